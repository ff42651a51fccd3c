"""Which of a request's fields travel on which hop, and in what form.

Owns the split of the host's ``Req`` into tensors, values that the host's JSON keeps exactly, and values that go with
the payload because JSON would change them (tuples, bytes, images, NaN, trees with tensors inside); the refusal, by
name, of what cannot be carried; and what a receiving role is known not to need. Imports nothing of the host and no
torch before it is needed; the host's classes are known by the names of their fields only.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from moonrelay.errors import UnsupportedTensor, WireError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Fields of ``Req`` that the host leaves behind on every hop, and which the next role's stages read: denoising reads
#: ``image_embeds`` and, through model configs, the condition images and their sizes; decoding reads trajectories and
#: what a denoiser has decoded already.
CARRIED: Final = frozenset(
    {
        "condition_image",
        "vae_image",
        "pixel_values",
        "preprocessed_image",
        "image_embeds",
        "original_condition_image_size",
        "vae_image_sizes",
        "output",
        "audio",
        "audio_sample_rate",
        "trajectory_timesteps",
        "trajectory_latents",
        "trajectory_audio_latents",
    }
)

#: What the host's plain `DecodingStage` does not read: it takes latents, the trajectory where one is wanted, and plain
#: settings, which always travel. (Attention masks, embeddings and conditions are the bulk of a prompt's tensors.)
NOT_DECODED: Final = frozenset(
    {
        "audio_prompt_embeds",
        "clip_embedding_neg",
        "clip_embedding_pos",
        "condition_image",
        "image_embeds",
        "image_latent",
        "neg_pooled_embeds",
        "negative_attention_mask",
        "negative_audio_prompt_embeds",
        "negative_prompt_embeds",
        "negative_prompt_embeds_mask",
        "noise_pred",
        "pixel_values",
        "pooled_embeds",
        "preprocessed_image",
        "prompt_attention_mask",
        "prompt_embeds",
        "prompt_embeds_mask",
        "timesteps",
        "vae_image",
        "y",
    }
)

#: Pipelines of the host whose only stage in the decoder is that plain `DecodingStage` (``add_standard_decoding_stage``,
#: directly or by its t2i, ti2i and ti2v recipes). Any other one is sent everything: a decoding stage of its own may
#: read what it likes, and a field that is missing there is a wrong picture, not an error.
PLAINLY_DECODED: Final = frozenset(
    {
        "Flux2KleinPipeline",
        "Flux2Pipeline",
        "FluxPipeline",
        "HunyuanVideoPipeline",
        "QwenImageEditPipeline",
        "QwenImageEditPlusPipeline",
        "QwenImagePipeline",
        "StableDiffusion3Pipeline",
        "WanCausalDMDPipeline",
        "WanDMDPipeline",
        "WanImageToVideoDmdPipeline",
        "WanImageToVideoPipeline",
        "WanPipeline",
        "ZImagePipeline",
    }
)

#: Sending role, and what its receivers do not need.
NOT_NEEDED: Final[Mapping[str, frozenset[str]]] = MappingProxyType({"denoiser": NOT_DECODED})

#: The key under which a packed value says what it was.
_MARK: Final = "__moonrelay__"
_EXTRA: Final = "_extra_"
_TRACE: Final = "_trace_state"
#: Modes of images whose bytes are all of the image.
_IMAGE_MODES: Final = frozenset(
    {"1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16"}
)
#: Takes extras and two dicts, and adds to these what it makes of their tensors and of the rest.
Trees = Callable[[Mapping[str, Any], dict[str, Any], dict[str, Any]], None]
_PLAIN_BASES: Final[tuple[Any, ...]] = (str, int, float, bytes)
_INT64: Final = range(-(1 << 63), 1 << 63)


def extract(
    req: Any, *, left: Collection[str], left_of_sampling: Collection[str] = (), trees: Trees | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take what travels out of a request.

    Args:
        req: The host's ``Req``: a dataclass with ``sampling_params``, ``extra`` and ``trace_ctx``.
        left: Its fields that never travel; what is in `CARRIED` does all the same.
        left_of_sampling: As ``left``, of its sampling parameters.
        trees: The host's way to take tensors out of an extra. What it takes, its roles' other ranks get as tensors too.

    Returns:
        Tensors and lists of tensors by field; all other values by field, as they are. Sampling parameters are among
        the latter, extras under ``_extra_`` and their key.

    Raises:
        UnsupportedTensor: An extra holds a tensor in something that cannot be carried; names it.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    kept = frozenset(left) - CARRIED
    for found in dataclasses.fields(req):
        if found.name in kept:
            continue
        value = getattr(req, found.name, None)
        if _is_default(value, found):
            continue
        (tensors if _is_tensors(value) else values)[found.name] = _simple(value)
    _add_extras(getattr(req, "extra", None) or {}, tensors, values, trees)
    _add_sampling(req, values, left_of_sampling)
    trace: Any = getattr(req, "trace_ctx", None)
    if getattr(trace, "tracing_enable", False):
        state = trace.__getstate__()
        if state and state.get("tracing_enable"):
            values[_TRACE] = state
    return tensors, values


def needed(role: str, pipeline: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the next role may need.

    Args:
        role: The sending role.
        pipeline: Name of the host's pipeline; an unknown one needs everything.
        given: Fields by name.
    """
    dropped = NOT_NEEDED.get(role, frozenset()) if pipeline in PLAINLY_DECODED else frozenset()
    return {name: value for name, value in given.items() if name not in dropped}


