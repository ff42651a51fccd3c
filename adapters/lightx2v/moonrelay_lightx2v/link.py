"""One role's end of the hand-over: what it sends is offered by name, what it needs is found by name.

Owns the life of a request within a role, and joins the parts: bytes move by the core's `DiffusionConnector`, names are
found by `moonrelay_lightx2v.rendezvous`. A role works on one request at a time, as the host's runners do; what it sent
lives on until it is taken.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.connector import DiffusionConnector
from moonrelay.connector.caching import ChosenCache
from moonrelay.errors import (
    Aborted,
    Cancelled,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
    TransferTimeout,
    WireError,
)
from moonrelay.handle import StageHandle
from moonrelay.payload import StagePayload
from moonrelay_lightx2v import fields, room
from moonrelay_lightx2v.config import ENCODER
from moonrelay_lightx2v.pairing import Names, said
from moonrelay_lightx2v.rendezvous import Caller, Desk
from moonrelay_lightx2v.rendezvous_wire import is_shared

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.connector.claim import PayloadClaim
    from moonrelay.events import Event
    from moonrelay_lightx2v.config import LinkConfig

logger = logging.getLogger(__name__)

#: What the trees of our payloads mean.
SCHEMA: Final = "lightx2v.stage/1"
_TREE: Final = "tree"
#: Pause before a receiver asks again for what another one took: its desk has not heard of that yet.
LOOK_AGAIN_S: Final = 0.2
#: Bound of one acknowledgement, in seconds.
ACK_TIMEOUT_S: Final = 10.0
#: How long a claim waits for another receiver's before the desks are asked again, in seconds; longer than an owner may
#: be silent.
CLAIM_TIMEOUT_S: Final = 10.0
#: Bound of a read once the payload was claimed, in seconds, where the request's own time leaves more.
FETCH_TIMEOUT_S: Final = 300.0
#: How long failures are told to receivers that come late, in seconds.
KEEP_FAILURES_S: Final = 600.0
#: How many ends of payloads are kept that came before their offer was noted.
EARLY_KEPT: Final = 256


@dataclass(slots=True)
class _Request:
    """What this role is working on."""

    names: Names
    cancelled: Callable[[], bool] | None = None
    claim: PayloadClaim | None = None
    sent: bool = False


@dataclass(frozen=True, slots=True)
class _Offered:
    """What this role sent and nobody has consumed."""

    handle: StageHandle
    names: Names


class StageLink:
    """Hands over for one role of the host.

    Cheap to make; `start` starts engine, channel and desk.

    Args:
        config: The role's settings.
        clock: All times are reckoned on it.

    Threads: `begin`, `send`, `receive` and `end` from the thread of the runner; all else from any.
    """

    def __init__(self, config: LinkConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self._clock: Clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._closed = False
        self._closing = threading.Lock()
        self._request: _Request | None = None
        self._offered: dict[str, _Offered] = {}
        self._early: dict[str, Event] = {}
        self._not_consumed: MoonrelayError | None = None
        self._connector = DiffusionConnector(
            role=f"lightx2v-{config.role}",
            transfer_mode=config.transfer_mode,
            te_config=config.transfer,
            store_config=config.store,
            control_config=config.control,
            lease_ttl_s=config.lease_ttl_s,
            spill_after_s=config.spill_after_s,
            integrity=config.integrity,
            auth_key=config.auth_key,
            observers=[self._on_event],
            clock=self._clock,
        )
        chosen = config.embedding_cache if config.role == ENCODER else None
        self._embeddings = None if chosen is None else ChosenCache(chosen, self._connector)
        self._desk: Desk | None = None
        self._caller: Caller | None = None
        if config.listens is not None:
            host, port = config.listens
            self._desk = Desk(
                host,
                port,
                phase=str(config.sends),
                auth_key=config.auth_key,
                clock=self._clock,
                keep_failures_s=KEEP_FAILURES_S,
            )
        if config.dials:
            self._caller = Caller(
                config.dials,
                phase=str(config.receives),
                auth_key=config.auth_key,
                peer_timeout_s=config.peer_timeout_s,
                clock=self._clock,
            )

    def __repr__(self) -> str:
        return f"<StageLink {self.config.role} {self._connector!r}>"

    @property
    def address(self) -> tuple[str, int] | None:
        """Where this role's receivers find it; ``None`` where it sends nothing. Known once started."""
        return None if self._desk is None else self._desk.address

    @property
    def connector(self) -> DiffusionConnector:
        """The connector that moves the bytes, to look at."""
        return self._connector

    @property
    def embeddings(self) -> EmbeddingCache | None:
        """An encoder's cache of what its text encoder makes; ``None`` where none was chosen."""
        return None if self._embeddings is None else self._embeddings.cache

    @property
    def not_consumed(self) -> MoonrelayError | None:
        """Why the input of the last request that ended well could not be acknowledged; ``None`` where it was."""
        return self._not_consumed

    def start(self) -> None:
        """Start engine, channel and desk, so that what is missing is said now.

        Blocks: seconds at most.

        Raises:
            ConfigError: The desk's address is taken, or the engine refuses its settings.
            PluginError: The engine or the store cannot be loaded.
            PeerLost: The store cannot be reached.
            ClosedError: The link is closed.
        """
        self._check_open()
        try:
            self._connector.start()
            if self._desk is not None:
                self._desk.start()
        except BaseException:
            self.close()
            raise

    # -- a request --------------------------------------------------------------------------------------------------

    def begin(self, names: Names, *, cancelled: Callable[[], bool] | None = None) -> None:
        """Note that this role works on a request from now on; one that was not ended is given back.

        Args:
            names: What the request goes by; see `moonrelay_lightx2v.pairing`.
            cancelled: Tells whether its client has given it up; looked at while this role waits, and before it sends.

        Raises:
            ClosedError: The link is closed.
        """
        self._check_open()
        if self._request is not None:
            self.end(Cancelled("another request began before this one had ended"))
        self._request = _Request(names, cancelled)
        if self._desk is not None and names:
            self._desk.working(names)

    def send(self, data: Mapping[str, Any], *, metadata: dict[str, object] | None = None) -> None:
        """Offer what this role made for the request that it works on. Waits for no receiver.

        Its tensors are copied: the host may change them as soon as this returns.

        Args:
            data: The host's tree.
            metadata: Plain values beside it.

        Raises:
            Cancelled: Its client has given it up.
            UnsupportedTensor, ConfigError: A value cannot be carried (names its place); the request has no name; this
                role sends nothing.
            CapacityError: It is larger than the pool, or there was no room within ``send_timeout_s``.
            PluginError, ClosedError: The engine cannot be used; the link is closed.

        Blocks: for the copy, and for room.
        """
        request = self._current()
        if self._desk is None:
            message = f"a role of disagg_mode={self.config.role!r} without decoder_engine_rank sends nothing"
            raise ConfigError(message, field="decoder_engine_rank")
        self._check_wanted(request)
        payload = StagePayload(
            request_id=said(request.names),
            kind=self.config.role,
            data={_TREE: fields.carriable(data)},
            metadata=metadata,
            schema=SCHEMA,
        )
        handle = room.publish(
            self._connector,
            payload,
            self.config,
            clock=self._clock,
            changed=self._changed,
            check_open=lambda: self._check_wanted(request),
            make_room=self._make_room,
        )
        with self._changed:
            self._offered[handle.id] = _Offered(handle, request.names)
        replaced = self._desk.offer(request.names, handle.id, handle.to_bytes())
        request.sent = True
        if replaced is not None:
            self._drop(replaced, "the same request was sent again")
        with self._changed:
            ended = self._early.get(handle.id)
        if ended is not None:
            self._forget(ended)

    def receive(self) -> tuple[dict[str, Any], dict[str, object]]:
        """Find, claim and read what the role before made for the request that this role works on.

        It stays claimed, and is acknowledged when the request ends well: until then another one could take it over.

        Returns:
            The tree, in memory that goes back to the pool when its tensors die, and the metadata.

        Raises:
            Cancelled: Its client has given it up.
            DeadlineExceeded: Nothing came under the request's names within ``transfer_timeout_s``.
            LeaseHeld: Another receiver had it until then.
            PeerLost: The role before is gone, or was restarted while it worked on this request.
            Aborted: The role before failed; with its text.
            LeaseExpired: The role before made it, and nobody took it within its ``lease_ttl_s``.
            ConfigError: The request has no name; this role receives nothing; the two do not fit together.
            MoonrelayError: As `DiffusionConnector.claim` and `PayloadClaim.read`.

        Blocks: until it is here.
        """
        request = self._current()
        if self._caller is None:
            message = f"a role of disagg_mode={self.config.role!r} receives nothing"
            raise ConfigError(message, field="disagg_mode")
        deadline = Deadline(self.config.transfer_timeout_s, self._clock)
        held: str | None = None  # a text, not the error: that would keep this frame, and what the request gets
        while True:
            self._check_wanted(request)
            try:
                raw = self._caller.find(request.names, deadline, cancelled=request.cancelled)
                handle = StageHandle.from_bytes(raw)
                return self._take(request, handle, deadline)
            except LeaseHeld as exc:
                # Another works on it, and may give it back. Meanwhile there may be another like it.
                if (deadline.remaining() or 0.0) <= LOOK_AGAIN_S:
                    raise
                held = exc.message
                logger.debug("%s is held by another receiver, looking again", said(request.names))
                self._caller.forget(request.names)
            except (DeadlineExceeded, TransferTimeout):
                if held is None or not deadline.expired:
                    raise
                raise LeaseHeld(held, request_id=said(request.names)) from None
            except LeaseLost:
                # Somebody consumed it meanwhile. Another may ask for the same, so there may be another like it; but
                # what goes by this request's own id was this request's.
                if deadline.expired or (handle.request_id == request.names[0] and not is_shared(request.names[0])):
                    raise
                logger.debug("%s was taken by another receiver, looking again", handle.id)
                self._caller.forget(request.names)
                with self._changed:
                    self._clock.wait(self._changed, deadline.remaining(LOOK_AGAIN_S))

    def end(self, error: BaseException | None = None) -> None:
        """End the request that this role works on.

        Args:
            error: Why it failed: its input is given back, and its receivers are told. ``None``: its input is consumed.

        Blocks: for one message to the owner of the input, ten seconds at most. Raises nothing.
        """
        request, self._request = self._request, None
        if request is None:
            return
        claim, request.claim = request.claim, None
        consumed = claim is not None and error is None
        self._not_consumed = None
        if claim is not None:
            try:
                if error is None:
                    claim.ack(timeout_s=ACK_TIMEOUT_S)
                else:
                    claim.nack()
            except MoonrelayError as exc:
                self._not_consumed = exc
                claim.nack()  # nothing of it is kept here
                # Its work is done; an input that stays is ended by its lease.
                logger.warning("%s: its input was not acknowledged: %s", said(request.names), exc)
        if self._caller is not None and request.names:
            self._caller.forget(request.names, taken=consumed)
        if self._desk is None or not request.names or request.sent:
            return
        if error is None:
            self._desk.done(request.names)
            return
        code = error.code if isinstance(error, MoonrelayError) else type(error).__name__
        if isinstance(error, Aborted) and error.context.get("cause") == Cancelled.code:
            code = Cancelled.code  # given up at a role before this one: not to be told to others either
        text = f"{self.config.role} failed: {str(error) or type(error).__name__}"
        try:
            self._desk.refuse(request.names, code, text)
        except MoonrelayError as exc:  # it is closed, or cannot use the names: what failed must be told, not this
            logger.warning("%s: its receivers are not told that it failed: %s", said(request.names), exc)

    # -- life -------------------------------------------------------------------------------------------------------

    def in_use(self) -> Mapping[str, int]:
        """Return what is held for payloads now; see `DiffusionConnector.in_use`."""
        return self._connector.in_use()

    def linger(self, timeout_s: float | None = None) -> bool:
        """Wait until what this role sent was taken, or has expired.

        Args:
            timeout_s: Longest wait, in seconds; ``linger_s`` by default.

        Returns:
            Whether nothing is left. Blocks: until then.
        """
        deadline = Deadline(self.config.linger_s if timeout_s is None else timeout_s, self._clock)
        with self._changed:
            return deadline.wait_for(self._changed, lambda: self._closed or not self._offered)

    def close(self) -> None:
        """End the link: what was not taken is moved to the store, where there is one, or aborted. Idempotent.

        Blocks: some seconds at most; a second caller until the first one is done.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._closing:  # a process that ends must not overtake the thread that is at it
            if self._caller is not None:
                self._caller.close()
            request, self._request = self._request, None
            if request is not None and request.claim is not None:
                request.claim.nack()
            if self._embeddings is not None:
                self._embeddings.close()
            try:
                self._connector.close()
            finally:
                if self._desk is not None:
                    self._desk.close()

    def at_exit(self) -> None:
        """End the link where the process ends: once what was sent is taken, or ``linger_s`` has passed.

        For `atexit`. Blocks: until then.
        """
        try:
            if not self.linger():
                logger.warning("%d payloads were not taken within linger_s, and are dropped", len(self._offered))
        except KeyboardInterrupt:  # at the process's end it would be printed and passed over, and nothing closed
            logger.warning("interrupted; %d payloads were not taken, and are dropped", len(self._offered))
        self.close()

    def close_when_taken(self, *, then: Callable[[], object] | None = None) -> None:
        """End the link once what was sent is taken. Returns at once: a thread waits; for finalizers.

        Args:
            then: Called when it has ended.
        """

        def wait() -> None:
            self.at_exit()
            if then is not None:
                then()

        if not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # the interpreter ends: `at_exit` does it
                threading.Thread(target=wait, name="moonrelay-lightx2v-close", daemon=True).start()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            message = "the link is closed; init_disagg makes a new one"
            raise ClosedError(message)

    def _check_wanted(self, request: _Request) -> None:
        self._check_open()
        if request.cancelled is not None and request.cancelled():
            message = f"{said(request.names)} was cancelled before the {self.config.role} was done with it"
            raise Cancelled(message, stage=self.config.role)

    def _current(self) -> _Request:
        self._check_open()
        request = self._request
        if request is None:
            message = "no request is under way; the runner's run_pipeline begins one"
            raise ConfigError(message, field="request")
        if not request.names:
            message = (
                "the request has no name by which its parts could be paired; POST the same task_id or "
                "data_bootstrap_room to all roles, use `moonrelay lightx2v-front`, or set pairing to 'auto'"
            )
            raise ConfigError(message, field="task_id")
        return request

    def _take(
        self, request: _Request, handle: StageHandle, deadline: Deadline
    ) -> tuple[dict[str, Any], dict[str, object]]:
        # Asked for briefly: one that another receiver holds is held for as long as that one computes.
        claim = self._connector.claim(handle, timeout_s=deadline.remaining(CLAIM_TIMEOUT_S) or 0.0)
        try:
            data = room.read(claim, self.config, deadline.remaining(FETCH_TIMEOUT_S) or 0.0)
        except BaseException:
            claim.nack()
            raise
        request.claim = claim
        if not isinstance(data, dict) or not isinstance(data.get(_TREE), dict):
            request.claim = None
            claim.nack()
            message = f"{said(request.names)}: what came is no tree of a LightX2V stage"
            raise WireError(message, request_id=handle.request_id)
        return data[_TREE], dict(handle.metadata or {})

    def _make_room(self) -> bool:
        """Drop the oldest payload that a receiver gave back, as one that failed does; return whether there was one."""
        payload_id = None if self._desk is None else self._desk.take_back()
        if payload_id is None:
            return False
        logger.info("%s is dropped: a receiver failed with it, and its room is needed", payload_id)
        with self._changed:
            # Off the books first: nobody who asks for the same is to be told that this one has failed.
            offered = self._offered.pop(payload_id, None)
        if offered is not None:
            self._connector.abort(offered.handle, "a receiver failed with it, and its room was needed")
        return True

    def _drop(self, payload_id: str, reason: str) -> None:
        with self._changed:
            offered = self._offered.get(payload_id)
        if offered is not None:
            self._connector.abort(offered.handle, reason)

    def _on_event(self, event: Event) -> None:
        """Follow our own payloads' ends (an observer; in whatever thread they end)."""
        if event.payload_id is None or event.name not in ("released", "lease_expired", "failed"):
            return
        if event.name == "lease_expired" and event.reason != "expired":
            return  # a reader's claim lapsed, the payload stays
        with self._changed:
            known = event.payload_id in self._offered
            if not known:
                # It has ended before `send`, which publishes first, could note it.
                self._early[event.payload_id] = event
                while len(self._early) > EARLY_KEPT:
                    self._early.pop(next(iter(self._early)))
        if known:
            self._forget(event)

    def _forget(self, event: Event) -> None:
        """Take a payload that has ended off the books; whoever still comes for it is told why it is gone."""
        payload_id = str(event.payload_id)
        with self._changed:
            offered = self._offered.pop(payload_id, None)
            self._early.pop(payload_id, None)
            self._changed.notify_all()
        if offered is None or self._desk is None:
            return
        self._desk.withdraw(payload_id, over=True)
        if event.name == "lease_expired":
            reason = (
                f"nobody took it within lease_ttl_s={self.config.lease_ttl_s:g} of the {self.config.role}; raise it "
                "where requests wait longer for their turn, and send this one again"
            )
            self._desk.refuse(offered.names, LeaseExpired.code, reason)
        elif event.name == "failed":
            self._desk.refuse(offered.names, event.code or MoonrelayError.code, event.reason or "it could not be sent")


__all__ = ["SCHEMA", "StageLink"]
