"""The matrix as Markdown, and back.

Owns the committed form: sorted, the same for the same reports, without times, digests or anything of a machine. What a
failed cell's reason says may differ from run to run, so it stands in the page and not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moonrelay.errors import ConfigError
from moonrelay_conformance.report.matrix import Cell, Column, Matrix, Row, Table
from moonrelay_conformance.report.text import MEANINGS, SIGNS, word
from moonrelay_conformance.results import Level, Outcome


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
_VERSIONS: Final = re.compile(r"^Suite (\S+), corpus (\d+)\.$", re.MULTILINE)
_COLUMN: Final = re.compile(r"^\| `(?P<key>[^`]+)` \| (?P<about>.*) \| (?P<checks>all|incomplete) \|$", re.MULTILINE)
_COMPARED: Final = re.compile(r"agree in all of (\d+) cases and scenarios")


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


def read(text: str, *, source: str = "the matrix") -> Matrix:
    """Read a matrix that `write` made; what it does not tell (why something failed, who disagrees) is not there.

    Raises:
        ConfigError: As `parse`, or it says no version, or nothing of a column.
    """
    cells = parse(text, source=source)
    versions = _VERSIONS.search(text)
    if versions is None:
        raise _edited(f"{source} says no version of suite and corpus")
    about = {found["key"]: found for found in _COLUMN.finditer(text)}
    columns: dict[str, Column] = {}
    tables = []
    for heading, head, lines in _tables(text):
        for key in head:
            if key not in about:
                raise _edited(f"{source} says nothing of {key}")
            complete = about[key]["checks"] == "all"
            columns[key] = Column(
                key=key, kind=key.partition(":")[0], about=about[key]["about"].replace("\\|", "|"), complete=complete
            )
        rows = []
        for level, id_, title, *said in lines:
            found = {
                key: _cell_of(cells[heading, key, id_.strip("`")], one)
                for key, one in zip(head, said, strict=True)
                if one
            }
            rows.append(Row(id=id_.strip("`"), level=Level(level), title=title, cells=found))
        tables.append(Table(heading=heading, columns=head, rows=tuple(rows)))
    compared = _COMPARED.search(text)
    return Matrix(
        suite_version=versions[1],
        corpus_version=int(versions[2]),
        columns=tuple(columns[key] for key in about if key in columns),
        tables=tuple(tables),
        disagreements=(),
        compared=int(compared[1]) if compared else 0,
    )


def cells_of(matrix: Matrix) -> Cells:
    """Return the cells of a matrix in the form of `parse`."""
    return {
        (table.heading, column, row.id): Said(cell.outcome, frozenset(cell.routes))
        for table in matrix.tables
        for row in table.rows
        for column, cell in row.cells.items()
    }


def _tables(text: str) -> Iterator[tuple[str, tuple[str, ...], list[list[str]]]]:
    """Yield heading, columns and rows of each table of checks."""
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading, *lines = section.splitlines()
        rows = [parts for parts in map(_parts, lines) if parts and not set("".join(parts)) <= set("-: ")]
        if rows and tuple(rows[0][: len(_FIRST)]) == _FIRST:
            yield heading.strip(), tuple(part.strip("`") for part in rows[0][len(_FIRST) :]), rows[1:]


def _cell_of(said: Said, text: str) -> Cell:
    """Return a cell as `_cell` wrote it."""
    found = _CELL.match(text)
    assert found is not None
    rest = text[found.end() :].removeprefix(": ")
    routes = tuple(sorted(said.routes))
    if said.outcome is Outcome.UNSUPPORTED:
        return Cell(outcome=said.outcome, routes=routes, reason=rest)
    return Cell(outcome=said.outcome, routes=routes, code=rest if said.outcome is Outcome.REFUSED else "")


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
