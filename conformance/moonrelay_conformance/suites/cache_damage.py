"""Damage and trouble: whatever is wrong with an entry is a miss, whatever is wrong with the store fails no request."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import CapacityError, ClosedError, MoonrelayError, PeerLost, TransferFailed, TransferTimeout
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.cache_bench import CacheBench, CacheSuite, Encoder
from moonrelay_conformance.suites.part_between import Conn, flipped

_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "its first bit": flipped(0),
    "its version": flipped(8),
    "its key": flipped(30),
    "its digest": flipped(60),
    "its description": flipped(90),
    "a bit in the middle": lambda raw: flipped(len(raw) // 2)(raw),
    "its last bit": flipped(-1),
    "everything": lambda raw: bytes(len(raw)),
    "its second half": lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2),
}
_ERRORS: tuple[MoonrelayError, ...] = (
    PeerLost("the store is gone"),
    TransferTimeout("the store does not answer"),
    TransferFailed("the store failed"),
    CapacityError("the store is full"),
    ClosedError("the relay is closed"),
)
#: More than a call with ``wait_s`` of half a second may take on a busy machine.
_PATIENCE_S = 30.0


def _encodes(bench: CacheBench, conn: Conn, prompt: str, what: str) -> str:
    """Ask a new cache, and check that it encoded, gave that, and told somebody; return its digest."""
    encode = Encoder()
    cache = bench.cache(conn)
    found = trees.digest(cache.get_or_encode(bench.key(prompt=prompt), encode))
    assert encode.calls == 1, f"{what}: it was taken for a hit"
    assert found == encode.digest, f"{what}: the caller was given something else than was encoded"
    assert conn.told("cache_trouble"), f"{what}: nobody was told"
    assert cache.counters().trouble > 0, f"{what}: it was not counted"
    return found


class CacheDamage(CacheSuite):
    """What goes wrong."""

    @promise(Level.L1, "A damaged entry is a miss and an event, wherever the damage is")
    def test_a_damaged_entry_is_a_miss(self, bench: CacheBench) -> None:
        for what, spoil in _DAMAGES.items():
            key, first = bench.key(prompt=what), Encoder()
            bench.cache().get_or_encode(key, first)
            conn = bench.conn(1)
            conn.between.spoil = spoil
            second = _encodes(bench, conn, what, f"an entry with {what} changed")
            after = bench.cache().get(key)
            assert after is None or trees.digest(after) in (first.digest, second), f"{what}: a third thing is kept"

    @promise(Level.L1, "What was stored for another key is never given, though it be found under this one")
    def test_an_entry_of_another_key_is_never_given(self, bench: CacheBench) -> None:
        ours, theirs = bench.key(prompt="ours"), bench.key(prompt="theirs")
        cache = bench.cache()
        for key in (ours, theirs):
            cache.get_or_encode(key, Encoder())
        conn = bench.conn(1)
        conn.between.mislead = lambda name: name.replace(ours.digest, theirs.digest)
        _encodes(bench, conn, "ours", "an entry of another key")

    @promise(Level.L2, "Records that are damaged or gone are misses")
    def test_damaged_records_are_misses(self, bench: CacheBench) -> None:
        for number, value in enumerate((b"", b"\x00", b"\xff" * 40, None)):
            key, encode = bench.key(prompt=f"{number}"), Encoder()
            bench.cache().get_or_encode(key, encode)
            conn = bench.conn(1)
            conn.between.records = lambda _, found, value=value: value if found else None
            wanted = Encoder()
            found = bench.cache(conn, wait_s=5.0).get_or_encode(key, wanted)
            assert trees.digest(found) in (encode.digest, wanted.digest), f"records that are {value!r}"

    @promise(Level.L1, "A store that is gone fails no request: it encodes, and says so")
    def test_a_store_that_is_gone_fails_no_request(self, bench: CacheBench) -> None:
        for number, error in enumerate(_ERRORS):
            for calls in ((), ("put",), ("get",), ("get_bytes",), ("put_if_absent",)):
                prompt = f"{number} {calls}"
                key = bench.key(prompt=prompt)
                if calls == ("get",):
                    bench.other().get_or_encode(key, Encoder())
                conn = bench.conn()
                conn.between.error, conn.between.failing = error, calls
                _encodes(bench, conn, prompt, f"{type(error).__name__} in {calls or 'every call'}")

    @promise(Level.L2, "After trouble the store is left alone for a while, and then used again")
    def test_the_store_is_used_again_after_trouble(self, bench: CacheBench) -> None:
        conn, other = bench.conn(), bench.other()
        cache = bench.cache(conn, capacity_bytes=0, store_bytes=1 << 20, retry_s=0.3)
        conn.between.error = PeerLost("the store is gone")
        encode = Encoder()
        for _ in range(5):
            cache.get_or_encode(bench.key(), encode)
        assert encode.calls == 5
        told = len(conn.told("cache_trouble"))
        assert told <= 3, f"a store that is gone was complained of {told} times in five calls"
        conn.between.error = None
        deadline = Deadline(_PATIENCE_S, SystemClock())
        while other.get(bench.key()) is None:
            assert not deadline.expired, "the store is back, and is never used again"
            threading.Event().wait(0.1)
            cache.get_or_encode(bench.key(), encode)

    @promise(Level.L3, "A store that does not answer keeps nobody beyond the deadline")
    def test_a_silent_store_keeps_nobody_beyond_the_deadline(self, bench: CacheBench) -> None:
        conn = bench.conn()
        conn.between.stall = True
        deadline = Deadline(_PATIENCE_S, SystemClock())
        encode = Encoder()
        found = bench.cache(conn, wait_s=0.5).get_or_encode(bench.key(), encode)
        assert trees.digest(found) == encode.digest
        assert not deadline.expired, f"wait_s=0.5 became more than {_PATIENCE_S} s"
