"""Clients and workers in processes of their own, as the queue suite sees them: started, ordered, stopped, killed.

Owns the processes of one test, and the reading of what they were told before they died.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import MoonrelayError, from_wire
from moonrelay.queueing import StageQueue
from moonrelay_conformance.suites.queue_base import PATIENCE_S, QueueSuite
from moonrelay_conformance.suites.queue_peer import name_of
from moonrelay_conformance.targets.parts import QueueTarget

#: Short enough to see a claim lapse, long enough for a busy machine.
LEASE_S: Final = 1.5
#: A claim that a process which only the machine's load holds up does not lose.
LONG_LEASE_S: Final = 30.0
CONFIG: Final[dict[str, object]] = {
    "lease_s": LEASE_S,
    "renew_s": LEASE_S / 5,
    "retry_delay_s": 0.0,
    "max_attempts": 50,
    "keep_events": 100_000,
    "poll_s": 0.2,
}
_BOOT: Final = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module('moonrelay_conformance.suites.queue_peer', run_name='__main__')"
)


class PeerProcess:
    """One `queue_peer` process. Starts at once; `do` waits until it is there."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            # The path travels along, so that targets which only this process can import are found there too.
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._rest = b""
        self._lines: deque[dict[str, Any]] = deque()
        self._stopped = False
        self._owed = 0
        self.told: list[Any] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, what: str, **arguments: object) -> None:
        """Give an order without waiting for its answer."""
        pipe = _there(self._process.stdin)
        pipe.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
        pipe.flush()
        self._owed += 1

    def answer(self) -> Any:
        """Return the next answer, or raise the typed error that it is. Blocks: `PATIENCE_S` at most."""
        line = self._next(PATIENCE_S)
        if line is None:
            message = f"a peer process gave no answer within {PATIENCE_S:g} s (it ended with {self._process.poll()})"
            raise AssertionError(message)
        self._owed -= 1
        if "ok" in line:
            return line["ok"]
        code = str(line["error"])
        if code.startswith("!"):
            message = f"the queue raised {code[1:]} in a peer process, which is no typed error: {line['message']}"
            raise AssertionError(message)
        raise from_wire(code, bool(line["retryable"]), str(line["message"]))

    def do(self, what: str, **arguments: object) -> Any:
        """Give an order and return its answer."""
        self.send(what, **arguments)
        return self.answer()

    def told_by(self, count: int) -> list[Any]:
        """Wait until the peer has told of ``count`` things, and return what it has told."""
        self.wait_told(count, for_s=PATIENCE_S)
        assert len(self.told) >= count, f"a peer told of {len(self.told)} things and then of no more"
        return self.told

    def wait_told(self, count: int, *, for_s: float) -> None:
        """Wait until the peer has told of ``count`` things, has come to its end, or was silent for ``for_s``."""
        while len(self.told) < count and not self._lines:
            line = self._read(for_s)
            if line is None:
                return
            self._sort(line)

    def kill(self, *, after_s: float = 0.0) -> list[Any]:
        """Kill -9 after a while, wait until the process is gone, and return all that it has told."""
        threading.Event().wait(after_s)
        self._process.kill()
        self._process.wait(PATIENCE_S)
        while (line := self._read(5.0)) is not None:
            self._sort(line)
        return self.told

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says that the process stands."""
        os.kill(self.pid, signal.SIGSTOP)
        self._stopped = True
        until, pause = Deadline(10.0, SystemClock()), threading.Event()
        while _state_of(self.pid) not in "Tt" and not until.expired:
            pause.wait(0.01)

    def go_on(self) -> None:
        """SIGCONT."""
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def spare(self) -> bool:
        """Close the queue in the process; return whether it can serve another test."""
        if self._process.poll() is not None or self._stopped or self._owed:
            return False
        self.do("close")
        self.told = []
        return True

    def end(self) -> None:
        """End the process, whatever its state. Idempotent."""
        if self._process.poll() is None:
            if self._stopped:
                self.go_on()
            self._process.kill()
            self._process.wait(PATIENCE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer; notes what is told meanwhile."""
        while not self._lines:
            line = self._read(timeout_s)
            if line is None:
                return None
            self._sort(line)
        return self._lines.popleft()

    def _sort(self, line: dict[str, Any]) -> None:
        if "told" in line:
            self.told.append(line["told"])
        else:
            self._lines.append(line)

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        """Return a whole line; ``None`` when the peer is gone or silent. A line cut short by a kill does not count."""
        pipe = _there(self._process.stdout)
        while b"\n" not in self._rest:
            ready, _, _ = select.select([pipe], [], [], timeout_s)
            chunk = os.read(pipe.fileno(), 65536) if ready else b""
            if not chunk:
                return None
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


