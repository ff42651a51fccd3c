"""What a stage hands on: `StagePayload`, and its flat form of tensors plus a small description of their tree.

Owns the checks at `publish` and the two directions of flattening: a payload that cannot be carried bit for bit is
refused here, before any memory is taken. Bytes of tensors never pass through the description (`moonrelay.tree`); where
they lie is `moonrelay.layout`, whose names are offered here too. Importing it loads no torch.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeGuard

import msgspec

from moonrelay.errors import ConfigError, UnsupportedTensor
from moonrelay.layout import (
    ITEMSIZES,
    MAX_BYTES,
    MAX_DIMS,
    MAX_STRIPS,
    QUANTISED,
    WHOLE,
    ChunkPlan,
    Extent,
    Strip,
    TensorSpec,
    bytes_of,
    chunk_nbytes,
    chunk_view,
    copy_bits,
    copy_leaf,
    host_extent,
    packed_order,
    split_sizes,
    strip_count,
    strips,
    tensor_from_buffer,
)
from moonrelay.tree import decode_specs, decode_tree, encode_tree

if TYPE_CHECKING:
    import torch

__all__ = [
    "MISSING",
    "ChunkPlan",
    "Extent",
    "Flattened",
    "StagePayload",
    "Strip",
    "TensorSpec",
    "bytes_of",
    "check_plain",
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

#: Bounds of what the caller names; a handle must stay small.
MAX_NAME: Final = 512
MAX_METADATA_BYTES: Final = 16 << 10
MAX_METADATA_DEPTH: Final = 16
MAX_CHUNKS: Final = 65536

#: All tensors' dimensions together; bounds the handle.
_MAX_TOTAL_DIMS: Final = 65536

_INT64 = range(-(1 << 63), 1 << 63)


class _Missing(enum.Enum):
    MISSING = "missing"


#: Stands for a ``data`` that was not given; ``None`` is a tree of its own.
MISSING: Final = _Missing.MISSING


@dataclass(frozen=True, slots=True, eq=False)
class StagePayload:
    """A tensor, or a tree of tensors and plain values, on its way to the next stage.

    Exactly one of ``tensor`` and ``data`` is given. Tensors must not be modified until the payload was consumed or
    given back. Plain values are ``None``, bool, int, float, complex, str, bytes, bytearray, ``torch.dtype``,
    ``torch.device``, ``torch.Size``; containers are list, tuple, dict, set and frozenset, nested at most 64 deep.
    Subclasses are refused, since they would come back as something else. A ``Parameter``, or a tensor that requires
    grad, is carried as a plain detached tensor. One tensor object in several places is sent once and comes back as one
    object; strides and the sharing of memory between different tensor objects are not kept.

    Args:
        request_id: The request that the payload belongs to.
        kind: ``"embedding"``, ``"latent"``, ``"frames"``, ``"checkpoint"``, ``"feature"``, or the user's own word.
        tensor: The tensor, when that is all.
        data: The tree.
        chunk_dim: Dimension along which ``tensor`` is cut; negative ones count from the end.
        num_chunks: How many chunks; at most the dimension's size.
        lease: A lease policy or its name; interpreted by the connector.
        attempt: Number of the attempt at the request's stage, from 0.
        metadata: Plain values that travel in the handle itself: str keys, values of None, bool, 64-bit int, float, str,
            lists and dicts of such; at most 16 KiB. Copied.
        schema: What the tree means, e.g. ``"wan.latents/1"``.

    Raises:
        ConfigError: A field is wrong; the message names it, its value and the remedy.
    """

    request_id: str
    kind: str
    tensor: torch.Tensor | None = field(default=None, repr=False)
    data: object = field(default=MISSING, repr=False)
    chunk_dim: int | None = None
    num_chunks: int = 1
    lease: object = field(default="delete_on_consume", kw_only=True)
    attempt: int = field(default=0, kw_only=True)
    metadata: dict[str, object] | None = field(default=None, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_name("request_id", self.request_id)
        _check_name("kind", self.kind)
        if self.schema is not None:
            _check_name("schema", self.schema)
        _check_int("attempt", self.attempt, 0, 1 << 31)
        _check_int("num_chunks", self.num_chunks, 1, MAX_CHUNKS)
        if self.chunk_dim is not None:
            _check_int("chunk_dim", self.chunk_dim, -MAX_DIMS, MAX_DIMS - 1)
        if self.lease is None:
            raise ConfigError("lease is None; give a policy or its name, e.g. 'delete_on_consume'", field="lease")
        if self.metadata is not None:
            object.__setattr__(self, "metadata", _check_metadata(self.metadata))
        if self.tensor is not None:
            if self.data is not MISSING and self.data is not None:
                raise ConfigError("both tensor and data are given; give exactly one", field="data")
            if not _is_tensor(self.tensor):
                message = f"tensor is a {type(self.tensor).__qualname__}, not a torch.Tensor; give a tree as data"
                raise ConfigError(message, field="tensor")
            object.__setattr__(self, "data", MISSING)
            object.__setattr__(self, "chunk_dim", _check_chunks(self.tensor, self.chunk_dim, self.num_chunks))
            return
        if self.data is MISSING:
            raise ConfigError("neither tensor nor data is given; give exactly one", field="tensor")
        if self.chunk_dim is not None:
            message = (
                f"chunk_dim={self.chunk_dim} with data; only a payload of one tensor can be cut, give it as tensor"
            )
            raise ConfigError(message, field="chunk_dim")
        if self.num_chunks != 1:
            message = (
                f"num_chunks={self.num_chunks} with data; only a payload of one tensor can be cut, give it as tensor"
            )
            raise ConfigError(message, field="num_chunks")


@dataclass(frozen=True, slots=True, eq=False)
class Flattened:
    """A payload taken apart; shares the tensors' memory.

    Attributes:
        tree: The description of the tree.
        leaves: The distinct tensors, detached, in order of first appearance.
        specs: What each leaf is, and the order in which its bytes travel.
        chunks: How the payload is cut.
        packed: For each leaf whether its memory is just its canonical bytes. Where not (gaps, overlaps, a lazy
            conjugate or negative bit, a chunk in too many strips), use `copy_leaf`, or `copy_bits` on chunk views.
    """

    tree: bytes
    leaves: tuple[torch.Tensor, ...]
    specs: tuple[TensorSpec, ...]
    chunks: ChunkPlan
    packed: tuple[bool, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(spec.nbytes for spec in self.specs)


def flatten(payload: StagePayload) -> Flattened:
    """Take a payload apart into a description and tensors. Copies no tensor; nothing is changed.

    Args:
        payload: What to send.

    Returns:
        Its flat form.

    Raises:
        UnsupportedTensor: A tensor or value cannot be carried bit for bit; ``context['field']`` names its place.
    """
    if payload.tensor is not None:
        tree, found = encode_tree(payload.tensor, "tensor")
        plan = _plan(payload.tensor, payload.chunk_dim, payload.num_chunks)
    else:
        tree, found = encode_tree(payload.data, "data")
        plan = WHOLE
    leaves: list[torch.Tensor] = []
    specs: list[TensorSpec] = []
    packed: list[bool] = []
    dims = total = 0
    for place, tensor in found:
        leaf, spec, dense = _leaf(tensor, place, plan)
        dims += len(spec.shape)
        total += spec.nbytes
        if dims > _MAX_TOTAL_DIMS or total > MAX_BYTES:
            raise UnsupportedTensor("the tensors are too many or too large to describe; send fewer", field=place)
        leaves.append(leaf)
        specs.append(spec)
        packed.append(dense)
    return Flattened(tree=tree, leaves=tuple(leaves), specs=tuple(specs), chunks=plan, packed=tuple(packed))


def unflatten(tree: bytes, leaves: Sequence[torch.Tensor]) -> object:
    """Put a payload's tree together again.

    Args:
        tree: The description.
        leaves: Its tensors, in `Flattened.leaves`' order.

    Returns:
        The tree, or the tensor itself where the payload was one tensor.

    Raises:
        WireError: The description is malformed, or does not fit the leaves.
        UnsupportedTensor: It holds a dtype that this process's torch does not have.
    """
    return decode_tree(tree, leaves)


def spec_tree(tree: bytes, specs: Sequence[TensorSpec]) -> object:
    """Return the payload's tree with a `TensorSpec` in place of each tensor, and of long ``bytes``, ``str`` and ints.

    Raises:
        WireError: The description is malformed, or does not fit the specs.
        UnsupportedTensor: It holds a dtype that this process's torch does not have.
    """
    return decode_specs(tree, specs)


def check_plain(value: object, place: str) -> None:
    """Refuse a value that may not stand in metadata.

    Args:
        value: None, bool, 64-bit int, float, str, or a list or str-keyed dict of such.
        place: Its name in messages.

    Raises:
        ConfigError: It is something else, too large, or nested deeper than 16.
    """
    pending: list[tuple[object, str, int]] = [(value, place, 0)]
    seen = 0
    while pending:
        item, where, depth = pending.pop()
        seen += 1
        if seen > MAX_METADATA_BYTES:
            raise ConfigError(f"{place} holds more than {MAX_METADATA_BYTES} values; send it as data", field=place)
        if item is None or type(item) in (bool, float) or (type(item) is int and item in _INT64):
            continue
        if type(item) is str:
            try:
                item.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(f"{where} holds a lone surrogate; use valid Unicode", field=where) from error
            continue
        if depth < MAX_METADATA_DEPTH:
            if type(item) is list:
                pending.extend((part, f"{where}[{index}]", depth + 1) for index, part in enumerate(item[:20000]))
                continue
            if type(item) is dict and all(type(name) is str for name in item):
                pending.extend((name, f"a key of {where}", depth) for name in item)
                pending.extend((part, f"{where}[{name[:40]!a}]", depth + 1) for name, part in item.items())
                continue
        message = (
            f"{where} is a {type(item).__qualname__} (or an int beyond 64 bits, a dict with other keys than str, or "
            f"nested deeper than {MAX_METADATA_DEPTH}); use None, bool, int, float, str, list, dict, or send it as data"
        )
        raise ConfigError(message, field=where)


def _check_metadata(metadata: object) -> dict[str, object]:
    if type(metadata) is not dict:
        message = f"metadata is a {type(metadata).__qualname__}; give a dict of plain values"
        raise ConfigError(message, field="metadata")
    check_plain(metadata, "metadata")
    raw = msgspec.msgpack.encode(metadata)
    if len(raw) > MAX_METADATA_BYTES:
        message = f"metadata takes {len(raw)} bytes, at most {MAX_METADATA_BYTES} are allowed; send the rest as data"
        raise ConfigError(message, field="metadata")
    return msgspec.msgpack.decode(raw, type=dict[str, object])


def _check_name(name: str, value: object) -> None:
    if type(value) is not str or not value or len(value) > MAX_NAME or not value.isprintable():
        shown = f"{value!a:.80}" if isinstance(value, str) else type(value).__qualname__
        message = f"{name}={shown} is wrong; give a printable, non-empty str of at most {MAX_NAME} characters"
        raise ConfigError(message, field=name)


def _check_int(name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        shown = f"{value}" if type(value) is int and value in _INT64 else type(value).__qualname__
        raise ConfigError(f"{name}={shown} is wrong; give an int from {least} to {most}", field=name)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _check_chunks(tensor: torch.Tensor, chunk_dim: int | None, num_chunks: int) -> int | None:
    """Return the dimension counted from the front."""
    if chunk_dim is None:
        if num_chunks != 1:
            message = f"num_chunks={num_chunks} without chunk_dim; say along which dimension to cut"
            raise ConfigError(message, field="num_chunks")
        return None
    shape = tuple(tensor.shape)
    dims = len(shape)
    if dims == 0:
        raise ConfigError(
            f"chunk_dim={chunk_dim} of a 0-d tensor, which cannot be cut; leave it out", field="chunk_dim"
        )
    if not -dims <= chunk_dim < dims:
        message = f"chunk_dim={chunk_dim} is out of range for shape {shape}; give {-dims} to {dims - 1}"
        raise ConfigError(message, field="chunk_dim")
    dim = chunk_dim % dims
    if num_chunks > max(shape[dim], 1):
        message = (
            f"num_chunks={num_chunks} is more than the {shape[dim]} of dimension {dim} of {shape}; give at most that"
        )
        raise ConfigError(message, field="num_chunks")
    return dim


def _plan(tensor: torch.Tensor, chunk_dim: int | None, num_chunks: int) -> ChunkPlan:
    if chunk_dim is None:
        return WHOLE
    return ChunkPlan(dim=chunk_dim, sizes=split_sizes(tensor.shape[chunk_dim], num_chunks))


def _leaf(tensor: torch.Tensor, place: str, plan: ChunkPlan) -> tuple[torch.Tensor, TensorSpec, bool]:
    """Return the detached tensor, its spec, and whether its memory is its canonical bytes."""
    _check_tensor(tensor, place)
    leaf = tensor.detach()
    name = str(leaf.dtype).removeprefix("torch.")
    dense, order = packed_order(leaf)
    spec = TensorSpec(
        shape=tuple(leaf.shape), dtype=name, order=order, width=None if name in ITEMSIZES else leaf.dtype.itemsize
    )
    if math.prod(max(size, 1) for size in spec.shape) * spec.itemsize > MAX_BYTES:
        raise UnsupportedTensor(f"shape {spec.shape[:8]} is too large to describe", field=place)
    if plan.dim is not None and plan.count > 1 and spec.nbytes:
        ranges = strip_count(spec, plan.dim)
        longest = spec.nbytes // ranges // spec.shape[plan.dim] * plan.sizes[0]
        if ranges > MAX_STRIPS or (ranges > 256 and longest < 4096):
            rest = tuple(dim for dim in spec.order or range(len(spec.shape)) if dim != plan.dim)
            return leaf, msgspec.structs.replace(spec, order=(plan.dim, *rest)), False
    return leaf, spec, dense and not leaf.is_conj() and not leaf.is_neg()


def _check_tensor(tensor: torch.Tensor, place: str) -> None:
    import torch

    what = ""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        what = f"a {type(tensor).__qualname__}; use tensor.as_subclass(torch.Tensor) or send its parts"
    elif tensor.is_quantized or str(tensor.dtype).removeprefix("torch.") in QUANTISED:
        what = f"quantised ({tensor.dtype}); send int_repr(), scale and zero point"
    elif tensor.is_nested or tensor.layout != torch.strided:
        what = f"of layout {tensor.layout}{' (nested)' if tensor.is_nested else ''}; send its parts, or to_dense()"
    elif tensor.device.type == "meta":
        what = "on the meta device, without bytes; send its shape as plain values"
    elif tensor.dim() > MAX_DIMS:
        what = f"of {tensor.dim()} dimensions, at most {MAX_DIMS} are possible; reshape it"
    if what:
        raise UnsupportedTensor(f"the tensor is {what}", field=place)
    if tensor.numel() == 0:
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    try:
        held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    except (RuntimeError, NotImplementedError) as error:
        message = "the tensor has no memory of its own (a functional or batched one); send a plain copy"
        raise UnsupportedTensor(message, field=place) from error
    if held < (last + 1) * tensor.element_size():
        raise UnsupportedTensor("the tensor's memory was freed or is virtual; send tensor.clone()", field=place)
