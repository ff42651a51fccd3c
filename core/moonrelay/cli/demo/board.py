"""What is known of a run: requests, stages, workers and what happened, fed by the queue's events.

Owns the state that display, timeline and summary read. No thread, clock or process of its own: time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

from moonrelay.cli.demo.prompts import DemoPrompt
from moonrelay.queueing.views import QueueEvent

Phase = Literal["waiting", "queued", "running", "done", "failed"]
WorkerPhase = Literal["starting", "ready", "killed", "lost", "ended"]

#: Events that end a delivery without completing it.
_BROKEN_OFF: Final = frozenset(
    {"preempted", "redelivered", "retry", "returned", "rewound", "failed", "cancelled", "dead"}
)


@dataclass(slots=True, kw_only=True)
class Span:
    """One delivery of one stage's work to one worker.

    Attributes:
        worker: The worker's name.
        stage: The stage.
        request_id: The request.
        attempt: Which delivery; 1 is the first.
        started_s: When it was claimed.
        ended_s: When it ended; ``None`` while under way.
        how: How it ended: ``completed``, ``killed``, or the queue's word.
    """

    worker: str
    stage: str
    request_id: str
    attempt: int
    started_s: float
    ended_s: float | None = None
    how: str = ""


@dataclass(slots=True, kw_only=True)
class StageCell:
    """One request in one stage, as shown."""

    phase: Phase = "waiting"
    fraction: float = 0.0
    worker: str = ""
    attempt: int = 0


@dataclass(slots=True, kw_only=True)
class RequestRow:
    """One request, as shown.

    Attributes:
        prompt: What was asked.
        cells: Its stages, by name.
        state: Where the whole request is.
        identical: What the comparison said; ``None`` before it.
        problem: Why it failed.
    """

    prompt: DemoPrompt
    cells: dict[str, StageCell]
    state: Phase = "waiting"
    identical: bool | None = None
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class WorkerRow:
    """One worker process, as shown."""

    name: str
    stage: str
    phase: WorkerPhase = "starting"
    pid: int = 0
    started_s: float = 0.0
    ready_s: float | None = None
    ended_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a worker said of a checkpoint: ``checkpoint_saved``, ``checkpoint_resumed``, ``checkpoint_refused``."""

    what: str
    worker: str
    request_id: str
    step: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something worth a line."""

    at_s: float
    text: str
    grave: bool = False


@dataclass(slots=True)
class Board:
    """The run as it stands.

    Args:
        prompts: What was asked.
        stages: The pipeline's stages, in order.
        started_s: When the run began.
    """

    prompts: tuple[DemoPrompt, ...]
    stages: tuple[str, ...]
    started_s: float
    requests: dict[str, RequestRow] = field(init=False)
    workers: dict[str, WorkerRow] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    undivided_done: int = 0
    undivided_spans: list[Span] = field(default_factory=list)
    _open: dict[str, Span] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = {
            prompt.request_id: RequestRow(prompt=prompt, cells={stage: StageCell() for stage in self.stages})
            for prompt in self.prompts
        }

    def note(self, at_s: float, text: str, *, grave: bool = False) -> None:
        """Add a line."""
        self.notes.append(Note(at_s=at_s, text=text, grave=grave))

    @property
    def finished(self) -> bool:
        """Whether every request has reached an end."""
        return all(row.state in ("done", "failed") for row in self.requests.values())

    def worker_started(self, name: str, stage: str, pid: int, at_s: float) -> None:
        """Take note of a new process."""
        self.workers[name] = WorkerRow(name=name, stage=stage, pid=pid, started_s=at_s)

    def worker_ready(self, name: str, at_s: float) -> None:
        """Take note that a worker takes jobs."""
        worker = self.workers[name]
        worker.phase, worker.ready_s = "ready", at_s
        self.note(at_s, f"{name} is ready (pid {worker.pid}, {at_s - worker.started_s:.1f} s to load)")

    def worker_gone(self, name: str, phase: WorkerPhase, at_s: float) -> None:
        """Take note of a worker's end; a job that it held breaks off here, whenever the queue hears of it."""
        worker = self.workers[name]
        worker.phase, worker.ended_s = phase, at_s
        for span in self._open.values():
            if span.worker == name:
                span.ended_s, span.how = at_s, phase

    def checkpoint(self, worker: str, what: str, request_id: str, step: int, at_s: float) -> None:
        """Take note of what a worker says of a checkpoint."""
        self.marks.append(Mark(what=what, worker=worker, request_id=request_id, step=step, at_s=at_s))
        if what == "checkpoint_resumed":
            self.note(at_s, f"{worker} takes {request_id} up again after step {step}")

    def apply(self, event: QueueEvent) -> None:
        """Take note of what the queue says."""
        row = self.requests.get(event.request_id)
        if row is None:
            return
        cell = row.cells[event.stage]
        if event.kind == "submitted":
            cell.phase = row.state = "queued"
            for stage in self.stages[: self.stages.index(event.stage)]:
                row.cells[stage] = StageCell(phase="done", fraction=1.0, worker="kept")
        elif event.kind == "claimed":
            self._claimed(row, cell, event)
        elif event.kind == "progress":
            cell.fraction = event.fraction
        elif event.kind == "completed":
            self._close(event, "completed")
            cell.phase, cell.fraction = "done", 1.0
            for stage in self.stages[self.stages.index(event.stage) + 1 :][:1]:
                row.cells[stage].phase = "queued"
        elif event.kind == "asked_to_yield":
            self.note(event.at_s, f"{event.request_id} is asked to make way at {event.stage} {event.note}")
        elif event.kind == "done":
            row.state = "done"
        elif event.kind in _BROKEN_OFF:
            self._broken_off(row, cell, event)

    def _claimed(self, row: RequestRow, cell: StageCell, event: QueueEvent) -> None:
        worker = short_name(event.worker)
        span = Span(
            worker=worker,
            stage=event.stage,
            request_id=event.request_id,
            attempt=event.attempt,
            started_s=event.at_s,
        )
        self.spans.append(span)
        self._open[event.request_id] = span
        row.state = cell.phase = "running"
        cell.fraction, cell.worker, cell.attempt = 0.0, worker, event.attempt

    def _broken_off(self, row: RequestRow, cell: StageCell, event: QueueEvent) -> None:
        self._close(event, event.kind)
        reason = event.note.partition("\n")[0]
        if event.kind in ("failed", "cancelled", "dead"):
            row.state = cell.phase = "failed"
            row.problem = reason or event.kind
            self.note(event.at_s, f"{event.request_id} {event.kind} at {event.stage}: {reason}", grave=True)
            return
        cell.phase, cell.fraction = "queued", 0.0
        if event.kind == "rewound":
            at = self.stages.index(event.stage)
            cell.phase = "waiting"
            row.cells[self.stages[max(0, at - 1)]] = StageCell(phase="queued")
        self.note(
            event.at_s,
            f"{event.request_id} {event.kind} at {event.stage} (attempt {event.attempt}): {reason}",
            grave=event.kind != "preempted",
        )

    def _close(self, event: QueueEvent, how: str) -> None:
        span = self._open.pop(event.request_id, None)
        if span is not None and span.ended_s is None:
            span.ended_s, span.how = event.at_s, how


def short_name(worker_id: str) -> str:
    """Return the name that a worker was started with; the queue adds a number to make it unique."""
    name, _, number = worker_id.rpartition("-")
    return name if name and number.isdigit() else worker_id
