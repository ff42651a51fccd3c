"""vLLM-Omni's engine in a process of its own, told what to do by JSON lines: `Engine` here, `main` there.

The host spawns its stages from that process; `Engine.end` ends all of them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

#: The host's own pipelines, undivided, as a deploy YAML names them; registered by `main` alone: class and output.
UNDIVIDED = {
    "moonrelay_test_qwen_image": ("QwenImagePipeline", "image"),
    "moonrelay_test_wan": ("WanPipeline", "video"),
}
#: What tests paint, by family and by name: with and without a negative prompt, as bare text, for which the host by
#: itself would not look for a payload, and of two prompts that were painted apart before.
SIZES: dict[str, dict[str, int]] = {
    "qwen_image": {"seed": 3, "height": 64, "width": 64, "num_inference_steps": 4},
    "wan": {"seed": 3, "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 3},
}
PROMPTS: dict[str, Any] = {
    "guided": {"prompt": "a fox in the snow", "negative_prompt": "blurry"},
    "plain": {"prompt": "a fox in the snow"},
    "text": "a lighthouse at night",
    "shared": {"prompt": "a lighthouse at night", "negative_prompt": "blurry"},
}
START_TIMEOUT_S = 420.0
#: What every stage of a deploy YAML needs besides on a CPU.
ON_A_CPU = {"enforce_eager": True}


class EngineFailed(Exception):
    """What a call raised in the engine's process: ``kind`` is the class's name, ``stage`` the host's word on where."""

    def __init__(self, kind: str, text: str, stage: int | None = None) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.stage = stage


def on_a_cpu(deploy: dict[str, Any]) -> dict[str, Any]:
    """Return a deploy YAML's content as this machine can run it."""
    stages = [{**stage, **ON_A_CPU} for stage in deploy["stages"]]
    return {**deploy, "distributed_executor_backend": "uni", "dtype": "float32", "stages": stages}


class Engine:
    """One `main` process and the stages that it spawned."""

    def __init__(self, model: Path, deploy: Path, log: Path) -> None:
        self.log = log
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("wb") as output:
            # A session of its own: whatever the host leaves behind is found by it.
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        try:
            self.do("start", timeout_s=START_TIMEOUT_S, model=str(model), deploy=str(deploy))
        except BaseException as exc:
            self.end()
            exc.add_note(self.tail())
            raise

    def do(self, op: str, *, timeout_s: float = 120.0, **arguments: Any) -> Any:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        line = process.stdout.readline() if ready else b""
        if not line:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # where its threads are goes to the log
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(2.0)
            text = f"no answer to {op} in {timeout_s} s, exit code {process.poll()}\n{self.tail()}"
            raise EngineFailed("Ended", text)
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(*reply["error"])
        return reply["result"]

    def processes(self) -> list[int]:
        """Return the living processes of the engine's session: its stages, and what they started."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self._process.pid:
                with contextlib.suppress(OSError, ValueError):
                    state, _, _, session = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[:4]
                    if int(session) == self._process.pid and state != "Z":
                        found.append(int(entry.name))
        return sorted(found)

    def leave(self, timeout_s: float) -> None:
        """Have the host close its engine, and the process end by itself."""
        self.do("close", timeout_s=timeout_s)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout_s)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class _Served:
    """The other end."""

    def __init__(self) -> None:
        self.omni: Any = None

    def start(self, model: str, deploy: str) -> int:
        from vllm_omni import Omni

        from moonrelay_vllm_omni import plugin

        plugin.register()
        _register_undivided()
        self.omni = Omni(model=model, deploy_config=deploy)
        return int(self.omni.num_stages)

    def paint(self, prompt: Any, **params: Any) -> dict[str, Any]:
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        each = [OmniDiffusionSamplingParams(**params) for _ in range(self.omni.num_stages)]
        started = time.monotonic()
        (output,) = self.omni.generate(prompt, each, use_tqdm=False)
        elapsed = time.monotonic() - started
        (image,) = output.images
        pixels = np.asarray(image)
        return {
            "sha256": hashlib.sha256(pixels.tobytes()).hexdigest(),
            "shape": pixels.shape,
            "values": len(np.unique(pixels)),
            "seconds": elapsed,
        }

    def stage_pid(self, stage: int) -> int:
        # No public word for it in 0.30.
        return int(self.omni.engine.stage_pools[stage].stage_client._proc_manager.proc.pid)

    def close(self) -> None:
        self.omni.close()


def _register_undivided() -> None:
    from vllm_omni.config.pipeline_registry import register_pipeline
    from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

    for name, (model, output) in UNDIVIDED.items():
        stage = StagePipelineConfig(
            stage_id=0,
            model_stage="diffusion",
            execution_type=StageExecutionType.DIFFUSION,
            model_arch=model,
            final_output=True,
            final_output_type=output,
        )
        register_pipeline(PipelineConfig(model_type=name, model_arch=model, stages=(stage,)))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the host prints is no answer
    faulthandler.register(signal.SIGUSR1)
    served = _Served()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = {"result": getattr(served, order.pop("op"))(**order)}
        except Exception as exc:
            reply = {"error": [type(exc).__name__, str(exc), getattr(exc, "error_stage_id", None)]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
