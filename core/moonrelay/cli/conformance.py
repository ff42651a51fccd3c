"""``moonrelay conformance``: run the suite against a target, or join the reports of several runs into one matrix.

Owns the command: its progress, its summary and its exit codes. The suite is the package ``moonrelay_conformance``,
imported only when the command is called.

Exit codes: 0 everything holds, 1 something failed, did not run or got worse, 2 a wrong argument.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Protocol

import typer

from moonrelay.errors import ConfigError, MoonrelayError, PluginError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from moonrelay_conformance.report.compare import Changes
    from moonrelay_conformance.report.matrix import Matrix
    from moonrelay_conformance.results import Outcome, Report, Result

_NEEDED: Final = ("pytest", "hypothesis", "torch")
_STDOUT: Final = "-"
_STYLES: Final = {
    "delivered": "green",
    "held": "green",
    "refused": "cyan",
    "unsupported": "dim",
    "not_run": "yellow",
    "failed": "bold red",
}


def conformance(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="What to test: an adapter, kind:name, or module:Class of a target. With --matrix: reports.",
            show_default=False,
        ),
    ] = None,
    level: Annotated[str, typer.Option(metavar="LEVEL", help="L1, L2 or L3: this level and those below it.")] = "L3",
    json_file: Annotated[
        str, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - is stdout.", show_default=False)
    ] = "",
    html: Annotated[str, typer.Option(metavar="FILE", help="Write the page.", show_default=False)] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Run only checks of this id or pattern; exit 0 if these hold, though the report is incomplete.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Processes to run checks in at once; 1 is this one. Default: up to 3 for an adapter, else one more.",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of each failure.")] = False,
    list_targets: Annotated[bool, typer.Option("--list", help="List what can be tested here.")] = False,
    matrix: Annotated[bool, typer.Option("--matrix", help="Join reports instead of running the suite.")] = False,
    markdown: Annotated[str, typer.Option(metavar="FILE", help="With --matrix: write Markdown.")] = "",
    against: Annotated[str, typer.Option(metavar="FILE", help="With --matrix: a committed matrix, as Markdown.")] = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="With --against: keep its columns that no report is of.")
    ] = False,
) -> None:
    """Run the conformance suite against an adapter, engine, relay, queue or cache; or join reports."""
    given = names or []
    if not matrix and (markdown or against):
        message = f"{'--markdown' if markdown else '--against'} goes with --matrix"
        raise ConfigError(message, field="markdown" if markdown else "against")
    if matrix and (json_file or only):
        message = f"{'--json' if json_file else '--only'} goes with a target, not with --matrix"
        raise ConfigError(message, field="json" if json_file else "only")
    if keep and not against:
        message = "--keep takes columns of a committed matrix; name it by --against"
        raise ConfigError(message, field="keep")
    if matrix:
        _join(given, markdown=markdown, html=html, against=against, keep=keep)
    elif list_targets:
        _list()
    else:
        if len(given) != 1:
            message = "name one target; `moonrelay conformance --list` shows what there is"
            raise ConfigError(message, field="name")
        _run(given[0], level=level, json_file=json_file, html=html, only=only or [], jobs=jobs, verbose=verbose)


def _run(
    name: str, *, level: str, json_file: str, html: str, only: Sequence[str], jobs: int | None, verbose: bool
) -> None:
    _require_extra()
    from moonrelay_conformance.jobs import default_jobs, run_jobs
    from moonrelay_conformance.recording import level_named
    from moonrelay_conformance.registry import resolve
    from moonrelay_conformance.run import RunInterrupted, run

    levels = level_named(level).upto
    target = resolve(name)
    asked = _is_installed(name) and getattr(target, "needs_host", True)
    why = _unavailable(target.kind, target.name) if asked else None
    if why is not None:
        message = f"{target.kind} {target.name!r} cannot be used here: {why}"
        raise PluginError(message, plugin=target.name)
    for path in (json_file, html):
        if path and path != _STDOUT:
            _require_writable(path)
    # With the JSON on stdout, everything for people goes to stderr.
    console = _console(sys.stderr if json_file == _STDOUT else sys.stdout)
    console.print(f"moonrelay conformance {target.info().label}, {', '.join(levels)}", markup=False, highlight=False)
    stopped: RunInterrupted | None = None
    report: Report | None
    several = default_jobs(target.kind, narrowed=bool(only)) if jobs is None else jobs
    with _display(console, verbose=verbose) as display:
        try:
            # Unless asked for, not in this process: native code that crashes or hangs costs one check, not the run.
            if several == 1 and (jobs == 1 or only):
                report = run(target, levels=levels, select=only, progress=display)
            else:
                report = run_jobs(name, jobs=several, levels=levels, select=only, progress=display)
        except RunInterrupted as exc:
            stopped, report = exc, exc.report
    if report is not None:
        _summarise(console, report, name)
        _write_report(report, json_file=json_file, html=html)
    if stopped is not None:
        raise SystemExit(143) if stopped.signal_number == signal.SIGTERM else KeyboardInterrupt
    assert report is not None
    if not _good(report, only):
        raise typer.Exit(1)


def _good(report: Report, only: Sequence[str]) -> bool:
    """Return whether what was asked for holds; with ``--only`` that is less than everything.

    Raises:
        ConfigError: A pattern of ``--only`` matches nothing.
    """
    if not only:
        return report.passed
    from moonrelay_conformance.recording import NOT_SELECTED, matches
    from moonrelay_conformance.results import Outcome

    for pattern in only:
        if not any(matches(pattern, one.id, one.test) for one in report.results):
            message = f"only={pattern!r} matches no check; the report's ids are what it takes, * and ? match"
            raise ConfigError(message, field="only")
    chosen = [one for one in report.results if one.reason != NOT_SELECTED]
    return not any(one.outcome in (Outcome.FAILED, Outcome.NOT_RUN) for one in chosen)


def _write_report(report: Report, *, json_file: str, html: str) -> None:
    if json_file == _STDOUT:
        sys.stdout.buffer.write(report.to_json() + b"\n")
        sys.stdout.buffer.flush()
    elif json_file:
        _write(json_file, report.to_json())
    if html:
        from moonrelay_conformance.report.page import page

        _write(html, page(report).encode())


def _summarise(console: Console, report: Report, name: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from moonrelay_conformance.report.text import SIGNS, verdict, word
    from moonrelay_conformance.results import Outcome

    counts = report.counts()
    seen = [one for one in Outcome if any(of_level.get(one) for of_level in counts.values())]
    table = Table(box=None, pad_edge=False)
    table.add_column("level")
    for outcome in seen:
        table.add_column(f"{SIGNS[outcome]} {word(outcome)}", justify="right", style=_STYLES[outcome.value])
    for level, of_level in counts.items():
        table.add_row(level.value, *(str(of_level.get(outcome, 0) or "·") for outcome in seen))
    console.print()
    console.print(table)
    failed = [result for result in report.results if result.outcome is Outcome.FAILED]
    for result in failed:
        console.print()
        console.print(Text.assemble(("✘ ", "bold red"), (_check(result), "bold"), f"  {result.title}"), soft_wrap=True)
        console.print(Text(f"  {result.reason}", style="red"), soft_wrap=True)
        again = f"  moonrelay conformance {shlex.quote(name)} --only {shlex.quote(result.id)} --verbose"
        console.print(Text(again, style="dim"), soft_wrap=True)
    said = verdict(report)
    left = sum(result.outcome is Outcome.NOT_RUN for result in report.results)
    notes = [f"{len(failed)} failed"] if failed else []
    notes += [f"{left} not run"] if left else []
    console.print()
    line = f"{report.target.label}: {said}, {len(report.results)} checks in {report.seconds:.1f} s"
    style = "bold green" if report.passed else "bold red" if failed else "bold yellow"
    console.print(Text(", ".join([line, *notes]), style=style), soft_wrap=True)


def _join(paths: Sequence[str], *, markdown: str, html: str, against: str, keep: bool) -> None:
    from moonrelay_conformance.report import compare
    from moonrelay_conformance.report import markdown as as_markdown
    from moonrelay_conformance.report.matrix import keep as with_kept
    from moonrelay_conformance.report.matrix import load
    from moonrelay_conformance.report.matrix_page import matrix_page

    if not paths:
        message = "--matrix needs the reports that `moonrelay conformance NAME --json FILE` wrote"
        raise ConfigError(message, field="matrix")
    joined = load([(path, _read(path, "matrix")) for path in paths])
    changes: Changes | None = None
    kept: tuple[str, ...] = ()
    if against:
        # Read before anything is written: the two may be one file.
        committed = _read(against, "against").decode("utf-8", "replace")
        cells = as_markdown.parse(committed, source=against)
        if keep:
            run = {column.key for column in joined.columns}
            joined = with_kept(joined, as_markdown.read(committed, source=against))
            kept = tuple(column.key for column in joined.columns if column.key not in run)
        changes = compare.compare(cells, as_markdown.cells_of(joined))
    text = as_markdown.write(joined)
    if markdown and markdown != _STDOUT:
        _write(markdown, text.encode())
    if html:
        _write(html, matrix_page(joined, changes).encode())
    on_stdout = markdown == _STDOUT or not (markdown or html or against)
    if on_stdout:
        typer.echo(text, nl=False)
    _tell(_console(sys.stderr if on_stdout else sys.stdout), joined, changes, kept)
    if not _holds(joined, changes):
        raise typer.Exit(1)


def _holds(matrix: Matrix, changes: Changes | None) -> bool:
    """Return whether a matrix is as it should be; a failure that was committed as one is no regression."""
    if changes is None:
        return matrix.passed
    return not matrix.disagreements and not changes.regressed and all(column.complete for column in matrix.columns)


def _tell(console: Console, matrix: Matrix, changes: Changes | None, kept: Sequence[str]) -> None:
    from rich.text import Text

    lines: list[tuple[str, str]] = [("bold red", f"✘ {one.id}: {one.text}") for one in matrix.disagreements]
    lines += [("bold red", f"✘ {one.key}: the report is incomplete") for one in matrix.columns if not one.complete]
    if changes is not None:
        lines += [("bold red", f"✘ worse: {one}") for one in changes.worse]
        lines += [("bold red", f"✘ missing: {one}") for one in changes.missing]
        lines += [("green", f"✔ better: {one}") for one in changes.better]
        lines += [("dim", f"○ new: {one}") for one in changes.new]
        lines += [("dim", f"○ kept as committed, not run: {one}") for one in kept]
    else:
        lines += [("bold red", f"✘ failed: {column} {check}") for column, check in matrix.failed]
    checks = sum(len(table.rows) for table in matrix.tables)
    good = _holds(matrix, changes)
    said = "nothing got worse" if changes is not None else "everything holds"
    verdict = said if good else "not everything holds"
    lines.append(("bold green" if good else "bold red", f"{len(matrix.columns)} targets, {checks} checks: {verdict}"))
    for style, line in lines:
        console.print(Text(line, style=style), soft_wrap=True)


def _list() -> None:
    from rich.table import Table
    from rich.text import Text

    from moonrelay_conformance.registry import Targets

    targets = Targets()
    table = Table(box=None, pad_edge=False)
    for heading in ("target", "capabilities", "state"):
        table.add_column(heading, overflow="fold")
    for name in targets.names():
        kind, _, bare = name.partition(":")
        count, problem = "", None
        try:
            declared = targets.resolve(name).capabilities()
            count = f"{sum(support.there for support in declared.values())}"
            problem = _unavailable(kind, bare)
        except MoonrelayError as exc:
            problem = exc.message
        except Exception as exc:  # noqa: BLE001 - foreign code: a broken plugin hurts only its own line
            problem = f"{type(exc).__name__}: {exc}"
        state = Text("ok", style="green") if problem is None else Text(problem, style="red")
        table.add_row(name, count, state)
    _console(sys.stdout).print(table)


def _unavailable(kind: str, name: str) -> str | None:
    """Return why an installed part cannot be used here, as it says itself or as its import does."""
    from moonrelay.cli.adapters import why_unavailable
    from moonrelay.cli.probes import PluginState
    from moonrelay.plugins import Registry
    from moonrelay_conformance.registry import GROUPS

    info = Registry(GROUPS[kind]).describe_one(name)
    if info.error is not None:
        return info.error
    return why_unavailable(
        PluginState(
            group=info.group,
            name=name,
            target=info.target,
            distribution=info.distribution,
            version=info.version,
            built_in=info.built_in,
            error=None,
            shadowed=(),
        )
    )


def _is_installed(name: str) -> bool:
    from moonrelay_conformance.registry import GROUPS

    kind, colon, _ = name.partition(":")
    return not colon or kind in GROUPS


def _require_extra() -> None:
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        message = f"the conformance suite needs {', '.join(missing)}; pip install 'moonrelay[conformance]'"
        raise PluginError(message, command="conformance")


def _check(result: Result) -> str:
    return f"{result.id} ({result.route})" if result.route else result.id


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        message = f"{field}={path!r} cannot be read: {exc.strerror or exc}"
        raise ConfigError(message, field=field) from exc


def _require_writable(path: str) -> None:
    """Refuse before a run of minutes what cannot be written after it; makes the folder."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Nothing is cut off or made here: what stands there stays until there is something better.
        at = Path(path) if Path(path).exists() else Path(path).parent
        if Path(path).is_dir() or not os.access(at, os.W_OK):
            number = errno.EISDIR if Path(path).is_dir() else errno.EACCES
            raise OSError(number, os.strerror(number))
    except OSError as exc:
        message = f"{path!r} cannot be written: {exc.strerror or exc}"
        raise ConfigError(message, field="file") from exc


