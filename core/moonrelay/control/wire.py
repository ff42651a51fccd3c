"""The envelope of the peer channel: header, body, seal.

Owns the layout of a frame, the authentication of every message with the deployment's key, and what is said when a frame
is refused. Payload bytes never travel in a frame.

Layout (one ZeroMQ frame, big endian): ``"MR"``, version, kind, flags, request id, floor, sender's nonce, receiver's
nonce, session, body, seal. The first four bytes never change across versions, so that a version mismatch can always be
told.

The seal is keyed BLAKE2b over everything before it. A recorded message cannot work twice: nonces tie it to two channel
instances, the session (chosen by the answering side, at random) to one handshake, the request id to one request of it,
the kind to one direction.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import logging
import struct
import threading
from collections import Counter
from dataclasses import dataclass

import msgspec
import zmq

from moonrelay.errors import ConfigError, MoonrelayError, PeerLost, VersionError, WireError

#: Version of frames, handshake and messages.
PROTOCOL_VERSION = 1
#: Largest frame either side takes, in bytes; ZeroMQ drops the connection of a peer that sends a larger one.
MAX_FRAME_BYTES = 4 << 20
NONCE_BYTES = 16
SESSION_BYTES = 8
SEAL_BYTES = 16
NO_SESSION = bytes(SESSION_BYTES)

#: ZeroMQ's constants as plain numbers: arithmetic on its enums costs microseconds.
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)

_MAGIC = b"MR"
_HEADER = struct.Struct(f">2sBBBQQ{NONCE_BYTES}s{NONCE_BYTES}s{SESSION_BYTES}s")
_SEALED = 1


class Kind(enum.IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REQUEST = 3
    REPLY = 4
    PUSH = 5
    REJECT = 6


_KINDS = {int(kind): kind for kind in Kind}


class Refusal(enum.StrEnum):
    """Why a frame is refused, as a `Reject` says it."""

    VERSION = "version"
    FEATURE = "feature"
    NONCE = "nonce"
    SESSION = "session"
    AUTH_MISSING = "auth_missing"
    AUTH_WRONG = "auth_wrong"
    AUTH_UNEXPECTED = "auth_unexpected"


class Reject(msgspec.Struct, frozen=True, kw_only=True):
    """Body of a `Kind.REJECT` frame.

    Attributes:
        code: A `Refusal`, or one that a later version adds.
        message: One line for a person.
        version: Version of the refusing side.
    """

    code: str
    message: str
    version: int


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one side of the channel speaks.

    Attributes:
        version: Version of the protocol; both sides must have the same.
        required: Features that the peer must know.
        optional: Features that this side would use when the peer knows them.
        known: Features that this side knows when a peer names them.
    """

    version: int = PROTOCOL_VERSION
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    known: tuple[str, ...] = ()


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One message in its envelope.

    (A struct for its speed; it is never encoded as one.)

    Attributes:
        kind: What it is.
        seq: Request id: strictly increasing per sending channel; a reply repeats it. Pushes count on their own.
        floor: In requests: ids below it are settled, the sender will not ask about them again.
        sender: Nonce of the sending channel.
        receiver: Nonce of the channel it is meant for.
        session: The handshake it belongs to.
        body: The encoded message.
        sealed: Whether the seal was there and right.
    """

    kind: Kind
    seq: int
    sender: bytes
    receiver: bytes
    session: bytes
    body: bytes
    floor: int = 0
    sealed: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A frame that has our shape but cannot be accepted.

    Attributes:
        why: The reason.
        kind: Kind of the frame, as far as it is known.
        seq: Its request id; 0 where the version is another.
        sender: Nonce it claims to come from; zeros where the version is another.
        version: The version it speaks.
    """

    why: Refusal
    kind: int
    seq: int
    sender: bytes
    version: int


class Seal:
    """Packs and unpacks frames, with the deployment's key or without one.

    Args:
        auth_key: The shared secret, or ``None``.
        dialect: Gives the version.

    Raises:
        ConfigError: The key is empty or of a wrong type.

    Threads: any; holds no state that changes.
    """

    def __init__(self, auth_key: str | bytes | None, dialect: Dialect) -> None:
        self.version = dialect.version
        self._key = None if auth_key is None else _derive(auth_key)

    @property
    def keyed(self) -> bool:
        return self._key is not None

    def pack(self, frame: Frame, *, sealed: bool = True) -> bytes:
        """Return the frame's bytes; ``sealed`` false leaves the seal off (a rejection of a stranger).

        Raises:
            WireError: It is larger than a peer would take.
        """
        key = self._key if sealed else None
        head = _HEADER.pack(
            _MAGIC,
            self.version,
            frame.kind,
            0 if key is None else _SEALED,
            frame.seq,
            frame.floor,
            frame.sender,
            frame.receiver,
            frame.session,
        )
        data = head + frame.body
        if key is not None:
            data += _seal(key, data)
        if len(data) > MAX_FRAME_BYTES:
            message = f"control message of {len(data)} bytes exceeds {MAX_FRAME_BYTES}; use fewer tensors or chunks"
            raise WireError(message, nbytes=len(data))
        return data

    def unpack(self, data: bytes) -> Frame | Refused:
        """Return the frame in ``data``, or why it is refused.

        Raises:
            WireError: Not a frame at all.
        """
        if len(data) < 4 or data[:2] != _MAGIC:
            message = "not a frame of the control channel"
            raise WireError(message, nbytes=len(data))
        if data[2] != self.version:
            return Refused(Refusal.VERSION, data[3], 0, bytes(NONCE_BYTES), data[2])
        if len(data) < _HEADER.size or data[3] not in _KINDS:
            message = "truncated frame, or one of an unknown kind, on the control channel"
            raise WireError(message, nbytes=len(data), kind=data[3])
        _, _, number, flags, seq, floor, sender, receiver, session = _HEADER.unpack_from(data)
        kind = _KINDS[number]
        sealed = bool(flags & _SEALED)
        why: Refusal | None = None
        end = len(data)
        if sealed and self._key is None:
            why = Refusal.AUTH_UNEXPECTED
        elif sealed and self._key is not None:
            end -= SEAL_BYTES
            if end < _HEADER.size or not hmac.compare_digest(_seal(self._key, data[:end]), data[end:]):
                why = Refusal.AUTH_WRONG
        elif self._key is not None and kind is not Kind.REJECT:
            why = Refusal.AUTH_MISSING
        if why is not None:
            return Refused(why, number, seq, sender, self.version)
        return Frame(kind, seq, sender, receiver, session, data[_HEADER.size : end], floor, sealed)


