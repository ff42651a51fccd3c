"""What a cache counts. Owns the numbers of one cache object; the events say the same to observers."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounters:
    """One cache's numbers since it was made, in this process.

    Attributes:
        hits_memory: Looks that this process's own tier answered.
        hits_store: Looks that the relay answered.
        misses: Looks that nothing answered. Every call of ``get`` or ``get_or_encode`` with a key is a hit or a miss.
        waits: Calls that waited for somebody else's encoding, however that ended.
        takeovers: Calls that went on in the place of somebody who died.
        encodes: How often encoding was called, for calls without a key too.
        trouble: Entries that were damaged, foreign or not kept, and times that the store did not serve.
        evicted: Entries that gave way, from either tier, by what this process stored.
        bytes_memory: Bytes held in memory now.
        bytes_store_read: Bytes of entries read from the relay.
        bytes_store_written: Bytes of entries put into the relay; one that somebody stored meanwhile counts too.
    """

    hits_memory: int = 0
    hits_store: int = 0
    misses: int = 0
    waits: int = 0
    takeovers: int = 0
    encodes: int = 0
    trouble: int = 0
    evicted: int = 0
    bytes_memory: int = 0
    bytes_store_read: int = 0
    bytes_store_written: int = 0


class Tally:
    """Counters that many threads add to.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters = CacheCounters()

    def add(self, **amounts: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            new = {name: getattr(self._counters, name) + amount for name, amount in amounts.items()}
            self._counters = dataclasses.replace(self._counters, **new)

    def read(self, *, bytes_memory: int = 0) -> CacheCounters:
        """Return the counters now."""
        with self._lock:
            return dataclasses.replace(self._counters, bytes_memory=bytes_memory)
