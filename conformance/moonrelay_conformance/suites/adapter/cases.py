"""The corpus: every case is delivered identical, or refused as it should be, and leaves nothing behind.

Owns how a case is carried out and judged; what is right stands in the corpus. Where the target does not declare what a
case needs to be *carried*, a typed refusal is right, and an identical delivery shows that the declaration is stale.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus.load import cases
from moonrelay_conformance.corpus.model import At, Case, Expected, PromiseName
from moonrelay_conformance.results import Kind, Level, Outcome
from moonrelay_conformance.sides.process import SideEnded, SideFailed, SideHung
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.stage import PATIENT, Actor, Sent, Stage, outcome
from moonrelay_conformance.suites.base import promise

if TYPE_CHECKING:
    from moonrelay_conformance.suites.base import Note

#: Deadline of one call; large payloads take their time on a busy machine.
CALL_S = 60.0
#: What a busy machine may add to a bound on a refusal.
SLOW_S = 5.0

TestT = Callable[..., None]


def of(*names: PromiseName) -> Callable[[TestT], TestT]:
    """Give a test the corpus's cases of these promises, one after the other."""

    def mark(function: TestT) -> TestT:
        chosen = [pytest.param(case, id=case.id) for case in cases() if case.promise in names]
        marked: TestT = pytest.mark.parametrize("case", chosen)(function)
        return marked

    return mark


