"""Payloads: what is carried comes back bit for bit; what is not is refused by the name of its place."""

from __future__ import annotations

import collections
import enum
import itertools
import struct
import subprocess
import sys

import msgspec
import pytest
import torch

from moonrelay.errors import ConfigError, UnsupportedTensor, VersionError, WireError
from moonrelay.layout import ITEMSIZES, QUANTISED, WHOLE, check_spec
from moonrelay.payload import (
    ChunkPlan,
    Flattened,
    StagePayload,
    Strip,
    TensorSpec,
    bytes_of,
    chunk_nbytes,
    chunk_view,
    copy_bits,
    copy_leaf,
    flatten,
    host_extent,
    spec_tree,
    strips,
    tensor_from_buffer,
    unflatten,
)


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's row-major bytes, by means other than the code under test."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.element_size() == 1 or plain.dtype == torch.complex32:  # their copies warn, or are not implemented
        plain = plain.view(torch.uint8 if plain.element_size() == 1 else torch.int32)
    return plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def canon(value: object) -> object:
    """Return something that is equal for two values just when their types and bits are."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), bits(value))
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


def carry(flat: Flattened) -> list[torch.Tensor]:
    """Move the leaves as a connector does: their canonical bytes into fresh memory, and tensors made of it."""
    landed = []
    for leaf, spec, packed in zip(flat.leaves, flat.specs, flat.packed, strict=True):
        memory = torch.full((spec.nbytes,), 0xA5, dtype=torch.uint8)
        if packed:
            memory.copy_(bytes_of(leaf))
        else:
            copy_leaf(leaf, spec, memory)
        landed.append(tensor_from_buffer(memory, spec))
    return landed


def round_trip(data: object) -> object:
    flat = flatten(StagePayload("r", "feature", data=data))
    return unflatten(flat.tree, carry(flat))


def refused(data: object) -> UnsupportedTensor:
    with pytest.raises(UnsupportedTensor) as caught:
        flatten(StagePayload("r", "feature", data=data))
    return caught.value


def filled(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of random bytes, also where arithmetic on the dtype is not implemented."""
    spec = TensorSpec(shape=shape, dtype=str(dtype).removeprefix("torch."))
    memory = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8)
    return memory.view(dtype).as_strided(shape, spec.strides())


# Tensors.


def all_dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((dtype for dtype in found if str(dtype)[6:] not in QUANTISED), key=str)


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 5), (2, 0, 3), (1, 1)], ids=str)
def test_every_dtype_of_torch_is_carried(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    assert canon(round_trip(tensor)) == canon(tensor)


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype_is_carried_with_gaps(dtype: torch.dtype) -> None:
    tensor = filled((4, 6), dtype)[::2, 1:4]
    flat = flatten(StagePayload("r", "feature", tensor=tensor))
    assert flat.packed == (False,)
    assert canon(unflatten(flat.tree, carry(flat))) == canon(tensor)


def test_the_table_of_dtypes_agrees_with_torch() -> None:
    for dtype in all_dtypes():
        assert ITEMSIZES[str(dtype)[6:]] == dtype.itemsize


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(2, 0, 3, 1),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "sliced": lambda t: t[:, ::2, 1:],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "broadcast 0-d": lambda t: torch.tensor(3.5).expand(4, 2),
    "overlapping": lambda t: t.reshape(-1).as_strided((5, 4), (1, 2)),
    "offset": lambda t: t[1],
    "0-d view": lambda t: t[1, 2, 3, 1],
    "diagonal": lambda t: t[0, 0].diagonal(),
    "flipped": lambda t: t.flip(0),
    "unit dims": lambda t: t[:1].transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_carried(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(2, 3, 4, 5))
    before = bits(tensor)
    assert canon(round_trip([tensor])) == canon([tensor])
    assert bits(tensor) == before


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "permuted", "channels_last", "unit dims", "offset"])
def test_dense_memory_is_described_not_copied(layout: str) -> None:
    tensor = LAYOUTS[layout](torch.randn(2, 3, 4, 5))
    flat = flatten(StagePayload("r", "feature", tensor=tensor))
    assert flat.packed == (True,)
    assert flat.leaves[0].data_ptr() == tensor.data_ptr()
    assert host_extent(flat.leaves[0]).address == tensor.data_ptr()
    assert host_extent(flat.leaves[0]).nbytes == flat.specs[0].nbytes == tensor.numel() * 4
    assert bytes_of(flat.leaves[0]).data_ptr() == tensor.data_ptr()