class PeerPool:
    """Processes of one class of tests; those that nobody killed serve the next test too, since a start takes long."""

    def __init__(self) -> None:
        self._idle: list[PeerProcess] = []

    def lend(self) -> PeerProcess:
        """Return a process without a queue."""
        return self._idle.pop() if self._idle else PeerProcess()

    def take_back(self, peer: PeerProcess) -> None:
        """Keep a process that is whole, end another."""
        if peer.spare():
            self._idle.append(peer)
        else:
            peer.end()

    def close(self) -> None:
        """End all."""
        for peer in self._idle:
            peer.end()


class Peers:
    """The processes of one test, and the queue as this process sees it.

    Args:
        target: Whose queue.
        folder: Of the test.
        pool: Where processes come from.
    """

    def __init__(self, target: QueueTarget, folder: Path, pool: PeerPool) -> None:
        self._target = target
        self._pool = pool
        self._lent: list[PeerProcess] = []
        self._opened: list[StageQueue] = []
        self.url = target.url(folder)
        self.queue = self.open()

    def open(self) -> StageQueue:
        """Open the queue in this process once more."""
        # What this process claims must not lapse when the machine is busy; the peers' claims are those that do.
        config = {**CONFIG, "lease_s": LONG_LEASE_S}
        queue = self._target.open(self.url, clock=None, pipeline=None, config=config)
        self._opened.append(queue)
        return queue

    def start(self, count: int = 1, **settings: object) -> list[PeerProcess]:
        """Start processes side by side and wait until each has opened the queue.

        Args:
            count: How many.
            **settings: Settings of their queue that differ from `CONFIG`.
        """
        made = [self._pool.lend() for _ in range(count)]
        self._lent += made
        for peer in made:
            peer.send("open", target=name_of(self._target), url=self.url, config={**CONFIG, **settings})
        for peer in made:
            peer.answer()
        return made

    def close(self) -> None:
        """End what was started, or hand it back."""
        for peer in self._lent:
            self._pool.take_back(peer)
        for queue in self._opened:
            queue.close()


_POOL: Final = pytest.StashKey[PeerPool]()


class ProcessSuite(QueueSuite):
    """Base of the modules whose tests need processes."""

    @pytest.fixture
    def peers(self, target: QueueTarget, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Peers]:
        """A new queue and processes around it."""
        made = Peers(target, tmp_path, _pool_of(request))
        yield made
        made.close()


def _pool_of(request: pytest.FixtureRequest) -> PeerPool:
    """Return the pool of the test's class, made on first use and closed after the class.

    Not a fixture of the class: pytest does not want those as methods any more, and a function beside the class would
    not be seen from a third party's module.
    """
    owner = request.node.getparent(pytest.Class)
    pool: PeerPool | None = owner.stash.get(_POOL, None)
    if pool is None:
        pool = owner.stash[_POOL] = PeerPool()
        owner.addfinalizer(pool.close)
    return pool


def refusal(peer: PeerProcess, what: str, **arguments: object) -> type[MoonrelayError] | None:
    """Give an order; return the class of the error, ``None`` where it was done."""
    try:
        peer.do(what, **arguments)
    except MoonrelayError as exc:
        return type(exc)
    return None


def _there(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
