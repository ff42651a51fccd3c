"""What a cached thing is known by: a digest of everything that decides its bytes, or no key at all.

Owns the exact form of values (`canonical`), the digest of them (`digest_of`), and `EmbeddingKey`. Never guesses: what
has no exact form is refused, and then nothing is cached. Keeps prompts out of labels and representations. Importing it
loads no torch.
"""

from __future__ import annotations

import enum
import hashlib
import logging
import math
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from dataclasses import fields as fields_of
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeAlias, runtime_checkable

import msgspec

from moonrelay.errors import ConfigError, UnsupportedTensor
from moonrelay.payload import StagePayload, copy_leaf, flatten

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Of what an embedding's key is made, and in which order; another one makes every entry a miss.
_EMBEDDING: Final = "moonrelay.embedding/1"
_MAX_DEPTH: Final = 64
#: What `EmbeddingKey.params` must say.
_NEEDED: Final = ("dtype", "max_length", "lora")

#: One of a request's images: a tensor, an array, a picture, or a file's bytes.
Image: TypeAlias = object


class IncompleteKey(ConfigError):
    """Something that decides the bytes is not known, so nothing will be cached; the message names it."""


@runtime_checkable
class CacheKey(Protocol):
    """What a cache takes for a key; anything with these two attributes is one."""

    @property
    def digest(self) -> str:
        """64 hexadecimal digits of everything that decides the bytes."""
        ...

    @property
    def label(self) -> Mapping[str, str]:
        """What may be shown of it in logs and listings; never what a user wrote."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingKey:
    """What decides the bytes of a text (or image) encoder's result, on whatever device.

    Two keys are equal when their digests are. One prompt and a list of that one prompt are the same; characters are
    never normalised, since tokenizers see them as they are.

    Args:
        encoder: Whose weights: ``name@revision``, e.g. ``google/umt5-xxl@<commit>``.
        prompt: The text, or the texts of a batch.
        role: ``"positive"``, ``"negative"``, or the user's own word.
        params: Everything else that encoding is told, by name. Must say ``dtype``, ``max_length`` (``None`` for no
            limit) and ``lora`` (``None``, or a mapping of ``adapter@revision`` to scale, in the order in which they are
            applied).
        tokenizer: ``name@revision`` where it is not the encoder's own.
        template: What the prompt is put into, where there is such a thing.
        images: What else is encoded, by content.

    Attributes:
        digest: 64 hexadecimal digits of all that.

    Raises:
        IncompleteKey: A field does not say everything; the message names it. Nothing can be cached then.
    """

    encoder: str
    prompt: str | Sequence[str] = field(repr=False)
    role: str
    params: Mapping[str, object] = field(repr=False)
    tokenizer: str | None = None
    template: object = field(default=None, repr=False)
    images: Sequence[Image] = field(default=(), repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        check_revision("encoder", self.encoder)
        if self.tokenizer is not None:
            check_revision("tokenizer", self.tokenizer)
        if type(self.role) is not str or not self.role:
            raise _incomplete("role", f"{self.role!r:.40} is no word such as 'positive' or 'negative'")
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not isinstance(prompts, (list, tuple)) or not prompts or not all(type(one) is str for one in prompts):
            raise _incomplete("prompt", f"a {type(self.prompt).__qualname__} is no text and no list of texts")
        params = _params(self.params)
        if not isinstance(self.images, (list, tuple)):
            raise _incomplete("images", f"a {type(self.images).__qualname__} is no list of images")
        for image in self.images:
            if image is None or isinstance(image, (str, int, float)):
                raise _incomplete("images", f"a {type(image).__qualname__} does not say what the image shows")
        parts = {
            "encoder": self.encoder,
            "tokenizer": self.tokenizer,
            "role": self.role,
            "prompt": prompts,
            "params": params,
            "template": self.template,
            "images": self.images,
        }
        plain: list[object] = [_EMBEDDING]
        for name, part in parts.items():
            try:
                plain.append(canonical(part))
            except IncompleteKey as exc:
                raise _incomplete(name, exc.message) from exc
        object.__setattr__(self, "digest", _digest(plain))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, EmbeddingKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def label(self) -> Mapping[str, str]:
        """Encoder and role; never the prompt."""
        return {"encoder": self.encoder, "role": self.role}

    @classmethod
    def complete(
        cls,
        *,
        encoder: str,
        prompt: str | Sequence[str],
        role: str,
        params: Mapping[str, object],
        tokenizer: str | None = None,
        template: object = None,
        images: Sequence[Image] = (),
    ) -> Self | None:
        """Return the key, or ``None`` where it cannot be complete; `EmbeddingCache.get_or_encode` takes both."""
        try:
            return cls(
                encoder=encoder,
                prompt=prompt,
                role=role,
                params=params,
                tokenizer=tokenizer,
                template=template,
                images=images,
            )
        except IncompleteKey as exc:
            logger.debug("no key for an embedding: %s", exc)
            return None


def canonical(value: Any, *, plain: bool = False) -> Any:
    """Return a value in plain form, such that equal forms are equal values.

    Told apart: types (a bool is no int, an int no float), every bit of a float, a dtype and its name, a character and
    its decomposed form. The same: a list and a tuple of the same items, mappings and sets in whatever order. Tensors,
    numpy arrays and PIL pictures are said by their content, a class, an enum's member or a function by its name.

    Args:
        value: None, bool, int, float, complex, str, bytes; lists, tuples, mappings and sets of such; enums, classes,
            functions, dataclasses; ``torch.dtype``, ``torch.device``, dense tensors; arrays and pictures.
        plain: Take values of a call only: no sets, enums, classes, functions and dataclasses, no mapping with a name
            that is no text.

    Returns:
        A tree of None, bool, int, float, str, bytes, lists and dicts.

    Raises:
        IncompleteKey: What the value is cannot be said completely.
    """
    return _canonical(value, plain, 0)


def digest_of(*parts: object) -> str:
    """Return 64 hexadecimal digits, such that no two different lists of parts have the same.

    Args:
        parts: Begin with a word for what the digest is of, and its version.

    Raises:
        IncompleteKey: As `canonical`.
    """
    return _digest([canonical(part) for part in parts])


def check_revision(name: str, value: object) -> None:
    """Raise `IncompleteKey` for what is not ``name@revision``; the message calls it ``name``."""
    known, at, revision = value.rpartition("@") if type(value) is str else ("", "", "")
    if not known.strip() or not at or not revision.strip():
        raise _incomplete(name, f"{value!r:.80} does not say whose weights of which revision: give 'name@revision'")


def plain_loras(name: str, given: object) -> list[list[object]] | None:
    """Return LoRAs in one form: pairs of ``adapter@revision`` and scale, in their order; ``None`` for none.

    Raises:
        IncompleteKey: They are no such mapping; the message calls them ``name``.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _incomplete(name, f"a {type(given).__qualname__} is no mapping of 'adapter@revision' to scale")
    pairs: list[list[object]] = []
    for adapter, scale in given.items():
        check_revision(name, adapter)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
            raise _incomplete(name, f"{scale!r:.40} is no scale of {adapter}")
        pairs.append([adapter, float(scale)])
    return pairs or None


