"""The embedding cache in one process: tiers, ownership, what goes wrong, and that no request fails of it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector, Event
from moonrelay.cache import entry
from moonrelay.cache.counters import CacheCounters
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.entry import pack
from moonrelay.cache.keys import EmbeddingKey, IncompleteKey
from moonrelay.cache.shared import SharedStore
from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import ConfigError, PeerLost
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from support.trees import TREES, canon, tensor

MakeCache = Callable[..., EmbeddingCache]
Made = tuple[EmbeddingCache, list[Event]]


def key(prompt: str = "a fox", **changes: Any) -> EmbeddingKey:
    params = {"dtype": "bf16", "max_length": 512, "lora": None}
    return EmbeddingKey(**{"encoder": "umt5@1", "prompt": prompt, "role": "positive", "params": params, **changes})


class Encoder:
    """Counts, and gives a new tree each time."""

    def __init__(self, tree: Callable[[], object] = lambda: [tensor("bfloat16", (1, 4, 8)), None]) -> None:
        self.calls = 0
        self._tree = tree

    def __call__(self) -> object:
        self.calls += 1
        return self._tree()


class Bench:
    """Caches on connectors of their own, as in processes of their own, on one store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.events: dict[EmbeddingCache, list[Event]] = {}
        self.connectors: dict[EmbeddingCache, DiffusionConnector] = {}

    def __call__(self, *, store: dict[str, Any] | None = None, mode: str = "p2p", **settings: Any) -> EmbeddingCache:
        seen: list[Event] = []
        config = {"url": f"local://{self.root}", "capacity_bytes": 64 << 20, **(store or {})}
        conn = DiffusionConnector("encode", mode, {"engine": "memory"}, config, observers=[seen.append])
        cache = EmbeddingCache(conn, **{"capacity_bytes": 8 << 20, "retry_s": 60.0, **settings})
        self.events[cache] = seen
        self.connectors[cache] = conn
        return cache

    def told(self, cache: EmbeddingCache, *names: str) -> list[tuple[str, str | None]]:
        """Return the cache's events of these names, or all, with their paths."""
        return [(one.name, one.path) for one in self.events[cache] if not names or one.name in names]

    def relay(self, cache: EmbeddingCache) -> Relay:
        return self.connectors[cache].store()

    def shared(self, cache: EmbeddingCache) -> SharedStore:
        return cache._opened().entries

    def keys(self, cache: EmbeddingCache, part: str = "") -> list[str]:
        return [name for name in self.relay(cache).keys("moonrelay/", soon()) if part in name]

    def close(self) -> None:
        for cache, conn in self.connectors.items():
            cache.close()
            conn.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "store")
    yield made
    made.close()


def soon() -> Deadline:
    return Deadline(10, SystemClock())


def numbers(cache: EmbeddingCache) -> dict[str, int]:
    """Return the counters that are not zero, without the bytes in memory."""
    counters = cache.counters()
    return {
        name: getattr(counters, name)
        for name in CacheCounters.__slots__
        if name != "bytes_memory" and getattr(counters, name)
    }


# Hits.


@pytest.mark.parametrize("name", TREES)
def test_hits_are_bit_exact_in_memory_and_in_the_store(bench: Bench, name: str) -> None:
    encode = Encoder(lambda: TREES[name])
    first, second = bench(), bench()
    want = canon(TREES[name])
    assert canon(first.get_or_encode(key(), encode)) == want
    assert canon(first.get_or_encode(key(), encode)) == want
    assert canon(second.get_or_encode(key(), encode)) == want
    assert canon(second.get_or_encode(key(), encode)) == want
    assert encode.calls == 1
    nbytes = pack(key().digest, TREES[name]).nbytes
    assert first.counters() == CacheCounters(
        hits_memory=1, misses=1, encodes=1, bytes_memory=nbytes, bytes_store_written=nbytes
    )
    assert second.counters() == CacheCounters(hits_memory=1, hits_store=1, bytes_memory=nbytes, bytes_store_read=nbytes)
    assert bench.told(first) == [("cache_miss", None), ("cache_stored", "store"), ("cache_hit", "memory")]
    assert bench.told(second) == [("cache_hit", "store"), ("cache_hit", "memory")]


