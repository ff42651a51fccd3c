"""The records of the shared tier: what stands under which key, and in which form.

Owns key names and encoding. A record that is malformed, or of a version that this side does not know, is read as if
there were none: a cache may forget, and must not guess.

Keys, under ``prefix``::

    root                     Root: which incarnation stands; only a clear removes it
    <incarnation>/z          this incarnation is being cleared
    <incarnation>/y          its generations are empty, and this is the number of the newest
    <incarnation>/g<level>/<i>   generation i * RUNG^level was opened, see ``generations``
    <incarnation>/x/<n>      generation n takes no more entries
    <incarnation>/l/<n>/<k>  Slot: the k-th entry of generation n, won by whoever wrote it first
    <incarnation>/o/<n>/<object>  an entry's bytes
    <incarnation>/r/<digest> Card: where the entry is; written last, so nothing half-written is seen
    f/<digest>               Head: a flight is on, led by whoever wrote it
    f/<flight>/<epoch>       Turn: the lead before was taken over, or has finished; epochs begin at 1
    f/<flight>/<epoch>/b/<k> the k-th sign of life of that epoch's lead; the first lead's epoch is 0
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec

from moonrelay.errors import ConfigError

MAX_PREFIX_CHARS = 80

#: What stands under a key whose presence is all that it says.
MARK = b"\x01"

_MAX_LABELS = 8
_MAX_LABEL_CHARS = 100
_PREFIX = re.compile(rf"[A-Za-z0-9._-][A-Za-z0-9._/-]{{0,{MAX_PREFIX_CHARS - 1}}}")
_DIGEST = re.compile(r"[0-9a-f]{8,128}")

Word = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class Root(msgspec.Struct, frozen=True, kw_only=True):
    """The store's incarnation, and the bound that every process keeps."""

    v: Literal[1] = 1
    incarnation: Word
    capacity_bytes: Positive
    generations: Annotated[int, msgspec.Meta(ge=2, le=32)]


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a generation; ``end`` is the sum of all charges up to this one."""

    v: Literal[1] = 1
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8,128}$")]
    object: Word
    nbytes: Positive
    end: Positive
    label: dict[str, str]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Where an entry is."""

    v: Literal[1] = 1
    generation: Count
    object: Word
    nbytes: Positive


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """A flight is on; ``flight`` names its other records."""

    v: Literal[1] = 1
    flight: Word


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The flight's next epoch: another lead took over, or the one before has ended it."""

    v: Literal[1] = 1
    by: Word
    ends: bool


Record = Root | Slot | Card | Head | Turn
RecordT = TypeVar("RecordT", Root, Slot, Card, Head, Turn)


def encoded(record: Record) -> bytes:
    """Return a record's bytes."""
    return msgspec.msgpack.encode(record)


def decoded(kind: type[RecordT], value: bytes) -> RecordT | None:
    """Return the record, or ``None`` where the bytes are none of this kind and version."""
    try:
        return msgspec.msgpack.decode(value, type=kind)
    except msgspec.MsgspecError:
        return None


def new_word() -> str:
    """Return a name that was never used before."""
    return secrets.token_hex(8)


def check_prefix(prefix: str) -> str:
    """Return ``prefix``.

    Raises:
        ConfigError: Empty, longer than 80 characters, with another character than keys have, or ending in a slash.
    """
    if not _PREFIX.fullmatch(prefix) or prefix.endswith("/"):
        message = f"prefix {prefix!r:.100} must be 1 to {MAX_PREFIX_CHARS} characters of A-Z a-z 0-9 . _ - /"
        raise ConfigError(message, field="prefix")
    return prefix


def check_digest(digest: str) -> str:
    """Return ``digest``.

    Raises:
        ConfigError: Not 8 to 128 lower-case hex digits.
    """
    if not _DIGEST.fullmatch(digest):
        message = f"digest {digest!r:.150} must be 8 to 128 lower-case hex digits"
        raise ConfigError(message, field="digest")
    return digest


def short_label(label: Mapping[str, str]) -> dict[str, str]:
    """Return a label that fits a record: the first few entries, each cut."""
    kept = sorted(label.items())[:_MAX_LABELS]
    return {str(name)[:_MAX_LABEL_CHARS]: str(value)[:_MAX_LABEL_CHARS] for name, value in kept}
