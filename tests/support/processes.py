"""Peers in processes of their own: started, told what to do, stopped, killed."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from moonrelay.errors import MoonrelayError, from_wire

ANSWER_TIMEOUT_S = 90.0


class PeerError(Exception):
    """A peer failed in a way that is no typed error."""


class PeerPool:
    """Peers of a test session: a process that nobody killed serves the next test too, since its start costs seconds."""

    def __init__(self) -> None:
        self._idle: list[PeerProcess] = []
        self._busy: list[PeerProcess] = []

    def start(self, **settings: Any) -> PeerProcess:
        """Return a peer with a new connector."""
        peer = self._idle.pop() if self._idle else PeerProcess()
        self._busy.append(peer)
        peer.do("start", **settings)
        return peer

    def take_back(self) -> None:
        """End all connectors; keep the processes that are whole."""
        busy, self._busy = self._busy, []
        for peer in busy:
            if peer.resettable:
                self._idle.append(peer)
            else:
                peer.end()

    def close(self) -> None:
        self.take_back()
        for peer in self._idle:
            peer.end()
        self._idle.clear()


class PeerProcess:
    """One `support.peer` process, with a connector."""

    def __init__(self, **settings: Any) -> None:
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.peer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
            bufsize=1,
        )
        self._stopped = False
        self._unanswered = 0
        if settings:
            self.do("start", **settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, what: str, **arguments: Any) -> None:
        """Give an order without waiting for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        self._unanswered += 1

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Wait for an order's answer; raise the typed error that it is."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            message = f"no answer within {timeout_s} s" if not ready else f"the peer ended with {self._process.poll()}"
            raise PeerError(message)
        self._unanswered -= 1
        answer = json.loads(line)
        if "ok" in answer:
            return answer["ok"]
        error = from_wire(answer["error"], answer["retryable"], answer["message"])
        if type(error) is MoonrelayError:
            raise PeerError(f"{answer['error']}: {answer['message']}")
        raise error

    def do(self, what: str, **arguments: Any) -> Any:
        """Give an order and wait for its answer."""
        self.send(what, **arguments)
        return self.answer()

    @property
    def resettable(self) -> bool:
        """Reset the peer; return whether that worked."""
        if self._process.poll() is not None:
            return False
        if self._stopped:
            self.go_on()
        try:
            while self._unanswered:
                try:
                    self.answer(20)
                except MoonrelayError:
                    continue
            self.do("reset")
        except (PeerError, OSError):
            return False
        return True

    def kill(self) -> None:
        """Kill -9, and wait until the process is gone."""
        self._process.kill()
        self._process.wait(timeout=10)

    def stop(self) -> None:
        """SIGSTOP, and wait until the system says that the process stands."""
        os.kill(self.pid, signal.SIGSTOP)
        self._stopped = True
        until = time.monotonic() + 5
        while _state_of(self.pid) not in "Tt" and time.monotonic() < until:
            select.select([], [], [], 0.01)

    def go_on(self) -> None:
        """SIGCONT."""
        self._stopped = False
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """End the process whatever its state. Idempotent."""
        if self._process.poll() is None:
            if self._stopped:
                self.go_on()
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
