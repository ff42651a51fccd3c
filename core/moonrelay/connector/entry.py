"""What a producer keeps for each payload it has published and that has not ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from moonrelay.connector.placement import Placement
from moonrelay.connector.publication import Publication
from moonrelay.control import messages as wire
from moonrelay.control.channel import PeerInfo, Responder
from moonrelay.errors import MoonrelayError
from moonrelay.handle import StageHandle
from moonrelay.relay.records import RelayedPayload


@dataclass(slots=True)
class Waiter:
    """A reader whose claim waits until the payload is free, at most until ``until`` on our clock."""

    peer: PeerInfo
    request: wire.Claim
    responder: Responder
    until: float


@dataclass(frozen=True, slots=True)
class Reader:
    """A reader with a claim: how to tell it something, and where it reads."""

    peer: PeerInfo
    where: wire.Where


@dataclass(slots=True)
class Entry:
    """One payload. All fields are guarded by the ledger's lock.

    Attributes:
        to_relay: New readers read it in the relay: its chunks go there as they become final, or all are there already.
        in_relay: All of it is in the relay.
        in_memory: Its direct memory is still held.
        relay_used: Something may be stored under its keys.
        moving: A move to the relay is under way.
        failed_moves: How many moves in a row did not end well.
        stored: Chunks that a move has put into the relay.
        holds: Uses of the memory by our own threads that are under way.
        spill_at: When to move it unless somebody has claimed it; ``None`` while it is not complete or not to be moved.
        digested: Chunks whose bytes are final and digested.
        failure: Why it was given up, as its readers will hear it.
    """

    handle: StageHandle
    publication: Publication
    placement: Placement
    relayed: RelayedPayload | None
    to_relay: bool = False
    in_relay: bool = False
    in_memory: bool = True
    relay_used: bool = False
    moving: bool = False
    failed_moves: int = 0
    stored: set[int] = field(default_factory=set)
    holds: int = 0
    spill_at: float | None = None
    digested: int = 0
    failure: MoonrelayError | None = None
    readers: dict[int, Reader] = field(default_factory=dict)
    waiters: deque[Waiter] = field(default_factory=deque)

    @property
    def where(self) -> wire.Where:
        """Where a new reader reads."""
        return "relay" if self.to_relay or self.in_relay else "direct"

    @property
    def read_directly(self) -> bool:
        return any(reader.where == "direct" for reader in self.readers.values())

    @property
    def whole(self) -> bool:
        return self.digested == self.handle.num_chunks