@pytest.mark.parametrize("mode", ["p2p", "store", "auto"])
def test_the_store_is_used_in_every_transfer_mode(bench: Bench, mode: str) -> None:
    encode = Encoder()
    for cache in (bench(mode=mode), bench(mode=mode)):
        cache.get_or_encode(key(), encode)
    assert encode.calls == 1


def test_an_edit_in_place_changes_nobody_elses(bench: Bench) -> None:
    kept: list[torch.Tensor] = []

    def encode() -> object:
        kept.append(torch.arange(6.0))
        return {"embeds": kept[0], "list": [1]}

    def spoil(tree: object) -> None:
        assert isinstance(tree, dict)
        assert torch.equal(tree["embeds"], torch.arange(6.0))
        assert tree["list"] == [1]
        tree["embeds"].zero_()
        tree["list"].clear()
        del tree["list"]

    first, second = bench(), bench()
    got = first.get_or_encode(key(), encode)
    hit = first.get_or_encode(key(), encode)
    spoil(hit)
    assert torch.equal(kept[0], torch.arange(6.0))
    spoil(got)
    for cache in (first, second, second, first):
        spoil(cache.get_or_encode(key(), encode))
    assert len(kept) == 1
    spoil(bench().get_or_encode(key(), encode))


def test_every_other_key_is_a_miss(bench: Bench) -> None:
    cache = bench()
    keys = [key(), key("b"), key(role="negative"), key(encoder="umt5@2"), key(template="x")]
    for number, one in enumerate(keys):
        assert cache.get_or_encode(one, lambda number=number: number) == number  # type: ignore[misc]
    for number, one in enumerate(keys):
        assert cache.get_or_encode(one, lambda: pytest.fail("encoded")) == number


def test_no_key_is_no_caching(bench: Bench) -> None:
    cache, encode = bench(), Encoder()
    incomplete = EmbeddingKey.complete(
        encoder="umt5", prompt="a", role="positive", params={"dtype": "bf16", "max_length": 1, "lora": None}
    )
    assert incomplete is None
    for _ in range(3):
        cache.get_or_encode(incomplete, encode)
    assert encode.calls == 3
    assert numbers(cache) == {"encodes": 3}
    assert bench.told(cache) == []
    assert bench.keys(cache) == []
    assert cache.get(None, default="x") == "x"
    assert not cache.put(None, 1)
    with pytest.raises(IncompleteKey):
        key(encoder="umt5")


def test_events_say_for_whom_and_never_the_prompt(bench: Bench) -> None:
    cache = bench()
    cache.get_or_encode(key("SECRET"), Encoder(), request_id="r1")
    cache.get_or_encode(key("SECRET"), Encoder(), request_id="r2")
    assert [one.request_id for one in bench.events[cache]] == ["r1", "r1", "r2"]
    for event in bench.events[cache]:
        assert (event.kind, event.stage) == ("embedding", "encode")
        assert event.extra == {"encoder": "umt5@1", "role": "positive"}
        assert "SECRET" not in str(event.fields())
    assert [one.nbytes for one in bench.events[cache]][1:] == [cache.counters().bytes_memory] * 2


def test_a_device_is_where_tensors_are_encoded_or_found(bench: Bench) -> None:
    first, second = bench(), bench()
    for cache in (first, first, second, second):
        tree = cache.get_or_encode(key(), Encoder(lambda: {"a": (tensor("float32"), [1])}), device="meta")
        assert isinstance(tree, dict)
        assert tree["a"][0].device.type == "meta"
        assert tree["a"][1] == [1]
    tree = first.get(key())
    assert isinstance(tree, dict)
    assert tree["a"][0].device.type == "cpu"


