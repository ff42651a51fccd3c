"""The host's payloads as Moonrelay's, and back.

Owns which of the host's types are translated: msgspec structs arrive as the dicts that the host's own serializer would
make of them, and a flat uint8 tensor arrives in the form that the host's KV path takes without a copy. Everything else
stays what it is. Moves no bytes.
"""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moonrelay.lease import DeleteOnConsume, Shared, Ttl
from moonrelay.payload import MAX_NAME, StagePayload

if TYPE_CHECKING:
    import torch

    from moonrelay_vllm_omni.directory import Edge

#: What a payload's tree means: the host's own fields, as its stages exchange them.
SCHEMA: Final = "vllm_omni.payload/1"
KIND: Final = "stage"
#: Where a handle says for which edge and key it was made.
EDGE_FIELD: Final = "edge"

#: Default factories that leave a field out when what they make is empty, as msgspec does.
_EMPTY: Final = (list, dict, set, bytearray)


class RawBuffer:
    """A flat uint8 tensor as the host's KV path takes it: ``tensor`` to read from, ``release()`` when done.

    The memory goes back to the pool when the last tensor on it dies; `release` only lets go of this one.
    """

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, 1-D uint8.

        Raises:
            ValueError: It was released.
        """
        if self._tensor is None:
            message = "the buffer was released"
            raise ValueError(message)
        return self._tensor

    def release(self) -> None:
        """Let go of the memory. Idempotent."""
        self._tensor = None

    def __len__(self) -> int:
        return 0 if self._tensor is None else self._tensor.numel()


def to_payload(edge: Edge, data: object, *, readers: int, ttl_s: float) -> StagePayload:
    """Return what is published for the host's ``put``.

    Args:
        edge: From which stage to which, under which key.
        data: The host's object; its tensors are referenced, not copied.
        readers: How many consumers take it; 0 is any number until the time is over.
        ttl_s: How long it is kept.

    Raises:
        ConfigError, UnsupportedTensor: When it is published; names the field.
    """
    tree = plain(data)
    return StagePayload(
        request_id=request_id_of(edge.key),
        kind=KIND,
        **({"tensor": tree} if _is_tensor(tree) else {"data": tree}),
        lease=_lease(readers, ttl_s),
        metadata={EDGE_FIELD: [edge.digest]},
        schema=SCHEMA,
    )


def to_host(tree: Any) -> object:
    """Return what the host's ``get`` hands out for a payload's tree."""
    return RawBuffer(tree) if _is_flat_bytes(tree) else tree


def _lease(readers: int, ttl_s: float) -> object:
    if readers == 1:
        return DeleteOnConsume(ttl_s)
    return Shared(readers, ttl_s) if readers else Ttl(ttl_s)


def request_id_of(key: str) -> str:
    """Return a payload's request id: the key itself, or its digest where it could not stand in a handle."""
    if key and len(key) <= MAX_NAME and key.isprintable():
        return key
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def plain(value: Any) -> Any:
    """Return ``value`` with every msgspec struct in it as a dict; what holds none is returned as it is."""
    return _plain(value, 0)


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, msgspec.Struct):
        return _struct(value, depth)
    kind = type(value)
    if depth >= _DEEPEST:
        return value  # the payload refuses what is nested so deep, and names the place
    if kind is dict:
        items = {key: _plain(item, depth + 1) for key, item in value.items()}
        return items if any(items[key] is not value[key] for key in items) else value
    if kind is list or kind is tuple:
        parts = [_plain(item, depth + 1) for item in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return parts if kind is list else tuple(parts)
    return value


def _struct(value: msgspec.Struct, depth: int) -> Any:
    """Return a struct as msgspec would encode it, without encoding what is in it."""
    settings = value.__struct_config__
    fields = msgspec.structs.fields(value)
    kept = {
        one.encode_name: _plain(getattr(value, one.name), depth + 1)
        for one in fields
        if (item := getattr(value, one.name)) is not msgspec.UNSET
        and not (settings.omit_defaults and not settings.array_like and _is_default(item, one))
    }
    tagged = {} if settings.tag is None else {str(settings.tag_field): settings.tag}
    if settings.array_like:
        return [*tagged.values(), *kept.values()]
    return {**tagged, **kept}


def _is_default(value: object, one: msgspec.structs.FieldInfo) -> bool:
    if one.default is not msgspec.NODEFAULT:
        default = one.default
        return value is default or (type(value) is type(default) and type(value) in _SCALARS and value == default)
    factory = one.default_factory
    return factory in _EMPTY and type(value) is factory and not value


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_flat_bytes(value: Any) -> bool:
    return _is_tensor(value) and value.dim() == 1 and str(value.dtype) == "torch.uint8"


_SCALARS: Final = (bool, int, float, str, bytes)
#: As deep as a payload may be.
_DEEPEST: Final = 64
