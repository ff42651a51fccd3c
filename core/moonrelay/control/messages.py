"""The messages of the peer channel: what one connector may ask another, and what it may be told.

Owns the versioned vocabulary and its encoding. Payload bytes never pass through these messages, only references and
digests. Every message is a tagged `msgspec.Struct`; an unknown field is ignored (it is optional by definition), an
unknown required feature is refused in the hello (see `moonrelay.control.wire.Dialect`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from moonrelay.errors import MoonrelayError, WireError, from_wire
from moonrelay.handle import EngineAddress, TensorLocation

MessageT = TypeVar("MessageT")

#: Where a payload's bytes are to be read from.
Where: TypeAlias = Literal["direct", "relay"]


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """A failure as it crosses the wire.

    Attributes:
        code: Code of a class in `moonrelay.errors`.
        retryable: Whether the same request may succeed later.
        message: One line for a person.
    """

    code: str
    retryable: bool
    message: str

    @classmethod
    def of(cls, error: MoonrelayError) -> Failure:
        """Return the wire form of ``error``."""
        code, retryable, message = error.to_wire()
        return cls(code=code, retryable=retryable, message=message)

    def error(self) -> MoonrelayError:
        """Return the failure as an exception, ready to raise."""
        return from_wire(self.code, self.retryable, self.message)


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """The complete readiness of a payload; it replaces whatever was known, so a lost one does no harm.

    Attributes:
        readable: Numbers of the chunks that are final.
        digests: Chunk number to digest, as far as they are known; absent where digests are off.
        failure: Why the payload will never be complete, else ``None``.
    """

    readable: tuple[int, ...] = ()
    digests: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    failure: Failure | None = None


# Requests.


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message to a peer: which version is spoken, and what the peer must or may know.

    Attributes:
        version: Version of the channel's protocol.
        required: Features without which this side does not work; an unknown one is refused.
        optional: Features this side would use; unknown ones are ignored.
        link: Random name of the connection, so that a repeated hello gives the same session.
    """

    version: int
    link: bytes
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


class Claim(msgspec.Struct, frozen=True, kw_only=True, tag="claim"):
    """Ask for the right to read a payload.

    Attributes:
        payload_id: The payload.
        reader: Identity of this claim attempt; the same reader asking again gets the same token.
        wait_s: How long the owner may hold the request back while another reader has the claim.
    """

    payload_id: str
    reader: str
    wait_s: float


class Renew(msgspec.Struct, frozen=True, kw_only=True, tag="renew"):
    """Keep a claim alive; the answer is `Renewed`, with the complete readiness."""

    payload_id: str
    token: int


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """Say that the payload was read whole and its bytes were right; the answer is `Done`."""

    payload_id: str
    token: int


class Nack(msgspec.Struct, frozen=True, kw_only=True, tag="nack"):
    """Give a claim back unread; the answer is `Done`."""

    payload_id: str
    token: int


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Drop a payload that nobody needs; idempotent; the answer is `Done`."""

    payload_id: str


class Query(msgspec.Struct, frozen=True, kw_only=True, tag="query"):
    """Ask how a payload's lease stands; the answer is `State`."""

    payload_id: str


class HoldsClaim(msgspec.Struct, frozen=True, kw_only=True, tag="holds_claim"):
    """Ask a reader whether its claim on a relayed payload is alive; the answer is `Holding`."""

    payload_id: str
    reader: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Ask for a sign of life; the channel itself answers `Done`."""


# Replies.


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """The answer to a `Hello` that was accepted.

    Attributes:
        version: Version of the channel's protocol on the answering side.
        features: The features of the hello that the answering side knows.
    """

    version: int
    features: tuple[str, ...] = ()


class Granted(msgspec.Struct, frozen=True, kw_only=True, tag="granted"):
    """A claim was given.

    Attributes:
        token: Fencing token; every later message about the claim carries it.
        claim_ttl_s: The claim is dropped when not renewed for this long.
        where: Read the producer's memory, or the relay.
        tensors: Where each tensor lies, in the handle's order; empty when ``where`` is ``"relay"``.
        engine: The engine that serves them.
        progress: Readiness at this moment.
    """

    token: int
    claim_ttl_s: float
    where: Where
    tensors: tuple[TensorLocation, ...] = ()
    engine: EngineAddress | None = None
    progress: Progress = msgspec.field(default_factory=Progress)


class Pending(msgspec.Struct, frozen=True, kw_only=True, tag="pending"):
    """Not answered yet (another reader holds the payload), but alive: a later answer follows by itself."""


class Renewed(msgspec.Struct, frozen=True, kw_only=True, tag="renewed"):
    """A claim was renewed.

    Attributes:
        progress: The complete readiness.
        where: Where the bytes are read from now on (a spill may have moved them).
    """

    progress: Progress
    where: Where


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The request was carried out."""


class Holding(msgspec.Struct, frozen=True, kw_only=True, tag="holding"):
    """The answer to `HoldsClaim`."""

    held: bool


class State(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """How a payload's lease stands; the fields are those of `moonrelay.lease.LeaseState`."""

    state: str
    readers: int
    acks: int
    chunks: int
    chunks_ready: int
    expires_in_s: float | None
    reason: str | None = None
    where: Where = "direct"


# Pushes, from the owner of a payload to its readers.


class Progressed(msgspec.Struct, frozen=True, kw_only=True, tag="progressed"):
    """The readiness of a payload changed; best effort, every `Renewed` says the same."""

    payload_id: str
    progress: Progress


#: What a handler may be asked. `Hello` and `Ping` are answered by the channel and never reach a handler.
Request: TypeAlias = Claim | Renew | Ack | Nack | Release | Query | HoldsClaim | Ping
#: What `PeerChannel.request` may return (never a `Failure`: it is raised).
Reply: TypeAlias = Granted | Pending | Renewed | Done | Holding | State
Push: TypeAlias = Progressed
Message: TypeAlias = Request | Reply | Push | Failure | Hello | Welcome

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return the message's bytes."""
    return _encoder.encode(message)


class _Decoder(Generic[MessageT]):
    """Decodes one group of messages; everything malformed or unknown is a `WireError`."""

    def __init__(self, name: str, kind: type[MessageT]) -> None:
        self._name = name
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind)

    def __call__(self, body: bytes) -> MessageT:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
            message = f"malformed or unknown {self._name} on the control channel: {exc}"
            raise WireError(message) from exc


decode_hello: _Decoder[Hello] = _Decoder("hello", Hello)
decode_welcome: _Decoder[Welcome] = _Decoder("welcome", Welcome)
decode_request: _Decoder[Request] = _Decoder("request", Request)  # type: ignore[arg-type]
decode_reply: _Decoder[Reply | Failure] = _Decoder("reply", Reply | Failure)  # type: ignore[arg-type]
decode_push: _Decoder[Push] = _Decoder("push", Push)
