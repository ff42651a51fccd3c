"""Transfers whose caller has given up but whose engine may still write: their memory waits here.

Owns the operations of such transfers until they are terminal, and nothing of their memory but the call that frees it.
Has no thread: the connector's reaper calls `Quarantine.poll`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moonrelay.clock import Clock, Deadline
from moonrelay.transfer.base import Operation, OperationState

#: Pause between two looks while `Quarantine.close` waits.
_LOOK_AGAIN_S = 0.005


class Quarantine:
    """Operations in flight without a caller.

    Args:
        clock: The clock on which ``close`` waits.

    Threads: all methods from any thread; an operation is polled by one thread at a time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition()
        self._held: list[_Held] = []
        self._polling = threading.Lock()

    @property
    def busy(self) -> int:
        """How many transfers are not quiet."""
        with self._lock:
            return len(self._held)

    def hold(self, operations: Sequence[Operation], on_quiet: Callable[[], None]) -> None:
        """Keep operations until all are terminal, then call ``on_quiet`` once; at once when all are already.

        Threads: ``on_quiet`` runs in the thread that calls ``hold``, ``poll`` or ``close``, with no lock held.
        """
        held = _Held(operations, on_quiet)
        if held.is_quiet():
            on_quiet()
            return
        with self._lock:
            self._held.append(held)

    def poll(self) -> int:
        """Ask the engine about every operation held, free what became quiet, return how many transfers remain."""
        with self._polling:
            with self._lock:
                held = list(self._held)
            quiet = [one for one in held if one.is_quiet()]
            with self._lock:
                self._held = [one for one in self._held if one not in quiet]
                count = len(self._held)
        for one in quiet:
            one.on_quiet()
        return count

    def close(self, timeout_s: float) -> bool:
        """Wait until everything is quiet. Call before the engine is closed. Idempotent.

        Returns:
            False when something was still running at the end: its memory stays held (it would be unsafe to reuse), and
            it becomes quiet with the next ``poll`` after the engine was closed.

        Blocks: ``timeout_s`` at most.
        """
        deadline = Deadline(timeout_s, self._clock)
        while self.poll():
            left = deadline.remaining(_LOOK_AGAIN_S)
            if not left:
                return False
            with self._idle:
                self._clock.wait(self._idle, left)
        return True


class _Held:
    """The reads of one call that had not ended when it gave up."""

    __slots__ = ("_running", "on_quiet")

    def __init__(self, operations: Sequence[Operation], on_quiet: Callable[[], None]) -> None:
        self._running = list(operations)
        for one in self._running:
            one.abandon()
        self.on_quiet = on_quiet

    def is_quiet(self) -> bool:
        self._running = [one for one in self._running if one.poll() is OperationState.RUNNING]
        return not self._running