def _write(path: str, content: bytes) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)
    except OSError as exc:
        message = f"{path!r} cannot be written: {exc.strerror or exc}"
        raise ConfigError(message, field="file") from exc


def _console(out: object) -> Console:
    from rich.console import Console

    # The file is named: the suite's session replaces sys.stdout while it runs.
    return Console(file=out, highlight=False)  # type: ignore[arg-type]


class _Display(Protocol):
    """What is told how a run goes, and then shows it."""

    def begun(self, total: int) -> None: ...

    def running(self, check: str) -> None: ...

    def ended(self, result: Result, details: str) -> None: ...


class _Lines:
    """A line for every check; for logs and CI."""

    def __init__(self, console: Console, *, verbose: bool) -> None:
        self._console = console
        self._verbose = verbose
        self._total = 0
        self._done = 0

    def begun(self, total: int) -> None:
        """Take down how many checks will run."""
        self._total = total

    def running(self, check: str) -> None:
        """Show nothing; the line comes with the end."""

    def ended(self, result: Result, details: str) -> None:
        """Print the check's line."""
        self._done += 1
        width = len(str(self._total))
        reason = f"  {result.reason}" if result.reason else ""
        line = (
            f"{self._done:{width}}/{self._total} {result.level} {_words(result.outcome)}  {_check(result)}"
            f"  {result.seconds:.2f} s{reason}"
        )
        self._console.print(line, markup=False, soft_wrap=True)
        if details and self._verbose:
            self._console.print(details, markup=False, soft_wrap=True)


