"""The asking side of the rendezvous: a receiver's `Caller`.

Owns the sockets to the desks, and which thread has them. What a find makes of the answers is
`moonrelay_lightx2v.rendezvous_search`'s. There is no thread here: who finds polls its own sockets.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import zmq

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.control.wire import MAX_FRAME_BYTES, NOBLOCK, POLLIN, Complaints
from moonrelay.errors import (
    Aborted,
    Cancelled,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    LeaseLost,
    PeerLost,
)
from moonrelay_lightx2v.rendezvous_search import Search
from moonrelay_lightx2v.rendezvous_wire import (
    ADDRESS_KEYS,
    Forget,
    Names,
    bare_host,
    check_names,
    check_phase,
    pack_question,
    seal_for,
    shown,
)

logger = logging.getLogger(__name__)

#: How long a connection that is let go may take to send its last word, in milliseconds.
_LINGER_MS: Final = 100
#: How soon a connection that failed is tried again, in milliseconds.
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1000
_QUEUE_LENGTH: Final = 1000
#: Sets of sockets kept for the next find; finds in more threads than that dial anew.
_IDLE_KEPT: Final = 4
#: Finds whose token is remembered for `Caller.forget`.
_TOKENS_KEPT: Final = 1024
#: How long `Caller.close` waits for a find, which is woken at once, to let go of its sockets.
_LET_GO_S: Final = 10.0
#: How often a find looks whether it was cancelled, in seconds: what says so is an event of the host's, no descriptor.
_CANCEL_LOOK_S: Final = 0.25


class Caller:
    """What one receiver role asks of desks.

    Args:
        addresses: ``(host, port)`` of the desks; all are asked. A name is dialled by IPv4.
        phase: What is wanted; must be the desks'.
        auth_key: The deployment's secret, or ``None``.
        peer_timeout_s: After how many seconds of silence a desk is lost.
        retry_s: How often the question is repeated, in seconds.
        clock: Time.

    Raises:
        ConfigError: No address, or one that cannot be; a time, the phase or the key is unusable.

    Threads: any; none of its own. Each find has its own sockets, kept for the next one. Of no use in a forked child.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        phase: str,
        auth_key: str | None = None,
        peer_timeout_s: float = 30.0,
        retry_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        if not addresses:
            message = f"bootstrap_addr is empty; set {ADDRESS_KEYS} to those of the role before this one"
            raise ConfigError(message, field="bootstrap_addr")
        for field, value in (("peer_timeout_s", peer_timeout_s), ("retry_s", retry_s)):
            if not 0 < value < math.inf:
                message = f"{field}={value!r} must be a positive number of seconds"
                raise ConfigError(message, field=field)
        self._peers = tuple(dict.fromkeys(_peer(host, port) for host, port in addresses))
        self._phase = check_phase(phase)
        self._seal = seal_for(auth_key)
        self._peer_timeout_s = peer_timeout_s
        # So that a lost message alone makes no desk silent.
        self._retry_s = min(retry_s, peer_timeout_s / 3)
        self._clock: Clock = clock or SystemClock()
        self._complaints = Complaints(logger, f"a caller of the {phase} stage")
        self._changed = threading.Condition()
        self._idle: list[_Lines] = []
        self._busy: set[_Lines] = set()
        self._tokens: OrderedDict[Names, bytes] = OrderedDict()
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._closed = False

    def find(self, names: Names, deadline: Deadline, *, cancelled: Callable[[], bool] | None = None) -> bytes:
        """Return the handle that a desk offers under one of these names.

        Args:
            names: Of what is wanted, most exact first.
            deadline: Until when.
            cancelled: Tells whether nobody wants it any more; looked at several times a second.

        Raises:
            Cancelled: ``cancelled`` said so, and nothing was found before.
            PeerLost: No desk answers for ``peer_timeout_s``, or the one that worked on it is gone, closes, or was
                restarted.
            Aborted: The stage that was to hand it over failed; the message carries its text, ``cause`` its code.
            LeaseExpired: What the stage sent under these names has expired.
            LeaseLost: It was consumed by another receiver, or has ended, and nothing came after it by the deadline.
            DeadlineExceeded: Nothing was offered by the deadline.
            ConfigError: The names are unusable, the desk has another ``auth_key``, or serves another phase.
            VersionError: The desk speaks another version.
            ClosedError: This caller is closed, or was while it waited.

        Blocks: until then.
        """
        names = check_names(names)
        search = Search(
            names,
            self._phase,
            self._peers,
            self._seal,
            now=self._clock.monotonic(),
            peer_timeout_s=self._peer_timeout_s,
            retry_s=self._retry_s,
        )
        lines = self._take_lines()
        reusable = False
        try:
            handle = self._ask(lines, search, deadline, cancelled)
            reusable = True
        except (Aborted, Cancelled, DeadlineExceeded, LeaseExpired, LeaseLost):
            reusable = True
            raise
        finally:
            # A connection to one that was lost may be dead without knowing it, one that was refused has more to say.
            self._let_go(lines, search, reusable)
        self._remember(names, search.token)
        return handle

    def forget(self, names: Names, *, taken: bool = True) -> None:
        """Tell the desks that the last find of these names is settled. Best effort; never blocks or raises.

        Args:
            names: As they were given to `find`.
            taken: Whether what was found was used up; if not, the desk may give it to another.
        """
        if os.getpid() != self._pid:
            return
        with self._changed:
            token = self._tokens.pop(tuple(dict.fromkeys(names)), None)
            if token is None or not self._idle:
                return
            lines = self._idle[-1]
            for number in range(len(self._peers)):
                lines.send(number, pack_question(self._seal, token, Forget(taken=taken)))

    def close(self) -> None:
        """Close the sockets; a find under way ends with `ClosedError`. Idempotent.

        Blocks: until that find let go, at once. Threads: any, but not from inside a find (a signal's handler).
        """
        if os.getpid() != self._pid:
            self._closed = True  # the parent's lock may be held for ever here
            self._end()
            return
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for lines in self._busy:
                lines.wake()
            if self._changed.wait_for(lambda: not self._busy, timeout=_LET_GO_S):
                self._end()
            else:
                logger.warning("a find of the %s stage does not end; its sockets stay", self._phase)

    def _end(self) -> None:
        idle, self._idle = self._idle, []
        for lines in idle:
            lines.close()
        context, self._context = self._context, None
        if context is not None:
            context.term()

    # Sockets, and who has them.

    def _take_lines(self) -> _Lines:
        if os.getpid() != self._pid:  # before the lock, which may be held for ever here
            message = "the caller is another process's, from before a fork; make a new one"
            raise ClosedError(message, stage=self._phase)
        with self._changed:
            self._check_open()
            if self._context is None:
                self._context = zmq.Context()
            lines = self._idle.pop() if self._idle else _Lines(self._context, self._peers)
            self._busy.add(lines)
            return lines

    def _let_go(self, lines: _Lines, search: Search, reusable: bool) -> None:
        with self._changed:
            for number in range(len(self._peers)):
                if not search.has_taken(number):
                    lines.send(number, search.farewell(number))
            self._busy.discard(lines)
            if reusable and not self._closed and len(self._idle) < _IDLE_KEPT:
                self._idle.append(lines)
            else:
                lines.close()
            self._changed.notify_all()

    def _remember(self, names: Names, token: bytes) -> None:
        with self._changed:
            self._tokens.pop(names, None)
            self._tokens[names] = token
            while len(self._tokens) > _TOKENS_KEPT:
                self._tokens.popitem(last=False)

    def _check_open(self) -> None:
        if self._closed:
            message = f"the caller of the {self._phase} stage is closed"
            raise ClosedError(message, stage=self._phase)

    # The find.

    def _ask(self, lines: _Lines, search: Search, deadline: Deadline, cancelled: Callable[[], bool] | None) -> bytes:
        while True:
            now = self._clock.monotonic()
            for number in search.due(now):
                lines.send(number, search.question(deadline.remaining()))
                search.asked(number, now)
            wait_s = deadline.remaining(max(0.0, search.next_at(now) - now))
            assert wait_s is not None
            if cancelled is not None:
                wait_s = min(wait_s, _CANCEL_LOOK_S)
            lost: PeerLost | None = None
            for number in lines.wait(wait_s):
                lost = self._hear(lines, search, number) or lost
            self._check_open()
            if search.handle is not None:
                return search.handle
            if cancelled is not None and cancelled():
                raise search.given_up()
            if lost is not None:
                raise lost
            search.check(self._clock.monotonic())
            if deadline.expired:
                raise search.too_late(deadline)

    def _hear(self, lines: _Lines, search: Search, number: int) -> PeerLost | None:
        """Take what a desk sent; a loss is told last, for another desk may have sent what is wanted."""
        lost: PeerLost | None = None
        while search.handle is None and (data := lines.receive(number)) is not None:
            try:
                complaint = search.take(number, data)
            except PeerLost as exc:
                lost = exc
                continue
            if complaint is not None:
                self._complaints.drop("malformed", f"{self._peers[number]}: {complaint}")
        return lost


