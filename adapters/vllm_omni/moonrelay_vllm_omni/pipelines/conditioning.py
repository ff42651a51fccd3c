"""The seam round ``encode_prompt`` of stages that have a text encoder: where a cache of embeddings is put in.

Owns the key: everything that decides the bytes, and nothing else. Where that is not known completely there is no key,
and then no hook is asked: never a guess. Keeps nothing itself, and without a hook changes nothing. The hook is named in
a stage of the deploy YAML, as ``model_config: {moonrelay: {condition_hook: "package.module:make"}}``; what that makes,
called without arguments, is called with a `ConditionKey` and a function that encodes, and returns the embeddings.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeAlias

from moonrelay.cache.keys import IncompleteKey, canonical, digest_of
from moonrelay.errors import ConfigError

logger = logging.getLogger(__name__)

#: Where the deploy YAML's settings of a stage lie, within its ``model_config``. (The host runs a stage that has
#: ``custom_pipeline_args`` in the orchestrator's own process.)
SETTINGS: Final = "moonrelay"
HOOK: Final = "condition_hook"
ENCODER: Final = "encoder"
REVISION: Final = "encoder_revision"

_KEY_VERSION: Final = "moonrelay.condition/2"
_METHOD: Final = "encode_prompt"
#: Arguments that are the prompt's text, for which one text and a list of one are the same.
_TEXTS: Final = ("prompt", "negative_prompt")
#: Where the result lies decides none of its bytes.
_NO_MATTER: Final = ("device",)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
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


def install_from(od_config: Any, pipeline: Any, made_by: Mapping[str, object]) -> None:
    """Put the hook that a stage's configuration names round a pipeline's ``encode_prompt``; none is named as a rule.

    Args:
        od_config: The host's, of one stage.
        pipeline: Changed in place.
        made_by: See `ConditionKey`.

    Raises:
        ConfigError: A setting is unknown, or the hook cannot be made.
    """
    given = (getattr(od_config, "model_config", None) or {}).get(SETTINGS)
    if given is None:
        return
    settings = _checked(given)
    identity = identity_of(od_config, settings)
    if identity is None:
        logger.warning(
            "no condition hook for %s: which weights its encoder has is not known; set %s, and load it without "
            "quantization and lora_path",
            type(pipeline).__name__,
            REVISION,
        )
        return
    install(pipeline, _made(settings[HOOK]), encoder=identity[0], revision=identity[1], made_by=made_by)


def install(
    pipeline: Any, hook: Hook | None, *, encoder: str, revision: str, made_by: Mapping[str, object] | None = None
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
        return _own(hook(key, encode), getattr(pipeline, "device", None))

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


def identity_of(od_config: Any, settings: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the name and the weights' revision of a stage's encoder; ``None`` where they are not known for certain.

    A revision is known where the settings say it, where the host was given a commit, and in the hub's own cache.

    Args:
        od_config: The host's, of one stage.
        settings: Ours, of that stage.
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
    return (encoder, known) if encoder and known else None


# -- inside -----------------------------------------------------------------------------------------------------------


def _checked(given: object) -> Mapping[str, str]:
    known = (HOOK, ENCODER, REVISION)
    if not isinstance(given, Mapping):
        message = f"model_config[{SETTINGS!r}] is no mapping; its keys are {', '.join(known)}"
        raise ConfigError(message, field=SETTINGS)
    for name, value in given.items():
        if name not in known:
            message = f"{name!r} is no setting of a stage; use {', '.join(known)}"
            raise ConfigError(message, field=str(name))
        if not isinstance(value, str) or not value:
            message = f"{name}={value!r} is no text"
            raise ConfigError(message, field=str(name))
    if HOOK not in given:
        message = f"{HOOK} is missing; give 'package.module:make', or leave {SETTINGS!r} out"
        raise ConfigError(message, field=HOOK)
    return dict(given)


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
