"""Removal of payloads that nobody will read, and of tombstones that nobody needs any more.

Owns when a payload counts as an orphan. It is reckoned on this process's monotonic clock from the first time that this
sweeper saw the payload, or the newest chunk of an unfinished one (or from its age, where the store knows that without
comparing clocks of two hosts), so a payload lives at least as long as its end record says.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import IntegrityError
from moonrelay.relay.base import Relay
from moonrelay.relay.records import RelayedPayload, payload_prefix

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sight:
    """What this sweeper knows of one payload; times on its own clock."""

    first_s: float
    ended_s: float | None = None
    ttl_s: float | None = None
    tomb_s: float | None = None
    claims: set[str] = field(default_factory=set)
    claimed_s: float = float("-inf")
    chunks: set[str] = field(default_factory=set)


class Sweeper:
    """Removes orphans under a namespace. One per process is enough; several sweepers of one store do no harm.

    Args:
        relay: A started relay that can list its keys.
        namespace: First component of every payload prefix that this sweeper cares for.
        clock: All ages are reckoned on it.
        default_ttl_s: For payloads without an end record, from the last chunk that was stored: their producer died
            while it stored them. A producer that takes longer for one chunk loses what it has stored.
        tombstone_ttl_s: How long a tombstone stays.
        claim_grace_s: A payload past its ttl is left this long after a new claim record was seen.
        timeout_s: Bound of one sweep.

    Threads: one at a time.
    """

    def __init__(
        self,
        relay: Relay,
        namespace: str,
        clock: Clock,
        *,
        default_ttl_s: float = 600.0,
        tombstone_ttl_s: float = 600.0,
        claim_grace_s: float = 60.0,
        timeout_s: float = 30.0,
    ) -> None:
        self._relay = relay
        self._namespace = namespace
        self._clock = clock
        self._default_ttl_s = default_ttl_s
        self._tombstone_ttl_s = tombstone_ttl_s
        self._claim_grace_s = claim_grace_s
        self._timeout_s = timeout_s
        self._sights: dict[str, _Sight] = {}

    def sweep(self, now: float | None = None) -> int:
        """Look once, and remove what is overdue.

        Args:
            now: The time on the sweeper's clock; by default the clock is read.

        Blocks: up to ``timeout_s``.

        Returns:
            How many keys were removed.

        Raises:
            TransferFailed, TransferTimeout, PeerLost: The store does not answer; the next sweep goes on.
        """
        now = self._clock.monotonic() if now is None else now
        deadline = Deadline(self._timeout_s, self._clock)
        payloads: dict[str, list[str]] = {}
        for key in self._relay.keys(f"{self._namespace}/", deadline):
            split = payload_prefix(key)
            if split is not None:
                payloads.setdefault(split[0], []).append(split[1])
        self._sights = {prefix: sight for prefix, sight in self._sights.items() if prefix in payloads}
        removed = 0
        for prefix, names in payloads.items():
            self._look(prefix, names, now, deadline)
            gone = self._overdue(prefix, names, now)
            if not gone:
                continue
            if "tomb" not in names:
                payload = RelayedPayload(self._relay, prefix, "sweeper")
                payload.tombstone("its time ran out in the store", deadline, kind="expired")
            # Ascending epochs, see RelayedPayload.remove_all; the tombstone goes last and only by itself.
            for name in sorted(gone, key=_order):
                self._relay.remove([f"{prefix}/{name}"], deadline)
            removed += len(gone)
            _log.info("swept %d keys of %s", len(gone), prefix)
        return removed

    def _look(self, prefix: str, names: list[str], now: float, deadline: Deadline) -> None:
        sight = self._sights.get(prefix)
        if sight is None:
            sight = self._sights[prefix] = _Sight(first_s=now - self._youngest_s(prefix, names))
        if "end" in names and sight.ended_s is None:
            payload = RelayedPayload(self._relay, prefix, "sweeper")
            try:
                end = payload.get_end(deadline)
            except IntegrityError:
                _log.warning("the end record of %s is not readable; its payload is treated as unfinished", prefix)
                end = None
            if end is not None:
                sight.ended_s = now - (self._relay.age_s(f"{prefix}/end") or 0.0)
                sight.ttl_s = end.ttl_s
        chunks = {name for name in names if name.startswith("c/")}
        if not chunks <= sight.chunks:
            # Its producer is still at work: the time of an unfinished payload runs from the last chunk that it stored.
            fresh = [name for name in names if name in chunks - sight.chunks]
            sight.first_s = max(sight.first_s, now - self._youngest_s(prefix, fresh))
            sight.chunks |= chunks
        if "tomb" in names and sight.tomb_s is None:
            sight.tomb_s = now - (self._relay.age_s(f"{prefix}/tomb") or 0.0)
        claims = {name for name in names if name.startswith("claim/")}
        if not claims <= sight.claims:
            sight.claimed_s = now - min(self._relay.age_s(f"{prefix}/{name}") or 0.0 for name in claims - sight.claims)
            sight.claims |= claims

    def _youngest_s(self, prefix: str, names: list[str]) -> float:
        return min(self._relay.age_s(f"{prefix}/{name}") or 0.0 for name in names)

    def _overdue(self, prefix: str, names: list[str], now: float) -> list[str]:
        """Return the names that should go now. Pure."""
        sight = self._sights[prefix]
        if sight.tomb_s is not None:
            # Buried: what is left beside the tombstone was created late, and nobody may read it.
            rest = [name for name in names if name != "tomb"]
            return rest or (["tomb"] if now - sight.tomb_s >= self._tombstone_ttl_s else [])
        since_s, ttl_s = (sight.first_s, self._default_ttl_s) if sight.ended_s is None else (sight.ended_s, sight.ttl_s)
        if ttl_s is None or now - since_s < ttl_s or now - sight.claimed_s < self._claim_grace_s:
            return []
        return names


def _order(name: str) -> tuple[str, list[int]]:
    kind, *numbers = name.split("/")
    return kind, [int(number) for number in numbers]
