"""A process of the engine and relay suites: started, told what to do by JSON lines, stopped, killed.

Owns the process's life and its pipes, on both ends: `HelperProcess` in the suite, `serve` in the process. Bytes of
payloads never cross; both ends make them from a seed.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import MoonrelayError, from_wire

#: How long an ordinary order may take.
ANSWER_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0


class HelperFailedError(Exception):
    """A helper process failed in a way that is no typed error, ended, or did not answer."""


def pattern(seed: int, nbytes: int) -> bytes:
    """Return the bytes that a seed stands for; the same in every process, and no two seeds' alike."""
    return random.Random(seed).randbytes(nbytes)


class HelperProcess:
    """One process that runs a module of this package.

    Args:
        module: Its full name; it calls `serve`.
        log: File for what the process and its libraries write.

    Threads: one at a time.
    """

    def __init__(self, module: str, log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                bufsize=0,
            )
        self._received = b""
        self._stopped = False
        self._unanswered = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def reusable(self) -> bool:
        """Whether it runs and has nothing to do."""
        return self._process.poll() is None and not self._stopped and self._unanswered == 0

    def do(self, order: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Any:
        """Give an order and wait for its answer.

        Raises:
            MoonrelayError: What the order raised there.
            HelperFailedError: Anything else went wrong.
        """
        self.send(order, **arguments)
        return self.answer(timeout_s)

    def send(self, order: str, **arguments: Any) -> None:
        """Give an order without waiting."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": order, **arguments}).encode() + b"\n")
            self._unanswered += 1
        except BrokenPipeError:
            self._fail("ended before an order reached it")

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Wait for the next answer."""
        answer = json.loads(self.line(timeout_s))
        self._unanswered -= 1
        if "ok" in answer:
            return answer["ok"]
        if "error" in answer:
            raise from_wire(*answer["error"])
        message = f"helper process {self.pid}: {answer['failed']}"
        raise HelperFailedError(message)

    def line(self, timeout_s: float = ANSWER_TIMEOUT_S) -> bytes:
        """Wait for the next line."""
        assert self._process.stdout is not None
        deadline = Deadline(timeout_s, SystemClock())
        while b"\n" not in self._received:
            if not select.select([self._process.stdout], [], [], deadline.remaining())[0]:
                self._fail(f"gave no answer within {timeout_s} s")
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                self._fail("ended without an answer")
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line

    def rest(self) -> list[bytes]:
        """Return the whole lines that a process which is gone has written."""
        assert self._process.stdout is not None
        while received := os.read(self._process.stdout.fileno(), 1 << 16):
            self._received += received
        *lines, _ = self._received.split(b"\n")
        return lines

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says that it stands."""
        self._stopped = True
        os.kill(self.pid, signal.SIGSTOP)
        deadline = Deadline(5.0, SystemClock())
        state = Path(f"/proc/{self.pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] not in "tT" and not deadline.expired:
            threading.Event().wait(0.01)

    def go_on(self) -> None:
        """SIGCONT."""
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """End it, kindly where it listens. Idempotent."""
        if self._process.poll() is None and self._stopped:
            self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdout.close()

    def __enter__(self) -> HelperProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _fail(self, what: str) -> None:
        tail = self._log.read_bytes()[-800:].decode(errors="replace").strip()
        message = f"helper process {self.pid} {what} (exit status {self._process.poll()}); its log ends: {tail}"
        raise HelperFailedError(message)


class HelperPool:
    """Processes of the tests of one class, all started alike: one that is whole serves the next test too.

    Args:
        module: As for `HelperProcess`.
        logs: Folder for logs; made when absent.
        start: Gives the arguments of the order ``start``; asked when a process is needed.
    """

    def __init__(self, module: str, logs: Path, start: Callable[[], Mapping[str, Any]]) -> None:
        self._module = module
        self._logs = logs
        self._start = start
        self._idle: list[HelperProcess] = []
        self._busy: list[HelperProcess] = []
        self._made = 0

    def take(self) -> HelperProcess:
        """Return a started process."""
        if self._idle:
            self._busy.append(self._idle.pop())
            return self._busy[-1]
        self._logs.mkdir(parents=True, exist_ok=True)
        self._made += 1
        process = HelperProcess(self._module, self._logs / f"helper-{self._made}.log")
        self._busy.append(process)
        process.do("start", path=[one for one in sys.path if one], **self._start())
        return process

    def take_back(self) -> None:
        """End what a test stopped, killed or left at work; keep the others."""
        busy, self._busy = self._busy, []
        for process in busy:
            if process.reusable:
                process.do("reset")
                self._idle.append(process)
            else:
                process.end()

    def close(self) -> None:
        """End all."""
        for process in (*self._idle, *self._busy):
            process.end()
        self._idle, self._busy = [], []


def serve(start: Callable[..., Any]) -> None:
    """Answer orders until standard input ends; what `HelperProcess` talks to.

    Args:
        start: Makes the object whose methods are the orders, with the arguments of the first one. A method that yields
            gives an answer for each item. Its ``reset`` is called between two tests, its ``close`` at the end.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries write to standard output must not mix with answers
    served: Any = None
    results: Iterator[Any]
    for line in sys.stdin.buffer:
        order = json.loads(line)
        name = order.pop("do")
        try:
            if name == "start":
                sys.path.extend(path for path in order.pop("path") if path not in sys.path)
                served, results = start(**order), iter((None,))
            else:
                result = getattr(served, name)(**order)
                results = result if isinstance(result, Iterator) else iter((result,))
            for result in results:
                answers.write(json.dumps({"ok": result}).encode() + b"\n")
            continue
        except MoonrelayError as exc:
            answer: dict[str, Any] = {"error": exc.to_wire()}
        except Exception as exc:  # noqa: BLE001 - the outermost frame: whatever it is, the suite must learn of it
            answer = {"failed": f"{type(exc).__name__}: {exc}"}
        answers.write(json.dumps(answer).encode() + b"\n")
    if served is not None:
        served.close()
