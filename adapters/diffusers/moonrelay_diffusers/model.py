"""What a model is before anything of it is loaded: its family and its JSON files.

Owns finding a model by folder or hub id, reading its JSON files and telling its family. Weights never pass through this
module; it imports neither torch nor diffusers, and the hub's client only for a hub id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moonrelay.errors import ConfigError

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model's identity and its index.

    Attributes:
        source: Folder, or hub id without revision.
        revision: Branch, tag or commit on the hub; ``None`` for the default and for folders.
        family: Name of the family.
        index: Content of ``model_index.json``.
    """

    source: str
    revision: str | None
    family: str
    index: Mapping[str, object]

    def components(self) -> tuple[str, ...]:
        """Return the names of the modules that the model has."""
        return tuple(name for name, entry in self.index.items() if isinstance(entry, list) and entry[:1] != [None])

    def all_slots(self) -> tuple[str, ...]:
        """Return the names of the modules that the index mentions, also those the model leaves out."""
        return tuple(name for name, entry in self.index.items() if isinstance(entry, list) and len(entry) == 2)

    def config(self, component: str) -> Mapping[str, object]:
        """Read ``<component>/config.json``.

        Blocks: while the file is read, or downloaded.

        Raises:
            ConfigError: The file is missing or is not a JSON object.
        """
        return _read_json(self.source, self.revision, f"{component}/config.json")


def inspect_model(model: str, *, family: str | None = None) -> ModelInfo:
    """Find a model and tell its family; loads no module.

    Args:
        model: A folder with ``model_index.json``, or ``owner/name`` or ``owner/name@revision`` on the hub.
        family: Overrides the family that ``model_index.json`` tells.

    Raises:
        ConfigError: No such folder, no such hub model, no index in it, or a pipeline class of no supported family.
    """
    # Imported here since families name ModelInfo in their signatures.
    from moonrelay_diffusers.families import family_named, family_of_class

    source, revision = _locate(model)
    index = _read_json(source, revision, "model_index.json")
    pipeline_class = index.get("_class_name")
    if not isinstance(pipeline_class, str):
        message = f"model={model!r}: model_index.json names no _class_name; give a diffusers model"
        raise ConfigError(message, field="model")
    found = family_named(family) if family is not None else family_of_class(pipeline_class, model)
    return ModelInfo(source=source, revision=revision, family=found.name, index=index)


def hub_snapshot(info: ModelInfo) -> Path:
    """Return the folder of a hub model's files here; its name is the commit.

    Blocks: while a small file is downloaded.

    Raises:
        ConfigError: The hub does not have it.
    """
    return _from_hub(info.source, info.revision, "model_index.json").parent


def whole(config: Mapping[str, object], name: str, default: int) -> int:
    """Return an integer entry of a config, or the default where it is absent or null.

    Raises:
        ConfigError: The entry is something else.
    """
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"the model's config says {name}={value!r}; it must be a whole number above 0"
        raise ConfigError(message, field=name)
    return value


def _locate(model: str) -> tuple[str, str | None]:
    if model.strip() and Path(model).expanduser().is_dir():
        return str(Path(model).expanduser()), None
    if not _HUB_ID.fullmatch(model):
        message = f"model={model!r} is neither a folder nor a hub id; give a folder with model_index.json or owner/name"
        raise ConfigError(message, field="model")
    source, _, revision = model.partition("@")
    return source, revision or None


def _read_json(source: str, revision: str | None, name: str) -> Mapping[str, object]:
    path = Path(source, name) if Path(source).is_dir() else _from_hub(source, revision, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        message = f"model={source!r} has no {name}; give the folder of a diffusers model"
        raise ConfigError(message, field="model") from exc
    except (OSError, ValueError) as exc:
        message = f"model={source!r}: {name} cannot be read: {exc}"
        raise ConfigError(message, field="model") from exc
    if not isinstance(content, dict):
        message = f"model={source!r}: {name} must hold a JSON object, not {type(content).__name__}"
        raise ConfigError(message, field="model")
    return content


def _from_hub(source: str, revision: str | None, name: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except (HfHubHTTPError, OSError, ValueError) as exc:
        message = f"model={source!r}: {name} is neither in this folder nor obtainable from the hub: {exc}"
        raise ConfigError(message, field="model") from exc
