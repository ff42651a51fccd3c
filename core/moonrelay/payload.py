"""What a stage hands on: `StagePayload`, and its flat form of tensors plus a small description of their tree.

Owns the checks at `publish` and the two directions of flattening. Bytes of tensors never pass through the description.
Importing it loads no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from moonrelay.layout import (
    ChunkPlan,
    Strip,
    TensorSpec,
    bytes_of,
    chunk_nbytes,
    chunk_view,
    copy_bits,
    copy_leaf,
    host_extent,
    strips,
    tensor_from_buffer,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "MISSING",
    "ChunkPlan",
    "Flattened",
    "StagePayload",
    "Strip",
    "TensorSpec",
    "bytes_of",
    "chunk_nbytes",
    "chunk_view",
    "copy_bits",
    "copy_leaf",
    "flatten",
    "host_extent",
    "spec_tree",
    "strips",
    "tensor_from_buffer",
    "unflatten",
]


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING


@dataclass(frozen=True, slots=True, eq=False)
class StagePayload:
    """A tensor, or a tree of tensors and plain values, on its way to the next stage (skeleton)."""

    request_id: str
    kind: str
    tensor: torch.Tensor | None = field(default=None, repr=False)
    data: object = field(default=MISSING, repr=False)
    chunk_dim: int | None = None
    num_chunks: int = 1
    lease: object = "delete_on_consume"
    attempt: int = 0
    metadata: dict[str, object] | None = None
    schema: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Flattened:
    """A payload taken apart (skeleton)."""

    tree: bytes
    leaves: tuple[torch.Tensor, ...]
    specs: tuple[TensorSpec, ...]
    chunks: ChunkPlan
    packed: tuple[bool, ...]


def flatten(payload: StagePayload) -> Flattened:
    """Take a payload apart."""
    raise NotImplementedError


def unflatten(tree: bytes, leaves: Sequence[torch.Tensor]) -> object:
    """Put a payload's tree together again."""
    raise NotImplementedError


def spec_tree(tree: bytes, specs: Sequence[TensorSpec]) -> object:
    """Return the tree with a `TensorSpec` where each tensor was."""
    raise NotImplementedError
