"""Qwen-Image text-to-image in three stages.

Owns what is particular to Qwen-Image: sizes, defaults, masks, and latents that are packed into patches. Source:
diffusers' ``QwenImagePipeline``, whose own methods do the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonrelay.errors import ConfigError
from moonrelay_diffusers.families.base import Conditioning, Embeds, FrameKind, Placement, Stage, Text
from moonrelay_diffusers.families.common import (
    PipelineDenoiser,
    Untyped,
    guided,
    load_pipeline,
    raise_if,
    require_multiple,
)
from moonrelay_diffusers.families.encoding import PipelineEncoder, embeds_of
from moonrelay_diffusers.frames import of_kind
from moonrelay_diffusers.model import whole
from moonrelay_diffusers.numerics import aligned
from moonrelay_diffusers.request import GenerationRequest, StageParams

if TYPE_CHECKING:
    import torch

    from moonrelay_diffusers.families.base import Floats, Frames
    from moonrelay_diffusers.model import ModelInfo

CONDITIONING = "qwen_image.conditioning/1"
LATENTS = "qwen_image.latents/1"
FRAMES = "qwen_image.frames/1"

#: Longest text that the pipeline takes, in tokens.
_LONGEST_TEXT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenImageGeometry:
    """How pixels and latents of one Qwen-Image model relate.

    Attributes:
        spatial: Pixels per latent along height and width.
        packed_channels: Channels of a packed latent, a patch of two by two.
    """

    spatial: int
    packed_channels: int

    @classmethod
    def of(cls, info: ModelInfo) -> QwenImageGeometry:
        """Read the geometry from the model's JSON files."""
        levels = info.config("vae").get("temperal_downsample")
        return cls(
            spatial=2 ** len(levels) if isinstance(levels, list) else 8,
            packed_channels=whole(info.config("transformer"), "in_channels", 64),
        )

    @property
    def multiple(self) -> int:
        """What height and width must be a multiple of, in pixels."""
        return self.spatial * 2

    def latent_shape(self, params: StageParams) -> tuple[int, ...]:
        """Return ``(1, patches, packed channels)``."""
        patches = (params.height // self.multiple) * (params.width // self.multiple)
        return (1, patches, self.packed_channels)


class QwenImageFamily:
    """Qwen-Image text-to-image."""

    name = "qwen_image"
    pipeline_class = "QwenImagePipeline"
    conditioning_schema = CONDITIONING
    components: Mapping[Stage, tuple[str, ...]] = {
        "encode": ("tokenizer", "text_encoder"),
        "denoise": ("transformer", "scheduler"),
        "decode": ("vae",),
    }

    def resolve(self, request: GenerationRequest, info: ModelInfo) -> GenerationRequest:
        """Fill in the pipeline's defaults and hold the request against the model; see `PipelineFamily`."""
        geometry = QwenImageGeometry.of(info)
        side = 128 * geometry.spatial
        full = dataclasses.replace(
            request,
            height=request.height or side,
            width=request.width or side,
            num_frames=request.num_frames or 1,
            num_inference_steps=request.num_inference_steps or 50,
            guidance_scale=4.0 if request.guidance_scale is None else request.guidance_scale,
            max_sequence_length=request.max_sequence_length or 512,
        )
        params = full.params()
        require_multiple("height", params.height, geometry.multiple)
        require_multiple("width", params.width, geometry.multiple)
        if params.num_frames != 1:
            message = f"num_frames={params.num_frames}: Qwen-Image makes single images; leave it out or use 1"
            raise ConfigError(message, field="num_frames")
        if params.guidance_scale_2 is not None:
            message = f"guidance_scale_2={params.guidance_scale_2} is for models with two transformers; leave it out"
            raise ConfigError(message, field="guidance_scale_2")
        if params.max_sequence_length > _LONGEST_TEXT:
            message = f"max_sequence_length={params.max_sequence_length} is too long; use 1 to {_LONGEST_TEXT}"
            raise ConfigError(message, field="max_sequence_length")
        return full

    def texts(self, request: GenerationRequest) -> tuple[Text, ...]:
        """Return prompt and, where guidance is on, negative prompt; see `PipelineFamily`."""
        params = request.params()
        limit = params.max_sequence_length
        positive = Text(role="positive", text=request.prompt, max_length=limit)
        if request.negative_prompt is None or not guided(params.guidance_scale):
            return (positive,)
        return positive, Text(role="negative", text=request.negative_prompt, max_length=limit)

    def conditioning(self, params: StageParams, embeds: Mapping[str, Embeds]) -> Conditioning:
        """Put embeddings, masks and parameters together; see `PipelineFamily`."""
        positive = embeds_of(embeds, "positive")
        # Without a negative prompt there is no guidance.
        negative = embeds_of(embeds, "negative") if "negative" in embeds else {}
        return {
            "negative_prompt_embeds": negative.get("prompt_embeds"),
            "negative_prompt_embeds_mask": negative.get("prompt_embeds_mask"),
            "params": params.to_payload(),
            "prompt_embeds": positive.get("prompt_embeds"),
            "prompt_embeds_mask": positive.get("prompt_embeds_mask"),
        }

    def call_arguments(self, request: GenerationRequest) -> dict[str, object]:
        """Return the undivided pipeline's arguments; see `PipelineFamily`."""
        on = request.negative_prompt is not None and guided(request.guidance_scale)
        return {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt if on else None,
            "true_cfg_scale": request.guidance_scale if on else 1.0,
            "height": request.height,
            "width": request.width,
            "num_inference_steps": request.num_inference_steps,
            "max_sequence_length": request.max_sequence_length,
        }

    def load_encode(self, info: ModelInfo, placement: Placement) -> QwenImageEncode:
        """Load tokenizer and text encoder."""
        return QwenImageEncode(self, info, placement)

    def load_denoise(self, info: ModelInfo, placement: Placement) -> QwenImageDenoise:
        """Load transformer and scheduler."""
        pipe = self._load(info, "denoise", placement)
        return QwenImageDenoise(pipe, self.components["denoise"], QwenImageGeometry.of(info))

    def load_decode(self, info: ModelInfo, placement: Placement) -> QwenImageDecode:
        """Load the VAE."""
        return QwenImageDecode(self._load(info, "decode", placement), QwenImageGeometry.of(info))

    def _load(self, info: ModelInfo, stage: Stage, placement: Placement) -> Untyped:
        return load_pipeline(info, self.pipeline_class, self.components[stage], placement)


class QwenImageEncode(PipelineEncoder):
    """Text to embeddings and masks, by the pipeline's ``encode_prompt``. See `EncodeRunner`."""

    family = QwenImageFamily.name
    output_schema = CONDITIONING
    components = QwenImageFamily.components["encode"]

    def embed(self, text: str, *, max_sequence_length: int) -> dict[str, torch.Tensor | None]:
        """Encode one text by itself; see `EncodeRunner`.

        Shapes: ``prompt_embeds`` is ``[1, tokens, text_dim]``; ``prompt_embeds_mask`` is ``[1, tokens]``, or ``None``
        where every token counts.
        """
        import torch

        with torch.no_grad():
            embeds, mask = self._pipe.encode_prompt(prompt=text, max_sequence_length=max_sequence_length)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}


