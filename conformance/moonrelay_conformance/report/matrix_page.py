"""The matrix as a page: rows are checks, columns are targets.

Owns the layout; looks and escaping are `moonrelay_conformance.report.style`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from moonrelay_conformance.report.compare import Changes
from moonrelay_conformance.report.matrix import Cell, Column, Matrix, Table
from moonrelay_conformance.report.style import (
    badge,
    chips,
    document,
    esc,
    filter_bar,
    head,
    legend,
    problems,
    row,
    said,
)
from moonrelay_conformance.results import Outcome


def matrix_page(matrix: Matrix, changes: Changes | None = None) -> str:
    """Return the page.

    Args:
        matrix: The joined reports.
        changes: What differs from a committed matrix, where there is one.
    """
    return document("Moonrelay conformance matrix", _body(matrix, changes))


def _body(matrix: Matrix, changes: Changes | None) -> Iterator[str]:
    good = matrix.passed and not (changes and changes.regressed)
    word = "all promises hold" if good else "not all promises hold"
    outcome = Outcome.HELD if good else Outcome.FAILED
    yield f'<h1>Conformance matrix<span class="verdict {outcome.value}">{word}</span></h1>'
    targets = f"{len(matrix.columns)} target{'' if len(matrix.columns) == 1 else 's'}"
    yield f'<p class="quiet">suite {esc(matrix.suite_version)} · corpus {matrix.corpus_version} · {targets}</p>'
    yield '<div class="cards">'
    for column in matrix.columns:
        yield _card(matrix, column)
    yield "</div>"
    yield legend()
    yield from _agreement(matrix)
    failed = [
        (f"{column}: {one.id}", cell.reason)
        for table in matrix.tables
        for one in table.rows
        for column, cell in one.cells.items()
        if cell.outcome is Outcome.FAILED
    ]
    if failed:
        yield f"<h2>Broken promises <small>{len(failed)}</small></h2>"
        yield problems(failed)
    if changes is not None:
        yield from _changes(changes)
    outcomes = [cell.outcome for table in matrix.tables for one in table.rows for cell in one.cells.values()]
    yield filter_bar(outcomes)
    for table in matrix.tables:
        yield from _table(table)


def _card(matrix: Matrix, column: Column) -> str:
    cells = (one.cells[column.key].outcome for table in matrix.tables for one in table.rows if column.key in one.cells)
    about = f'<p class="quiet">{esc(column.about)}</p>' if column.about else ""
    incomplete = "" if column.complete else f"<p>{badge(Outcome.NOT_RUN, 'incomplete')}</p>"
    return f'<div class="card"><h3>{esc(column.key)}</h3>{about}{incomplete}{chips(Counter(cells))}</div>'


def _agreement(matrix: Matrix) -> Iterator[str]:
    if matrix.disagreements:
        yield f"<h2>Disagreements <small>{len(matrix.disagreements)}</small></h2>"
        yield problems((one.id, one.text) for one in matrix.disagreements)
    elif matrix.compared:
        yield (
            f'<p style="margin-top:14px">{badge(Outcome.HELD, "agreement")} In {matrix.compared} cases and scenarios '
            "that more than one adapter or route passed, all saw the same bytes and the same steps.</p>"
        )


def _changes(changes: Changes) -> Iterator[str]:
    wrong = (*changes.worse, *changes.missing)
    if wrong:
        yield f"<h2>Worse than the committed matrix <small>{len(wrong)}</small></h2>"
        yield problems([*(("worse", one) for one in changes.worse), *(("missing", one) for one in changes.missing)])
    told = [*(("better", one) for one in changes.better), *(("new", one) for one in changes.new)]
    if told:
        items = "".join(f"<li>{esc(name)}: {esc(text)}</li>" for name, text in told)
        yield f"<details><summary>{len(told)} better or new</summary><ol>{items}</ol></details>"


def _table(table: Table) -> Iterator[str]:
    yield f"<h2>{esc(table.heading)} <small>{len(table.rows)}</small></h2>"
    names = [esc(column.partition(":")[2] or column) for column in table.columns]
    yield f'<div class="table"><table>{head(["level", "check", *names])}<tbody>'
    for one in table.rows:
        cells = [_cell(one.cells.get(column)) for column in table.columns]
        yield row(one.level, one.id, one.title, (cell.outcome for cell in one.cells.values()), cells)
    yield "</tbody></table></div>"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return '<span class="none" title="this check does not exist for this target">·</span>'
    shown = cell.reason and (cell.outcome in (Outcome.FAILED, Outcome.NOT_RUN, Outcome.UNSUPPORTED) or cell.routes)
    code = cell.code if cell.outcome is Outcome.REFUSED else ""
    return said(cell.outcome, cell.short, code, cell.reason if shown else "", hover=cell.reason)
