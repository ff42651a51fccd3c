"""Which parts of a pool are free: best fit with coalescing, as pure state.

Owns numbers only: no lock, no memory, no slots.
"""

from __future__ import annotations

from bisect import bisect_left


class FreeList:
    """Best-fit allocation of offsets in ``[0, capacity)``, with coalescing. Pure state: no lock, no memory.

    Units: offsets and sizes in bytes, multiples of the alignment.
    """

    def __init__(self, capacity: int) -> None:
        self._offsets: list[int] = [0] if capacity else []
        self._sizes: list[int] = [capacity] if capacity else []

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def largest(self) -> int:
        return max(self._sizes, default=0)

    def take(self, size: int) -> int | None:
        """Cut ``size`` from the smallest block that holds it (the lowest of equals); ``None`` when none does."""
        best = min(
            (index for index, have in enumerate(self._sizes) if have >= size),
            key=lambda index: (self._sizes[index], index),
            default=None,
        )
        if best is None:
            return None
        offset = self._offsets[best]
        if self._sizes[best] == size:
            del self._offsets[best], self._sizes[best]
        else:
            self._offsets[best] += size
            self._sizes[best] -= size
        return offset

    def give(self, offset: int, size: int) -> None:
        """Return a block and join it with its free neighbours."""
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and offset + size == self._offsets[at]:
            size += self._sizes[at]
            del self._offsets[at], self._sizes[at]
        if at > 0 and self._offsets[at - 1] + self._sizes[at - 1] == offset:
            self._sizes[at - 1] += size
        else:
            self._offsets.insert(at, offset)
            self._sizes.insert(at, size)
