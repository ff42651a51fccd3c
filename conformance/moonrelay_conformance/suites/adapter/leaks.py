"""What payloads hold is given back: memory, descriptors, threads, mappings, keys in the store, names in shared memory.

Owns the cycles and the looks at what is left; the system, the store and the memory are asked, not the code under test,
but for what only the host can tell (`AdapterSide.in_use`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.sides.probe import Held, leaks
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.leases import passed, refused
from moonrelay_conformance.suites.adapter.stage import (
    PATIENT,
    SETTLE_S,
    Actor,
    Cast,
    Sent,
    Stage,
    bytes_of,
    outcome,
    until,
)
from moonrelay_conformance.suites.base import promise

#: How often a cycle is repeated; what grows by one each time stands out from pools that fill.
CYCLES: Final = 24
#: Cycles in which a host may come to its size first.
WARM_UP: Final = 3
#: A tensor that can be carried, and one thing that cannot be.
_FOREIGN: Final = {
    "dict": [["latents", {"tensor": {"shape": [64], "dtype": "float32", "seed": 3}}], ["hook", {"foreign": "function"}]]
}


@dataclass(frozen=True, slots=True)
class Outside:
    """What lies in the store and in shared memory.

    Attributes:
        keys: Of the store.
        names: Of memory.
    """

    keys: frozenset[str]
    names: frozenset[str]

    @classmethod
    def look(cls, stage: Stage) -> Outside:
        return cls(frozenset(stage.ground.store_keys()), frozenset(stage.ground.memory_names()))

    def beyond(self, before: Outside) -> str:
        """Return what there is more than before; empty where that is nothing."""
        found = []
        for what, now, then in (("keys in the store", self.keys, before.keys), ("names", self.names, before.names)):
            new = sorted(now - then)
            if new:
                found.append(f"{len(new)} {what}, among them {new[0]!r}")
        return "; ".join(found)


def repeat(stage: Stage, sides: Cast, cycle: Callable[[int], None], *, cycles: int = CYCLES) -> None:
    """Repeat a cycle and fail where something grows with the number of cycles, or is left at the end."""
    actors = [sides.producer, sides.consumer]
    stage.acquaint(*actors)
    for number in range(WARM_UP):
        cycle(number)
    left = stage.settle(*actors)
    assert not left, f"after {WARM_UP} cycles, {left}"
    before = Outside.look(stage)
    series: dict[str, list[Held]] = {actor.name: [] for actor in actors}
    for number in range(WARM_UP, WARM_UP + cycles):
        cycle(number)
        for actor in actors:
            series[actor.name].append(actor.process.probe())
    assert_nothing_left(stage, actors, before, f"after {cycles} cycles")
    for name, looks in series.items():
        found = leaks(looks)
        assert not found, f"{name} holds more with every cycle: {'; '.join(found)}"


def assert_nothing_left(stage: Stage, actors: list[Actor], before: Outside, when: str) -> None:
    """Fail unless sides hold nothing, and store and memory are as before, within `SETTLE_S`."""
    left = stage.settle(*actors)
    assert not left, f"{when}, {left}"
    found = left_outside(stage, before, SETTLE_S)
    assert not found, f"{when} there are {found} more than before"


def left_outside(stage: Stage, before: Outside, within_s: float) -> str:
    """Return what store and memory hold beyond ``before`` after sweeps for ``within_s``; empty is nothing."""
    found = ""

    def clean() -> bool:
        nonlocal found
        stage.ground.sweep()
        found = Outside.look(stage).beyond(before)
        return not found

    until(clean, within_s, step_s=0.1)
    return found


class LeakTests(AdapterSuite):
    """Nothing piles up, whatever becomes of a payload."""

    @promise(Level.L1, "Payloads that were published and taken over leave nothing behind")
    def test_delivered_payloads_leave_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        repeat(stage, sides, lambda number: sides.consumer.takes(sides.producer.publish(bytes_of(8192, number))))

    @promise(Level.L1, "Payloads that were refused leave nothing behind")
    def test_a_refusal_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)

        def cycle(_: int) -> None:
            observed = outcome(lambda: sides.producer.publish(_FOREIGN))
            assert observed.startswith("refused:"), (
                f"a function in a payload must be refused by a typed error: {observed}"
            )

        repeat(stage, sides, cycle)
        sides.consumer.takes(sides.producer.publish())

    @promise(
        Level.L2,
        "Payloads that do not fit leave nothing behind",
        requires=[Capability.CAPACITY],
    )
    def test_a_capacity_refusal_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, {**PATIENT, "pool_bytes": 1 << 20})

        def cycle(number: int) -> None:
            sent: list[Sent] = []
            observed = outcome(lambda: sent.append(sides.producer.publish(bytes_of(3 << 20, number))))
            if observed == "ok":
                observed = outcome(lambda: sides.consumer.receive(sent[0], timeout_s=10.0))
            refused(observed, "capacity_error")

        repeat(stage, sides, cycle, cycles=8)
        sides.consumer.takes(sides.producer.publish())

    @promise(Level.L2, "Payloads that were given up leave nothing behind", requires=[Capability.ABORT])
    def test_an_abort_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)

        def cycle(number: int) -> None:
            sent = sides.producer.publish(bytes_of(8192, number))
            sides.producer.abort(sent)
            refused(outcome(lambda: sides.consumer.receive(sent, timeout_s=5.0)), "aborted", "lease_lost")

        repeat(stage, sides, cycle)

    @promise(
        Level.L2,
        "A payload that is given up while it is read, or before it is whole, leaves nothing behind",
        requires=[Capability.ABORT, Capability.CLAIM, Capability.CHUNKED],
    )
    def test_an_abort_in_the_middle_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)

        def cycle(number: int) -> None:
            sent = sides.producer.open(bytes_of(8192, number), num_chunks=4)
            sides.producer.ready(sent, 0)
            claim = sides.consumer.claim(sent)
            if number % 2:
                sides.consumer.next_chunk(claim)
            sides.producer.do("abort", name=sent.name, reason="given up in the middle")
            refused(outcome(lambda: _rest(sides.consumer, claim)), "aborted", "lease_lost")
            outcome(lambda: sides.consumer.nack(claim))
            sides.consumer.drop(claim)
            sides.producer.drop(sent.name)

        repeat(stage, sides, cycle, cycles=12)

    @promise(Level.L2, "Payloads that nobody read in their time leave nothing behind", requires=[Capability.TTL])
    def test_an_expiry_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        stage.acquaint(sides.producer, sides.consumer)
        before = Outside.look(stage)
        for number in range(CYCLES):
            sides.producer.publish(bytes_of(8192, number), ttl_s=0.5)
        passed(0.8)
        assert_nothing_left(stage, [sides.producer, sides.consumer], before, "after all payloads' time")

    @promise(Level.L2, "Claims that are given back leave nothing behind", requires=[Capability.CLAIM])
    def test_a_nack_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)

        def cycle(number: int) -> None:
            sent = sides.producer.publish(bytes_of(8192, number))
            claim = sides.consumer.claim(sent)
            sides.consumer.read(claim)
            sides.consumer.nack(claim)
            sides.consumer.drop(claim)
            sides.consumer.takes(sent)

        repeat(stage, sides, cycle, cycles=12)

    @promise(Level.L2, "A release drops a payload, and leaves nothing behind", requires=[Capability.RELEASE])
    def test_a_release_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)

        def cycle(number: int) -> None:
            sent = sides.producer.publish(bytes_of(8192, number))
            sides.consumer.release(sent)
            refused(outcome(lambda: sides.consumer.receive(sent, timeout_s=3.0)), "lease_lost")

        repeat(stage, sides, cycle, cycles=12)

    @promise(Level.L2, "Registered memory is published without a copy", requires=[Capability.ZERO_COPY, Capability.P2P])
    def test_registered_memory_is_not_copied(self, stage: Stage) -> None:
        sides = stage.cast("p2p", PATIENT)
        before = _staged(sides.producer)
        for number in range(3):
            sides.consumer.takes(sides.producer.publish(bytes_of(1 << 20, number), registered=True))
        assert _staged(sides.producer) == before, "registered memory was copied before it was published"
        # A count that does not see the copies of other memory says nothing about these.
        sides.consumer.takes(sides.producer.publish(bytes_of(1 << 20, 3)))
        assert _staged(sides.producer) > before, (
            "memory that is not registered was published and 'staged' did not grow; it must count every copy"
        )


def _rest(consumer: Actor, claim: str) -> None:
    while consumer.next_chunk(claim, timeout_s=5.0) is not None:
        pass


def _staged(producer: Actor) -> int:
    counters: dict[str, Any] = producer.do("counters")
    assert "staged" in counters, "who declares zero_copy must count its copies as 'staged' (AdapterSide.counters)"
    return int(counters["staged"])
