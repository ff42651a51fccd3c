"""Sides that are killed, stopped, or full: a dead peer is an error in time, and nothing of it stays.

Owns the points at which a side dies or stands still. What a killed process held is looked for around the code under
test, after what the deployment does at intervals (`AdapterGround.sweep`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.faults import SLOW_S, receive
from moonrelay_conformance.suites.adapter.leaks import Outside, assert_nothing_left, left_outside
from moonrelay_conformance.suites.adapter.leases import passed, refused
from moonrelay_conformance.suites.adapter.stage import (
    PATIENT,
    SETTLE_S,
    Actor,
    Cast,
    Sent,
    Stage,
    answer_of,
    bytes_of,
    outcome,
    timed,
    until,
)
from moonrelay_conformance.suites.base import promise

_SIZE: Final = 256 << 10
#: Takes long enough to be interrupted.
_LARGE: Final = 48 << 20
#: So long after its order a read of it is under way.
READING_S: Final = 0.03
#: Deadline of a call on a peer that is gone.
GONE_S: Final = 8.0
#: Deadline of a reader that has to wait for the claim of one that is gone to lapse.
LAPSE_S: Final = 15.0
#: Within this long the first of several chunks are seen in the store, where they are put there one by one ...
RELAYED_S: Final = 10.0
#: ... and all that come are there when no more has come for this long.
QUIET_S: Final = 0.4


def _in_time(act: Callable[[], object], within_s: float) -> str:
    """Run what depends on a dead peer; fail where it hangs or ends in an untyped error."""
    observed, took_s = timed(act)
    assert observed != "hang", f"a call on a dead peer must end by its deadline of {within_s} s, and hangs"
    assert took_s <= within_s + SLOW_S, f"a call on a dead peer took {took_s:.1f} s, its deadline was {within_s} s"
    assert observed == "ok" or observed.startswith("refused:"), f"a dead peer must be a typed error, not {observed}"
    return observed


class DeadProducerTests(AdapterSuite):
    """The producer is killed or stands still."""

    @promise(Level.L3, "A payload whose producer was killed before it was claimed is an error in time, or delivered")
    def test_a_dead_producer_is_an_error_not_a_hang(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route)
        sent = sides.producer.publish(bytes_of(_SIZE, 50))
        sides.producer.kill()
        observed = receive(sides.consumer, sent, timeout_s=GONE_S)
        if observed != "ok":
            refused(observed, "peer_lost", "transfer_timeout", "transfer_failed", "lease_lost")
        left = stage.settle(sides.consumer)
        assert not left, f"after its producer was killed, {left}"

    @pytest.mark.parametrize("point", ["claimed", "reading", "between-chunks"])
    @promise(
        Level.L3,
        "A producer that is killed while its payload is read is an error in time, never short or wrong bytes",
        requires=[Capability.CLAIM, Capability.CHUNKED, Capability.P2P],
    )
    def test_a_producer_killed_while_it_is_read_is_an_error_not_a_hang(self, stage: Stage, point: str) -> None:
        sides = stage.cast("p2p")
        producer, consumer = sides.producer, sides.consumer
        if point == "between-chunks":
            sent = producer.open(bytes_of(_SIZE, 51), num_chunks=3)
            producer.ready(sent, 0)
            claim = consumer.claim(sent)
            assert consumer.next_chunk(claim) == (0, sent.chunk_digests[0])
            producer.kill()
            observed = _in_time(lambda: consumer.next_chunk(claim, timeout_s=GONE_S), GONE_S)
            assert observed != "ok", "a chunk that its producer never finished was delivered"
        else:
            sent = producer.publish(bytes_of(_LARGE, 52))
            claim = consumer.claim(sent)
            if point == "reading":
                consumer.send("read", name=claim, timeout_s=10.0)
                passed(READING_S)
                producer.kill()
                observed, digest = answer_of(consumer, answer_s=10.0)
                _not_wrong(observed, digest, sent)
            else:
                producer.kill()
                got: list[str] = []
                observed = _in_time(lambda: got.append(consumer.read(claim, timeout_s=GONE_S)), GONE_S)
                _not_wrong(observed, "".join(got), sent)
        outcome(lambda: consumer.nack(claim))
        consumer.drop(claim)
        left = stage.settle(consumer)
        assert not left, f"after its producer was killed, {left}"

    @promise(
        Level.L3,
        "What was relayed outlives its producer",
        requires=[Capability.STORE, Capability.SHARED_READERS],
    )
    def test_a_relayed_payload_outlives_its_producer(self, stage: Stage) -> None:
        sides = stage.cast("store")
        sent = sides.producer.publish(bytes_of(_SIZE, 53), lease="shared", readers=2)
        # That one reader has it shows that it was relayed whole.
        assert receive(sides("consumer2"), sent, timeout_s=20.0) == "ok"
        sides.producer.kill()
        assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a relayed payload died with its producer"
        refused(receive(sides.consumer, sent, timeout_s=3.0), "lease_lost")

    @promise(
        Level.L3,
        "A payload of which the producer had relayed a part only is never delivered",
        requires=[Capability.STORE, Capability.CHUNKED],
    )
    def test_a_payload_relayed_in_part_is_never_delivered(self, stage: Stage) -> None:
        sides = stage.cast("store")
        before = frozenset(stage.ground.store_keys())
        sent = sides.producer.open(bytes_of(_SIZE, 54), num_chunks=8)
        sides.producer.ready(sent, 0, 1, 2, 3)
        # Killed at once it might have relayed nothing.
        _relayed(stage, before)
        sides.producer.kill()
        observed = receive(sides.consumer, sent, timeout_s=6.0)
        assert observed != "ok", "4 of 8 chunks were delivered as the payload"

    @promise(Level.L3, "A producer that stands still is an error by the reader's deadline, and nothing is lost")
    def test_a_stopped_producer_is_an_error_not_a_hang(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route)
        # Stopped at once: on the store's route the payload may be on its way.
        sent = sides.producer.publish(bytes_of(_SIZE, 55))
        sides.producer.stop()
        sides.consumer.process  # noqa: B018 - starts it: a heavy host's imports are not the call's time
        observed = _in_time(lambda: sides.consumer.takes(sent, timeout_s=3.0), 3.0)
        sides.producer.go_on()
        if observed != "ok":
            refused(observed, "peer_lost", "transfer_timeout", "transfer_failed", "lease_held")
            assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a producer that stood still lost a payload"

    @promise(Level.L3, "A producer that stands still for a moment is waited for")
    def test_a_short_stop_of_the_producer_is_waited_for(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        sent = sides.producer.publish(bytes_of(_SIZE, 56))
        sides.producer.stop()
        sides.consumer.send("receive", ticket=sent.ticket, timeout_s=15.0)
        passed(0.5)
        sides.producer.go_on()
        assert answer_of(sides.consumer) == ("ok", sent.digest), "a short stop of its producer lost a payload"


class DeadConsumerTests(AdapterSuite):
    """The consumer is killed or stands still."""

    @pytest.mark.parametrize("point", ["reading", "between-chunks", "read"])
    @promise(
        Level.L3,
        "A payload whose reader was killed before its ack is another reader's",
        requires=[Capability.CLAIM, Capability.RESUME],
    )
    def test_a_killed_reader_does_not_keep_the_payload(self, stage: Stage, route: str, point: str) -> None:
        sides = stage.cast(route)
        producer, reader = sides.producer, sides("consumer2")
        stage.acquaint(producer, sides.consumer)
        before = Outside.look(stage)
        # Where nothing is chunked, the reader is killed before it has read anything.
        chunked = point == "between-chunks" and stage.supports(Capability.CHUNKED)
        if chunked:
            sent = producer.open(bytes_of(_SIZE, 57), num_chunks=3)
            producer.ready(sent, 0)
        else:
            sent = producer.publish(bytes_of(_LARGE if point == "reading" else _SIZE, 57))
        claim = reader.claim(sent)
        if chunked:
            assert reader.next_chunk(claim) == (0, sent.chunk_digests[0])
        elif point == "reading":
            reader.send("read", name=claim, timeout_s=10.0)
            passed(READING_S)
        elif point == "read":
            assert reader.read(claim) == sent.digest
        reader.kill()
        if chunked:
            assert outcome(lambda: producer.ready(sent, 1, 2)) == "ok", "a killed reader took the payload with it"
        assert receive(sides.consumer, sent, timeout_s=LAPSE_S) == "ok", "a killed reader took the payload with it"
        if chunked:
            producer.drop(sent.name)
        assert_nothing_left(stage, [producer, sides.consumer], before, "after its reader was killed")

    @promise(
        Level.L3,
        "A reader that stood still past its claim is fenced: its ack is refused, another one has the payload",
        requires=[Capability.CLAIM, Capability.RESUME, Capability.P2P],
    )
    def test_a_reader_stopped_past_its_claim_is_fenced(self, stage: Stage) -> None:
        sides = stage.cast("p2p")
        sent, sleeper = sides.producer.publish(bytes_of(_SIZE, 58)), sides("consumer2")
        claim = sleeper.claim(sent)
        assert sleeper.read(claim) == sent.digest
        sleeper.stop()
        assert receive(sides.consumer, sent, timeout_s=LAPSE_S) == "ok", "a reader that stands still keeps the payload"
        sleeper.go_on()
        observed = outcome(lambda: sleeper.ack(claim, timeout_s=GONE_S))
        refused(observed, "lease_lost")
        outcome(lambda: sleeper.nack(claim))
        sleeper.drop(claim)


class WreckTests(AdapterSuite):
    """What is left of a killed process, and what happens when there is no room."""

    @promise(Level.L3, "What a killed process held is cleared")
    def test_a_killed_process_leaves_nothing_behind(self, stage: Stage, route: str) -> None:
        stage.acquaint(stage.cast(route).producer, stage.cast(route).consumer)
        before = Outside.look(stage)
        sides = stage.cast(route)
        # Its life is over soon: until then what was relayed is meant to outlive its producer.
        ttl = {"ttl_s": 1.0} if stage.supports(Capability.TTL) else {}
        sides("producer2").publish(bytes_of(_SIZE, 59), **ttl)
        sides("producer2").kill()
        found = left_outside(stage, before, SETTLE_S)
        assert not found, f"a killed process left {found}"

    @promise(
        Level.L3,
        "A full pool is back-pressure or a typed refusal: nothing is lost, small requests continue, it recovers",
        requires=[Capability.CAPACITY],
    )
    def test_a_full_pool_loses_nothing_and_recovers(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, {**PATIENT, "pool_bytes": 2 << 20})
        for turn in range(2):
            sent = _fill(sides, turn)
            small: list[Sent] = []
            observed = outcome(lambda small=small: small.append(sides.producer.publish()))  # type: ignore[misc]
            if observed != "ok":
                refused(observed, "capacity_error")
            told = [_taken(sides.consumer, one) for one in (*sent, *small)]
            lost = [one for one in told if one not in ("ok", "refused:capacity_error")]
            assert not lost, (
                f"{len(lost)} of {len(told)} payloads that were accepted by a full pool were lost: {', '.join(lost)}"
            )
            left = stage.settle(sides.producer, sides.consumer)
            assert not left, f"a pool that was full does not recover: {left}"
            sides.consumer.takes(sides.producer.publish(bytes_of(_SIZE, 1)))


def _relayed(stage: Stage, before: frozenset[str]) -> None:
    """Wait until the store has more than before, and gets no more; who relays whole payloads only shows nothing."""
    seen, since = before, time.monotonic()

    def rests() -> bool:
        nonlocal seen, since
        now = frozenset(stage.ground.store_keys())
        if now != seen:
            seen, since = now, time.monotonic()
        return bool(seen - before) and time.monotonic() - since >= QUIET_S

    until(rests, RELAYED_S)


def _fill(sides: Cast, turn: int) -> list[Sent]:
    """Publish twice what fits; return what was accepted."""
    accepted: list[Sent] = []
    for number in range(8):
        observed = outcome(
            lambda number=number: accepted.append(sides.producer.publish(bytes_of(512 << 10, 100 * turn + number)))  # type: ignore[misc]
        )
        if observed != "ok":
            refused(observed, "capacity_error")
    assert accepted, "an empty pool accepted nothing"
    return accepted


def _taken(consumer: Actor, sent: Sent) -> str:
    """Take a payload over, a second time where the first one was refused; return how it ended.

    A claim may lapse, or its producer be silent for too long, while the machine is busy. The payload is still there
    then, so the second time tells what was lost from what was late.
    """
    observed = receive(consumer, sent, timeout_s=LAPSE_S)
    if observed in ("ok", "refused:capacity_error"):
        return observed
    return receive(consumer, sent, timeout_s=LAPSE_S)


def _not_wrong(observed: str, digest: str, sent: Sent) -> None:
    if observed == "ok":
        assert digest == sent.digest, "wrong bytes were delivered while the producer died"
    else:
        refused(observed, "peer_lost", "transfer_failed", "transfer_timeout", "lease_lost", "integrity_error")
