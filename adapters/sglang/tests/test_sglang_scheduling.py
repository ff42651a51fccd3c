"""The head's decisions: who gets what, and what becomes of it when an instance dies, is restarted or answers late."""

from __future__ import annotations

from typing import Any

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import CapacityError, ConfigError, MoonrelayError, PeerLost, WireError
from moonrelay_sglang.actions import Action, Dispatch, Failed, Limits, Release, StageInput
from moonrelay_sglang.scheduling import HeadScheduler

POOLS = {
    "encoder": ["tcp://127.0.0.1:1"],
    "denoiser": ["tcp://127.0.0.1:2", "tcp://127.0.0.1:3"],
    "decoder": ["tcp://127.0.0.1:4"],
}


class Head:
    """A scheduler with all instances up, and what it has decided."""

    def __init__(self, *, policy: str = "round_robin", slots: int = 1, pools: Any = None, **limits: Any) -> None:
        self.clock = ManualClock()
        pools = pools or POOLS
        self.scheduler = HeadScheduler(pools, policy=policy, limits=Limits(**limits), clock=self.clock)
        self.slots = slots
        self.epochs = {(stage, index): "one" for stage, endpoints in pools.items() for index in range(len(endpoints))}
        self.silent: set[tuple[str, int]] = set()
        self.holding: dict[tuple[str, int], set[tuple[str, int]]] = {place: set() for place in self.epochs}
        for stage, index in self.epochs:
            self.register(stage, index)

    def register(self, stage: str, index: int, **changes: Any) -> None:
        values = {"epoch": self.epochs[stage, index], "slots": self.slots, **changes}
        self.scheduler.register(stage, index, **values)

    def poll(self) -> list[Action]:
        actions = self.scheduler.poll()
        for action in actions:
            if isinstance(action, Dispatch):
                self.holding[action.stage, action.index].add((action.request_id, action.attempt))
        return actions

    def given(self) -> list[Dispatch]:
        return [action for action in self.poll() if isinstance(action, Dispatch)]

    def pass_time(self, seconds: float) -> list[Action]:
        """Let time pass in steps, with everybody beating who is not silent."""
        actions: list[Action] = []
        while seconds > 0:
            step = min(1.0, seconds)
            self.clock.advance(step)
            seconds -= step
            for place, epoch in self.epochs.items():
                if place not in self.silent:
                    actions += self.scheduler.beat(*place, epoch=epoch, holding=self.holding[place])
            actions += self.poll()
        return actions

    def staged(self, work: Dispatch, **changes: Any) -> list[Action]:
        self.holding[work.stage, work.index].discard((work.request_id, work.attempt))
        given = StageInput(manifest={"of": work.stage, "attempt": work.attempt}, scalar_fields={"seed": 1})
        return self.scheduler.staged(work.stage, work.index, work.request_id, work.attempt, given, **changes)

    def failed(self, work: Dispatch, error: MoonrelayError, **changes: Any) -> list[Action]:
        self.holding[work.stage, work.index].discard((work.request_id, work.attempt))
        return self.scheduler.failed(work.request_id, work.attempt, error, **changes)

    def until(self, stage: str, request_id: str = "r") -> Dispatch:
        """Submit a request and bring it to a stage."""
        self.scheduler.submit(request_id)
        (work,) = self.given()
        while work.stage != stage:
            assert self.staged(work) == []
            (work,) = self.given()
        return work


def test_a_request_passes_the_stages_and_its_inputs_follow_it() -> None:
    head = Head()
    work = head.until("encoder")
    assert work.given is None
    head.staged(work)
    (denoise,) = head.given()
    assert denoise.given is not None
    assert denoise.given.manifest == {"of": "encoder", "attempt": work.attempt}
    head.staged(denoise)
    (decode,) = head.given()
    assert decode.stage == "decoder"
    released = head.scheduler.finished("r")
    assert {(one.stage, one.attempt) for one in released if isinstance(one, Release)} == {
        ("encoder", work.attempt),
        ("denoiser", denoise.attempt),
        ("decoder", decode.attempt),
    }
    assert head.scheduler.finished("r") == []
    assert head.scheduler.snapshot()["active"] == 0


