"""SQLite against the model in memory: the same random history gives the same answers, states and events.

Both run the same rules, so the machine also holds both against what must be true of any history: tokens grow, ends are
final and told once, credits are never overdrawn by an admission, attempts are bounded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moonrelay.clock import ManualClock
from moonrelay.errors import ConfigError, IntegrityError, MoonrelayError, TransferFailed
from moonrelay.queueing import Job, Pipeline, StageQueue, StageSpec, StageTask, Worker

STAGES = ("encode", "denoise", "decode")
PIPELINE = Pipeline(
    [
        StageSpec(name="encode", downstream="denoise"),
        StageSpec(name="denoise", kind="admission", downstream="decode"),
        StageSpec(name="decode"),
    ]
)
SETTINGS = {"lease_s": 10.0, "max_depth": 8, "keep_ended": 4, "keep_events": 50, "affinity_wait_s": 3.0}
ENDS = ("done", "failed", "dead", "cancelled")
LABELS = st.sampled_from([None, {"host": "a"}, {"host": "b"}])
IDS = st.sampled_from([f"r{number}" for number in range(10)])
ERRORS = st.sampled_from([TransferFailed("flaky"), ConfigError("wrong"), IntegrityError("bytes")])
PICK = st.integers(0, 99)


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.clock = ManualClock()
        self.queues = [
            StageQueue.connect(url, clock=self.clock, pipeline=PIPELINE, config=SETTINGS)
            for url in ("memory://", f"sqlite:///{self.folder}/queue.db")
        ]
        self.workers: list[list[Worker]] = []
        self.jobs: list[list[Job]] = []
        self.token = 0
        self.seen = 0
        self.ends: Counter[tuple[str, int]] = Counter()
        self.lives: Counter[str] = Counter()

    def both(self, act: Callable[[int], object]) -> object:
        """Do the same on both queues; the outcomes must be the same."""
        outcomes: list[object] = []
        for number in range(2):
            try:
                outcomes.append(act(number))
            except MoonrelayError as exc:
                outcomes.append((type(exc), exc.message, exc.retryable))
        assert outcomes[0] == outcomes[1]
        return outcomes[0]

    @rule(
        request_id=IDS,
        stage=st.sampled_from(["encode", "encode", "encode", "denoise", "decode"]),
        priority=st.sampled_from([None, "interactive", "standard", "batch"]),
        deadline_s=st.sampled_from([None, None, 5.0, 40.0]),
        affinity=LABELS,
        max_attempts=st.sampled_from([None, 1, 2]),
        if_absent=st.booleans(),
    )
    def submit(self, request_id: str, if_absent: bool, **fields: object) -> None:
        task = StageTask(request_id=request_id, payload={"n": 1}, **fields)  # type: ignore[arg-type]
        self.both(lambda n: self.queues[n].submit(task, if_absent=if_absent))

    @initialize(buffers=st.integers(1, 2))
    def open_pools(self, buffers: int) -> None:
        for stage in STAGES:
            self.join_pool(stage, 2, buffers, None)
            self.join_pool(stage, 1, 1, {"host": "a"})
        for number in range(5):
            for queue in self.queues:
                queue.submit(StageTask(stage="encode", request_id=f"r{number}", payload={"n": 1}))

    def join_pool(self, stage: str, slots: int, buffers: int, affinity: dict[str, str] | None) -> None:
        self.workers.append(
            [
                queue.register_worker(stage, slots=slots, buffers=buffers, affinity=affinity, heartbeat=False)
                for queue in self.queues
            ]
        )

    @rule(stage=st.sampled_from(STAGES), slots=st.integers(1, 2), buffers=st.integers(0, 2), affinity=LABELS)
    def join(self, stage: str, slots: int, buffers: int, affinity: dict[str, str] | None) -> None:
        if len(self.workers) < 8:
            self.join_pool(stage, slots, buffers, affinity)

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, many=st.integers(1, 4))
    def claim(self, pick: int, many: int) -> None:
        """Let workers claim, beginning with one of them, until ``many`` jobs are out."""
        for turn in range(len(self.workers)):
            many -= self.claim_one(self.workers[(pick + turn) % len(self.workers)])
            if not many:
                return

    def claim_one(self, pair: list[Worker]) -> bool:
        before = self.queues[0].stats().stages["decode"]
        got = [worker.take(timeout_s=0) for worker in pair]
        if got[0] is None or got[1] is None:
            assert got == [None, None]
            return False
        assert got[0].task == got[1].task
        assert got[0].token == got[1].token > self.token
        self.token = got[0].token
        self.jobs.append([got[0], got[1]])
        if pair[0].stage == "denoise":
            assert before.credits_free >= 1
            after = self.queues[0].stats().stages["decode"]
            assert after.credits_held == before.credits_held + 1 <= after.credits_total
        return True

    @precondition(lambda self: self.workers)
    @rule(
        pick=PICK,
        stop=st.sampled_from([None, *STAGES]),
        trouble=st.sampled_from([None, *STAGES]),
        lose=st.booleans(),
        error=ERRORS,
    )
    def work(self, pick: int, stop: str | None, trouble: str | None, lose: bool, error: MoonrelayError) -> None:
        """Let all pools do their work, but for one stage that stands still and one that has trouble."""
        for turn in range(len(self.workers)):
            pair = self.workers[(pick + turn) % len(self.workers)]
            if pair[0].stage == stop or not self.claim_one(pair):
                continue
            below = STAGES[(STAGES.index(pair[0].stage) + 1) % 3]
            next_task = None if below == "encode" else StageTask(stage=below, handle=b"h")
            for job in self.jobs[-1]:
                if job.stage != trouble:
                    job.complete(next_task=next_task)
                elif lose:
                    job.lost_input(error)
                else:
                    job.fail(error)

    @precondition(lambda self: self.jobs)
    @rule(
        pick=PICK,
        act=st.sampled_from(["advance", "advance", "advance", "finish", "fail", "lose", "lose", "return", "progress"]),
        error=ERRORS,
        skip=st.sampled_from([1, 1, 1, 2, 0]),
        deadline_s=st.sampled_from([None, None, 3.0]),
        affinity=LABELS,
        fraction=st.floats(0, 1),
    )
    def settle(
        self,
        pick: int,
        act: str,
        error: MoonrelayError,
        skip: int,
        deadline_s: float | None,
        affinity: dict[str, str] | None,
        fraction: float,
    ) -> None:
        """Do something with a job, most often one of the newest; old ones, lost or settled, must be refused."""
        pair = self.jobs[-1 - pick % min(len(self.jobs), 4 if pick < 80 else 99)]
        below = STAGES[min(2, STAGES.index(pair[0].stage) + skip)]
        task = StageTask(stage=below, handle=b"h", deadline_s=deadline_s, affinity=affinity)
        acts: dict[str, Callable[[Job], object]] = {
            "advance": lambda job: job.complete(next_task=task),
            "finish": lambda job: job.complete(result=[pick]),
            "fail": lambda job: job.fail(error),
            "lose": lambda job: job.lost_input(error),
            "return": lambda job: job.give_back("enough"),
            "progress": lambda job: job.progress(fraction, "on it"),
        }
        self.both(lambda n: acts[act](pair[n]))

    @precondition(lambda self: self.workers)
    @rule(pick=PICK, leave=st.sampled_from([False, False, False, True]))
    def renew(self, pick: int, leave: bool) -> None:
        number = pick % len(self.workers)
        pair = self.workers[number]
        self.both(lambda n: pair[n].renew())
        assert [job.lost is None for job in pair[0].held] == [job.lost is None for job in pair[1].held]
        if leave:
            for worker in self.workers.pop(number):
                worker.close()

    @rule(request_id=IDS, act=st.sampled_from(["cancel", "forget", "forget", "result", "result"]))
    def client(self, request_id: str, act: str) -> None:
        acts: dict[str, Callable[[StageQueue], object]] = {
            "cancel": lambda queue: queue.cancel(request_id),
            "forget": lambda queue: queue.forget(request_id),
            "result": lambda queue: queue.result(request_id, timeout_s=0),
        }
        self.both(lambda n: acts[act](self.queues[n]))

    @rule(seconds=st.sampled_from([0.05, 0.3, 0.3, 3.0, 6.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def both_show_the_same(self) -> None:
        assert self.queues[0].requests() == self.queues[1].requests()
        stats = self.queues[0].stats()
        assert stats == self.queues[1].stats()
        due = [queue._engine.read(lambda book: book.tx.next_due_s(book.now_s)) for queue in self.queues]  # type: ignore[attr-defined]
        assert due[0] == due[1]
        events = self.queues[0].events(self.seen)
        assert events == self.queues[1].events(self.seen)
        for event in events:
            assert event.number > self.seen
            self.seen = event.number
            if event.kind == "submitted":
                self.lives[event.request_id] += 1
            if event.kind in ENDS:
                self.ends[event.request_id, self.lives[event.request_id]] += 1
        assert all(count == 1 for count in self.ends.values())

    @invariant()
    def credits_follow_what_is_there(self) -> None:
        views, stats = self.queues[1].requests(), self.queues[1].stats()
        decode = stats.stages["decode"]
        held = sum((view.stage, view.state) in (("denoise", "running"), ("decode", "queued")) for view in views)
        total = sum(worker.buffers for worker in stats.workers if worker.stage == "decode")
        assert (decode.credits_held, decode.credits_total) == (held, total)
        assert decode.credits_free == max(0, total - held)

    @invariant()
    def a_job_that_is_not_lost_is_the_only_one_of_its_request(self) -> None:
        tokens = {view.token for view in self.queues[1].requests() if view.state == "running"}
        owners = Counter(job.request_id for _, job in self.jobs if job.token in tokens)
        assert all(count == 1 for count in owners.values())
        assert sum(stage.running for stage in self.queues[1].stats().stages.values()) == len(tokens)

    def teardown(self) -> None:
        for queue in self.queues:
            queue.close()
        shutil.rmtree(self.folder)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
