"""Several reports as one matrix: rows are checks, columns are targets.

Owns the joining, what a cell says, and the comparison across adapters: those that delivered a case delivered the same
bytes, and a scenario goes the same way step by step, on every route of every adapter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moonrelay.errors import ConfigError
from moonrelay_conformance.report.text import word, worst
from moonrelay_conformance.results import Kind, Level, Outcome, Report, Result

#: A version, up to what is kept of it.
_VERSION: Final = re.compile(r"\b(\d+\.\d+)\.[\w.+]*\w")
#: The tables: kind of target, kind of check (``None`` is all), heading. A table without rows is left out.
_TABLES: Final = (
    ("adapter", Kind.CASE, "Adapters: cases"),
    ("adapter", Kind.SCENARIO, "Adapters: lease scenarios"),
    ("adapter", Kind.PROMISE, "Adapters: promises"),
    ("engine", None, "Transfer engines"),
    ("relay", None, "Relays"),
    ("queue", None, "Queues"),
    ("cache", None, "Caches of embeddings"),
    ("checkpoint", None, "Step checkpoints"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """How one check ended for one target.

    Attributes:
        outcome: The worst of its routes.
        routes: The routes with that outcome, where others ended differently; else empty.
        code: Error code of a refusal; several where routes differ.
        reason: Why, in one line, route by route where they differ.
    """

    outcome: Outcome
    routes: tuple[str, ...] = ()
    code: str = ""
    reason: str = ""

    @property
    def short(self) -> str:
        """The outcome, with the routes that it holds for."""
        return f"{word(self.outcome)} ({', '.join(self.routes)})" if self.routes else word(self.outcome)

    @property
    def text(self) -> str:
        """The outcome, with the error code of a refusal."""
        return f"{self.short}: {self.code}" if self.outcome is Outcome.REFUSED and self.code else self.short


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One check; ``cells`` by column, without those for which the check does not exist."""

    id: str
    level: Level
    title: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The checks of one kind for the targets of one kind."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A check that two adapters, or two routes, passed differently.

    Attributes:
        id: The case or scenario.
        text: Who saw what, in one line.
    """

    id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A target.

    Attributes:
        key: Heading of its column.
        kind: Kind of the target.
        about: Its distribution and host, versions without the patch level.
        complete: Whether all checks of its levels ran.
    """

    key: str
    kind: str
    about: str
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """What the reports say together.

    Attributes:
        suite_version: Of the suite that made them.
        corpus_version: Of the corpus.
        columns: The targets, adapters first.
        tables: Tables that have rows.
        disagreements: Between adapters and between routes.
        compared: How many cases and scenarios were compared between at least two.
    """

    suite_version: str
    corpus_version: int
    columns: tuple[Column, ...]
    tables: tuple[Table, ...]
    disagreements: tuple[Disagreement, ...]
    compared: int

    @property
    def failed(self) -> Iterator[tuple[str, str]]:
        """Yield column and check of every cell that failed."""
        for table in self.tables:
            for row in table.rows:
                for column, cell in row.cells.items():
                    if cell.outcome is Outcome.FAILED:
                        yield column, row.id

    @property
    def passed(self) -> bool:
        """Whether all reports are complete, nothing failed and nobody disagrees."""
        return not self.disagreements and all(column.complete for column in self.columns) and not any(self.failed)


def join(reports: Sequence[Report]) -> Matrix:
    """Join reports.

    Raises:
        ConfigError: There is none, they are of different versions of suite or corpus, or two are of the same target.
    """
    if not reports:
        message = "a matrix needs at least one report"
        raise ConfigError(message, field="matrix")
    for name in ("suite_version", "corpus_version"):
        versions = sorted({str(getattr(report, name)) for report in reports})
        if len(versions) > 1:
            message = f"reports of {name.replace('_', ' ')}s {' and '.join(versions)} do not join; run the older again"
            raise ConfigError(message, field="matrix")
    named = _named(reports)
    tables = [_table(kind, check, heading, named) for kind, check, heading in _TABLES]
    disagreements, compared = _compare({key: one for key, one in named.items() if one.target.kind == "adapter"})
    return Matrix(
        suite_version=reports[0].suite_version,
        corpus_version=reports[0].corpus_version,
        columns=tuple(
            Column(key=key, kind=one.target.kind, about=_about(one), complete=one.whole) for key, one in named.items()
        ),
        tables=tuple(table for table in tables if table.rows),
        disagreements=tuple(disagreements),
        compared=compared,
    )


def keep(matrix: Matrix, committed: Matrix) -> Matrix:
    """Return a matrix with the columns of a committed one that it does not have, as they stand there.

    What a kept column delivered is not compared again with the others: digests are not committed.

    Raises:
        ConfigError: The committed one is of another version of suite or corpus.
    """
    for name in ("suite_version", "corpus_version"):
        ours, theirs = getattr(matrix, name), getattr(committed, name)
        if ours != theirs:
            message = f"columns of {name.replace('_', ' ')} {theirs} cannot be kept beside {ours}; run them again"
            raise ConfigError(message, field="keep")
    kinds = [kind for kind, check, _ in _TABLES if check in (None, Kind.CASE)]
    ours = {column.key for column in matrix.columns}
    columns = [*matrix.columns, *(column for column in committed.columns if column.key not in ours)]
    columns.sort(key=lambda one: (_position(kinds, one.kind), one.key))
    rows = {(table.heading, row.id): row for table in matrix.tables for row in table.rows}
    for table in committed.tables:
        for row in table.rows:
            kept = {key: cell for key, cell in row.cells.items() if key not in ours}
            if kept:
                there = rows.get((table.heading, row.id), replace(row, cells={}))
                rows[table.heading, row.id] = replace(there, cells={**there.cells, **kept})
    tables = [
        Table(
            heading=heading,
            columns=tuple(column.key for column in columns if column.kind == kind),
            rows=tuple(sorted((row for (at, _), row in rows.items() if at == heading), key=_place)),
        )
        for kind, _, heading in _TABLES
    ]
    return replace(
        matrix,
        columns=tuple(columns),
        tables=tuple(table for table in tables if table.rows),
        compared=max(matrix.compared, committed.compared),
    )


