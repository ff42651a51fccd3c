"""``moonrelay worker`` as a process: ready lines, signals, its supervisor's death, kill -9, and what it refuses.

The adapter is a third party's, made here; its jobs last as long as their payload says, so that a signal finds one under
way. Nothing waits for a fixed time: each step is awaited on the queue or on the worker's output.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import StageTask

pytestmark = pytest.mark.processes

TIMEOUT_S = 60.0

ADAPTER = '''
import threading
from moonrelay.orchestrator import Outcome

class Program:
    def __init__(self, stage, output):
        self.stage = stage
        self._output = output

    def process(self, work):
        """Report in small steps until the file that the payload names is there, or the job is lost."""
        gate = work.payload.get("gate")
        done = 0
        while gate and not (self._output / gate).exists() and not work.stopped():
            done += 1
            work.report(min(done, 99), 100, "step")
            threading.Event().wait(0.02)
        for number in range(4):
            work.report(number + 1, 4, "last steps")
        return Outcome(result={"stage": self.stage, "attempt": work.job.attempt, "worker": work.job.worker_id})

class Adapter:
    stages = ("encode", "denoise", "decode")

    def prepare(self, threads):
        return {"threads": threads}

    def load_program(self, model, stage, *, output, device, dtype, file_format):
        return Program(stage, output)

class HostOnly:
    stages = ()
'''

ENTRY_POINTS = "[moonrelay.adapters]\nwaiting = mr_waiting_adapter:Adapter\nhostonly = mr_waiting_adapter:HostOnly\n"


class WorkerProcess:
    """One worker, heard line by line."""

    def __init__(self, root: Path, *arguments: str, stdin: int | None = None) -> None:
        path = os.pathsep.join([str(root / "site"), *(entry for entry in sys.path if entry)])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonrelay.cli.main", "worker", *arguments],
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )

    def line(self) -> dict[str, object]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        assert readable, "the worker said nothing"
        text = self.process.stdout.readline()
        assert text, f"the worker ended: {self.process.stderr.read() if self.process.stderr else ''}"
        found: dict[str, object] = json.loads(text)
        return found

    def ready(self) -> dict[str, object]:
        line = self.line()
        assert line["event"] == "ready"
        return line

    def end(self) -> tuple[int, str]:
        """Wait for its end; return exit code and stderr."""
        _, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Bench:
    """A queue, and workers on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        site = root / "site"
        info = site / "mr_waiting-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mr-waiting\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(ENTRY_POINTS)
        (site / "mr_waiting_adapter.py").write_text(ADAPTER)
        self.output = root / "out"
        self.output.mkdir()
        self.queue = StageQueue.connect(f"sqlite:///{root / 'queue.db'}", config={"poll_s": 0.05})
        self.workers: list[WorkerProcess] = []

    def worker(self, *more: str, stage: str = "decode", stdin: int | None = None) -> WorkerProcess:
        made = WorkerProcess(
            self.root,
            stage,
            "--model=any",
            "--adapter=waiting",
            f"--queue={self.queue.url}",
            f"--output={self.output}",
            "--transfer-mode=p2p",
            "--engine=shm",
            "--queue-lease-s=2",
            *more,
            stdin=stdin,
        )
        self.workers.append(made)
        return made

    def submit(self, request_id: str, gate: str | None = None) -> None:
        self.queue.submit(StageTask(request_id=request_id, stage="decode", payload={"gate": gate}))

    def open(self, gate: str) -> None:
        (self.output / gate).touch()

    def kinds(self, request_id: str) -> list[str]:
        return [event.kind for event in self.queue.events() if event.request_id == request_id]

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not true():
            assert time.monotonic() < deadline, f"waited for {what} in vain"
            time.sleep(0.02)

    def until_running(self, request_id: str) -> None:
        self.until(lambda: "progress" in self.kinds(request_id), f"{request_id} to run")

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.queue.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_it_says_when_it_is_ready_and_does_a_job(bench: Bench) -> None:
    bench.submit("r1")
    worker = bench.worker("--threads=3", "--worker-id=mine")
    ready = worker.ready()
    assert ready["stage"] == "decode"
    assert ready["pid"] == worker.process.pid
    assert ready["numerics"] == {"threads": 3}
    assert str(ready["worker_id"]).startswith("mine-")
    result = bench.queue.result("r1", timeout_s=TIMEOUT_S)
    assert result == {"stage": "decode", "attempt": 1, "worker": ready["worker_id"]}


def test_sigterm_lets_the_job_finish(bench: Bench) -> None:
    worker = bench.worker()
    worker.ready()
    bench.submit("r1", gate="go")
    bench.until_running("r1")
    bench.submit("r2")
    worker.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # it is still at it
        worker.process.wait(0.3)
    bench.open("go")
    assert worker.line() == {"event": "ended", "stage": "decode", "completed": 1, "failed": 0, "lost": 0, "rewound": 0}
    code, err = worker.end()
    assert (code, err) == (0, "")
    assert bench.queue.result("r1", timeout_s=1)["attempt"] == 1  # type: ignore[call-overload,index]
    assert bench.kinds("r2") == ["submitted"]  # and it took no other


