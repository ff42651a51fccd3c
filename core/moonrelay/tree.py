"""The description of a payload's tree: plain values inline, each tensor as a number. Versioned, strict, bounded.

Owns what a plain value is, and its wire form. Types are told apart exactly: a bool is no int, a list no tuple, and what
comes back is what went in or was refused by the place where it stands. Bytes of tensors never pass through here; long
``bytes`` and ``str`` become tensors themselves. Importing it loads no torch.

Wire form (msgpack): ``[version, number of leaves, node]``. ``None``, bool, float, 64-bit int and short str stand for
themselves; everything else is an array that begins with its tag.
"""

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from moonrelay.errors import UnsupportedTensor, VersionError, WireError
from moonrelay.layout import ITEMSIZES, QUANTISED, TensorSpec

if TYPE_CHECKING:
    import torch

VERSION: Final = 1

#: Longest ``bytes``, ``str`` or int (in bytes) that stands in the tree itself; a longer one becomes a uint8 tensor.
INLINE_BYTES: Final = 1024
#: Deepest nesting of containers, largest encoded tree, most tensors in one.
MAX_DEPTH: Final = 64
MAX_TREE_BYTES: Final = 1 << 20
MAX_LEAVES: Final = 8192

_LEAF, _LIST, _TUPLE, _DICT, _SET, _FROZENSET = "T", "l", "t", "d", "s", "f"
_BYTES, _BYTEARRAY, _STR, _INT, _COMPLEX = "b", "a", "u", "i", "c"
_DTYPE, _SIZE, _DEVICE = "D", "Z", "V"
_BLOBS: Final = frozenset({_BYTES, _BYTEARRAY, _STR, _INT})

_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1

#: What to do instead, by the first module or base class that matches.
_REMEDIES: Final = {
    "numpy": "use torch.from_numpy(array) for an array, .item() for a scalar",
    "Enum": "use its .value",
    "PIL": "use a uint8 tensor of its pixels",
    "memoryview": "use bytes(value)",
    "range": "use a list or a tuple",
    "dict": "use dict(value)",
    "list": "use list(value)",
    "tuple": "use tuple(value)",
    "str": "use str(value)",
    "int": "use int(value)",
    "float": "use float(value)",
}

#: The description of a payload that is one tensor.
ONE_TENSOR: Final = msgspec.msgpack.encode([VERSION, 1, [_LEAF, 0]])


def encode_tree(value: object, root: str) -> tuple[bytes, list[tuple[str, torch.Tensor]]]:
    """Describe a tree and collect its tensors.

    Args:
        value: A tensor, a plain value, or a list, tuple, dict, set or frozenset of such.
        root: Name of the value in messages, e.g. ``"data"``.

    Returns:
        The description, and each distinct tensor object once with its place, in order of first appearance.

    Raises:
        UnsupportedTensor: Something in the tree cannot be carried exactly; ``context['field']`` names its place.
    """
    encoder = _Encoder(root)
    node = encoder.node(value)
    tree = msgspec.msgpack.encode([VERSION, len(encoder.leaves), node])
    if len(tree) > MAX_TREE_BYTES:
        raise encoder.too_large()
    return tree, encoder.leaves


def decode_tree(tree: bytes, leaves: Sequence[torch.Tensor]) -> object:
    """Rebuild a tree from its description and its tensors.

    Args:
        tree: What `encode_tree` made.
        leaves: The tensors, in its order.

    Returns:
        A new tree; a tensor object that stood in several places does so again.

    Raises:
        WireError: The description is malformed, or does not fit the leaves.
        VersionError: It is of another version.
        UnsupportedTensor: It names a dtype that this process's torch does not have.
    """
    return _TensorDecoder(leaves).decode(tree)


def decode_specs(tree: bytes, specs: Sequence[TensorSpec]) -> object:
    """Rebuild a tree with specs in place of tensors (and of long ``bytes``, ``str`` and ints).

    Raises:
        WireError, VersionError, UnsupportedTensor: As `decode_tree`.
    """
    return _SpecDecoder(specs).decode(tree)


def check_tree(tree: bytes, specs: Sequence[TensorSpec]) -> None:
    """Refuse a description that is malformed or does not fit its specs. Loads no torch.

    Raises:
        WireError, VersionError: As `decode_tree`.
    """
    _CheckDecoder(specs).decode(tree)


