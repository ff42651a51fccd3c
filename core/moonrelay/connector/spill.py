"""How published bytes get into the relay, and out of it again when the payload ends.

Owns puts and removals of one producer. When a payload is moved is the ledger's decision.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moonrelay.connector.entry import Entry
from moonrelay.connector.runtime import Runtime
from moonrelay.errors import ClosedError, ConfigError, MoonrelayError
from moonrelay.relay.records import RelayedPayload

if TYPE_CHECKING:
    from moonrelay.connector.ledger import Ledger

logger = logging.getLogger(__name__)

#: A move that failed for want of room, or of the store, is tried again after this long, in seconds; it doubles with
#: each further failure in a row.
RETRY_S = 2.0
RETRY_MAX_S = 60.0
CLEAN_UP_TIMEOUT_S = 30.0


class Spiller:
    """Moves payloads of one producer to the relay.

    Threads: `start` on the reaper's; the work runs on the runtime's movers.
    """

    def __init__(self, runtime: Runtime, ledger: Ledger) -> None:
        self._runtime = runtime
        self._ledger = ledger

    def put_chunk(self, entry: Entry, chunk: int, digest: bytes) -> None:
        """Put one chunk; the caller holds the entry. Blocks: up to ``put_timeout_s``.

        Raises:
            CapacityError, TransferFailed, TransferTimeout, PeerLost: Not stored.
        """
        relayed = relayed_of(entry)
        deadline = self._runtime.patience(self._runtime.settings.store.put_timeout_s)
        for attempt in (1, 2):
            # The memory stays until no native call can read it any more, also after a put that timed out.
            entry.placement.hold()
            parts = entry.placement.extents(chunk)
            try:
                relayed.put_chunk(chunk, parts, digest, deadline, on_quiet=entry.placement.release)
            except MoonrelayError as exc:
                if attempt == 2 or not exc.retryable or deadline.expired:
                    raise
                self._runtime.emit(entry.handle, "retried", path="store", reason=str(exc), code=exc.code)
            else:
                return

    def finish(self, entry: Entry) -> None:
        """Say in the relay that all chunks are there. Blocks: up to ``put_timeout_s``."""
        deadline = self._runtime.patience(self._runtime.settings.store.put_timeout_s)
        relayed_of(entry).put_end(entry.handle.num_chunks, entry.handle.lease.ttl_s, deadline)

    def start(self, entry: Entry) -> None:
        """Begin to move a complete payload; the ledger has marked it as moving and holds its memory."""
        try:
            self._runtime.submit(lambda: self._move(entry))
        except ClosedError:
            self._ledger.move_ended(entry, moved=False)

    def _move(self, entry: Entry) -> None:
        started = self._runtime.clock.monotonic()
        moved = failed = False
        try:
            moved = self._store(entry)
        except MoonrelayError as exc:
            # It stays where it is, can still be read directly, and is tried again.
            failed = True
            self._runtime.emit(entry.handle, "fallback", path="p2p", reason=f"not relayed: {exc}", code=exc.code)
        except BaseException:
            failed = True
            raise
        finally:
            self._ledger.move_ended(entry, moved=moved, failed=failed)
        if moved:
            took = self._runtime.clock.monotonic() - started
            self._runtime.emit(entry.handle, "spilled", path="store", nbytes=entry.handle.nbytes, duration_s=took)

    def _store(self, entry: Entry) -> bool:
        """Put what is not there yet; False when the payload is ending, or somebody reads it directly."""
        digests = self._ledger.digests(entry)
        for chunk in range(entry.handle.num_chunks):
            if not self._ledger.wanted(entry):
                return False
            if chunk not in entry.stored:
                self.put_chunk(entry, chunk, digests[chunk])
                entry.stored.add(chunk)
        # A sweeper may have taken the first chunks for a dead producer's, when the rest was long in coming.
        relayed_of(entry).check_buried(self._runtime.patience(self._runtime.settings.store.put_timeout_s))
        marked = 0
        while (acks := self._ledger.seal(entry, marked)) != marked:
            if acks is None:
                return False
            # Readers that are done already count in the relay too, before anybody can claim there.
            deadline = self._runtime.patience(self._runtime.settings.store.put_timeout_s)
            relayed_of(entry).mark_consumed(acks, deadline)
            marked = acks
        self.finish(entry)
        return True

    def clean(self, entry: Entry) -> None:
        """Remove what an ended payload left in the relay, on a mover. Returns at once."""
        if entry.relay_used:
            try:
                self._runtime.submit(lambda: self._clean(entry))
            except ClosedError:
                logger.warning("objects of %s stay until a sweeper takes them", entry.handle.id)

    def _clean(self, entry: Entry) -> None:
        deadline = self._runtime.patience(CLEAN_UP_TIMEOUT_S)
        try:
            relayed_of(entry).remove_all(entry.handle.num_chunks, deadline, keep_tombstone=False)
        except MoonrelayError as exc:
            logger.warning("objects of %s stay until a sweeper takes them: %s", entry.handle.id, exc)


def relayed_of(entry: Entry) -> RelayedPayload:
    """Return the entry's objects; raise `ConfigError` where the connector has no relay."""
    if entry.relayed is None:
        message = "transfer_mode='p2p' has no relay"
        raise ConfigError(message, field="transfer_mode")
    return entry.relayed
