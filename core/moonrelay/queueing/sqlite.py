"""The embedded queue: one SQLite file in WAL mode, shared by the processes of one machine; durable.

Owns the connections, the watcher that hears of other processes' changes, and the URL. All processes must run in one
boot of one machine, since leases are reckoned on its monotonic clock; a file from an earlier boot is carried over.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from moonrelay.clock import Clock
from moonrelay.errors import ClosedError, ConfigError, PluginError
from moonrelay.queueing import schema
from moonrelay.queueing.engine import Engine
from moonrelay.queueing.rows import SqliteTransaction
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.store import Transaction
from moonrelay.queueing.stored import StoredQueue
from moonrelay.queueing.task import Pipeline
from moonrelay.queueing.wakeup import Bell

logger = logging.getLogger(__name__)

_BUSY_RETRY_S = 0.02
_FIRST_POLL_S = 0.02


class Connections:
    """Connections to one file, one for each thread that is in a transaction at the moment; kept for the next.

    Threads: any; each connection is in one thread's hands at a time.
    """

    def __init__(self, path: Path, busy_timeout_s: float) -> None:
        self._path = path
        self._busy_timeout_s = busy_timeout_s
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False

    def connect(self) -> sqlite3.Connection:
        """Open a new connection, which the caller closes."""
        try:
            connection = sqlite3.connect(
                self._path, timeout=self._busy_timeout_s, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as exc:
            raise schema.translate(exc, self._path) from exc
        try:
            # In WAL mode NORMAL survives any death of processes; only a power cut can lose the last transactions.
            connection.execute("PRAGMA synchronous = NORMAL")
        except sqlite3.Error as exc:
            connection.close()
            raise schema.translate(exc, self._path) from exc
        return connection

    @contextmanager
    def borrow(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection that no other thread has; it must be handed back outside a transaction."""
        with self._lock:
            if self._closed:
                raise ClosedError("the queue was closed", path=str(self._path))
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self.connect()
        try:
            yield connection
        finally:
            with self._lock:
                keep = not self._closed and not connection.in_transaction
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def close(self) -> None:
        """Close what is idle now, and the others as they come back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


class SqliteEngine(Engine):
    """Transactions on one file, and hearing of other processes' transactions.

    Threads: any. ``moonrelay-queue-watch`` is its own, and runs once somebody waits.
    """

    def __init__(self, path: Path, clock: Clock, config: QueueConfig, pipeline: Pipeline | None) -> None:
        super().__init__(clock, config)
        self._path = path
        self._connections = Connections(path, config.busy_timeout_s)
        self._bell = Bell(path.with_name(path.name + "-bells"))
        self._watch_lock = threading.Lock()
        self._waiting = 0
        self._watcher: threading.Thread | None = None
        try:
            self._pipeline = self._open(pipeline)
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return f"sqlite:///{quote(str(self._path))}"

    @property
    def pipeline(self) -> Pipeline:
        return self._pipeline

    @contextmanager
    def transaction(self, *, write: bool) -> Iterator[Transaction]:
        with self._connections.borrow() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                try:
                    yield SqliteTransaction(connection)
                    connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        connection.rollback()
                    raise
            except sqlite3.Error as exc:
                raise schema.translate(exc, self._path) from exc

    def ring(self) -> None:
        self._bell.ring()

    def watch(self, waiting: bool) -> None:
        with self._watch_lock:
            self._waiting += 1 if waiting else -1
            if not waiting or self.closed:
                return
            first = self._waiting == 1
            if self._watcher is None:
                self._bell.hang_up()
                self._watcher = threading.Thread(target=self._watch, name="moonrelay-queue-watch", daemon=True)
                self._watcher.start()
        if first:
            self._bell.wake_self()

    def close(self) -> None:
        super().close()
        with self._watch_lock:
            watcher, self._watcher = self._watcher, None
        if watcher is not None:
            self._bell.wake_self()
            watcher.join()
        self._bell.close()
        self._connections.close()

    def _open(self, wanted: Pipeline | None) -> Pipeline:
        if sqlite3.sqlite_version_info < schema.OLDEST_SQLITE:
            message = f"SQLite {sqlite3.sqlite_version} is too old; the queue needs 3.35 or newer"
            raise PluginError(message, scheme="sqlite")
        with self._connections.borrow() as connection:
            try:
                self._use_wal(connection)
                connection.execute("BEGIN IMMEDIATE")
                try:
                    pipeline = schema.prepare(connection, self._path, wanted, self.clock)
                    connection.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        connection.rollback()
                    raise
            except sqlite3.Error as exc:
                raise schema.translate(exc, self._path) from exc
        return pipeline

    def _use_wal(self, connection: sqlite3.Connection) -> None:
        """Switch to WAL. The busy timeout does not cover this switch, so several first openers take turns here."""
        left_s = self.config.busy_timeout_s
        while True:
            try:
                mode = str(connection.execute("PRAGMA journal_mode = WAL").fetchone()[0])
            except sqlite3.OperationalError as exc:
                if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or left_s <= 0:
                    raise
                self._bell.wait(_BUSY_RETRY_S)
                left_s -= _BUSY_RETRY_S
                continue
            if mode != "wal":
                message = f"{self._path} cannot use a write-ahead log (mode {mode}); choose a local folder"
                raise ConfigError(message, field="url")
            return

    def _watch(self) -> None:
        try:
            with closing(self._connections.connect()) as connection:
                self._listen(connection)
        except Exception as exc:  # the thread's outermost frame
            if not self.closed:
                logger.exception("the watcher of %s ended; waiting calls fail", self._path)
                self.fail(exc)

    def _listen(self, connection: sqlite3.Connection) -> None:
        """Pass on every ring, and find by polling what was changed without one."""
        seen, pause_s = self._version(connection), _FIRST_POLL_S
        while not self.closed:
            with self._watch_lock:
                waiting = self._waiting > 0
            rung = self._bell.wait(pause_s if waiting else None)
            version = self._version(connection)
            if rung or version != seen:
                seen, pause_s = version, _FIRST_POLL_S
                self.note_change()
            else:
                pause_s = min(self.config.poll_s, pause_s * 2)

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return a number that changes when another connection changed the file."""
        try:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error as exc:
            error = schema.translate(exc, self._path)
            if error.retryable:
                return -1  # locked for a moment: look again
            raise error from exc


