"""Where a receiver finds by name what a sender has: the sender's `Desk`, and the `Caller` that asks desks.

Owns the desk's socket and its thread. Whom the desk gives what is `moonrelay_lightx2v.rendezvous_book`'s, what is said
`moonrelay_lightx2v.rendezvous_wire`'s, the asking side `moonrelay_lightx2v.rendezvous_caller`'s. Handles travel here,
never tensors.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

import zmq

from moonrelay.clock import Clock, SystemClock
from moonrelay.control.wire import MAX_FRAME_BYTES, NOBLOCK, POLLIN, Complaints, Frame, Kind, Refusal, Refused
from moonrelay.errors import ClosedError, ConfigError, WireError
from moonrelay_lightx2v.rendezvous_book import Book, Sending
from moonrelay_lightx2v.rendezvous_caller import Caller
from moonrelay_lightx2v.rendezvous_wire import (
    MAX_HANDLE_BYTES,
    WRONG_PHASE,
    Names,
    Want,
    bare_host,
    check_names,
    check_phase,
    new_token,
    pack_answer,
    pack_reject,
    question_in,
    seal_for,
    shown,
)

__all__ = ["Caller", "Desk", "Names"]

logger = logging.getLogger(__name__)

#: How long a closing desk may take to say so, in milliseconds.
_LINGER_MS: Final = 200
#: Messages taken before what has to be sent is sent.
_BATCH: Final = 64
_QUEUE_LENGTH: Final = 1000
_PORT_KEYS: Final = "rendezvous_port, sender_engine_rank or bootstrap_room"


class Desk:
    """What one sender role has to hand over, by name.

    Args:
        host: Address of this machine to bind, or a name of it; IPv6 literals with or without brackets.
        port: Port to bind; 0 is the system's choice.
        phase: What is handed over here; a caller that wants another phase is refused.
        auth_key: The deployment's secret, or ``None``.
        clock: Time.
        keep_failures_s: How long a failure is told to who comes, in seconds.

    Raises:
        ConfigError: The address cannot be one, the phase or the key is empty.

    Threads: any; one daemon thread of its own between `start` and `close`. Of no use in a forked child.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        phase: str,
        auth_key: str | None = None,
        clock: Clock | None = None,
        keep_failures_s: float = 600.0,
    ) -> None:
        self._host = bare_host(host, "local_hostname")
        if not 0 <= port <= 65535:
            message = f"port {port} of the rendezvous is none; set {_PORT_KEYS} so that it is between 1 and 65535"
            raise ConfigError(message, field="rendezvous_port")
        self._port = port
        self._phase = check_phase(phase)
        self._seal = seal_for(auth_key)
        self._nonce = new_token()
        self._clock: Clock = clock or SystemClock()
        self._complaints = Complaints(logger, f"the desk of the {phase} stage")
        self._lock = threading.Lock()
        self._book = Book(keep_failures_s)
        self._outbox: deque[Sending] = deque()
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._wake: int | None = None
        self._thread: threading.Thread | None = None
        self._bound: tuple[str, int] | None = None
        self._closed = False

    # Life.

    def start(self) -> None:
        """Bind and serve. Idempotent.

        Raises:
            ConfigError: The address is taken or unusable.
            ClosedError: The desk was closed.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            if self._thread is not None:
                return
            try:
                self._open()
            except BaseException:
                self._give_back()
                raise

    def _open(self) -> None:
        address = _resolved(self._host, self._port)
        self._context = zmq.Context()
        self._router = router = self._context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, _LINGER_MS)
        router.set(zmq.IPV6, 1 if ":" in address else 0)
        router.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, _QUEUE_LENGTH)
        router.set(zmq.RCVHWM, _QUEUE_LENGTH)
        router.set(zmq.TCP_KEEPALIVE, 1)
        router.set(zmq.TCP_KEEPALIVE_IDLE, 60)
        try:
            router.bind(f"tcp://{shown(address, self._port or '*')}")
        except zmq.ZMQError as exc:
            raise _cannot_bind(self._host, self._port, exc) from exc
        endpoint = bytes(router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0")
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bound = (self._host, int(endpoint.rsplit(b":", 1)[1]))
        self._thread = threading.Thread(target=self._run, name=f"moonrelay-desk-{self._phase}", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where it is bound: the host as given, and the port. Only after `start`."""
        if self._bound is None:
            message = "a desk has no address before start()"
            raise ClosedError(message, stage=self._phase)
        return self._bound

    def close(self) -> None:
        """Tell who waits that this desk closes, then stop. Idempotent.

        Blocks: until the thread ended, a fraction of a second.
        """
        if os.getpid() != self._pid:
            self._closed = True  # the parent's lock may be held for ever here, and its thread is not in this process
            self._give_back()
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._outbox.extend(self._book.closing())
            self._kick()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        router, self._router = self._router, None
        if router is not None:
            router.close()
        wake, self._wake = self._wake, None
        if wake is not None:
            os.close(wake)
        context, self._context = self._context, None
        if context is not None:
            context.term()

    def _check_open(self) -> None:
        if self._closed:
            message = f"the desk of the {self._phase} stage is closed"
            raise ClosedError(message, stage=self._phase)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # before the lock, which may be held for ever here
            message = f"the desk of the {self._phase} stage is another process's, from before a fork; make a new one"
            raise ClosedError(message, stage=self._phase)

    # What the stage says.

    def working(self, names: Names) -> None:
        """Say that a new request is being worked on here, until `offer`, `refuse` or `done`.

        Where its first name is its own, an older offer or failure under that name answers nobody from now on.

        Raises:
            ConfigError: The names are unusable.
            ClosedError: The desk is closed.
        """
        names = check_names(names)
        self._check_process()
        with self._lock:
            self._check_open()
            self._send_soon(self._book.working(names))

    def offer(self, names: Names, payload_id: str, handle: bytes) -> str | None:
        """Offer a payload under these names; who waits for one of them is told at once.

        Under a first name that begins with ``same:`` nothing is replaced: who asks for the same gets the same, one
        offer after the other.

        Returns:
            The id of an older offer under the same first name that this one replaces, or ``None``.

        Raises:
            ConfigError: The names are unusable.
            WireError: The handle is too large.
            CapacityError: Thousands of offers wait already.
            ClosedError: The desk is closed.
        """
        names = check_names(names)
        if len(handle) > MAX_HANDLE_BYTES:
            message = f"a handle of {len(handle)} bytes exceeds {MAX_HANDLE_BYTES}; use fewer tensors or chunks"
            raise WireError(message, nbytes=len(handle))
        self._check_process()
        with self._lock:
            self._check_open()
            replaced, sendings = self._book.offer(names, payload_id, handle, self._clock.monotonic())
            self._send_soon(sendings)
        return replaced

    def refuse(self, names: Names, code: str, message: str) -> None:
        """Say that this stage failed a request: who waits for it is told, else the first who comes.

        Its offer, when it is there already, stays, and is what they get.

        Raises:
            ConfigError: The names are unusable.
            ClosedError: The desk is closed.
        """
        names = check_names(names)
        self._check_process()
        with self._lock:
            self._check_open()
            self._send_soon(self._book.refuse(names, code, message, self._clock.monotonic()))

    def done(self, names: Names) -> None:
        """Say that a request is no longer worked on, and nothing came of it. Nothing after `close`."""
        names = check_names(names)
        with self._lock:
            self._book.done(names)

    def withdraw(self, payload_id: str, *, over: bool = False) -> None:
        """Forget an offer: its payload has ended. Unknown ids are nothing; so is everything after `close`.

        Args:
            payload_id: Of the payload.
            over: Whether a find that comes for it is to learn, when its time is over, that it was there. It waits all
                the same: a client may send a request again under the same id.
        """
        with self._lock:
            self._book.withdraw(payload_id, over)

    def take_back(self) -> str | None:
        """Forget the oldest offer that a find gave back and that nobody has now: what is best done without.

        Returns:
            The id of its payload; ``None`` where there is none.
        """
        with self._lock:
            return self._book.take_back()

    # The thread.

    def _send_soon(self, sendings: Iterable[Sending]) -> None:
        """Have the thread send; the lock is held, so that what is decided first is sent first."""
        before = len(self._outbox)
        self._outbox.extend(sendings)
        if len(self._outbox) > before:
            self._kick()

    def _kick(self) -> None:
        if self._wake is not None and threading.current_thread() is not self._thread:
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        router, wake = self._router, self._wake
        assert router is not None
        assert wake is not None
        poller = zmq.Poller()
        poller.register(router, POLLIN)
        poller.register(wake, POLLIN)
        while True:
            ready = dict(poller.poll())
            if wake in ready:
                os.eventfd_read(wake)
            try:
                # Before what comes next: it may be what the closing has to say.
                closing = self._closed
                self._empty_outbox(router)
                if closing:
                    return
                if router in ready:
                    self._take_batch(router)
                self._empty_outbox(router)
            except Exception as exc:  # noqa: BLE001  the desk serves on; its callers ask again
                self._complaints.drop("a defect of the desk", repr(exc))
                if self._closed:
                    return

    def _take_batch(self, router: zmq.Socket[bytes]) -> None:
        for _ in range(_BATCH):
            try:
                route, *parts = router.recv_multipart(NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(router, route, parts)
            except WireError as exc:
                self._complaints.drop("malformed", exc)

    def _take(self, router: zmq.Socket[bytes], route: bytes, parts: list[bytes]) -> None:
        if len(parts) != 1:
            self._complaints.drop("malformed", f"{len(parts)} parts instead of one")
            return
        frame = self._seal.unpack(parts[0])
        if isinstance(frame, Refused):
            self._complaints.drop(frame.why, f"version {frame.version}")
            if frame.kind == Kind.REQUEST or frame.why is Refusal.VERSION:
                self._reject(router, route, frame.sender, frame.why, f"refused: {frame.why}")
            return
        question = question_in(frame)
        if isinstance(question, Want):
            if question.phase != self._phase:
                self._complaints.drop("another phase is wanted", question.phase)
                self._reject(router, route, frame.sender, WRONG_PHASE, self._phase)
                return
            self._want(route, frame, question)
            return
        with self._lock:
            self._outbox.extend(self._book.forget(frame.sender, question.taken, self._clock.monotonic()))

    def _want(self, route: bytes, frame: Frame, want: Want) -> None:
        names = tuple(dict.fromkeys(want.names))
        with self._lock:
            now = self._clock.monotonic()
            answer = self._book.want(frame.sender, route, names, want.wait_ms / 1000, now)
            self._outbox.append(Sending(route, frame.sender, answer))

    def _empty_outbox(self, router: zmq.Socket[bytes]) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                sending = self._outbox.popleft()
            data = pack_answer(self._seal, self._nonce, sending.token, sending.answer)
            if not self._send(router, sending.route, data):
                with self._lock:
                    self._outbox.extend(self._book.lost(sending.token, self._clock.monotonic()))

    def _reject(self, router: zmq.Socket[bytes], route: bytes, token: bytes, code: str, text: str) -> None:
        self._send(router, route, pack_reject(self._seal, self._nonce, token, code, text))

    def _send(self, router: zmq.Socket[bytes], route: bytes, data: bytes) -> bool:
        try:
            router.send_multipart((route, data), NOBLOCK)
        except zmq.ZMQError as exc:  # gone, or it does not read: it asks again if it still wants to know
            logger.debug("the desk of the %s stage did not reach a caller: %s", self._phase, exc)
            return False
        return True


def _resolved(host: str, port: int) -> str:
    """Return the numeric address to bind; ZeroMQ takes no names there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        message = f"local_hostname={host!r} cannot be resolved ({exc}); set it to an address of this machine"
        raise ConfigError(message, field="local_hostname") from exc
    # IPv4 first: a caller that is given a name dials that.
    best = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(best[4][0])


def _cannot_bind(host: str, port: int, error: zmq.ZMQError) -> ConfigError:
    where = shown(host, port)
    if error.errno == errno.EADDRINUSE:
        message = (
            f"{where} is taken by another process, so no receiver would find this role there; end that process, or "
            f"set another {_PORT_KEYS} on both sides"
        )
        return ConfigError(message, field="rendezvous_port")
    if error.errno == errno.EACCES:
        message = f"{where} may not be bound ({error}); set another {_PORT_KEYS} on both sides"
        return ConfigError(message, field="rendezvous_port")
    message = f"{where} cannot be bound ({error}); set local_hostname to an address of this machine"
    return ConfigError(message, field="local_hostname")
