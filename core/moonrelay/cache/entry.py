"""The form of an entry: a tree of tensors and plain values as one object, checked by itself when it is read.

Owns that form. An object begins with a header (magic, version, sizes, whose key it is, a digest of everything in it),
then comes the description of the tree and of its tensors, then their bytes. An object that is damaged, cut short, of
another version or of another key is `Unusable`: for a cache that is a miss, never an error. Importing it loads no
torch.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from moonrelay.errors import MoonrelayError
from moonrelay.integrity import digester
from moonrelay.layout import Extent, TensorSpec, check_spec, copy_leaf, tensor_from_buffer
from moonrelay.payload import StagePayload, flatten, unflatten

if TYPE_CHECKING:
    import torch

MAGIC: Final = b"moonrlyC"
VERSION: Final = 1

#: Magic, version, bytes of the description, bytes of the tensors, the key's digest.
_FRONT: Final = struct.Struct("<8sIIQ32s")
#: Behind that: digest of all but itself, by this algorithm.
_ALGORITHM: Final = "xxh3_128"
_DIGEST_BYTES: Final = 16
#: Where the description begins.
HEADER_BYTES: Final = _FRONT.size + _DIGEST_BYTES

#: Largest description of an entry: a tree's and its tensors'.
_MAX_DESCRIPTION: Final = 16 << 20


class Unusable(Exception):
    """An object is no entry of that key that this version reads whole; the message says why, in one line."""


class _Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: what it is, and on which kind of device it was."""

    spec: TensorSpec
    device: str


