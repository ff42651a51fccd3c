"""Removal of payloads that nobody will read."""

from __future__ import annotations

from moonrelay.clock import Clock
from moonrelay.relay.base import Relay


class Sweeper:
    """Removes orphans under a namespace. One per process; several sweepers of one store do no harm.

    Args:
        relay: A started relay.
        namespace: First component of every payload prefix that this sweeper cares for.
        clock: All ages are reckoned on it.
        default_ttl_s: For payloads without an end record.
        tombstone_ttl_s: How long a tombstone stays.
        claim_grace_s: A payload past its ttl is left this long after the last claim was seen.
        timeout_s: Bound of one sweep.
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
    ) -> None: ...

    def sweep(self, now: float | None = None) -> int:
        """Look once; return how many keys were removed. Blocks: up to ``timeout_s``."""
        raise NotImplementedError