@pytest.mark.parametrize("how", ["twice", "grace"])
def test_a_job_that_outlasts_the_grace_is_given_back(bench: Bench, how: str) -> None:
    worker = bench.worker(f"--grace-s={0.2 if how == 'grace' else 60}")
    worker.ready()
    bench.submit("r1", gate="never")
    bench.until_running("r1")
    worker.process.send_signal(signal.SIGTERM)
    if how == "twice":
        with pytest.raises(subprocess.TimeoutExpired):
            worker.process.wait(0.2)
        worker.process.send_signal(signal.SIGTERM)
    code, err = worker.end()
    assert (code, err) == (0, "")
    assert bench.kinds("r1")[-1] == "returned"
    assert bench.queue.requests()[0].state == "queued"


def test_ctrl_c_gives_the_job_back_at_once(bench: Bench) -> None:
    worker = bench.worker()
    worker.ready()
    bench.submit("r1", gate="never")
    bench.until_running("r1")
    worker.process.send_signal(signal.SIGINT)
    code, err = worker.end()
    assert (code, err) == (130, "interrupted\n")
    assert bench.kinds("r1")[-1] == "returned"


def test_an_idle_worker_ends_at_once(bench: Bench) -> None:
    worker = bench.worker()
    worker.ready()
    worker.process.send_signal(signal.SIGTERM)
    code, err = worker.end()
    assert (code, err) == (0, "")
    assert not bench.queue.stats().workers


def test_it_ends_when_its_supervisor_is_gone(bench: Bench) -> None:
    reading, writing = os.pipe()
    worker = bench.worker("--parent-fd=0", stdin=reading)
    os.close(reading)
    worker.ready()
    bench.submit("r1", gate="never")
    bench.until_running("r1")
    os.close(writing)
    code, _ = worker.end()
    assert code == 0
    assert bench.kinds("r1")[-1] == "returned"


def test_it_stays_while_its_supervisor_is_there(bench: Bench) -> None:
    reading, writing = os.pipe()
    worker = bench.worker("--parent-fd=0", stdin=reading)
    os.close(reading)
    worker.ready()
    bench.submit("r1")
    bench.queue.result("r1", timeout_s=TIMEOUT_S)
    assert worker.process.poll() is None
    os.close(writing)
    assert worker.end()[0] == 0


def test_a_killed_workers_job_is_done_by_another(bench: Bench) -> None:
    first = bench.worker()
    first.ready()
    bench.submit("r1", gate="go")
    bench.until_running("r1")
    first.process.kill()
    second = bench.worker()
    ready = second.ready()
    bench.open("go")
    result = bench.queue.result("r1", timeout_s=TIMEOUT_S)
    assert result == {"stage": "decode", "attempt": 2, "worker": ready["worker_id"]}
    assert "redelivered" in bench.kinds("r1")


def test_two_workers_of_one_name_do_not_clash(bench: Bench) -> None:
    workers = [bench.worker("--worker-id=same") for _ in range(2)]
    names = {str(worker.ready()["worker_id"]) for worker in workers}
    assert len(names) == 2
    bench.submit("r1", gate="go")
    bench.submit("r2", gate="go")
    bench.until_running("r1")
    bench.until_running("r2")
    bench.open("go")
    results = [bench.queue.result(name, timeout_s=TIMEOUT_S) for name in ("r1", "r2")]
    assert {result["worker"] for result in results} == names  # type: ignore[call-overload,index]


def test_a_held_job_waits_in_the_middle_until_it_may_go_on(bench: Bench) -> None:
    worker = bench.worker("--parent-fd=0", "--hold-at=0.5", stdin=subprocess.PIPE)
    worker.ready()
    bench.submit("r1")
    bench.until(lambda: any(view.note == "held" for view in bench.queue.requests()), "the hold")
    view = bench.queue.requests()[0]
    assert (view.state, view.fraction) == ("running", 0.5)
    # Longer than its lease of two seconds: the worker's heartbeat keeps the job.
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(2.5)
    assert bench.kinds("r1").count("claimed") == 1
    assert worker.process.stdin is not None
    worker.process.stdin.write("go on\n")
    worker.process.stdin.flush()
    assert bench.queue.result("r1", timeout_s=TIMEOUT_S)["attempt"] == 1  # type: ignore[call-overload,index]
    bench.submit("r2")
    assert bench.queue.result("r2", timeout_s=TIMEOUT_S)["attempt"] == 1  # type: ignore[call-overload,index]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--queue=nowhere"], 2, "'nowhere'"),
        (["--queue="], 2, "MOONRELAY_QUEUE_URL"),
        (["--adapter=nosuch"], 1, "'nosuch'"),
        (["--adapter=hostonly"], 1, "no programs"),
        (["--engine=nosuch"], 1, "nosuch"),
        (["--transfer-mode=carrier-pigeon"], 2, "carrier-pigeon"),
        (["--transfer-mode=store", "--store=nosuch://x"], 1, "nosuch"),
        (["--dtype=vae="], 2, "dtype"),
        (["--parent-fd=77"], 2, "parent_fd"),
        (["--hold-at=0"], 2, "hold_at="),
    ],
)
def test_a_wrong_setting_is_one_line(bench: Bench, arguments: list[str], code: int, said: str) -> None:
    worker = bench.worker(*arguments)
    got, err = worker.end()
    assert got == code, err
    assert said in err
    assert err.count("\n") == 1, err
    assert "Traceback" not in err


def test_an_unknown_stage_is_refused_with_the_known_ones(bench: Bench) -> None:
    code, err = bench.worker(stage="upscale").end()
    assert code == 2
    assert "encode, denoise, decode" in err
