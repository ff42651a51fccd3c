"""When a payload counts as an orphan, on a clock that the test moves."""

from __future__ import annotations

import ctypes

import pytest

from moonrelay.clock import Deadline, ManualClock
from moonrelay.config import StoreConfig
from moonrelay.errors import LeaseExpired
from moonrelay.handle import Extent
from moonrelay.relay.memory import MemoryRelay
from moonrelay.relay.records import ClaimToken, RelayedPayload
from moonrelay.relay.sweeper import Sweeper


class AgedRelay(MemoryRelay):
    """A relay that knows how old its objects are."""

    ages: dict[str, float]

    def age_s(self, key: str) -> float | None:
        return self.ages.get(key)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def relay():
    store = AgedRelay(StoreConfig(url=None))
    store.ages = {}
    store.start()
    yield store
    store.close()


@pytest.fixture
def sweeper(relay: AgedRelay, clock: ManualClock) -> Sweeper:
    return Sweeper(relay, "ns", clock, default_ttl_s=100, tombstone_ttl_s=50, claim_grace_s=30)


def store(relay: AgedRelay, clock: ManualClock, name: str, ttl_s: float | None, *, end: bool = True) -> RelayedPayload:
    buffer = (ctypes.c_char * 10)()
    payload = RelayedPayload(relay, name, "p")
    deadline = Deadline(10, clock)
    payload.put_chunk(0, [Extent(ctypes.addressof(buffer), 10)], b"", deadline)
    if end:
        payload.put_end(1, ttl_s, deadline)
    return payload


def names(relay: AgedRelay, clock: ManualClock) -> list[str]:
    return relay.keys("", Deadline(10, clock))


def test_a_payload_lives_its_ttl_then_leaves_a_tombstone_then_nothing(
    relay: AgedRelay, clock: ManualClock, sweeper: Sweeper
) -> None:
    payload = store(relay, clock, "ns/a", 60)
    assert sweeper.sweep() == 0
    clock.advance(59)
    assert sweeper.sweep() == 0
    clock.advance(1)
    assert sweeper.sweep() == 2
    assert names(relay, clock) == ["ns/a/tomb"]
    with pytest.raises(LeaseExpired):
        payload.claim("late", b"", Deadline(10, clock))
    assert sweeper.sweep() == 0
    clock.advance(50)
    assert sweeper.sweep() == 1
    assert names(relay, clock) == []


def test_a_payload_without_end_lives_the_default_and_a_pinned_one_for_ever(
    relay: AgedRelay, clock: ManualClock, sweeper: Sweeper
) -> None:
    store(relay, clock, "ns/unfinished", None, end=False)
    store(relay, clock, "ns/pinned", None)
    sweeper.sweep()
    clock.advance(99)
    assert sweeper.sweep() == 0
    clock.advance(1)
    assert sweeper.sweep() == 1
    sweeper.sweep()
    clock.advance(10_000)
    assert sweeper.sweep() == 1
    assert names(relay, clock) == ["ns/pinned/c/0/0", "ns/pinned/end"]


def test_an_unfinished_payload_lives_while_chunks_are_being_added(
    relay: AgedRelay, clock: ManualClock, sweeper: Sweeper
) -> None:
    payload = store(relay, clock, "ns/p", None, end=False)
    buffer = (ctypes.c_char * 10)()
    for chunk in range(1, 4):
        sweeper.sweep()
        clock.advance(90)
        payload.put_chunk(chunk, [Extent(ctypes.addressof(buffer), 10)], b"", Deadline(10, clock))
    assert sweeper.sweep() == 0
    assert payload.get_end(Deadline(10, clock)) is None
    clock.advance(101)
    assert sweeper.sweep() == 4


def test_ages_count_from_what_the_store_knows(relay: AgedRelay, clock: ManualClock, sweeper: Sweeper) -> None:
    store(relay, clock, "ns/old", 60)
    store(relay, clock, "ns/new", 60)
    relay.ages = {"ns/old/end": 60.0, "ns/old/c/0/0": 61.0}
    assert sweeper.sweep() == 2
    assert names(relay, clock) == ["ns/new/c/0/0", "ns/new/end", "ns/old/tomb"]


def test_a_claim_protects_an_expired_payload_for_a_while(
    relay: AgedRelay, clock: ManualClock, sweeper: Sweeper
) -> None:
    payload = store(relay, clock, "ns/a", 60)
    sweeper.sweep()
    clock.advance(59)
    assert isinstance(payload.claim("r", b"", Deadline(10, clock)), ClaimToken)
    assert sweeper.sweep() == 0
    clock.advance(29)
    assert sweeper.sweep() == 0
    clock.advance(1)
    assert sweeper.sweep() == 3


def test_what_appears_beside_a_tombstone_goes_at_once(relay: AgedRelay, clock: ManualClock, sweeper: Sweeper) -> None:
    payload = store(relay, clock, "ns/a", None)
    payload.tombstone("consumed", Deadline(10, clock))
    assert sweeper.sweep() == 2
    assert names(relay, clock) == ["ns/a/tomb"]


def test_only_payloads_of_the_namespace_are_touched(relay: AgedRelay, clock: ManualClock, sweeper: Sweeper) -> None:
    store(relay, clock, "other/a", 1)
    store(relay, clock, "nsx/a", 1)
    relay.put_if_absent("ns/strange", b"1", Deadline(10, clock))
    sweeper.sweep()
    clock.advance(1000)
    assert sweeper.sweep() == 0
    assert len(names(relay, clock)) == 5


def test_a_broken_end_record_counts_as_none(relay: AgedRelay, clock: ManualClock, sweeper: Sweeper) -> None:
    relay.put_if_absent("ns/a/end", b"\xff", Deadline(10, clock))
    sweeper.sweep()
    clock.advance(100)
    assert sweeper.sweep() == 1


def test_a_payload_seen_again_under_the_same_prefix_starts_anew(
    relay: AgedRelay, clock: ManualClock, sweeper: Sweeper
) -> None:
    payload = store(relay, clock, "ns/a", 60)
    sweeper.sweep()
    clock.advance(50)
    payload.remove_all(1, Deadline(10, clock))
    sweeper.sweep()
    store(relay, clock, "ns/a", 60)
    clock.advance(20)
    assert sweeper.sweep() == 0
