"""The answering side of the peer channel: sessions, repeated requests, deferred replies, pushes.

Owns what is remembered of each peer that asks: its session, the requests it has not settled, and their replies. Socket
and thread are the channel's. A request takes effect once: its repetition is answered from memory, a replayed one is
refused.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from moonrelay.control import messages
from moonrelay.control.messages import Done, Failure, Hello, Message, Pending, Ping, Push, Reply, Request, Welcome
from moonrelay.control.wire import (
    NO_SESSION,
    SESSION_BYTES,
    Complaints,
    Dialect,
    Frame,
    Kind,
    Refusal,
    Refused,
    Reject,
    Seal,
    encode_reject,
)
from moonrelay.errors import MoonrelayError, WireError

logger = logging.getLogger(__name__)

#: Test seam: ``drop("send" | "receive", message)`` true loses the message.
Drop = Callable[[Literal["send", "receive"], Message], bool]

#: Peers remembered; a forgotten one says hello again.
MAX_SESSIONS = 1024
#: Unsettled requests per peer; beyond it further ones are dropped (the peer repeats them).
MAX_UNSETTLED = 4096


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who sent a request.

    Attributes:
        nonce: The peer's channel instance.
        route: Opaque; give it to `PeerChannel.push` to tell that peer something later.
    """

    nonce: str
    route: bytes


class Responder(Protocol):
    """The way back to the peer that asked."""

    def reply(self, message: Reply | Failure) -> None:
        """Answer the request. Threads: any. Never blocks.

        `Pending` may be sent any number of times (a repeated request is told so by itself); anything else once.

        Raises:
            MoonrelayError: The request was answered before.
            WireError: The message is too large; the peer is told so.
        """
        ...

    @property
    def waiting(self) -> bool:
        """Whether the peer still waits, as far as is known; false also after the answer."""
        ...


class Handler(Protocol):
    """What the owner of a channel does with requests."""

    def handle(self, peer: PeerInfo, request: Request, respond: Responder) -> None:
        """Take a request; reply now or later, from any thread.

        Called on the I/O thread; must not block. An error raised here becomes the answer.
        """
        ...


@dataclass(slots=True)
class _Exchange:
    """A request that its sender has not settled."""

    identity: bytes
    reply: bytes | None = None


@dataclass(slots=True)
class _Session:
    """One handshake of one peer."""

    id: bytes
    peer: bytes
    link: bytes
    identity: bytes
    hello_seq: int
    floor: int = 0
    pushes: int = 0
    unsettled: dict[int, _Exchange] = field(default_factory=dict)

    def settle(self, floor: int) -> None:
        if floor > self.floor:
            self.floor = floor
            for seq in [seq for seq in self.unsettled if seq < floor]:
                del self.unsettled[seq]


class _Responder:
    """See `Responder`."""

    __slots__ = ("_seq", "_server", "_session")

    def __init__(self, server: Server, session: bytes, seq: int) -> None:
        self._server = server
        self._session = session
        self._seq = seq

    def reply(self, message: Reply | Failure) -> None:
        self._server.reply(self._session, self._seq, message)

    @property
    def waiting(self) -> bool:
        return self._server.waiting(self._session, self._seq)


