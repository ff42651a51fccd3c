"""How a tensor's bytes lie: specs, element widths, dense orders, chunk plans and the byte ranges they give.

Owns the arithmetic of layouts, and the few torch calls that turn bytes into tensors and back. It copies bytes only in
`copy_leaf`, when told to. Importing it loads no torch.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from moonrelay.errors import ConfigError, UnsupportedTensor, WireError

if TYPE_CHECKING:
    import torch

#: Bytes per element of every dtype whose tensors can be carried, by torch's name without ``torch.``. The sub-byte
#: integers and the ``bits`` types are one-byte (``bits16``: two-byte) shells in torch, and are carried as such.
ITEMSIZES: Final[dict[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    "bits8": 1,
    "bits16": 2,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}

#: Quantised dtypes: their values mean nothing without a quantiser, which has no bytes in the tensor.
QUANTISED: Final = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})

#: Most dimensions of a tensor, and most bytes (and byte offsets) that a spec may speak of.
MAX_DIMS: Final = 64
MAX_BYTES: Final = (1 << 62) - 1

#: Up to so many bytes one thread copies host memory sooner than several are woken. With so few threads one is as fast
#: at any size and takes less processor time: 53 ms against 96 ms of torch's ``copy_`` for 512 MiB.
ONE_THREAD_NBYTES: Final = 1 << 20
FEW_THREADS: Final = 2

#: A chunk in more strips than this is refused, or copied to where it lies in one.
MAX_STRIPS: Final = 4096


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of host memory of this process; never on a wire.

    Attributes:
        address: First byte, in this process's address space.
        nbytes: Length in bytes.
    """

    address: int
    nbytes: int


