"""Single flight: who leads, who waits, who takes over, and that nothing is left of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonrelay.cache.flight import Lead, SingleFlight, Waited
from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import ClosedError, ConfigError, TransferFailed
from moonrelay.relay.base import Relay
from moonrelay.relay.faulty import Fault, FaultyRelay, Scripted
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.memory import MemoryRelay

DIGEST = "ab" * 32
PREFIX = "ns/cache"
DEAD_S = 1.0


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, SystemClock())


@pytest.fixture(params=["memory", "local"])
def relay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Relay]:
    made: Relay = (
        MemoryRelay(StoreConfig(url=None))
        if request.param == "memory"
        else LocalRelay(StoreConfig(url=f"local://{tmp_path}/relay", capacity_bytes=1 << 20))
    )
    made.start()
    yield made
    made.close()


@pytest.fixture
def flights(relay: Relay) -> Iterator[Callable[..., SingleFlight]]:
    """Make single flights, each as in a process of its own."""
    made: list[SingleFlight] = []

    def make(clock: ManualClock | SystemClock | None = None, on: Relay | None = None) -> SingleFlight:
        made.append(SingleFlight(on or relay, PREFIX, clock or SystemClock(), beat_s=0.05, dead_after_s=DEAD_S))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "moonrelay-cache-beat"]


def led(outcome: Lead | Waited) -> Lead:
    assert isinstance(outcome, Lead)
    return outcome


class Asked:
    """One who enters on a thread of its own."""

    def __init__(self, flight: SingleFlight, digest: str = DIGEST, deadline: Deadline | None = None) -> None:
        self.outcome: Lead | Waited | Exception | None = None

        def ask() -> None:
            try:
                self.outcome = flight.enter(digest, deadline or soon())
            except Exception as error:
                self.outcome = error

        self.thread = threading.Thread(target=ask)
        self.thread.start()

    def waits(self, seconds: float = 0.1) -> bool:
        self.thread.join(seconds)
        return self.thread.is_alive()

    def got(self) -> Lead | Waited:
        self.thread.join(20)
        assert isinstance(self.outcome, (Lead, Waited)), self.outcome
        return self.outcome


def test_one_leads_and_nothing_is_left(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    flight = flights()
    for _ in range(3):
        with led(flight.enter(DIGEST, soon())) as lead:
            assert lead.epoch == 0
            assert lead.stands()
            assert relay.keys(PREFIX, soon())
        lead.finish()
        assert not lead.stands()
        assert relay.keys("", soon()) == []


def test_others_wait_until_the_lead_has_finished(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    lead = led(flights().enter(DIGEST, soon()))
    asked = [Asked(flights()) for _ in range(4)]
    assert all(one.waits() for one in asked)
    other = led(flights().enter("cd" * 32, soon()))
    lead.finish()
    assert [one.got() for one in asked] == [Waited(finished=True)] * 4
    assert other.stands()
    other.finish()
    assert relay.keys("", soon()) == []


def test_threads_of_one_process_wait_without_the_store(flights: Callable[..., SingleFlight]) -> None:
    inner = MemoryRelay(StoreConfig(url=None))
    inner.start()
    script = [Scripted(Fault.NONE, calls=("put_if_absent",))] + [Scripted(Fault.FAIL, calls=("get_bytes",))] * 5
    flight = SingleFlight(
        FaultyRelay(StoreConfig(url=None), inner=inner, faults=script), PREFIX, SystemClock(), beat_s=5, dead_after_s=30
    )
    lead = led(flight.enter(DIGEST, soon()))
    asked = [Asked(flight) for _ in range(4)]
    assert all(one.waits(0.05) for one in asked)
    lead.finish()
    assert [one.got() for one in asked] == [Waited(finished=True)] * 4
    flight.close()


def test_a_waiter_leaves_at_its_deadline(flights: Callable[..., SingleFlight]) -> None:
    first = flights()
    lead = led(first.enter(DIGEST, soon()))
    assert flights().enter(DIGEST, soon(0.2)) == Waited(finished=False)
    assert first.enter(DIGEST, soon(0.2)) == Waited(finished=False)
    assert lead.stands()
    lead.finish()


def test_when_the_thread_that_asks_gives_up_another_asks_in_its_place(flights: Callable[..., SingleFlight]) -> None:
    lead = led(flights().enter(DIGEST, soon()))
    here = flights()
    short = Asked(here, deadline=soon(0.3))
    assert short.waits(0.05)
    long = Asked(here)
    assert short.got() == Waited(finished=False)
    assert long.waits()
    lead.finish()
    assert long.got() == Waited(finished=True)


def test_a_slow_lead_that_beats_is_not_taken_over(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    lead = led(flights().enter(DIGEST, soon()))
    asked = Asked(flights())
    assert asked.waits(2.5 * DEAD_S)
    assert lead.stands()
    lead.finish()
    assert asked.got() == Waited(finished=True)
    assert relay.keys("", soon()) == []


def die(flight: SingleFlight) -> None:
    """Let a process's leads give no more signs of life, as if it had been killed or stopped."""
    with flight._changed:
        flight._beats = dict.fromkeys(flight._beats, -1)


