"""The tier in the relay: entries that every process of a deployment may read, bounded by bytes, the least used out first.

Owns what is kept and what goes. What an entry's bytes mean, and whether they are whole, is for ``entry`` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moonrelay.clock import Clock, Deadline
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An entry that was found: fresh memory of the caller's own.

    Attributes:
        data: The bytes that were put, not yet checked.
        ageing: Whether it will be evicted soon unless it is promoted.
    """

    data: memoryview
    ageing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """What `SharedStore.entries` tells of one entry."""

    digest: str
    nbytes: int
    label: Mapping[str, str]
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """How full a store is: an upper bound, since what was replaced or given up counts until its generation goes.

    Attributes:
        entries: Places taken.
        nbytes: Bytes charged, the records about the entries included.
        capacity_bytes: The bound that stands.
        generations: How many hold something.
    """

    entries: int
    nbytes: int
    capacity_bytes: int
    generations: int


class SharedStore:
    """Entries by digest in a relay.

    Args:
        relay: A started relay.
        prefix: Prefix of all keys, without a trailing slash, at most 80 characters; nothing else lies under it but the
            flights of `SingleFlight`.
        capacity_bytes: Bound of all bytes, records included. What the first process says stands until `clear`.
        clock: For looking after new generations now and then.
        generations: In how many steps the store forgets.
        on_trouble: Told in one line what was wrong with a record, or why an entry was not kept; logged by default.
        on_evicted: Told how many entries and bytes this process evicted.

    Threads: all methods from any thread; any number of processes at once.
    """

    def __init__(
        self,
        relay: Relay,
        prefix: str,
        capacity_bytes: int,
        clock: Clock,
        *,
        generations: int = 8,
        on_trouble: Callable[[str], None] | None = None,
        on_evicted: Callable[[int, int], None] | None = None,
    ) -> None:
        raise NotImplementedError

    def get(self, digest: str, deadline: Deadline) -> Hit | None:
        """Read an entry.

        Args:
            digest: Its key's digest, 64 hex digits.
            deadline: When to give up.

        Blocks: two small reads and one of the entry's size, until the deadline at most.

        Returns:
            The bytes in fresh memory; ``None`` when there is no entry, or its records are not readable.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer.
        """
        raise NotImplementedError

    def contains(self, digest: str, deadline: Deadline) -> bool:
        """Return whether an entry stands, without reading it. Raises as `get`."""
        raise NotImplementedError

    def put(
        self,
        digest: str,
        parts: Sequence[Extent],
        nbytes: int,
        label: Mapping[str, str],
        deadline: Deadline,
        *,
        on_quiet: OnQuiet | None = None,
    ) -> bool:
        """Keep an entry, unless it is there already.

        Args:
            digest: Its key's digest, 64 hex digits.
            parts: Its bytes, in host memory that nobody changes until this is quiet.
            nbytes: Their sum.
            label: What `entries` tells of it; cut when long.
            deadline: When to give up.
            on_quiet: Called exactly once when nothing can read ``parts`` any more, see `Relay`.

        Blocks: until stored; a put that opens a generation removes the oldest first.

        Returns:
            Whether the entry stands now. False: it is too large, there is no room, or the store was cleared meanwhile.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer; nothing half is visible.
        """
        raise NotImplementedError

    def promote(self, digest: str, hit: Hit, label: Mapping[str, str], deadline: Deadline) -> bool:
        """Put an ageing entry into the newest generation, one attempt. ``hit.data`` must be whole: check it first.

        Returns:
            Whether it stands there now. Never raises because of the store.
        """
        raise NotImplementedError

    def forget(self, digest: str, deadline: Deadline) -> None:
        """Drop an entry, for instance a damaged one, so that the next put replaces it. Raises as `get`."""
        raise NotImplementedError

    def entries(self, deadline: Deadline) -> Iterator[StoredEntry]:
        """Tell the entries, the newest generation first. Raises as `get`, also in the middle."""
        raise NotImplementedError

    def usage(self, deadline: Deadline) -> StoreUsage:
        """Return how full the store is, by a few small reads per generation. Raises as `get`."""
        raise NotImplementedError

    def clear(self, deadline: Deadline) -> None:
        """Remove everything under the prefix, flights included; what is put meanwhile may stay, whole.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: Not done; the next put or clear goes on with it.
        """
        raise NotImplementedError