class SqliteQueue(StoredQueue):
    """The queue in a SQLite file: ``sqlite:///relative/path.db`` or ``sqlite:////absolute/path.db``."""

    @classmethod
    def open(cls, url: str, *, clock: Clock, pipeline: Pipeline | None, config: QueueConfig) -> SqliteQueue:
        return cls(SqliteEngine(path_of(url), clock, config, pipeline))


def path_of(url: str) -> Path:
    """Return the absolute path that a ``sqlite://`` URL names.

    Raises:
        ConfigError: The URL names a host or settings, or no file in an existing folder.
    """
    parts = urlsplit(url)
    hint = "use sqlite:///relative/path.db or sqlite:////absolute/path.db"
    if parts.netloc:
        message = f"url={url!r} names a host {parts.netloc!r}; {hint}"
        raise ConfigError(message, field="url")
    if parts.query or parts.fragment:
        message = f"url={url!r} must not have a query or a fragment (escape '?' as %3F and '#' as %23); {hint}"
        raise ConfigError(message, field="url")
    text = unquote(parts.path.removeprefix("/"))
    if not text or "\0" in text or text == ":memory:":
        message = f"url={url!r} names no file; {hint}, or memory:// for a queue inside one process"
        raise ConfigError(message, field="url")
    path = Path(text).absolute()
    if not path.parent.is_dir():
        message = f"url={url!r}: there is no folder {path.parent}; make it first"
        raise ConfigError(message, field="url")
    if path.is_dir():
        message = f"url={url!r}: {path} is a folder; {hint}"
        raise ConfigError(message, field="url")
    return path
