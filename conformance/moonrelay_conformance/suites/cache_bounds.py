"""Bounds: neither tier grows beyond its bytes, the least recently used go first, a clear leaves nothing."""

from __future__ import annotations

from moonrelay_conformance.corpus import trees
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.cache_bench import NOTHING, CacheBench, CacheSuite, Encoder, built, entry

_ENTRY_BYTES = 32 << 10
_STORE_BYTES = 1 << 20
#: Times the store's bound that is put into it.
_TIMES = 3
_COUNT = _TIMES * _STORE_BYTES // _ENTRY_BYTES
#: Many keys in a small store, so that one record which stays for each would be seen.
_SMALL_BYTES, _SMALL_STORE_BYTES, _MANY = 32 << 10, 1 << 20, 96
#: An object and two records for each entry that fits, and 100 of whatever else there is.
_MOST_OBJECTS = 3 * _SMALL_STORE_BYTES // _SMALL_BYTES + 100


class CacheBounds(CacheSuite):
    """How much is kept."""

    @promise(Level.L1, "Memory stays within its bound, and the least recently used goes first")
    def test_memory_is_bounded_and_the_least_recently_used_goes_first(self, bench: CacheBench) -> None:
        probe = bench.cache(shared=False)
        probe.put(bench.key(), trees.build(entry(0, _ENTRY_BYTES)))
        each = probe.counters().bytes_memory
        conn = bench.conn()
        cache = bench.cache(conn, capacity_bytes=4 * each, shared=False)
        keys = [bench.key(prompt=f"{n}") for n in range(6)]
        for key in keys[:4]:
            cache.put(key, trees.build(entry(0, _ENTRY_BYTES)))
        assert cache.get(keys[0]) is not None, "what fits was not kept"
        for key in keys[4:]:
            cache.put(key, trees.build(entry(0, _ENTRY_BYTES)))
            assert cache.counters().bytes_memory <= 4 * each, "memory grows beyond its bound"
        kept = [number for number, key in enumerate(keys) if cache.get(key) is not None]
        assert kept == [0, 3, 4, 5], f"kept are {kept}; 1 and 2 were used least recently"
        assert cache.counters().evicted == len(conn.told("cache_evicted")) == 2
        cache.put(bench.key(prompt="large"), trees.build(entry(0, 5 * _ENTRY_BYTES)))
        assert cache.counters().bytes_memory <= 4 * each
        assert cache.get(keys[5]) is not None, "an entry that is too large drove others out"

    @promise(Level.L1, "The store stays within its bound under any number of keys, records and all")
    def test_the_store_stays_within_its_bound(self, bench: CacheBench) -> None:
        cache = bench.cache(capacity_bytes=0, store_bytes=_SMALL_STORE_BYTES)
        keys = [bench.key(prompt=f"{n}") for n in range(_MANY)]
        for number, key in enumerate(keys, 1):
            cache.put(key, trees.build(entry(number, _SMALL_BYTES)))
            if number % 48 == 0:
                assert cache.get(key) is not None, "the newest is not there"
                objects = len(bench.stored())
                assert objects <= _MOST_OBJECTS, f"after {number} keys {objects} objects are in the store"
        held = sum(cache.get(one) is not None for one in keys)
        told = f"{held} entries of {_SMALL_BYTES} bytes are in {_SMALL_STORE_BYTES}"
        assert held * _SMALL_BYTES <= _SMALL_STORE_BYTES, told
        assert held * _SMALL_BYTES >= _SMALL_STORE_BYTES // 3, told
        assert cache.counters().evicted >= _MANY // 2, "evictions are not counted"

    @promise(Level.L2, "An entry that is used outlives those that are not")
    def test_a_used_entry_outlives_unused_ones(self, bench: CacheBench) -> None:
        cache = bench.cache(capacity_bytes=0, store_bytes=_STORE_BYTES)
        used, unused = bench.key(prompt="used"), bench.key(prompt="unused")
        encode = Encoder(entry(1, _ENTRY_BYTES))
        cache.put(unused, trees.build(entry(2, _ENTRY_BYTES)))
        for number in range(_COUNT):
            cache.get_or_encode(used, encode)
            cache.put(bench.key(prompt=f"{number}"), trees.build(entry(number, _ENTRY_BYTES)))
        assert encode.calls == 1, f"what is used all the time went {encode.calls - 1} times"
        assert cache.get(unused) is None, "what nobody uses outlived everything"

    @promise(Level.L2, "What is larger than the store is given to its caller, and drives nobody out")
    def test_what_is_too_large_drives_nobody_out(self, bench: CacheBench) -> None:
        cache = bench.cache(capacity_bytes=0, store_bytes=_STORE_BYTES)
        small, large = bench.key(prompt="small"), bench.key(prompt="large")
        cache.put(small, trees.build(entry(1, _ENTRY_BYTES)))
        description = entry(2, 2 * _STORE_BYTES)
        found = cache.get_or_encode(large, built(description))
        assert trees.digest(found) == trees.digest(trees.build(description))
        assert cache.get(large) is None
        assert cache.get(small) is not None, "an entry that is too large drove another out"

    @promise(Level.L1, "A clear leaves nothing behind, in memory or in the store, and the cache goes on")
    def test_a_clear_leaves_nothing(self, bench: CacheBench) -> None:
        cache, other = bench.cache(store_bytes=_STORE_BYTES), bench.other(store_bytes=_STORE_BYTES)
        keys = [bench.key(prompt=f"{n}") for n in range(_COUNT // 2)]
        for number, key in enumerate(keys):
            (cache, other)[number % 2].get_or_encode(key, built(entry(number, _ENTRY_BYTES)))
        assert bench.stored(), "nothing was stored; there is nothing to clear"
        cache.clear()
        left = bench.until_gone()
        assert not left, f"a clear left {len(left)} objects, e.g. {left[0]}"
        assert cache.counters().bytes_memory == 0
        fresh = bench.cache(store_bytes=_STORE_BYTES)
        assert [number for number, key in enumerate(keys) if fresh.get(key, NOTHING) is not NOTHING] == []
        encode = Encoder()
        for one in (cache, bench.other(store_bytes=_STORE_BYTES)):
            assert trees.digest(one.get_or_encode(keys[0], encode)) == encode.digest
        assert encode.calls == 1, "after a clear the cache keeps nothing"
        for one in (cache, other):
            one.close()
        bench.cache(store_bytes=_STORE_BYTES).clear()
        assert not bench.until_gone(), "a second clear left something"
