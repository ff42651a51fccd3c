"""The subcommands of ``moonrelay bench``: arguments in, a table or one JSON object out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moonrelay.cli.bench import host
from moonrelay.cli.bench.host_command import against_host
from moonrelay.cli.bench.samples import parse_sizes
from moonrelay.cli.sizes import say_size
from moonrelay.clock import Clock, SystemClock
from moonrelay.config import require_one_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ENGINES: Final = ("mooncake", "shm")
#: Columns of a table that goes to no terminal.
_WIDTH: Final = 140
Row = dict[str, object]
Measure = Callable[[str, Sequence[int], int | None, Clock], Iterator[Row]]

bench = typer.Typer(no_args_is_help=True, help="Measure the connector on this machine.")
bench.command(name="host")(against_host)

Engine = Annotated[str, typer.Option(help="mooncake or shm; both by default.", show_default=False)]
Rounds = Annotated[int, typer.Option(min=0, help="Rounds for each size; 0 takes as many as fit into some seconds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@bench.command()
def overhead(
    engine: Engine = "",
    sizes: Annotated[str, typer.Option(help="Payload sizes.")] = "64KiB,1MiB,16MiB,64MiB,256MiB",
    rounds: Rounds = 0,
    as_json: AsJson = False,
) -> None:
    """Compare the connector with the raw engine in its safe form, and with one memcpy; medians of one run."""
    from moonrelay.cli.bench.overhead import measure

    _run(measure, engine, sizes, rounds, _overhead_table() if not as_json else None, _overhead_cells)


@bench.command()
def latency(
    engine: Engine = "",
    sizes: Annotated[str, typer.Option(help="Payload sizes.")] = "4KiB,64KiB",
    rounds: Rounds = 0,
    as_json: AsJson = False,
) -> None:
    """Measure a small payload from publish to receive, in ZeroMQ round trips between the same two processes."""
    from moonrelay.cli.bench.latency import measure

    _run(measure, engine, sizes, rounds, _latency_table() if not as_json else None, _latency_cells)


@bench.command()
def cache(
    encoder: Annotated[str, typer.Option(help="T5 encoder that is timed: small, base, large or xl.")] = "large",
    store: Annotated[
        str | None, typer.Option(help="Relay, e.g. mooncake://host:port.", show_default="an embedded one")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of hits; 0 is seven.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="How many ask for one key at once.")] = 32,
    prompts: Annotated[int, typer.Option(min=10, help="How many different prompts there are.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Compare hits of the embedding cache with encoding; 32 processes on one key; prompts as they repeat."""
    from moonrelay.cli.bench.cache import ENCODERS, measure
    from moonrelay.cli.bench.cache_table import show

    require_one_of(_Encoder(encoder), "encoder", tuple(ENCODERS))
    rows = measure(encoder, rounds or None, store, SystemClock(), processes=processes, prompts=prompts)
    _report(rows, None if as_json else show)


@bench.command()
def checkpoint(
    step_ms: Annotated[float, typer.Option(min=1, help="How long a step takes at least.")] = 110.0,
    store: Annotated[
        str | None, typer.Option(help="Relay, e.g. mooncake://host:port.", show_default="an embedded one")
    ] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of ten steps each; 0 is seven.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure what step checkpoints add to a step, and a job that is taken up again against starting over."""
    from moonrelay.cli.bench.cache_table import show
    from moonrelay.cli.bench.checkpoint import measure

    _report(measure(step_ms / 1e3, rounds or None, store, SystemClock()), None if as_json else show)


class _Encoder:
    """The encoder asked for; an object, so that the check can name its field."""

    def __init__(self, encoder: str) -> None:
        self.encoder = encoder


def _report(rows: Iterator[Row], show: Callable[[Console, Row], None] | None) -> None:
    """Print each row when it is there, or all of them as JSON; with the machine and its load."""
    from rich.console import Console

    facts = host.describe()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    kept: list[Row] = []
    for row in rows:
        kept.append(row)
        if show is not None:
            show(console, row)
    facts["load_1min_after"] = host.load()
    if show is None:
        typer.echo(json.dumps({"rows": kept, "host": facts}, indent=2))
    else:
        _machine(console, facts)


def _machine(console: Console, facts: Row) -> None:
    load = f"load {facts['load_1min']} to {facts['load_1min_after']}"
    console.print(f"{facts['cpu']}, {facts['cores']} cores, {load}", markup=False)


class _Chosen:
    """The engine asked for; an object, so that the check can name its field."""

    def __init__(self, engine: str) -> None:
        self.engine = engine


def _run(
    measure: Measure, engine: str, sizes: str, rounds: int, table: Table | None, cells: Callable[[Row], list[str]]
) -> None:
    if engine:
        require_one_of(_Chosen(engine), "engine", ENGINES)
    nbytes = parse_sizes(sizes)
    clock = SystemClock()
    facts = host.describe()
    rows: list[Row] = []
    for name in (engine,) if engine else ENGINES:
        for row in measure(name, nbytes, rounds or None, clock):
            rows.append(row)
            if table is not None:
                table.add_row(*cells(row))
    facts["load_1min_after"] = host.load()
    if table is None:
        typer.echo(json.dumps({"rows": rows, "host": facts}, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    _machine(console, facts)


def _overhead_table() -> Table:
    from rich.table import Table

    table = Table(title="Connector against the raw engine and one memcpy (medians; quartiles of the single rounds)")
    for name in ("engine", "size", "integrity", "connector", "raw", "memcpy", "/ raw", "/ memcpy", "rounds"):
        table.add_column(name, justify="left" if name in ("engine", "integrity") else "right")
    return table


def _overhead_cells(row: Row) -> list[str]:
    return [
        str(row["engine"]),
        say_size(_int(row["size_bytes"])),
        str(row["integrity"]),
        _ms(row["connector_s"]),
        _ms(row["raw_s"]),
        _ms(row["memcpy_s"]),
        f"{row['ratio_to_raw']} {_range(row['ratio_to_raw_quartiles'])}",
        f"{row['ratio_to_memcpy']} {_range(row['ratio_to_memcpy_quartiles'])}",
        str(row["rounds"]),
    ]


def _latency_table() -> Table:
    from rich.table import Table

    table = Table(title="Publish to receive, in ZeroMQ round trips (medians; quartiles of the single rounds)")
    for name in ("engine", "size", "integrity", "connector", "round trip", "round trips", "rounds"):
        table.add_column(name, justify="left" if name in ("engine", "integrity") else "right")
    return table


def _latency_cells(row: Row) -> list[str]:
    return [
        str(row["engine"]),
        say_size(_int(row["size_bytes"])),
        str(row["integrity"]),
        _ms(row["connector_s"]),
        _ms(row["round_trip_s"]),
        f"{row['round_trips']} {_range(row['round_trips_quartiles'])}",
        str(row["rounds"]),
    ]


def _ms(seconds: object) -> str:
    return f"{float(str(seconds)) * 1e3:.3g} ms"


def _int(number: object) -> int:
    return int(str(number))


def _range(quartiles: object) -> str:
    low, high = quartiles if isinstance(quartiles, tuple) else (quartiles, quartiles)
    return f"({low}-{high})"
