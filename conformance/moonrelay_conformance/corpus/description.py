"""The language in which payloads are described, as JSON values, and the check that a description is one.

Owns the vocabulary; no tensor is made here. A plain JSON scalar stands for itself. Everything else is an object with
one key:

| node                                                    | stands for                                              |
|---------------------------------------------------------|---------------------------------------------------------|
| `{"tensor": {"shape", "dtype", ...}}`                   | a tensor; see `TENSOR_KEYS`                             |
| `{"views": {"of": tensor, "dim": d, "sizes": [...]}}`   | a list of slices that share one storage                 |
| `{"list": [...]}`, `{"tuple": ...}`                     | the container                                           |
| `{"set": [...]}`, `{"frozenset": [...]}`                | the container                                           |
| `{"dict": [[key, value], ...]}`                         | a dict, in this order                                   |
| `{"repeat": {"count": n, "of": node}}`                  | a list of n, the seeds advancing by one                 |
| `{"nest": {"depth": n, "of": node}}`                    | n lists around it                                       |
| `{"named": {"name": "a", "of": node}}`, `{"same": "a"}` | one object in two places                                |
| `{"bytes": hex}`, `{"bytearray": hex}`                  | bytes                                                   |
| `{"blob": {"nbytes": n, "seed": s}}`                    | n bytes from a seed                                     |
| `{"text": {"count": n, "of": "..."}}`                   | a str n times over                                      |
| `{"codepoints": [...]}`                                 | a str of any code points, lone surrogates also          |
| `{"int": "123"}`                                        | an int of any size; `{"int": {"bits": n}}` is 2**n - 1  |
| `{"float": "nan"}`                                      | `inf`, `-inf`, `-0.0`, or 16 hex digits of its bits     |
| `{"complex": [re, im]}`                                 | a complex, of numbers or float nodes                    |
| `{"dtype": "float16"}`, `{"device": "cpu"}`             | torch's                                                 |
| `{"size": [...]}`                                       | `torch.Size`                                            |
| `{"foreign": word}`                                     | something that must be refused; see `FOREIGN`           |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from moonrelay.errors import ConfigError

#: Most bytes of one described tensor or blob; the corpus has to run anywhere.
MAX_BYTES: Final = 1 << 30

#: Of a tensor node. ``shape`` and ``dtype`` are required. The bytes of its elements in C order come from ``seed``;
#: ``bits`` (hex) fills it with a repeated pattern of bytes instead; ``finite`` keeps random floats finite.
TENSOR_KEYS: Final = frozenset({"shape", "dtype", "seed", "bits", "finite", "layout", "requires_grad", "parameter"})

#: How a tensor lies in memory. The logical values of all but ``expanded``, ``overlapping``, ``conj`` and ``neg`` are
#: those of ``contiguous`` with the same seed.
LAYOUTS: Final = frozenset(
    {
        "contiguous",
        "transposed",  # the dimensions reversed in memory
        "inner_first",  # the first dimension moved innermost
        "strided",  # every second element of the last dimension
        "cropped",  # the inside of a larger tensor, along every dimension
        "offset",  # contiguous, but not at the start of its storage
        "odd_stride",  # a dimension of size 1 with a stride that says nothing
        "channels_last",  # 4 dimensions
        "channels_last_3d",  # 5 dimensions
        "expanded",  # the first dimension has stride 0
        "overlapping",  # 2 dimensions, rows overlap in memory
        "conj",  # complex, the lazy conjugate bit set
        "neg",  # float16, float32 or float64, the lazy negative bit set
    }
)

#: Things that no payload can carry bit for bit.
FOREIGN: Final = frozenset(
    {
        "object",
        "generator",
        "torch_generator",
        "ndarray",
        "numpy_scalar",
        "function",
        "module",
        "sparse",
        "sparse_csr",
        "nested_tensor",
        "quantized",
        "meta",
        "tensor_subclass",
        "freed",
        "enum",
        "int_enum",
        "dataclass",
        "named_tuple",
        "ordered_dict",
        "defaultdict",
        "dict_subclass",
        "list_subclass",
        "str_subclass",
        "int_subclass",
        "range",
        "memoryview",
        "decimal",
        "datetime",
        "path",
        "cycle",
        "ellipsis",
        "tensor_key",
    }
)

_HEX: Final = re.compile(r"([0-9a-f]{2})*")
_FLOAT: Final = re.compile(r"nan|inf|-inf|-0\.0|[0-9a-f]{16}")
_INT: Final = re.compile(r"-?[0-9]+")
_DEVICE: Final = re.compile(r"[a-z]+(:[0-9]+)?")


def check(description: Any, place: str = "tree") -> None:
    """Refuse a description that stands for nothing. Loads no torch.

    Args:
        description: JSON values.
        place: Its name in messages.

    Raises:
        ConfigError: ``context['field']`` is the place inside the description.
    """
    _Checker().node(description, place)


def only(description: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key and the value of a checked node."""
    ((kind, value),) = description.items()
    return kind, value


