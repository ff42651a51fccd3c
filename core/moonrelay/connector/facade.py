"""DiffusionConnector: what a stage calls to hand a payload on and to take one over."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.connector.claim import PayloadClaim
from moonrelay.connector.outbox import Outbox
from moonrelay.connector.publication import Publication
from moonrelay.connector.registration import Registration, empty
from moonrelay.connector.requests import RequestHandler
from moonrelay.connector.runtime import Runtime
from moonrelay.connector.settings import make_settings
from moonrelay.connector.sources import relayed_payload
from moonrelay.control import messages as wire
from moonrelay.errors import ClosedError, ConfigError, PeerLost
from moonrelay.events import EventBus
from moonrelay.handle import ControlAddress, StageHandle
from moonrelay.lease import LeaseState, LeaseStatus
from moonrelay.payload import StagePayload
from moonrelay.relay.base import Relay

if TYPE_CHECKING:
    from types import TracebackType

    import torch

DEFAULT_TIMEOUT_S = 30.0


class DiffusionConnector:
    """Hands stage payloads over, directly or through a relay.

    Cheap to make: engine, relay and channel start on first use. Several connectors may live in one process.

    Args:
        role: The stage served: ``encode``, ``denoise``, ``decode``, or any other non-empty name.
        transfer_mode: ``p2p`` (read from the producer's memory), ``store`` (through the relay) or ``auto`` (offer
            directly, and move to the relay what nobody claims soon); ``None`` takes ``MOONRELAY_TRANSFER_MODE``, else
            ``auto``.
        te_config: The direct engine: a `TransferConfig`, a mapping of its fields, or ``None``.
        store_config: The relay: a `StoreConfig`, a mapping, a URL, or ``None``.
        control_config: The peer channel: a `ControlConfig`, a mapping, or ``None``.
        lease_ttl_s: Life of a payload that names no other, in seconds.
        spill_after_s: In ``auto``, how long an unclaimed payload stays in the producer's memory, in seconds.
        drain_timeout_s: How long `close` may take to relay what is unclaimed and to let readers finish, in seconds.
        integrity: ``auto`` or ``full`` (every chunk is digested on both sides), or ``off``.
        auth_key: Shared secret of the deployment, else ``MOONRELAY_AUTH_KEY``, else none.
        observers: Callables taking an `moonrelay.events.Event`, or objects with hooks.
        clock: Time; for tests.

    Raises:
        ConfigError: A wrong argument; the message names the field, the value and the remedy.

    Threads: all methods from any thread; calls do not wait for each other's transfers.
    """

    def __init__(
        self,
        role: str,
        transfer_mode: str | None = None,
        te_config: TransferConfig | Mapping[str, Any] | None = None,
        store_config: StoreConfig | Mapping[str, Any] | str | None = None,
        *,
        control_config: ControlConfig | Mapping[str, Any] | None = None,
        lease_ttl_s: float = 600.0,
        spill_after_s: float = 5.0,
        drain_timeout_s: float = 10.0,
        integrity: str = "auto",
        auth_key: str | None = None,
        observers: Iterable[object] = (),
        clock: Clock | None = None,
    ) -> None:
        self.settings = make_settings(
            role=role,
            transfer_mode=transfer_mode,
            te_config=te_config,
            store_config=store_config,
            control_config=control_config,
            lease_ttl_s=lease_ttl_s,
            spill_after_s=spill_after_s,
            drain_timeout_s=drain_timeout_s,
            integrity=integrity,
            auth_key=auth_key,
        )
        self._clock: Clock = clock or SystemClock()
        self.events = EventBus(observers, self._clock)
        self._runtime = Runtime(self.settings, self._clock, self.events)
        self._outbox = Outbox(self._runtime)
        self._lock = threading.Lock()
        # Weak: a claim that its reader lets go of without a word is renewed no more, and lapses.
        self._claims: WeakValueDictionary[str, PayloadClaim] = WeakValueDictionary()
        self._renewing: set[str] = set()
        self._runtime.handler = RequestHandler(self._outbox.ledger, self._holds_claim)
        self._runtime.on_push = self._on_push
        self._runtime.on_tick = self._outbox.ledger.tick
        self._runtime.on_renew = self._renew_claims

    def __repr__(self) -> str:
        return f"<DiffusionConnector {self.settings.role} {self.settings.mode} via {self.settings.transfer.engine}>"

    # -- producing ------------------------------------------------------------------------------------------------

    def publish(self, payload: StagePayload, *, copy: bool = False) -> StageHandle:
        """Publish a payload whose bytes are final. Returns at once.

        Args:
            payload: What to hand on. Its tensors must stay unmodified until it is consumed or reclaimed.
            copy: Snapshot the tensors before returning, so that they may be modified.

        Returns:
            The handle to send to a consumer, by a queue message or otherwise.

        Raises:
            UnsupportedTensor, ConfigError: The payload cannot be carried; names the field. Nothing changed.
            CapacityError: The pool has no room and there is no relay to take it.
            PluginError: The engine or relay cannot be loaded.
            ClosedError: The connector is closed.
        """
        return self._outbox.publish(payload, chunks_follow=False, snapshot=copy).handle

    def open(self, payload: StagePayload) -> Publication:
        """Publish a payload whose chunks become final one by one; see `Publication.ready`.

        Its handle may be sent on, claimed and read from before any chunk is ready. Raises as `publish`.
        """
        return self._outbox.publish(payload, chunks_follow=True, snapshot=False)

    def abort(self, handle: StageHandle | bytes, reason: str) -> None:
        """Give up a payload that this connector published: readers get `Aborted` with ``reason``.

        Idempotent; no effect on a payload that has ended, or is another connector's. Returns at once.
        """
        self._outbox.abort(_as_handle(handle).id, reason)

    def empty(self, shape: Iterable[int], *, dtype: torch.dtype, device: str | None = None) -> torch.Tensor:
        """Allocate a tensor in registered memory: publishing it copies nothing.

        Args:
            shape: Its shape.
            dtype: Its dtype.
            device: Must be the pool's device where given.

        Returns:
            An uninitialised, contiguous tensor; its memory goes back to the pool when the last tensor on it dies.

        Raises:
            CapacityError: The pool has no room now, or is too small; what nobody has claimed is asked to make room.
            ConfigError: Another device than the pool's.
        """
        return empty(self._runtime, tuple(shape), dtype, device, on_shortage=self._outbox.ledger.make_room)

    def register(self, tensor: torch.Tensor) -> Registration:
        """Register one's own memory: publishing tensors inside it copies nothing, and it can be read into.

        Returns:
            A context manager; leaving it gives the registration back. Payloads still published from this memory keep it
            registered until they end.

        Raises:
            RegistrationError: The engine cannot register this memory; the message names the remedy.
        """
        return Registration(self._runtime, tensor)

    # -- beside payloads ------------------------------------------------------------------------------------------

    def store(self) -> Relay:
        """Return this connector's relay, started, whatever ``transfer_mode`` is; caches keep their objects there.

        It is the connector's: it is closed with it, and by nobody else. Keys are used once, and those of payloads are
        not for others: begin one's own with the store's namespace and a word.

        Blocks: seconds at most, when first called.

        Raises:
            PluginError, ConfigError, PeerLost: It cannot be reached.
            ClosedError: The connector is closed.
        """
        return self._runtime.relay()

    @property
    def clock(self) -> Clock:
        """The clock that all of this connector's waits and deadlines are reckoned on."""
        return self._clock

    # -- consuming ------------------------------------------------------------------------------------------------

    def claim(self, handle: StageHandle | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> PayloadClaim:
        """Claim a payload: work first, acknowledge last.

        Blocks: until the claim is granted, or ``timeout_s``.

        Raises:
            LeaseHeld: Another reader had it until the deadline.
            LeaseLost: It was consumed or released.
            LeaseExpired: Its time is over.
            Aborted: Its producer gave it up, with the reason.
            PeerLost: The producer does not answer, and nothing was relayed.
            WireError, VersionError: The handle's bytes are malformed or of another version.
        """
        handle = _as_handle(handle)
        _check_timeout(timeout_s)
        claim = PayloadClaim(self._runtime, handle, timeout_s, on_start=self._claim_started, on_end=self._claim_ended)
        self._runtime.renew_within(claim.renew_every_s)
        return claim

    def receive(
        self, handle: StageHandle | bytes, *, dst: torch.Tensor | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> object:
        """Take a payload over whole: claim, read, acknowledge.

        Returns:
            The tree, or the tensor. Without ``dst`` it lies in pool memory that goes back when the tensors die.

        Blocks: until it is here, proved and acknowledged, or ``timeout_s``. Raises: as `claim` and `PayloadClaim.read`.
        """
        deadline = Deadline(timeout_s, self._clock)
        with self.claim(handle, timeout_s=timeout_s) as claim:
            data = claim.read(dst, timeout_s=deadline.remaining())
            claim.ack(timeout_s=deadline.remaining())
            return data

    def consume(
        self, handle: StageHandle | bytes, *, dst: torch.Tensor | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Iterator[torch.Tensor]:
        """Iterate over a tensor's chunks in order, as they land; acknowledged when the loop ends.

        Leaving the loop early or by an exception gives the payload back unread.

        Args:
            handle: A payload that is one tensor.
            dst: Destination; chunks are views of it.
            timeout_s: Longest wait for the claim, and for each chunk.
        """
        with self.claim(handle, timeout_s=timeout_s) as claim:
            yield from claim.chunks(dst)
            claim.ack()

    def release(self, handle: StageHandle | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Drop a payload that nobody needs, wherever it is. Idempotent. Blocks: for one message to its owner."""
        handle = _as_handle(handle)
        deadline = Deadline(timeout_s, self._clock)
        try:
            self._ask_owner(handle, wire.Release(payload_id=handle.id), deadline)
        except PeerLost as exc:
            if handle.relay is None:
                return
            relayed = relayed_payload(self._runtime.relay_at(handle.relay), handle, handle.relay, self._runtime)
            self._runtime.emit(handle, "fallback", path="store", reason=str(exc), code=exc.code)
            if relayed.get_end(deadline) is not None:
                # A late reader finds the tombstone, which the sweeper takes some time later.
                relayed.tombstone("nobody needs it", deadline, kind="released")
            relayed.remove_all(handle.num_chunks, deadline)

    def status(self, handle: StageHandle | bytes, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> LeaseState:
        """Return how a payload's lease stands, from whoever holds it.

        Raises:
            LeaseLost: Nobody remembers it.
            PeerLost: The producer is gone, and nothing was relayed.
        """
        handle = _as_handle(handle)
        deadline = Deadline(timeout_s, self._clock)
        try:
            reply = self._ask_owner(handle, wire.Query(payload_id=handle.id), deadline)
        except PeerLost:
            return self._relayed_status(handle, deadline)
        if not isinstance(reply, wire.State):
            message = f"the owner answered a query with {type(reply).__name__}"
            raise PeerLost(message, request_id=handle.request_id)
        return LeaseState(
            state=LeaseStatus(reply.state),
            readers=reply.readers,
            acks=reply.acks,
            chunks=reply.chunks,
            chunks_ready=reply.chunks_ready,
            expires_in_s=reply.expires_in_s,
            reason=reply.reason,
        )

    # -- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start engine, channel and relay now instead of on first use, so that what is missing is said now. Idempotent.

        Blocks: seconds at most.

        Raises:
            PluginError: The engine or the relay is unknown, or its native library is missing.
            ConfigError: The engine or the relay refuses its settings.
            PeerLost: The relay cannot be reached.
            ClosedError: The connector is closed.
        """
        self._runtime.channel()
        if self.settings.serves_directly:
            self._runtime.data()
        if self.settings.relays:
            self._runtime.relay()

    def in_use(self) -> Mapping[str, int]:
        """Return what this connector holds for payloads now; all zero when nothing is under way.

        Returns:
            ``payloads`` published and not ended; ``slots`` of pool memory, also of tensors that were handed out;
            ``claims`` that have not ended.
        """
        with self._lock:
            claims = len(self._claims)
        with self._outbox.ledger.changed:
            payloads = len(self._outbox.ledger.entries())
        return {"payloads": payloads, "slots": self._runtime.live_slots, "claims": claims}

    def close(self) -> None:
        """End the connector. Idempotent. Blocks: up to ``drain_timeout_s`` and a few seconds.

        What nobody has claimed is moved to the relay, where there is one, so that its handle stays good; readers may
        finish; the rest is aborted, so that its readers hear of it. Tensors that were handed out stay valid.
        """
        with self._lock:
            claims = list(self._claims.values())
        try:
            for claim in claims:
                claim.nack()
            if self._runtime.started:
                self._outbox.drain(Deadline(self.settings.drain_timeout_s, self._clock))
        finally:
            self._runtime.close()

    def __enter__(self) -> DiffusionConnector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _ask_owner(self, handle: StageHandle, message: wire.Release | wire.Query, deadline: Deadline) -> wire.Reply:
        if handle.direct is None:
            text = "the handle names no producer"
            raise PeerLost(text, request_id=handle.request_id)
        return self._runtime.channel().request(handle.direct.control, message, deadline)

    def _relayed_status(self, handle: StageHandle, deadline: Deadline) -> LeaseState:
        if handle.relay is not None:
            relayed = relayed_payload(self._runtime.relay_at(handle.relay), handle, handle.relay, self._runtime)
            count = handle.num_chunks
            tomb = relayed.tomb(deadline)
            if tomb is not None:
                return LeaseState(_status_of(tomb.kind), 0, 0, count, count, None, tomb.reason)
            if relayed.get_end(deadline) is not None:
                return LeaseState(LeaseStatus.READY, 0, 0, count, count, None)
        message = "the producer does not answer, and nothing was relayed"
        raise PeerLost(message, request_id=handle.request_id)

    def _claim_started(self, claim: PayloadClaim) -> None:
        with self._lock:
            self._claims[claim.reader] = claim

    def _claim_ended(self, claim: PayloadClaim) -> None:
        with self._lock:
            self._claims.pop(claim.reader, None)

    def _holds_claim(self, payload_id: str, reader: str) -> bool:
        with self._lock:
            claim = self._claims.get(reader)
        return claim is not None and claim.handle.id == payload_id

    def _on_push(self, _peer: ControlAddress, push: wire.Push) -> None:
        with self._lock:
            claims = [claim for claim in self._claims.values() if claim.handle.id == push.payload_id]
        for claim in claims:
            claim.progress.update(push.progress)

    def _renew_claims(self) -> float | None:
        """Renew all claims, those of one owner one after the other, so that an owner that hangs delays no other's."""
        by_owner: dict[str, list[PayloadClaim]] = {}
        with self._lock:
            claims = list(self._claims.values())
            for claim in claims:
                direct = claim.handle.direct
                by_owner.setdefault(direct.control.nonce if direct is not None else "", []).append(claim)
            due = {owner: mine for owner, mine in by_owner.items() if owner not in self._renewing}
            self._renewing |= due.keys()
        for owner, mine in due.items():
            try:
                self._runtime.submit_renewal(partial(self._renew_of, owner, mine))
            except ClosedError:
                return None
        return min((claim.renew_every_s for claim in claims), default=None)

    def _renew_of(self, owner: str, claims: list[PayloadClaim]) -> None:
        try:
            while claims:
                claims.pop().renew()
        finally:
            with self._lock:
                self._renewing.discard(owner)


def _as_handle(handle: StageHandle | bytes) -> StageHandle:
    if isinstance(handle, StageHandle):
        return handle
    if isinstance(handle, bytes):
        return StageHandle.from_bytes(handle)
    message = f"handle is a {type(handle).__name__}; pass the StageHandle or its bytes"
    raise ConfigError(message, field="handle")


def _status_of(kind: str) -> LeaseStatus:
    """Return the final state that a tombstone stands for; an unknown kind says at least that the payload is gone."""
    try:
        return LeaseStatus(kind)
    except ValueError:
        return LeaseStatus.CONSUMED


def _check_timeout(timeout_s: object) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s >= 0:
        message = f"timeout_s={timeout_s!r} must be a number of seconds, 0 or more; every wait has a deadline"
        raise ConfigError(message, field="timeout_s")


__all__ = ["DiffusionConnector"]
