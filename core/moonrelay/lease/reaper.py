"""The reaper: one thread that runs jobs when their time has come.

Owns the thread and the order of the jobs. What a job does (expire leases, spill, poll a quarantine) is its owner's; a
job says itself when it wants to run next.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable

from moonrelay.clock import Clock
from moonrelay.errors import ClosedError

logger = logging.getLogger(__name__)

#: A job's work: given the time, return when to run next (on the same clock), or ``None`` to rest until asked.
Work = Callable[[float], float | None]


class Job:
    """A piece of work that the reaper runs when due. Made by `Reaper.job`; rests until `due_by`.

    Threads: any. The work itself never runs twice at the same time.
    """

    __slots__ = ("__weakref__", "_reaper", "name", "work")

    def __init__(self, reaper: Reaper, name: str, work: Work) -> None:
        self._reaper = reaper
        self.name = name
        self.work = work

    def due_by(self, when: float | None) -> None:
        """Run no later than ``when``; a later time than the one known, or ``None``, changes nothing.

        Raises:
            ClosedError: The reaper is closed.
        """
        self._reaper.due_by(self, when)

    def cancel(self) -> None:
        """Run no more. Does not wait for a run that is under way. Idempotent, also after close."""
        self._reaper.cancel(self)


class Reaper:
    """One thread, many jobs (tens, not thousands: a table has one job for all its leases).

    Args:
        clock: Time; the thread waits on it.
        name: Name of the thread.
        on_failure: Told of a job that raised, after it was logged; called on the reaper's thread.
        retry_s: A job that raised runs again after this long (it would otherwise never run again).

    The thread starts with the first job that is due. Threads: any.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        name: str = "moonrelay-reaper",
        on_failure: Callable[[Job, Exception], None] | None = None,
        retry_s: float = 1.0,
    ) -> None:
        self._clock = clock
        self._name = name
        self._on_failure = on_failure
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._due: dict[Job, float] = {}
        self._cancelled: weakref.WeakSet[Job] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._closed = False

    def job(self, name: str, work: Work) -> Job:
        """Make a job; it rests until its ``due_by`` is called."""
        return Job(self, name, work)

    def at(self, when: float, name: str, action: Callable[[], None]) -> Job:
        """Run ``action`` once at ``when``; return the job, to cancel it.

        Raises:
            ClosedError: The reaper is closed.
        """

        def once(_now: float) -> None:
            action()

        job = self.job(name, once)
        job.due_by(when)
        return job

    def close(self) -> None:
        """Stop the thread and wait for it (unless called by a job). Idempotent. Blocks: for the job under way."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def due_by(self, job: Job, when: float | None) -> None:
        """See `Job.due_by`."""
        with self._changed:
            if self._closed:
                message = "the reaper is closed"
                raise ClosedError(message, job=job.name)
            if when is None or job in self._cancelled or self._due.get(job, math.inf) <= when:
                return
            self._due[job] = when
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """See `Job.cancel`."""
        with self._changed:
            self._cancelled.add(job)
            self._due.pop(job, None)

    def _next(self) -> tuple[Job, float] | None:
        """Wait for the next job that is due; ``None`` at the end."""
        with self._changed:
            while not self._closed:
                now = self._clock.monotonic()
                job = min(self._due, key=self._due.__getitem__, default=None)
                if job is None:
                    self._clock.wait(self._changed, None)
                elif self._due[job] > now:
                    self._clock.wait(self._changed, self._due[job] - now)
                else:
                    del self._due[job]
                    return job, now
            return None

    def _run(self) -> None:
        while (found := self._next()) is not None:
            job, now = found
            try:
                again = job.work(now)
            except Exception as exc:  # outermost frame of the thread: the owner is told, other jobs go on
                logger.exception("job %s failed; it runs again in %s s", job.name, self._retry_s)
                again = self._clock.monotonic() + self._retry_s
                self._tell(job, exc)
            if again is not None:
                try:
                    self.due_by(job, again)
                except ClosedError:
                    return

    def _tell(self, job: Job, error: Exception) -> None:
        if self._on_failure is None:
            return
        try:
            self._on_failure(job, error)
        except Exception:  # outermost frame of the thread
            logger.exception("the owner's failure callback failed for job %s", job.name)