class _Live:
    """A bar and the running check, failures as they come; for a terminal.

    It is drawn when something happens and has no thread: the suite counts this process's threads.
    """

    def __init__(self, console: Console, bar: Bar, *, verbose: bool) -> None:
        self._console = console
        self._bar = bar
        self._verbose = verbose
        self._task: TaskID = bar.add_task("collecting", total=None)
        self._failed = 0

    def begun(self, total: int) -> None:
        """Draw an empty bar."""
        self._bar.update(self._task, total=total, description="", refresh=True)

    def running(self, check: str) -> None:
        """Show which check runs."""
        self._bar.update(self._task, description=check, refresh=True)

    def ended(self, result: Result, details: str) -> None:
        """Advance the bar; a failure stays on the screen."""
        from rich.text import Text

        if result.outcome.value == "failed":
            self._failed += 1
            self._console.print(Text.assemble(("✘ ", "bold red"), _check(result), (f"  {result.reason}", "red")))
            if details and self._verbose:
                self._console.print(Text(details, style="dim"))
        self._bar.update(self._task, advance=1, failed=self._failed, refresh=True)


def _words(outcome: Outcome) -> str:
    from moonrelay_conformance.report.text import SIGNS, word

    return f"{SIGNS[outcome]} {word(outcome):<11}"


@contextmanager
def _display(console: Console, *, verbose: bool) -> Iterator[_Display]:
    """Yield a live bar for a terminal, lines for anything else."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield _Lines(console, verbose=verbose)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    bar = Progress(
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"), markup=False),
        console=console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        yield _Live(console, bar, verbose=verbose)
