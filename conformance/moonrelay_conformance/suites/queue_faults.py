"""What a queue keeps to when processes are killed and stopped, at any moment.

Owns the checks under faults. Moments are drawn from a seed; which instruction a kill meets is not, so a check that
passes says that none of this run's kills broke the promise.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from moonrelay.errors import ConfigError, LeaseLost, MoonrelayError
from moonrelay.queueing import StageQueue, StageTask
from moonrelay.queueing.task import Plain
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.queue_base import ENDS, PATIENCE_S, all_events, at, kinds, submit
from moonrelay_conformance.suites.queue_processes import PeerProcess, Peers, ProcessSuite, refusal

#: Bytes of a payload whose submit a kill is to meet.
_FILL: Final = 20_000
#: A kill comes this long at most after the last word of the process, so that kills meet it in all its phases.
_SPREAD_S: Final = 0.02


class Faults(ProcessSuite):
    """Processes that die and stand still."""

    @promise(
        Level.L3,
        "The job of a worker that was killed is redelivered and completed once",
        requires=[Capability.PROCESSES],
    )
    def test_the_job_of_a_killed_worker_is_redelivered_and_done_once(self, peers: Peers) -> None:
        queue = peers.queue
        (peer,) = peers.start()
        name = peer.do("join", worker="w", stage="encode")
        submit(queue, "r1", payload=[7])
        held = peer.do("take", worker="w", timeout_s=PATIENCE_S)
        peer.kill()
        with queue.register_worker("encode") as worker:
            job = worker.take(timeout_s=PATIENCE_S)
            assert job is not None, "the job of a killed worker is not redelivered"
            assert (job.request_id, job.attempt, job.task.payload) == ("r1", 2, [7])
            assert job.token > held["token"]
            job.complete(result="right")
            assert worker.take(timeout_s=0.3) is None
        assert queue.result("r1", timeout_s=0) == "right"
        steps = [kind for kind in kinds(queue, "r1") if kind != "progress"]
        assert steps == ["submitted", "claimed", "redelivered", "claimed", "completed", "done"]
        assert name not in [one.worker_id for one in queue.stats().workers]

    @promise(
        Level.L3,
        "A worker that was stopped past its claim is fenced once it goes on",
        requires=[Capability.PROCESSES],
    )
    def test_a_worker_stopped_past_its_claim_is_fenced(self, peers: Peers) -> None:
        queue = peers.queue
        (peer,) = peers.start()
        # The first one's heartbeat may tell it of the loss at once; the second comes unaware, for the queue to fence.
        for worker, heartbeat in (("aware", True), ("unaware", False)):
            peer.do("join", worker=worker, stage="encode", heartbeat=heartbeat)
            submit(queue, worker)
            assert peer.do("take", worker=worker, timeout_s=PATIENCE_S)["request_id"] == worker
        peer.stop()
        with queue.register_worker("encode", slots=2) as other:
            jobs = [other.take(timeout_s=PATIENCE_S) for _ in range(2)]
            assert None not in jobs, "the jobs of a stopped worker are not redelivered"
            # The orders wait for it.
            for name in ("unaware", "aware"):
                peer.send("complete", request_id=name, result="late")
            peer.go_on()
            assert [_refusal_of(peer), _refusal_of(peer)] == [LeaseLost, LeaseLost]
            for job in jobs:
                assert job is not None
                assert at(queue, job.request_id) == ("running", "encode")
                job.complete(result="right")
        for name in ("unaware", "aware"):
            assert queue.result(name, timeout_s=0) == "right"
            assert kinds(queue, name).count("done") == 1
        # Its registration heals by itself, and it is given work again.
        submit(queue, "r2")
        assert peer.do("take", worker="aware", timeout_s=PATIENCE_S)["request_id"] == "r2"
        assert refusal(peer, "complete", request_id="r2") is None

    @promise(
        Level.L3,
        "A client killed while it submits leaves each request whole or absent, and what was confirmed is there",
        requires=[Capability.PROCESSES],
    )
    def test_a_client_killed_in_submit_leaves_requests_whole_or_absent(self, peers: Peers) -> None:
        queue, count, draw = peers.queue, 1000, random.Random(5)
        clients = peers.start(3)
        for number, peer in enumerate(clients):
            peer.send("pour", prefix=f"c{number}", count=count, stage="encode", size=_FILL)
        for number, peer in enumerate(clients):
            peer.told_by(3 + 9 * number)
            peer.kill(after_s=draw.uniform(0, _SPREAD_S))
        told = [name for peer in clients for name in peer.told]
        there = [one.request_id for one in queue.requests()]
        assert set(told) <= set(there), "a submit that was confirmed is not there"
        # Beside those that were confirmed there may be the one that each client was about to be told of.
        assert len(there) <= len(told) + len(clients)
        assert Counter(kind for _, kind in _told(queue)) == {"submitted": len(there)}
        # The clients' successor does not know what arrived, and says everything again.
        for number, peer in enumerate(clients):
            for place in range(len(peer.told) + 3):
                name = f"c{number}-{place}"
                assert _submitted_again(queue, name, place) is (name not in there)
        names = [one.request_id for one in queue.requests()]
        with queue.register_worker("encode", slots=2) as worker:
            for _ in names:
                job = worker.take(timeout_s=PATIENCE_S)
                assert job is not None, "a request that is shown cannot be delivered"
                place = int(job.request_id.rpartition("-")[2])
                assert job.task.payload == _poured(job.request_id, place), "a request is there in part"
                job.complete(result=place)
        assert {one.state for one in queue.requests()} == {"done"}

    @promise(
        Level.L3,
        "A worker killed while it completes neither loses a request nor has it done twice",
        requires=[Capability.PROCESSES],
    )
    def test_a_worker_killed_in_complete_loses_and_doubles_nothing(self, peers: Peers) -> None:
        queue, count, draw = peers.queue, 200, random.Random(6)
        for number in range(count):
            submit(queue, f"r{number}")
        told: list[Any] = []
        crowd = peers.start(3)
        for peer in crowd:
            peer.send("drain", stage="encode", total=count)
        for number, peer in enumerate(crowd):
            peer.wait_told(2 + 5 * number, for_s=PATIENCE_S)  # the others may have left it less
            told += peer.kill(after_s=draw.uniform(0, _SPREAD_S))
        before = {name: _kept(queue, name) for name, _, how in told if how == "ok"}
        assert before == {name: {"id": name, "token": token} for name, token, how in told if how == "ok"}
        told += _drain(queue, "encode", count)
        _assert_each_ended_once(queue, [f"r{number}" for number in range(count)], told)
        assert {name: _kept(queue, name) for name in before} == before, "a result changed afterwards"

    @promise(
        Level.L3,
        "Each of eighty requests of two clients ends exactly once while workers are killed at random",
        requires=[Capability.PROCESSES],
    )
    def test_each_request_ends_once_while_workers_are_killed(self, peers: Peers) -> None:
        queue, count, draw = peers.queue, 40, random.Random(7)
        clients, workers = peers.start(2), peers.start(3)
        total = 2 * count
        for peer in workers:
            peer.send("drain", stage="encode", total=total)
        for number, peer in enumerate(clients):
            peer.send("pour", prefix=f"c{number}", count=count, stage="encode", size=100)
        told: list[Any] = []
        for _ in range(3):
            victim = workers.pop(draw.randrange(len(workers)))
            # A few jobs later, unless it is not given that many.
            victim.wait_told(len(victim.told) + draw.randrange(1, 6), for_s=1.0)
            told += victim.kill(after_s=draw.uniform(0, _SPREAD_S))
            (fresh,) = peers.start()
            fresh.send("drain", stage="encode", total=total)
            workers.append(fresh)
        for peer in [*clients, *workers]:
            peer.answer()
        for peer in workers:
            told += peer.told
        names = [f"c{client}-{number}" for client in range(2) for number in range(count)]
        _assert_each_ended_once(queue, names, told)

    @promise(
        Level.L3,
        "A killed denoise worker's credit comes back; a killed decode worker takes its buffers along",
        requires=[Capability.PROCESSES],
    )
    def test_credits_survive_the_death_of_either_side(self, peers: Peers) -> None:
        queue = peers.queue
        upper, below = peers.start(2)
        for number in range(2):
            submit(queue, f"r{number}", "denoise")
        below.do("join", worker="w", stage="decode", buffers=1)
        upper.do("join", worker="w", stage="denoise")
        assert upper.do("take", worker="w", timeout_s=PATIENCE_S)["request_id"] == "r0"
        with queue.register_worker("denoise", slots=2) as denoise:
            assert denoise.take(timeout_s=0) is None
            upper.kill()
            job = denoise.take(timeout_s=PATIENCE_S)
            assert job is not None, "the credit of a killed worker does not come back"
            assert (job.request_id, job.attempt) == ("r0", 2)
            below.kill()
            _until_lost(queue, "decode")
            decode = queue.stats().stages["decode"]
            assert (decode.credits_total, decode.credits_held, decode.credits_free) == (0, 1, 0)
            job.complete(next_task=StageTask(stage="decode", payload=[1]))
            assert denoise.take(timeout_s=0) is None
            with queue.register_worker("decode", buffers=2) as fresh:
                kept = fresh.take(timeout_s=PATIENCE_S)
                assert kept is not None
                assert (kept.request_id, kept.task.payload) == ("r0", [1])
                assert denoise.take(timeout_s=PATIENCE_S) is not None

    @promise(
        Level.L3,
        "What was confirmed is there after everybody was killed, and the rest goes on",
        requires=[Capability.PROCESSES, Capability.DURABLE],
    )
    def test_everything_confirmed_survives_the_death_of_everybody(self, peers: Peers) -> None:
        count = 60
        peers.queue.close()
        client, *workers = peers.start(3)
        client.send("pour", prefix="c", count=count, stage="encode", size=100)
        for peer in workers:
            peer.send("drain", stage="encode", total=count)
        client.told_by(count // 2)
        for peer in (client, *workers):
            peer.kill()
        queue = peers.open()
        there = [one.request_id for one in queue.requests()]
        assert set(client.told) <= set(there)
        told = [one for peer in workers for one in peer.told]
        for name, token, how in told:
            assert how == "ok"
            assert _kept(queue, name) == {"id": name, "token": token}
        told += _drain(queue, "encode", len(there))
        _assert_each_ended_once(queue, there, told)


def _drain(queue: StageQueue, stage: str, total: int) -> list[tuple[str, int, str]]:
    """Complete in this process what is left, and return what was confirmed."""
    told: list[tuple[str, int, str]] = []
    with queue.register_worker(stage) as worker:
        while queue.stats().ended.get("done", 0) < total:
            job = worker.take(timeout_s=PATIENCE_S)
            assert job is not None, f"{queue.stats().active} requests are under way and none of them is delivered"
            job.complete(result={"id": job.request_id, "token": job.token})
            told.append((job.request_id, job.token, "ok"))
    return told


def _assert_each_ended_once(queue: StageQueue, names: Iterable[str], told: Iterable[Any]) -> None:
    wanted = dict.fromkeys(names, 1)
    events = _told(queue)
    assert Counter(name for name, kind in events if kind in ENDS) == wanted, "a request has not exactly one end"
    assert Counter(name for name, kind in events if kind == "submitted") == wanted
    assert {one.request_id: one.state for one in queue.requests()} == dict.fromkeys(wanted, "done")
    confirmed = [(name, token) for name, token, how in told if how == "ok"]
    assert max(Counter(name for name, _ in confirmed).values(), default=1) == 1, "two completions were confirmed"
    for name, token in confirmed:
        assert _kept(queue, name) == {"id": name, "token": token}, "another result than was confirmed"
    assert queue.stats().active == 0


def _kept(queue: StageQueue, name: str) -> object:
    """Return the result of a request whose completion was confirmed."""
    try:
        return queue.result(name, timeout_s=0)
    except MoonrelayError as exc:
        message = f"the completion of {name} was confirmed, and is gone: {exc.message}"
        raise AssertionError(message) from exc


def _submitted_again(queue: StageQueue, name: str, place: int) -> bool:
    """Submit again what a killed client had submitted, or not; return whether it was new."""
    task = StageTask(stage="encode", request_id=name, payload=_poured(name, place))
    try:
        return queue.submit(task, if_absent=True)
    except ConfigError as exc:
        message = f"{name} is there in part, or not as it was submitted: {exc.message}"
        raise AssertionError(message) from exc


def _told(queue: StageQueue) -> list[tuple[str, str]]:
    return [(event.request_id, event.kind) for event in all_events(queue) if event.request_id]


def _poured(name: str, place: int) -> dict[str, Plain]:
    """Return the payload that `queue_peer.Peer.pour` gives."""
    return {"id": name, "fill": "x" * _FILL, "end": place}


def _refusal_of(peer: PeerProcess) -> type[Exception] | None:
    try:
        peer.answer()
    except LeaseLost as exc:
        return type(exc)
    return None


def _until_lost(queue: StageQueue, stage: str) -> None:
    """Wait until a worker of a stage is told lost."""
    since = 0
    while True:
        events = queue.events(since, timeout_s=PATIENCE_S)
        assert events, "a killed worker is not told as lost"
        if any((event.kind, event.stage) == ("worker_lost", stage) for event in events):
            return
        since = events[-1].number