def test_one_element_of_any_stride_has_its_bytes() -> None:
    tensor = torch.arange(4.0)[2:3].as_strided((1,), (9,), 2)
    assert bytes_of(tensor).view(torch.float32).tolist() == [2.0]
    assert bytes_of(torch.arange(4.0)[4::2]).numel() == 0


def test_channels_last_keeps_its_strides() -> None:
    tensor = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    back = round_trip(tensor)
    assert isinstance(back, torch.Tensor)
    assert back.stride() == tensor.stride()
    assert flatten(StagePayload("r", "f", tensor=tensor)).specs[0].order == (0, 2, 3, 1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazy_conjugate_and_negative_bits_are_resolved(dtype: torch.dtype) -> None:
    source = torch.randn(3, 4, dtype=dtype)
    for tensor in (source.conj(), source.conj().imag, source.conj().T, source.conj()[:, ::2]):
        assert tensor.is_conj() or tensor.is_neg()
        flat = flatten(StagePayload("r", "feature", tensor=tensor))
        assert flat.packed == (False,)
        with pytest.raises(UnsupportedTensor):
            host_extent(tensor)
        assert canon(unflatten(flat.tree, carry(flat))) == canon(tensor)


def test_nan_bits_and_signed_zeros_survive() -> None:
    patterns = torch.tensor([0x7F800001, 0x7FC12345, -1, -(1 << 31), 0x7F800000, 1], dtype=torch.int32)
    for tensor in (patterns.view(torch.float32), patterns.view(torch.float32)[::2], patterns.view(torch.bfloat16)):
        assert canon(round_trip(tensor)) == canon(tensor)


def test_parameters_come_back_plain_and_detached() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    grown = parameter * 2
    back = round_trip({"p": parameter, "g": grown})
    assert isinstance(back, dict)
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad
    assert not back["g"].requires_grad
    assert parameter.requires_grad
    assert bits(back["g"]) == bits(grown)


def test_one_tensor_in_two_places_is_sent_once() -> None:
    tensor, twin = torch.randn(4), torch.randn(4)
    flat = flatten(StagePayload("r", "f", data=[tensor, {"again": tensor}, twin]))
    assert len(flat.leaves) == 2
    back = unflatten(flat.tree, carry(flat))
    assert isinstance(back, list)
    assert back[0] is back[1]["again"]
    assert canon(back) == canon([tensor, {"again": tensor}, twin])


class Tagged(torch.Tensor):
    pass


def unsupported_tensors() -> dict[str, torch.Tensor]:
    dense = torch.eye(3)
    freed = torch.randn(8)
    freed.untyped_storage().resize_(0)
    return {
        "sparse": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "subclass": dense.as_subclass(Tagged),
        "uninitialised": torch.nn.UninitializedParameter(),
        "freed": freed,
        "zero": torch._efficientzerotensor((3,)),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["sparse", "csr", "meta", "nested", "subclass", "uninitialised", "freed", "zero"])
def test_tensors_without_plain_bytes_are_refused_by_place(name: str) -> None:
    error = refused({"good": torch.ones(2), "a": [1, unsupported_tensors()[name]]})
    assert error.context["field"] == "data['a'][1]"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantised_tensors_are_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedTensor, match="quantised") as caught:
        flatten(StagePayload("r", "latent", tensor=tensor))
    assert caught.value.context["field"] == "tensor"


