"""An engine's life: started, watched, closed, started again, and given up, by a clock that the test moves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serve_double import WAIT_S, Engines, eventually

from moonrelay.clock import ManualClock
from moonrelay_vllm_omni.serve.errors import EngineUnavailable
from moonrelay_vllm_omni.serve.supervisor import State, Supervisor


class Begun:
    def __init__(self, **more: Any) -> None:
        self.clock = ManualClock()
        self.engines = Engines()
        self.changes: list[State] = []
        self.supervisor: Supervisor = self.engines.supervisor(
            self.clock, lambda: self.changes.append(self.supervisor.status().state), **more
        )

    def is_in(self, state: State) -> bool:
        return self.supervisor.status().state is state

    def reaches(self, state: State, *, seconds: float = 0.0) -> None:
        eventually(lambda: self.is_in(state), lambda: self.clock.advance(seconds) if seconds else None)


@pytest.fixture
def begun() -> Iterator[Begun]:
    one = Begun(attempts=3, backoff_s=10.0, steady_s=100.0)
    yield one
    one.engines.go.set()
    assert one.supervisor.close(WAIT_S)
    assert all(engine.closed.is_set() for engine in one.engines.made)


def test_before_it_is_ready_nobody_gets_an_engine(begun: Begun) -> None:
    begun.engines.go.clear()
    begun.supervisor.start()
    with pytest.raises(EngineUnavailable, match="starting") as refusal:
        begun.supervisor.engine()
    assert refusal.value.retry_after_s == 30.0
    begun.engines.go.set()
    begun.reaches(State.READY)
    assert begun.supervisor.engine() is begun.engines.made[0]


def test_a_first_start_that_fails_is_not_tried_again(begun: Begun) -> None:
    begun.engines.failures = [ValueError("no such model")]
    begun.supervisor.start()
    begun.reaches(State.FAILED)
    assert begun.engines.tries == 1
    with pytest.raises(EngineUnavailable, match="ValueError: no such model") as refusal:
        begun.supervisor.engine()
    assert refusal.value.retry_after_s is None


def test_a_dead_stage_is_seen_by_the_watch_and_the_engine_started_again(begun: Begun) -> None:
    begun.supervisor.start()
    begun.reaches(State.READY)
    first = begun.engines.made[0]
    first.die(2)
    begun.reaches(State.RESTARTING, seconds=1.0)
    status = begun.supervisor.status()
    assert status.reason == "stage 2 died: killed"
    assert [one.stage for one in status.deaths] == [2]
    begun.reaches(State.READY, seconds=1.0)
    assert first.closed.is_set()
    assert begun.supervisor.engine() is begun.engines.made[1]
    status = begun.supervisor.status()
    assert (status.restarts, status.deaths, status.reason) == (1, (), "")
    assert begun.changes == [State.READY, State.RESTARTING, State.READY]


def test_who_saw_it_fail_need_not_wait_for_the_watch(begun: Begun) -> None:
    begun.supervisor.start()
    begun.reaches(State.READY)
    begun.supervisor.look()
    assert begun.is_in(State.READY)
    begun.engines.made[0].die(0)
    begun.supervisor.look()
    assert begun.is_in(State.RESTARTING)
    with pytest.raises(EngineUnavailable, match="stage 0 died"):
        begun.supervisor.engine()


def test_no_engine_is_started_before_its_pause_is_over(begun: Begun) -> None:
    begun.supervisor.start()
    begun.reaches(State.READY)
    begun.engines.made[0].die(1)
    begun.supervisor.look()
    assert begun.engines.made[0].closed.wait(WAIT_S)
    begun.clock.advance(9.0)
    assert not threading.Event().wait(0.1)
    assert begun.engines.tries == 1
    begun.reaches(State.READY, seconds=0.5)
    assert begun.engines.tries == 2


def test_engines_that_die_soon_are_given_up(begun: Begun) -> None:
    begun.supervisor.start()
    for number in range(3):
        begun.reaches(State.READY, seconds=2.0)
        begun.engines.made[number].die(2)
        begun.supervisor.look()
    begun.reaches(State.FAILED)
    assert begun.engines.tries == 3
    assert "stage 2 died" in begun.supervisor.status().reason


def test_starts_that_fail_are_given_up(begun: Begun) -> None:
    begun.supervisor.start()
    begun.reaches(State.READY)
    begun.engines.failures = [OSError("no memory"), OSError("no memory")]
    begun.engines.made[0].die(2)
    begun.supervisor.look()
    begun.reaches(State.FAILED, seconds=2.0)
    assert begun.engines.tries == 3
    assert "no memory" in begun.supervisor.status().reason


def test_an_engine_that_lived_long_has_its_attempts_anew(begun: Begun) -> None:
    begun.supervisor.start()
    for number in range(5):
        begun.reaches(State.READY, seconds=2.0)
        begun.clock.advance(101.0)
        begun.engines.made[number].die(2)
        begun.supervisor.look()
    begun.reaches(State.READY, seconds=2.0)
    assert begun.supervisor.status().restarts == 5


def test_a_start_under_way_does_not_hold_up_the_end(begun: Begun) -> None:
    begun.engines.go.clear()
    begun.supervisor.start()
    eventually(lambda: begun.engines.tries == 1)
    assert begun.supervisor.close(WAIT_S)
    assert begun.engines.interrupted.is_set()
    assert begun.is_in(State.CLOSED)


def test_once_the_end_is_near_no_death_counts(begun: Begun) -> None:
    begun.supervisor.start()
    begun.reaches(State.READY)
    begun.supervisor.stop_soon()
    begun.engines.made[0].die(0)
    begun.supervisor.look()
    assert begun.is_in(State.READY), "what runs may go on"
    assert begun.supervisor.close(WAIT_S)
    assert begun.engines.tries == 1
    assert begun.is_in(State.CLOSED)


def test_a_pause_does_not_hold_up_the_end(begun: Begun) -> None:
    begun.supervisor.start()
    begun.reaches(State.READY)
    begun.engines.made[0].die(0)
    begun.supervisor.look()
    assert begun.engines.made[0].closed.wait(WAIT_S)
    assert begun.supervisor.close(WAIT_S)
    assert begun.engines.tries == 1
    assert begun.supervisor.close(WAIT_S), "again"