class _Encoder:
    """One walk over a tree; holds the place that it has reached."""

    def __init__(self, root: str) -> None:
        self.leaves: list[tuple[str, torch.Tensor]] = []
        self._numbers: dict[int, int] = {}
        self._root = root
        self._path: list[str] = []
        self._open: set[int] = set()
        self._size = 0
        self._torch = sys.modules.get("torch")

    def node(self, value: object, *, key: bool = False) -> object:
        """Return the wire form of a value; ``key`` where it must be hashable, inside a dict's key or a set."""
        self._grow(1)
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if type(value) is int:
            if _INT64_MIN <= value <= _INT64_MAX:
                return value
            return self._blob(_INT, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True), key)
        if type(value) is str:
            return self._str(value, key)
        if type(value) is bytes:
            return self._blob(_BYTES, value, key)
        if type(value) is complex:
            return [_COMPLEX, value.real, value.imag]
        if type(value) is tuple:
            return self._container(_TUPLE, value, key)
        if type(value) is frozenset:
            return self._container(_FROZENSET, value, key=True, indexed=False)
        if not key:
            if type(value) is list:
                return self._container(_LIST, value, key)
            if type(value) is dict:
                return self._dict(value)
            if type(value) is set:
                return self._container(_SET, value, key=True, indexed=False)
            if type(value) is bytearray:
                return self._blob(_BYTEARRAY, bytes(value), key)
            if self._torch is not None and isinstance(value, self._torch.Tensor):
                return [_LEAF, self._leaf(value)]
        return self._torch_value(value, key)

    def too_large(self) -> UnsupportedTensor:
        """Return the error for a description above its bound."""
        message = (
            f"the plain values take more than {MAX_TREE_BYTES} bytes or hold more than {MAX_LEAVES} tensors; "
            "put long lists of numbers into tensors, many tensors into one"
        )
        return UnsupportedTensor(message, field=self._root)

    def _field(self) -> str:
        return self._root + "".join(self._path)

    def _grow(self, nbytes: int) -> None:
        self._size += nbytes
        if self._size > MAX_TREE_BYTES:
            raise self.too_large()

    def _leaf(self, tensor: torch.Tensor) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            number = len(self.leaves)
            if number >= MAX_LEAVES:
                raise self.too_large()
            self.leaves.append((self._field(), tensor))
            self._numbers[id(tensor)] = number
        return number

    def _str(self, value: str, key: bool) -> object:
        if len(value) <= INLINE_BYTES // 4:
            try:
                value.encode()
            except UnicodeEncodeError:
                pass
            else:
                self._grow(len(value))
                return value
        return self._blob(_STR, value.encode("utf-8", "surrogatepass"), key)

    def _blob(self, tag: str, raw: bytes, key: bool) -> object:
        if len(raw) <= INLINE_BYTES:
            self._grow(len(raw))
            return [tag, raw]
        if key:
            message = f"a dict's key or a set's element of {len(raw)} bytes is too long; at most {INLINE_BYTES}"
            raise UnsupportedTensor(message, field=self._field())
        import torch

        return [tag, self._leaf(torch.frombuffer(bytearray(raw), dtype=torch.uint8))]

    def _enter(self, value: object) -> None:
        if id(value) in self._open:
            raise UnsupportedTensor("the container contains itself; break the cycle", field=self._field())
        if len(self._open) >= MAX_DEPTH:
            message = f"containers are nested deeper than {MAX_DEPTH}; flatten the tree"
            raise UnsupportedTensor(message, field=self._root + "".join(self._path[:4]) + "...")
        self._open.add(id(value))

    def _container(self, tag: str, value: Iterable[object], key: bool, *, indexed: bool = True) -> list[object]:
        self._enter(value)
        nodes: list[object] = [tag]
        for index, item in enumerate(value):
            self._path.append(f"[{index}]" if indexed else "{...}")
            nodes.append(self.node(item, key=key))
            self._path.pop()
        self._open.discard(id(value))
        return nodes

    def _dict(self, value: dict[object, object]) -> list[object]:
        self._enter(value)
        nodes: list[object] = [_DICT]
        for name, item in value.items():
            self._path.append(f"[{_short(name)}]")
            nodes.append(self.node(name, key=True))
            nodes.append(self.node(item))
            self._path.pop()
        self._open.discard(id(value))
        return nodes

    def _torch_value(self, value: object, key: bool) -> list[object]:
        if self._torch is not None:
            import torch

            if isinstance(value, torch.dtype):
                return [_DTYPE, str(value).removeprefix("torch.")]
            if isinstance(value, torch.device):
                return [_DEVICE, value.type, value.index]
            if isinstance(value, torch.Size):
                return self._container(_SIZE, value, key)
        what = type(value)
        place = "as a dict's key or a set's element " if key else ""
        bases = [what.__module__.partition(".")[0], *(base.__name__ for base in what.__mro__)]
        remedy = next((text for name, text in _REMEDIES.items() if name in bases), "use tensors and plain values")
        message = f"a {what.__module__}.{what.__qualname__} {place}cannot be carried exactly; {remedy}"
        raise UnsupportedTensor(message, field=self._field())