def test_get_and_put(bench: Bench) -> None:
    first, second = bench(), bench()
    assert first.get(key()) is None
    assert first.get(key(), default="nothing") == "nothing"
    assert first.put(key(), None)
    assert first.get(key(), default="nothing") is None
    assert second.get(key(), default="nothing") is None
    assert numbers(first)["misses"] == 2
    assert numbers(second) == {"hits_store": 1, "bytes_store_read": first.counters().bytes_store_written}
    assert not first.put(key("b"), object())
    assert bench.told(first, "cache_trouble") == [("cache_trouble", "memory")]


def test_what_cannot_be_kept_is_encoded_each_time_and_told(bench: Bench) -> None:
    cache, encode = bench(), Encoder(object)
    assert cache.get_or_encode(key(), encode) is not cache.get_or_encode(key(), encode)
    assert encode.calls == 2
    assert numbers(cache) == {"encodes": 2, "misses": 2, "trouble": 2}
    assert {one.code for one in bench.events[cache] if one.name == "cache_trouble"} == {"unsupported_tensor"}


def test_anything_with_digest_and_label_is_a_key_if_its_digest_is_one(bench: Bench) -> None:
    class Other:
        label = {"encoder": "x"}
        digest = "ab" * 32

    cache = bench()
    assert cache.get_or_encode(Other(), lambda: 1) == 1
    assert cache.get_or_encode(Other(), lambda: 2) == 1
    Other.digest = "ab"
    with pytest.raises(ConfigError, match=r"key\.digest"):
        cache.get_or_encode(Other(), lambda: 2)


# Bounds.


def test_memory_is_bounded_and_the_store_still_has_what_went(bench: Bench) -> None:
    size = pack(key().digest, torch.zeros(1000)).nbytes
    cache = bench(capacity_bytes=2 * size, store_bytes=16 << 20)
    for number in range(4):
        cache.get_or_encode(key(str(number)), lambda number=number: torch.full((1000,), float(number)))  # type: ignore[misc]
    assert cache.counters().bytes_memory == 2 * size
    assert numbers(cache)["evicted"] == 2
    assert bench.told(cache, "cache_evicted") == [("cache_evicted", "memory")] * 2
    again = cache.get_or_encode(key("0"), lambda: pytest.fail("encoded"))
    assert isinstance(again, torch.Tensor)
    assert again[0] == 0
    assert numbers(cache)["hits_store"] == 1


def test_the_store_is_bounded_to_half_of_an_embedded_relay(bench: Bench) -> None:
    bounds = []
    for number, settings in enumerate(({}, {"store_bytes": 1 << 20}, {"capacity_bytes": 1 << 20})):
        cache = bench(namespace=f"n{number}", **{"capacity_bytes": 1 << 30, **settings})
        bounds.append(bench.shared(cache).usage(soon()).capacity_bytes)
    assert bounds == [32 << 20, 1 << 20, 1 << 20]


def test_the_store_forgets_within_its_bound_and_says_so(bench: Bench) -> None:
    cache = bench(store_bytes=400_000, capacity_bytes=0)
    for number in range(60):
        cache.get_or_encode(key(str(number)), lambda number=number: torch.full((2500,), float(number)))  # type: ignore[misc]
        assert bench.shared(cache).usage(soon()).nbytes <= 400_000
    gone = [one for one in bench.events[cache] if one.name == "cache_evicted"]
    assert gone
    assert all(one.path == "store" for one in gone)
    assert numbers(cache)["evicted"] == sum(int(str(one.extra["entries"])) for one in gone)
    assert bench.told(cache, "cache_trouble") == []


