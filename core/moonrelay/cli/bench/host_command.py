"""``moonrelay bench host NAME``: a host's own connectors against ours; arguments in, tables or one JSON object out."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer

from moonrelay.cli.bench import host
from moonrelay.cli.bench.host_lanes import choose, host_bench
from moonrelay.cli.bench.host_payload import sizes_of
from moonrelay.cli.sizes import say_size

if TYPE_CHECKING:
    from rich.table import Table

    from moonrelay.cli.bench.host_rounds import Report

#: Columns of a table that goes to no terminal.
_WIDTH: Final = 170


def against_host(
    name: Annotated[str, typer.Argument(help="An adapter's name, e.g. vllm-omni.")],
    sizes: Annotated[
        str,
        typer.Option(
            help="Tensor bytes of the payloads, or their names where the host has its own; by default "
            "64KiB,1MiB,64MiB,512MiB, or all of those.",
            show_default=False,
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each lane.")] = 5,
    lanes: Annotated[str, typer.Option(help="Names of lanes; all by default.", show_default=False)] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a host's own connectors with ours: put and get of dicts between two processes, with one copy_ as unit."""
    from moonrelay.cli.bench.host_rounds import measure

    bench = host_bench(name)
    chosen = choose(bench().lanes(), lanes)
    nbytes = sizes_of(sizes, bench.payloads)
    facts = {**host.describe(), "against": bench.host, "rounds": rounds}
    with tempfile.TemporaryDirectory(prefix="moonrelay-bench-") as folder:
        report = measure(bench, chosen, nbytes, rounds, Path(folder), _say)
    facts["load_1min_after"] = host.load()
    if as_json:
        typer.echo(json.dumps({**msgspec.to_builtins(report), "host": facts}, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for table in tables(report):
        console.print(table)
    console.print(
        f"{facts['against']}; {facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']} to "
        f"{facts['load_1min_after']}; {rounds} rounds",
        markup=False,
    )


def _say(line: str) -> None:
    typer.echo(line, err=True)


def tables(report: Report) -> Iterator[Table]:
    """Yield what a terminal shows: which lanes run, the figures, and ours against each of the host's."""
    yield _lanes_table(report)
    yield _figures_table(report)
    yield _factors_table(report)


def _lanes_table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Lanes")
    for heading in ("lane", "what it is", "as released", "fix of the bench", "measured"):
        table.add_column(heading, overflow="fold")
    for one in report.lanes:
        says = "; ".join((one.says, *one.notes))
        cells = (one.lane, says, one.as_released, one.fix or "-", one.error or "yes")
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _figures_table(report: Report) -> Table:
    from rich.table import Table

    table = Table(title="Put and get of a dict between two processes (medians; quartiles of the sum)")
    for heading in (
        "size",
        "lane",
        "put",
        "get",
        "sum",
        "quartiles",
        "usable",
        "first sum",
        "processor",
        "copy_",
        "sum / copy_",
        "n",
    ):
        table.add_column(heading, justify="left" if heading == "lane" else "right", no_wrap=True)
    for row in report.rows:
        low, high = row.sum_quartiles_s
        table.add_row(
            row.payload or say_size(row.size_bytes),
            row.lane,
            _ms(row.put_s),
            _ms(row.get_s),
            _ms(row.sum_s),
            f"{_ms(low)} - {_ms(high)}",
            _ms(row.usable_s),
            _ms(row.first_s),
            _ms(row.cpu_s),
            _ms(row.copy_s),
            f"{row.ratio_to_copy:.3g}",
            str(row.passes),
        )
    return table


def _factors_table(report: Report) -> Table:
    from rich.table import Table

    ours = {one.lane for one in report.lanes if one.ours}
    theirs = [one.lane for one in report.lanes if not one.ours]
    sums = {(row.lane, row.size_bytes): (row.sum_s, row.cpu_s) for row in report.rows}
    names = {row.size_bytes: row.payload or say_size(row.size_bytes) for row in report.rows}
    table = Table(
        title="How many times faster than the host's own: put + get (in brackets: processor time), of medians"
    )
    for heading in ("size", "lane", *(f"than {lane}" for lane in theirs)):
        table.add_column(heading, justify="left" if heading == "lane" else "right", no_wrap=True)
    for (lane, nbytes), (sum_s, cpu_s) in sums.items():
        if lane in ours:
            others = [sums.get((other, nbytes)) for other in theirs]
            factors = ["-" if one is None else f"{one[0] / sum_s:.1f} ({one[1] / cpu_s:.1f})" for one in others]
            table.add_row(names[nbytes], lane, *factors)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
