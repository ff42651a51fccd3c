"""Run the suite against a target, from a program.

Owns the session of pytest that does it, and its seclusion: no ``pytest.ini``, ``conftest.py`` or plugin of the folder
that the caller happens to stand in has a say. Sessions may be nested, with other targets.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.results import Level, Report, Result

if TYPE_CHECKING:
    from moonrelay_conformance.recording import Progress
    from moonrelay_conformance.sides.process import SidePool
    from moonrelay_conformance.targets.base import Target

#: A single check takes this long at most; one that hangs fails, and the run goes on.
CHECK_TIMEOUT_S: Final = 120.0

_INI: Final = """\
[pytest]
xfail_strict = true
filterwarnings =
    error::pytest.PytestUnhandledThreadExceptionWarning
    error::pytest.PytestUnraisableExceptionWarning
    ignore::pytest.PytestAssertRewriteWarning
"""


class RunBroken(MoonrelayError):
    """The suite could not be run to its end; the message says why."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM ended a run; what it had found by then is in ``report``."""

    def __init__(self, report: Report | None, signal_number: int) -> None:
        super().__init__()
        self.report = report
        self.signal_number = signal_number


def run(
    target: Target,
    *,
    levels: Iterable[Level | str] = tuple(Level),
    pool: SidePool | None = None,
    select: Sequence[str] = (),
    progress: Progress | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
    plugins: Sequence[object] = (),
) -> Report:
    """Run the suite for the target's kind.

    Args:
        target: What is tested.
        levels: Levels to run; all by default.
        pool: Processes of sides to share between runs; the caller closes it.
        select: Run only checks whose id or test matches one of these patterns; the report is then not complete.
        progress: Is told how the run goes.
        timeout_s: Bound of a single check; it holds only where `run` is called by the main thread.
        plugins: Plugins of pytest, beside the suite's own.

    Returns:
        The report. A failure is in it, and raises nothing.

    Raises:
        RunBroken: The suite cannot be collected, or pytest itself failed.
        RunInterrupted: Ctrl-C or SIGTERM.

    Blocks: minutes.
    Threads: one run at a time in a process, runs inside of runs apart.
    """
    import pytest

    from moonrelay_conformance import plugin
    from moonrelay_conformance.recording import Handover, level_named

    chosen = {level if isinstance(level, Level) else level_named(level) for level in levels}
    handover = Handover(
        target=target,
        levels=tuple(level for level in Level if level in chosen),
        select=tuple(select),
        pool=pool,
        progress=_Aloud(progress, sys.stdout) if progress is not None else None,
    )
    with tempfile.TemporaryDirectory(prefix="moonrelay-conformance-") as made:
        folder = Path(made).resolve()
        (folder / "pytest.ini").write_text(_INI, encoding="utf-8")
        arguments = _arguments(folder, timeout_s)
        shown = io.StringIO()
        with _alarm_kept(), terminable() as ended, contextlib.redirect_stdout(shown):
            code = pytest.main(arguments, plugins=[plugin, handover, *plugins])
    report = handover.reports[0] if handover.reports else None
    # Pytest says "interrupted" of a session that it ended since a class could not be collected, too.
    if ended or (code == pytest.ExitCode.INTERRUPTED and not handover.problems):
        raise RunInterrupted(report, ended[0] if ended else signal.SIGINT)
    if report is None or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RunBroken(_why(handover.problems, shown.getvalue()), target=target.name)
    return report


class _Aloud:
    """Progress that writes where the caller does, not where pytest is made to write."""

    def __init__(self, progress: Progress, out: TextIO) -> None:
        self._progress = progress
        self._out = out

    def begun(self, total: int) -> None:
        with contextlib.redirect_stdout(self._out):
            self._progress.begun(total)

    def running(self, check: str) -> None:
        with contextlib.redirect_stdout(self._out):
            self._progress.running(check)

    def ended(self, result: Result, details: str) -> None:
        with contextlib.redirect_stdout(self._out):
            self._progress.ended(result, details)


class Runner(Protocol):
    """What `run` is to those who call it, and to those who replace it in tests."""

    def __call__(
        self, target: Target, *, levels: Iterable[Level | str], select: Sequence[str], progress: Progress | None
    ) -> Report:
        """Run the suite; see `run`."""
        ...


def _arguments(folder: Path, timeout_s: float) -> list[str]:
    from moonrelay_conformance.plugin import CHOSEN

    bounded = _has_timeouts() and _in_main_thread()
    timeouts = ["-p", "pytest_timeout", f"--timeout={timeout_s}", "--timeout-method=signal"] if bounded else []
    return [
        "--disable-plugin-autoload",
        "-c",
        str(folder / "pytest.ini"),
        f"--rootdir={folder}",
        f"--basetemp={folder / 'work'}",
        "--noconftest",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:faulthandler",
        "--tb=short",
        "--color=no",
        *timeouts,
        str(CHOSEN),
    ]


def _has_timeouts() -> bool:
    import importlib.util

    return importlib.util.find_spec("pytest_timeout") is not None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _why(problems: Sequence[str], shown: str) -> str:
    """Return in one line why a session gave no report."""
    for text in (*problems, shown):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        said = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
        if said or lines:
            return f"the suite could not be run: {(said or lines[-1:])[0]}"
    return "the suite could not be run: pytest gave no reason"


@contextlib.contextmanager
def _alarm_kept() -> Iterator[None]:
    """Give an outer session's alarm back, which the inner one's bound on a check takes."""
    if not _in_main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGALRM)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGALRM, handler)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


@contextlib.contextmanager
def terminable() -> Iterator[list[int]]:
    """Let SIGTERM end the session as Ctrl-C does; pytest takes the ``SystemExit`` of a handler for a failed test.

    Yields:
        The signal's number, once it came.
    """
    ended: list[int] = []
    if not _in_main_thread() or not callable(signal.getsignal(signal.SIGTERM)):
        yield ended
        return
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, _frame: FrameType | None) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, before)