class _Description(msgspec.Struct, frozen=True, array_like=True):
    tree: bytes
    leaves: tuple[_Leaf, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """An entry in memory of its own, which nobody writes any more.

    Attributes:
        key_digest: Its key's digest, 64 hexadecimal digits.
        buffer: The object's bytes.
    """

    key_digest: str
    buffer: bytearray | memoryview

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return len(self.buffer)

    @property
    def parts(self) -> tuple[Extent, ...]:
        """Where the bytes lie, for a relay; valid as long as this object lives."""
        return (Extent(_address(self.buffer), self.nbytes),)

    def tree(self, device: str | torch.device | None = None) -> object:
        """Return the tree in fresh memory, checked; see `unpack`.

        Raises:
            Unusable: The bytes are not what they were.
        """
        return unpack(self.buffer, self.key_digest, device)

    def keep(self) -> None:
        """Do nothing; whoever holds this method holds the memory: a relay's ``on_quiet``."""


def pack(key_digest: str, tree: object) -> Packed:
    """Make an entry of a tree: a snapshot, so that the tree may be changed afterwards.

    Args:
        key_digest: The key's digest, 64 hexadecimal digits.
        tree: As `moonrelay.payload.StagePayload` takes them: tensors on any device, and plain values.

    Raises:
        UnsupportedTensor: Something in it cannot be carried bit for bit; the message names it.

    Blocks: for one copy of the tensors to host memory.
    """
    import torch

    flat = flatten(StagePayload("cache", "cache", data=tree))
    leaves = tuple(
        _Leaf(spec=spec, device=leaf.device.type) for spec, leaf in zip(flat.specs, flat.leaves, strict=True)
    )
    description = msgspec.msgpack.encode(_Description(tree=flat.tree, leaves=leaves))
    buffer = bytearray(HEADER_BYTES + len(description) + flat.nbytes)
    _FRONT.pack_into(buffer, 0, MAGIC, VERSION, len(description), flat.nbytes, bytes.fromhex(key_digest))
    at = HEADER_BYTES
    buffer[at : at + len(description)] = description
    at += len(description)
    for leaf, spec, packed in zip(flat.leaves, flat.specs, flat.packed, strict=True):
        if spec.nbytes:
            source = leaf
            if not packed or leaf.device.type != "cpu":
                source = torch.empty(spec.nbytes, dtype=torch.uint8)
                copy_leaf(leaf, spec, source)
            ctypes.memmove(_address(buffer) + at, source.data_ptr(), spec.nbytes)
            at += spec.nbytes
    buffer[_FRONT.size : HEADER_BYTES] = _content_digest(buffer)
    return Packed(key_digest, buffer)


def unpack(data: bytes | bytearray | memoryview, key_digest: str, device: str | torch.device | None = None) -> object:
    """Return an entry's tree, once every byte of it is proved. Its tensors are fresh memory, the caller's own.

    Args:
        data: The object.
        key_digest: The digest of the key that it was looked up by.
        device: Where the tensors shall be; ``None``: each on the kind of device where it was encoded, on the current
            one of that kind, and in host memory where this process has none.

    Returns:
        The tree, bit for bit.

    Raises:
        Unusable: It is damaged, cut short, of another version or of another key, or of a dtype not known here.
    """
    data = data if isinstance(data, bytearray) else _writable(data)
    description, at = _checked(data, key_digest)
    try:
        leaves = []
        for leaf in description.leaves:
            leaves.append(_leaf(data, at, leaf, device))
            at += leaf.spec.nbytes
        return unflatten(description.tree, leaves)
    except MoonrelayError as exc:
        message = f"it is not readable here: {exc.message}"
        raise Unusable(message) from exc


# -- inside -----------------------------------------------------------------------------------------------------------


def _checked(data: bytearray | memoryview, key_digest: str) -> tuple[_Description, int]:
    """Return the description of a whole entry of that key, and where its tensors' bytes begin.

    Raises:
        Unusable: It is none.
    """
    if len(data) < HEADER_BYTES or bytes(data[: len(MAGIC)]) != MAGIC:
        message = f"{len(data)} bytes that do not begin as an entry does"
        raise Unusable(message)
    _, version, described, held, key = _FRONT.unpack_from(data, 0)
    if version != VERSION:
        message = f"it has version {version}, this side reads version {VERSION}"
        raise Unusable(message)
    if key.hex() != key_digest:
        message = f"it belongs to key {key.hex()[:16]}, not {key_digest[:16]}"
        raise Unusable(message)
    if described > _MAX_DESCRIPTION or len(data) != HEADER_BYTES + described + held:
        message = f"it has {len(data)} bytes, not {HEADER_BYTES + described + held}"
        raise Unusable(message)
    if bytes(data[_FRONT.size : HEADER_BYTES]) != _content_digest(data):
        message = "its bytes are not those that were stored"
        raise Unusable(message)
    at = HEADER_BYTES + described
    try:
        description = msgspec.msgpack.decode(data[HEADER_BYTES:at], type=_Description)
        for number, leaf in enumerate(description.leaves):
            check_spec(leaf.spec, f"leaves[{number}]")
    except (msgspec.MsgspecError, MoonrelayError) as exc:
        message = f"its description is malformed: {exc}"
        raise Unusable(message) from exc
    if sum(leaf.spec.nbytes for leaf in description.leaves) != held:
        message = "its tensors are not as long as its description says"
        raise Unusable(message)
    return description, at


def _leaf(data: bytearray | memoryview, at: int, leaf: _Leaf, device: str | torch.device | None) -> torch.Tensor:
    import torch

    fresh = torch.empty(leaf.spec.nbytes, dtype=torch.uint8)
    if leaf.spec.nbytes:
        ctypes.memmove(fresh.data_ptr(), _address(data) + at, leaf.spec.nbytes)
    tensor = tensor_from_buffer(fresh, leaf.spec)
    where = torch.device(leaf.device if _is_here(leaf.device) else "cpu") if device is None else torch.device(device)
    return tensor if where.type == "cpu" else tensor.to(where)


def _is_here(device_type: str) -> bool:
    import torch

    if device_type == "cpu":
        return True
    backend = getattr(torch, device_type, None)
    return backend is not None and bool(backend.is_available())


def _content_digest(data: bytearray | memoryview) -> bytes:
    address = _address(data)
    digest = digester(_ALGORITHM)
    digest.update(Extent(address, _FRONT.size))
    digest.update(Extent(address + HEADER_BYTES, len(data) - HEADER_BYTES))
    return digest.digest()


def _writable(data: bytes | memoryview) -> bytearray | memoryview:
    if isinstance(data, memoryview) and not data.readonly and data.c_contiguous:
        return data.cast("B") if data.format != "B" or data.ndim != 1 else data
    return bytearray(data)


def _address(data: bytearray | memoryview) -> int:
    return ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data))