class Server:
    """Takes the frames of the listening socket and answers them.

    Args:
        nonce: Of this channel instance.
        seal: Packs and unpacks.
        dialect: What this side speaks.
        send: Sends bytes to a connection; best effort, never blocks, from any thread.
        complaints: Where dropped messages are logged.
        handler: Takes the requests, or ``None``.
        drop: Test seam.

    Threads: `receive` on the I/O thread only, the rest from any.
    """

    def __init__(
        self,
        nonce: bytes,
        seal: Seal,
        dialect: Dialect,
        send: Callable[[bytes, bytes], bool],
        complaints: Complaints,
        handler: Handler | None,
        drop: Drop | None,
    ) -> None:
        self._nonce = nonce
        self._seal = seal
        self._dialect = dialect
        self._send = send
        self._complaints = complaints
        self._handler = handler
        self._drop = drop
        self._lock = threading.Lock()
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._by_link: dict[tuple[bytes, bytes], _Session] = {}

    def receive(self, identity: bytes, parts: list[bytes]) -> None:
        """Take one message of the connection ``identity``; whatever it is, this returns."""
        if len(parts) != 1:
            self._complaints.drop("malformed", f"{len(parts)} parts instead of one")
            return
        try:
            frame = self._seal.unpack(parts[0])
            if isinstance(frame, Refused):
                self._complaints.drop(frame.why, f"from {frame.sender.hex()}, version {frame.version}")
                if frame.kind in (Kind.HELLO, Kind.REQUEST) or frame.why is Refusal.VERSION:
                    self._reject(identity, frame.why, f"refused: {frame.why}", frame.seq, frame.sender)
            elif frame.kind is Kind.HELLO:
                self._hello(identity, frame)
            elif frame.kind is Kind.REQUEST:
                self._request(identity, frame)
            else:
                self._complaints.drop("malformed", f"{frame.kind.name} at a listening socket")
        except WireError as exc:
            self._complaints.drop("malformed", exc)

    def reply(self, session_id: bytes, seq: int, message: Reply | Failure) -> None:
        """Answer a request; see `Responder.reply`."""
        with self._lock:
            session = self._sessions.get(session_id)
            exchange = None if session is None else session.unsettled.get(seq)
            if session is None or exchange is None:
                return  # the peer gave the request up, or was forgotten
            if exchange.reply is not None:
                text = "the request was answered before"
                raise MoonrelayError(text, peer=session.peer.hex(), answer=type(message).__name__)
            identity = exchange.identity
            too_large: WireError | None = None
            try:
                data = self._pack(Kind.REPLY, session_id, seq, session.peer, message)
            except WireError as exc:
                too_large, message = exc, Failure.of(exc)
                data = self._pack(Kind.REPLY, session_id, seq, session.peer, message)
            if not isinstance(message, Pending):
                exchange.reply = data
        self._transmit(identity, data, message)
        if too_large is not None:
            raise too_large

    def waiting(self, session_id: bytes, seq: int) -> bool:
        """Return whether a request is unsettled and unanswered."""
        with self._lock:
            session = self._sessions.get(session_id)
            exchange = None if session is None else session.unsettled.get(seq)
            return exchange is not None and exchange.reply is None

    def push(self, route: bytes, message: Push) -> bool:
        """Send a push to a peer; see `PeerChannel.push`."""
        with self._lock:
            session = self._sessions.get(route)
            if session is None:
                return False
            session.pushes += 1
            data = self._pack(Kind.PUSH, route, session.pushes, session.peer, message)
            identity = session.identity
        return self._transmit(identity, data, message)

    def _hello(self, identity: bytes, frame: Frame) -> None:
        hello = messages.decode_hello(frame.body)
        if self._drop is not None and self._drop("receive", hello):
            return
        if frame.receiver != self._nonce:
            self._reject(identity, Refusal.NONCE, "this is another process", frame.seq, frame.sender)
            return
        if hello.version != self._dialect.version:
            self._reject(identity, Refusal.VERSION, "version differs", frame.seq, frame.sender)
            return
        unknown = sorted(set(hello.required) - set(self._dialect.known))
        if unknown:
            text = f"required feature {', '.join(repr(name) for name in unknown)} is unknown to the peer"
            self._reject(identity, Refusal.FEATURE, text, frame.seq, frame.sender)
            return
        with self._lock:
            session = self._by_link.get((frame.sender, hello.link))
            if session is None:
                session = self._new_session(identity, frame, hello)
            elif frame.seq > session.hello_seq:
                session.identity, session.hello_seq = identity, frame.seq
        known = tuple(name for name in (*hello.required, *hello.optional) if name in self._dialect.known)
        welcome = Welcome(version=self._dialect.version, features=known)
        self._transmit(identity, self._pack(Kind.WELCOME, session.id, frame.seq, frame.sender, welcome), welcome)

    def _new_session(self, identity: bytes, frame: Frame, hello: Hello) -> _Session:
        session = _Session(secrets.token_bytes(SESSION_BYTES), frame.sender, hello.link, identity, frame.seq)
        self._sessions[session.id] = session
        self._by_link[session.peer, session.link] = session
        if len(self._sessions) > MAX_SESSIONS:
            _, oldest = self._sessions.popitem(last=False)
            del self._by_link[oldest.peer, oldest.link]
        return session

    def _request(self, identity: bytes, frame: Frame) -> None:
        with self._lock:
            session = self._sessions.get(frame.session)
            if session is None or session.peer != frame.sender or frame.receiver != self._nonce:
                session = None
            else:
                self._sessions.move_to_end(session.id)
                known = session.unsettled.get(frame.seq)
                session.settle(min(frame.floor, frame.seq))
                if known is None and (frame.seq < session.floor or len(session.unsettled) >= MAX_UNSETTLED):
                    self._complaints.drop("stale or too many", f"request {frame.seq} of {frame.sender.hex()}")
                    return
                if known is None:
                    session.identity = identity
                    session.unsettled[frame.seq] = _Exchange(identity)
                else:
                    known.identity = identity
        if session is None:
            why = Refusal.SESSION if frame.receiver == self._nonce else Refusal.NONCE
            self._reject(identity, why, "say hello first", frame.seq, frame.sender, frame.session)
            return
        if known is not None:
            self._repeat(session, frame.seq, known)
            return
        self._serve(session, frame)

    def _repeat(self, session: _Session, seq: int, exchange: _Exchange) -> None:
        """Answer a repeated request from memory."""
        if exchange.reply is None:
            pending = Pending()
            data = self._pack(Kind.REPLY, session.id, seq, session.peer, pending)
            self._transmit(exchange.identity, data, pending)
        elif self._drop is None or not self._drop("send", _decoded(exchange.reply, self._seal)):
            self._send(exchange.identity, exchange.reply)

    def _serve(self, session: _Session, frame: Frame) -> None:
        respond = _Responder(self, session.id, frame.seq)
        try:
            request = messages.decode_request(frame.body)
            if self._drop is not None and self._drop("receive", request):
                with self._lock:
                    session.unsettled.pop(frame.seq, None)
                return
            if isinstance(request, Ping):
                respond.reply(Done())
            elif self._handler is None:
                text = "this channel answers no requests"
                respond.reply(Failure.of(MoonrelayError(text)))
            else:
                self._handler.handle(PeerInfo(session.peer.hex(), session.id), request, respond)
        except MoonrelayError as exc:
            self._fail(respond, exc)
        except Exception as exc:
            # Outermost frame of a request: the peer is told, the loop serves the others.
            logger.exception("the handler failed on a request of %s", session.peer.hex())
            self._fail(respond, MoonrelayError(f"the peer failed on this request: {type(exc).__name__}: {exc}"))

    def _fail(self, respond: _Responder, error: MoonrelayError) -> None:
        if respond.waiting:
            respond.reply(Failure.of(error))
        else:
            logger.error("a request failed after it was answered: %s", error)

    def _pack(self, kind: Kind, session: bytes, seq: int, receiver: bytes, message: Message) -> bytes:
        return self._seal.pack(Frame(kind, seq, self._nonce, receiver, session, messages.encode(message)))

    def _transmit(self, identity: bytes, data: bytes, message: Message) -> bool:
        if self._drop is not None and self._drop("send", message):
            return False
        return self._send(identity, data)

    def _reject(
        self, identity: bytes, why: Refusal, text: str, seq: int, receiver: bytes, session: bytes = NO_SESSION
    ) -> None:
        body = encode_reject(Reject(code=why, message=text, version=self._dialect.version))
        frame = Frame(Kind.REJECT, seq, self._nonce, receiver, session, body)
        # Sealed only for those who proved to have the key; a stranger could not read the seal anyway.
        known = why in (Refusal.NONCE, Refusal.SESSION, Refusal.FEATURE)
        self._send(identity, self._seal.pack(frame, sealed=known))


def _decoded(data: bytes, seal: Seal) -> Message:
    frame = seal.unpack(data)
    assert isinstance(frame, Frame)
    return messages.decode_reply(frame.body)
