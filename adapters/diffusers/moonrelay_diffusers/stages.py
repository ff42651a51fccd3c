"""Loads one stage of a model.

Owns the way in: a model's name and a stage's name become a runner. Tensors pass through the runners, not through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, overload

from moonrelay.errors import ConfigError
from moonrelay_diffusers.families import family_named
from moonrelay_diffusers.families.base import (
    STAGES,
    DecodeRunner,
    DenoiseRunner,
    EncodeRunner,
    Placement,
    Stage,
    StageRunner,
)
from moonrelay_diffusers.model import inspect_model
from moonrelay_diffusers.request import GenerationRequest

DTypes = str | Mapping[str, str] | None


@overload
def load_stage(
    model: str, stage: Literal["encode"], *, device: str = ..., dtype: DTypes = ..., family: str | None = ...
) -> EncodeRunner: ...
@overload
def load_stage(
    model: str, stage: Literal["denoise"], *, device: str = ..., dtype: DTypes = ..., family: str | None = ...
) -> DenoiseRunner: ...
@overload
def load_stage(
    model: str, stage: Literal["decode"], *, device: str = ..., dtype: DTypes = ..., family: str | None = ...
) -> DecodeRunner: ...
@overload
def load_stage(
    model: str, stage: Stage, *, device: str = ..., dtype: DTypes = ..., family: str | None = ...
) -> StageRunner: ...


def load_stage(
    model: str, stage: Stage, *, device: str = "cpu", dtype: DTypes = None, family: str | None = None
) -> StageRunner:
    """Load the modules of one stage, and of no other.

    Args:
        model: A folder that holds ``model_index.json``, or the id of a repository on the model hub.
        stage: ``encode``, ``denoise`` or ``decode``.
        device: Where the modules live.
        dtype: See `Placement.dtype`; every stage of a deployment, and the reference, must be given the same.
        family: Name of the family, where ``model_index.json`` names a pipeline class that is none of ours but fits one.

    Blocks: while files are read, or downloaded.

    Raises:
        ConfigError: No such model, stage or family; the message lists what is supported.
    """
    if stage not in STAGES:
        message = f"stage={stage!r} is not known; use one of {', '.join(STAGES)}"
        raise ConfigError(message, field="stage")
    info = inspect_model(model, family=family)
    found = family_named(info.family)
    placement = Placement(device=device, dtype=dtype)
    if stage == "encode":
        return found.load_encode(info, placement)
    if stage == "denoise":
        return found.load_denoise(info, placement)
    return found.load_decode(info, placement)


def resolve_request(model: str, request: GenerationRequest, *, family: str | None = None) -> GenerationRequest:
    """Hold a request against a model and fill in its family's defaults; reads the model's JSON files, loads no module.

    Raises:
        ConfigError: The model cannot do it; ``context['field']`` says what.
    """
    info = inspect_model(model, family=family)
    return family_named(info.family).resolve(request, info)
