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
    Cancelled,
    ClosedError,
    DeadlineExceeded,
    IntegrityError,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    PeerLost,
)
from moonrelay.handle import StageHandle
from moonrelay.orchestrator.program import Outcome, StageProgram, Work
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.job import Job
from moonrelay.queueing.worker import Worker

logger = logging.getLogger(__name__)

#: How often an idle worker looks whether it should stop, in seconds.
IDLE_S = 0.5
#: How long a job's input may take to be claimed, in seconds: longer than a dead reader's claim lives.
CLAIM_TIMEOUT_S = 30.0

#: The input is gone for good: the stage that made it has to make it again.
_INPUT_GONE = (PeerLost, LeaseLost, LeaseExpired, Aborted, IntegrityError)
#: The job is no longer ours.
_JOB_LOST = (LeaseLost, Cancelled, DeadlineExceeded)


@dataclass(slots=True)
class LoopCounts:
    """What a loop has done so far."""

    completed: int = 0
    failed: int = 0
    lost: int = 0
    rewound: int = 0


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
    ) -> None:
        self._queue = queue
        self._connector = connector
        self._program = program
        self._buffers = buffers
        self._affinity = affinity
        self._worker_id = worker_id
        self._on_registered = on_registered
        self._stop = threading.Event()
        self.counts = LoopCounts()

    def stop(self) -> None:
        """Let `run` return after the job under way."""
        self._stop.set()

    def run(self) -> LoopCounts:
        """Work until stopped. Blocks: until then.

        Raises:
            ClosedError: The queue was closed under the loop.
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
                job = worker.take(timeout_s=IDLE_S)
                if job is not None:
                    self.do(job)
        return self.counts

    def do(self, job: Job) -> None:
        """Do one claimed job; whatever happens, it is settled, or left to the queue because it is lost."""
        try:
            with job:
                self._do(job)
        except _JOB_LOST as exc:
            self.counts.lost += 1
            logger.warning("job %s of %s is no longer ours: %s", job.stage, job.request_id, exc)
        except ClosedError:
            raise
        except MoonrelayError as exc:
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
            try:
                outcome = self._program.process(Work(job, self._connector, claim))
            except _INPUT_GONE as exc:
                if claim is None or job.lost is not None:
                    raise
                # Reading failed for good, or the claim lapsed; the job itself is still ours.
                self._rewind(job, exc)
                return
            job.complete(next_task=outcome.next_task, result=outcome.result)
        except BaseException:
            self._drop(outcome)
            raise
        finally:
            if claim is not None and not job.settled:
                claim.nack()
        self.counts.completed += 1
        if claim is not None:
            self._acknowledge(claim, job)

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
        logger.warning("input of %s %s is gone, it is made again: %s", job.stage, job.request_id, error)
        self.counts.rewound += 1
        job.lost_input(error)

    @staticmethod
    def _acknowledge(claim: PayloadClaim, job: Job) -> None:
        """Consume the input; after this the request no longer needs it, so a failure here is not the job's."""
        try:
            claim.ack()
        except MoonrelayError as exc:
            logger.warning("input of %s %s could not be acknowledged: %s", job.stage, job.request_id, exc)
            claim.nack()

    def _drop(self, outcome: Outcome | None) -> None:
        """Take back what was published for a job that somebody else does now."""
        published: StageHandle | None = outcome.published if outcome is not None else None
        if published is None:
            return
        try:
            self._connector.release(published)
        except MoonrelayError as exc:
            logger.warning("result of %s stays until its lease ends: %s", published.request_id, exc)