def test_what_is_used_stays(bench: Bench) -> None:
    cache = bench(store_bytes=400_000, capacity_bytes=0)
    used = key("used")
    cache.get_or_encode(used, lambda: torch.ones(2500))
    for number in range(60):
        cache.get_or_encode(key(str(number)), lambda: torch.zeros(2500))
        got = cache.get_or_encode(used, lambda: pytest.fail("encoded"))
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, torch.ones(2500))


def test_without_room_in_memory_everything_comes_from_the_store(bench: Bench) -> None:
    cache, encode = bench(capacity_bytes=0, store_bytes=1 << 20), Encoder()
    for _ in range(3):
        cache.get_or_encode(key(), encode)
    assert encode.calls == 1
    assert numbers(cache)["hits_store"] == 2


@pytest.mark.parametrize("settings", [{"shared": False}, {"store_bytes": 0}])
def test_a_cache_that_is_not_shared_starts_no_store(bench: Bench, settings: dict[str, Any]) -> None:
    first, second, encode = bench(**settings), bench(**settings), Encoder()
    for cache in (first, first, second, second):
        cache.get_or_encode(key(), encode)
    assert encode.calls == 2
    assert numbers(first) == {"encodes": 1, "misses": 1, "hits_memory": 1}
    assert not bench.connectors[first]._runtime.started
    first.clear()
    assert first.get(key()) is None


def test_clear_leaves_nothing_behind(bench: Bench) -> None:
    cache, other = bench(), bench()
    for number in range(20):
        cache.get_or_encode(key(str(number)), Encoder())
    other.get(key("3"))
    assert bench.keys(cache)
    cache.clear()
    assert bench.keys(cache) == []
    assert cache.counters().bytes_memory == 0
    assert cache.get(key("3")) is None
    encode = Encoder()
    cache.get_or_encode(key("3"), encode)
    assert bench().get_or_encode(key("3"), encode) is not None
    assert encode.calls == 1


# What is wrong with an entry.


def plant(bench: Bench, cache: EmbeddingCache, raw: bytes) -> None:
    """Put bytes into the store as the entry of `key`."""
    held = bytearray(raw)
    address = entry._address(held)
    stored = bench.shared(cache).put(key().digest, [Extent(address, len(held))], len(held), {}, soon())
    assert stored


def whole() -> bytearray:
    return bytearray(pack(key().digest, [tensor("bfloat16", (1, 4, 8), 9), None]).buffer)


def flipped() -> bytes:
    raw = whole()
    raw[-1] ^= 1
    return bytes(raw)


def of_another_version() -> bytes:
    raw = whole()
    struct.pack_into("<I", raw, 8, entry.VERSION + 1)
    raw[entry._FRONT.size : entry.HEADER_BYTES] = entry._content_digest(raw)
    return bytes(raw)


PLANTED: dict[str, Callable[[], bytes]] = {
    "damaged": flipped,
    "cut short": lambda: bytes(whole()[:-9]),
    "half of it zero": lambda: bytes(whole()[:100]) + bytes(len(whole()) - 100),
    "of another version": of_another_version,
    "of another key": lambda: bytes(pack(key("b").digest, "wrong").buffer),
    "no entry at all": lambda: b"x" * 500,
    "tiny": lambda: b"x",
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_planted_is_a_miss_an_event_and_is_replaced(bench: Bench, what: str) -> None:
    cache, encode = bench(), Encoder()
    plant(bench, cache, PLANTED[what]())
    assert canon(cache.get_or_encode(key(), encode)) == canon(Encoder()())
    assert numbers(cache)["trouble"] == 1
    assert bench.told(cache) == [("cache_trouble", "store"), ("cache_miss", None), ("cache_stored", "store")]
    other = bench()
    assert canon(other.get_or_encode(key(), encode)) == canon(Encoder()())
    assert encode.calls == 1
    assert bench.told(other) == [("cache_hit", "store")]


def test_a_whole_planted_entry_is_a_hit(bench: Bench) -> None:
    cache = bench()
    plant(bench, cache, bytes(whole()))
    assert canon(cache.get_or_encode(key(), lambda: pytest.fail("encoded"))) == canon(
        [tensor("bfloat16", (1, 4, 8), 9), None]
    )


def test_an_object_that_is_damaged_where_it_lies_is_a_miss_and_replaced(bench: Bench) -> None:
    encode = Encoder()
    bench().get_or_encode(key(), encode)
    (path,) = [one for one in (bench.root / "objects").iterdir() if "%o%" in one.name]
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)
    cache = bench()
    cache.get_or_encode(key(), encode)
    assert encode.calls == 2
    assert bench.told(cache, "cache_trouble") == [("cache_trouble", "store")]
    bench().get_or_encode(key(), encode)
    assert encode.calls == 2


