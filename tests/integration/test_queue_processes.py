"""The SQLite queue with real processes: killed, stopped and continued, racing, and cleaned up after."""

from __future__ import annotations

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moonrelay
from moonrelay.errors import Cancelled, DeadlineExceeded, LeaseLost, MoonrelayError, PeerLost
from moonrelay.queueing import QueueEvent, RequestView, StageQueue, StageTask
from moonrelay.queueing.stored import WorkerDesk

pytestmark = pytest.mark.processes

#: Short enough to see a lapse, long enough for a busy machine.
LEASE_S = 1.5
CONFIG = {"lease_s": LEASE_S, "renew_s": 0.3, "retry_delay_s": 0.0}
PATIENCE_S = 60.0

#: A worker of one stage. ``hold`` in the payload names the stage whose job is held until its claim is lost.
WORKER = """
import sys
from moonrelay.errors import ClosedError, MoonrelayError
from moonrelay.queueing import StageQueue, StageTask
url, stage, buffers, lease_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
config = {"lease_s": lease_s, "renew_s": lease_s / 5, "retry_delay_s": 0.0}
below = {"encode": "denoise", "denoise": "decode"}.get(stage)
with StageQueue.connect(url, config=config) as queue, queue.register_worker(stage, buffers=buffers) as worker:
    while True:
        job = worker.take(timeout_s=60)
        if job is None:
            break
        payload = job.task.payload
        try:
            if payload.get("hold") == stage:
                job.wait_lost(timeout_s=60)
            if payload.get("lost") == stage and job.attempt == 1:
                job.lost_input(MoonrelayError("the input is gone"))
            elif below is None:
                job.complete(result={"worker": worker.worker_id, "attempt": job.attempt, "handle": job.task.handle})
            else:
                handle = f"{stage}-{job.attempt}".encode()
                job.complete(next_task=StageTask(stage=below, payload=payload, handle=handle))
            print("completed", job.request_id, job.token, flush=True)
        except MoonrelayError as exc:
            print(type(exc).__name__, job.request_id, job.token, flush=True)
"""

#: Submits its own jobs and takes part in everybody's until all are done.
CROWD = """
import sys
from moonrelay.queueing import StageQueue, StageTask
url, name, count, total = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with StageQueue.connect(url) as queue, queue.register_worker("encode") as worker:
    for number in range(count):
        queue.submit(StageTask(stage="encode", request_id=f"{name}-{number}"))
    while True:
        job = worker.take(timeout_s=0.2)
        if job is not None:
            job.complete(result=worker.worker_id)
        elif queue.stats().ended.get("done", 0) == total:
            break
"""