class _Lines:
    """One connection to each desk, and what wakes who waits on them.

    Threads: one at a time; `wake` from any.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], peers: Sequence[str]) -> None:
        self._sockets: list[zmq.Socket[bytes]] = []
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._wake, POLLIN)
        try:
            for peer in peers:
                dealer = context.socket(zmq.DEALER)
                self._sockets.append(dealer)
                _dial(dealer, peer)
                self._poller.register(dealer, POLLIN)
        except BaseException:
            self.close()
            raise

    def send(self, number: int, data: bytes) -> None:
        """Send, as soon as the desk can be reached."""
        try:
            self._sockets[number].send(data, NOBLOCK)
        except zmq.Again:
            logger.debug("the queue to desk %d is full; the question is repeated later", number)

    def wait(self, wait_s: float) -> list[int]:
        """Return the desks that sent something; none when the time is over or on `wake`."""
        ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        return [number for number, dealer in enumerate(self._sockets) if dealer in ready]

    def receive(self, number: int) -> bytes | None:
        """Return the next message, or ``None``."""
        try:
            parts = self._sockets[number].recv_multipart(NOBLOCK)
        except zmq.Again:
            return None
        return b"".join(parts)

    def wake(self) -> None:
        """End the wait, for good."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close all. Idempotent."""
        for dealer in self._sockets:
            dealer.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


