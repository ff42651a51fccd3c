"""What a pipeline family is: the parts of a diffusers pipeline, cut into encode, denoise and decode.

Owns the protocols that the worker loop and the families agree on, and nothing that runs. Imports neither torch nor
diffusers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from moonrelay_diffusers.request import GenerationRequest, Plain, StageParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from moonrelay.cache.features import FeatureRun
    from moonrelay.cache.keys import EmbeddingKey
    from moonrelay_diffusers.loop import RunCheckpoints
    from moonrelay_diffusers.model import ModelInfo

    Floats: TypeAlias = npt.NDArray[np.float32]
    #: Frames as ``[frames, height, width, 3]``.
    Frames: TypeAlias = npt.NDArray[np.uint8] | Floats

Stage: TypeAlias = Literal["encode", "denoise", "decode"]
STAGES: tuple[Stage, ...] = ("encode", "denoise", "decode")

#: ``"uint8"``: pixels 0..255; ``"float"``: the pipeline's own ``output_type="np"``, float32 in 0..1.
FrameKind: TypeAlias = Literal["uint8", "float"]

#: What encode hands to denoise: tensors by name (``None`` where guidance is off) and ``"params"``, plain values.
Conditioning: TypeAlias = dict[str, "torch.Tensor | dict[str, Plain] | None"]


#: What encoding one text gives: tensors by name, ``None`` for one that the pipeline leaves out.
Embeds: TypeAlias = Mapping[str, "torch.Tensor | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text of a request, encoded by itself.

    Attributes:
        role: ``positive`` or ``negative``.
        text: What is encoded.
        max_length: Longest text in tokens; a longer one is cut.
    """

    role: Literal["positive", "negative"]
    text: str = field(repr=False)
    max_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a stage's modules live and in which type.

    Attributes:
        device: A torch device, e.g. ``cpu`` or ``cuda:0``.
        dtype: Name of a torch type for all modules (``"bfloat16"``), or a mapping from module name to one, with
            ``"default"`` for the rest. ``None`` leaves the choice to diffusers (float32).
    """

    device: str = "cpu"
    dtype: str | Mapping[str, str] | None = None


class EncodeRunner(Protocol):
    """Turns a request into conditioning. Threads: one call at a time."""

    family: str
    output_schema: str
    components: tuple[str, ...]

    def run(self, request: GenerationRequest, *, embed: Callable[[Text], Embeds] | None = None) -> Conditioning:
        """Encode the prompts.

        Args:
            request: What to make.
            embed: Gives one text's embeddings; a cache, or this runner's own `embed` by default.

        Returns:
            A tree of tensors under the schema ``output_schema``, and ``"params"``: the resolved plain parameters.

        Raises:
            ConfigError: The request asks for what the model cannot do.
        """
        ...

    def embed(self, text: str, *, max_sequence_length: int) -> dict[str, torch.Tensor | None]:
        """Encode one text by itself; its bits do not depend on other texts, so that it can be cached."""
        ...

    def key(self, text: Text) -> EmbeddingKey | None:
        """Return what decides a text's embeddings; ``None`` where that is not known completely: do not cache then."""
        ...


