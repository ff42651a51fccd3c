"""Descriptions, the trees they stand for, and the canonical form that tells trees apart."""

from __future__ import annotations

import hashlib
import struct
import types
from typing import Any

import pytest
import torch

from moonrelay.errors import ConfigError
from moonrelay_conformance.corpus.description import FOREIGN, LAYOUTS, check
from moonrelay_conformance.corpus.trees import (
    build,
    chunk_digests,
    chunk_of,
    digest,
    missing_dtypes,
    outline,
    seeded,
)

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
]
#: Those whose logical values differ from the contiguous tensor's.
OTHER_VALUES = frozenset({"expanded", "overlapping", "conj", "neg"})
SHAPES = {
    "channels_last": [2, 3, 4, 5],
    "channels_last_3d": [2, 3, 2, 3, 4],
    "odd_stride": [3, 1, 4],
    "overlapping": [3, 4],
}


def tensor(shape: list[int], dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"tensor": {"shape": shape, "dtype": dtype, "seed": 1, **more}}


def flipped(value: torch.Tensor, byte: int) -> torch.Tensor:
    """Return a copy with one bit changed."""
    copy = value.clone()
    copy.view(-1).view(torch.uint8)[byte] ^= 1
    return copy


# The digest.


def test_the_digest_never_changes() -> None:
    tree = {"a": torch.arange(6, dtype=torch.int16).view(2, 3), "b": [1, 1.0, True, None, "x", b"y"]}
    raw = hashlib.blake2b(struct.pack("<6h", *range(6)), digest_size=16).hexdigest()
    canonical = (
        f'["dict",[["str","a"],["tensor",0,"int16",[2,3],"{raw}"]],[["str","b"],["list",["int","0x1"],'
        '["float","3ff0000000000000"],["bool",true],["none"],["str","x"],["bytes","79"]]]]'
    )
    assert digest(tree) == hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


