"""Worker: a registration in a stage's pool, kept alive by a thread of its own.

Owns the heartbeat and the jobs that this registration holds. Never runs a job.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from moonrelay.clock import Deadline
from moonrelay.errors import Cancelled, ClosedError, DeadlineExceeded, LeaseLost, MoonrelayError
from moonrelay.queueing.job import NO_JOB, Job, NoJob
from moonrelay.queueing.ports import WorkerPort
from moonrelay.queueing.store import WorkerRow

logger = logging.getLogger(__name__)


class Worker:
    """A member of a stage's pool.

    Its registration offers ``buffers`` credits upstream, and is renewed every ``renew_s`` together with the claims of
    its jobs. When the process stops for longer than the lease, the jobs go to others and are marked lost here; the
    registration heals by itself.

    Threads: any; one thread, ``moonrelay-queue-heartbeat-<id>``, is its own.
    """

    def __init__(self, port: WorkerPort, wanted: WorkerRow, *, heartbeat: bool) -> None:
        self._port = port
        self._condition = threading.Condition()
        self._jobs: dict[int, weakref.ref[Job]] = {}
        self._claiming = 0
        self._calls = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._row = port.join(wanted)
        self._renewed_at_s = port.clock.monotonic()
        if heartbeat:
            name = f"moonrelay-queue-heartbeat-{self.worker_id}"
            self._thread = threading.Thread(target=self._beat, name=name, daemon=True)
            self._thread.start()

    def __repr__(self) -> str:
        return f"<Worker {self.worker_id} of {self.stage}>"

    @property
    def worker_id(self) -> str:
        """The unique id, as shown in views and events."""
        return self._row.worker_id

    @property
    def stage(self) -> str:
        return self._row.stage

    @property
    def slots(self) -> int:
        return self._row.slots

    @property
    def buffers(self) -> int:
        return self._row.buffers

    @property
    def affinity(self) -> Mapping[str, str]:
        return dict(self._row.affinity)

    @property
    def held(self) -> tuple[Job, ...]:
        """The jobs that are not settled yet."""
        with self._condition:
            return tuple(self._open_jobs())

    def claim(self, timeout_s: float | None = None) -> Job | NoJob:
        """Take a job, as ``with worker.claim(timeout_s=10) as job:``; ``job`` is ``None`` when nothing came.

        The same as `take`, but with something that ``with`` accepts in the place of ``None``: it is false, so that
        ``if not job`` reads the same in both forms.

        Blocks: until there is a job and a free slot, or ``timeout_s``.

        Raises:
            ClosedError: The worker or its queue was closed.
        """
        return self.take(timeout_s) or NO_JOB

    def take(self, timeout_s: float | None = None) -> Job | None:
        """Take a job; return ``None`` when nothing came in time.

        Blocks: until there is a job and one of the worker's slots is free, or ``timeout_s``.

        Raises:
            ClosedError: The worker or its queue was closed.
        """
        deadline = Deadline(timeout_s, self._port.clock)
        with self._condition:
            free = deadline.wait_for(self._condition, lambda: self._closed or self._has_slot())
            self._ensure_open()
            if not free:
                return None
            self._claiming += 1
        try:
            with self._call():
                return self._take(deadline)
        finally:
            with self._condition:
                self._claiming -= 1
                self._condition.notify_all()

    @property
    def closed(self) -> bool:
        """Whether the worker left the pool."""
        with self._condition:
            return self._closed

    def renew(self) -> None:
        """Renew the registration and the claims now; the heartbeat does this by itself.

        Raises:
            ClosedError: The worker or its queue was closed.
            MoonrelayError: The backend could not be reached; the old lease runs on.
        """
        with self._call():
            with self._condition:
                jobs = {job.request_id: job for job in self._open_jobs() if job.lost is None}
            started_s = self._port.clock.monotonic()
            lost = self._port.renew(self._row, {name: job.token for name, job in jobs.items()})
        with self._condition:
            self._renewed_at_s = started_s
        for name, reason in lost.items():
            if not jobs[name].settled:
                jobs[name].mark_lost(reason)
        for job in jobs.values():
            job.hear()

    def close(self) -> None:
        """Leave the pool: jobs still held go back to the queue, credits are withdrawn, the thread ends. Idempotent."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.notify_all()
        self._port.wake()
        if self._thread is not None:
            self._thread.join()
        # A claim or renewal under way would register the worker again behind our back; each is bounded by the backend.
        quiet = Deadline(self._port.config.busy_timeout_s, self._port.clock)
        with self._condition:
            quiet.wait_for(self._condition, lambda: self._calls == 0)
        try:
            self._port.leave(self._row)
        except MoonrelayError as exc:
            logger.warning("worker %s could not sign off, its lease will end: %s", self.worker_id, exc)
        for job in self.held:
            job.mark_lost(LeaseLost("the worker was closed", request_id=job.request_id, token=job.token))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, deadline: Deadline) -> Job | None:
        while True:
            delivery = self._port.claim(self._row, deadline, lambda: self._closed)
            if delivery is None:
                with self._condition:
                    self._ensure_open()
                return None
            row = delivery.request
            try:
                job = Job(self._port, delivery, self._condition, self.worker_id)
            except MoonrelayError as exc:
                # The handle cannot be read here (another version, or damaged); another worker may be able to.
                logger.warning("cannot read the task of %s: %s", row.request_id, exc)
                with suppress(LeaseLost, Cancelled, DeadlineExceeded):  # then it is not ours to fail any more
                    self._port.fail(row.request_id, row.token, exc, True)
                continue
            with self._condition:
                self._jobs[row.token] = weakref.ref(job)
            return job

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Count a call to the backend that may register the worker again; none begins once it is closed."""
        with self._condition:
            self._ensure_open()
            self._calls += 1
        try:
            yield
        finally:
            with self._condition:
                self._calls -= 1
                self._condition.notify_all()

    def _has_slot(self) -> bool:
        return sum(1 for _ in self._open_jobs()) + self._claiming < self._row.slots

    def _open_jobs(self) -> list[Job]:
        """Return unsettled jobs, dropping those that are settled or were let go of; the lock must be held."""
        found: list[Job] = []
        for token, reference in list(self._jobs.items()):
            job = reference()
            if job is None or job.settled:
                del self._jobs[token]
            else:
                found.append(job)
        return found

    def _ensure_open(self) -> None:
        if self._failure is not None:
            message = f"worker {self.worker_id} lost its heartbeat: {self._failure}"
            raise ClosedError(message, worker=self.worker_id) from self._failure
        if self._closed:
            message = f"worker {self.worker_id} was closed"
            raise ClosedError(message, worker=self.worker_id)

    def _beat(self) -> None:
        try:
            self._renew_until_closed()
        except Exception as exc:  # the thread's outermost frame
            logger.exception("heartbeat of %s ended", self.worker_id)
            with self._condition:
                self._failure = exc
                jobs = self._open_jobs()
                self._condition.notify_all()
            for job in jobs:
                job.mark_lost(LeaseLost(f"the heartbeat ended: {exc}", request_id=job.request_id, token=job.token))

    def _renew_until_closed(self) -> None:
        pause_s = self._port.config.renew_s
        while True:
            deadline = Deadline(pause_s, self._port.clock)
            with self._condition:
                if deadline.wait_for(self._condition, lambda: self._closed):
                    return
            try:
                self.renew()
            except ClosedError:
                return
            except MoonrelayError as exc:
                logger.warning("worker %s could not renew, trying again: %s", self.worker_id, exc)
                self._fence_myself(exc)

    def _fence_myself(self, error: MoonrelayError) -> None:
        """Give jobs up whose lease must have ended by now, since nobody could be told otherwise."""
        with self._condition:
            age_s = self._port.clock.monotonic() - self._renewed_at_s
            jobs = self._open_jobs() if age_s >= self._port.config.lease_s else []
        for job in jobs:
            job.mark_lost(LeaseLost(f"not renewed in time: {error}", request_id=job.request_id, token=job.token))
