"""The families of pipelines that can be cut into stages, by name and by pipeline class.

Owns the list; a family's own module says how it is cut. Imports neither torch nor diffusers.
"""

from __future__ import annotations

from moonrelay.errors import ConfigError
from moonrelay_diffusers.families.base import PipelineFamily
from moonrelay_diffusers.families.qwen_image import QwenImageFamily
from moonrelay_diffusers.families.wan import WanFamily

FAMILIES: tuple[PipelineFamily, ...] = (WanFamily(), QwenImageFamily())


def supported() -> str:
    """Return the supported families in words, for messages."""
    return ", ".join(f"{family.name} ({family.pipeline_class})" for family in FAMILIES)


def family_named(name: str) -> PipelineFamily:
    """Return the family of that name.

    Raises:
        ConfigError: There is none; the message lists those that are.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    message = f"family={name!r} is not known; supported: {supported()}"
    raise ConfigError(message, field="family")


def family_of_class(pipeline_class: str, model: str) -> PipelineFamily:
    """Return the family of a pipeline class.

    Raises:
        ConfigError: No family has that class; the message lists those that are supported.
    """
    for family in FAMILIES:
        if family.pipeline_class == pipeline_class:
            return family
    message = f"model={model!r} is a {pipeline_class}, which is not supported; supported: {supported()}"
    raise ConfigError(message, field="model")
