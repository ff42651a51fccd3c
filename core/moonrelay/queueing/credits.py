"""Credits: buffer slots that a stage's pool offers for results that it has not taken yet.

Owns the account as a pure function of what is stored. There is no second book to keep in step with the first, so a
credit can neither leak nor be returned twice: a credit *is* held by each job that runs in an admission stage upstream
(its result will need a place) and by each task that waits in this stage's queue (a result not yet taken). It is free
again when a worker of this stage claims that task, and when the request ends or goes elsewhere for whatever reason; a
task that comes back to the queue holds one again. The total is what the live workers advertise; when one of them dies
the total shrinks, and what is under way keeps its place, so for a while more can be held than there is. Time is passed
in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one worker advertises, until its registration's lease ends."""

    buffers: int
    lease_until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A stage's credits at one moment.

    Attributes:
        total: Advertised by live workers.
        held: Taken by jobs upstream and by waiting results; above ``total`` after a worker died.
        live: Whether any worker is registered.
    """

    total: int
    held: int
    live: bool

    @property
    def free(self) -> int:
        """Credits that a new job may take; never negative."""
        return max(0, self.total - self.held)


def account(offers: Iterable[Offer], *, admitted: int, waiting: int, now_s: float) -> Account:
    """Draw up a stage's account.

    Args:
        offers: Of the stage's workers.
        admitted: Jobs running in the admission stages that feed it.
        waiting: Tasks in its queue.
        now_s: The time; an offer whose lease has ended does not count.
    """
    live = [offer.buffers for offer in offers if offer.lease_until_s > now_s]
    return Account(total=sum(live), held=admitted + waiting, live=bool(live))