# -- inside -----------------------------------------------------------------------------------------------------------


def _incomplete(name: str, why: str) -> IncompleteKey:
    return IncompleteKey(f"{name}: {why}; the key is not complete, and nothing will be cached under it", field=name)


def _params(given: object) -> dict[str, object]:
    """Return the parameters with their LoRAs in one form.

    Raises:
        IncompleteKey: They do not say what they must.
    """
    if not isinstance(given, Mapping) or not all(type(name) is str for name in given):
        raise _incomplete("params", f"a {type(given).__qualname__} is no mapping of names to values")
    for name in _NEEDED:
        if name not in given:
            raise _incomplete(f"params[{name!r}]", "it is missing")
    dtype, length, lora = (given[name] for name in _NEEDED)
    if not (_is_dtype(dtype) or (type(dtype) is str and dtype)):
        raise _incomplete("params['dtype']", f"{dtype!r:.40} is no dtype")
    if length is not None and (type(length) is not int or length < 1):
        raise _incomplete("params['max_length']", f"{length!r:.40} is no length")
    return {**given, "lora": plain_loras("params['lora']", lora)}


def _canonical(value: Any, plain: bool, depth: int) -> Any:
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if depth >= _MAX_DEPTH:
        message = f"it is nested deeper than {_MAX_DEPTH}"
        raise IncompleteKey(message)
    if type(value) in (list, tuple):
        return [_canonical(item, plain, depth + 1) for item in value]
    if isinstance(value, Mapping):
        if plain and not all(type(name) is str for name in value):
            message = "a mapping's name is no text"
            raise IncompleteKey(message)
        pairs = (
            [_canonical(name, plain, depth + 1), _canonical(part, plain, depth + 1)] for name, part in value.items()
        )
        return {"mapping": sorted(pairs, key=_encoded)}
    if type(value) is complex:
        return {"complex": [value.real, value.imag]}
    said = None if plain else _said_by_name(value, depth)
    return _by_content(value) if said is None else said


