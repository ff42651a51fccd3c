"""What every queue backend does: one suite over the model in memory and over SQLite, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import (
    Cancelled,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    QueueFull,
    TransferFailed,
)
from moonrelay.queueing import Job, Pipeline, StageQueue, StageTask, Worker

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


class TestOneRequest:
    def test_it_passes_the_stages_and_ends_with_its_result(self, queue: StageQueue) -> None:
        workers = {stage: join(queue, stage) for stage in ("encode", "denoise", "decode")}
        assert queue.submit(StageTask(stage="encode", request_id="r1", payload={"prompt": "a cat", "n": [1, 2]}))
        job = take(workers["encode"])
        assert (job.task.payload, job.attempt, job.task.attempt) == ({"prompt": "a cat", "n": [1, 2]}, 1, 1)
        job.complete(next_task=StageTask(stage="denoise", handle=b"embedding"))
        job = take(workers["denoise"])
        assert job.task.handle == b"embedding"
        job.progress(0.25, "step 5")
        view = queue.requests()[0]
        assert (view.fraction, view.note, view.worker) == (0.25, "step 5", workers["denoise"].worker_id)
        job.complete(next_task=StageTask(stage="decode", handle=b"latent"))
        take(workers["decode"]).complete(result={"frames": 81})
        assert queue.result("r1", timeout_s=0) == {"frames": 81}
        assert queue.result("r1", timeout_s=0) == {"frames": 81}
        assert [event.kind for event in queue.events() if event.request_id == "r1"] == [
            *("submitted", "claimed", "completed", "claimed", "progress", "completed", "claimed", "completed", "done")
        ]

    def test_tokens_grow_with_every_claim(self, queue: StageQueue) -> None:
        encode, denoise = join(queue, "encode", slots=9), join(queue, "denoise", slots=9)
        join(queue, "decode", buffers=9)
        tokens = []
        for number in range(3):
            queue.submit(StageTask(stage="encode", request_id=f"r{number}"))
            job = take(encode)
            tokens.append(job.token)
            job.complete(next_task=StageTask(stage="denoise"))
            tokens.append(take(denoise).token)
        assert tokens == sorted(set(tokens))

    def test_a_wait_ends_by_its_deadline_and_says_where_the_request_is(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        with pytest.raises(DeadlineExceeded, match="queued at encode"):
            queue.result("r1", timeout_s=0)
        with pytest.raises(ConfigError, match="not in the queue"):
            queue.result("r2", timeout_s=0)

    def test_a_taken_id_is_refused_until_forgotten(self, queue: StageQueue) -> None:
        task = StageTask(stage="encode", request_id="r1", payload=1)
        queue.submit(task)
        with pytest.raises(ConfigError) as caught:
            queue.submit(task)
        assert caught.value.context["field"] == "request_id"
        assert queue.submit(task, if_absent=True) is False
        with pytest.raises(ConfigError, match="differs"):
            queue.submit(StageTask(stage="encode", request_id="r1", payload=2), if_absent=True)
        with pytest.raises(ConfigError, match="cancel it first"):
            queue.forget("r1")
        queue.cancel("r1")
        assert queue.submit(task, if_absent=True) is False
        assert queue.forget("r1") is True
        assert queue.forget("r1") is False
        assert queue.submit(task) is True

    def test_depth_is_bounded_and_next_tasks_are_not_refused(self, open_queue: Open) -> None:
        queue = open_queue(max_depth=2)
        worker = join(queue, "encode")
        encode_one(queue, "r1", worker)
        queue.submit(StageTask(stage="encode", request_id="r2"))
        with pytest.raises(QueueFull):
            queue.submit(StageTask(stage="encode", request_id="r3"))
        take(worker).complete(next_task=StageTask(stage="denoise"))
        assert queue.stats().active == 2
        queue.cancel("r1")
        assert queue.submit(StageTask(stage="encode", request_id="r3"))

    def test_bad_input_is_refused_by_name_and_changes_nothing(self, queue: StageQueue) -> None:
        with pytest.raises(ConfigError, match="request_id"):
            queue.submit(StageTask(stage="encode"))
        with pytest.raises(ConfigError, match="upscale"):
            queue.submit(StageTask(stage="upscale", request_id="r1"))
        with pytest.raises(ConfigError, match=r"task.payload\['x'\]"):
            queue.submit(StageTask(stage="encode", request_id="r1", payload={"x": object()}))  # type: ignore[dict-item]
        for bad in ({"slots": 0}, {"buffers": -1}, {"slots": True}, {"affinity": "n1"}, {"worker_id": ""}):
            with pytest.raises(ConfigError):
                queue.register_worker("encode", **bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            queue.register_worker("upscale")
        assert queue.requests() == []
        assert queue.stats().workers == ()

    def test_a_refused_completion_leaves_the_job_as_it_was(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="denoise", request_id="r1"))
        join(queue, "decode")
        job = take(join(queue, "denoise"))
        with pytest.raises(ConfigError):
            job.complete(next_task=StageTask(stage="decode"), result=1)
        with pytest.raises(ConfigError, match="must come after"):
            job.complete(next_task=StageTask(stage="encode"))
        with pytest.raises(ConfigError):
            job.complete(next_task=StageTask(stage="decode", request_id="other"))
        with pytest.raises(ConfigError, match="result"):
            job.complete(result=object())  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            job.progress(1.5)
        job.complete(result=None)
        assert queue.result("r1", timeout_s=0) is None


class TestLeaving:
    def test_by_an_exception_fails_the_job(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        with pytest.raises(KeyError), take(join(queue, "encode")):
            raise KeyError("prompt")
        with pytest.raises(MoonrelayError, match="KeyError: 'prompt'") as caught:
            queue.result("r1", timeout_s=0)
        assert (caught.value.context["stage"], caught.value.context["state"]) == ("encode", "failed")

    def test_without_completing_gives_it_back_and_counts(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1", max_attempts=2))
        worker = join(queue, "encode")
        for attempt in (1, 2):
            with worker.claim(timeout_s=0) as job:
                assert job is not None
                assert job.attempt == attempt
        assert state(queue, "r1") == "dead"

    def test_by_an_interrupt_gives_it_back(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        worker = join(queue, "encode")
        with pytest.raises(KeyboardInterrupt), take(worker):
            raise KeyboardInterrupt
        assert take(worker).attempt == 2

    def test_nothing_came_is_false_and_none_inside_with(self, queue: StageQueue) -> None:
        worker = join(queue, "encode")
        assert worker.take(timeout_s=0) is None
        assert not worker.claim(timeout_s=0)
        with worker.claim(timeout_s=0) as job:
            assert job is None

    def test_a_settled_job_is_settled_once(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        with take(join(queue, "encode")) as job:
            job.complete(result=1)
            with pytest.raises(LeaseLost, match="completed already"):
                job.fail(OSError("late"))
        assert queue.result("r1", timeout_s=0) == 1


class TestFailures:
    def test_retryable_ones_come_again_after_a_pause_then_are_dead(self, queue: StageQueue, clock: ManualClock) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1", max_attempts=3))
        worker = join(queue, "encode")
        for attempt, pause_s in ((1, 0.1), (2, 0.2)):
            job = take(worker)
            assert job.attempt == attempt
            job.fail(TransferFailed("no route"))
            clock.advance(pause_s * 0.9)
            assert worker.take(timeout_s=0) is None
            clock.advance(pause_s * 0.2)
        assert queue.requests()[0].error_code == "transfer_failed"
        take(worker).fail(TransferFailed("no route"))
        assert state(queue, "r1") == "dead"
        with pytest.raises(TransferFailed, match="no route") as caught:
            queue.result("r1", timeout_s=0)
        assert caught.value.context["attempt"] == 3
        assert caught.value.context["state"] == "dead"
        assert not caught.value.retryable

    def test_final_ones_end_the_request_at_once(self, queue: StageQueue) -> None:
        worker = join(queue, "encode")
        queue.submit(StageTask(stage="encode", request_id="r1"))
        take(worker).fail(ConfigError("no such model", field="model"))
        queue.submit(StageTask(stage="encode", request_id="r2"))
        take(worker).fail(TransferFailed("x"), retryable=False)
        assert [view.state for view in queue.requests()] == ["failed", "failed"]
        with pytest.raises(ConfigError, match="no such model"):
            queue.result("r1", timeout_s=0)

    def test_attempts_of_each_stage_are_counted_apart(self, queue: StageQueue, clock: ManualClock) -> None:
        encode, denoise = join(queue, "encode"), join(queue, "denoise")
        join(queue, "decode")
        queue.submit(StageTask(stage="encode", request_id="r1"))
        take(encode).fail(OSError("x"))
        clock.advance(1)
        take(encode).complete(next_task=StageTask(stage="denoise"))
        assert take(denoise).attempt == 1


class TestFencing:
    def test_a_claim_that_was_not_renewed_is_redelivered_and_its_token_is_dead(
        self, queue: StageQueue, clock: ManualClock
    ) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        first, second = join(queue, "encode"), join(queue, "encode")
        late = take(first)
        clock.advance(9.9)
        assert second.take(timeout_s=0) is None
        clock.advance(0.2)
        again = take(second)
        assert (again.attempt, again.token > late.token) == (2, True)
        before = queue.requests()
        for act in (
            lambda: late.progress(0.5),
            lambda: late.complete(result="late"),
        ):
            with pytest.raises(LeaseLost):
                act()
        assert queue.requests() == before
        again.complete(result="right")
        assert queue.result("r1", timeout_s=0) == "right"

    @pytest.mark.parametrize(
        "act",
        [
            lambda job: job.complete(result=1),
            lambda job: job.complete(next_task=StageTask(stage="decode")),
            lambda job: job.fail(OSError("x")),
            lambda job: job.lost_input(PeerLost("x")),
            lambda job: job.give_back(),
            lambda job: job.progress(0.1),
        ],
    )
    def test_every_late_act_is_refused_also_when_nobody_noticed_the_lapse(
        self, queue: StageQueue, clock: ManualClock, act: Callable[[Job], None]
    ) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        job = take(join(queue, "encode"))
        clock.advance(10)
        with pytest.raises(LeaseLost):
            act(job)
        assert at(queue, "r1") == ("queued", "encode")

    def test_renewal_and_progress_keep_a_claim(self, queue: StageQueue, clock: ManualClock) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        worker, other = join(queue, "encode"), join(queue, "encode")
        job = take(worker)
        for _ in range(3):
            clock.advance(9)
            worker.renew()
            clock.advance(9)
            job.progress(0.5)
            assert other.take(timeout_s=0) is None
        job.complete(result=1)

    def test_a_renewal_tells_of_the_loss(self, queue: StageQueue, clock: ManualClock) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        worker = join(queue, "encode")
        job = take(worker)
        clock.advance(11)
        assert job.lost is None
        worker.renew()
        assert isinstance(job.lost, LeaseLost)
        for _ in range(2):
            with pytest.raises(LeaseLost):
                job.check()
        assert [view.worker_id for view in queue.stats().workers] == [worker.worker_id]

    def test_dead_workers_use_attempts_up(self, queue: StageQueue, clock: ManualClock) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1", max_attempts=2))
        for _ in range(2):
            take(join(queue, "encode"))
            clock.advance(11)
        assert state(queue, "r1") == "dead"
        with pytest.raises(PeerLost, match="stopped renewing"):
            queue.result("r1", timeout_s=0)
        assert queue.stats().workers == ()

    def test_a_closed_worker_hands_its_jobs_back_at_once(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        with join(queue, "encode") as worker:
            job = take(worker)
        assert take(join(queue, "encode")).attempt == 2
        with pytest.raises(LeaseLost):
            job.complete(result=1)
        with pytest.raises(ClosedError):
            worker.take(timeout_s=0)

    def test_slots_bound_the_jobs_of_a_worker(self, queue: StageQueue) -> None:
        for number in range(3):
            queue.submit(StageTask(stage="encode", request_id=f"r{number}"))
        worker = join(queue, "encode", slots=2)
        first, _second = take(worker), take(worker)
        assert worker.take(timeout_s=0) is None
        first.complete(result=1)
        assert take(worker).request_id == "r2"


class TestCancelAndDeadline:
    def test_a_queued_request_ends_at_once(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        assert queue.cancel("r1") is True
        assert queue.cancel("r1") is False
        assert join(queue, "encode").take(timeout_s=0) is None
        with pytest.raises(Cancelled, match="queued at encode"):
            queue.result("r1", timeout_s=0)
        with pytest.raises(ConfigError):
            queue.cancel("r2")

    def test_a_running_ones_worker_is_told_at_its_renewal(self, queue: StageQueue) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        worker = join(queue, "encode")
        job = take(worker)
        queue.cancel("r1")
        assert not job.cancelled
        worker.renew()
        assert job.cancelled
        with pytest.raises(Cancelled), job:
            job.check()
        with pytest.raises(Cancelled):
            queue.result("r1", timeout_s=0)
        assert worker.held == ()

    @pytest.mark.parametrize(
        "act", [lambda job: job.progress(0.5), lambda job: job.complete(result=1), lambda job: job.fail(OSError())]
    )
    def test_or_at_whatever_it_does_first(self, queue: StageQueue, act: Callable[[Job], None]) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1"))
        job = take(join(queue, "encode"))
        queue.cancel("r1")
        with pytest.raises(Cancelled):
            act(job)
        assert job.cancelled
        assert state(queue, "r1") == "cancelled"

    def test_a_deadline_ends_a_queued_request_though_nobody_claims(self, queue: StageQueue, clock: ManualClock) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1", deadline_s=5))
        assert queue.requests()[0].deadline_in_s == 5
        clock.advance(5)
        with pytest.raises(DeadlineExceeded, match="queued at encode") as caught:
            queue.result("r1", timeout_s=0)
        assert caught.value.context["state"] == "failed"
        assert queue.requests()[0].deadline_in_s is None

    def test_a_deadline_ends_a_running_request_and_its_worker_is_told(
        self, queue: StageQueue, clock: ManualClock
    ) -> None:
        queue.submit(StageTask(stage="encode", request_id="r1", deadline_s=5))
        worker = join(queue, "encode")
        job = take(worker)
        assert job.task.deadline_s == 5
        clock.advance(6)
        with pytest.raises(DeadlineExceeded):
            job.complete(result=1)
        assert state(queue, "r1") == "failed"
        worker.renew()
        assert isinstance(job.lost, DeadlineExceeded)

    def test_a_deadline_holds_for_the_whole_request_and_only_comes_nearer(
        self, queue: StageQueue, clock: ManualClock
    ) -> None:
        encode = join(queue, "encode")
        for request_id, deadline_s in (("r1", 100.0), ("r2", 3.0), ("r3", None)):
            queue.submit(StageTask(stage="encode", request_id=request_id, deadline_s=10))
            take(encode).complete(next_task=StageTask(stage="denoise", deadline_s=deadline_s))
        assert [view.deadline_in_s for view in queue.requests()] == [10, 3, 10]
        clock.advance(4)
        assert [view.state for view in queue.requests()] == ["queued", "failed", "queued"]
