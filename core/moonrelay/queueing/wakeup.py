"""Bells: how one process tells others of the same machine to look at the database again.

Owns a folder beside the database with one FIFO for each process that waits. A byte in it means "look again" and nothing
else; a lost one costs a pause of the watcher's poll. A FIFO whose process died has no reader, and is removed by
whoever rings next.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import select
import threading
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)


class Bell:
    """This process's end of the bells: one FIFO to be woken by, and ringing all others.

    Where the folder cannot hold FIFOs, waiting still ends by its timeout and by `wake_self`.

    Args:
        folder: Where the FIFOs are; made when needed, and removed with the last of them.

    Threads: `wait` from one thread; everything else from any.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._path: Path | None = None
        self._fd: int | None = None
        self._closed = False

    def hang_up(self) -> None:
        """Make this process's FIFO, so that others can ring it. Idempotent."""
        with self._lock:
            if self._fd is not None or self._closed:
                return
            for _ in range(8):
                try:
                    self._folder.mkdir(mode=0o777, exist_ok=True)
                    self._make()
                except FileNotFoundError:
                    continue  # the last of the others removed the folder just now
                except OSError as exc:
                    logger.warning("no wake-ups between processes in %s, polling instead: %s", self._folder, exc)
                return

    def wait(self, timeout_s: float | None) -> bool:
        """Wait to be rung. Blocks: until then, or ``timeout_s``. Returns whether it was."""
        fd = self._fd
        if fd is None:
            rung = self._woken.wait(timeout_s)
            self._woken.clear()
            return rung
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        rung = bool(poller.poll(None if timeout_s is None else max(1, round(timeout_s * 1000))))
        if rung:
            with suppress(BlockingIOError):
                os.read(fd, 65536)
        return rung

    def wake_self(self) -> None:
        """End this process's own `wait`."""
        self._woken.set()
        with self._lock:
            if self._fd is not None:
                with suppress(BlockingIOError):  # full: it is awake already
                    os.write(self._fd, b"\0")

    def ring(self) -> None:
        """Wake every other process that waits, and clear away what dead ones left."""
        own = None if self._path is None else self._path.name
        try:
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in entries if entry.name != own]
        except FileNotFoundError:
            return  # nobody waits
        except OSError as exc:
            logger.warning("cannot ring %s: %s", self._folder, exc)
            return
        for name in names:
            if name.startswith("."):
                _sweep(self._folder / name)
            else:
                _ring_one(self._folder / name)

    def close(self) -> None:
        """Remove the FIFO, and the folder if it is the last. Idempotent; `wait` must not be running."""
        with self._lock:
            self._closed = True
            fd, path, self._fd, self._path = self._fd, self._path, None, None
        if path is not None:
            path.unlink(missing_ok=True)
        if fd is not None:
            os.close(fd)
        with suppress(OSError):
            self._folder.rmdir()

    def _make(self) -> None:
        name = f"{os.getpid()}-{secrets.token_hex(6)}"
        draft, path = self._folder / f".{name}", self._folder / name
        os.mkfifo(draft, 0o666)
        try:
            # Reading and writing: so there is always a writer, and poll() never reports a hang-up.
            fd = os.open(draft, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._fd, self._path = fd, path


def _ring_one(path: Path) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno == errno.ENXIO:  # nobody reads it: its process is gone
            with suppress(OSError):
                path.unlink()
        elif exc.errno != errno.ENOENT:
            logger.warning("cannot ring %s: %s", path, exc)
        return
    try:
        os.write(fd, b"\0")
    except (BlockingIOError, BrokenPipeError):
        pass  # full, so it is awake already; or it is going away
    finally:
        os.close(fd)


def _sweep(draft: Path) -> None:
    """Remove the draft of a process that died while it made its FIFO."""
    pid = draft.name[1:].partition("-")[0]
    if not pid.isdigit():
        return
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        with suppress(OSError):
            draft.unlink()
    except OSError:
        pass  # it lives, as another user's
