"""Rows of a queue in SQLite: `Transaction` over one connection.

Owns the SQL. Decides nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, fields
from typing import Any

import msgspec

from moonrelay.errors import IntegrityError
from moonrelay.queueing.fairness import Passes
from moonrelay.queueing.states import State
from moonrelay.queueing.store import Count, Counter, RequestRow, StageRow, Transaction, WorkerRow
from moonrelay.queueing.task import Priority
from moonrelay.queueing.views import QueueEvent

_REQUEST = tuple(field.name for field in fields(RequestRow))
_STAGE = tuple(field.name for field in fields(StageRow))
_WORKER = tuple(field.name for field in fields(WorkerRow))
_EVENT = tuple(field.name for field in fields(QueueEvent))


def _select(table: str, columns: tuple[str, ...]) -> str:
    return f"SELECT {', '.join(columns)} FROM {table}"


def _upsert(table: str, columns: tuple[str, ...], key: tuple[str, ...]) -> str:
    names, marks = ", ".join(columns), ", ".join("?" for _ in columns)
    updates = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT ({', '.join(key)}) DO UPDATE SET {updates}"


_GET_REQUEST = _select("request", _REQUEST)
_PUT_REQUEST = _upsert("request", _REQUEST, ("request_id",))
_GET_STAGE = _select("stage", _STAGE) + " WHERE request_id = ? AND stage = ?"
_PUT_STAGE = _upsert("stage", _STAGE, ("request_id", "stage"))
_GET_WORKER = _select("worker", _WORKER)
_PUT_WORKER = _upsert("worker", _WORKER, ("worker_id",))
_GET_EVENTS = _select("event", _EVENT) + " WHERE number > ? ORDER BY number LIMIT ?"
_PUT_EVENT = f"INSERT INTO event ({', '.join(_EVENT)}) VALUES ({', '.join('?' for _ in _EVENT)})"
_NEXT = "INSERT INTO counter VALUES (?, 1) ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value"
_DUE = """
SELECT min(at_s) FROM (
    SELECT min(lease_until_s) AS at_s FROM request WHERE lease_until_s IS NOT NULL
    UNION ALL SELECT min(deadline_at_s) FROM request WHERE ended = 0 AND deadline_at_s IS NOT NULL
    UNION ALL SELECT min(not_before_s) FROM request WHERE state = 'queued' AND not_before_s > ?
    UNION ALL SELECT min(lease_until_s) FROM worker
)"""
_OVERDUE = """ WHERE request_id IN (
    SELECT request_id FROM request WHERE lease_until_s IS NOT NULL AND lease_until_s <= ?1
    UNION SELECT request_id FROM request WHERE ended = 0 AND deadline_at_s IS NOT NULL AND deadline_at_s <= ?1
) ORDER BY number"""


class SqliteTransaction(Transaction):
    """One open transaction; begun and ended by its engine."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    def request(self, request_id: str) -> RequestRow | None:
        row = self._db.execute(f"{_GET_REQUEST} WHERE request_id = ?", (request_id,)).fetchone()
        return None if row is None else _request(row)

    def requests(self) -> Iterable[RequestRow]:
        return self._requests(" ORDER BY number")

    def put_request(self, row: RequestRow) -> None:
        values = _values(row, _REQUEST)
        self._db.execute(_PUT_REQUEST, values)

    def drop_request(self, request_id: str) -> None:
        self._db.execute("DELETE FROM request WHERE request_id = ?", (request_id,))
        self._db.execute("DELETE FROM stage WHERE request_id = ?", (request_id,))

    def queued(self, stage: str, priority: Priority) -> Iterator[RequestRow]:
        return self._requests(" WHERE state = 'queued' AND stage = ? AND priority = ? ORDER BY number", stage, priority)

    def running_by(self, worker_id: str) -> list[RequestRow]:
        return list(self._requests(" WHERE worker = ? AND state = 'running' ORDER BY number", worker_id))

    def counts(self) -> list[Count]:
        rows = self._db.execute(
            "SELECT stage, state, priority, count(*) FROM request GROUP BY state, stage, priority"
        ).fetchall()
        return [Count(stage=row[0], state=row[1], priority=row[2], number=row[3]) for row in sorted(rows)]

    def count(self, stage: str, state: State) -> int:
        return self._number("SELECT count(*) FROM request WHERE state = ? AND stage = ?", state, stage)

    def active(self) -> int:
        return self._number("SELECT count(*) FROM request WHERE state IN ('queued', 'running')")

    def overdue(self, now_s: float) -> list[RequestRow]:
        return list(self._requests(_OVERDUE, now_s))

    def next_due_s(self, now_s: float) -> float | None:
        row = self._db.execute(_DUE, (now_s,)).fetchone()
        return None if row[0] is None else float(row[0])

    def surplus(self, keep: int) -> list[str]:
        extra = self._number("SELECT count(*) FROM request WHERE ended > 0") - keep
        if extra <= 0:
            return []
        rows = self._db.execute(
            "SELECT request_id FROM request WHERE ended > 0 ORDER BY reported DESC, ended LIMIT ?", (extra,)
        )
        return [row[0] for row in rows.fetchall()]

    def stage(self, request_id: str, stage: str) -> StageRow | None:
        row = self._db.execute(_GET_STAGE, (request_id, stage)).fetchone()
        if row is None:
            return None
        values = dict(zip(_STAGE, row, strict=True))
        values["affinity"] = _labels(values["affinity"])
        return StageRow(**values)

    def put_stage(self, row: StageRow) -> None:
        self._db.execute(_PUT_STAGE, _values(row, _STAGE))

    def workers(self, stage: str | None = None) -> list[WorkerRow]:
        where, values = ("", ()) if stage is None else (" WHERE stage = ?", (stage,))
        return [_worker(row) for row in self._db.execute(f"{_GET_WORKER}{where} ORDER BY rowid", values).fetchall()]

    def worker(self, worker_id: str) -> WorkerRow | None:
        row = self._db.execute(f"{_GET_WORKER} WHERE worker_id = ?", (worker_id,)).fetchone()
        return None if row is None else _worker(row)

    def put_worker(self, row: WorkerRow) -> None:
        self._db.execute(_PUT_WORKER, _values(row, _WORKER))

    def drop_worker(self, worker_id: str) -> None:
        self._db.execute("DELETE FROM worker WHERE worker_id = ?", (worker_id,))

    def passes(self, stage: str) -> Passes:
        row = self._db.execute("SELECT value FROM passes WHERE stage = ?", (stage,)).fetchone()
        if row is None:
            return {}
        try:
            return msgspec.msgpack.decode(row[0], type=dict[Priority, int])
        except msgspec.MsgspecError as exc:
            raise IntegrityError("the stored state of fair choice is damaged", stage=stage) from exc

    def put_passes(self, stage: str, passes: Passes) -> None:
        self._db.execute(
            _upsert("passes", ("stage", "value"), ("stage",)), (stage, msgspec.msgpack.encode(dict(passes)))
        )

    def next(self, counter: Counter) -> int:
        return self._next(counter)

    def append_event(self, event: QueueEvent, keep: int) -> None:
        number = self._next("event")
        self._db.execute(_PUT_EVENT, (number, *astuple(event)[1:]))
        self._db.execute("DELETE FROM event WHERE number <= ?", (number - keep,))

    def events(self, since: int, limit: int) -> list[QueueEvent]:
        rows = self._db.execute(_GET_EVENTS, (since, limit)).fetchall()
        return [QueueEvent(**dict(zip(_EVENT, row, strict=True))) for row in rows]

    def last_event(self) -> int:
        return self._number("SELECT coalesce(max(value), 0) FROM counter WHERE name = 'event'")

    def _next(self, name: str) -> int:
        return int(self._db.execute(_NEXT, (name,)).fetchone()[0])

    def _requests(self, where: str, *values: object) -> Iterator[RequestRow]:
        cursor = self._db.execute(_GET_REQUEST + where, values)
        try:
            for row in cursor:
                yield _request(row)
        finally:
            cursor.close()

    def _number(self, query: str, *values: object) -> int:
        return int(self._db.execute(query, values).fetchone()[0])


def _values(row: RequestRow | StageRow | WorkerRow, columns: tuple[str, ...]) -> list[object]:
    return [
        msgspec.msgpack.encode(dict(row.affinity)) if name == "affinity" else getattr(row, name) for name in columns
    ]


def _request(row: tuple[Any, ...]) -> RequestRow:
    values = dict(zip(_REQUEST, row, strict=True))
    values["affinity"] = _labels(values["affinity"])
    values["reported"] = bool(values["reported"])
    return RequestRow(**values)


def _worker(row: tuple[Any, ...]) -> WorkerRow:
    values = dict(zip(_WORKER, row, strict=True))
    values["affinity"] = _labels(values["affinity"])
    return WorkerRow(**values)


def _labels(packed: bytes) -> Mapping[str, str]:
    try:
        return msgspec.msgpack.decode(packed, type=dict[str, str])
    except msgspec.MsgspecError as exc:
        raise IntegrityError("a stored affinity is damaged") from exc
