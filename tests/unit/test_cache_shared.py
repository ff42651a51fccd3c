"""The shared cache tier: what is found, what goes, and what stays whole when a step is the last."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from moonrelay.cache.generations import MAX_SLOTS, Generations, Log, gallop
from moonrelay.cache.shared import SharedStore
from moonrelay.cache.wire import Card, Root, decoded, encoded
from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import ConfigError, TransferFailed
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay
from moonrelay.relay.faulty import Fault, FaultyRelay, Scripted
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.memory import MemoryRelay

PREFIX = "ns/cache"
CAPACITY = 64_000
SHARE = CAPACITY // 8


def soon() -> Deadline:
    return Deadline(20.0, SystemClock())


def digest(i: int) -> str:
    return hashlib.sha256(b"%d" % i).hexdigest()


def data(i: int, nbytes: int = 1000) -> bytes:
    return (b"%06d" % i * (nbytes // 6 + 1))[:nbytes]


def put(store: SharedStore, i: int, nbytes: int = 1000, content: bytes | None = None) -> bool:
    raw = data(i, nbytes) if content is None else content
    block = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
    quiet: list[int] = []
    half = len(raw) // 2
    base = ctypes.addressof(block)
    parts = [Extent(base, half), Extent(base + half, len(raw) - half)]
    try:
        return store.put(digest(i), parts, len(raw), {"role": f"r{i}"}, soon(), on_quiet=lambda: quiet.append(1))
    finally:
        assert quiet == [1]


def got(store: SharedStore, i: int) -> bytes | None:
    hit = store.get(digest(i), soon())
    return None if hit is None else bytes(hit.data)


@pytest.fixture(params=["memory", "local"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    made: Relay = (
        MemoryRelay(StoreConfig(url=None, capacity_bytes=1 << 20))
        if request.param == "memory"
        else LocalRelay(StoreConfig(url=f"local://{tmp_path}/relay", capacity_bytes=1 << 20))
    )
    made.start()
    yield made
    made.close()


class Heard:
    """A store, and what it told."""

    def __init__(self, relay: Relay, capacity: int = CAPACITY, **settings: int) -> None:
        self.trouble: list[str] = []
        self.evicted: list[tuple[int, int]] = []
        self.clock = ManualClock()
        self.store = SharedStore(
            relay,
            PREFIX,
            capacity,
            self.clock,
            on_trouble=self.trouble.append,
            on_evicted=lambda entries, nbytes: self.evicted.append((entries, nbytes)),
            **settings,
        )


def bytes_under(relay: Relay) -> int:
    return sum(len(relay.get_bytes(key, soon()) or b"") for key in relay.keys(f"{PREFIX}/", soon()))


def test_what_was_put_comes_back_in_memory_of_its_own(relay: Relay) -> None:
    heard, other = Heard(relay), Heard(relay)
    assert got(heard.store, 1) is None
    assert not heard.store.contains(digest(1), soon())
    assert put(heard.store, 1)
    assert other.store.contains(digest(1), soon())
    first, second = (other.store.get(digest(1), soon()) for _ in range(2))
    assert first is not None
    assert second is not None
    first.data[:4] = b"gone"
    assert bytes(second.data) == data(1)
    assert got(heard.store, 1) == data(1)
    assert heard.trouble == other.trouble == []


def test_a_second_put_of_the_same_entry_costs_nothing(relay: Relay) -> None:
    heard = Heard(relay)
    assert put(heard.store, 1)
    before = relay.keys("", soon())
    assert put(heard.store, 1)
    assert relay.keys("", soon()) == before


def test_the_bound_holds_after_every_put_and_the_oldest_go_first(relay: Relay) -> None:
    heard = Heard(relay)
    for i in range(200):
        assert put(heard.store, i)
        if i % 7 == 0:
            marks = sum(1 for key in relay.keys(f"{PREFIX}/", soon()) if "/g" in key or "/x/" in key)
            assert bytes_under(relay) <= CAPACITY + marks + 200
    kept = [i for i in range(200) if got(heard.store, i) is not None]
    assert kept == list(range(kept[0], 200))
    assert 40 <= len(kept) <= 64
    assert sum(entries for entries, _ in heard.evicted) == 200 - len(kept)
    usage = heard.store.usage(soon())
    assert usage.entries == len(kept)
    assert len(kept) * 1000 < usage.nbytes <= usage.capacity_bytes == CAPACITY
    assert usage.generations == 8
    told = list(heard.store.entries(soon()))
    assert sorted(entry.digest for entry in told) == sorted(digest(i) for i in kept)
    assert told[0].label == {"role": "r199"}
    assert told[0].nbytes == 1000


def test_an_entry_that_is_read_and_promoted_stays(relay: Relay) -> None:
    heard = Heard(relay)
    assert put(heard.store, 0)
    promoted = 0
    for i in range(1, 300):
        assert put(heard.store, i)
        hit = heard.store.get(digest(0), soon())
        assert hit is not None, f"lost after {i}"
        heard.clock.advance(2.0)
        if hit.ageing:
            assert heard.store.promote(digest(0), hit, {"role": "r0"}, soon())
            promoted += 1
            assert got(heard.store, 0) == data(0)
    assert 5 <= promoted <= 15
    assert heard.trouble == []


def test_many_who_promote_one_entry_take_little_room(relay: Relay) -> None:
    stores = [Heard(relay) for _ in range(6)]
    for i in range(33):
        assert put(stores[0].store, i)
    hits = [one.store.get(digest(0), soon()) for one in stores]
    before = stores[0].store.usage(soon()).entries
    for one, hit in zip(stores, hits, strict=True):
        assert hit is not None
        assert hit.ageing
        assert one.store.promote(digest(0), hit, {}, soon())
    assert stores[0].store.usage(soon()).entries == before + 1


def test_one_larger_than_a_share_is_not_kept(relay: Relay) -> None:
    heard = Heard(relay)
    assert not put(heard.store, 1, SHARE)
    assert "larger than a share" in heard.trouble[0]
    assert put(heard.store, 2, SHARE - 400)
    assert not [key for key in relay.keys(PREFIX, soon()) if digest(1) in key]


def test_small_entries_are_bounded_by_their_number(monkeypatch: pytest.MonkeyPatch, relay: Relay) -> None:
    assert MAX_SLOTS == 4096
    monkeypatch.setattr("moonrelay.cache.generations.MAX_SLOTS", 5)
    heard = Heard(relay)
    for i in range(100):
        assert put(heard.store, i, 2)
    assert heard.store.usage(soon()).entries <= 40


def test_clear_leaves_no_key_and_the_store_goes_on(relay: Relay) -> None:
    heard, other = Heard(relay), Heard(relay)
    for i in range(100):
        assert put(heard.store, i)
        assert put(other.store, i)
    relay.put_if_absent(f"{PREFIX}/f/abc", b"x", soon())
    relay.put_if_absent("ns/other", b"x", soon())
    other.store.clear(soon())
    assert relay.keys("", soon()) == ["ns/other"]
    assert got(heard.store, 99) is None
    assert heard.store.usage(soon()).entries == 0
    assert put(heard.store, 99)
    assert got(other.store, 99) == data(99)
    heard.store.clear(soon())
    heard.store.clear(soon())
    assert relay.keys("", soon()) == ["ns/other"]


def test_forget_makes_room_for_a_whole_one(relay: Relay) -> None:
    heard = Heard(relay)
    assert put(heard.store, 1, content=b"damaged")
    heard.store.forget(digest(1), soon())
    assert got(heard.store, 1) is None
    assert put(heard.store, 1)
    assert got(heard.store, 1) == data(1)


def test_the_bound_of_the_first_stands_until_clear(relay: Relay) -> None:
    first, second = Heard(relay), Heard(relay, CAPACITY * 4)
    assert put(first.store, 1)
    assert put(second.store, 2)
    assert "until it is cleared" in second.trouble[0]
    assert second.store.usage(soon()).capacity_bytes == CAPACITY
    second.store.clear(soon())
    assert put(second.store, 2)
    assert first.store.usage(soon()).capacity_bytes == CAPACITY * 4


@pytest.mark.parametrize("junk", [b"\xff\xff", b"\x01", msgspec.msgpack.encode({"v": 2, "incarnation": "0" * 16})])
def test_a_root_of_another_version_is_a_complaint_and_no_cache(relay: Relay, junk: bytes) -> None:
    relay.put_if_absent(f"{PREFIX}/root", junk, soon())
    heard = Heard(relay)
    assert got(heard.store, 1) is None
    assert not put(heard.store, 1)
    assert "another version" in heard.trouble[0]
    heard.store.clear(soon())
    assert relay.keys("", soon()) == []
    assert put(heard.store, 1)


@pytest.mark.parametrize("junk", [b"\xff\xff", b"\x80", b"\x84\xa1v\x02\xaageneration\x00\xa6object\xa0\xa6nbytes\x01"])
def test_a_malformed_card_is_a_miss_and_is_replaced(relay: Relay, junk: bytes) -> None:
    heard = Heard(relay)
    assert put(heard.store, 1)
    (key,) = [key for key in relay.keys(PREFIX, soon()) if "/r/" in key]
    relay.remove([key], soon())
    relay.put_if_absent(key, junk, soon())
    assert got(heard.store, 1) is None
    assert "damaged" in heard.trouble[0]
    assert put(heard.store, 1)
    assert got(heard.store, 1) == data(1)


def test_a_card_without_its_bytes_is_a_miss_and_is_replaced(relay: Relay) -> None:
    heard = Heard(relay)
    assert put(heard.store, 1)
    relay.remove([key for key in relay.keys(PREFIX, soon()) if "/o/" in key], soon())
    assert got(heard.store, 1) is None
    assert put(heard.store, 1)
    assert got(heard.store, 1) == data(1)


def test_a_card_that_lies_about_the_size_is_a_miss(relay: Relay) -> None:
    heard = Heard(relay)
    for nbytes in (999, 1 << 60):
        assert put(heard.store, 1)
        (key,) = [key for key in relay.keys(PREFIX, soon()) if "/r/" in key]
        card = decoded(Card, relay.get_bytes(key, soon()) or b"")
        assert card is not None
        relay.remove([key], soon())
        relay.put_if_absent(key, encoded(msgspec.structs.replace(card, nbytes=nbytes)), soon())
        assert got(heard.store, 1) is None
    assert len(heard.trouble) == 2


def test_a_malformed_slot_closes_its_generation_for_writers(relay: Relay) -> None:
    heard = Heard(relay)
    assert put(heard.store, 1)
    (key,) = [key for key in relay.keys(PREFIX, soon()) if "/l/0/0" in key]
    relay.put_if_absent(key[:-1] + "1", b"\xff", soon())
    for i in range(2, 100):
        assert put(heard.store, i)
    assert got(heard.store, 99) == data(99)
    assert bytes_under(relay) <= CAPACITY + 300


def test_in_a_full_relay_the_oldest_make_room() -> None:
    relay = MemoryRelay(StoreConfig(url=None, capacity_bytes=30_000))
    relay.start()
    heard = Heard(relay)
    assert all(put(heard.store, i) for i in range(60))
    assert heard.evicted
    assert got(heard.store, 59) == data(59)
    assert heard.trouble == []


def test_without_room_an_entry_is_given_up() -> None:
    relay = MemoryRelay(StoreConfig(url=None, capacity_bytes=4000))
    relay.start()
    heard = Heard(relay)
    assert put(heard.store, 1)
    assert not put(heard.store, 2, 5000)
    assert "no room" in heard.trouble[0]
    assert got(heard.store, 1) == data(1)


@pytest.mark.parametrize("call", ["put", "put_if_absent", "get_bytes"])
@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FAIL_AFTER])
@pytest.mark.parametrize("nth", range(12))
def test_a_failing_call_is_told_and_leaves_nothing_half(call: str, fault: Fault, nth: int) -> None:
    inner = MemoryRelay(StoreConfig(url=None, capacity_bytes=1 << 20))
    inner.start()
    plain = Heard(inner)
    assert put(plain.store, 0)
    script = [Scripted(Fault.NONE, calls=(call,))] * nth + [Scripted(fault, calls=(call,))]
    faulty = FaultyRelay(StoreConfig(url=None), inner=inner, faults=script)
    failing = Heard(faulty)
    try:
        kept = put(failing.store, 1)
    except TransferFailed:
        kept = False
    assert got(plain.store, 1) in ((data(1),) if kept else (None, data(1)))
    assert put(plain.store, 1)
    assert got(plain.store, 1) == data(1)
    plain.store.clear(soon())
    assert inner.keys("", soon()) == []


def test_a_get_that_fails_is_told(relay: Relay) -> None:
    plain = Heard(relay)
    assert put(plain.store, 1)
    failing = Heard(FaultyRelay(StoreConfig(url=None), inner=relay, faults=[Fault.FAIL]))
    with pytest.raises(TransferFailed):
        failing.store.get(digest(1), soon())
    assert got(failing.store, 1) == data(1)


def test_threads_that_put_at_once_keep_the_bound(relay: Relay) -> None:
    heard = Heard(relay, 40_000)
    errors: list[BaseException] = []

    def work(me: int) -> None:
        try:
            for i in range(60):
                put(heard.store, me * 20 + i)
                found = got(heard.store, me * 20 + i)
                assert found in (None, data(me * 20 + i))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert bytes_under(relay) <= 40_000 + 1000
    heard.store.clear(soon())
    assert relay.keys("", soon()) == []


def test_bad_arguments_are_named(relay: Relay) -> None:
    for settings in ({"capacity": 0}, {"generations": 1}, {"generations": 33}):
        with pytest.raises(ConfigError):
            Heard(relay, **settings)
    for prefix in ("", "a/", "a b", "x" * 81):
        with pytest.raises(ConfigError):
            SharedStore(relay, prefix, 1000, SystemClock())
    heard = Heard(relay)
    for bad in ("", "xyz", "ABCDEF01", "0" * 129, "../../../etc"):
        with pytest.raises(ConfigError):
            heard.store.get(bad, soon())
    block = (ctypes.c_char * 4)()
    with pytest.raises(ConfigError):
        heard.store.put(digest(1), [Extent(ctypes.addressof(block), 4)], 5, {}, soon())


def test_labels_are_cut_so_that_records_stay_small(relay: Relay) -> None:
    heard = Heard(relay)
    block = (ctypes.c_char * 4)()
    label = {f"key{i}" * 100: "value" * 1000 for i in range(100)}
    assert heard.store.put(digest(1), [Extent(ctypes.addressof(block), 4)], 4, label, soon())
    (entry,) = heard.store.entries(soon())
    assert len(entry.label) <= 8


class Counting(Relay):
    """Counts the calls of the relay inside."""

    scheme = "counting"

    def __init__(self, inner: Relay) -> None:
        self.inner = inner
        self.calls: list[str] = []

    def start(self) -> None:
        self.inner.start()

    @property
    def url(self) -> str:
        return self.inner.url

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        self.calls.append("put")
        self.inner.put(key, parts, deadline, on_quiet=on_quiet)

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        self.calls.append("get")
        return self.inner.get(key, parts, deadline, on_quiet=on_quiet)

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        self.calls.append("put_if_absent")
        return self.inner.put_if_absent(key, value, deadline)

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        self.calls.append("get_bytes")
        return self.inner.get_bytes(key, deadline)

    def remove(self, keys: Sequence[str], deadline: Deadline) -> None:  # type: ignore[override]
        self.calls.append("remove")
        self.inner.remove(keys, deadline)

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        self.calls.append("keys")
        return self.inner.keys(prefix, deadline)

    def close(self) -> None:
        self.inner.close()


def test_a_hit_a_miss_and_a_put_take_few_calls() -> None:
    inner = MemoryRelay(StoreConfig(url=None))
    inner.start()
    relay = Counting(inner)
    heard = Heard(relay)
    for i in range(3):
        assert put(heard.store, i)
    got(heard.store, 0)  # looks for newer generations, once a second
    relay.calls.clear()
    assert got(heard.store, 1) is not None
    assert relay.calls == ["get_bytes", "get"]
    relay.calls.clear()
    assert got(heard.store, 77) is None
    assert relay.calls == ["get_bytes", "get_bytes"]
    relay.calls.clear()
    assert put(heard.store, 3)
    assert sorted(relay.calls) == ["get_bytes"] * 6 + ["put"] + ["put_if_absent"] * 2


def test_gallop_finds_the_last_from_anywhere() -> None:
    for last in range(70):
        for start in range(-1, last + 1):
            asked: list[int] = []

            def stands(i: int, last: int = last, asked: list[int] = asked) -> bool:
                asked.append(i)
                return i <= last

            assert gallop(stands, start) == last
            assert len(asked) <= 2 * (last - start + 2).bit_length() + 1


def test_generations_are_found_by_anybody_however_many_there_were() -> None:
    relay = MemoryRelay(StoreConfig(url=None))
    relay.start()
    generations = Generations(relay, "b")
    assert generations.newest(soon()) is None
    for n in range(2500):
        assert generations.open(n, soon())
        generations.close(n, soon())
        if n % 97 == 0 or n in (31, 32, 33, 1023, 1024, 1025):
            assert Generations(relay, "b").newest(soon()) == n
            assert not generations.takes_entries(max(0, n - 8), soon())
        assert len(relay.keys("", soon())) < 600
    behind = Generations(relay, "b")
    assert behind.newest(soon()) == 2499
    assert not behind.open(2300, soon())
    assert Generations(relay, "b").newest(soon()) == 2499
    relay.remove(generations.marks(2499), soon())
    assert relay.keys("", soon()) == []


def test_a_log_is_joined_at_its_end_and_never_goes_beyond_its_share() -> None:
    relay = MemoryRelay(StoreConfig(url=None))
    relay.start()
    logs = [Log(relay, "b", 0, 10_000) for _ in range(3)]
    taken = 0
    while logs[taken % 3].take(digest(taken), "0" * 15 + str(taken % 10), 100, {}, soon()) is not None:
        taken += 1
    assert taken > 30
    assert all(log.take(digest(5000), "a" * 16, 100, {}, soon()) is None for log in logs)
    tail = Log(relay, "b", 0, 10_000).tail(soon())
    assert tail.slot == taken == logs[0].length(soon())
    assert 9_000 < tail.end <= 10_000


def test_a_writer_that_was_cleared_away_leaves_nothing(relay: Relay) -> None:
    writer, cleaner = Heard(relay), Heard(relay)
    assert put(writer.store, 1)
    cleaner.store.clear(soon())
    assert put(writer.store, 2)
    root = decoded(Root, relay.get_bytes(f"{PREFIX}/root", soon()) or b"")
    assert root is not None
    assert all(
        key.startswith((f"{PREFIX}/root", f"{PREFIX}/{root.incarnation}/")) for key in relay.keys(PREFIX, soon())
    )
    assert got(cleaner.store, 2) == data(2)


def test_a_clear_that_somebody_died_in_is_finished_by_the_next_put() -> None:
    relay = MemoryRelay(StoreConfig(url=None))
    relay.start()
    heard = Heard(relay)
    for i in range(20):
        assert put(heard.store, i)
    root = decoded(Root, relay.get_bytes(f"{PREFIX}/root", soon()) or b"")
    assert root is not None
    relay.put_if_absent(f"{PREFIX}/{root.incarnation}/z", b"\x01", soon())
    fresh = Heard(relay)
    assert put(fresh.store, 5)
    assert not [key for key in relay.keys(PREFIX, soon()) if root.incarnation in key]
    assert got(heard.store, 6) is None
    assert got(heard.store, 5) == data(5)


class Breaking(Counting):
    """Fails where it is told to: at one call of a kind, a removal half-way."""

    def __init__(self, inner: Relay) -> None:
        super().__init__(inner)
        self.breaks: Callable[[str, Sequence[str]], bool] = lambda call, keys: False

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        if self.breaks("get_bytes", [key]):
            message = "injected"
            raise TransferFailed(message)
        return super().get_bytes(key, deadline)

    def remove(self, keys: Sequence[str], deadline: Deadline) -> None:  # type: ignore[override]
        keys = list(keys)
        if self.breaks("remove", keys):
            super().remove(keys[: len(keys) // 2], deadline)
            message = "injected"
            raise TransferFailed(message)
        super().remove(keys, deadline)


@pytest.mark.parametrize("nth", range(20))
def test_a_clear_that_fails_at_any_removal_is_finished_by_a_put_or_a_clear(nth: int) -> None:
    inner = MemoryRelay(StoreConfig(url=None))
    inner.start()
    stale = Heard(inner)
    for i in range(20):
        assert put(stale.store, i)
    breaking = Breaking(inner)
    left = [nth]

    def breaks(call: str, keys: Sequence[str]) -> bool:
        left[0] -= call == "remove"
        return left[0] < 0

    breaking.breaks = breaks
    with contextlib.suppress(TransferFailed):
        Heard(breaking).store.clear(soon())
    assert stale.store.usage(soon()).nbytes <= CAPACITY
    assert put(stale.store, 30)
    other = Heard(inner)
    assert put(other.store, 31)
    assert put(stale.store, 32)
    assert got(other.store, 32) == data(32)
    assert got(stale.store, 31) == data(31)
    other.store.clear(soon())
    assert inner.keys("", soon()) == []


def test_a_writer_that_opens_a_generation_of_a_cleared_store_is_not_believed() -> None:
    inner = MemoryRelay(StoreConfig(url=None))
    inner.start()
    relay = Breaking(inner)
    writer, other = Heard(relay), Heard(inner)
    assert put(writer.store, 1, 6000)
    other.store.clear(soon())
    assert put(other.store, 2)
    relay.breaks = lambda call, keys: keys[0].endswith("/z")
    with pytest.raises(TransferFailed):
        put(writer.store, 3, 6000)  # opens the next generation, and does not come to see that all was cleared
    relay.breaks = lambda call, keys: False
    assert put(writer.store, 4)
    assert got(other.store, 4) == data(4)
    assert got(writer.store, 2) == data(2)
