"""The worker loop: take a job, claim its input, run the program, settle the job, acknowledge the input.

Owns the order of these steps, which is what makes a worker's death harmless: the next task is queued before the input
is acknowledged, and everything is fenced by the job's token and the claim's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moonrelay.connector import DiffusionConnector, PayloadClaim
from moonrelay.errors import (
    Aborted,
    ClosedError,
    InputLost,
    IntegrityError,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    Preempted,
)
from moonrelay.handle import StageHandle
from moonrelay.orchestrator.program import Outcome, StageProgram, Work
from moonrelay.orchestrator.yielding import Yielding
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.job import Job
from moonrelay.queueing.worker import Worker

logger = logging.getLogger(__name__)

#: How often an idle worker looks whether it should stop, in seconds.
IDLE_S = 0.5
#: How long a job's input may take to be claimed, in seconds: longer than a dead reader's claim lives.
CLAIM_TIMEOUT_S = 30.0
#: How long telling a producer that its payload is needed no more may take, in seconds; its lease ends by itself too.
RELEASE_TIMEOUT_S = 5.0

#: The input is gone for good: the stage that made it has to make it again.
_INPUT_GONE = (PeerLost, LeaseLost, LeaseExpired, Aborted, IntegrityError)


@dataclass(slots=True)
class LoopCounts:
    """What a loop has done so far."""

    completed: int = 0
    failed: int = 0
    lost: int = 0
    rewound: int = 0
    left: int = 0


class StageLoop:
    """Runs one program on the jobs of its stage, one at a time.

    Args:
        queue: Where jobs come from.
        connector: How payloads move.
        program: What the stage computes.
        buffers: Credits advertised upstream; see `StageQueue.register_worker`.
        affinity: Labels of this worker.
        worker_id: A name for displays.
        on_registered: Called once by `run` when the worker has joined its pool, with the registration.
        on_idle: Called when nothing came for a while, and after each job; must not raise or block.

    Threads: `run` in one thread; `stop` from any.
    """

    def __init__(
        self,
        queue: StageQueue,
        connector: DiffusionConnector,
        program: StageProgram,
        *,
        buffers: int | None = None,
        affinity: Mapping[str, str] | None = None,
        worker_id: str | None = None,
        on_registered: Callable[[Worker], None] | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self._queue = queue
        self._connector = connector
        self._program = program
        self._buffers = buffers
        self._affinity = affinity
        self._worker_id = worker_id
        self._on_registered = on_registered
        self._on_idle = on_idle
        self._stop = threading.Event()
        self.counts = LoopCounts()

    def stop(self) -> None:
        """Let `run` return after the job under way, which a program may leave earlier; see `Work.leaving`."""
        self._stop.set()

    def run(self) -> LoopCounts:
        """Work until stopped. Blocks: until then.

        Raises:
            ClosedError: The queue or the connector was closed under the loop.
        """
        worker = self._queue.register_worker(
            self._program.stage,
            slots=1,
            buffers=self._buffers,
            affinity=self._affinity,
            worker_id=self._worker_id,
        )
        with worker:
            if self._on_registered is not None:
                self._on_registered(worker)
            while not self._stop.is_set():
                job = self._take(worker)
                if job is not None:
                    self.do(job)
                if self._on_idle is not None:
                    self._on_idle()
        return self.counts

    def _take(self, worker: Worker) -> Job | None:
        try:
            return worker.take(timeout_s=IDLE_S)
        except MoonrelayError as exc:
            if not exc.retryable:
                raise
            logger.warning("the queue gave no answer, it is asked again in %s s: %s", IDLE_S, exc)
            self._stop.wait(IDLE_S)
            return None

    def do(self, job: Job) -> None:
        """Do one claimed job; whatever happens, it is settled, or left to the queue because it is lost.

        Its input is acknowledged when it completed, and given back, or dropped where it is of no use, when it did not.

        Raises:
            ClosedError: Queue or connector were closed under it; the job was given back.
        """
        try:
            with job:
                try:
                    self._do(job)
                except ClosedError as exc:
                    # It is this worker that ends, not the job that is wrong: another one can do it.
                    self._give_back(job, f"the worker stops: {exc}")
                    raise
                except Preempted as exc:
                    self._leave(job, str(exc))
                    self.counts.left += 1
        except ClosedError:
            raise
        except MoonrelayError as exc:
            if job.lost is not None:
                self.counts.lost += 1
                logger.warning("job %s of %s is no longer ours: %s", job.stage, job.request_id, exc)
            else:
                self.counts.failed += 1
                logger.warning("job %s of %s failed: %s", job.stage, job.request_id, exc)
        except Exception:  # the job's outermost frame: `with job` has told the queue, the worker goes on
            self.counts.failed += 1
            logger.exception("job %s of %s failed", job.stage, job.request_id)

    def _do(self, job: Job) -> None:
        claim = self._claim_input(job)
        if claim is None and job.settled:
            return
        outcome: Outcome | None = None
        try:
            outcome = self._program.process(self._work(job, claim))
            job.complete(next_task=outcome.next_task, result=outcome.result)
        except BaseException as exc:
            self._drop(outcome)
            if claim is None:
                if not isinstance(exc, InputLost) or job.lost is not None:
                    raise
                self._rewind(job, exc)
                return
            claim.nack()
            if exc is not claim.failure or not isinstance(exc, _INPUT_GONE) or job.lost is not None:
                raise
            # Reading failed for good, or the claim lapsed; the job itself is still ours.
            self._rewind(job, exc)
            if isinstance(exc, IntegrityError):
                # Its producer still keeps it, and the request has a new one made.
                self._release(claim.handle)
            return
        self.counts.completed += 1
        if outcome.afterwards is not None:
            outcome.afterwards()
        if claim is not None:
            self._acknowledge(claim, job)

    def _work(self, job: Job, claim: PayloadClaim | None) -> Work:
        settings = self._queue.config
        yielding = Yielding(job, settings, self._connector.clock) if settings.preempt else None
        return Work(job, self._connector, claim, self._stop.is_set, yielding)

    def _claim_input(self, job: Job) -> PayloadClaim | None:
        handle = job.task.handle
        if handle is None:
            return None
        try:
            return self._connector.claim(handle, timeout_s=CLAIM_TIMEOUT_S)
        except _INPUT_GONE as exc:
            self._rewind(job, exc)
            return None

    def _rewind(self, job: Job, error: MoonrelayError) -> None:
        job.lost_input(error)
        self.counts.rewound += 1
        logger.warning("input of %s %s is gone, it is made again: %s", job.stage, job.request_id, error)

    def _acknowledge(self, claim: PayloadClaim, job: Job) -> None:
        """Consume the input; after this the request no longer needs it, so a failure here is not the job's."""
        try:
            claim.ack()
        except MoonrelayError as exc:
            logger.warning("input of %s %s could not be acknowledged: %s", job.stage, job.request_id, exc)
            claim.nack()
            if claim.handle.lease.readers == 1:
                # The job is done, by us and nobody else: its input, made for it alone, is needed no more.
                self._release(claim.handle)

    def _drop(self, outcome: Outcome | None) -> None:
        """Take back what was published for a job that somebody else does now."""
        published: StageHandle | None = outcome.published if outcome is not None else None
        if published is not None:
            self._release(published)

    def _release(self, handle: StageHandle) -> None:
        try:
            self._connector.release(handle, timeout_s=RELEASE_TIMEOUT_S)
        except MoonrelayError as exc:
            logger.warning("%s of %s stays until its lease ends: %s", handle.kind, handle.request_id, exc)

    @staticmethod
    def _give_back(job: Job, why: str) -> None:
        try:
            job.give_back(why)
        except MoonrelayError as exc:
            logger.warning("job %s of %s goes back when its lease ends: %s", job.stage, job.request_id, exc)

    @staticmethod
    def _leave(job: Job, why: str) -> None:
        try:
            job.leave(why)
        except MoonrelayError as exc:
            logger.warning("job %s of %s goes back when its lease ends: %s", job.stage, job.request_id, exc)
