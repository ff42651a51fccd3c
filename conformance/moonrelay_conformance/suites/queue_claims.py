"""What a claim is: one holder at a time, fenced by a token, redelivered when it lapses, and told when it is over.

Owns the checks of tokens, leases, attempts, cancelling and deadlines, in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import pytest

from moonrelay.errors import (
    Cancelled,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    TransferFailed,
)
from moonrelay.queueing import Job, StageQueue, StageTask
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.queue_base import (
    LEASE,
    Aside,
    OpenQueue,
    Pace,
    QueueSuite,
    at,
    idle,
    join,
    kinds,
    submit,
    take,
    view,
)

#: Whatever a worker may do with its job, by name.
ACTS: Final[dict[str, Callable[[Job], None]]] = {
    "complete": lambda job: job.complete(result="late"),
    "advance": lambda job: job.complete(next_task=StageTask(stage="decode")),
    "fail": lambda job: job.fail(OSError("late")),
    "lost-input": lambda job: job.lost_input(PeerLost("late")),
    "give-back": lambda job: job.give_back(),
    "progress": lambda job: job.progress(0.1),
}


class Claims(QueueSuite):
    """One claim from delivery to its end."""

    @promise(Level.L1, "Every claim's token is larger than all before it, across stages, workers and requests")
    def test_tokens_grow_with_every_claim(self, queue: StageQueue, pace: Pace) -> None:
        encode, other, denoise = join(queue, "encode"), join(queue, "encode"), join(queue, "denoise", slots=9)
        join(queue, "decode", buffers=9)
        tokens: list[int] = []

        def claimed(job: Job) -> Job:
            tokens.append(job.token)
            assert view(queue, job.request_id).token == job.token
            return job

        for number in range(3):
            submit(queue, f"r{number}")
            claimed(take(encode)).give_back()
            claimed(take(other)).complete(next_task=StageTask(stage="denoise"))
            claimed(take(denoise)).lost_input(PeerLost("gone"))
            claimed(take(encode)).fail(OSError("flaky"))
            queue.cancel(f"r{number}")
            queue.forget(f"r{number}")
        submit(queue, "r0")
        claimed(take(encode))
        pace.advance(LEASE + 1)
        claimed(take(other))
        assert tokens == sorted(set(tokens)), f"tokens do not grow: {tokens}"

    @promise(Level.L1, "While a claim lasts its job is given to nobody else")
    def test_a_claim_is_kept_until_its_lease_ends(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        first, second = join(queue, "encode"), join(queue, "encode")
        job = take(first)
        for _ in range(2):
            assert second.take(timeout_s=0) is None
            pace.advance(LEASE * 0.4)
        assert second.take(timeout_s=0) is None
        job.complete(result="mine")
        assert queue.result("r1", timeout_s=0) == "mine"
        assert kinds(queue, "r1").count("claimed") == 1

    @promise(Level.L1, "A claim that is not renewed is redelivered, and its old holder changes nothing any more")
    def test_a_lapsed_claim_is_redelivered_and_its_holder_is_fenced(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        first, second = join(queue, "encode"), join(queue, "encode")
        late = take(first)
        pace.advance(LEASE + 1)
        again = take(second)
        assert (again.request_id, again.attempt) == ("r1", 2)
        assert again.token > late.token
        before = queue.requests()
        for name in ("progress", "complete"):
            with pytest.raises(LeaseLost):
                ACTS[name](late)
        assert queue.requests() == before
        again.complete(result="right")
        assert queue.result("r1", timeout_s=0) == "right"
        assert kinds(queue, "r1") == ["submitted", "claimed", "redelivered", "claimed", "completed", "done"]

    @promise(Level.L1, "Whatever a late holder does is refused while another worker has the job")
    @pytest.mark.parametrize("act", list(ACTS))
    def test_a_late_holder_is_fenced_whatever_it_does(self, queue: StageQueue, pace: Pace, act: str) -> None:
        submit(queue, "r1")
        late = take(join(queue, "encode"))
        pace.advance(LEASE + 1)
        again = take(join(queue, "encode"))
        with pytest.raises(LeaseLost):
            ACTS[act](late)
        assert (view(queue, "r1").token, at(queue, "r1")) == (again.token, ("running", "encode"))
        again.complete(result="right")
        assert queue.result("r1", timeout_s=0) == "right"

    @promise(Level.L1, "A late act is refused also when nobody has noticed the lapse before")
    @pytest.mark.parametrize("act", list(ACTS))
    def test_a_late_act_is_refused_before_anybody_noticed(self, queue: StageQueue, pace: Pace, act: str) -> None:
        submit(queue, "r1")
        job = take(join(queue, "encode"))
        pace.advance(LEASE + 1)
        with pytest.raises(LeaseLost):
            ACTS[act](job)
        assert at(queue, "r1") == ("queued", "encode")

    @promise(Level.L1, "A late holder is refused also when its own worker has the job again")
    def test_an_old_token_is_dead_also_within_one_worker(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        worker = join(queue, "encode", slots=2)
        late = take(worker)
        pace.advance(LEASE + 1)
        again = take(worker)
        with pytest.raises(LeaseLost):
            late.complete(result="late")
        again.complete(result="right")
        assert queue.result("r1", timeout_s=0) == "right"

    @promise(Level.L1, "Renewals and progress keep a claim for as long as they come")
    def test_renewal_and_progress_keep_a_claim(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        worker, other = join(queue, "encode"), join(queue, "encode")
        job = take(worker)
        for turn in range(3):
            pace.advance(LEASE * 0.6)
            worker.renew()
            pace.advance(LEASE * 0.6)
            job.progress(0.25 * turn, "on it")
            assert other.take(timeout_s=0) is None
        one = view(queue, "r1")
        assert (one.fraction, one.note, one.attempt) == (0.5, "on it", 1)
        job.complete(result=1)
        assert queue.result("r1", timeout_s=0) == 1

    @promise(Level.L1, "A renewal does not bring a lapsed claim back, and tells its holder")
    def test_a_renewal_tells_of_the_loss_and_brings_nothing_back(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        worker = join(queue, "encode")
        late = take(worker)
        pace.advance(LEASE + 1)
        again = take(join(queue, "encode"))
        assert late.lost is None
        worker.renew()
        assert isinstance(late.lost, LeaseLost)
        with pytest.raises(LeaseLost):
            late.check()
        assert view(queue, "r1").token == again.token
        # The worker itself is in the pool again.
        assert worker.worker_id in [one.worker_id for one in queue.stats().workers]

    @promise(Level.L1, "The heartbeat keeps a claim without any help")
    def test_the_heartbeat_keeps_a_claim(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1")
        other = join(queue, "encode")
        with queue.register_worker("encode", heartbeat=True) as worker:
            job = take(worker)
            for _ in range(6):
                last = next(one.lease_left_s for one in queue.stats().workers if one.worker_id == worker.worker_id)
                pace.advance(LEASE * 0.3)
                self._until_renewed(queue, worker.worker_id, above_s=last - pace.s(LEASE * 0.3))
            assert other.take(timeout_s=0) is None
            job.complete(result=1)
        assert queue.result("r1", timeout_s=0) == 1

    @promise(Level.L1, "Redeliveries count attempts; when they are used up the request is dead, and its client is told")
    def test_dead_workers_use_attempts_up_and_the_client_is_told(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1", max_attempts=2)
        for attempt in (1, 2):
            job = take(join(queue, "encode"))
            assert (job.attempt, job.task.attempt) == (attempt, attempt)
            pace.advance(LEASE + 1)
        with pytest.raises(PeerLost) as caught:
            queue.result("r1", timeout_s=0)
        assert (caught.value.context["state"], caught.value.context["attempt"]) == ("dead", 2)
        assert not caught.value.retryable
        with pytest.raises(LeaseLost):
            job.complete(result="late")
        assert kinds(queue, "r1") == ["submitted", "claimed", "redelivered", "claimed", "dead"]
        assert queue.stats().workers == ()

    @promise(Level.L1, "A retryable failure comes again after a growing pause, within the attempts; then it is dead")
    def test_a_retryable_failure_comes_again_until_attempts_are_used_up(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1", max_attempts=3)
        worker = join(queue, "encode")
        for attempt, pause in ((1, 1.0), (2, 2.0)):
            job = take(worker)
            assert job.attempt == attempt
            job.fail(TransferFailed("no route"))
            assert view(queue, "r1").error_code == "transfer_failed"
            pace.advance(pause * 0.5)
            assert worker.take(timeout_s=0) is None, "a failed job came back without its pause"
            pace.advance(pause * 0.7)
        take(worker).fail(TransferFailed("no route"))
        with pytest.raises(TransferFailed, match="no route") as caught:
            queue.result("r1", timeout_s=0)
        assert (caught.value.context["state"], caught.value.context["attempt"]) == ("dead", 3)
        assert kinds(queue, "r1")[-1] == "dead"
        pace.advance(10)
        assert worker.take(timeout_s=0) is None

    @promise(Level.L1, "A final failure ends the request at once, with the stage's own error")
    def test_a_final_failure_ends_the_request_at_once(self, queue: StageQueue, pace: Pace) -> None:
        worker = join(queue, "encode")
        submit(queue, "r1")
        take(worker).fail(ConfigError("no such model", field="model"))
        submit(queue, "r2")
        take(worker).fail(TransferFailed("no route"), retryable=False)
        pace.advance(10)
        assert worker.take(timeout_s=0) is None
        for request_id, kind in (("r1", ConfigError), ("r2", TransferFailed)):
            with pytest.raises(kind) as caught:
                queue.result(request_id, timeout_s=0)
            assert caught.value.context["state"] == "failed"

    @promise(Level.L1, "A job that is given back is delivered again, at once and counted")
    def test_a_returned_job_is_delivered_again(self, queue: StageQueue) -> None:
        submit(queue, "r1", payload=[1], max_attempts=3)
        worker, other = join(queue, "encode"), join(queue, "encode")
        take(worker).give_back("enough")
        with other.claim(timeout_s=0) as job:
            assert job is not None, "a job that was given back is not delivered again"
            assert (job.attempt, job.task.payload) == (2, [1])
        last = take(worker)
        assert last.attempt == 3
        with pytest.raises(KeyboardInterrupt), last:
            raise KeyboardInterrupt
        assert at(queue, "r1") == ("dead", "encode")

    @promise(Level.L1, "Attempts of each stage are counted apart")
    def test_attempts_of_each_stage_are_counted_apart(self, queue: StageQueue) -> None:
        submit(queue, "r1", max_attempts=2)
        encode, denoise = join(queue, "encode"), join(queue, "denoise")
        join(queue, "decode")
        take(encode).give_back()
        take(encode).complete(next_task=StageTask(stage="denoise", max_attempts=2))
        job = take(denoise)
        assert job.attempt == 1
        job.give_back()
        assert take(denoise).attempt == 2

    @promise(Level.L1, "A worker that leaves hands its jobs back at once, and is fenced")
    def test_a_closed_worker_hands_its_jobs_back(self, queue: StageQueue) -> None:
        submit(queue, "r1")
        with join(queue, "encode") as worker:
            job = take(worker)
        assert take(join(queue, "encode")).attempt == 2
        with pytest.raises(LeaseLost):
            job.complete(result="late")
        with pytest.raises(ClosedError):
            worker.take(timeout_s=0)

    @promise(Level.L1, "A worker holds at most its slots")
    def test_slots_bound_the_jobs_of_a_worker(self, queue: StageQueue) -> None:
        for number in range(3):
            submit(queue, f"r{number}")
        worker = join(queue, "encode", slots=2)
        first, second = take(worker), take(worker)
        assert worker.take(timeout_s=0) is None
        first.complete(result=1)
        assert take(worker).request_id == "r2"
        second.give_back()

    @promise(Level.L1, "Two workers never hold one job, also when many threads claim at once")
    def test_threads_that_race_never_hold_one_job(self, open_queue: OpenQueue) -> None:
        queue, count, racers = open_queue(max_attempts=9), 60, 6
        for number in range(count):
            submit(queue, f"r{number}")
        start, lock = threading.Barrier(racers), threading.Lock()
        holding: set[str] = set()
        taken: list[tuple[str, int]] = []

        def race() -> None:
            worker = join(queue, "encode")
            start.wait(30)
            while (job := worker.take(timeout_s=0)) is not None:
                with lock:
                    assert job.request_id not in holding, f"{job.request_id} is held twice"
                    holding.add(job.request_id)
                    taken.append((job.request_id, job.token))
                view(queue, job.request_id)
                with lock:
                    holding.remove(job.request_id)
                job.complete(result=job.token)

        for racer in [Aside(race) for _ in range(racers)]:
            racer.outcome()
        assert len(taken) == count, f"{count} requests were delivered {len(taken)} times"
        assert len({token for _, token in taken}) == count
        for request_id, token in taken:
            assert queue.result(request_id, timeout_s=0) == token
        assert queue.stats().ended == {"done": count}

    @promise(Level.L1, "Of two who settle one job at the same time only one does")
    def test_of_two_threads_that_settle_one_job_one_is_refused(self, queue: StageQueue) -> None:
        worker = join(queue, "encode")
        for number in range(10):
            submit(queue, f"r{number}")
            job, start = take(worker), threading.Barrier(2)
            wins: list[str] = []

            def settle(name: str, job: Job = job, start: threading.Barrier = start, wins: list[str] = wins) -> None:
                start.wait(30)
                try:
                    job.complete(result=name)
                except MoonrelayError:
                    return
                wins.append(name)

            for one in [Aside(lambda name=name: settle(name)) for name in ("a", "b")]:  # type: ignore[misc]
                one.outcome()
            assert len(wins) == 1
            assert queue.result(f"r{number}", timeout_s=0) == wins[0]
            assert kinds(queue, f"r{number}").count("done") == 1

    @promise(Level.L1, "A cancelled request is over: its client is told, and no worker gets it")
    def test_a_cancelled_queued_request_is_never_worked_on(self, queue: StageQueue) -> None:
        submit(queue, "r1")
        submit(queue, "r2")
        waiting = Aside(lambda: queue.result("r1"))
        assert queue.cancel("r1") is True
        assert queue.cancel("r1") is False
        worker = join(queue, "encode")
        assert take(worker).request_id == "r2"
        with pytest.raises(Cancelled) as caught:
            waiting.outcome()
        assert caught.value.context["state"] == "cancelled"
        assert kinds(queue, "r1") == ["submitted", "cancelled"]

    @promise(Level.L1, "The worker of a cancelled request is told at its next renewal")
    def test_the_worker_of_a_cancelled_request_is_told(self, queue: StageQueue) -> None:
        submit(queue, "r1")
        worker = join(queue, "encode")
        job = take(worker)
        assert queue.cancel("r1") is True
        assert at(queue, "r1") == ("cancelled", "encode")
        worker.renew()
        assert job.cancelled
        with pytest.raises(Cancelled):
            job.check()
        with pytest.raises(Cancelled):
            queue.result("r1", timeout_s=0)

    @promise(Level.L1, "Whatever a worker does with a cancelled request is refused as Cancelled and changes nothing")
    @pytest.mark.parametrize("act", list(ACTS))
    def test_a_cancelled_running_request_stays_cancelled(self, queue: StageQueue, act: str) -> None:
        submit(queue, "r1")
        job = take(join(queue, "encode"))
        queue.cancel("r1")
        with pytest.raises(Cancelled):
            ACTS[act](job)
        assert at(queue, "r1") == ("cancelled", "encode")
        with pytest.raises(Cancelled):
            queue.result("r1", timeout_s=0)
        assert kinds(queue, "r1")[-1] == "cancelled"

    @promise(Level.L1, "What has ended cannot be cancelled any more")
    def test_a_cancel_after_the_end_changes_nothing(self, queue: StageQueue) -> None:
        submit(queue, "r1")
        take(join(queue, "encode")).complete(result=1)
        assert queue.cancel("r1") is False
        assert queue.result("r1", timeout_s=0) == 1
        assert at(queue, "r1") == ("done", "encode")

    @promise(Level.L1, "A deadline ends a queued request though nobody claims it")
    def test_a_deadline_ends_a_queued_request(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1", deadline_s=pace.s(5))
        waiting = Aside(lambda: queue.result("r1"))
        assert waiting.running(0.05)
        pace.advance(6)
        assert at(queue, "r1") == ("failed", "encode")
        with pytest.raises(DeadlineExceeded) as caught:
            waiting.outcome()
        assert (caught.value.context["state"], caught.value.context["stage"]) == ("failed", "encode")
        assert idle(join(queue, "encode"))

    @promise(Level.L1, "A deadline ends a running request, and its worker is told")
    def test_a_deadline_ends_a_running_request_and_its_worker_is_told(self, queue: StageQueue, pace: Pace) -> None:
        submit(queue, "r1", deadline_s=pace.s(5))
        worker = join(queue, "encode")
        job = take(worker)
        assert job.task.deadline_s is not None
        assert 0 < job.task.deadline_s <= pace.s(5)
        pace.advance(6)
        worker.renew()
        assert isinstance(job.lost, DeadlineExceeded)
        with pytest.raises(DeadlineExceeded):
            job.complete(result="late")
        with pytest.raises(DeadlineExceeded) as caught:
            queue.result("r1", timeout_s=0)
        assert caught.value.context["state"] == "failed"

    @promise(Level.L1, "A deadline holds across stages and only comes nearer")
    def test_a_deadline_holds_across_stages(self, queue: StageQueue, pace: Pace) -> None:
        encode = join(queue, "encode")
        for request_id, deadline_s in (("r1", pace.s(100)), ("r2", pace.s(2)), ("r3", None)):
            submit(queue, request_id, deadline_s=pace.s(8))
            take(encode).complete(next_task=StageTask(stage="denoise", deadline_s=deadline_s))
        pace.advance(4)
        assert [one.state for one in queue.requests()] == ["queued", "failed", "queued"]
        pace.advance(5)
        assert [one.state for one in queue.requests()] == ["failed", "failed", "failed"]

    @staticmethod
    def _until_renewed(queue: StageQueue, worker_id: str, *, above_s: float) -> None:
        """Wait until the heartbeat's thread, which a moved clock woke, has renewed."""
        pause = threading.Event()
        for _ in range(600):
            left = [one.lease_left_s for one in queue.stats().workers if one.worker_id == worker_id]
            assert left, "the worker lost its registration though its heartbeat runs"
            if left[0] > above_s + 1e-6:
                return
            pause.wait(0.02)
        pytest.fail("the heartbeat does not renew")
