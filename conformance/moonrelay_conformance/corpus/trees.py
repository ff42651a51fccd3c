"""Trees made from their descriptions, and the canonical form by which two trees are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def build(description: Any, *, received: bool = False) -> Any:
    """Return the tree that a description stands for; the same in every process.

    ``received`` builds it as it must arrive: detached, plain tensors."""
    raise NotImplementedError


def outline(tree: Any) -> list[Any]:
    """Return the canonical form of a tree: JSON values."""
    raise NotImplementedError


def digest(tree: Any) -> str:
    """Return the digest of a tree's canonical form, 32 hex digits; never raises for foreign objects."""
    raise NotImplementedError


def chunk_of(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """Return chunk ``index`` of ``count`` along ``dim``; the first chunks are one larger."""
    raise NotImplementedError


def chunk_digests(description: Any, dim: int, count: int) -> tuple[str, ...]:
    """Return the digest of each chunk of the described tensor."""
    raise NotImplementedError
