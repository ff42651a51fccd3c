"""Faults of engine, relay and control channel: wrong bytes are never delivered, nothing hangs, nothing is lost.

Owns what is broken and when; the faults themselves are injected by wrappers around the real parts
(`SideSettings.faults`), so the code under test is what runs in production.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.leases import passed, refused
from moonrelay_conformance.suites.adapter.stage import (
    PATIENT,
    Actor,
    Cast,
    Sent,
    Stage,
    answer_of,
    bytes_of,
    timed,
)
from moonrelay_conformance.suites.base import promise

#: A side may need this much longer than a deadline on a busy machine.
SLOW_S: Final = 8.0
#: More than any retry.
MANY: Final = 32
_SIZE: Final = 64 << 10


@contextmanager
def broken(
    stage: Stage, route: str, own: Mapping[str, Mapping[str, Any]], common: Mapping[str, Any] = PATIENT
) -> Iterator[Cast]:
    """Give sides of which those in ``own`` have faults; these are used for this test alone."""
    sides = stage.cast(route, common, {name: {"faults": faults} for name, faults in own.items()})
    try:
        yield sides
    finally:
        stage.retire(*(sides(name) for name in own))


def receive(consumer: Actor, sent: Sent, *, timeout_s: float) -> str:
    """Take a payload over; fail where the bytes are others, the failure is untyped, or the deadline is not kept."""
    got: list[str] = []
    consumer.process  # noqa: B018 - starts it: a heavy host's imports are not the call's time
    observed, took_s = timed(lambda: got.append(consumer.receive(sent, timeout_s=timeout_s)["digest"]))
    assert got in ([], [sent.digest]), "wrong bytes were delivered as a success"
    assert observed == "ok" or observed.startswith("refused:"), f"a fault must end in a typed error, not in {observed}"
    assert took_s <= timeout_s + SLOW_S, f"the answer came after {took_s:.1f} s, its deadline was {timeout_s} s"
    return observed


def typed_or_delivered(observed: str) -> None:
    """Fail where a fault was told as something that it is not: the payload is neither consumed nor expired."""
    assert observed not in ("refused:lease_lost", "refused:lease_expired"), (
        f"a fault on the way must not be told as {observed}: the payload is there"
    )


class EngineFaultTests(AdapterSuite):
    """The transfer engine lies, fails, stalls, and writes late."""

    @pytest.mark.parametrize("fault", ["wrong", "short", "nothing"])
    @promise(
        Level.L3,
        "A transfer that reports success for other bytes is never delivered",
        requires=[Capability.INJECT_ENGINE, Capability.P2P],
    )
    def test_false_success_of_the_engine_is_never_delivered(self, stage: Stage, fault: str) -> None:
        with broken(stage, "p2p", {"consumer2": {"engine": (fault,) * MANY}}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 5))
            observed = receive(sides("consumer2"), sent, timeout_s=10.0)
            assert observed != "ok", "the engine moved nothing right, and yet something was delivered"
            typed_or_delivered(observed)
            # The payload is whole at its producer, and a sound reader gets it.
            assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a lying engine lost the payload"

    @pytest.mark.parametrize("fault", ["wrong", "short", "nothing", "fail", "fail_after"])
    @promise(
        Level.L3,
        "One failure of the engine is retried, or told",
        requires=[Capability.INJECT_ENGINE, Capability.P2P],
    )
    def test_one_failure_of_the_engine_is_retried_or_told(self, stage: Stage, fault: str) -> None:
        with broken(stage, "p2p", {"consumer2": {"engine": (fault,)}}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 6))
            observed = receive(sides("consumer2"), sent, timeout_s=10.0)
            typed_or_delivered(observed)
            if observed != "ok":
                assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "one failed transfer lost the payload"

    @pytest.mark.parametrize("fault", ["fail", "fail_after"])
    @promise(
        Level.L3,
        "An engine that keeps failing is told, and loses nothing",
        requires=[Capability.INJECT_ENGINE, Capability.P2P],
    )
    def test_a_failing_engine_is_an_error_and_loses_nothing(self, stage: Stage, fault: str) -> None:
        with broken(stage, "p2p", {"consumer2": {"engine": (fault,) * MANY}}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 7))
            observed = receive(sides("consumer2"), sent, timeout_s=10.0)
            refused(observed, "transfer_failed", "transfer_timeout")
            left = stage.settle(sides("consumer2"))
            assert not left, f"a failed transfer leaks: {left}"
            assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a failing engine lost the payload"

    @promise(
        Level.L3,
        "A transfer that stalls ends at the reader's deadline",
        requires=[Capability.INJECT_ENGINE, Capability.P2P],
    )
    def test_a_stalled_transfer_is_an_error_not_a_hang(self, stage: Stage) -> None:
        with broken(stage, "p2p", {"consumer2": {"engine": ("stall",) * MANY}}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 8))
            observed = receive(sides("consumer2"), sent, timeout_s=1.0)
            assert observed != "ok", "a transfer that moved nothing was delivered"
            typed_or_delivered(observed)
            assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a stalled transfer lost the payload"

    @promise(
        Level.L3,
        "Bytes that arrive after the deadline do not land in another payload's memory",
        requires=[Capability.INJECT_ENGINE, Capability.P2P],
    )
    def test_late_bytes_never_land_in_another_payload(self, stage: Stage) -> None:
        with broken(stage, "p2p", {"consumer2": {"engine": ("delay:1.5",)}}) as sides:
            late, others = sides.producer.publish(bytes_of(_SIZE, 9)), []
            reader = sides("consumer2")
            observed = receive(reader, late, timeout_s=0.4)
            for seed in range(10, 18):
                sent, name = sides.producer.publish(bytes_of(_SIZE, seed)), stage.name("kept")
                assert reader.receive(sent, name=name)["digest"] == sent.digest
                others.append((name, sent))
            passed(1.8)
            changed = [name for name, sent in others if reader.recheck(name) != sent.digest]
            for name, _ in others:
                reader.drop(name)
            assert not changed, "bytes of a transfer that was given up landed in another payload's memory"
            if observed != "ok":
                assert receive(sides.consumer, late, timeout_s=20.0) == "ok", "a late transfer lost the payload"


class RelayFaultTests(AdapterSuite):
    """The relay loses, corrupts and fails."""

    @pytest.mark.parametrize("fault", ["wrong", "short", "lose", "fail", "fail_after"])
    @promise(
        Level.L3,
        "What the relay stored wrong, short or not at all is never delivered",
        requires=[Capability.INJECT_STORE, Capability.STORE],
    )
    def test_a_broken_put_is_never_delivered(self, stage: Stage, fault: str) -> None:
        with broken(stage, "store", {"producer2": {"relay": (f"put:{fault}",)}}) as sides:
            sent: list[Sent] = []
            observed, _ = timed(lambda: sent.append(sides("producer2").publish(bytes_of(_SIZE, 20))))
            if observed == "ok":
                observed = receive(sides.consumer, sent[0], timeout_s=8.0)
            assert observed == "ok" or observed.startswith("refused:"), f"a broken put ended in {observed}"
            healthy = sides("producer2").publish(bytes_of(_SIZE, 21))
            assert receive(sides.consumer, healthy, timeout_s=20.0) == "ok", "after a broken put no payload passes"

    @pytest.mark.parametrize("fault", ["wrong", "short", "nothing", "lose", "fail"])
    @promise(
        Level.L3,
        "What the relay hands out wrong, short or not at all is never delivered",
        requires=[Capability.INJECT_STORE, Capability.STORE],
    )
    def test_a_broken_get_is_never_delivered(self, stage: Stage, fault: str) -> None:
        with broken(stage, "store", {"consumer2": {"relay": (f"get:{fault}",) * MANY}}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 22))
            observed = receive(sides("consumer2"), sent, timeout_s=6.0)
            assert observed != "ok", "the relay handed nothing out right, and yet something was delivered"
            assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a broken get lost the payload"

    @promise(
        Level.L3,
        "A relay that does not answer ends at the reader's deadline",
        requires=[Capability.INJECT_STORE, Capability.STORE],
    )
    def test_a_stalled_relay_is_an_error_not_a_hang(self, stage: Stage) -> None:
        with broken(stage, "store", {"consumer2": {"relay": ("get:stall",) * MANY}}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 23))
            observed = receive(sides("consumer2"), sent, timeout_s=1.5)
            assert observed != "ok", "a relay that handed nothing out delivered something"
            assert receive(sides.consumer, sent, timeout_s=20.0) == "ok", "a stalled relay lost the payload"

    @promise(
        Level.L3,
        "A transport that repeats calls to the relay does no harm",
        requires=[Capability.INJECT_STORE, Capability.STORE],
    )
    def test_calls_to_the_relay_that_are_repeated_do_no_harm(self, stage: Stage) -> None:
        repeated = {"relay": ("get:duplicate",) * MANY}
        with broken(stage, "store", {"consumer2": repeated}) as sides:
            sent = sides.producer.publish(bytes_of(_SIZE, 24))
            assert receive(sides("consumer2"), sent, timeout_s=20.0) == "ok", "a repeated call lost the payload"
            refused(receive(sides.consumer, sent, timeout_s=3.0), "lease_lost")


#: Which side loses which message, and how often: each once and twice in a row.
_LOST: Final = [
    ("consumer2", "send:hello:1"),
    ("consumer2", "send:claim:1"),
    ("consumer2", "send:claim:2"),
    ("consumer2", "send:ack:1"),
    ("consumer2", "send:ack:2"),
    ("producer2", "send:granted:2"),
    ("producer2", "send:done:2"),
]


class ControlFaultTests(AdapterSuite):
    """Control messages are lost, once or twice in a row."""

    @pytest.mark.parametrize(
        ("side", "lost"), _LOST, ids=[f"{lost.split(':')[1]}-{lost.split(':')[2]}" for _, lost in _LOST]
    )
    @promise(
        Level.L3,
        "A lost control message changes nothing but the time",
        requires=[Capability.INJECT_CONTROL, Capability.P2P],
    )
    def test_a_lost_control_message_changes_nothing(self, stage: Stage, side: str, lost: str) -> None:
        with broken(stage, "p2p", {side: {"control": (lost,)}}) as sides:
            producer = sides("producer2") if side == "producer2" else sides.producer
            reader = sides("consumer2") if side == "consumer2" else sides.consumer
            sent = producer.publish(bytes_of(_SIZE, 30))
            assert receive(reader, sent, timeout_s=10.0) == "ok", f"{lost} was lost, and the payload with it"
            refused(receive(sides("consumer3"), sent, timeout_s=5.0), "lease_lost")
            left = stage.settle(producer, reader)
            assert not left, f"after {lost} was lost, {left}"

    @promise(
        Level.L3,
        "Renewals that are lost do not cost a living reader its claim",
        requires=[Capability.INJECT_CONTROL, Capability.P2P, Capability.CLAIM],
    )
    def test_lost_renewals_do_not_end_a_claim(self, stage: Stage) -> None:
        with broken(stage, "p2p", {"consumer2": {"control": ("send:renew:2",)}}, {}) as sides:
            sent, reader = sides.producer.publish(bytes_of(_SIZE, 31)), sides("consumer2")
            claim = reader.claim(sent)
            refused(receive(sides.consumer, sent, timeout_s=2.5), "lease_held")
            assert reader.read(claim) == sent.digest
            reader.ack(claim)
            reader.drop(claim)

    @promise(
        Level.L3,
        "A lost nack gives the payload back when the claim lapses",
        requires=[Capability.INJECT_CONTROL, Capability.P2P, Capability.CLAIM],
    )
    def test_a_lost_nack_does_not_keep_the_payload(self, stage: Stage) -> None:
        # None gets through, however often it is sent: the payload comes back by the lapse of the claim alone.
        with broken(stage, "p2p", {"consumer2": {"control": ("send:nack:all",)}}, {}) as sides:
            sent, reader = sides.producer.publish(bytes_of(_SIZE, 32)), sides("consumer2")
            reader.nack(reader.claim(sent))
            within_s = reader.settings.claim_ttl_s + SLOW_S
            assert receive(sides.consumer, sent, timeout_s=within_s) == "ok", "a lost nack lost the payload"

    @promise(
        Level.L3,
        "Progress that is not heard of is heard of with the next renewal",
        requires=[Capability.INJECT_CONTROL, Capability.P2P, Capability.CLAIM, Capability.CHUNKED],
    )
    def test_lost_progress_does_not_stop_the_chunks(self, stage: Stage) -> None:
        with broken(stage, "p2p", {"producer2": {"control": ("send:progressed:4",)}}) as sides:
            producer, reader = sides("producer2"), sides.consumer
            sent = producer.open(bytes_of(_SIZE, 33), num_chunks=4)
            claim = reader.claim(sent)
            for chunk in range(4):
                reader.send("next_chunk", name=claim, timeout_s=8.0)
                producer.ready(sent, chunk)
                observed, digest = answer_of(reader)
                assert (observed, digest) == ("ok", sent.chunk_digests[chunk]), f"chunk {chunk} ended in {observed}"
            assert reader.next_chunk(claim) is None
            reader.ack(claim)
            reader.drop(claim)
            producer.drop(sent.name)
