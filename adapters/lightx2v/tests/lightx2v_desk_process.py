"""A desk in a process of its own, told what to do; and what a test sees of its own process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from moonrelay.clock import Deadline, SystemClock

CLOCK = SystemClock()
TIMEOUT_S = 30.0


def within(seconds: float) -> Deadline:
    return Deadline(seconds, CLOCK)


class Finding:
    """A find in a thread of its own: what came of it."""

    def __init__(self, caller: Any, *names: str, timeout_s: float = TIMEOUT_S, **more: Any) -> None:
        self._result: bytes | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._find, args=(caller, names, within(timeout_s), more), name="finding", daemon=True
        )
        self._thread.start()

    def _find(self, caller: Any, names: tuple[str, ...], deadline: Deadline, more: dict[str, Any]) -> None:
        try:
            self._result = caller.find(names, deadline, **more)
        except BaseException as exc:
            self._error = exc

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> bytes:
        """Return the handle, or raise what the find raised."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the find hangs"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def until(condition: Any, what: str) -> None:
    """Wait for something outside, with a bound."""
    end = time.monotonic() + TIMEOUT_S
    step = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {TIMEOUT_S} s: {what}"
        step.wait(0.02)


def held() -> tuple[int, int]:
    """Return how many descriptors and tasks this process has."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class DeskProcess:
    """A process with a desk on loopback."""

    def __init__(self, port: int = 0, phase: str = "encoder") -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(port), phase],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            bufsize=1,
        )
        self.port = int(self._answer())

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        assert line, f"the desk's process says nothing; ended with {self._process.poll()}"
        return line

    def do(self, what: str, *arguments: Any) -> Any:
        """Call a method of the desk; ``waiting`` tells how many finds wait there."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._answer())

    def until_waited_for(self, finds: int = 1) -> None:
        until(lambda: self.do("waiting") == finds, f"{finds} finds wait")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        stat = Path(f"/proc/{self._process.pid}/stat")
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] in "Tt", "the process stands")

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """End the process whatever its state. Idempotent."""
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """Serve a desk on a port, for a phase; take orders from stdin."""
    from moonrelay_lightx2v.rendezvous import Desk

    desk = Desk("127.0.0.1", int(sys.argv[1]), phase=sys.argv[2])
    desk.start()
    print(desk.address[1], flush=True)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        answer: object = None
        if what == "waiting":
            with desk._lock:
                answer = len(desk._book._waiters)
        else:
            if what == "offer":
                arguments[2] = arguments[2].encode()
            if what not in ("withdraw", "close"):
                arguments[0] = tuple(arguments[0])
            answer = getattr(desk, what)(*arguments)
        print(json.dumps(answer), flush=True)
    desk.close()


if __name__ == "__main__":
    main()
