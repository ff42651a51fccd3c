"""Hits: bit for bit, from both tiers, and the caller's own; what is no hit, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.cache_bench import NOTHING, CacheBench, CacheSuite, Encoder, edited

_BF16 = {"tensor": {"shape": [1, 77, 64], "dtype": "bfloat16", "seed": 3}}
#: What encoders give, and what is hard on whoever keeps it.
_TREES: dict[str, Any] = {
    "bare": _BF16,
    "named": {"dict": [["prompt_embeds", _BF16], ["pooled", {"tensor": {"shape": [1, 8], "dtype": "float16"}}]]},
    "tuple with none": {"tuple": [_BF16, None, {"list": [{"tensor": {"shape": [2], "dtype": "int64"}}]}]},
    "fp8": {"tensor": {"shape": [4, 4], "dtype": "float8_e4m3fn", "seed": 5}},
    "mask": {"tensor": {"shape": [1, 9], "dtype": "bool", "seed": 6}},
    "no dimension": {"tensor": {"shape": [], "dtype": "bfloat16", "seed": 7}},
    "empty": {"list": [{"tensor": {"shape": [0, 4], "dtype": "float32"}}, {"dict": []}]},
    "transposed": {"tensor": {"shape": [6, 5], "dtype": "float32", "seed": 8, "layout": "transposed"}},
    "strided": {"tensor": {"shape": [6, 5], "dtype": "float32", "seed": 9, "layout": "strided"}},
    "one object twice": {"list": [{"named": {"name": "a", "of": _BF16}}, {"same": "a"}]},
    "plain": {"dict": [["scale", {"float": "-0.0"}], ["nan", {"float": "nan"}], ["n", 3], ["t", "x"], ["b", True]]},
    "none": None,
}


class _EncodeFailedError(Exception):
    """An encoder's own error."""


