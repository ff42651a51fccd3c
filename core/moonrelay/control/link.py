"""The asking side of the peer channel: one connection to one peer, shared by all threads that ask it something.

Owns the connection, its session and the requests in flight. Payload bytes never travel here.

Who reads the socket. The thread that waits for an answer reads the socket itself while it waits ("it leads"): an answer
costs no handover between threads. Other threads that ask the same peer meanwhile are woken by the leader; when it has
its answer, one of them leads on. While nobody waits, the channel's I/O thread reads (pushes, monitor events). The
socket is touched under the link's lock only; a leader sleeps on the socket's file descriptor without the lock, which
does not touch the socket. ZeroMQ's descriptor is edge-like: a send may swallow its signal, so whoever sends reads what
is there before it lets go of the lock. Whenever the lock is free, all that came was taken, and what comes next signals.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import select
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from moonrelay.clock import Clock, Deadline
from moonrelay.config import ControlConfig
from moonrelay.control import messages
from moonrelay.control.messages import Failure, Hello, Message, Pending, Push, Reply, Request
from moonrelay.control.server import Drop
from moonrelay.control.wire import (
    EVENTS,
    MAX_FRAME_BYTES,
    NO_SESSION,
    NOBLOCK,
    POLLIN,
    Complaints,
    Dialect,
    Frame,
    Kind,
    Refusal,
    Refused,
    ReplayWindow,
    Seal,
    decode_reject,
    rejection,
)
from moonrelay.errors import DeadlineExceeded, MoonrelayError, PeerLost, VersionError, WireError
from moonrelay.handle import ControlAddress

logger = logging.getLogger(__name__)

#: A peer whose port refuses, or that closed the connection, for this long is gone.
REFUSAL_GRACE_S = 1.0
_RECONNECT_MS = 100
_QUEUE_LENGTH = 1000

_UP = int(zmq.Event.HANDSHAKE_SUCCEEDED)
_DOWN = int(
    zmq.Event.CLOSED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class Loop(Protocol):
    """What a link needs of the channel's I/O thread. All may be called from any thread, under the link's lock."""

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call ``on_readable`` on the I/O thread while ``fd`` is readable."""

    def arm(self, fd: int, armed: bool) -> None:
        """Pause or go on watching ``fd``."""

    def unwatch(self, fd: int) -> None:
        """Forget ``fd``."""

    def deliver(self, peer: ControlAddress, message: Push) -> None:
        """Hand a push to the owner, on the I/O thread."""

    def discard(self, link: Link) -> None:
        """Ask no more through a link that failed or whose peer is gone."""

    def disposed(self, link: Link) -> None:
        """Take note that a discarded link gave everything back."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all links of a channel share."""

    context: zmq.Context[zmq.Socket[bytes]]
    config: ControlConfig
    clock: Clock
    nonce: bytes
    seal: Seal
    dialect: Dialect
    seqs: itertools.count[int]
    complaints: Complaints
    drop: Drop | None
    loop: Loop


class _Waiter:
    """A request in flight; guarded by the link's lock."""

    __slots__ = ("_changed", "_lock", "error", "message", "pending", "reply", "seq", "take_pending")

    def __init__(self, seq: int, message: Request, lock: threading.Lock, take_pending: bool) -> None:
        self.seq = seq
        self.message = message
        self._lock = lock
        self._changed: threading.Condition | None = None
        self.reply: Reply | None = None
        self.error: MoonrelayError | None = None
        self.pending = False
        self.take_pending = take_pending

    @property
    def changed(self) -> threading.Condition:
        """Made when first waited on: a leader never does."""
        if self._changed is None:
            self._changed = threading.Condition(self._lock)
        return self._changed

    def notify(self) -> None:
        if self._changed is not None:
            self._changed.notify()

    @property
    def settled(self) -> bool:
        return self.reply is not None or self.error is not None


