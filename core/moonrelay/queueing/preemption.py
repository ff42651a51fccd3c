"""Which running jobs make way for waiting ones: a worker's job that can be left is asked for it here.

Owns the rule, as pure functions over a `Book`. A job is asked when another worker's free slot would not do, when what
waits would be chosen before it by the fair choice, and only so many times; no more jobs are asked than tasks wait. What
is asked is taken back when it is needed no more. Whether leaving is worth it, the worker knows: it offers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from moonrelay.queueing.delivery import downstream_account, open_at_s
from moonrelay.queueing.fairness import choose
from moonrelay.queueing.outcome import fence, stage_row
from moonrelay.queueing.store import Book, RequestRow
from moonrelay.queueing.task import Priority


def make_way(book: Book, request_id: str, token: int, *, willing: bool) -> str:
    """Return the request that a job is to make way for now, or an empty text.

    Args:
        book: The queue.
        request_id: The job's request.
        token: The claim's.
        willing: Whether the job can be left at its next boundary, and leaving it is worth it.

    Raises:
        LeaseLost, Cancelled, DeadlineExceeded: The claim is lost.
    """
    row, _ = fence(book, request_id, token)
    asker = _asker(book, row) if willing else None
    wanted = "" if asker is None else asker.request_id
    if wanted != row.yield_to:
        book.tx.put_request(replace(row, yield_to=wanted))
        if asker is not None:
            note = f"for {asker.request_id} ({asker.priority}), which waits"
            book.tell("asked_to_yield", row, attempt=stage_row(book, row).attempt, worker=row.worker or "", note=note)
    return wanted


def _asker(book: Book, row: RequestRow) -> RequestRow | None:
    """Return the waiting task for which a running one shall be left, if there is one."""
    above = book.config.precedence.get(row.priority, ())
    worker = None if row.worker is None else book.tx.worker(row.worker)
    if worker is None or not any(next(iter(book.tx.queued(row.stage, name)), None) for name in above):
        return None
    if stage_row(book, row).yields >= book.config.preempt_at_most:
        return None
    credit = downstream_account(book, row.stage)
    if credit is not None and credit.total < credit.held:
        return None  # its own credit would go to nobody
    live = [one for one in book.tx.workers(row.stage) if one.lease_until_s > book.now_s]
    running = {one.worker_id: book.tx.running_by(one.worker_id) for one in live}
    idle = sum(max(0, one.slots - len(running[one.worker_id])) for one in live)
    if credit is not None:
        idle = min(idle, credit.free)
    promised = {other.yield_to for rows in running.values() for other in rows if other.request_id != row.request_id}
    eligible = (
        one
        for name in above
        for one in book.tx.queued(row.stage, name)
        if one.request_id not in promised and open_at_s(book, one, worker, live) <= book.now_s
    )
    found = list(islice(eligible, idle + 1))
    if len(found) <= idle or not _before(book, row, found[idle].priority):
        return None
    return next((one for one in found if one.request_id == row.yield_to), found[idle])


def _before(book: Book, row: RequestRow, waiting: Priority) -> bool:
    """Return whether the fair choice between a waiting class and the job's own falls on what waits."""
    both = {waiting, row.priority}
    chosen, _ = choose(both, both, book.tx.passes(row.stage))
    return chosen == waiting
