"""The seam round ``encode_prompt`` of stages that have a text encoder: where a cache of embeddings is put in.

Owns the key: everything that decides the bytes, and nothing else. Where that is not known completely there is no key,
and then nobody is asked: never a guess. Keeps nothing itself, and without a setting changes nothing. In a stage of the
deploy YAML, ``model_config: {moonrelay: {embedding_cache: true}}`` asks `moonrelay_vllm_omni.pipelines.embeddings`, and
``{condition_hook: "package.module:make"}`` one's own: what that makes, called without arguments, is called with a
`ConditionKey` and a function that encodes, and returns the embeddings.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeAlias

from moonrelay.cache.files import FileDigests
from moonrelay.cache.keys import IncompleteKey, canonical, digest_of
from moonrelay.connector.caching import CacheChoice
from moonrelay.errors import ConfigError
from moonrelay_vllm_omni.pipelines.embeddings import StageCache

logger = logging.getLogger(__name__)

#: Where the deploy YAML's settings of a stage lie, within its ``model_config``. (The host runs a stage that has
#: ``custom_pipeline_args`` in the orchestrator's own process.)
SETTINGS: Final = "moonrelay"
HOOK: Final = "condition_hook"
CACHE: Final = "embedding_cache"
ENCODER: Final = "encoder"
REVISION: Final = "encoder_revision"

_KEY_VERSION: Final = "moonrelay.condition/2"
_METHOD: Final = "encode_prompt"
#: Arguments that are the prompt's text, for which one text and a list of one are the same.
_TEXTS: Final = ("prompt", "negative_prompt")
#: Where the result lies decides none of its bytes.
_NO_MATTER: Final = ("device",)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
#: Of a model's folder, what decides what a text becomes.
_FOLDERS: Final = ("text_encoder", "tokenizer")
#: A folder of the hub's cache.
_SNAPSHOT: Final = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionKey:
    """What decides the bytes of a condition.

    Attributes:
        encoder: Whose weights, by the model's name.
        revision: Of the weights.
        made_by: What of the pipeline decides more: its class, the host's version, template, types.
        arguments: Of the call, by name, defaults among them, in canonical form: prompts with their role, lengths,
            types; tensors and pictures as digests of their contents.
        digest: Of all that, 64 hexadecimal digits.
    """

    encoder: str
    revision: str
    made_by: Mapping[str, object]
    arguments: Mapping[str, object]
    digest: str

    @property
    def label(self) -> Mapping[str, str]:
        """What may be shown of it: the weights, never the prompt."""
        return {"encoder": f"{self.encoder}@{self.revision}"}


#: Called with a key and what encodes; returns what that returned, now or earlier. As `EmbeddingCache.get_or_encode`.
Hook: TypeAlias = Callable[[ConditionKey, Callable[[], object]], object]


def install_from(od_config: Any, pipeline: Any, made_by: Mapping[str, object]) -> bool:
    """Put what a stage's configuration asks for round a pipeline's ``encode_prompt``: its cache, or a hook.

    Args:
        od_config: The host's, of one stage.
        pipeline: Changed in place.
        made_by: See `ConditionKey`.

    Returns:
        Whether it is there; by default nothing is asked for.

    Raises:
        ConfigError: A setting is unknown or wrong, cache and hook are both asked for, or the hook cannot be made.

    Blocks: while the encoder's files are read, where nothing else says which weights they hold.
    """
    given = (getattr(od_config, "model_config", None) or {}).get(SETTINGS)
    if given is None:
        return False
    settings = _checked(given)
    choice, path = settings[CACHE], settings[HOOK]
    if choice is None and path is None:
        return False
    what = f"{'condition hook' if path else 'embedding cache'} for {type(pipeline).__name__}"
    if _ranks(od_config) > 1:
        logger.warning("no %s: it has several ranks, and they must encode in step", what)
        return False
    identity = identity_of(od_config, settings, pipeline)
    if identity is None:
        logger.warning(
            "no %s: which weights its encoder has is not known; set %s, and load it without quantization and lora_path",
            what,
            REVISION,
        )
        return False
    hook: Hook = StageCache(choice, od_config, pipeline) if path is None else _made(path)
    install(pipeline, hook, encoder=identity[0], revision=identity[1], made_by=made_by, own=path is None)
    logger.info("%s: what %s@%s makes is remembered", what, *identity)
    return True


def install(
    pipeline: Any,
    hook: Hook | None,
    *,
    encoder: str,
    revision: str,
    made_by: Mapping[str, object] | None = None,
    own: bool = False,
) -> None:
    """Put a hook round a pipeline's ``encode_prompt``.

    The hook is asked only where the key is complete, and what the pipeline gets is its own: it may write into that.
    What the hook raises, and what encoding raises within it, passes.

    Args:
        pipeline: Changed in place; not at all where there is no hook.
        hook: See `Hook`.
        encoder: See `ConditionKey`, and so the next two.
        revision: Of the encoder's weights.
        made_by: What of the pipeline decides more.
        own: Whether what the hook returns is nobody else's, and on the pipeline's device, so that it need not be
            copied.

    Raises:
        ConfigError: Encoder or revision is empty: every two models would share what they make.
    """
    if hook is None:
        return
    for field, value in ((ENCODER, encoder), (REVISION, revision)):
        if not isinstance(value, str) or not value:
            message = f"{field}={value!r} names nothing; without it other weights' embeddings would be taken for these"
            raise ConfigError(message, field=field)
    original = getattr(pipeline, _METHOD)
    signature = inspect.signature(original)

    @wraps(original)
    def encode_prompt(*args: Any, **more: Any) -> Any:
        def encode() -> Any:
            return original(*args, **more)

        try:
            bound = signature.bind(*args, **more)
        except TypeError:
            return encode()  # which says what is wrong
        bound.apply_defaults()
        key = key_of(encoder, revision, made_by or {}, bound.arguments)
        if key is None:
            return encode()
        found = hook(key, encode)
        return found if own else _own(found, getattr(pipeline, "device", None))

    setattr(pipeline, _METHOD, encode_prompt)


def key_of(
    encoder: str, revision: str, made_by: Mapping[str, object], arguments: Mapping[str, object]
) -> ConditionKey | None:
    """Return the key of one call; ``None`` where it cannot be complete, or where there is nothing to encode.

    Args:
        encoder: See `ConditionKey`.
        revision: See `ConditionKey`.
        made_by: See `ConditionKey`.
        arguments: By name, as given, with the defaults of those that are not.
    """
    if any("embeds" in name and value is not None for name, value in arguments.items()):
        return None  # encoded already
    try:
        made = canonical(made_by, plain=True)
        named = {
            name: canonical([value] if name in _TEXTS and isinstance(value, str) else value, plain=True)
            for name, value in sorted(arguments.items())
            if name not in _NO_MATTER
        }
    except IncompleteKey as exc:
        logger.debug("no key for a condition: %s", exc)
        return None
    digest = digest_of(_KEY_VERSION, encoder, revision, made, named)
    return ConditionKey(encoder=encoder, revision=revision, made_by=made, arguments=named, digest=digest)


def identity_of(od_config: Any, settings: Mapping[str, Any], pipeline: Any = None) -> tuple[str, str] | None:
    """Return the name and the weights' revision of a stage's encoder; ``None`` where they are not known for certain.

    A revision is known where the settings say it, where the host was given a commit, in the hub's own cache, and in a
    folder, where it is a digest of the files: then the encoder is named by its class, so that the folder's place does
    not matter.

    Args:
        od_config: The host's, of one stage.
        settings: Ours, of that stage.
        pipeline: As it was loaded.

    Blocks: while the files of a folder are read.
    """
    if getattr(od_config, "quantization_config", None) is not None or getattr(od_config, "lora_path", None):
        return None  # the weights are not those of the revision
    model = str(getattr(od_config, "model", None) or "")
    revision = str(getattr(od_config, "revision", None) or "")
    snapshot = _SNAPSHOT.search(model)
    encoder = settings.get(ENCODER) or (snapshot["id"].replace("--", "/") if snapshot else model)
    known = settings.get(REVISION) or (snapshot["revision"] if snapshot else None)
    if known is None and _COMMIT.fullmatch(revision):
        known = revision
    loaded = getattr(pipeline, "text_encoder", None)
    if known is None and model and loaded is not None:
        if Path(model).is_dir():
            encoder, known = settings.get(ENCODER) or type(loaded).__qualname__, _content(Path(model))
        else:
            known = _commit(loaded)
    return (encoder, known) if encoder and known else None


# -- inside -----------------------------------------------------------------------------------------------------------


def _checked(given: object) -> Mapping[str, Any]:
    """Return all settings, with a `CacheChoice` or nothing for the cache, and nothing for those that are not given."""
    known = (CACHE, HOOK, ENCODER, REVISION)
    if not isinstance(given, Mapping):
        message = f"model_config[{SETTINGS!r}] is no mapping; its keys are {', '.join(known)}"
        raise ConfigError(message, field=SETTINGS)
    for name, value in given.items():
        if name not in known:
            message = f"{name!r} is no setting of a stage; use {', '.join(known)}"
            raise ConfigError(message, field=str(name))
        if name != CACHE and (not isinstance(value, str) or not value):
            message = f"{name}={value!r} is no text"
            raise ConfigError(message, field=str(name))
    if HOOK not in given and CACHE not in given:
        message = f"{CACHE} is missing; give true, {HOOK} instead, or leave {SETTINGS!r} out"
        raise ConfigError(message, field=CACHE)
    choice = CacheChoice.parse(given.get(CACHE))
    if choice is not None and HOOK in given:
        message = f"{CACHE} and {HOOK} are both given, and only one can be asked; leave one out"
        raise ConfigError(message, field=CACHE)
    return {**dict.fromkeys(known), **given, CACHE: choice}


def _ranks(od_config: Any) -> int:
    parallel = getattr(od_config, "parallel_config", None)
    counts = (getattr(od_config, "num_gpus", None), getattr(parallel, "world_size", None))
    return max([count for count in counts if isinstance(count, int)], default=1)


def _content(model: Path) -> str | None:
    """Return a digest of what a model's folder has for its text encoder; ``None`` where a part is missing."""
    digests = FileDigests()
    found = [digests.of(model / name) for name in _FOLDERS]
    return None if None in found else digest_of("moonrelay.encoder/1", *found)


def _commit(loaded: Any) -> str | None:
    """Return from which commit of the hub a module was loaded, as its library noted."""
    noted = getattr(getattr(loaded, "config", None), "_commit_hash", None)
    return noted if isinstance(noted, str) and _COMMIT.fullmatch(noted) else None


def _made(path: str) -> Hook:
    module, colon, name = path.partition(":")
    try:
        hook = getattr(importlib.import_module(module), name)() if colon and name else None
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        message = f"{HOOK}={path!r} cannot be made: {type(exc).__name__}: {exc}"
        raise ConfigError(message, field=HOOK) from exc
    if not callable(hook):
        message = f"{HOOK}={path!r} makes nothing that can be called; give 'package.module:make'"
        raise ConfigError(message, field=HOOK)
    made: Hook = hook
    return made


def _own(value: Any, device: object) -> Any:
    """Return the caller's own copy, on the pipeline's device."""
    import torch

    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        return copy if device is None else copy.to(device)  # type: ignore[call-overload]
    if isinstance(value, Mapping):
        return {name: _own(part, device) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts: Iterable[Any] = (_own(part, device) for part in value)
        return list(parts) if isinstance(value, list) else tuple(parts)
    return value
