"""What a stage does with one job: the seam between the worker loop and an adapter.

Owns the protocol only. The loop claims, settles and acknowledges; the program computes, reads its input and publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from moonrelay.connector import DiffusionConnector, PayloadClaim
from moonrelay.errors import ConfigError
from moonrelay.handle import StageHandle
from moonrelay.orchestrator.yielding import Yielding
from moonrelay.queueing.job import Job
from moonrelay.queueing.task import Plain, StageTask

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cache.features import FeatureCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program made of a job: the next stage's task, or the request's result.

    Attributes:
        next_task: Work of the next stage; its ``handle`` is what the program published.
        result: The request's result where it ends here; plain values.
        afterwards: Called once the job is completed, when what the program kept for a second try is needed no more.
            Must not raise or block.
    """

    next_task: StageTask | None = None
    result: Plain = None
    afterwards: Callable[[], None] | None = None

    @property
    def published(self) -> StageHandle | None:
        """The payload that was published for the next stage."""
        handle = self.next_task.handle if self.next_task is not None else None
        return handle if isinstance(handle, StageHandle) else None


@dataclass(frozen=True, slots=True)
class Work:
    """One job in a program's hands.

    Attributes:
        job: The claimed job.
        connector: Where results are published.
        claim: The claimed input, not read yet; ``None`` for a task without a handle. The loop acknowledges it after the
            job was settled, so that a worker that dies loses nothing.
    """

    job: Job
    connector: DiffusionConnector
    claim: PayloadClaim | None
    _asked_to_leave: Callable[[], bool] | None = None
    _yielding: Yielding | None = None

    @property
    def payload(self) -> dict[str, Plain]:
        """The task's plain values.

        Raises:
            ConfigError: They are no mapping.
        """
        payload = self.job.task.payload
        if not isinstance(payload, dict):
            message = f"the task's payload is a {type(payload).__name__}, a mapping of fields is needed"
            raise ConfigError(message, field="payload", request_id=self.job.request_id)
        return payload

    @property
    def input(self) -> PayloadClaim:
        """The claimed input.

        Raises:
            ConfigError: The task has no handle.
        """
        if self.claim is None:
            message = f"a task of stage {self.job.stage!r} needs a handle"
            raise ConfigError(message, field="handle", request_id=self.job.request_id)
        return self.claim

    def report(self, done: int, total: int, note: str = "") -> None:
        """Show progress, and raise when the job is no longer ours (`Cancelled`, `LeaseLost`, `DeadlineExceeded`)."""
        if self._yielding is not None:
            self._yielding.step(done, total)
        self.job.progress(min(1.0, done / max(1, total)), note)

    def stopped(self) -> bool:
        """Whether the job is known to be lost or cancelled; cheap, for the inner loop of a long computation."""
        return self.job.lost is not None

    def leaving(self) -> bool:
        """Whether the job should be left at the next boundary where another worker can go on from.

        A program that can be left there saves its state and raises `Preempted`; others go on to the end. Only a program
        that asks is ever preempted. Cheap.
        """
        if self._yielding is not None and self._yielding.asked():
            return True
        return self._asked_to_leave is not None and self._asked_to_leave()


class StageProgram(Protocol):
    """What one stage computes. Threads: one job at a time."""

    #: The stage's name in the queue's pipeline.
    stage: str

    def process(self, work: Work) -> Outcome:
        """Do one job. Blocks: for as long as it takes.

        Raises:
            MoonrelayError: The job failed; ``retryable`` decides whether it is tried again.
            Preempted: `Work.leaving` said so, and the state is saved: the job goes back to the queue.
            InputLost: A task without a handle named what is kept elsewhere, and it is not there any more: the request
                goes back to the stage before.
        """
        ...


@runtime_checkable
class CachesEmbeddings(Protocol):
    """A program that can take embeddings from a cache; the worker gives it one where that is switched on."""

    def use_embeddings(self, cache: EmbeddingCache) -> None:
        """Use a cache from now on; called before the first job. Blocks: while its keys are made ready.

        The cache is the worker's to close.
        """
        ...


@runtime_checkable
class CachesFeatures(Protocol):
    """A program that can keep features of prompts; the worker gives it a cache where that is asked for."""

    def use_features(self, cache: FeatureCache) -> None:
        """Use a cache from now on; called before the first job. Blocks: while it is seen whether features can be kept.

        The cache is the worker's to close.

        Raises:
            ConfigError: They cannot; the message names why.
        """
        ...


ProgramFactory = Callable[..., StageProgram]
