"""SKELETON (signatures hold; bodies follow within minutes)."""

from __future__ import annotations

from moonrelay.handle import Region
from moonrelay.transfer.base import TransferEngine


class Registrations:
    def __init__(self, engine: TransferEngine) -> None: ...
    def add(self, address: int, nbytes: int) -> Region:
        """Counted; a range inside a registered one gives that region. RegistrationError on partial overlap."""
        raise NotImplementedError

    def find(self, address: int, nbytes: int) -> Region | None:
        raise NotImplementedError

    def remove(self, region: Region) -> None:
        """One remove per add; unknown regions are ignored."""

    def close(self) -> None: ...
