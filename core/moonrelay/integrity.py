"""What makes "delivered" true: digests of bytes where they lie, and proof that every byte came once (skeleton)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from moonrelay.layout import Extent

if TYPE_CHECKING:
    import torch


class Digest(ABC):
    """A digest in the making; fed in order."""

    @abstractmethod
    def update(self, data: Extent | torch.Tensor) -> None:
        """Add host memory, or a contiguous 1-d uint8 tensor."""

    @abstractmethod
    def digest(self) -> bytes:
        """Return 16 bytes (``b""`` for ``off``)."""


def digester(name: str) -> Digest:
    """Begin a digest: ``xxh3_128``, ``lanes128`` or ``off``."""
    raise NotImplementedError


def choose(mode: str, device: str) -> str:
    """Return the algorithm for a payload on ``device``; ``mode`` is ``auto``, ``full`` or ``off``."""
    raise NotImplementedError


class Coverage:
    """Proof that each of ``total_nbytes`` bytes is covered exactly once."""

    def __init__(self, total_nbytes: int) -> None:
        raise NotImplementedError

    def add(self, offset: int, nbytes: int) -> None:
        """Count a range as covered; overlap or outside raises IntegrityError."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        raise NotImplementedError
