"""Trees of tensors and plain values for tests, and the form in which two of them are compared bit for bit."""

from __future__ import annotations

import struct

import torch

from moonrelay.layout import ITEMSIZES, TensorSpec, bytes_of, copy_leaf, tensor_from_buffer

#: Every dtype that this torch has.
DTYPES = sorted(name for name in ITEMSIZES if hasattr(torch, name))
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0,), (3, 0, 2), (7,), (2, 3, 5))


def tensor(dtype: str, shape: tuple[int, ...] = (2, 3), seed: int = 0) -> torch.Tensor:
    """Return a tensor on memory of any bytes: NaNs of all kinds are among them."""
    spec = TensorSpec(shape=shape, dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    return tensor_from_buffer(torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=random), spec)


def bits(value: torch.Tensor) -> bytes:
    spec = TensorSpec(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
    plain = torch.empty(spec.nbytes, dtype=torch.uint8)
    copy_leaf(value.detach().cpu(), spec, plain)
    return bytes_of(plain).numpy().tobytes()


def canon(value: object) -> object:
    """Return something that is equal for two trees just when types, structure and every bit are."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), value.device.type, bits(value))
    if type(value) is float:
        return ("float", struct.pack("<d", value))
    if type(value) in (list, tuple, torch.Size):
        return (type(value).__name__, *(canon(item) for item in value))  # type: ignore[attr-defined]
    if type(value) in (set, frozenset):
        return (type(value).__name__, frozenset(canon(item) for item in value))  # type: ignore[attr-defined]
    if type(value) is dict:
        return ("dict", *((canon(name), canon(item)) for name, item in value.items()))
    return (type(value).__name__, bytes(value) if isinstance(value, bytearray) else value)


def every_dtype() -> dict[str, object]:
    """Return a tree with every dtype in every shape."""
    return {f"{name} {shape}": tensor(name, shape, len(name)) for name in DTYPES for shape in SHAPES}


def nested() -> dict[object, object]:
    """Return a tree of everything else."""
    shared = tensor("bfloat16", (4,))
    return {
        "prompt_embeds": [tensor("bfloat16", (1, 4, 8)), None, (tensor("int64", ()), [])],
        "mask": tensor("bool", (1, 4)),
        3: {
            "guidance": -0.0,
            "nan": float("nan"),
            "big": 1 << 80,
            "raw": b"\x00\xff",
            "long": "x" * 5000,
            "flag": True,
        },
        "twice": [shared, shared],
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "set": {1, "a", None},
        "array": bytearray(b"abc"),
        "empty": {},
        "complex": 1j,
        None: None,
    }


#: Name to tree: what must come back bit for bit.
TREES: dict[str, object] = {
    "every dtype": every_dtype(),
    "nested": nested(),
    "one tensor": tensor("bfloat16", (1, 7, 16)),
    "0-d": tensor("bfloat16", ()),
    "empty": tensor("float8_e4m3fn", (0, 4096)),
    "fp8": tensor("float8_e5m2", (3, 5)),
    "None": None,
    "no tensor": [1, "a", {}],
    "channels last": tensor("float16", (2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "transposed": tensor("float32", (3, 4)).T,
    "with gaps": tensor("float32", (6, 8))[::2, 1::3],
    "expanded": tensor("bfloat16", (1, 3)).expand(4, 3),
    "conjugated": tensor("complex64", (3,)).conj(),
    "negated": tensor("complex64", (3,)).conj().imag,
    "inside a larger one": tensor("float32", (8,))[3:5],
}