def test_a_stage_may_be_left_out() -> None:
    head = Head(pools={"prompt_encoder": ["a"], "image_encoder": ["b"], "denoiser": ["c"], "decoder": ["d"]})
    work = head.until("prompt_encoder")
    head.staged(work, next_stage="denoiser")
    (denoise,) = head.given()
    assert denoise.stage == "denoiser"


def test_instances_are_asked_in_turn() -> None:
    head = Head(slots=2)
    seen = []
    for number in range(4):
        work = head.until("denoiser", f"r{number}")
        seen.append(work.index)
    assert seen == [0, 1, 0, 1]


def test_the_emptiest_instance_is_asked_first() -> None:
    head = Head(policy="max_free_slots", slots=1)
    head.register("denoiser", 1, epoch="two", slots=3)
    head.epochs["denoiser", 1] = "two"
    assert [head.until("denoiser", f"r{number}").index for number in range(3)] == [1, 1, 0]


def test_no_more_than_its_slots_are_given_to_an_instance() -> None:
    head = Head(slots=1)
    head.scheduler.submit("a")
    head.scheduler.submit("b")
    (first,) = head.given()
    assert head.given() == []
    head.staged(first)
    assert {work.stage for work in head.given()} == {"denoiser", "encoder"}


def test_a_dead_instance_gets_nothing_and_its_work_goes_to_another() -> None:
    head = Head(dead_after_s=5.0)
    work = head.until("denoiser")
    head.silent.add(("denoiser", work.index))
    actions = head.pass_time(6.0)
    (again,) = [one for one in actions if isinstance(one, Dispatch)]
    assert again.index != work.index
    assert again.attempt > work.attempt
    assert again.given == work.given, "its input is still where it was"
    assert "gave no sign of life" in str(head.scheduler._queue.requests()[0].error_message)
    assert head.scheduler.problems() == []
    # What the dead one made after all is dropped, and does not count.
    assert head.staged(work) == [
        Release(stage="denoiser", index=work.index, request_id="r", attempt=work.attempt),
    ]
    assert head.given() == []
    head.scheduler.submit("other")
    (encode,) = head.given()
    head.staged(encode)
    assert head.given() == [], "the living one is busy, the dead one gets nothing"


def test_an_instance_that_was_thought_dead_comes_back() -> None:
    head = Head(dead_after_s=5.0)
    head.silent.add(("encoder", 0))
    head.pass_time(6.0)
    assert head.scheduler.problems() == ["no encoder is alive; tried tcp://127.0.0.1:1"]
    head.scheduler.submit("r")
    assert head.given() == []
    head.silent.clear()
    head.register("encoder", 0)
    assert head.scheduler.problems() == []
    assert [work.stage for work in head.given()] == ["encoder"]


def test_a_restarted_instance_gets_its_work_anew_and_at_once() -> None:
    head = Head()
    work = head.until("encoder")
    head.register("encoder", 0, epoch="two")
    head.clock.advance(0.2)  # the pause before another attempt
    (again,) = head.given()
    assert (again.epoch, again.request_id) == ("two", "r")
    assert again.attempt > work.attempt


def test_the_same_registration_again_changes_nothing() -> None:
    head = Head()
    work = head.until("encoder")
    head.register("encoder", 0)
    assert head.given() == []
    assert head.staged(work) == []


def test_a_lost_input_is_made_again() -> None:
    head = Head()
    work = head.until("denoiser")
    head.failed(work, PeerLost("the encoder is gone"), lost_input=True)
    (again,) = head.given()
    assert again.stage == "encoder"
    head.staged(again)
    (denoise,) = head.given()
    assert denoise.given is not None
    assert denoise.given.manifest["attempt"] == again.attempt


def test_attempts_are_bounded_and_the_client_is_told_why() -> None:
    head = Head(attempts=2)
    work = head.until("denoiser")
    head.failed(work, PeerLost("no answer"))
    head.clock.advance(1.0)
    (again,) = head.given()
    head.failed(again, PeerLost("no answer either"))
    (failed,) = [action for action in head.poll() if isinstance(action, Failed)]
    assert failed.request_id == "r"
    assert "no answer either" in failed.error
    assert "denoiser" in failed.error
    assert head.scheduler.snapshot()["active"] == 0


