"""The seam round a runner's text encoder: a text that was encoded before is not encoded again.

Owns the keys: everything that decides the bytes, or no key at all, and then nothing is kept. In the place of the host's
text encoder the runner gets one that asks the role's cache first, text by text, so that negative prompts are kept
apart. Where the host loads its encoder anew for each request (``lazy_load``, ``unload_modules``), that is put off until
a text has to be encoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cache.files import FileDigests
from moonrelay.cache.keys import EmbeddingKey

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache

logger = logging.getLogger(__name__)

_ENCODERS: Final = "lightx2v.models.input_encoders.hf"
#: What tokenizes and encodes beside the host, by version; most are there for one way of quantizing only.
_LIBRARIES: Final = (
    "transformers",
    "tokenizers",
    "ftfy",
    "regex",
    "vllm",
    "sgl-kernel",
    "torchao",
    "triton",
    "q8-kernels",
    "compressed-tensors",
    "bitsandbytes",
)
#: Settings with such a name say where files lie; what is in them is in the key by its content.
_PLACES: Final = ("_path", "_ckpt")


@dataclass(frozen=True, slots=True)
class _Kind:
    """One of the host's text encoders.

    Attributes:
        encoder: Its class.
        files: Gives its weights and its tokenizer, files or folders.
        settings: Which of the host's settings decide what it makes; one that ends in an underscore stands for all that
            begin so.
        length: The setting that bounds a text's length, and the bound where it is not set.
    """

    encoder: str
    files: Callable[[Any, Mapping[str, Any]], tuple[Path, Path]]
    settings: tuple[str, ...]
    length: tuple[str, int | None]


def _files_of_t5(encoder: Any, _config: Mapping[str, Any]) -> tuple[Path, Path]:
    return Path(encoder.checkpoint_path), Path(encoder.tokenizer_path)


def _files_of_qwen(_encoder: Any, config: Mapping[str, Any]) -> tuple[Path, Path]:
    model = Path(config["model_path"])
    weights = config["qwen25vl_quantized_ckpt"] if config.get("qwen25vl_quantized") else model / "text_encoder"
    return Path(weights), Path(config.get("qwen25vl_tokenizer_path", model / "tokenizer"))


#: By the class of runners whose ``load_text_encoder`` makes it.
_KINDS: Final[Mapping[str, _Kind]] = {
    "lightx2v.models.runners.wan.wan_runner.WanRunner": _Kind(
        encoder=f"{_ENCODERS}.wan.t5.model.T5EncoderModel",
        files=_files_of_t5,
        settings=("t5_", "text_len", "cpu_offload", "dummy_model"),
        length=("text_len", None),
    ),
    "lightx2v.models.runners.qwen_image.qwen_image_runner.QwenImageRunner": _Kind(
        encoder=f"{_ENCODERS}.qwen25.qwen25_vlforconditionalgeneration.Qwen25_VLForConditionalGeneration_TextEncoder",
        files=_files_of_qwen,
        settings=(
            "qwen25vl_",
            "prompt_template_",
            "tokenizer_",
            "text_encoder_",
            "task",
            "layered",
            "cpu_offload",
            "dummy_model",
        ),
        length=("tokenizer_max_length", 4096),
    ),
}


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What was found out of an encoder when it was loaded.

    Attributes:
        kind: Which one it is.
        encoder: Whose weights of which revision.
        tokenizer: Likewise.
        settings: As they were then.
        host: What of the process decides more.
        looked: Changes when a file becomes another one.
    """

    kind: _Kind
    encoder: str
    tokenizer: str
    settings: Mapping[str, Any]
    host: Mapping[str, object]
    looked: object


