"""Wan text-to-video (Wan2.1, Wan2.2 with two transformers) in three stages.

Owns what is particular to Wan: sizes, defaults, and the VAE's decoding latent frame by latent frame, which lets frames
be made while latents are still arriving. Source: diffusers' ``WanPipeline`` and ``AutoencoderKLWan``, whose own methods
do the work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from moonrelay_diffusers.features import WanFeatures
from moonrelay_diffusers.frames import of_kind
from moonrelay_diffusers.model import whole
from moonrelay_diffusers.numerics import aligned
from moonrelay_diffusers.request import GenerationRequest, StageParams

if TYPE_CHECKING:
    import torch

    from moonrelay_diffusers.families.base import Floats, Frames
    from moonrelay_diffusers.model import ModelInfo

CONDITIONING = "wan.conditioning/1"
LATENTS = "wan.latents/1"
FRAMES = "wan.frames/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class WanGeometry:
    """How pixels, frames and latents of one Wan model relate.

    Attributes:
        temporal: Frames per latent frame, but for the first, which is one frame.
        spatial: Pixels per latent along height and width.
        multiple: What height and width must be a multiple of, in pixels.
        channels: Channels of a latent.
        two_stage: Whether a second transformer takes over at low noise.
    """

    temporal: int
    spatial: int
    multiple: int
    channels: int
    two_stage: bool

    @classmethod
    def of(cls, info: ModelInfo) -> WanGeometry:
        """Read the geometry from the model's JSON files."""
        vae = info.config("vae")
        present = info.components()
        transformer = info.config("transformer" if "transformer" in present else "transformer_2")
        spatial = whole(vae, "scale_factor_spatial", 8)
        patch = transformer.get("patch_size")
        patch_side = patch[1] if isinstance(patch, list) and len(patch) == 3 else 2
        return cls(
            temporal=whole(vae, "scale_factor_temporal", 4),
            spatial=spatial,
            # The pipeline itself asks for 16, whatever the patches are.
            multiple=max(16, spatial * patch_side),
            channels=whole(vae, "z_dim", 16),
            two_stage=info.index.get("boundary_ratio") is not None,
        )

    def latent_shape(self, params: StageParams) -> tuple[int, ...]:
        """Return ``(1, channels, latent frames, height, width)``."""
        frames = (params.num_frames - 1) // self.temporal + 1
        return (1, self.channels, frames, params.height // self.spatial, params.width // self.spatial)


class WanFamily:
    """Wan text-to-video."""

    name = "wan"
    pipeline_class = "WanPipeline"
    conditioning_schema = CONDITIONING
    components: Mapping[Stage, tuple[str, ...]] = {
        "encode": ("tokenizer", "text_encoder"),
        "denoise": ("transformer", "transformer_2", "scheduler"),
        "decode": ("vae",),
    }

    def resolve(self, request: GenerationRequest, info: ModelInfo) -> GenerationRequest:
        """Fill in the pipeline's defaults and hold the request against the model; see `PipelineFamily`."""
        geometry = WanGeometry.of(info)
        full = dataclasses.replace(
            request,
            height=request.height or 480,
            width=request.width or 832,
            num_frames=request.num_frames or 81,
            num_inference_steps=request.num_inference_steps or 50,
            guidance_scale=5.0 if request.guidance_scale is None else request.guidance_scale,
            max_sequence_length=request.max_sequence_length or 512,
        )
        params = full.params()
        require_multiple("height", params.height, geometry.multiple)
        require_multiple("width", params.width, geometry.multiple)
        if (params.num_frames - 1) % geometry.temporal:
            near = (params.num_frames - 1) // geometry.temporal * geometry.temporal + 1
            message = (
                f"num_frames={params.num_frames} must be {geometry.temporal}*k+1; "
                f"the nearest are {near} and {near + geometry.temporal}"
            )
            raise ConfigError(message, field="num_frames")
        if params.guidance_scale_2 is not None and not geometry.two_stage:
            message = f"guidance_scale_2={params.guidance_scale_2} is for models with two transformers; leave it out"
            raise ConfigError(message, field="guidance_scale_2")
        return full

    def texts(self, request: GenerationRequest) -> tuple[Text, ...]:
        """Return prompt and, where guidance is on, negative prompt, the empty one by default; see `PipelineFamily`."""
        params = request.params()
        limit = params.max_sequence_length
        positive = Text(role="positive", text=request.prompt, max_length=limit)
        if not guided(params.guidance_scale):
            return (positive,)
        return positive, Text(role="negative", text=request.negative_prompt or "", max_length=limit)

    def conditioning(self, params: StageParams, embeds: Mapping[str, Embeds]) -> Conditioning:
        """Put embeddings and parameters together; see `PipelineFamily`."""
        negative = embeds_of(embeds, "negative") if guided(params.guidance_scale) else {}
        return {
            "prompt_embeds": embeds_of(embeds, "positive").get("prompt_embeds"),
            "negative_prompt_embeds": negative.get("prompt_embeds"),
            "params": params.to_payload(),
        }

    def call_arguments(self, request: GenerationRequest) -> dict[str, object]:
        """Return the undivided pipeline's arguments; see `PipelineFamily`."""
        return {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": request.guidance_scale,
            "guidance_scale_2": request.guidance_scale_2,
            "max_sequence_length": request.max_sequence_length,
        }

    def load_encode(self, info: ModelInfo, placement: Placement) -> WanEncode:
        """Load tokenizer and text encoder."""
        return WanEncode(self, info, placement)

    def load_denoise(self, info: ModelInfo, placement: Placement) -> WanDenoise:
        """Load the transformer, or both, and the scheduler."""
        present = tuple(name for name in self.components["denoise"] if name in info.components())
        return WanDenoise(self._load(info, "denoise", placement), present, WanGeometry.of(info))

    def load_decode(self, info: ModelInfo, placement: Placement) -> WanDecode:
        """Load the VAE."""
        return WanDecode(self._load(info, "decode", placement), WanGeometry.of(info))

    def _load(self, info: ModelInfo, stage: Stage, placement: Placement) -> Untyped:
        return load_pipeline(info, self.pipeline_class, self.components[stage], placement)


class WanEncode(PipelineEncoder):
    """Text to embeddings, by the pipeline's ``encode_prompt``. See `EncodeRunner`."""

    family = WanFamily.name
    output_schema = CONDITIONING
    components = WanFamily.components["encode"]

    def embed(self, text: str, *, max_sequence_length: int) -> dict[str, torch.Tensor | None]:
        """Encode one text by itself; see `EncodeRunner`.

        Shapes: ``prompt_embeds`` is ``[1, max_sequence_length, text_dim]``, zero after the text's end.
        """
        import torch

        with torch.no_grad():
            embeds, _ = self._pipe.encode_prompt(
                prompt=text, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
            )
        return {"prompt_embeds": embeds}


class WanDenoise(PipelineDenoiser):
    """Embeddings to latents, by the pipeline's ``__call__`` without text encoder and VAE. See `DenoiseRunner`.

    Shapes: latents are ``[1, channels, latent frames, height, width]``.
    """

    family = WanFamily.name
    input_schema = CONDITIONING
    output_schema = LATENTS
    chunk_dim: int | None = 2

    def __init__(self, pipe: Untyped, components: tuple[str, ...], geometry: WanGeometry) -> None:
        super().__init__(pipe, components)
        self._geometry = geometry
        self._features = WanFeatures(pipe, components, self._identity)
        # Without a VAE the pipeline takes 4 and 8 for granted, which Wan2.2's 5B model is not.
        pipe.vae_scale_factor_temporal = geometry.temporal
        pipe.vae_scale_factor_spatial = geometry.spatial

    def latent_shape(self, params: StageParams) -> tuple[int, ...]:
        return self._geometry.latent_shape(params)

    def noise_dtype(self, tree: Mapping[str, object]) -> torch.dtype:
        import torch

        return torch.float32

    def call_arguments(self, tree: Mapping[str, object], params: StageParams) -> dict[str, object]:
        on = guided(params.guidance_scale)
        return {
            "prompt_embeds": self.embeds(tree, "prompt_embeds"),
            "negative_prompt_embeds": self.embeds(tree, "negative_prompt_embeds") if on else None,
            "num_frames": params.num_frames,
            "guidance_scale": params.guidance_scale,
            "guidance_scale_2": params.guidance_scale_2,
        }


class WanDecode:
    """Latents to frames. See `DecodeRunner`.

    `run` is the tail of the pipeline's ``__call__``. `run_chunks` does what ``AutoencoderKLWan.decode`` does inside,
    one latent frame after the other, and stops between them to wait for more. Bits stay equal because each step works
    on tensors of the very shapes and strides that the whole has: vectorised CPU code treats an element by its place.
    """

    family = WanFamily.name
    input_schema = LATENTS
    output_schema = FRAMES
    components = WanFamily.components["decode"]
    incremental = True

    def __init__(self, pipe: Untyped, geometry: WanGeometry) -> None:
        import torch
        from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

        self._pipe = pipe
        self._vae = pipe.vae
        self._geometry = geometry
        self._causal_convs = sum(isinstance(module, WanCausalConv3d) for module in self._vae.decoder.modules())
        config = self._vae.config
        shape = (1, config.z_dim, 1, 1, 1)
        place = {"device": self._vae.device, "dtype": self._vae.dtype}
        self._mean = torch.tensor(config.latents_mean).view(shape).to(**place)
        # Inverse before the cast, as the pipeline has it: rounding differs otherwise.
        self._inverse_std = 1.0 / torch.tensor(config.latents_std).view(shape).to(**place)

    def run(self, latents: torch.Tensor, params: Mapping[str, object], *, kind: FrameKind = "uint8") -> Frames:
        """Decode whole latents with the VAE's own ``decode``; see `DecodeRunner`."""
        import torch

        shape = self._geometry.latent_shape(StageParams.from_payload(params))
        if tuple(latents.shape) != shape:
            message = f"latents are {tuple(latents.shape)}, not {shape} as params say; decode what denoise gave"
            raise ConfigError(message, field="latents")
        with torch.no_grad():
            video = self._vae.decode(self._denormalised(latents), return_dict=False)[0]
        return of_kind(self._postprocessed(video), kind)

    def run_chunks(
        self,
        chunks: Iterable[torch.Tensor],
        params: Mapping[str, object],
        *,
        kind: FrameKind = "uint8",
        on_frames: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Frames:
        """Decode latent frames as they land; see `DecodeRunner`."""
        import numpy as np

        typed = StageParams.from_payload(params)
        frames = np.empty((typed.num_frames, typed.height, typed.width, 3), np.uint8 if kind == "uint8" else np.float32)
        done = 0
        for piece in self._pieces(chunks, self._geometry.latent_shape(typed), cancelled):
            made = of_kind(self._postprocessed(piece), kind)
            frames[done : done + len(made)] = made
            done += len(made)
            if on_frames is not None:
                on_frames(done, typed.num_frames)
        return frames

    def _pieces(
        self, chunks: Iterable[torch.Tensor], shape: tuple[int, ...], cancelled: Callable[[], bool] | None
    ) -> Iterator[torch.Tensor]:
        """Yield the video of each latent frame, ``[1, 3, frames, height, width]``, as its latents land."""
        import torch

        total = shape[2]
        whole_latents = torch.zeros(shape, device=self._vae.device, dtype=self._vae.dtype)
        history: list[torch.Tensor | str | None] = [None] * self._causal_convs
        landed = 0
        with torch.no_grad():
            for chunk in chunks:
                end = landed + _checked_chunk(chunk, shape, landed)
                whole_latents[:, :, landed:end] = self._denormalised(chunk)
                # Kernel size 1, so that zeros in the place of latents yet to come touch nothing.
                mixed = self._vae.post_quant_conv(whole_latents)
                for index in range(landed, end):
                    raise_if(cancelled, f"cancelled after latent frame {index} of {total}")
                    yield self._finished(
                        self._vae.decoder(
                            mixed[:, :, index : index + 1],
                            feat_cache=history,
                            feat_idx=[0],
                            first_chunk=index == 0,
                        )
                    )
                landed = end
        if landed != total:
            message = f"the chunks hold {landed} latent frames, not {total} as params say; decode what denoise gave"
            raise ConfigError(message, field="latents")

    def _denormalised(self, latents: torch.Tensor) -> torch.Tensor:
        placed = aligned(latents.to(self._vae.device, dtype=self._vae.dtype))
        return placed / self._inverse_std + self._mean

    def _finished(self, piece: torch.Tensor) -> torch.Tensor:
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        if self._vae.config.patch_size is not None:
            piece = unpatchify(piece, patch_size=self._vae.config.patch_size)
        return piece.clamp(-1.0, 1.0)

    def _postprocessed(self, video: torch.Tensor) -> Floats:
        floats: Floats = self._pipe.video_processor.postprocess_video(video, output_type="np")[0]
        return floats


def _checked_chunk(chunk: torch.Tensor, shape: tuple[int, ...], landed: int) -> int:
    """Return how many latent frames a chunk holds, after holding it against the whole's shape."""
    fits = chunk.ndim == len(shape) and chunk.shape[:2] == shape[:2] and chunk.shape[3:] == shape[3:]
    if not fits or landed + chunk.shape[2] > shape[2]:
        message = f"a chunk of latents is {tuple(chunk.shape)}; {landed} latent frames of {shape} have come before it"
        raise ConfigError(message, field="latents")
    return chunk.shape[2]
