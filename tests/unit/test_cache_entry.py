"""Entries of caches: what is read is what was stored, bit for bit, or nothing."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import msgspec
import pytest
import torch

from moonrelay.cache import entry
from moonrelay.cache.entry import HEADER_BYTES, Packed, Unusable, pack, unpack
from moonrelay.errors import UnsupportedTensor
from support.trees import DTYPES, SHAPES, TREES, canon, tensor

KEY = "ab" * 32
OTHER = "cd" * 32


def stored(packed: Packed) -> bytearray:
    """Return the bytes as a relay reads them."""
    return bytearray(b"".join(ctypes.string_at(part.address, part.nbytes) for part in packed.parts))


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_bit_for_bit(name: str) -> None:
    packed = pack(KEY, TREES[name])
    raw = stored(packed)
    assert len(raw) == packed.nbytes
    assert canon(packed.tree()) == canon(TREES[name])
    for form in (raw, bytes(raw), memoryview(raw), memoryview(bytes(raw)), memoryview(raw)[:]):
        assert canon(unpack(form, KEY)) == canon(TREES[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_dtype_and_shape_alone(dtype: str, shape: tuple[int, ...]) -> None:
    sent = tensor(dtype, shape, seed=7)
    assert canon(pack(KEY, sent).tree()) == canon(sent)


def test_one_tensor_in_two_places_comes_back_as_one() -> None:
    shared = tensor("float32")
    got = pack(KEY, [shared, shared]).tree()
    assert isinstance(got, list)
    assert got[0] is got[1]


def test_an_entry_is_a_snapshot_and_its_trees_are_their_owners() -> None:
    sent = tensor("int32", (4, 5))
    before = canon(sent)
    packed = pack(KEY, {"a": sent, "b": None})
    sent.zero_()
    first, second = packed.tree(), packed.tree()
    assert isinstance(first, dict)
    assert canon(first["a"]) == before
    first["a"].zero_()
    first["a"].resize_(100)
    first["b"] = 1
    assert canon(second) == canon(packed.tree())
    assert canon(second) != canon(first)
    assert isinstance(second, dict)
    assert canon(second["a"]) == before


def test_a_hit_may_be_used_as_any_tensor() -> None:
    with torch.inference_mode():
        packed = pack(KEY, tensor("float32"))
        inside = packed.tree()
    assert isinstance(inside, torch.Tensor)
    outside = packed.tree()
    assert isinstance(outside, torch.Tensor)
    assert not outside.is_inference()
    assert outside.requires_grad_().sum().requires_grad
    assert torch.equal(inside.nan_to_num(), outside.detach().nan_to_num())


def test_a_parameter_comes_back_as_a_plain_tensor() -> None:
    got = pack(KEY, torch.nn.Parameter(torch.ones(2))).tree()
    assert type(got) is torch.Tensor
    assert not got.requires_grad


def test_a_device_that_is_not_here_gives_host_memory() -> None:
    packed = pack(KEY, tensor("float32"))
    raw = stored(packed)
    at = raw.rindex(b"\xa3cpu")
    raw[at : at + 4] = b"\xa3foo"
    raw[HEADER_BYTES - 16 : HEADER_BYTES] = entry._content_digest(raw)
    assert canon(unpack(raw, KEY)) == canon(packed.tree())


def test_a_device_that_is_asked_for_is_where_tensors_are() -> None:
    got = pack(KEY, {"a": tensor("float32"), "b": 1}).tree("meta")
    assert isinstance(got, dict)
    assert got["a"].device.type == "meta"
    assert got["b"] == 1


@pytest.mark.parametrize("name", ["nested", "empty", "None"])
def test_no_changed_byte_goes_unnoticed(name: str) -> None:
    raw = stored(pack(KEY, TREES[name]))
    for at in range(len(raw)):
        for flip in (0x01, 0x80):
            raw[at] ^= flip
            with pytest.raises(Unusable):
                unpack(raw, KEY)
            raw[at] ^= flip
    assert canon(unpack(raw, KEY)) == canon(TREES[name])


def test_no_half_entry_is_read() -> None:
    raw = stored(pack(KEY, TREES["nested"]))
    for end in (*range(0, len(raw), 7), len(raw) - 1):
        with pytest.raises(Unusable):
            unpack(raw[:end], KEY)
    with pytest.raises(Unusable, match="bytes, not"):
        unpack(raw + b"\x00", KEY)
    with pytest.raises(Unusable):
        unpack(bytearray(len(raw)), KEY)


def test_an_entry_of_another_key_is_none_of_this_one() -> None:
    with pytest.raises(Unusable, match="belongs to key abababab"):
        unpack(stored(pack(KEY, 1)), OTHER)


def resealed(change: Callable[[bytearray], None]) -> bytearray:
    """Return an entry that was changed by somebody who knows how it is sealed."""
    raw = stored(pack(KEY, tensor("float32", (4,))))
    change(raw)
    raw[HEADER_BYTES - 16 : HEADER_BYTES] = entry._content_digest(raw)
    return raw


def set_version(raw: bytearray) -> None:
    struct.pack_into("<I", raw, 8, entry.VERSION + 1)


def set_shape(raw: bytearray) -> None:
    at = raw.index(b"\xa5shape") + 6
    assert raw[at : at + 2] == b"\x91\x04"
    raw[at + 1] = 5


def set_negative(raw: bytearray) -> None:
    raw[raw.index(b"\xa5shape") + 7] = 0xFF


def set_dtype(raw: bytearray) -> None:
    at = raw.index(b"\xa7float32")
    raw[at : at + 8] = b"\xa7float99"


def set_unfit(raw: bytearray) -> None:
    at = raw.index(b"\xa7float32")
    raw[at : at + 8] = b"\xa7float64"


def set_tree(raw: bytearray) -> None:
    at = raw.index(b"\x92\xa1T\x00")
    raw[at + 2] = ord("X")


def set_garbage(raw: bytearray) -> None:
    raw[HEADER_BYTES] = 0xC1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (set_version, "version 2, this side reads version 1"),
        (set_shape, "not as long"),
        (set_negative, "malformed"),
        (set_dtype, "malformed"),
        (set_unfit, "not as long"),
        (set_tree, "not readable here"),
        (set_garbage, "malformed"),
    ],
)
def test_what_is_whole_but_foreign_is_unusable(change: Callable[[bytearray], None], why: str) -> None:
    with pytest.raises(Unusable, match=why):
        unpack(resealed(change), KEY)
    assert canon(unpack(resealed(lambda raw: None), KEY)) == canon(tensor("float32", (4,)))


@pytest.mark.parametrize("value", [object(), torch.eye(2).to_sparse(), torch.zeros(1, device="meta"), [lambda: 1]])
def test_what_cannot_be_carried_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedTensor):
        pack(KEY, value)


def test_a_description_is_bounded() -> None:
    raw = stored(pack(KEY, None))
    struct.pack_into("<I", raw, 12, 1 << 30)
    with pytest.raises(Unusable):
        unpack(raw, KEY)
    assert msgspec.msgpack.decode(stored(pack(KEY, None))[HEADER_BYTES:])[1] == []
