"""What a backend stores: rows, and a transaction over them.

Owns the shape of the state. A backend implements `Transaction` and nothing else of the rules: every decision is taken
by the pure functions of `intake`, `delivery`, `outcome` and `report`, so that two backends cannot differ. Times are
seconds on the one clock that all users of a queue share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from moonrelay.queueing.fairness import Passes
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.states import State
from moonrelay.queueing.task import Pipeline, Priority
from moonrelay.queueing.views import QueueEvent

HandleKind: TypeAlias = Literal["none", "bytes", "handle"]
Counter: TypeAlias = Literal["request", "token", "worker", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """A request: where it is, and who has it.

    ``token`` is that of the last claim, also after it ended. ``ended`` is 0 while under way, then the order of ending.
    ``fingerprint`` is the digest of the first task as submitted. ``yield_to`` is the waiting request that a running job
    was asked to make way for, empty for none.
    """

    request_id: str
    number: int
    fingerprint: bytes
    state: State
    stage: str
    priority: Priority
    affinity: Mapping[str, str]
    queued_at_s: float
    not_before_s: float
    submitted_at_s: float
    updated_at_s: float
    deadline_at_s: float | None
    token: int = 0
    worker: str | None = None
    lease_until_s: float | None = None
    fraction: float = 0.0
    note: str = ""
    result: bytes | None = None
    error: bytes | None = None
    ended: int = 0
    reported: bool = False
    yield_to: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage's task of one request, as it was submitted, with its count of attempts.

    ``made_by`` is the stage whose completion made the task, ``None`` for the first. ``attempt`` counts deliveries,
    ``spent`` those that count against ``max_attempts``, ``yields`` those that made way for another request.
    """

    request_id: str
    stage: str
    made_by: str | None
    payload: bytes
    handle: bytes | None
    handle_kind: HandleKind
    affinity: Mapping[str, str]
    attempt: int
    spent: int
    max_attempts: int
    yields: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRow:
    """A registered worker, alive until ``lease_until_s``."""

    worker_id: str
    stage: str
    slots: int
    buffers: int
    affinity: Mapping[str, str] = field(default_factory=dict)
    lease_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """How many requests of one kind there are."""

    stage: str
    state: State
    priority: Priority
    number: int


class Transaction(ABC):
    """Atomic access to one queue's rows. Reads see this transaction's own writes.

    Rules check before they write: what raises a `MoonrelayError` has written nothing.
    """

    @abstractmethod
    def request(self, request_id: str) -> RequestRow | None:
        """Return a request's row."""

    @abstractmethod
    def requests(self) -> Iterable[RequestRow]:
        """Return all rows in order of ``number``."""

    @abstractmethod
    def put_request(self, row: RequestRow) -> None:
        """Insert or replace."""

    @abstractmethod
    def drop_request(self, request_id: str) -> None:
        """Remove a request with its stage rows."""

    @abstractmethod
    def queued(self, stage: str, priority: Priority) -> Iterable[RequestRow]:
        """Return queued rows in order of ``number``; read lazily."""

    @abstractmethod
    def running_by(self, worker_id: str) -> list[RequestRow]:
        """Return the running rows that a worker holds, in order of ``number``."""

    @abstractmethod
    def counts(self) -> list[Count]:
        """Return how many requests there are by stage, state and priority."""

    @abstractmethod
    def count(self, stage: str, state: State) -> int:
        """Return how many requests of a stage are in ``state``."""

    @abstractmethod
    def active(self) -> int:
        """Return how many requests are queued or running."""

    @abstractmethod
    def overdue(self, now_s: float) -> list[RequestRow]:
        """Return active rows whose deadline, or whose claim's lease, is not after ``now_s``; in order of ``number``."""

    @abstractmethod
    def next_due_s(self, now_s: float) -> float | None:
        """Return the earliest deadline of an active request, lease of a running one or of a worker, or ``not_before_s``
        above ``now_s`` of a queued one."""

    @abstractmethod
    def surplus(self, keep: int) -> list[str]:
        """Return the ended requests beyond ``keep``, those whose outcome was read first, then by order of ending."""

    @abstractmethod
    def stage(self, request_id: str, stage: str) -> StageRow | None:
        """Return one stage's row."""

    @abstractmethod
    def put_stage(self, row: StageRow) -> None:
        """Insert or replace."""

    @abstractmethod
    def workers(self, stage: str | None = None) -> list[WorkerRow]:
        """Return the workers of a stage, or all, in order of joining."""

    @abstractmethod
    def worker(self, worker_id: str) -> WorkerRow | None:
        """Return one worker."""

    @abstractmethod
    def put_worker(self, row: WorkerRow) -> None:
        """Insert or replace."""

    @abstractmethod
    def drop_worker(self, worker_id: str) -> None:
        """Remove."""

    @abstractmethod
    def passes(self, stage: str) -> Passes:
        """Return the state of fair choice of a stage."""

    @abstractmethod
    def put_passes(self, stage: str, passes: Passes) -> None:
        """Replace it."""

    @abstractmethod
    def next(self, counter: Counter) -> int:
        """Return the next number of a counter, 1 first; a number is never given twice."""

    @abstractmethod
    def append_event(self, event: QueueEvent, keep: int) -> None:
        """Append with the next event number (``event.number`` is ignored), and drop the oldest beyond ``keep``."""

    @abstractmethod
    def events(self, since: int, limit: int) -> list[QueueEvent]:
        """Return at most ``limit`` events with a number above ``since``, oldest first."""

    @abstractmethod
    def last_event(self) -> int:
        """Return the newest event's number, 0 when there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """What a rule works on: a transaction, the time, the pipeline and the settings."""

    tx: Transaction
    now_s: float
    pipeline: Pipeline
    config: QueueConfig

    def tell(
        self, kind: str, row: RequestRow, *, attempt: int = 0, worker: str = "", fraction: float = 0.0, note: str = ""
    ) -> None:
        """Append an event about a request."""
        self._append(kind, row.request_id, row.stage, attempt, worker, fraction, note)

    def tell_worker(self, kind: str, worker: WorkerRow) -> None:
        """Append an event about a worker."""
        self._append(kind, "", worker.stage, 0, worker.worker_id, 0.0, "")

    def _append(
        self, kind: str, request_id: str, stage: str, attempt: int, worker: str, fraction: float, note: str
    ) -> None:
        event = QueueEvent(
            number=0,
            at_s=self.now_s,
            kind=kind,
            request_id=request_id,
            stage=stage,
            attempt=attempt,
            worker=worker,
            fraction=fraction,
            note=note,
        )
        self.tx.append_event(event, self.config.keep_events)