class _Checker:
    """One walk over a description."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._kinds: Mapping[str, Callable[[Any, str], None]] = {
            "tensor": self._tensor,
            "views": self._views,
            "list": self._items,
            "tuple": self._items,
            "set": self._items,
            "frozenset": self._items,
            "dict": self._dict,
            "repeat": self._repeat,
            "nest": self._nest,
            "named": self._named,
            "same": self._same,
            "bytes": _matches(_HEX, "hex digits"),
            "bytearray": _matches(_HEX, "hex digits"),
            "blob": self._blob,
            "text": self._text,
            "codepoints": self._codepoints,
            "int": self._int,
            "float": _matches(_FLOAT, "nan, inf, -inf, -0.0 or 16 hex digits"),
            "complex": self._complex,
            "dtype": self._word,
            "device": _matches(_DEVICE, "a device, e.g. cpu or cuda:1"),
            "size": self._sizes,
            "foreign": self._foreign,
        }

    def node(self, node: Any, place: str) -> None:
        if node is None or type(node) in (bool, int, float, str):
            return
        _require(isinstance(node, dict) and len(node) == 1, place, node, "a scalar, or an object with one key")
        kind, value = only(node)
        _require(kind in self._kinds, place, kind, f"one of {', '.join(self._kinds)}")
        self._kinds[kind](value, f"{place}.{kind}")

    def _tensor(self, value: Any, place: str) -> None:
        _object(value, place, {"shape", "dtype"}, TENSOR_KEYS)
        self._sizes(value["shape"], f"{place}.shape")
        self._word(value["dtype"], f"{place}.dtype")
        _require(type(value.get("seed", 0)) is int, f"{place}.seed", value.get("seed"), "an int")
        layout = value.get("layout", "contiguous")
        _require(layout in LAYOUTS, f"{place}.layout", layout, f"one of {', '.join(sorted(LAYOUTS))}")
        if "bits" in value:
            _matches(_HEX, "hex digits")(value["bits"], f"{place}.bits")
            _require(bool(value["bits"]), f"{place}.bits", value["bits"], "at least one byte")
        for name in ("finite", "requires_grad", "parameter"):
            _require(type(value.get(name, False)) is bool, f"{place}.{name}", value.get(name), "true or false")
        total = 16
        for size in value["shape"]:
            total *= max(size, 1)
        _require(total <= 16 * MAX_BYTES, f"{place}.shape", value["shape"], f"a shape of at most {MAX_BYTES} elements")

    def _views(self, value: Any, place: str) -> None:
        _object(value, place, {"of", "dim", "sizes"}, {"of", "dim", "sizes"})
        _require(isinstance(value["of"], dict) and "tensor" in value["of"], f"{place}.of", value["of"], "a tensor")
        self.node(value["of"], f"{place}.of")
        shape, dim = value["of"]["tensor"]["shape"], value["dim"]
        _require(type(dim) is int and 0 <= dim < len(shape), f"{place}.dim", dim, f"0 to {len(shape) - 1}")
        self._sizes(value["sizes"], f"{place}.sizes")
        fits = sum(value["sizes"]) == shape[dim]
        _require(fits, f"{place}.sizes", value["sizes"], f"sizes that add up to {shape[dim]}")

    def _items(self, value: Any, place: str) -> None:
        _require(isinstance(value, list), place, value, "a list")
        for index, item in enumerate(value):
            self.node(item, f"{place}[{index}]")

    def _dict(self, value: Any, place: str) -> None:
        _require(isinstance(value, list), place, value, "a list of [key, value]")
        for index, item in enumerate(value):
            _require(isinstance(item, list) and len(item) == 2, f"{place}[{index}]", item, "[key, value]")
            self.node(item[0], f"{place}[{index}].key")
            self.node(item[1], f"{place}[{index}].value")

    def _repeat(self, value: Any, place: str) -> None:
        _object(value, place, {"count", "of"}, {"count", "of"})
        _natural(value["count"], f"{place}.count", 100_000)
        self.node(value["of"], f"{place}.of")

    def _nest(self, value: Any, place: str) -> None:
        _object(value, place, {"depth", "of"}, {"depth", "of"})
        _natural(value["depth"], f"{place}.depth", 150)
        self.node(value["of"], f"{place}.of")

    def _named(self, value: Any, place: str) -> None:
        _object(value, place, {"name", "of"}, {"name", "of"})
        self._word(value["name"], f"{place}.name")
        _require(value["name"] not in self._names, f"{place}.name", value["name"], "a new name")
        self.node(value["of"], f"{place}.of")
        self._names.add(value["name"])

    def _same(self, value: Any, place: str) -> None:
        _require(value in self._names, place, value, "a name that stands before it")

    def _blob(self, value: Any, place: str) -> None:
        _object(value, place, {"nbytes"}, {"nbytes", "seed"})
        _natural(value["nbytes"], f"{place}.nbytes", MAX_BYTES)
        _require(type(value.get("seed", 0)) is int, f"{place}.seed", value.get("seed"), "an int")

    def _text(self, value: Any, place: str) -> None:
        _object(value, place, {"count", "of"}, {"count", "of"})
        _natural(value["count"], f"{place}.count", MAX_BYTES)
        _require(type(value["of"]) is str, f"{place}.of", value["of"], "a str")

    def _codepoints(self, value: Any, place: str) -> None:
        _require(isinstance(value, list), place, value, "a list of numbers")
        for index, item in enumerate(value):
            _natural(item, f"{place}[{index}]", 0x10FFFF)

    def _int(self, value: Any, place: str) -> None:
        if isinstance(value, dict):
            _object(value, place, {"bits"}, {"bits"})
            _natural(value["bits"], f"{place}.bits", 1 << 24)
        else:
            _matches(_INT, "decimal digits")(value, place)

    def _complex(self, value: Any, place: str) -> None:
        _require(isinstance(value, list) and len(value) == 2, place, value, "[real, imaginary]")
        for index, item in enumerate(value):
            number = type(item) in (int, float) or (isinstance(item, dict) and "float" in item)
            _require(number, f"{place}[{index}]", item, "a number or a float node")
            self.node(item, f"{place}[{index}]")

    def _word(self, value: Any, place: str) -> None:
        _require(type(value) is str and value.isidentifier(), place, value, "a name")

    def _sizes(self, value: Any, place: str) -> None:
        _require(isinstance(value, list), place, value, "a list of sizes")
        for index, item in enumerate(value):
            _natural(item, f"{place}[{index}]", 1 << 40)

    def _foreign(self, value: Any, place: str) -> None:
        _require(value in FOREIGN, place, value, f"one of {', '.join(sorted(FOREIGN))}")


def _object(value: Any, place: str, required: set[str], allowed: frozenset[str] | set[str]) -> None:
    _require(isinstance(value, dict), place, value, "an object")
    missing = sorted(required - value.keys())
    _require(not missing, place, value, f"an object with {', '.join(missing)}")
    unknown = sorted(value.keys() - allowed)
    _require(not unknown, place, unknown, f"only {', '.join(sorted(allowed))}")


def _natural(value: Any, place: str, most: int) -> None:
    _require(type(value) is int and 0 <= value <= most, place, value, f"an int from 0 to {most}")


def _matches(pattern: re.Pattern[str], what: str) -> Callable[[Any, str], None]:
    def check_text(value: Any, place: str) -> None:
        _require(type(value) is str and pattern.fullmatch(value) is not None, place, value, what)

    return check_text


def _require(holds: bool, place: str, value: Any, wanted: str) -> None:
    if not holds:
        message = f"{place} is {value!r:.80}; give {wanted}"
        raise ConfigError(message, field=place)
