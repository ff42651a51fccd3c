"""Checks of keys, values, extents and time, and the host memory behind extents as buffers.

Owns what all relays check alike. Nothing here copies bytes.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence

from moonrelay.clock import Deadline
from moonrelay.errors import ConfigError, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay.base import MAX_VALUE_BYTES

MAX_KEY_BYTES = 200
_KEY = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_KEY_BYTES}}}")


def check_key(key: str) -> str:
    """Return ``key``.

    Raises:
        ConfigError: Empty, longer than 200 bytes, or with a character outside ``A-Z a-z 0-9 . _ - /``.
    """
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        message = f"store key {key!r:.80} must be 1 to {MAX_KEY_BYTES} characters of A-Z a-z 0-9 . _ - /"
        raise ConfigError(message, field="key")
    return key


def check_value(value: bytes) -> bytes:
    """Return ``value``.

    Raises:
        ConfigError: Not bytes, empty, or larger than `MAX_VALUE_BYTES`.
    """
    if not isinstance(value, bytes) or not 1 <= len(value) <= MAX_VALUE_BYTES:
        size = len(value) if isinstance(value, bytes) else type(value).__name__
        message = f"store value must be 1 to {MAX_VALUE_BYTES} bytes, not {size}"
        raise ConfigError(message, field="value")
    return value


def check_parts(parts: Sequence[Extent]) -> tuple[list[Extent], int]:
    """Return the extents that are not empty, and their total size.

    Raises:
        ConfigError: No byte in all, or an extent that cannot be memory.
    """
    kept = [part for part in parts if part.nbytes != 0]
    for part in kept:
        if part.nbytes < 0 or part.address <= 0:
            message = f"extent {part!r} is not memory; give its address and a size of at least 0"
            raise ConfigError(message, field="parts")
    total = sum(part.nbytes for part in kept)
    if total == 0:
        message = "an object needs at least one byte; parts are empty"
        raise ConfigError(message, field="parts")
    return kept, total


def check_time(deadline: Deadline, key: str) -> None:
    """Raise `TransferTimeout` when the deadline has passed."""
    if deadline.expired:
        message = f"object {key!r} was not moved within {deadline.timeout_s} s"
        raise TransferTimeout(message, key=key)


def view(part: Extent) -> memoryview:
    """Return the memory of an extent as a writable buffer of bytes; the caller keeps it mapped."""
    return memoryview((ctypes.c_char * part.nbytes).from_address(part.address)).cast("B")


def batches(parts: Sequence[Extent], batch_bytes: int, batch_parts: int = 512) -> Iterator[list[memoryview]]:
    """Cut extents into lists of buffers, in order, none larger than ``batch_bytes`` or longer than ``batch_parts``."""
    batch: list[memoryview] = []
    room = batch_bytes
    for part in parts:
        at = 0
        while at < part.nbytes:
            nbytes = min(room, part.nbytes - at)
            batch.append(view(Extent(part.address + at, nbytes)))
            at += nbytes
            room -= nbytes
            if room == 0 or len(batch) == batch_parts:
                yield batch
                batch, room = [], batch_bytes
    if batch:
        yield batch
