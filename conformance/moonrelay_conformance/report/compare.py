"""A matrix beside a committed one: what got worse.

Owns the judgement: a cell that got worse or is gone is a regression; what got better or is new is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonrelay_conformance.report.markdown import Cells, Said
from moonrelay_conformance.report.text import rank
from moonrelay_conformance.results import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What differs, one line each.

    Attributes:
        worse: Cells with a worse outcome than the committed one, and new ones that failed or were not run.
        missing: Committed cells that are gone; a column that is gone is one line.
        better: Cells with a better outcome.
        new: Cells that the committed matrix does not have; a new column is one line.
    """

    worse: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    better: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    @property
    def regressed(self) -> bool:
        return bool(self.worse or self.missing)


def compare(committed: Cells, now: Cells) -> Changes:
    """Return how ``now`` differs from what was committed."""
    worse: list[str] = []
    better: list[str] = []
    for key in committed.keys() & now.keys():
        before, after = committed[key], now[key]
        if before != after:
            (worse if _is_worse(before, after) else better).append(f"{_place(key)}: {before} → {after}")
    worse += [f"{_place(key)}: new, {now[key]}" for key in now.keys() - committed.keys() if _broken(now[key].outcome)]
    return Changes(
        worse=tuple(sorted(worse)),
        missing=_only(committed, now, "is gone"),
        better=tuple(sorted(better)),
        new=_only(now, committed, "is new"),
    )


def _is_worse(before: Said, after: Said) -> bool:
    """Return whether a cell got worse; with the same outcome, whether a route has it that had a better one."""
    if before.outcome is not after.outcome:
        return rank(after.outcome) > rank(before.outcome)
    return bool(before.routes) and not (after.routes and after.routes <= before.routes)


def _broken(outcome: Outcome) -> bool:
    return outcome in (Outcome.FAILED, Outcome.NOT_RUN)


def _only(these: Cells, others: Cells, text: str) -> tuple[str, ...]:
    known = {(table, column) for table, column, _ in others}
    lines: dict[str, None] = {}
    for key in sorted(these.keys() - others.keys()):
        table, column, _ = key
        if (table, column) in known:
            lines[f"{_place(key)}: {text} ({these[key]})"] = None
        else:
            lines[f"column {column} of {table!r}: {text}"] = None
    return tuple(lines)


def _place(key: tuple[str, str, str]) -> str:
    _, column, check = key
    return f"{column} {check}"
