"""Workers with their own heartbeat: renewing, healing, closing, and waiting in threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import ClosedError, DeadlineExceeded, LeaseLost
from moonrelay.queueing import StageQueue, StageTask
from moonrelay.queueing.stored import WorkerDesk

FAST = {"lease_s": 1.5, "renew_s": 0.2, "poll_s": 0.1}


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"


@pytest.fixture
def queue(url: str) -> Iterator[StageQueue]:
    with StageQueue.connect(url, config=FAST) as queue:
        yield queue


def ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("moonrelay-queue")]


def test_the_heartbeat_keeps_a_job_for_longer_than_its_lease(queue: StageQueue) -> None:
    queue.submit(StageTask(stage="encode", request_id="r1"))
    worker, other = queue.register_worker("encode"), queue.register_worker("encode")
    with worker.claim(timeout_s=5) as job:
        assert job is not None
        assert other.take(timeout_s=2.5) is None
        job.complete(result=1)
    assert queue.requests()[0].attempt == 1


def test_a_cancel_reaches_a_running_job_by_itself(queue: StageQueue) -> None:
    queue.submit(StageTask(stage="encode", request_id="r1"))
    with queue.register_worker("encode").claim(timeout_s=5) as job:
        assert job is not None
        queue.cancel("r1")
        assert job.wait_lost(timeout_s=10)
        assert job.cancelled
        with pytest.raises(Exception, match="cancelled"):
            job.complete(result=1)


def test_a_job_that_was_let_go_of_is_not_renewed(queue: StageQueue) -> None:
    queue.submit(StageTask(stage="encode", request_id="r1"))
    worker = queue.register_worker("encode")
    assert worker.take(timeout_s=5) is not None
    gc.collect()
    job = worker.take(timeout_s=10)
    assert job is not None
    assert job.attempt == 2


def test_a_job_that_cannot_be_renewed_is_given_up(queue: StageQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.submit(StageTask(stage="encode", request_id="r1"))
    worker = queue.register_worker("encode")
    job = worker.take(timeout_s=5)
    assert job is not None

    def refuse(*_args: object) -> None:
        raise DeadlineExceeded("locked")

    monkeypatch.setattr(WorkerDesk, "renew", refuse)
    assert job.wait_lost(timeout_s=10)
    with pytest.raises(LeaseLost, match="not renewed in time"):
        job.check()


def test_a_heartbeat_that_dies_fails_its_worker_aloud(queue: StageQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.submit(StageTask(stage="encode", request_id="r1"))
    worker = queue.register_worker("encode")
    job = worker.take(timeout_s=5)
    assert job is not None

    def explode(*_args: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(WorkerDesk, "renew", explode)
    assert job.wait_lost(timeout_s=10)
    with pytest.raises(ClosedError, match="a defect"):
        worker.take(timeout_s=0)
    monkeypatch.undo()
    worker.close()


@pytest.mark.parametrize("closing", ["worker", "queue"])
def test_closing_ends_waits_in_other_threads(queue: StageQueue, closing: str) -> None:
    worker = queue.register_worker("encode")
    queue.submit(StageTask(stage="denoise", request_id="r1"))
    raised: list[BaseException] = []

    def wait(act: object) -> None:
        try:
            act()  # type: ignore[operator]
        except BaseException as exc:
            raised.append(exc)

    acts = [lambda: worker.take(timeout_s=60)]
    if closing == "queue":
        acts += [lambda: queue.result("r1", timeout_s=60), lambda: queue.events(10_000, timeout_s=60)]
    threads = [threading.Thread(target=wait, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    (worker if closing == "worker" else queue).close()
    for thread in threads:
        thread.join(30)
    assert [type(exc) for exc in raised] == [ClosedError] * len(acts)
    if closing == "worker":
        assert queue.stats().workers == ()


def test_a_renewal_under_way_does_not_bring_a_closed_worker_back(
    queue: StageQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = queue.register_worker("encode", heartbeat=False)
    inside, go_on, left = threading.Event(), threading.Event(), threading.Event()
    renew, leave = WorkerDesk.renew, WorkerDesk.leave

    def slow(desk: WorkerDesk, *args: object) -> object:
        inside.set()
        assert go_on.wait(30)
        return renew(desk, *args)  # type: ignore[arg-type]

    def note(desk: WorkerDesk, row: object) -> None:
        leave(desk, row)  # type: ignore[arg-type]
        left.set()

    monkeypatch.setattr(WorkerDesk, "renew", slow)
    monkeypatch.setattr(WorkerDesk, "leave", note)
    threads = [threading.Thread(target=worker.renew), threading.Thread(target=worker.close)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    left.wait(0.3)  # it must not have left before the renewal is through
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert queue.stats().workers == ()


def test_waiters_are_woken_by_what_they_wait_for(queue: StageQueue) -> None:
    got: list[object] = []
    denoise = queue.register_worker("denoise")
    queue.submit(StageTask(stage="denoise", request_id="r1"))
    number = queue.stats().last_event
    threads = [
        threading.Thread(target=lambda: got.append(queue.result("r1", timeout_s=30))),
        threading.Thread(target=lambda: got.append(queue.events(number, timeout_s=30)[0].kind)),
        threading.Thread(target=lambda: denoise.take(timeout_s=30).complete(result="ok")),  # type: ignore[union-attr]
    ]
    for thread in threads:
        thread.start()
    queue.register_worker("decode")  # its credit lets the denoise worker go
    for thread in threads:
        thread.join(30)
    assert sorted(map(str, got)) == ["ok", "worker_joined"]


def test_a_second_thread_waits_for_the_slot_of_the_first(queue: StageQueue) -> None:
    for number in range(2):
        queue.submit(StageTask(stage="encode", request_id=f"r{number}"))
    worker = queue.register_worker("encode", slots=1)
    first = worker.take(timeout_s=5)
    assert first is not None
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(worker.take(timeout_s=30)))
    thread.start()
    first.complete(result=1)
    thread.join(30)
    assert got[0] is not None


def test_a_deadline_wakes_a_waiting_client(url: str) -> None:
    clock = ManualClock()
    with StageQueue.connect(url, clock=clock) as queue:
        queue.submit(StageTask(stage="encode", request_id="r1", deadline_s=5))
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                queue.result("r1", timeout_s=1000)
            except DeadlineExceeded as exc:
                raised.append(exc)

        thread = threading.Thread(target=wait)
        thread.start()
        while thread.is_alive():
            clock.advance(0.5)
            thread.join(0.02)
        assert raised[0].context["state"] == "failed"  # type: ignore[attr-defined]


def test_threads_are_gone_after_close(url: str) -> None:
    before = ours()
    with StageQueue.connect(url, config=FAST) as queue:
        workers = [queue.register_worker("encode") for _ in range(3)]
        assert workers[0].take(timeout_s=0.01) is None
        assert len(ours()) >= len(before) + 3
        workers[1].close()
    assert ours() == before
