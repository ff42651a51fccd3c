"""Time as an argument: monotonic clocks, deadlines, and waiting on a condition until one of them.

Everything that expires is reckoned on one owner's monotonic clock. Wall-clock time is never compared across hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and a wait that this clock can end."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never goes back."""
        ...

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        """Wait on a held condition for at most ``timeout_s`` seconds of this clock.

        Blocks: yes. The condition's lock must be held. May wake spuriously.

        Returns:
            False when the time ran out, True when notified (or woken spuriously).
        """
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        return condition.wait(timeout_s)


def unix_s() -> int:
    """Return seconds since 1970, for what people and clients are told. Nothing expires by it, nothing is compared."""
    return int(time.time())


class ManualClock:
    """A clock that moves only when told; for tests.

    Threads: any thread may call ``advance``; waiters wake when their time has come.
    """

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now = start_s
        self._lock = threading.Lock()
        self._waiting: list[threading.Condition] = []

    def monotonic(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds`` and wake everybody who waits on this clock."""
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for condition in waiting:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        with self._lock:
            self._waiting.append(condition)
            start = self._now
        try:
            # A real bound as well, so that a test that forgets to advance fails instead of hanging.
            condition.wait(timeout=30.0)
        finally:
            with self._lock:
                self._waiting.remove(condition)
                now = self._now
        return timeout_s is None or now - start < timeout_s


class Deadline:
    """A point on a clock until which something may take.

    Args:
        timeout_s: Seconds from now; ``None`` means never.
        clock: The clock it is reckoned on.
    """

    __slots__ = ("_at", "_clock", "timeout_s")

    def __init__(self, timeout_s: float | None, clock: Clock) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._at = None if timeout_s is None else clock.monotonic() + timeout_s

    @property
    def clock(self) -> Clock:
        return self._clock

    def remaining(self, at_most: float | None = None) -> float | None:
        """Return seconds left (never negative), bounded by ``at_most``; ``None`` means without end."""
        if self._at is None:
            return at_most
        left = max(0.0, self._at - self._clock.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def expired(self) -> bool:
        return self._at is not None and self._clock.monotonic() >= self._at

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Wait on a held condition until ``predicate()`` or the deadline; return the predicate's last value.

        Blocks: until the deadline at most. The condition's lock must be held.
        """
        while not predicate():
            left = self.remaining()
            if left is not None and left <= 0:
                return False
            self._clock.wait(condition, left)
        return True
