"""The peer channel: one listening socket and one I/O thread per connector, and blocking requests to other connectors.

Owns the sockets, the I/O thread and the life of both. Payload bytes never travel through this channel. What is answered
is `moonrelay.control.server`'s, how one peer is asked `moonrelay.control.link`'s, how a frame looks
`moonrelay.control.wire`'s.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import logging
import os
import re
import secrets
import select
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from types import TracebackType

import zmq

from moonrelay.clock import Clock, Deadline
from moonrelay.config import ControlConfig
from moonrelay.control.link import Link, Surroundings
from moonrelay.control.messages import Push, Reply, Request
from moonrelay.control.server import Drop, Handler, PeerInfo, Responder, Server
from moonrelay.control.wire import EVENTS, MAX_FRAME_BYTES, NOBLOCK, NONCE_BYTES, POLLIN, Complaints, Dialect, Seal
from moonrelay.errors import ClosedError, ConfigError, MoonrelayError, PeerLost, WireError
from moonrelay.handle import ControlAddress

__all__ = ["Drop", "Handler", "PeerChannel", "PeerInfo", "Responder"]

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%a-z]+\]|[0-9.]+):([0-9]{1,5})")
_NONCE = re.compile(rf"[0-9a-f]{{{2 * NONCE_BYTES}}}")
_QUEUE_LENGTH = 1000
#: An instance found gone is not asked again for this long, in seconds; a queue full of its handles would wait for each.
GONE_REMEMBERED_S = 2.0
GONE_KEPT = 1024


class PeerChannel:
    """A connector's end of the control plane.

    Args:
        config: Addresses and times.
        auth_key: Secret of the deployment, or ``None`` for a channel without authentication.
        clock: Time.
        handler: Takes the requests of peers; ``None`` refuses all but pings.
        on_push: Takes pushes of the peers that were asked something; called on the I/O thread, must not block.
        name: Part of the thread's name.
        advertise_host: Numeric address that peers dial; ``config.bind_host`` by default.
        port: Where to listen; 0 lets the system choose.
        nonce: Name of this instance, 32 hex digits; random by default.
        dialect: Version and features.
        drop: Test seam that loses messages.

    Raises:
        ConfigError: An address or the key is wrong.

    Threads: any, unless a method says otherwise.
    """

    def __init__(
        self,
        config: ControlConfig,
        *,
        auth_key: str | bytes | None,
        clock: Clock,
        handler: Handler | None = None,
        on_push: Callable[[ControlAddress, Push], None] | None = None,
        name: str = "peer",
        advertise_host: str | None = None,
        port: int = 0,
        nonce: str | None = None,
        dialect: Dialect | None = None,
        drop: Drop | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_push = on_push
        self._name = f"moonrelay-control-{name}"
        self._bind_host = _host("bind_host", config.bind_host)
        advertised = _host("advertise_host", advertise_host or config.bind_host)
        if ipaddress.ip_address(advertised).is_unspecified:
            message = f"bind_host={config.bind_host!r} is no address that peers can dial; pass advertise_host as well"
            raise ConfigError(message, field="advertise_host")
        self._advertised = advertised
        self._port = port
        self._nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else _nonce(nonce)
        self._dialect = dialect or Dialect()
        self._seal = Seal(auth_key, self._dialect)
        self._drop = drop
        self._complaints = Complaints(logger, self._name)
        self._seqs = itertools.count(1)
        self._server = Server(self._nonce, self._seal, self._dialect, self._send, self._complaints, handler, drop)
        self._lock = threading.Lock()  # life and links
        self._router_lock = threading.Lock()
        self._links: dict[tuple[str, str], Link] = {}
        self._gone: OrderedDict[tuple[str, str], float] = OrderedDict()
        self._retiring: set[Link] = set()
        self._watched: dict[int, Callable[[], None]] = {}
        self._pushed: deque[tuple[ControlAddress, Push]] = deque()
        self._address: ControlAddress | None = None
        self._thread: threading.Thread | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._epoll: select.epoll | None = None
        self._wake: int | None = None
        self._around: Surroundings | None = None
        self._stopping = False
        self._look_again = False
        self._closed = False
        self._failure: Exception | None = None

    # Life.

    def start(self) -> None:
        """Bind, then start the I/O thread. Idempotent.

        Raises:
            ConfigError: The address cannot be bound.
            ClosedError: The channel was closed.
        """
        with self._lock:
            self._check_open()
            if self._thread is not None:
                return
            try:
                self._open()
            except zmq.ZMQError as exc:
                self._give_back()
                message = (
                    f"bind_host={self._config.bind_host!r} cannot be bound ({exc}); use an address of this machine"
                )
                raise ConfigError(message, field="bind_host") from exc
            except OSError:
                self._give_back()
                raise

    def _open(self) -> None:
        self._context = zmq.Context()
        self._router = router = self._context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        router.set(zmq.IPV6, 1 if ":" in self._bind_host else 0)
        router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, _QUEUE_LENGTH)
        router.set(zmq.RCVHWM, _QUEUE_LENGTH)
        router.set(zmq.TCP_KEEPALIVE, 1)
        router.bind(f"tcp://{_bracketed(self._bind_host)}:{self._port or '*'}")
        bound = router.get(zmq.LAST_ENDPOINT)
        port = int(bytes(bound).rstrip(b"\0").rsplit(b":", 1)[1])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._around = Surroundings(
            context=self._context,
            config=self._config,
            clock=self._clock,
            nonce=self._nonce,
            seal=self._seal,
            dialect=self._dialect,
            seqs=self._seqs,
            complaints=self._complaints,
            drop=self._drop,
            loop=self,
        )
        self.watch(self._wake, self._on_wake)
        self.watch(int(router.get(zmq.FD)), self._on_router)
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()
        self._address = ControlAddress(address=f"tcp://{_bracketed(self._advertised)}:{port}", nonce=self._nonce.hex())

    @property
    def address(self) -> ControlAddress:
        """Where peers reach this channel. Only after `start`."""
        if self._address is None:
            message = "the channel has no address before start()"
            raise ClosedError(message, channel=self._name)
        return self._address

    def close(self) -> None:
        """Stop the thread and close all sockets; waiting requests raise `ClosedError`. Idempotent.

        Blocks: until the thread ended; a handler under way is waited for. Threads: any but the I/O thread.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = [*self._links.values(), *self._retiring]
        for link in links:
            link.close(self._closed_error())
        self._stopping = True
        if self._thread is not None:
            self._kick()
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._give_back()

    def _give_back(self) -> None:
        with self._router_lock:
            router, self._router = self._router, None
            if router is not None:
                router.close(linger=0)
        if self._epoll is not None:
            self._epoll.close()
        if self._wake is not None:
            wake, self._wake = self._wake, None
            os.close(wake)
        if self._context is not None:
            context, self._context = self._context, None
            context.term()

    def _check_open(self) -> None:
        if self._closed:
            raise self._closed_error()
        if self._failure is not None:
            message = f"the channel's thread failed: {self._failure}"
            raise ClosedError(message, channel=self._name) from self._failure

    def _closed_error(self) -> ClosedError:
        message = "the control channel is closed"
        return ClosedError(message, channel=self._name)

    # Asking and telling.

    def request(
        self, peer: ControlAddress, message: Request, deadline: Deadline, *, keep_waiting: bool = True
    ) -> Reply:
        """Ask a peer and wait for its answer.

        Lost messages are sent again every ``retry_s``; the peer acts on a request once, however often it hears it.

        Args:
            peer: Whom to ask, from a handle.
            message: The request.
            deadline: Until when to wait.
            keep_waiting: On `Pending` wait on; false returns the `Pending` and gives the request up.

        Raises:
            MoonrelayError: The peer's failure, rebuilt from its reply.
            PeerLost: Refused or disconnected for about a second, silent for ``peer_timeout_s``, or another process
                answers at the address.
            VersionError: The peer speaks another version, or one side requires a feature unknown to the other.
            ConfigError: The two sides do not share an ``auth_key``.
            DeadlineExceeded: No answer by the deadline, and the peer is not known to be lost; ``context["pending"]``
                is true when it said that it is alive and working on it.
            WireError: The address is malformed, or the message too large.
            ClosedError: This channel is closed.

        Blocks: until the answer or the deadline. Threads: any but the I/O thread.
        """
        if threading.current_thread() is self._thread:
            text = "a request from the I/O thread would wait for itself; ask from another thread"
            raise MoonrelayError(text, request=type(message).__name__)
        self._check_not_gone(peer, message)
        while True:
            try:
                reply = self._link(peer).request(message, deadline, keep_waiting)
            except PeerLost as exc:
                self._remember_gone(peer, exc)
                raise
            if reply is not None:
                return reply

    def _check_not_gone(self, peer: ControlAddress, message: Request) -> None:
        """Raise at once for an instance that was found gone a moment ago: its port has refused us."""
        key = (peer.address, peer.nonce)
        with self._lock:
            until = self._gone.get(key)
            if until is None:
                return
            if self._clock.monotonic() >= until:
                del self._gone[key]
                return
        text = "the peer's process was found gone a moment ago"
        raise PeerLost(text, peer=peer.address, request=type(message).__name__, gone=True)

    def _remember_gone(self, peer: ControlAddress, error: PeerLost) -> None:
        """Spare the next requests the second it takes to find out. Silence is not remembered: it may end."""
        if not error.context.get("gone"):
            return
        with self._lock:
            self._gone[peer.address, peer.nonce] = self._clock.monotonic() + GONE_REMEMBERED_S
            while len(self._gone) > GONE_KEPT:
                self._gone.popitem(last=False)

    def push(self, route: bytes, message: Push) -> bool:
        """Tell a peer something, best effort.

        Args:
            route: From the `PeerInfo` of one of its requests.
            message: What to tell.

        Returns:
            Whether it was handed to the network; false when the peer is unknown or gone.

        Raises:
            WireError: The message is too large.

        Threads: any. Never blocks.
        """
        return self._server.push(route, message)

    def _link(self, peer: ControlAddress) -> Link:
        key = (peer.address, peer.nonce)
        with self._lock:
            self._check_open()
            if self._around is None:
                message = "the channel was not started"
                raise ClosedError(message, channel=self._name)
            link = self._links.get(key)
            if link is None:
                _check_address(peer)
                link = self._links[key] = Link(peer, self._around)
            return link

    def _send(self, identity: bytes, data: bytes) -> bool:
        """Send to a connection of the listening socket. Threads: any."""
        with self._router_lock:
            router = self._router
            if router is None:
                return False
            try:
                router.send_multipart((identity, data), NOBLOCK, copy=True)
            except zmq.ZMQError as exc:  # gone, or its queue is full: it asks again
                logger.debug("%s: a peer was not reached: %s", self._name, exc)
                return False
            # A send may swallow the signal of an arrival; the I/O thread has to look.
            if threading.current_thread() is self._thread:
                self._look_again = True
                return True
            arrived = int(router.getsockopt(EVENTS)) & POLLIN
        if arrived:
            self._kick()
        return True

    # What links need of the I/O thread (`moonrelay.control.link.Loop`).

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """See `Loop`."""
        assert self._epoll is not None
        self._watched[fd] = on_readable
        self._epoll.register(fd, select.EPOLLIN)

    def arm(self, fd: int, armed: bool) -> None:
        """See `Loop`."""
        assert self._epoll is not None
        self._epoll.modify(fd, select.EPOLLIN if armed else 0)

    def unwatch(self, fd: int) -> None:
        """See `Loop`."""
        assert self._epoll is not None
        self._watched.pop(fd, None)
        self._epoll.unregister(fd)

    def deliver(self, peer: ControlAddress, message: Push) -> None:
        """See `Loop`."""
        self._pushed.append((peer, message))
        if threading.current_thread() is not self._thread:
            self._kick()

    def discard(self, link: Link) -> None:
        """See `Loop`. Takes no lock: the caller holds the link's."""
        self._retiring.add(link)
        key = (link.peer.address, link.peer.nonce)
        if self._links.get(key) is link:
            self._links.pop(key, None)

    def disposed(self, link: Link) -> None:
        """See `Loop`. Takes no lock: the caller holds the link's."""
        self._retiring.discard(link)

    def _kick(self) -> None:
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(wake, 1)

    # The I/O thread.

    def _run(self) -> None:
        assert self._epoll is not None
        try:
            self._on_router()  # a socket signals only what comes after it was found empty
            while not self._stopping:
                for fd, _ in self._epoll.poll():
                    on_readable = self._watched.get(fd)
                    if on_readable is not None:
                        on_readable()
                while self._pushed:
                    self._deliver(*self._pushed.popleft())
                if self._look_again:
                    self._on_router()
        except Exception as exc:  # outermost frame of the thread: everybody who asks is told
            logger.exception("%s: the I/O thread failed", self._name)
            self._failure = exc
            with self._lock:
                links = list(self._links.values())
            for link in links:
                link.close(ClosedError(f"the channel's thread failed: {exc}", channel=self._name))

    def _on_wake(self) -> None:
        assert self._wake is not None
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._on_router()

    def _on_router(self) -> None:
        while not self._stopping:
            with self._router_lock:
                self._look_again = False
                if self._router is None or not int(self._router.getsockopt(EVENTS)) & POLLIN:
                    return
                identity, *parts = self._router.recv_multipart(NOBLOCK)
            self._server.receive(identity, parts)

    def _deliver(self, peer: ControlAddress, message: Push) -> None:
        if self._on_push is None:
            return
        try:
            self._on_push(peer, message)
        except Exception:  # outermost frame of a push: pushes are best effort, the loop goes on
            logger.exception("%s: on_push failed for %s", self._name, type(message).__name__)

    def __enter__(self) -> PeerChannel:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _host(field: str, text: str) -> str:
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        return str(ipaddress.ip_address(host))
    except ValueError as exc:
        message = f"{field}={text!r} is not a numeric address; use one like 127.0.0.1 or ::1"
        raise ConfigError(message, field=field) from exc


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _nonce(text: str) -> bytes:
    if not _NONCE.fullmatch(text):
        message = f"nonce={text!r} must be {2 * NONCE_BYTES} lower-case hex digits"
        raise ConfigError(message, field="nonce")
    return bytes.fromhex(text)


def _check_address(peer: ControlAddress) -> None:
    match = _ADDRESS.fullmatch(peer.address)
    if match is None or not 0 < int(match[2]) < 65536 or not _NONCE.fullmatch(peer.nonce):
        message = f"control address {peer.address!r:.80} (nonce {peer.nonce!r:.40}) is malformed"
        raise WireError(message)