class Strip(NamedTuple):
    """A range of a packed tensor's bytes, relative to its first one."""

    offset: int
    nbytes: int


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tensor without its bytes: what it is, and how its bytes lie when packed.

    Attributes:
        shape: Size of each dimension.
        dtype: torch's name without ``torch.``, e.g. ``"bfloat16"``.
        order: The dimensions from outermost to innermost as they lie in memory; ``None`` is row-major. A channels_last
            image batch has ``(0, 2, 3, 1)``.
        width: Bytes per element, given only for a dtype newer than this module's table.
    """

    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] | None = None
    width: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element.

        Raises:
            WireError: The dtype is unknown and the spec does not say how wide it is.
        """
        known = ITEMSIZES.get(self.dtype, self.width)
        if known is None:
            message = f"dtype {self.dtype!r} is unknown and its width is not given; update moonrelay on this side"
            raise WireError(message, field="dtype")
        return known

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensor."""
        return self.numel * self.itemsize

    def strides(self) -> tuple[int, ...]:
        """Return the strides of the packed layout, in elements."""
        strides = [1] * len(self.shape)
        step = 1
        for dim in reversed(self.order if self.order is not None else range(len(self.shape))):
            strides[dim] = step
            step *= max(self.shape[dim], 1)
        return tuple(strides)


class ChunkPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a payload is cut.

    Attributes:
        dim: The dimension of the payload's one tensor along which it is cut; ``None`` for a payload in one piece.
        sizes: Size of each chunk along ``dim``, balanced as by ``torch.tensor_split``; ``(1,)`` without ``dim``.
    """

    dim: int | None
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of chunks, at least one."""
        return len(self.sizes)


#: The plan of a payload in one piece.
WHOLE: Final = ChunkPlan(dim=None, sizes=(1,))


def split_sizes(size: int, count: int) -> tuple[int, ...]:
    """Return the sizes of ``count`` chunks of ``size``, as ``torch.tensor_split``: the first ones one larger."""
    base, larger = divmod(size, count)
    return (base + 1,) * larger + (base,) * (count - larger)


def check_spec(spec: TensorSpec, field: str) -> None:
    """Refuse a spec from outside that no tensor can have.

    Args:
        spec: A decoded spec; its types are right, its values are not trusted.
        field: Its place, for the message.

    Raises:
        WireError: A negative or overflowing shape, an unknown dtype, an order that is no permutation.
    """
    if len(spec.shape) > MAX_DIMS:
        raise WireError(f"{len(spec.shape)} dimensions, at most {MAX_DIMS} are possible", field=f"{field}.shape")
    if spec.dtype in ITEMSIZES:
        if spec.width is not None and spec.width != ITEMSIZES[spec.dtype]:
            raise WireError(f"dtype {spec.dtype!r} is not {spec.width} bytes wide", field=f"{field}.width")
    elif spec.dtype in QUANTISED or not spec.dtype.isidentifier() or len(spec.dtype) > 64 or spec.width is None:
        raise WireError(f"dtype {spec.dtype[:80]!r} is unknown; update moonrelay on this side", field=f"{field}.dtype")
    elif not 1 <= spec.width <= 64:
        raise WireError(f"width {spec.width} of dtype {spec.dtype!r} is impossible", field=f"{field}.width")
    extent = spec.itemsize
    for size in spec.shape:
        extent *= max(size, 1)
        if size < 0 or extent > MAX_BYTES:
            raise WireError(f"shape {spec.shape[:8]} is negative or too large", field=f"{field}.shape")
    if spec.order is not None and sorted(spec.order) != list(range(len(spec.shape))):
        raise WireError(f"order {spec.order[:8]} is no permutation of the dimensions", field=f"{field}.order")


def check_plan(plan: ChunkPlan, specs: tuple[TensorSpec, ...]) -> None:
    """Refuse a chunk plan from outside that does not fit its tensors.

    Raises:
        WireError: No chunk, a dimension out of range, or sizes that are not the dimension's.
    """
    if plan.dim is None:
        if plan.sizes != (1,):
            raise WireError(f"an uncut payload has sizes (1,), not {plan.sizes[:8]}", field="chunks.sizes")
        return
    if len(specs) != 1 or not 0 <= plan.dim < len(specs[0].shape):
        raise WireError(f"no dimension {plan.dim} to cut along", field="chunks.dim")
    size = specs[0].shape[plan.dim]
    if not 1 <= len(plan.sizes) <= max(size, 1) or min(plan.sizes) < min(size, 1) or sum(plan.sizes) != size:
        raise WireError(f"sizes {plan.sizes[:8]} do not cut {size}", field="chunks.sizes")


def strip_count(spec: TensorSpec, dim: int) -> int:
    """Return in how many separate ranges a proper part of dimension ``dim`` lies."""
    order = spec.order if spec.order is not None else tuple(range(len(spec.shape)))
    return math.prod(spec.shape[outer] for outer in order[: order.index(dim)])


def chunk_nbytes(specs: tuple[TensorSpec, ...], plan: ChunkPlan, chunk: int) -> int:
    """Return the bytes of one chunk, over all leaves.

    Raises:
        ConfigError: There is no such chunk.
    """
    _check_chunk(plan, chunk)
    if plan.dim is None:
        return sum(spec.nbytes for spec in specs)
    spec = specs[0]
    return spec.nbytes // max(spec.shape[plan.dim], 1) * plan.sizes[chunk]


def strips(spec: TensorSpec, plan: ChunkPlan, chunk: int) -> tuple[Strip, ...]:
    """Return where one chunk's bytes lie in a leaf that is packed in its spec's order.

    Args:
        spec: The leaf.
        plan: How the payload is cut.
        chunk: Number of the chunk, from 0.

    Returns:
        Byte ranges relative to the leaf's first byte, in memory order, adjacent ones merged; ``()`` for no bytes.

    Raises:
        ConfigError: There is no such chunk.
    """
    _check_chunk(plan, chunk)
    total = spec.nbytes
    if total == 0:
        return ()
    if plan.dim is None:
        return (Strip(0, total),)
    repeats = strip_count(spec, plan.dim)
    row = total // repeats
    unit = row // spec.shape[plan.dim]
    length = plan.sizes[chunk] * unit
    if length == 0:
        return ()
    if length == row:
        return (Strip(0, total),)
    start = sum(plan.sizes[:chunk]) * unit
    return tuple(Strip(start + index * row, length) for index in range(repeats))


def chunk_view(tensor: torch.Tensor, plan: ChunkPlan, chunk: int) -> torch.Tensor:
    """Return the part of ``tensor`` that is chunk ``chunk``, sharing its memory.

    Raises:
        ConfigError: There is no such chunk.
    """
    _check_chunk(plan, chunk)
    if plan.dim is None:
        return tensor
    return tensor.narrow(plan.dim, sum(plan.sizes[:chunk]), plan.sizes[chunk])


def _check_chunk(plan: ChunkPlan, chunk: int) -> None:
    if not 0 <= chunk < plan.count:
        raise ConfigError(f"chunk {chunk} does not exist, the payload has chunks 0 to {plan.count - 1}", field="chunk")


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """Return torch's dtype for a spec.

    Raises:
        UnsupportedTensor: The torch of this process has no such dtype.
    """
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != spec.itemsize:
        message = f"torch {torch.__version__} has no dtype {spec.dtype!r} of {spec.itemsize} bytes; update torch here"
        raise UnsupportedTensor(message, field="dtype")
    return dtype


def packed_order(tensor: torch.Tensor) -> tuple[bool, tuple[int, ...] | None]:
    """Return whether a strided tensor fills its memory without gaps or overlaps, and in which order of dimensions.

    Returns:
        ``(True, None)`` for row-major, ``(True, order)`` for another dense order, ``(False, None)`` for the rest.
    """
    if tensor.is_contiguous():
        return True, None
    shape, strides = tensor.shape, tensor.stride()
    order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
    step = 1
    for dim in reversed(order):
        if shape[dim] != 1:
            if strides[dim] != step:
                return False, None
            step *= shape[dim]
    return True, tuple(order)


def tensor_from_buffer(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Make a tensor that lives in ``buffer``, packed in its spec's order. No copy.

    Args:
        buffer: A contiguous 1-d uint8 tensor of exactly ``spec.nbytes``, on any device. Its storage offset must be a
            multiple of the element's width (64-byte aligned slots always are).
        spec: What the tensor is.

    Raises:
        ConfigError: The buffer has another type, size or alignment.
        UnsupportedTensor: This process's torch does not know the dtype.
    """
    import torch

    _check_bytes(buffer, spec.nbytes)
    dtype = torch_dtype(spec)
    if buffer.storage_offset() % spec.itemsize and spec.nbytes:
        message = f"buffer begins at byte {buffer.storage_offset()} of its storage; align it to {spec.itemsize}"
        raise ConfigError(message, field="buffer")
    if not spec.nbytes:
        buffer = buffer.new_empty(0, dtype=torch.uint8)
    return buffer.view(dtype).as_strided(spec.shape, spec.strides())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a packed tensor's memory as a 1-d uint8 tensor, in memory order. No copy.

    Raises:
        UnsupportedTensor: The tensor is not dense, or its conjugate or negative bit is set.
    """
    import torch

    _require_packed(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def host_extent(tensor: torch.Tensor) -> Extent:
    """Return where a packed tensor's bytes lie in this process's host memory.

    Raises:
        UnsupportedTensor: The tensor is not dense, is on a device, or its conjugate or negative bit is set.
    """
    if tensor.device.type != "cpu":
        raise UnsupportedTensor(f"the tensor is on {tensor.device}, not in host memory", field="tensor")
    _require_packed(tensor)
    return Extent(address=tensor.data_ptr(), nbytes=tensor.numel() * tensor.element_size())


def copy_leaf(leaf: torch.Tensor, spec: TensorSpec, destination: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Write a leaf's bytes into ``destination``, packed in its spec's order; resolves conjugate and negative bits.

    Args:
        leaf: Any strided tensor of the spec's shape and dtype, as `payload.flatten` returned it.
        spec: The leaf's spec.
        destination: A contiguous 1-d uint8 tensor of exactly ``spec.nbytes``, on any device, aligned to the element.
        non_blocking: As in ``Tensor.copy_``.

    Raises:
        ConfigError: The destination does not fit.
    """
    copy_bits(leaf, tensor_from_buffer(destination, spec), non_blocking=non_blocking)


