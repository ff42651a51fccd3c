"""The seam round ``TextEncodingStage.forward``: where a cache of embeddings is put in.

Owns the key: everything that decides the bytes, and nothing else. Where that is not known completely there is no key,
and then nobody is asked: never a guess. Keeps nothing itself, and without a setting changes nothing. In
``MOONRELAY_SGLANG``, ``{"embedding_cache": true}`` asks the role's own cache, and ``{"condition_hook":
"package.module:make"}`` one's own: what that makes, called without arguments, is called with a `ConditionKey` and a
function that encodes, and returns what a request's text became, by field.

The host's own fingerprint of a request is in the key, and not alone: it tells large tensors apart by shape only, and
says nothing of weights, types and templates, since it is compared within one process.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from moonrelay.cache.keys import IncompleteKey, canonical, digest_of
from moonrelay.errors import ConfigError, PluginError
from moonrelay_sglang import config as settings
from moonrelay_sglang.config import SglangConfig

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache

logger = logging.getLogger(__name__)

_KEY_VERSION: Final = "moonrelay.condition/3"
#: The host's class. Its subclasses read more of a request than its fingerprint has, so they are left alone.
_STAGE: Final = "sglang.multimodal_gen.runtime.pipelines_core.stages.text_encoding.TextEncodingStage"
#: Where what was found out of a stage hangs on it, and the role's cache.
_FOUND: Final = "_moonrelay_condition"
_LENT: Final = "_moonrelay_embeddings"
#: What tokenizes and encodes beside the host and torch.
_LIBRARIES: Final = ("transformers", "tokenizers")
#: Of the host's settings, what decides how an encoder computes.
_COMPUTES: Final = (
    "attention_backend",
    "component_attention_backends",
    "component_precisions",
    "disable_autocast",
    "enable_torch_compile",
    "regional_compile",
    "model_subfolder",
    "model_variant",
    "pipeline_class_name",
)
#: With one of these the weights are not those of the model's revision.
_OTHER_WEIGHTS: Final = (
    "lora_path",
    "quantization",
    "component_quantizations",
    "component_paths",
    "component_weights_paths",
)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
#: A folder of the hub's cache.
_SNAPSHOT: Final = re.compile(r"models--(?P<id>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionKey:
    """What decides the bytes of a condition.

    Attributes:
        encoder: Whose weights, by the model's name.
        revision: Of the weights.
        made_by: What of the process decides more: versions, device, the encoders' classes and types, the pipeline's
            settings, template among them.
        request: The host's fingerprint of a request: prompts, guidance, template, length.
        digest: Of all that, 64 hexadecimal digits.
    """

    encoder: str
    revision: str
    made_by: Mapping[str, object]
    request: tuple[object, ...]
    digest: str

    @property
    def label(self) -> Mapping[str, str]:
        """What may be shown of it: the weights, never the prompt."""
        return {"encoder": f"{self.encoder}@{self.revision}"}


#: Called with a key and what encodes; returns what that returned, now or earlier. As `EmbeddingCache.get_or_encode`.
Hook: TypeAlias = Callable[[ConditionKey, Callable[[], Mapping[str, object]]], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class _Seam:
    """What was found out of one stage."""

    hook: Hook
    encoder: str
    revision: str
    made_by: Mapping[str, object]


def around_forward(original: Callable[..., Any], stage: Any, batch: Any, server_args: Any) -> Any:
    """Ask the hook that was chosen, if one was; on ``TextEncodingStage.forward``.

    What the hook raises, and what encoding raises within it, passes. What the request gets is its own: a later stage
    may write into that.
    """
    if not settings.is_chosen(server_args):
        return original(stage, batch, server_args)
    seam = _seam_of(stage, server_args)
    if seam is None or getattr(batch, "is_warmup", False):
        return original(stage, batch, server_args)
    names = tuple(stage.deduplicated_output_fields)
    before = {name: getattr(batch, name, None) for name in names}
    key = None
    if not any(_is_there(value) for value in before.values()) and _weights_as_loaded():
        key = key_of(seam.encoder, seam.revision, seam.made_by, stage.build_dedup_fingerprint(batch, server_args))
    if key is None:
        return original(stage, batch, server_args)

    def encode() -> Mapping[str, object]:
        for name, value in before.items():
            # The stage appends to lists of the request: asked again, it must find them empty again.
            setattr(batch, name, list(value) if isinstance(value, list) else value)
        original(stage, batch, server_args)
        return {name: getattr(batch, name, None) for name in names}

    made = seam.hook(key, encode)
    if not isinstance(made, Mapping) or set(made) != set(names):
        message = f"the condition hook returned {type(made).__name__}, not what encoding gives: {', '.join(names)}"
        raise PluginError(message, plugin="sglang")
    device = _device()
    for name in names:
        setattr(batch, name, _own(made[name], device))
    return batch


def lend(stages: Iterable[Any], cache: EmbeddingCache) -> None:
    """Let a role's stages ask its cache.

    Args:
        stages: All of its pipeline.
        cache: Closed by the role when it ends: from then on they encode.
    """
    for stage in stages:
        if _name(type(stage)) == _STAGE:
            setattr(stage, _LENT, cache)


def key_of(
    encoder: str, revision: str, made_by: Mapping[str, object], fingerprint: Iterable[object]
) -> ConditionKey | None:
    """Return the key of one request; ``None`` where it cannot be complete.

    Args:
        encoder: See `ConditionKey`.
        revision: See `ConditionKey`.
        made_by: See `ConditionKey`; in plain form, as `moonrelay.cache.keys.canonical` makes it.
        fingerprint: The host's, of the request.
    """
    try:
        request = [_seen(part) for part in fingerprint]
    except IncompleteKey as exc:
        logger.debug("no key for a condition: %s", exc)
        return None
    digest = digest_of(_KEY_VERSION, encoder, revision, made_by, request)
    return ConditionKey(encoder=encoder, revision=revision, made_by=made_by, request=tuple(request), digest=digest)


def identity_of(server_args: Any, config: SglangConfig) -> tuple[str, str] | None:
    """Return the name and the weights' revision of a role's model; ``None`` where they are not known for certain.

    A revision is known where our settings say it, where the host was given a commit, and in the hub's own cache.

    Args:
        server_args: The host's.
        config: Our settings.
    """
    if any(getattr(server_args, name, None) for name in _OTHER_WEIGHTS):
        return None
    model = str(getattr(server_args, "model_path", None) or "")
    revision = str(getattr(server_args, "revision", None) or "")
    snapshot = _SNAPSHOT.search(model)
    encoder = config.encoder or (snapshot["id"].replace("--", "/") if snapshot else model)
    known = config.encoder_revision or (snapshot["revision"] if snapshot else None)
    if known is None and _COMMIT.fullmatch(revision):
        known = revision
    return (encoder, known) if encoder and known else None


def named(path: str) -> Callable[[], Hook]:
    """Return what makes the hook that a setting names; imports its module.

    Raises:
        ConfigError: It cannot be imported, or cannot be called.
    """
    module, colon, name = path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name) if colon and name else None
    except (ImportError, AttributeError, ValueError) as exc:
        message = f"condition_hook={path!r} cannot be imported: {type(exc).__name__}: {exc}"
        raise ConfigError(message, field="condition_hook") from exc
    if not callable(make):
        message = f"condition_hook={path!r} names nothing that can be called; give 'package.module:make'"
        raise ConfigError(message, field="condition_hook")
    made: Callable[[], Hook] = make
    return made


# -- inside -----------------------------------------------------------------------------------------------------------


def _seam_of(stage: Any, server_args: Any) -> _Seam | None:
    """Return what was found out of a stage, found out when it is first used."""
    if _FOUND not in vars(stage):
        setattr(stage, _FOUND, _find_out(stage, server_args))
    found: _Seam | None = vars(stage)[_FOUND]
    return found


def _find_out(stage: Any, server_args: Any) -> _Seam | None:
    config = settings.from_server_args(server_args)
    if config.condition_hook is None and config.embedding_cache is None:
        return None
    what = "embedding cache" if config.condition_hook is None else "condition hook"
    if _name(type(stage)) != _STAGE:
        logger.warning("no %s for %s: what it reads of a request is not known", what, type(stage).__name__)
        return None
    if int(getattr(server_args, "num_gpus", 1) or 1) > 1:
        logger.warning("no %s for a role of several ranks: they must encode in step", what)
        return None
    identity = identity_of(server_args, config)
    if identity is None:
        logger.warning(
            "no %s: which weights the text encoder has is not known; set encoder_revision, and load it "
            "without LoRA, quantization and components of other models",
            what,
        )
        return None
    try:
        made_by = canonical(_made_by(stage, server_args))
    except IncompleteKey as exc:
        logger.warning("no %s: %s", what, exc)
        return None
    hook = _asks(vars(stage).get(_LENT)) if config.condition_hook is None else named(config.condition_hook)()
    if hook is None:
        logger.warning("no embedding cache: this process has none for the pipeline's %s", type(stage).__name__)
        return None
    if not callable(hook):
        message = f"condition_hook={config.condition_hook!r} makes a {type(hook).__name__}, which cannot be called"
        raise ConfigError(message, field="condition_hook")
    logger.info("what the text encoder of %s@%s makes is remembered", *identity)
    return _Seam(hook, *identity, made_by=made_by)


def _asks(cache: EmbeddingCache | None) -> Hook | None:
    """Return the hook of a role's own cache."""
    if cache is None:
        return None
    # What comes back is what an encoding of a stage gave, here or elsewhere; it is looked at.
    return lambda key, encode: cast("Mapping[str, object]", cache.get_or_encode(key, encode))


