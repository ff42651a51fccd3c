"""Bytes that a queue stores: plain values, handles and errors.

Owns what may enter a queue. A value that is not plain is refused with the place where it stands; nothing is pickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from moonrelay.errors import ConfigError, IntegrityError, MoonrelayError, from_wire
from moonrelay.queueing.store import HandleKind
from moonrelay.queueing.task import Plain, StageTask

_MAX_DEPTH = 32
_MAX_MESSAGE_CHARS = 4096
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1


@runtime_checkable
class WireHandle(Protocol):
    """Anything that names a payload and has a wire form; `StageHandle` is one."""

    def to_bytes(self) -> bytes:
        """Return the wire form."""
        ...


class StoredError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A failure as it is kept: its wire form, where it happened, and how far the stage's work had come at most."""

    code: str
    retryable: bool
    message: str
    stage: str
    attempt: int
    reached: float = 0.0


def pack_plain(field: str, value: object, *, at_most: int) -> bytes:
    """Encode a plain value.

    Args:
        field: Its name in messages.
        value: See `StageTask.payload`.
        at_most: Bound of the encoded size, in bytes.

    Raises:
        ConfigError: Something in it is not plain, or it is too large; the message names the place.
    """
    packed = msgspec.msgpack.encode(_checked(field, value, 0))
    if len(packed) > at_most:
        message = (
            f"{field} takes {len(packed)} bytes, above the bound of {at_most}; "
            "publish it through a DiffusionConnector and send the handle"
        )
        raise ConfigError(message, field=field)
    return packed


def unpack_plain(packed: bytes) -> Plain:
    """Decode what `pack_plain` made."""
    try:
        value: Plain = msgspec.msgpack.decode(packed)
    except msgspec.DecodeError as exc:
        raise IntegrityError("a stored value is damaged") from exc
    return value


def pack_handle(handle: object) -> tuple[HandleKind, bytes | None]:
    """Return how a handle was given, and its bytes.

    Raises:
        ConfigError: It is neither bytes nor has a wire form.
    """
    if handle is None:
        return "none", None
    if isinstance(handle, (bytes, bytearray, memoryview)):
        return "bytes", bytes(handle)
    if isinstance(handle, WireHandle):
        return "handle", handle.to_bytes()
    message = f"handle of type {type(handle).__name__} must be a StageHandle or its bytes"
    raise ConfigError(message, field="handle")


def pack_error(
    error: BaseException, *, stage: str, attempt: int, retryable: bool | None = None, reached: float = 0.0
) -> bytes:
    """Encode a failure; a foreign exception becomes a `MoonrelayError` that names its class."""
    own = error if isinstance(error, MoonrelayError) else foreign(error)
    code, flag, message = own.to_wire()
    stored = StoredError(
        code=code,
        retryable=flag if retryable is None else retryable,
        message=_printable(message[:_MAX_MESSAGE_CHARS]),
        stage=stage,
        attempt=attempt,
        reached=reached,
    )
    return msgspec.msgpack.encode(stored)


def unpack_error(packed: bytes) -> StoredError:
    """Decode what `pack_error` made."""
    try:
        return msgspec.msgpack.decode(packed, type=StoredError)
    except msgspec.DecodeError as exc:
        raise IntegrityError("a stored error is damaged") from exc


def reached(packed: bytes | None, stage: str) -> float:
    """Return how far a stage's work had come when it last failed; 0 where nothing is known."""
    stored = None if packed is None else unpack_error(packed)
    return stored.reached if stored is not None and stored.stage == stage else 0.0


def rebuild(stored: StoredError, **context: object) -> MoonrelayError:
    """Return the error that `StageQueue.result` raises."""
    error = from_wire(stored.code, stored.retryable, stored.message)
    error.context.update({"stage": stored.stage, "attempt": stored.attempt, **context})
    return error


#: A program or its input is wrong: the same call fails the same way again.
_HOPELESS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    ArithmeticError,
    AssertionError,
    SyntaxError,
)


def foreign(error: BaseException) -> MoonrelayError:
    """Return a worker's own exception as one of ours.

    It is retryable unless its class says that program or input are wrong (`TypeError`, `ValueError`, `KeyError` ...);
    attempts are bounded either way.
    """
    own = MoonrelayError(f"{type(error).__name__}: {error}")
    own.retryable = not isinstance(error, (*_HOPELESS, NotImplementedError, RecursionError, ImportError))
    return own


def fingerprint(task: StageTask, payload: bytes, handle: bytes | None) -> bytes:
    """Return a digest of all that a submitted task says."""
    parts = (
        task.stage,
        task.priority or "standard",
        task.deadline_s,
        sorted((task.affinity or {}).items()),
        task.attempt,
        task.max_attempts,
        payload,
        handle,
    )
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _checked(field: str, value: object, depth: int) -> object:
    if depth > _MAX_DEPTH:
        message = f"{field} is nested deeper than {_MAX_DEPTH} levels"
        raise ConfigError(message, field=field)
    if value is None or type(value) in (bool, float, bytes):
        return value
    if type(value) is int and _INT_MIN <= value <= _INT_MAX:
        return value
    if type(value) is str:
        return _text(field, value)
    if isinstance(value, Mapping):
        return {_key(field, key): _checked(f"{field}[{key!r}]", part, depth + 1) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview)):
        return [_checked(f"{field}[{number}]", part, depth + 1) for number, part in enumerate(value)]
    kind = "an int beyond 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"
    message = f"{field} is {kind}, not a plain value; tensors travel by a DiffusionConnector's handle"
    raise ConfigError(message, field=field)


def _key(field: str, key: object) -> object:
    if type(key) is str:
        return _text(f"key of {field}", key)
    if type(key) is int and _INT_MIN <= key <= _INT_MAX:
        return key
    message = f"{field} has the key {key!r}; keys must be str or int of 64 bits"
    raise ConfigError(message, field=field)


def _text(field: str, value: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as exc:
        message = f"{field} is a text with a lone surrogate, which has no UTF-8 form"
        raise ConfigError(message, field=field) from exc
    return value