def test_a_batched_tensor_is_refused() -> None:
    def inside(row: torch.Tensor) -> torch.Tensor:
        assert "data[0]" in str(refused([row]))
        return row

    torch.vmap(inside)(torch.ones(2, 2))


def test_a_dtype_newer_than_the_table_is_carried_by_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ITEMSIZES, "bfloat16")
    tensor = torch.randn(3, 4).bfloat16()
    flat = flatten(StagePayload("r", "latent", tensor=tensor))
    assert flat.specs[0].width == 2
    check_spec(flat.specs[0], "spec")
    assert canon(unflatten(flat.tree, carry(flat))) == canon(tensor)
    with pytest.raises(UnsupportedTensor, match="no dtype 'float99'"):
        tensor_from_buffer(torch.zeros(6, dtype=torch.uint8), TensorSpec(shape=(2,), dtype="float99", width=3))
    with pytest.raises(WireError, match="float99"):
        _ = TensorSpec(shape=(2,), dtype="float99").nbytes


# Plain values.

PLAIN = [
    None,
    True,
    False,
    0,
    1,
    -1,
    1 << 63,
    (1 << 64) - 1,
    1 << 64,
    -(1 << 63),
    -(1 << 63) - 1,
    10**400,
    -(10**400),
    1 << 20000,
    0.0,
    -0.0,
    float("inf"),
    float("-inf"),
    struct.unpack("<d", b"\x01\x00\x00\x00\x00\x00\xf0\x7f")[0],
    struct.unpack("<d", b"\xef\xbe\xad\xde\x00\x00\xf8\xff")[0],
    5e-324,
    complex(-0.0, float("nan")),
    "",
    "kind",
    "\N{SNOWMAN}" * 300,
    "\ud800 alone",
    "\x00\r\n",
    "x" * 5000,
    "\udcff" * 3000,
    b"",
    b"\x00\xff",
    bytes(range(256)) * 40,
    bytearray(b"abc"),
    bytearray(5000),
    [],
    (),
    {},
    set(),
    frozenset(),
    [[], ((),), {}],
    (1, [2, (3, [4])]),
    {"a": {1: {None: {True: {2.5: {("t", 1): "deep"}}}}}},
    {"z": 1, "a": 2, "m": 3},
    {float("nan"): 1, -0.0: 2, b"k": 3, 1j: 4, frozenset({1, ("x",)}): 5, 1 << 70: 6, "\udc00": 7},
    {1, "a", None, 2.5, (1, 2)},
    frozenset({b"x", frozenset({1})}),
    [True, 1, 1.0, "1"],
    torch.bfloat16,
    torch.qint8,
    torch.device("cpu"),
    torch.device("cuda:3"),
    torch.device("cuda"),
    torch.Size([2, 3]),
    torch.Size([]),
    {"size": torch.Size([1 << 40, -1]), torch.float16: 1},
]


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_back_equal_in_type_and_bits(value: object) -> None:
    assert canon(round_trip(value)) == canon(value)
    assert canon(round_trip({"v": [value, torch.ones(2)]})) == canon({"v": [value, torch.ones(2)]})


def test_long_bytes_never_stand_in_the_tree() -> None:
    value = {"b": b"q" * 100_000, "s": "q" * 100_000, "i": 1 << 100_000, "a": bytearray(b"q" * 100_000)}
    flat = flatten(StagePayload("r", "feature", data=value))
    assert len(flat.tree) < 200
    assert len(flat.leaves) == 4
    assert canon(unflatten(flat.tree, carry(flat))) == canon(value)


def test_the_order_of_a_dict_is_kept() -> None:
    names = [f"k{number}" for number in (5, 3, 9, 1)]
    back = round_trip(dict.fromkeys(names, 0))
    assert isinstance(back, dict)
    assert list(back) == names


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


Point = collections.namedtuple("Point", "x y")


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError

    def __hash__(self) -> int:
        return 7


def cyclic() -> list[object]:
    inner: list[object] = [1]
    inner.append((inner,))
    return inner