class QwenImageDenoise(PipelineDenoiser):
    """Embeddings to packed latents, by the pipeline's ``__call__`` without text encoder and VAE. See `DenoiseRunner`.

    Shapes: latents are ``[1, patches, packed channels]``.
    """

    family = QwenImageFamily.name
    input_schema = CONDITIONING
    output_schema = LATENTS
    chunk_dim: int | None = None

    def __init__(self, pipe: Untyped, components: tuple[str, ...], geometry: QwenImageGeometry) -> None:
        super().__init__(pipe, components)
        self._geometry = geometry
        # Without a VAE the pipeline takes 8 for granted.
        pipe.vae_scale_factor = geometry.spatial

    def latent_shape(self, params: StageParams) -> tuple[int, ...]:
        return self._geometry.latent_shape(params)

    def noise_dtype(self, tree: Mapping[str, object]) -> torch.dtype:
        return self.embeds(tree, "prompt_embeds").dtype

    def call_arguments(self, tree: Mapping[str, object], params: StageParams) -> dict[str, object]:
        negative = self.optional_embeds(tree, "negative_prompt_embeds")
        arguments: dict[str, object] = {
            "prompt_embeds": self.embeds(tree, "prompt_embeds"),
            "prompt_embeds_mask": self._mask(tree, "prompt_embeds"),
            "true_cfg_scale": 1.0,
        }
        if negative is not None:
            arguments["negative_prompt_embeds"] = negative
            arguments["negative_prompt_embeds_mask"] = self._mask(tree, "negative_prompt_embeds")
            arguments["true_cfg_scale"] = params.guidance_scale
        return arguments

    def _mask(self, tree: Mapping[str, object], name: str) -> torch.Tensor:
        """Return the mask, all ones where the tree has none: the pipeline drops those, and warns of a missing mask."""
        import torch

        given = self.optional_embeds(tree, f"{name}_mask")
        embeds = self.embeds(tree, name)
        return torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device) if given is None else given


