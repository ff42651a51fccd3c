"""Whatever bytes arrive as a handle: a valid handle or a `WireError`, and memory in proportion to the bytes."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonrelay.errors import UnsupportedTensor, WireError
from moonrelay.handle import ControlAddress, DirectAddress, LeaseTerms, RelayAddress, StageHandle
from moonrelay.payload import StagePayload, flatten, unflatten

THOROUGH = settings(max_examples=400, deadline=None)


def handle_of(payload: StagePayload) -> StageHandle:
    flat = flatten(payload)
    return StageHandle(
        id="0123456789abcdef" * 2,
        request_id=payload.request_id,
        kind=payload.kind,
        attempt=1,
        tree=flat.tree,
        tensors=flat.specs,
        chunks=flat.chunks,
        digest="xxh3_128",
        lease=LeaseTerms(policy="ttl", readers=0, ttl_s=600.0),
        direct=DirectAddress(control=ControlAddress(address="tcp://127.0.0.1:7001", nonce="c1")),
        relay=RelayAddress(url="local:///run/x", prefix="moonrelay/r1/0"),
        metadata={"fps": 16.0, "tags": ["a", None]},
    )


DATA = {"a": [torch.zeros(2, 3), (torch.zeros(4).bool(), None)], 3: {"b": 2.5, "s": {1, "x"}}, "d": torch.float16}
VALID = [
    handle_of(StagePayload("r1", "feature", data=DATA)).to_bytes(),
    handle_of(StagePayload("r1", "latent", tensor=torch.zeros(2, 7, 3), chunk_dim=1, num_chunks=3)).to_bytes(),
]

anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.sampled_from(["T", "l", "d", "t", "b", "u", "float32", "qint8", b"\x93\x01\x00\xc0", [["T", 0]], 1 << 62]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)


@contextlib.contextmanager
def frugal(nbytes: int) -> Iterator[None]:
    """Fail when more memory was taken than input of this size can need."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1 << 20) + 200 * nbytes


def accept_or_refuse(raw: bytes) -> None:
    with frugal(len(raw)):
        try:
            handle = StageHandle.from_bytes(raw)
        except WireError:
            return
        assert handle.nbytes == sum(handle.chunk_nbytes(chunk) for chunk in range(handle.num_chunks)) >= 0
    again = handle.to_bytes()
    assert StageHandle.from_bytes(again).to_bytes() == again
    with contextlib.suppress(UnsupportedTensor, WireError):
        _ = handle.spec


@THOROUGH
@given(st.binary(max_size=300))
@example(b"\xdd\xff\xff\xff\xff")
def test_any_bytes(body: bytes) -> None:
    accept_or_refuse(body)
    accept_or_refuse(b"MRH\x01\x00" + body)


@THOROUGH
@given(st.sampled_from(VALID), st.randoms(use_true_random=False), st.integers(1, 6))
def test_a_damaged_handle(raw: bytes, chance: random.Random, changes: int) -> None:
    damaged = bytearray(raw)
    for _ in range(changes):
        place = chance.randrange(len(damaged))
        kind = chance.randrange(5)
        if kind == 0:
            damaged[place] = chance.randrange(256)
        elif kind == 1:
            damaged[place] ^= 1 << chance.randrange(8)
        elif kind == 2:
            del damaged[place : place + chance.randrange(1, 9)]
        elif kind == 3:
            damaged[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
        else:
            damaged[place : place + 5] = bytes([chance.choice([0xDD, 0xDF, 0xC6, 0xDB, 0xC9])]) + b"\xff" * 4
        if not damaged:
            break
    accept_or_refuse(bytes(damaged))


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for name, item in value.items():
            found += places(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


@THOROUGH
@given(st.sampled_from(VALID), st.data())
def test_any_value_in_any_field(raw: bytes, data: st.DataObject) -> None:
    body = msgspec.msgpack.decode(raw[5:])
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(places(body)))
        holder = body
        for step in path:
            holder = holder[step]
        if data.draw(st.booleans()):
            holder[last] = data.draw(anything)
        elif isinstance(holder, dict) and data.draw(st.booleans()):
            del holder[last]
        elif isinstance(holder, dict):
            holder[data.draw(st.text(max_size=8))] = data.draw(anything)
    accept_or_refuse(raw[:5] + msgspec.msgpack.encode(body))


@THOROUGH
@given(anything)
def test_any_tree(node: object) -> None:
    leaves = [torch.zeros(2), torch.zeros(3, dtype=torch.uint8)]
    for count in (0, 2):
        tree = msgspec.msgpack.encode([1, count, node])
        with contextlib.suppress(WireError, UnsupportedTensor):
            unflatten(tree, leaves[:count])
