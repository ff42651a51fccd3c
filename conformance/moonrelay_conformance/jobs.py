"""A run that is divided over several processes, since most checks wait: for a lease to end, for a process to start.

Owns the division: `moonrelay_conformance.job` processes ask for one test after the other, so none is idle while another
has a queue, and a job that dies loses the one test that it was at. The report has the checks, and the order, of a run
in one process.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import child_environment
from moonrelay_conformance.job import Broken, Collected, Done, Event, Finished, Order, Running, Task, Wanted
from moonrelay_conformance.results import Level, Outcome, Report, Result, TargetInfo
from moonrelay_conformance.run import CHECK_TIMEOUT_S, RunBroken, RunInterrupted, terminable
from moonrelay_conformance.sides.nursery import BIRTH_TIMEOUT_S

if TYPE_CHECKING:
    from moonrelay_conformance.recording import Progress

#: A job of which nothing is heard for this long beyond a check's own bound is killed: it hangs where no bound reaches.
SILENCE_S: Final = 60.0
#: Time for jobs to end their sides when the run is interrupted, in seconds.
END_TIMEOUT_S: Final = 30.0
#: Jobs of an adapter's run where nothing else is said. Each holds some processes of some 240 MB.
MOST_BY_DEFAULT: Final = 3
_DECODER: Final = msgspec.json.Decoder(Event)


def default_jobs(kind: str, *, narrowed: bool = False) -> int:
    """Return how many jobs a run has where nobody says.

    Args:
        kind: Of the target. The suites of engines, relays and queues are short.
        narrowed: Only some checks are run; several processes would mostly start.
    """
    if kind != "adapter" or narrowed:
        return 1
    return min(MOST_BY_DEFAULT, len(os.sched_getaffinity(0)) + 1)


def run_jobs(
    name: str,
    *,
    jobs: int,
    levels: Iterable[Level] = tuple(Level),
    select: Sequence[str] = (),
    progress: Progress | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> Report:
    """Run the suite in several processes at once; see `moonrelay_conformance.run.run`.

    Args:
        name: Of the target, as the registry takes it: a job makes its own.
        jobs: How many processes.
        levels: Levels to run.
        select: Run only checks whose id or test matches one of these patterns.
        progress: Is told how the run goes; checks of several jobs overlap.
        timeout_s: Bound of a single check.

    Returns:
        The report. A check of a job that died has not run, and says so.

    Raises:
        RunBroken: The suite cannot be collected.
        RunInterrupted: Ctrl-C or SIGTERM; the jobs have ended.

    Blocks: minutes.
    Threads: the main thread's alone; the jobs are killed by the system when it ends.
    """
    task = Task(name=name, levels=tuple(levels), select=tuple(select), timeout_s=timeout_s)
    # What a job leaves that is killed lies here; its sides may not be quite gone when it is removed.
    with tempfile.TemporaryDirectory(prefix="moonrelay-conformance-", ignore_cleanup_errors=True) as scratch:
        return _run_division(_Division(task, progress, scratch), jobs)


def _run_division(division: _Division, jobs: int) -> Report:
    broken: str | None = None
    interrupted = False
    with terminable() as ended:
        try:
            division.start(jobs)
            broken = division.go_on()
        except KeyboardInterrupt:
            interrupted = True
        # A second signal ends it without waiting.
        with contextlib.suppress(KeyboardInterrupt):
            division.interrupt()
        division.kill()
    if interrupted:
        raise RunInterrupted(division.report(), ended[0] if ended else signal.SIGINT)
    report = division.report()
    if broken is not None or report is None:
        raise RunBroken(broken or division.why_nothing(), target=division.task.name)
    return report


class _Job:
    """One process, and what it was handed. Threads: one."""

    def __init__(self, number: int, task: Task, silence_s: float, scratch: str) -> None:
        self.number = number
        path = os.pathsep.join(str(Path(entry or ".").absolute()) for entry in sys.path)
        self.process = subprocess.Popen(
            [
                sys.executable,
                # The working folder is not imported from, beyond what PYTHONPATH says of it.
                "-P",
                "-m",
                "moonrelay_conformance.job",
                str(os.getpid()),
                msgspec.json.encode(task).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment({"PYTHONPATH": path, "TMPDIR": scratch}, stands_for_us=True),
            # A group of its own: the terminal's interrupt reaches the parent alone, which then ends the jobs.
            process_group=0,
        )
        self.held: deque[int] = deque()
        self.running: int | None = None
        self.last: int | None = None
        self.finished = False
        self._silence_s = silence_s
        self._rest = b""
        self._heard()

    def events(self) -> list[Event] | None:
        """Return the messages that are there; ``None`` at the end."""
        assert self.process.stdout is not None
        some = os.read(self.process.stdout.fileno(), 1 << 16)
        if not some:
            return None
        self._heard()
        *lines, self._rest = (self._rest + some).split(b"\n")
        return [_DECODER.decode(line) for line in lines]

    def hand(self, test: int | None) -> None:
        """Answer that it wanted a test."""
        if test is not None:
            self.held.append(test)
        assert self.process.stdin is not None
        # One that has ended meanwhile is noticed at its end of the wire.
        with contextlib.suppress(OSError):
            self.process.stdin.write(msgspec.json.encode(Order(test)) + b"\n")
            self.process.stdin.flush()

    def may_be_silent(self, timeout_s: float | None) -> None:
        """Bear with it for a check whose own bound is longer than others'."""
        if timeout_s is not None:
            self._due = Deadline(max(self._silence_s, timeout_s + SILENCE_S), SystemClock())

    def is_silent(self) -> bool:
        """Return whether nothing was heard for too long."""
        return self._due.expired

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it, if it lives."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def how_it_ended(self) -> str:
        """Return in words how the process ended; waits for it."""
        code = self.process.wait()
        return f"ended by signal {-code}" if code < 0 else f"ended with exit status {code}"

    def close(self) -> None:
        """Close the wire."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _heard(self) -> None:
        self._due = Deadline(self._silence_s, SystemClock())


class _Division:
    """The jobs of one run, the tests that nobody has yet, and what is known of each check. Threads: one."""

    def __init__(self, task: Task, progress: Progress | None, scratch: str) -> None:
        self.task = task
        self._scratch = scratch
        self._progress = progress
        self._clock = SystemClock()
        self._started_s = self._clock.monotonic()
        self._selector = selectors.DefaultSelector()
        self._jobs: list[_Job] = []
        self._target: TargetInfo | None = None
        self._checks: dict[str, Result] = {}
        self._tests: tuple[str, ...] = ()
        self._left: deque[int] = deque()
        self._ends: list[str] = []
        self._stopping = False
        #: How many jobs may be started for what dead ones left.
        self._spare = 0

    def start(self, jobs: int) -> None:
        """Start so many processes."""
        self._spare = jobs
        for _ in range(jobs):
            self._start_one()

    def _start_one(self) -> None:
        job = _Job(len(self._jobs) + 1, self.task, self.task.timeout_s + SILENCE_S, self._scratch)
        self._jobs.append(job)
        self._selector.register(job.process.stdout, selectors.EVENT_READ, job)  # type: ignore[arg-type]

    def _is_going_on(self) -> bool:
        """Return whether a job lives; where all have ended and left tests that they did not begin, start another."""
        if not self._selector.get_map() and self._left and self._spare and not self._stopping:
            self._spare -= 1
            self._start_one()
        return bool(self._selector.get_map())

    def go_on(self, deadline: Deadline | None = None) -> str | None:
        """Serve the jobs until all have ended; return why the suite cannot be run, if it cannot."""
        while self._is_going_on() and not (deadline and deadline.expired):
            for key, _ in self._selector.select(1.0):
                broken = self._serve(key.data)
                if broken is not None:
                    return broken
            for job in self._jobs:
                if job.process.poll() is None and job.is_silent():
                    job.send(signal.SIGKILL)
        for test in self._left if self._tests and not self._stopping else ():
            self._lose(test, f"no job was left to run it: {'; '.join(self._ends)}")
        return None

    def interrupt(self) -> None:
        """Let every job end its sides, and wait until they have ended or `END_TIMEOUT_S` is over."""
        self._stopping = True
        for job in self._jobs:
            job.send(signal.SIGTERM)
        self.go_on(Deadline(END_TIMEOUT_S, self._clock))

    def kill(self) -> None:
        """Kill what still runs; the system kills their sides with them. Idempotent."""
        for job in self._jobs:
            job.send(signal.SIGKILL)
            job.process.wait()
            job.close()
        self._selector.close()

    def report(self) -> Report | None:
        """Return what is known; ``None`` where nothing was collected."""
        if self._target is None:
            return None
        from moonrelay_conformance.corpus.load import CORPUS_VERSION
        from moonrelay_conformance.recording import environment

        results = tuple(self._checks.values())
        return Report(
            target=self._target,
            levels=self.task.levels,
            results=results,
            environment=environment(),
            complete=all(result.outcome is not Outcome.NOT_RUN for result in results),
            corpus_version=CORPUS_VERSION,
            seconds=round(self._clock.monotonic() - self._started_s, 2),
        )

    def why_nothing(self) -> str:
        """Return why there is no report."""
        return f"the suite could not be run: {'; '.join(self._ends) or 'no job was started'}"

    def _serve(self, job: _Job) -> str | None:
        """Take what a job says; return why the suite cannot be run, if it says that."""
        events = job.events()
        if events is None:
            self._selector.unregister(job.process.stdout)  # type: ignore[arg-type]
            self._over(job)
            return None
        for event in events:
            match event:
                case Broken(message):
                    return message
                case Collected():
                    job.may_be_silent(BIRTH_TIMEOUT_S)  # while it has the host imported
                    if self._target is not None and event.tests != self._tests:
                        return "the suite could not be divided: its jobs collected different checks"
                    if self._target is None:
                        self._begin(event)
                case Wanted():
                    job.hand(self._next_for(job))
                case Running(test, check, timeout_s):
                    self._runs(job, test)
                    job.may_be_silent(timeout_s)
                    if self._progress:
                        self._progress.running(check)
                case Done(test, result, details):
                    self._runs(job, test)
                    job.last, job.running = job.running, None
                    self._checks[test] = result
                    if self._progress:
                        self._progress.ended(result, details)
                case Finished():
                    job.finished = True
        return None

    def _begin(self, collected: Collected) -> None:
        self._target, self._checks, self._tests = collected.target, dict(collected.checks), collected.tests
        self._left.extend(range(len(self._tests)))
        if self._progress:
            self._progress.begun(sum(test in self._checks for test in self._tests))

    def _next_for(self, job: _Job) -> int | None:
        """Return a test for a job: the first one begins at the end, where the short ones are, the others in front.

        So what computes (the corpus) runs beside what waits, and neighbours, which use the same sides, stay together.
        """
        if self._stopping or not self._left:
            return None
        return self._left.pop() if job.number == 1 else self._left.popleft()

    def _runs(self, job: _Job, test: str) -> None:
        """Take down which of the tests that a job holds it is at; those before it were no checks."""
        while job.held and (job.running is None or self._tests[job.running] != test):
            job.running = job.held.popleft()

    def _over(self, job: _Job) -> None:
        """Take down that a job has ended: what it was at is lost, what it had not begun is for others."""
        how = f"job {job.number} {job.how_it_ended()}"
        if job.finished and not job.held and job.running is None:
            return
        self._ends.append(how)
        if self._stopping:
            return
        if job.running is not None:
            self._lose(job.running, f"{how} while it ran")
        elif not job.held and job.last is not None:
            self._lose(job.last, f"{how} while it cleaned up")
        self._left.extendleft(reversed(job.held))
        job.held.clear()

    def _lose(self, test: int, reason: str) -> None:
        name = self._tests[test]
        if name in self._checks:
            self._checks[name] = msgspec.structs.replace(self._checks[name], outcome=Outcome.NOT_RUN, reason=reason)


__all__ = ["default_jobs", "run_jobs"]