@pytest.mark.parametrize("part", ["/o/", "/r/"])
def test_an_entry_of_which_a_half_is_there_is_a_miss(bench: Bench, part: str) -> None:
    encode = Encoder()
    writer = bench()
    writer.get_or_encode(key(), encode)
    bench.relay(writer).remove(bench.keys(writer, part), soon())
    for _ in range(2):
        bench().get_or_encode(key(), encode)
    assert encode.calls == 2


@pytest.mark.parametrize("part", ["/o/", "/r/", "/l/", "/g", "/root"])
def test_records_that_are_garbage_are_no_error(bench: Bench, part: str) -> None:
    encode = Encoder()
    writer = bench()
    writer.get_or_encode(key(), encode)
    for name in bench.keys(writer, part):
        bench.relay(writer).remove([name], soon())
        bench.relay(writer).put_if_absent(name, b"\xc1garbage", soon())
    for _ in range(2):
        assert canon(bench().get_or_encode(key(), encode)) == canon(Encoder()())


def test_an_entry_damaged_in_memory_is_found_out(bench: Bench) -> None:
    cache, encode = bench(), Encoder()
    cache.get_or_encode(key(), encode)
    held = cache._memory.get(key().digest)
    assert held is not None
    held.buffer[-1] ^= 1
    assert canon(cache.get_or_encode(key(), encode)) == canon(Encoder()())
    assert encode.calls == 1
    assert bench.told(cache, "cache_trouble", "cache_hit") == [("cache_trouble", "memory"), ("cache_hit", "store")]


# What is wrong with the store.


FAULTS = ["get_bytes:fail", "put_if_absent:fail", "put:fail", "put:fail_after", "put:lose", "put_if_absent:lose",
          "get_bytes:lose", "put:short", "put:wrong", "put:duplicate", "put_if_absent:duplicate"]  # fmt: skip


@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_the_store_fails_a_request(bench: Bench, fault: str, nth: int) -> None:
    call, _, word = fault.partition(":")
    faults = [f"{call}:none"] * nth + [f"{call}:{word}"]
    options = {"inner": f"local://{bench.root}", "faults": faults}
    faulty = bench(store={"url": "faulty://", "options": options}, retry_s=0.01, capacity_bytes=0, store_bytes=1 << 20)
    plain = bench(retry_s=0.01)
    want = canon(Encoder()())
    for cache in (faulty, faulty, plain, faulty, plain):
        assert canon(cache.get_or_encode(key(), Encoder())) == want
        threading.Event().wait(0.02)
    encode = Encoder()
    for cache in (faulty, plain):
        assert canon(cache.get_or_encode(key("afterwards"), encode)) == want
    assert encode.calls <= 2


@pytest.mark.parametrize("word", ["fail", "lose", "short", "wrong", "nothing", "duplicate"])
def test_what_is_read_wrongly_is_a_miss(bench: Bench, word: str) -> None:
    bench().get_or_encode(key(), Encoder())
    options = {"inner": f"local://{bench.root}", "faults": [f"get:{word}"]}
    cache = bench(store={"url": "faulty://", "options": options}, retry_s=0.01)
    encode = Encoder()
    assert canon(cache.get_or_encode(key(), encode)) == canon(Encoder()())
    assert encode.calls <= 1
    if word in ("fail", "short", "wrong", "nothing"):
        assert ("cache_trouble", "store") in bench.told(cache)


