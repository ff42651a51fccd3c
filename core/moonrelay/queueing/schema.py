"""The SQLite file: its tables, its version, its boot; and what SQLite's codes mean to us.

Owns everything that is decided once per file. Rows are `moonrelay.queueing.rows`.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import msgspec

from moonrelay.clock import Clock
from moonrelay.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    IntegrityError,
    MoonrelayError,
    VersionError,
)
from moonrelay.queueing.task import DEFAULT_PIPELINE, Pipeline, StageSpec

APPLICATION_ID = 0x4D524C51
VERSION = 1
OLDEST_SQLITE = (3, 35, 0)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE counter (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE passes (stage TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE request (
    request_id TEXT PRIMARY KEY, number INTEGER NOT NULL UNIQUE, fingerprint BLOB NOT NULL,
    state TEXT NOT NULL, stage TEXT NOT NULL, priority TEXT NOT NULL, affinity BLOB NOT NULL,
    queued_at_s REAL NOT NULL, not_before_s REAL NOT NULL, submitted_at_s REAL NOT NULL, updated_at_s REAL NOT NULL,
    deadline_at_s REAL, token INTEGER NOT NULL, worker TEXT, lease_until_s REAL, fraction REAL NOT NULL,
    note TEXT NOT NULL, result BLOB, error BLOB, ended INTEGER NOT NULL, reported INTEGER NOT NULL,
    yield_to TEXT NOT NULL DEFAULT ''
);
CREATE INDEX request_queue ON request (state, stage, priority, number);
CREATE INDEX request_worker ON request (worker) WHERE worker IS NOT NULL;
CREATE INDEX request_lease ON request (lease_until_s) WHERE lease_until_s IS NOT NULL;
CREATE INDEX request_deadline ON request (deadline_at_s) WHERE ended = 0 AND deadline_at_s IS NOT NULL;
CREATE INDEX request_later ON request (not_before_s) WHERE state = 'queued';
CREATE INDEX request_ended ON request (reported DESC, ended) WHERE ended > 0;
CREATE TABLE stage (
    request_id TEXT NOT NULL, stage TEXT NOT NULL, made_by TEXT, payload BLOB NOT NULL, handle BLOB,
    handle_kind TEXT NOT NULL, affinity BLOB NOT NULL, attempt INTEGER NOT NULL, spent INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL, yields INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (request_id, stage)
);
CREATE TABLE worker (
    worker_id TEXT PRIMARY KEY, stage TEXT NOT NULL, slots INTEGER NOT NULL, buffers INTEGER NOT NULL,
    affinity BLOB NOT NULL, lease_until_s REAL NOT NULL
);
CREATE TABLE event (
    number INTEGER PRIMARY KEY, at_s REAL NOT NULL, kind TEXT NOT NULL, request_id TEXT NOT NULL, stage TEXT NOT NULL,
    attempt INTEGER NOT NULL, worker TEXT NOT NULL, fraction REAL NOT NULL, note TEXT NOT NULL
);
"""

#: Columns that came later. They have defaults, so that a file of before is taken over, and a release of before can go
#: on with a file of now.
_LATER = (("request", "yield_to", "TEXT NOT NULL DEFAULT ''"), ("stage", "yields", "INTEGER NOT NULL DEFAULT 0"))


class StoredStage(msgspec.Struct, frozen=True, kw_only=True):
    """A `StageSpec` as it is kept."""

    name: str
    kind: str
    downstream: str | None = None


