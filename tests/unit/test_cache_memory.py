"""The tier in memory: bounded by bytes, the least recently used out first, nobody's tensors but the caller's own."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import pytest
import torch

from moonrelay.cache.entry import Packed, pack
from moonrelay.cache.memory import MemoryTier
from moonrelay.errors import ConfigError


def digest(number: int) -> str:
    return f"{number:064x}"


def entry(number: int, nbytes: int = 100) -> Packed:
    return Packed(digest(number), bytearray(nbytes))


def held(tier: MemoryTier, numbers: int = 20) -> list[int]:
    """Return what is kept, looked up without being used."""
    return [number for number in range(numbers) if digest(number) in tier._entries]


def test_the_least_recently_used_goes_first() -> None:
    gone: list[int] = []
    tier = MemoryTier(300, on_evicted=gone.append)
    for number in range(3):
        assert tier.put(digest(number), entry(number))
    assert tier.get(digest(0)) is not None
    assert tier.put(digest(3), entry(3, 101))
    assert held(tier) == [0, 3]
    assert (tier.nbytes, len(tier), gone) == (201, 2, [100, 100])
    assert tier.get(digest(1)) is None


def test_replacing_counts_once_and_makes_newest() -> None:
    tier = MemoryTier(300)
    for number in range(3):
        tier.put(digest(number), entry(number))
    tier.put(digest(0), entry(0, 50))
    assert tier.nbytes == 250
    tier.put(digest(4), entry(4))
    assert held(tier) == [0, 2, 4]


def test_what_is_larger_than_the_tier_is_not_kept_and_drives_nobody_out() -> None:
    tier = MemoryTier(300)
    tier.put(digest(0), entry(0))
    assert not tier.put(digest(1), entry(1, 301))
    assert held(tier) == [0]
    assert tier.put(digest(1), entry(1, 300))
    assert held(tier) == [1]
    assert not tier.put(digest(1), entry(1, 301))
    assert (held(tier), tier.nbytes) == ([], 0)


def test_nothing_is_kept_without_room() -> None:
    tier = MemoryTier(0)
    assert not tier.put(digest(0), entry(0))
    assert tier.get(digest(0)) is None


def test_what_is_removed_is_gone() -> None:
    tier = MemoryTier(300)
    for number in range(3):
        tier.put(digest(number), entry(number))
    tier.remove(digest(1))
    tier.remove(digest(9))
    assert (held(tier), tier.nbytes) == ([0, 2], 200)
    tier.clear()
    assert (held(tier), tier.nbytes, len(tier)) == ([], 0, 0)


def test_it_does_as_a_model_does() -> None:
    chance = random.Random(5)
    tier = MemoryTier(1000)
    model: OrderedDict[int, int] = OrderedDict()
    for _ in range(5000):
        number, nbytes = chance.randrange(30), chance.randrange(1, 400)
        if chance.random() < 0.5:
            assert (tier.get(digest(number)) is not None) is (number in model)
            if number in model:
                model.move_to_end(number)
        else:
            tier.put(digest(number), entry(number, nbytes))
            model.pop(number, None)
            model[number] = nbytes
            while sum(model.values()) > 1000:
                model.popitem(last=False)
        assert tier.nbytes == sum(model.values()) <= 1000
        assert list(tier._entries) == [digest(number) for number in model]


def test_who_asks_gets_memory_of_their_own() -> None:
    tier = MemoryTier(1 << 20)
    sent = torch.arange(6.0)
    tier.put(digest(0), pack(digest(0), [sent]))
    sent.zero_()
    for _ in range(3):
        found = tier.get(digest(0))
        assert found is not None
        tree = found.tree()
        assert isinstance(tree, list)
        assert torch.equal(tree[0], torch.arange(6.0))
        tree[0].zero_()
        tree.clear()


def test_many_threads_keep_it_bounded_and_its_sum_right() -> None:
    tier = MemoryTier(2000)

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(500):
            number = chance.randrange(40)
            if tier.get(digest(number)) is None:
                tier.put(digest(number), entry(number, chance.randrange(1, 300)))
            assert tier.nbytes <= 2000

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.nbytes == sum(packed.nbytes for packed in tier._entries.values())


@pytest.mark.parametrize("capacity", [-1, 1.5, True, None, "1"])
def test_a_bound_that_is_none_is_refused(capacity: object) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        MemoryTier(capacity)  # type: ignore[arg-type]