def _derive(auth_key: str | bytes) -> bytes:
    if not isinstance(auth_key, (str, bytes)):
        message = f"auth_key must be str, bytes or None, not {type(auth_key).__name__}"
        raise ConfigError(message, field="auth_key")
    raw = auth_key.encode() if isinstance(auth_key, str) else auth_key
    if not raw:
        message = "auth_key='' is empty; set the deployment's secret, or None for a channel without authentication"
        raise ConfigError(message, field="auth_key")
    return hashlib.blake2b(raw, digest_size=32, person=b"moonrelay-key").digest()


def _seal(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=SEAL_BYTES, key=key, person=b"moonrelay-ctl").digest()


_reject_encoder = msgspec.msgpack.Encoder()
_reject_decoder: msgspec.msgpack.Decoder[Reject] = msgspec.msgpack.Decoder(Reject)


def encode_reject(reject: Reject) -> bytes:
    """Return the bytes of a rejection's body."""
    return _reject_encoder.encode(reject)


def decode_reject(body: bytes) -> Reject:
    """Return the rejection in ``body``; raise `WireError` when it is malformed."""
    try:
        return _reject_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        message = f"malformed rejection on the control channel: {exc}"
        raise WireError(message) from exc


def rejection(code: str, message: str, *, peer: str, ours: int, theirs: int) -> MoonrelayError:
    """Return the error that the asking side raises for a rejected handshake.

    Args:
        code: A `Refusal`, or an unknown code of a later version.
        message: What the peer said.
        peer: Its address.
        ours: Version of this side.
        theirs: Version of the peer.
    """
    if code == Refusal.VERSION:
        text = f"the peer speaks control protocol {theirs}, this side {ours}; install the same Moonrelay on both"
        return VersionError(text, peer=peer)
    if code == Refusal.FEATURE:
        text = f"the peer (protocol {theirs}) refused this side's hello (protocol {ours}): {message}"
        return VersionError(text, peer=peer)
    if code == Refusal.NONCE:
        return PeerLost("another process answers at the peer's address; the peer is gone", peer=peer, gone=True)
    auth = {
        Refusal.AUTH_WRONG: "wrong auth_key: the peer uses another one; set the same auth_key on both sides",
        Refusal.AUTH_MISSING: "wrong auth_key: the peer requires one and this side has none; set auth_key on this side",
        Refusal.AUTH_UNEXPECTED: "wrong auth_key: this side has one and the peer has none; set auth_key on the peer",
    }.get(code)  # type: ignore[call-overload]
    if auth is not None:
        return ConfigError(auth, field="auth_key", peer=peer)
    return WireError(f"the peer refused the message: {message}", code=code, peer=peer)


class ReplayWindow:
    """Which sequence numbers of a stream were seen, within a sliding window; older ones count as seen."""

    __slots__ = ("_highest", "_seen", "_size")

    def __init__(self, size: int = 1024) -> None:
        self._size = size
        self._highest = 0
        self._seen: set[int] = set()

    def fresh(self, seq: int) -> bool:
        """Return whether ``seq`` is new, and remember it."""
        if seq <= self._highest - self._size or seq in self._seen:
            return False
        self._seen.add(seq)
        if seq > self._highest:
            self._highest = seq
            if len(self._seen) > 2 * self._size:
                self._seen = {known for known in self._seen if known > seq - self._size}
        return True


class Complaints:
    """Logs what was dropped, without letting a stranger fill the log: the 1st, 2nd, 4th, 8th … of each reason.

    Threads: any.
    """

    def __init__(self, logger: logging.Logger, owner: str) -> None:
        self._logger = logger
        self._owner = owner
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def drop(self, reason: str, detail: object) -> None:
        """Log at WARNING that something was dropped for ``reason`` (one of a few), with a detail."""
        with self._lock:
            self._counts[reason] += 1
            count = self._counts[reason]
        if count & (count - 1) == 0:
            self._logger.warning("%s: dropped a message, %s (%d so far): %s", self._owner, reason, count, detail)

    def count(self, reason: str) -> int:
        """Return how often something was dropped for ``reason``."""
        with self._lock:
            return self._counts[reason]
