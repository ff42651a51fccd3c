"""A real run for the conformance suite: a tiny random Qwen-Image, undivided and in three stages, both by the host.

Owns whether the host's engine can run here, and the two processes that run it: each is ``python -m`` this module, told
what to do by one JSON line. The host spawns its stages from them, so each is ended with its whole session.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from moonrelay.cli.demo.children import EXITED, Child, Inbox, Message
from moonrelay.cli.lifeline import Lifeline
from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import DeadlineExceeded, MoonrelayError, PeerLost
from moonrelay_vllm_omni import plugin

#: Where the host looks for platforms that it does not bring.
PLATFORMS: Final = "vllm_omni.platform_plugins"
UNDIVIDED: Final = "moonrelay_undivided_qwen_image"
DIVIDED: Final = "moonrelay_qwen_image"
STAGES: Final = 3

_MODEL: Final = "QwenImagePipeline"
_PROMPT: Final = {"prompt": "A red fox in the snow", "negative_prompt": "blurred"}
_PARAMS: Final = {"seed": 11, "height": 64, "width": 64, "num_inference_steps": 4}
#: In a process of its own: an adapter imports no other one.
_BUILD: Final = "import sys; from moonrelay_diffusers import tiny; tiny.build_qwen_image(sys.argv[1])"
_LOOK_S: Final = 0.2


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's process is asked for.

    Attributes:
        model: The model's folder.
        deploy: The deploy YAML.
    """

    model: str
    deploy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted:
    """Digests of the picture by both ways."""

    undivided: str
    divided: str


def platform() -> tuple[bool, str]:
    """Say whether the host's engine can run on this machine.

    Returns:
        ``(True, on what)`` or ``(False, what is missing)``.
    """
    if not plugin.VllmOmniAdapter().available()[0]:
        return False, "the host is not installed"
    names = sorted(one.name for one in metadata.entry_points(group=PLATFORMS))
    if names:
        return True, f"platform {', '.join(names)}"
    if _has_cuda():
        return True, "CUDA"
    return False, "no GPU, and no platform of another kind is installed for its engine"


def paint(extra: Mapping[str, Any], folder: Path, *, timeout_s: float) -> Painted:
    """Run the pipeline undivided and in three stages, side by side.

    Args:
        extra: Of the connector between the stages.
        folder: An empty folder for model, YAML and logs.
        timeout_s: Bound of it all; a minute is usual on two cores, most of it imports of the host.

    Raises:
        DeadlineExceeded: It took too long; the message says what is missing.
        PeerLost: A process ended; the message holds its last words.
        MoonrelayError: The host failed, with its own error.
    """
    clock = SystemClock()
    deadline = Deadline(timeout_s, clock)
    model = folder / "model"
    build(model, timeout_s=timeout_s)
    inbox = Inbox()
    painted: dict[str, str] = {}
    with ExitStack() as stack:
        children: dict[str, Child] = {}
        for name, deploy in ((DIVIDED, divided_deploy(extra)), (UNDIVIDED, undivided_deploy())):
            file = folder / f"{name}.yaml"
            file.write_text(json.dumps(deploy))  # which is YAML
            order = msgspec.json.encode(Order(model=str(model), deploy=str(file))).decode()
            command = [sys.executable, "-m", "moonrelay_vllm_omni.real_run"]
            child = Child(name, command, inbox, folder / f"{name}.log", first_line=order, clock=clock)
            stack.callback(_end, child)
            children[name] = child
        while len(painted) < len(children):
            message_in = inbox.get(_LOOK_S)
            if message_in is not None:
                _heard(message_in, children, painted)
            elif deadline.expired:
                missing = ", ".join(sorted(children.keys() - painted.keys()))
                late = f"{missing} took more than {timeout_s:g} s; see the logs in {folder}"
                raise DeadlineExceeded(late)
    return Painted(undivided=painted[UNDIVIDED], divided=painted[DIVIDED])