class Link:
    """A connection to one peer.

    Args:
        peer: Whom to ask.
        around: What the channel's links share.

    Threads: any. ``on_socket`` and ``on_monitor`` are the I/O thread's.
    """

    def __init__(self, peer: ControlAddress, around: Surroundings) -> None:
        self.peer = peer
        self._around = around
        self._peer_nonce = bytes.fromhex(peer.nonce)
        self._name = secrets.token_bytes(8)
        self._lock = threading.Lock()
        self._disposed = threading.Condition(self._lock)
        self._waiters: dict[int, _Waiter] = {}
        self._leader: _Waiter | None = None
        self._session: bytes | None = None
        self._welcomed = False
        self._hellos: set[int] = set()
        self._pushes = ReplayWindow()
        self._heard_at = around.clock.monotonic()
        self._down_since: float | None = None
        self._closed = False
        self._draining = False
        self._open_fds = False
        self._wake = -1
        self._connect()

    # Asking.

    def request(self, message: Request, deadline: Deadline, keep_waiting: bool) -> Reply | None:
        """Ask and wait; ``None`` when the link was closed before, and a new one is to be made.

        Raises:
            MoonrelayError: See `PeerChannel.request`.

        Blocks: until the answer or the deadline.
        """
        with self._lock:
            if self._closed:
                return None
            waiter = _Waiter(next(self._around.seqs), message, self._lock, not keep_waiting)
            self._waiters[waiter.seq] = waiter
            try:
                self._transmit(waiter)
                return self._await(waiter, deadline)
            finally:
                self._leave(waiter)

    def _await(self, waiter: _Waiter, deadline: Deadline) -> Reply:
        clock, config = self._around.clock, self._around.config
        started = clock.monotonic()
        resend_at = started + config.retry_s
        while True:
            if waiter.error is not None:
                # Kept by nothing that its traceback keeps: else frames, and the tensors in them, would wait for the
                # garbage collector.
                error, waiter.error = waiter.error, None
                try:
                    raise error
                finally:
                    del error
            if waiter.reply is not None:
                return waiter.reply
            now = clock.monotonic()
            lost_at = self._judge(waiter, now, started)
            left = deadline.remaining()
            if left is not None and left <= 0:
                raise self._too_late(waiter, deadline, now - max(self._heard_at, started))
            if now >= resend_at:
                resend_at = now + config.retry_s
                self._transmit(waiter)
            slice_s = max(0.0, min(resend_at, lost_at) - now)
            slice_s = slice_s if left is None else min(slice_s, left)
            if waiter.settled:
                continue
            if self._leader is None:
                self._lead(waiter)
            if self._leader is waiter:
                self._sleep_on_socket(slice_s)
            else:
                clock.wait(waiter.changed, slice_s)

    def _judge(self, waiter: _Waiter, now: float, started: float) -> float:
        """Raise `PeerLost` when the peer is gone; return when it would be, as things stand."""
        config = self._around.config
        silent_since = max(self._heard_at, started)
        if now - silent_since >= config.peer_timeout_s:
            message = f"the peer gave no sign of life for {config.peer_timeout_s:g} s"
            raise PeerLost(message, peer=self.peer.address, request=type(waiter.message).__name__)
        lost_at = silent_since + config.peer_timeout_s
        if self._down_since is not None:
            gone_at = max(self._down_since, started) + REFUSAL_GRACE_S
            if now >= gone_at:
                message = (
                    f"the peer closed its connection or refuses one for {REFUSAL_GRACE_S:g} s; its process is gone"
                )
                raise PeerLost(message, peer=self.peer.address, request=type(waiter.message).__name__, gone=True)
            lost_at = min(lost_at, gone_at)
        return lost_at

    def _too_late(self, waiter: _Waiter, deadline: Deadline, silent_s: float) -> DeadlineExceeded:
        how = (
            "the peer is alive and has not answered yet"
            if waiter.pending
            else f"the peer is silent for {silent_s:.3g} s"
        )
        message = f"no answer within {deadline.timeout_s:g} s; {how}"
        kind = type(waiter.message).__name__
        return DeadlineExceeded(message, peer=self.peer.address, request=kind, pending=waiter.pending)

    def _lead(self, waiter: _Waiter) -> None:
        self._leader = waiter
        self._around.loop.arm(self._fd, False)

    def _sleep_on_socket(self, slice_s: float) -> None:
        """Wait for the socket without the lock, then read it. Only the leader."""
        self._lock.release()
        try:
            ready = self._poll.poll(int(slice_s * 1000) + 1)
        finally:
            self._lock.acquire()
        if any(fd == self._wake for fd, _ in ready):
            os.eventfd_read(self._wake)
        if not self._closed:
            self._drain()

    def _leave(self, waiter: _Waiter) -> None:
        del self._waiters[waiter.seq]
        if self._leader is waiter:
            self._leader = next((other for other in self._waiters.values() if not other.settled), None)
            if self._leader is not None:
                self._leader.notify()
            elif not self._closed:
                self._around.loop.arm(self._fd, True)
        self._dispose()

    def _notify(self, waiter: _Waiter) -> None:
        waiter.notify()
        if waiter is self._leader:
            os.eventfd_write(self._wake, 1)

    # Sending.

    def _transmit(self, waiter: _Waiter) -> None:
        """Send a request, or the hello that has to come first."""
        if self._session is None:
            self._say_hello()
            return
        self._send(Kind.REQUEST, waiter.seq, self._session, waiter.message, floor=next(iter(self._waiters)))

    def _say_hello(self) -> None:
        dialect = self._around.dialect
        seq = next(self._around.seqs)
        self._hellos.add(seq)
        hello = Hello(version=dialect.version, link=self._name, required=dialect.required, optional=dialect.optional)
        self._send(Kind.HELLO, seq, NO_SESSION, hello)

    def _send(self, kind: Kind, seq: int, session: bytes, message: Message, *, floor: int = 0) -> None:
        around = self._around
        frame = Frame(kind, seq, around.nonce, self._peer_nonce, session, messages.encode(message), floor)
        data = around.seal.pack(frame)
        if self._closed:
            return
        if around.drop is not None and around.drop("send", message):
            return
        try:
            self._socket.send(data, NOBLOCK)
        except zmq.Again:
            logger.debug("the queue to %s is full; the request is repeated later", self.peer.address)
        self._drain()

    # Receiving.

    def on_socket(self) -> None:
        """Read what came. Called by the I/O thread."""
        with self._lock:
            if not self._closed:
                self._drain()

    def _drain(self) -> None:
        if self._draining:
            return  # what is taken sends something: the loop below, further out, reads on
        self._draining = True
        try:
            while not self._closed and int(self._socket.getsockopt(EVENTS)) & POLLIN:
                data = self._socket.recv(NOBLOCK)
                try:
                    self._take(data)
                except WireError as exc:
                    self._around.complaints.drop("malformed", exc)
        finally:
            self._draining = False

    def _take(self, data: bytes) -> None:
        around = self._around
        frame = around.seal.unpack(data)
        if isinstance(frame, Refused):
            around.complaints.drop(frame.why, f"from {self.peer.address}")
            # A peer that does not share our key says so by a rejection; only one of another version cannot be read.
            if frame.why is Refusal.VERSION and frame.kind == Kind.REJECT and not self._welcomed:
                self._fail(self._rejected(frame.why, "", frame.version))
            return
        if frame.receiver != around.nonce or (frame.sender != self._peer_nonce and frame.kind is not Kind.REJECT):
            around.complaints.drop("not for this channel", f"from {self.peer.address}")
        elif frame.kind is Kind.REJECT:
            self._on_reject(frame)
        elif frame.kind is Kind.WELCOME:
            self._on_welcome(frame)
        elif frame.session != self._session:
            around.complaints.drop("of another session", f"from {self.peer.address}")
        elif frame.kind is Kind.REPLY:
            self._on_reply(frame)
        elif frame.kind is Kind.PUSH:
            self._on_push(frame)
        else:
            around.complaints.drop("malformed", f"{frame.kind.name} at a connecting socket")

    def _on_reject(self, frame: Frame) -> None:
        reject = decode_reject(frame.body)
        if self._around.seal.keyed and not frame.sealed and self._welcomed:
            self._around.complaints.drop("unsealed rejection", f"from {self.peer.address}")
        elif reject.code == Refusal.SESSION:
            if self._session is not None and frame.session == self._session:
                self._session = None
                self._say_hello()
        else:
            self._fail(self._rejected(reject.code, reject.message, reject.version))

    def _on_welcome(self, frame: Frame) -> None:
        welcome = messages.decode_welcome(frame.body)
        if self._dropped(welcome) or frame.seq not in self._hellos:
            return
        if welcome.version != self._around.dialect.version:
            self._fail(self._rejected(Refusal.VERSION, "", welcome.version))
            return
        missing = sorted(set(self._around.dialect.required) - set(welcome.features))
        if missing:
            text = f"the peer does not know the required feature {missing[0]!r}; install the same Moonrelay on both"
            self._fail(VersionError(text, peer=self.peer.address))
            return
        self._heard()
        self._hellos.clear()
        if frame.session != self._session:
            self._session, self._welcomed, self._pushes = frame.session, True, ReplayWindow()
        for waiter in list(self._waiters.values()):
            if not waiter.settled:
                self._transmit(waiter)

    def _on_reply(self, frame: Frame) -> None:
        reply = messages.decode_reply(frame.body)
        if self._dropped(reply):
            return
        self._heard()
        waiter = self._waiters.get(frame.seq)
        if waiter is None or waiter.settled:
            return
        if isinstance(reply, Failure):
            waiter.error = reply.error()
        elif isinstance(reply, Pending) and not waiter.take_pending:
            waiter.pending = True
            return
        else:
            waiter.reply = reply
        self._notify(waiter)

    def _on_push(self, frame: Frame) -> None:
        push = messages.decode_push(frame.body)
        if self._dropped(push) or not self._pushes.fresh(frame.seq):
            return
        self._heard()
        self._around.loop.deliver(self.peer, push)

    def _dropped(self, message: Message) -> bool:
        return self._around.drop is not None and self._around.drop("receive", message)

    def _heard(self) -> None:
        self._heard_at = self._around.clock.monotonic()

    def _rejected(self, code: str, text: str, theirs: int) -> MoonrelayError:
        ours = self._around.dialect.version
        return rejection(code, text, peer=self.peer.address, ours=ours, theirs=theirs)

    # The connection's life.

    def on_monitor(self) -> None:
        """Take note of what the connection does. Called by the I/O thread."""
        with self._lock:
            self._read_monitor()
            if self._closed or self._waiters or self._down_since is None:
                return
            if self._around.clock.monotonic() - self._down_since >= REFUSAL_GRACE_S:
                logger.debug("the connection to %s is down and unused; forgotten", self.peer.address)
                self._close()

    def _read_monitor(self) -> None:
        while not self._closed and int(self._monitor.getsockopt(EVENTS)) & POLLIN:
            parts = self._monitor.recv_multipart(NOBLOCK)
            event = parse_monitor_message(parts)["event"]
            if event == _UP:
                self._down_since = None
            elif event & _DOWN and self._down_since is None:
                self._down_since = self._around.clock.monotonic()
                for waiter in self._waiters.values():
                    self._notify(waiter)

    def close(self, error: MoonrelayError) -> None:
        """Fail what waits and close the connection. Idempotent. Blocks: until its leader, woken at once, let go."""
        with self._lock:
            self._fail(error)
            self._disposed.wait_for(lambda: not self._open_fds, timeout=self._around.config.peer_timeout_s)

    def _fail(self, error: MoonrelayError) -> None:
        """End the link; each waiting thread raises an error of its own."""
        for waiter in self._waiters.values():
            if not waiter.settled:
                waiter.error = type(error)(error.message, **error.context)
                self._notify(waiter)
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._around.loop.discard(self)
        self._dispose()

    def _dispose(self) -> None:
        """Give the descriptors back, once nobody sleeps on them."""
        if not self._closed or self._leader is not None or not self._open_fds:
            return
        self._open_fds = False
        self._around.loop.unwatch(self._fd)
        self._around.loop.unwatch(self._monitor_fd)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        os.close(self._wake)
        self._around.loop.disposed(self)
        self._disposed.notify_all()

    def _connect(self) -> None:
        socket = self._around.context.socket(zmq.DEALER)
        try:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.IPV6, 1 if "[" in self.peer.address else 0)
            socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.set(zmq.SNDHWM, _QUEUE_LENGTH)
            socket.set(zmq.RCVHWM, _QUEUE_LENGTH)
            socket.set(zmq.TCP_KEEPALIVE, 1)
            self._monitor = socket.get_monitor_socket(_UP | _DOWN)
            try:
                socket.connect(self.peer.address)
            except zmq.ZMQError:
                socket.disable_monitor()
                self._monitor.close(linger=0)
                raise
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            message = f"control address {self.peer.address!r} cannot be dialled: {exc}"
            raise WireError(message, peer=self.peer.address) from exc
        self._socket = socket
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._fd = int(socket.get(zmq.FD))
        self._monitor_fd = int(self._monitor.get(zmq.FD))
        self._open_fds = True
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._around.loop.watch(self._fd, self.on_socket)
        self._around.loop.watch(self._monitor_fd, self.on_monitor)
        with self._lock:  # a socket signals only what comes after it was found empty
            self._drain()
            self._read_monitor()
