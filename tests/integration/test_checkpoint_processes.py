"""Step checkpoints between processes: whoever is killed, at whatever moment, the newest whole state is there."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector, StageQueue
from moonrelay.cache.checkpoint import Checkpointer, CheckpointIdentity
from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import child_environment
from moonrelay.events import Event

pytestmark = pytest.mark.processes

TIMEOUT_S = 60.0

#: Saves one state after the other as fast as it can, and says so; a state is known by its step.
SAVER = """
import json, sys
import torch
from moonrelay import DiffusionConnector
from moonrelay.cache.checkpoint import Checkpointer, CheckpointIdentity, StepState

url, identity = sys.argv[1], json.loads(sys.argv[2])
identity.update({name: tuple(identity[name]) for name in ("latent_shape", "approximate")})
conn = DiffusionConnector("denoise", "store", store_config={"url": url})
checkpointer = Checkpointer(conn, every=1)
session = checkpointer.session(CheckpointIdentity(**identity))
state = session.resume()
step = 0 if state is None else state.step
while True:
    step += 1
    latents = torch.full(identity["latent_shape"], float(step))
    made = StepState(step=step, latents=latents, scheduler={"last": latents + 1}, generators={})
    print(json.dumps({"begun": step}), flush=True)
    session.after_step(step, lambda: made)
    checkpointer.wait_idle(30)
    print(json.dumps({"whole": step}), flush=True)
"""

IDENTITY = CheckpointIdentity(
    request_id="r1",
    model="m@1",
    loras={},
    scheduler="s",
    scheduler_config="c",
    sigmas="a",
    timesteps="b",
    num_steps=1_000_000,
    guidance={},
    latent_shape=(64, 1024),
    latent_dtype="float32",
    conditioning="e",
    numerics={},
    seed=0,
)


def saver(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SAVER, url, json.dumps(IDENTITY.to_plain())],
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment({}),
    )


def read(process: subprocess.Popen[str], lines: int) -> dict[str, int]:
    """Read so many lines; return the newest of each kind."""
    newest: dict[str, int] = {}
    assert process.stdout is not None
    for _ in range(lines):
        assert select.select([process.stdout], [], [], TIMEOUT_S)[0]
        newest |= json.loads(process.stdout.readline())
    return newest


@pytest.mark.parametrize("lines", [1, 2, 5, 8, 13], ids=str)
def test_whoever_is_killed_while_saving_the_newest_whole_state_is_there(lines: int, tmp_path: Path) -> None:
    url = f"local://{tmp_path / 'store'}"
    events: list[Event] = []
    conn = DiffusionConnector("denoise", "store", store_config={"url": url}, observers=[events.append])
    process = saver(url)
    try:
        told = read(process, lines)
        process.kill()
        rest = process.communicate(timeout=TIMEOUT_S)[0].splitlines()
    finally:
        process.kill()
        process.wait()
    for line in rest:
        if line.endswith("}"):
            told |= json.loads(line)
    with conn, Checkpointer(conn, every=1) as checkpointer:
        session = checkpointer.session(IDENTITY)
        state = session.resume()
        found = 0 if state is None else state.step
        assert told.get("whole", 0) <= found <= told["begun"]
        if state is not None:
            assert state.latents.equal(torch.full(IDENTITY.latent_shape, float(found)))
            last = state.scheduler["last"]
            assert isinstance(last, torch.Tensor)
            assert last.equal(state.latents + 1)
        # What the dead one left half-done goes with the rest.
        session.finish()
        assert checkpointer.wait_idle(30)
        assert conn.store().keys("", Deadline(10, SystemClock())) == []
    assert [event.name for event in events if event.name == "checkpoint_failed"] == []


def test_a_host_that_takes_no_checkpoints_says_so(tmp_path: Path) -> None:
    info = tmp_path / "site" / "mr_plain-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mr-plain\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moonrelay.adapters]\nplain = mr_plain_adapter:Adapter\n")
    (tmp_path / "site" / "mr_plain_adapter.py").write_text(
        "class Adapter:\n"
        "    stages = ()\n"
        "    def prepare(self, threads):\n"
        "        return {}\n"
        "    def load_program(self, model, stage, *, output, device, dtype, file_format):\n"
        "        raise RuntimeError('loaded')\n"
    )
    queue = f"sqlite:///{tmp_path / 'queue.db'}"
    StageQueue.connect(queue).close()
    path = ":".join([str(tmp_path / "site"), *filter(None, sys.path)])
    command: list[Any] = [sys.executable, "-m", "moonrelay.cli.main", "worker", "denoise", "--model=any"]
    done = subprocess.run(
        [
            *command,
            *("--adapter=plain", f"--queue={queue}", "--transfer-mode=p2p", "--engine=shm", "--checkpoint-every=5"),
            f"--store=local://{tmp_path / 'store'}",
        ],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=child_environment({"PYTHONPATH": path}),
    )
    assert done.returncode != 0
    assert "adapter 'plain' takes no checkpoints" in done.stderr
    assert "loaded" not in done.stderr