def _short(name: object) -> str:
    """Return a dict key as it stands in a field's name, whatever its ``repr`` does."""
    if isinstance(name, (str, int, float, bool, bytes, type(None))) and type(name).__module__ == "builtins":
        text = repr(name[:40] if isinstance(name, (str, bytes)) else name) if not _huge(name) else "int"
        return text.encode("ascii", "backslashreplace").decode()
    return type(name).__name__


def _huge(name: object) -> bool:
    return isinstance(name, int) and name.bit_length() > 256


class _Decoder(ABC):
    """One walk over a description. Every failure is a `WireError`; memory is bounded by the input's size."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._used = bytearray(count)

    def decode(self, tree: bytes) -> object:
        if len(tree) > MAX_TREE_BYTES:
            raise WireError(f"the tree has {len(tree)} bytes, at most {MAX_TREE_BYTES} are allowed", field="tree")
        try:
            top = msgspec.msgpack.decode(tree)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise WireError("the tree is no valid msgpack", field="tree") from error
        if type(top) is not list or len(top) != 3 or type(top[0]) is not int:
            raise _malformed("it is no [version, leaves, node]")
        if top[0] != VERSION:
            raise VersionError(f"the tree has version {top[0]}, this side reads version {VERSION}", field="tree")
        if type(top[1]) is not int or top[1] != self._count:
            raise _malformed(f"it speaks of {str(top[1])[:20]} tensors, there are {self._count}")
        value = self._node(top[2], depth=0, key=False)
        if not all(self._used):
            raise _malformed("a tensor stands nowhere in it")
        return value

    @abstractmethod
    def leaf(self, number: int) -> object:
        """Return what stands for tensor ``number``."""

    @abstractmethod
    def blob(self, tag: str, number: int) -> object:
        """Return what stands for a long ``bytes``, ``str`` or int whose bytes are tensor ``number``."""

    @abstractmethod
    def torch_value(self, tag: str, args: list[object]) -> object:
        """Return the dtype, device or Size whose arguments were checked."""

    def _node(self, node: object, depth: int, key: bool) -> object:
        kind = type(node)
        if node is None or kind is bool or kind is float or kind is int or kind is str:
            return node
        if type(node) is not list or not node or type(node[0]) is not str:
            raise _malformed(f"a {kind.__name__} is no node")
        tag: str = node[0]
        args: list[object] = node[1:]
        if tag == _LEAF and not key:
            return self.leaf(self._number(args))
        if tag in _BLOBS:
            return self._any_blob(tag, args, key)
        if tag == _COMPLEX:
            if len(args) == 2 and type(args[0]) is float and type(args[1]) is float:
                return complex(args[0], args[1])
            raise _malformed("a complex number needs two floats")
        if tag in (_DTYPE, _DEVICE, _SIZE):
            return self.torch_value(tag, _checked(tag, args))
        if depth >= MAX_DEPTH:
            raise _malformed(f"it is nested deeper than {MAX_DEPTH}")
        if tag == _TUPLE:
            return tuple([self._node(arg, depth + 1, key) for arg in args])
        if tag == _FROZENSET:
            return frozenset(self._distinct(args, depth))
        if key:
            raise _malformed(f"{tag[:8]!r} is no key")
        if tag == _LIST:
            return [self._node(arg, depth + 1, key=False) for arg in args]
        if tag == _DICT:
            return self._dict(args, depth)
        if tag == _SET:
            return self._distinct(args, depth)
        raise _malformed(f"tag {tag[:8]!r} is unknown")

    def _dict(self, args: list[object], depth: int) -> dict[object, object]:
        if len(args) % 2:
            raise _malformed("a dict has a key without a value")
        found: dict[object, object] = {}
        for name, value in zip(args[::2], args[1::2], strict=True):
            found[self._node(name, depth + 1, key=True)] = self._node(value, depth + 1, key=False)
        if len(found) != len(args) // 2:
            raise _malformed("a dict has a key twice")
        return found

    def _distinct(self, args: list[object], depth: int) -> set[object]:
        found = {self._node(arg, depth + 1, key=True) for arg in args}
        if len(found) != len(args):
            raise _malformed("a set has an element twice")
        return found

    def _number(self, args: list[object]) -> int:
        if len(args) != 1 or type(args[0]) is not int or not 0 <= args[0] < self._count:
            raise _malformed("a tensor's number is out of range")
        self._used[args[0]] = 1
        return args[0]

    def _any_blob(self, tag: str, args: list[object], key: bool) -> object:
        if len(args) == 1 and type(args[0]) is bytes and not (key and tag == _BYTEARRAY):
            return _from_bytes(tag, args[0])
        if key:
            raise _malformed("a long value is no key")
        return self.blob(tag, self._number(args))


class _TensorDecoder(_Decoder):
    """Rebuilds the tree itself."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__(len(leaves))
        self._leaves = leaves

    def leaf(self, number: int) -> object:
        return self._leaves[number]

    def blob(self, tag: str, number: int) -> object:
        import torch

        tensor = self._leaves[number]
        if tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise _malformed(f"tensor {number} holds no plain bytes")
        host = tensor.detach().cpu().contiguous()
        return _from_bytes(tag, ctypes.string_at(host.data_ptr(), host.numel()) if host.numel() else b"")

    def torch_value(self, tag: str, args: list[object]) -> object:
        return _to_torch(tag, args)