@dataclass(frozen=True, slots=True)
class Refusal:
    """A typed refusal.

    Attributes:
        error: What was raised.
        at: Where.
        took_s: How long the call took.
    """

    error: MoonrelayError
    at: At
    took_s: float


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrived.

    Attributes:
        digest: Of the tree; empty where it was read by chunks.
        chunks: Digests of the chunks, as they came.
        metadata: What came beside.
    """

    digest: str
    chunks: tuple[str, ...] = ()
    metadata: Any = None


def carry(stage: Stage, route: str, case: Case) -> Delivery | Refusal:
    """Publish a case and take it over.

    Raises:
        AssertionError: The producer refused the payload in an untyped way, a side hangs or ended, or chunks came
            twice or not at all.
    """
    sides = stage.cast(route, {**PATIENT, **case.side.given()})
    sent: Sent | None = None
    sides.producer.process  # noqa: B018 - starts it: a heavy host's imports are not the call's time
    began = time.monotonic()
    try:
        sent = _publish(sides.producer, case)
        sides.consumer.process  # noqa: B018 - likewise
        began = time.monotonic()
        return _take(sides.consumer, sent, case, stage)
    except SideFailed as exc:
        message = f"{case.id}: a failure must leave as a typed error, not as {exc.context.get('type')}: {exc.message}"
        raise AssertionError(message) from exc
    except (SideHung, SideEnded) as exc:
        message = f"{case.id}: {exc}"
        raise AssertionError(message) from exc
    except MoonrelayError as exc:
        at = At.PUBLISH if sent is None else At.RECEIVE
        if sent is not None:
            _drop(stage, sides.producer, sent)
        return Refusal(exc, at, time.monotonic() - began)


def _publish(producer: Actor, case: Case) -> Sent:
    outgoing = msgspec.to_builtins(case.outgoing)
    order = outgoing.pop("ready_order", ())
    if not order:
        return producer.publish(case.tree, **outgoing)
    sent = producer.open(case.tree, **outgoing)
    producer.ready(sent, *order)
    return sent


def _take(consumer: Actor, sent: Sent, case: Case, stage: Stage) -> Delivery:
    if not case.expect.chunks or not stage.supports(Capability.CHUNKED, Capability.CLAIM):
        answer = consumer.receive(sent, timeout_s=CALL_S)
        return Delivery(answer["digest"], (), answer.get("metadata"))
    claim = consumer.claim(sent, timeout_s=CALL_S)
    try:
        chunks: list[str] = []
        while (chunk := consumer.next_chunk(claim, timeout_s=CALL_S)) is not None:
            chunks.append(chunk[1])
            assert len(chunks) <= len(case.expect.chunks), f"{case.id}: more chunks were delivered than there are"
        consumer.ack(claim, timeout_s=CALL_S)
    except BaseException:
        outcome(lambda: consumer.nack(claim))
        raise
    finally:
        outcome(lambda: consumer.drop(claim))
    return Delivery("", tuple(chunks))


def _drop(stage: Stage, producer: Actor, sent: Sent) -> None:
    if stage.supports(Capability.ABORT):
        outcome(lambda: producer.abort(sent))
    elif stage.supports(Capability.RELEASE):
        outcome(lambda: producer.release(sent))


def judge(stage: Stage, route: str, case: Case, note: Note) -> None:
    """Carry a case out and fail unless the outcome is right and nothing is left behind."""
    sides = stage.cast(route, {**PATIENT, **case.side.given()})
    lacking = stage.target.lacking(*(one for one in case.requires if one.carried))
    found = carry(stage, route, case)
    if isinstance(found, Refusal):
        note.outcome, note.code = Outcome.REFUSED, found.error.code
        if not lacking:
            _judge_refusal(case, found)
    else:
        note.outcome, note.digest = Outcome.DELIVERED, found.digest or "+".join(found.chunks)
        _judge_delivery(case, found, lacking)
    left = stage.settle(sides.producer, sides.consumer)
    assert not left, f"{case.id}: {'after its refusal' if isinstance(found, Refusal) else 'after delivery'}, {left}"
    if isinstance(found, Refusal):
        after = outcome(lambda: sides.consumer.takes(sides.producer.publish(), timeout_s=CALL_S))
        assert after == "ok", f"{case.id}: after its refusal a small payload does not pass any more: {after}"


def _judge_refusal(case: Case, found: Refusal) -> None:
    expect, error = case.expect, found.error
    assert expect.outcome is not Expected.DELIVERED, (
        f"{case.id}: must be delivered, and was refused at {found.at} with {error.code}: {error}"
    )
    assert error.code in expect.codes, (
        f"{case.id}: must be refused with {' or '.join(expect.codes)}, not {error.code}: {error}"
    )
    there = expect.at in (found.at, At.ANYWHERE)
    assert there, f"{case.id}: must be refused at {expect.at}, not at {found.at}: {error}"
    if expect.field:
        named = str(error.context.get("field", ""))
        assert expect.field in named, (
            f"{case.id}: the refusal must name {expect.field}, its field is {named!r}: {error}"
        )
    if expect.within_s is not None:
        assert found.took_s <= expect.within_s + SLOW_S, f"{case.id}: refused after {found.took_s:.1f} s only"


def _judge_delivery(case: Case, found: Delivery, lacking: tuple[Capability, ...]) -> None:
    expect = case.expect
    assert expect.outcome is not Expected.REFUSED, (
        f"{case.id}: must be refused with {' or '.join(expect.codes)}, and something was delivered ({found.digest})"
    )
    if found.chunks:
        assert len(found.chunks) == len(expect.chunks), (
            f"{case.id}: {len(found.chunks)} chunks were delivered, not {len(expect.chunks)}"
        )
        wrong = [
            number for number, pair in enumerate(zip(found.chunks, expect.chunks, strict=True)) if pair[0] != pair[1]
        ]
        assert not wrong, f"{case.id}: chunks {wrong} are not those that were published at these places"
    else:
        assert found.digest == expect.digest, (
            f"{case.id}: what was delivered is not what was published: {found.digest}, not {expect.digest}; it must be "
            "identical, or refused"
        )
        wanted = case.outgoing.metadata
        if wanted is not None:
            assert found.metadata == wanted, f"{case.id}: metadata {wanted!r} arrived as {found.metadata!r}"
    assert not lacking, (
        f"{case.id}: delivered identical although {', '.join(lacking)} is not declared; the declaration is stale"
    )


class CorpusTests(AdapterSuite):
    """Every payload of the corpus, one test for each promise."""

    @of(PromiseName.STRUCTURE)
    @promise(Level.L1, "Lists, tuples, dicts, None: the tree arrives as it was", kind=Kind.CASE)
    def test_structure_is_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.DTYPE)
    @promise(Level.L1, "Every tensor keeps its dtype, bit for bit", kind=Kind.CASE)
    def test_dtype_is_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.SHAPE)
    @promise(Level.L1, "Every tensor keeps its shape, also () and without padding", kind=Kind.CASE)
    def test_shape_is_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.VALUES)
    @promise(Level.L1, "Tensors and views arrive with their logical values", kind=Kind.CASE)
    def test_values_are_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.PLAIN)
    @promise(Level.L1, "Plain values beside the tensors arrive, with their types", kind=Kind.CASE)
    def test_plain_values_are_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.IDENTITY)
    @promise(Level.L1, "One object in two places arrives as one", kind=Kind.CASE)
    def test_identity_is_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.EMPTY)
    @promise(Level.L1, "What is empty arrives empty, and is neither missing nor failed", kind=Kind.CASE)
    def test_empty_is_not_missing(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.METADATA)
    @promise(Level.L1, "What travels with the ticket arrives", kind=Kind.CASE)
    def test_metadata_is_kept(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.CHUNKS)
    @promise(Level.L1, "Chunks arrive once each, in order, whatever the order they became ready in", kind=Kind.CASE)
    def test_chunks_arrive_once_in_order(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.REFUSED)
    @promise(Level.L1, "What cannot be carried is refused by a typed error that names the field", kind=Kind.CASE)
    def test_what_cannot_be_carried_is_refused_by_name(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)

    @of(PromiseName.CAPACITY)
    @promise(Level.L1, "What does not fit is a typed refusal, and small payloads pass on", kind=Kind.CASE)
    def test_capacity_is_a_typed_refusal(self, case: Case, route: str, stage: Stage, note: Note) -> None:
        judge(stage, route, case, note)
