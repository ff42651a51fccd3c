"""StoredQueue: the queue's public face over an engine; a thin shell round the rules.

Owns validation of what callers give, and the hand-over between waiting and rules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import ConfigError, DeadlineExceeded, MoonrelayError
from moonrelay.queueing import codec, delivery, intake, outcome, preemption, report
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.delivery import Delivery, Idle
from moonrelay.queueing.engine import Engine
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.states import ENDED, State
from moonrelay.queueing.store import RequestRow, WorkerRow
from moonrelay.queueing.task import Pipeline, Plain, StageTask, check_affinity, check_name
from moonrelay.queueing.views import QueueEvent, QueueStats, RequestView
from moonrelay.queueing.worker import Worker

_BUFFERS_PER_SLOT = 4


class WorkerDesk:
    """The workers' side of a queue: implements `WorkerPort` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def clock(self) -> Clock:
        return self._engine.clock

    @property
    def config(self) -> QueueConfig:
        return self._engine.config

    def join(self, worker: WorkerRow) -> WorkerRow:
        return self._engine.run(
            lambda book: delivery.join(book, replace(worker, worker_id=f"{worker.worker_id}-{book.tx.next('worker')}"))
        )

    def leave(self, worker: WorkerRow) -> None:
        self._engine.run(lambda book: delivery.leave(book, worker.worker_id))

    def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
        def attempt() -> tuple[Delivery | None, float | None]:
            got = self._engine.run(lambda book: delivery.claim(book, worker), ring=False)
            if isinstance(got, Idle):
                return None, got.retry_at_s
            self._engine.wake()
            return got, None

        return self._engine.wait_until(attempt, deadline, stopped)

    def renew(self, worker: WorkerRow, held: Mapping[str, int]) -> Mapping[str, MoonrelayError]:
        return self._engine.run(lambda book: delivery.renew(book, worker, held), ring=False)

    def advance(self, request_id: str, token: int, task: StageTask) -> None:
        packed = intake.pack(self.config.max_task_bytes, "next_task", task)
        self._engine.run(lambda book: outcome.advance(book, request_id, token, packed))

    def finish(self, request_id: str, token: int, result: Plain) -> None:
        packed = codec.pack_plain("result", result, at_most=self.config.max_task_bytes)
        self._engine.run(lambda book: outcome.finish(book, request_id, token, packed))

    def fail(self, request_id: str, token: int, error: MoonrelayError, retryable: bool) -> State:
        return self._engine.run(lambda book: outcome.fail(book, request_id, token, error, retryable))

    def give_back(self, request_id: str, token: int, note: str, *, counts: bool = True) -> State:
        return self._engine.run(lambda book: outcome.give_back(book, request_id, token, note, counts=counts))

    def lose_input(self, request_id: str, token: int, error: MoonrelayError) -> State:
        return self._engine.run(lambda book: outcome.lose_input(book, request_id, token, error))

    def progress(self, request_id: str, token: int, fraction: float, note: str) -> None:
        self._engine.run(lambda book: outcome.progress(book, request_id, token, fraction, note), ring=False)
        self._engine.note_change()

    def make_way(self, request_id: str, token: int, *, willing: bool) -> str:
        return self._engine.run(lambda book: preemption.make_way(book, request_id, token, willing=willing), ring=False)

    def wake(self) -> None:
        self._engine.note_change()


class StoredQueue(StageQueue):
    """A queue whose state is rows in an engine.

    Threads: any. Waiting calls end with `ClosedError` when the queue is closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._desk = WorkerDesk(engine)
        self._lock = threading.Lock()
        self._workers: list[Worker] = []

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def pipeline(self) -> Pipeline:
        return self._engine.pipeline

    @property
    def config(self) -> QueueConfig:
        return self._engine.config

    def submit(self, task: StageTask, *, if_absent: bool = False, ahead: StageTask | None = None) -> bool:
        if task.request_id is None:
            raise ConfigError("a submitted task needs a request_id", field="request_id")
        request_id = task.request_id
        self.pipeline[task.stage]
        packed = intake.pack(self.config.max_task_bytes, "task", task)
        further = None if ahead is None else intake.pack(self.config.max_task_bytes, "ahead", ahead)
        if ahead is not None and self.pipeline.position(ahead.stage) <= self.pipeline.position(task.stage):
            message = f"ahead.stage={ahead.stage!r} must come after {task.stage!r} in {self.pipeline!r}"
            raise ConfigError(message, field="ahead.stage")
        return self._engine.run(
            lambda book: intake.submit(book, request_id, packed, if_absent=if_absent, ahead=further)
        )

    def result(self, request_id: str, timeout_s: float | None = None) -> Plain:
        check_name("request_id", request_id)

        def attempt() -> tuple[RequestRow | None, float | None]:
            row = self._engine.read(lambda book: intake.known(book, request_id))
            return (row if row.state in ENDED else None), None

        row = self._engine.wait_until(attempt, Deadline(timeout_s, self._engine.clock), lambda: False)
        if row is None:
            now = self._engine.read(lambda book: intake.known(book, request_id))
            message = f"request {request_id!r} had not ended after {timeout_s} s; it is {now.state} at {now.stage}"
            raise DeadlineExceeded(message, request_id=request_id, stage=now.stage, waited_s=timeout_s)
        if not row.reported:
            self._engine.run(lambda book: intake.report(book, request_id), ring=False)
        if row.state != "done" or row.result is None:
            raise intake.failure_of(row)
        return codec.unpack_plain(row.result)

    def cancel(self, request_id: str) -> bool:
        check_name("request_id", request_id)
        return self._engine.run(lambda book: intake.cancel(book, request_id))

    def forget(self, request_id: str) -> bool:
        check_name("request_id", request_id)
        return self._engine.run(lambda book: intake.forget(book, request_id))

    def requests(self) -> list[RequestView]:
        return self._engine.read(report.requests)

    def stats(self) -> QueueStats:
        return self._engine.read(report.stats)

    def events(self, since: int = 0, *, limit: int = 1000, timeout_s: float = 0.0) -> list[QueueEvent]:
        _check_count("since", since, 0)
        _check_count("limit", limit, 1)

        def attempt() -> tuple[list[QueueEvent] | None, float | None]:
            return self._engine.read(lambda book: book.tx.events(since, limit)) or None, None

        return self._engine.wait_until(attempt, Deadline(timeout_s, self._engine.clock), lambda: False) or []

    def register_worker(
        self,
        stage: str,
        *,
        slots: int = 1,
        buffers: int | None = None,
        affinity: Mapping[str, str] | None = None,
        worker_id: str | None = None,
        heartbeat: bool = True,
    ) -> Worker:
        self.pipeline[stage]
        _check_count("slots", slots, 1)
        if buffers is not None:
            _check_count("buffers", buffers, 0)
        check_affinity(affinity)
        if worker_id is not None:
            check_name("worker_id", worker_id)
        wanted = WorkerRow(
            worker_id=worker_id or stage,
            stage=stage,
            slots=slots,
            buffers=_BUFFERS_PER_SLOT * slots if buffers is None else buffers,
            affinity=dict(affinity or {}),
            lease_until_s=0.0,
        )
        worker = Worker(self._desk, wanted, heartbeat=heartbeat)
        with self._lock:
            self._workers = [*(other for other in self._workers if not other.closed), worker]
        return worker

    def close(self) -> None:
        with self._lock:
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        self._engine.close()


def _check_count(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        message = f"{field}={value!r} must be a whole number of at least {least}"
        raise ConfigError(message, field=field)
