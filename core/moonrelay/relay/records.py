"""What the objects of one relayed payload mean: chunks, the end record, claims, a tombstone.

Owns the key names under a payload's prefix, the header inside a chunk's object, and the claim chain by which readers
share a payload whose producer is gone. Built on the `Relay` contract only: it moves no byte itself, keeps no thread and
never waits but inside a relay's call. Digests are compared here with nothing: the header carries them to the reader.

Keys, under ``prefix``::

    c/<chunk>/<attempt>      header + the chunk's bytes; a put that failed is repeated under the next attempt
    end                      End: how many chunks, their attempts, how long the payload may stay
    claim/<slot>/<epoch>     Holder, Free or Done; the record of the highest epoch is the state of the slot
    tomb                     why the payload is no more; stays until the sweeper takes it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonrelay.clock import Clock, Deadline
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay

HEADER_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """What a chunk's own header says: its number, its length without the header, and the producer's digest."""

    chunk: int
    nbytes: int
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The payload is complete in the store: this many chunks; ``ttl_s`` ``None`` means until released."""

    count: int
    ttl_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimToken:
    """A claim that this reader won; ``slot`` -1 stands for a payload that any number may read."""

    slot: int
    epoch: int
    reader_id: str
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A slot held by another reader: ask ``owner`` whether it lives, then wait, or `take_over` this very epoch."""

    slot: int
    epoch: int
    reader_id: str
    owner: bytes


class RelayedPayload:
    """The objects of one payload.

    Args:
        relay: A started relay.
        prefix: Prefix of all keys, unique to this attempt, without a trailing slash.
        payload_id: The handle's id (at most 64 ASCII characters); compared with each chunk's header.
        clock: Reserved for waits between looks.
        slots: How many readers may each consume the payload once (1 for delete-on-consume, n for shared, 0 for any
            number, which then needs no claim records).

    Threads: all methods from any thread.
    """

    def __init__(self, relay: Relay, prefix: str, payload_id: str, clock: Clock, *, slots: int = 1) -> None: ...

    def put_chunk(
        self,
        chunk: int,
        parts: Sequence[Extent],
        digest: bytes,
        deadline: Deadline,
        *,
        on_quiet: OnQuiet | None = None,
    ) -> None:
        """Store a chunk. After a failure that is ``retryable`` call it again: it uses a fresh key."""

    def get_chunk(
        self, chunk: int, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None
    ) -> ChunkRecord | None:
        """Read a chunk into ``parts``; ``None`` when it is not there (yet). The caller compares the digest."""
        raise NotImplementedError

    def put_end(self, count: int, ttl_s: float | None, deadline: Deadline) -> None:
        """Say that all chunks are stored."""

    def get_end(self, deadline: Deadline) -> End | None:
        """Return the end record; ``None`` while the payload is not complete in the store."""
        raise NotImplementedError

    def claim(self, reader_id: str, owner: bytes, deadline: Deadline) -> ClaimToken | list[Held]:
        """Take a free slot; when none is free return who holds them. Raises LeaseLost when consumed or buried."""
        raise NotImplementedError

    def take_over(self, held: Held, reader_id: str, owner: bytes, deadline: Deadline) -> ClaimToken | None:
        """Claim in place of a dead holder; ``None`` when somebody was faster (claim again)."""
        raise NotImplementedError

    def is_mine(self, token: ClaimToken, deadline: Deadline) -> bool:
        """Return whether the claim still stands (not taken over, given back or acknowledged)."""
        raise NotImplementedError

    def nack(self, token: ClaimToken, deadline: Deadline) -> bool:
        """Give the slot back; False when it was taken over before."""
        raise NotImplementedError

    def ack(self, token: ClaimToken, deadline: Deadline) -> bool:
        """Mark the slot consumed; True when every slot is now consumed (then bury). Raises LeaseLost if fenced."""
        raise NotImplementedError

    def tombstone(self, reason: str, deadline: Deadline) -> None:
        """Leave a record that the payload is no more, so that a late reader is told LeaseLost."""

    def tombstone_reason(self, deadline: Deadline) -> str | None:
        """Return the tombstone's reason; ``None`` when there is none."""
        raise NotImplementedError

    def remove_all(self, count: int, deadline: Deadline, *, keep_tombstone: bool = True) -> None:
        """Remove every key of the payload, whatever attempts and epochs there were. Idempotent."""