class Processes:
    """Processes of one test; ends those that are left, by pid."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._started: list[subprocess.Popen[str]] = []

    def start(self, program: str, *arguments: object) -> subprocess.Popen[str]:
        root = str(Path(moonrelay.__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-c", program, self._url, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._started.append(process)
        return process

    def worker(self, stage: str, buffers: int = 4, lease_s: float = LEASE_S) -> subprocess.Popen[str]:
        return self.start(WORKER, stage, buffers, lease_s)

    def kill(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(PATIENCE_S)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


@pytest.fixture
def queue(url: str) -> Iterator[StageQueue]:
    with StageQueue.connect(url, config=CONFIG) as queue:
        yield queue


@pytest.fixture
def processes(url: str) -> Iterator[Processes]:
    started = Processes(url)
    yield started
    started.close()


def await_event(queue: StageQueue, wanted: Callable[[QueueEvent], bool], since: int = 0) -> QueueEvent:
    while True:
        events = queue.events(since, timeout_s=PATIENCE_S)
        assert events, "nothing happened in time"
        for event in events:
            if wanted(event):
                return event
        since = events[-1].number


def await_claim(queue: StageQueue, stage: str, attempt: int = 1) -> RequestView:
    await_event(queue, lambda event: (event.kind, event.stage, event.attempt) == ("claimed", stage, attempt))
    return queue.requests()[0]


def claims(queue: StageQueue) -> Counter[tuple[str, str]]:
    return Counter((event.request_id, event.stage) for event in queue.events(limit=10_000) if event.kind == "claimed")


def test_a_killed_workers_job_is_redelivered_once_and_its_token_is_dead(
    queue: StageQueue, processes: Processes
) -> None:
    queue.submit(StageTask(stage="decode", request_id="r1", payload={"hold": "decode"}))
    first = processes.worker("decode")
    held = await_claim(queue, "decode")
    processes.kill(first)
    with queue.register_worker("decode") as worker, worker.claim(timeout_s=PATIENCE_S) as job:
        assert job is not None
        assert (job.attempt, job.token > held.token) == (2, True)
        late = WorkerDesk(queue._engine)  # type: ignore[attr-defined]
        with pytest.raises(LeaseLost):
            late.finish("r1", held.token, "late")
        job.complete(result="right")
        assert worker.take(timeout_s=LEASE_S) is None
    assert queue.result("r1", timeout_s=0) == "right"
    assert claims(queue) == {("r1", "decode"): 2}


def test_a_stopped_worker_that_continues_has_lost_its_job(queue: StageQueue, processes: Processes) -> None:
    queue.submit(StageTask(stage="decode", request_id="r1", payload={"hold": "decode"}))
    first = processes.worker("decode")
    held = await_claim(queue, "decode")
    first.send_signal(signal.SIGSTOP)
    try:
        with queue.register_worker("decode") as worker, worker.claim(timeout_s=PATIENCE_S) as job:
            assert job is not None
            job.complete(result="right")
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.stdout is not None
    assert first.stdout.readline().split() == ["LeaseLost", "r1", str(held.token)]
    assert queue.result("r1", timeout_s=0) == "right"
    assert [event.kind for event in queue.events()].count("done") == 1
    # Its registration heals by itself, and it takes work again.
    queue.submit(StageTask(stage="decode", request_id="r2", payload={}))
    assert queue.result("r2", timeout_s=PATIENCE_S)["worker"] == held.worker  # type: ignore[index, call-overload]


def test_four_processes_share_their_jobs_and_each_is_delivered_once(queue: StageQueue, processes: Processes) -> None:
    crowd = [processes.start(CROWD, f"p{number}", 50, 200) for number in range(4)]
    for process in crowd:
        assert process.wait(PATIENCE_S) == 0
    results = [queue.result(view.request_id, timeout_s=0) for view in queue.requests()]
    assert len(results) == 200
    counted = claims(queue)
    assert len(counted) == 200
    assert set(counted.values()) == {1}
    assert [event.kind for event in queue.events(limit=10_000)].count("done") == 200


def test_a_cancel_reaches_another_process(queue: StageQueue, processes: Processes) -> None:
    queue.submit(StageTask(stage="decode", request_id="r1", payload={"hold": "decode"}))
    worker = processes.worker("decode")
    held = await_claim(queue, "decode")
    queue.cancel("r1")
    with pytest.raises(Cancelled):
        queue.result("r1", timeout_s=0)
    assert worker.stdout is not None
    assert worker.stdout.readline().split() == ["Cancelled", "r1", str(held.token)]


def test_a_deadline_ends_a_request_that_nobody_looks_at(queue: StageQueue, processes: Processes) -> None:
    queue.submit(StageTask(stage="decode", request_id="r1", payload={"hold": "decode"}, deadline_s=5.0))
    queue.submit(StageTask(stage="encode", request_id="r2", payload={}, deadline_s=0.2))
    worker = processes.worker("decode")
    for request_id in ("r2", "r1"):
        with pytest.raises(DeadlineExceeded) as caught:
            queue.result(request_id, timeout_s=PATIENCE_S)
        assert caught.value.context["state"] == "failed"
    assert worker.stdout is not None
    assert worker.stdout.readline().split()[0] == "DeadlineExceeded"


def test_a_job_that_kills_its_workers_is_a_dead_letter(queue: StageQueue, processes: Processes) -> None:
    queue.submit(StageTask(stage="decode", request_id="r1", payload={"hold": "decode"}, max_attempts=2))
    for attempt in (1, 2):
        worker = processes.worker("decode")
        await_claim(queue, "decode", attempt)
        processes.kill(worker)
    with pytest.raises(PeerLost) as caught:
        queue.result("r1", timeout_s=PATIENCE_S)
    assert (caught.value.context["state"], caught.value.context["attempt"]) == ("dead", 2)


def test_a_lost_input_is_made_again_across_processes(queue: StageQueue, processes: Processes) -> None:
    for stage in ("decode", "denoise", "encode"):  # any start order
        processes.worker(stage)
    queue.submit(StageTask(stage="encode", request_id="r1", payload={"lost": "decode"}))
    queue.submit(StageTask(stage="encode", request_id="r2", payload={"lost": "denoise"}))
    result = queue.result("r1", timeout_s=PATIENCE_S)
    assert (result["attempt"], result["handle"]) == (2, b"denoise-2")  # type: ignore[index, call-overload]
    assert queue.result("r2", timeout_s=PATIENCE_S)["handle"] == b"denoise-2"  # type: ignore[index, call-overload]
    assert claims(queue) == {
        ("r1", "encode"): 1,
        ("r1", "denoise"): 2,
        ("r1", "decode"): 2,
        ("r2", "encode"): 2,
        ("r2", "denoise"): 2,
        ("r2", "decode"): 1,
    }


def test_the_credit_of_a_killed_denoise_worker_comes_back(queue: StageQueue, processes: Processes) -> None:
    with queue.register_worker("decode", buffers=1), queue.register_worker("denoise") as other:
        queue.submit(StageTask(stage="denoise", request_id="r1", payload={"hold": "denoise"}))
        queue.submit(StageTask(stage="denoise", request_id="r2", payload={}))
        denoise = processes.worker("denoise")
        await_claim(queue, "denoise")
        assert other.take(timeout_s=0) is None
        assert queue.stats().stages["denoise"].no_credit
        processes.kill(denoise)
        job = other.take(timeout_s=PATIENCE_S)
        assert job is not None
        assert (job.request_id, job.attempt) == ("r1", 2)
        stats = queue.stats().stages["decode"]
        assert (stats.credits_total, stats.credits_held) == (1, 1)
        job.complete(result=1)
        assert queue.stats().stages["decode"].credits_free == 1


def test_a_killed_decode_worker_takes_its_credits_along_and_loses_no_result(
    queue: StageQueue, processes: Processes
) -> None:
    with queue.register_worker("denoise", slots=3) as denoise:
        decode = processes.worker("decode", buffers=2)
        for number in range(3):
            payload = {"hold": "decode"}
            queue.submit(StageTask(stage="denoise", request_id=f"r{number}", payload=payload))
        jobs = [denoise.take(timeout_s=PATIENCE_S) for _ in range(2)]
        assert denoise.take(timeout_s=0) is None
        jobs[0].complete(next_task=StageTask(stage="decode", payload={"hold": "decode"}))  # type: ignore[union-attr]
        await_claim(queue, "decode")
        processes.kill(decode)
        await_event(queue, lambda event: event.kind == "worker_lost")
        stats = queue.stats().stages["decode"]
        assert (stats.credits_total, stats.credits_held, stats.credits_free) == (0, 2, 0)
        jobs[1].complete(next_task=StageTask(stage="decode", payload={}))  # type: ignore[union-attr]
        assert denoise.take(timeout_s=0) is None
        with queue.register_worker("decode", buffers=3, slots=2) as fresh:
            taken = [fresh.take(timeout_s=PATIENCE_S) for _ in range(2)]
            assert [job.request_id for job in taken if job] == ["r0", "r1"]
            assert denoise.take(timeout_s=PATIENCE_S) is not None
            for job in taken:
                job.complete(result=1)  # type: ignore[union-attr]


@pytest.mark.slow
def test_the_file_survives_the_death_of_everybody(url: str, tmp_path: Path, processes: Processes) -> None:
    with StageQueue.connect(url, config=CONFIG) as queue:
        for number in range(60):
            queue.submit(StageTask(stage="encode", request_id=f"r{number}", payload={}))
        everybody = [processes.worker(stage) for stage in ("encode", "denoise", "decode") for _ in range(2)]
        await_event(queue, lambda event: event.kind == "done")
    for process in everybody:
        process.kill()
    for process in everybody:
        process.wait(PATIENCE_S)
    check = sqlite3.connect(tmp_path / "queue.db")
    assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    check.close()
    for stage in ("encode", "denoise", "decode"):
        processes.worker(stage)
    with StageQueue.connect(url, config=CONFIG) as queue:
        for number in range(60):
            assert queue.result(f"r{number}", timeout_s=PATIENCE_S) is not None
        done = Counter(event.request_id for event in queue.events(limit=10_000) if event.kind == "done")
        assert len(done) == 60
        assert set(done.values()) == {1}
        bells = list((tmp_path / "queue.db-bells").iterdir())
        assert len(bells) <= 4  # three workers and this process; the dead ones' were cleared away


@pytest.mark.slow
def test_three_hundred_cycles_leave_nothing_behind(url: str, tmp_path: Path) -> None:
    def cycle(number: int) -> None:
        with StageQueue.connect(url, config={"keep_ended": 5, "keep_events": 20}) as queue:
            queue.submit(StageTask(stage="encode", request_id=f"r{number}", payload={"n": number}))
            with queue.register_worker("encode") as worker, worker.claim(timeout_s=PATIENCE_S) as job:
                assert job is not None
                job.complete(result=number)
            assert queue.result(f"r{number}", timeout_s=PATIENCE_S) == number

    def baseline() -> tuple[int, list[str], list[str]]:
        gc.collect()
        threads = sorted(thread.name for thread in threading.enumerate() if "moonrelay" in thread.name)
        return len(os.listdir("/proc/self/fd")), threads, sorted(entry.name for entry in tmp_path.iterdir())

    cycle(0)
    before = baseline()
    size = (tmp_path / "queue.db").stat().st_size
    for number in range(1, 301):
        cycle(number)
    assert baseline() == before
    assert before[1:] == ([], ["queue.db"])
    assert (tmp_path / "queue.db").stat().st_size <= 2 * size


def test_a_worker_that_fails_reports_its_typed_error_across_processes(queue: StageQueue, processes: Processes) -> None:
    processes.worker("decode")
    queue.submit(StageTask(stage="decode", request_id="r1", payload={"lost": "decode"}))
    with pytest.raises(MoonrelayError, match="the input is gone") as caught:
        queue.result("r1", timeout_s=PATIENCE_S)
    assert (caught.value.context["stage"], caught.value.context["attempt"]) == ("decode", 1)
