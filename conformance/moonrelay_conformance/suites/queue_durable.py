"""What a queue shared by processes promises, and what a durable one keeps.

Owns the checks that need a second process, or a second opening of the same queue, but no violence.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from moonrelay.errors import Cancelled, ConfigError, DeadlineExceeded, LeaseLost
from moonrelay.queueing import Pipeline, StageQueue, StageSpec, StageTask
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.queue_base import (
    LEASE,
    PATIENCE_S,
    OpenQueue,
    Pace,
    QueueSuite,
    all_events,
    at,
    join,
    kinds,
    submit,
    take,
)
from moonrelay_conformance.suites.queue_processes import LONG_LEASE_S, Peers, ProcessSuite, refusal

#: A worker that renews every 0.3 s is told within this.
_TOLD_S: Final = 15.0


class Durable(QueueSuite):
    """What survives."""

    @promise(
        Level.L2,
        "Requests, payloads, results, failures, events and counters survive that everybody closes the queue",
        requires=[Capability.DURABLE],
    )
    def test_everything_survives_reopening(self, open_queue: OpenQueue, pace: Pace) -> None:
        queue = open_queue(keep_events=1000)
        url = queue.url
        encode, denoise = join(queue, "encode"), join(queue, "denoise")
        join(queue, "decode")
        for number, name in enumerate(("done", "failed", "cancelled", "moved", "rewound", "tried")):
            submit(queue, name, payload={"n": number, "b": b"\xff", 1: None} if name == "tried" else [number])
        take(encode).complete(result={"frames": [b"\x00", 2.5]})
        take(encode).fail(ConfigError("no such model", field="model"))
        queue.cancel("cancelled")
        take(encode).complete(next_task=StageTask(stage="denoise", handle=b"moved", payload={1: (2,)}))
        take(encode).complete(next_task=StageTask(stage="denoise", handle=b"lost"))
        first = take(denoise)
        take(encode).give_back("once")
        submit(queue, "late", "decode", deadline_s=pace.s(50), priority="batch", affinity={"host": "n1"})
        first.give_back()
        token = first.token
        for worker in (encode, denoise):
            worker.close()
        queue.close()

        again = open_queue(url=url, keep_events=1000)
        states = {one.request_id: (one.state, one.stage, one.attempt) for one in again.requests()}
        assert states == {
            "done": ("done", "encode", 1),
            "failed": ("failed", "encode", 1),
            "cancelled": ("cancelled", "encode", 0),
            "moved": ("queued", "denoise", 1),
            "rewound": ("queued", "denoise", 0),
            "tried": ("queued", "encode", 1),
            "late": ("queued", "decode", 0),
        }
        assert list(states)[-1] == "late"
        assert again.result("done", timeout_s=0) == {"frames": [b"\x00", 2.5]}
        with pytest.raises(ConfigError, match="no such model"):
            again.result("failed", timeout_s=0)
        with pytest.raises(Cancelled):
            again.result("cancelled", timeout_s=0)
        events = all_events(again)
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert kinds(again, "done") == ["submitted", "claimed", "completed", "done"]
        assert again.stats().workers == ()
        with pytest.raises(ConfigError):
            again.submit(StageTask(stage="encode", request_id="moved"))
        assert again.submit(StageTask(stage="encode", request_id="moved", payload=[3]), if_absent=True) is False
        submit(again, "new")
        assert again.stats().last_event == len(events) + 1
        join(again, "decode")
        encode, denoise = join(again, "encode"), join(again, "denoise", slots=2)
        jobs = [take(encode), take(denoise), take(denoise)]
        assert [job.request_id for job in jobs] == ["tried", "moved", "rewound"]
        assert [job.attempt for job in jobs] == [2, 2, 1]
        assert jobs[0].task.payload == {"n": 5, "b": b"\xff", 1: None}
        assert (jobs[1].task.handle, jobs[1].task.payload) == (b"moved", {1: [2]})
        assert min(job.token for job in jobs) > token
        jobs[2].lost_input(LeaseLost("consumed"))
        assert at(again, "rewound") == ("queued", "encode")
        pace.advance(51)
        with pytest.raises(DeadlineExceeded):
            again.result("late", timeout_s=0)

    @promise(Level.L2, "The pipeline is kept with the queue; another one is refused", requires=[Capability.DURABLE])
    def test_the_pipeline_is_kept_with_the_queue(self, open_queue: OpenQueue) -> None:
        mine = Pipeline([StageSpec(name="a", kind="admission", downstream="b"), StageSpec(name="b")])
        queue = open_queue(pipeline=mine)
        url = queue.url
        queue.close()
        assert open_queue(url=url).pipeline == mine
        assert open_queue(url=url, pipeline=mine).pipeline == mine
        with pytest.raises(ConfigError):
            open_queue(url=url, pipeline=Pipeline([StageSpec(name="a")]))

    @promise(
        Level.L2,
        "Two openings of one queue are one queue: a lapse, a cancel and a fence hold across them",
        requires=[Capability.PROCESSES],
    )
    def test_two_openings_are_one_queue(self, open_queue: OpenQueue, pace: Pace) -> None:
        one = open_queue()
        other = open_queue(url=one.url)
        submit(one, "r1")
        late = take(join(other, "encode"))
        assert at(one, "r1") == ("running", "encode")
        pace.advance(LEASE + 1)
        again = take(join(one, "encode"))
        assert again.token > late.token
        with pytest.raises(LeaseLost):
            late.complete(result="late")
        other.cancel("r1")
        with pytest.raises(Cancelled):
            again.complete(result="late")
        assert one.requests() == other.requests()
        assert all_events(one) == all_events(other)


class Processes(ProcessSuite):
    """Several processes, none of which is hurt."""

    @promise(
        Level.L2, "Client, worker and reader may be three processes, and are woken", requires=[Capability.PROCESSES]
    )
    def test_a_request_is_served_by_other_processes(self, peers: Peers) -> None:
        client, worker = peers.start(2)
        worker.do("join", worker="w", stage="encode")
        worker.send("take", worker="w", timeout_s=PATIENCE_S)
        payload = {"prompt": "a cat", "n": [1, 2.5, None, True]}
        assert client.do("submit", request_id="r1", stage="encode", payload=payload) is True
        got = worker.answer()
        assert (got["request_id"], got["attempt"], got["payload"]) == ("r1", 1, payload)
        client.send("result", request_id="r1", timeout_s=PATIENCE_S)
        worker.do("complete", request_id="r1", result={"frames": 81})
        assert client.answer() == {"frames": 81}
        assert peers.queue.result("r1", timeout_s=0) == {"frames": 81}

    @promise(Level.L2, "Of processes that race for jobs each job goes to one of them", requires=[Capability.PROCESSES])
    def test_processes_that_race_never_hold_one_job(self, peers: Peers) -> None:
        count, queue = 120, peers.queue
        for number in range(count):
            submit(queue, f"r{number}")
        crowd = peers.start(3, lease_s=LONG_LEASE_S)
        for peer in crowd:
            peer.send("drain", stage="encode", total=count)
        for peer in crowd:
            peer.answer()
        told = [tuple(one) for peer in crowd for one in peer.told]
        assert {how for _, _, how in told} == {"ok"}
        assert Counter(request_id for request_id, _, _ in told) == {f"r{number}": 1 for number in range(count)}
        assert len({token for _, token, _ in told}) == count, "a token was given to two claims"
        for request_id, token, _ in told:
            assert queue.result(request_id, timeout_s=0) == {"id": request_id, "token": token}
        deliveries = Counter(event.request_id for event in all_events(queue) if event.kind == "claimed")
        assert set(deliveries.values()) == {1}

    @promise(Level.L2, "Of processes that submit one id at once, one is taken in", requires=[Capability.PROCESSES])
    def test_processes_that_submit_one_id_queue_it_once(self, peers: Peers) -> None:
        crowd = peers.start(3)
        for number in range(15):
            for peer in crowd:
                peer.send("submit", request_id=f"r{number}", stage="encode", payload=number, if_absent=True)
            assert sorted(peer.answer() for peer in crowd) == [False, False, True]
        assert [one.request_id for one in peers.queue.requests()] == [f"r{number}" for number in range(15)]

    @promise(
        Level.L2,
        "A claim that another process did not renew is redelivered, and that process is fenced",
        requires=[Capability.PROCESSES],
    )
    def test_a_late_holder_in_another_process_is_fenced(self, peers: Peers) -> None:
        queue = peers.queue
        (late,) = peers.start()
        late.do("join", worker="w", stage="encode", slots=4, heartbeat=False)
        for number in range(3):
            submit(queue, f"r{number}")
        held = [late.do("take", worker="w", timeout_s=0) for _ in range(3)]
        with queue.register_worker("encode", slots=3) as worker:
            jobs = [worker.take(timeout_s=PATIENCE_S) for _ in range(3)]
            assert [(job.request_id, job.attempt) for job in jobs if job] == [(one["request_id"], 2) for one in held]
            acts: dict[str, dict[str, object]] = {"complete": {}, "fail": {"text": "late"}, "progress": {"fraction": 1}}
            for number, (act, arguments) in enumerate(acts.items()):
                assert refusal(late, act, request_id=f"r{number}", **arguments) is LeaseLost, act
            for number, job in enumerate(jobs):
                assert job is not None
                assert job.token > held[number]["token"]
                job.complete(result="right")
        assert [queue.result(f"r{number}", timeout_s=0) for number in range(3)] == ["right"] * 3

    @promise(Level.L2, "A cancel and a deadline reach the worker in another process", requires=[Capability.PROCESSES])
    def test_a_cancel_and_a_deadline_reach_another_process(self, peers: Peers) -> None:
        queue = peers.queue
        (peer,) = peers.start(lease_s=LONG_LEASE_S)
        peer.do("join", worker="w", stage="encode", slots=2)
        submit(queue, "cancelled")
        assert peer.do("take", worker="w", timeout_s=PATIENCE_S) is not None
        submit(queue, "late", deadline_s=1.5)
        assert peer.do("take", worker="w", timeout_s=PATIENCE_S) is not None
        queue.cancel("cancelled")
        assert peer.do("lost", request_id="cancelled", timeout_s=_TOLD_S) == Cancelled.code
        assert peer.do("lost", request_id="late", timeout_s=_TOLD_S) == DeadlineExceeded.code
        with pytest.raises(Cancelled):
            queue.result("cancelled", timeout_s=0)
        with pytest.raises(DeadlineExceeded):
            queue.result("late", timeout_s=0)

    @promise(Level.L2, "Credits are one account for all processes", requires=[Capability.PROCESSES])
    def test_credits_are_one_account_for_all_processes(self, peers: Peers) -> None:
        queue = peers.queue
        below, upper = peers.start(2, lease_s=LONG_LEASE_S)
        for number in range(3):
            submit(queue, f"r{number}", "denoise")
        with queue.register_worker("denoise", slots=3) as denoise:
            assert denoise.take(timeout_s=0) is None
            upper.do("join", worker="w", stage="denoise", slots=3)
            below.do("join", worker="w", stage="decode", buffers=2)
            assert upper.do("take", worker="w", timeout_s=PATIENCE_S)["request_id"] == "r0"
            job = denoise.take(timeout_s=PATIENCE_S)
            assert job is not None
            assert _credits(queue) == (2, 2, 0)
            assert upper.do("take", worker="w", timeout_s=0) is None, "a job was admitted without a credit"
            job.complete(next_task=StageTask(stage="decode"))
            assert upper.do("take", worker="w", timeout_s=0) is None
            upper.send("take", worker="w", timeout_s=PATIENCE_S)
            assert below.do("take", worker="w", timeout_s=PATIENCE_S)["request_id"] == "r1"
            assert upper.answer()["request_id"] == "r2"


def _credits(queue: StageQueue) -> tuple[int, int, int]:
    decode = queue.stats().stages["decode"]
    return decode.credits_total, decode.credits_held, decode.credits_free
