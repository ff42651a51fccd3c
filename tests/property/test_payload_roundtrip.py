"""Any tree of tensors and plain values comes back equal in type and bits, by the bytes of its chunks alone."""

from __future__ import annotations

import struct
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonrelay.integrity import Coverage, digester
from moonrelay.layout import ITEMSIZES
from moonrelay.payload import (
    Extent,
    Flattened,
    StagePayload,
    TensorSpec,
    bytes_of,
    chunk_nbytes,
    chunk_view,
    copy_bits,
    flatten,
    host_extent,
    spec_tree,
    strips,
    tensor_from_buffer,
    unflatten,
)

QUICK = settings(max_examples=120, deadline=None)

#: complex32 is left to the unit tests: torch warns at most operations on it.
DTYPES = sorted(name for name in ITEMSIZES if hasattr(torch, name) and name != "complex32")


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 1:
        plain = plain.view(torch.uint8)
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def canon(value: object) -> object:
    """Return something that is equal for two values just when their types and bits are."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), bits(value))
    if isinstance(value, TensorSpec):
        return ("spec", value.dtype, value.shape)
    if type(value) is float:
        return ("float", struct.pack("<d", value))
    if type(value) is complex:
        return ("complex", struct.pack("<dd", value.real, value.imag))
    if type(value) in (list, tuple, torch.Size):
        return (type(value).__name__, *(canon(item) for item in value))
    if type(value) in (set, frozenset):
        return (type(value).__name__, frozenset(canon(item) for item in value))
    if type(value) is dict:
        return ("dict", *((canon(name), canon(item)) for name, item in value.items()))
    if type(value) is bytearray:
        return ("bytearray", bytes(value))
    return (type(value).__name__, value)


@st.composite
def tensors(draw: Any, min_dims: int = 0) -> torch.Tensor:
    """Tensors of any dtype on memory of any bytes: permuted, sliced, expanded, conjugated, empty."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=min_dims, max_size=4)))
    spec = TensorSpec(shape=shape, dtype=dtype)
    seed = draw(st.integers(0, 1 << 16))
    memory = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor = tensor_from_buffer(memory, spec)
    if shape and draw(st.booleans()):
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for dim in range(len(shape)):
        change = draw(st.sampled_from(["keep", "keep", "keep", "step", "cut", "expand"]))
        if change == "step":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
        elif change == "cut" and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 1, tensor.shape[dim] - 1)
        elif change == "expand" and tensor.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1).expand(*(3 if d == dim else size for d, size in enumerate(tensor.shape)))
    if tensor.is_complex() and draw(st.booleans()):
        tensor = tensor.conj().imag if draw(st.booleans()) else tensor.conj()
    return tensor


plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 200), max_value=1 << 200),
    st.floats(),
    st.integers(0, (1 << 64) - 1).map(lambda pattern: struct.unpack("<d", struct.pack("<Q", pattern))[0]),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.integers(1020, 3000).map(bytes),
    st.integers(200, 3000).map(lambda size: "\ud9ff" * size),
    st.binary().map(bytearray),
    st.sampled_from([torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 0])]),
)
names = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=50)),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
trees = st.recursive(
    st.one_of(plain, tensors()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(names, inner, max_size=4),
        st.sets(names, max_size=4),
        st.frozensets(names, max_size=4),
    ),
    max_leaves=12,
)


def serve(flat: Flattened) -> list[torch.Tensor]:
    """Return tensors whose memory is the canonical bytes, as a producer serves them: its own, or a staged copy."""
    served = []
    for leaf, spec, packed in zip(flat.leaves, flat.specs, flat.packed, strict=True):
        if packed:
            served.append(leaf)
            continue
        staged = tensor_from_buffer(torch.full((spec.nbytes,), 0x5A, dtype=torch.uint8), spec)
        for chunk in range(flat.chunks.count):
            copy_bits(chunk_view(leaf, flat.chunks, chunk), chunk_view(staged, flat.chunks, chunk))
        served.append(staged)
    return served


def deliver(flat: Flattened, order: list[int]) -> list[torch.Tensor]:
    """Move every chunk by its byte ranges, in the given order, with coverage and digests."""
    sources = serve(flat)
    memory = [torch.full((spec.nbytes,), 0xA5, dtype=torch.uint8) for spec in flat.specs]
    landed = [tensor_from_buffer(part, spec) for part, spec in zip(memory, flat.specs, strict=True)]
    covered = [Coverage(spec.nbytes) for spec in flat.specs]
    for chunk in order:
        made, seen, total = digester("xxh3_128"), digester("lanes128"), 0
        again, alike = digester("xxh3_128"), digester("lanes128")
        for source, spec, target, coverage in zip(sources, flat.specs, memory, covered, strict=True):
            ranges = strips(spec, flat.chunks, chunk)
            for offset, nbytes in ranges:
                extent = Extent(host_extent(source).address + offset, nbytes)
                made.update(extent)
                seen.update(extent)
                target[offset : offset + nbytes] = bytes_of(source)[offset : offset + nbytes]
                coverage.add(offset, nbytes)
                again.update(target[offset : offset + nbytes])
                alike.update(target[offset : offset + nbytes])
                total += nbytes
        assert total == chunk_nbytes(flat.specs, flat.chunks, chunk)
        assert made.digest() == again.digest()
        assert seen.digest() == alike.digest()
    for coverage in covered:
        coverage.require_complete()
    return landed


@QUICK
@given(trees)
def test_any_tree_comes_back(data: object) -> None:
    before = canon(data)
    flat = flatten(StagePayload("r", "feature", data=data))
    assert canon(unflatten(flat.tree, deliver(flat, [0]))) == before
    assert canon(data) == before


@QUICK
@given(st.data())
def test_any_tensor_comes_back_in_chunks_of_any_order(data: st.DataObject) -> None:
    tensor = data.draw(tensors(min_dims=1))
    dim = data.draw(st.integers(-tensor.dim(), tensor.dim() - 1))
    count = data.draw(st.integers(1, max(tensor.shape[dim], 1)))
    flat = flatten(StagePayload("r", "latent", tensor=tensor, chunk_dim=dim, num_chunks=count))
    order = data.draw(st.permutations(range(count)))
    assert canon(unflatten(flat.tree, deliver(flat, order))) == canon(tensor)


@QUICK
@given(st.lists(tensors(), max_size=4))
def test_specs_stand_where_the_tensors_stood(data: list[torch.Tensor]) -> None:
    flat = flatten(StagePayload("r", "feature", data={"t": data}))
    specs = spec_tree(flat.tree, flat.specs)
    assert isinstance(specs, dict)
    assert [(spec.dtype, spec.shape) for spec in specs["t"]] == [(str(t.dtype)[6:], tuple(t.shape)) for t in data]
    assert sum(spec.nbytes for spec in flat.specs) == sum(t.numel() * t.element_size() for t in data)
