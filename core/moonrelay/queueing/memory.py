"""The queue inside one process: the model that other backends are compared with, and good for tests.

Owns rows in dictionaries. Nothing survives it.
"""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from moonrelay.clock import Clock
from moonrelay.errors import ConfigError
from moonrelay.queueing.engine import Engine
from moonrelay.queueing.fairness import Passes
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.states import ENDED, State
from moonrelay.queueing.store import Count, Counter, RequestRow, StageRow, Transaction, WorkerRow
from moonrelay.queueing.stored import StoredQueue
from moonrelay.queueing.task import DEFAULT_PIPELINE, Pipeline, Priority
from moonrelay.queueing.views import QueueEvent


class MemoryTransaction(Transaction):
    """Rows in dictionaries; rows are frozen, so handing them out is safe. Cannot undo, which the rules never need."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestRow] = {}
        self._stages: dict[tuple[str, str], StageRow] = {}
        self._workers: dict[str, WorkerRow] = {}
        self._passes: dict[str, Passes] = {}
        self._counters: Tally[str] = Tally()
        self._events: deque[QueueEvent] = deque()
        self._last_event = 0

    def request(self, request_id: str) -> RequestRow | None:
        return self._requests.get(request_id)

    def requests(self) -> Iterable[RequestRow]:
        return list(self._requests.values())

    def put_request(self, row: RequestRow) -> None:
        self._requests[row.request_id] = row

    def drop_request(self, request_id: str) -> None:
        del self._requests[request_id]
        for key in [key for key in self._stages if key[0] == request_id]:
            del self._stages[key]

    def queued(self, stage: str, priority: Priority) -> Iterable[RequestRow]:
        return (row for row in self._in(stage, "queued") if row.priority == priority)

    def running_by(self, worker_id: str) -> list[RequestRow]:
        return [row for row in self._requests.values() if row.state == "running" and row.worker == worker_id]

    def counts(self) -> list[Count]:
        tally = Tally((row.stage, row.state, row.priority) for row in self._requests.values())
        return [
            Count(stage=stage, state=state, priority=priority, number=number)
            for (stage, state, priority), number in sorted(tally.items())
        ]

    def count(self, stage: str, state: State) -> int:
        return sum(1 for _ in self._in(stage, state))

    def active(self) -> int:
        return sum(1 for row in self._requests.values() if row.state not in ENDED)

    def overdue(self, now_s: float) -> list[RequestRow]:
        return [
            row
            for row in self._requests.values()
            if row.state not in ENDED
            and any(at_s is not None and at_s <= now_s for at_s in (row.deadline_at_s, row.lease_until_s))
        ]

    def next_due_s(self, now_s: float) -> float | None:
        due = [row.lease_until_s for row in self._workers.values()]
        for row in self._requests.values():
            if row.state not in ENDED:
                due += [at_s for at_s in (row.deadline_at_s, row.lease_until_s) if at_s is not None]
            if row.state == "queued" and row.not_before_s > now_s:
                due.append(row.not_before_s)
        return min(due, default=None)

    def surplus(self, keep: int) -> list[str]:
        ended = sorted(
            (row for row in self._requests.values() if row.state in ENDED),
            key=lambda row: (not row.reported, row.ended),
        )
        return [row.request_id for row in ended[: max(0, len(ended) - keep)]]

    def stage(self, request_id: str, stage: str) -> StageRow | None:
        return self._stages.get((request_id, stage))

    def put_stage(self, row: StageRow) -> None:
        self._stages[row.request_id, row.stage] = row

    def workers(self, stage: str | None = None) -> list[WorkerRow]:
        return [row for row in self._workers.values() if stage in (None, row.stage)]

    def worker(self, worker_id: str) -> WorkerRow | None:
        return self._workers.get(worker_id)

    def put_worker(self, row: WorkerRow) -> None:
        self._workers[row.worker_id] = row

    def drop_worker(self, worker_id: str) -> None:
        del self._workers[worker_id]

    def passes(self, stage: str) -> Passes:
        return self._passes.get(stage, {})

    def put_passes(self, stage: str, passes: Passes) -> None:
        self._passes[stage] = passes

    def next(self, counter: Counter) -> int:
        self._counters[counter] += 1
        return self._counters[counter]

    def append_event(self, event: QueueEvent, keep: int) -> None:
        self._last_event += 1
        self._events.append(replace(event, number=self._last_event))
        while len(self._events) > keep:
            self._events.popleft()

    def events(self, since: int, limit: int) -> list[QueueEvent]:
        return [event for event in self._events if event.number > since][:limit]

    def last_event(self) -> int:
        return self._last_event

    def _in(self, stage: str, state: State) -> Iterator[RequestRow]:
        return (row for row in self._requests.values() if row.stage == stage and row.state == state)


class MemoryEngine(Engine):
    """One lock around one `MemoryTransaction`."""

    def __init__(self, clock: Clock, config: QueueConfig, pipeline: Pipeline) -> None:
        super().__init__(clock, config)
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._rows = MemoryTransaction()

    @property
    def url(self) -> str:
        return "memory://"

    @property
    def pipeline(self) -> Pipeline:
        return self._pipeline

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[Transaction]:
        with self._lock:
            yield self._rows

    def ring(self) -> None:
        """Do nothing: there is no other process."""

    def watch(self, waiting: bool) -> None:
        """Do nothing: there is no other process."""


class MemoryQueue(StoredQueue):
    """A queue inside this process, ``memory://``; each connection is a new queue."""

    @classmethod
    def open(cls, url: str, *, clock: Clock, pipeline: Pipeline | None, config: QueueConfig) -> MemoryQueue:
        if urlsplit(url)[1:] != ("", "", "", ""):
            message = f"url={url!r} must be 'memory://'; a queue in memory has no name and no settings in its URL"
            raise ConfigError(message, field="url")
        return cls(MemoryEngine(clock, config, pipeline or DEFAULT_PIPELINE))
