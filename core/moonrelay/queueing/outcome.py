"""What can happen to a claimed job, and to anything that is overdue: the rules of attempts, rewinds and ends.

Owns every step out of ``running``. Pure functions over a `Book`; they check first and write afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moonrelay.errors import Cancelled, ConfigError, DeadlineExceeded, LeaseLost, MoonrelayError, PeerLost, Preempted
from moonrelay.queueing import codec
from moonrelay.queueing.states import ENDED, State, Step, step
from moonrelay.queueing.store import Book, HandleKind, RequestRow, StageRow
from moonrelay.queueing.task import Priority

_DEADLINE = DeadlineExceeded.code


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTask:
    """A `StageTask` ready to be stored."""

    stage: str
    payload: bytes
    handle: bytes | None
    handle_kind: HandleKind
    affinity: dict[str, str]
    attempt: int
    max_attempts: int | None
    priority: Priority | None
    deadline_s: float | None
    fingerprint: bytes


def why_lost(book: Book, request_id: str, token: int) -> MoonrelayError | None:
    """Return why a claim is no longer its holder's, ``None`` while it is."""
    row = book.tx.request(request_id)
    if row is None or row.token != token:
        return LeaseLost("the claim is not yours any more", request_id=request_id, token=token)
    where = {"request_id": request_id, "stage": row.stage, "token": token}
    if row.state == "cancelled":
        return Cancelled("the request was cancelled", **where)
    if row.state == "failed" and row.error is not None and codec.unpack_error(row.error).code == _DEADLINE:
        return DeadlineExceeded("the request's deadline passed", **where)
    if row.state in ENDED:
        return LeaseLost("the request has ended", state=row.state, **where)
    if row.deadline_at_s is not None and row.deadline_at_s <= book.now_s:
        return DeadlineExceeded("the request's deadline passed", **where)
    if row.state != "running" or row.lease_until_s is None or row.lease_until_s <= book.now_s:
        return LeaseLost("the claim was not renewed in time and went back to the queue", **where)
    return None


def fence(book: Book, request_id: str, token: int) -> tuple[RequestRow, StageRow]:
    """Return the rows of a job that still holds its claim.

    Raises:
        LeaseLost: The claim lapsed, was given away, or the request ended.
        Cancelled: The request was cancelled while this claim held it.
        DeadlineExceeded: Its deadline passed while this claim held it.
    """
    lost = why_lost(book, request_id, token)
    if lost is not None:
        raise lost
    row = book.tx.request(request_id)
    if row is None:
        raise LeaseLost("the request is gone", request_id=request_id)
    return row, stage_row(book, row)


def stage_row(book: Book, row: RequestRow) -> StageRow:
    """Return the row of the stage where a request is."""
    found = book.tx.stage(row.request_id, row.stage)
    if found is None:
        message = f"request {row.request_id!r} has no task for stage {row.stage!r}"
        raise MoonrelayError(message, request_id=row.request_id, stage=row.stage)
    return found


def advance(book: Book, request_id: str, token: int, task: PackedTask) -> None:
    """Complete a stage and queue the next one's task."""
    row, done = fence(book, request_id, token)
    if book.pipeline.position(task.stage) <= book.pipeline.position(row.stage):
        message = f"next_task.stage={task.stage!r} must come after {row.stage!r} in {book.pipeline!r}"
        raise ConfigError(message, field="next_task.stage")
    before = book.tx.stage(request_id, task.stage)
    deadlines = [row.deadline_at_s, None if task.deadline_s is None else book.now_s + task.deadline_s]
    book.tell("completed", row, attempt=done.attempt, worker=row.worker or "")
    book.tx.put_stage(
        StageRow(
            request_id=request_id,
            stage=task.stage,
            made_by=row.stage,
            payload=task.payload,
            handle=task.handle,
            handle_kind=task.handle_kind,
            affinity=task.affinity,
            attempt=max(task.attempt, before.attempt if before else 0),
            spent=before.spent if before else 0,
            yields=before.yields if before else 0,
            max_attempts=task.max_attempts or book.config.max_attempts,
        )
    )
    moved = replace(
        row,
        stage=task.stage,
        priority=task.priority or row.priority,
        affinity=task.affinity,
        error=None,
        deadline_at_s=min((at for at in deadlines if at is not None), default=None),
    )
    _queue(book, moved, "advance")


def finish(book: Book, request_id: str, token: int, result: bytes) -> None:
    """Complete a request with its result."""
    row, done = fence(book, request_id, token)
    book.tell("completed", row, attempt=done.attempt, worker=row.worker or "")
    end(book, replace(row, result=result, error=None, fraction=1.0), "finish", "done", attempt=done.attempt)


def fail(book: Book, request_id: str, token: int, error: MoonrelayError, retryable: bool) -> State:
    """Report a job's failure: again within its bound when retryable, else the request ends."""
    row, job = fence(book, request_id, token)
    if not retryable:
        _fail(book, row, job, error)
        return "failed"
    delay_s = min(book.config.retry_delay_max_s, book.config.retry_delay_s * 2.0 ** (job.spent - 1))
    return _again(book, row, job, error, "retry", delay_s)


def give_back(book: Book, request_id: str, token: int, note: str, *, counts: bool = True) -> State:
    """Return a job unfinished (nack); the attempt counts unless the work so far is kept for the next one."""
    row, job = fence(book, request_id, token)
    if not counts:
        job = replace(job, spent=max(0, job.spent - 1), yields=job.yields + (1 if row.yield_to else 0))
        book.tx.put_stage(job)
        if row.yield_to:
            return _made_way(book, row, job, note)
    return hand_back(book, row, job, note)


