"""The states of a lease, which may follow which, and what the table tells its owner.

Owns the transition table. Pure: no thread, lock, socket or clock.

| from             | to                                 | because                                   |
|------------------|------------------------------------|-------------------------------------------|
| `OPEN`           | `READY`                            | the last chunk became readable            |
| `OPEN`, `READY`  | `CLAIMED`                          | claim                                     |
| `OPEN`, `READY`  | `ABORTED`, `EXPIRED`, `RELEASED`   | abort, time over, release; nobody reads   |
| `OPEN`, `READY`  | `CANCEL_PENDING`, `EXPIRE_PENDING` | the same while the owner holds the memory |
| `CLAIMED`        | `OPEN`, `READY`                    | the last claim was given back or lapsed   |
| `CLAIMED`        | `CONSUMED`                         | the last acknowledgement                  |
| `CLAIMED`        | `CANCEL_PENDING`                   | release or abort of something being read  |
| `CLAIMED`        | `EXPIRE_PENDING`                   | time over while being read                |
| `EXPIRE_PENDING` | `CANCEL_PENDING`                   | abort: its readers hear the reason        |
| `EXPIRE_PENDING` | `EXPIRED`, `CONSUMED`              | nobody reads any more                     |
| `CANCEL_PENDING` | `RELEASED`, `ABORTED`, `CONSUMED`  | nobody reads any more                     |

`CONSUMED`, `ABORTED`, `EXPIRED` and `RELEASED` are final. A payload whose last acknowledgement came while its owner
holds the memory (a spill copies it) waits in `CANCEL_PENDING` for the owner.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from moonrelay.errors import MoonrelayError


class LeaseStatus(enum.StrEnum):
    """Where a payload stands."""

    OPEN = "open"  # chunks are still being made; nobody reads
    READY = "ready"  # whole; nobody reads
    CLAIMED = "claimed"  # at least one reader
    CANCEL_PENDING = "cancel_pending"  # given up, but somebody still touches the memory
    EXPIRE_PENDING = "expire_pending"  # time over, but somebody still touches the memory
    CONSUMED = "consumed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    RELEASED = "released"

    @property
    def final(self) -> bool:
        return self in FINAL

    @property
    def ending(self) -> bool:
        """Whether no new claim is given: a final state, or a pending one."""
        return self in FINAL or self in (LeaseStatus.CANCEL_PENDING, LeaseStatus.EXPIRE_PENDING)


_S = LeaseStatus

FINAL: frozenset[LeaseStatus] = frozenset({_S.CONSUMED, _S.ABORTED, _S.EXPIRED, _S.RELEASED})

_ENDS = frozenset({_S.ABORTED, _S.EXPIRED, _S.RELEASED, _S.CANCEL_PENDING, _S.EXPIRE_PENDING})

TRANSITIONS: dict[LeaseStatus, frozenset[LeaseStatus]] = {
    _S.OPEN: frozenset({_S.READY, _S.CLAIMED}) | _ENDS,
    _S.READY: frozenset({_S.CLAIMED}) | _ENDS,
    _S.CLAIMED: frozenset({_S.OPEN, _S.READY, _S.CONSUMED, _S.CANCEL_PENDING, _S.EXPIRE_PENDING}),
    _S.EXPIRE_PENDING: frozenset({_S.CANCEL_PENDING, _S.EXPIRED, _S.CONSUMED}),
    _S.CANCEL_PENDING: frozenset({_S.RELEASED, _S.ABORTED, _S.CONSUMED}),
    _S.CONSUMED: frozenset(),
    _S.ABORTED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.RELEASED: frozenset(),
}


def check_transition(payload_id: str, before: LeaseStatus, after: LeaseStatus) -> None:
    """Raise `MoonrelayError` when a lease may not go from ``before`` to ``after``."""
    if after not in TRANSITIONS[before]:
        message = f"illegal lease transition {before.name} -> {after.name}; this is a defect of the lease table"
        raise MoonrelayError(message, payload_id=payload_id)


@dataclass(frozen=True, slots=True)
class Reclaim:
    """Nobody reads or will read the payload: its memory may be freed. Given exactly once per payload."""

    id: str
    final_state: LeaseStatus


@dataclass(frozen=True, slots=True)
class Available:
    """What a claim would be told has changed: readers who wait for one should ask again."""

    id: str


Effect: TypeAlias = Reclaim | Available
#: What the owner does after it let go of its lock, in this order.
Effects: TypeAlias = tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A reader's right to read.

    Attributes:
        token: Fences the claim: strictly increasing per table, never given twice.
        reader: Who has it.
        expires_at: When it lapses unless renewed, on the owner's clock.
    """

    token: int
    reader: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class Readiness:
    """Which chunks may be read.

    Attributes:
        chunks: How many there are.
        readable: The numbers of those that are final, ascending.
        digests: Digests known so far, by chunk number.
        reason: Why the payload was aborted, else ``None``.
    """

    chunks: int
    readable: tuple[int, ...]
    digests: dict[int, bytes]
    reason: str | None


@dataclass(frozen=True, slots=True)
class LeaseState:
    """How a payload's lease stands at one moment.

    Attributes:
        state: The state.
        readers: Claims alive.
        acks: Acknowledgements so far.
        chunks: How many chunks there are.
        chunks_ready: How many of them are readable.
        expires_in_s: Seconds until the lease runs out, never negative; ``None`` when it does not, or has ended.
        reason: Why it was aborted, else ``None``.
    """

    state: LeaseStatus
    readers: int
    acks: int
    chunks: int
    chunks_ready: int
    expires_in_s: float | None
    reason: str | None = None
