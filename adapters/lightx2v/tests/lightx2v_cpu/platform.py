"""The platform ``cpu``, and the host's modules mended as they are imported. See the package."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightx2v_cpu import shims
from lightx2v_cpu.install import COUNTS, TINY

#: Sizes of the tiny models; the denoiser's are in its folder's ``config.json``.
TEXT_ENCODER: dict[str, int] = {
    "vocab_size": 64,
    "dim": 64,
    "dim_attn": 64,
    "dim_ffn": 96,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
}
VAE: dict[str, int] = {"dim": 8, "num_res_blocks": 1}
_ENCODERS = "lightx2v.models.input_encoders.hf"
_T5 = f"{_ENCODERS}.wan.t5.model"
_QWEN = f"{_ENCODERS}.qwen25.qwen25_vlforconditionalgeneration"


def register() -> None:
    """The entry point; the host calls it before it imports anything else of its own."""
    if os.environ.get("PLATFORM") != "cpu":
        return
    from lightx2v_platform.registry_factory import PLATFORM_DEVICE_REGISTER

    PLATFORM_DEVICE_REGISTER("cpu")(Cpu)
    shims.apply()
    mended: dict[str, Callable[[Any], None]] = {
        "lightx2v.models.networks.base_model": _weights_where_they_are_used,
    }
    if os.environ.get(COUNTS):
        mended[_T5] = functools.partial(_counting, "T5EncoderModel")
        mended[_QWEN] = functools.partial(_counting, "Qwen25_VLForConditionalGeneration_TextEncoder")
    if os.environ.get(TINY) == "1":
        mended[_T5] = _both(_tiny_text_encoder, mended.get(_T5))
        mended["lightx2v.models.video_encoders.hf.wan.vae"] = _tiny_vae
    sys.meta_path.insert(0, _AfterImport(mended))


class Cpu:
    """The device, as the host asks for it."""

    name = "cpu"

    @staticmethod
    def init_device_env() -> None:
        pass

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def get_device() -> str:
        return "cpu"

    @staticmethod
    def init_parallel_env() -> None:
        import torch.distributed

        torch.distributed.init_process_group(backend="gloo")


class _AfterImport(MetaPathFinder):
    """Calls a function with a module once it has been executed, each once."""

    def __init__(self, mended: dict[str, Callable[[Any], None]]) -> None:
        self._left = dict(mended)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        mend = self._left.pop(fullname, None)
        if mend is None:
            return None
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def then_mend(module: ModuleType) -> None:
            execute(module)
            mend(module)

        spec.loader.exec_module = then_mend  # type: ignore[method-assign]
        return spec


def _weights_where_they_are_used(module: Any) -> None:
    """On the device "cpu" the host takes weights for offloaded ones, and does not set those that it computes with."""
    apply = module.BaseTransformerModel._apply_weights

    @functools.wraps(apply)
    def and_set(self: Any, *args: Any, **kwargs: Any) -> None:
        apply(self, *args, **kwargs)
        for part in ("pre_weight", "transformer_weights", "post_weight"):
            if (weights := getattr(self, part, None)) is not None:
                weights.to_cuda()  # to the device, that is

    module.BaseTransformerModel._apply_weights = and_set


def _tiny_text_encoder(module: Any) -> None:
    module.umt5_xxl = functools.partial(module.umt5_xxl, **TEXT_ENCODER)


def _tiny_vae(module: Any) -> None:
    module._video_vae = functools.partial(module._video_vae, **VAE)


def _both(first: Callable[[Any], None], second: Callable[[Any], None] | None) -> Callable[[Any], None]:
    def mend(module: Any) -> None:
        first(module)
        if second is not None:
            second(module)

    return mend


def _counting(name: str, module: Any) -> None:
    """Write a word to the file that the process was told for each encoder that is loaded and each text encoded."""
    encoder = getattr(module, name)
    for method, word in (("__init__", "load"), ("infer", "infer")):
        setattr(encoder, method, _counted(getattr(encoder, method), word))


def _counted(original: Callable[..., Any], word: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with open(os.environ[COUNTS], "a", encoding="utf-8") as counts:
            counts.write(f"{word}\n")
        return original(*args, **kwargs)

    return counted
