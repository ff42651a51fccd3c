"""One thread that does a connector's small jobs on the store in the order in which they were given.

Owns the thread. The order is the contract: a record is written before it is taken away, chunk after chunk.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import MoonrelayError

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class OrderedJobs:
    """Jobs, one after the other, and one that comes again at intervals.

    Args:
        name: Of the thread.
        clock: For the intervals.
        every_s: Pause between two runs of ``again``.
        again: The recurring job; run first thing.

    Threads: `submit`, `flush` and `close` from any. A job that raises is logged, and the next one is done.
    """

    def __init__(self, name: str, clock: Clock, *, every_s: float, again: Job) -> None:
        self._clock = clock
        self._every_s = every_s
        self._again = again
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._busy = False
        self._closed = False
        self._due_s = clock.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"moonrelay-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Let ``job`` be done after those before it; False where the thread has ended. Returns at once."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(job)
            self._changed.notify_all()
            return True

    def flush(self, deadline: Deadline) -> bool:
        """Wait until everything that was submitted is done. Blocks: until ``deadline``; False where it passed."""
        with self._changed:
            return deadline.wait_for(self._changed, lambda: not self._jobs and not self._busy)

    def close(self, deadline: Deadline) -> None:
        """Do what is left, then end. Idempotent. Blocks: until ``deadline``, and for the job under way."""
        done = self.flush(deadline)
        with self._changed:
            self._closed = True
            left = len(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        if not done:
            logger.warning("the store does not answer: %d jobs on the directory are left undone", left)
        if self._thread is not threading.current_thread():
            self._thread.join(deadline.remaining(_JOIN_S) if not done else _JOIN_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._jobs and not self._closed and self._clock.monotonic() < self._due_s:
                    self._clock.wait(self._changed, self._due_s - self._clock.monotonic())
                if self._jobs:
                    job = self._jobs.popleft()
                elif self._closed:
                    return
                else:
                    job = self._again
                    self._due_s = self._clock.monotonic() + self._every_s
                self._busy = True
            try:
                job()
            except MoonrelayError as exc:
                logger.warning("a job on the directory failed: %s", exc)
            except Exception:
                logger.exception("a job on the directory failed")


_JOIN_S = 10.0
