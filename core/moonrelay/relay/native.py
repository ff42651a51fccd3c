"""Native calls that may outlast the caller's patience, run on threads of their own.

Owns the threads, and the promise that memory given to a native call is known to be quiet: a caller that gives up at its
deadline leaves the call behind, and is told when it has ended.
"""

from __future__ import annotations

import collections
import enum
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import ClosedError, TransferTimeout
from moonrelay.relay.base import OnQuiet

ResultT = TypeVar("ResultT")
_log = logging.getLogger(__name__)


class _State(enum.Enum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    LEFT = "left"  # running, and its caller is gone


class _Call(Generic[ResultT]):
    """One call; all fields are guarded by the pool's condition."""

    __slots__ = ("error", "on_late", "on_quiet", "result", "state", "work")

    def __init__(
        self, work: Callable[[], ResultT], on_quiet: OnQuiet | None, on_late: Callable[[ResultT], None] | None
    ) -> None:
        self.work = work
        self.on_quiet = on_quiet
        self.on_late = on_late
        self.state = _State.QUEUED
        self.result: ResultT | None = None
        self.error: Exception | None = None


class NativeCalls:
    """A small pool of threads for calls that release the interpreter's lock and can't be interrupted.

    Args:
        name: Part of the threads' names.
        threads: At most so many calls at a time; further ones queue. Threads start when needed.

    Threads: all methods from any thread but the pool's own.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._max_threads = threads
        self._condition = threading.Condition()
        self._queue: collections.deque[_Call[object]] = collections.deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._running = 0
        self._closed = False
        self._abandoned = False
        self._last: Callable[[], None] | None = None

    def call(
        self,
        work: Callable[[], ResultT],
        deadline: Deadline,
        *,
        what: str,
        on_quiet: OnQuiet | None = None,
        on_late: Callable[[ResultT], None] | None = None,
    ) -> ResultT:
        """Run ``work`` on a thread of the pool and return what it returns.

        Args:
            work: The native call.
            deadline: How long the caller waits.
            what: Names the call in the timeout's message.
            on_quiet: Called exactly once, when ``work`` has ended or will never begin.
            on_late: Called with the result, on the pool's thread, when ``work`` returns after the caller gave up.

        Blocks: until ``work`` ended, or the deadline.

        Raises:
            TransferTimeout: The deadline passed; ``work`` never began, or still runs.
            ClosedError: The pool is closed, or was closed for longer than it waits while ``work`` ran.
            Exception: What ``work`` raised.
        """
        call = _Call(work, on_quiet, on_late)
        quiet = True
        try:
            with self._condition:
                if self._closed:
                    message = f"{what}: the relay is closed"
                    raise ClosedError(message)
                self._queue.append(call)  # type: ignore[arg-type]  # the queue holds calls of every result type
                self._hire()
                self._condition.notify_all()
                try:
                    deadline.wait_for(self._condition, lambda: call.state is _State.DONE or self._abandoned)
                finally:
                    # Also on KeyboardInterrupt: the native call doesn't know of it.
                    if call.state is _State.QUEUED:
                        self._queue.remove(call)  # type: ignore[arg-type]
                    elif call.state is _State.RUNNING:
                        call.state = _State.LEFT
                        quiet = False
            if call.state is not _State.DONE and self._abandoned:
                message = f"{what}: the relay was closed while the store did not answer"
                raise ClosedError(message)
            if call.state is not _State.DONE:
                message = f"{what} did not end within {deadline.timeout_s} s"
                raise TransferTimeout(message)
            if call.error is not None:
                raise call.error
            return call.result  # type: ignore[return-value]  # set together with DONE
        finally:
            if quiet and on_quiet is not None:
                on_quiet()

    @property
    def running(self) -> int:
        """How many native calls are under way, left ones included."""
        with self._condition:
            return self._running

    def close(self, timeout_s: float, last: Callable[[], None]) -> bool:
        """Refuse new calls, wait for those under way, join the threads, then run ``last`` (once in all).

        Blocks: at most ``timeout_s`` for the calls, and as long as ``last`` takes.

        Returns:
            True when everything ended. False when calls are still under way: the thread of the last one runs ``last``.
        """
        deadline = Deadline(timeout_s, SystemClock())
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            quiet = deadline.wait_for(self._condition, lambda: self._running == 0 and not self._queue)
            if not quiet:
                self._last = last
                self._abandoned = True
                self._condition.notify_all()
            threads = list(self._threads)
        if not quiet:
            _log.warning("%s: closed while %d native calls are still under way", self._name, self.running)
            return False
        for thread in threads:
            thread.join()
        last()
        return True

    def _hire(self) -> None:
        if self._idle < len(self._queue) and len(self._threads) < self._max_threads:
            thread = threading.Thread(
                target=self._work, name=f"moonrelay-{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._queue and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if not self._queue:
                    return
                call = self._queue.popleft()
                call.state = _State.RUNNING
                self._running += 1
            result: object = None
            error: Exception | None = None
            try:
                result = call.work()
            except Exception as raised:  # noqa: BLE001 - outermost frame: handed to the caller
                error = raised
            self._finish(call, result, error)

    def _finish(self, call: _Call[object], result: object, error: Exception | None) -> None:
        with self._condition:
            left = call.state is _State.LEFT
            if not left:
                call.result, call.error, call.state = result, error, _State.DONE
                self._ended()
                return
        try:
            if call.on_quiet is not None:
                call.on_quiet()
            if error is None and call.on_late is not None:
                call.on_late(result)
        except Exception:  # noqa: BLE001 - outermost frame: nobody waits for this call any more
            _log.exception("%s: a call that was given up could not be cleaned up", self._name)
        with self._condition:
            self._ended()
            last = self._last if self._running == 0 and not self._queue else None
            if last is not None:
                self._last = None
        if last is not None:
            last()

    def _ended(self) -> None:
        self._running -= 1
        self._condition.notify_all()
