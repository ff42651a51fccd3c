"""``moonrelay adapters``: every part that can be chosen by name, who provides it, and whether it loads.

Owns the list's rendering only; the look-up is `moonrelay.cli.probes`, in processes of their own.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moonrelay.cli.probes import Machine, PluginState


def adapters(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List adapters, engines, relays, queues, policies and observers, and whether they load."""
    states = Machine().plugins()
    if as_json:
        typer.echo(json.dumps({"plugins": [state.as_dict() for state in states]}, indent=2))
        return
    _show(states)


def _show(states: list[PluginState]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("group", "name", "from", "state"):
        table.add_column(heading, overflow="fold")
    for state in states:
        source = f"{state.distribution} {state.version or ''}".strip()
        verdict = Text("ok", style="green") if state.error is None else Text(state.error, style="red")
        if state.shadowed:
            verdict.append(f" (also claimed by {', '.join(state.shadowed)}, not used)", style="yellow")
        table.add_row(state.group.removeprefix("moonrelay."), state.name, source, verdict)
    Console().print(table)
