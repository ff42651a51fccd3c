"""Who gets what next: credits, order, priorities, affinity, and going back for an input that was lost.

Owns the checks of admission and choice, in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from moonrelay.errors import ConfigError, IntegrityError, LeaseLost, PeerLost
from moonrelay.queueing import Job, Pipeline, StageQueue, StageSpec, StageStats, StageTask, Worker
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.queue_base import (
    LEASE,
    OpenQueue,
    Pace,
    QueueSuite,
    all_events,
    at,
    join,
    submit,
    take,
)

#: However a job in an admission stage can end, by name.
ENDINGS: Final[dict[str, Callable[[StageQueue, Job], object]]] = {
    "done": lambda _queue, job: job.complete(result=1),
    "failed": lambda _queue, job: job.fail(ConfigError("no such model", field="model")),
    "retried": lambda _queue, job: job.fail(OSError("flaky")),
    "given-back": lambda _queue, job: job.give_back(),
    "cancelled": lambda queue, job: queue.cancel(job.request_id),
    "input-lost": lambda _queue, job: job.lost_input(PeerLost("gone")),
}
#: More deliveries than any fair choice makes before it comes to the least urgent class.
_STARVED: Final = 100


class Order(QueueSuite):
    """Admission and choice."""

    @promise(Level.L1, "Denoise is admitted only against a free buffer downstream")
    def test_denoise_is_admitted_only_against_a_credit(self, queue: StageQueue) -> None:
        for number in range(4):
            submit(queue, f"r{number}", "denoise")
        denoise = join(queue, "denoise", slots=4)
        assert denoise.take(timeout_s=0) is None
        assert queue.stats().stages["denoise"].no_credit
        decode = join(queue, "decode", slots=1, buffers=2)
        jobs = [take(denoise), take(denoise)]
        assert denoise.take(timeout_s=0) is None, "a job was admitted without a credit"
        stats = queue.stats().stages
        assert stats["denoise"].no_credit
        assert _credits(queue) == (2, 2, 0)
        jobs[0].complete(next_task=StageTask(stage="decode", handle=b"latents"))
        assert denoise.take(timeout_s=0) is None, "a result that waits did not keep its credit"
        taken = take(decode)
        job = take(denoise)  # the place is free once the result is taken, not once it is decoded
        assert job.request_id == "r2"
        taken.complete(result=1)

    @promise(Level.L1, "A worker that waits for a credit gets its job when one comes")
    def test_a_credit_that_comes_lets_the_next_job_in(self, queue: StageQueue) -> None:
        submit(queue, "r1", "denoise")
        denoise = join(queue, "denoise")
        assert denoise.take(timeout_s=0) is None
        with join(queue, "decode", buffers=1):
            take(denoise).give_back()
        assert denoise.take(timeout_s=0) is None, "the credits of a worker that left can still be taken"
        join(queue, "decode", buffers=0)
        assert denoise.take(timeout_s=0) is None

    @promise(Level.L1, "A job's credit comes back however the job ends")
    @pytest.mark.parametrize("ending", list(ENDINGS))
    def test_the_credit_comes_back_however_the_job_ends(self, queue: StageQueue, ending: str) -> None:
        join(queue, "decode", buffers=1)
        denoise, encode = join(queue, "denoise", slots=2), join(queue, "encode")
        submit(queue, "r1")
        take(encode).complete(next_task=StageTask(stage="denoise", handle=b"embedding"))
        job = take(denoise)
        assert _credits(queue) == (1, 1, 0)
        ENDINGS[ending](queue, job)
        assert _credits(queue) == (1, 0, 1)
        if at(queue, "r1")[0] not in ("queued", "running"):
            submit(queue, "r2", "denoise")
            assert take(denoise).request_id == "r2"

    @promise(Level.L1, "A credit comes back when the worker dies, and when the deadline passes")
    def test_the_credit_of_a_dead_worker_comes_back(self, queue: StageQueue, pace: Pace) -> None:
        decode, denoise = join(queue, "decode", buffers=2), join(queue, "denoise", slots=2)
        submit(queue, "r1", "denoise")
        submit(queue, "r2", "denoise", deadline_s=pace.s(5))
        jobs = take(denoise), take(denoise)
        assert _credits(queue) == (2, 2, 0)
        pace.advance(6)
        decode.renew()
        assert _credits(queue) == (2, 1, 1)
        pace.advance(6)
        assert _credits(queue) == (2, 0, 2)
        assert all(job.settled is False for job in jobs)

    @promise(Level.L1, "A dead decode worker takes its buffers along; nothing that is under way is lost")
    def test_a_dead_decode_worker_takes_its_buffers_along(self, queue: StageQueue, pace: Pace) -> None:
        for number in range(4):
            submit(queue, f"r{number}", "denoise")
        _dead, alive = join(queue, "decode", buffers=2), join(queue, "decode", buffers=1)
        denoise = join(queue, "denoise", slots=4)
        jobs = [take(denoise) for _ in range(3)]
        pace.advance(LEASE * 0.6)
        denoise.renew()
        alive.renew()
        pace.advance(LEASE * 0.6)
        assert _credits(queue) == (1, 3, 0)
        for job in jobs:
            job.complete(next_task=StageTask(stage="decode"))
        for _ in range(2):
            take(alive).complete(result=1)
            assert denoise.take(timeout_s=0) is None, "more is admitted than the pool that is left has room for"
        take(alive).complete(result=1)
        assert take(denoise).request_id == "r3"

    @promise(Level.L1, "A result whose decode worker died holds its place again")
    def test_a_result_that_comes_back_holds_its_credit_again(self, queue: StageQueue, pace: Pace) -> None:
        _dying, alive = join(queue, "decode", buffers=1), join(queue, "decode", buffers=1)
        submit(queue, "r1", "denoise")
        take(join(queue, "denoise")).complete(next_task=StageTask(stage="decode"))
        _job = take(_dying)
        assert _credits(queue) == (2, 0, 2)
        pace.advance(LEASE * 0.6)
        alive.renew()
        pace.advance(LEASE * 0.6)
        assert at(queue, "r1") == ("queued", "decode")
        assert _credits(queue) == (1, 1, 0)

    @promise(Level.L1, "Another pipeline's admission stages take their own credits; without a stage below none")
    def test_admission_follows_the_pipeline(self, open_queue: OpenQueue) -> None:
        draft = StageSpec(name="draft", kind="admission", downstream="refine")
        queue = open_queue(pipeline=Pipeline([draft, StageSpec(name="refine", kind="admission")]))
        submit(queue, "r1", "draft")
        first = join(queue, "draft")
        assert first.take(timeout_s=0) is None
        second = join(queue, "refine", buffers=1)
        take(first).complete(next_task=StageTask(stage="refine"))
        take(second).complete(result=1)
        assert queue.result("r1", timeout_s=0) == 1

    @promise(Level.L1, "Within a class the first submitted is served first, also after it came back")
    def test_first_come_first_served_within_a_class(self, queue: StageQueue) -> None:
        names = [f"r{number}" for number in (5, 2, 9, 0, 11)]
        for name in names:
            submit(queue, name)
        worker = join(queue, "encode")
        take(worker).give_back()
        for _ in names:
            take(worker).complete(result=1)
        assert [event.request_id for event in all_events(queue) if event.kind == "done"] == names
        assert [one.request_id for one in queue.requests()] == names

    @promise(Level.L1, "More urgent work is served first")
    def test_urgent_work_is_served_first(self, queue: StageQueue) -> None:
        for name in ("batch", "standard", "interactive"):
            submit(queue, name, priority=name)
        worker, order = join(queue, "encode"), []
        for _ in range(3):
            job = take(worker)
            order.append(job.request_id)
            job.complete(result=1)
        assert order == ["interactive", "standard", "batch"]

    @promise(Level.L1, "No priority class waits for ever while more urgent work keeps coming")
    @pytest.mark.parametrize("priority", ["batch", "standard"])
    def test_no_priority_class_starves(self, queue: StageQueue, priority: str) -> None:
        submit(queue, "patient", priority=priority)
        worker = join(queue, "encode")
        for number in range(_STARVED):
            submit(queue, f"urgent{number}", priority="interactive")
            if number == 0:
                submit(queue, "urgent", priority="interactive")  # so that urgent work always waits
            job = take(worker)
            job.complete(result=1)
            if job.request_id == "patient":
                return
        pytest.fail(f"{priority} work was passed over {_STARVED} times")

    @promise(Level.L1, "A request keeps its priority through the stages unless a stage changes it")
    def test_priority_is_kept_through_the_stages(self, queue: StageQueue) -> None:
        worker = join(queue, "encode")
        for name, changed in (("r1", None), ("r2", "interactive")):
            submit(queue, name, priority="batch")
            take(worker).complete(next_task=StageTask(stage="denoise", priority=changed))  # type: ignore[arg-type]
        assert [one.priority for one in queue.requests()] == ["batch", "interactive"]
        assert queue.stats().stages["denoise"].queued_by_priority == {"interactive": 1, "standard": 0, "batch": 1}

    @promise(Level.L1, "Affinity lets the preferred worker come first, for a bounded time")
    def test_affinity_waits_for_its_worker_but_not_for_ever(self, queue: StageQueue, pace: Pace) -> None:
        here = join(queue, "encode", affinity={"host": "n1", "gpu": "0"})
        there = join(queue, "encode", affinity={"host": "n2"})
        submit(queue, "r1", affinity={"host": "n1"})
        submit(queue, "r2", affinity={"host": "n1"})
        submit(queue, "r3")
        job = take(there)
        assert job.request_id == "r3", "affinity was not heeded"
        job.complete(result=1)
        assert there.take(timeout_s=0) is None
        assert take(here).request_id == "r1"
        pace.advance(2.5)
        assert take(there).request_id == "r2", "a task waits for ever for a worker that is busy"

    @promise(Level.L1, "Affinity to a worker that is not there holds nothing up")
    def test_affinity_to_nobody_holds_nothing_up(self, queue: StageQueue) -> None:
        submit(queue, "r1", affinity={"host": "n9"})
        job = take(join(queue, "encode", affinity={"host": "n1"}))
        assert job.task.affinity == {"host": "n9"}

    @promise(Level.L1, "The load shown is the load there is")
    def test_stats_show_the_load_there_is(self, queue: StageQueue) -> None:
        for number in range(3):
            submit(queue, f"r{number}", priority="batch" if number else None)
        worker = join(queue, "encode", slots=2, affinity={"host": "n1"})
        job = take(worker)
        stats = queue.stats()
        assert list(stats.stages) == ["encode", "denoise", "decode"]
        encode = stats.stages["encode"]
        assert (encode.queued, encode.running, encode.workers, encode.slots) == (2, 1, 1, 2)
        assert encode.queued_by_priority == {"interactive": 0, "standard": 0, "batch": 2}
        assert (stats.active, dict(stats.ended)) == (3, {})
        (seen,) = stats.workers
        assert (seen.worker_id, seen.stage, seen.running) == (worker.worker_id, "encode", 1)
        assert dict(seen.affinity) == {"host": "n1"}
        job.complete(result=1)
        worker.close()
        stats = queue.stats()
        assert (stats.active, dict(stats.ended), stats.workers) == (2, {"done": 1}, ())


class Rewinds(QueueSuite):
    """A lost input goes back to the stage that made it."""

    @promise(Level.L1, "A lost input is made again by the stage that made it, from its own input")
    def test_a_lost_input_goes_back_to_its_maker(self, queue: StageQueue) -> None:
        encode, denoise, decode = _run_to_decode(queue)
        take(decode).lost_input(PeerLost("the producer is gone"))
        assert at(queue, "r1") == ("queued", "denoise")
        again = take(denoise)
        assert (again.task.handle, again.task.payload, again.attempt) == (b"e1", {"steps": 4}, 2)
        again.lost_input(LeaseLost("consumed"))  # and further back
        assert at(queue, "r1") == ("queued", "encode")
        job = take(encode)
        assert (job.task.payload, job.task.handle, job.attempt) == ({"prompt": "a cat"}, None, 2)
        job.complete(next_task=StageTask(stage="denoise", handle=b"e2"))
        job = take(denoise)
        assert (job.task.handle, job.attempt) == (b"e2", 3)
        job.complete(next_task=StageTask(stage="decode", handle=b"l2"))
        job = take(decode)
        assert (job.task.handle, job.attempt) == (b"l2", 2)
        job.complete(result="ok")
        assert queue.result("r1", timeout_s=0) == "ok"

    @promise(Level.L1, "Lost inputs are bounded by their maker's attempts and not counted against the reader")
    def test_lost_inputs_use_up_their_makers_attempts(self, queue: StageQueue) -> None:
        _encode, denoise, decode = _run_to_decode(queue)
        for _ in range(2):
            take(decode).lost_input(IntegrityError("wrong bytes"))
            take(denoise).complete(next_task=StageTask(stage="decode", handle=b"again", max_attempts=1))
        take(decode).lost_input(IntegrityError("wrong bytes"))
        assert at(queue, "r1") == ("dead", "decode")
        with pytest.raises(IntegrityError, match="wrong bytes"):
            queue.result("r1", timeout_s=0)

    @promise(Level.L1, "A lost input that no stage made ends the request")
    def test_a_lost_input_without_a_maker_ends_the_request(self, queue: StageQueue) -> None:
        submit(queue, "r1", "decode", handle=b"from outside")
        take(join(queue, "decode")).lost_input(PeerLost("gone"))
        with pytest.raises(PeerLost) as caught:
            queue.result("r1", timeout_s=0)
        assert caught.value.context["state"] == "failed"


def _run_to_decode(queue: StageQueue) -> tuple[Worker, Worker, Worker]:
    encode, denoise, decode = (join(queue, stage) for stage in ("encode", "denoise", "decode"))
    submit(queue, "r1", payload={"prompt": "a cat"})
    take(encode).complete(next_task=StageTask(stage="denoise", handle=b"e1", payload={"steps": 4}))
    take(denoise).complete(next_task=StageTask(stage="decode", handle=b"l1"))
    return encode, denoise, decode


def _credits(queue: StageQueue) -> tuple[int, int, int]:
    """Return the total, held and free credits of decode."""
    decode: StageStats = queue.stats().stages["decode"]
    return decode.credits_total, decode.credits_held, decode.credits_free
