"""Queues that break what they promise to a client; see `planted.queues`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moonrelay.errors import ConfigError
from moonrelay.queueing import QueueEvent, StageTask, codec
from moonrelay.queueing.memory import MemoryQueue, MemoryTransaction
from moonrelay.queueing.states import State
from moonrelay.queueing.store import RequestRow, WorkerRow
from moonrelay.queueing.stored import WorkerDesk
from moonrelay.queueing.task import Plain
from planted.queue_base import Planted


class CancelIgnored(Planted):
    """A cancel of a running request is confirmed and has no effect."""

    class queue(MemoryQueue):  # noqa: N801
        def cancel(self, request_id: str) -> bool:
            running = any(one.request_id == request_id and one.state == "running" for one in self.requests())
            return True if running else super().cancel(request_id)


class CancelUntold(Planted):
    """The worker of a cancelled request is not told at its renewal."""

    class desk(WorkerDesk):  # noqa: N801
        def renew(self, worker: WorkerRow, held: Mapping[str, int]) -> Mapping[str, Any]:
            lost = super().renew(worker, held)
            return {name: error for name, error in lost.items() if error.code != "cancelled"}


class DeadlineIgnored(Planted):
    """A deadline that passed while a worker has the job is not heeded."""

    class rows(MemoryTransaction):  # noqa: N801
        def put_request(self, row: RequestRow) -> None:
            super().put_request(replace(row, deadline_at_s=None) if row.state == "running" else row)


class ResultReadOnce(Planted):
    """A result is gone once it was read."""

    class queue(MemoryQueue):  # noqa: N801
        def result(self, request_id: str, timeout_s: float | None = None) -> Plain:
            found = super().result(request_id, timeout_s)
            self.forget(request_id)
            return found


class EndToldTwice(Planted):
    """The end of a request is told two times."""

    class rows(MemoryTransaction):  # noqa: N801
        def append_event(self, event: QueueEvent, keep: int) -> None:
            super().append_event(event, keep)
            if event.kind == "failed":
                super().append_event(event, keep)


class PayloadAsJson(Planted):
    """A payload goes through JSON: int keys become text."""

    class queue(MemoryQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            if isinstance(task.payload, dict):
                task = replace(task, payload={str(key): value for key, value in task.payload.items()})
            return super().submit(task, if_absent=if_absent)


class HandleAsBytes(Planted):
    """A StageHandle comes back as its bytes."""

    class queue(MemoryQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            return super().submit(replace(task, handle=codec.pack_handle(task.handle)[1]), if_absent=if_absent)


class FullButTaken(Planted):
    """The queue says that it is full, and has queued the request all the same."""

    class queue(MemoryQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            try:
                return super().submit(task, if_absent=if_absent)
            except Exception as exc:
                if getattr(exc, "code", "") == "queue_full":
                    with self._engine.transaction(write=True) as tx:
                        like = next(iter(tx.requests()))
                        tx.put_request(replace(like, request_id=task.request_id or "", number=tx.next("request")))
                raise


class RefusedButQueued(Planted):
    """A request whose payload is refused stands in the queue without one."""

    class queue(MemoryQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            try:
                return super().submit(task, if_absent=if_absent)
            except ConfigError:
                if task.payload is not None:
                    super().submit(replace(task, payload=None), if_absent=True)
                raise


class SleepsThroughClose(Planted):
    """Who waits is not woken when the queue is closed, and gives up by itself, empty-handed."""

    class queue(MemoryQueue):  # noqa: N801
        def events(self, since: int = 0, *, limit: int = 1000, timeout_s: float = 0.0) -> list[QueueEvent]:
            if timeout_s:
                threading.Event().wait(1.0)
                return []
            return super().events(since, limit=limit, timeout_s=timeout_s)


class QueuedDeadlineIgnored(Planted):
    """A deadline is heeded only once a worker has the request."""

    class rows(MemoryTransaction):  # noqa: N801
        def overdue(self, now_s: float) -> list[RequestRow]:
            return [row for row in super().overdue(now_s) if row.state == "running"]


class QueuedCancelIgnored(Planted):
    """A cancel of a request that waits is confirmed and has no effect."""

    class queue(MemoryQueue):  # noqa: N801
        def cancel(self, request_id: str) -> bool:
            waits = any(one.request_id == request_id and one.state == "queued" for one in self.requests())
            return True if waits else super().cancel(request_id)


class FinalFailureTriedAgain(Planted):
    """Every failure is tried again, also one that says it is final."""

    class desk(WorkerDesk):  # noqa: N801
        def fail(self, request_id: str, token: int, error: Any, retryable: bool) -> State:
            return super().fail(request_id, token, error, True)


class RepeatedSubmitTakenIn(Planted):
    """A submit repeated with if_absent is said to be new."""

    class queue(MemoryQueue):  # noqa: N801
        def submit(self, task: StageTask, *, if_absent: bool = False) -> bool:
            super().submit(task, if_absent=if_absent)
            return True


class WholeFloatAsInt(Planted):
    """A result that is a whole number comes back as an int."""

    class desk(WorkerDesk):  # noqa: N801
        def finish(self, request_id: str, token: int, result: Plain) -> None:
            whole = isinstance(result, float) and result == int(result)
            super().finish(request_id, token, int(result) if whole else result)  # type: ignore[arg-type]


class EventsForEver(Planted):
    """Events are never dropped."""

    class rows(MemoryTransaction):  # noqa: N801
        def append_event(self, event: QueueEvent, keep: int) -> None:
            super().append_event(event, keep * 1000)


class EndedForEver(Planted):
    """Ended requests are never dropped."""

    class rows(MemoryTransaction):  # noqa: N801
        def surplus(self, keep: int) -> list[str]:
            return []
