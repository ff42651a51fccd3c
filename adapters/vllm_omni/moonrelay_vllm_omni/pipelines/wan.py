"""Stages of Wan 2.x, text to video, each the host's own pipeline with the others' models left out.

Owns where the pipeline is cut: after ``encode_prompt`` and after ``diffuse``. A decode stage runs the host's whole
``forward`` with both replaced by what was received, so that its many forms of output stay the host's. The classes are
made on the first look-up of their names, since their base is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from types import SimpleNamespace
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
NAMES: Final = ("MoonrelayWanEncode", "MoonrelayWanDenoise", "MoonrelayWanEncodeDenoise", "MoonrelayWanDecode")

_MODELS: Final = ("text_encoder", "transformer", "transformer_2", "vae")


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return classes()[name]
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


def pre_process(od_config: object) -> Callable[..., Any]:
    """Return what prepares a request's image: the host's own function."""
    from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import get_wan22_pre_process_func

    made: Callable[..., Any] = get_wan22_pre_process_func(od_config)
    return made


def post_process(od_config: object) -> Callable[..., Any]:
    """Return what makes frames of a decode stage's output: the host's own function."""
    from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import get_wan22_post_process_func

    made: Callable[..., Any] = get_wan22_post_process_func(od_config)
    return made


def encode_each_alone(pipeline: Any) -> None:
    """Have a pipeline encode its two prompts in a call each, so that each is remembered by itself.

    The host's method runs its encoder once for each anyway, and treats both alike: what comes of it is the same.

    Args:
        pipeline: Changed in place, after what remembers was put round its ``encode_prompt``.
    """
    encode = pipeline.encode_prompt

    @wraps(encode)
    def encode_prompt(
        prompt: Any,
        negative_prompt: Any = None,
        do_classifier_free_guidance: bool = True,
        *more: Any,
        **named: Any,
    ) -> tuple[Any, Any]:
        embeds, _ = encode(prompt, None, False, *more, **named)
        if not do_classifier_free_guidance:
            return embeds, None
        negative = negative_prompt or ""
        if isinstance(negative, str):
            negative = [negative] * (1 if isinstance(prompt, str) else len(prompt))
        negative_embeds, _ = encode(negative, None, False, *more, **named)
        return embeds, negative_embeds

    pipeline.encode_prompt = encode_prompt


@cache
def classes() -> Mapping[str, type[Any]]:
    """Return the stages' classes by name; the same ones every time. Imports the host's diffusion engine."""
    import torch
    from vllm_omni.diffusion.models.wan2_2.pipeline_wan2_2 import Wan22Pipeline, resolve_wan_guidance_scales

    class Stage(Wan22Pipeline):  # type: ignore[misc]
        """The pipeline with only the models that the stage needs.

        All are read at the start, by the host's constructor; the memory of the others is given back after it.
        """

        supports_request_batch = False
        keeps: ClassVar[tuple[str, ...]] = ()

        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            whole_requests_only(od_config, type(self).__name__)
            super().__init__(od_config=od_config, prefix=prefix)
            self.condition_width = int(self.text_encoder.config.get_text_config().hidden_size)
            transformer = self.transformer if self.transformer is not None else self.transformer_2
            self.condition_dtype = transformer.dtype
            keep_only(self, _MODELS, self.keeps)
            if "text_encoder" in self.keeps and install_from(od_config, self, self.made_by()):
                encode_each_alone(self)

        def made_by(self) -> dict[str, object]:
            """Return what decides a condition's bytes besides the encoder's weights and the call."""
            return {**computed_by(self), "pipeline": Wan22Pipeline.__qualname__}

        def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
            if "transformer" in self.keeps:
                loaded: set[str] = super().load_weights(weights)
                return loaded
            return already_loaded(self)

        def stand_in(self, count: int) -> Any:
            """Return embeddings that say nothing, for one prompt."""
            return torch.zeros(count, self.condition_width, dtype=self.condition_dtype, device=self.device)

    class MoonrelayWanEncode(Stage):
        """Prompts to embeddings."""

        keeps: ClassVar[tuple[str, ...]] = ("text_encoder",)
        _dit_modules: ClassVar[list[str]] = []
        _vae_modules: ClassVar[list[str]] = []

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            params = request.sampling_params
            prompt = request.prompt if isinstance(request.prompt, Mapping) else {"prompt": request.prompt}
            text = prompt.get("prompt")
            if not text:
                message = "Wan needs a prompt's text; its encode stage was given none"
                raise ValueError(message)
            scales = resolve_wan_guidance_scales(params, default_guidance_scale=1.0 if self.is_dmd else 4.0)
            embeds, negative = self.encode_prompt(
                prompt=[text],
                negative_prompt=prompt.get("negative_prompt"),
                do_classifier_free_guidance=max(scales) > 1.0,
                max_sequence_length=params.max_sequence_length or 512,
                dtype=self.condition_dtype,
            )
            negative = embeds.new_zeros(1, 0, embeds.shape[-1]) if negative is None else negative
            return handed_over(prompt_embeds=embeds[0], negative_prompt_embeds=negative[0])

    class MoonrelayWanEncodeDenoise(Stage):
        """Prompts to latents."""

        keeps: ClassVar[tuple[str, ...]] = ("text_encoder", "transformer", "transformer_2", "vae")

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            drop_empty_negative(request.prompt)
            request.sampling_params.output_type = "latent"
            (output,) = super().forward(req)
            return handed_over(latents=output.output)

    class MoonrelayWanDenoise(MoonrelayWanEncodeDenoise):
        """Embeddings to latents. Keeps the VAE too, which encodes the first frame where one is given."""

        keeps: ClassVar[tuple[str, ...]] = ("transformer", "transformer_2", "vae")
        _encoder_modules: ClassVar[list[str]] = []

        def encode_prompt(self, *_args: Any, **_more: Any) -> Any:
            message = (
                "the denoise stage was given no embeddings for this guidance, and it has no text encoder; give encode "
                "and denoise stage the same guidance_scale"
            )
            raise RuntimeError(message)

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            if request.is_dummy_run():  # the host's warm-up: nothing was received
                given = {name: self.stand_in(WARM_UP_TOKENS) for name in ("prompt_embeds", NEGATIVE[0])}
                request.prompt = {"prompt": "", "additional_information": given}
            return super().forward(req)

    class MoonrelayWanDecode(Stage):
        """Latents to videos."""

        keeps: ClassVar[tuple[str, ...]] = ("vae",)
        _dit_modules: ClassVar[list[str]] = []
        _encoder_modules: ClassVar[list[str]] = []

        def __init__(self, *, od_config: Any, prefix: str = "") -> None:
            super().__init__(od_config=od_config, prefix=prefix)
            self.transformer = self.transformer_2 = None
            self.text_encoder = SimpleNamespace(dtype=self.condition_dtype)  # all that `forward` asks of it here
            self.received: Any = None

        def diffuse(self, latents: Any, *_args: Any, **_more: Any) -> Any:
            return latents if self.received is None else self.received

        def forward(self, req: Any) -> Any:
            request = req.requests[0]
            self.received = additional_information(request.prompt).get("latents")
            if self.received is None and not request.is_dummy_run():
                message = "the decode stage was given no latents, and it has no transformer"
                raise RuntimeError(message)
            # No text, and no first frame, which the latents have already.
            given = {name: self.stand_in(1) for name in ("prompt_embeds", NEGATIVE[0])}
            asked = request.prompt
            request.prompt = {"prompt": "", "additional_information": given}
            try:
                return super().forward(req)
            finally:
                request.prompt, self.received = asked, None

    made = (MoonrelayWanEncode, MoonrelayWanDenoise, MoonrelayWanEncodeDenoise, MoonrelayWanDecode)
    return {one.__name__: one for one in made}
