"""The folder behind the local relay: files of objects, files being written, and how many bytes both take.

Owns the folder's lock and its count of used bytes, correct with any number of processes, also when one is killed. The
count may be too high for a moment after a crash, never too low; it is made anew from the files before anybody is told
that the folder is full.

Layout::

    lock           flock'ed for every change; holds the count, 8 bytes
    objects/k...   one file per object, ``/`` of the key written as ``%``; linked here when complete
    tmp/...        files being written, each flock'ed by its writer, so that a dead writer's file is known by its lock
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import CapacityError, TransferTimeout

_COUNT_BYTES = 8
_PAUSE_S = 0.001


@dataclass(frozen=True, slots=True)
class Temporary:
    """A file being written: room for ``nbytes`` is reserved in the count."""

    fd: int
    path: Path
    nbytes: int


class Ledger:
    """Reserves, commits and removes files of one folder.

    Threads: all methods from any thread and any process.

    Args:
        root: The folder; ``objects`` and ``tmp`` exist in it.
        capacity_bytes: Bound of all files' sizes.
    """

    def __init__(self, root: Path, capacity_bytes: int) -> None:
        self._lock_path = root / "lock"
        self._capacity = capacity_bytes
        self.objects = root / "objects"
        self._temporaries = root / "tmp"

    def reserve(self, nbytes: int, deadline: Deadline) -> Temporary:
        """Make a file for ``nbytes`` and count it.

        Blocks: while another process changes the folder, until the deadline at most.

        Raises:
            CapacityError: No room.
            TransferTimeout: The folder stayed locked.
            OSError: The system refuses.
        """
        with self._locked(deadline) as lock:
            used = self._read(lock)
            if used is None or used + nbytes > self._capacity:
                used = self._recount()
                self._write(lock, used)
            if used + nbytes > self._capacity:
                message = f"{nbytes} bytes do not fit the local relay; raise capacity_bytes={self._capacity}"
                raise CapacityError(message, used=used)
            path = self._temporaries / uuid.uuid4().hex
            self._write(lock, used + nbytes)
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.ftruncate(fd, nbytes)
                except OSError:
                    path.unlink()
                    os.close(fd)
                    raise
            except OSError:
                self._write(lock, used)
                raise
        return Temporary(fd, path, nbytes)

    def commit(self, temporary: Temporary, name: str) -> bool:
        """Make the file the object ``name``, whole, and close it; False, and nothing done, when that exists."""
        try:
            os.link(temporary.path, self.objects / name)
        except FileExistsError:
            return False
        temporary.path.unlink()
        os.close(temporary.fd)
        return True

    def abort(self, temporary: Temporary, deadline: Deadline) -> None:
        """Drop a file being written and its reservation."""
        try:
            with self._locked(deadline) as lock:
                temporary.path.unlink(missing_ok=True)
                self._add(lock, -temporary.nbytes)
        except (TransferTimeout, OSError):
            # The count stays too high until the next recount; subtracting without the lock could make it too low.
            with contextlib.suppress(OSError):
                temporary.path.unlink(missing_ok=True)
        finally:
            os.close(temporary.fd)

    def remove(self, names: list[str], deadline: Deadline) -> None:
        """Remove objects; missing ones are fine.

        Raises:
            TransferTimeout: The folder stayed locked; none was removed.
        """
        with self._locked(deadline) as lock:
            for name in names:
                path = self.objects / name
                try:
                    nbytes = path.stat().st_size
                    path.unlink()
                except FileNotFoundError:
                    continue
                self._add(lock, -nbytes)

    def recover(self, deadline: Deadline) -> int:
        """Remove what dead writers left, count the files anew, and return the count."""
        with self._locked(deadline) as lock:
            used = self._recount()
            self._write(lock, used)
        return used

    @contextlib.contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[int]:
        # A file description of its own for each use: threads exclude each other like processes do.
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pause = threading.Condition()
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if deadline.expired:
                        message = f"the local relay's folder stayed locked by another process: {self._lock_path}"
                        raise TransferTimeout(message) from None
                    with pause:
                        SystemClock().wait(pause, _PAUSE_S)
            yield fd
        finally:
            os.close(fd)

    def _recount(self) -> int:
        """Count the bytes of all files under the lock, dead writers' files removed first."""
        for path in list(self._temporaries.iterdir()):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            except (BlockingIOError, FileNotFoundError):
                continue
            finally:
                os.close(fd)
        sizes: dict[int, int] = {}  # by inode: a file just committed stands in both folders for a moment
        for folder in (self._temporaries, self.objects):
            with os.scandir(folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        sizes[status.st_ino] = status.st_size
        return sum(sizes.values())

    def _add(self, lock: int, nbytes: int) -> None:
        used = self._read(lock)
        if used is not None:
            self._write(lock, max(0, used + nbytes))

    @staticmethod
    def _read(lock: int) -> int | None:
        raw = os.pread(lock, _COUNT_BYTES, 0)
        return int.from_bytes(raw, "little") if len(raw) == _COUNT_BYTES else None

    @staticmethod
    def _write(lock: int, used: int) -> None:
        if os.pwrite(lock, used.to_bytes(_COUNT_BYTES, "little"), 0) != _COUNT_BYTES:
            raise OSError(errno.ENOSPC, "no room for the local relay's own count")