ONE = torch.ones(3)
TWO = torch.ones(3)
DIFFERENT = {
    "tuple and list": ((1,), [1]),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "None and empty": (None, []),
    "text and bytes": ("a", b"a"),
    "bytes and bytearray": (b"a", bytearray(b"a")),
    "set and frozenset": ({1}, frozenset({1})),
    "Size and tuple": (torch.Size([1, 2]), (1, 2)),
    "dtype and its name": (torch.float16, "float16"),
    "device and its name": (torch.device("cpu"), "cpu"),
    "0.0 and -0.0": (0.0, -0.0),
    "two NaNs": (struct.unpack(">d", bytes.fromhex("7ff8000000000001"))[0], float("nan")),
    "complex -0.0": (complex(0.0, 0.0), complex(0.0, -0.0)),
    "order of a dict": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "int key and text key": ({1: 0}, {"1": 0}),
    "tensor and list of it": (ONE, [ONE]),
    "tensor and number": (torch.tensor(1), 1),
    "shape () and (1,)": (torch.ones(()), torch.ones(1)),
    "shapes of the same bytes": (torch.ones(2, 3), torch.ones(3, 2)),
    "empty shapes": (torch.ones(0, 3), torch.ones(0, 4)),
    "dtypes of the same bytes": (torch.zeros(4, dtype=torch.int16), torch.zeros(4, dtype=torch.bfloat16)),
    "dtypes without bytes": (torch.zeros(0, dtype=torch.int8), torch.zeros(0, dtype=torch.uint8)),
    "tensor 0.0 and -0.0": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "one object and two equal ones": ([ONE, ONE], [ONE, ONE.clone()]),
    "which of two is repeated": ([ONE, TWO, ONE], [ONE, TWO, TWO]),
    "requires grad": (ONE, ONE.clone().requires_grad_()),
    "parameter": (ONE, torch.nn.Parameter(ONE.clone(), requires_grad=False)),
    "nesting": ([[1], 2], [1, [2]]),
    "named tuple": ((1,), types.SimpleNamespace(a=1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_the_digest_tells_apart(what: str) -> None:
    left, right = DIFFERENT[what]
    assert digest(left) != digest(right)


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one != "bool"])  # a bool has no other bits
def test_the_digest_sees_every_byte_of_every_dtype(dtype: str) -> None:
    made = build(tensor([3], dtype))
    found = {digest(flipped(made, byte)) for byte in range(3 * made.element_size())}
    assert len(found | {digest(made)}) == 3 * made.element_size() + 1


def test_the_digest_does_not_see_strides_or_sharing() -> None:
    made = build(tensor([4, 6]))
    assert digest(made.t().contiguous().t()) == digest(made)
    whole = torch.arange(6)
    assert digest([whole[:3], whole[3:]]) == digest([whole[:3].clone(), whole[3:].clone()])


def test_the_order_of_a_set_is_of_no_account() -> None:
    assert digest({"set": {"a", "b", "c", 1, None}}) == digest({"set": {None, 1, "c", "b", "a"}})


@pytest.mark.parametrize("word", sorted(FOREIGN))
def test_a_foreign_object_has_a_digest_of_its_own(word: str) -> None:
    made = [build({"foreign": word}), build(tensor([2]))]
    assert digest(made) == digest(made)
    assert digest(made) != digest([build(tensor([2]))])


# Building.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", sorted(LAYOUTS - OTHER_VALUES))
def test_layouts_hold_the_same_logical_values(layout: str, dtype: str) -> None:
    shape = SHAPES.get(layout, [3, 4, 5])
    made, plain = build(tensor(shape, dtype, layout=layout)), build(tensor(shape, dtype))
    assert digest(made) == digest(plain)
    untouched = layout in ("contiguous", "offset")
    assert (made.stride() == plain.stride()) is untouched
    assert (made.storage_offset() == 0) is (layout not in ("offset", "cropped"))


def test_lazy_bits_are_set_and_resolved() -> None:
    conj = build(tensor([4], "complex64", layout="conj", finite=True))
    assert conj.is_conj()
    assert digest(conj) == digest(conj.resolve_conj())
    assert digest(conj) != digest(build(tensor([4], "complex64", finite=True)))
    neg = build(tensor([4], layout="neg", finite=True))
    assert neg.is_neg()
    assert digest(neg) == digest(-build(tensor([4], finite=True)))


def test_expanded_and_overlapping_memory_is_small() -> None:
    made = build(tensor([6, 4], layout="expanded"))
    assert made.stride() == (0, 1)
    assert made.untyped_storage().nbytes() == 16
    rows = build(tensor([5, 7], layout="overlapping"))
    assert rows.stride() == (1, 1)
    assert torch.equal(rows[1, :-1], rows[0, 1:])


def test_bytes_come_from_the_seed() -> None:
    made = build({"tensor": {"shape": [5], "dtype": "uint8", "seed": 7}})
    assert bytes(made.tolist()) == seeded(7, 5) == hashlib.shake_128(b"7").digest(5)
    assert build({"blob": {"nbytes": 5, "seed": 7}}) == seeded(7, 5)


def test_finite_leaves_no_nan_and_no_infinity() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64", "complex64"):
        assert torch.isfinite(build(tensor([4096], dtype, finite=True))).all()


def test_bits_fill_the_tensor() -> None:
    made = build({"tensor": {"shape": [3], "dtype": "float16", "bits": "017c0080"}})
    assert made.view(torch.int16).tolist() == [0x7C01, -0x8000, 0x7C01]


def test_repeated_tensors_differ() -> None:
    made = build({"repeat": {"count": 3, "of": tensor([4])}})
    assert len({digest(one) for one in made}) == 3
    assert digest(made[2]) == digest(build({"tensor": {"shape": [4], "dtype": "float32", "seed": 3}}))


def test_one_object_in_two_places_is_one() -> None:
    made = build({"list": [{"named": {"name": "a", "of": tensor([2])}}, {"same": "a"}]})
    assert made[0] is made[1]


def test_views_share_a_storage() -> None:
    made = build({"views": {"of": tensor([6, 2]), "dim": 0, "sizes": [2, 4]}})
    assert [tuple(one.shape) for one in made] == [(2, 2), (4, 2)]
    assert made[0].untyped_storage().data_ptr() == made[1].untyped_storage().data_ptr()


def test_what_is_received_is_detached() -> None:
    for more in ({"requires_grad": True}, {"parameter": True, "requires_grad": True}):
        sent, got = build(tensor([2], **more)), build(tensor([2], **more), received=True)
        assert sent.requires_grad
        assert type(got) is torch.Tensor
        assert not got.requires_grad
        assert digest(sent) != digest(got) == digest(build(tensor([2])))


@pytest.mark.parametrize(
    ("description", "value"),
    [
        ({"tuple": [1, {"list": []}]}, (1, [])),
        ({"dict": [[1, "a"], [{"tuple": [2]}, None]]}, {1: "a", (2,): None}),
        ({"set": [1, {"frozenset": [2]}]}, {1, frozenset({2})}),
        ({"nest": {"depth": 3, "of": 1}}, [[[1]]]),
        ({"bytes": "00ff"}, b"\x00\xff"),
        ({"bytearray": "00ff"}, bytearray(b"\x00\xff")),
        ({"text": {"count": 3, "of": "ab"}}, "ababab"),
        ({"codepoints": [0xD800, 0]}, "\ud800\x00"),
        ({"int": "-123456789012345678901234567890"}, -123456789012345678901234567890),
        ({"int": {"bits": 70}}, 2**70 - 1),
        ({"float": "-inf"}, float("-inf")),
        ({"float": "3ff8000000000000"}, 1.5),
        ({"complex": [1, {"float": "inf"}]}, complex(1, float("inf"))),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"device": "cuda:1"}, torch.device("cuda:1")),
        ({"size": [2, 3]}, torch.Size([2, 3])),
    ],
)
def test_plain_nodes(description: Any, value: Any) -> None:
    made = build(description)
    assert type(made) is type(value)
    assert made == value
    assert outline(made) == outline(value)


