"""Trees made from their descriptions, and the canonical form by which two trees are compared.

Owns both, and shares no code with what is under test: not with `moonrelay.payload`, its layouts or its digests. The
canonical form tells apart types, dtypes, shapes, the bits of every element, the order of a dict, and one object in two
places from two equal ones. It does not see strides, devices and what memory is shared; of a tensor it also says whether
it requires grad, since nothing that was sent does so where it arrives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from moonrelay.errors import ConfigError
from moonrelay_conformance.corpus.description import check, only
from moonrelay_conformance.corpus.foreign import make_foreign
from moonrelay_conformance.corpus.layouts import element_bytes, lay_out

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES: Final = 16

#: Deeper containers have no form; what must arrive is never that deep, and a list may contain itself.
_MAX_DEPTH: Final = 200


def build(description: Any, *, received: bool = False) -> Any:
    """Make the tree that a description stands for; the same in every process.

    Args:
        description: See `moonrelay_conformance.corpus.description`.
        received: Make it as it must arrive: tensors that are detached and no parameters.

    Returns:
        A new tree.

    Raises:
        ConfigError: The description is wrong, or this process's torch lacks a dtype; names the place.
    """
    check(description)
    return _Builder(received).node(description, "tree", 0)


def outline(tree: Any) -> list[Any]:
    """Return the canonical form of a tree.

    Returns:
        JSON values; a tensor is ``["tensor", number, dtype, shape, digest of its elements]``, and ``["same", number]``
        where it stands again. What cannot be in a payload is ``["foreign", its type]``, so that a wrong result has a
        form too.
    """
    return _Outliner().node(tree)


def digest(tree: Any) -> str:
    """Return the digest of a tree: BLAKE2b-128 over its outline as compact ASCII JSON, in hex."""
    raw = json.dumps(outline(tree), separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    return hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest()


def chunk_of(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """Return one chunk of a tensor, sharing its memory: the remainder goes to the first chunks, one each.

    Args:
        tensor: What is cut.
        dim: Dimension along which it is cut; negative ones count from the end.
        count: Number of chunks.
        index: Which one.

    Raises:
        ConfigError: There is no such chunk.
    """
    if not 0 <= index < count:
        message = f"chunk {index} does not exist; there are chunks 0 to {count - 1}"
        raise ConfigError(message, field="chunk")
    base, rest = divmod(tensor.shape[dim], count)
    start = index * base + min(index, rest)
    return tensor.narrow(dim, start, base + (index < rest))


def chunk_digests(description: Any, dim: int, count: int) -> tuple[str, ...]:
    """Return the digest of every chunk of a described tensor, in chunk order.

    Raises:
        ConfigError: The description is wrong, or is not of one tensor.
    """
    tensor = build(description, received=True)
    if not hasattr(tensor, "narrow"):
        message = f"only a tensor can be cut into chunks, this is a {type(tensor).__name__}"
        raise ConfigError(message, field="tree")
    return tuple(digest(chunk_of(tensor, dim, count, index)) for index in range(count))


def missing_dtypes(description: Any) -> tuple[str, ...]:
    """Return the dtypes of a description that this process's torch does not have; empty where it can be built."""
    import torch

    named = {value for kind, value in _words(description) if kind == "dtype" and isinstance(value, str)}
    return tuple(sorted(name for name in named if not isinstance(getattr(torch, name, None), torch.dtype)))


def _words(node: Any) -> Iterable[tuple[str, Any]]:
    """Yield the keys and values of all objects in a description."""
    if isinstance(node, dict):
        yield from node.items()
        for value in node.values():
            yield from _words(value)
    elif isinstance(node, list):
        for value in node:
            yield from _words(value)


