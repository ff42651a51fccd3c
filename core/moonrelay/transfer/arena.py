"""The pool: one registered region, cut into counted slots in which payloads lie and land.

Owns the map of free and used memory and the life of every slot. One region is registered, not thousands of tensors (a
Mooncake peer cannot connect to a process with some 17 000 registrations). A tensor handed out keeps its slot until its
storage dies, also past `Arena.close`; the region is released when the last slot is gone.

References are given back from anywhere, also by a finalizer that runs during a garbage collection inside this module's
own lock. So `Slot.release` never waits for a lock: it appends to a queue that whoever next gets the lock settles.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import CapacityError, ClosedError
from moonrelay.handle import Region
from moonrelay.transfer.base import TransferEngine
from moonrelay.transfer.freelist import FreeList

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ALIGNMENT = 256
#: A waiter looks again after this long, since a finalizer may have given memory back without being able to wake it.
_LOOK_AGAIN_S = 0.01


class Slot:
    """A piece of an arena with a count of references: one at birth, freed at zero.

    ``with arena.allocate(n) as slot:`` gives that first one back at the end.

    Attributes:
        address: First byte, 256-aligned.
        nbytes: What was asked for.
        region: The registered region it lies in.
        size: What it takes from the pool: ``nbytes`` rounded up to the alignment.
        references: How often it is held. Only the arena changes it, and it may lag behind a release.
        quarantined: How many transfers that may still write it are not quiet. Only the arena changes it.

    Threads: all methods from any thread; ``release`` also from a finalizer.
    """

    __slots__ = ("__weakref__", "_arena", "address", "nbytes", "quarantined", "references", "region", "size")

    def __init__(self, arena: Arena, region: Region, address: int, nbytes: int, size: int) -> None:
        self._arena = arena
        self.size = size
        self.references = 1
        self.quarantined = 0
        self.address = address
        self.nbytes = nbytes
        self.region = region

    def retain(self) -> None:
        """Add a reference.

        Raises:
            ClosedError: The slot is free already; whoever retains must hold a reference.
        """
        self._arena.retain(self)

    def release(self) -> None:
        """Give one reference back. Never blocks."""
        self._arena.release(self)

    def quarantine(self) -> Callable[[], None]:
        """Keep the memory from being reused until told that the engine is quiet.

        Returns:
            A function that ends it; may be called from any thread and more than once, the first call counts. Fit as
            ``on_quiet`` of a pull.
        """
        self._arena.retain(self, quarantine=True)
        left = deque((1,))

        def lift() -> None:
            try:
                left.popleft()
            except IndexError:
                return
            self._arena.release(self, quarantine=True)

        return lift

    def tensor(self) -> torch.Tensor:
        """Return a one-dimensional uint8 tensor that shares the memory.

        Its storage holds a reference of its own, which it gives back when it dies, however many views were made.

        Raises:
            ClosedError: The slot is free already.
        """
        return self._arena.tensor(self)

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Slot {self.address:#x}+{self.nbytes}>"


class Arena:
    """A pool of registered memory on the engine's device, mapped at the first use.

    Args:
        engine: A started engine, at the latest when the first slot is allocated.
        nbytes: Size of the pool; rounded up to the alignment.
        clock: The clock on which ``allocate`` waits.
        device: Where the engine allocates, for the tensors: ``cpu`` or ``cuda:N``.

    Threads: all methods from any thread.
    """

    def __init__(self, engine: TransferEngine, nbytes: int, clock: Clock, device: str = "cpu") -> None:
        self._engine = engine
        self._device = device
        self._clock = clock
        self._capacity = _aligned(nbytes)
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._free = FreeList(self._capacity)
        self._region: Region | None = None
        self._committed = 0
        self._starts: list[int] = []
        self._slots: dict[int, Slot] = {}
        self._empty_slots = 0
        self._used = 0
        self._quarantined = 0
        self._returned: deque[tuple[Slot, bool]] = deque()
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def used_bytes(self) -> int:
        """Bytes in live slots, rounded up to the alignment."""
        with self._locked():
            return self._used

    @property
    def free_bytes(self) -> int:
        with self._locked():
            return self._capacity - self._used

    @property
    def quarantined_bytes(self) -> int:
        """Bytes in slots that wait for the engine to be quiet."""
        with self._locked():
            return self._quarantined

    @property
    def live_slots(self) -> int:
        with self._locked():
            return len(self._slots) + self._empty_slots

    def allocate(self, nbytes: int, deadline: Deadline | None = None) -> Slot:
        """Take ``nbytes`` (zero is fine) from the pool.

        Args:
            nbytes: Size of the slot.
            deadline: Wait until then for room; ``None`` does not wait.

        Returns:
            The slot, with one reference that is the caller's. Its content is arbitrary.

        Raises:
            CapacityError: No room. ``context['fits']`` tells "none now" (true) from "larger than the pool" (false).
            ClosedError: The arena is closed.

        Blocks: until room or the deadline; the first call also maps and registers the pool.
        """
        if nbytes < 0:
            message = f"cannot allocate {nbytes} bytes"
            raise CapacityError(message, wanted=nbytes, fits=False)
        size = _aligned(nbytes)
        with self._locked():
            while True:
                self._settle()
                if self._closed:
                    message = "the pool is closed"
                    raise ClosedError(message)
                if size > self._capacity:
                    raise self._no_room(nbytes, fits=False)
                slot = self._take(nbytes, size)
                if slot is not None:
                    return slot
                left = None if deadline is None else deadline.remaining(_LOOK_AGAIN_S)
                if not left:
                    raise self._no_room(nbytes, fits=True)
                self._clock.wait(self._room, left)

    def find(self, address: int, nbytes: int) -> Slot | None:
        """Return the live slot in which a range lies entirely, ``None`` when there is none.

        The caller must own something that keeps the slot alive (a tensor in it) until it has retained the slot.
        """
        if nbytes < 1:
            return None
        with self._locked():
            at = bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            slot = self._slots[self._starts[at]]
            return slot if address + nbytes <= slot.address + slot.nbytes else None

    def close(self) -> None:
        """Allocate no more. The region is released now, or when the last live slot is freed. Idempotent."""
        with self._locked():
            self._closed = True
            self._settle()
            self._room.notify_all()

    def _take(self, nbytes: int, size: int) -> Slot | None:
        region = self._mapped() if size else self._region or Region(key="", base=0, nbytes=0)
        if size == 0:
            self._empty_slots += 1
            return Slot(self, region, region.base, 0, 0)
        offset = self._free.take(size)
        if offset is None:
            return None
        if offset + size > self._committed:
            try:
                self._engine.commit(region, self._committed, offset + size - self._committed)
            except BaseException:
                self._free.give(offset, size)
                raise
            self._committed = offset + size
        slot = Slot(self, region, region.base + offset, nbytes, size)
        self._starts.insert(bisect_left(self._starts, slot.address), slot.address)
        self._slots[slot.address] = slot
        self._used += size
        return slot

    def _mapped(self) -> Region:
        if self._region is None:
            self._region = self._engine.allocate(self._capacity)
        return self._region

    def _no_room(self, nbytes: int, *, fits: bool) -> CapacityError:
        free, largest = self._free.free_bytes, self._free.largest
        what = "has no room now for" if fits else "is smaller than"
        message = (
            f"the pool of {self._capacity} bytes {what} {nbytes} bytes: {free} free, largest block {largest}, "
            f"{self._quarantined} in quarantine; raise pool_bytes"
        )
        return CapacityError(message, wanted=nbytes, free=free, largest=largest, pool=self._capacity, fits=fits)

    def retain(self, slot: Slot, *, quarantine: bool = False) -> None:
        """Add a reference to a live slot (`Slot.retain`, `Slot.quarantine`)."""
        with self._locked():
            if slot.references < 1:
                message = f"{slot!r} is free already"
                raise ClosedError(message)
            slot.references += 1
            if quarantine:
                slot.quarantined += 1
                if slot.quarantined == 1:
                    self._quarantined += slot.size

    def release(self, slot: Slot, *, quarantine: bool = False) -> None:
        """Give a reference back (`Slot.release`). Never blocks; fit for a finalizer."""
        self._returned.append((slot, quarantine))
        self._settle_if_free()

    def _settle_if_free(self) -> None:
        # Whoever holds the lock may have settled before the last append, and comes here itself when it is done.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._settle()
                self._room.notify_all()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock with everything settled that was given back so far."""
        try:
            with self._lock:
                self._settle()
                yield
        finally:
            self._settle_if_free()

    def _settle(self) -> None:
        """Apply what was given back. The lock is held."""
        while True:
            try:
                slot, quarantine = self._returned.popleft()
            except IndexError:
                break
            self._drop(slot, quarantine)
        if self._closed and self._region is not None and not self._slots:
            region, self._region = self._region, None
            self._engine.release(region)

    def _drop(self, slot: Slot, quarantine: bool) -> None:
        if slot.references < 1:
            # Its memory may be another's by now.
            logger.error("%r was released more often than it was retained", slot)
            return
        if quarantine:
            slot.quarantined -= 1
            if slot.quarantined == 0:
                self._quarantined -= slot.size
        slot.references -= 1
        if slot.references:
            return
        if slot.size == 0:
            self._empty_slots -= 1
            return
        del self._slots[slot.address]
        del self._starts[bisect_left(self._starts, slot.address)]
        self._used -= slot.size
        self._free.give(slot.address - slot.region.base, slot.size)

    def tensor(self, slot: Slot) -> torch.Tensor:
        """Return a tensor over a live slot (`Slot.tensor`)."""
        from moonrelay.transfer.views import tensor_over

        self.retain(slot)
        return tensor_over(slot.address, slot.nbytes, self._device, slot.release)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