class QwenImageDecode:
    """Packed latents to one image: the tail of the pipeline's ``__call__``. See `DecodeRunner`."""

    family = QwenImageFamily.name
    input_schema = LATENTS
    output_schema = FRAMES
    components = QwenImageFamily.components["decode"]
    incremental = False

    def __init__(self, pipe: Untyped, geometry: QwenImageGeometry) -> None:
        self._pipe = pipe
        self._vae = pipe.vae
        self._geometry = geometry

    def run(self, latents: torch.Tensor, params: Mapping[str, object], *, kind: FrameKind = "uint8") -> Frames:
        """Decode whole latents; see `DecodeRunner`. One frame comes back."""
        import torch

        typed = StageParams.from_payload(params)
        shape = self._geometry.latent_shape(typed)
        if tuple(latents.shape) != shape:
            message = f"latents are {tuple(latents.shape)}, not {shape} as params say; decode what denoise gave"
            raise ConfigError(message, field="latents")
        with torch.no_grad():
            image = self._vae.decode(self._denormalised(latents, typed), return_dict=False)[0][:, :, 0]
        floats: Floats = self._pipe.image_processor.postprocess(image, output_type="np")
        return of_kind(floats, kind)

    def run_chunks(
        self,
        chunks: Iterable[torch.Tensor],
        params: Mapping[str, object],
        *,
        kind: FrameKind = "uint8",
        on_frames: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Frames:
        """Gather the chunks, then decode; an image is decoded all at once. See `DecodeRunner`."""
        import torch

        kept = []
        for chunk in chunks:
            raise_if(cancelled, "cancelled before decoding")
            kept.append(chunk.clone())
        if not kept:
            message = "no latents came; decode what the denoise stage gave"
            raise ConfigError(message, field="latents")
        raise_if(cancelled, "cancelled before decoding")
        frames = self.run(kept[0] if len(kept) == 1 else torch.cat(kept, dim=1), params, kind=kind)
        if on_frames is not None:
            on_frames(1, 1)
        return frames

    def _denormalised(self, latents: torch.Tensor, params: StageParams) -> torch.Tensor:
        import torch

        placed = aligned(latents.to(self._vae.device))
        unpacked = self._pipe._unpack_latents(  # noqa: SLF001  (a static method that its sister pipelines share)
            placed, params.height, params.width, self._geometry.spatial
        ).to(self._vae.dtype)
        config = self._vae.config
        shape = (1, config.z_dim, 1, 1, 1)
        mean = torch.tensor(config.latents_mean).view(shape).to(unpacked.device, unpacked.dtype)
        inverse_std = 1.0 / torch.tensor(config.latents_std).view(shape).to(unpacked.device, unpacked.dtype)
        result: torch.Tensor = unpacked / inverse_std + mean
        return result
