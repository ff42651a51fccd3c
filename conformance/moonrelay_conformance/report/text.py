"""A report in words for a terminal.

Owns the one line and its counts; tables are the command's.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonrelay_conformance.results import Outcome, Report


def one_line(report: Report) -> str:
    """Return how a run ended, with a count for each level."""
    levels = "; ".join(f"{level} {_counts(counts)}" for level, counts in report.counts().items())
    return f"{report.target.label}: {verdict(report)} ({levels})"


def verdict(report: Report) -> str:
    """Return ``passed``, ``FAILED`` or ``INCOMPLETE``."""
    if any(result.outcome is Outcome.FAILED for result in report.results):
        return "FAILED"
    return "passed" if report.complete else "INCOMPLETE"


def _counts(counts: Mapping[Outcome, int]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts.get(outcome)) or "none"
