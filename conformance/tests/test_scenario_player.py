"""The scenario player, on sides that are only pretended: what it observes, and what it says when that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from fake_side import FakeGround, FakeTarget, FakeWorld

from moonrelay_conformance.corpus.model import Scenario
from moonrelay_conformance.suites.adapter.play import Player
from moonrelay_conformance.suites.adapter.stage import PATIENT, SMALL, Stage
from moonrelay_conformance.suites.base import Note

Play = Callable[..., Note]

PUBLISH = {"do": "publish", "side": "producer", "as": "p", "expect": ["published"]}
RECEIVE = {"do": "receive", "side": "consumer", "of": "p", "expect": ["delivered"]}
CLAIM = {"do": "claim", "side": "consumer", "of": "p", "as": "c", "expect": ["granted"]}
READ = {"do": "read", "side": "consumer", "of": "c", "expect": ["delivered"]}
ACK = {"do": "ack", "side": "consumer", "of": "c", "expect": ["done"]}
NACK = {"do": "nack", "side": "consumer", "of": "c", "expect": ["done"]}
SETTLED = {"do": "settled", "within_s": 0.2, "expect": ["settled"]}


def scenario(*steps: dict[str, Any]) -> Scenario:
    given = {"id": "s", "level": "L1", "title": "t", "provenance": ["p"], "reason": "r", "payload": SMALL}
    return msgspec.convert({**given, "steps": list(steps)}, Scenario)


@pytest.fixture
def play() -> Play:
    def run(*steps: dict[str, Any], faults: tuple[str, ...] = ()) -> Note:
        world, note = FakeWorld(*faults), Note()
        Player(Stage(FakeTarget(), world, FakeGround()), scenario(*steps), "p2p", note).play()  # type: ignore[arg-type]
        return note

    return run


def test_each_step_is_observed_and_noted(play: Play) -> None:
    gone = {**RECEIVE, "side": "consumer2", "expect": ["refused:lease_lost"]}
    status = {"do": "status", "side": "consumer", "of": "p", "expect": ["state:consumed"]}
    note = play(PUBLISH, CLAIM, READ, ACK, gone, status, SETTLED)
    assert note.steps == [
        "1. producer publish p -> published",
        "2. consumer claim p c -> granted",
        "3. consumer read c -> delivered",
        "4. consumer ack c -> done",
        "5. consumer2 receive p -> refused:lease_lost",
        "6. consumer status p -> state:consumed",
        "7. settled -> settled",
    ]


def test_a_wrong_observation_names_step_expectation_and_what_was_seen(play: Play) -> None:
    gone = {**RECEIVE, "side": "consumer2", "expect": ["refused:lease_lost", "refused:lease_held"]}
    with pytest.raises(AssertionError) as caught:
        play(PUBLISH, RECEIVE, gone, faults=("twice",))
    assert str(caught.value) == (
        "s, step 3: consumer2 receive p: expected refused:lease_lost or refused:lease_held, observed delivered"
    )


@pytest.mark.parametrize(
    ("fault", "observed"),
    [("wrong_bytes", "wrong_bytes"), ("hang", "hang"), ("untyped", "untyped")],
)
def test_what_a_broken_side_does_is_called_by_its_name(fault: str, observed: str) -> None:
    world = FakeWorld()
    stage = Stage(FakeTarget(), world, FakeGround())  # type: ignore[arg-type]
    cast = stage.cast("p2p", PATIENT)
    # The sides meet before the baseline, with the settings of a scenario in which nobody dies; the fault comes after.
    stage.acquaint(cast.producer, cast.consumer)
    world.faults = frozenset({fault})
    with pytest.raises(AssertionError, match=f"step 2: consumer receive p: expected delivered, observed {observed}"):
        Player(stage, scenario(PUBLISH, RECEIVE), "p2p", Note()).play()


def test_what_is_left_is_not_settled(play: Play) -> None:
    with pytest.raises(AssertionError, match=r"observed left: .*producer holds 1 payloads"):
        play(PUBLISH, CLAIM, SETTLED)


def test_a_nack_that_keeps_the_payload_is_seen(play: Play) -> None:
    again = {**CLAIM, "side": "consumer2"}
    play(PUBLISH, CLAIM, NACK, again)
    with pytest.raises(AssertionError, match=r"step 4: .*expected granted, observed refused:lease_held"):
        play(PUBLISH, CLAIM, NACK, again, faults=("nack_keeps",))


def test_an_edit_shows_in_the_recheck(play: Play) -> None:
    kept = {**RECEIVE, "as": "k"}
    recheck = {"do": "recheck", "side": "consumer", "of": "k"}
    edit = {"do": "edit", "side": "consumer", "of": "k", "expect": ["done"]}
    play(PUBLISH, kept, {**recheck, "expect": ["unchanged"]}, edit, {**recheck, "expect": ["changed"]}, SETTLED)


def test_begun_steps_are_observed_when_they_finish(play: Play) -> None:
    begin = {"do": "begin", "side": "consumer", "step": {**RECEIVE, "side": ""}, "expect": ["done"]}
    finish = {"do": "finish", "side": "consumer", "within_s": 5.0, "expect": ["delivered"]}
    note = play(PUBLISH, begin, finish, SETTLED)
    assert note.steps is not None
    assert note.steps[1:3] == ["2. begin: consumer receive p -> done", "3. consumer finish -> delivered"]


def test_what_comes_too_late_is_late(play: Play) -> None:
    wait = {"do": "pass_time", "seconds": 0.05, "within_s": 0.01, "expect": ["done"]}
    with pytest.raises(AssertionError, match=r"expected done, observed late \(done after"):
        play(wait)


def test_a_state_that_never_comes_is_late(play: Play) -> None:
    wait = {"do": "until_status", "side": "consumer", "of": "p", "state": ["consumed"], "within_s": 0.1}
    with pytest.raises(AssertionError, match=r"observed late \(still state:ready"):
        play(PUBLISH, {**wait, "expect": ["state:consumed"]})


def test_a_killed_reader_and_a_restarted_one(play: Play) -> None:
    kill = {"do": "kill", "side": "consumer", "expect": ["done"]}
    play(
        PUBLISH,
        CLAIM,
        kill,
        {**RECEIVE, "side": "consumer2"},
        {"do": "restart", "side": "consumer", "expect": ["done"]},
        SETTLED,
    )


def test_a_failed_scenario_leaves_its_sides_to_nobody(play: Play) -> None:
    world = FakeWorld()
    stage = Stage(FakeTarget(), world, FakeGround())  # type: ignore[arg-type]
    before = stage.cast("p2p", PATIENT).consumer
    with pytest.raises(AssertionError):
        Player(stage, scenario(PUBLISH, {**CLAIM, "expect": ["refused:lease_lost"]}), "p2p", Note()).play()
    assert stage.cast("p2p", PATIENT).consumer is not before
