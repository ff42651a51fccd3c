"""How a described tensor lies in memory, and its elements' bytes back out of any layout.

Owns both directions. Copies are made between integers of the dtype's width, so that no conversion can touch a bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: Makes the bytes of a tensor's elements, given their number.
Bytes = Callable[[int], bytearray]

#: Integers by which elements are copied, by their width.
_CARRIERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}

#: For a neg view of this dtype: the complex dtype of which it is the imaginary part.
_COMPLEX_OF: Final = {"float16": "complex32", "float32": "complex64", "float64": "complex128"}

#: Most significant exponent bit within an element, little endian: (byte, mask). Clearing it leaves a finite value.
_EXPONENT: Final = {
    "float16": (2, 1, 0x40),
    "bfloat16": (2, 1, 0x40),
    "float32": (4, 3, 0x40),
    "float64": (8, 7, 0x40),
    "complex32": (2, 1, 0x40),
    "complex64": (4, 3, 0x40),
    "complex128": (8, 7, 0x40),
}


def lay_out(value: Mapping[str, Any], dtype: torch.dtype, source: Bytes, place: str) -> torch.Tensor:
    """Make a tensor from its description.

    Args:
        value: A checked tensor node.
        dtype: Its dtype.
        source: Gives its elements' bytes.
        place: Its name in messages.

    Raises:
        ConfigError: The layout does not fit the shape or the dtype; names the place.
    """
    shape, layout, finite = value["shape"], value.get("layout", "contiguous"), value.get("finite", False)
    if layout == "conj":
        _require(dtype.is_complex, place, "the layout conj needs a complex dtype")
        return _packed(shape, dtype, source, finite).conj()
    if layout == "neg":
        return _negative(shape, dtype, source, finite, place)
    if layout == "expanded":
        _require(len(shape) >= 1 and shape[0] > 1, place, "the layout expanded needs a first dimension above 1")
        return _packed(shape[1:], dtype, source, finite).unsqueeze(0).expand(shape)
    if layout == "overlapping":
        _require(len(shape) == 2 and min(shape) > 1, place, "the layout overlapping needs two dimensions above 1")
        return _packed([sum(shape) - 1], dtype, source, finite).as_strided(shape, (1, 1))
    made = _packed(shape, dtype, source, finite)
    if layout == "contiguous":
        return made
    if dtype.itemsize not in _CARRIERS:
        return _placed(made, layout, place)
    return _placed(_as_integers(made), layout, place).view(dtype)


def element_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's elements in C order, by their logical values.

    Raises:
        RuntimeError, NotImplementedError: The tensor has no bytes (sparse, meta, ...).
    """
    import torch

    plain = tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.is_nested:
        message = f"a tensor of layout {plain.layout} has no elements in order"
        raise NotImplementedError(message)
    if plain.is_conj() or plain.is_neg():  # asked first: torch warns of some dtypes that it cannot have
        plain = plain.resolve_conj().resolve_neg()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    nbytes = plain.numel() * plain.element_size()
    if nbytes == 0:
        return b""
    if plain.untyped_storage().nbytes() == 0:
        message = "the tensor's memory was freed"
        raise NotImplementedError(message)
    packed = _as_integers(plain).contiguous()
    return ctypes.string_at(packed.data_ptr(), nbytes)


def _placed(made: torch.Tensor, layout: str, place: str) -> torch.Tensor:
    """Return a tensor of the same elements that lies differently."""
    import torch

    dims = made.dim()
    if layout in ("channels_last", "channels_last_3d"):
        wanted = 4 if layout == "channels_last" else 5
        _require(dims == wanted, place, f"the layout {layout} needs {wanted} dimensions")
        return made.contiguous(memory_format=getattr(torch, layout))
    if layout == "offset":
        storage = made.new_zeros(made.numel() + 5)
        target = storage[3 : 3 + made.numel()].view(made.shape)
        target.copy_(made)
        return target
    _require(dims >= 1, place, f"the layout {layout} needs a dimension")
    if layout == "transposed":
        backwards = list(reversed(range(dims)))
        return made.permute(backwards).contiguous().permute(backwards)
    if layout == "inner_first":
        return made.movedim(0, -1).contiguous().movedim(-1, 0)
    if layout == "odd_stride":
        _require(1 in made.shape, place, "the layout odd_stride needs a dimension of size 1")
        strides = [7 if size == 1 else stride for size, stride in zip(made.shape, made.stride(), strict=True)]
        return made.as_strided(tuple(made.shape), strides)
    if layout == "strided":
        target = made.new_zeros((*made.shape[:-1], made.shape[-1] * 2))[..., ::2]
    else:
        assert layout == "cropped"
        target = made.new_zeros([size + 2 for size in made.shape])
        for dim in range(dims):
            target = target.narrow(dim, 1, made.shape[dim])
    target.copy_(made)
    return target


def _negative(shape: Sequence[int], dtype: torch.dtype, source: Bytes, finite: bool, place: str) -> torch.Tensor:
    """Return a tensor with the negative bit: the imaginary part of a lazily conjugated one."""
    import torch

    name = _COMPLEX_OF.get(str(dtype).removeprefix("torch."))
    _require(name is not None, place, f"the layout neg needs one of {', '.join(_COMPLEX_OF)}")
    values = _packed(shape, dtype, source, finite)
    pairs = torch.zeros((*shape, 2), dtype=dtype)
    _as_integers(pairs)[..., 1].copy_(_as_integers(values))
    return pairs.view(getattr(torch, str(name))).squeeze(-1).conj().imag


def _packed(shape: Sequence[int], dtype: torch.dtype, source: Bytes, finite: bool) -> torch.Tensor:
    """Return a contiguous tensor at the start of its storage."""
    import torch

    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    raw = source(nbytes)
    name = str(dtype).removeprefix("torch.")
    if name == "bool":
        raw = bytearray(byte & 1 for byte in raw)
    if finite and name in _EXPONENT:
        width, byte, mask = _EXPONENT[name]
        raw[byte::width] = bytes(one & ~mask for one in raw[byte::width])
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).view(tuple(shape))


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as integers of the same width; pairs of them for the widest dtype."""
    import torch

    carrier = _CARRIERS.get(tensor.element_size())
    if carrier is None:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(getattr(torch, carrier))


def _require(holds: bool, place: str, message: str) -> None:
    if not holds:
        raise ConfigError(f"{place}: {message}", field=place)