class CacheHits(CacheSuite):
    """What comes out."""

    @promise(Level.L1, "A hit is what was encoded, bit for bit, from memory and from the store")
    def test_a_hit_is_what_was_encoded_bit_for_bit(self, bench: CacheBench) -> None:
        first, second = bench.cache(), bench.other()
        for name, description in _TREES.items():
            key, encode = bench.key(prompt=name), Encoder(description)
            wanted = trees.digest(trees.build(description, received=True))
            for where, cache in (("new", first), ("memory", first), ("store", second), ("memory", second)):
                found = trees.digest(cache.get_or_encode(key, encode))
                assert found == wanted, f"{name} from {where} is something else"
            assert encode.calls == 1, f"{name} was encoded {encode.calls} times"

    @promise(Level.L1, "A hit is the caller's own: what is written into it changes nobody else's")
    def test_a_hit_is_the_callers_own(self, bench: CacheBench) -> None:
        first, second = bench.cache(), bench.other()
        key, encode = bench.key(), Encoder()
        fresh: Any = first.get_or_encode(key, encode)
        wanted = trees.digest(fresh)
        edited(fresh)
        for tree in encode.trees:
            edited(tree)
        for turn in range(2):
            for where, cache in (("memory", first), ("store, then memory", second)):
                hit: Any = cache.get_or_encode(key, encode)
                assert trees.digest(hit) == wanted, f"a hit from {where} shows what a caller wrote (turn {turn})"
                edited(hit)
        two: list[Any] = [first.get(key), first.get(key)]
        edited(two[0])
        assert trees.digest(two[1]) == wanted, "two hits share memory"
        assert trees.digest(bench.cache().get(key)) == wanted, "the store holds what a caller wrote"
        assert encode.calls == 1

    @promise(Level.L1, "What an encoder raises reaches its caller unchanged, and the next one tries again")
    def test_an_encoders_error_is_the_callers(self, bench: CacheBench) -> None:
        cache, key, error = bench.cache(), bench.key(), _EncodeFailedError("out of memory")

        def fails() -> object:
            raise error

        for _ in range(2):
            with pytest.raises(_EncodeFailedError) as caught:
                cache.get_or_encode(key, fails)
            assert caught.value is error
        assert bench.other().get(key, NOTHING) is NOTHING
        encode = Encoder()
        assert trees.digest(cache.get_or_encode(key, encode)) == encode.digest
        assert encode.calls == 1

    @promise(Level.L2, "What cannot be carried bit for bit is given to its caller, and not kept")
    def test_what_cannot_be_carried_is_not_kept(self, bench: CacheBench) -> None:
        conn = bench.conn()
        cache, key, calls = bench.cache(conn), bench.key(), []

        def encode() -> object:
            calls.append(object())
            return {"embeds": calls[-1]}

        for number in range(2):
            assert cache.get_or_encode(key, encode) == {"embeds": calls[number]}
        assert len(calls) == 2
        assert bench.other().get(key, NOTHING) is NOTHING
        assert conn.told("cache_trouble"), "nobody was told"

    @promise(Level.L2, "Counters and events say what happened: hits by tier, misses, encodings, bytes")
    def test_counters_and_events_say_what_happened(self, bench: CacheBench) -> None:
        ours, theirs = bench.conn(), bench.conn(1)
        first, second = bench.cache(ours), bench.cache(theirs)
        key, encode = bench.key(), Encoder()
        assert first.get(key) is None
        for cache in (first, first, second, second, second):
            cache.get_or_encode(key, encode)
        first.get_or_encode(None, encode)
        one, other = first.counters(), second.counters()
        assert (one.hits_memory, one.hits_store, one.misses, one.encodes) == (1, 0, 2, 2), one
        assert (other.hits_memory, other.hits_store, other.misses, other.encodes) == (2, 1, 0, 0), other
        for counters in (one, other):
            assert (counters.waits, counters.takeovers, counters.trouble, counters.evicted) == (0, 0, 0, 0), counters
        assert one.bytes_memory == other.bytes_memory > 0
        assert (one.bytes_store_written, one.bytes_store_read) == (one.bytes_memory, 0), one
        assert (other.bytes_store_written, other.bytes_store_read) == (0, one.bytes_memory), other
        told = [(event.name, event.path) for event in ours.seen]
        assert told == [
            ("cache_miss", None),
            ("cache_miss", None),
            ("cache_stored", "store"),
            ("cache_hit", "memory"),
        ]
        assert [(event.name, event.path) for event in theirs.seen] == [
            ("cache_hit", "store"),
            ("cache_hit", "memory"),
            ("cache_hit", "memory"),
        ]
        said = repr([event.fields() for event in (*ours.seen, *theirs.seen)])
        assert "red fox" not in said, "an event shows what a user wrote"

    @promise(Level.L1, "A closed cache encodes, and forgets its memory")
    def test_a_closed_cache_encodes(self, bench: CacheBench) -> None:
        cache, key, encode = bench.cache(), bench.key(), Encoder()
        cache.get_or_encode(key, encode)
        cache.close()
        cache.close()
        assert trees.digest(cache.get_or_encode(key, encode)) == encode.digest
        assert encode.calls == 2
        assert cache.counters().bytes_memory == 0

    @promise(Level.L1, "What one process encoded another one does not", requires=(Capability.PROCESSES,))
    def test_another_process_hits(self, bench: CacheBench, tmp_path: Any) -> None:
        begun = tmp_path / "begun"
        asked: dict[str, Any] = {
            "word": bench.word,
            "prompt": "of another",
            "begun": str(begun),
            "first_s": 0,
            "hold_s": 0,
        }
        theirs = bench.peer().do("ask", **asked, settings={})
        encode = Encoder()
        assert trees.digest(bench.cache().get_or_encode(bench.key(prompt="of another"), encode)) == theirs["digest"]
        assert encode.calls == 0
        ours = trees.digest(bench.cache().get_or_encode(bench.key(prompt="of ours"), encode))
        found = bench.peer().do("ask", **{**asked, "prompt": "of ours"}, settings={})
        assert (found["digest"], found["encodes"], found["hits_store"]) == (ours, 0, 1)