class _Builder:
    """One walk over a checked description."""

    def __init__(self, received: bool) -> None:
        self._received = received
        self._named: dict[str, Any] = {}
        self._kinds: Mapping[str, Callable[[Any, str, int], Any]] = {
            "tensor": self._tensor,
            "views": self._views,
            "list": self._list,
            "tuple": lambda value, place, shift: tuple(self._list(value, place, shift)),
            "set": self._set,
            "frozenset": lambda value, place, shift: frozenset(self._set(value, place, shift)),
            "dict": self._dict,
            "repeat": lambda value, place, shift: [
                self.node(value["of"], f"{place}[{index}]", shift + index) for index in range(value["count"])
            ],
            "nest": self._nest,
            "named": self._name,
            "same": lambda value, *_: self._named[value],
            "bytes": lambda value, *_: bytes.fromhex(value),
            "bytearray": lambda value, *_: bytearray.fromhex(value),
            "blob": lambda value, _, shift: seeded(value.get("seed", 0) + shift, value["nbytes"]),
            "text": lambda value, *_: value["of"] * value["count"],
            "codepoints": lambda value, *_: "".join(map(chr, value)),
            "int": lambda value, *_: (1 << value["bits"]) - 1 if isinstance(value, dict) else int(value),
            "float": lambda value, *_: _float(value),
            "complex": lambda value, place, shift: complex(*(float(self.node(part, place, shift)) for part in value)),
            "dtype": lambda value, place, _: _dtype(value, place),
            "device": self._device,
            "size": self._size,
            "foreign": lambda value, place, _: make_foreign(value, place),
        }

    def node(self, node: Any, place: str, shift: int) -> Any:
        if not isinstance(node, dict):
            return node
        kind, value = only(node)
        return self._kinds[kind](value, f"{place}.{kind}", shift)

    def _tensor(self, value: Mapping[str, Any], place: str, shift: int) -> Any:
        import torch

        dtype = _dtype(value["dtype"], place)
        made = lay_out(value, dtype, lambda nbytes: _elements(value, nbytes, shift), place)
        if self._received:
            return made
        try:
            if value.get("parameter"):
                return torch.nn.Parameter(made, requires_grad=value.get("requires_grad", False))
            return made.requires_grad_(value.get("requires_grad", False))
        except RuntimeError as exc:
            message = f"{place}: {exc}"
            raise ConfigError(message, field=place) from exc

    def _views(self, value: Mapping[str, Any], place: str, shift: int) -> Any:
        whole = self.node(value["of"], f"{place}.of", shift)
        starts = itertools.accumulate(value["sizes"], initial=0)
        return [whole.narrow(value["dim"], start, size) for start, size in zip(starts, value["sizes"], strict=False)]

    def _list(self, value: Sequence[Any], place: str, shift: int) -> list[Any]:
        return [self.node(item, f"{place}[{index}]", shift) for index, item in enumerate(value)]

    def _set(self, value: Sequence[Any], place: str, shift: int) -> set[Any]:
        items = self._list(value, place, shift)
        try:
            found = set(items)
        except TypeError as exc:
            message = f"{place}: {exc}; a set holds hashable values"
            raise ConfigError(message, field=place) from exc
        if len(found) != len(items):
            message = f"{place} has an element twice"
            raise ConfigError(message, field=place)
        return found

    def _dict(self, value: Sequence[Any], place: str, shift: int) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for index, (key, item) in enumerate(value):
            try:
                found[self.node(key, f"{place}[{index}].key", shift)] = self.node(item, f"{place}[{index}]", shift)
            except TypeError as exc:
                message = f"{place}[{index}].key: {exc}; a key is hashable"
                raise ConfigError(message, field=f"{place}[{index}].key") from exc
        if len(found) != len(value):
            message = f"{place} has a key twice"
            raise ConfigError(message, field=place)
        return found

    def _nest(self, value: Mapping[str, Any], place: str, shift: int) -> Any:
        inner = self.node(value["of"], f"{place}.of", shift)
        for _ in range(value["depth"]):
            inner = [inner]
        return inner

    def _name(self, value: Mapping[str, Any], place: str, shift: int) -> Any:
        made = self._named[value["name"]] = self.node(value["of"], f"{place}.of", shift)
        return made

    def _device(self, value: str, place: str, _shift: int) -> Any:
        import torch

        try:
            return torch.device(value)
        except RuntimeError as exc:
            message = f"{place}={value!r} is no device"
            raise ConfigError(message, field=place) from exc

    def _size(self, value: Sequence[int], _place: str, _shift: int) -> Any:
        import torch

        return torch.Size(value)