def build(model: Path, *, timeout_s: float) -> None:
    """Make the tiny random Qwen-Image: always the same.

    Args:
        model: The folder to make.
        timeout_s: Bound; ten seconds are usual, most of them imports.

    Raises:
        DeadlineExceeded: It took too long.
        PeerLost: It could not be made; the message holds the last words.
    """
    try:
        built = subprocess.run(
            [sys.executable, "-c", _BUILD, str(model)], timeout=timeout_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as exc:
        message = f"building the tiny model took more than {timeout_s:g} s"
        raise DeadlineExceeded(message) from exc
    if built.returncode:
        message = f"the tiny model could not be built: {built.stderr.strip()[-400:]}"
        raise PeerLost(message)


def undivided_deploy() -> dict[str, Any]:
    """Return the deploy YAML of one stage."""
    return {"pipeline": UNDIVIDED, **_here(), "stages": [_stage(0)]}


def divided_deploy(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the deploy YAML of three stages, as the example has it."""
    stages = [_stage(number) for number in range(STAGES)]
    for number in range(STAGES - 1):
        stages[number]["output_connectors"] = {f"to_stage_{number + 1}": "mr"}
        stages[number + 1]["input_connectors"] = {f"from_stage_{number}": "mr"}
    return {
        "pipeline": DIVIDED,
        **_here(),
        "connectors": {"mr": {"name": plugin.NAME, "extra": dict(extra)}},
        "stages": stages,
    }


def _stage(number: int) -> dict[str, Any]:
    return {"stage_id": number, "devices": "0", "max_num_seqs": 1, "enforce_eager": True}


def _here() -> dict[str, Any]:
    """Return what a deploy YAML needs on this machine: without a GPU one executor, and numbers that it can add."""
    common = {"async_chunk": False}
    return common if _has_cuda() else {**common, "distributed_executor_backend": "uni", "dtype": "float32"}


def _has_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _heard(message: Message, children: Mapping[str, Child], painted: dict[str, str]) -> None:
    if message.event == "painted":
        painted[message.child] = str(message.fields["digest"])
    elif message.event == "error":
        text = f"{message.child}: {message.fields['message']}"
        raise MoonrelayError(text)
    elif message.event == EXITED and message.child not in painted:
        raise children[message.child].failure(message.fields.get("code"))


def _end(child: Child) -> None:
    """End a process with all that it spawned."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.close()


# -- the engine's process ---------------------------------------------------------------------------------------------


def _digest(order: Order) -> str:
    """Have the host paint; return the pixels' digest."""
    import numpy as np
    from vllm_omni import Omni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    plugin.register()
    _register_undivided()
    omni = Omni(model=order.model, deploy_config=order.deploy)
    params = [OmniDiffusionSamplingParams(**_PARAMS) for _ in range(omni.num_stages)]
    (output,) = omni.generate(dict(_PROMPT), params, use_tqdm=False)
    (image,) = output.images
    pixels = np.asarray(image)
    if len(np.unique(pixels)) <= STAGES:
        message = "the picture is flat; it would equal any other"
        raise MoonrelayError(message)
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


def _register_undivided() -> None:
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

    if UNDIVIDED in OMNI_PIPELINES:
        return
    stage = StagePipelineConfig(
        stage_id=0,
        model_stage="diffusion",
        execution_type=StageExecutionType.DIFFUSION,
        model_arch=_MODEL,
        final_output=True,
        final_output_type="image",
    )
    register_pipeline(PipelineConfig(model_type=UNDIVIDED, model_arch=_MODEL, stages=(stage,)))


def main() -> None:
    """Carry out the order on standard input; whoever started this ends it, with its stages."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the host prints is no answer
    Lifeline(sys.stdin.fileno(), _end_self)
    said: dict[str, str] = {}
    try:
        said = {"event": "painted", "digest": _digest(order)}
    except Exception as exc:
        said = {"event": "error", "message": f"{type(exc).__name__}: {exc}"}
        raise
    finally:
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def _end_self() -> None:
    """End with all stages, which are in this process's group where it was started as the leader of one."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