def _made_by(stage: Any, server_args: Any) -> dict[str, object]:
    import torch

    from moonrelay_sglang import plugin

    device = torch.device(_device())
    return {
        "host": plugin.host_version(),
        "torch": str(torch.__version__),
        "libraries": {name: version(name) for name in _LIBRARIES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(device),
        "precision": torch.get_float32_matmul_precision(),
        "stage": type(stage),
        "encoders": [
            {"class": type(one), "types": {str(weight.dtype) for weight in one.parameters()}, "training": one.training}
            for one in stage.text_encoders
        ],
        "tokenizers": [type(one) for one in stage.tokenizers],
        "pipeline": server_args.pipeline_config,
        "settings": {name: getattr(server_args, name, None) for name in _COMPUTES},
    }


def _processor(device: Any) -> list[object]:
    """Return what decides a sum's order where no accelerator computes it."""
    import torch

    return [device.type, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]


def _weights_as_loaded() -> bool:
    """Return whether no weights were changed while the process ran; the host counts that, and LoRAs too."""
    from sglang.multimodal_gen.runtime.cache.conditioning import conditioning_weights_epoch

    return bool(conditioning_weights_epoch() == 0)


def _device() -> Any:
    from sglang.multimodal_gen.runtime.distributed import get_local_torch_device

    return get_local_torch_device()


def _is_there(value: object) -> bool:
    """Return whether a field of a request has been filled already."""
    return value is not None and value is not False and not (isinstance(value, (list, tuple)) and not value)


def _seen(part: object) -> Any:
    """Return a part of the host's fingerprint in plain form.

    Raises:
        IncompleteKey: It stands for a tensor by shape and device alone, or for something of an unknown kind.
    """
    if isinstance(part, (list, tuple)):
        if len(part) == 4 and part[0] == "tensor" and isinstance(part[3], str):
            message = "the host's fingerprint leaves a tensor's content out"
            raise IncompleteKey(message)
        return [_seen(item) for item in part]
    if part is None or type(part) in (bool, int, float, str, bytes):
        return part
    message = f"a {_name(type(part))} in the host's fingerprint decides bytes in a way that is not known"
    raise IncompleteKey(message)


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _own(value: Any, device: Any) -> Any:
    """Return the request's own copy, on the role's device."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().clone().to(device)
    if isinstance(value, (list, tuple)):
        parts = [_own(part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        return {name: _own(part, device) for name, part in value.items()}
    return value
