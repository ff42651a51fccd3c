"""Random histories: the queue under test does what the queue in memory does, and no history breaks an invariant.

Owns the state machine. It gives both queues the same orders on one clock and compares what they answer, show and tell;
beside that it keeps a small account of its own, which shares nothing with any queue: tokens grow, a claim has one
holder, a request ends once, and what a stage holds is what was sent there. Where the target is the queue in memory
itself, the comparison is with a second one of its kind and only the account can find a fault that both share.

Priorities stay out: how much of the pool each class gets is a queue's own choice, so long as nobody starves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from moonrelay.errors import ConfigError, IntegrityError, MoonrelayError, TransferFailed
from moonrelay.queueing import Job, Pipeline, QueueStats, RequestView, StageQueue, StageSpec, StageTask, Worker
from moonrelay.queueing.task import Plain
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.queue_base import ENDS, LEASE, OpenQueue, Pace, QueueSuite
from moonrelay_conformance.targets.parts import QueueTarget
from moonrelay_conformance.targets.queues import InstalledQueue

EXAMPLES: Final = 16
STEPS: Final = 25
_STAGES: Final = ("encode", "denoise", "decode")
_PIPELINE: Final = Pipeline(
    [
        StageSpec(name="encode", downstream="denoise"),
        StageSpec(name="denoise", kind="admission", downstream="decode"),
        StageSpec(name="decode"),
    ]
)
_SETTINGS: Final[dict[str, object]] = {"max_depth": 8, "keep_ended": 6, "keep_events": 10_000}
_LABELS: Final = st.sampled_from([None, {"host": "a"}, {"host": "b"}])
_IDS: Final = st.sampled_from([f"r{number}" for number in range(8)])
_ERRORS: Final = st.sampled_from([TransferFailed("flaky"), ConfigError("wrong"), IntegrityError("bytes")])
_PICK: Final = st.integers(0, 99)


class Histories(QueueSuite):
    """The state machine as a test."""

    @promise(Level.L1, "Random histories go as they do in the queue in memory, and break no invariant")
    def test_random_histories_agree_with_the_model(self, target: QueueTarget) -> None:
        class Machine(QueueMachine):
            tested = target

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=EXAMPLES if target.takes_clock else EXAMPLES // 2,
                stateful_step_count=STEPS,
                deadline=None,
                derandomize=True,
                database=None,
                # Shrinking costs more than the whole suite; the history that failed is printed either way.
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )


@dataclass(slots=True)
class Account:
    """What must be true of any history, kept without any queue.

    Attributes:
        token: The largest token seen.
        payloads: What was sent to each stage of each living request.
        ended: How each request's present life ended.
        seen: Number of the newest event.
        handed: Deliveries of each request's stage in its present life.
    """

    token: int = 0
    payloads: dict[tuple[str, str], object] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    seen: int = 0
    handed: dict[tuple[str, str], int] = field(default_factory=dict)

    def begin(self, request_id: str, stage: str, payload: object) -> None:
        """Note that a request was taken in."""
        self.ended.pop(request_id, None)
        for record in (self.payloads, self.handed):
            for key in [key for key in record if key[0] == request_id]:
                del record[key]
        self.payloads[request_id, stage] = payload

    def deliver(self, job: Job) -> None:
        """Check a delivery."""
        assert job.token > self.token, f"token {job.token} came after {self.token}"
        self.token = job.token
        key = job.request_id, job.stage
        assert job.request_id not in self.ended, f"{job.request_id} was delivered after its end"
        assert key in self.payloads, f"{key} was delivered though nobody sent it there"
        assert job.task.payload == self.payloads[key], f"{key} came with another stage's or request's payload"
        self.handed[key] = self.handed.get(key, 0) + 1
        assert job.attempt == self.handed[key], f"{key} is attempt {job.attempt} at delivery {self.handed[key]}"

    def end(self, request_id: str, kind: str) -> None:
        """Check an end."""
        assert request_id not in self.ended, f"{request_id} ended as {self.ended.get(request_id)} and as {kind}"
        self.ended[request_id] = kind


class QueueMachine(RuleBasedStateMachine):
    """The same orders to two queues.

    Attributes:
        tested: The queue under test; the other one is the queue in memory.
    """

    tested: ClassVar[QueueTarget]

    def __init__(self) -> None:
        super().__init__()
        target = self.tested
        self.folder = tempfile.TemporaryDirectory(prefix="moonrelay-conformance-")
        self.pace = Pace(manual=target.takes_clock)
        targets = InstalledQueue("memory"), target
        self.opened = [OpenQueue(one, self.pace, Path(self.folder.name)) for one in targets]
        # Where time cannot be moved, nothing may hang on it: the two queues' moments would differ.
        still = {} if target.takes_clock else {"lease_s": 3600.0, "renew_s": 1000.0, "retry_delay_s": 0.0}
        config: dict[str, Any] = {**_SETTINGS, **still}
        self.queues: list[StageQueue] = [opened(pipeline=_PIPELINE, **config) for opened in self.opened]
        self.workers: list[list[Worker]] = []
        self.jobs: list[list[Job]] = []
        self.sent = 0
        self.account = Account()

    def both(self, act: Callable[[int], object]) -> object:
        """Do the same on both queues; the outcomes must be the same. A refusal is compared by its class."""
        outcomes: list[object] = []
        for number in range(2):
            try:
                outcomes.append(act(number))
            except MoonrelayError as exc:
                outcomes.append((type(exc), exc.retryable))
        model, got = outcomes
        assert got == model, f"the queue gave {got!r}, the model {model!r}"
        return got

    @initialize(buffers=st.integers(1, 2))
    def open_pools(self, buffers: int) -> None:
        for stage in _STAGES:
            self.join_pool(stage, 2, buffers, None)
            self.join_pool(stage, 1, 1, {"host": "a"})
        for number in range(4):
            self.give(f"r{number}", "encode")
        # Begin in the middle of things: one request in each stage, so that short histories see all of them.
        error = TransferFailed("flaky")
        pools = [self.workers[2 * place] for place in range(3)]
        for place in (0, 1, 0):
            assert self.claim_one(pools[place])
            self.act(self.jobs[-1], "advance", error=error)
        for pair in pools:
            assert self.claim_one(pair)

    def join_pool(self, stage: str, slots: int, buffers: int, affinity: dict[str, str] | None) -> None:
        self.workers.append(
            [
                queue.register_worker(stage, slots=slots, buffers=buffers, affinity=affinity, heartbeat=False)
                for queue in self.queues
            ]
        )

    def give(self, request_id: str, stage: str, *, if_absent: bool = False, **fields: object) -> None:
        self.sent += 1
        payload: dict[str, Plain] = {"request": request_id, "sent": self.sent}
        task = StageTask(stage=stage, request_id=request_id, payload=payload, **fields)  # type: ignore[arg-type]
        known = {one.request_id for one in self.queues[1].requests()}
        self.follow()
        if self.both(lambda n: self.queues[n].submit(task, if_absent=if_absent)) is True:
            assert request_id not in known, f"{request_id} was taken in twice"
            self.account.begin(request_id, stage, payload)

    @rule(
        request_id=_IDS,
        stage=st.sampled_from(["encode", "encode", "encode", "denoise", "decode"]),
        deadline=st.sampled_from([None, None, 5.0, 40.0]),
        affinity=_LABELS,
        max_attempts=st.sampled_from([None, 1, 2]),
        if_absent=st.booleans(),
    )
    def submit(
        self,
        request_id: str,
        stage: str,
        deadline: float | None,
        affinity: dict[str, str] | None,
        max_attempts: int | None,
        if_absent: bool,
    ) -> None:
        deadline_s = None if deadline is None or self.pace.clock is None else self.pace.s(deadline)
        if self.pace.clock is None:
            affinity = None  # its wait ends by time
        self.give(
            request_id,
            stage,
            if_absent=if_absent,
            deadline_s=deadline_s,
            affinity=affinity,
            max_attempts=max_attempts,
        )

    @rule(stage=st.sampled_from(_STAGES), slots=st.integers(1, 2), buffers=st.integers(0, 2), affinity=_LABELS)
    def join(self, stage: str, slots: int, buffers: int, affinity: dict[str, str] | None) -> None:
        if len(self.workers) < 8:
            self.join_pool(stage, slots, buffers, affinity)

    @precondition(lambda self: self.workers)
    @rule(pick=_PICK, many=st.integers(1, 4))
    def claim(self, pick: int, many: int) -> None:
        """Let workers claim, beginning with one of them, until ``many`` jobs are out."""
        for turn in range(len(self.workers)):
            many -= self.claim_one(self.workers[(pick + turn) % len(self.workers)])
            if not many:
                return

    def claim_one(self, pair: list[Worker]) -> bool:
        free = self.queues[1].stats().stages["decode"].credits_free
        self.follow()
        model, got = (worker.take(timeout_s=0) for worker in pair)
        if model is None or got is None:
            assert (got is None) == (model is None), f"the queue gave {got!r}, the model {model!r}"
            return False
        assert (got.request_id, got.stage, got.attempt) == (model.request_id, model.stage, model.attempt)
        assert (got.task.payload, got.task.handle) == (model.task.payload, model.task.handle)
        self.jobs.append([model, got])
        self.account.deliver(got)
        assert got.stage != "denoise" or free >= 1, "denoise was admitted without a credit"
        return True

    @precondition(lambda self: self.workers)
    @rule(
        pick=_PICK,
        stop=st.sampled_from([None, *_STAGES]),
        trouble=st.sampled_from([None, *_STAGES]),
        lose=st.booleans(),
        error=_ERRORS,
    )
    def work(self, pick: int, stop: str | None, trouble: str | None, lose: bool, error: MoonrelayError) -> None:
        """Let all pools do their work, but for one stage that stands still and one that has trouble."""
        for turn in range(len(self.workers)):
            pair = self.workers[(pick + turn) % len(self.workers)]
            if pair[0].stage == stop or not self.claim_one(pair):
                continue
            act = "advance" if pair[0].stage != trouble else ("lose" if lose else "fail")
            self.act(self.jobs[-1], "finish" if (act, pair[0].stage) == ("advance", "decode") else act, error=error)

    @precondition(lambda self: self.jobs)
    @rule(
        pick=_PICK,
        act=st.sampled_from(["advance", "advance", "advance", "finish", "fail", "lose", "lose", "return", "progress"]),
        error=_ERRORS,
        skip=st.sampled_from([1, 1, 1, 2, 0]),
        affinity=_LABELS,
        fraction=st.floats(0, 1),
    )
    def settle(
        self, pick: int, act: str, error: MoonrelayError, skip: int, affinity: dict[str, str] | None, fraction: float
    ) -> None:
        """Do something with a job, most often one of the newest; old ones, lost or settled, must be refused."""
        pair = self.jobs[-1 - pick % min(len(self.jobs), 4 if pick < 80 else 99)]
        if self.pace.clock is None:
            affinity = None
        self.act(pair, act, error=error, skip=skip, affinity=affinity, fraction=fraction)

    def act(
        self,
        pair: list[Job],
        act: str,
        *,
        error: MoonrelayError,
        skip: int = 1,
        affinity: dict[str, str] | None = None,
        fraction: float = 0.5,
    ) -> None:
        self.sent += 1
        below = _STAGES[min(2, _STAGES.index(pair[1].stage) + skip)]
        payload: dict[str, Plain] = {"request": pair[1].request_id, "sent": self.sent}
        task = StageTask(stage=below, handle=b"h", payload=payload, affinity=affinity)
        acts: dict[str, Callable[[Job], object]] = {
            "advance": lambda job: job.complete(next_task=task),
            "finish": lambda job: job.complete(result=payload),
            "fail": lambda job: job.fail(error),
            "lose": lambda job: job.lost_input(error),
            "return": lambda job: job.give_back("enough"),
            "progress": lambda job: job.progress(fraction, "on it"),
        }
        done = self.both(lambda n: acts[act](pair[n])) is None
        assert not done or pair[1].token in self.newest().values(), "an old token was accepted"
        if done and act == "advance":
            self.account.payloads[pair[1].request_id, below] = payload
        if done and act == "finish":
            assert self.queues[1].result(pair[1].request_id, timeout_s=0) == payload
            assert self.queues[0].result(pair[1].request_id, timeout_s=0) == payload

    def newest(self) -> dict[str, int]:
        """Return the token of each request's last delivery."""
        return {got.request_id: got.token for _, got in self.jobs}

    @precondition(lambda self: self.workers)
    @rule(pick=_PICK, leave=st.sampled_from([False, False, False, True]))
    def renew(self, pick: int, leave: bool) -> None:
        number = pick % len(self.workers)
        pair = self.workers[number]
        self.both(lambda n: pair[n].renew())
        model, got = ([(job.request_id, type(job.lost)) for job in worker.held] for worker in pair)
        assert got == model
        if leave:
            for worker in self.workers.pop(number):
                worker.close()

    @rule(request_id=_IDS, act=st.sampled_from(["cancel", "forget", "forget", "result", "result"]))
    def client(self, request_id: str, act: str) -> None:
        acts: dict[str, Callable[[StageQueue], object]] = {
            "cancel": lambda queue: queue.cancel(request_id),
            "forget": lambda queue: queue.forget(request_id),
            "result": lambda queue: queue.result(request_id, timeout_s=0),
        }
        self.both(lambda n: acts[act](self.queues[n]))

    @precondition(lambda self: self.pace.clock is not None)
    @rule(units=st.sampled_from([0.05, 0.3, 1.2, 3.0, 6.0, LEASE + 1]))
    def pass_time(self, units: float) -> None:
        self.pace.advance(units)

    @invariant()
    def both_show_the_same(self) -> None:
        model, got = ([self.shown(one, n) for one in queue.requests()] for n, queue in enumerate(self.queues))
        assert got == model
        own, other = (self.load(queue.stats(), n) for n, queue in enumerate(self.queues))
        assert other == own
        self.follow()

    def follow(self) -> None:
        """Compare what both have told since, and enter it into the account."""
        model, got = (queue.events(self.account.seen) for queue in self.queues)
        assert [_told(event) for event in got] == [_told(event) for event in model]
        for event in got:
            assert event.number == self.account.seen + 1, "event numbers have a gap"
            self.account.seen = event.number
            if event.kind in ENDS:
                self.account.end(event.request_id, event.kind)

    @invariant()
    def what_is_shown_fits_together(self) -> None:
        """Hold the queue under test against the account alone."""
        queue = self.queues[1]
        views, stats = queue.requests(), queue.stats()
        self.follow()
        for one in views:
            assert (one.state in ENDS) == (one.request_id in self.account.ended), f"{one.request_id} is {one.state}"
            assert one.state not in ENDS or self.account.ended[one.request_id] == one.state
        tokens = [one.token for one in views if one.state == "running"]
        assert len(set(tokens)) == len(tokens), "two jobs have one token"
        assert all(self.newest().get(one.request_id) == one.token for one in views if one.state == "running")
        decode = stats.stages["decode"]
        held = sum((one.stage, one.state) in (("denoise", "running"), ("decode", "queued")) for one in views)
        total = sum(worker.buffers for worker in stats.workers if worker.stage == "decode")
        assert (decode.credits_held, decode.credits_total) == (held, total)
        assert decode.credits_free == max(0, total - held)
        assert stats.active == sum(one.state not in ENDS for one in views)

    def teardown(self) -> None:
        for opened in self.opened:
            opened.close()
        self.folder.cleanup()

    def shown(self, one: RequestView, number: int) -> tuple[Any, ...]:
        """Return what two queues must show alike of a request; tokens by their order, workers by their place."""
        given = [pair[number].worker_id for pair in self.workers]
        timed = self.pace.clock is not None
        return (
            one.request_id,
            one.state,
            one.stage,
            one.attempt,
            given.index(one.worker) if one.worker in given else one.worker is None,
            next((place for place, pair in enumerate(self.jobs) if pair[number].token == one.token), None),
            one.fraction,
            one.note,
            one.error_code,
            (one.submitted_at_s, one.updated_at_s, one.deadline_in_s) if timed else None,
        )

    def load(self, stats: QueueStats, number: int) -> tuple[Any, ...]:
        """Return what two queues must show alike of their load."""
        given = [pair[number].worker_id for pair in self.workers]
        workers = sorted(
            (given.index(one.worker_id), one.running, one.lease_left_s if self.pace.clock else 0.0)
            for one in stats.workers
            if one.worker_id in given
        )
        return dict(stats.stages), workers, stats.active, dict(stats.ended), stats.last_event


def _told(event: Any) -> tuple[Any, ...]:
    return event.kind, event.request_id, event.stage, event.attempt, event.fraction


__all__ = ["EXAMPLES", "STEPS", "Account", "Histories", "QueueMachine"]
