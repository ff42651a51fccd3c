"""Things that no payload can carry bit for bit, to see that they are refused and not dropped.

Owns how each is made. None of them is ever compared; a target that delivers one has already failed.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from moonrelay.errors import ConfigError


class Mode(enum.Enum):
    FAST = "fast"


class Number(enum.IntEnum):
    ONE = 1


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass
class Request:
    steps: int = 4


class Renamed(dict[str, int]):
    pass


class Stack(list[int]):
    pass


class Name(str):
    __slots__ = ()


class Count(int):
    pass


def make_foreign(word: str, place: str) -> Any:
    """Make the foreign thing that ``word`` names.

    Raises:
        ConfigError: This process cannot make it (no numpy); names the place.
    """
    if word in _PLAIN:
        return _PLAIN[word]()
    try:
        return _TORCH[word]()
    except ImportError as exc:
        message = f"{place}: {word} needs {exc.name}; install it beside torch"
        raise ConfigError(message, field=place) from exc


def _cycle() -> list[Any]:
    made: list[Any] = [1]
    made.append(made)
    return made


def _module() -> Any:
    import torch

    return torch.nn.Identity()


def _torch_generator() -> Any:
    import torch

    return torch.Generator()


def _ndarray() -> Any:
    import numpy as np

    return np.arange(6, dtype=np.float32)


def _numpy_scalar() -> Any:
    import numpy as np

    return np.float32(1.5)


def _sparse() -> Any:
    import torch

    return torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)


def _sparse_csr() -> Any:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the layout is in beta
        return torch.sparse_csr_tensor(
            torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.tensor([1.0, 2.0]), check_invariants=True
        )


def _nested_tensor() -> Any:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def _quantized() -> Any:
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the quantised dtypes will go
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def _meta() -> Any:
    import torch

    return torch.empty(2, 3, device="meta")


def _tensor_subclass() -> Any:
    import torch

    class Latents(torch.Tensor):
        pass

    return torch.ones(4).as_subclass(Latents)


def _freed() -> Any:
    import torch

    made = torch.ones(16)
    made.untyped_storage().resize_(0)
    return made


def _tensor_key() -> Any:
    import torch

    return {torch.ones(2): 1}


_PLAIN: Final[Mapping[str, Callable[[], Any]]] = {
    "object": object,
    "generator": lambda: (number for number in range(3)),
    "function": lambda: lambda value: value,
    "enum": lambda: Mode.FAST,
    "int_enum": lambda: Number.ONE,
    "dataclass": Request,
    "named_tuple": lambda: Pair(1, 2),
    "ordered_dict": lambda: collections.OrderedDict(a=1),
    "defaultdict": lambda: collections.defaultdict(int, a=1),
    "dict_subclass": lambda: Renamed(a=1),
    "list_subclass": lambda: Stack([1]),
    "str_subclass": lambda: Name("a"),
    "int_subclass": lambda: Count(3),
    "range": lambda: range(3),
    "memoryview": lambda: memoryview(b"abc"),
    "decimal": lambda: decimal.Decimal("1.5"),
    "datetime": lambda: datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC),
    "path": lambda: pathlib.PurePosixPath("weights"),
    "cycle": _cycle,
    "ellipsis": lambda: ...,
}

_TORCH: Final[Mapping[str, Callable[[], Any]]] = {
    "torch_generator": _torch_generator,
    "ndarray": _ndarray,
    "numpy_scalar": _numpy_scalar,
    "module": _module,
    "sparse": _sparse,
    "sparse_csr": _sparse_csr,
    "nested_tensor": _nested_tensor,
    "quantized": _quantized,
    "meta": _meta,
    "tensor_subclass": _tensor_subclass,
    "freed": _freed,
    "tensor_key": _tensor_key,
}