class DenoiseRunner(Protocol):
    """Turns conditioning into latents. Threads: one call at a time."""

    family: str
    input_schema: str
    output_schema: str
    components: tuple[str, ...]
    #: The dimension along which latents may be cut into chunks, ``None`` where there is none.
    chunk_dim: int | None

    def latent_spec(self, tree: Mapping[str, object]) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and type of the latents that `run` will give for this tree."""
        ...

    def run(
        self,
        tree: Mapping[str, object],
        *,
        on_step: Callable[[int, int], None] | None = None,
        out: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
        cancelled: Callable[[], bool] | None = None,
        checkpoints: RunCheckpoints | None = None,
        features: FeatureRun | None = None,
    ) -> torch.Tensor:
        """Denoise from the seed's noise, or from where a checkpoint of this very run was taken: the bits are the same.

        Args:
            tree: What `EncodeRunner.run` gave.
            on_step: Called after each step with (steps done, steps in all).
            out: Gives the tensor, of the shape and type asked for, in which the latents shall land.
            cancelled: Asked after each step; true ends the run.
            checkpoints: Where the loop's state is saved as it goes, and looked for at its start.
            features: What may be kept of the prompts from step to step and from request to request. Exact features
                change no bit; an approximation does, and only where the cache allows it by name.

        Raises:
            Cancelled: ``cancelled`` said so.
            ConfigError: The tree lacks something, or does not fit the model.
            Preempted: ``checkpoints.leaving`` said so, and the state is saved.
            CheckpointMismatch: It was to go on from another request's checkpoint, and cannot.
        """
        ...

    def check_features(self) -> None:
        """See whether this stage can keep features, before any are asked for.

        Blocks: for as long as reading all weights takes.

        Raises:
            ConfigError: It cannot; the message names the family, or the module that is not known.
        """
        ...


class DecodeRunner(Protocol):
    """Turns latents into frames. Threads: one call at a time."""

    family: str
    input_schema: str
    output_schema: str
    components: tuple[str, ...]
    #: Whether `run_chunks` decodes while chunks are still coming; otherwise it waits for the last.
    incremental: bool

    def run(self, latents: torch.Tensor, params: Mapping[str, object], *, kind: FrameKind = "uint8") -> Frames:
        """Decode whole latents."""
        ...

    def run_chunks(
        self,
        chunks: Iterable[torch.Tensor],
        params: Mapping[str, object],
        *,
        kind: FrameKind = "uint8",
        on_frames: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Frames:
        """Decode latents as their chunks land, bit for bit what `run` gives for the whole.

        Args:
            chunks: Pieces along the denoise stage's ``chunk_dim``, in order. A chunk's memory may be reused once the
                next one is asked for.
            params: The plain parameters of the conditioning.
            kind: Which frames to give.
            on_frames: Called as frames are done, with (frames done, frames in all).
            cancelled: Asked between latent frames; true ends the run.

        Raises:
            Cancelled: ``cancelled`` said so.
            ConfigError: The chunks do not add up to the latents that ``params`` describe.
        """
        ...


StageRunner: TypeAlias = EncodeRunner | DenoiseRunner | DecodeRunner


class PipelineFamily(Protocol):
    """A kind of diffusers pipeline that can run in three stages."""

    #: Name of the family, first part of its schemas: ``wan``, ``qwen_image``.
    name: str
    #: Class named by ``model_index.json``.
    pipeline_class: str
    #: Schema of what encode hands to denoise.
    conditioning_schema: str
    #: Modules of each stage, by their names in ``model_index.json``.
    components: Mapping[Stage, tuple[str, ...]]

    def resolve(self, request: GenerationRequest, info: ModelInfo) -> GenerationRequest:
        """Fill in the family's defaults and hold the request against the model.

        Raises:
            ConfigError: ``context['field']`` names what the model cannot do.
        """
        ...

    def texts(self, request: GenerationRequest) -> tuple[Text, ...]:
        """Return the texts of a resolved request that its run needs encoded, each role once."""
        ...

    def conditioning(self, params: StageParams, embeds: Mapping[str, Embeds]) -> Conditioning:
        """Put together what denoise takes.

        Args:
            params: A resolved request's.
            embeds: What encoding gave, by the texts' roles.

        Raises:
            ConfigError: One is missing.
        """
        ...

    def call_arguments(self, request: GenerationRequest) -> dict[str, object]:
        """Return a resolved request as arguments of the undivided pipeline's ``__call__``, less the generator."""
        ...

    def load_encode(self, info: ModelInfo, placement: Placement) -> EncodeRunner:
        """Load the encode stage's modules, and no other's."""
        ...

    def load_denoise(self, info: ModelInfo, placement: Placement) -> DenoiseRunner:
        """Load the denoise stage's modules, and no other's."""
        ...

    def load_decode(self, info: ModelInfo, placement: Placement) -> DecodeRunner:
        """Load the decode stage's modules, and no other's."""
        ...