class TextSeam:
    """Puts a cache before the text encoders of one runner.

    Args:
        cache: The role's cache.
        revision: Of the encoder's weights and its tokenizer, where somebody said it; else their files are read.

    Threads: the runner's.
    """

    def __init__(self, cache: EmbeddingCache, revision: str | None = None) -> None:
        self._cache = cache
        self._revision = revision
        self._digests = FileDigests()
        self._loaded: _Loaded | None = None

    def load(self, owner: type, config: Mapping[str, Any], load: Callable[[], Any]) -> Any:
        """Do what the host's ``load_text_encoder`` does, and put the cache before what that gives.

        Args:
            owner: The class whose method it is.
            config: The host's.
            load: The host's own.

        Blocks: for the host's loading, and the first time while the encoder's files are read once more.
        """
        kind = _KINDS.get(f"{owner.__module__}.{owner.__qualname__}")
        if kind is None:
            return _left(load(), f"what the text encoder of {owner.__qualname__} makes depends on is not known")
        settings = _settings_of(kind, config)
        looked = self._look(kind, config)
        before = self._loaded
        anew = bool(config.get("lazy_load") or config.get("unload_modules"))
        if anew and before is not None and (before.kind, before.settings, before.looked) == (kind, settings, looked):
            return [Remembering(lambda text, encode: self._ask(before, config, text, encode), load=lambda: load()[0])]
        self._loaded = None
        encoders = load()
        found = self._find_out(kind, config, settings, looked, encoders)
        if isinstance(found, str):
            return _left(encoders, found)
        self._loaded = found
        return [Remembering(lambda text, encode: self._ask(found, config, text, encode), encoder=encoders[0])]

    def _ask(self, loaded: _Loaded, config: Mapping[str, Any], text: str, encode: Callable[[], Any]) -> Any:
        return self._cache.get_or_encode(_key_of(loaded, config, text), encode)

    def _find_out(
        self, kind: _Kind, config: Mapping[str, Any], settings: Mapping[str, Any], looked: object, encoders: Any
    ) -> _Loaded | str:
        """Return what decides what an encoder makes, or in words why that is not known."""
        names = [f"{type(one).__module__}.{type(one).__qualname__}" for one in encoders]
        if names != [kind.encoder]:
            return f"what a text encoder of {', '.join(names) or 'no kind'} makes depends on is not known"
        if config.get("dummy_model"):
            return "its weights are random"
        weights, tokenizer = kind.files(encoders[0], config)
        name = kind.encoder.rpartition(".")[2]
        if self._revision is not None:
            # A word such as "v2" is one model's.
            name = f"{Path(config['model_path']).name}/{weights.name}/{name}"
            revisions: tuple[str | None, str | None] = (self._revision, self._revision)
        else:
            revisions = self._digests.of(weights), self._digests.of(tokenizer)
            if None in revisions or self._look(kind, config) != looked:
                return f"{weights} and {tokenizer} cannot be read, or changed meanwhile; set encoder_revision"
        host = _host()
        if host is None:
            return "the host's own files cannot be read"
        loaded = _Loaded(kind, f"{name}@{revisions[0]}", f"{name}@{revisions[1]}", settings, host, looked)
        if _key_of(loaded, config, "a prompt") is None:
            return "a setting of the host has no exact form"
        logger.info("[moonrelay] what the text encoder %s makes is remembered", loaded.encoder)
        return loaded

    def _look(self, kind: _Kind, config: Mapping[str, Any]) -> object:
        """Return what changes when one of the files that an encoder may be loaded from becomes another one."""
        if self._revision is not None:
            return None
        places = {name: value for name, value in _chosen(kind, config) if name.endswith(_PLACES)}
        places["model_path"] = config.get("model_path")
        return {name: self._digests.look(Path(place)) for name, place in places.items() if isinstance(place, str)}


class Remembering:
    """A text encoder of the host's whose texts are looked for in a cache first; all else of it is the host's.

    Args:
        ask: Called with a text and with what encodes it.
        encoder: The host's; without, ``load`` gives it when it is first needed.
        load: Loads it.

    Threads: the runner's.
    """

    def __init__(
        self,
        ask: Callable[[str, Callable[[], Any]], Any],
        *,
        encoder: Any = None,
        load: Callable[[], Any] | None = None,
    ) -> None:
        self.__dict__.update(_ask=ask, _encoder=encoder, _load=load)

    def infer(self, texts: Any, *args: Any, **kwargs: Any) -> Any:
        """Do what the host's does; a single text without images is asked for in the cache."""
        if args or kwargs or not isinstance(texts, list) or len(texts) != 1 or type(texts[0]) is not str:
            return self._get().infer(texts, *args, **kwargs)
        return self._ask(texts[0], lambda: self._get().infer(texts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._get(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._get(), name, value)

    def _get(self) -> Any:
        own = self.__dict__
        if own["_encoder"] is None and own["_load"] is not None:
            own["_encoder"] = own["_load"]()
        return own["_encoder"]


# -- inside -----------------------------------------------------------------------------------------------------------


def _left(encoders: Any, why: str) -> Any:
    logger.warning("[moonrelay] no embedding cache: %s", why)
    return encoders


def _key_of(loaded: _Loaded, config: Mapping[str, Any], text: str) -> EmbeddingKey | None:
    import torch
    from lightx2v.utils.envs import GET_DTYPE

    length, usual = loaded.kind.length
    return EmbeddingKey.complete(
        encoder=loaded.encoder,
        tokenizer=loaded.tokenizer,
        prompt=text,
        role="text",  # which one a text is does not change what is made of it
        params={
            "dtype": str(GET_DTYPE()),
            "max_length": loaded.settings.get(length, usual),
            "lora": None,  # the host's are of the denoiser
            # The encoder reads some as it is loaded and others as it runs.
            "settings": [loaded.settings, _settings_of(loaded.kind, config)],
            "host": loaded.host,
            "precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
        },
    )


def _chosen(kind: _Kind, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if any(name == one or (one.endswith("_") and str(name).startswith(one)) for one in kind.settings):
            yield str(name), value


def _settings_of(kind: _Kind, config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in _chosen(kind, config) if not name.endswith(_PLACES)}


def _plain(value: Any) -> Any:
    """Return a value that stays as it is, whatever the host does to its own."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _host() -> dict[str, object] | None:
    """Return what of this process decides what an encoder makes; ``None`` where that cannot be told.

    The host's version has never changed, so its code says which it is.
    """
    import lightx2v
    import lightx2v_platform
    import torch
    from lightx2v_platform.base.global_var import AI_DEVICE

    digests = FileDigests()
    code = [digests.of(Path(str(module.__file__)).parent, pattern="*.py") for module in (lightx2v, lightx2v_platform)]
    if None in code:
        return None
    on_cuda = str(AI_DEVICE).startswith("cuda") and torch.cuda.is_available()
    return {
        "code": code,
        "torch": str(torch.__version__),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "device": [str(AI_DEVICE), torch.cuda.get_device_name() if on_cuda else None],
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


__all__ = ["Remembering", "TextSeam"]
