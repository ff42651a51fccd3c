"""StagePayload and its shape: a tree of tensors and plain values, cut into chunks."""

from __future__ import annotations

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor without its bytes."""

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] | None = None


class ChunkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a payload is cut."""

    dim: int | None
    sizes: tuple[int, ...]