def _made_way(book: Book, row: RequestRow, job: StageRow, note: str) -> State:
    """Queue a row again that was left for a waiting request, and have that one's class served next."""
    asker = book.tx.request(row.yield_to)
    if asker is not None and asker.state == "queued" and asker.stage == row.stage:
        book.tx.put_passes(row.stage, {**book.tx.passes(row.stage), asker.priority: 0})
    error = Preempted(f"made way for {row.yield_to}: {note or 'no word of how far it came'}", worker=row.worker)
    return _again(book, row, job, error, "preempted", 0.0)


def hand_back(book: Book, row: RequestRow, job: StageRow, note: str) -> State:
    """Queue a running row again because its worker returned it."""
    error = MoonrelayError(f"the worker gave the job back: {note or 'no reason given'}", worker=row.worker)
    error.retryable = True
    return _again(book, row, job, error, "returned", 0.0)


def lose_input(book: Book, request_id: str, token: int, error: MoonrelayError) -> State:
    """Send a request back to the stage that made this job's input, because the input is gone.

    The attempt does not count against this stage, but against the earlier one. Without an earlier stage the request
    fails; with the earlier one's attempts used up it is dead.
    """
    row, job = fence(book, request_id, token)
    maker = None if job.made_by is None else book.tx.stage(request_id, job.made_by)
    if maker is None:
        _fail(book, row, job, error)
        return "failed"
    if maker.spent >= maker.max_attempts:
        _bury(book, row, job, error, note=f"{maker.stage} has used its {maker.max_attempts} attempts up")
        return "dead"
    book.tx.put_stage(replace(job, spent=job.spent - 1))
    book.tell("rewound", row, attempt=job.attempt, worker=row.worker or "", note=_note(error))
    packed = codec.pack_error(error, stage=row.stage, attempt=job.attempt)
    return _queue(book, replace(row, stage=maker.stage, affinity=maker.affinity, error=packed), "rewind")


def progress(book: Book, request_id: str, token: int, fraction: float, note: str) -> None:
    """Note how far a job is, and renew its claim."""
    row, job = fence(book, request_id, token)
    until = book.now_s + book.config.lease_s
    book.tx.put_request(
        replace(
            row,
            fraction=fraction,
            note=note,
            lease_until_s=max(until, row.lease_until_s or until),
            updated_at_s=book.now_s,
        )
    )
    book.tell("progress", row, attempt=job.attempt, worker=row.worker or "", fraction=fraction, note=note)


def reap(book: Book) -> None:
    """Deal with everything overdue: deadlines, claims that were not renewed, workers that are gone."""
    for row in book.tx.overdue(book.now_s):
        job = stage_row(book, row)
        if row.deadline_at_s is not None and row.deadline_at_s <= book.now_s:
            _fail(book, row, job, DeadlineExceeded(f"the request's deadline passed while {row.state} at {row.stage}"))
        else:
            error = PeerLost(f"worker {row.worker} stopped renewing its claim", worker=row.worker)
            _again(book, row, job, error, "redelivered", 0.0)
    for worker in book.tx.workers():
        if worker.lease_until_s <= book.now_s:
            book.tx.drop_worker(worker.worker_id)
            book.tell_worker("worker_lost", worker)


def end(book: Book, row: RequestRow, what: Step, kind: str, *, attempt: int, note: str = "") -> None:
    """Move a request to an end, and drop the oldest ended ones beyond the bound."""
    worker = row.worker or ""
    book.tx.put_request(
        replace(
            row,
            state=step(row.state, what),
            worker=None,
            lease_until_s=None,
            updated_at_s=book.now_s,
            yield_to="",
            ended=book.tx.next("end"),
        )
    )
    book.tell(kind, row, attempt=attempt, worker=worker, note=note)
    for request_id in book.tx.surplus(book.config.keep_ended):
        book.tx.drop_request(request_id)


def _again(book: Book, row: RequestRow, job: StageRow, error: MoonrelayError, kind: str, delay_s: float) -> State:
    if job.spent >= job.max_attempts:
        _bury(book, row, job, error, note=f"{job.spent} of {job.max_attempts} attempts used")
        return "dead"
    book.tell(kind, row, attempt=job.attempt, worker=row.worker or "", note=_note(error))
    # How far it had come outlives the attempt: whoever takes it up again can say what is done twice.
    reached = max(row.fraction, codec.reached(row.error, row.stage))
    packed = codec.pack_error(error, stage=row.stage, attempt=job.attempt, reached=reached)
    return _queue(book, replace(row, error=packed), "retry", delay_s=delay_s)


def _queue(book: Book, row: RequestRow, what: Step, *, delay_s: float = 0.0) -> State:
    after = step(row.state, what)
    book.tx.put_request(
        replace(
            row,
            state=after,
            worker=None,
            lease_until_s=None,
            queued_at_s=book.now_s,
            not_before_s=book.now_s + delay_s,
            updated_at_s=book.now_s,
            fraction=0.0,
            note="",
            yield_to="",
        )
    )
    return after


def _fail(book: Book, row: RequestRow, job: StageRow, error: MoonrelayError) -> None:
    packed = codec.pack_error(error, stage=row.stage, attempt=job.attempt, retryable=error.retryable)
    end(book, replace(row, error=packed), "fail", "failed", attempt=job.attempt, note=_note(error))


def _bury(book: Book, row: RequestRow, job: StageRow, error: MoonrelayError, *, note: str) -> None:
    # To the client the request is over: trying again is a new request, and its own decision.
    packed = codec.pack_error(error, stage=row.stage, attempt=job.attempt, retryable=False)
    end(book, replace(row, error=packed), "bury", "dead", attempt=job.attempt, note=f"{note}; {_note(error)}")


def _note(error: MoonrelayError) -> str:
    return f"{error.code}: {error.message}"[:500]
