"""The producer's side: what was published here, who may read it, and where its bytes are.

Owns how a payload gets a handle and its chunks become readable, and how a producer ends. Leases and readers are
`moonrelay.connector.ledger`, puts into the relay are `moonrelay.connector.spill`.
"""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

from moonrelay import integrity
from moonrelay.clock import Deadline
from moonrelay.connector.entry import Entry
from moonrelay.connector.ledger import Ledger
from moonrelay.connector.placement import Placement, place, work_completed
from moonrelay.connector.publication import Publication
from moonrelay.connector.runtime import Runtime
from moonrelay.errors import (
    CapacityError,
    ClosedError,
    MoonrelayError,
)
from moonrelay.handle import DirectAddress, RelayAddress, StageHandle
from moonrelay.lease import terms
from moonrelay.payload import Flattened, StagePayload, flatten
from moonrelay.relay.records import RelayedPayload

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

#: How long readers of a closing producer may take to let go, in seconds.
LET_GO_S = 1.0
#: A chunk of at most this many bytes is staged and digested in the caller's thread: a hand-over would cost more.
INLINE_NBYTES = 1 << 20


class Outbox:
    """Publications of one connector.

    Threads: any.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._settings = runtime.settings
        self._clock = runtime.clock
        self.ledger = Ledger(runtime)
        self._draining = False

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
        try:
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
                handle,
                Publication(handle, self, self._clock),
                placement,
                relayed,
                to_relay=to_relay,
                relay_used=to_relay,
            )
            with self.ledger.changed:
                self._check_open(payload.request_id)
                self.ledger.add(entry)
        except BaseException:
            placement.release()
            raise
        path = "store" if to_relay else "p2p"
        self._runtime.emit(handle, "published", nbytes=handle.nbytes, path=path)
        if placement.staged_nbytes:
            reason = "a snapshot was asked for" if snapshot else "the memory is not registered, or not dense"
            self._runtime.emit(handle, "staged", nbytes=placement.staged_nbytes, reason=reason)
        if not chunks_follow:
            self._all_final(entry)
        self.ledger.wake_by(self._clock.monotonic() + lease.ttl_s if lease.ttl_s is not None else None)
        return entry.publication

    def _all_final(self, entry: Entry) -> None:
        try:
            for chunk in range(entry.handle.num_chunks):
                entry.publication.ready(chunk)
        except BaseException as exc:
            # The caller gets no handle, so nobody would ever end it.
            self.ledger.abort(entry.handle.id, f"publishing failed: {type(exc).__name__}: {exc}")
            raise

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
            self.ledger.make_room()
            return place(flat, None, snapshot=snapshot), True

    # -- chunks ---------------------------------------------------------------------------------------------------

    def chunk_final(self, payload_id: str, chunk: int) -> None:
        """Bring one chunk to where it is read: stage and digest it, or put it into the relay.

        Returns at once for large chunks and for those on a device.

        Raises:
            Aborted, LeaseExpired, LeaseLost: The payload has ended.
        """
        entry = self.ledger.hold(payload_id)
        work_done = work_completed(entry.placement)
        at_once = work_done is None and not entry.to_relay
        in_place = at_once and not entry.placement.staged_nbytes
        if (at_once and _is_small(entry, chunk)) or (in_place and entry.handle.digest == integrity.OFF):
            self._finish_chunk(entry, chunk, None)
        else:
            # Puts wait for the store, stages and digests for nobody: a store that hangs must not stop the direct path.
            submit = self._runtime.submit if entry.to_relay else self._runtime.submit_staging
            try:
                if in_place:
                    # Before any thread is woken: a reader may be faster.
                    self.ledger.note(entry, chunk, digest=None, readable=True)
                submit(lambda: self._finish_chunk(entry, chunk, work_done, announced=in_place))
            except BaseException:
                self.ledger.unhold(entry)
                raise

    def _finish_chunk(
        self, entry: Entry, chunk: int, work_done: Callable[[], None] | None, *, announced: bool = False
    ) -> None:
        """Do the work of `chunk_final` (in a thread of the runtime, or the caller's). Ends the table's hold.

        Args:
            entry: The payload.
            chunk: The chunk's number.
            work_done: A wait for the device, or ``None``.
            announced: Whether readers were told already that they may read it.
        """
        try:
            if self.ledger.given_up(entry):
                return
            if work_done is not None:
                work_done()
            entry.placement.stage(chunk)
            if entry.to_relay:
                digest = self._digest(entry, chunk)
                self.ledger.put_chunk(entry, chunk, digest)
                if self.ledger.note(entry, chunk, digest=digest, readable=True):
                    self.ledger.all_put(entry)
            else:
                if not (announced or entry.handle.digest == integrity.OFF or _is_small(entry, chunk)):
                    # Readers may begin while the digest is computed.
                    self.ledger.note(entry, chunk, digest=None, readable=True)
                    announced = True
                self.ledger.note(entry, chunk, digest=self._digest(entry, chunk), readable=not announced)
        except MoonrelayError as exc:
            self.ledger.fail(entry, exc)
        except Exception as exc:  # noqa: BLE001 - outermost frame of a mover: torch and engines raise what they like
            text = f"staging failed: {type(exc).__name__}: {exc}"
            self.ledger.fail(entry, MoonrelayError(text, request_id=entry.handle.request_id))
        finally:
            self.ledger.unhold(entry)

    def _digest(self, entry: Entry, chunk: int) -> bytes:
        digest = integrity.digester(entry.handle.digest)
        if entry.handle.digest != integrity.OFF:
            for part in entry.placement.parts(chunk):
                digest.update(part)
        return digest.digest()

    # -- ends -----------------------------------------------------------------------------------------------------

    def abort(self, payload_id: str, reason: str) -> None:
        """Give a payload up; readers hear the reason. Idempotent."""
        self.ledger.abort(payload_id, reason)

    def drain(self, deadline: Deadline) -> None:
        """Take no more payloads; bring unclaimed ones to the relay and let readers finish. Blocks: until the deadline.

        What can be neither relayed nor finished is aborted, so that its readers hear of it.
        """
        ledger = self.ledger
        with ledger.changed:
            self._draining = True
            ledger.drain()
            hopeless = [entry for entry in ledger.entries() if not self._may_settle(entry)]
        for entry in hopeless:
            self.abort(entry.handle.id, "its producer was closed")
        ledger.make_room()
        with ledger.changed:
            deadline.wait_for(
                ledger.changed,
                lambda: all(
                    _settled(entry) or entry.failure or not self._may_settle(entry) for entry in ledger.entries()
                ),
            )
            left = [entry for entry in ledger.entries() if not _settled(entry)]
        for entry in left:
            self.abort(entry.handle.id, "its producer was closed")
        with ledger.changed:
            # Readers that were told have this long to let go of the memory.
            grace = Deadline(min(LET_GO_S, self._settings.control.claim_ttl_s), self._clock)
            grace.wait_for(ledger.changed, lambda: all(map(_settled, ledger.entries())))
        ledger.close()

    def _may_settle(self, entry: Entry) -> bool:
        """Whether waiting can bring the payload to an end, or to the relay. The lock is held."""
        if not entry.publication.all_final:
            return False
        return self._settings.relays or bool(entry.readers or entry.waiters)

    def _check_open(self, request_id: str) -> None:
        if self._draining:
            message = "the connector is closing; publish before close()"
            raise ClosedError(message, request_id=request_id)


def _settled(entry: Entry) -> bool:
    return entry.in_relay and not entry.read_directly


def _is_small(entry: Entry, chunk: int) -> bool:
    return entry.handle.chunk_nbytes(chunk) <= INLINE_NBYTES
