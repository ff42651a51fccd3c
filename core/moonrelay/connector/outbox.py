"""The producer's side: what was published here, who may read it, and where its bytes are.

Owns the publications of one connector: their leases (decided by the pure `LeaseTable`) and their memory (`Placement`).
Decisions are made under one lock; messages, copies and puts happen after it. How bytes get into the relay is
`moonrelay.connector.spill`.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

from moonrelay import integrity
from moonrelay.clock import Deadline
from moonrelay.connector.entry import Entry, Reader, Waiter
from moonrelay.connector.placement import Placement, place, work_completed
from moonrelay.connector.publication import Publication, PublicationState
from moonrelay.connector.runtime import Runtime
from moonrelay.connector.spill import RETRY_S, Spiller
from moonrelay.control import messages as wire
from moonrelay.control.channel import PeerInfo, Responder
from moonrelay.errors import (
    Aborted,
    CapacityError,
    ClosedError,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
)
from moonrelay.events import EventName
from moonrelay.handle import DirectAddress, RelayAddress, StageHandle
from moonrelay.lease import Available, Effects, LeaseState, LeaseStatus, LeaseTable, Reclaim, terms
from moonrelay.payload import Flattened, StagePayload, flatten
from moonrelay.relay.records import RelayedPayload

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: How long readers of a closing producer may take to let go, in seconds.
LET_GO_S = 1.0
#: Errors of aborted payloads that are remembered for late readers.
FAILURES_KEPT = 1024
#: A chunk of at most this many bytes is staged and digested in the caller's thread: a hand-over would cost more.
INLINE_NBYTES = 1 << 20


class Outbox:
    """Publications of one connector.

    Threads: `publish`, `chunk_final`, `abort`, `release` from any; `claim` to `state` on the channel's thread, where
    they never block; `tick` on the reaper's.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._clock = runtime.clock
        self._changed = threading.Condition()
        self._table = LeaseTable()
        self._entries: dict[str, Entry] = {}
        self._failures: OrderedDict[str, MoonrelayError] = OrderedDict()
        self._draining = False
        self._spiller = Spiller(runtime, self)

    # -- publishing -----------------------------------------------------------------------------------------------

    def publish(self, payload: StagePayload, *, chunks_follow: bool, snapshot: bool) -> Publication:
        """Give a payload a handle.

        Args:
            payload: What to publish.
            chunks_follow: Whether the caller will say chunk by chunk that they are final.
            snapshot: Whether to copy everything before returning.

        Raises:
            UnsupportedTensor, ConfigError: The payload cannot be carried; the message names the field.
            CapacityError: No room, and nothing to relay it.
            ClosedError: The connector is closed or draining.
        """
        self._check_open(payload.request_id)
        flat = flatten(payload)
        lease = terms(payload.lease, self._settings.lease_ttl_s, resolve=self._runtime.policy)
        payload_id = secrets.token_hex(16)
        relayed, relay_address = self._relay_for(payload_id, lease.readers)
        control = self._runtime.channel().address
        placement, to_relay = self._place(flat, snapshot=snapshot)
        handle = StageHandle(
            id=payload_id,
            request_id=payload.request_id,
            kind=payload.kind,
            attempt=payload.attempt,
            tree=flat.tree,
            tensors=flat.specs,
            chunks=flat.chunks,
            digest=integrity.choose(self._settings.integrity, placement.device),
            lease=lease,
            direct=DirectAddress(
                control=control,
                engine=self._runtime.data().engine.address if self._settings.serves_directly else None,
            ),
            relay=relay_address,
            schema=payload.schema,
            metadata=payload.metadata,
        )
        entry = Entry(
            handle, Publication(handle, self, self._clock), placement, relayed, to_relay=to_relay, relay_used=to_relay
        )
        try:
            with self._changed:
                self._check_open(payload.request_id)
                self._table.add(payload_id, lease, flat.chunks.count, self._clock.monotonic())
                self._entries[payload_id] = entry
        except MoonrelayError:
            placement.release()
            raise
        path = "store" if to_relay else "p2p"
        self._runtime.emit(handle, "published", nbytes=handle.nbytes, path=path)
        if placement.staged_nbytes:
            reason = "a snapshot was asked for" if snapshot else "the memory is not registered, or not dense"
            self._runtime.emit(handle, "staged", nbytes=placement.staged_nbytes, reason=reason)
        if not chunks_follow:
            for chunk in range(flat.chunks.count):
                entry.publication.ready(chunk)
        self._wake_by(self._clock.monotonic() + lease.ttl_s if lease.ttl_s is not None else None)
        return entry.publication

    def _relay_for(self, payload_id: str, slots: int) -> tuple[RelayedPayload | None, RelayAddress | None]:
        if not self._settings.relays:
            return None, None
        relay = self._runtime.relay()
        prefix = f"{self._settings.store.namespace}/{payload_id}"
        payload = RelayedPayload(relay, prefix, payload_id, slots=slots)
        return payload, RelayAddress(url=relay.url, prefix=prefix)

    def _place(self, flat: Flattened, *, snapshot: bool) -> tuple[Placement, bool]:
        if not self._settings.serves_directly:
            return place(flat, None, snapshot=snapshot), True
        try:
            return place(flat, self._runtime.data(), snapshot=snapshot), False
        except CapacityError as exc:
            if not self._settings.relays:
                raise
            # No room to offer it: this payload goes straight to the relay from where it lies, and older ones that
            # nobody has claimed make room.
            self._runtime.emit(None, "fallback", path="store", reason=str(exc), code=exc.code)
            self.make_room()
            return place(flat, None, snapshot=snapshot), True

    def make_room(self) -> None:
        """Ask for every complete, unclaimed payload to be moved to the relay soon. Returns at once."""
        with self._changed:
            now = self._clock.monotonic()
            for entry in self._entries.values():
                if entry.spill_at is not None:
                    entry.spill_at = now
        self._wake_by(now)

    # -- chunks ---------------------------------------------------------------------------------------------------

    def chunk_final(self, payload_id: str, chunk: int) -> None:
        """Bring one chunk to where it is read: stage and digest it, or put it into the relay.

        Returns at once for large chunks and for those on a device.

        Raises:
            Aborted, LeaseExpired, LeaseLost: The payload has ended.
        """
        with self._changed:
            self._table.hold(payload_id)
            entry = self._entries[payload_id]
        inline = not entry.to_relay and entry.handle.chunk_nbytes(chunk) <= INLINE_NBYTES
        work_done = work_completed(entry.placement)
        if inline and work_done is None:
            self._finish_chunk(entry, chunk, None)
        else:
            try:
                self._runtime.submit(lambda: self._finish_chunk(entry, chunk, work_done))
            except ClosedError:
                self.unhold(entry)
                raise

    def _finish_chunk(self, entry: Entry, chunk: int, work_done: Callable[[], None] | None) -> None:
        """Do the work of `chunk_final` (mover thread, or the caller's for a small chunk). Ends the table's hold."""
        try:
            if work_done is not None:
                work_done()
            entry.placement.stage(chunk)
            if entry.to_relay:
                digest = self._digest(entry, chunk)
                self._spiller.put_chunk(entry, chunk, digest)
                if self._note(entry, chunk, digest=digest, readable=True):
                    self._spiller.finish(entry)
                    self._moved(entry)
            elif entry.handle.digest == integrity.OFF or entry.handle.chunk_nbytes(chunk) > INLINE_NBYTES:
                # Readers may begin while the digest is computed.
                self._note(entry, chunk, digest=None, readable=True)
                self._note(entry, chunk, digest=self._digest(entry, chunk), readable=False)
            else:
                self._note(entry, chunk, digest=self._digest(entry, chunk), readable=True)
        except MoonrelayError as exc:
            self.fail(entry, exc)
        except RuntimeError as exc:  # torch reports a copy that failed (out of memory, a lost device) this way
            self.fail(entry, MoonrelayError(f"staging failed: {exc}", request_id=entry.handle.request_id))
        finally:
            self.unhold(entry)

    def _digest(self, entry: Entry, chunk: int) -> bytes:
        digest = integrity.digester(entry.handle.digest)
        if entry.handle.digest != integrity.OFF:
            for part in entry.placement.parts(chunk):
                digest.update(part)
        return digest.digest()

    def _note(self, entry: Entry, chunk: int, *, digest: bytes | None, readable: bool) -> bool:
        """Enter a chunk's readiness and tell the readers; return whether it made the payload whole."""
        payload_id = entry.handle.id
        now = self._clock.monotonic()
        with self._changed:
            if payload_id not in self._table:
                return False
            if digest is not None:
                self._table.set_digest(payload_id, chunk, digest)
                entry.digested += 1
            if readable:
                self._table.mark_readable(payload_id, chunk, now)
            if entry.whole:
                entry.placement.drop_sources()
                if self._settings.mode == "auto" and not entry.to_relay and entry.spill_at is None:
                    entry.spill_at = now + self._settings.spill_after_s
            spill_at, whole = entry.spill_at, entry.whole
            self._show(entry)
        self._push_progress(entry)
        self._wake_by(spill_at)
        return whole and digest is not None

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self, payload_id: str, reason: str) -> None:
        """Give a payload up; readers hear the reason. Idempotent."""
        with self._changed:
            entry = self._entries.get(payload_id)
            effects = self._table.abort(payload_id, reason)
            if entry is not None:
                text = f"the producer gave the payload up: {reason}"
                entry.failure = entry.failure or Aborted(text, request_id=entry.handle.request_id)
                self._show(entry)
        if entry is not None:
            self._push_progress(entry)
        self._apply(effects)

    def fail(self, entry: Entry, error: MoonrelayError) -> None:
        """Abort a payload because of an error on our side; readers get that very error."""
        logger.error("payload %s of %s failed: %s", entry.handle.id, entry.handle.request_id, error)
        self._runtime.emit(entry.handle, "failed", reason=str(error), code=error.code)
        with self._changed:
            entry.failure = entry.failure or error
        self.abort(entry.handle.id, str(error))

    def release(self, payload_id: str) -> None:
        """Drop a payload. Idempotent."""
        with self._changed:
            effects = self._table.release(payload_id)
        self._apply(effects)

    def unhold(self, entry: Entry) -> None:
        """End one hold of our own on the payload's memory."""
        with self._changed:
            effects = self._table.unhold(entry.handle.id)
            self._changed.notify_all()
        self._apply(effects)

    # -- the relay ------------------------------------------------------------------------------------------------

    def digests(self, entry: Entry) -> dict[int, bytes]:
        """Return the digests of a whole payload by chunk."""
        with self._changed:
            return self._table.readiness(entry.handle.id).digests

    def move_ended(self, entry: Entry, *, moved: bool) -> None:
        """Take note that a move to the relay has ended, well or not."""
        with self._changed:
            entry.moving = False
            if not moved:
                entry.spill_at = self._clock.monotonic() + RETRY_S
            spill_at = entry.spill_at
        if moved:
            self._moved(entry)
        self.unhold(entry)
        if not moved:
            self._wake_by(spill_at)

    def _moved(self, entry: Entry) -> None:
        """All of it is in the relay: from now on it is read there, and the memory goes with its last direct reader."""
        with self._changed:
            entry.in_relay = True
            entry.spill_at = None
            self._show(entry)
        self._free_memory(entry)

    def _free_memory(self, entry: Entry) -> None:
        with self._changed:
            free = entry.in_memory and entry.in_relay and not entry.read_directly
            if free:
                entry.in_memory = False
            self._changed.notify_all()
        if free:
            entry.placement.release()

    # -- requests of readers (channel thread) -----------------------------------------------------------------------

    def claim(self, peer: PeerInfo, request: wire.Claim, respond: Responder) -> None:
        """Grant a claim, or keep the reader waiting until its own deadline."""
        until = self._clock.monotonic() + max(0.0, request.wait_s)
        waiter = Waiter(peer, request, respond, until)
        reply = self._try_claim(waiter)
        if reply is not None:
            respond.reply(reply)
            return
        respond.reply(wire.Pending())
        self._wake_by(until)

    def _try_claim(self, waiter: Waiter, *, queue: bool = True) -> wire.Granted | wire.Failure | None:
        """Return the answer to a claim; ``None`` when the reader has to wait, and then it is queued."""
        payload_id = waiter.request.payload_id
        now = self._clock.monotonic()
        control = self._settings.control
        with self._changed:
            try:
                claim, effects = self._table.claim(payload_id, waiter.request.reader, control.claim_ttl_s, now)
            except MoonrelayError as exc:
                return wire.Failure.of(self._failure_of(payload_id, exc))
            entry = self._entries[payload_id]
            if claim is None:
                if queue:
                    entry.waiters.append(waiter)
                return None
            entry.readers[claim.token] = Reader(waiter.peer, entry.where)
            self._show(entry)
            granted = wire.Granted(
                token=claim.token,
                claim_ttl_s=control.claim_ttl_s,
                where=entry.where,
                tensors=entry.placement.locations() if entry.where == "direct" else (),
                engine=entry.handle.direct.engine if entry.handle.direct is not None else None,
                progress=self._progress(entry),
            )
            deadline = self._table.next_deadline()
        self._apply(effects)
        self._wake_by(deadline)
        return granted

    def renew(self, request: wire.Renew) -> wire.Reply:
        """Keep a claim alive."""
        now = self._clock.monotonic()
        with self._changed:
            self._table.renew(request.payload_id, request.token, self._settings.control.claim_ttl_s, now)
            entry = self._entries[request.payload_id]
            return wire.Renewed(progress=self._progress(entry), where=entry.where)

    def ack(self, request: wire.Ack) -> wire.Reply:
        """Take an acknowledgement."""
        with self._changed:
            effects = self._table.ack(request.payload_id, request.token, self._clock.monotonic())
            self._forget_reader(request.payload_id, request.token)
        self._apply(effects)
        return wire.Done()

    def nack(self, request: wire.Nack) -> wire.Reply:
        """Take a claim back."""
        with self._changed:
            effects = self._table.nack(request.payload_id, request.token, self._clock.monotonic())
            self._forget_reader(request.payload_id, request.token)
        self._apply(effects)
        return wire.Done()

    def state(self, payload_id: str) -> wire.State:
        """Return how a payload's lease stands."""
        with self._changed:
            entry = self._entries.get(payload_id)
            state: LeaseState = self._table.snapshot(payload_id, self._clock.monotonic())
            return wire.State(
                state=str(state.state),
                readers=state.readers,
                acks=state.acks,
                chunks=state.chunks,
                chunks_ready=state.chunks_ready,
                expires_in_s=state.expires_in_s,
                reason=state.reason,
                where=entry.where if entry is not None else "direct",
            )

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Expire claims and payloads, give up on waiting readers, start due spills; return when to come again."""
        with self._changed:
            effects = self._table.expire(now)
            late: list[Waiter] = []
            spills: list[Entry] = []
            due: list[float] = []
            for entry in self._entries.values():
                self._drop_lapsed(entry, now)
                late += [waiter for waiter in entry.waiters if waiter.until <= now]
                entry.waiters = type(entry.waiters)(waiter for waiter in entry.waiters if waiter.until > now)
                due += [waiter.until for waiter in entry.waiters]
                if entry.spill_at is not None and not entry.moving and not entry.readers:
                    if entry.spill_at <= now and self._begin_move(entry):
                        spills.append(entry)
                    else:
                        due.append(entry.spill_at)
            next_expiry = self._table.next_deadline()
        for waiter in late:
            message = f"another reader holds the payload after {waiter.request.wait_s:.3g} s"
            waiter.responder.reply(wire.Failure.of(LeaseHeld(message, payload_id=waiter.request.payload_id)))
        self._apply(effects)
        for entry in spills:
            self._spiller.start(entry)
        if next_expiry is not None:
            due.append(next_expiry)
        return min(due, default=None)

    def _begin_move(self, entry: Entry) -> bool:
        """Hold the memory for a move; False when the payload is ending. The lock is held."""
        try:
            self._table.hold(entry.handle.id)
        except (LeaseLost, LeaseExpired, Aborted):
            return False
        entry.moving = entry.relay_used = True
        return True

    def _drop_lapsed(self, entry: Entry, now: float) -> None:
        """Forget readers whose claim was not renewed. The lock is held."""
        alive = {claim.token for claim in self._table.claims(entry.handle.id, now)}
        lapsed = [token for token in entry.readers if token not in alive]
        for token in lapsed:
            del entry.readers[token]
            self._runtime.emit(entry.handle, "lease_expired", reason="a claim was not renewed in time")
        if lapsed:
            self._show(entry)

    def _forget_reader(self, payload_id: str, token: int) -> None:
        """Forget a reader that has finished. The lock is held."""
        entry = self._entries.get(payload_id)
        if entry is not None:
            entry.readers.pop(token, None)
            self._show(entry)

    # -- effects --------------------------------------------------------------------------------------------------

    def _apply(self, effects: Effects) -> None:
        """Act on what the table decided, without the lock."""
        for effect in effects:
            if isinstance(effect, Reclaim):
                self._reclaim(effect)
            else:
                self._retry_waiters(effect)
        with self._changed:
            kept = [entry for entry in self._entries.values() if entry.in_relay and entry.in_memory]
        for entry in kept:
            self._free_memory(entry)

    def _reclaim(self, effect: Reclaim) -> None:
        """Nobody touches the payload any more: give everything back."""
        with self._changed:
            entry = self._entries.pop(effect.id, None)
            if entry is None:
                return
            in_memory, entry.in_memory = entry.in_memory, False
            waiters, entry.waiters = list(entry.waiters), type(entry.waiters)()
            failure = self._remember_failure(entry, effect.final_state)
        if in_memory:
            entry.placement.release()
        self._spiller.clean(entry)
        entry.publication.update(PublicationState(str(effect.final_state)), failure)
        for waiter in waiters:
            answer = self._try_claim(waiter, queue=False)
            if answer is not None:
                waiter.responder.reply(answer)
        with self._changed:
            self._changed.notify_all()
        name: EventName = "lease_expired" if effect.final_state is LeaseStatus.EXPIRED else "released"
        self._runtime.emit(entry.handle, name, nbytes=entry.handle.nbytes, reason=str(effect.final_state))

    def _remember_failure(self, entry: Entry, final: LeaseStatus) -> MoonrelayError | None:
        """Keep the very error of an aborted payload for readers that come later. The lock is held."""
        if final is LeaseStatus.EXPIRED:
            return LeaseExpired("the payload's lease ran out", request_id=entry.handle.request_id)
        if final is not LeaseStatus.ABORTED:
            return None
        if entry.failure is not None:
            self._failures[entry.handle.id] = entry.failure
            while len(self._failures) > FAILURES_KEPT:
                self._failures.popitem(last=False)
        return entry.failure

    def _failure_of(self, payload_id: str, error: MoonrelayError) -> MoonrelayError:
        """Return the error that an aborted payload's readers should hear. The lock is held."""
        if not isinstance(error, Aborted):
            return error
        entry = self._entries.get(payload_id)
        return (entry.failure if entry is not None else self._failures.get(payload_id)) or error

    def _retry_waiters(self, effect: Available) -> None:
        while True:
            with self._changed:
                entry = self._entries.get(effect.id)
                if entry is None or not entry.waiters:
                    return
                waiter = entry.waiters.popleft()
            answer = self._try_claim(waiter, queue=False)
            if answer is None:
                with self._changed:
                    entry.waiters.appendleft(waiter)
                return
            waiter.responder.reply(answer)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _show(self, entry: Entry) -> None:
        """Bring the publication's visible state in line. The lock is held."""
        state = self._table.snapshot(entry.handle.id, self._clock.monotonic()).state
        if state.final:
            return
        spilled = state is LeaseStatus.READY and entry.in_relay
        entry.publication.update(PublicationState.SPILLED if spilled else PublicationState(str(state)))

    def _progress(self, entry: Entry) -> wire.Progress:
        """Return the complete readiness. The lock is held."""
        readiness = self._table.readiness(entry.handle.id)
        failure = wire.Failure.of(entry.failure) if entry.failure is not None else None
        return wire.Progress(readable=readiness.readable, digests=readiness.digests, failure=failure)

    def _push_progress(self, entry: Entry) -> None:
        with self._changed:
            if not entry.readers or entry.handle.id not in self._table:
                return
            progress = self._progress(entry)
            routes = [reader.peer.route for reader in entry.readers.values()]
        for route in routes:
            self._runtime.channel().push(route, wire.Progressed(payload_id=entry.handle.id, progress=progress))

    def _wake_by(self, when: float | None) -> None:
        if when is not None:
            self._runtime.tick_by(when)

    def _check_open(self, request_id: str) -> None:
        if self._draining:
            message = "the connector is closing; publish before close()"
            raise ClosedError(message, request_id=request_id)

    # -- closing --------------------------------------------------------------------------------------------------

    def drain(self, deadline: Deadline) -> None:
        """Take no more payloads; bring unclaimed ones to the relay and let readers finish. Blocks: until the deadline.

        What can be neither relayed nor finished is aborted, so that its readers hear of it.
        """
        with self._changed:
            self._draining = True
            hopeless = [entry for entry in self._entries.values() if not self._may_settle(entry)]
        for entry in hopeless:
            self.abort(entry.handle.id, "its producer was closed")
        self.make_room()
        with self._changed:
            deadline.wait_for(self._changed, lambda: all(map(_settled, self._entries.values())))
            left = [entry for entry in self._entries.values() if not _settled(entry)]
        for entry in left:
            self.abort(entry.handle.id, "its producer was closed")
        with self._changed:
            # Readers that were told have this long to let go of the memory.
            grace = Deadline(min(LET_GO_S, self._settings.control.claim_ttl_s), self._clock)
            grace.wait_for(self._changed, lambda: all(map(_settled, self._entries.values())))
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            if entry.in_memory:
                entry.placement.release()
            if entry.in_relay:
                entry.publication.update(PublicationState.SPILLED)

    def _may_settle(self, entry: Entry) -> bool:
        """Whether waiting can bring the payload to an end, or to the relay. The lock is held."""
        if not entry.publication.all_final:
            return False
        return self._settings.relays or bool(entry.readers)


def _settled(entry: Entry) -> bool:
    return entry.in_relay and not entry.read_directly
