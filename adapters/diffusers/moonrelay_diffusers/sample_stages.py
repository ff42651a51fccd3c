"""A tiny Wan's encode and denoise stage with the host's caches: what a side of the conformance suite runs.

Owns the stages of one process: the encoder is counted by a hook on it, the loop by its own reports. What stands between
them and the caches is the program's own code. Imports torch and diffusers, so it is imported when they are asked for.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Final

from moonrelay import DiffusionConnector
from moonrelay.cache.checkpoint import Checkpointer
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay_diffusers import GenerationRequest, load_stage, tiny
from moonrelay_diffusers.families.base import Embeds, Text
from moonrelay_diffusers.loop import RunCheckpoints
from moonrelay_diffusers.numerics import deterministic_setup

_SEED: Final = 3
_SIZE: Final = 32
_FRAMES: Final = 17
_CACHE_BYTES: Final = 16 << 20
_WAIT_S: Final = 60.0
_NEGATIVE: Final = "negative_"


class _Left(BaseException):
    """The loop is left where a worker would die; nothing on the way out may tidy up."""


class Stages:
    """The stages of one process, loaded when first used.

    Args:
        connector: Its store takes both caches.
        model: Folder of the tiny model; made by whoever needs it first.
    """

    def __init__(self, connector: DiffusionConnector, model: Path) -> None:
        self._connector = connector
        self._model = model
        self._loaded: dict[str, Any] = {}
        self._cache: EmbeddingCache | None = None
        self._forwards = 0
        deterministic_setup(1)

    def encode(self, prompt: str, negative: str, *, cached: bool) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Encode as the program of the encode stage does.

        Returns:
            What it hands on for the prompt, for the negative prompt, and how often the encoder computed.
        """
        runner = self._stage("encode")
        before = self._forwards
        made = runner.run(_request(prompt, negative), embed=self._kept if cached else None)
        trees: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        for name, part in made.items():
            if name != "params":
                trees[name.startswith(_NEGATIVE)][name.removeprefix(_NEGATIVE)] = part
        return (*trees, self._forwards - before)

    def denoise(self, request_id: str, *, seed: int, steps: int, stop_after: int | None) -> tuple[Any, int, int]:
        """Denoise as the program of the denoise stage does, with a checkpoint after each step.

        Returns:
            The latents (``None`` of a loop that was left after ``stop_after`` steps), steps that it did not have to do,
            and steps that it did.
        """
        tree = self._stage("encode").run(_request("a fox", "blurred", seed=seed, steps=steps))
        done: list[int] = []
        with Checkpointer(self._connector, every=1) as checkpointer:
            wanted = RunCheckpoints(checkpointer=checkpointer, request_id=request_id)

            def on_step(step: int, _total: int) -> None:
                done.append(step)
                checkpointer.wait_idle(_WAIT_S)
                if step == stop_after:
                    raise _Left

            try:
                latents = self._stage("denoise").run(tree, on_step=on_step, checkpoints=wanted)
            except _Left:
                return None, wanted.resumed_step, len(done)
            wanted.finish()
            checkpointer.wait_idle(_WAIT_S)
        return latents, wanted.resumed_step, len(done)

    def close(self) -> None:
        """Let go of cache and models."""
        if self._cache is not None:
            self._cache.close()
        self._loaded.clear()

    def _kept(self, text: Text) -> Embeds:
        if self._cache is None:
            self._cache = EmbeddingCache(self._connector, _CACHE_BYTES)
        runner = self._stage("encode")
        found: Any = self._cache.get_or_encode(
            runner.key(text), lambda: runner.embed(text.text, max_sequence_length=text.max_length)
        )
        return found  # type: ignore[no-any-return]

    def _stage(self, name: str) -> Any:
        if name not in self._loaded:
            self._build()
            runner: Any = load_stage(str(self._model), name)  # type: ignore[call-overload]
            if name == "encode":
                runner._pipe.text_encoder.register_forward_hook(self._count)  # noqa: SLF001 - counted at the encoder
            self._loaded[name] = runner
        return self._loaded[name]

    def _count(self, *_: object) -> None:
        self._forwards += 1

    def _build(self) -> None:
        if self._model.exists():
            return
        made = self._model.with_name(f"{self._model.name}-{os.getpid()}")
        tiny.build_wan(made, _SEED)
        try:
            made.rename(self._model)
        except OSError:  # another process was faster; what it built is the same
            shutil.rmtree(made)


def _request(prompt: str, negative: str, *, seed: int = 0, steps: int = 4) -> GenerationRequest:
    return GenerationRequest(
        prompt=prompt,
        negative_prompt=negative,
        seed=seed,
        height=_SIZE,
        width=_SIZE,
        num_frames=_FRAMES,
        num_inference_steps=steps,
        max_sequence_length=64,
    )