def test_a_dead_lead_is_taken_over_by_one_and_learns_it(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    dead = flights()
    lead = led(dead.enter(DIGEST, soon()))
    die(dead)
    asked = [Asked(flights()) for _ in range(3)]
    done: list[Lead] = []
    until = soon()
    while not (leading := [one for one in asked if not one.thread.is_alive()]):
        assert not until.expired
        threading.Event().wait(0.02)
    assert len(leading) == 1
    done.append(led(leading[0].got()))
    assert done[0].epoch == 1
    assert done[0].stands()
    assert not lead.stands()
    lead.finish()  # late: it ends nothing
    assert done[0].stands()
    assert all(one.waits(0.05) for one in asked if one not in leading)
    done[0].finish()
    assert [one.got() for one in asked if one not in leading] == [Waited(finished=True)] * 2
    assert relay.keys("", soon()) == []


def test_a_lead_that_wakes_up_after_everything_leaves_nothing(
    relay: Relay, flights: Callable[..., SingleFlight]
) -> None:
    stopped = flights()
    lead = led(stopped.enter(DIGEST, soon()))
    die(stopped)
    led(Asked(flights()).got()).finish()
    assert relay.keys("", soon()) == []
    stopped._beat(lead, 0)
    assert relay.keys("", soon()) == []
    again = led(flights().enter(DIGEST, soon()))
    lead.finish()
    assert again.stands()
    again.finish()
    assert relay.keys("", soon()) == []


def test_what_one_left_that_died_while_it_finished_is_removed(
    relay: Relay, flights: Callable[..., SingleFlight]
) -> None:
    dead = flights()
    lead = led(dead.enter(DIGEST, soon()))
    stale = relay.get_bytes(f"{PREFIX}/f/{DIGEST}", soon())
    assert stale is not None
    dead._relay = MemoryRelay(StoreConfig(url=None))  # its removal reaches nobody
    dead._relay.start()
    lead.finish()
    other = SingleFlight(relay, PREFIX, SystemClock(), beat_s=0.05, dead_after_s=DEAD_S)
    end = dead._relay.keys("", soon())
    assert end == []
    outcome = led(other.enter(DIGEST, soon()))
    assert outcome.epoch == 1
    outcome.finish()
    assert relay.keys("", soon()) == []
    # And with the record of its end, but with its head still there.
    third = led(other.enter(DIGEST, soon()))
    relay.put_if_absent(f"{PREFIX}/f/{third.flight}/1", b"\x83\xa1v\x01\xa2by\xb00000000000000000\xa4ends\xc3", soon())
    die(other)
    assert flights().enter(DIGEST, soon()) == Waited(finished=True)
    assert relay.keys("", soon()) == []
    other.close()


def test_dead_or_alive_is_reckoned_on_the_waiters_clock(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    dead = flights()
    led(dead.enter(DIGEST, soon()))
    die(dead)
    clock = ManualClock()
    asked = Asked(flights(clock), deadline=Deadline(100.0, clock))
    assert asked.waits(0.2)
    for _ in range(40):
        clock.advance(0.1)
        if not asked.waits(0.02):
            break
    assert led(asked.got()).epoch == 1


def test_a_failing_store_is_told_and_nobody_is_left_behind(flights: Callable[..., SingleFlight]) -> None:
    inner = MemoryRelay(StoreConfig(url=None))
    inner.start()
    for fault in (Fault.FAIL, Fault.FAIL_AFTER):
        faulty = FaultyRelay(StoreConfig(url=None), inner=inner, faults=[Scripted(fault, calls=("put_if_absent",))])
        flight = flights(on=faulty)
        with pytest.raises(TransferFailed):
            flight.enter(DIGEST, soon())
        assert inner.keys("", soon()) == []
        lead = led(flight.enter(DIGEST, soon()))
        lead.finish()
        assert inner.keys("", soon()) == []


def test_a_waiting_thread_takes_the_place_of_one_whose_store_failed(flights: Callable[..., SingleFlight]) -> None:
    inner = MemoryRelay(StoreConfig(url=None))
    inner.start()
    lead = led(flights(on=inner).enter(DIGEST, soon()))
    script = [Scripted(Fault.NONE, calls=("get_bytes",))] * 3 + [Scripted(Fault.FAIL, calls=("get_bytes",))]
    here = flights(on=FaultyRelay(StoreConfig(url=None), inner=inner, faults=script))
    asked = [Asked(here), Asked(here)]
    threading.Event().wait(0.5)
    lead.finish()
    for one in asked:
        one.thread.join(20)
    outcomes = sorted((type(one.outcome).__name__ for one in asked), reverse=True)
    assert outcomes == ["Waited", "TransferFailed"]


def test_close_ends_what_this_process_leads_and_waits_for(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    first, second = flights(), flights()
    lead = led(first.enter(DIGEST, soon()))
    asked, local = Asked(second), Asked(first)
    assert asked.waits()
    second.close()
    assert asked.got() == Waited(finished=False)
    first.close()
    first.close()
    assert isinstance(local.got(), Waited)
    assert not lead.stands()
    assert relay.keys("", soon()) == []
    with pytest.raises(ClosedError):
        first.enter(DIGEST, soon())


def test_damaged_records_stop_nobody(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    relay.put_if_absent(f"{PREFIX}/f/{DIGEST}", b"junk", soon())
    lead = led(flights().enter(DIGEST, soon()))
    relay.put_if_absent(f"{PREFIX}/f/{lead.flight}/1", b"junk", soon())
    assert not lead.stands()
    outcome = led(flights().enter(DIGEST, soon()))
    assert outcome.epoch == 2
    outcome.finish()
    lead.finish()
    assert relay.keys("", soon()) == []


def test_bad_arguments_are_named(relay: Relay) -> None:
    with pytest.raises(ConfigError):
        SingleFlight(relay, PREFIX, SystemClock(), beat_s=2.0, dead_after_s=3.0)
    with pytest.raises(ConfigError):
        SingleFlight(relay, PREFIX, SystemClock()).enter("not hex", soon())


def test_many_threads_of_many_processes_lead_one_at_a_time(relay: Relay, flights: Callable[..., SingleFlight]) -> None:
    made = [flights() for _ in range(4)]
    leading = threading.Semaphore(1)
    counts: list[str] = []

    def work(me: int) -> None:
        for _ in range(10):
            outcome = made[me % 4].enter(DIGEST, soon())
            if isinstance(outcome, Lead):
                with outcome:
                    counts.append("led" if leading.acquire(blocking=False) else "two at once")
                    leading.release()
            else:
                counts.append("waited" if outcome.finished else "late")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 80
    assert set(counts) <= {"led", "waited"}
    assert relay.keys("", soon()) == []
