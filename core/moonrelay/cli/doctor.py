"""``moonrelay doctor``: what is installed, loadable and reachable, each finding with its remedy.

Owns the report and the exit code: 0, or 1 when something required fails. The judgement is `moonrelay.cli.checks`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moonrelay.cli.checks import Finding, examine
from moonrelay.cli.probes import Machine
from moonrelay.config import from_environment

if TYPE_CHECKING:
    from rich.console import Console

_STYLES: Final = (("ok", "green"), ("warn", "yellow"), ("fail", "bold red"), ("skip", "dim"))


def doctor(
    queue: Annotated[
        str, typer.Option(help="The deployment's queue, e.g. redis://host:6379/0; or MOONRELAY_QUEUE_URL.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is installed, loadable and reachable, and how to mend what is not."""
    findings = examine(Machine(), queue or from_environment("QUEUE_URL"))
    raise typer.Exit(report(findings, as_json=as_json))


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print findings as they come, or one JSON object at the end.

    Returns:
        The exit code.
    """
    seen: list[Finding] = []
    if as_json:
        seen.extend(findings)
        typer.echo(json.dumps({"ok": not _failed(seen), "findings": [asdict(finding) for finding in seen]}, indent=2))
        return 1 if _failed(seen) else 0
    from rich.console import Console

    console = Console(highlight=False)
    for finding in findings:
        seen.append(finding)
        _show(console, finding)
    counts: Counter[str] = Counter(finding.status for finding in seen)
    console.print("\n" + ", ".join(f"{counts[name]} {name}" for name, _ in _STYLES if counts[name]), markup=False)
    return 1 if _failed(seen) else 0


def _failed(findings: Iterable[Finding]) -> bool:
    return any(finding.status == "fail" for finding in findings)


def _show(console: Console, finding: Finding) -> None:
    from rich.text import Text

    style = dict(_STYLES)[finding.status]
    line = Text.assemble((f"{finding.status:<5}", style), f"{finding.name:<34} ", finding.detail)
    console.print(line, soft_wrap=True)
    if finding.remedy:
        console.print(Text(f"     -> {finding.remedy}"), soft_wrap=True)
