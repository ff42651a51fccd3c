"""What planted queues are made of: a target whose queue's parts are exchanged for faulty ones."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from moonrelay.clock import Clock, SystemClock
from moonrelay.config import build
from moonrelay.queueing import Pipeline, QueueConfig
from moonrelay.queueing.engine import Engine
from moonrelay.queueing.memory import MemoryEngine, MemoryQueue, MemoryTransaction
from moonrelay.queueing.rows import SqliteTransaction
from moonrelay.queueing.sqlite import SqliteQueue
from moonrelay.queueing.store import Transaction
from moonrelay.queueing.stored import StoredQueue, WorkerDesk
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.parts import QueueTarget, declared


class Planted(QueueTarget):
    """A faulty queue as a target: a queue in memory whose rows, desk or calls are exchanged.

    Attributes:
        rows: What stores.
        desk: What serves the workers.
        queue: What is called.
        file_rows: What stores, in a `PlantedFile`.
    """

    rows: ClassVar[type[MemoryTransaction]] = MemoryTransaction
    desk: ClassVar[type[WorkerDesk]] = WorkerDesk
    queue: ClassVar[type[StoredQueue]] = MemoryQueue
    file_rows: ClassVar[type[SqliteTransaction] | None] = None

    def __init__(self) -> None:
        self.name = type(self).__name__

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared()

    def url(self, folder: Path) -> str:
        return "memory://"

    def open(
        self, url: str, *, clock: Clock | None, pipeline: Pipeline | None, config: Mapping[str, object] | None
    ) -> StoredQueue:
        settings = build(QueueConfig, config, env_prefix="QUEUE")
        made = self.queue.open(url, clock=clock or SystemClock(), pipeline=pipeline, config=settings)
        assert isinstance(made, StoredQueue)
        if isinstance(made._engine, MemoryEngine):
            made._engine._rows = self.rows()
        elif self.file_rows is not None:
            _exchange(made._engine, self.file_rows)
        made._desk = self.desk(made._engine)
        return made


class PlantedFile(Planted):
    """A faulty queue that is a file shared by processes."""

    queue = SqliteQueue

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(Capability.PROCESSES, Capability.DURABLE)

    def url(self, folder: Path) -> str:
        return f"sqlite:///{quote(str(folder))}/queue-{secrets.token_hex(4)}.db"


def _exchange(engine: Engine, rows: type[SqliteTransaction]) -> None:
    """Let an engine's transactions be of another class."""
    plain = engine.transaction

    @contextmanager
    def transaction(*, write: bool) -> Iterator[Transaction]:
        with plain(write=write) as tx:
            assert isinstance(tx, SqliteTransaction)
            yield rows(tx._db)

    engine.transaction = transaction  # type: ignore[method-assign]
