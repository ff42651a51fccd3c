"""What the process of a suite holds, as the system tells it: descriptors, threads, mapped memory.

Owns the looking, and the patience until what was let go is gone. Asks nothing of the code under test.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from moonrelay.clock import Deadline, SystemClock

#: Until when what was let go must be gone.
SETTLE_S = 10.0
_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Footprint:
    """A look at this process.

    Attributes:
        fds: Open descriptors.
        threads: Threads of the system.
        mapped: Mappings whose file lies below the folder that was given.
        virtual_bytes: Mapped memory of all kinds.
    """

    fds: int
    threads: int
    mapped: int
    virtual_bytes: int


def footprint(folder: Path) -> Footprint:
    """Look at this process, garbage collected."""
    gc.collect()
    inside = f"{folder}{os.sep}"
    return Footprint(
        fds=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
        mapped=sum(inside in line for line in Path("/proc/self/maps").read_text().splitlines()),
        virtual_bytes=int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"),
    )


def settles_at(before: Footprint, folder: Path, *, slack_bytes: int) -> None:
    """Wait until this process holds no more than ``before``.

    Args:
        before: An earlier look.
        folder: As then.
        slack_bytes: By how much mapped memory may have grown: the C library keeps some for its threads.

    Raises:
        AssertionError: It still does after `SETTLE_S`; the message says what is left.
    """
    deadline = Deadline(SETTLE_S, SystemClock())
    while True:
        now = footprint(folder)
        left = [
            f"{getattr(now, name) - getattr(before, name)} {what} more than before"
            for name, what in (("fds", "descriptors"), ("threads", "threads"), ("mapped", "mappings of its files"))
            if getattr(now, name) > getattr(before, name)
        ]
        if now.virtual_bytes > before.virtual_bytes + slack_bytes:
            left.append(f"{now.virtual_bytes - before.virtual_bytes} bytes of mapped memory more than before")
        if not left:
            return
        assert not deadline.expired, "left behind: " + ", ".join(left)
        threading.Event().wait(0.05)


class Memory:
    """Memory of the suite's own, between two guards that nobody may write.

    Args:
        content: Initial bytes.

    Attributes:
        address: First byte.
        nbytes: Length.
    """

    GUARD = bytes(range(7, 71))

    def __init__(self, content: bytes) -> None:
        self._whole = ctypes.create_string_buffer(self.GUARD + content + self.GUARD, len(content) + 2 * len(self.GUARD))
        self.address = ctypes.addressof(self._whole) + len(self.GUARD)
        self.nbytes = len(content)

    def read(self) -> bytes:
        """Return the bytes.

        Raises:
            AssertionError: A guard was written.
        """
        guard, raw = len(self.GUARD), self._whole.raw
        assert raw[:guard] == self.GUARD, "bytes before the given memory were written"
        assert raw[-guard:] == self.GUARD, "bytes after the given memory were written"
        return raw[guard:-guard]


def at(address: int, nbytes: int) -> bytes:
    """Return the bytes at an address of this process."""
    return ctypes.string_at(address, nbytes)


def differs(found: bytes, wanted: bytes) -> str:
    """Say where two byte strings differ first, for a message; empty where they are equal."""
    if found == wanted:
        return ""
    if len(found) != len(wanted):
        return f"{len(found)} bytes instead of {len(wanted)}"
    starts = [n for n in range(0, len(wanted), _BLOCK) if found[n : n + _BLOCK] != wanted[n : n + _BLOCK]]
    first = next(n for n in range(starts[0], len(wanted)) if found[n] != wanted[n])
    return f"bytes are wrong, the first at {first} of {len(wanted)}, in {len(starts)} blocks of {_BLOCK}"
