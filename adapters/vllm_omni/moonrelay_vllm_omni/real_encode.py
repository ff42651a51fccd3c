"""A real encode stage for the conformance suite: a tiny random Qwen-Image's, by the host's own worker in this process.

Owns that worker's life, and the counting of what its text encoder computes. The embedding cache is switched on as a
deploy YAML does; without it the very same pipeline encodes with its class's own method.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moonrelay_vllm_omni import plugin, real_run

#: Bound of building the model, in seconds; ten are usual.
BUILD_TIMEOUT_S: Final = 120.0

_CLASS: Final = "MoonrelayQwenImageEncode"
_METHOD: Final = "encode_prompt"
_NEGATIVE: Final = "negative_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What two prompts became, by the host's names, and how often the text encoder computed for it."""

    positive: Mapping[str, Any]
    negative: Mapping[str, Any]
    computed: int


class EncodeStage:
    """Encodes prompts as the host's encode stage does. One in a process.

    Args:
        extra: Of the stage's connector; its store is the cache's.
        model: Folder of the model; built there where there is none.

    Raises:
        DeadlineExceeded, PeerLost: The model could not be built.

    Blocks: some ten seconds.

    Threads: one.
    """

    def __init__(self, extra: Mapping[str, Any], model: Path) -> None:
        _build(model)
        plugin.register()
        import torch
        from vllm_omni.diffusion.data import OmniDiffusionConfig
        from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker

        config = OmniDiffusionConfig.from_kwargs(
            model=str(model),
            model_class_name=_CLASS,
            dtype=torch.float32,
            enforce_eager=True,
            model_config={"moonrelay": {"embedding_cache": True}},
            omni_kv_config={
                "connector_config": {**extra, "type": plugin.NAME, "role": "sender"},
                "need_recv_cache": False,
            },
        )
        self._worker: Any = DiffusionWorker(local_rank=0, rank=0, od_config=config)
        self._pipeline: Any = self._worker.model_runner.pipeline
        self._numbers = itertools.count()
        self._computed = 0
        self._pipeline.text_encoder.register_forward_pre_hook(self._count)

    def encode(self, prompt: str, negative: str, *, cached: bool) -> Made:
        """Encode two prompts.

        Args:
            prompt: The prompt.
            negative: The negative prompt.
            cached: Whether by the embedding cache.
        """
        import torch
        from vllm_omni.diffusion.request import OmniDiffusionRequest
        from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
        from vllm_omni.inputs.data import OmniDiffusionSamplingParams

        request = OmniDiffusionRequest(
            prompt={"prompt": prompt, "negative_prompt": negative},
            sampling_params=OmniDiffusionSamplingParams(),
            request_id=f"encode-{next(self._numbers)}",
        )
        own = vars(self._pipeline)
        remembering = own[_METHOD]
        if not cached:
            del own[_METHOD]
        before = self._computed
        try:
            with torch.inference_mode():
                made = self._pipeline.forward(DiffusionRequestBatch(requests=[request])).custom_output
        finally:
            own[_METHOD] = remembering
        return Made(
            positive={name: part for name, part in made.items() if not name.startswith(_NEGATIVE)},
            negative={name: part for name, part in made.items() if name.startswith(_NEGATIVE)},
            computed=self._computed - before,
        )

    def close(self) -> None:
        """End the worker, and with its pipeline the cache. Idempotent."""
        worker, self._worker, self._pipeline = self._worker, None, None
        if worker is not None:
            worker.shutdown()

    def _count(self, *_given: object) -> None:
        self._computed += 1


def _build(model: Path) -> None:
    """Build the model, where no other process did; whoever is first wins, and all have the same."""
    if model.exists():
        return
    model.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        made = Path(folder) / model.name
        real_run.build(made, timeout_s=BUILD_TIMEOUT_S)
        try:
            os.rename(made, model)
        except OSError:
            if not model.is_dir():
                raise
