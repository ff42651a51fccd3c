"""A small model of one payload's lease: what a reader may be told, and nothing of how it comes about.

Owns the rules, written independently of `moonrelay.lease`, so that a mistake there is not repeated here. Pure: no time
passes in it; claims live while their readers do, and no payload's life ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

#: How many acknowledgements consume a payload; 0 is no number.
UNLIMITED: Final = 0


@dataclass(eq=False)
class LeaseModel:
    """One payload.

    Attributes:
        limit: How many acknowledgements consume it, and so how many may read at once; `UNLIMITED` is any number.
        acks: How many it has.
        live: Names of the claims that are neither acknowledged nor given back.
        ended: ``released`` or ``aborted``, once it was.
    """

    limit: int
    acks: int = 0
    live: set[str] = field(default_factory=set)
    ended: str = ""

    @property
    def consumed(self) -> bool:
        """Whether it has all acknowledgements that it waits for."""
        return self.limit != UNLIMITED and self.acks >= self.limit

    @property
    def full(self) -> bool:
        """Whether no other reader would be let in."""
        return self.limit != UNLIMITED and self.acks + len(self.live) >= self.limit

    def may_claim(self) -> frozenset[str]:
        """Return what a claim may be answered with."""
        if self.consumed or self.ended == "released":
            return frozenset({"refused:lease_lost"})
        if self.ended == "aborted":
            return frozenset({"refused:aborted"})
        return frozenset({"refused:lease_held"}) if self.full else frozenset({"granted"})

    def may_read(self) -> frozenset[str]:
        """Return what a read with a live claim may end in: what was released may be finished."""
        return frozenset({"delivered", "refused:aborted"}) if self.ended == "aborted" else frozenset({"delivered"})

    def may_ack(self) -> frozenset[str]:
        """Return what the acknowledgement of a live claim may be answered with."""
        return frozenset({"refused:aborted"}) if self.ended == "aborted" else frozenset({"done"})

    def states(self) -> frozenset[str]:
        """Return the words by which its state may be told; one that has ended may have been forgotten."""
        if self.consumed:
            return frozenset({"state:consumed", "refused:lease_lost"})
        if not self.ended:
            return frozenset({"state:claimed" if self.live else "state:ready"})
        if self.live:
            return frozenset({"state:cancel_pending", f"state:{self.ended}"})
        # Acknowledged by those who were reading it as it was released: told as either.
        told = {f"state:{self.ended}", "refused:lease_lost", "refused:aborted"}
        return frozenset(told | ({"state:consumed"} if self.acks else set()))

    # What happens.

    def claimed(self, claim: str) -> None:
        """Take note of a claim that was granted."""
        self.live.add(claim)

    def acked(self, claim: str) -> None:
        """Take note of an acknowledgement that was accepted."""
        self.live.discard(claim)
        self.acks += 1

    def left(self, claim: str) -> None:
        """Take note of a claim that was given back."""
        self.live.discard(claim)

    def abort(self) -> None:
        """Its producer gives it up: nothing, once it has ended and nobody reads."""
        if not self.consumed and (not self.ended or self.live):
            self.ended = "aborted"

    def release(self) -> None:
        """Somebody drops it: nothing, once it has ended."""
        if not self.consumed and not self.ended:
            self.ended = "released"
