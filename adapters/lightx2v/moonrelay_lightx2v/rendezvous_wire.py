"""What a desk and its callers say to each other: messages, their bounds, their envelope.

Owns the structs, and what a message may be at most. The envelope and its seal are the control channel's frames
(`moonrelay.control.wire`), under a version and a key of this protocol: a caller is named by its find's token, a desk
by its nonce. Handles travel here, never tensors.

A find's token is random, so an answer to one find is none to another, however often somebody sends it again.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec

from moonrelay.control.wire import (
    NO_SESSION,
    NONCE_BYTES,
    Dialect,
    Frame,
    Kind,
    Refusal,
    Reject,
    Seal,
    encode_reject,
    rejection,
)
from moonrelay.errors import ConfigError, MoonrelayError, WireError

#: What one request goes by, most exact name first.
Names = tuple[str, ...]
_T = TypeVar("_T")

#: Version of envelope and messages; both sides must have the same.
VERSION: Final = 1
MAX_NAMES: Final = 8
MAX_NAME_CHARS: Final = 512
MAX_PHASE_CHARS: Final = 64
MAX_CODE_CHARS: Final = 64
#: Longest text of a refusal; a longer one is cut.
MAX_TEXT_CHARS: Final = 4096
#: Largest handle, in bytes: a frame without its envelope.
MAX_HANDLE_BYTES: Final = (4 << 20) - 4096
#: Longest time that a desk remembers a find without hearing of it again, in milliseconds.
MAX_WAIT_MS: Final = 3_600_000
#: Names that say what is asked for, not which request it is: two requests may share one, and then want the same bytes.
SHARED: Final = "same:"
#: Why a desk refuses a caller that is not its own; beside `moonrelay.control.wire.Refusal`.
WRONG_PHASE: Final = "phase"
#: The settings that lead a receiver to a desk, for messages.
ADDRESS_KEYS: Final = "bootstrap_addr, rendezvous_port, sender_engine_rank and bootstrap_room"

_NO_ONE: Final = bytes(NONCE_BYTES)
_DOMAIN: Final = b"lightx2v rendezvous\0"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARS)]
_Phase = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PHASE_CHARS)]


class Want(msgspec.Struct, frozen=True, kw_only=True, tag="want"):
    """A find asks. Said again until it is answered; it means the same each time.

    Attributes:
        names: What the request goes by, most exact first.
        phase: What it wants.
        wait_ms: For how long the desk keeps the question without hearing it again, in milliseconds.
    """

    names: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMES)]
    phase: _Phase
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=MAX_WAIT_MS)]


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag="forget"):
    """A find has ended.

    Attributes:
        taken: Whether what this desk gave it was of use; if not, the desk may give it to another.
    """

    taken: bool


class Here(msgspec.Struct, frozen=True, kw_only=True, tag="here"):
    """What was wanted.

    Attributes:
        handle: Of the payload.
    """

    handle: Annotated[bytes, msgspec.Meta(max_length=MAX_HANDLE_BYTES)]


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The stage failed on what was wanted.

    Attributes:
        code: Of the stage's error.
        message: Its text.
    """

    code: Annotated[str, msgspec.Meta(max_length=MAX_CODE_CHARS)]
    message: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]


class NotYet(msgspec.Struct, frozen=True, kw_only=True, tag="not_yet"):
    """Nothing under these names so far.

    Attributes:
        working: Whether the stage works on it now.
        over: Whether what there was has ended, consumed or not, and nothing has come since.
    """

    working: bool
    over: bool = False


class Closing(msgspec.Struct, frozen=True, kw_only=True, tag="closing"):
    """The desk closes; nothing will come."""


Question = Want | Forget
Answer = Here | Refused | NotYet | Closing

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def new_token() -> bytes:
    """Return the name of a new find, or of a new desk."""
    return secrets.token_bytes(NONCE_BYTES)


def seal_for(auth_key: str | None, version: int = VERSION) -> Seal:
    """Return what packs and unpacks frames of this protocol.

    Args:
        auth_key: The deployment's secret, or ``None``.
        version: Of the protocol; tests speak another.

    Raises:
        ConfigError: The key is empty or no string.
    """
    dialect = Dialect(version=version)
    if auth_key is None:
        return Seal(None, dialect)
    Seal(auth_key, dialect)  # says what is wrong with the key as it is
    # A key of its own, so that no message of the control channel is one of this protocol.
    return Seal(_DOMAIN + auth_key.encode(), dialect)


def pack_question(seal: Seal, token: bytes, message: Question) -> bytes:
    """Return the frame of what a find says."""
    return seal.pack(Frame(Kind.REQUEST, 0, token, _NO_ONE, NO_SESSION, _encoder.encode(message)))


