"""The yardstick's process: builds the tiny model where one is wanted, then runs diffusers' own, undivided pipeline.

Owns nothing of the pipeline in stages: it shares the model's folder and the requests' seeds with the workers, and no
memory, queue or connector. Started as ``python -m moonrelay.cli.demo.undivided``; one JSON line in, JSON lines out.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from moonrelay.cli.lifeline import Lifeline
from moonrelay.cli.worker import parse_dtype
from moonrelay.clock import SystemClock
from moonrelay.errors import MoonrelayError

if TYPE_CHECKING:
    from moonrelay_diffusers.request import GenerationRequest

#: The live pipeline goes first where processors are few.
_NICENESS: Final = 5
#: Requests of a family that makes images have one frame.
_SMALL: Final = {"wan": (96, 17), "qwen_image": (192, 1)}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is asked for.

    Attributes:
        model: Folder or hub id; ``None`` builds a tiny model in ``build``.
        build: Folder for that.
        prompts: Request id, prompt, negative prompt and seed of each request.
        steps: Denoising steps.
        size: Height and width; ``None`` is small and fit for the family.
        frames: Frames; ``None`` likewise.
        device: Where the model lives.
        dtype: Type of the weights, as for ``moonrelay worker``.
        threads: Threads of one torch operation.
    """

    model: str | None
    build: str
    prompts: Sequence[tuple[str, str, str | None, int]]
    steps: int
    size: int | None
    frames: int | None
    device: str
    dtype: str | None
    threads: int


def requests_of(order: Order, family: str) -> dict[str, GenerationRequest]:
    """Return the requests, complete but for the family's own defaults, by id.

    Raises:
        ConfigError: A field is out of range.
    """
    from moonrelay_diffusers.request import GenerationRequest

    side, frames = _SMALL.get(family, (None, None))
    return {
        request_id: GenerationRequest(
            prompt=prompt,
            negative_prompt=negative,
            seed=seed,
            height=order.size or side,
            width=order.size or side,
            num_frames=order.frames or frames,
            num_inference_steps=order.steps,
        )
        for request_id, prompt, negative, seed in order.prompts
    }


def run(order: Order) -> None:
    """Do what was asked, saying so line by line."""
    from moonrelay_diffusers.embeddings import EncodeShortcut
    from moonrelay_diffusers.frames import frames_digest
    from moonrelay_diffusers.model import inspect_model
    from moonrelay_diffusers.numerics import deterministic_setup
    from moonrelay_diffusers.reference import Reference
    from moonrelay_diffusers.stages import resolve_request

    clock = SystemClock()
    numerics = deterministic_setup(order.threads)
    model = order.model or _build(Path(order.build))
    family = inspect_model(model).family
    requests = {name: resolve_request(model, asked) for name, asked in requests_of(order, family).items()}
    # Made here, since a key holds what decides bits: this process has torch, set up as the workers have it.
    shortcut = EncodeShortcut(model, dtype=parse_dtype(order.dtype))
    ahead = {name: shortcut.task(request) for name, request in requests.items()}
    _say(
        "model",
        model=model,
        family=family,
        numerics=dataclasses.asdict(numerics),
        requests={name: request.to_payload() for name, request in requests.items()},
        ahead={name: task.payload for name, task in ahead.items() if task is not None},
    )
    if order.device == "cpu":
        os.nice(_NICENESS)
    pipeline = Reference(model, device=order.device, dtype=parse_dtype(order.dtype))
    for name, request in requests.items():
        began = clock.monotonic()
        frames = pipeline.run(request)
        ended = clock.monotonic()
        _say(
            "undivided",
            request_id=name,
            digest=frames_digest(frames),
            frames=list(frames.shape),
            started_s=began,
            ended_s=ended,
        )


def main() -> None:
    """Read the order from standard input and carry it out; the outermost frame of this process."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    Lifeline(sys.stdin.fileno(), lambda: os._exit(1))
    try:
        run(order)
    except MoonrelayError as exc:
        code, retryable, message = exc.to_wire()
        _say("error", code=code, retryable=retryable, message=message)
        raise SystemExit(1) from exc
    finally:
        gc.freeze()  # the exit frees it all; collecting first takes a second


def _build(folder: Path) -> str:
    from moonrelay_diffusers.tiny import build_wan

    return str(build_wan(folder))


def _say(event: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