@pytest.mark.parametrize(
    ("description", "place"),
    [
        ([1], "tree"),
        ({"list": [], "tuple": []}, "tree"),
        ({"lst": []}, "tree"),
        ({"list": [1, {"tensor": {"dtype": "uint8"}}]}, "tree.list[1].tensor"),
        ({"tensor": {"shape": [1], "dtype": "uint8", "colour": 1}}, "tree.tensor"),
        ({"tensor": {"shape": [1], "dtype": "uint8", "layout": "wavy"}}, "tree.tensor.layout"),
        ({"tensor": {"shape": [1 << 40], "dtype": "uint8"}}, "tree.tensor.shape"),
        ({"tensor": {"shape": [1], "dtype": "uint8", "bits": "0"}}, "tree.tensor.bits"),
        ({"dict": [["a"]]}, "tree.dict[0]"),
        ({"dict": [["a", {"bytes": "xy"}]]}, "tree.dict[0].value.bytes"),
        ({"same": "a"}, "tree.same"),
        ({"foreign": "unicorn"}, "tree.foreign"),
        ({"float": "many"}, "tree.float"),
        ({"int": "1.5"}, "tree.int"),
        ({"nest": {"depth": 10_000, "of": 1}}, "tree.nest.depth"),
        ({"views": {"of": tensor([4]), "dim": 0, "sizes": [1, 1]}}, "tree.views.sizes"),
    ],
)
def test_a_wrong_description_is_refused_by_its_place(description: Any, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(description)
    assert caught.value.context["field"] == place
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("description", "says"),
    [
        (tensor([2], "float7"), "no dtype 'float7'"),
        (tensor([2], layout="conj"), "needs a complex dtype"),
        (tensor([2], layout="channels_last"), "needs 4 dimensions"),
        (tensor([2], "int64", layout="neg"), "needs one of"),
        (tensor([2], "int64", requires_grad=True), "require gradients"),
        ({"set": [{"list": []}]}, "hashable"),
        ({"dict": [[{"list": []}, 1]]}, "hashable"),
        ({"dict": [[1, 1], [1, 2]]}, "a key twice"),
        ({"set": [1, True]}, "an element twice"),
    ],
)
def test_what_cannot_be_built_is_refused(description: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(description)


def test_missing_dtypes_are_named() -> None:
    tree = {"list": [tensor([1], "float7"), tensor([1], "uint8"), {"dtype": "float9"}]}
    assert missing_dtypes(tree) == ("float7", "float9")


# Chunks.


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_chunks_are_the_reference_slices(dim: int, count: int) -> None:
    made = build(tensor([7, 5, 6]))
    wanted = torch.tensor_split(made, count, dim=dim)
    for index, one in enumerate(wanted):
        got = chunk_of(made, dim, count, index)
        assert torch.equal(got.view(torch.int32), one.view(torch.int32))
    assert chunk_digests(tensor([7, 5, 6]), dim, count) == tuple(map(digest, wanted))


def test_a_chunk_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunk 2 does not exist"):
        chunk_of(torch.ones(4), 0, 2, 2)
    with pytest.raises(ConfigError, match="only a tensor"):
        chunk_digests({"list": []}, 0, 1)
