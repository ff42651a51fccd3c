"""GenerationRequest: what a client asks for, as plain values.

Owns the fields of a request, their own limits and their wire form. What a model family adds to the limits (multiples,
frame counts, defaults) is in `moonrelay_diffusers.families`. Imports neither torch nor diffusers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from moonrelay.config import unknown_key
from moonrelay.errors import ConfigError

#: A value of a request's wire form.
Plain = str | int | float | None

_WHOLE = ("seed", "height", "width", "num_frames", "num_inference_steps", "max_sequence_length")
_REAL = ("guidance_scale", "guidance_scale_2")
_REQUIRED = ("prompt", "seed")
_TEXT = ("prompt", "negative_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One video or image to make.

    ``None`` means "the family's default", which `families.base.PipelineFamily.resolve` fills in.

    Attributes:
        prompt: What to show; must not be blank.
        negative_prompt: What to avoid. ``None``: Wan takes the empty string; Qwen-Image goes without guidance.
        seed: Seed of the noise, 0 to 2**63-1. Equal seeds give equal bits.
        height: Height of a frame in pixels.
        width: Width of a frame in pixels.
        num_frames: Frames of the video; 1 for an image.
        num_inference_steps: Denoising steps.
        guidance_scale: Strength of guidance; guidance is off at 1 and below. Qwen-Image calls it ``true_cfg_scale``.
        guidance_scale_2: The same for the second transformer of Wan2.2; ``None`` takes ``guidance_scale``.
        max_sequence_length: Longest prompt in tokens; a longer one is cut.

    Raises:
        ConfigError: A value is of the wrong type or out of range; ``context['field']`` names it.
    """

    prompt: str
    negative_prompt: str | None = None
    seed: int = 0
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    max_sequence_length: int | None = None

    def __post_init__(self) -> None:
        for name in _TEXT:
            _check_text(name, getattr(self, name))
        if not self.prompt.strip():
            message = f"prompt={self.prompt!r} is blank; say what to show"
            raise ConfigError(message, field="prompt")
        for name in _WHOLE:
            _check_whole(name, getattr(self, name))
        for name in _REAL:
            _check_real(name, getattr(self, name))

    def to_payload(self) -> dict[str, Plain]:
        """Return the request as plain values; `from_payload` gives an equal request back."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_payload(cls, payload: Mapping[str, object]) -> GenerationRequest:
        """Rebuild a request from `to_payload`'s form.

        Args:
            payload: Field names to values; ``prompt`` is required.

        Raises:
            ConfigError: Not a mapping, a field that a request does not have (the nearest is suggested), ``prompt``
                missing, or a value that the field does not take.
        """
        if not isinstance(payload, Mapping):
            message = f"a request must be a mapping of fields, not {type(payload).__name__}"
            raise ConfigError(message, field="request")
        names = {field.name for field in dataclasses.fields(cls)}
        for key in payload:
            if key not in names:
                raise ConfigError(unknown_key(key, names, cls.__name__), field=str(key))
        if "prompt" not in payload:
            message = "prompt is missing; say what to show"
            raise ConfigError(message, field="prompt")
        return cls(**payload)  # type: ignore[arg-type]  # __post_init__ checks each type

    def params(self) -> StageParams:
        """Return what the stages after encode need.

        Raises:
            ConfigError: A field is still ``None``; resolve the request first.
        """
        return StageParams.from_payload(self.to_payload())


def _check_text(name: str, value: object) -> None:
    if value is None and name not in _REQUIRED:
        return
    if not isinstance(value, str):
        message = f"{name}={value!r} must be text, not {type(value).__name__}"
        raise ConfigError(message, field=name)


def _check_whole(name: str, value: object) -> None:
    if value is None and name not in _REQUIRED:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        message = f"{name}={value!r} must be a whole number, not {type(value).__name__}"
        raise ConfigError(message, field=name)
    low, high = (0, 2**63 - 1) if name == "seed" else (1, 2**20)
    if not low <= value <= high:
        message = f"{name}={value} is out of range; use {low} to {high}"
        raise ConfigError(message, field=name)


def _check_real(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        message = f"{name}={value!r} must be a number, not {type(value).__name__}"
        raise ConfigError(message, field=name)
    if not math.isfinite(value) or not 0 <= value <= 1000:
        message = f"{name}={value!r} is out of range; use 0 to 1000 (1 and below switch guidance off)"
        raise ConfigError(message, field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParams:
    """The plain parameters that travel with tensors from stage to stage: a resolved request without its text.

    Attributes are those of `GenerationRequest`, none of them "the default" any more.
    """

    seed: int
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    max_sequence_length: int

    def __post_init__(self) -> None:
        for name in _WHOLE:
            _check_whole(name, _present(name, getattr(self, name)))
        _check_real("guidance_scale", _present("guidance_scale", self.guidance_scale))
        _check_real("guidance_scale_2", self.guidance_scale_2)

    @classmethod
    def from_payload(cls, params: Mapping[str, object]) -> StageParams:
        """Take the parameters out of a payload; entries that this version does not know are left alone.

        Raises:
            ConfigError: One is missing, or is not what it must be; ``context['field']`` names it.
        """
        return cls(**{field.name: params.get(field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]

    def to_payload(self) -> dict[str, Plain]:
        """Return the parameters as plain values."""
        return dataclasses.asdict(self)


def _present(name: str, value: object) -> object:
    if value is None:
        message = f"{name} is missing from the payload's params; publish what the encode stage gave"
        raise ConfigError(message, field=name)
    return value
