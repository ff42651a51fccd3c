"""An embedding cache as a host's settings ask for one: ``true``, or an object with a few keys.

Owns what those keys mean, for every adapter alike, and the relay of a cache that has one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.config import unknown_key
from moonrelay.connector.facade import DiffusionConnector
from moonrelay.connector.settings import ConnectorSettings
from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    from moonrelay.clock import Clock
    from moonrelay.events import EventBus
    from moonrelay.relay.base import Relay

DEFAULT_BYTES: Final = 2 << 30
_KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "bytes": (int,),
    "store": (str,),
    "store_bytes": (int,),
    "shared": (bool,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoice:
    """What somebody wants of an embedding cache.

    Attributes:
        capacity_bytes: Bound in this process's memory (``bytes``).
        store: URL of the relay; ``None`` for the connector's.
        store_bytes: Bound in the relay; as in memory where ``None``.
        shared: Whether entries are kept in the relay, for other processes and the next start. ``None``: where somebody
            named a store, or payloads go through one.
    """

    capacity_bytes: int = DEFAULT_BYTES
    store: str | None = None
    store_bytes: int | None = None
    shared: bool | None = None

    @classmethod
    def parse(cls, given: object, name: str = "embedding_cache") -> CacheChoice | None:
        """Read the setting.

        Args:
            given: ``True``, or a mapping with any of ``bytes``, ``store``, ``store_bytes`` and ``shared``. ``False``
                and ``None`` are no cache.
            name: The setting's, for messages.

        Raises:
            ConfigError: Something else, an unknown key, or a wrong value; names it.
        """
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        if not isinstance(given, Mapping):
            message = f"{name}={given!r} must be true, or an object with {', '.join(_KEYS)}"
            raise ConfigError(message, field=name)
        for key, value in given.items():
            if key not in _KEYS:
                raise ConfigError(unknown_key(key, _KEYS, name), field=str(key))
            wanted = _KEYS[key]
            if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
                message = f"{name}.{key}={value!r} must be {wanted[0].__name__}"
                raise ConfigError(message, field=key)
            if isinstance(value, int) and value < (key == "bytes"):
                message = f"{name}.{key}={value!r} must be a number of bytes, {int(key == 'bytes')} or more"
                raise ConfigError(message, field=key)
        found: dict[str, Any] = dict(given)
        if found.get("shared") is False and found.get("store"):
            message = f"{name}.shared is false, so {name}.store would not be used; leave one of them out"
            raise ConfigError(message, field="shared")
        return cls(capacity_bytes=found.pop("bytes", DEFAULT_BYTES), **found)


class ChosenCache:
    """A cache as it was chosen. Close it before the connector.

    Args:
        choice: The choice.
        connector: The process's own; its events tell of the cache.

    Raises:
        ConfigError: The store's URL is wrong.

    Attributes:
        cache: The cache.

    Threads: any.
    """

    def __init__(self, choice: CacheChoice, connector: DiffusionConnector) -> None:
        settings = connector.settings
        self._beside: DiffusionConnector | None = None
        at: DiffusionConnector | _Beside = connector
        if choice.store is not None:
            # Options are of the other store's kind.
            store = replace(settings.store, url=choice.store, options={})
            self._beside = DiffusionConnector(
                role=settings.role, transfer_mode="store", store_config=store, clock=connector.clock
            )
            at = _Beside(self._beside, connector.events)
        named = settings.relays or settings.store.url is not None or choice.store is not None
        self.cache = EmbeddingCache(
            at,
            choice.capacity_bytes,
            store_bytes=choice.store_bytes,
            shared=named if choice.shared is None else choice.shared,
        )

    def close(self) -> None:
        """End the cache, and the relay that is its own; what is in the relay stays. Idempotent."""
        self.cache.close()
        if self._beside is not None:
            self._beside.close()


class _Beside:
    """Another connector's relay, and the events of the process's own."""

    def __init__(self, beside: DiffusionConnector, events: EventBus) -> None:
        self._beside = beside
        self._events = events

    @property
    def settings(self) -> ConnectorSettings:
        return self._beside.settings

    @property
    def clock(self) -> Clock:
        return self._beside.clock

    @property
    def events(self) -> EventBus:
        return self._events

    def store(self) -> Relay:
        return self._beside.store()
