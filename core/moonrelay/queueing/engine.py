"""Engine: how rules run against a backend, and how waiting works; the part that a backend fills in.

Owns the order of lock, time, overdue work and rule, and the condition on which this process waits. Decisions are in the
rules; rows are in the backend's transaction.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import ClosedError
from moonrelay.queueing import outcome
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.store import Book, Transaction
from moonrelay.queueing.task import Pipeline

ValueT = TypeVar("ValueT")


class Engine(ABC):
    """Runs rules in transactions.

    Threads: any. ``close`` is idempotent.
    """

    def __init__(self, clock: Clock, config: QueueConfig) -> None:
        self.clock = clock
        self.config = config
        self._condition = threading.Condition()
        self._generation = 0
        self._closed = False
        self._failure: BaseException | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """A URL by which another process reaches the same queue."""

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The stored stages."""

    @abstractmethod
    def transaction(self, *, write: bool) -> AbstractContextManager[Transaction]:
        """Open a transaction; an exception undoes it.

        Blocks: for the backend's lock, bounded by ``busy_timeout_s``.
        """

    @abstractmethod
    def ring(self) -> None:
        """Tell other processes that something changed."""

    @abstractmethod
    def watch(self, waiting: bool) -> None:
        """Take note that somebody here begins or ends to wait for other processes' changes."""

    def run(self, rule: Callable[[Book], ValueT], *, ring: bool = True) -> ValueT:
        """Run a writing rule, after everything overdue was dealt with.

        Args:
            rule: Checks first, then writes.
            ring: Whether waiters should look again afterwards.
        """
        self._reap()
        with self.transaction(write=True) as tx:
            value = rule(self._book(tx))
        if ring:
            self.wake()
        return value

    def read(self, rule: Callable[[Book], ValueT]) -> ValueT:
        """Run a reading rule, after everything overdue was dealt with."""
        self._reap()
        with self.transaction(write=False) as tx:
            return rule(self._book(tx))

    def wake(self) -> None:
        """Make everybody who waits on this queue look again, here and elsewhere."""
        self.note_change()
        self.ring()

    def note_change(self) -> None:
        """Make everybody who waits in this process look again."""
        with self._condition:
            self._generation += 1
            self._condition.notify_all()

    def wait_until(
        self, attempt: Callable[[], tuple[ValueT | None, float | None]], deadline: Deadline, stopped: Callable[[], bool]
    ) -> ValueT | None:
        """Call ``attempt`` until it gives a value, looking again on every change and whenever something falls due.

        Args:
            attempt: Returns a value, or ``None`` and when (in seconds of the clock) to look again at the latest.
            deadline: When to give up.
            stopped: Ends the wait early.

        Returns:
            The value; ``None`` when time ran out or ``stopped()``.

        Raises:
            ClosedError: The queue was closed meanwhile.
        """
        self.watch(True)
        try:
            while not stopped():
                with self._condition:
                    seen = self._generation
                value, again_at_s = attempt()
                if value is not None:
                    return value
                if deadline.expired:
                    return None
                self._sleep(seen, self._earliest(again_at_s), deadline, stopped)
            return None
        finally:
            self.watch(False)

    def close(self) -> None:
        """Wake everybody who waits; they get `ClosedError`."""
        with self._condition:
            self._closed = True
            self._generation += 1
            self._condition.notify_all()

    @property
    def closed(self) -> bool:
        with self._condition:
            return self._closed

    def ensure_open(self) -> None:
        """Raise `ClosedError` once the queue is closed, or can no longer hear of changes."""
        with self._condition:
            closed, failure = self._closed, self._failure
        if failure is not None and not closed:
            message = f"the queue's watcher ended ({failure}); connect again"
            raise ClosedError(message, url=self.url) from failure
        if closed:
            raise ClosedError("the queue was closed", url=self.url)

    def fail(self, failure: BaseException) -> None:
        """Make every further call fail, because this object cannot work any more."""
        with self._condition:
            self._failure = failure
            self._generation += 1
            self._condition.notify_all()

    def _book(self, tx: Transaction) -> Book:
        # The time is read once the lock is held: waiting for it must not make a lease look younger than it is.
        return Book(tx=tx, now_s=self.clock.monotonic(), pipeline=self.pipeline, config=self.config)

    def _reap(self) -> None:
        """Deal with what is overdue in a transaction of its own, so that a refused rule does not undo it."""
        self.ensure_open()
        with self.transaction(write=False) as tx:
            due_s = tx.next_due_s(self.clock.monotonic())
        if due_s is None or due_s > self.clock.monotonic():
            return
        with self.transaction(write=True) as tx:
            outcome.reap(self._book(tx))
        self.wake()

    def _earliest(self, again_at_s: float | None) -> float | None:
        with self.transaction(write=False) as tx:
            due_s = tx.next_due_s(self.clock.monotonic())
        return min((at_s for at_s in (again_at_s, due_s) if at_s is not None), default=None)

    def _sleep(self, seen: int, again_at_s: float | None, deadline: Deadline, stopped: Callable[[], bool]) -> None:
        left_s = None if again_at_s is None else max(0.0, again_at_s - self.clock.monotonic())
        pause = Deadline(deadline.remaining(at_most=left_s), self.clock)
        with self._condition:
            pause.wait_for(self._condition, lambda: self._generation != seen or self._closed or stopped())
        self.ensure_open()
