"""What the stages of every model share: leaving out models, handing over, and looking at what was received."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from moonrelay_vllm_omni import plugin

#: Parts of a condition that an encode stage sends empty where there is nothing to avoid.
NEGATIVE: Final = ("negative_prompt_embeds", "negative_prompt_embeds_mask")
#: Tokens of the made-up condition that a denoise stage warms up with.
WARM_UP_TOKENS: Final = 64
#: What tokenizes and encodes beside the host and torch.
_LIBRARIES: Final = ("transformers", "tokenizers")


def whole_requests_only(od_config: object, stage: str) -> None:
    """Refuse the host's step-wise execution, in which a pipeline looks for no payload.

    Raises:
        ValueError: The deploy YAML asks for it.
    """
    if getattr(od_config, "step_execution", False):
        message = f"{stage} runs whole requests; take step_execution out of its deploy YAML"
        raise ValueError(message)


def keep_only(pipeline: Any, models: Iterable[str], keeps: Sequence[str]) -> None:
    """Take the models of other stages off a pipeline, and their weights out of what the host is to load."""
    for name in models:
        if name not in keeps:
            delattr(pipeline, name)
    pipeline.weights_sources = [source for source in pipeline.weights_sources if source.prefix.rstrip(".") in keeps]


def already_loaded(pipeline: Any) -> set[str]:
    """Return the names of all parameters, for the host's loader, where the constructor has read them."""
    return {name for name, _ in pipeline.named_parameters()}


def computed_by(pipeline: Any) -> dict[str, object]:
    """Return what decides the bits of a text encoder's result besides its weights and what it is given."""
    import torch

    encoder = pipeline.text_encoder
    device = torch.device(pipeline.device)
    if device.type == "cuda":
        unit: object = torch.cuda.get_device_name(device)
    else:  # what decides a sum's order
        unit = [device.type, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    return {
        "host": plugin.host_version(),
        "torch": str(torch.__version__),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "unit": unit,
        "precision": torch.get_float32_matmul_precision(),
        "encoder": type(encoder).__qualname__,
        "attention": str(getattr(encoder.config, "_attn_implementation", None)),
        "training": encoder.training,
        "weights": encoder.dtype,
    }


def handed_over(**payload: Any) -> Any:
    """Return an output that shows nothing, with a payload for the next stage."""
    import torch
    from vllm_omni.diffusion.data import DiffusionOutput

    output = DiffusionOutput(output={"payload": {"output": torch.zeros(1)}})
    # No field in 0.30, and yet what its sender reads.
    output.custom_output = payload
    return output


def additional_information(prompt: object) -> dict[str, Any]:
    """Return where the host puts what it received for a prompt; an empty dict where it put nothing."""
    held = prompt.get("additional_information") if isinstance(prompt, Mapping) else None
    return held if isinstance(held, dict) else {}


def drop_empty_negative(prompt: object) -> None:
    """Take an encode stage's word for "nothing to avoid" out of a prompt: embeddings without tokens."""
    held = additional_information(prompt)
    embeds = held.get(NEGATIVE[0])
    if embeds is not None and embeds.numel() == 0:
        for name in NEGATIVE:
            held.pop(name, None)
