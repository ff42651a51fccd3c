"""Mapped memory of this process that is unmapped when its last user lets go.

Owns the calls to the C library. An engine and everybody who copies from or to a mapping hold the `Mapping`; there is no
explicit unmap, so nothing can be unmapped under a copy. Mappings hold no file descriptor.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

from moonrelay.errors import CapacityError

_FAILED = ctypes.c_void_p(-1).value
#: Linux's value where Python's mmap module does not know it.
_HUGEPAGE = getattr(mmap, "MADV_HUGEPAGE", 14)
_POPULATE_WRITE = 23  # since Linux 5.14


class Mapping:
    """A range of mapped memory; unmapped when the object dies.

    Attributes:
        address: First byte; page-aligned.
        nbytes: Length in bytes.
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        # At exit the system unmaps; a finalizer there could run before the last copy ends.
        weakref.finalize(self, _unmap, address, nbytes).atexit = False

    def holds(self, address: int, nbytes: int) -> bool:
        """Say whether a range lies inside."""
        return self.address <= address and nbytes >= 0 and address + nbytes <= self.address + self.nbytes

    def populate(self, offset: int, nbytes: int) -> bool:
        """Have the system map pages for writing at once, instead of at the first touch of each.

        Costs less than half of the page faults that it spares. Releases the GIL.

        Returns:
            False where the system cannot; then the pages are mapped when they are touched, as without this.
        """
        begin = offset - offset % mmap.PAGESIZE
        return bool(_libc().madvise(self.address + begin, offset + nbytes - begin, _POPULATE_WRITE) == 0)


def map_memory(nbytes: int) -> Mapping:
    """Map new private memory, readable and writable, in huge pages where the system has them; touched lazily.

    Raises:
        CapacityError: The system gives no such memory.
    """
    return _map(nbytes, -1, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, huge=True)


def map_file(fd: int, nbytes: int, *, writable: bool) -> Mapping:
    """Map the first ``nbytes`` of a file, shared; the descriptor may be closed afterwards.

    Raises:
        CapacityError: The system gives no such mapping.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    return _map(nbytes, fd, protection, mmap.MAP_SHARED, huge=False)


def copy(destination: int, source: int, nbytes: int) -> None:
    """Copy between addresses of this process. Releases the GIL."""
    ctypes.memmove(destination, source, nbytes)


def _map(nbytes: int, fd: int, protection: int, flags: int, *, huge: bool) -> Mapping:
    libc = _libc()
    address = libc.mmap(None, nbytes, protection, flags, fd, 0)
    if address is None or address == _FAILED:
        reason = os.strerror(ctypes.get_errno())
        message = f"cannot map {nbytes} bytes: {reason}; lower pool_bytes"
        raise CapacityError(message, wanted=nbytes)
    mapping = Mapping(address, nbytes)
    if huge:
        libc.madvise(address, nbytes, _HUGEPAGE)  # advice: a kernel without huge pages refuses, which is fine
    return mapping


def _unmap(address: int, nbytes: int) -> None:
    _libc().munmap(address, nbytes)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
