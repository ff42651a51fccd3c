"""The suite of caches: `CacheConformance`, assembled from the modules beside it.

All tests of a run share one store and two connectors; each has caches with a word of its own, and clears them.
"""

from __future__ import annotations

from moonrelay_conformance.suites.cache_bounds import CacheBounds
from moonrelay_conformance.suites.cache_damage import CacheDamage
from moonrelay_conformance.suites.cache_flights import CacheFlights
from moonrelay_conformance.suites.cache_hits import CacheHits
from moonrelay_conformance.suites.cache_keys import CacheKeys


class CacheConformance(CacheKeys, CacheHits, CacheDamage, CacheFlights, CacheBounds):
    """What a cache of embeddings must do over every relay. Subclass it and set `target`."""
