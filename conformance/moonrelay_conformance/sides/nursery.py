"""A process that has imported a host, from which sides' processes are forked: ten seconds of imports are paid once.

For a target that says so (`AdapterTarget.forked`). Owns that process and its forks from outside; from inside it is
`moonrelay_conformance.sides.forking`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import child_environment
from moonrelay.errors import PeerLost

#: Time for a process to be born, the host's imports among it where it is the first, in seconds.
BIRTH_TIMEOUT_S: Final = 300.0
_END_TIMEOUT_S: Final = 10.0
_BIRTH: Final = b"+"
_MESSAGE_BYTES: Final = 1 << 12
_CLOCK: Final = SystemClock()


class Nursery:
    """The process, from outside.

    Args:
        side: ``module:Class`` of the sides, whose `AdapterSide.prepare` is called.
        python: Its interpreter.
        env: Variables to add to its environment, and its forks'.
        folder: Its working folder, and theirs.
        log: Where standard error goes, theirs too; ``None`` leaves it where ours goes.

    Threads: one; the system kills it when that thread ends.
    """

    def __init__(
        self, side: str, *, python: str, env: Mapping[str, str], folder: Path | None, log: IO[Any] | None
    ) -> None:
        self._ended: dict[int, int] = {}
        self._born: list[int] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    python,
                    "-P",
                    "-m",
                    "moonrelay_conformance.sides.forking",
                    str(os.getpid()),
                    str(theirs.fileno()),
                    side,
                ],
                stdin=subprocess.DEVNULL,
                stdout=2 if log is None else log,  # what the host says as it is imported is for people
                stderr=log,
                cwd=folder or "/",
                env=child_environment(env),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def born(self) -> Child:
        """Return a new process, at which `runner` waits for orders.

        Raises:
            PeerLost: The nursery has ended: the side cannot be imported, for one; or it gives no answer.
        """
        their_orders, orders = os.pipe()
        answers, their_answers = os.pipe()
        try:
            socket.send_fds(self._socket, [_BIRTH], [their_orders, their_answers])
            deadline = Deadline(BIRTH_TIMEOUT_S, _CLOCK)
            while not self._born and not deadline.expired:
                self._listen(deadline.remaining())
        except OSError as exc:
            os.close(orders)
            os.close(answers)
            raise self._lost() from exc
        finally:
            os.close(their_orders)
            os.close(their_answers)
        if not self._born:
            os.close(orders)
            os.close(answers)
            raise self._lost()
        return Child(self, self._born.pop(), os.fdopen(orders, "wb"), os.fdopen(answers, "rb"))

    def code_of(self, pid: int, timeout_s: float = 0.0) -> int | None:
        """Return how a process ended, as `subprocess.Popen.returncode`; ``None`` where it has not by then."""
        deadline = Deadline(timeout_s, _CLOCK)
        while pid not in self._ended:
            try:
                heard = self._listen(deadline.remaining())
            except OSError:
                return -signal.SIGKILL  # by the system, with the nursery
            if not heard and deadline.expired:
                return None
        return self._ended[pid]

    def close(self) -> None:
        """End it. Idempotent. Its forks must have ended."""
        self._socket.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self, timeout_s: float | None) -> bool:
        """Take in a message, if one comes in time; return whether one came.

        Raises:
            OSError: The nursery has ended.
        """
        ready, _, _ = select.select([self._socket], [], [], timeout_s)
        if not ready:
            return False
        message = self._socket.recv(_MESSAGE_BYTES)
        if not message:
            raise ConnectionResetError
        told = msgspec.json.decode(message)
        if "born" in told:
            self._born.append(told["born"])
            self._ended.pop(told["born"], None)  # the system gives numbers again
        else:
            self._ended[told["ended"]] = told["code"]
        return True

    def _lost(self) -> PeerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        message = f"the process that sides are forked from gives none; its exit status is {self._process.poll()}"
        return PeerLost(message)


class Child:
    """A fork, with what `subprocess.Popen` has that is used of it."""

    def __init__(self, nursery: Nursery, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return how it ended, ``None`` where it has not."""
        return self._nursery.code_of(self.pid)

    def wait(self, timeout: float) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not.
        """
        code = self._nursery.code_of(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"side {self.pid}", timeout)
        return code
