"""Keys of embeddings in this host, and the shortcut past the encode stage for requests whose embeddings are all kept.

Owns what goes into a key: the encoder's and the tokenizer's files by content (or their commit on the hub), the type
asked for, the libraries that encode and how many threads they have. It is made without loading the model, so that a
client makes the same key as the worker does. What is not known completely gives no key. Imports torch inside functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonrelay.cache.keys import EmbeddingKey
from moonrelay.errors import ConfigError
from moonrelay.orchestrator.shortcut import name_kept
from moonrelay.queueing.task import Plain, StageTask
from moonrelay_diffusers.revision import Revisions

if TYPE_CHECKING:
    from moonrelay_diffusers.families.base import PipelineFamily, Text
    from moonrelay_diffusers.model import ModelInfo
    from moonrelay_diffusers.request import GenerationRequest

#: Whose versions are part of a key: they encode, or bring the pipeline's template.
_LIBRARIES: Final = ("torch", "diffusers", "transformers", "tokenizers")
_ENCODER: Final = "text_encoder"
_TOKENIZER: Final = "tokenizer"

#: Where a task that skipped encoding has what `denoise` needs beside the embeddings.
CONDITIONING: Final = "conditioning"


class EmbeddingKeys:
    """Makes keys for the texts of one model.

    Args:
        info: The model.
        family: Its family.
        dtype: As for `load_stage`.

    Threads: any.
    """

    def __init__(self, info: ModelInfo, family: PipelineFamily, dtype: str | Mapping[str, str] | None) -> None:
        self._info = info
        self._family = family
        self._dtype = _asked(dtype)
        self._versions = _versions()
        self._revisions = Revisions(info)
        self._looked: object = None
        self._names: tuple[str, str] | None = None

    def of(self, text: Text) -> EmbeddingKey | None:
        """Return a text's key for the files as they are now; ``None`` where it would not be complete.

        Blocks: while files that are not known yet are read.
        """
        names = self._named()
        return None if names is None else self._key(names, text)

    def look(self) -> None:
        """Remember which files there are, before a model is loaded from them; for `frozen`."""
        self._looked = self._look()

    def frozen(self, text: Text) -> EmbeddingKey | None:
        """Return a text's key for the files as they were at `look`; ``None`` if they changed before it was first asked.

        Blocks: the first time, while files are read.
        """
        if self._names is None:
            names = self._named()
            if names is None or self._look() != self._looked:
                return None
            self._names = names
        return self._key(self._names, text)

    def _look(self) -> object:
        return [self._revisions.look(component) for component in (_ENCODER, _TOKENIZER)]

    def _named(self) -> tuple[str, str] | None:
        """Return encoder and tokenizer with their revisions."""
        named = []
        for component in (_ENCODER, _TOKENIZER):
            revision = self._revisions.of(component)
            if revision is None:
                return None
            # A folder's path says nothing: the same files elsewhere are the same encoder, also in another model.
            whose = self._family.pipeline_class if Path(self._info.source).is_dir() else self._info.source
            named.append(f"{whose}/{component}@{revision}")
        return named[0], named[1]

    def _key(self, names: tuple[str, str], text: Text) -> EmbeddingKey | None:
        import torch

        if self._versions is None:
            return None
        facts: dict[str, object] = {
            **self._versions,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
        return EmbeddingKey.complete(
            encoder=names[0],
            tokenizer=names[1],
            prompt=text.text,
            role=text.role,
            params={"dtype": self._dtype, "max_length": text.max_length, "lora": None, "host": facts},
            # The template is the pipeline class's own, of this version of diffusers.
            template={"pipeline": self._family.pipeline_class, "diffusers": facts["diffusers"]},
        )


class EncodeShortcut:
    """Tells how a request would go past the encode stage; for clients, which load no model.

    Args:
        model: As for `load_stage`.
        dtype: As the encode workers have it.
        family: As for `load_stage`.

    Blocks: while the model's JSON files are read, or downloaded.

    Raises:
        ConfigError: No such model or family.

    Threads: any. Keys hold the number of threads, and more of what decides bits, so this process must be set up as the
    workers are; see `moonrelay_diffusers.numerics`.
    """

    def __init__(self, model: str, *, dtype: str | Mapping[str, str] | None = None, family: str | None = None) -> None:
        from moonrelay_diffusers.families import family_named
        from moonrelay_diffusers.model import inspect_model

        self._info = inspect_model(model, family=family)
        self._family = family_named(self._info.family)
        self._keys = EmbeddingKeys(self._info, self._family, dtype)

    def keys(self, request: GenerationRequest) -> dict[str, EmbeddingKey] | None:
        """Return the keys of a request's texts by role; ``None`` where one would not be complete.

        Blocks: the first time for as long as reading the encoder's files takes.

        Raises:
            ConfigError: The model cannot do what the request asks.
        """
        made = {text.role: self._keys.of(text) for text in self._family.texts(self._resolved(request))}
        return {role: key for role, key in made.items() if key is not None} if None not in made.values() else None

    def task(self, request: GenerationRequest) -> StageTask | None:
        """Return the ``denoise`` task of a request, for `moonrelay.orchestrator.shortcut.submit`.

        Blocks and raises as `keys` does.
        """
        resolved = self._resolved(request)
        keys = self.keys(resolved)
        if keys is None:
            return None
        payload: dict[str, Plain] = {
            "request": dict(resolved.to_payload()),
            CONDITIONING: {"schema": self._family.conditioning_schema, "params": dict(resolved.params().to_payload())},
            **name_kept(keys),
        }
        return StageTask(stage="denoise", payload=payload)

    def _resolved(self, request: GenerationRequest) -> GenerationRequest:
        return self._family.resolve(request, self._info)


def conditioning_asked(payload: Mapping[str, object]) -> tuple[str, dict[str, object]] | None:
    """Return schema and parameters from the payload of a task that skipped encoding; ``None`` of another task.

    Raises:
        ConfigError: They are malformed.
    """
    found = payload.get(CONDITIONING)
    if found is None:
        return None
    schema, params = (found.get("schema"), found.get("params")) if isinstance(found, Mapping) else (None, None)
    if not isinstance(schema, str) or not isinstance(params, Mapping):
        message = f"{CONDITIONING!r} needs a schema and params; make the task with EncodeShortcut"
        raise ConfigError(message, field=CONDITIONING)
    return schema, dict(params)


def _asked(dtype: str | Mapping[str, str] | None) -> str:
    """Return the type that the text encoder is loaded with, as diffusers chooses it."""
    if dtype is None:
        return "default"
    return dtype if isinstance(dtype, str) else dtype.get(_ENCODER, dtype.get("default", "float32"))


def _versions() -> dict[str, str] | None:
    """Return what encodes, by version; ``None`` where something is not installed."""
    try:
        return {library: version(library) for library in _LIBRARIES}
    except PackageNotFoundError:
        return None
