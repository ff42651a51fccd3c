"""Job: a claimed task in a worker's hands, until it is settled once.

Owns the fencing token of one claim. Everything that it sends carries the token; after the claim is lost it changes
nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from moonrelay.clock import Deadline
from moonrelay.errors import Cancelled, ConfigError, DeadlineExceeded, LeaseLost, MoonrelayError
from moonrelay.handle import StageHandle
from moonrelay.queueing import codec
from moonrelay.queueing.delivery import Delivery
from moonrelay.queueing.ports import WorkerPort
from moonrelay.queueing.task import Plain, StageTask

logger = logging.getLogger(__name__)


class NoJob:
    """What a claim gives when nothing came: false, and ``None`` inside ``with``."""

    __slots__ = ()

    def __bool__(self) -> Literal[False]:
        return False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __repr__(self) -> str:
        return "<no job>"


#: The one `NoJob`.
NO_JOB = NoJob()


class Job:
    """A task that this worker holds.

    As a context manager: leaving by an exception fails the job with it (`Exception`) or gives it back
    (`KeyboardInterrupt` and its like, which concern the worker); leaving without having settled it gives it back. When
    the claim was lost meanwhile, the exception on its way passes unchanged, and without one the loss is raised.

    The claim is renewed by the worker's heartbeat for as long as the process lives and this object is alive.

    Attributes:
        task: As submitted, with ``attempt`` set; ``deadline_s`` is what was left of it at the claim.
        token: Fencing token; grows with every claim of the queue.

    Threads: any; it is settled once.
    """

    def __init__(self, port: WorkerPort, delivery: Delivery, on_settled: threading.Condition, worker_id: str) -> None:
        self._port = port
        self._delivery = delivery
        self._condition = on_settled
        self._lost: MoonrelayError | None = None
        self._settled: str | None = None
        self._willing = False
        self._yield_to = ""
        self.worker_id = worker_id
        self.token = delivery.request.token
        self.task = _task_of(delivery)

    def __repr__(self) -> str:
        return f"<Job {self.request_id} {self.stage} attempt {self.attempt} token {self.token}>"

    @property
    def request_id(self) -> str:
        return self._delivery.request.request_id

    @property
    def stage(self) -> str:
        return self._delivery.request.stage

    @property
    def attempt(self) -> int:
        """Which delivery of this stage's work this is; 1 is the first."""
        return self._delivery.stage.attempt

    @property
    def reached(self) -> float:
        """How far earlier attempts of this stage's work had come, 0 to 1; 0 for a first one."""
        return codec.reached(self._delivery.request.error, self.stage)

    @property
    def cancelled(self) -> bool:
        """Whether the worker has been told that the request was cancelled."""
        return isinstance(self.lost, Cancelled)

    @property
    def lost(self) -> MoonrelayError | None:
        """Why the claim is no longer ours; ``None`` as far as is known."""
        with self._condition:
            return self._lost

    @property
    def settled(self) -> bool:
        """Whether the job was completed, failed, given back or lost."""
        with self._condition:
            return self._settled is not None

    @property
    def yield_to(self) -> str:
        """The waiting request for which the job should be left at its next boundary, as last heard; empty for none."""
        with self._condition:
            return self._yield_to

    def offer(self, willing: bool) -> None:
        """Say whether the job may be asked to make way for a waiting one; it may not until this is called. Cheap.

        The queue is told with the next renewal or progress, and its answer is `yield_to`; see `QueueConfig.preempt`.
        """
        with self._condition:
            self._willing = willing

    def hear(self) -> None:
        """Ask whether the job is to make way, if it was offered; called with each renewal.

        Blocks: for the queue's answer. Trouble with it is logged, and the next renewal asks again.
        """
        with self._condition:
            willing, before = self._willing, self._yield_to
            if self._settled is not None or self._lost is not None or not (willing or before):
                return
        try:
            wanted = self._port.make_way(self.request_id, self.token, willing=willing)
        except MoonrelayError as exc:
            logger.debug("not heard whether %r is to make way: %s", self, exc)
            return
        with self._condition:
            self._yield_to = wanted

    def check(self) -> None:
        """Raise if the claim is known to be lost; cheap, for the inner loop of a long job.

        Raises:
            Cancelled: The request was cancelled.
            DeadlineExceeded: Its deadline passed.
            LeaseLost: It was given to another worker, or has ended.
        """
        lost = self.lost
        if lost is not None:
            raise _fresh(lost)

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the claim is lost or the job settled; for a host that stops its work from another thread.

        Blocks: until then, or ``timeout_s``.

        Returns:
            Whether the claim is lost.
        """
        deadline = Deadline(timeout_s, self._port.clock)
        with self._condition:
            deadline.wait_for(self._condition, lambda: self._lost is not None or self._settled is not None)
            return self._lost is not None

    def complete(self, *, next_task: StageTask | None = None, result: Plain = None) -> None:
        """Finish this stage's work: queue the next stage's task, or end the request with ``result``.

        Args:
            next_task: Work of a later stage; ``request_id`` may be left out.
            result: What `StageQueue.result` returns; plain.

        Raises:
            ConfigError: Both were given, or one is not fit; the job stays as it was and may be settled again.
            LeaseLost, Cancelled, DeadlineExceeded: The claim is lost; nothing was changed.
        """
        if next_task is None:
            self._settle("completed", lambda: self._port.finish(self.request_id, self.token, result))
            return
        if result is not None:
            raise ConfigError("give next_task or result, not both", field="result")
        if next_task.request_id not in (None, self.request_id):
            message = f"next_task.request_id={next_task.request_id!r} is not this job's {self.request_id!r}"
            raise ConfigError(message, field="next_task.request_id")
        task = replace(next_task, request_id=self.request_id)
        self._settle("advanced", lambda: self._port.advance(self.request_id, self.token, task))

    def fail(self, error: BaseException, *, retryable: bool | None = None) -> None:
        """Report a failure: the task is delivered again if it is retryable and attempts are left.

        Args:
            error: What went wrong. A foreign exception counts as retryable unless its class says that program or input
                are wrong.
            retryable: Overrides the error's own flag.

        Raises:
            LeaseLost, Cancelled, DeadlineExceeded: The claim is lost; nothing was changed.
        """
        own = error if isinstance(error, MoonrelayError) else codec.foreign(error)
        again = own.retryable if retryable is None else retryable
        self._settle("failed", lambda: self._port.fail(self.request_id, self.token, own, again))

    def give_back(self, note: str = "") -> None:
        """Return the job unfinished, for any worker to take; the attempt counts. Raises as `fail` does."""
        self._settle("given back", lambda: self._port.give_back(self.request_id, self.token, note))

    def leave(self, note: str = "") -> None:
        """Return the job unfinished with its work so far kept, for any worker to go on; it is no attempt of its bound.

        Raises as `fail` does.
        """
        self._settle("left", lambda: self._port.give_back(self.request_id, self.token, note, counts=False))

    def lost_input(self, error: BaseException) -> None:
        """Report that the payload behind ``task.handle`` is gone or wrong, so that it must be made again.

        The request goes back to the stage that completed with this task, within that stage's attempts; this stage's
        attempt is not counted. Raises as `fail` does.
        """
        own = error if isinstance(error, MoonrelayError) else codec.foreign(error)
        self._settle("rewound", lambda: self._port.lose_input(self.request_id, self.token, own))

    def progress(self, fraction: float, note: str = "") -> None:
        """Show how far the job is, and renew the claim.

        Args:
            fraction: 0 to 1.
            note: A short text, cut at 200 characters.

        Raises:
            ConfigError: ``fraction`` is out of range.
            LeaseLost, Cancelled, DeadlineExceeded: The claim is lost; nothing was changed.
        """
        if not 0.0 <= fraction <= 1.0:
            message = f"fraction={fraction!r} must be between 0 and 1"
            raise ConfigError(message, field="fraction")
        self._ensure_open()
        try:
            self._port.progress(self.request_id, self.token, float(fraction), note[:200])
        except MoonrelayError as exc:
            if _is_loss(exc):
                self.mark_lost(exc)
            raise
        self.hear()

    def mark_lost(self, reason: MoonrelayError) -> None:
        """Note that the claim is lost; called by the worker after a renewal."""
        with self._condition:
            if self._settled is None and self._lost is None:
                self._lost = reason
                logger.warning("claim lost: %s (request_id=%s stage=%s)", reason, self.request_id, self.stage)
            self._condition.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.settled:
            return
        if error is None:
            self.give_back("left without completing")
        else:
            self._leave_by(error)

    def _leave_by(self, error: BaseException) -> None:
        try:
            if isinstance(error, Exception):
                self.fail(error)
            else:
                self.give_back(f"the worker stops: {type(error).__name__}")
        except MoonrelayError as exc:
            # The caller's own exception matters more; the queue heals what could not be told it by the lease.
            self._close(exc)
            logger.warning("could not settle %r: %s", self, exc)

    def _settle(self, how: str, act: Callable[[], object]) -> None:
        self._ensure_open()
        try:
            act()
        except MoonrelayError as exc:
            if _is_loss(exc):
                self._close(exc)
            raise
        with self._condition:
            self._settled = how
            self._condition.notify_all()

    def _ensure_open(self) -> None:
        with self._condition:
            lost, settled = self._lost, self._settled
        if settled is not None:
            message = f"the job was {settled} already"
            raise LeaseLost(message, request_id=self.request_id, stage=self.stage)
        if lost is not None:
            self._close(lost)
            raise _fresh(lost)

    def _close(self, error: MoonrelayError) -> None:
        with self._condition:
            self._lost = self._lost or error
            self._settled = self._settled or f"lost ({error.code})"
            self._condition.notify_all()


def _is_loss(error: MoonrelayError) -> bool:
    """Tell a lost claim from a call that did not get through; only the first ends the job."""
    return isinstance(error, (LeaseLost, Cancelled)) or (
        isinstance(error, DeadlineExceeded) and error.context.get("token") is not None
    )


def _fresh(error: MoonrelayError) -> MoonrelayError:
    """Return an equal error without a traceback of its own, so that one reason can be raised many times."""
    return type(error)(error.message, **error.context)


def _task_of(delivery: Delivery) -> StageTask:
    row, stored = delivery.request, delivery.stage
    handle: StageHandle | bytes | None = stored.handle
    if stored.handle is not None and stored.handle_kind == "handle":
        handle = StageHandle.from_bytes(stored.handle)
    return StageTask(
        stage=row.stage,
        request_id=row.request_id,
        payload=codec.unpack_plain(stored.payload),
        handle=handle,
        priority=row.priority,
        deadline_s=delivery.deadline_in_s or None,
        affinity=dict(stored.affinity) or None,
        attempt=stored.attempt,
        max_attempts=stored.max_attempts,
    )
