"""A denoise worker dies, or is told to end, within a job: another one goes on, and the frames are the same."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay import DiffusionConnector, StageQueue, StageTask
from moonrelay.cache.checkpoint import Checkpointer
from moonrelay.cli.worker import CheckpointSweep
from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import child_environment
from moonrelay.orchestrator import StageLoop
from moonrelay_diffusers.programs import load_program

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("same_bits")]

TIMEOUT_S = 90.0
STEPS = 6
EVERY = 2
CONTROL = {"claim_ttl_s": 1.0, "renew_s": 0.25, "peer_timeout_s": 1.0, "retry_s": 0.2}


class House:
    """Encode, decode and a second denoise worker in this process; the first one in a process of its own."""

    def __init__(self, models: Any, root: Path) -> None:
        self.models = models
        self.root = root
        self.model = models.folder("wan2.1")
        self.store = f"local://{root / 'store'}"
        self.queue = StageQueue.connect(
            f"sqlite:///{root / 'queue.db'}",
            config={"poll_s": 0.05, "lease_s": 2.0, "renew_s": 0.5, "retry_delay_s": 0.0, "max_attempts": 3},
        )
        self.events: list[Any] = []
        self.connectors = {stage: self._connector(stage) for stage in ("encode", "denoise", "decode")}
        self.checkpointer = Checkpointer(self.connectors["denoise"], every=EVERY, scope=self.queue.url)
        self.loops: dict[str, StageLoop] = {}
        self.workers = {stage: self.queue.register_worker(stage) for stage in ("encode", "decode")}
        self.process: subprocess.Popen[str] | None = None

    def _connector(self, stage: str) -> DiffusionConnector:
        return DiffusionConnector(
            stage,
            "auto",
            {"engine": "shm", "pool_bytes": 8 << 20},
            {"url": self.store},
            control_config=CONTROL,
            observers=[self.events.append] if stage == "denoise" else [],
        )

    def submit(self, request_id: str, priority: Any = None, **more: Any) -> None:
        request = self.models.request("wan2.1", num_inference_steps=STEPS)
        self.queue.submit(
            StageTask(
                request_id=request_id,
                stage="encode",
                payload={"request": request.to_payload(), **more},
                priority=priority,
            )
        )
        self.do("encode")

    def do(self, stage: str) -> None:
        """Do one job of a stage here."""
        if stage not in self.workers:
            self.workers[stage] = self.queue.register_worker(stage)
        if (stage, self.model) not in _programs:
            _programs[stage, self.model] = load_program(
                self.model,
                stage,
                output=self.root / "out",
                file_format="npy",  # type: ignore[arg-type]
            )
        program = _programs[stage, self.model]
        program._output = self.root / "out"
        program._checkpointer = self.checkpointer if stage == "denoise" else None
        job = self.workers[stage].take(timeout_s=TIMEOUT_S)
        assert job is not None, f"no job came to {stage}"
        StageLoop(self.queue, self.connectors[stage], program).do(job)

    def start(self, hold_after: int, *more: str) -> None:
        """Start the worker that holds its first job after so many steps, until it is told to go on."""
        command = [
            *(sys.executable, "-m", "moonrelay.cli.main", "worker", "denoise", f"--model={self.model}"),
            *(f"--queue={self.queue.url}", "--engine=shm", f"--store={self.store}", "--queue-lease-s=2"),
            *("--pool-bytes=8388608", "--claim-ttl-s=1", f"--checkpoint-every={EVERY}", "--threads=1"),
            *(f"--hold-at={(hold_after - 0.5) / STEPS}", "--parent-fd=0", *more),
        ]
        with (self.root / "worker.log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,  # a line that waits in a buffer of ours would be seen by no select
                env=child_environment({}),
            )
        assert self.line()["event"] == "ready"

    def line(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        text = self.process.stdout.readline() if readable else b""
        assert text, (self.root / "worker.log").read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def until(self, true: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not true():
            assert time.monotonic() < until, f"waited for {what} in vain: {(self.root / 'worker.log').read_text()}"
            select.select([], [], [], 0.02)

    def until_held(self, request_id: str) -> None:
        def held() -> bool:
            return any(view.request_id == request_id and view.note == "held" for view in self.queue.requests())

        self.until(held, "the worker to hold")

    def go_on(self) -> None:
        """Let the held job go on."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(b"go on\n")

    def kinds(self, request_id: str, stage: str = "denoise") -> list[str]:
        """Return what the queue says of a request's stage."""
        told = (event for event in self.queue.events(limit=10_000) if event.request_id == request_id)
        return [event.kind for event in told if event.stage == stage and event.kind != "progress"]

    def whole(self) -> set[int]:
        """Return the steps of the checkpoints that are whole."""
        return {int(key.split("/")[3].split("-")[1]) for key in self.keys() if key.endswith("/end")}

    def keys(self) -> list[str]:
        return self.connectors["denoise"].store().keys("moonrelay/ck/", Deadline(10, SystemClock()))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def result(self, request_id: str) -> dict[str, Any]:
        self.do("decode")
        found = self.queue.result(request_id, timeout_s=TIMEOUT_S)
        assert isinstance(found, dict)
        return found

    def denoised(self, result: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = next(entry for entry in result["trace"] if entry["stage"] == "denoise")
        return found

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.kill()
            assert self.process.stdout is not None
            assert self.process.stdin is not None
            self.process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        for worker in self.workers.values():
            worker.close()
        self.checkpointer.close()
        for connector in self.connectors.values():
            connector.close()
        self.queue.close()


_programs: dict[Any, Any] = {}


@pytest.fixture
def house(models: Any, tmp_path: Path) -> Iterator[House]:
    made = House(models, tmp_path)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.close()


@pytest.fixture(scope="session")
def unbroken(models: Any) -> str:
    from moonrelay_diffusers.frames import frames_digest

    return frames_digest(models.reference("wan2.1").run(models.request("wan2.1", num_inference_steps=STEPS)))


@pytest.mark.parametrize("step", [1, EVERY, EVERY + 1, STEPS], ids=["1", "k", "k+1", "last"])
def test_a_killed_workers_job_goes_on_elsewhere(step: int, house: House, unbroken: str) -> None:
    house.start(step)
    house.submit("r1")
    house.until_held("r1")
    saved = step // EVERY * EVERY
    house.until(lambda: house.whole() == ({saved} if saved else set()), "the last checkpoint")
    house.kill()
    house.do("denoise")
    result = house.result("r1")
    assert result["digest"] == unbroken
    entry = house.denoised(result)
    assert entry["attempt"] == 2
    assert entry["resumed_step"] == saved
    assert entry["steps_redone"] == step - saved
    assert entry["steps_redone"] <= EVERY
    assert house.checkpointer.wait_idle(30)
    assert house.keys() == []


def test_a_worker_that_is_drained_leaves_its_job_to_another(house: House, unbroken: str) -> None:
    house.start(3)
    house.submit("r1")
    house.until_held("r1")
    assert house.process is not None
    house.process.send_signal(signal.SIGTERM)
    ended = house.line()
    assert (ended["event"], ended["left"], ended["completed"], ended["failed"]) == ("ended", 1, 0, 0)
    assert house.process.wait(TIMEOUT_S) == 0
    assert house.whole() == {3}
    house.do("denoise")
    result = house.result("r1")
    assert result["digest"] == unbroken
    entry = house.denoised(result)
    assert (entry["resumed_step"], entry["steps_redone"]) == (3, 0)
    assert house.checkpointer.wait_idle(30)
    assert house.keys() == []


def test_an_interactive_job_overtakes_a_batch_job_on_one_worker(house: House, unbroken: str) -> None:
    house.start(3, "--preempt", "--preempt-least-s=0", "--tell-checkpoints")
    house.submit("b1", "batch")
    house.until_held("b1")
    house.submit("i1", "interactive")
    # The held worker computes nothing: it is the heartbeat by which it hears.
    house.until(lambda: "asked_to_yield" in house.kinds("b1"), "the job to be asked")
    house.go_on()
    results = {}
    for name in ("i1", "b1"):
        house.until(lambda: house.queue.stats().stages["decode"].queued > 0, "a result")
        if name == "i1":
            assert house.kinds("b1")[-1] != "completed"
        results[name] = house.result(name)
        assert results[name]["digest"] == unbroken
    assert house.kinds("b1") == ["claimed", "asked_to_yield", "preempted", "claimed", "completed"]
    assert house.kinds("i1") == ["claimed", "completed"]
    entry = house.denoised(results["b1"])
    assert (entry["attempt"], entry["resumed_step"], entry["steps_redone"]) == (2, 3, 0)
    assert house.process is not None
    assert house.process.stdout is not None
    house.process.send_signal(signal.SIGTERM)
    said = [json.loads(line) for line in house.process.stdout]
    told = [(line["event"], line["step"]) for line in said if line.get("request_id") == "b1"]
    assert told[:3] == [("checkpoint_saved", 2), ("checkpoint_saved", 3), ("checkpoint_resumed", 3)]
    assert (said[-1]["event"], said[-1]["left"], said[-1]["completed"]) == ("ended", 1, 2)


def test_a_batch_job_is_not_left_where_preemption_is_off(house: House, unbroken: str) -> None:
    house.start(3)
    house.submit("b1", "batch")
    house.until_held("b1")
    house.submit("i1", "interactive")
    house.go_on()
    house.until(lambda: house.queue.stats().stages["decode"].queued > 0, "a result")
    assert house.result("b1")["digest"] == unbroken
    assert house.kinds("b1") == ["claimed", "completed"]


@pytest.mark.parametrize("end", ["cancelled", "dead"])
def test_nothing_is_left_when_the_worker_that_saved_is_dead(end: str, house: House) -> None:
    house.start(3)
    house.submit("r1")
    house.until_held("r1")
    house.until(lambda: house.whole() == {2}, "the checkpoint")
    house.kill()
    if end == "cancelled":
        assert house.queue.cancel("r1")
    else:
        worker = house.queue.register_worker("denoise")
        for _ in range(2):
            job = worker.take(timeout_s=TIMEOUT_S)
            assert job is not None
            job.give_back("not mine")
        worker.close()
    [view] = house.queue.requests()
    assert view.state == end
    assert house.keys()
    CheckpointSweep(house.checkpointer, house.queue, SystemClock())()
    assert house.checkpointer.wait_idle(30)
    assert house.keys() == []


def test_a_worker_removes_the_checkpoints_of_a_job_that_is_cancelled(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.submit("r1")
    steps: list[int] = []

    def cancel(event: Any) -> None:
        if event.name == "checkpoint_saved":
            steps.append(event.fields()["step"])
            house.queue.cancel("r1")

    submit = house.checkpointer.submit

    def at_once(work: Callable[[], None]) -> bool:
        """Let the loop wait for the save, so that the cancel comes before the next step."""
        return submit(work) and house.checkpointer.wait_idle(30)

    monkeypatch.setattr(house.checkpointer, "submit", at_once)
    unsubscribe = house.connectors["denoise"].events.subscribe(cancel)
    try:
        house.do("denoise")
    finally:
        unsubscribe()
    assert steps == [EVERY]
    [view] = house.queue.requests()
    assert view.state == "cancelled"
    assert house.checkpointer.wait_idle(30)
    assert house.keys() == []


def test_a_client_edits_a_request(house: House, unbroken: str) -> None:
    house.submit("r1", checkpoints={"retain": True, "keep": 9})
    house.do("denoise")
    assert house.result("r1")["digest"] == unbroken
    assert house.checkpointer.wait_idle(30)
    assert house.whole() == {2, 4, 6}
    house.submit("r2", checkpoints={"from": "r1", "step": 2, "override": ["conditioning"]})
    house.do("denoise")
    result = house.result("r2")
    assert house.denoised(result)["resumed_step"] == 2
    assert result["digest"] == unbroken  # its prompt is the same
    for number, (wishes, field) in enumerate(
        [
            ({"from": 1}, "checkpoints.from"),
            ({"form": "r1"}, "checkpoints.form"),
            ({"step": 0}, "checkpoints.step"),
            ({"override": "conditioning"}, "checkpoints.override"),
            ({"override": ["sigmas"]}, "override"),
            ({"retain": 1}, "checkpoints.retain"),
            ("r1", "checkpoints"),
        ]
    ):
        house.submit(f"w{number}", checkpoints=wishes)
        house.do("denoise")
        view = next(view for view in house.queue.requests() if view.request_id == f"w{number}")
        assert view.state == "failed"
        assert view.error_code == "config_error"
        assert f"field='{field}'" in str(view.error_message)
