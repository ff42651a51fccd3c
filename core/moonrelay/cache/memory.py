"""The tier in this process: entries in host memory, the least recently used out first.

Owns the bound by bytes and the order of use. An entry is kept packed, so whoever asks unpacks memory of their own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from moonrelay.cache.entry import Packed
from moonrelay.errors import ConfigError


class MemoryTier:
    """Entries by digest.

    Args:
        capacity_bytes: Bound of the entries' bytes; 0 keeps nothing.
        on_evicted: Told of every entry that gave way to another: its size in bytes. Called outside the lock.

    Raises:
        ConfigError: The bound is no number of bytes.

    Threads: any.
    """

    def __init__(self, capacity_bytes: int, *, on_evicted: Callable[[int], None] | None = None) -> None:
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < 0:
            message = f"capacity_bytes={capacity_bytes!r} must be a number of bytes, 0 or more"
            raise ConfigError(message, field="capacity_bytes")
        self._capacity = capacity_bytes
        self._on_evicted = on_evicted
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Packed] = OrderedDict()
        self._nbytes = 0

    def get(self, digest: str) -> Packed | None:
        """Return an entry, which becomes the most recently used; ``None`` when there is none."""
        with self._lock:
            found = self._entries.get(digest)
            if found is not None:
                self._entries.move_to_end(digest)
            return found

    def put(self, digest: str, packed: Packed) -> bool:
        """Keep an entry as the most recently used, instead of an older one of that digest.

        Returns:
            Whether it is kept: one that is larger than the whole tier is not.
        """
        evicted: list[int] = []
        with self._lock:
            self._drop(digest)
            kept = packed.nbytes <= self._capacity
            if kept:
                self._entries[digest] = packed
                self._nbytes += packed.nbytes
            while self._nbytes > self._capacity:
                _, oldest = self._entries.popitem(last=False)
                self._nbytes -= oldest.nbytes
                evicted.append(oldest.nbytes)
        if self._on_evicted is not None:
            for nbytes in evicted:
                self._on_evicted(nbytes)
        return kept

    def remove(self, digest: str) -> None:
        """Forget an entry, if it is there."""
        with self._lock:
            self._drop(digest)

    def clear(self) -> None:
        """Forget all entries."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the entries now."""
        return self._nbytes

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, digest: str) -> None:
        dropped = self._entries.pop(digest, None)
        if dropped is not None:
            self._nbytes -= dropped.nbytes
