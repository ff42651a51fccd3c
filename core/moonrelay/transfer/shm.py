"""The engine of one host on CPU: pools are files in shared memory, a read is one memmove from a mapping.

Owns the segments ``moonrelay-te-<pid>-<nonce>-<n>``, their locks and the sweep of what a killed process left. An
owner holds an exclusive ``flock`` on each of its segments for its life, so a segment whose lock can be had is an
orphan. Readers map a peer's segment read-only, by a checked name; its bytes stay readable after its owner was killed,
until a sweep.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from moonrelay.config import TransferConfig
from moonrelay.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    MoonrelayError,
    PeerLost,
    RegistrationError,
)
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, TransferEngine
from moonrelay.transfer.mapping import Mapping, copy, map_file
from moonrelay.transfer.operations import Finished, out_of_bounds

logger = logging.getLogger(__name__)

DIRECTORY = Path("/dev/shm")
PREFIX = "moonrelay-te-"
_NAME = re.compile(r"moonrelay-te-[0-9]{1,10}-([0-9a-f]{32})-[0-9]{1,6}\Z")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
#: Peers' segments kept mapped; the least recently read is dropped first.
_MAX_CACHED = 64


class _Segment:
    """A segment of this process: named, locked, mapped."""

    __slots__ = ("fd", "mapping", "path")

    def __init__(self, path: Path, fd: int, mapping: Mapping) -> None:
        self.path = path
        self.fd = fd
        self.mapping = mapping

    def unlink(self) -> None:
        """Take the name away and give the lock back; the memory stays mapped. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.close(fd)


