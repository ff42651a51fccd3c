"""What clients do: submit, cancel, forget, and read an outcome.

Pure functions over a `Book`; they check first and write afterwards.
"""

from __future__ import annotations

from dataclasses import replace

from moonrelay.errors import Cancelled, ConfigError, MoonrelayError, QueueFull
from moonrelay.queueing import codec
from moonrelay.queueing.outcome import PackedTask, end, stage_row
from moonrelay.queueing.states import ENDED
from moonrelay.queueing.store import Book, RequestRow, StageRow
from moonrelay.queueing.task import StageTask


def pack(book_limit: int, field: str, task: StageTask) -> PackedTask:
    """Encode a task.

    Args:
        book_limit: Bound of the payload's encoded size, in bytes.
        field: ``task`` or ``next_task``; begins the names in messages.
        task: The task.

    Raises:
        ConfigError: Payload or handle is not of a kind that a queue carries.
    """
    payload = codec.pack_plain(f"{field}.payload", task.payload, at_most=book_limit)
    kind, handle = codec.pack_handle(task.handle)
    return PackedTask(
        stage=task.stage,
        payload=payload,
        handle=handle,
        handle_kind=kind,
        affinity=dict(task.affinity or {}),
        attempt=task.attempt,
        max_attempts=task.max_attempts,
        priority=task.priority,
        deadline_s=task.deadline_s,
        fingerprint=codec.fingerprint(task, payload, handle),
    )


def submit(book: Book, request_id: str, task: PackedTask, *, if_absent: bool, ahead: PackedTask | None = None) -> bool:
    """Queue a new request; see `StageQueue.submit`."""
    book.pipeline[task.stage]
    there = book.tx.request(request_id)
    if there is not None:
        if if_absent and there.fingerprint == task.fingerprint:
            return False
        rule = "its task differs from this one" if if_absent else "use another id, or forget it once it has ended"
        message = f"request_id={request_id!r} is taken by a request that is {there.state}; {rule}"
        raise ConfigError(message, field="request_id")
    if book.tx.active() >= book.config.max_depth:
        message = f"{book.config.max_depth} requests are under way (max_depth); try again later"
        raise QueueFull(message, request_id=request_id)
    first = ahead or task
    row = RequestRow(
        request_id=request_id,
        number=book.tx.next("request"),
        fingerprint=task.fingerprint,
        state="queued",
        stage=first.stage,
        priority=task.priority or "standard",
        affinity=first.affinity,
        queued_at_s=book.now_s,
        not_before_s=book.now_s,
        submitted_at_s=book.now_s,
        updated_at_s=book.now_s,
        deadline_at_s=None if task.deadline_s is None else book.now_s + task.deadline_s,
    )
    book.tx.put_request(row)
    book.tx.put_stage(_first_row(book, request_id, task, made_by=None))
    if ahead is not None:
        book.tx.put_stage(_first_row(book, request_id, ahead, made_by=task.stage))
    book.tell("submitted", row)
    return True


def _first_row(book: Book, request_id: str, task: PackedTask, *, made_by: str | None) -> StageRow:
    return StageRow(
        request_id=request_id,
        stage=task.stage,
        made_by=made_by,
        payload=task.payload,
        handle=task.handle,
        handle_kind=task.handle_kind,
        affinity=task.affinity,
        attempt=task.attempt,
        spent=0,
        max_attempts=task.max_attempts or book.config.max_attempts,
    )


def cancel(book: Book, request_id: str) -> bool:
    """End a request as cancelled; see `StageQueue.cancel`."""
    row = known(book, request_id)
    if row.state in ENDED:
        return False
    job = stage_row(book, row)
    error = codec.pack_error(
        Cancelled(f"the request was cancelled while {row.state} at {row.stage}"), stage=row.stage, attempt=job.attempt
    )
    end(book, replace(row, error=error), "cancel", "cancelled", attempt=job.attempt)
    return True


def forget(book: Book, request_id: str) -> bool:
    """Drop an ended request; see `StageQueue.forget`."""
    row = book.tx.request(request_id)
    if row is None:
        return False
    if row.state not in ENDED:
        message = f"request_id={request_id!r} is {row.state} at {row.stage}; cancel it first"
        raise ConfigError(message, field="request_id")
    book.tx.drop_request(request_id)
    book.tell("forgotten", row)
    return True


def known(book: Book, request_id: str) -> RequestRow:
    """Return a request's row, or raise `ConfigError`."""
    row = book.tx.request(request_id)
    if row is None:
        message = f"request_id={request_id!r} is not in the queue: never submitted, forgotten, or dropped as the oldest"
        raise ConfigError(message, field="request_id")
    return row


def report(book: Book, request_id: str) -> None:
    """Note that an outcome was read, so that it may be dropped before those that were not."""
    row = book.tx.request(request_id)
    if row is not None and row.state in ENDED and not row.reported:
        book.tx.put_request(replace(row, reported=True))


def failure_of(row: RequestRow) -> MoonrelayError:
    """Return the error that an ended request's client gets."""
    if row.error is None:
        message = f"request {row.request_id!r} is {row.state} without a stored error"
        return MoonrelayError(message, request_id=row.request_id)
    return codec.rebuild(codec.unpack_error(row.error), request_id=row.request_id, state=row.state)
