"""``moonrelay adapters``: every part that can be chosen by name, who provides it, and whether it loads.

Owns the list's rendering, and the question to each adapter whether its host is there; the look-up is
`moonrelay.cli.probes`, in processes of their own.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moonrelay.cli.probes import Machine, PluginState
from moonrelay.plugins import ADAPTERS, Registry


def adapters(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List adapters, engines, relays, queues, policies, observers and brought commands, and whether they load."""
    states = Machine().plugins()
    if as_json:
        plugins = [{**state.as_dict(), "unavailable": why_unavailable(state)} for state in states]
        typer.echo(json.dumps({"plugins": plugins}, indent=2))
        return
    _show(states)


def why_unavailable(state: PluginState) -> str | None:
    """Return why an adapter that loads cannot be used here, as it says itself; ``None`` where nothing is wrong.

    Only adapters are asked, and only for a method ``available() -> (bool, reason)``; one without it counts as usable.
    """
    if state.group != ADAPTERS or state.error is not None:
        return None
    try:
        adapter = Registry(ADAPTERS).load(state.name)
        ask = getattr(adapter() if isinstance(adapter, type) else adapter, "available", None)
        usable, reason = ask() if ask is not None else (True, "")
    except Exception as exc:  # noqa: BLE001 - foreign code: a broken plugin hurts only its own line
        return f"it cannot say whether it is usable: {type(exc).__name__}: {exc}"
    return None if usable else str(reason)


def _show(states: list[PluginState]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("group", "name", "from", "state"):
        table.add_column(heading, overflow="fold")
    for state in states:
        source = f"{state.distribution} {state.version or ''}".strip()
        problem = state.error or why_unavailable(state)
        verdict = Text("ok", style="green") if problem is None else Text(problem, style="red")
        if state.shadowed:
            verdict.append(f" (also claimed by {', '.join(state.shadowed)}, not used)", style="yellow")
        table.add_row(state.group.removeprefix("moonrelay."), state.name, source, verdict)
    Console().print(table)
