"""The lease table: which payloads there are, who reads them, and when their memory may be freed.

Owns that state and nothing else: no thread, no lock, no socket, no clock; the caller passes ``now`` and serialises the
calls. What the caller has to do (free memory, wake readers) comes back as `Effects`, to be acted on after its lock. A
call that raises has changed nothing. The states and their order are in `moonrelay.lease.states`.

Time. A claim at or past its ``expires_at`` counts as gone and its token is fenced, whether or not `LeaseTable.expire`
ran in between; `expire` is what turns that into state and effects. So behaviour does not depend on how punctual the
caller is.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from moonrelay.errors import Aborted, ConfigError, LeaseExpired, LeaseLost, MoonrelayError
from moonrelay.handle import LeaseTerms
from moonrelay.lease.policies import check
from moonrelay.lease.states import (
    Available,
    Claim,
    Effect,
    Effects,
    LeaseState,
    LeaseStatus,
    Readiness,
    Reclaim,
    check_transition,
)

_S = LeaseStatus

#: Acknowledged tokens remembered per payload, so that a repeated ack is told the same.
_ACKED_KEPT = 256


@dataclass(slots=True)
class _Entry:
    """A payload with memory."""

    id: str
    terms: LeaseTerms
    chunks: int
    expires_at: float | None
    state: LeaseStatus = _S.OPEN
    readable: set[int] = field(default_factory=set)
    digests: dict[int, bytes] = field(default_factory=dict)
    claims: dict[int, Claim] = field(default_factory=dict)
    acks: int = 0
    acked: OrderedDict[int, None] = field(default_factory=OrderedDict)
    holds: int = 0
    outcome: LeaseStatus | None = None  # decided, while state is a pending one
    reason: str | None = None
    scheduled: float | None = None  # earliest heap entry that stands for this payload

    @property
    def used(self) -> bool:
        return bool(self.claims) or self.holds > 0

    @property
    def whole(self) -> bool:
        return len(self.readable) == self.chunks

    @property
    def spent(self) -> bool:
        """Whether the acknowledgements have consumed the payload."""
        return 0 < self.terms.readers <= self.acks

    def alive(self, now: float) -> list[Claim]:
        return [claim for claim in self.claims.values() if claim.expires_at > now]

    def due(self) -> float | None:
        """Return when `LeaseTable.expire` next has something to do here."""
        times = [claim.expires_at for claim in self.claims.values()]
        if self.expires_at is not None and not self.state.ending:
            times.append(self.expires_at)
        return min(times, default=None)


@dataclass(frozen=True, slots=True)
class _Tombstone:
    """A payload without memory, kept so that the late hear what became of it."""

    state: LeaseStatus
    acks: int
    acked: frozenset[int]
    chunks: int
    chunks_ready: int
    reason: str | None


class LeaseTable:
    """The leases of one owner.

    Args:
        tombstones: How many ended payloads are remembered; beyond it the longest ended are forgotten.

    Threads: not safe; the owner's lock serialises all calls.
    """

    def __init__(self, *, tombstones: int = 4096) -> None:
        if isinstance(tombstones, bool) or not isinstance(tombstones, int) or tombstones < 1:
            message = f"tombstones={tombstones!r} must be a whole number above 0"
            raise ConfigError(message, field="tombstones")
        self._entries: dict[str, _Entry] = {}
        self._tombstones: OrderedDict[str, _Tombstone] = OrderedDict()
        self._tombstones_max = tombstones
        self._tokens = itertools.count(1)
        self._due: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Return how many payloads have memory."""
        return len(self._entries)

    def __contains__(self, payload_id: object) -> bool:
        """Return whether the payload has memory."""
        return payload_id in self._entries

    def ids(self) -> tuple[str, ...]:
        """Return the payloads that have memory, oldest first."""
        return tuple(self._entries)

    # The owner's side: a payload is made, becomes readable, is held, is given up.

    def add(self, payload_id: str, terms: LeaseTerms, chunks: int, now: float) -> Effects:
        """Enter a payload, with no chunk readable yet.

        Args:
            payload_id: Used once in the life of the table.
            terms: Who may read, and for how long from now on.
            chunks: How many chunks there will be; at least 1.
            now: Time.

        Raises:
            ConfigError: The terms or the count are wrong, or the id was used before.
        """
        check(terms)
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            message = f"chunks={chunks!r} must be a whole number above 0"
            raise ConfigError(message, field="chunks", payload_id=payload_id)
        if payload_id in self._entries or payload_id in self._tombstones:
            message = f"payload id {payload_id!r} was used before; make a new id for each attempt"
            raise ConfigError(message, field="payload_id")
        entry = _Entry(payload_id, terms, chunks, None if terms.ttl_s is None else now + terms.ttl_s)
        self._entries[payload_id] = entry
        self._schedule(entry)
        return ()

    def mark_readable(self, payload_id: str, chunk: int, now: float, digest: bytes | None = None) -> Effects:
        """Say that a chunk is final; the last one makes an unclaimed payload `READY`.

        Raises:
            ConfigError: No such chunk, or it was final already.
            LeaseLost, LeaseExpired, Aborted: The payload has ended; there is no use in making the rest.
        """
        entry = self._entry(payload_id)
        self._check_chunk(entry, chunk)
        if chunk in entry.readable:
            message = f"chunk {chunk} was marked readable before; each becomes final once"
            raise ConfigError(message, field="chunk", payload_id=payload_id)
        entry.readable.add(chunk)
        if digest is not None:
            entry.digests[chunk] = digest
        if entry.state is _S.OPEN and entry.whole:
            self._move(entry, _S.READY)
        return ()

    def set_digest(self, payload_id: str, chunk: int, digest: bytes) -> Effects:
        """Set a chunk's digest, before or after it becomes readable.

        Raises:
            ConfigError: No such chunk, or it has another digest.
            LeaseLost, LeaseExpired, Aborted: The payload has ended.
        """
        entry = self._entry(payload_id)
        self._check_chunk(entry, chunk)
        if entry.digests.get(chunk, digest) != digest:
            message = f"chunk {chunk} has a digest already, and another one; a chunk is final once"
            raise ConfigError(message, field="digest", payload_id=payload_id)
        entry.digests[chunk] = digest
        return ()

    def hold(self, payload_id: str) -> Effects:
        """Keep the memory from being reclaimed while the owner itself touches it (writes a chunk, copies a spill).

        Counted: each `hold` needs one `unhold`. A hold keeps nobody from claiming.

        Raises:
            LeaseLost, LeaseExpired, Aborted: The payload has ended or is ending.
        """
        entry = self._entry(payload_id)
        if entry.state.ending:
            raise self._ended(payload_id, entry.outcome or entry.state, entry.reason)
        entry.holds += 1
        return ()

    def unhold(self, payload_id: str) -> Effects:
        """Give a `hold` back.

        Raises:
            MoonrelayError: There was no hold.
        """
        entry = self._entries.get(payload_id)
        if entry is None or entry.holds == 0:
            message = "unhold without hold; this is a defect of the caller"
            raise MoonrelayError(message, payload_id=payload_id)
        entry.holds -= 1
        return self._settle(entry)

    def release(self, payload_id: str) -> Effects:
        """Drop a payload that nobody needs. Idempotent, also for unknown ids; readers may finish."""
        return self._end(payload_id, _S.RELEASED, None)

    def abort(self, payload_id: str, reason: str) -> Effects:
        """Give a payload up; readers are told why. Idempotent; nothing happens after the payload has ended."""
        return self._end(payload_id, _S.ABORTED, reason)

    # The readers' side.

    def claim(self, payload_id: str, reader: str, claim_ttl_s: float, now: float) -> tuple[Claim | None, Effects]:
        """Give a reader the right to read, if there is room for one.

        A payload whose chunks are still being made may be claimed.

        Args:
            payload_id: The payload.
            reader: Identity of the claim attempt; while its claim lives, asking again gives the same token, renewed.
            claim_ttl_s: The claim lapses when not renewed for this long.
            now: Time.

        Returns:
            The claim, or ``None`` when other readers hold the payload; and the effects.

        Raises:
            LeaseLost: Consumed, released, or unknown.
            LeaseExpired: Its time is over.
            Aborted: Its producer gave it up; with the reason.
        """
        entry = self._entry(payload_id)
        if entry.state.ending:
            raise self._ended(payload_id, entry.outcome or entry.state, entry.reason)
        if entry.expires_at is not None and now >= entry.expires_at:
            raise self._ended(payload_id, _S.EXPIRED, None)
        alive = entry.alive(now)
        for held in alive:
            if held.reader == reader:
                return self._renewed(entry, held, claim_ttl_s, now), ()
        if 0 < entry.terms.readers <= entry.acks + len(alive):
            return None, ()
        dropped = len(entry.claims) > len(alive)
        entry.claims = {held.token: held for held in alive}
        given = Claim(next(self._tokens), reader, now + claim_ttl_s)
        entry.claims[given.token] = given
        if entry.state is not _S.CLAIMED:
            self._move(entry, _S.CLAIMED)
        self._schedule(entry)
        return given, self._room(entry) if dropped else ()

    def renew(self, payload_id: str, token: int, claim_ttl_s: float, now: float) -> Claim:
        """Keep a claim alive, also while the payload's end is pending (the reader may finish).

        Raises:
            LeaseLost: The claim lapsed, was given back, or never was; the reader must stop reading.
            LeaseExpired, Aborted: The payload has ended.
        """
        entry = self._entry(payload_id)
        return self._renewed(entry, self._held(entry, token, now), claim_ttl_s, now)

    def ack(self, payload_id: str, token: int, now: float) -> Effects:
        """Take a reader's word that it has the payload; repeated with the same token it changes nothing.

        Raises:
            LeaseLost: The token is fenced.
            Aborted: The producer gave the payload up while it was read; the reader gives its claim back (`nack`).
            LeaseExpired: The payload has ended.
        """
        gone = self._tombstones.get(payload_id)
        if gone is not None and token in gone.acked:
            return ()
        entry = self._entry(payload_id)
        if token in entry.acked:
            return ()
        self._held(entry, token, now)
        if entry.outcome is _S.ABORTED:
            raise self._ended(payload_id, _S.ABORTED, entry.reason)
        del entry.claims[token]
        entry.acks += 1
        entry.acked[token] = None
        if len(entry.acked) > _ACKED_KEPT:
            entry.acked.popitem(last=False)
        return self._settle(entry)

    def nack(self, payload_id: str, token: int, now: float) -> Effects:
        """Give a claim back unread; the payload may be claimed again at once.

        Raises:
            LeaseLost: The token is fenced.
            LeaseExpired, Aborted: The payload has ended.
        """
        entry = self._entry(payload_id)
        self._held(entry, token, now)
        del entry.claims[token]
        return self._settle(entry, vacated=True)

    # Time.

    def next_deadline(self) -> float | None:
        """Return when `expire` next has something to do, or ``None``. Cheap; changes nothing that can be seen."""
        while self._due:
            when, payload_id = self._due[0]
            entry = self._entries.get(payload_id)
            if entry is not None and entry.scheduled == when and entry.due() == when:
                return when
            heapq.heappop(self._due)
            if entry is not None and entry.scheduled == when:
                entry.scheduled = None
                self._schedule(entry)
        return None

    def expire(self, now: float) -> Effects:
        """Drop the claims that were not renewed and end the payloads whose time is over."""
        effects: list[Effect] = []
        while (when := self.next_deadline()) is not None and when <= now:
            entry = self._entries[self._due[0][1]]
            lapsed = [claim.token for claim in entry.claims.values() if claim.expires_at <= now]
            for token in lapsed:
                del entry.claims[token]
            over = entry.expires_at is not None and now >= entry.expires_at and not entry.state.ending
            effects += self._settle(entry, vacated=bool(lapsed) and not over)
            if over:
                effects += self._decide(entry, _S.EXPIRED)
        return tuple(effects)

    # Questions.

    def snapshot(self, payload_id: str, now: float) -> LeaseState:
        """Return how a payload's lease stands, also after its end while it is remembered.

        Raises:
            LeaseLost: Unknown, or forgotten.
        """
        gone = self._tombstones.get(payload_id)
        if gone is not None:
            return LeaseState(gone.state, 0, gone.acks, gone.chunks, gone.chunks_ready, None, gone.reason)
        entry = self._entry(payload_id)
        left = None if entry.expires_at is None or entry.state.ending else max(0.0, entry.expires_at - now)
        return LeaseState(
            entry.state, len(entry.alive(now)), entry.acks, entry.chunks, len(entry.readable), left, entry.reason
        )

    def readiness(self, payload_id: str) -> Readiness:
        """Return which chunks may be read, with their digests, and why no more will come.

        Raises:
            LeaseLost, LeaseExpired, Aborted: The payload has ended.
        """
        entry = self._entry(payload_id)
        return Readiness(entry.chunks, tuple(sorted(entry.readable)), dict(entry.digests), entry.reason)

    def holds_claim(self, payload_id: str, reader: str, now: float) -> bool:
        """Return whether ``reader`` has a live claim."""
        entry = self._entries.get(payload_id)
        return entry is not None and any(claim.reader == reader for claim in entry.alive(now))

    def claims(self, payload_id: str, now: float) -> tuple[Claim, ...]:
        """Return the live claims of a payload; none when it is unknown or has ended."""
        entry = self._entries.get(payload_id)
        return () if entry is None else tuple(entry.alive(now))

    def check_invariants(self) -> None:
        """Raise `MoonrelayError` when the state contradicts itself; for tests."""
        for entry in self._entries.values():
            broken = [name for name, holds in _invariants(entry).items() if not holds]
            if broken:
                message = f"lease table broken: {', '.join(broken)}"
                raise MoonrelayError(message, payload_id=entry.id, state=entry.state.name)
        both = self._entries.keys() & self._tombstones.keys()
        if both:
            message = f"lease table broken: alive and ended at once: {sorted(both)}"
            raise MoonrelayError(message)

    # Inside.

    def _entry(self, payload_id: str) -> _Entry:
        entry = self._entries.get(payload_id)
        if entry is not None:
            return entry
        gone = self._tombstones.get(payload_id)
        if gone is None:
            message = "payload is unknown or long gone"
            raise LeaseLost(message, payload_id=payload_id)
        raise self._ended(payload_id, gone.state, gone.reason)

    @staticmethod
    def _ended(payload_id: str, state: LeaseStatus, reason: str | None) -> MoonrelayError:
        if state is _S.ABORTED:
            return Aborted(f"the producer gave the payload up: {reason}", payload_id=payload_id)
        if state in (_S.EXPIRED, _S.EXPIRE_PENDING):
            return LeaseExpired("the payload's lease ran out", payload_id=payload_id)
        how = "released" if state is _S.RELEASED else "consumed"
        return LeaseLost(f"the payload was {how}", payload_id=payload_id)

    @staticmethod
    def _check_chunk(entry: _Entry, chunk: int) -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not 0 <= chunk < entry.chunks:
            message = f"chunk={chunk!r} does not exist; the payload has chunks 0 to {entry.chunks - 1}"
            raise ConfigError(message, field="chunk", payload_id=entry.id)

    @staticmethod
    def _held(entry: _Entry, token: int, now: float) -> Claim:
        claim = entry.claims.get(token)
        if claim is None or claim.expires_at <= now:
            message = "the claim lapsed or was given up, its token is fenced"
            raise LeaseLost(message, payload_id=entry.id, token=token)
        return claim

    def _renewed(self, entry: _Entry, claim: Claim, claim_ttl_s: float, now: float) -> Claim:
        renewed = replace(claim, expires_at=max(claim.expires_at, now + claim_ttl_s))
        entry.claims[claim.token] = renewed
        return renewed

    def _room(self, entry: _Entry) -> Effects:
        """Return `Available` when one more reader would be given a claim."""
        limit = entry.terms.readers
        free = limit == 0 or entry.acks + len(entry.claims) < limit
        # With any number of readers nobody ever waits, so there is nobody to tell.
        return (Available(entry.id),) if free and limit > 0 else ()

    def _end(self, payload_id: str, outcome: LeaseStatus, reason: str | None) -> Effects:
        entry = self._entries.get(payload_id)
        if entry is None:
            return ()
        if entry.state.ending:
            stronger = outcome is _S.ABORTED and entry.outcome in (_S.RELEASED, _S.EXPIRED)
            if not stronger:
                return ()
            entry.outcome, entry.reason = outcome, reason
            if entry.state is _S.EXPIRE_PENDING:
                self._move(entry, _S.CANCEL_PENDING)
            return ()
        entry.reason = reason
        return self._decide(entry, outcome)

    def _decide(self, entry: _Entry, outcome: LeaseStatus) -> Effects:
        """End a payload: at once when nobody touches its memory, else when the last one is done."""
        entry.outcome = outcome
        if entry.used:
            self._move(entry, _S.EXPIRE_PENDING if outcome is _S.EXPIRED else _S.CANCEL_PENDING)
            self._schedule(entry)
            return (Available(entry.id),)
        return (*self._bury(entry, outcome), Available(entry.id))

    def _settle(self, entry: _Entry, *, vacated: bool = False) -> Effects:
        """Bring the state in line after a claim or a hold ended."""
        if entry.state.ending:
            if entry.used:
                return ()
            assert entry.outcome is not None
            consumed = entry.spent and entry.outcome is not _S.ABORTED
            return self._bury(entry, _S.CONSUMED if consumed else entry.outcome)
        if entry.spent:
            if entry.holds == 0:
                return (*self._bury(entry, _S.CONSUMED), Available(entry.id))
            return self._decide(entry, _S.CONSUMED)
        if entry.state is _S.CLAIMED and not entry.claims:
            self._move(entry, _S.READY if entry.whole else _S.OPEN)
        return self._room(entry) if vacated else ()

    def _bury(self, entry: _Entry, final: LeaseStatus) -> Effects:
        self._move(entry, final)
        del self._entries[entry.id]
        self._tombstones[entry.id] = _Tombstone(
            final, entry.acks, frozenset(entry.acked), entry.chunks, len(entry.readable), entry.reason
        )
        while len(self._tombstones) > self._tombstones_max:
            self._tombstones.popitem(last=False)
        return (Reclaim(entry.id, final),)

    @staticmethod
    def _move(entry: _Entry, state: LeaseStatus) -> None:
        check_transition(entry.id, entry.state, state)
        entry.state = state

    def _schedule(self, entry: _Entry) -> None:
        """Make sure that the heap knows a time at or before the entry's next one."""
        due = entry.due()
        if due is not None and (entry.scheduled is None or due < entry.scheduled):
            entry.scheduled = due
            heapq.heappush(self._due, (due, entry.id))


def _invariants(entry: _Entry) -> dict[str, bool]:
    limit = entry.terms.readers
    return {
        "a final state keeps memory": not entry.state.final,
        "more readers than the policy allows": limit == 0 or entry.acks + len(entry.claims) <= limit,
        "CLAIMED and having a reader differ": entry.state.ending or (entry.state is _S.CLAIMED) == bool(entry.claims),
        "READY although chunks are missing": entry.state is not _S.READY or entry.whole,
        "OPEN although whole": entry.state is not _S.OPEN or not entry.whole,
        "pending without users": not entry.state.ending or entry.used,
        "pending and outcome differ": entry.state.ending == (entry.outcome is not None),
        "consumed but not ending": entry.state.ending or not entry.spent,
        "negative holds": entry.holds >= 0,
        "unscheduled deadline": entry.due() is None
        or (entry.scheduled is not None and entry.scheduled <= (entry.due() or 0.0)),
    }
