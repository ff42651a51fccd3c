"""A side's process, from outside: started, told what to do, stopped, killed, looked at.

Owns the wire to `moonrelay_conformance.sides.runner`: an order is one JSON line with a number, its answer one JSON line
with the same number. Tensors never cross, only descriptions and digests. A side cannot outlive the process that started
it: the system kills it (`runner.main`), also where it is stopped.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import child_environment
from moonrelay.errors import MoonrelayError, PeerLost, from_wire
from moonrelay_conformance.sides import probe
from moonrelay_conformance.sides.nursery import Child, Nursery
from moonrelay_conformance.sides.probe import Held
from moonrelay_conformance.targets.adapter import SideSettings

#: Time for an order of a given ``timeout_s`` to be answered beyond it, in seconds: a call that is late is an
#: observation, a call that never ends is a hang.
GRACE_S: Final = 10.0
#: Time for an order without a time of its own, in seconds; a start imports torch and a host on a busy machine.
ANSWER_TIMEOUT_S: Final = 90.0
#: Time that `SideProcess.end` gives a side to close by itself, in seconds.
END_TIMEOUT_S: Final = 20.0
#: Orders whose arguments include ``timeout_s``.
TIMED: Final = frozenset({"receive", "claim", "read", "next_chunk", "ack", "release", "status"})
#: What a timed order gets where none is given, in seconds.
DEFAULT_TIMEOUT_S: Final = 30.0
_CLOCK: Final = SystemClock()


class SideFailed(MoonrelayError):
    """A side raised something that is no `MoonrelayError`: every failure of an adapter must be typed.

    ``context['type']`` is the exception's type, ``context['trace']`` the end of its traceback.
    """


class SideHung(MoonrelayError, TimeoutError):
    """A side gave no answer in time."""


class SideEnded(MoonrelayError, ConnectionError):
    """A side's process ended without being asked to."""