def deep(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, 2, 3, Colour.RED]}, "data['a'][3]"),
        ({"a": Level.LOW}, "data['a']"),
        ((Point(1, 2),), "data[0]"),
        (collections.OrderedDict(a=1), "data"),
        ({"a": collections.defaultdict(list)}, "data['a']"),
        ({"x": memoryview(b"abc")}, "data['x']"),
        ({"x": range(3)}, "data['x']"),
        ({1: {None: object()}}, "data[1][None]"),
        ({("a", 1): lambda: None}, "data[tuple]"),
        ({Hostile(): 1}, "data[Hostile]"),
        ({"t": {Colour.RED: 1}}, "data['t'][Colour]"),
        ({b"x" * 2000: 1}, "data[b'" + "x" * 40 + "']"),
        ({"s": {"x" * 2000}}, "data['s']{...}"),
        ({1 << 5000: object()}, "data[int]"),
        ({"\ud800": object()}, "data['\\ud800']"),
        ({"c": cyclic()}, "data['c'][1][0]"),
        ([torch.strided], "data[0]"),
        ([torch.Generator()], "data[0]"),
        ([type], "data[0]"),
        ([NotImplemented, ...], "data[0]"),
    ],
    ids=lambda value: ascii(value)[:30] if isinstance(value, str) else "",
)
def test_other_values_are_refused_by_place(value: object, place: str) -> None:
    assert refused(value).context["field"] == place


def test_numpy_is_refused_with_a_remedy() -> None:
    numpy = pytest.importorskip("numpy")
    for value in (numpy.zeros(3), numpy.float64(1.0), numpy.int64(1), numpy.bool_(True)):
        error = refused({"n": value})
        assert error.context["field"] == "data['n']"
        assert "from_numpy" in str(error)


def test_nesting_is_bounded_and_never_overflows_the_stack() -> None:
    assert canon(round_trip(deep(64))) == canon(deep(64))
    assert "nested deeper" in str(refused(deep(65)))
    assert "nested deeper" in str(refused(deep(100_000)))


def test_a_tree_of_too_many_values_is_refused() -> None:
    assert "plain values" in str(refused([0] * (1 << 21)))
    assert "plain values" in str(refused(["x" * 200] * 10_000))
    assert "plain values" in str(refused([torch.ones(1) for _ in range(8193)]))
    shared: list[object] = []
    for _ in range(60):
        shared = [shared, shared]
    assert "plain values" in str(refused(shared))


# Chunks.

SHAPES = [((1, 4, 7, 3, 5), 2, 3), ((8,), 0, 8), ((6, 5), 0, 4), ((6, 5), 1, 2), ((3, 4, 5), -1, 5), ((2, 3), 1, 1)]


@pytest.mark.parametrize(("shape", "dim", "count"), SHAPES)
@pytest.mark.parametrize("reverse", [False, True])
def test_strips_are_where_the_chunk_lies(shape: tuple[int, ...], dim: int, count: int, reverse: bool) -> None:
    tensor = filled(shape, torch.int16)
    if reverse:
        tensor = filled(shape[::-1], torch.int16).permute(*range(len(shape) - 1, -1, -1))
    flat = flatten(StagePayload("r", "latent", tensor=tensor, chunk_dim=dim, num_chunks=count))
    spec, plan = flat.specs[0], flat.chunks
    assert plan.sizes == tuple(part.shape[dim] for part in torch.tensor_split(tensor, count, dim))
    assert plan.count == count
    memory = bytes_of(tensor)
    where = torch.arange(spec.numel).as_strided(shape, spec.strides())
    seen = bytearray(spec.nbytes)
    for chunk in range(count):
        view = chunk_view(tensor, plan, chunk)
        assert torch.equal(view, torch.tensor_split(tensor, count, dim)[chunk])
        elements = chunk_view(where, plan, chunk).reshape(-1).sort().values
        expected = memory.view(torch.int16)[elements].view(torch.uint8)
        ranges = strips(spec, plan, chunk)
        assert torch.equal(torch.cat([memory[strip.offset :][: strip.nbytes] for strip in ranges]), expected)
        assert chunk_nbytes(flat.specs, plan, chunk) == sum(strip.nbytes for strip in ranges) == view.numel() * 2
        for before, after in itertools.pairwise(ranges):
            assert before.offset + before.nbytes < after.offset
        for strip in ranges:
            for byte in range(strip.offset, strip.offset + strip.nbytes):
                seen[byte] += 1
    assert seen == b"\x01" * spec.nbytes