def test_a_final_error_is_told_at_once_and_everything_is_released() -> None:
    head = Head()
    work = head.until("denoiser")
    error = CapacityError("64 GiB do not fit in the pool of 1 GiB")
    assert head.failed(work, error) == [
        Release(stage="denoiser", index=work.index, request_id="r", attempt=work.attempt)
    ]
    actions = head.poll()
    (failed,) = [action for action in actions if isinstance(action, Failed)]
    assert "64 GiB do not fit" in failed.error
    assert failed.code == CapacityError.code
    assert [one.stage for one in actions if isinstance(one, Release)] == ["encoder"]


def test_a_late_failure_changes_nothing() -> None:
    head = Head(dead_after_s=5.0)
    work = head.until("denoiser")
    head.silent.add(("denoiser", work.index))
    head.pass_time(6.0)
    assert head.failed(work, CapacityError("too late")) == []
    assert not [action for action in head.poll() if isinstance(action, Failed)]


def test_time_is_told_apart_into_waiting_and_running() -> None:
    head = Head(request_s=30.0, queued_s=4.0, slots=1)
    head.scheduler.submit("runs")
    head.scheduler.submit("waits")
    (running,) = head.given()
    failed = [action for action in head.pass_time(5.0) if isinstance(action, Failed)]
    assert [one.request_id for one in failed] == ["waits"]
    assert "waited" in failed[0].error
    assert "encoder" in failed[0].error
    assert running.request_id == "runs"
    failed = [action for action in head.pass_time(30.0) if isinstance(action, Failed)]
    assert [one.request_id for one in failed] == ["runs"]
    assert "deadline passed while running" in failed[0].error


def test_work_that_never_came_is_given_again() -> None:
    head = Head(dead_after_s=3.0)
    work = head.until("encoder")
    head.holding["encoder", 0].clear()
    given = [action for action in head.pass_time(8.0) if isinstance(action, Dispatch)]
    assert given
    assert given[0].attempt > work.attempt


def test_a_large_result_may_take_longer_than_signs_of_life() -> None:
    head = Head(dead_after_s=3.0)
    work = head.until("decoder")
    head.holding["decoder", 0].clear()
    head.scheduler.sent("r", work.attempt)
    assert not [action for action in head.pass_time(60.0) if isinstance(action, Dispatch)]
    assert head.scheduler.finished("r")
    assert head.scheduler.snapshot()["served"] == 1


def test_a_result_that_never_comes_is_made_again() -> None:
    head = Head(dead_after_s=3.0)
    work = head.until("decoder")
    head.holding["decoder", 0].clear()
    head.scheduler.sent("r", work.attempt)
    given = [action for action in head.pass_time(130.0) if isinstance(action, Dispatch)]
    assert given
    assert given[0].attempt > work.attempt


def test_what_is_held_in_vain_is_released() -> None:
    head = Head()
    released = head.scheduler.beat("denoiser", 0, epoch="one", holding=[("unknown", 7)])
    assert released == [Release(stage="denoiser", index=0, request_id="unknown", attempt=7)]


def test_a_cancelled_request_is_released_and_its_result_dropped() -> None:
    head = Head()
    work = head.until("denoiser")
    released = head.scheduler.cancel("r")
    assert ("denoiser", work.attempt) in {(one.stage, one.attempt) for one in released if isinstance(one, Release)}
    assert head.staged(work) != []
    assert head.poll() == []
    assert head.scheduler.cancel("r") == []


def test_with_credits_no_work_is_begun_that_nobody_downstream_could_take() -> None:
    head = Head(policy="credits", slots=2)
    for index in range(2):
        head.register("denoiser", index, epoch="two", slots=1, buffers=1)
        head.epochs["denoiser", index] = "two"
    for number in range(6):
        head.scheduler.submit(f"r{number}")
    first = head.given()
    assert len(first) == 2
    for work in first:
        head.staged(work)
    # Two are denoised, two more may be encoded; the last two wait although the encoder has free slots.
    given = head.given()
    assert sorted(work.stage for work in given) == ["denoiser", "denoiser", "encoder", "encoder"]
    for work in given:
        if work.stage == "encoder":
            head.staged(work)
    assert head.given() == []
    assert head.scheduler.snapshot()["stages"]["encoder"]["waits_for_credit"]


