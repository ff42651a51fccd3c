"""The matrix as Markdown, and back.

Owns the committed form: sorted, the same for the same reports, without times, digests or anything of a machine. What a
failed cell's reason says may differ from run to run, so it stands in the page and not here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moonrelay.errors import ConfigError
from moonrelay_conformance.report.matrix import Cell, Matrix, Table
from moonrelay_conformance.report.text import MEANINGS, SIGNS, word
from moonrelay_conformance.results import Outcome


@dataclass(frozen=True, slots=True)
class Said:
    """What a cell says.

    Attributes:
        outcome: The worst of the routes.
        routes: The routes with that outcome, where others ended better; empty is all.
    """

    outcome: Outcome
    routes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{word(self.outcome)} ({', '.join(sorted(self.routes))})" if self.routes else word(self.outcome)


#: Table, column and check to what the cell says.
Cells = Mapping[tuple[str, str, str], Said]

_FIRST: Final = ("level", "check", "what is promised")
_WORDS: Final = {word(outcome): outcome for outcome in Outcome}
_CELL: Final = re.compile(rf"^(?:\S )?({'|'.join(map(re.escape, _WORDS))})(?: \(([^()]*)\))?(?=$|[\s:(])")
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
        ConfigError: It holds no table of checks, a cell that says no outcome, a row that is cut short or stands twice;
            the message names the line.
    """
    cells: dict[tuple[str, str, str], Said] = {}
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
            where = f"{source}, line {number}"
            if len(parts) != len(_FIRST) + len(columns):
                raise _edited(f"{where}: {len(parts)} cells under {len(_FIRST) + len(columns)} headings")
            for column, said in zip(columns, parts[len(_FIRST) :], strict=True):
                key = (heading, column, parts[1].strip("`"))
                if key in cells:
                    raise _edited(f"{where}: {key[2]} of {column} stands twice")
                if said:
                    cells[key] = _said(said, where)
    if not tables:
        raise _edited(f"{source} holds no table of checks")
    return cells


def cells_of(matrix: Matrix) -> Cells:
    """Return the cells of a matrix in the form of `parse`."""
    return {
        (table.heading, column, row.id): Said(cell.outcome, frozenset(cell.routes))
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


def _said(text: str, where: str) -> Said:
    found = _CELL.match(text)
    if found is None:
        raise _edited(f"{where}: {text!r} says no outcome")
    routes = (route.strip() for route in (found.group(2) or "").split(","))
    return Said(_WORDS[found.group(1)], frozenset(route for route in routes if route))


def _edited(what: str) -> ConfigError:
    message = f"{what}; make it with `moonrelay conformance --matrix ... --markdown FILE`"
    return ConfigError(message, field="against")
