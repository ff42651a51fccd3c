"""Digests see every change and do not depend on how bytes are cut; coverage proves each byte once."""

from __future__ import annotations

import itertools
import random
import tracemalloc

import pytest
import torch
import xxhash

from moonrelay.errors import ConfigError, IntegrityError
from moonrelay.integrity import _ROW, _ROW_BYTES, ALGORITHMS, Coverage, Digest, LanesDigest, _mix, choose, digester
from moonrelay.layout import Extent

MASK = (1 << 64) - 1
SIZES = [0, 1, 7, 8, 9, 63, 4096, _ROW_BYTES - 1, _ROW_BYTES, _ROW_BYTES + 5, 3 * _ROW_BYTES + 17]


class DeviceLanes(LanesDigest):
    """``lanes128`` by the operations that a device is given, on the CPU."""

    _host_types = frozenset()


def made(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def digest_of(data: torch.Tensor | Extent, name: str = "lanes128") -> bytes:
    digest = digester(name)
    digest.update(data)
    return digest.digest()


def lanes_by_hand(raw: bytes) -> bytes:
    """``lanes128`` as its docstring defines it, in plain integers."""
    seeds = (0x6D6F6F6E72656C61, 0x792D6C616E657331)
    sums = [0, 0]
    padded = raw + bytes(-len(raw) % 8)
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little", signed=True)
        row, column = divmod(index, _ROW)
        for lane, value in enumerate((word, word >> 32)):
            key = _mix((2 * column + _mix(seeds[lane])) & MASK) | 1
            sums[lane] += value * key * (_mix(row) | 1)
    mixed = [_mix((total + len(raw) * seed) & MASK) for total, seed in zip(sums, seeds, strict=True)]
    return b"".join(lane.to_bytes(8, "big") for lane in mixed)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 100, _ROW_BYTES, _ROW_BYTES + 13])
def test_lanes128_is_what_it_is_said_to_be(nbytes: int) -> None:
    data = made(nbytes)
    assert digest_of(data) == lanes_by_hand(data.numpy().tobytes())


def test_lanes128_never_changes() -> None:
    data = (torch.arange(1000, dtype=torch.int32) % 251).to(torch.uint8)
    assert digest_of(data).hex() == "4f8e5b352e23cdf463e8a3246e010ad4"


@pytest.mark.parametrize("nbytes", SIZES)
def test_lanes128_is_the_same_by_a_devices_operations(nbytes: int) -> None:
    data = made(nbytes)
    device = DeviceLanes()
    device.update(data)
    assert device.digest() == digest_of(data)
    assert device.digest() == digest_of(data)


@pytest.mark.parametrize("nbytes", SIZES)
def test_xxh3_is_xxhashs_own(nbytes: int) -> None:
    data = made(nbytes)
    assert digest_of(data, "xxh3_128") == xxhash.xxh3_128_digest(data.numpy().tobytes())
    assert digest_of(Extent(data.data_ptr(), nbytes), "xxh3_128") == digest_of(data, "xxh3_128")


@pytest.mark.parametrize("make", [lambda: digester("xxh3_128"), lambda: digester("lanes128"), DeviceLanes])
def test_cuts_do_not_matter(make: type[Digest]) -> None:
    chance = random.Random(3)
    data = made(2 * _ROW_BYTES + 4321)
    whole = make()
    whole.update(data)
    for _ in range(5):
        edges = [0, *sorted(chance.sample(range(1, data.numel()), 9)), data.numel()]
        digest = make()
        for begin, end in itertools.pairwise(edges):
            part = data[begin:end]
            digest.update(part if chance.random() < 0.5 else Extent(part.data_ptr(), part.numel()))
        assert digest.digest() == whole.digest()


def test_parts_of_lanes128_may_come_in_any_order() -> None:
    data = made(3 * _ROW_BYTES + 77)
    edges = [0, 5, 4096, 4099, _ROW_BYTES, 2 * _ROW_BYTES + 3, data.numel()]
    parts = list(itertools.pairwise(edges))
    random.Random(1).shuffle(parts)
    digest = LanesDigest()
    for begin, end in parts:
        digest.add(begin, data[begin:end])
    assert digest.digest() == digest_of(data)


