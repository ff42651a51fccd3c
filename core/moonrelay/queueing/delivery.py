"""What workers do: join, claim, renew, leave. Owns the choice of the next job and its admission.

Pure functions over a `Book`. A claim reads the credits, chooses and takes in one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moonrelay.errors import MoonrelayError
from moonrelay.queueing.credits import Account, Offer, account
from moonrelay.queueing.fairness import choose
from moonrelay.queueing.outcome import hand_back, stage_row, why_lost
from moonrelay.queueing.states import step
from moonrelay.queueing.store import Book, RequestRow, StageRow, WorkerRow
from moonrelay.queueing.task import PRIORITIES, Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A claimed job, as stored."""

    request: RequestRow
    stage: StageRow
    deadline_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Nothing to take now.

    Attributes:
        retry_at_s: When something may become takeable by the mere passing of time; ``None`` when only a change helps.
        no_credit: Work waits, but no buffer slot is free downstream.
    """

    retry_at_s: float | None
    no_credit: bool


def join(book: Book, worker: WorkerRow) -> WorkerRow:
    """Register a worker, or register it again after its lease lapsed; return its row."""
    there = book.tx.worker(worker.worker_id)
    row = replace(worker, lease_until_s=book.now_s + book.config.lease_s)
    book.tx.put_worker(row)
    if there is None:
        book.tell_worker("worker_joined", row)
    return row


def leave(book: Book, worker_id: str) -> None:
    """Remove a worker; the jobs that it still holds go back to the queue."""
    for row in book.tx.running_by(worker_id):
        hand_back(book, row, stage_row(book, row), "the worker was closed")
    there = book.tx.worker(worker_id)
    if there is not None:
        book.tx.drop_worker(worker_id)
        book.tell_worker("worker_left", there)


def renew(book: Book, worker: WorkerRow, held: Mapping[str, int]) -> dict[str, MoonrelayError]:
    """Renew a worker's registration and its claims.

    Args:
        worker: The worker; joins again if its lease had lapsed.
        held: Tokens of its jobs, by request.

    Returns:
        Why each claim is lost that is, by request.
    """
    until_s = join(book, worker).lease_until_s
    lost: dict[str, MoonrelayError] = {}
    for request_id, token in held.items():
        reason = why_lost(book, request_id, token)
        row = book.tx.request(request_id)
        if reason is not None or row is None:
            lost[request_id] = reason or MoonrelayError("the request is gone", request_id=request_id)
        else:
            book.tx.put_request(replace(row, lease_until_s=until_s))
    return lost


def claim(book: Book, worker: WorkerRow) -> Delivery | Idle:
    """Take the next job for a worker, if there is one that it may have now."""
    present = book.tx.worker(worker.worker_id) or join(book, worker)
    waiting, heads, retry_at_s = _takeable(book, present)
    if not heads:
        return Idle(retry_at_s=retry_at_s, no_credit=False)
    credit = downstream_account(book, present.stage)
    if credit is not None and credit.free <= 0:
        return Idle(retry_at_s=None, no_credit=True)
    chosen, passes = choose(waiting, tuple(heads), book.tx.passes(present.stage))
    book.tx.put_passes(present.stage, passes)
    return _take(book, present, heads[chosen])


def stage_account(book: Book, stage: str) -> Account:
    """Return the credits of a stage."""
    return account(
        (Offer(buffers=row.buffers, lease_until_s=row.lease_until_s) for row in book.tx.workers(stage)),
        admitted=sum(book.tx.count(spec.name, "running") for spec in book.pipeline.feeding(stage)),
        waiting=book.tx.count(stage, "queued"),
        now_s=book.now_s,
    )


def downstream_account(book: Book, stage: str) -> Account | None:
    """Return the account that jobs of ``stage`` take a credit from, ``None`` where they need none."""
    spec = book.pipeline[stage]
    if spec.kind != "admission" or spec.downstream is None:
        return None
    return stage_account(book, spec.downstream)


def _takeable(book: Book, worker: WorkerRow) -> tuple[list[Priority], dict[Priority, RequestRow], float | None]:
    """Return the classes with waiting work, each one's first takeable task, and when that may change by itself."""
    waiting: list[Priority] = []
    heads: dict[Priority, RequestRow] = {}
    later: list[float] = []
    others = [row for row in book.tx.workers(worker.stage) if row.lease_until_s > book.now_s]
    for priority in PRIORITIES:
        for row in book.tx.queued(worker.stage, priority):
            if not waiting or waiting[-1] != priority:
                waiting.append(priority)
            at_s = open_at_s(book, row, worker, others)
            if at_s <= book.now_s:
                heads[priority] = row
                break
            later.append(at_s)
    return waiting, heads, min(later, default=None)


def open_at_s(book: Book, row: RequestRow, worker: WorkerRow, others: list[WorkerRow]) -> float:
    """Return when ``worker`` may take a task: a preferred worker has ``affinity_wait_s`` to come first."""
    if suits(row.affinity, worker) or not any(suits(row.affinity, other) for other in others):
        return row.not_before_s
    return max(row.not_before_s, row.queued_at_s + book.config.affinity_wait_s)


def suits(wanted: Mapping[str, str], worker: WorkerRow) -> bool:
    """Return whether a worker has every label that a task prefers."""
    return all(worker.affinity.get(key) == value for key, value in wanted.items())


def _take(book: Book, worker: WorkerRow, row: RequestRow) -> Delivery:
    job = stage_row(book, row)
    until_s = book.now_s + book.config.lease_s
    taken = replace(
        row,
        state=step(row.state, "claim"),
        token=book.tx.next("token"),
        worker=worker.worker_id,
        lease_until_s=until_s,
        updated_at_s=book.now_s,
        fraction=0.0,
        note="",
        yield_to="",
    )
    counted = replace(job, attempt=job.attempt + 1, spent=job.spent + 1)
    book.tx.put_request(taken)
    book.tx.put_stage(counted)
    book.tx.put_worker(replace(worker, lease_until_s=max(worker.lease_until_s, until_s)))
    book.tell("claimed", taken, attempt=counted.attempt, worker=worker.worker_id)
    left_s = None if row.deadline_at_s is None else max(0.0, row.deadline_at_s - book.now_s)
    return Delivery(request=taken, stage=counted, deadline_in_s=left_s)
