"""The bytes of a relayed payload's objects: the header inside a chunk's object, and the small records.

Owns both formats and their versions. Knows nothing of keys or stores.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import xxhash

from moonrelay.errors import (
    Aborted,
    ConfigError,
    IntegrityError,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    VersionError,
)

_MAGIC = b"MRCHUNK\x00"
_VERSION = 1
_FIELDS = struct.Struct("<8sHBBIQ64s32s")  # magic, version, id length, digest length, chunk, nbytes, id, digest
_CHECK = struct.Struct("<Q")  # xxh3_64 of the fields
HEADER_BYTES = _FIELDS.size + _CHECK.size
_MAX_ID_BYTES = 64
_MAX_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """What a chunk's own header says: its number, its length without the header, and the producer's digest."""

    chunk: int
    nbytes: int
    digest: bytes


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The payload is complete in the store: this many chunks; ``ttl_s`` ``None`` means until released."""

    count: int
    ttl_s: float | None


class Tomb(msgspec.Struct, frozen=True, kw_only=True, tag="tomb"):
    """The payload is no more: ``kind`` is ``consumed``, ``released``, ``expired`` or ``aborted``."""

    kind: str
    reason: str


class Holder(msgspec.Struct, frozen=True, kw_only=True, tag="holder"):
    """A reader has the slot."""

    reader_id: str
    owner: bytes
    nonce: bytes


class Free(msgspec.Struct, frozen=True, kw_only=True, tag="free"):
    """The reader of the epoch before gave the slot back; ``nonce`` is that reader's."""

    nonce: bytes


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The reader of the epoch before consumed the payload; ``nonce`` is that reader's."""

    nonce: bytes


Record = End | Tomb | Holder | Free | Done
decoder = msgspec.msgpack.Decoder(Record)

TOMB_ERRORS: dict[str, type[MoonrelayError]] = {
    "consumed": LeaseLost,
    "released": LeaseLost,
    "expired": LeaseExpired,
    "aborted": Aborted,
}


def check_id(payload_id: str) -> str:
    """Return ``payload_id``.

    Raises:
        ConfigError: Not 1 to 64 ASCII characters.
    """
    if not 1 <= len(payload_id) <= _MAX_ID_BYTES or not payload_id.isascii():
        message = f"payload id {payload_id!r:.80} must be 1 to {_MAX_ID_BYTES} ASCII characters"
        raise ConfigError(message, field="payload_id")
    return payload_id


def pack_header(payload_id: str, chunk: int, nbytes: int, digest: bytes) -> bytes:
    """Return the header of a chunk.

    Raises:
        ConfigError: The id is not 1 to 64 ASCII characters, or the digest is longer than 32 bytes.
    """
    check_id(payload_id)
    if len(digest) > _MAX_DIGEST_BYTES:
        message = f"a chunk's digest takes at most {_MAX_DIGEST_BYTES} bytes, not {len(digest)}"
        raise ConfigError(message, field="digest")
    name = payload_id.encode()
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(name), len(digest), chunk, nbytes, name, digest)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def unpack_header(header: bytes, payload_id: str, chunk: int, nbytes: int) -> ChunkRecord:
    """Read a header, and check that it is the one expected.

    Raises:
        IntegrityError: It is torn, no header, or another chunk's or payload's.
        VersionError: It was written in another version.
    """
    fields = header[: _FIELDS.size]
    magic, version, id_length, digest_length, found, found_nbytes, name, digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or _CHECK.unpack(header[_FIELDS.size :])[0] != xxhash.xxh3_64_intdigest(fields):
        message = f"the header of chunk {chunk} is torn or not a chunk's"
        raise IntegrityError(message, payload=payload_id)
    if version != _VERSION:
        message = f"chunk {chunk} was stored in version {version}, this side reads {_VERSION}"
        raise VersionError(message, payload=payload_id)
    if (name[:id_length], found, found_nbytes) != (payload_id.encode(), chunk, nbytes):
        message = (
            f"the object of chunk {chunk} holds chunk {found} of payload {name[:id_length]!r}, {found_nbytes} bytes"
        )
        raise IntegrityError(message, payload=payload_id)
    return ChunkRecord(chunk=chunk, nbytes=nbytes, digest=digest[:digest_length])