def cell_of(results: Sequence[Result]) -> Cell:
    """Return what a cell says of one check's results, one for each route."""
    ended = worst(result.outcome for result in results)
    at = [result for result in results if result.outcome is ended]
    alike = len(at) == len(results)
    codes = dict.fromkeys(result.code for result in at if result.code)
    reasons = dict.fromkeys(result.reason for result in at if result.reason)
    if alike and len(reasons) <= 1:
        reason = next(iter(reasons), "")
    else:
        reason = "; ".join(_by_route(result) for result in results)
    return Cell(
        outcome=ended,
        routes=() if alike else tuple(sorted(result.route for result in at if result.route)),
        code=", ".join(codes),
        reason=reason,
    )


def _by_route(result: Result) -> str:
    said = f"{result.route or 'no route'}: {word(result.outcome)}"
    return f"{said}, {result.reason}" if result.reason else said


def _named(reports: Sequence[Report]) -> dict[str, Report]:
    """Return the reports by column, adapters first, then by name; hosts tell targets of one name apart."""
    labels = [report.target.label for report in reports]
    kinds = [kind for kind, check, _ in _TABLES if check in (None, Kind.CASE)]
    named: dict[str, Report] = {}
    for report in sorted(reports, key=lambda one: (_position(kinds, one.target.kind), one.target.label, _about(one))):
        key = report.target.label
        if labels.count(key) > 1:
            key = f"{key} ({_about(report)})"
        if key in named:
            message = f"two reports are of {key}; give one of them"
            raise ConfigError(message, field="matrix")
        named[key] = report
    return named


def _position(kinds: Sequence[str], kind: str) -> int:
    return kinds.index(kind) if kind in kinds else len(kinds)


def _about(report: Report) -> str:
    return ", ".join(_without_patch(one) for one in (report.target.distribution, report.target.host) if one)


def _without_patch(text: str) -> str:
    return _VERSION.sub(r"\1", text)


def _table(kind: str, check: Kind | None, heading: str, named: Mapping[str, Report]) -> Table:
    columns = tuple(key for key, report in named.items() if report.target.kind == kind)
    found: dict[str, dict[str, list[Result]]] = {}
    for column in columns:
        for result in named[column].results:
            if check is None or result.kind is check:
                found.setdefault(result.id, {}).setdefault(column, []).append(result)
    rows = [
        Row(
            id=id_,
            level=min(one.level for results in cells.values() for one in results),
            title=next((one.title for results in cells.values() for one in results if one.title), ""),
            cells={column: cell_of(results) for column, results in cells.items()},
        )
        for id_, cells in found.items()
    ]
    return Table(heading=heading, columns=columns, rows=tuple(sorted(rows, key=_place)))


def _place(row: Row) -> tuple[Level, str]:
    return row.level, row.id


def _compare(adapters: Mapping[str, Report]) -> tuple[list[Disagreement], int]:
    digests: dict[str, dict[str, str]] = {}
    steps: dict[str, dict[str, tuple[str, ...]]] = {}
    for column, report in adapters.items():
        for result in report.results:
            where = f"{column} ({result.route})" if result.route else column
            if result.kind is Kind.CASE and result.outcome is Outcome.DELIVERED:
                digests.setdefault(result.id, {})[where] = result.digest
            elif result.kind is Kind.SCENARIO and result.outcome is Outcome.HELD:
                steps.setdefault(result.id, {})[where] = result.steps
    found = [
        Disagreement(id=id_, text="delivered different bytes: " + _who(by_where))
        for id_, by_where in sorted(digests.items())
        if len(set(by_where.values())) > 1
    ]
    for id_, taken in sorted(steps.items()):
        found += [Disagreement(id=id_, text=text) for text in _differing_steps(taken)]
    return found, sum(len(by) > 1 for by in digests.values()) + sum(len(by) > 1 for by in steps.values())


def _differing_steps(taken: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    lengths = {len(steps) for steps in taken.values()}
    if len(lengths) > 1:
        yield "took different numbers of steps: " + _who({where: str(len(steps)) for where, steps in taken.items()})
        return
    for number, seen in enumerate(zip(*taken.values(), strict=True), start=1):
        if len(set(seen)) > 1:
            yield f"step {number} differs: " + _who(dict(zip(taken, seen, strict=True)))


def _who(said: Mapping[str, str]) -> str:
    """Return who said what; those who said the same stand together."""
    by_text: dict[str, list[str]] = {}
    for where, text in said.items():
        by_text.setdefault(text, []).append(where)
    return "; ".join(f"{', '.join(sorted(where))}: {text or 'nothing'}" for text, where in sorted(by_text.items()))


def load(sources: Iterable[tuple[str, bytes]]) -> Matrix:
    """Read and join reports, given as name and content.

    Raises:
        WireError: One is no report; the message names it.
        VersionError: One is of another version.
        ConfigError: As `join`.
    """
    return join([Report.from_json(raw, source=name) for name, raw in sources])