class SideProcess:
    """One process that runs a side; several, one after the other, with `reset` between.

    Args:
        python: Its interpreter. Where it is this one, it sees this process's ``sys.path``; another one must have
            ``moonrelay`` and the adapter installed.
        env: Variables to add to its environment. ``MOONRELAY_*`` of ours is not passed on.
        folder: Its working folder, which nothing is imported from; ``None`` takes the root folder.
        log: Where its standard error goes; ``None`` leaves it where ours goes.
        nursery: Forks it, so that it has what the nursery has of all the above; ``None`` starts it.

    Threads: one at a time. The system kills the process when the *thread* that made this object ends.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        log: IO[Any] | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self._process: subprocess.Popen[bytes] | Child
        if nursery is not None:
            self._process = nursery.born()
        else:
            # -P: the working folder is not imported from, as it would be with -m.
            self._process = subprocess.Popen(
                [python, "-P", "-m", "moonrelay_conformance.sides.runner", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder or "/",
                env=child_environment(_added(python, env or {})),
                # A group of its own: the terminal's interrupt reaches the suite alone, and `kill` the side's children.
                process_group=0,
            )
        self._stopped = False
        self._numbers = 0
        self._due: deque[tuple[int, str]] = deque()
        self._given_up: set[int] = set()
        self._read = b""

    def __repr__(self) -> str:
        return f"<SideProcess {self.pid} {'stopped' if self._stopped else 'alive' if self.alive else 'ended'}>"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called, and `go_on` not yet."""
        return self._stopped

    @property
    def unanswered(self) -> int:
        """How many orders were sent whose answers nobody waited for yet."""
        return len(self._due)

    # -- orders -----------------------------------------------------------------------------------------------------

    def do(self, op: str, *, timeout_s: float | None = None, within_s: float | None = None, **arguments: Any) -> Any:
        """Give an order and wait for its answer.

        Args:
            op: An operation of `moonrelay_conformance.sides.runner`.
            timeout_s: The operation's own time, for those that have one (`TIMED`).
            within_s: Time for the answer; by default ``timeout_s`` and `GRACE_S`, or `ANSWER_TIMEOUT_S`.
            **arguments: The operation's arguments.

        Raises:
            MoonrelayError: What the side raised: its class and ``context`` are kept.
            SideFailed: The side raised something else.
            SideHung: No answer in time. Kill the process: whatever it is at is not known.
            SideEnded: The process ended.
        """
        self.send(op, timeout_s=timeout_s, **arguments)
        if within_s is None:
            within_s = (timeout_s or DEFAULT_TIMEOUT_S) + GRACE_S if op in TIMED else ANSWER_TIMEOUT_S
        while len(self._due) > 1:
            # Answers come in order; those before ours belong to orders that nobody finished.
            self._given_up.add(self._due.popleft()[0])
        return self.answer(within_s)

    def send(self, op: str, *, timeout_s: float | None = None, **arguments: Any) -> None:
        """Give an order without waiting; take the answer by `answer`. Orders are executed one after the other.

        Raises:
            SideEnded: The process ended.
        """
        self._numbers += 1
        if op in TIMED:
            arguments["timeout_s"] = timeout_s or DEFAULT_TIMEOUT_S
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode({"n": self._numbers, "do": op, **arguments}) + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as exc:
            raise self._ended() from exc
        self._due.append((self._numbers, op))

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Wait for the answer to the oldest order that has none; raises as `do`."""
        if not self._due:
            message = "no order is without an answer; send one first"
            raise SideFailed(message, pid=self.pid)
        number, op = self._due[0]
        deadline = Deadline(timeout_s, _CLOCK)
        while True:
            line = self._line(deadline)
            if line is None:
                self._given_up.add(self._due.popleft()[0])
                state = " (it is stopped)" if self._stopped else ""
                message = f"no answer to {op!r} within {timeout_s} s{state}"
                raise SideHung(message, op=op, pid=self.pid)
            answer = msgspec.json.decode(line)
            if answer["n"] in self._given_up:
                self._given_up.discard(answer["n"])
                continue
            self._due.popleft()
            assert answer["n"] == number
            return _unpacked(answer, op)

    def reset(self) -> bool:
        """End the side, so that the process can serve another one; return whether the process is whole."""
        return self.begin_reset() and self.end_reset()

    def begin_reset(self) -> bool:
        """Begin what `reset` does, without waiting; False where the process has ended."""
        if not self.alive:
            return False
        if self._stopped:
            self.go_on()
        try:
            self.send("reset")
        except SideEnded:
            return False
        return True

    def end_reset(self) -> bool:
        """Wait for what `begin_reset` began; return whether the process is whole. Blocks: `END_TIMEOUT_S` at most."""
        # Answers come in order; those before ours belong to orders that nobody finished.
        while len(self._due) > 1:
            self._given_up.add(self._due.popleft()[0])
        try:
            self.answer(END_TIMEOUT_S)
        except MoonrelayError:
            return False
        return True

    def begin_end(self) -> None:
        """Let the process end without waiting for it; `end` waits."""
        if self.alive and not self._stopped and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    # -- what is done to it -------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill -9, with the processes that the side started, and wait until it is gone. Idempotent."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        self._stopped = False
        self._close_pipes()

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says that the process stands."""
        os.kill(self.pid, signal.SIGSTOP)
        self._stopped = True
        deadline = Deadline(5.0, _CLOCK)
        while _state_of(self.pid) not in "Tt" and not deadline.expired:
            select.select([], [], [], 0.01)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self._stopped = False

    def probe(self) -> Held:
        """Return what the process holds, as the system lists it; see `probe.look`.

        Threads are called by Python's names where the side answers and has nothing to do.
        """
        names: dict[int, str] = {}
        if self.alive and not self._stopped and not self._due:
            names = {int(thread): name for thread, name in self.do("threads").items()}
        return probe.look(self.pid, names)

    def end(self) -> None:
        """End the process whatever its state. Idempotent. Blocks: `END_TIMEOUT_S` at most."""
        if self.alive:
            if self._stopped:
                self.go_on()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._close_pipes()

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _line(self, deadline: Deadline) -> bytes | None:
        """Return the next line; ``None`` where none comes in time."""
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            if self._process.stdout.closed:
                raise self._ended()
            ready, _, _ = select.select([self._process.stdout], [], [], deadline.remaining())
            if not ready:
                return None
            some = os.read(self._process.stdout.fileno(), 1 << 16)
            if not some:
                raise self._ended()
            self._read += some
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> SideEnded:
        self._due.clear()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.poll()
        how = f"by signal {-code}" if code is not None and code < 0 else f"with exit status {code}"
        message = f"the side's process ended {how}"
        return SideEnded(message, pid=self.pid)

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class SidePool:
    """Processes of a run: one that nobody killed serves the next test too, since its start costs seconds.

    One process more than is used gets ready meanwhile: tests that kill sides wait for timeouts much of their time.

    Args:
        python, env, log: As for `SideProcess`.
        spare: Whether to keep that one.
        forked: Whether processes are forked from one that has imported their side, which makes a spare one needless.

    Threads: one.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        log: IO[Any] | None = None,
        spare: bool = True,
        forked: bool = False,
    ) -> None:
        self._python = python
        self._spare = spare and not forked
        self._forked = forked
        self._nurseries: dict[str, Nursery] = {}
        self._env = dict(env or {})
        self._log = log
        self._folder = tempfile.TemporaryDirectory(prefix="moonrelay-sides-")
        self._idle: list[SideProcess] = []
        self._busy: list[SideProcess] = []

    def prepare(self, side: str) -> None:
        """Where processes are forked, have their host imported now. What fails is left to `start`. Blocks: seconds."""
        if self._forked:
            with contextlib.suppress(PeerLost):
                self._idle.append(self._made(side))

    def start(self, side: str, settings: SideSettings) -> SideProcess:
        """Return a process in which ``side`` was made and started.

        Args:
            side: ``module:Class`` of an `AdapterSide`.
            settings: For it.

        Raises:
            MoonrelayError: The side refuses its settings, or cannot start; the process is kept for others.
            SideFailed: It cannot be imported, or raised something untyped.
        """
        process = self._take(side)
        self._busy.append(process)
        if self._spare and not self._idle:
            ready = self._made(side)
            ready.send("warm")
            self._idle.append(ready)
        process.do("start", side=side, settings=msgspec.to_builtins(settings))
        return process

    def take_back(self) -> None:
        """End all sides that are in use; keep the processes that are whole, end the others."""
        busy, self._busy = self._busy, []
        # All at once: each waits for its peers for a while.
        begun = [process.begin_reset() for process in busy]
        for process, asked in zip(busy, begun, strict=True):
            if asked and process.end_reset():
                self._idle.append(process)
            else:
                process.kill()

    def close(self) -> None:
        """End all processes. Idempotent."""
        self.take_back()
        idle, self._idle = self._idle, []
        for process in idle:
            process.begin_end()
        for process in idle:
            process.end()
        for nursery in self._nurseries.values():
            nursery.close()
        self._nurseries.clear()
        self._folder.cleanup()

    def __enter__(self) -> SidePool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self, side: str) -> SideProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.end()
        return self._made(side)

    def _made(self, side: str) -> SideProcess:
        folder = Path(self._folder.name)
        if not self._forked:
            return SideProcess(python=self._python, env=self._env, folder=folder, log=self._log)
        if side not in self._nurseries:
            env = _added(self._python, self._env)
            self._nurseries[side] = Nursery(side, python=self._python, env=env, folder=folder, log=self._log)
        return SideProcess(nursery=self._nurseries[side])


def _added(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return what is added to the environment of a side's process."""
    # Threads of native pools would be counted as leaks while they fill, and several sides share a machine.
    added = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if python == sys.executable:
        added["PYTHONPATH"] = os.pathsep.join(str(Path(entry or ".").absolute()) for entry in sys.path)
    return {**added, **env}


def _unpacked(answer: dict[str, Any], op: str) -> Any:
    if "ok" in answer:
        return answer["ok"]
    if "error" in answer:
        raise _rebuilt(**answer["error"])
    failed = answer["failed"]
    message = f"the side's {op!r} raised {failed['type']}: {failed['text']}"
    raise SideFailed(message, op=op, type=failed["type"], trace=failed["trace"])


def _rebuilt(code: str, retryable: bool, message: str, context: dict[str, Any]) -> MoonrelayError:
    """Return the error as it was in the side; an unknown class becomes the base with the code in its context."""
    error = from_wire(code, retryable, message)
    error.context.update(context)
    return error


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