def test_a_store_that_is_gone_is_told_once_left_alone_and_used_again(bench: Bench) -> None:
    cache, encode = bench(retry_s=0.5), Encoder()
    relay = bench.relay(cache)
    cache.get_or_encode(key("before"), encode)
    relay.close()
    for number in range(3):
        cache.get_or_encode(key(str(number)), encode)
        cache.get_or_encode(key(str(number)), encode)
    assert encode.calls == 4
    assert bench.told(cache, "cache_trouble") == [("cache_trouble", "store")]
    assert numbers(cache)["hits_memory"] == 3
    assert [one.code for one in bench.events[cache] if one.name == "cache_trouble"] == ["closed_error"]
    relay.start()
    threading.Event().wait(0.6)
    cache.get_or_encode(key("after"), encode)
    assert bench().get_or_encode(key("after"), lambda: pytest.fail("encoded")) is not None


def test_after_its_connector_was_closed_a_cache_encodes(bench: Bench) -> None:
    cache, encode = bench(retry_s=0.05), Encoder()
    cache.get_or_encode(key(), encode)
    bench.connectors[cache].close()
    cache.get_or_encode(key(), encode)
    cache.get_or_encode(key("b"), encode)
    assert encode.calls == 2
    fresh = EmbeddingCache(bench.connectors[cache])
    assert canon(fresh.get_or_encode(key(), encode)) == canon(Encoder()())
    assert canon(fresh.get_or_encode(key(), encode)) == canon(Encoder()())
    assert encode.calls == 3
    fresh.close()


def test_a_store_that_cannot_be_reached_at_first_is_used_later(bench: Bench) -> None:
    cache = bench(retry_s=0.2)
    conn = bench.connectors[cache]
    real = conn.store

    def lost() -> Relay:
        message = "the store does not answer"
        raise PeerLost(message)

    conn.store = lost  # type: ignore[method-assign]
    cache.get_or_encode(key(), Encoder())
    assert bench.told(cache) == [("cache_trouble", "store"), ("cache_miss", None)]
    conn.store = real  # type: ignore[method-assign]
    threading.Event().wait(0.3)
    cache.get_or_encode(key("b"), Encoder())
    assert bench.told(cache, "cache_stored") == [("cache_stored", "store")]


@pytest.mark.parametrize("call", ["get_bytes", "put_if_absent", "put", "get"])
def test_a_store_that_stalls_stops_a_request_for_a_bounded_time(bench: Bench, call: str) -> None:
    if call == "get":
        bench().get_or_encode(key(), Encoder())
    options = {"inner": f"local://{bench.root}", "faults": [f"{call}:stall"] * 3}
    cache = bench(store={"url": "faulty://", "options": options}, wait_s=0.3)
    clock = SystemClock()
    started = clock.monotonic()
    encode = Encoder()
    assert canon(cache.get_or_encode(key(), encode)) == canon(Encoder()())
    assert clock.monotonic() - started < 5
    assert encode.calls == 1
    assert len(bench.told(cache, "cache_trouble")) == 1
    assert canon(cache.get_or_encode(key(), encode)) == canon(Encoder()())
    assert encode.calls == 1


def test_a_full_store_is_told_and_memory_serves(bench: Bench) -> None:
    cache = bench(store={"capacity_bytes": 100_000}, store_bytes=50_000)
    encode = Encoder(lambda: torch.zeros(20_000))
    cache.get_or_encode(key(), encode)
    cache.get_or_encode(key(), encode)
    assert encode.calls == 1
    assert bench.told(cache, "cache_trouble", "cache_stored") == [("cache_trouble", "store")]