def split(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Part values that JSON keeps exactly from those that it would change.

    Returns:
        The former as they are; the latter packed, as `unpack` takes them back.

    Raises:
        UnsupportedTensor: A value cannot be carried; names the field, and the place in it.
    """
    plain: dict[str, Any] = {}
    packed: dict[str, Any] = {}
    for name, value in values.items():
        try:
            if _is_json(value):
                plain[name] = value
            else:
                packed[name] = pack(value, name)
        except RecursionError as exc:
            raise _without_end(name) from exc
    return plain, packed


def pack(value: Any, field: str) -> Any:
    """Return a value in the terms of a payload: tensors, plain values, plain containers.

    Raises:
        UnsupportedTensor: It cannot be carried; names ``field`` and the place in it.
    """
    kind = type(value)
    if kind in (list, tuple):
        return kind(pack(item, f"{field}[{place}]") for place, item in enumerate(value))
    if kind is dict:
        if _MARK in value:
            pairs = [[pack(key, field), pack(item, f"{field}[{key!r}]")] for key, item in value.items()]
            return {_MARK: "dict", "items": pairs}
        return {key: pack(item, f"{field}[{key!r}]") for key, item in value.items()}
    if kind in (set, frozenset):
        return kind(pack(item, field) for item in value)
    if _is_plain(value) or _is_tensor(value):
        return value
    if isinstance(value, enum.Enum):
        return value.name  # as the host
    if _of(value, "numpy", "ndarray"):
        return _pack_array(value, field)
    if _of(value, "numpy", "generic"):
        return pack(value.item(), field)
    if _of(value, "PIL.Image", "Image"):
        return _pack_image(value, field)
    for plain in _PLAIN_BASES:
        # A subclass of a plain type, a str with methods for one: what it is worth is its value.
        if isinstance(value, plain):
            return plain(value)
    message = (
        f"field {field!r} holds a {kind.__module__}.{kind.__qualname__}, which cannot be sent to the next role; "
        "a stage must leave tensors, arrays, images and plain values there"
    )
    raise UnsupportedTensor(message, field=field)


def unpack(value: Any) -> Any:
    """Return what `pack` was given.

    Raises:
        WireError: It says that it was something that is not known here.
    """
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return kind(unpack(item) for item in value)
    if kind is not dict:
        return value
    if _MARK not in value:
        return {key: unpack(item) for key, item in value.items()}
    word = value[_MARK]
    restore = {"dict": _unpack_dict, "array": _unpack_array, "image": _unpack_image}.get(word)
    if restore is None:
        message = (
            f"a value was packed as {word!r}, which this version does not know; install the same Moonrelay everywhere"
        )
        raise WireError(message, field=_MARK)
    return restore(value)


def nbytes_of(tree: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    if _is_tensor(tree):
        return int(tree.numel() * tree.element_size())
    if isinstance(tree, Mapping):
        return sum(nbytes_of(item) for item in tree.values())
    if isinstance(tree, (list, tuple, set, frozenset)):
        return sum(nbytes_of(item) for item in tree)
    return 0


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a tree with ``change`` done to its tensors, in containers of the same kinds."""
    if _is_tensor(tree):
        return change(tree)
    if type(tree) is dict:
        return {key: map_tensors(item, change) for key, item in tree.items()}
    if type(tree) in (list, tuple, set, frozenset):
        return type(tree)(map_tensors(item, change) for item in tree)
    return tree


# -- inside ---------------------------------------------------------------------------------------------------------


def _add_extras(extra: Any, tensors: dict[str, Any], values: dict[str, Any], trees: Trees | None) -> None:
    for key, value in extra.items():
        if key.startswith("_"):
            continue  # the host's word for what stays in its process
        try:
            pack(value, f"extra[{key!r}]")
        except RecursionError as exc:
            raise _without_end(f"extra[{key!r}]") from exc
        except UnsupportedTensor as exc:
            if _holds_tensor(value):
                raise
            # The host drops such extras without a word, and its models are made for that.
            logger.warning("not sent to the next role: %s", exc.message)
            continue
        if trees is not None and _holds_tensor(value):
            taken: dict[str, Any] = {}
            trees({key: value}, tensors, taken)
            values.update(taken)
            if taken:
                continue
        values[f"{_EXTRA}{key}"] = value


def _add_sampling(req: Any, values: dict[str, Any], left: Collection[str]) -> None:
    sampling = getattr(req, "sampling_params", None)
    if sampling is None:
        return
    for found in dataclasses.fields(sampling):
        if found.name in left or found.name in values:
            continue
        value = getattr(sampling, found.name, None)
        # Also one that equals its default: the receiver makes its own object, maybe with other defaults.
        if value is not None or not _is_none_by_default(found):
            values[found.name] = _simple(value)
    if getattr(req, "generator", None) is not None and getattr(req, "seed", None) is not None:
        values["seed"] = _simple(req.seed)


def _simple(value: Any) -> Any:
    """Return enums and single numbers as the host sends them."""
    if isinstance(value, enum.Enum):
        return value.name
    return value.item() if _of(value, "numpy", "generic") else value


def _is_default(value: Any, found: dataclasses.Field[Any]) -> bool:
    if found.default is not dataclasses.MISSING:
        # Identity and type first: comparing a tensor or an array gives no truth.
        return value is found.default or (
            type(value) is type(found.default) and _is_plain(value) and bool(value == found.default)
        )
    if found.default_factory is not dataclasses.MISSING:
        return type(value) in (list, dict) and not value
    return False


def _is_none_by_default(found: dataclasses.Field[Any]) -> bool:
    return found.default is None or (
        found.default is dataclasses.MISSING and found.default_factory is dataclasses.MISSING
    )


def _is_json(value: Any) -> bool:
    """Whether JSON brings it back as it is."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return kind is not str or value.isascii() or _is_utf8(value)
    if kind is int:
        return value in _INT64
    if kind is float:
        return math.isfinite(value)
    if kind is list:
        return all(_is_json(item) for item in value)
    if kind is dict:
        return _MARK not in value and all(type(key) is str and _is_json(item) for key, item in value.items())
    return False


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_plain(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, complex, str, bytes, bytearray):
        return True
    torch_module = sys.modules.get("torch")
    if torch_module is None:
        return False
    return type(value) in (torch_module.dtype, torch_module.device, torch_module.Size)


def _is_tensor(value: Any) -> bool:
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def _is_tensors(value: Any) -> bool:
    return _is_tensor(value) or (type(value) is list and len(value) > 0 and all(_is_tensor(item) for item in value))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_tensor(item) for item in value)
    return _is_tensor(value)


def _of(value: Any, module: str, name: str) -> bool:
    """Whether it is of a class of a module, if that was imported at all."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(value, found)


def _without_end(field: str) -> UnsupportedTensor:
    message = f"field {field!r} contains itself, or is nested too deep to be sent to the next role"
    return UnsupportedTensor(message, field=field)


def _bytes_tensor(raw: bytes | bytearray) -> Any:
    """Return bytes as a tensor: in a payload's memory, not in its handle."""
    import torch

    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _pack_array(array: Any, field: str) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.fields is not None or type(array).__name__ != "ndarray":
        what = f"a numpy {type(array).__name__} of {array.dtype}"
        message = f"field {field!r} holds {what}, which cannot be sent; use plain numbers"
        raise UnsupportedTensor(message, field=field)
    return {
        _MARK: "array",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "data": _bytes_tensor(array.tobytes()),
    }


def _unpack_array(packed: Mapping[str, Any]) -> Any:
    import numpy as np

    raw = packed["data"].cpu().numpy().tobytes()
    return np.frombuffer(raw, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"]).copy()


def _pack_image(image: Any, field: str) -> dict[str, Any]:
    if image.mode not in _IMAGE_MODES:
        message = (
            f"field {field!r} holds an image of mode {image.mode}, which cannot be sent; convert it to RGB or RGBA"
        )
        raise UnsupportedTensor(message, field=field)
    return {_MARK: "image", "mode": image.mode, "size": list(image.size), "data": _bytes_tensor(image.tobytes())}


def _unpack_image(packed: Mapping[str, Any]) -> Any:
    from PIL import Image

    return Image.frombytes(packed["mode"], tuple(packed["size"]), packed["data"].cpu().numpy().tobytes())


def _unpack_dict(packed: Mapping[str, Any]) -> dict[Any, Any]:
    items: Iterable[Any] = packed["items"]
    return {unpack(key): unpack(value) for key, value in items}
