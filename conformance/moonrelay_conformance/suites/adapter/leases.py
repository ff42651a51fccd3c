"""What a lease promises its readers, each promise in a test whose name says what is broken when it fails.

The corpus's scenarios go through the same promises step by step; here are those that need several sides at once, or
that a report should call by their name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.stage import (
    PATIENT,
    Actor,
    Cast,
    Sent,
    Stage,
    answer_of,
    bytes_of,
    outcome,
    refusal,
    until,
)
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.targets.adapter import Ticket

#: Bound of the pool where a test wants freed memory to be used again at once.
TIGHT = 4 << 20
_PAYLOAD = 256 << 10
#: What is left of a ticket's text: nothing, all but its end or its beginning, one half or the other.
_PARTS: Final = (slice(0, 0), slice(None, -1), slice(None, -4), slice(4, None), slice(0, 64), slice(-64, None))


def passed(seconds: float) -> None:
    """Let time pass: lives and claims of this length are over afterwards."""
    threading.Event().wait(seconds)


def refused(observed: str, *codes: str) -> None:
    """Fail unless ``observed`` is a refusal with one of ``codes``."""
    assert observed in [f"refused:{code}" for code in codes], f"expected a refusal {' or '.join(codes)}, saw {observed}"


def overwrite(stage: Stage, producer: Actor) -> None:
    """Use the producer's free memory for other bytes, and give it back."""
    fillers: list[Sent] = []
    for seed in range(900, 920):
        full = refusal(lambda seed=seed: fillers.append(producer.publish(bytes_of(_PAYLOAD, seed))))  # type: ignore[misc]
        if full is not None:
            # There is no free memory left to write over.
            refused(f"refused:{full.code}", "capacity_error")
            break
    for filler in fillers:
        if stage.supports(Capability.ABORT):
            producer.abort(filler)
        elif stage.supports(Capability.RELEASE):
            producer.release(filler)
        else:
            stage.drain(producer, filler)


def tight(stage: Stage, route: str) -> Cast:
    """Return sides whose pool is small, where the adapter's has a bound."""
    return stage.cast(route, PATIENT | ({"pool_bytes": TIGHT} if stage.supports(Capability.CAPACITY) else {}))