def test_a_chunk_lands_by_its_strips_alone() -> None:
    tensor = torch.randn(3, 6, 4)
    flat = flatten(StagePayload("r", "latent", tensor=tensor, chunk_dim=1, num_chunks=4))
    source, landed = bytes_of(tensor), torch.zeros(tensor.numel() * 4, dtype=torch.uint8)
    target = tensor_from_buffer(landed, flat.specs[0])
    for offset, nbytes in strips(flat.specs[0], flat.chunks, 2):
        landed[offset : offset + nbytes] = source[offset : offset + nbytes]
    assert torch.equal(chunk_view(target, flat.chunks, 2), tensor[:, 4:5])
    assert target[:, :4].eq(0).all()


def test_one_strip_for_the_whole_and_none_for_nothing() -> None:
    spec = TensorSpec(shape=(2, 3, 4), dtype="float32")
    assert strips(spec, WHOLE, 0) == (Strip(0, 96),)
    assert strips(spec, ChunkPlan(dim=1, sizes=(3,)), 0) == (Strip(0, 96),)
    assert strips(TensorSpec(shape=(2, 0, 4), dtype="float32"), WHOLE, 0) == ()
    assert strips(TensorSpec(shape=(2, 0, 4), dtype="float32"), ChunkPlan(dim=0, sizes=(1, 1)), 1) == ()
    assert strips(TensorSpec(shape=(2, 0, 4), dtype="float32"), ChunkPlan(dim=1, sizes=(0,)), 0) == ()
    assert strips(TensorSpec(shape=(), dtype="float64"), WHOLE, 0) == (Strip(0, 8),)
    for chunk in (-1, 1):
        with pytest.raises(ConfigError, match=f"chunk {chunk} does not exist"):
            strips(spec, WHOLE, chunk)


def test_a_chunk_in_too_many_strips_travels_in_another_order() -> None:
    tensor = torch.randn(20, 300, 8)
    flat = flatten(StagePayload("r", "frames", tensor=tensor, chunk_dim=2, num_chunks=4))
    assert flat.packed == (False,)
    assert all(len(strips(flat.specs[0], flat.chunks, chunk)) == 1 for chunk in range(4))
    landed = tensor_from_buffer(torch.zeros(tensor.numel() * 4, dtype=torch.uint8), flat.specs[0])
    for chunk in range(4):
        copy_bits(chunk_view(flat.leaves[0], flat.chunks, chunk), chunk_view(landed, flat.chunks, chunk))
    assert canon(unflatten(flat.tree, [landed])) == canon(tensor)


# Specs and buffers.


