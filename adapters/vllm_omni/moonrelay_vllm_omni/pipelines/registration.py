"""Which pipelines the plugin adds to the host, and what their stages hand to one another.

Owns names and topology. Names of payload parts are those that the host's own pipelines look for in a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

logger = logging.getLogger(__name__)

#: What the names of a family's stages end with.
ROLES: Final = ("Encode", "Denoise", "EncodeDenoise", "Decode")

_NEXT_PROMPT: Final = "moonrelay_vllm_omni.pipelines.handover.next_prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model of the host in stages.

    Attributes:
        pipeline: The ``pipeline`` of a deploy YAML with three stages; with ``_decode_apart`` behind it, with two.
        module: Where its stages are, and what the host calls before and after them.
        classes: What their names begin with.
        output: What the host calls the last stage's product.
        condition: What the encode stage hands over. All of it always: the host takes a part that is declared and
            missing for a loss.
        result: What the denoise stage hands over.
        pre_process: Whether the host prepares requests for the denoise stage.
    """

    pipeline: str
    module: str
    classes: str
    output: str
    condition: tuple[str, ...]
    result: tuple[str, ...]
    pre_process: bool = False


FAMILIES: Final = (
    Family(
        pipeline="moonrelay_qwen_image",
        module="moonrelay_vllm_omni.pipelines.qwen_image",
        classes="MoonrelayQwenImage",
        output="image",
        condition=("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask"),
        result=("latents", "image_size"),
    ),
    Family(
        pipeline="moonrelay_wan",
        module="moonrelay_vllm_omni.pipelines.wan",
        classes="MoonrelayWan",
        output="video",
        condition=("prompt_embeds", "negative_prompt_embeds"),
        result=("latents",),
        pre_process=True,
    ),
)


#: How a family is divided, by what the pipeline's name ends with.
_DIVISIONS: Final = ("", "_decode_apart")


def names() -> tuple[str, ...]:
    """Return what a deploy YAML may name as its ``pipeline``."""
    return tuple(family.pipeline + suffix for family in FAMILIES for suffix in _DIVISIONS)


def register() -> None:
    """Make the pipelines known to the host, in this process. Idempotent.

    Raises:
        ImportError: The host lacks what its diffusion engine needs.

    Threads: any.
    """
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline

    for family in FAMILIES:
        if family.pipeline in OMNI_PIPELINES:
            continue
        _register_models(family)
        for pipeline in _pipelines(family):
            register_pipeline(pipeline)
        logger.debug("registered %s", family.pipeline)


def _register_models(family: Family) -> None:
    from vllm_omni.diffusion.registry import register_diffusion_model

    for role in ROLES:
        name = family.classes + role
        register_diffusion_model(
            name,
            family.module,
            name,
            pre_process_func_name="pre_process" if family.pre_process and role.endswith("Denoise") else None,
            post_process_func_name="post_process" if role == "Decode" else None,
        )


def _pipelines(family: Family) -> Iterator[Any]:
    from vllm_omni.config.stage_config import PipelineConfig

    decode = {"takes": family.result, "final_output": True, "final_output_type": family.output}
    three: list[tuple[str, dict[str, Any]]] = [
        ("Encode", {"sends": family.condition}),
        ("Denoise", {"takes": family.condition, "sends": family.result}),
        ("Decode", decode),
    ]
    two: list[tuple[str, dict[str, Any]]] = [("EncodeDenoise", {"sends": family.result}), ("Decode", decode)]
    for suffix, stages in zip(_DIVISIONS, (three, two), strict=True):
        yield PipelineConfig(
            model_type=family.pipeline + suffix,
            model_arch=family.classes + stages[-2][0],
            stages=tuple(
                _stage(number, role, family.classes + role, **more) for number, (role, more) in enumerate(stages)
            ),
        )


def _stage(
    number: int, role: str, model: str, *, takes: tuple[str, ...] = (), sends: tuple[str, ...] = (), **more: Any
) -> Any:
    from vllm_omni.config.stage_config import StageExecutionType, StagePipelineConfig

    if number:
        # Without it the host would pass a string prompt on as it is, and then not look for the payload.
        more["custom_process_input_func"] = _NEXT_PROMPT
    return StagePipelineConfig(
        stage_id=number,
        model_stage=role.lower(),
        execution_type=StageExecutionType.DIFFUSION,
        input_sources=(number - 1,) if number else (),
        model_arch=model,
        stage_input_payload_keys=takes,
        stage_output_payload_keys=sends,
        omni_kv_config={"need_recv_cache": False},
        **more,
    )