def copy_bits(source: torch.Tensor, destination: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Copy between two tensors of one shape and dtype, bit for bit, for every dtype (``copy_`` has gaps).

    Args:
        source: Any strided tensor; its conjugate and negative bits are resolved.
        destination: A tensor without such bits.
        non_blocking: As in ``Tensor.copy_``.

    Raises:
        ConfigError: Shapes or dtypes differ.
    """
    import torch

    if source.shape != destination.shape or source.dtype != destination.dtype:
        message = (
            f"source is {tuple(source.shape)} {source.dtype}, destination {tuple(destination.shape)} "
            f"{destination.dtype}; give a destination of the source's shape and dtype"
        )
        raise ConfigError(message, field="destination")
    if not (source.is_conj() or source.is_neg()):
        if _alike_on_host(source, destination):
            ctypes.memmove(destination.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
            return
        carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(source.element_size())
        if carrier is not None:
            source, destination = source.view(carrier), destination.view(carrier)
    destination.copy_(source, non_blocking=non_blocking)


def _alike_on_host(source: torch.Tensor, destination: torch.Tensor) -> bool:
    """Whether two tensors' bytes lie in the same order in host memory, and one thread copies them well enough."""
    import torch

    if source.device.type != "cpu" or destination.device.type != "cpu" or source.stride() != destination.stride():
        return False
    nbytes = source.numel() * source.element_size()
    return (nbytes <= ONE_THREAD_NBYTES or torch.get_num_threads() <= FEW_THREADS) and packed_order(source)[0]


def _require_packed(tensor: torch.Tensor) -> None:
    if not packed_order(tensor)[0] or tensor.is_conj() or tensor.is_neg():
        message = (
            f"strides {tensor.stride()} of shape {tuple(tensor.shape)} are not dense, or a lazy bit is set; copy it"
        )
        raise UnsupportedTensor(message, field="tensor")


def _check_bytes(buffer: torch.Tensor, nbytes: int) -> None:
    import torch

    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.numel() != nbytes:
        message = (
            f"need a contiguous 1-d uint8 tensor of {nbytes} bytes, "
            f"got {tuple(buffer.shape)} {buffer.dtype} with strides {buffer.stride()}"
        )
        raise ConfigError(message, field="buffer")