def test_specs_reckon_without_torch() -> None:
    code = (
        "import sys, moonrelay.payload as p, moonrelay.handle, moonrelay.integrity\n"
        "s = p.TensorSpec(shape=(2, 3, 4), dtype='bfloat16', order=(0, 2, 1))\n"
        "assert (s.numel, s.itemsize, s.nbytes, s.strides()) == (24, 2, 48, (12, 1, 3))\n"
        "f = p.flatten(p.StagePayload('r', 'feature', data={'a': [1, (2.5, None)]}))\n"
        "assert p.unflatten(f.tree, ()) == {'a': [1, (2.5, None)]}\n"
        "assert not {'torch', 'mooncake', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_buffer_becomes_a_tensor_without_a_copy() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    tensor = tensor_from_buffer(memory[16:40], TensorSpec(shape=(2, 3), dtype="float32", order=(1, 0)))
    assert tensor.data_ptr() == memory.data_ptr() + 16
    assert tensor.stride() == (1, 2)
    tensor.fill_(1.0)
    assert memory[:16].eq(0).all()
    assert memory[40:].eq(0).all()
    assert memory[16:40].view(torch.float32).eq(1).all()


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(23, dtype=torch.uint8),
        torch.zeros(25, dtype=torch.uint8),
        torch.zeros(24, dtype=torch.int8),
        torch.zeros(48, dtype=torch.uint8)[::2],
        torch.zeros(4, 6, dtype=torch.uint8),
        torch.zeros(30, dtype=torch.uint8)[3:27],
    ],
    ids=["short", "long", "int8", "strided", "2-d", "misaligned"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(ConfigError):
        tensor_from_buffer(buffer, TensorSpec(shape=(2, 3), dtype="float32"))


def test_copies_between_unlike_tensors_are_refused() -> None:
    with pytest.raises(ConfigError, match="shape and dtype"):
        copy_bits(torch.ones(3), torch.ones(3, dtype=torch.float64))
    with pytest.raises(ConfigError, match="shape and dtype"):
        copy_bits(torch.ones(1), torch.ones(3))


@pytest.mark.parametrize("threads", [1, 16])
@pytest.mark.parametrize("nbytes", [0, 1 << 12, 5 << 20])
@pytest.mark.parametrize("layout", ["packed", "transposed", "unlike", "gaps", "expanded", "negative"])
def test_a_copy_has_the_same_bits_however_both_lie(
    monkeypatch: pytest.MonkeyPatch, threads: int, nbytes: int, layout: str
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    raw = torch.arange(2 * nbytes, dtype=torch.int64).to(torch.uint8)
    whole = raw.view(torch.int32).view(-1, 4).view(torch.int16)
    source, destination = {
        "packed": lambda: (whole, torch.zeros_like(whole)),
        "transposed": lambda: (whole.t(), torch.zeros_like(whole).t()),
        "unlike": lambda: (whole.t(), torch.zeros(whole.t().shape, dtype=whole.dtype)),
        "gaps": lambda: (whole[:, ::2], torch.zeros_like(whole)[:, ::2]),
        "expanded": lambda: (
            torch.arange(8, dtype=torch.int16).expand(nbytes // 16, 8),
            torch.zeros(nbytes // 16, 8, dtype=torch.int16),
        ),
        "negative": lambda: (
            torch.view_as_complex(whole.float().view(-1, 2)).conj().imag,
            torch.zeros(whole.numel() // 2),
        ),
    }[layout]()
    copy_bits(source, destination)
    assert torch.equal(destination, source)


def test_a_copy_touches_nothing_beside_it() -> None:
    around = torch.zeros(3, 1 << 12, dtype=torch.int16)
    copy_bits(torch.ones(1 << 12, dtype=torch.int16), around[1])
    assert around.sum(1).tolist() == [0, 1 << 12, 0]


# The description.


def test_the_tree_of_specs_has_the_payloads_form() -> None:
    data = {"a": [torch.ones(2, 3).bfloat16(), None], "b": (b"x" * 2000, 7), "t": torch.float16}
    flat = flatten(StagePayload("r", "feature", data=data))
    assert spec_tree(flat.tree, flat.specs) == {
        "a": [TensorSpec(shape=(2, 3), dtype="bfloat16"), None],
        "b": (TensorSpec(shape=(2000,), dtype="uint8"), 7),
        "t": torch.float16,
    }


def test_a_tensor_alone_is_its_own_tree() -> None:
    flat = flatten(StagePayload("r", "latent", tensor=torch.ones(2)))
    assert spec_tree(flat.tree, flat.specs) == flat.specs[0]
    assert unflatten(flat.tree, flat.leaves) is flat.leaves[0]


def nested(node: object, levels: int) -> object:
    for _ in range(levels):
        node = ["l", node]
    return node


@pytest.mark.parametrize(
    "tree",
    [
        b"",
        b"\xc1",
        b"\x91" * 200_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x00" * ((1 << 20) + 1),
        *(
            msgspec.msgpack.encode(value)
            for value in (
                None,
                [],
                [1, 1],
                [1, 1, ["T", 0], 0],
                [True, 1, ["T", 0]],
                [1, 2, ["T", 0]],
                [1, True, ["T", 0]],
                [1, 1, None],
                [1, 1, ["T", 1]],
                [1, 1, ["T", -1]],
                [1, 1, ["T", True]],
                [1, 1, ["T"]],
                [1, 1, ["T", 0, 0]],
                [1, 1, ["?", 0]],
                [1, 1, [[], 0]],
                [1, 1, {"T": 0}],
                [1, 1, ["l", ["T", 0], b"raw"]],
                [1, 1, ["l", ["T", 0], []]],
                [1, 1, ["d", "k"]],
                [1, 1, ["d", "k", ["T", 0], "k", 1]],
                [1, 1, ["d", 1, ["T", 0], True, 1]],
                [1, 1, ["d", ["T", 0], 1]],
                [1, 1, ["d", ["l"], ["T", 0]]],
                [1, 1, ["d", ["t", ["d"]], ["T", 0]]],
                [1, 1, ["d", ["b", 0], 1]],
                [1, 1, ["d", ["a", b"x"], ["T", 0]]],
                [1, 1, ["l", ["T", 0], ["s", 1, 1]]],
                [1, 1, ["l", ["T", 0], ["f", ["l"]]]],
                [1, 1, ["l", ["T", 0], ["c", 1, 2.0]]],
                [1, 1, ["l", ["T", 0], ["u", b"\xff\xff"]]],
                [1, 1, ["l", ["T", 0], ["b", "str"]]],
                [1, 1, ["l", ["T", 0], ["Z", "x"]]],
                [1, 1, ["l", ["T", 0], ["Z", 1 << 63]]],
                [1, 1, ["l", ["T", 0], ["D", "os.path"]]],
                [1, 1, ["l", ["T", 0], ["D", 3]]],
                [1, 1, ["l", ["T", 0], ["V", "cu:da", 0]]],
                [1, 1, ["l", ["T", 0], ["V", "nosuchdevice", 0]]],
                [1, 1, ["l", ["T", 0], ["V", "cuda", -1]]],
                [1, 1, ["b", 0]],
                [1, 1, nested(["T", 0], 65)],
            )
        ),
    ],
    ids=lambda tree: str(tree[:24]),
)
def test_malformed_trees_are_wire_errors(tree: bytes) -> None:
    with pytest.raises(WireError):
        unflatten(tree, [torch.ones(2)])
    with pytest.raises(WireError):
        spec_tree(tree, [TensorSpec(shape=(2,), dtype="float32")])


def test_a_tree_of_another_version_names_both() -> None:
    with pytest.raises(VersionError, match=r"version 2, this side reads version 1"):
        unflatten(msgspec.msgpack.encode([2, 0, None]), [])


def test_a_dtype_that_this_torch_lacks_is_unsupported() -> None:
    with pytest.raises(UnsupportedTensor, match="float99"):
        unflatten(msgspec.msgpack.encode([1, 0, ["D", "float99"]]), [])
    with pytest.raises(UnsupportedTensor, match="nn"):
        unflatten(msgspec.msgpack.encode([1, 0, ["D", "nn"]]), [])


# StagePayload.


def test_a_payload_keeps_what_it_was_given() -> None:
    tensor = torch.ones(2, 6)
    payload = StagePayload("r1", "latent", tensor=tensor, chunk_dim=-1, num_chunks=3, schema="wan.latents/1", attempt=2)
    assert (payload.request_id, payload.kind, payload.chunk_dim, payload.num_chunks) == ("r1", "latent", 1, 3)
    assert payload.tensor is tensor
    assert payload.lease == "delete_on_consume"
    assert StagePayload(request_id="r", kind="k", data=None).data is None
    assert round_trip(None) is None


def test_metadata_is_a_private_copy() -> None:
    metadata = {"steps": [1, 2], "nested": {"x": None, "f": 0.5, "b": True}}
    payload = StagePayload("r", "k", data=1, metadata=metadata)
    metadata["steps"].append(3)  # type: ignore[attr-defined]
    assert payload.metadata == {"steps": [1, 2], "nested": {"x": None, "f": 0.5, "b": True}}


T = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({}, "tensor", "exactly one"),
        ({"tensor": T, "data": 1}, "data", "exactly one"),
        ({"tensor": [1]}, "tensor", "not a torch.Tensor"),
        ({"request_id": ""}, "request_id", "non-empty"),
        ({"request_id": "a\nb"}, "request_id", "printable"),
        ({"request_id": "x" * 600}, "request_id", "at most 512"),
        ({"request_id": 7}, "request_id", "=int"),
        ({"kind": None}, "kind", "=NoneType"),
        ({"data": 1, "schema": ""}, "schema", "non-empty"),
        ({"data": 1, "attempt": -1}, "attempt", "=-1"),
        ({"data": 1, "attempt": True}, "attempt", "=bool"),
        ({"data": 1, "attempt": 10**5000}, "attempt", "give an int"),
        ({"data": 1, "lease": None}, "lease", "delete_on_consume"),
        ({"data": 1, "chunk_dim": 0}, "chunk_dim", "give it as tensor"),
        ({"data": T, "num_chunks": 2}, "num_chunks", "give it as tensor"),
        ({"tensor": T, "num_chunks": 2}, "num_chunks", "along which dimension"),
        ({"tensor": T, "chunk_dim": 2}, "chunk_dim", "-2 to 1"),
        ({"tensor": T, "chunk_dim": -3}, "chunk_dim", "-2 to 1"),
        ({"tensor": T, "chunk_dim": 1.0}, "chunk_dim", "give an int"),
        ({"data": 1, "chunk_dim": 10**5000}, "chunk_dim", "give an int"),
        ({"tensor": T, "chunk_dim": True}, "chunk_dim", "give an int"),
        ({"tensor": T, "chunk_dim": 0, "num_chunks": 5}, "num_chunks", "more than the 4"),
        ({"tensor": T, "chunk_dim": 0, "num_chunks": 0}, "num_chunks", "=0"),
        ({"tensor": torch.ones(()), "chunk_dim": 0}, "chunk_dim", "0-d"),
        ({"data": 1, "metadata": [1]}, "metadata", "give a dict"),
        ({"data": 1, "metadata": {1: 2}}, "metadata", "other keys than str"),
        ({"data": 1, "metadata": {"a": (1,)}}, "metadata['a']", "is a tuple"),
        ({"data": 1, "metadata": {"a": T}}, "metadata['a']", "is a Tensor"),
        ({"data": 1, "metadata": {"a": 1 << 63}}, "metadata['a']", "64 bits"),
        ({"data": 1, "metadata": {"a": ["\ud800"]}}, "metadata['a'][0]", "surrogate"),
        ({"data": 1, "metadata": {"a": "x" * 20_000}}, "metadata", "at most 16384"),
        ({"data": 1, "metadata": {"a": [0] * 100_000}}, "metadata", "send it as data"),
        ({"data": 1, "metadata": {"a": cyclic()}}, "metadata['a'][1]", "is a tuple"),
        ({"data": 1, "metadata": {"a": deep(17)}}, "metadata['a']" + "[0]" * 15, "nested deeper"),
    ],
)
def test_wrong_fields_are_named_with_value_and_remedy(fields: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StagePayload(**{"request_id": "r", "kind": "k", **fields})  # type: ignore[arg-type]
    assert caught.value.context["field"] == field
    assert words in str(caught.value)


def test_wide_cycles_in_metadata_end_soon() -> None:
    wide: list[object] = []
    wide.extend([wide] * 10)
    with pytest.raises(ConfigError):
        StagePayload("r", "k", data=1, metadata={"a": wide})
