"""The caller's own memory, registered once with the engine and counted.

Owns which ranges of foreign memory are registered, and how often. The memory itself stays the caller's, who must keep
it until `Registrations.remove`.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right

from moonrelay.errors import ClosedError, RegistrationError
from moonrelay.handle import Region
from moonrelay.transfer.base import TransferEngine


class Registrations:
    """Registered ranges of foreign memory; they never overlap.

    Threads: all methods from any thread.
    """

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        # Sorted by base; the two lists run in parallel.
        self._bases: list[int] = []
        self._regions: list[Region] = []
        self._counts: dict[int, int] = {}
        self._closed = False

    def add(self, address: int, nbytes: int) -> Region:
        """Register a range, or count one more user of the registered region in which it lies.

        Returns:
            The region, which may be larger than the range; give it to `remove` once per `add`.

        Raises:
            RegistrationError: Empty, overlaps a registered region without lying in it, or the engine refuses.
            ClosedError: After `close`.

        Blocks: while the engine registers (it pins the memory on RDMA).
        """
        if nbytes < 1:
            message = f"cannot register {nbytes} bytes at {address:#x}: there is nothing to register"
            raise RegistrationError(message, nbytes=nbytes)
        with self._lock:
            if self._closed:
                message = "the registrations are closed"
                raise ClosedError(message)
            known = self.find(address, nbytes)
            if known is None:
                self._refuse_overlap(address, nbytes)
                known = self._engine.register(address, nbytes)
                at = bisect_left(self._bases, address)
                self._bases.insert(at, address)
                self._regions.insert(at, known)
                self._counts[address] = 0
            self._counts[known.base] += 1
            return known

    def find(self, address: int, nbytes: int) -> Region | None:
        """Return the registered region in which a range lies entirely, ``None`` when there is none."""
        if nbytes < 1:
            return None
        with self._lock:
            at = bisect_right(self._bases, address) - 1
            if at < 0:
                return None
            region = self._regions[at]
            return region if address + nbytes <= region.base + region.nbytes else None

    def remove(self, region: Region) -> None:
        """Undo one `add`; the last one unregisters. A region that is not registered (any more) is ignored.

        No fence: a read that a peer has under way may still complete.
        """
        with self._lock:
            at = bisect_left(self._bases, region.base)
            if at == len(self._bases) or self._regions[at] != region:
                return
            self._counts[region.base] -= 1
            if self._counts[region.base]:
                return
            del self._bases[at], self._regions[at], self._counts[region.base]
            self._engine.unregister(region)

    def __len__(self) -> int:
        """Return how many regions are registered."""
        with self._lock:
            return len(self._regions)

    def close(self) -> None:
        """Unregister everything. Idempotent."""
        with self._lock:
            self._closed = True
            while self._regions:
                self._bases.pop()
                self._engine.unregister(self._regions.pop())
            self._counts.clear()

    def _refuse_overlap(self, address: int, nbytes: int) -> None:
        at = bisect_left(self._bases, address)
        for region in self._regions[max(0, at - 1) : at + 1]:
            if region.base < address + nbytes and address < region.base + region.nbytes:
                message = (
                    f"{nbytes} bytes at {address:#x} overlap {region.nbytes} registered bytes at {region.base:#x}; "
                    f"register the whole storage once, or remove the other registration first"
                )
                raise RegistrationError(message, nbytes=nbytes)
