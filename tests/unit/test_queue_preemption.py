"""Who makes way for whom, in every backend: off by default, bounded, fair; on a clock that the test moves."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonrelay.clock import ManualClock
from moonrelay.errors import ConfigError, LeaseLost
from moonrelay.queueing import Job, Pipeline, QueueConfig, StageQueue, StageSpec, StageTask, Worker
from moonrelay.queueing.precedence import INTERACTIVE_FIRST, read_precedence
from moonrelay.queueing.task import PRIORITIES

ONE_STAGE = Pipeline([StageSpec(name="denoise")])
Open = Callable[..., StageQueue]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
def open_queue(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Open]:
    opened: list[StageQueue] = []

    def connect(pipeline: Pipeline | None = ONE_STAGE, **config: object) -> StageQueue:
        url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue-{len(opened)}.db"
        config = {"preempt": INTERACTIVE_FIRST, "affinity_wait_s": 0.0, **config}
        opened.append(StageQueue.connect(url, clock=clock, pipeline=pipeline, config=config))
        return opened[-1]

    yield connect
    for queue in opened:
        queue.close()


def join(queue: StageQueue, stage: str = "denoise", **kwargs: Any) -> Worker:
    return queue.register_worker(stage, heartbeat=False, **kwargs)


def submit(queue: StageQueue, request_id: str, priority: Any = "batch", stage: str = "denoise") -> None:
    queue.submit(StageTask(stage=stage, request_id=request_id, priority=priority))


def take(worker: Worker) -> Job:
    job = worker.take(timeout_s=0)
    assert job is not None
    return job


def running(queue: StageQueue, worker: Worker, request_id: str = "b1") -> Job:
    """Return a batch job that is under way and was offered."""
    submit(queue, request_id)
    job = take(worker)
    assert job.request_id == request_id
    job.offer(True)
    job.progress(0.25)
    return job


def kinds(queue: StageQueue, request_id: str) -> list[str]:
    return [event.kind for event in queue.events() if event.request_id == request_id and event.kind != "progress"]


@pytest.mark.parametrize("how", ["renewal", "progress"])
def test_a_waiting_interactive_task_has_a_batch_job_asked_and_is_taken_next(open_queue: Open, how: str) -> None:
    queue = open_queue()
    worker = join(queue)
    job = running(queue, worker)
    assert job.yield_to == ""
    submit(queue, "b2")
    submit(queue, "s1", "standard")
    submit(queue, "i1", "interactive")
    worker.renew() if how == "renewal" else job.progress(0.5)
    assert job.yield_to == "i1"
    job.leave("after step 2 of 4")
    assert [take(worker).request_id for _ in range(1)] == ["i1"]
    assert kinds(queue, "b1") == ["submitted", "claimed", "asked_to_yield", "preempted"]
    told = next(event for event in queue.events() if event.kind == "preempted")
    assert "made way for i1: after step 2 of 4" in told.note


def test_off_by_default_nothing_is_asked_and_the_queue_is_not_even_heard(open_queue: Open) -> None:
    queue = open_queue(preempt="")
    assert QueueConfig().preempt == ""
    worker = join(queue)
    job = running(queue, worker)
    submit(queue, "i1", "interactive")
    worker.renew()
    job.progress(0.5)
    assert job.yield_to == ""
    job.leave("drained")
    assert kinds(queue, "b1") == ["submitted", "claimed", "returned"]


def test_a_job_that_was_not_offered_is_never_asked(open_queue: Open) -> None:
    queue = open_queue()
    worker = join(queue)
    submit(queue, "b1")
    job = take(worker)
    submit(queue, "i1", "interactive")
    worker.renew()
    job.progress(0.5)
    assert job.yield_to == ""
    job.offer(True)
    worker.renew()
    assert job.yield_to == "i1"
    job.offer(False)  # what is left is no longer worth it
    worker.renew()
    assert job.yield_to == ""
    job.leave()
    assert "preempted" not in kinds(queue, "b1")


@pytest.mark.parametrize("mine", PRIORITIES)
@pytest.mark.parametrize("theirs", PRIORITIES)
@pytest.mark.parametrize("rule", ["interactive>batch", "interactive>standard+batch, standard>batch", "standard>batch"])
def test_only_the_classes_that_the_setting_names(open_queue: Open, rule: str, mine: str, theirs: str) -> None:
    queue = open_queue(preempt=rule)
    worker = join(queue)
    submit(queue, "mine", mine)
    job = take(worker)
    job.offer(True)
    submit(queue, "theirs", theirs)
    job.progress(0.5)
    named = {
        "interactive>batch": {("interactive", "batch")},
        "standard>batch": {("standard", "batch")},
    }.get(rule, {("interactive", "batch"), ("interactive", "standard"), ("standard", "batch")})
    assert job.yield_to == ("theirs" if (theirs, mine) in named else "")


def test_what_was_asked_is_taken_back_when_it_is_needed_no_more(open_queue: Open) -> None:
    queue = open_queue()
    worker = join(queue)
    job = running(queue, worker)
    submit(queue, "i1", "interactive")
    worker.renew()
    assert job.yield_to == "i1"
    queue.cancel("i1")
    worker.renew()
    assert job.yield_to == ""
    submit(queue, "i2", "interactive")
    worker.renew()
    assert job.yield_to == "i2"
    helper = join(queue)
    worker.renew()  # the new worker has a free slot for it
    assert job.yield_to == ""
    assert take(helper).request_id == "i2"


def test_no_more_jobs_are_asked_than_tasks_wait(open_queue: Open) -> None:
    queue = open_queue()
    workers = [join(queue) for _ in range(3)]
    jobs = [running(queue, worker, f"b{number}") for number, worker in enumerate(workers)]
    submit(queue, "i1", "interactive")
    for worker in (*workers, *workers):
        worker.renew()
    assert [job.yield_to for job in jobs] == ["i1", "", ""]
    submit(queue, "i2", "interactive")
    for worker in (*workers, *workers):
        worker.renew()
    assert sorted(job.yield_to for job in jobs) == ["", "i1", "i2"]


def test_a_free_slot_of_its_own_or_of_another_worker_does_as_well(open_queue: Open) -> None:
    queue = open_queue()
    worker = join(queue, slots=2)
    job = running(queue, worker)
    submit(queue, "i1", "interactive")
    worker.renew()
    assert job.yield_to == ""
    submit(queue, "i2", "interactive")
    worker.renew()
    assert job.yield_to == "i2"  # the first has the free slot


def test_without_a_credit_downstream_even_after_leaving_nobody_is_asked(open_queue: Open) -> None:
    stages = [StageSpec(name="denoise", kind="admission", downstream="decode"), StageSpec(name="decode")]
    queue = open_queue(Pipeline(stages), lease_s=10.0)
    worker, first, second = join(queue), join(queue, "decode", buffers=1), join(queue, "decode", buffers=1)
    submit(queue, "b0")
    take(worker).complete(next_task=StageTask(stage="decode"))
    job = running(queue, worker)
    submit(queue, "i1", "interactive")
    worker.renew()
    assert job.yield_to == "i1"  # no credit is free, and leaving frees one
    first.close()
    worker.renew()
    assert job.yield_to == ""
    second.close()


def test_a_job_makes_way_only_so_often_and_costs_no_attempt(open_queue: Open) -> None:
    queue = open_queue(preempt_at_most=2, max_attempts=2)
    worker = join(queue)
    submit(queue, "b1")
    for number in range(2):
        job = take(worker)
        assert job.request_id == "b1"
        job.offer(True)
        submit(queue, f"i{number}", "interactive")
        job.progress(0.5)
        assert job.yield_to == f"i{number}"
        job.leave()
        take(worker).complete()
    job = take(worker)
    assert (job.request_id, job.attempt) == ("b1", 3)
    job.offer(True)
    submit(queue, "i9", "interactive")
    job.progress(0.9)
    worker.renew()
    assert job.yield_to == ""
    job.fail(LeaseLost("a first failure", retryable=True), retryable=True)  # both attempts are still there


def test_a_class_whose_turn_it_is_keeps_running(open_queue: Open) -> None:
    queue = open_queue()
    worker = join(queue)
    job = running(queue, worker)
    submit(queue, "i0", "interactive")
    worker.renew()
    job.leave()
    asked: list[bool] = []
    for number in range(1, 40):
        job = take(worker)
        submit(queue, f"i{number}", "interactive")
        if job.request_id == "b1":
            break
        job.complete()
        asked.append(True)
    assert job.request_id == "b1"  # the fair choice fell on it, whatever waits
    assert len(asked) <= 17


def test_a_leave_for_another_reason_is_no_preemption(open_queue: Open) -> None:
    queue = open_queue()
    worker = join(queue)
    job = running(queue, worker)
    job.leave("the worker is drained")
    assert kinds(queue, "b1")[-1] == "returned"


def test_a_lapsed_job_forgets_that_it_was_asked(open_queue: Open, clock: ManualClock) -> None:
    queue = open_queue()
    worker = join(queue)
    job = running(queue, worker)
    submit(queue, "i1", "interactive")
    worker.renew()
    assert job.yield_to == "i1"
    clock.advance(60.0)
    other = join(queue)
    take(other).complete()
    again = take(other)
    assert (again.request_id, again.yield_to) == ("b1", "")
    again.leave()
    assert kinds(queue, "b1")[-1] == "returned"
    job.hear()  # what it was told is void with its claim, and it asks no more
    assert "preempted" not in kinds(queue, "b1")


@pytest.mark.parametrize(
    "text", ["batch>interactive", "batch>batch", "interactive", "urgent>batch", "interactive>", ">batch", "a+b>batch"]
)
def test_a_rule_that_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StageQueue.connect("memory://", config={"preempt": text})
    assert caught.value.context["field"] == "preempt"


def test_a_rule_is_read_with_the_most_urgent_first() -> None:
    assert read_precedence("") == {}
    assert read_precedence("standard>batch, interactive > batch+standard") == {
        "batch": ("interactive", "standard"),
        "standard": ("interactive",),
    }


def test_a_file_of_before_is_taken_over(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    StageQueue.connect(url).close()
    with sqlite3.connect(tmp_path / "queue.db") as connection:
        connection.execute("ALTER TABLE request DROP COLUMN yield_to")
        connection.execute("ALTER TABLE stage DROP COLUMN yields")
    connection.close()
    with StageQueue.connect(url, config={"preempt": INTERACTIVE_FIRST}) as queue:
        worker = join(queue, "encode")
        queue.submit(StageTask(stage="encode", request_id="b1", priority="batch"))
        job = take(worker)
        job.offer(True)
        queue.submit(StageTask(stage="encode", request_id="i1", priority="interactive"))
        worker.renew()
        assert job.yield_to == "i1"


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.sampled_from(PRIORITIES)),
            st.tuples(st.sampled_from(["take", "renew", "leave if asked", "complete"]), st.integers(0, 2)),
        ),
        max_size=80,
    ),
    at_most=st.integers(1, 3),
)
def test_however_things_come_nobody_starves_and_nobody_makes_way_in_vain(moves: Any, at_most: int) -> None:
    rule = "interactive>standard+batch, standard>batch"
    config = {"preempt": rule, "preempt_at_most": at_most, "max_attempts": 1, "renew_s": 1.0, "lease_s": 10.0}
    with StageQueue.connect("memory://", clock=ManualClock(), pipeline=ONE_STAGE, config=config) as queue:
        workers = [join(queue) for _ in range(3)]
        held: dict[int, Job] = {}
        sent = 0
        for what, which in moves:
            if what == "submit":
                sent += 1
                submit(queue, f"r{sent}", which)
                continue
            job = held.get(which)
            if what == "take" and job is None:
                found = workers[which].take(timeout_s=0)
                if found is not None:
                    found.offer(True)
                    held[which] = found
            elif what == "renew":
                workers[which].renew()
            elif what == "complete" and job is not None:
                held.pop(which).complete()
            elif what == "leave if asked" and job is not None and job.yield_to:
                held.pop(which).leave()
            check(queue, held)
        # Everything ends, though everybody makes way whenever asked.
        for _ in range((at_most + 1) * 20 * (sent + 1)):
            if queue.stats().active == 0:
                break
            for number, worker in enumerate(workers):
                job = held.pop(number, None) or worker.take(timeout_s=0)
                if job is None:
                    continue
                job.offer(True)
                worker.renew()
                job.leave() if job.yield_to else job.complete()
        views = queue.requests()
        assert [view.state for view in views] == ["done"] * sent
        for view in views:
            assert kinds(queue, view.request_id).count("preempted") <= at_most


def check(queue: StageQueue, held: dict[int, Job]) -> None:
    views = {view.request_id: view for view in queue.requests()}
    for job in held.values():
        job.hear()
    asked = [job for job in held.values() if job.yield_to]
    assert len({job.yield_to for job in asked}) == len(asked)
    for job in asked:
        asker = views[job.yield_to]
        assert asker.state == "queued"
        assert PRIORITIES.index(asker.priority) < PRIORITIES.index(views[job.request_id].priority)
