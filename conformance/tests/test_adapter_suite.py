"""The tests of the adapter suite fail where what they promise is broken, and the message says what."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from fake_side import FakeGround, FakeTarget, FakeWorld

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus.load import cases, scenarios
from moonrelay_conformance.corpus.model import PromiseName
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter import AdapterConformance
from moonrelay_conformance.suites.adapter.leaks import LeakTests
from moonrelay_conformance.suites.adapter.leases import LeaseTests
from moonrelay_conformance.suites.adapter.machine import ModelTests
from moonrelay_conformance.suites.adapter.stage import Stage, outcome
from moonrelay_conformance.suites.base import MARKER, Promise
from moonrelay_conformance.targets.parts import PART_CAPABILITIES


def stage_of(*faults: str) -> Stage:
    return Stage(FakeTarget(), FakeWorld(*faults), FakeGround())  # type: ignore[arg-type]


Test = Callable[[Stage, str], Any]

LEASES = LeaseTests()
LEAKS = LeakTests()
BROKEN: list[tuple[Test, str, str]] = [
    (LEASES.test_a_payload_is_never_delivered_twice_after_its_ack, "twice", "saw ok"),
    (LEASES.test_a_race_has_one_winner, "twice", "one winner"),
    (LEASES.test_a_nack_gives_the_payload_back, "nack_keeps", "held"),
    (LEASES.test_a_claimed_payload_is_nobody_elses, "two_winners", "saw ok"),
    (LEASES.test_requests_are_never_swapped, "swap", "was given the payload of request"),
    (LEASES.test_a_shared_payload_has_as_many_readers_as_it_says, "twice", "saw ok"),
    (LEASES.test_delivered_bytes_do_not_change_afterwards, "wrong_bytes", "other bytes"),
    (LEAKS.test_an_abort_leaves_nothing_behind, "leak", "holds"),
    (LEAKS.test_a_refusal_leaves_nothing_behind, "accepts_all", "typed error"),
    (ModelTests().test_leases_behave_as_their_model, "two_winners", "the model allows"),
]
BROKEN_IDS = [f"{one.__name__}-{fault}" for one, fault, _ in BROKEN]


@pytest.mark.parametrize(
    ("test", "fault", "message"), BROKEN, ids=[f"{one.__name__}-{fault}" for one, fault, _ in BROKEN]
)
def test_a_broken_adapter_is_caught(test: Test, fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonrelay_conformance.suites.adapter.stage.SETTLE_S", 0.1)
    with pytest.raises((AssertionError, MoonrelayError, ExceptionGroup)) as caught:
        test(stage_of(fault), "p2p")
    assert message in _whole(caught.value)


@pytest.mark.parametrize("test", [one for one, _, _ in BROKEN[:-1]], ids=[one.__name__ for one, _, _ in BROKEN[:-1]])
def test_a_sound_adapter_is_not(test: Test) -> None:
    test(stage_of(), "p2p")


def test_a_sound_adapter_behaves_as_the_model() -> None:
    ModelTests().test_leases_behave_as_their_model(stage_of(), "p2p")


def _whole(error: BaseException) -> str:
    inner = "".join(_whole(one) for one in getattr(error, "exceptions", ()))
    return f"{error}{inner}{_whole(error.__cause__) if error.__cause__ else ''}"


def test_outcomes_are_called_by_their_names() -> None:
    for fault, observed in (("hang", "hang"), ("untyped", "untyped: the side's 'receive' raised KeyError: 'x'")):
        world = FakeWorld()
        sides = Stage(FakeTarget(), world, FakeGround()).cast("p2p")  # type: ignore[arg-type]
        sent = sides.producer.publish()
        world.faults = frozenset({fault})
        assert outcome(lambda sides=sides, sent=sent: sides.consumer.receive(sent)) == observed  # type: ignore[misc]


def test_a_side_that_hangs_is_killed_and_started_anew() -> None:
    world = FakeWorld()
    sides = Stage(FakeTarget(), world, FakeGround()).cast("p2p")  # type: ignore[arg-type]
    sent = sides.producer.publish()
    world.faults = frozenset({"hang"})
    assert outcome(lambda: sides.consumer.receive(sent)) == "hang"
    hung = world.started[-1]
    assert hung.dead
    world.faults = frozenset()
    sides.consumer.takes(sent)
    assert world.started[-1] is not hung


def test_sides_are_kept_warm_and_the_longest_unused_makes_room() -> None:
    world = FakeWorld()
    stage = Stage(FakeTarget(), world, FakeGround())  # type: ignore[arg-type]
    first = stage.cast("p2p").producer.process
    assert stage.cast("p2p").producer.process is first
    for size in range(1, 12):
        stage.cast("p2p", {"pool_bytes": size << 20}).producer.process.do("collect")
    # Its process serves another side.
    assert first in [actor.process for actor in stage._actors.values()]
    assert len(world.started) <= 8


def suite_tests() -> dict[str, Promise]:
    found = {}
    for name, member in inspect.getmembers(AdapterConformance):
        if name.startswith("test_"):
            marks = [mark for mark in getattr(member, "pytestmark", []) if mark.name == MARKER]
            assert marks, f"{name} has no promise"
            found[name] = marks[0].args[0]
    return found


def test_every_test_has_a_promise_and_every_level_has_tests() -> None:
    found = suite_tests()
    assert {one.level for one in found.values()} == set(Level)
    assert all(not capability.carried for one in found.values() for capability in one.requires)


def test_every_operation_that_an_adapter_may_declare_is_required_by_a_test_or_an_entry_of_the_corpus() -> None:
    used = {capability for one in suite_tests().values() for capability in one.requires}
    used |= {capability for one in (*cases(), *scenarios()) for capability in one.requires}
    used |= {Capability.SPILL}  # a route
    assert set(Capability) - used - set(PART_CAPABILITIES) == set()


def test_every_case_of_the_corpus_has_a_test() -> None:
    covered = {
        argument.values[0].id
        for _, member in inspect.getmembers(AdapterConformance)
        for mark in getattr(member, "pytestmark", [])
        if mark.name == "parametrize" and mark.args[0] == "case"
        for argument in mark.args[1]
    }
    assert covered == {case.id for case in cases()}
    assert {case.promise for case in cases()} <= set(PromiseName)
