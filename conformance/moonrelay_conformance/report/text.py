"""A report in words.

Owns the signs and words of outcomes, so that no form of a report tells them by colour alone, and the line that ends a
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from moonrelay_conformance.results import Outcome, Report

#: A sign for each outcome.
SIGNS: Final[Mapping[Outcome, str]] = MappingProxyType(
    {
        Outcome.DELIVERED: "✔",
        Outcome.REFUSED: "⊘",
        Outcome.HELD: "✔",
        Outcome.UNSUPPORTED: "○",
        Outcome.NOT_RUN: "?",
        Outcome.FAILED: "✘",
    }
)
#: What an outcome means.
MEANINGS: Final[Mapping[Outcome, str]] = MappingProxyType(
    {
        Outcome.DELIVERED: "arrived identical",
        Outcome.REFUSED: "refused with a typed error, as it should be",
        Outcome.HELD: "the promise holds",
        Outcome.UNSUPPORTED: "not declared by the target, so not tried",
        Outcome.NOT_RUN: "not run",
        Outcome.FAILED: "the promise is broken",
    }
)


def word(outcome: Outcome) -> str:
    """Return an outcome's name as people read it."""
    return outcome.value.replace("_", " ")


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of some outcomes."""
    return max(outcomes, key=rank)


def rank(outcome: Outcome) -> int:
    """Return an outcome's place from best to worst."""
    return tuple(Outcome).index(outcome)


def one_line(report: Report) -> str:
    """Return how a run ended, with a count for each level."""
    levels = "; ".join(f"{level} {counted(counts)}" for level, counts in report.counts().items())
    return f"{report.target.label}: {verdict(report)} ({levels})"


def verdict(report: Report) -> str:
    """Return ``passed``, ``FAILED`` or ``INCOMPLETE``."""
    if any(result.outcome is Outcome.FAILED for result in report.results):
        return "FAILED"
    return "passed" if report.whole else "INCOMPLETE"


def counted(counts: Mapping[Outcome, int]) -> str:
    """Return counts in words, e.g. ``24 delivered, 3 refused``."""
    return ", ".join(f"{counts[outcome]} {word(outcome)}" for outcome in Outcome if counts.get(outcome)) or "none"
