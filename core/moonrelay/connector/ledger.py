"""The leases of one producer: its payloads, their readers, and what follows when either ends.

Owns the entries and the pure `LeaseTable` that decides about them, under one lock. Decides under the lock; replies,
pushes and the freeing of memory happen after it. What is published, and how bytes move, is
`moonrelay.connector.outbox`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from typing import Literal

from moonrelay.connector.entry import Entry, Reader, Waiter
from moonrelay.connector.publication import PublicationState
from moonrelay.connector.runtime import Runtime
from moonrelay.connector.spill import RETRY_MAX_S, RETRY_S, Spiller
from moonrelay.control import messages as wire
from moonrelay.control.channel import PeerInfo, Responder
from moonrelay.errors import Aborted, ClosedError, LeaseExpired, LeaseHeld, LeaseLost, MoonrelayError, PeerLost
from moonrelay.events import EventName
from moonrelay.handle import StageHandle
from moonrelay.lease import Available, Effects, LeaseState, LeaseStatus, LeaseTable, Reclaim

logger = logging.getLogger(__name__)

#: Errors of aborted payloads that are remembered for late readers.
FAILURES_KEPT = 1024


class Ledger:
    """Payloads and leases of one connector.

    Threads: `claim` to `state` on the channel's thread, where they never block; `tick` on the reaper's; the rest from
    any.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._clock = runtime.clock
        self.changed = threading.Condition()
        self._table = LeaseTable()
        self._entries: dict[str, Entry] = {}
        self._failures: OrderedDict[str, MoonrelayError] = OrderedDict()
        self._spiller = Spiller(runtime, self)
        self._draining = False
        self._closed = False

    # -- the producer's side ----------------------------------------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Enter a payload. The lock is held."""
        handle = entry.handle
        self._table.add(handle.id, handle.lease, handle.num_chunks, self._clock.monotonic())
        self._entries[handle.id] = entry

    def entries(self) -> list[Entry]:
        """Return the payloads that have not ended. The lock is held."""
        return list(self._entries.values())

    def close(self) -> None:
        """Answer no more: let go of all payloads, and tell those who wait. What is in the relay stays there."""
        with self.changed:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
            waiters = [waiter for entry in entries for waiter in entry.waiters]
            release = [entry for entry in entries if entry.in_memory]
            # Where one of our threads is still at work, its last hold cleans up.
            clean = [entry for entry in entries if not entry.in_relay and not entry.holds]
            for entry in entries:
                entry.in_memory = False
                failure = entry.failure or Aborted("its producer was closed", request_id=entry.handle.request_id)
                state = PublicationState.SPILLED if entry.in_relay else PublicationState.ABORTED
                entry.publication.update(state, None if entry.in_relay else failure)
        for entry in release:
            entry.placement.release()
        for entry in clean:
            self._spiller.clean(entry)
        for waiter in waiters:
            self._answer(waiter, wire.Failure.of(self._gone(waiter.request.payload_id)))

    def drain(self) -> None:
        """Move to the relay at once what can be moved, now and later. The lock is held."""
        self._draining = True

    @staticmethod
    def _gone(payload_id: str) -> PeerLost:
        """Return what a reader hears that comes after `close`: it has to look into the relay."""
        return PeerLost("the producer was closed", payload_id=payload_id)

    def hold(self, payload_id: str) -> Entry:
        """Keep a payload's memory until `unhold`.

        Raises:
            Aborted, LeaseExpired, LeaseLost: The payload has ended.
            ClosedError: The connector is closed.
        """
        with self.changed:
            if self._closed:
                message = "the connector is closed"
                raise ClosedError(message, payload_id=payload_id)
            try:
                self._hold(payload_id)
            except MoonrelayError as exc:
                raise self._failure_of(payload_id, exc) from None
            return self._entries[payload_id]

    def _hold(self, payload_id: str) -> None:
        """See `hold`. The lock is held."""
        self._table.hold(payload_id)
        entry = self._entries[payload_id]
        entry.holds += 1
        # A hold of its own: `close` gives the publication's back whoever is at work.
        entry.placement.hold()

    def note(self, entry: Entry, chunk: int, *, digest: bytes | None, readable: bool) -> bool:
        """Enter a chunk's readiness and tell the readers; return whether it made the payload whole."""
        payload_id = entry.handle.id
        now = self._clock.monotonic()
        with self.changed:
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
                    entry.spill_at = now if self._draining else now + self._settings.spill_after_s
            spill_at, whole = entry.spill_at, entry.whole
            self._show(entry)
        self._push_progress(entry)
        self.wake_by(spill_at)
        return whole and digest is not None

    def make_room(self) -> None:
        """Ask for every complete, unclaimed payload to be moved to the relay soon. Returns at once."""
        with self.changed:
            now = self._clock.monotonic()
            for entry in self._entries.values():
                # A move that failed waits for its turn, unless there will be none.
                if entry.spill_at is not None and (self._draining or entry.failed_moves == 0):
                    entry.spill_at = now
        self.wake_by(now)

    def abort(self, payload_id: str, reason: str) -> None:
        """Give a payload up; readers hear the reason. Idempotent."""
        with self.changed:
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
        with self.changed:
            entry.failure = entry.failure or error
        self.abort(entry.handle.id, str(error))

    def release(self, payload_id: str) -> None:
        """Drop a payload. Idempotent.

        Raises:
            PeerLost: The connector is closed; what is left of it is in the relay.
        """
        with self.changed:
            self._check_open(payload_id)
            effects = self._table.release(payload_id)
        self._apply(effects)

    def unhold(self, entry: Entry) -> None:
        """End one hold of our own on the payload's memory."""
        with self.changed:
            effects = self._table.unhold(entry.handle.id)
            entry.holds -= 1
            clean = self._closed and entry.holds == 0 and not entry.in_relay
            self.changed.notify_all()
        entry.placement.release()
        with self.changed:
            # Only now: who sees it spilled may rely on the memory being free.
            if entry.handle.id in self._table:
                self._show(entry)
        if clean:
            self._spiller.clean(entry)
        self._apply(effects)

    # -- the relay ------------------------------------------------------------------------------------------------

    def digests(self, entry: Entry) -> dict[int, bytes]:
        """Return the digests of a whole payload by chunk."""
        with self.changed:
            return self._table.readiness(entry.handle.id).digests

    def wanted(self, entry: Entry) -> bool:
        """Return whether there is any use in bringing a payload to the relay."""
        with self.changed:
            return not self._closed and self._unended(entry)

    def given_up(self, entry: Entry) -> bool:
        """Return whether nobody will read what is still to be made of a payload."""
        with self.changed:
            return self._closed or entry.failure is not None

    def seal(self, entry: Entry, marked: int) -> int | None:
        """Let new readers read in the relay from now on, where all chunks are.

        A payload must not be complete there while somebody reads it directly: a reader that cannot reach us would
        win beside one that can.

        Args:
            entry: A payload that is being moved.
            marked: How many of its acknowledgements are entered in the relay.

        Returns:
            ``marked`` when it is done; more when so many have to be entered first; ``None`` when it is not to be: the
            payload is ending, or is being read directly.
        """
        with self.changed:
            if self._closed or not self._unended(entry) or entry.read_directly:
                return None
            acks = self._table.snapshot(entry.handle.id, self._clock.monotonic()).acks
            if acks == marked:
                entry.to_relay = True
            return acks

    def _unended(self, entry: Entry) -> bool:
        """Return whether a payload may still be claimed, as far as is known. The lock is held."""
        state = self._table.snapshot(entry.handle.id, self._clock.monotonic()).state
        return entry.failure is None and not state.ending

    def move_ended(self, entry: Entry, *, moved: bool, failed: bool = False) -> None:
        """Take note that a move to the relay has ended: well, by an error, or because it was not to be now."""
        with self.changed:
            entry.moving = False
            if moved:
                entry.spill_at = None
            elif failed:
                pause_s = min(RETRY_S * 2**entry.failed_moves, RETRY_MAX_S)
                entry.failed_moves += 1
                entry.spill_at = self._clock.monotonic() + pause_s
            else:
                entry.spill_at = self._clock.monotonic()
            spill_at = entry.spill_at
        if moved:
            self._moved(entry)
        self.unhold(entry)
        self.wake_by(spill_at)

    def put_chunk(self, entry: Entry, chunk: int, digest: bytes) -> None:
        """Put one chunk of a payload that goes to the relay as it is made. Blocks: see `Spiller.put_chunk`."""
        self._spiller.put_chunk(entry, chunk, digest)

    def all_put(self, entry: Entry) -> None:
        """Complete a payload that went to the relay as it was made."""
        if self.wanted(entry):
            self._spiller.finish(entry)
            self._moved(entry)

    def _moved(self, entry: Entry) -> None:
        """All of it is in the relay: from now on it is read there, and the memory goes with its last direct reader."""
        with self.changed:
            entry.in_relay = True
            entry.spill_at = None
        self._free_memory(entry)

    def _free_memory(self, entry: Entry) -> None:
        with self.changed:
            free = entry.in_memory and entry.in_relay and not entry.read_directly
            if free:
                entry.in_memory = False
            self.changed.notify_all()
        if free:
            entry.placement.release()

    # -- requests of readers (channel thread) -----------------------------------------------------------------------

    def claim(self, peer: PeerInfo, request: wire.Claim, respond: Responder) -> None:
        """Grant a claim, or keep the reader waiting until its own deadline."""
        until = self._clock.monotonic() + max(0.0, request.wait_s)
        waiter = Waiter(peer, request, respond, until)
        reply = self._try_claim(waiter, queue=None)
        if reply is None:
            # Said before it is queued: once queued, another thread may answer it.
            respond.reply(wire.Pending())
            reply = self._try_claim(waiter, queue="back")
        if reply is None:
            self.wake_by(until)
        else:
            respond.reply(reply)

    def _try_claim(
        self, waiter: Waiter, *, queue: Literal["front", "back"] | None
    ) -> wire.Granted | wire.Failure | None:
        """Return the answer to a claim; ``None`` when the reader has to wait.

        It is queued in the same breath: else what makes room just afterwards would find nobody waiting.
        """
        payload_id = waiter.request.payload_id
        now = self._clock.monotonic()
        control = self._settings.control
        with self.changed:
            if self._closed:
                return wire.Failure.of(self._gone(payload_id))
            try:
                claim, effects = self._table.claim(payload_id, waiter.request.reader, control.claim_ttl_s, now)
            except MoonrelayError as exc:
                return wire.Failure.of(self._failure_of(payload_id, exc))
            entry = self._entries[payload_id]
            if claim is None:
                if queue == "front":
                    entry.waiters.appendleft(waiter)
                elif queue == "back":
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
        self.wake_by(deadline)
        return granted

    def renew(self, request: wire.Renew) -> wire.Reply:
        """Keep a claim alive."""
        now = self._clock.monotonic()
        with self.changed:
            self._check_open(request.payload_id)
            self._table.renew(request.payload_id, request.token, self._settings.control.claim_ttl_s, now)
            entry = self._entries[request.payload_id]
            return wire.Renewed(progress=self._progress(entry), where=entry.where)

    def ack(self, request: wire.Ack) -> wire.Reply:
        """Take an acknowledgement."""
        with self.changed:
            self._check_open(request.payload_id)
            effects = self._table.ack(request.payload_id, request.token, self._clock.monotonic())
            self._forget_reader(request.payload_id, request.token)
        self._apply(effects)
        return wire.Done()

    def nack(self, request: wire.Nack) -> wire.Reply:
        """Take a claim back."""
        with self.changed:
            self._check_open(request.payload_id)
            effects = self._table.nack(request.payload_id, request.token, self._clock.monotonic())
            self._forget_reader(request.payload_id, request.token)
            entry = self._entries.get(request.payload_id)
            spill_at = entry.spill_at if entry is not None else None
        self._apply(effects)
        self.wake_by(spill_at)
        return wire.Done()

    def state(self, payload_id: str) -> wire.State:
        """Return how a payload's lease stands."""
        with self.changed:
            self._check_open(payload_id)
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
        with self.changed:
            effects = self._table.expire(now)
            late: list[Waiter] = []
            spills: list[Entry] = []
            lapsed: list[StageHandle] = []
            due: list[float] = []
            for entry in self._entries.values():
                lapsed += [entry.handle] * self._drop_lapsed(entry, now)
                late += [waiter for waiter in entry.waiters if waiter.until <= now]
                entry.waiters = deque(waiter for waiter in entry.waiters if waiter.until > now)
                due += [waiter.until for waiter in entry.waiters]
                if entry.spill_at is None or entry.moving or entry.read_directly:
                    continue  # whoever ends the move or the read lets us look again
                if entry.spill_at > now:
                    due.append(entry.spill_at)
                elif self._begin_move(entry):
                    spills.append(entry)
                else:
                    entry.spill_at = None  # it is ending
            next_expiry = self._table.next_deadline()
        self._apply(effects)
        for handle in lapsed:
            self._runtime.emit(handle, "lease_expired", reason="a claim was not renewed in time")
        for waiter in late:
            message = f"another reader holds the payload after {waiter.request.wait_s:.3g} s"
            held = LeaseHeld(message, payload_id=waiter.request.payload_id)
            self._answer(waiter, wire.Failure.of(held))
        for entry in spills:
            self._spiller.start(entry)
        if next_expiry is not None:
            due.append(next_expiry)
        return min(due, default=None)

    def _begin_move(self, entry: Entry) -> bool:
        """Hold the memory for a move; False when the payload is ending. The lock is held."""
        try:
            self._hold(entry.handle.id)
        except (LeaseLost, LeaseExpired, Aborted):
            return False
        entry.moving = entry.relay_used = True
        return True

    def _drop_lapsed(self, entry: Entry, now: float) -> int:
        """Forget readers whose claim was not renewed; return how many. The lock is held."""
        alive = {claim.token for claim in self._table.claims(entry.handle.id, now)}
        lapsed = [token for token in entry.readers if token not in alive]
        for token in lapsed:
            del entry.readers[token]
        if lapsed:
            self._show(entry)
        return len(lapsed)

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
        with self.changed:
            kept = [entry for entry in self._entries.values() if entry.in_relay and entry.in_memory]
        for entry in kept:
            self._free_memory(entry)

    def _reclaim(self, effect: Reclaim) -> None:
        """Nobody touches the payload any more: give everything back."""
        with self.changed:
            entry = self._entries.pop(effect.id, None)
            if entry is None:
                return
            in_memory, entry.in_memory = entry.in_memory, False
            waiters, entry.waiters = list(entry.waiters), deque()
            failure = self._remember_failure(entry, effect.final_state)
        if in_memory:
            entry.placement.release()
        self._spiller.clean(entry)
        entry.publication.update(PublicationState(str(effect.final_state)), failure)
        for waiter in waiters:
            answer = self._try_claim(waiter, queue=None)
            if answer is not None:
                self._answer(waiter, answer)
        with self.changed:
            self.changed.notify_all()
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
        """Show the changed state, and let waiting readers try again."""
        with self.changed:
            changed = self._entries.get(effect.id)
            if changed is not None:
                self._show(changed)
        while True:
            with self.changed:
                entry = self._entries.get(effect.id)
                if entry is None or not entry.waiters:
                    return
                waiter = entry.waiters.popleft()
            if not waiter.responder.waiting:
                continue  # it gave up; a claim granted to nobody would keep the others out until it lapses
            answer = self._try_claim(waiter, queue="front")
            if answer is None:
                return
            self._answer(waiter, answer)

    @staticmethod
    def _answer(waiter: Waiter, message: wire.Granted | wire.Failure) -> None:
        """Answer a reader that waited; that it cannot be told stops nothing else."""
        try:
            waiter.responder.reply(message)
        except MoonrelayError as exc:
            logger.warning("a reader of %s could not be answered: %s", waiter.request.payload_id, exc)

    def _check_open(self, payload_id: str) -> None:
        if self._closed:
            raise self._gone(payload_id)

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
        with self.changed:
            if not entry.readers or entry.handle.id not in self._table:
                return
            progress = self._progress(entry)
            routes = [reader.peer.route for reader in entry.readers.values()]
        for route in routes:
            self._runtime.channel().push(route, wire.Progressed(payload_id=entry.handle.id, progress=progress))

    def wake_by(self, when: float | None) -> None:
        """Let `tick` run no later than ``when``."""
        if when is not None:
            self._runtime.tick_by(when)
