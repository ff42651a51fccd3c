"""Any history of requests, reports, deaths, restarts, lost and late messages: what must be true of all of them.

The machine plays the roles' processes and the head's loop, by the messages that `moonrelay_sglang.head` would pass on.
Instances keep what they were given and made until they are told to drop it, as `moonrelay_sglang.worker` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonrelay.clock import ManualClock
from moonrelay.errors import CapacityError, PeerLost
from moonrelay_sglang.actions import Action, Dispatch, Failed, Limits, Release, StageInput
from moonrelay_sglang.scheduling import POLICIES, HeadScheduler

POOLS = {"encoder": ["e0", "e1"], "denoiser": ["d0", "d1"], "decoder": ["v0"]}
PLACES = [(stage, index) for stage, endpoints in POOLS.items() for index in range(len(endpoints))]
LIMITS: dict[str, Any] = {"request_s": 120.0, "queued_s": 50.0, "dead_after_s": 5.0, "attempts": 3}
BUFFERS = 2
PICK = st.integers(0, 999)
PLACE = st.sampled_from(PLACES)
CLASSES = st.sampled_from([None, "interactive", "standard", "batch"])
LABELS = st.sampled_from([None, {"zone": "0"}, {"zone": "1"}])


@dataclass
class Process:
    """A role's process."""

    stage: str
    index: int
    epoch: str
    slots: int
    silent: bool = False
    holding: set[tuple[str, int]] = field(default_factory=set)
    offered: set[tuple[str, int]] = field(default_factory=set)


class HeadMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.born = 0
        self.submitted = 0
        self.ended: dict[str, str] = {}
        self.active: set[str] = set()
        self.attempts: set[int] = set()
        self.heard_at_s: dict[tuple[str, int], float] = {}
        self.registered: dict[tuple[str, int], str] = {}
        # Reports of deliveries that somebody has made already, or that another process made: they may come again.
        self.late: list[Dispatch] = []
        self.gone: list[Process] = []

    @initialize(policy=st.sampled_from(POLICIES), slots=st.lists(st.integers(1, 3), min_size=5, max_size=5))
    def begin(self, policy: str, slots: list[int]) -> None:
        self.scheduler = HeadScheduler(POOLS, policy=policy, limits=Limits(**LIMITS), clock=self.clock)
        self.credits = POLICIES.index(policy) >= POLICIES.index("credits")
        self.processes = {
            place: Process(*place, epoch=self._epoch(), slots=number)
            for place, number in zip(PLACES, slots, strict=True)
        }
        for place in PLACES:
            self._beat(self.processes[place])

    # -- clients

    @rule(priority=CLASSES, affinity=LABELS)
    def submit(self, priority: Any, affinity: dict[str, str] | None) -> None:
        self.submitted += 1
        self.scheduler.submit(f"r{self.submitted}", priority=priority, affinity=affinity)
        self.active.add(f"r{self.submitted}")

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        if self.submitted:
            request_id = f"r{pick % self.submitted + 1}"
            was_active = request_id in self.active
            actions = self.scheduler.cancel(request_id)
            if was_active:
                self._end(request_id, "cancelled")
            else:
                assert actions == []
            self._carry_out(actions)

    # -- instances

    @rule(pick=PICK)
    def staged(self, pick: int) -> None:
        work = self._some_work(pick)
        if work is not None and work.stage != "decoder":
            self._leave(work)
            self._offer(work)
            self._report_staged(work)

    @rule(pick=PICK)
    def finished(self, pick: int) -> None:
        work = self._some_work(pick, stage="decoder")
        if work is not None:
            self._leave(work)
            self._report_finished(work)

    @rule(pick=PICK, final=st.booleans(), lost_input=st.booleans())
    def failed(self, pick: int, final: bool, lost_input: bool) -> None:
        work = self._some_work(pick)
        if work is not None:
            self._leave(work)
            self._report_failed(work, final, lost_input)

    @rule(pick=PICK)
    def reported_again(self, pick: int) -> None:
        if self.late:
            work = self.late[pick % len(self.late)]
            if work.stage == "decoder":
                self._report_finished(work)
            else:
                self._report_staged(work)

    @rule(pick=PICK)
    def failed_too_late(self, pick: int) -> None:
        given_up = [
            work for work in self.late if self.scheduler.attempt_of(work.request_id, work.stage) != work.attempt
        ]
        if given_up:
            before = self.scheduler.snapshot()
            self._report_failed(given_up[pick % len(given_up)], True, False)
            assert self.scheduler.snapshot() == before

    @rule(place=PLACE)
    def fall_silent(self, place: tuple[str, int]) -> None:
        self.processes[place].silent = True

    @rule(place=PLACE)
    def speak_again(self, place: tuple[str, int]) -> None:
        self.processes[place].silent = False
        self._beat(self.processes[place])

    @rule(place=PLACE)
    def restart(self, place: tuple[str, int]) -> None:
        before = self.processes[place]
        if self.registered[place] == before.epoch:  # of a process that was never heard before, nobody could know
            self.gone.append(before)
        self.late += [
            Dispatch(stage=before.stage, index=before.index, epoch=before.epoch, request_id=name, attempt=n, given=None)
            for name, n in sorted(before.holding)
        ]
        self.processes[place] = Process(*place, epoch=self._epoch(), slots=before.slots)

    @rule(pick=PICK)
    def last_words(self, pick: int) -> None:
        """A sign of life of a process that has ended arrives after those of its successor."""
        if self.gone:
            before = self.gone[pick % len(self.gone)]
            now = self.processes[before.stage, before.index]
            if not now.silent:
                self._beat(now)
                running = self.scheduler.snapshot()["stages"][before.stage]["running"]
                self._beat(before)
                assert self.scheduler.snapshot()["stages"][before.stage]["running"] == running
                assert self.scheduler.index_of(now.stage, now.epoch) == now.index

    @rule(place=PLACE, pick=PICK)
    def lose_work_on_its_way(self, place: tuple[str, int], pick: int) -> None:
        holding = sorted(self.processes[place].holding)
        if holding:
            self.processes[place].holding.discard(holding[pick % len(holding)])

    # -- time

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._beat_all()
        self._poll()

    @rule(seconds=st.sampled_from([6.0, 25.0, 60.0]))
    def the_head_stands_still(self, seconds: float) -> None:
        """What roles said meanwhile comes first when it goes on, in any order with what follows."""
        self.clock.advance(seconds)

    @rule()
    def poll(self) -> None:
        self._poll()

    @rule()
    def beat_all(self) -> None:
        self._beat_all()

    # -- what must be true

    @invariant()
    def nothing_is_kept_of_the_ended(self) -> None:
        assert set(self.scheduler._requests) == self.active
        assert set(self.scheduler._running) <= self.active
        assert {view.request_id for view in self.scheduler._queue.requests()} >= set(self.scheduler._running)

    def teardown(self) -> None:
        if not self.attempts and not self.active:
            return
        for process in self.processes.values():
            process.silent = False
        for _ in range(400):
            if not self.active:
                break
            self.pass_time(1.0)
            for work in [self._some_work(0), self._some_work(1), self._some_work(0, stage="decoder")]:
                if work is not None and (work.request_id, work.attempt) in self._process(work).holding:
                    self._leave(work)
                    if work.stage == "decoder":
                        self._report_finished(work)
                    else:
                        self._offer(work)
                        self._report_staged(work)
        assert not self.active, "instances live and time passes"
        for _ in range(2):
            self._beat_all()
            self._poll()
        assert not self.scheduler._requests
        assert not self.scheduler._running
        assert not self.scheduler._queue.requests()
        assert self.scheduler.snapshot()["active"] == 0
        for process in self.processes.values():
            assert not process.holding, "work in vain goes on"
            assert not process.offered, "what nobody needs any more keeps memory"
        assert len(self.ended) == self.submitted
        self.scheduler.close()

    # -- inside

    def _epoch(self) -> str:
        self.born += 1
        return f"epoch-{self.born}"

    def _process(self, work: Dispatch) -> Process:
        return self.processes[work.stage, work.index]

    def _some_work(self, pick: int, stage: str | None = None) -> Dispatch | None:
        found = [
            Dispatch(stage=one.stage, index=one.index, epoch=one.epoch, request_id=name, attempt=number, given=None)
            for one in self.processes.values()
            if stage in (None, one.stage) and not one.silent
            for name, number in sorted(one.holding)
        ]
        return found[pick % len(found)] if found else None

    def _leave(self, work: Dispatch) -> None:
        self._process(work).holding.discard((work.request_id, work.attempt))
        self.late.append(work)

    def _offer(self, work: Dispatch) -> None:
        # What the request offered before is withdrawn.
        process = self._process(work)
        process.offered = {one for one in process.offered if one[0] != work.request_id}
        process.offered.add((work.request_id, work.attempt))

    def _report_staged(self, work: Dispatch) -> None:
        index = self.scheduler.index_of(work.stage, work.epoch)
        if index is not None:
            given = StageInput(manifest={"attempt": work.attempt}, scalar_fields={})
            self._carry_out(self.scheduler.staged(work.stage, index, work.request_id, work.attempt, given))

    def _report_failed(self, work: Dispatch, final: bool, lost_input: bool) -> None:
        error = CapacityError("too large") if final else PeerLost("no answer")
        self._carry_out(self.scheduler.failed(work.request_id, work.attempt, error, lost_input=lost_input))

    def _report_finished(self, work: Dispatch) -> None:
        was_active = work.request_id in self.active
        actions = self.scheduler.finished(work.request_id)
        if was_active:
            self._end(work.request_id, "finished")
        else:
            assert actions == []
        self._carry_out(actions)

    def _beat(self, process: Process) -> None:
        place = process.stage, process.index
        told = self.scheduler.register(
            *place,
            epoch=process.epoch,
            slots=process.slots,
            buffers=BUFFERS,
            labels={"zone": str(process.index)},
        )
        if told:
            self.heard_at_s[place] = self.clock.monotonic()
            self.registered[place] = process.epoch
        holding, offered = sorted(process.holding), sorted(process.offered)
        self._carry_out(self.scheduler.beat(*place, epoch=process.epoch, holding=holding, offered=offered))

    def _beat_all(self) -> None:
        for process in self.processes.values():
            if not process.silent:
                self._beat(process)

    def _poll(self) -> None:
        actions = self.scheduler.poll()
        self._carry_out(actions)
        stages = self.scheduler.snapshot()["stages"]
        for stage, state in stages.items():
            for one in state["instances"]:
                assert one["running"] <= one["slots"]
            given = [one for one in actions if isinstance(one, Dispatch) and one.stage == stage]
            if self.credits and given and stage != "decoder":
                below = stages["denoiser" if stage == "encoder" else "decoder"]
                room = BUFFERS * sum(one["alive"] for one in below["instances"])
                assert state["running"] + below["queued"] <= room

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Failed):
                self._end(action.request_id, "failed")
                assert action.error
                assert "\n" not in action.error
                assert "not in the queue" not in action.error
                continue
            place = action.stage, action.index
            process = self.processes[place]
            key = action.request_id, action.attempt
            if isinstance(action, Dispatch):
                assert action.request_id in self.active
                assert action.attempt not in self.attempts, "a number is never used again"
                self.attempts.add(action.attempt)
                assert action.epoch == self.registered[place]
                assert self.clock.monotonic() - self.heard_at_s[place] < LIMITS["dead_after_s"]
                assert (action.given is None) == (action.stage == "encoder")
                if process.epoch == action.epoch:
                    process.holding = {one for one in process.holding if one[0] != action.request_id} | {key}
            else:
                assert isinstance(action, Release)
                if process.silent:
                    continue  # the message waits, or is lost with the process
                for kept in (process.holding, process.offered):
                    kept.difference_update([one for one in kept if one[0] == key[0] and one[1] <= key[1]])

    def _end(self, request_id: str, how: str) -> None:
        assert request_id not in self.ended, f"it had {self.ended[request_id]} before"
        self.ended[request_id] = how
        self.active.discard(request_id)


TestHeadMachine = HeadMachine.TestCase
TestHeadMachine.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