class _Outliner:
    """One walk over a tree."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        # What has a number must not be freed during the walk: another object could get its id.
        self._kept: list[Any] = []
        self._depth = 0

    def node(self, value: Any) -> list[Any]:
        if self._depth > _MAX_DEPTH:
            return ["foreign", f"containers nested deeper than {_MAX_DEPTH}"]
        self._depth += 1
        try:
            return self._node(value)
        finally:
            self._depth -= 1

    def _node(self, value: Any) -> list[Any]:
        kind = type(value)
        if value is None:
            return ["none"]
        if kind is bool:
            return ["bool", value]
        if kind is int:
            return ["int", hex(value)]
        if kind is float:
            return ["float", _float_bits(value)]
        if kind is complex:
            return ["complex", _float_bits(value.real), _float_bits(value.imag)]
        if kind is str:
            return ["str", value]
        if kind in (bytes, bytearray):
            return [kind.__name__, bytes(value).hex()]
        if kind in (list, tuple):
            return [kind.__name__, *map(self.node, value)]
        if kind is dict:
            return ["dict", *([self.node(key), self.node(item)] for key, item in value.items())]
        if kind in (set, frozenset):
            return [kind.__name__, *sorted(map(self.node, value), key=json.dumps)]
        return self._torch_value(value)

    def _torch_value(self, value: Any) -> list[Any]:
        import torch

        kind = type(value)
        if kind is torch.Tensor:
            number = self._numbers.get(id(value))
            if number is not None:
                return ["same", number]
            self._numbers[id(value)] = number = len(self._numbers)
            self._kept.append(value)
            return self._tensor(value, number)
        if kind is torch.dtype:
            return ["dtype", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", value.type, value.index]
        if kind is torch.Size:
            return ["size", *value]
        return ["foreign", f"{kind.__module__}.{kind.__qualname__}"]

    def _tensor(self, value: Any, number: int) -> list[Any]:
        name = str(value.dtype).removeprefix("torch.")
        try:
            shape = list(value.shape)
            raw = element_bytes(value)
        except (RuntimeError, NotImplementedError) as exc:
            return ["foreign", f"{value.layout} tensor of {name} on {value.device.type}: {type(exc).__name__}"]
        grad = ["requires_grad"] if value.requires_grad else []
        return ["tensor", number, name, shape, hashlib.blake2b(raw, digest_size=_DIGEST_BYTES).hexdigest(), *grad]


def seeded(seed: int, nbytes: int) -> bytes:
    """Return ``nbytes`` that a seed stands for: SHAKE-128 of its decimal digits."""
    return hashlib.shake_128(str(seed).encode("ascii")).digest(nbytes)


def _elements(value: Mapping[str, Any], nbytes: int, shift: int) -> bytearray:
    """Return the bytes of a described tensor's elements in C order."""
    pattern = bytes.fromhex(value.get("bits", ""))
    if pattern:
        return bytearray((pattern * (nbytes // len(pattern) + 1))[:nbytes])
    return bytearray(seeded(value.get("seed", 0) + shift, nbytes))


def _float(text: str) -> float:
    if len(text) == 16:
        found: float = struct.unpack(">d", bytes.fromhex(text))[0]
        return found
    return float(text)


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _dtype(name: str, place: str) -> torch.dtype:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        message = f"{place}: torch {torch.__version__} has no dtype {name!r}; update torch"
        raise ConfigError(message, field=place)
    return found