def test_without_credits_the_encoder_goes_on() -> None:
    head = Head(policy="round_robin", slots=1)
    for number in range(6):
        head.scheduler.submit(f"r{number}")
    encoded = 0
    for _ in range(6):
        for work in head.given():
            if work.stage == "encoder":
                encoded += 1
                head.staged(work)
    assert encoded == 6


@pytest.mark.parametrize(("policy", "first"), [("credits", "batch"), ("priority", "urgent"), ("affinity", "urgent")])
def test_a_class_counts_where_the_policy_says_so(policy: str, first: str) -> None:
    head = Head(policy=policy, slots=1)
    blocked = head.until("encoder", "before")
    head.scheduler.submit("batch", priority="batch")
    head.scheduler.submit("urgent", priority="interactive")
    head.staged(blocked)
    encoding = [work.request_id for work in head.given() if work.stage == "encoder"]
    assert encoding == [first]


def test_affinity_brings_a_request_where_it_wants_to_be() -> None:
    head = Head(policy="affinity", slots=1)
    head.register("denoiser", 1, epoch="two", slots=1, labels={"host": "b"})
    head.epochs["denoiser", 1] = "two"
    head.scheduler.submit("r", affinity={"host": "b"})
    head.clock.advance(3.0)  # the encoder has no such label, and takes it after a while
    for place, epoch in head.epochs.items():
        head.scheduler.beat(*place, epoch=epoch, holding=())
    (work,) = head.given()
    head.staged(work)
    (denoise,) = head.given()
    assert denoise.index == 1


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="policy='fastest'"):
        HeadScheduler(POOLS, policy="fastest")
    with pytest.raises(ConfigError, match="stage 'decoder' has no instance"):
        HeadScheduler({**POOLS, "decoder": []})
    with pytest.raises(ConfigError, match="dead_after_s"):
        Limits(dead_after_s=0)
    with pytest.raises(ConfigError, match=r"denoiser\[2\]"):
        Head().scheduler.register("denoiser", 2, epoch="x", slots=1)


def test_all_requests_may_end_at_once() -> None:
    head = Head(request_s=10.0)
    for number in range(2500):
        head.scheduler.submit(f"r{number}")
    head.clock.advance(11.0)
    failed = [action for action in head.poll() if isinstance(action, Failed)]
    assert len(failed) == 2500, "more than the queue's feed keeps"
    assert all("deadline passed" in one.error for one in failed)
    assert head.scheduler.snapshot()["active"] == 0


def test_a_result_counts_although_the_head_stood_still() -> None:
    head = Head(dead_after_s=5.0)
    head.until("decoder")
    head.clock.advance(60.0)  # beyond the queue's own lease
    head.scheduler.finished("r")
    assert head.poll() == []
    assert head.scheduler.snapshot()["active"] == 0


def test_the_last_stage_makes_input_for_nobody() -> None:
    head = Head()
    work = head.until("decoder")
    with pytest.raises(WireError, match="does not follow"):
        head.staged(work)
    assert head.scheduler.attempt_of("r", "decoder") == work.attempt


def test_what_a_returned_instance_still_offers_is_released() -> None:
    head = Head()
    work = head.until("denoiser")
    encoded = 1
    assert head.scheduler.beat("encoder", 0, epoch="one", holding=(), offered=[("r", encoded)]) == []
    head.silent.add(("encoder", 0))
    head.pass_time(6.0)
    head.failed(work, CapacityError("final"))
    assert not [one for one in head.poll() if isinstance(one, Release) and one.stage == "encoder"]
    head.register("encoder", 0)
    assert head.scheduler.beat("encoder", 0, epoch="one", holding=(), offered=[("r", encoded)]) == [
        Release(stage="encoder", index=0, request_id="r", attempt=encoded)
    ]


def test_the_last_words_of_a_process_do_not_put_its_successor_out() -> None:
    head = Head()
    head.register("encoder", 0, epoch="two")
    work = head.until("encoder")
    assert not head.scheduler.register("encoder", 0, epoch="one", slots=1)
    assert head.scheduler.index_of("encoder", "two") == 0
    assert head.scheduler.attempt_of("r", "encoder") == work.attempt