# One encodes.


def all_at_once(count: int, work: Callable[[int], object]) -> list[object]:
    results: list[object] = [None] * count
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        gate.wait(10)
        try:
            results[number] = work(number)
        except Exception as exc:
            results[number] = exc

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("shared", [True, False])
def test_of_many_threads_one_encodes(bench: Bench, shared: bool) -> None:
    cache = bench(shared=shared)
    calls: list[int] = []

    def encode() -> object:
        calls.append(1)
        threading.Event().wait(0.3)
        return torch.randn(100)

    results = all_at_once(16, lambda _: cache.get_or_encode(key(), encode))
    assert len(calls) == 1
    assert len({str(canon(one)) for one in results}) == 1
    assert len({one.data_ptr() for one in results}) == 16  # type: ignore[attr-defined]
    counted = numbers(cache)
    assert (counted["misses"], counted["encodes"], counted["hits_memory"]) == (1, 1, 15)
    assert counted["waits"] == len(bench.told(cache, "cache_wait")) <= 15


def test_of_many_connectors_one_encodes(bench: Bench) -> None:
    caches = [bench(wait_s=30.0) for _ in range(8)]
    calls: list[int] = []

    def encode() -> object:
        calls.append(1)
        threading.Event().wait(0.3)
        return torch.randn(100)

    results = all_at_once(8, lambda number: caches[number].get_or_encode(key(), encode))
    assert len(calls) == 1
    assert len({str(canon(one)) for one in results}) == 1
    counted = [cache.counters() for cache in caches]
    assert sum(one.misses for one in counted) == sum(one.encodes for one in counted) == 1
    assert sum(one.hits_store for one in counted) == 7
    assert sum(one.takeovers for one in counted) == 0
    assert not any("/f/" in name for name in bench.keys(caches[0]))


@pytest.mark.parametrize("apart", [True, False])
def test_what_was_stored_between_look_and_turn_is_found(bench: Bench, apart: bool) -> None:
    late = bench()
    early = bench() if apart else late
    flight = late._opened().flight
    enter = flight.enter

    def after_the_other(digest: str, deadline: Deadline) -> object:
        flight.enter = enter  # type: ignore[method-assign]
        assert early.get_or_encode(key(), lambda: "early") == "early"
        return enter(digest, deadline)

    flight.enter = after_the_other  # type: ignore[assignment, method-assign]
    assert late.get_or_encode(key(), lambda: pytest.fail("encoded")) == "early"
    assert early.counters().encodes == 1
    assert numbers(late).get("waits", 0) == 0
    assert not any("/f/" in name for name in bench.keys(late))


class Broken(Exception):
    pass


def test_what_encoding_raises_passes_and_the_next_leads(bench: Bench) -> None:
    caches = [bench(wait_s=30.0), bench(wait_s=30.0)]
    lock = threading.Lock()
    calls: list[int] = []

    def encode() -> object:
        with lock:
            calls.append(1)
            mine = len(calls)
        threading.Event().wait(0.1)
        if mine <= 3:
            message = f"no {mine}"
            raise Broken(message)
        return "made"

    results = all_at_once(8, lambda number: caches[number % 2].get_or_encode(key(), encode))
    failed = [one for one in results if isinstance(one, Broken)]
    assert sorted(str(one) for one in failed) == ["no 1", "no 2", "no 3"]
    assert [one for one in results if not isinstance(one, Broken)] == ["made"] * 5
    assert len(calls) == 4
    assert sum(cache.counters().misses for cache in caches) == 4
    assert sum(cache.counters().encodes for cache in caches) == 4


