"""What a request may say: bodies of OpenAI's image and video requests to an `Order`, or a refusal by field.

Owns names, bounds and defaults of the fields. What this front does not do is refused, never left out silently.
Nothing here knows HTTP or the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from moonrelay.config import require_positive, unknown_key
from moonrelay.errors import ConfigError
from moonrelay_vllm_omni.serve.errors import BadRequest, NotFound

#: Seeds are drawn below this where a request names none.
SEEDS: Final = 1 << 31

#: Fields of OpenAI's that change nothing here, with the values that say so.
_IMAGE_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": ("auto", "opaque"),
    "moderation": ("auto",),
    "output_format": ("png",),
    "partial_images": (0,),
    "quality": ("auto", "standard"),
    "response_format": ("b64_json",),
    "stream": (False,),
}
_REMEDIES: Final = {
    "response_format": "this server keeps no images; use b64_json",
    "input_reference": "the pipeline takes text only; leave it out",
}
_COMMON: Final = (
    "model",
    "prompt",
    "size",
    "user",
    "seed",
    "negative_prompt",
    "num_inference_steps",
    "guidance_scale",
    "true_cfg_scale",
)
_IMAGE_KEYS: Final = (*_COMMON, "n", *_IMAGE_FIXED)
_VIDEO_KEYS: Final = (*_COMMON, "seconds", "num_frames", "fps", "input_reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what is taken on.

    Attributes:
        default_size: Width and height where a request names none, or ``auto``.
        max_pixels: Of one image or frame.
        side_step: Width and height are multiples of this; the host would round others down without a word.
        max_images: Of one request.
        max_steps: Denoising steps.
        max_prompt_chars: Of a prompt and of a negative prompt. The model's own bound in tokens holds besides.
        default_fps: Frames a second where a request names none.
        default_seconds: Duration where a request names none.
        max_frames: Of one video.
        frame_step: A video has a multiple of this, and one, as the models' VAEs need.
    """

    default_size: tuple[int, int] = (1024, 1024)
    max_pixels: int = 2048 * 2048
    side_step: int = 16
    max_images: int = 10
    max_steps: int = 200
    max_prompt_chars: int = 32_000
    default_fps: int = 16
    default_seconds: float = 5.0
    max_frames: int = 257
    frame_step: int = 4

    def __post_init__(self) -> None:
        names = ("max_pixels", "side_step", "max_images", "max_steps", "max_prompt_chars", "default_fps")
        require_positive(self, *names, "default_seconds", "max_frames", "frame_step")
        width, height = self.default_size
        if width % self.side_step or height % self.side_step or not 0 < width * height <= self.max_pixels:
            message = (
                f"default_size={width}x{height}: must be multiples of {self.side_step}, "
                f"and at most max_pixels={self.max_pixels}"
            )
            raise ConfigError(message, field="default_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One image or one video to make."""

    prompt: str
    width: int
    height: int
    seed: int
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    num_frames: int = 1
    fps: int = 0

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def seconds(self) -> str:
        """Duration as OpenAI writes it: a number in a string."""
        return f"{self.num_frames / self.fps:g}" if self.fps else "0"


def image_orders(body: Mapping[str, Any], limits: Limits, *, model: str, seed: int) -> list[Order]:
    """Return what an image request asks for: ``n`` orders, with seeds one after the other.

    Args:
        body: The request's JSON object.
        limits: Bounds and defaults.
        model: The name served.
        seed: Drawn by the caller, for a request that names none.

    Raises:
        BadRequest: A field is unknown, wrong, out of bounds, or asks for what is not done here.
        NotFound: Another model is asked for.
    """
    _known(body, _IMAGE_KEYS, "image request")
    for name, allowed in _IMAGE_FIXED.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            words = " or ".join(repr(one) for one in allowed)
            raise _wrong(name, value, _REMEDIES.get(name, f"only {words} is offered here"))
    first = _order(body, limits, model=model, seed=seed)
    count = _integer(body, "n", 1, limits.max_images)
    return [replace(first, seed=(first.seed + number) % SEEDS) for number in range(1 if count is None else count)]


def video_order(body: Mapping[str, Any], limits: Limits, *, model: str, seed: int) -> Order:
    """Return what a video request asks for. Arguments and errors as of `image_orders`; numbers may be strings."""
    _known(body, _VIDEO_KEYS, "video request")
    if body.get("input_reference") is not None:
        raise _wrong("input_reference", "a file", _REMEDIES["input_reference"])
    order = _order(body, limits, model=model, seed=seed)
    fps = _integer(body, "fps", 1, 120) or limits.default_fps
    frames = _integer(body, "num_frames", 1, limits.max_frames)
    if frames is not None:
        if body.get("seconds") is not None:
            raise _wrong("seconds", body["seconds"], "num_frames says it already; leave one out")
        if frames % limits.frame_step != 1 % limits.frame_step:
            near = frames // limits.frame_step * limits.frame_step + 1
            raise _wrong("num_frames", frames, f"must be a multiple of {limits.frame_step}, and one; {near} would do")
    else:
        seconds = _number(body, "seconds", 1 / fps, limits.max_frames / fps)
        wanted = round((limits.default_seconds if seconds is None else seconds) * fps)
        frames = min(wanted, limits.max_frames - 1) // limits.frame_step * limits.frame_step + 1
    return replace(order, num_frames=frames, fps=fps)


def _order(body: Mapping[str, Any], limits: Limits, *, model: str, seed: int) -> Order:
    asked = body.get("model")
    if asked is not None and asked != model:
        message = f"model={asked!r} is not served here; use {model!r}, or leave it out"
        raise NotFound(message, param="model")
    prompt = _text(body, "prompt", limits.max_prompt_chars)
    if prompt is None or not prompt.strip():
        raise _wrong("prompt", prompt, "say what is to be seen")
    width, height = _size(body, limits)
    chosen = _integer(body, "seed", 0, SEEDS - 1)
    return Order(
        prompt=prompt,
        negative_prompt=_text(body, "negative_prompt", limits.max_prompt_chars),
        width=width,
        height=height,
        seed=seed if chosen is None else chosen,
        num_inference_steps=_integer(body, "num_inference_steps", 1, limits.max_steps),
        guidance_scale=_number(body, "guidance_scale", 0.0, 100.0),
        true_cfg_scale=_number(body, "true_cfg_scale", 0.0, 100.0),
    )


def _wrong(name: str, value: object, remedy: str) -> BadRequest:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return BadRequest(f"{name}={shown}: {remedy}", param=name)


def _known(body: Mapping[str, Any], valid: tuple[str, ...], owner: str) -> None:
    for key in body:
        if key not in valid:
            raise BadRequest(unknown_key(key, valid, owner), param=str(key))


def _text(body: Mapping[str, Any], name: str, longest: int) -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise _wrong(name, value, "must be a string")
    if len(value) > longest:
        raise _wrong(name, value, f"has {len(value)} characters; at most {longest} are taken")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(name, value, "holds half a character (a lone surrogate), which no tokenizer takes") from None
    return value


def _number(body: Mapping[str, Any], name: str, least: float, most: float) -> float | None:
    value = body.get(name)
    if isinstance(value, str):  # a form has no numbers, and OpenAI writes seconds as a string
        try:
            value = float(value)
        except ValueError:
            raise _wrong(name, value, "must be a number") from None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(name, value, "must be a number")
    if not least <= value <= most:
        raise _wrong(name, value, f"must be between {least:g} and {most:g}")
    return float(value)


def _integer(body: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = body.get(name)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,20}", value):
        value = int(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "must be an integer")
    if not least <= value <= most:
        raise _wrong(name, value, f"must be between {least} and {most}")
    return value


def _size(body: Mapping[str, Any], limits: Limits) -> tuple[int, int]:
    value = body.get("size")
    if value is None or value == "auto":
        return limits.default_size
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", value) if isinstance(value, str) else None
    if found is None:
        raise _wrong("size", value, "must be WIDTHxHEIGHT, such as 1024x1024, or auto")
    width, height = int(found[1]), int(found[2])
    step = limits.side_step
    if not width or not height or width % step or height % step:
        near = "x".join(str(max(step, side // step * step)) for side in (width, height))
        raise _wrong("size", value, f"width and height must be multiples of {step}; {near} would do")
    if width * height > limits.max_pixels:
        raise _wrong("size", value, f"has {width * height} pixels; at most {limits.max_pixels} are made")
    return width, height