def prepare(connection: sqlite3.Connection, path: Path, wanted: Pipeline | None, clock: Clock) -> Pipeline:
    """Make or check the tables, inside one immediate transaction of the caller's.

    Args:
        connection: Holds the write lock.
        path: For messages.
        wanted: The caller's pipeline; ``None`` takes what is stored.
        clock: The time to which a file from an earlier boot is carried over.

    Returns:
        The pipeline that stands.

    Raises:
        ConfigError: Another program's database, or another pipeline is stored.
        VersionError: The file has another version.
    """
    application, version = (int(connection.execute(f"PRAGMA {name}").fetchone()[0]) for name in _MARKS)
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not (empty and application == 0 and version == 0):
        message = f"{path} is another program's database; choose another path"
        raise ConfigError(message, field="url")
    if not empty and version != VERSION:
        message = f"{path} is a queue of version {version}, this is version {VERSION}; drain it with its own release"
        raise VersionError(message, theirs=version, ours=VERSION)
    if empty:
        return _create(connection, wanted or DEFAULT_PIPELINE)
    stored = _unpack_pipeline(_meta(connection, "pipeline"))
    if wanted is not None and wanted != stored:
        message = f"{path} was made with {stored!r}, not with {wanted!r}; leave pipeline out, or choose another path"
        raise ConfigError(message, field="pipeline")
    for table, column, kind in _LATER:
        if column not in {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
    if _meta(connection, "boot") != boot_id():
        _carry_over(connection, clock.monotonic())
    return stored


def boot_id() -> bytes:
    """Return what tells this boot of the machine from others; monotonic times compare within one boot only."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"


def translate(exc: sqlite3.Error, path: Path) -> MoonrelayError:
    """Return our error for one of SQLite's; the only place that reads its codes."""
    code = getattr(exc, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        busy = DeadlineExceeded(f"{path} stayed locked by others; raise busy_timeout_s or look for a stuck process")
        busy.retryable = True
        return busy
    if code == sqlite3.SQLITE_NOTADB:
        return IntegrityError(f"{path} is not a SQLite database; choose another path or move the file away")
    if code == sqlite3.SQLITE_CORRUPT:
        return IntegrityError(f"{path} is damaged ({exc}); move it away, its requests must be submitted again")
    if code == sqlite3.SQLITE_FULL:
        return CapacityError(f"no room left for {path}; free space on its disk")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        return ConfigError(f"{path} cannot be opened for writing ({exc}); check the path and its rights", field="url")
    if code == sqlite3.SQLITE_ERROR and "no such" in str(exc):
        return IntegrityError(f"{path} lacks parts of a queue ({exc}); move it away")
    return MoonrelayError(f"{path}: {exc}", sqlite=getattr(exc, "sqlite_errorname", None))


_MARKS = ("application_id", "user_version")


def _create(connection: sqlite3.Connection, pipeline: Pipeline) -> Pipeline:
    for statement in _TABLES.split(";"):
        if statement.strip():
            connection.execute(statement)
    stages = [StoredStage(name=spec.name, kind=spec.kind, downstream=spec.downstream) for spec in pipeline]
    values = {"pipeline": msgspec.msgpack.encode(stages), "boot": boot_id()}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    return pipeline


def _unpack_pipeline(packed: bytes) -> Pipeline:
    try:
        stages = msgspec.msgpack.decode(packed, type=list[StoredStage])
        kinds = {"work": "work", "admission": "admission"}
        return Pipeline(
            [
                StageSpec(
                    name=one.name,
                    kind="admission" if kinds[one.kind] == "admission" else "work",
                    downstream=one.downstream,
                )
                for one in stages
            ]
        )
    except (msgspec.MsgspecError, KeyError, ConfigError) as exc:
        raise IntegrityError("the stored pipeline is damaged") from exc


def _meta(connection: sqlite3.Connection, name: str) -> bytes:
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    if row is None:
        message = f"the queue's file lacks {name!r}; move it away"
        raise IntegrityError(message)
    return bytes(row[0])


def _carry_over(connection: sqlite3.Connection, now_s: float) -> None:
    """Bring a file of an earlier boot to this boot's clock: time stood still meanwhile, and everybody is gone."""
    row = connection.execute(
        "SELECT max(at_s) FROM (SELECT max(updated_at_s) AS at_s FROM request UNION ALL SELECT max(at_s) FROM event)"
    ).fetchone()
    shift_s = 0.0 if row[0] is None else now_s - float(row[0])
    connection.execute(
        "UPDATE request SET queued_at_s = queued_at_s + ?1, not_before_s = not_before_s + ?1,"
        " submitted_at_s = submitted_at_s + ?1, updated_at_s = updated_at_s + ?1, deadline_at_s = deadline_at_s + ?1",
        (shift_s,),
    )
    connection.execute("UPDATE request SET lease_until_s = ? WHERE state = 'running'", (now_s,))
    connection.execute("UPDATE event SET at_s = at_s + ?", (shift_s,))
    connection.execute("DELETE FROM worker")
    connection.execute("UPDATE meta SET value = ? WHERE name = 'boot'", (boot_id(),))