def test_what_cannot_be_kept_has_nobody_stand_in_line_for_long(bench: Bench) -> None:
    caches = [bench(wait_s=60.0) for _ in range(8)]
    lock = threading.Lock()
    now: list[int] = [0]
    most: list[int] = [0]

    def encode() -> object:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.5)
        with lock:
            now[0] -= 1
        return object()

    results = all_at_once(8, lambda number: caches[number].get_or_encode(key(), encode))
    assert len({id(one) for one in results}) == 8
    assert most[0] > 1
    reasons = {one.reason for cache in caches for one in bench.events[cache] if one.name == "cache_wait"}
    assert "nothing was stored, again and again" in reasons


def test_an_interrupt_passes_too_and_nobody_is_kept_waiting(bench: Bench) -> None:
    cache = bench()

    def encode() -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get_or_encode(key(), encode)
    assert bench(wait_s=30.0).get_or_encode(key(), lambda: 5) == 5
    assert bench.told(cache, "cache_trouble") == []


@pytest.mark.parametrize("apart", [True, False])
def test_a_slow_encoder_stops_others_only_for_a_while(bench: Bench, apart: bool) -> None:
    slow = bench(wait_s=0.4)
    other = bench(wait_s=0.4) if apart else slow
    begun, go_on = threading.Event(), threading.Event()

    def encode() -> object:
        begun.set()
        assert go_on.wait(30)
        return "slow"

    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(slow.get_or_encode(key(), encode)))
    thread.start()
    assert begun.wait(10)
    assert other.get_or_encode(key(), lambda: "own") == "own"
    assert [one.reason for one in bench.events[other] if one.name == "cache_wait"] == ["not encoded within 0.4 s"]
    assert bench.told(slow, "cache_trouble") == []
    go_on.set()
    thread.join(30)
    assert results == ["slow"]
    assert other.counters().waits == 1


def test_different_keys_do_not_wait_for_each_other(bench: Bench) -> None:
    cache = bench(wait_s=30.0)
    together = threading.Barrier(6)

    def encode() -> object:
        together.wait(20)  # passes only when all six encode at once
        return 1

    assert all_at_once(6, lambda number: cache.get_or_encode(key(str(number)), encode)) == [1] * 6


# The end.


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("moonrelay-cache")}


def test_close_ends_what_runs_and_later_calls_encode(bench: Bench) -> None:
    cache = bench(wait_s=30.0, dead_after_s=0.3)
    begun, go_on = threading.Event(), threading.Event()

    def encode() -> object:
        begun.set()
        assert go_on.wait(30)
        return "first"

    results: list[object] = []
    workers = [
        threading.Thread(target=lambda: results.append(cache.get_or_encode(key(), encode))),
        threading.Thread(target=lambda: results.append(cache.get_or_encode(key(), lambda: "second"))),
    ]
    workers[0].start()
    assert begun.wait(10)
    workers[1].start()
    threading.Event().wait(0.3)
    cache.close()
    cache.close()
    workers[1].join(10)
    assert results == ["second"]
    go_on.set()
    workers[0].join(10)
    assert results == ["second", "first"]
    assert cache.get_or_encode(key(), lambda: "third") == "third"
    assert cache.get(key(), default="none") == "none"
    assert not cache.put(key(), 1)
    cache.clear()
    assert cache.counters().bytes_memory == 0
    assert threads() == set()


def test_it_may_be_used_with_with(bench: Bench) -> None:
    with bench() as cache:
        assert cache.get_or_encode(key(), lambda: 1) == 1
    assert cache.get_or_encode(key(), lambda: 2) == 2


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"capacity_bytes": 1.0}, "capacity_bytes"),
        ({"store_bytes": -1}, "store_bytes"),
        ({"store_bytes": True}, "store_bytes"),
        ({"wait_s": 0}, "wait_s"),
        ({"wait_s": "1"}, "wait_s"),
        ({"retry_s": -1}, "retry_s"),
        ({"dead_after_s": True}, "dead_after_s"),
        ({"namespace": ""}, "namespace"),
        ({"namespace": "a/b"}, "namespace"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(bench: Bench, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        bench(**settings)
    assert refused.value.context["field"] == field