def _each(ticket: Ticket, change: Callable[[Any], Any]) -> Ticket:
    """Return a ticket with all its values changed, those in lists and dicts too."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict) and value:
            return {key: changed(one) for key, one in value.items()}
        if isinstance(value, list) and value:
            return [changed(one) for one in value]
        return change(value)

    return {key: changed(value) for key, value in ticket.items()}


def _truncated(part: slice) -> Callable[[Any], Any]:
    return lambda value: value[part] if isinstance(value, str) else None


#: What no ticket says of a payload.
_OTHERS: Final[tuple[Any, ...]] = (None, 7, [], {"a": "b"})


def _always(other: Any) -> Callable[[Any], Any]:
    return lambda _: other


#: How a ticket is damaged on its way: each gives the tickets that arrive. All its values are damaged, since a host may
#: put in some that no reader needs.
DAMAGES: Final[Mapping[str, Callable[[Ticket], list[Ticket]]]] = {
    "missing": lambda ticket: [{}, {f"{key}-of-another": value for key, value in ticket.items()}],
    "truncated": lambda ticket: [_each(ticket, _truncated(part)) for part in _PARTS],
    "replaced": lambda ticket: [
        _each(ticket, lambda value: "A" * len(value) if isinstance(value, str) else "A"),
        _each(ticket, lambda value: value[::-1] if isinstance(value, str) else [value]),
    ],
    "retyped": lambda ticket: [_each(ticket, _always(other)) for other in _OTHERS],
}


class LeaseTests(AdapterSuite):
    """Who may read a payload, how often, and for how long."""

    @promise(Level.L1, "After its ack a payload is delivered to nobody again")
    def test_a_payload_is_never_delivered_twice_after_its_ack(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish()
        sides.consumer.takes(sent)
        for name in ("consumer", "consumer2"):
            refused(outcome(lambda name=name: sides(name).receive(sent, timeout_s=3.0)), "lease_lost")  # type: ignore[misc]

    @promise(Level.L1, "Of several consumers that take one payload at the same time, one gets it")
    def test_a_race_has_one_winner(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        racers = [sides(name) for name in ("consumer", "consumer2", "consumer3")]
        for number in range(3):
            sent = sides.producer.publish(bytes_of(_PAYLOAD, 40 + number))
            for racer in racers:
                racer.send("receive", ticket=sent.ticket, timeout_s=10.0)
            answers = [answer_of(racer) for racer in racers]
            outcomes = [observed for observed, _ in answers]
            got = [digest for observed, digest in answers if observed == "ok"]
            assert outcomes.count("ok") == 1, f"a race must have one winner: {outcomes}"
            assert got == [sent.digest], "the winner of a race was given other bytes than those published"
            for observed in outcomes:
                if observed != "ok":
                    refused(observed, "lease_lost", "lease_held")

    @promise(Level.L1, "Requests in flight together are never swapped, in whatever order they are taken")
    def test_requests_are_never_swapped(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        # The same shapes: nothing but the request tells them apart.
        sent = [sides.producer.publish(bytes_of(4096, 60 + number)) for number in range(8)]
        order = [7, 0, 5, 2, 3, 6, 1, 4]
        for first, second in zip(order[::2], order[1::2], strict=True):
            pairs = ((sides("consumer"), sent[first]), (sides("consumer2"), sent[second]))
            for consumer, one in pairs:
                consumer.send("receive", ticket=one.ticket, timeout_s=20.0)
            for consumer, one in pairs:
                got = consumer.answer()["digest"]
                whose = [number for number, other in enumerate(sent) if other.digest == got]
                assert got == one.digest, f"a request was given the payload of request {whose or 'nobody'}"

    @promise(Level.L1, "The ticket of a consumed payload never yields what lies in its memory now")
    def test_a_used_ticket_never_yields_the_next_payload(self, stage: Stage, route: str) -> None:
        sides = tight(stage, route)
        old = sides.producer.publish(bytes_of(_PAYLOAD, 80))
        sides.consumer.takes(old)
        new = [sides.producer.publish(bytes_of(_PAYLOAD, 81 + number)) for number in range(8)]
        refused(outcome(lambda: sides.consumer.receive(old, timeout_s=3.0)), "lease_lost")
        for one in new:
            sides.consumer.takes(one)

    @pytest.mark.parametrize("damage", sorted(DAMAGES))
    @promise(Level.L1, "A damaged ticket is refused by a typed error, and costs the payload nothing")
    def test_a_damaged_ticket_is_refused(self, stage: Stage, route: str, damage: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish()
        damaged = [ticket for ticket in DAMAGES[damage](sent.ticket) if ticket != sent.ticket]
        assert damaged, f"nothing of the ticket can be {damage}: {sent.ticket}"
        for ticket in damaged:
            other = replace(sent, ticket=ticket)
            observed = outcome(lambda other=other: sides.consumer.receive(other, timeout_s=3.0))  # type: ignore[misc]
            assert observed != "ok", f"something was delivered for a ticket with values {damage}: {ticket}"
            assert observed.startswith("refused:"), f"a damaged ticket must be a typed error, not {observed}"
        sides.consumer.takes(sent)

    @promise(Level.L1, "What was delivered stays as it is while the producer's memory is used again")
    def test_delivered_bytes_do_not_change_afterwards(self, stage: Stage, route: str) -> None:
        sides = tight(stage, route)
        sent = sides.producer.publish(bytes_of(_PAYLOAD, 90))
        name = stage.name("kept")
        assert sides.consumer.receive(sent, name=name)["digest"] == sent.digest
        for seed in range(91, 91 + 2 * TIGHT // _PAYLOAD):
            sides.consumer.takes(sides.producer.publish(bytes_of(_PAYLOAD, seed)))
        changed = sides.consumer.recheck(name) != sent.digest
        sides.consumer.drop(name)
        assert not changed, "what was delivered changed when its memory was used for another payload"

    @promise(Level.L2, "A payload's memory is not used again while it is claimed", requires=[Capability.CLAIM])
    def test_memory_is_not_freed_under_a_reader(self, stage: Stage, route: str) -> None:
        sides = tight(stage, route)
        sent = sides.producer.publish(bytes_of(_PAYLOAD, 95))
        claim = sides.consumer.claim(sent)
        overwrite(stage, sides.producer)
        assert sides.consumer.read(claim) == sent.digest, "memory was freed under a reader before it had read"
        overwrite(stage, sides.producer)
        assert sides.consumer.read(claim) == sent.digest, "memory was freed under a reader that has not acknowledged"
        sides.consumer.ack(claim)
        sides.consumer.drop(claim)

    @promise(
        Level.L2,
        "A payload whose time is over while it is claimed is read right, or not at all",
        requires=[Capability.CLAIM, Capability.TTL],
    )
    def test_expiry_never_frees_memory_under_a_reader(self, stage: Stage, route: str) -> None:
        sides = tight(stage, route)
        for ttl_s in (0.6, 4.0):
            sent, names = sides.producer.publish(bytes_of(_PAYLOAD, 97), ttl_s=ttl_s), list[str]()
            observed = outcome(lambda sent=sent, names=names: names.append(sides.consumer.claim(sent)))  # type: ignore[misc]
            if observed == "ok":
                break
            # The machine was too busy for so short a life.
            refused(observed, "lease_expired", "lease_lost")
        assert observed == "ok", "a payload expired before its time"
        claim = names[0]
        passed(ttl_s + 0.4)
        overwrite(stage, sides.producer)
        got: list[str] = []
        observed = outcome(lambda: got.append(sides.consumer.read(claim)))
        assert got in ([], [sent.digest]), "a reader was given bytes of memory that had been freed at its expiry"
        if observed == "ok":
            outcome(lambda: sides.consumer.ack(claim))
        else:
            refused(observed, "lease_expired", "lease_lost")
            outcome(lambda: sides.consumer.nack(claim))
        sides.consumer.drop(claim)

    @promise(
        Level.L2,
        "A payload that was claimed and not read is another reader's after its nack",
        requires=[Capability.CLAIM],
    )
    def test_a_nack_gives_the_payload_back(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish()
        claim = sides.consumer.claim(sent)
        sides.consumer.read(claim)
        sides.consumer.nack(claim)
        sides.consumer.drop(claim)
        sides("consumer2").takes(sent)

    @promise(Level.L2, "What is claimed is nobody else's until then", requires=[Capability.CLAIM])
    def test_a_claimed_payload_is_nobody_elses(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route)
        sent = sides.producer.publish()
        claim = sides.consumer.claim(sent)
        # Longer than an unrenewed claim lives: the reader lives, so its claim does.
        refused(outcome(lambda: sides("consumer2").receive(sent, timeout_s=2.5)), "lease_held")
        assert sides.consumer.read(claim) == sent.digest
        sides.consumer.ack(claim)
        sides.consumer.drop(claim)

    @promise(Level.L2, "An ack that is repeated counts once", requires=[Capability.CLAIM, Capability.SHARED_READERS])
    def test_an_ack_given_twice_counts_once(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish(lease="shared", readers=2)
        claim = sides.consumer.claim(sent)
        assert sides.consumer.read(claim) == sent.digest
        sides.consumer.ack(claim)
        assert outcome(lambda: sides.consumer.ack(claim)) == "ok", "the second ack of one claim must do nothing"
        sides.consumer.drop(claim)
        sides("consumer2").takes(sent)
        refused(outcome(lambda: sides("consumer3").receive(sent, timeout_s=3.0)), "lease_lost")

    @promise(Level.L2, "A shared payload is delivered to as many as it says", requires=[Capability.SHARED_READERS])
    def test_a_shared_payload_has_as_many_readers_as_it_says(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish(lease="shared", readers=2)
        sides("consumer").takes(sent)
        sides("consumer2").takes(sent)
        refused(outcome(lambda: sides("consumer3").receive(sent, timeout_s=3.0)), "lease_lost")

    @promise(
        Level.L2, "What one reader does to its tensors is not seen by another", requires=[Capability.SHARED_READERS]
    )
    def test_an_edit_by_one_reader_is_not_seen_by_another(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish(lease="shared", readers=2)
        name = stage.name("edited")
        sides.consumer.receive(sent, name=name)
        sides.consumer.do("edit", name=name)
        sides.consumer.drop(name)
        sides("consumer2").takes(sent)

    @promise(Level.L2, "An unread payload's time ends", requires=[Capability.TTL])
    def test_an_unread_payload_expires(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish(bytes_of(_PAYLOAD), ttl_s=0.8)
        passed(1.2)
        refused(outcome(lambda: sides.consumer.receive(sent, timeout_s=5.0)), "lease_expired", "lease_lost")
        left = stage.settle(sides.producer, sides.consumer)
        assert not left, f"a payload whose time is over still holds memory: {left}"

    @promise(Level.L2, "A payload lives as long as it was said to", requires=[Capability.TTL])
    def test_a_payload_does_not_expire_early(self, stage: Stage, route: str) -> None:
        # The side's own default is short, the payload's life is long.
        sides = stage.cast(route, {**PATIENT, "lease_ttl_s": 1.0})
        sent = sides.producer.publish(ttl_s=30.0)
        passed(1.5)
        assert outcome(lambda: sides.consumer.takes(sent)) == "ok", "a payload ended long before its time"

    @promise(Level.L2, "A pinned payload stays until it is released", requires=[Capability.PINNED, Capability.RELEASE])
    def test_a_pinned_payload_stays_until_released(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, {**PATIENT, "lease_ttl_s": 1.0})
        sent = sides.producer.publish(lease="pinned")
        sides.consumer.takes(sent)
        passed(1.5)
        sides.consumer.takes(sent)
        sides.consumer.release(sent)
        sides.consumer.release(sent)
        refused(outcome(lambda: sides.consumer.receive(sent, timeout_s=3.0)), "lease_lost")

    @promise(Level.L2, "A reader is told that, and why, a payload was given up", requires=[Capability.ABORT])
    def test_an_abort_reaches_the_reader(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish()
        sides.producer.abort(sent, "denoise ran out of memory")
        error = refusal(lambda: sides.consumer.receive(sent, timeout_s=5.0))
        assert error is not None, "an aborted payload was delivered"
        assert error.code == "aborted", f"an aborted payload was refused as {error.code}: {error}"
        assert "denoise ran out of memory" in str(error), f"the reader must hear the reason, not {error}"

    @promise(Level.L2, "An acknowledged payload counts as consumed", requires=[Capability.STATUS])
    def test_status_tells_that_a_payload_was_consumed(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish()
        seen: list[str] = []

        def says(*words: str) -> bool:
            seen.append(sides.consumer.status(sent))
            return seen[-1] in words

        assert until(lambda: says("ready"), 10.0), f"a payload that nobody read must be ready, not {seen[-1]}"
        sides.consumer.takes(sent)
        assert until(lambda: says("consumed"), 10.0), f"a payload that was read must be consumed, not {seen[-1]}"
