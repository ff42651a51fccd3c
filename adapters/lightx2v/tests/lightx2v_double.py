"""A small double of LightX2V, as far as the adapter meets it: its mixin, runners, requests, and how it loads plugins.

Ours, and held to the real one by `test_lightx2v_plugin.py` where that is there. Its models are a few torch operations,
deterministic in what a request asks for, so that what a disaggregated run gives can be compared with one process.

Three ways in, from small to large: `runners()` over a mixin, `Worker` over a runner, as the host's server has one, and
`write_tree`, which writes packages ``lightx2v`` and ``lightx2v_platform``, to be imported or run by ``python -m``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import queue
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

DEVICE = "cpu"
DTYPE = torch.bfloat16
TEXT_DIM = 16
CLIP_SHAPE = (7, 12)
Z_DIM = 16

#: What runners read of the mixin beside calling its methods.
READ_BY_RUNNERS = frozenset({"_disagg_p2_sender", "_p2_receive_meta"})


class LockableDict(dict[Any, Any]):
    """The host's configuration: attributes are items, nested ones too, and after `lock` nothing can be changed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._locked = False
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check()
        wrapped = LockableDict(value) if isinstance(value, dict) and not isinstance(value, LockableDict) else value
        super().__setitem__(key, wrapped)

    def __delitem__(self, key: Any) -> None:
        self._check()
        super().__delitem__(key)

    def pop(self, *args: Any) -> Any:
        self._check()
        return super().pop(*args)

    def update(self, *args: Any, **kwargs: Any) -> None:
        self._check()
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    @property
    def locked(self) -> bool:
        return self._locked

    def lock(self) -> None:
        for one in self._all():
            one._locked = True

    def unlock(self) -> None:
        for one in self._all():
            one._locked = False

    @contextmanager
    def temporarily_unlocked(self) -> Iterator[LockableDict]:
        before = [(one, one._locked) for one in self._all()]
        for one, _ in before:
            one._locked = False
        try:
            yield self
        finally:
            for one, locked in before:
                one._locked = locked

    def _all(self) -> Iterator[LockableDict]:
        yield self
        for value in self.values():
            if isinstance(value, LockableDict):
                yield from value._all()

    def _check(self) -> None:
        if self._locked:
            raise TypeError("the configuration is locked")


@dataclass
class InputInfo:
    """A request, with the fields that all tasks of the host have."""

    seed: int = 0
    prompt: str = ""
    negative_prompt: str = ""
    save_result_path: str | None = ""
    return_result_tensor: bool = False
    resize_mode: str = ""
    target_shape: list[int] = field(default_factory=list)


@dataclass
class T2VInputInfo(InputInfo):
    prompt_enhanced: str = ""
    latent_shape: list[int] = field(default_factory=list)


@dataclass
class I2VInputInfo(T2VInputInfo):
    image_path: str = ""
    original_shape: list[int] = field(default_factory=list)


@dataclass
class T2IInputInfo(InputInfo):
    image_shapes: list[Any] = field(default_factory=list)
    txt_seq_lens: list[int] = field(default_factory=list)
    aspect_ratio: str = ""


@dataclass
class I2IInputInfo(T2IInputInfo):
    image_path: str = ""
    original_size: list[Any] = field(default_factory=list)


INPUTS: Mapping[str, type[InputInfo]] = {
    "t2v": T2VInputInfo,
    "i2v": I2VInputInfo,
    "t2i": T2IInputInfo,
    "i2i": I2IInputInfo,
}


def init_empty_input_info(task: str) -> InputInfo:
    return INPUTS[task]()


def update_input_info_from_dict(input_info: InputInfo, data: Mapping[str, Any]) -> None:
    for name in input_info.__dataclass_fields__:
        if name in data:
            setattr(input_info, name, data[name])


def _noise(word: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(word.encode()))
    return torch.randn(*shape, generator=generator).to(dtype)


