"""How requests flow in every queue backend: rewinds, credits, order and bounds, on a clock that the test moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    LeaseLost,
    PeerLost,
)
from moonrelay.queueing import Job, Pipeline, StageQueue, StageSpec, StageTask, Worker
from moonrelay.queueing.fairness import longest_wait

Open = Callable[..., StageQueue]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def open_queue(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    opened: list[StageQueue] = []

    def connect(pipeline: Pipeline | None = None, **settings: object) -> StageQueue:
        url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue-{len(opened)}.db"
        queue = StageQueue.connect(url, clock=clock, pipeline=pipeline, config=settings)
        opened.append(queue)
        return queue

    yield connect
    for queue in opened:
        queue.close()


@pytest.fixture
def queue(open_queue: Open) -> StageQueue:
    return open_queue()


def join(queue: StageQueue, stage: str, **kwargs: object) -> Worker:
    return queue.register_worker(stage, heartbeat=False, **kwargs)  # type: ignore[arg-type]


def take(worker: Worker) -> Job:
    job = worker.take(timeout_s=0)
    assert job is not None
    return job


def state(queue: StageQueue, request_id: str) -> str:
    return next(view.state for view in queue.requests() if view.request_id == request_id)


def at(queue: StageQueue, request_id: str) -> tuple[str, str]:
    return next((view.state, view.stage) for view in queue.requests() if view.request_id == request_id)


def encode_one(queue: StageQueue, request_id: str, worker: Worker, **kwargs: object) -> None:
    queue.submit(StageTask(stage="encode", request_id=request_id, **kwargs))  # type: ignore[arg-type]
    take(worker).complete(next_task=StageTask(stage="denoise", handle=b"embedding"))


class TestRewind:
    def run_to_decode(self, queue: StageQueue, **kwargs: int) -> tuple[Worker, Worker, Worker]:
        encode, denoise, decode = (join(queue, stage) for stage in ("encode", "denoise", "decode"))
        queue.submit(StageTask(stage="encode", request_id="r1", payload={"prompt": "a cat"}, **kwargs))  # type: ignore[arg-type]
        take(encode).complete(next_task=StageTask(stage="denoise", handle=b"e1", payload={"steps": 4}))
        take(denoise).complete(next_task=StageTask(stage="decode", handle=b"l1"))
        return encode, denoise, decode

    def test_a_lost_input_is_made_again_by_the_stage_that_made_it(self, queue: StageQueue) -> None:
        _encode, denoise, decode = self.run_to_decode(queue)
        take(decode).lost_input(PeerLost("the producer is gone"))
        assert at(queue, "r1") == ("queued", "denoise")
        again = take(denoise)
        assert (again.task.handle, again.task.payload, again.attempt) == (b"e1", {"steps": 4}, 2)
        again.complete(next_task=StageTask(stage="decode", handle=b"l2"))
        job = take(decode)
        assert (job.task.handle, job.attempt) == (b"l2", 2)
        job.complete(result="ok")
        assert queue.result("r1", timeout_s=0) == "ok"

    def test_and_back_to_the_first_stage_when_that_input_is_gone_too(self, queue: StageQueue) -> None:
        encode, denoise, decode = self.run_to_decode(queue)
        take(decode).lost_input(LeaseLost("consumed"))
        take(denoise).lost_input(LeaseLost("consumed"))
        job = take(encode)
        assert (job.task.payload, job.attempt) == ({"prompt": "a cat"}, 2)
        job.complete(next_task=StageTask(stage="denoise", handle=b"e2"))
        job = take(denoise)
        assert (job.task.handle, job.attempt) == (b"e2", 3)
        job.complete(next_task=StageTask(stage="decode", handle=b"l3"))
        assert take(decode).task.handle == b"l3"

    def test_it_is_bounded_by_the_maker_and_not_counted_against_the_reader(self, queue: StageQueue) -> None:
        _encode, denoise, decode = self.run_to_decode(queue)
        for _ in range(2):
            take(decode).lost_input(IntegrityError("wrong bytes"))
            take(denoise).complete(next_task=StageTask(stage="decode", handle=b"again", max_attempts=1))
        take(decode).lost_input(IntegrityError("wrong bytes"))
        assert at(queue, "r1") == ("dead", "decode")
        with pytest.raises(IntegrityError, match="wrong bytes"):
            queue.result("r1", timeout_s=0)

    def test_a_lost_input_leaves_the_readers_attempts_for_its_own_failures(
        self, queue: StageQueue, clock: ManualClock
    ) -> None:
        _encode, denoise, decode = self.run_to_decode(queue)
        for _ in range(2):
            take(decode).lost_input(PeerLost("gone"))
            take(denoise).complete(next_task=StageTask(stage="decode", handle=b"again", max_attempts=2))
        take(decode).fail(OSError("flaky"))
        clock.advance(1)
        job = take(decode)
        assert job.attempt == 4
        job.fail(OSError("flaky"))
        assert at(queue, "r1") == ("dead", "decode")

    def test_a_forgotten_id_begins_anew(self, queue: StageQueue) -> None:
        encode, denoise, _decode = self.run_to_decode(queue)
        queue.cancel("r1")
        queue.forget("r1")
        encode_one(queue, "r1", encode)
        assert take(denoise).attempt == 1

    def test_a_request_may_begin_further_on_and_goes_back_when_that_input_is_gone(self, queue: StageQueue) -> None:
        encode, denoise = join(queue, "encode"), join(queue, "denoise")
        join(queue, "decode")
        first = StageTask(stage="encode", request_id="r1", payload={"prompt": "a cat"}, priority="batch")
        queue.submit(first, ahead=StageTask(stage="denoise", payload={"kept": ["d1"]}, max_attempts=2))
        assert at(queue, "r1") == ("queued", "denoise")
        assert encode.take(timeout_s=0) is None
        job = take(denoise)
        assert (job.task.payload, job.task.handle, job.task.priority) == ({"kept": ["d1"]}, None, "batch")
        job.lost_input(PeerLost("evicted"))
        job = take(encode)
        assert (job.task.payload, job.attempt, job.task.priority) == ({"prompt": "a cat"}, 1, "batch")
        job.complete(next_task=StageTask(stage="denoise", handle=b"e1"))
        job = take(denoise)
        assert (job.task.handle, job.attempt) == (b"e1", 2)
        assert [event.kind for event in queue.events() if event.request_id == "r1"] == [
            *("submitted", "claimed", "rewound", "claimed", "completed", "claimed"),
        ]

    def test_one_that_begins_further_on_is_the_same_request(self, queue: StageQueue) -> None:
        first = StageTask(stage="encode", request_id="r1", payload={"prompt": "a cat"})
        ahead = StageTask(stage="denoise", payload={"kept": ["d1"]})
        assert queue.submit(first, if_absent=True, ahead=ahead)
        assert not queue.submit(first, if_absent=True)
        assert not queue.submit(first, if_absent=True, ahead=ahead)
        assert at(queue, "r1") == ("queued", "denoise")
        with pytest.raises(ConfigError, match="differs"):
            queue.submit(StageTask(stage="encode", request_id="r1", payload={}), if_absent=True, ahead=ahead)

    @pytest.mark.parametrize("stage", ["encode", "denoise", "nowhere"])
    def test_it_cannot_begin_before_its_first_stage(self, queue: StageQueue, stage: str) -> None:
        with pytest.raises(ConfigError, match="stage"):
            queue.submit(StageTask(stage="denoise", request_id="r1"), ahead=StageTask(stage=stage))
        assert queue.requests() == []

    def test_without_an_earlier_stage_the_request_fails(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="decode", request_id="r1", handle=b"from outside"))
        take(join(queue, "decode")).lost_input(PeerLost("gone"))
        assert state(queue, "r1") == "failed"
        with pytest.raises(PeerLost):
            queue.result("r1", timeout_s=0)


class TestCredits:
    def test_denoise_is_admitted_only_against_a_buffer_downstream(self, queue: StageQueue) -> None:
        for number in range(4):
            queue.submit(StageTask(stage="denoise", request_id=f"r{number}"))
        denoise = join(queue, "denoise", slots=4)
        assert denoise.take(timeout_s=0) is None
        assert queue.stats().stages["denoise"].no_credit
        decode = join(queue, "decode", slots=1, buffers=2)
        jobs = [take(denoise), take(denoise)]
        assert denoise.take(timeout_s=0) is None
        stats = queue.stats().stages
        assert stats["denoise"].no_credit
        assert (stats["decode"].credits_total, stats["decode"].credits_held, stats["decode"].credits_free) == (2, 2, 0)
        jobs[0].complete(next_task=StageTask(stage="decode", handle=b"l"))
        assert denoise.take(timeout_s=0) is None  # its result waits and holds the slot
        taken = take(decode)
        assert take(denoise).request_id == "r2"  # the slot is free once the result is taken, not once it is decoded
        taken.complete(result=1)

    @pytest.mark.parametrize(
        "finish",
        [
            lambda queue, job: job.fail(ConfigError("x")),
            lambda queue, job: job.fail(OSError("x")),
            lambda queue, job: job.give_back(),
            lambda queue, job: job.complete(result=1),
            lambda queue, job: queue.cancel(job.request_id),
            lambda queue, job: job.lost_input(PeerLost("x")),
        ],
    )
    def test_the_credit_comes_back_however_the_job_ends(
        self, queue: StageQueue, finish: Callable[[StageQueue, Job], object]
    ) -> None:
        join(queue, "decode", buffers=1)
        denoise = join(queue, "denoise")
        encode_one(queue, "r1", join(queue, "encode"))
        job = take(denoise)
        assert queue.stats().stages["decode"].credits_free == 0
        finish(queue, job)
        assert queue.stats().stages["decode"].credits_free == 1

    def test_it_comes_back_when_the_denoise_worker_dies_or_the_deadline_passes(
        self, queue: StageQueue, clock: ManualClock
    ) -> None:
        decode, denoise = join(queue, "decode", buffers=2), join(queue, "denoise", slots=2)
        queue.submit(StageTask(stage="denoise", request_id="r1"))
        queue.submit(StageTask(stage="denoise", request_id="r2", deadline_s=8))
        _jobs = take(denoise), take(denoise)
        clock.advance(8)
        decode.renew()
        assert queue.stats().stages["decode"].credits_free == 1
        clock.advance(3)
        assert queue.stats().stages["decode"].credits_free == 2

    def test_a_dead_decode_worker_takes_its_buffers_along_and_jobs_keep_theirs(
        self, queue: StageQueue, clock: ManualClock
    ) -> None:
        for number in range(4):
            queue.submit(StageTask(stage="denoise", request_id=f"r{number}"))
        _dead, alive = join(queue, "decode", buffers=2), join(queue, "decode", buffers=1)
        denoise = join(queue, "denoise", slots=4)
        jobs = [take(denoise) for _ in range(3)]
        clock.advance(6)
        denoise.renew()
        alive.renew()
        clock.advance(6)
        stats = queue.stats().stages["decode"]
        assert (stats.credits_total, stats.credits_held, stats.credits_free) == (1, 3, 0)
        for job in jobs:
            job.complete(next_task=StageTask(stage="decode"))
        for _ in range(2):
            take(alive).complete(result=1)
            assert denoise.take(timeout_s=0) is None
        take(alive).complete(result=1)
        assert take(denoise).request_id == "r3"

    def test_a_result_that_comes_back_holds_its_slot_again(self, queue: StageQueue, clock: ManualClock) -> None:
        dying, alive = join(queue, "decode", buffers=1), join(queue, "decode", buffers=1)
        denoise = join(queue, "denoise", slots=3)
        queue.submit(StageTask(stage="denoise", request_id="r1"))
        take(denoise).complete(next_task=StageTask(stage="decode"))
        take(dying)
        assert queue.stats().stages["decode"].credits_free == 2
        clock.advance(6)
        alive.renew()
        clock.advance(6)
        assert at(queue, "r1") == ("queued", "decode")
        assert queue.stats().stages["decode"].credits_free == 0
        take(alive).complete(result=1)
        assert queue.stats().stages["decode"].credits_free == 1

    def test_a_pool_that_keeps_up_idles_nobody(self, queue: StageQueue) -> None:
        """Two denoise workers, two decode workers of one buffer each, decode faster: denoise never waits."""
        for number in range(40):
            queue.submit(StageTask(stage="denoise", request_id=f"r{number}"))
        denoise = [join(queue, "denoise") for _ in range(2)]
        decode = [join(queue, "decode", buffers=1) for _ in range(2)]
        jobs = [take(worker) for worker in denoise]
        for turn in range(38):
            jobs[turn % 2].complete(next_task=StageTask(stage="decode"))
            taken = take(decode[turn % 2])
            jobs[turn % 2] = take(denoise[turn % 2])  # asserts that there is one, while the other's credit is held
            taken.complete(result=turn)
        assert queue.stats().ended == {"done": 38}

    def test_two_results_at_once_find_their_buffers(self, queue: StageQueue) -> None:
        """Compute slots do not limit admission: one decode slot, two buffers, two denoise jobs."""
        for number in range(4):
            queue.submit(StageTask(stage="denoise", request_id=f"r{number}"))
        denoise, decode = [join(queue, "denoise") for _ in range(2)], join(queue, "decode", slots=1, buffers=2)
        for job in [take(worker) for worker in denoise]:
            job.complete(next_task=StageTask(stage="decode"))
        busy = take(decode)
        assert [take(denoise[0]).request_id, denoise[1].take(timeout_s=0)] == ["r2", None]
        busy.complete(result=1)
        take(decode)
        assert take(denoise[1]).request_id == "r3"

    def test_another_pipeline_has_its_own_admission(self, open_queue: Open) -> None:
        queue = open_queue(
            Pipeline(
                [
                    StageSpec(name="draft", kind="admission", downstream="refine"),
                    StageSpec(name="refine", kind="admission"),
                ]
            )
        )
        queue.submit(StageTask(stage="draft", request_id="r1"))
        draft = join(queue, "draft")
        assert draft.take(timeout_s=0) is None
        refine = join(queue, "refine")
        take(draft).complete(next_task=StageTask(stage="refine"))
        take(refine).complete(result=1)  # nothing downstream, so no credit is needed


class TestOrder:
    def test_first_come_first_served_within_a_class_also_after_a_return(self, queue: StageQueue) -> None:
        for number in range(3):
            queue.submit(StageTask(stage="encode", request_id=f"r{number}"))
        worker = join(queue, "encode")
        take(worker).give_back()
        assert [take(worker).complete(result=1) or number for number in range(3)] == [0, 1, 2]
        ended = [event.request_id for event in queue.events() if event.kind == "done"]
        assert ended == ["r0", "r1", "r2"]

    def test_urgent_work_comes_first_and_nobody_starves(self, queue: StageQueue) -> None:
        for number in range(3):
            for priority in ("batch", "standard"):
                queue.submit(StageTask(stage="encode", request_id=f"{priority}{number}", priority=priority))  # type: ignore[arg-type]
        worker = join(queue, "encode")
        order = []
        for number in range(70):  # an endless stream of urgent work
            queue.submit(StageTask(stage="encode", request_id=f"i{number}", priority="interactive"))
            job = take(worker)
            order.append(job.task.priority)
            job.complete(result=1)
        assert order[:3] == ["interactive"] * 3
        assert Counter(order) == {"interactive": 64, "standard": 3, "batch": 3}
        assert order.index("batch") <= longest_wait("batch")

    def test_a_next_task_keeps_the_class_unless_it_says_otherwise(self, queue: StageQueue) -> None:
        encode = join(queue, "encode")
        encode_one(queue, "r1", encode, priority="interactive")
        queue.submit(StageTask(stage="encode", request_id="r2", priority="interactive"))
        take(encode).complete(next_task=StageTask(stage="denoise", priority="batch"))
        assert [view.priority for view in queue.requests()] == ["interactive", "batch"]

    def test_affinity_waits_for_its_worker_but_not_for_ever(self, queue: StageQueue, clock: ManualClock) -> None:
        here, there = join(queue, "encode", affinity={"host": "n1"}), join(queue, "encode", affinity={"host": "n2"})
        queue.submit(StageTask(stage="encode", request_id="r1", affinity={"host": "n1"}))
        queue.submit(StageTask(stage="encode", request_id="r2", affinity={"host": "n1"}))
        queue.submit(StageTask(stage="encode", request_id="r3"))
        job = take(there)
        assert job.request_id == "r3"
        job.complete(result=1)
        assert there.take(timeout_s=0) is None
        assert take(here).request_id == "r1"
        clock.advance(2.0)
        assert take(there).request_id == "r2"

    def test_affinity_to_nobody_holds_nothing_up(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1", affinity={"host": "n9"}))
        assert take(join(queue, "encode")).task.affinity == {"host": "n9"}


class TestBounds:
    def test_ended_requests_are_kept_up_to_a_bound_those_not_read_longest(self, open_queue: Open) -> None:
        queue = open_queue(keep_ended=3)
        worker = join(queue, "encode")
        for number in range(6):
            queue.submit(StageTask(stage="encode", request_id=f"r{number}"))
            take(worker).complete(result=number)
            if number == 2:
                queue.result("r2", timeout_s=0)
        assert [view.request_id for view in queue.requests()] == ["r3", "r4", "r5"]
        queue.result("r5", timeout_s=0)
        queue.submit(StageTask(stage="encode", request_id="r6"))
        take(worker).complete(result=6)
        assert [view.request_id for view in queue.requests()] == ["r3", "r4", "r6"]

    def test_events_are_numbered_and_bounded(self, open_queue: Open) -> None:
        queue = open_queue(keep_events=5)
        for number in range(10):
            queue.submit(StageTask(stage="encode", request_id=f"r{number}"))
        events = queue.events()
        assert [event.number for event in events] == [6, 7, 8, 9, 10]
        assert [event.request_id for event in queue.events(since=8)] == ["r8", "r9"]
        assert [event.number for event in queue.events(limit=2)] == [6, 7]
        assert queue.events(since=10) == []
        assert queue.stats().last_event == 10

    def test_each_end_is_told_once(self, queue: StageQueue, clock: ManualClock) -> None:
        worker = join(queue, "encode", slots=9)
        for name in ("done", "failed", "dead", "cancelled", "late"):
            deadline_s = 5 if name == "late" else None
            queue.submit(StageTask(stage="encode", request_id=name, max_attempts=1, deadline_s=deadline_s))
        jobs = {job.request_id: job for job in (take(worker) for _ in range(5))}
        jobs["done"].complete(result=1)
        jobs["failed"].fail(ConfigError("x"))
        jobs["dead"].fail(OSError("x"))
        queue.cancel("cancelled")
        clock.advance(30)
        queue.requests()
        ends = Counter(
            event.request_id for event in queue.events() if event.kind in ("done", "failed", "dead", "cancelled")
        )
        assert ends == dict.fromkeys(("done", "failed", "dead", "cancelled", "late"), 1)
        assert queue.stats().ended == {"done": 1, "failed": 2, "dead": 1, "cancelled": 1}

    def test_everything_ends_with_a_typed_error_once_closed(self, queue: StageQueue) -> None:
        worker = join(queue, "encode")
        queue.close()
        queue.close()
        for act in (
            queue.requests,
            queue.stats,
            queue.events,
            lambda: queue.result("r1"),
            lambda: worker.take(timeout_s=0),
        ):
            with pytest.raises(ClosedError):
                act()


def test_what_is_left_with_its_work_kept_is_no_attempt_of_the_bound(open_queue: Open) -> None:
    queue = open_queue(max_attempts=2, retry_delay_s=0.0)
    queue.submit(StageTask(request_id="r1", stage="encode", payload={}))
    worker = join(queue, "encode")
    for number in range(1, 6):
        job = take(worker)
        assert job.attempt == number
        job.leave("somebody else goes on")
        assert state(queue, "r1") == "queued"
    take(worker).give_back("again")
    take(worker).give_back("and again")
    assert state(queue, "r1") == "dead"


def test_how_far_earlier_attempts_came_is_told(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue(max_attempts=9, retry_delay_s=0.0, lease_s=10.0, renew_s=2.0)
    queue.submit(StageTask(request_id="r1", stage="encode", payload={}))
    worker = join(queue, "encode")
    first = take(worker)
    assert first.reached == 0.0
    first.progress(0.25)
    first.progress(0.5)
    clock.advance(11)  # it died
    second = take(join(queue, "encode"))
    assert second.reached == 0.5
    second.progress(0.25)  # it began further back, and was told to stop
    second.leave()
    third = take(join(queue, "encode"))
    assert third.reached == 0.5
    third.progress(0.75)
    third.fail(PeerLost("store"), retryable=True)
    fourth = take(join(queue, "encode"))
    assert fourth.reached == 0.75
    fourth.complete(next_task=StageTask(stage="denoise", payload={}))
    join(queue, "decode")
    assert take(join(queue, "denoise")).reached == 0.0
