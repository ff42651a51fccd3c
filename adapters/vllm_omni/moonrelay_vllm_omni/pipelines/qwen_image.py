"""Stages of Qwen-Image, each the host's own pipeline with the others' models left out.

Owns where the pipeline is cut: after ``encode_prompt`` and before the VAE. The classes are made on the first look-up of
their names, since their base is the host's; what is between the cuts is the host's code, so that the picture is the
same bit for bit. An embedding cache goes round ``encode_prompt`` of a loaded encode stage, as the host's own one does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, Final

from moonrelay_vllm_omni.pipelines.common import (
    NEGATIVE,
    WARM_UP_TOKENS,
    additional_information,
    already_loaded,
    computed_by,
    drop_empty_negative,
    handed_over,
    keep_only,
    whole_requests_only,
)
from moonrelay_vllm_omni.pipelines.conditioning import install_from

#: Names of the classes, for the host's registry.
NAMES: Final = (
    "MoonrelayQwenImageEncode",
    "MoonrelayQwenImageDenoise",
    "MoonrelayQwenImageEncodeDenoise",
    "MoonrelayQwenImageDecode",
)

_MODELS: Final = ("text_encoder", "transformer", "vae")


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return classes()[name]
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def post_process(od_config: object) -> Callable[..., Any]:
    """Return what makes images of a decode stage's output: the host's own function."""
    from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import get_qwen_image_post_process_func

    made: Callable[..., Any] = get_qwen_image_post_process_func(od_config)
    return made


@cache
def classes() -> Mapping[str, type[Any]]:
    """Return the stages' classes by name; the same ones every time. Imports the host's diffusion engine."""
    import torch
    from vllm_omni.diffusion.models.qwen_image.pipeline_qwen_image import QwenImagePipeline
    from vllm_omni.diffusion.utils.size_utils import normalize_min_aligned_size

    class Stage(QwenImagePipeline):  # type: ignore[misc]
        """The pipeline with only the models that the stage needs.

        All three are read at the start, by the host's constructor; the memory of the others is given back after it.
        """

        supports_request_batch = False
        supports_step_execution = False
        keeps: ClassVar[tuple[str, ...]] = ()

        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            whole_requests_only(od_config, type(self).__name__)
            super().__init__(od_config=od_config, prefix=prefix)
            self.condition_width = int(self.text_encoder.config.get_text_config().hidden_size)
            self.condition_dtype = self.text_encoder.dtype
            keep_only(self, _MODELS, self.keeps)
            if "text_encoder" in self.keeps:
                install_from(od_config, self, self.made_by())

        def made_by(self) -> dict[str, object]:
            """Return what decides a condition's bytes besides the encoder's weights and the call."""
            return {
                **computed_by(self),
                "pipeline": QwenImagePipeline.__qualname__,
                "template": self.prompt_template_encode,
                "template_start": self.prompt_template_encode_start_idx,
                "tokens": self.tokenizer_max_length,
            }

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
            if "transformer" in self.keeps:
                loaded: set[str] = super().load_weights(weights)
                return loaded
            return already_loaded(self)

        def picture_size(self, params: Any) -> tuple[int, int]:
            """Return height and width as the host's ``forward`` works them out."""
            side = self.default_sample_size * self.vae_scale_factor
            size: tuple[int, int] = normalize_min_aligned_size(
                params.height or side, params.width or side, self.vae_scale_factor * 2
            )
            return size

    class MoonrelayQwenImageEncode(Stage):
        """Prompts to embeddings."""

        keeps: ClassVar[tuple[str, ...]] = ("text_encoder",)
        _dit_modules: ClassVar[list[str]] = []
        _vae_modules: ClassVar[list[str]] = []

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            prompt = request.prompt if isinstance(request.prompt, Mapping) else {"prompt": request.prompt}
            length = request.sampling_params.max_sequence_length or self.tokenizer_max_length
            embeds, mask = self.condition(req, prompt, "prompt", length)
            if prompt.get("negative_prompt") is None and req.get_prompt_field(prompt, NEGATIVE[0]) is None:
                negative, negative_mask = embeds.new_zeros(0, embeds.shape[-1]), mask.new_zeros(0)
            else:
                negative, negative_mask = self.condition(req, prompt, "negative_prompt", length)
            return handed_over(
                prompt_embeds=embeds,
                prompt_embeds_mask=mask,
                negative_prompt_embeds=negative,
                negative_prompt_embeds_mask=negative_mask,
            )

        def condition(self, req: Any, prompt: Mapping[str, Any], name: str, length: int) -> tuple[Any, Any]:
            """Return embeddings and mask of one of the two prompts, without a batch dimension."""
            given, given_mask = (req.get_prompt_field(prompt, f"{name}_{part}") for part in ("embeds", "embeds_mask"))
            ready = {}
            if given is not None and given_mask is not None:
                ready = {"prompt_embeds": given[None], "prompt_embeds_mask": given_mask[None]}
            embeds, mask = self.encode_prompt(
                prompt.get(name) or "", max_sequence_length=length, prompt_name=name, **ready
            )
            return embeds[0], mask[0]

    class MoonrelayQwenImageEncodeDenoise(Stage):
        """Prompts to latents."""

        keeps: ClassVar[tuple[str, ...]] = ("text_encoder", "transformer")
        _vae_modules: ClassVar[list[str]] = []

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            drop_empty_negative(request.prompt)
            request.sampling_params.output_type = "latent"
            (output,) = super().forward(req)
            return handed_over(latents=output.output, image_size=list(self.picture_size(request.sampling_params)))

    class MoonrelayQwenImageDenoise(MoonrelayQwenImageEncodeDenoise):
        """Embeddings to latents."""

        keeps: ClassVar[tuple[str, ...]] = ("transformer",)
        _encoder_modules: ClassVar[list[str]] = []

        def encode_prompt(self, prompt: Any, *args: Any, prompt_embeds: Any = None, **more: Any) -> Any:
            if prompt_embeds is None:
                message = "the denoise stage was given no prompt_embeds, and it has no text encoder"
                raise RuntimeError(message)
            return super().encode_prompt(prompt, *args, prompt_embeds=prompt_embeds, **more)

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            if request.is_dummy_run():  # the host's warm-up: nothing was received
                shape = (WARM_UP_TOKENS, self.condition_width)
                request.prompt = {
                    "prompt": "",
                    "additional_information": {
                        "prompt_embeds": torch.zeros(shape, dtype=self.condition_dtype, device=self.device),
                        "prompt_embeds_mask": torch.ones(shape[0], dtype=torch.long, device=self.device),
                    },
                }
            return super().forward(req)

    class MoonrelayQwenImageDecode(Stage):
        """Latents to pictures."""

        keeps: ClassVar[tuple[str, ...]] = ("vae",)
        _dit_modules: ClassVar[list[str]] = []
        _encoder_modules: ClassVar[list[str]] = []

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            held = additional_information(request.prompt)
            latents, size = held.get("latents"), held.get("image_size")
            if request.is_dummy_run():
                size = self.picture_size(request.sampling_params)
                side = self.vae_scale_factor * 2
                shape = (1, (size[0] // side) * (size[1] // side), self.vae.config.z_dim * 4)
                latents = torch.zeros(shape, dtype=self.vae.dtype, device=self.device)
            if latents is None or size is None:
                message = "the decode stage was given no latents, and it has no transformer"
                raise RuntimeError(message)
            height, width = size
            return self._decode_latents(latents, height, width, request.sampling_params.output_type or "pil")

    made = (
        MoonrelayQwenImageEncode,
        MoonrelayQwenImageDenoise,
        MoonrelayQwenImageEncodeDenoise,
        MoonrelayQwenImageDecode,
    )
    return {one.__name__: one for one in made}