class TextEncoder:
    """Where its files are is in attributes, as the host's T5 has it; ``asked`` holds all texts since it was made."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.checkpoint_path = config.get("t5_original_ckpt")
        self.tokenizer_path = config.get("t5_tokenizer_path")
        self.asked: list[str] = []

    def infer(self, prompts: list[str], images: list[str] | None = None) -> list[torch.Tensor]:
        self.asked += prompts
        words = [prompt.split() or [""] for prompt in prompts]
        return [torch.cat([_noise(word, 1, TEXT_DIM, dtype=DTYPE) for word in line]) for line in words]


class Scheduler:
    """Noise by the request's seed; its generator stays after a request that failed, as the host's does."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.infer_steps = int(config["infer_steps"])
        self.generator: torch.Generator | None = None
        self.latents: Any = None

    def prepare(self, seed: int, latent_shape: list[int]) -> None:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(seed)
        self.latents = torch.randn(*latent_shape, generator=self.generator)

    def clear(self) -> None:
        self.generator = None
        self.latents = None


class NullScheduler:
    def clear(self) -> None:
        pass


class Dit:
    """Every value that a runner hands over has its part in every step."""

    scheduler: Scheduler

    def set_scheduler(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def infer(self, inputs: Mapping[str, Any]) -> None:
        push = torch.zeros(())
        for tensor in _tensors([inputs["text_encoder_output"], inputs["image_encoder_output"]]):
            weights = torch.linspace(0.5, 1.5, tensor.numel())
            push = push + (tensor.float().flatten() * weights).mean()
        self.scheduler.latents = torch.tanh(self.scheduler.latents * 0.9 + push)


class VaeDecoder:
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return latents.float().repeat_interleave(2, -1).repeat_interleave(2, -2).mul(3).sin()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from _tensors(tree[key])
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _tensors(one)


class Wire:
    """What connects native roles of one process: what was sent first into a room is received first, whoever asked."""

    def __init__(self, within_s: float = 10.0) -> None:
        self._within_s = within_s
        self._rooms: dict[tuple[int, int], queue.SimpleQueue[Any]] = {}

    def send(self, phase: int, room: int, what: Any) -> None:
        self._rooms.setdefault((phase, room), queue.SimpleQueue()).put(what)

    def receive(self, phase: int, room: int) -> Any:
        return self._rooms.setdefault((phase, room), queue.SimpleQueue()).get(timeout=self._within_s)


def native_mixin() -> type:
    """Return a new `DisaggMixin` with the host's six methods, over a `Wire` under ``disagg_config["wire"]``.

    ``calls`` of a runner holds the names of those that ran.
    """

    class DisaggMixin:
        calls: list[str]

        def init_disagg(self, config):  # type: ignore[no-untyped-def]
            self.calls = ["init_disagg"]
            self._disagg_cfg = config.get("disagg_config", {})
            self._disagg_mode = config.get("disagg_mode")
            self._disagg_decentralized = False
            self._disagg_p2_sender = None
            if self._disagg_mode == "transformer" and self._disagg_cfg.get("decoder_engine_rank") is not None:
                self._disagg_p2_sender = "native"

        def send_encoder_outputs(self, inputs: dict, latent_shape: list):  # type: ignore[no-untyped-def,type-arg]
            self.calls.append("send_encoder_outputs")
            sent = {**inputs, "latent_shape": list(latent_shape)}
            if isinstance(inputs["image_encoder_output"], list):
                sent["image_encoder_output"] = inputs["image_encoder_output"][:1]
            self._disagg_cfg["wire"].send(1, self._disagg_cfg["bootstrap_room"], sent)

        def receive_encoder_outputs(self) -> dict:  # type: ignore[type-arg]
            self.calls.append("receive_encoder_outputs")
            found: dict[str, Any] = self._disagg_cfg["wire"].receive(1, self._disagg_cfg["bootstrap_room"])
            return found

        def send_transformer_outputs(self, latents: torch.Tensor):  # type: ignore[no-untyped-def]
            self.calls.append("send_transformer_outputs")
            request: Any = self.input_info  # type: ignore[attr-defined]
            meta = {name: getattr(request, name, None) for name in ("auto_height", "auto_width")}
            self._disagg_cfg["wire"].send(2, self._disagg_cfg["decoder_bootstrap_room"], (latents.to(DTYPE), meta))

        def receive_transformer_outputs(self) -> torch.Tensor:
            self.calls.append("receive_transformer_outputs")
            latents: torch.Tensor
            latents, self._p2_receive_meta = self._disagg_cfg["wire"].receive(2, self._disagg_cfg["bootstrap_room"])
            return latents

        def release_disagg(self):  # type: ignore[no-untyped-def]
            self.calls.append("release_disagg")

    DisaggMixin.__qualname__ = "DisaggMixin"
    DisaggMixin.__module__ = "lightx2v.disagg.disagg_mixin"
    return DisaggMixin


def base_runner() -> type[Any]:
    """Return a new class that all runners are made of."""

    class BaseRunner:
        """What all runners have; its ``__init_subclass__`` wraps the ``run_pipeline`` of each subclass."""

        def __init__(self, config: Any) -> None:
            self.config = config
            self.input_info: Any = None
            self.inputs: Any = None
            self.model: Any = None
            #: ``text_encoder``, ``dit`` or ``vae``: that part raises.
            self.fails_at = ""
            #: Requests that came to their end.
            self.finished = 0

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            run = cls.__dict__.get("run_pipeline")
            if run is not None and not getattr(run, "_gc_freeze_wrapped", False):

                @functools.wraps(run)
                def run_pipeline(self: Any, *args: Any, **kwargs: Any) -> Any:
                    result = run(self, *args, **kwargs)
                    self.finished += 1
                    return result

                run_pipeline._gc_freeze_wrapped = True  # type: ignore[attr-defined]
                cls.run_pipeline = run_pipeline  # type: ignore[attr-defined]

        def apply_disagg_request_overrides(self, config_modify: Any) -> None:
            settings = self.config.get("disagg_config")
            if not self.config.get("disagg_mode") or not isinstance(settings, dict):
                return
            with self.config.temporarily_unlocked():
                for key in ("data_bootstrap_room", "disagg_bootstrap_room"):
                    if config_modify.get(key) is not None:
                        self.config["data_bootstrap_room"] = int(config_modify[key])
                for key, name in (
                    ("disagg_bootstrap_room", "bootstrap_room"),
                    ("disagg_decoder_bootstrap_room", "decoder_bootstrap_room"),
                    ("disagg_phase1_receiver_engine_rank", "receiver_engine_rank"),
                ):
                    if config_modify.get(key) is not None:
                        settings[name] = int(config_modify[key])

        def _may_fail(self, part: str) -> None:
            if self.fails_at == part:
                raise RuntimeError(f"planted failure of the {part}")

    return BaseRunner


def default_runner(base: type) -> type[Any]:
    """Return a new class of the runners that hand over, over their base."""

    class DefaultRunner(base):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.config["use_prompt_enhancer"] = False
            self.init_scheduler()

        def init_scheduler(self) -> None:
            self.scheduler: Any = (
                NullScheduler() if self.config.get("disagg_mode") == "decode" else Scheduler(self.config)
            )

        def init_modules(self) -> None:
            role = self.config.get("disagg_mode")
            two_stages = self.config.get("disagg_config", {}).get("decoder_engine_rank") is None
            #: Every text encoder that was loaded.
            self.loaded: list[TextEncoder] = []
            lazy = self.config.get("lazy_load", False)
            self.text_encoders = self.load_text_encoder() if role in (None, "encoder") and not lazy else None
            self.model = Dit() if role in (None, "transformer") else None
            self.vae_decoder = (
                VaeDecoder() if role in (None, "decode") or (role == "transformer" and two_stages) else None
            )
            if self.model is not None:
                self.model.set_scheduler(self.scheduler)
            self.config.lock()

        def set_config(self, config_modify: Mapping[str, Any]) -> None:
            with self.config.temporarily_unlocked():
                self.config.update(config_modify)

        def run_segment(self) -> torch.Tensor:
            for _ in range(self.model.scheduler.infer_steps):
                self._may_fail("dit")
                self.model.infer(self.inputs)
            latents: torch.Tensor = self.model.scheduler.latents
            return latents

        def end_run(self) -> None:
            (self.model.scheduler if self.model is not None else self.scheduler).clear()
            self.inputs = None
            self.input_info = None

        def _save(self, made: torch.Tensor, request: InputInfo) -> torch.Tensor | None:
            if request.return_result_tensor:
                return made
            if request.save_result_path:
                Path(request.save_result_path).write_bytes(made.contiguous().numpy().tobytes())
            return None

    return DefaultRunner


def runners(mixin: type, default: type | None = None) -> tuple[type[Any], type[Any]]:
    """Return new classes ``WanRunner`` and ``QwenImageRunner`` over a mixin: the native one, or ours."""
    default = default_runner(base_runner()) if default is None else default

    class WanRunner(mixin, default):  # type: ignore[misc,valid-type]
        def init_modules(self) -> None:
            if self.config.get("disagg_mode"):
                self.init_disagg(self.config)
            super().init_modules()

        def run_input_encoder(self) -> dict[str, Any]:
            request, config = self.input_info, self.config
            height, width = request.target_shape or (config["target_height"], config["target_width"])
            frames = 1 + (config["target_video_length"] - 1) // 4
            request.latent_shape = [Z_DIM, frames, height // 8, width // 8]
            image = None
            if config["task"] == "i2v":
                image = {
                    "clip_encoder_out": _noise("clip" + request.image_path, *CLIP_SHAPE, dtype=DTYPE),
                    "vae_encoder_out": _noise(
                        "vae" + request.image_path, Z_DIM + 4, *request.latent_shape[1:], dtype=DTYPE
                    ),
                }
            return {"text_encoder_output": self.run_text_encoder(request), "image_encoder_output": image}

        def load_text_encoder(self) -> list[TextEncoder]:
            self.loaded.append(TextEncoder(self.config))
            return self.loaded[-1:]

        def run_text_encoder(self, request: Any) -> dict[str, Any]:
            self._may_fail("text_encoder")
            if self.config.get("lazy_load", False):
                self.text_encoders = self.load_text_encoder()
            contexts = []
            for text in (request.prompt, request.negative_prompt):
                (rows,) = self.text_encoders[0].infer([text])
                room = rows.new_zeros(self.config["text_len"] - rows.size(0), rows.size(1))
                contexts.append(torch.stack([torch.cat([rows, room])]))
            if self.config.get("lazy_load", False):
                del self.text_encoders[0]
            return {"context": contexts[0], "context_null": contexts[1] if self.config.get("enable_cfg") else None}

        def init_run(self) -> None:
            self.model.scheduler.prepare(self.input_info.seed, self.input_info.latent_shape)
            if self.config.get("model_cls") == "wan2.2" and self.config["task"] == "i2v":
                self.inputs["image_encoder_output"]["vae_encoder_out"] = None

        def run_vae_decoder(self, latents: torch.Tensor) -> torch.Tensor:
            self._may_fail("vae")
            made: torch.Tensor = self.vae_decoder.decode(latents.to(DTYPE))
            return made

        def process_images_after_vae_decoder(self) -> dict[str, Any]:
            return {"video": self._save(self.gen_video, self.input_info)}

        def _run_transformer_role(self) -> Any:
            self.init_run()
            latents = self.run_segment()
            if self._disagg_p2_sender is not None:
                self.send_transformer_outputs(latents)
                self.end_run()
                return None
            self.gen_video = self.run_vae_decoder(latents)
            made = self.process_images_after_vae_decoder()
            self.end_run()
            return made

        def run_pipeline(self, input_info: Any) -> Any:
            self.input_info = input_info
            role = self.config.get("disagg_mode")
            if role == "encoder":
                self.inputs = self.run_input_encoder()
                self.send_encoder_outputs(self.inputs, list(self.input_info.latent_shape))
                return None
            if role == "transformer":
                self.inputs = self.receive_encoder_outputs()
                if self.inputs.get("latent_shape"):
                    self.input_info.latent_shape = self.inputs["latent_shape"]
                return self._run_transformer_role()
            if role == "decode":
                self.gen_video = self.run_vae_decoder(self.receive_transformer_outputs())
                return self.process_images_after_vae_decoder()
            self.inputs = self.run_input_encoder()
            self.init_run()
            self.gen_video = self.run_vae_decoder(self.run_segment())
            made = self.process_images_after_vae_decoder()
            self.end_run()
            return made

    class QwenImageRunner(mixin, default):  # type: ignore[misc,valid-type]
        def init_modules(self) -> None:
            if self.config.get("disagg_mode"):
                self.init_disagg(self.config)
            super().init_modules()

        def set_config(self, config_modify: Mapping[str, Any]) -> None:
            super().set_config(config_modify)
            self.apply_disagg_request_overrides(config_modify)

        def load_text_encoder(self) -> list[TextEncoder]:
            self.loaded.append(TextEncoder(self.config))
            return self.loaded[-1:]

        def run_input_encoder(self) -> dict[str, Any]:
            self._may_fail("text_encoder")
            request = self.input_info
            texts = [request.prompt, request.negative_prompt] if self.config.get("enable_cfg") else [request.prompt]
            images = [request.image_path.split(",")] if self.config["task"] == "i2i" else []
            embeds = [self.text_encoders[0].infer([text], *images)[0].unsqueeze(0) for text in texts]
            request.txt_seq_lens = [one.shape[1] for one in embeds]
            text: dict[str, Any] = dict(zip(("prompt_embeds", "negative_prompt_embeds"), embeds, strict=False))
            if self.config["task"] == "t2i":
                return {"text_encoder_output": text, "image_encoder_output": None}
            paths = request.image_path.split(",")
            text["image_info"] = {
                "vae_image_list": [_noise("image" + path, 3, 8, 8) for path in paths],
                "vae_image_info_list": [(32 + 16 * place, 48) for place in range(len(paths))],
            }
            latents = [
                {"image_latents": _noise("latents" + path, 1, 6 + place, 64, dtype=DTYPE)}
                for place, path in enumerate(paths)
            ]
            return {"text_encoder_output": text, "image_encoder_output": latents}

        def set_target_shape(self) -> None:
            request, scale = self.input_info, self.config["vae_scale_factor"]
            if self.config.get("disagg_mode") == "transformer" and self.inputs.get("latent_shape"):
                shape = self.inputs["latent_shape"]
                request.target_shape = tuple(shape)
                request.auto_height, request.auto_width = shape[-2] * scale, shape[-1] * scale
                return
            height, width = request.target_shape or (self.config["target_height"], self.config["target_width"])
            request.auto_height, request.auto_width = height, width
            request.target_shape = (1, 1, Z_DIM, 2 * (height // (scale * 2)), 2 * (width // (scale * 2)))

        def set_img_shapes(self) -> None:
            request, patch = self.input_info, self.config["vae_scale_factor"] * 2
            shapes = [(1, request.auto_height // patch, request.auto_width // patch)]
            if self.config["task"] == "i2i":
                info = self.inputs["text_encoder_output"]["image_info"]
                shapes += [(1, height // patch, width // patch) for height, width in info["vae_image_info_list"]]
            request.image_shapes = [shapes]

        def run_dit(self) -> torch.Tensor:
            *_, channels, height, width = self.input_info.target_shape
            self.model.scheduler.prepare(
                self.input_info.seed, [1, (height // 2) * (width // 2), channels * 4]
            )  # packed, a sequence of patches
            return self.run_segment()

        def run_vae_decoder(self, latents: torch.Tensor) -> torch.Tensor:
            self._may_fail("vae")
            _, height, width = self.input_info.image_shapes[0][0]
            made: torch.Tensor = self.vae_decoder.decode(latents.reshape(-1, height, width))
            return made

        def run_pipeline(self, input_info: Any) -> Any:
            self.input_info = input_info
            role = self.config.get("disagg_mode")
            if role == "decode":
                latents = self.receive_transformer_outputs()
                patch = self.config["vae_scale_factor"] * 2
                sizes = self._p2_receive_meta
                input_info.auto_height, input_info.auto_width = int(sizes["auto_height"]), int(sizes["auto_width"])
                input_info.image_shapes = [[(1, input_info.auto_height // patch, input_info.auto_width // patch)]]
                return self._end(self.run_vae_decoder(latents), input_info)
            self.inputs = self.receive_encoder_outputs() if role == "transformer" else self.run_input_encoder()
            self.set_target_shape()
            self.set_img_shapes()
            if role == "encoder":
                self.send_encoder_outputs(self.inputs, list(self.input_info.target_shape))
                return None
            latents = self.run_dit()
            if getattr(self, "_disagg_p2_sender", None) is not None:
                self.send_transformer_outputs(latents)
                self.end_run()
                return None
            return self._end(self.run_vae_decoder(latents), input_info)

        def _end(self, image: torch.Tensor, input_info: Any) -> dict[str, Any]:
            self.end_run()
            return {"images": self._save(image, input_info)}

    for made in (WanRunner, QwenImageRunner):
        made.__qualname__ = made.__name__
    return WanRunner, QwenImageRunner


def settings_of(
    role: str | None, *, task: str = "t2v", stages: int = 3, disagg: Mapping[str, Any] | None = None, **more: Any
) -> LockableDict:
    """Return a role's configuration as the host makes it of its JSON; ``None`` for one process that does all.

    Args:
        role: ``encoder``, ``transformer``, ``decode`` or ``None``.
        task: One of `INPUTS`.
        stages: 2 where the transformer decodes itself.
        disagg: More for ``disagg_config``: the connector, a `Wire`.
        **more: More for the configuration.
    """
    config: dict[str, Any] = {
        "model_cls": "wan2.1" if task.endswith("v") else "qwen_image",
        "task": task,
        "infer_steps": 2,
        "enable_cfg": True,
        "text_len": 8,
        "target_video_length": 5,
        "target_height": 32,
        "target_width": 48,
        "vae_scale_factor": 8,
        "parallel": False,
        **more,
    }
    if role is not None:
        rooms: dict[str, Any] = {"bootstrap_addr": "127.0.0.1", "bootstrap_room": 0}
        rooms |= {"sender_engine_rank": 0, "receiver_engine_rank": 1}
        if role == "transformer" and stages == 3:
            rooms |= {"decoder_engine_rank": 2, "decoder_bootstrap_room": 1}
        if role == "decode":
            rooms |= {"bootstrap_room": 1, "sender_engine_rank": 1, "receiver_engine_rank": 2}
        config |= {"disagg_mode": role, "disagg_config": {**rooms, **(disagg or {})}}
    return LockableDict(config)


def runner_of(config: LockableDict, mixin: type) -> Any:
    """Return a runner as the host's `init_runner` makes it: by its ``model_cls``, with its modules."""
    wan, qwen = runners(mixin)
    made = (wan if config["model_cls"].startswith("wan") else qwen)(config)
    made.init_modules()
    return made


class Worker:
    """A role of the host's server: one request after the other, what a request said stays for the next one."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.input_info = init_empty_input_info(runner.config["task"])

    def process(self, task_id: str = "unknown", **request: Any) -> dict[str, Any]:
        """Run a request, as the body of a POST says it, and return what the host would say of it."""
        given = {"task_id": task_id, **request, "task": self.runner.config["task"]}
        given.setdefault("return_result_tensor", True)
        given.setdefault("negative_prompt", "")
        try:
            update_input_info_from_dict(self.input_info, given)
            self.runner.set_config(given)
            made = self.runner.run_pipeline(self.input_info)
        except Exception as exc:
            return {"task_id": task_id, "status": "failed", "error": str(exc), "error_type": type(exc).__name__}
        return {"task_id": task_id, "status": "success", "pipeline_return": made}


def load_platform_plugins() -> list[str]:
    """Call the plugins of the host's group, as it does: one that raises is passed over.

    Returns:
        What those that raised said.
    """
    failed = []
    for point in importlib.metadata.entry_points(group="lightx2v.platform_plugins"):
        try:
            point.load()()
        except Exception as exc:
            failed.append(f"{type(exc).__name__}: {exc}")
    return failed


_MIXIN = """
import lightx2v_double
from lightx2v_platform.base.global_var import AI_DEVICE
from lightx2v.utils.envs import GET_DTYPE
DisaggMixin = lightx2v_double.native_mixin()
"""
_RUNNER = """
import lightx2v_double
from lightx2v.disagg.disagg_mixin import DisaggMixin
from lightx2v.models.runners.default_runner import DefaultRunner
{name} = lightx2v_double.runners(DisaggMixin, DefaultRunner)[{place}]
{name}.__module__ = __name__
"""
_PROGRAM = """
import json, sys
from lightx2v.models.runners.wan.wan_runner import WanRunner
if __name__ == "__main__":
    mixin = [cls.__module__ + "." + cls.__name__ for cls in WanRunner.__mro__ if cls.__name__ == "DisaggMixin"]
    print(json.dumps({{"program": "{program}", "argv": sys.argv, "mixin": mixin}}))
"""

#: Path to text; `lightx2v.__init__` loads the plugins first, then everything.
TREE: Mapping[str, str] = {
    "lightx2v_platform/__init__.py": "",
    "lightx2v_platform/base/__init__.py": "",
    "lightx2v_platform/base/global_var.py": f"AI_DEVICE = {DEVICE!r}\nPLATFORM = {DEVICE!r}\n",
    "lightx2v_platform/set_ai_device.py": (
        "import lightx2v_double\nplugins_failed = lightx2v_double.load_platform_plugins()\n"
    ),
    "lightx2v/__init__.py": (
        '__version__ = "0.1.0"\n'
        "import lightx2v_platform.set_ai_device\n"
        "import lightx2v.models.runners.wan.wan_runner\n"
        "import lightx2v.models.runners.qwen_image.qwen_image_runner\n"
    ),
    "lightx2v/utils/__init__.py": "",
    "lightx2v/utils/envs.py": "from lightx2v_double import DTYPE\ndef GET_DTYPE():\n    return DTYPE\n",
    "lightx2v/utils/lockable_dict.py": "from lightx2v_double import LockableDict\n",
    "lightx2v/utils/input_info.py": "from lightx2v_double import init_empty_input_info, update_input_info_from_dict\n",
    "lightx2v/disagg/__init__.py": "",
    "lightx2v/disagg/disagg_mixin.py": _MIXIN,
    "lightx2v/disagg/services/__init__.py": "",
    "lightx2v/disagg/services/base.py": (
        "from abc import ABC\nclass BaseService(ABC):\n    def __init__(self):\n        super().__init__()\n"
    ),
    "lightx2v/models/__init__.py": "",
    "lightx2v/models/runners/__init__.py": "",
    "lightx2v/models/runners/base_runner.py": "import lightx2v_double\nBaseRunner = lightx2v_double.base_runner()\n",
    "lightx2v/models/runners/default_runner.py": (
        "import lightx2v_double\n"
        "from lightx2v.models.runners.base_runner import BaseRunner\n"
        "DefaultRunner = lightx2v_double.default_runner(BaseRunner)\n"
    ),
    "lightx2v/models/runners/wan/__init__.py": "",
    "lightx2v/models/runners/wan/wan_runner.py": _RUNNER.format(name="WanRunner", place=0),
    "lightx2v/models/runners/qwen_image/__init__.py": "",
    "lightx2v/models/runners/qwen_image/qwen_image_runner.py": _RUNNER.format(name="QwenImageRunner", place=1),
    "lightx2v/infer.py": _PROGRAM.format(program="infer"),
    "lightx2v/server/__init__.py": "",
    "lightx2v/server/__main__.py": _PROGRAM.format(program="server"),
}


def write_tree(folder: Path, *, changes: Mapping[str, str] | None = None, entry_point: str | None = None) -> Path:
    """Write the double's packages into a folder, for ``sys.path`` or PYTHONPATH (with this file's folder beside it).

    Args:
        folder: Where to.
        changes: Files of `TREE` with other text.
        entry_point: ``module:function``, written as a distribution's that plugs into the host.
    """
    for name, text in {**TREE, **(changes or {})}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if entry_point is not None:
        about = folder / "planted_plugin-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-plugin\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[lightx2v.platform_plugins]\nplanted = {entry_point}\n")
    return folder


def _host_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("lightx2v", "lightx2v_platform")]


@contextmanager
def installed(
    folder: Path, *, changes: Mapping[str, str] | None = None, plugins: tuple[Callable[[], Any], ...] = ()
) -> Iterator[None]:
    """Make ``import lightx2v`` find the double in this process, with these plugins and no others.

    All import state of the host, and the finders, are afterwards as they were before.
    """

    @dataclass(frozen=True)
    class Point:
        plugin: Callable[[], Any]

        def load(self) -> Callable[[], Any]:
            return self.plugin

    def entry_points(**_: Any) -> list[Point]:
        return [Point(plugin) for plugin in plugins]

    with pytest.MonkeyPatch.context() as patch:
        for name in _host_modules():
            patch.delitem(sys.modules, name)
        patch.setattr(sys, "meta_path", list(sys.meta_path))
        patch.syspath_prepend(str(write_tree(folder, changes=changes)))
        patch.setattr(importlib.metadata, "entry_points", entry_points)
        try:
            yield
        finally:
            for name in _host_modules():
                del sys.modules[name]
