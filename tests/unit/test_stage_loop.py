"""The worker loop: in which order a job is claimed, run, settled and acknowledged, and what a failure leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moonrelay import DeleteOnConsume, DiffusionConnector, LeaseStatus, StageHandle, StagePayload
from moonrelay.errors import (
    Cancelled,
    ClosedError,
    DeadlineExceeded,
    InputLost,
    IntegrityError,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    Preempted,
    QueueFull,
    TransferFailed,
)
from moonrelay.orchestrator import Outcome, StageLoop, Work
from moonrelay.queueing import Job, StageQueue, StageTask, Worker

CONTROL = {"claim_ttl_s": 1.0, "renew_s": 0.2, "peer_timeout_s": 1.0, "retry_s": 0.2}
Process = Callable[[Work], Outcome]


class Program:
    """A stage whose work is a function."""

    def __init__(self, process: Process, stage: str = "denoise") -> None:
        self.stage = stage
        self.process = process


class House:
    """One upstream connector, one worker with a loop, and the queue between them."""

    def __init__(self, settings: dict[str, object] | None = None) -> None:
        config = {"retry_delay_s": 0.0, "max_attempts": 3, **(settings or {})}
        self.queue = StageQueue.connect("memory://", config=config)
        self.upstream = DiffusionConnector(
            "encode", "p2p", {"engine": "memory", "pool_bytes": 1 << 20}, control_config=CONTROL
        )
        self.connector = DiffusionConnector(
            "denoise", "p2p", {"engine": "memory", "pool_bytes": 1 << 20}, control_config=CONTROL
        )
        self.encoder = self.queue.register_worker("encode", heartbeat=False)
        self.decoder = self.queue.register_worker("decode", heartbeat=False)
        self.worker: Worker = self.queue.register_worker("denoise", heartbeat=False)

    def submit(self, request_id: str = "r1", priority: Any = None) -> StageHandle:
        """Bring a request to where its denoise task, with a payload, waits."""
        self.queue.submit(StageTask(stage="encode", request_id=request_id, payload={}, priority=priority))
        return self.encode()

    def encode(self) -> StageHandle:
        job = self.encoder.take(timeout_s=5)
        assert job is not None
        handle = self.upstream.publish(payload(job.request_id))
        job.complete(next_task=StageTask(stage="denoise", handle=handle, payload={}))
        return handle

    def take(self) -> Job:
        job = self.worker.take(timeout_s=5)
        assert job is not None
        return job

    def loop(self, process: Process) -> StageLoop:
        return StageLoop(self.queue, self.connector, Program(process))

    def run(self, loop: StageLoop, jobs: int) -> None:
        """Do so many jobs, whichever come."""
        for _ in range(jobs):
            loop.do(self.take())

    def request(self, request_id: str = "r1") -> tuple[str, str]:
        view = next(view for view in self.queue.requests() if view.request_id == request_id)
        return view.state, view.stage

    def input_state(self, handle: StageHandle) -> LeaseStatus:
        return self.upstream.status(handle).state

    def close(self) -> None:
        for worker in (self.worker, self.encoder, self.decoder):
            worker.close()
        self.queue.close()
        self.connector.close()
        self.upstream.close()


def payload(request_id: str) -> StagePayload:
    return StagePayload(request_id=request_id, kind="embedding", tensor=torch.arange(64, dtype=torch.float32))


def held(connector: DiffusionConnector) -> int:
    return len(connector._claims)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()


def denoise(work: Work) -> Outcome:
    read = work.input.read()
    assert isinstance(read, torch.Tensor)
    handle = work.connector.publish(payload(work.job.request_id))
    return Outcome(next_task=StageTask(stage="decode", handle=handle, payload={}))


def raising(error: BaseException) -> Process:
    def process(_work: Work) -> Outcome:
        raise error

    return process


def test_a_job_is_completed_before_its_input_is_acknowledged(house: House) -> None:
    handle = house.submit()
    seen: list[object] = []
    loop = house.loop(denoise)
    original = loop._acknowledge

    def look(claim: Any, job: Job) -> None:
        seen.append((house.request(), house.input_state(handle)))
        original(claim, job)

    loop._acknowledge = look  # type: ignore[method-assign]
    loop.do(house.take())
    assert seen == [(("queued", "decode"), LeaseStatus.CLAIMED)]
    assert house.input_state(handle) is LeaseStatus.CONSUMED
    assert loop.counts.completed == 1
    assert held(house.connector) == 0


def test_a_result_without_a_next_stage_ends_the_request(house: House) -> None:
    house.submit()
    house.loop(lambda work: Outcome(result={"n": 1})).do(house.take())
    assert house.queue.result("r1", timeout_s=1) == {"n": 1}


def test_an_input_that_was_kept_elsewhere_and_is_gone_goes_back_too(house: House) -> None:
    first = StageTask(stage="encode", request_id="r1", payload={})
    house.queue.submit(first, ahead=StageTask(stage="denoise", payload={"kept": "there"}))
    loop = house.loop(raising(InputLost("evicted")))
    loop.do(house.take())
    assert house.request() == ("queued", "encode")
    assert (loop.counts.rewound, loop.counts.failed) == (1, 0)
    house.encode()
    house.loop(denoise).do(house.take())
    assert house.request() == ("queued", "decode")


def test_an_input_that_is_gone_goes_back_to_the_stage_that_made_it(house: House) -> None:
    handle = house.submit()
    house.upstream.release(handle)
    ran: list[object] = []
    loop = house.loop(lambda work: ran.append(work) or Outcome())  # type: ignore[func-returns-value]
    loop.do(house.take())
    assert ran == []
    assert house.request() == ("queued", "encode")
    assert loop.counts.rewound == 1
    again = house.encode()
    assert again != handle
    house.loop(denoise).do(house.take())
    assert house.request() == ("queued", "decode")


def test_an_input_that_cannot_be_read_is_dropped_and_made_again(house: House) -> None:
    handle = house.submit()

    def process(work: Work) -> Outcome:
        def lie(*_: object) -> None:
            raise IntegrityError("bytes are wrong")

        work.input._source.fetch = lie  # type: ignore[method-assign, assignment]
        work.input.read()
        raise AssertionError

    loop = house.loop(process)
    loop.do(house.take())
    assert house.request() == ("queued", "encode")
    assert loop.counts.rewound == 1
    assert held(house.connector) == 0, "the claim on the bad input is renewed for ever"
    assert house.input_state(handle) is LeaseStatus.RELEASED, "nobody will ever read it"


def test_a_failure_that_is_not_the_inputs_does_not_blame_the_input(house: House) -> None:
    handle = house.submit()
    loop = house.loop(raising(PeerLost("the store that results go to does not answer")))
    loop.do(house.take())
    assert house.request() == ("queued", "denoise")
    assert house.input_state(handle) is LeaseStatus.READY
    assert (loop.counts.failed, loop.counts.rewound) == (1, 0)


@pytest.mark.parametrize("error", [TransferFailed("a link is down"), ValueError("odd")])
def test_a_failed_job_gives_its_input_back(house: House, error: Exception) -> None:
    handle = house.submit()
    loop = house.loop(raising(error))
    loop.do(house.take())
    assert loop.counts.failed == 1
    assert house.input_state(handle) is LeaseStatus.READY
    assert held(house.connector) == 0


def test_a_retryable_failure_is_tried_again_with_the_same_input(house: House) -> None:
    house.submit()
    house.loop(raising(TransferFailed("once"))).do(house.take())
    house.loop(denoise).do(house.take())
    assert house.request() == ("queued", "decode")


def test_a_failure_for_good_reaches_the_client(house: House) -> None:
    house.submit()
    house.loop(raising(IntegrityError("the model's weights are damaged"))).do(house.take())
    with pytest.raises(MoonrelayError, match="weights"):
        house.queue.result("r1", timeout_s=1)


def test_a_job_lost_mid_way_gives_the_input_back_and_drops_the_result(house: House) -> None:
    handle = house.submit()
    published: list[StageHandle] = []

    def process(work: Work) -> Outcome:
        outcome = denoise(work)
        assert outcome.published is not None
        published.append(outcome.published)
        house.queue.cancel("r1")
        return outcome

    loop = house.loop(process)
    loop.do(house.take())
    assert loop.counts.lost == 1
    assert house.connector.status(published[0]).state is LeaseStatus.RELEASED
    assert held(house.connector) == 0, "the claim of a lost job is renewed for ever, and keeps its successor out"
    assert house.input_state(handle) is LeaseStatus.READY


def test_a_job_known_to_be_lost_gives_the_input_back(house: House) -> None:
    handle = house.submit()
    job = house.take()

    def process(work: Work) -> Outcome:
        work.job.mark_lost(LeaseLost("another worker has it", request_id="r1", token=work.job.token))
        work.report(1, 2)
        raise AssertionError

    loop = house.loop(process)
    loop.do(job)
    assert loop.counts.lost == 1
    assert held(house.connector) == 0
    assert house.input_state(handle) is LeaseStatus.READY


def test_a_cancelled_job_stops_at_its_next_report(house: House) -> None:
    house.submit()
    steps: list[int] = []

    def process(work: Work) -> Outcome:
        for step in range(5):
            steps.append(step)
            if step == 1:
                house.queue.cancel("r1")
            work.report(step, 5)
        raise AssertionError

    loop = house.loop(process)
    loop.do(house.take())
    assert steps == [0, 1]
    assert loop.counts.lost == 1
    with pytest.raises(Cancelled):
        house.queue.result("r1", timeout_s=1)


def test_a_deadline_of_the_programs_own_is_a_failure_not_a_lost_job(house: House) -> None:
    house.submit()
    loop = house.loop(raising(DeadlineExceeded("a helper took too long")))
    loop.do(house.take())
    assert (loop.counts.failed, loop.counts.lost) == (1, 0)


def test_a_connector_closed_under_the_loop_gives_the_job_to_others(house: House) -> None:
    handle = house.submit()

    def process(work: Work) -> Outcome:
        house.connector.close()
        work.connector.publish(payload("r1"))
        raise AssertionError

    with pytest.raises(ClosedError):
        house.loop(process).do(house.take())
    assert house.request() == ("queued", "denoise"), "a worker that stops must not fail the request for good"
    assert house.input_state(handle) is LeaseStatus.READY


def test_an_interrupt_gives_job_and_input_back_and_passes_on(house: House) -> None:
    handle = house.submit()
    with pytest.raises(KeyboardInterrupt):
        house.loop(raising(KeyboardInterrupt())).do(house.take())
    assert house.request() == ("queued", "denoise")
    assert house.input_state(handle) is LeaseStatus.READY


def test_an_acknowledgement_that_comes_too_late_drops_the_input(house: House) -> None:
    handle = house.submit()

    def process(work: Work) -> Outcome:
        outcome = denoise(work)
        # As if the claim had lapsed while the process was stopped.
        house.upstream._outbox.ledger._table.nack(handle.id, 1, 0.0)
        return outcome

    loop = house.loop(process)
    loop.do(house.take())
    assert loop.counts.completed == 1
    assert house.request() == ("queued", "decode")
    assert house.input_state(handle) is LeaseStatus.RELEASED, "the job is done: nobody needs the input any more"


def test_a_crash_between_complete_and_ack_leaves_nothing_for_long(house: House) -> None:
    house.queue.submit(StageTask(stage="encode", request_id="r1", payload={}))
    job = house.encoder.take(timeout_s=5)
    assert job is not None
    opened = house.upstream.open(
        StagePayload(request_id="r1", kind="embedding", tensor=torch.zeros(64), lease=DeleteOnConsume(1.5))
    )
    opened.ready(0)
    job.complete(next_task=StageTask(stage="denoise", handle=opened.handle, payload={}))
    loop = house.loop(denoise)

    def die(claim: Any, job: Job) -> None:
        # A process that is killed neither acknowledges nor renews.
        house.connector._renew_claims = lambda: False  # type: ignore[method-assign]
        claim.renew = lambda: None
        raise KeyboardInterrupt

    loop._acknowledge = die  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.do(house.take())
    assert house.request() == ("queued", "decode")
    opened.wait("expired", 10)
    assert house.upstream._runtime.data().arena.live_slots == 0


def test_run_goes_on_after_a_queue_that_is_busy_for_a_moment(house: House) -> None:
    house.submit()
    house.worker.close()
    troubles = [QueueFull("busy")]
    ran = threading.Event()

    def process(work: Work) -> Outcome:
        ran.set()
        return denoise(work)

    def registered(worker: Worker) -> None:
        original = worker.take

        def take(timeout_s: float | None = None) -> Job | None:
            if troubles:
                raise troubles.pop()
            return original(timeout_s)

        worker.take = take  # type: ignore[method-assign]

    loop = StageLoop(house.queue, house.connector, Program(process), on_registered=registered)
    thread = threading.Thread(target=loop.run, name="moonrelay-test-loop")
    thread.start()
    assert ran.wait(10)
    loop.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert loop.counts.completed == 1


def test_a_job_that_is_left_goes_back_with_its_input_and_costs_no_attempt(house: House) -> None:
    handle = house.submit()
    loop = house.loop(raising(Preempted("left after step 3")))
    for _ in range(5):  # more often than there are attempts
        loop.do(house.take())
        assert house.request() == ("queued", "denoise")
        assert house.input_state(handle) is LeaseStatus.READY
    assert (loop.counts.left, loop.counts.failed) == (5, 0)
    loop = house.loop(denoise)
    loop.do(house.take())
    assert house.request() == ("queued", "decode")


def test_a_program_hears_that_its_worker_is_to_stop(house: House) -> None:
    house.submit()
    seen: list[bool] = []

    def process(work: Work) -> Outcome:
        seen.append(work.leaving())
        loop.stop()
        seen.append(work.leaving())
        return denoise(work)

    loop = house.loop(process)
    loop.do(house.take())
    assert seen == [False, True]


def batch_and_interactive(**settings: object) -> House:
    """Return a house with a batch job waiting at denoise, where interactive work preempts it."""
    house = House({"preempt": "interactive>batch", "preempt_least_s": 0.0, **settings})
    house.submit("b1", "batch")
    return house


def stepping(house: House, steps: int, seen: list[tuple[str, int]], *, arrives_after: int = 2) -> Process:
    """Return a program that can be left after each of its steps; an interactive task arrives during the first job."""

    def process(work: Work) -> Outcome:
        for done in range(1, steps + 1):
            seen.append((work.job.request_id, done))
            if seen == [("b1", number + 1) for number in range(arrives_after)]:
                house.submit("i1", "interactive")
            work.report(done, steps)
            if work.leaving():
                message = f"left after step {done} of {steps}"
                raise Preempted(message)
        return denoise(work)

    return process


def test_an_interactive_task_overtakes_a_batch_job_at_a_step_boundary() -> None:
    house = batch_and_interactive()
    seen: list[tuple[str, int]] = []
    loop = house.loop(stepping(house, 6, seen))
    house.run(loop, 3)
    assert [name for name, _ in seen] == ["b1"] * 3 + ["i1"] * 6 + ["b1"] * 6
    assert (loop.counts.left, loop.counts.completed, loop.counts.failed) == (1, 2, 0)
    house.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"preempt": ""}, "off"),
        ({"preempt_least_steps": 6}, "too few steps left"),
        ({"preempt_least_s": 3600.0}, "too little time left"),
        ({"preempt": "standard>batch"}, "another class"),
    ],
)
def test_a_batch_job_goes_on_where_leaving_is_off_or_not_worth_it(settings: dict[str, object], why: str) -> None:
    house = batch_and_interactive(**settings)
    seen: list[tuple[str, int]] = []
    loop = house.loop(stepping(house, 6, seen))
    house.run(loop, 2)
    assert [name for name, _ in seen] == ["b1"] * 6 + ["i1"] * 6, why
    assert loop.counts.left == 0
    house.close()


def test_a_program_that_never_asks_is_never_preempted() -> None:
    house = batch_and_interactive()

    def process(work: Work) -> Outcome:
        for done in range(1, 7):
            if done == 2 and work.job.request_id == "b1":
                house.submit("i1", "interactive")
            work.report(done, 6)
        assert work.job.yield_to == ""
        return denoise(work)

    loop = house.loop(process)
    house.run(loop, 2)
    assert (loop.counts.left, loop.counts.completed) == (0, 2)
    house.close()


def test_what_was_kept_for_a_second_try_is_dropped_once_the_job_is_settled(house: House) -> None:
    house.submit()
    seen: list[tuple[str, str]] = []

    def process(work: Work) -> Outcome:
        made = denoise(work)
        return Outcome(next_task=made.next_task, afterwards=lambda: seen.append(house.request()))

    house.loop(process).do(house.take())
    assert seen == [("queued", "decode")]

    def broken(work: Work) -> Outcome:
        process(work)
        raise TransferFailed("after all")

    house.submit("r2")
    house.loop(broken).do(house.take())
    assert len(seen) == 1
