"""What the families' encode stages share: each text by itself, by the pipeline's own ``encode_prompt``, and its key.

Owns the run round it. What is encoded, and what becomes of it, is the family's; what decides the bits is told by
`moonrelay_diffusers.embeddings`. torch and diffusers are imported inside functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from moonrelay.errors import ConfigError
from moonrelay_diffusers.embeddings import EmbeddingKeys
from moonrelay_diffusers.families.base import Conditioning, Embeds, PipelineFamily, Placement, Text
from moonrelay_diffusers.families.common import Untyped, load_pipeline
from moonrelay_diffusers.request import GenerationRequest

if TYPE_CHECKING:
    import torch

    from moonrelay.cache.keys import EmbeddingKey
    from moonrelay_diffusers.model import ModelInfo


class PipelineEncoder(ABC):
    """An encode stage that calls the pipeline's own ``encode_prompt``. See `EncodeRunner`.

    Args:
        family: The family.
        info: The model.
        placement: Where its modules go, and in which type.

    Threads: one call at a time. Blocks: while files are read, or downloaded.

    Raises:
        ConfigError: A file is missing or damaged, or the device or type does not exist.
    """

    family: str
    output_schema: str
    components: tuple[str, ...]

    def __init__(self, family: PipelineFamily, info: ModelInfo, placement: Placement) -> None:
        self._family = family
        self._info = info
        # Looked at before the weights are read: files that change under it make a key that nobody else has.
        self._keys = EmbeddingKeys(info, family, placement.dtype)
        self._keys.look()
        self._pipe = load_pipeline(info, family.pipeline_class, self.components, placement)
        self._loaded = self._state()

    @abstractmethod
    def embed(self, text: str, *, max_sequence_length: int) -> dict[str, torch.Tensor | None]:
        """Encode one text by itself; see `EncodeRunner`."""

    def run(self, request: GenerationRequest, *, embed: Callable[[Text], Embeds] | None = None) -> Conditioning:
        """Encode prompt and, where guidance is on, negative prompt; see `EncodeRunner`."""
        resolved = self._family.resolve(request, self._info)
        one = self._embed if embed is None else embed
        return self._family.conditioning(
            resolved.params(), {text.role: one(text) for text in self._family.texts(resolved)}
        )

    def key(self, text: Text) -> EmbeddingKey | None:
        """Return what decides a text's embeddings; see `EncodeRunner`.

        Blocks: the first time for as long as reading the encoder's files takes.
        """
        # An adapter, other weights or another template that somebody put in since: its revision is not known.
        return self._keys.frozen(text) if self._state() == self._loaded else None

    def _embed(self, text: Text) -> Embeds:
        return self.embed(text.text, max_sequence_length=text.max_length)

    def _state(self) -> tuple[object, ...]:
        """Return what changes when what was loaded is changed."""
        modules = [getattr(self._pipe, name) for name in self.components]
        tensors = [tensor for module in modules for tensor in _tensors(module)]
        return (
            *(id(module) for module in modules),
            *(str(getattr(module, "dtype", None)) for module in modules),
            *(bool(getattr(module, "peft_config", None)) for module in modules),
            *(str(getattr(self._pipe, name, None)) for name in ("prompt_template_encode", "tokenizer_max_length")),
            *((id(tensor), tensor._version) for tensor in tensors),  # noqa: SLF001
        )


def embeds_of(embeds: Mapping[str, Embeds], role: str) -> Embeds:
    """Return one role's embeddings.

    Raises:
        ConfigError: They are missing.
    """
    found = embeds.get(role)
    if not isinstance(found, Mapping):
        message = f"the {role} embeddings are missing; encode all texts of the request"
        raise ConfigError(message, field=role)
    return found


def _tensors(module: Untyped) -> list[torch.Tensor]:
    import torch

    if not isinstance(module, torch.nn.Module):
        return []
    return [*module.parameters(), *module.buffers()]
