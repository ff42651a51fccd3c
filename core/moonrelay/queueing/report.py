"""What a queue shows: views of requests, stages and workers, made from a `Book`. Reads only."""

from __future__ import annotations

from collections import Counter

from moonrelay.queueing import codec
from moonrelay.queueing.delivery import downstream_account, stage_account
from moonrelay.queueing.states import ENDED, State
from moonrelay.queueing.store import Book, Count, RequestRow
from moonrelay.queueing.task import PRIORITIES
from moonrelay.queueing.views import QueueStats, RequestView, StageStats, WorkerView


def requests(book: Book) -> list[RequestView]:
    """Return a view of every request, in order of submission."""
    return [view(book, row) for row in book.tx.requests()]


def view(book: Book, row: RequestRow) -> RequestView:
    """Return one request's view."""
    job = book.tx.stage(row.request_id, row.stage)
    error = None if row.error is None else codec.unpack_error(row.error)
    timed = row.deadline_at_s is not None and row.state not in ENDED
    return RequestView(
        request_id=row.request_id,
        state=row.state,
        stage=row.stage,
        priority=row.priority,
        attempt=0 if job is None else job.attempt,
        worker=row.worker,
        token=row.token if row.state == "running" else 0,
        fraction=row.fraction,
        note=row.note,
        error_code=None if error is None else error.code,
        error_message=None if error is None else error.message,
        submitted_at_s=row.submitted_at_s,
        updated_at_s=row.updated_at_s,
        deadline_in_s=max(0.0, row.deadline_at_s - book.now_s) if timed and row.deadline_at_s is not None else None,
    )


def stats(book: Book) -> QueueStats:
    """Return the load of the whole queue."""
    counts = book.tx.counts()
    ended: Counter[State] = Counter()
    for count in counts:
        if count.state in ENDED:
            ended[count.state] += count.number
    return QueueStats(
        stages={spec.name: _stage(book, spec.name, counts) for spec in book.pipeline},
        workers=tuple(
            WorkerView(
                worker_id=row.worker_id,
                stage=row.stage,
                slots=row.slots,
                buffers=row.buffers,
                affinity=dict(row.affinity),
                running=len(book.tx.running_by(row.worker_id)),
                lease_left_s=max(0.0, row.lease_until_s - book.now_s),
            )
            for row in book.tx.workers()
        ),
        active=book.tx.active(),
        ended=dict(ended),
        last_event=book.tx.last_event(),
    )


def _stage(book: Book, stage: str, counts: list[Count]) -> StageStats:
    mine = [count for count in counts if count.stage == stage]
    queued = {
        name: sum(count.number for count in mine if count.state == "queued" and count.priority == name)
        for name in PRIORITIES
    }
    waiting = sum(queued.values())
    workers = book.tx.workers(stage)
    own = stage_account(book, stage)
    below = downstream_account(book, stage)
    return StageStats(
        queued=waiting,
        queued_by_priority=queued,
        running=sum(count.number for count in mine if count.state == "running"),
        workers=len(workers),
        slots=sum(row.slots for row in workers),
        credits_total=own.total,
        credits_held=own.held,
        credits_free=own.free,
        no_credit=waiting > 0 and below is not None and below.free <= 0,
    )