def _dial(dealer: zmq.Socket[bytes], peer: str) -> None:
    dealer.set(zmq.LINGER, _LINGER_MS)
    dealer.set(zmq.IPV6, 1 if peer.startswith("[") else 0)
    dealer.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    # Not IMMEDIATE: that loses what a desk said right before its connection ended. What is kept for a desk that is not
    # there yet it hears in order, of a find that ended meanwhile that it has, too.
    dealer.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
    dealer.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    dealer.set(zmq.SNDHWM, _QUEUE_LENGTH)
    dealer.set(zmq.RCVHWM, _QUEUE_LENGTH)
    dealer.set(zmq.TCP_KEEPALIVE, 1)
    dealer.set(zmq.TCP_KEEPALIVE_IDLE, 60)
    try:
        dealer.connect(f"tcp://{peer}")
    except zmq.ZMQError as exc:
        message = f"the desk's address {peer!r} cannot be dialled ({exc}); set {ADDRESS_KEYS}"
        raise ConfigError(message, field="bootstrap_addr") from exc


def _peer(host: str, port: int) -> str:
    host = bare_host(host, "bootstrap_addr")
    if not 1 <= port <= 65535:
        message = f"port {port} of the desk at {host!r} is none; set {ADDRESS_KEYS}"
        raise ConfigError(message, field="rendezvous_port")
    return shown(host, port)
