"""The embedded relay: one file per object in a folder of one machine, shared memory by default.

Owns the files' life: they are written beside the objects and linked to their name when complete, so an object is
never seen half, a key is never used twice, and what was stored outlives its writer. One copy into the store and one out
of it, both made by the kernel without the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig, unknown_key
from moonrelay.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    IntegrityError,
    MoonrelayError,
    PeerLost,
    TransferFailed,
)
from moonrelay.handle import Extent
from moonrelay.relay import parse_url
from moonrelay.relay.base import OnQuiet, Relay
from moonrelay.relay.extents import batches, check_key, check_parts, check_time, check_value
from moonrelay.relay.ledger import Ledger, Temporary

#: Bytes between two looks at the deadline.
_BATCH_BYTES = 16 << 20
_START_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 1.0


class LocalRelay(Relay):
    """Objects in files.

    Args:
        config: ``url`` is ``local:///folder`` or ``None`` for a folder of this user under ``/dev/shm`` (else under the
            system's temporary folder); ``capacity_bytes`` bounds the folder's total over all processes that use it, and
            each of them should give the same. No options.
    """

    scheme: ClassVar[str] = "local"

    def __init__(self, config: StoreConfig) -> None:
        self._capacity = config.capacity_bytes
        self._clock = SystemClock()
        self._ledger: Ledger | None = None
        for option in config.options:
            raise ConfigError(unknown_key(option, (), "The local relay"), field=option)
        self._root = _default_root() if config.url is None else _root_of(config.url)

    def start(self) -> None:
        if self._ledger is not None:
            return
        with _translated(f"cannot use the local relay's folder {self._root}"):
            _own_folder(self._root)
            for name in ("objects", "tmp"):
                (self._root / name).mkdir(mode=0o700, exist_ok=True)
            ledger = Ledger(self._root, self._capacity)
            ledger.recover(Deadline(_START_TIMEOUT_S, self._clock))
        self._ledger = ledger

    @property
    def url(self) -> str:
        return f"local://{self._root}"

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        try:
            kept, total = check_parts(parts)
            check_key(key)
            with self._temporary(key, total, deadline) as temporary:
                self._fill(temporary, batches(kept, _BATCH_BYTES), key, deadline)
                if not self._commit(temporary, key):
                    message = f"store key {key!r} exists already; keys are used once"
                    raise IntegrityError(message, key=key)
        finally:
            if on_quiet is not None:
                on_quiet()

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        try:
            kept, total = check_parts(parts)
            check_time(deadline, key)
            with _translated(f"object {key!r} not read"), self._opened(key) as fd:
                if fd is None:
                    return False
                nbytes = os.fstat(fd).st_size
                if nbytes != total:
                    message = f"object {key!r} has {nbytes} bytes, not {total}"
                    raise IntegrityError(message, key=key)
                at = 0
                for batch in batches(kept, _BATCH_BYTES):
                    check_time(deadline, key)
                    at += _exactly(os.preadv, fd, batch, at)
                return True
        finally:
            if on_quiet is not None:
                on_quiet()

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        check_key(key)
        check_value(value)
        while True:
            standing = self.get_bytes(key, deadline)
            if standing is not None:
                return standing
            with self._temporary(key, len(value), deadline) as temporary:
                self._fill(temporary, iter(([memoryview(value)],)), key, deadline)
                if self._commit(temporary, key):
                    return value
            check_time(deadline, key)  # somebody was faster: read theirs, unless it is removed meanwhile

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        check_time(deadline, key)
        with _translated(f"object {key!r} not read"), self._opened(key) as fd:
            return None if fd is None else os.pread(fd, os.fstat(fd).st_size, 0)

    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        names = [_name_of(check_key(key)) for key in keys]
        with _translated("objects not removed"):
            self._started().remove(names, deadline)

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        check_time(deadline, prefix)
        start = _name_of(prefix)
        with _translated("objects not listed"), os.scandir(self._started().objects) as entries:
            return sorted(_key_of(entry.name) for entry in entries if entry.name.startswith(start))

    def age_s(self, key: str) -> float | None:
        # Files are stamped with the machine's monotonic clock, so the age survives changes of the wall clock. A stamp
        # from before the last boot gives less than the truth, or nothing.
        with _translated(f"object {key!r} not read"), self._opened(key) as fd:
            if fd is None:
                return None
            age_s = self._clock.monotonic() - os.fstat(fd).st_mtime
            return age_s if age_s >= 0 else None

    def close(self) -> None:
        self._ledger = None

    def _started(self) -> Ledger:
        ledger = self._ledger
        if ledger is None:
            message = "the local relay is not started, or closed"
            raise ClosedError(message, url=self.url)
        return ledger

    @contextlib.contextmanager
    def _temporary(self, key: str, nbytes: int, deadline: Deadline) -> Iterator[Temporary]:
        """Reserve a file, and drop it on the way out unless it was committed."""
        ledger = self._started()
        with _translated(f"object {key!r} not stored"):
            temporary = ledger.reserve(nbytes, deadline)
            try:
                yield temporary
            finally:
                if temporary.path.exists():
                    ledger.abort(temporary, Deadline(_ABORT_TIMEOUT_S, self._clock))

    def _fill(self, temporary: Temporary, content: Iterator[list[memoryview]], key: str, deadline: Deadline) -> None:
        at = 0
        for batch in content:
            check_time(deadline, key)
            at += _exactly(os.pwritev, temporary.fd, batch, at)
        stamp_ns = int(self._clock.monotonic() * 1e9)
        os.utime(temporary.fd, ns=(stamp_ns, stamp_ns))

    def _commit(self, temporary: Temporary, key: str) -> bool:
        return self._started().commit(temporary, _name_of(key))

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int | None]:
        path = self._started().objects / _name_of(check_key(key))
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)


def _default_root() -> Path:
    shared = Path("/dev/shm")
    base = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"moonrelay-{os.geteuid()}"


def _root_of(text: str) -> Path:
    url = parse_url(text)
    if url.scheme != LocalRelay.scheme or url.host or url.port is not None or url.query or not url.path.strip("/"):
        message = f"store url {text!r} must be local:///absolute/folder"
        raise ConfigError(message, field="url")
    return Path(url.path)


def _own_folder(root: Path) -> None:
    """Make ``root``, or check that it is a folder of this very user that nobody else can write.

    Raises:
        ConfigError: It belongs to another user, is a link or no folder, or others may write there.
    """
    root.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        message = f"store folder {root} is a link or no folder; name a folder of your own"
        raise ConfigError(message, field="url")
    if status.st_uid != os.geteuid():
        message = f"store folder {root} belongs to user {status.st_uid}, not {os.geteuid()}; name a folder of your own"
        raise ConfigError(message, field="url")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        message = f"store folder {root} can be written by others; run chmod 700 {root}"
        raise ConfigError(message, field="url")


def _name_of(key: str) -> str:
    return "k" + key.replace("/", "%")


def _key_of(name: str) -> str:
    return name[1:].replace("%", "/")


def _exactly(move: Callable[[int, list[memoryview], int], int], fd: int, batch: list[memoryview], offset: int) -> int:
    """Repeat a short vectored read or write until the whole batch is moved; return its size."""
    done = 0
    while batch:
        moved = move(fd, batch, offset + done)
        if moved == 0:
            message = "the file ended early"
            raise IntegrityError(message)
        done += moved
        while batch and moved >= batch[0].nbytes:
            moved -= batch[0].nbytes
            batch = batch[1:]
        if moved:
            batch = [batch[0][moved:], *batch[1:]]
    return done


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn the system's errors into ours; the one table of this relay."""
    try:
        yield
    except MoonrelayError:
        raise
    except OSError as error:
        message = f"{what}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise CapacityError(message) from error
        if error.errno in (errno.ENOENT, errno.ESTALE, errno.ENODEV):
            message = f"{message}; the relay's folder is gone"
            raise PeerLost(message) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            message = f"{message}; name a folder that this user may write"
            raise ConfigError(message, field="url") from error
        raise TransferFailed(message) from error