def _said_by_name(value: Any, depth: int) -> dict[str, Any] | None:
    if type(value) in (set, frozenset):
        return {"set": sorted((_canonical(item, False, depth + 1) for item in value), key=_encoded)}
    if isinstance(value, enum.Enum):
        if value.name is None:
            return {"enum": _name(type(value)), "flags": _canonical(value.value, False, depth + 1)}
        return {"enum": _name(type(value)), "member": value.name}
    if isinstance(value, type):
        return {"class": _name(value)}
    if isinstance(value, FunctionType):
        if value.__closure__ is not None or "<lambda>" in value.__qualname__:
            message = f"the function {value.__qualname__} is not said by its name"
            raise IncompleteKey(message)
        return {"function": _name(value)}
    if is_dataclass(value):
        names = {entry.name for entry in fields_of(value)}.union(getattr(value, "__dict__", ()))
        content = {name: getattr(value, name) for name in names if hasattr(value, name)}
        return {"class": _name(type(value)), "of": _canonical(content, False, depth + 1)}
    return None


def _name(kind: Any) -> str:
    if kind.__module__ == "__main__":
        message = f"{kind.__module__}.{kind.__qualname__} may be something else in another process"
        raise IncompleteKey(message)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_dtype(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype)


def _by_content(value: Any) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value)}
    if torch is not None and type(value) is torch.Tensor:
        return _of_tensor(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind == "numpy.ndarray" and not value.dtype.hasobject and value.dtype.names is None:
        return {"array": value.dtype.str, "shape": list(value.shape), "of": _hashed(value.tobytes())}
    if kind == "PIL.Image.Image":
        return {
            "picture": value.mode,
            "size": list(value.size),
            "palette": [value.palette.mode, value.getpalette(None)] if value.palette is not None else None,
            "transparency": canonical(value.info.get("transparency"), plain=True),
            "of": _hashed(value.tobytes()),
        }
    message = f"a {kind} decides bytes in a way that is not known"
    raise IncompleteKey(message)


def _of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    import torch

    try:
        flat = flatten(StagePayload("key", "key", tensor=tensor))
    except UnsupportedTensor as exc:
        raise IncompleteKey(exc.message) from exc
    spec = msgspec.structs.replace(flat.specs[0], order=None)
    content = bytearray(spec.nbytes)
    if content:
        copy_leaf(flat.leaves[0], spec, torch.frombuffer(content, dtype=torch.uint8))
    return {"tensor": spec.dtype, "shape": list(spec.shape), "of": _hashed(content)}


def _hashed(data: bytes | bytearray) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(_encoded(parts), digest_size=32).hexdigest()


def _encoded(value: Any) -> bytes:
    """Return bytes of a canonical value, such that no two different ones have the same."""
    pieces: list[bytes] = []
    _encode(value, pieces)
    return b"".join(pieces)


def _encode(value: Any, pieces: list[bytes]) -> None:
    if isinstance(value, dict):
        _item(pieces, b"d", str(len(value)).encode())
        for name, part in value.items():
            _encode(name, pieces)
            _encode(part, pieces)
    elif isinstance(value, list):
        _item(pieces, b"l", str(len(value)).encode())
        for part in value:
            _encode(part, pieces)
    elif isinstance(value, str):
        _item(pieces, b"s", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        _item(pieces, b"b", value)
    elif isinstance(value, float):
        _item(pieces, b"f", struct.pack("<d", value))
    elif isinstance(value, int) and not isinstance(value, bool):
        _item(pieces, b"i", b"%x" % value)
    else:  # None, False, True
        _item(pieces, b"c", repr(value).encode())


def _item(pieces: list[bytes], kind: bytes, data: bytes) -> None:
    pieces.append(b"%b%d:" % (kind, len(data)))
    pieces.append(data)
