"""The matrix as Markdown, and back.

Owns the committed form: sorted, the same for the same reports, without times, digests or anything of a machine. What a
failed cell's reason says may differ from run to run, so it stands in the page and not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from moonrelay.errors import ConfigError
from moonrelay_conformance.report.matrix import Cell, Matrix, Table
from moonrelay_conformance.report.text import MEANINGS, SIGNS, word
from moonrelay_conformance.results import Outcome

#: Table, column and check to the outcome.
Cells = Mapping[tuple[str, str, str], Outcome]

_FIRST: Final = ("level", "check", "what is promised")
_WORDS: Final = {word(outcome): outcome for outcome in Outcome}
_CELL: Final = re.compile(rf"^(?:\S )?({'|'.join(map(re.escape, _WORDS))})(?=$|[\s:(])")
_SPLIT: Final = re.compile(r"(?<!\\)\|")


def write(matrix: Matrix) -> str:
    """Return the matrix as Markdown."""
    lines = [
        "# Conformance matrix",
        "",
        "Made by `moonrelay conformance --matrix`; not edited by hand.",
        f"Suite {matrix.suite_version}, corpus {matrix.corpus_version}.",
        "",
        "; ".join(f"{SIGNS[outcome]} {word(outcome)}: {meaning}" for outcome, meaning in MEANINGS.items()) + ".",
        "A cell is the worst of the target's routes.",
        "",
        "| target | from | checks |",
        "|---|---|---|",
        *(_line([f"`{one.key}`", one.about, "all" if one.complete else "incomplete"]) for one in matrix.columns),
        "",
        "## Agreement",
        "",
        *_agreement(matrix),
    ]
    for table in matrix.tables:
        lines += ["", f"## {table.heading}", "", *_table(table)]
    return "\n".join(lines) + "\n"


def parse(text: str, *, source: str = "the matrix") -> Cells:
    """Read the cells of a matrix that `write` made.

    Raises:
        ConfigError: It holds no table of checks, or a cell that says no outcome; the message names the line.
    """
    cells: dict[tuple[str, str, str], Outcome] = {}
    heading = ""
    columns: tuple[str, ...] = ()
    tables = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("## "):
            heading, columns = line.removeprefix("## ").strip(), ()
        parts = _parts(line)
        if tuple(parts[: len(_FIRST)]) == _FIRST:
            columns = tuple(part.strip("`") for part in parts[len(_FIRST) :])
            tables += 1
        elif columns and parts and not set(line) <= set("|-: "):
            for column, said in zip(columns, parts[len(_FIRST) :], strict=False):
                if said:
                    cells[heading, column, parts[1].strip("`")] = _outcome(said, f"{source}, line {number}")
    if not tables:
        message = (
            f"{source} holds no table of checks; make it with `moonrelay conformance --matrix ... --markdown FILE`"
        )
        raise ConfigError(message, field="against")
    return cells


def cells_of(matrix: Matrix) -> Cells:
    """Return the cells of a matrix in the form of `parse`."""
    return {
        (table.heading, column, row.id): cell.outcome
        for table in matrix.tables
        for row in table.rows
        for column, cell in row.cells.items()
    }


def _agreement(matrix: Matrix) -> list[str]:
    if matrix.disagreements:
        return [f"- ✘ `{one.id}`: disagreement" for one in sorted(matrix.disagreements, key=lambda one: one.id)]
    if not any(column.kind == "adapter" for column in matrix.columns):
        return ["No adapter is compared."]
    return [
        f"Adapters and their routes agree in all of {matrix.compared} cases and scenarios that more than one passed."
    ]


def _table(table: Table) -> list[str]:
    head = [*_FIRST, *(f"`{column}`" for column in table.columns)]
    return [
        _line(head),
        "|" + "---|" * len(head),
        *(
            _line([row.level.value, f"`{row.id}`", row.title, *(_cell(row.cells.get(one)) for one in table.columns)])
            for row in table.rows
        ),
    ]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    text = f"{SIGNS[cell.outcome]} {cell.text}"
    return f"{text}: {cell.reason}" if cell.outcome is Outcome.UNSUPPORTED and cell.reason else text


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(part.split()).replace("|", "\\|") for part in parts) + " |"


def _parts(line: str) -> list[str]:
    if not line.startswith("|") or not line.rstrip().endswith("|"):
        return []
    return [part.strip().replace("\\|", "|") for part in _SPLIT.split(line.strip())[1:-1]]


def _outcome(text: str, where: str) -> Outcome:
    found = _CELL.match(text)
    if found is None:
        message = (
            f"{where}: {text!r} says no outcome; make it with `moonrelay conformance --matrix ... --markdown FILE`"
        )
        raise ConfigError(message, field="against")
    return _WORDS[found.group(1)]
