"""What a queue shows of itself: requests, stages, workers and events, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moonrelay.queueing.states import State
from moonrelay.queueing.task import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request as it stands.

    Attributes:
        request_id: The request.
        state: ``queued``, ``running``, or one of the ends ``done``, ``failed``, ``cancelled``, ``dead``.
        stage: Where it is, or where it ended.
        priority: Its class.
        attempt: Deliveries of this stage's work so far.
        worker: Who works on it; ``None`` while nobody does.
        token: Fencing token of the present claim; 0 while there is none.
        fraction: Progress within the stage, 0 to 1.
        note: The worker's last note.
        error_code: Code of the last failure, also of one that is being retried; ``None`` when there was none.
        error_message: Its message.
        submitted_at_s: Monotonic seconds (of this boot) of the submission.
        updated_at_s: Monotonic seconds of the last change.
        deadline_in_s: Seconds left until its deadline; ``None`` without one, or once ended.
    """

    request_id: str
    state: State
    stage: str
    priority: Priority
    attempt: int
    worker: str | None
    token: int
    fraction: float
    note: str
    error_code: str | None
    error_message: str | None
    submitted_at_s: float
    updated_at_s: float
    deadline_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One registered worker."""

    worker_id: str
    stage: str
    slots: int
    buffers: int
    affinity: Mapping[str, str]
    running: int
    lease_left_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """One stage's load.

    Attributes:
        queued: Requests that wait here.
        queued_by_priority: The same by class.
        running: Requests being worked on here.
        workers: Live workers.
        slots: Their compute slots.
        credits_total: Buffer slots that they advertise for results not yet taken.
        credits_held: Of these, held by admitted jobs upstream and by results that wait here. May exceed the total
            after a worker died.
        credits_free: What is left, never negative.
        no_credit: This is an admission stage with waiting work and no free credit downstream (`NoCredit`).
    """

    queued: int
    queued_by_priority: Mapping[Priority, int]
    running: int
    workers: int
    slots: int
    credits_total: int
    credits_held: int
    credits_free: int
    no_credit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """The whole queue's load.

    Attributes:
        stages: By name, in the pipeline's order.
        workers: All live workers.
        active: Requests under way.
        ended: Ended requests that are still kept, by state.
        last_event: Number of the newest event.
    """

    stages: Mapping[str, StageStats]
    workers: tuple[WorkerView, ...]
    active: int
    ended: Mapping[State, int]
    last_event: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEvent:
    """Something that happened, for a live display.

    Attributes:
        number: Grows by one with each event; a gap after ``since`` means that older ones were dropped.
        at_s: Monotonic seconds of this boot.
        kind: ``submitted``, ``claimed``, ``progress``, ``completed`` (a stage), ``retry``, ``redelivered``,
            ``returned``, ``rewound``, ``asked_to_yield`` (to a waiting request), ``preempted`` (left for it), ``done``,
            ``failed``, ``cancelled``, ``dead``, ``forgotten``, ``worker_joined``, ``worker_left``, ``worker_lost``.
        request_id: Empty for a worker's event.
        stage: Where it happened.
        attempt: Of the stage's work.
        worker: Who was concerned; empty when nobody.
        fraction: Of a ``progress`` event, else 0.
        note: The worker's note, or the error's code and message.
    """

    number: int
    at_s: float
    kind: str
    request_id: str
    stage: str
    attempt: int
    worker: str
    fraction: float
    note: str