class ShmEngine(TransferEngine):
    """Reads between two processes of one host.

    ``options``: ``directory`` (default ``/dev/shm``), the same for both peers.

    Threads: any. A read is complete when ``read`` returns; the copy releases the GIL.
    """

    name: ClassVar[str] = "shm"
    registers_foreign_memory: bool = False
    lands_in_foreign_memory: bool = True
    # A read is over when it returns, so pieces give no overlap; but a digest of what is still in the core's own cache
    # takes a third of the time.
    fixed_piece_bytes: int | None = 1 << 20

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        # Re-entrant, because `release` may be called by a finalizer while this thread is inside.
        self._lock = threading.RLock()
        self._directory = DIRECTORY
        self._address: EngineAddress | None = None
        self._closed = False
        self._segments: dict[str, _Segment] = {}
        self._cached: OrderedDict[str, Mapping] = OrderedDict()
        self._count = 0

    def start(self) -> None:
        if self._config.device != "cpu":
            message = f"device={self._config.device!r} cannot be served by engine 'shm'; use device='cpu'"
            raise ConfigError(message, field="device")
        directory = directory_of(self._config)
        with self._lock:
            if self._closed:
                message = "the shm engine is closed"
                raise ClosedError(message)
            if self._address is not None:
                return
            self._directory = directory
            nonce = secrets.token_hex(16)
            self._address = EngineAddress(engine=self.name, address=f"shm:{_boot_id()}", nonce=nonce)
        swept = sweep_orphans(directory)
        if swept:
            logger.info("removed %d shared-memory segments of dead processes", len(swept))

    @property
    def address(self) -> EngineAddress:
        if self._address is None:
            message = "the shm engine was not started"
            raise ClosedError(message)
        return self._address

    def allocate(self, nbytes: int) -> Region:
        with self._lock:
            self._require_open()
            segment = self._create(nbytes)
            self._segments[segment.path.name] = segment
        return Region(key=segment.path.name, base=segment.mapping.address, nbytes=nbytes)

    def commit(self, region: Region, offset: int, nbytes: int) -> None:
        segment = self._segments.get(region.key)
        if segment is None or segment.fd < 0 or nbytes < 1:
            return
        try:
            # Without this, touching a page that the file system has no room for kills the process (SIGBUS).
            os.posix_fallocate(segment.fd, offset, nbytes)
        except OSError as exc:
            message = f"no room for {nbytes} bytes in {self._directory}: {exc.strerror}; enlarge it or lower pool_bytes"
            raise CapacityError(message, wanted=nbytes, fits=exc.errno == errno.ENOSPC) from exc
        segment.mapping.populate(offset, nbytes)

    def release(self, region: Region) -> None:
        segment = self._segments.pop(region.key, None)
        if segment is not None:
            segment.unlink()

    def register(self, address: int, nbytes: int) -> Region:
        self._require_open()
        message = (
            "engine 'shm' serves only memory of its own: make the tensor with conn.empty(...), or let it be staged"
        )
        raise RegistrationError(message, nbytes=nbytes)

    def unregister(self, region: Region) -> None:
        """Nothing can be registered, so there is nothing to undo."""

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        self._require_open()
        error = out_of_bounds(region, remote_address, nbytes)
        if error is not None:
            return Finished(error)
        source = self._mapped(peer, region)
        if isinstance(source, MoonrelayError):
            return Finished(source)
        offset = remote_address - region.base
        error = out_of_bounds(Region(key=region.key, base=0, nbytes=source.nbytes), offset, nbytes)
        if error is not None:
            return Finished(error)
        copy(local_address, source.address + offset, nbytes)
        return Finished()

    def forget(self, peer: EngineAddress) -> None:
        with self._lock:
            for name in [name for name in self._cached if _nonce_of(name) == peer.nonce]:
                del self._cached[name]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._cached.clear()
            for segment in list(self._segments.values()):
                segment.unlink()

    def _create(self, nbytes: int) -> _Segment:
        while True:
            self._count += 1
            path = self._directory / f"{PREFIX}{os.getpid()}-{self.address.nonce}-{self._count}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as exc:
                message = f"cannot create shared memory in {self._directory}: {exc.strerror}"
                raise CapacityError(message, wanted=nbytes) from exc
            try:
                if not _lock_own(fd):
                    os.close(fd)  # a sweep took it for an orphan between the two calls; it is gone
                    continue
                os.ftruncate(fd, nbytes)
                return _Segment(path, fd, map_file(fd, nbytes, writable=True))
            except OSError as exc:
                path.unlink(missing_ok=True)
                os.close(fd)
                message = f"cannot size shared memory in {self._directory} to {nbytes} bytes: {exc.strerror}"
                raise CapacityError(message, wanted=nbytes) from exc
            except CapacityError:
                path.unlink(missing_ok=True)
                os.close(fd)
                raise

    def _mapped(self, peer: EngineAddress, region: Region) -> Mapping | MoonrelayError:
        """Return the read-only mapping of a peer's segment, from the cache or new; or the error."""
        if _nonce_of(region.key) != peer.nonce:
            message = f"region {region.key[:80]!r} is no segment of this peer"
            return RegistrationError(message, peer=peer.address)
        with self._lock:
            known = self._cached.get(region.key)
            if known is not None:
                self._cached.move_to_end(region.key)
                return known
            self._drop_vanished()
            mapping = self._open(peer, region)
            if isinstance(mapping, Mapping) and not self._closed:
                self._cached[region.key] = mapping
                while len(self._cached) > _MAX_CACHED:
                    self._cached.popitem(last=False)
            return mapping

    def _open(self, peer: EngineAddress, region: Region) -> Mapping | MoonrelayError:
        path = self._directory / region.key
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            message = (
                f"cannot open segment {region.key!r}: {exc.strerror}; the peer closed it, runs on another host "
                f"or in a container with its own {self._directory}, or as another user"
            )
            return PeerLost(message, peer=peer.address)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size < region.nbytes:
                message = f"segment {region.key!r} has {facts.st_size} bytes, not {region.nbytes}"
                return RegistrationError(message, peer=peer.address)
            return map_file(fd, facts.st_size, writable=False)
        except CapacityError as exc:
            return exc
        finally:
            os.close(fd)

    def _drop_vanished(self) -> None:
        """Unmap segments whose owner has taken the name away, so that they do not pin its memory."""
        for name in [name for name in self._cached if not (self._directory / name).exists()]:
            del self._cached[name]

    def _require_open(self) -> None:
        if self._closed or self._address is None:
            message = f"the shm engine {'is closed' if self._closed else 'was not started'}"
            raise ClosedError(message)


def directory_of(config: TransferConfig) -> Path:
    """Return the folder for segments that a config names.

    Raises:
        ConfigError: It is no folder.
    """
    directory = Path(str(config.options.get("directory", DIRECTORY)))
    if not directory.is_dir():
        message = f"options.directory={str(directory)!r} is no folder; engine 'shm' needs one in shared memory"
        raise ConfigError(message, field="directory")
    return directory


def sweep_orphans(directory: Path = DIRECTORY) -> list[str]:
    """Remove segments whose owner died, and return their names.

    Only names of this module's form, of files this user may open; a living owner's lock protects its segments.

    Threads: any, also in many processes at once.
    """
    return [name for name in _segment_names(directory) if _remove_orphan(directory / name)]


def _segment_names(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries if _NAME.match(entry.name)]
    except OSError:
        return
    yield from names


def _remove_orphan(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone meanwhile, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:
        return False  # its owner lives, or another sweep was faster
    finally:
        os.close(fd)
    return True


def _lock_own(fd: int) -> bool:
    """Lock a segment just created; False when a sweep was faster."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(fd).st_nlink > 0


def _nonce_of(name: str) -> str | None:
    found = _NAME.match(name)
    return None if found is None else found.group(1)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
