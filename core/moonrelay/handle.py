"""StageHandle: the reference that travels in a queue message, and the addresses inside it.

Owns the versioned wire form. Payload bytes never pass through a handle; a handle is small, immutable and used once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moonrelay.layout import ChunkPlan, Extent, TensorSpec

__all__ = [
    "ControlAddress",
    "DirectAddress",
    "EngineAddress",
    "Extent",
    "LeaseTerms",
    "Region",
    "RelayAddress",
    "StageHandle",
    "TensorLocation",
]


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that an engine serves to its peers.

    Attributes:
        key: The engine's name for the memory (a shared-memory name, or empty where the address is enough).
        base: First address, in the owner's address space.
        nbytes: Length in bytes.
    """

    key: str
    base: int
    nbytes: int


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transfer engine is reached; ``nonce`` tells two lives of one address apart."""

    engine: str
    address: str
    nonce: str


class ControlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a connector's control channel is reached; ``nonce`` tells two lives of one address apart."""

    address: str
    nonce: str


class DirectAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The producer of a payload: whom to ask for a claim, and which engine serves the bytes."""

    control: ControlAddress
    engine: EngineAddress | None = None


class RelayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a payload is, or will be, in an object store.

    Attributes:
        url: The store.
        prefix: Prefix of all the payload's keys; unique to this attempt.
    """

    url: str
    prefix: str


class TensorLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor's bytes begin in a producer's memory, sent with a granted claim.

    Attributes:
        region: The registered region that holds it.
        address: First byte, in the producer's address space; the tensor lies there packed, in its spec's order.
    """

    region: Region
    address: int


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A lease policy as it stands in a handle: name in ``moonrelay.policies``, how many readers, for how long.

    ``readers`` 0 means any number. ``ttl_s`` ``None`` means until released.
    """

    policy: str
    readers: int
    ttl_s: float | None


class StageHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A reference to a published payload (fields are completed by its owner)."""

    id: str
    request_id: str
    kind: str
    attempt: int
    tree: bytes
    tensors: tuple[TensorSpec, ...]
    chunks: ChunkPlan
    digest: str
    lease: LeaseTerms
    direct: DirectAddress | None = None
    relay: RelayAddress | None = None
    schema: str | None = None
    metadata: dict[str, Any] | None = None

    def to_bytes(self) -> bytes:
        """Return the versioned wire form (skeleton)."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, raw: bytes) -> StageHandle:
        """Rebuild a handle from its wire form (skeleton)."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        raise NotImplementedError

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.chunks.count

    @property
    def spec(self) -> object:
        """The payload's tree with a `TensorSpec` where each tensor was."""
        raise NotImplementedError

    def chunk_nbytes(self, chunk: int) -> int:
        """Return the bytes of one chunk."""
        raise NotImplementedError