class _SpecDecoder(_Decoder):
    """Rebuilds the tree with specs in it."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        super().__init__(len(specs))
        self._specs = specs

    def leaf(self, number: int) -> object:
        return self._specs[number]

    def blob(self, tag: str, number: int) -> object:
        spec = self._specs[number]
        if spec.dtype != "uint8" or len(spec.shape) != 1:
            raise _malformed(f"tensor {number} holds no plain bytes")
        return spec

    def torch_value(self, tag: str, args: list[object]) -> object:
        return _to_torch(tag, args)


class _CheckDecoder(_SpecDecoder):
    """Only looks."""

    def torch_value(self, tag: str, args: list[object]) -> object:
        return (tag, *args)


def _malformed(why: str) -> WireError:
    return WireError(f"the tree is malformed: {why}", field="tree")


def _from_bytes(tag: str, raw: bytes) -> object:
    if tag == _BYTES:
        return raw
    if tag == _BYTEARRAY:
        return bytearray(raw)
    if tag == _INT:
        return int.from_bytes(raw, "little", signed=True)
    try:
        return raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise _malformed("a str is no UTF-8") from error


def _checked(tag: str, args: list[object]) -> list[object]:
    """Return the arguments of a dtype, device or Size, once their types are right."""
    if tag == _SIZE:
        right = all(type(arg) is int and _INT64_MIN <= arg <= _INT64_MAX for arg in args)
    elif tag == _DTYPE:
        right = len(args) == 1 and type(args[0]) is str and len(args[0]) <= 64 and args[0].isidentifier()
    else:
        right = (
            len(args) == 2 and type(args[0]) is str and args[0].isalnum() and args[0].isascii() and len(args[0]) < 32
        )
        right = right and (args[1] is None or (type(args[1]) is int and 0 <= args[1] < 128))
    if not right:
        raise _malformed(f"the arguments of {tag!r} are wrong")
    return args


def _to_torch(tag: str, args: list[object]) -> object:
    import torch

    if tag == _SIZE:
        return torch.Size(arg for arg in args if isinstance(arg, int))
    if tag == _DTYPE:
        dtype = getattr(torch, str(args[0]), None)
        if not isinstance(dtype, torch.dtype):
            known = args[0] in ITEMSIZES or args[0] in QUANTISED
            message = f"torch {torch.__version__} has no dtype {args[0]!r}" + ("; update torch here" if known else "")
            raise UnsupportedTensor(message, field="tree")
        return dtype
    try:
        return torch.device(str(args[0])) if args[1] is None else torch.device(f"{args[0]}:{args[1]}")
    except RuntimeError as error:
        raise _malformed(f"device {str(args[0])[:32]!r} is unknown") from error