def pack_answer(seal: Seal, nonce: bytes, token: bytes, message: Answer) -> bytes:
    """Return the frame of what a desk says to a find."""
    return seal.pack(Frame(Kind.REPLY, 0, nonce, token, NO_SESSION, _encoder.encode(message)))


def pack_reject(seal: Seal, nonce: bytes, token: bytes, code: str, message: str) -> bytes:
    """Return the frame that refuses a caller; sealed only for one that has shown the key."""
    body = encode_reject(Reject(code=code, message=message, version=seal.version))
    return seal.pack(Frame(Kind.REJECT, 0, nonce, token, NO_SESSION, body), sealed=code == WRONG_PHASE)


def question_in(frame: Frame) -> Question:
    """Return what a find says; raise `WireError` when it is malformed."""
    if frame.kind is not Kind.REQUEST:
        message = f"{frame.kind.name} at a desk"
        raise WireError(message)
    return _decoded(_questions, frame)


def answer_in(frame: Frame) -> Answer:
    """Return what a desk says; raise `WireError` when it is malformed."""
    if frame.kind is not Kind.REPLY:
        message = f"{frame.kind.name} at a caller"
        raise WireError(message)
    return _decoded(_answers, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[_T], frame: Frame) -> _T:
    try:
        return decoder.decode(frame.body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        message = f"malformed message of the rendezvous: {exc}"
        raise WireError(message, nbytes=len(frame.body)) from exc


def refusal_error(code: str, text: str, *, phase: str, peer: str, theirs: int) -> MoonrelayError:
    """Return the error that a find ends with when a desk refuses its caller.

    Args:
        code: A `Refusal`, or `WRONG_PHASE`.
        text: What the desk said: its phase, where that is wrong.
        phase: What the caller wants.
        peer: The desk's address.
        theirs: The desk's version.
    """
    if code == WRONG_PHASE:
        message = (
            f"the desk at {peer} hands over {text[:MAX_PHASE_CHARS]!r}, and this role wants {phase!r}; "
            f"set {ADDRESS_KEYS} to those of the role before this one"
        )
        return ConfigError(message, field="bootstrap_addr", peer=peer)
    if code in (Refusal.NONCE, Refusal.SESSION):
        message = f"no desk of LightX2V answers at {peer} but another part of Moonrelay; set {ADDRESS_KEYS}"
        return ConfigError(message, field="bootstrap_addr", peer=peer)
    return rejection(code, text[:MAX_TEXT_CHARS], peer=peer, ours=VERSION, theirs=theirs)


def is_shared(name: str) -> bool:
    """Return whether several requests may go by this name."""
    return name.startswith(SHARED)


def check_names(names: Names) -> Names:
    """Return the names as a tuple, each once; raise `ConfigError` when they are too many, too long, or none."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        message = f"names must be a tuple of strings, not {names!r:.200}"
        raise ConfigError(message, field="names")
    found = tuple(dict.fromkeys(names))
    if not 1 <= len(found) <= MAX_NAMES:
        message = f"a request goes by 1 to {MAX_NAMES} names, not {len(found)}"
        raise ConfigError(message, field="names")
    for name in found:
        if not 1 <= len(name) <= MAX_NAME_CHARS:
            message = f"a request's name has 1 to {MAX_NAME_CHARS} characters, not {len(name)}: {name[:40]!r}"
            raise ConfigError(message, field="names")
        try:
            name.encode()
        except UnicodeEncodeError as exc:
            message = f"a request's name is no valid text: {name[:40]!r}"
            raise ConfigError(message, field="names") from exc
    return found


def check_phase(phase: str) -> str:
    """Return the phase; raise `ConfigError` when it is empty or too long."""
    if not 1 <= len(phase) <= MAX_PHASE_CHARS:
        message = f"phase={phase[:80]!r} must have 1 to {MAX_PHASE_CHARS} characters"
        raise ConfigError(message, field="phase")
    return phase


def described(names: Sequence[str]) -> str:
    """Return names for a message to a person."""
    return ", ".join(name if len(name) <= 80 else f"{name[:77]}..." for name in names)


def bare_host(host: str, field: str) -> str:
    """Return a host without the brackets of an IPv6 literal; raise `ConfigError` when there is none."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare or any(character.isspace() or character in "[]/*" for character in bare):
        message = f"{field}={host!r} is no host; give an address or a name without scheme and port"
        raise ConfigError(message, field=field)
    if ":" in bare:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError as exc:
            message = f"{field}={host!r} is no IPv6 address ({exc}); give the port apart from the host"
            raise ConfigError(message, field=field) from exc
    return bare


def shown(host: str, port: int | str) -> str:
    """Return ``host:port``, with the brackets that an IPv6 literal needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
