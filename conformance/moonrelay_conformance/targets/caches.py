"""Targets for the caches over a relay: `CacheTarget` for embeddings, `CheckpointTarget` for step checkpoints.

Owns the protocol of both, and the targets of what the core has over an installed relay. What is tested is the cache;
the relay under it decides what its name is, how its store is started and how it is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.base import Target
from moonrelay_conformance.targets.parts import RelayGround, RelayTarget, declared

if TYPE_CHECKING:
    from moonrelay import DiffusionConnector
    from moonrelay.cache.checkpoint import Checkpointer, StoreConnector
    from moonrelay.cache.embeddings import Connector, EmbeddingCache
    from moonrelay.cache.keys import EmbeddingKey


class OverARelay(Target):
    """Something that keeps what it is given in a relay.

    Args:
        relay: The relay under it; an installed one by its scheme.
    """

    def __init__(self, relay: RelayTarget | str) -> None:
        if isinstance(relay, str):
            from moonrelay_conformance.targets.relays import target_for

            relay = target_for(relay)
        self.relay = relay
        self.name = relay.name
        self.recipe = (f"{type(self).__module__}:{type(self).__qualname__}", relay.name)

    def capabilities(self) -> Mapping[Capability, Support]:
        """Return what the relay can do of what this needs: reach other processes, list keys."""
        return declared(*(one for one in (Capability.PROCESSES, Capability.LISTING) if self.relay.supports(one)))

    def distribution(self) -> str:
        return self.relay.distribution()

    def host(self) -> str:
        return self.relay.host()

    def ground(self, folder: Path, *, capacity_bytes: int) -> AbstractContextManager[RelayGround]:
        """Start, or name, a store of about ``capacity_bytes``."""
        return self.relay.ground(folder, capacity_bytes=capacity_bytes)

    def connector(self, url: str, *, capacity_bytes: int, namespace: str) -> DiffusionConnector:
        """Return a connector of that store, as a process of its own would have."""
        from moonrelay import DiffusionConnector

        store = {"url": url, "capacity_bytes": capacity_bytes, "namespace": namespace}
        return DiffusionConnector("conformance", "store", {"engine": "memory"}, store)


class CacheTarget(OverARelay):
    """A cache of embeddings under test: `moonrelay.cache.embeddings.EmbeddingCache` over a relay."""

    kind: ClassVar[str] = "cache"

    def make(self, conn: Connector, capacity_bytes: int, **settings: Any) -> EmbeddingCache:
        """Return a new cache. Importable names only: it is also made in processes of its own."""
        from moonrelay.cache.embeddings import EmbeddingCache

        return EmbeddingCache(conn, capacity_bytes, **settings)

    def key(self, **fields: Any) -> EmbeddingKey:
        """Return the key of these fields; see `moonrelay.cache.keys.EmbeddingKey`."""
        from moonrelay.cache.keys import EmbeddingKey

        return EmbeddingKey(**fields)


class CheckpointTarget(OverARelay):
    """Step checkpoints under test: `moonrelay.cache.checkpoint.Checkpointer` over a relay."""

    kind: ClassVar[str] = "checkpoint"

    def make(self, conn: StoreConnector, **settings: Any) -> Checkpointer:
        """Return a new checkpointer. Importable names only: it is also made in processes of its own."""
        from moonrelay.cache.checkpoint import Checkpointer

        return Checkpointer(conn, **settings)