@pytest.mark.parametrize("name", ["xxh3_128", "lanes128"])
def test_every_kind_of_damage_is_seen(name: str) -> None:
    data = made(4 * _ROW_BYTES)
    seen = {digest_of(data, name)}
    chance = random.Random(5)

    def differs(damaged: torch.Tensor) -> None:
        digest = digest_of(damaged, name)
        assert digest not in seen
        seen.add(digest)

    for bit in range(64):
        damaged = data.clone()
        damaged[chance.randrange(data.numel() // 8) * 8 + bit // 8] ^= 1 << (bit % 8)
        differs(damaged)
    for byte in (3, 7):  # the sign bits of two floats, of two doubles: what a sum of words alone would miss
        damaged = data.clone()
        damaged[800 + byte] ^= 0x80
        damaged[1600 + byte] ^= 0x80
        differs(damaged)
    for first, second, size in ((0, 8, 8), (0, 4, 4), (16, 3 * _ROW_BYTES + 16, 64), (0, _ROW_BYTES, _ROW_BYTES)):
        damaged = data.clone()
        damaged[first : first + size], damaged[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        differs(damaged)
    differs(data.roll(1))
    differs(data.roll(_ROW_BYTES))
    differs(data[:-1])
    differs(torch.cat([data, torch.zeros(8, dtype=torch.uint8)]))
    damaged = data.clone()
    damaged[_ROW_BYTES:] = 0
    differs(damaged)
    differs(torch.zeros(8, dtype=torch.uint8))
    differs(torch.zeros(16, dtype=torch.uint8))
    differs(torch.zeros(0, dtype=torch.uint8))


def test_lanes128_copies_at_most_a_bounded_part() -> None:
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != data.data_ptr():
                self.largest = max(self.largest, result.untyped_storage().nbytes())
            return result

    data = made(40 << 20)
    for digest, bound in ((LanesDigest(), 1 << 20), (DeviceLanes(), 16 << 20)):
        digest.update(data[:8])
        with Watch() as watch:
            digest.update(data[8:])
        assert 0 < watch.largest <= bound


def test_xxh3_copies_nothing() -> None:
    data = made(8 << 20)
    tracemalloc.start()
    try:
        digest_of(data, "xxh3_128")
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()


def test_off_is_nothing() -> None:
    assert digest_of(made(9), "off") == b""


@pytest.mark.parametrize("name", ["xxh3_128", "lanes128"])
def test_only_plain_bytes_are_read(name: str) -> None:
    for wrong in (torch.ones(3), torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)[::2]):
        with pytest.raises(ConfigError, match="contiguous 1-d uint8"):
            digester(name).update(wrong)


def test_xxh3_does_not_fetch_from_a_device() -> None:
    with pytest.raises(ConfigError, match="use lanes128"):
        digester("xxh3_128").update(torch.zeros(8, dtype=torch.uint8, device="meta"))


def test_names_and_modes() -> None:
    for name in ALGORITHMS:
        assert digester(name).name == name
    with pytest.raises(ConfigError, match="xxh3_128, lanes128, off"):
        digester("md5")
    with pytest.raises(ConfigError, match="negative"):
        LanesDigest().add(-1, made(8))
    assert choose("auto", "cpu") == choose("full", "cpu") == "xxh3_128"
    assert choose("auto", "cuda:1") == choose("full", "cuda") == "lanes128"
    assert choose("off", "cuda:1") == "off"
    with pytest.raises(ConfigError, match="'auto', 'full' or 'off'"):
        choose("maybe", "cpu")


def test_coverage_in_any_order() -> None:
    chance = random.Random(7)
    for _ in range(50):
        edges = [0, *sorted(chance.sample(range(1, 200), 12)), 200]
        ranges = list(itertools.pairwise(edges))
        chance.shuffle(ranges)
        coverage = Coverage(200)
        for begin, end in ranges:
            assert not coverage.complete
            with pytest.raises(IntegrityError):
                coverage.require_complete()
            coverage.add(begin, end - begin)
            with pytest.raises(IntegrityError, match="twice"):
                coverage.add(end - 1, 1)
        assert coverage.complete
        assert coverage.covered == 200
        assert coverage.missing() == ()
        coverage.require_complete()


@pytest.mark.parametrize(
    "wrong", [(0, 5), (3, 1), (2, 10), (9, 2), (4, 3), (0, 20), (19, 2), (-1, 1), (5, -1), (21, 0)]
)
def test_coverage_refuses_overlap_and_outside_and_counts_nothing(wrong: tuple[int, int]) -> None:
    coverage = Coverage(20)
    coverage.add(3, 2)
    coverage.add(10, 4)
    coverage.add(5, 1)
    before = coverage.missing()
    with pytest.raises(IntegrityError):
        coverage.add(*wrong)
    assert coverage.missing() == before == ((0, 3), (6, 4), (14, 6))
    assert coverage.covered == 7


def test_coverage_agrees_with_a_set_of_bytes() -> None:
    chance = random.Random(11)
    for _ in range(200):
        coverage, covered = Coverage(40), set()
        for _ in range(30):
            offset, nbytes = chance.randrange(40), chance.randrange(6)
            wanted = set(range(offset, offset + nbytes))
            if wanted & covered or offset + nbytes > 40:
                with pytest.raises(IntegrityError):
                    coverage.add(offset, nbytes)
            else:
                coverage.add(offset, nbytes)
                covered |= wanted
            assert coverage.complete == (len(covered) == 40)
            gaps = {byte for begin, size in coverage.missing() for byte in range(begin, begin + size)}
            assert gaps == set(range(40)) - covered


def test_coverage_of_nothing_is_complete() -> None:
    coverage = Coverage(0)
    assert coverage.complete
    coverage.add(0, 0)
    with pytest.raises(IntegrityError):
        coverage.add(0, 1)
    with pytest.raises(ConfigError):
        Coverage(-1)
