"""SKELETON (signatures hold; bodies follow within minutes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moonrelay.clock import Clock, Deadline
from moonrelay.handle import Region
from moonrelay.transfer.base import TransferEngine

if TYPE_CHECKING:
    import torch


class Slot:
    """A piece of the arena: one reference at birth, freed at zero. ``with slot:`` releases that one."""

    address: int
    nbytes: int
    region: Region

    def retain(self) -> None: ...
    def release(self) -> None: ...
    def quarantine(self) -> Callable[[], None]:
        """Hold the slot until the returned function is called (any thread, also a finalizer; effective once)."""
        raise NotImplementedError

    def tensor(self) -> torch.Tensor:
        """1-d uint8 tensor sharing the memory; its storage holds a reference of its own until it dies."""
        raise NotImplementedError


class Arena:
    def __init__(self, engine: TransferEngine, nbytes: int, clock: Clock) -> None: ...
    def allocate(self, nbytes: int, deadline: Deadline | None = None) -> Slot:
        """Raises CapacityError (context: wanted, free, largest, pool, fits) at once, or at the deadline when one is given and it fits."""
        raise NotImplementedError

    def find(self, address: int, nbytes: int) -> Slot | None:
        raise NotImplementedError

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    quarantined_bytes: int
    live_slots: int

    def close(self) -> None: ...
