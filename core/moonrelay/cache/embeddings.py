"""EmbeddingCache: what an encoder made of a prompt, kept for every process of a deployment.

Owns the order in which tiers are asked, and that a request never fails of its cache: what is damaged, foreign or not
reachable is a miss and an event. Encoding itself, and what it raises, is the caller's. Importing it loads no torch.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self, TypeVar

from moonrelay.cache.counters import CacheCounters, Tally
from moonrelay.cache.entry import VERSION, Packed, Unusable, pack
from moonrelay.cache.flight import Lead, SingleFlight
from moonrelay.cache.keys import CacheKey
from moonrelay.cache.memory import MemoryTier
from moonrelay.cache.shared import SharedStore
from moonrelay.cache.wire import check_prefix
from moonrelay.clock import Clock, Deadline
from moonrelay.config import StoreConfig
from moonrelay.errors import ClosedError, ConfigError, MoonrelayError, UnsupportedTensor
from moonrelay.events import Event, EventBus, EventName, Scalar
from moonrelay.relay import parse_url
from moonrelay.relay.base import Relay
from moonrelay.relay.memory import MemoryRelay

if TYPE_CHECKING:
    import torch

#: Longest time that one read of an entry may take, where ``wait_s`` allows as much.
READ_S: Final = 3.0
#: Longest time that moving an ageing entry up may take.
PROMOTE_S: Final = 1.0
CLEAR_S: Final = 60.0
#: After so many encodings of others that left nothing, a call encodes without waiting for its turn: what cannot be kept
#: would have everybody stand in line.
MAX_TURNS: Final = 4
#: Relays whose capacity payloads and caches share, by their configuration.
_EMBEDDED: Final = ("local", "memory")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9._-]{1,40}")

_D = TypeVar("_D")


class _Settings(Protocol):
    @property
    def role(self) -> str: ...
    @property
    def store(self) -> StoreConfig: ...


class Connector(Protocol):
    """What a cache needs of a `DiffusionConnector`."""

    @property
    def settings(self) -> _Settings:
        """Its role, and its store's configuration."""
        ...

    @property
    def clock(self) -> Clock:
        """For all waits."""
        ...

    @property
    def events(self) -> EventBus:
        """Who is told."""
        ...

    def store(self) -> Relay:
        """Return the started relay."""
        ...


@dataclass(frozen=True, slots=True)
class _Ask:
    """One call: for what, and for whom."""

    digest: str
    label: Mapping[str, str]
    device: str | torch.device | None
    request_id: str | None
    started_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A hit; its tree may be ``None``."""

    tree: object


class _Store:
    """The shared tier of one cache: its entries, its flights."""

    def __init__(self, entries: SharedStore, flight: SingleFlight) -> None:
        self.entries = entries
        self.flight = flight


class EmbeddingCache:
    """Gives what was encoded before, here or in any process of the deployment, bit for bit; encodes the rest once.

    Asks this process's memory, then the relay, then waits for whoever encodes the same now, then encodes. A hit is the
    caller's own, in fresh memory. Nothing that is wrong with an entry or with the store fails a call: it is told as an
    event, and the call encodes. After trouble the store is left alone for ``retry_s``.

    Args:
        conn: A `DiffusionConnector`; the cache uses its relay, whatever its transfer mode, its clock and its events.
            Close the cache first.
        capacity_bytes: Bound of the entries in this process's memory.
        store_bytes: Bound of the entries in the relay, ``capacity_bytes`` by default, and at most half of an embedded
            relay's capacity. What the first process says stands until `clear`.
        shared: Whether the relay is used at all.
        wait_s: How long a call waits for somebody else's encoding; also bounds each use of the store.
        namespace: Word for this cache in the relay's keys; caches with the same word share entries.
        retry_s: How long the store is left alone after trouble.
        dead_after_s: After how long without a sign of life whoever encodes is taken for dead.

    Raises:
        ConfigError: An argument is wrong; the message names it.

    Threads: all methods from any thread. ``encode`` must not ask the cache for the very key that it encodes.
    """

    #: Word for what is kept, in events.
    kind: ClassVar[str] = "embedding"

    def __init__(
        self,
        conn: Connector,
        capacity_bytes: int = 2 << 30,
        *,
        store_bytes: int | None = None,
        shared: bool = True,
        wait_s: float = 10.0,
        namespace: str = "embeddings",
        retry_s: float = 5.0,
        dead_after_s: float = 3.0,
    ) -> None:
        for name, value in (("wait_s", wait_s), ("retry_s", retry_s), ("dead_after_s", dead_after_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                message = f"{name}={value!r} must be a number of seconds above 0"
                raise ConfigError(message, field=name)
        if store_bytes is not None and (type(store_bytes) is not int or store_bytes < 0):
            message = f"store_bytes={store_bytes!r} must be a number of bytes, 0 or more"
            raise ConfigError(message, field="store_bytes")
        self._conn = conn
        self._clock = conn.clock
        self._memory = MemoryTier(capacity_bytes, on_evicted=self._memory_evicted)
        self._store_bytes = capacity_bytes if store_bytes is None else store_bytes
        self._use_shared = shared and self._store_bytes > 0
        self._wait_s = wait_s
        self._retry_s = retry_s
        self._dead_after_s = dead_after_s
        self._prefix = shared_prefix(conn.settings.store.namespace, namespace)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._store: _Store | None = None
        self._rest_until: float | None = None
        self._closed = False
        relay = MemoryRelay(StoreConfig())
        relay.start()
        self._alone = SingleFlight(relay, "alone", self._clock, beat_s=dead_after_s / 6, dead_after_s=dead_after_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get_or_encode(
        self,
        key: CacheKey | None,
        encode: Callable[[], object],
        *,
        device: str | torch.device | None = None,
        request_id: str | None = None,
    ) -> object:
        """Return what ``encode`` gives for ``key``, made now or earlier, here or elsewhere.

        Args:
            key: An `EmbeddingKey`, or anything with a ``digest`` and a ``label``; ``None`` for no caching.
            encode: Called without arguments where nothing is known yet. Its result may be changed afterwards: what is
                kept is a snapshot.
            device: Where the tensors shall be. ``None``: on the kind of device where they were encoded; host memory
                where this process has no such device.
            request_id: For the events.

        Returns:
            The tree of tensors and plain values, the caller's own.

        Raises:
            What ``encode`` raises, unchanged; the next caller then tries itself. Nothing because of the cache.
            ConfigError: The key's digest is none.

        Blocks: while somebody else encodes, for ``wait_s`` at most, and for the store's reads and writes, each bounded
        by ``wait_s`` too.
        """
        if key is None or self._closed:
            self._tally.add(encodes=1)
            return _placed(encode(), device)
        ask = self._ask(key, device, request_id)
        found = self._find(ask)
        if found is not None:
            return found.tree
        turn = self._take_turn(ask)
        if isinstance(turn, _Found):
            return turn.tree
        if turn is None:
            return self._encode(ask, encode)
        with turn:
            # Whoever led before may have stored it between our look and our turn.
            found = self._find(ask)
            return self._encode(ask, encode) if found is None else found.tree

    def get(
        self,
        key: CacheKey | None,
        default: _D | None = None,
        *,
        device: str | torch.device | None = None,
        request_id: str | None = None,
    ) -> object | _D:
        """Return what is kept for ``key``, else ``default``. Never encodes, waits for nobody.

        Args:
            key: As of `get_or_encode`; ``None`` gives ``default``.
            default: Something of one's own where a kept ``None`` must be told from nothing.
            device: As of `get_or_encode`.
            request_id: For the events.

        Blocks: for one read of the store.
        """
        if key is None or self._closed:
            return default
        ask = self._ask(key, device, request_id)
        found = self._find(ask)
        if found is None:
            self._missed(ask)
            return default
        return found.tree

    def holds(self, keys: Iterable[CacheKey | None]) -> bool:
        """Return whether the relay has an entry for every key, for whoever sends work past the encoder.

        It is not read, and may be gone a moment later; nothing is counted as a hit or a miss. ``False`` for a key that
        is ``None``, without a shared tier, and when the store does not serve.

        Blocks: for one small read per key.
        """
        asks = [None if key is None or self._closed else self._ask(key, None, None) for key in keys]
        store = self._serving() if all(asks) else None
        if store is None:
            return False
        try:
            return all(ask is not None and store.entries.contains(ask.digest, self._soon(READ_S)) for ask in asks)
        except MoonrelayError as exc:
            self._store_fails(exc, None)
            return False

    @property
    def shares(self) -> bool:
        """Whether there is a shared tier that serves now."""
        return self._serving() is not None

    def put(self, key: CacheKey | None, tree: object, *, request_id: str | None = None) -> bool:
        """Keep a tree that was encoded elsewhere; a snapshot.

        Returns:
            Whether it is kept, in memory at least. ``False`` without a key, or where it cannot be carried bit for bit
            (an event says why).

        Blocks: for one write of the store, bounded by ``wait_s``.
        """
        if key is None or self._closed:
            return False
        return self._keep(self._ask(key, None, request_id), tree)

    def counters(self) -> CacheCounters:
        """Return this object's numbers."""
        return self._tally.read(bytes_memory=self._memory.nbytes)

    def clear(self) -> None:
        """Forget everything, in memory and in the relay, for all processes.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer; memory is cleared.

        Blocks: until the relay's objects are removed, a minute at most.
        """
        self._memory.clear()
        if self._use_shared and not self._closed:
            self._opened().entries.clear(Deadline(CLEAR_S, self._clock))

    def close(self) -> None:
        """Let waiters go, end threads, free memory. What is in the relay stays. Idempotent.

        Calls that are under way, and later ones, encode.
        """
        with self._lock:
            self._closed = True
        with self._opening:
            store, self._store = self._store, None
        if store is not None:
            store.flight.close()
        self._alone.close()
        self._memory.clear()

    def _ask(self, key: CacheKey, device: str | torch.device | None, request_id: str | None) -> _Ask:
        digest = key.digest
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            message = f"key.digest={digest!r:.80} must be 64 lower-case hexadecimal digits"
            raise ConfigError(message, field="key")
        return _Ask(digest, key.label, device, request_id, self._clock.monotonic())

    # -- finding ------------------------------------------------------------------------------------------------------

    def _find(self, ask: _Ask) -> _Found | None:
        """Return a hit of either tier, counted and told."""
        return self._find_in_memory(ask) or self._find_in_store(ask)

    def _find_in_memory(self, ask: _Ask) -> _Found | None:
        packed = self._memory.get(ask.digest)
        if packed is None:
            return None
        try:
            tree = packed.tree(ask.device)
        except Unusable as exc:
            self._memory.remove(ask.digest)
            self._trouble(str(exc), path="memory", code="integrity_error", ask=ask)
            return None
        self._hit(ask, "memory", packed.nbytes)
        return _Found(tree)

    def _find_in_store(self, ask: _Ask) -> _Found | None:
        store = self._serving()
        if store is None:
            return None
        try:
            hit = store.entries.get(ask.digest, self._soon(READ_S))
            if hit is None:
                return None
            self._tally.add(bytes_store_read=len(hit.data))
            packed = Packed(ask.digest, hit.data)
            try:
                tree = packed.tree(ask.device)
            except Unusable as exc:
                self._trouble(str(exc), path="store", code="integrity_error", ask=ask)
                store.entries.forget(ask.digest, self._soon(READ_S))
                return None
        except MoonrelayError as exc:
            self._store_fails(exc, ask)
            return None
        self._memory.put(ask.digest, packed)
        self._hit(ask, "store", packed.nbytes)
        if hit.ageing:
            store.entries.promote(ask.digest, hit, ask.label, self._soon(PROMOTE_S))
        return _Found(tree)

    # -- taking turns -------------------------------------------------------------------------------------------------

    def _take_turn(self, ask: _Ask) -> _Found | Lead | None:
        """Return the right to encode, or what somebody else encoded meanwhile; ``None``: encode without that right."""
        store = self._serving()
        if store is not None:
            try:
                return self._queue(ask, store.flight)
            except MoonrelayError as exc:
                self._store_fails(exc, ask)
        try:
            return self._queue(ask, self._alone)
        except MoonrelayError:
            return None  # closed

    def _queue(self, ask: _Ask, flight: SingleFlight) -> _Found | Lead | None:
        deadline = Deadline(self._wait_s, self._clock)
        since_s: float | None = None
        for _ in range(MAX_TURNS):
            entered_s = self._clock.monotonic()
            turn = flight.enter(ask.digest, deadline)
            if isinstance(turn, Lead):
                if turn.epoch > 0:
                    since_s = entered_s if since_s is None else since_s
                    self._tally.add(takeovers=1)
                if since_s is not None:
                    self._waited(ask, since_s, "took over" if turn.epoch > 0 else "nothing was stored")
                return turn
            since_s = entered_s if since_s is None else since_s
            found = self._find(ask) if turn.finished else None
            if found is not None:
                self._waited(ask, since_s, "encoded elsewhere")
                return found
            if not turn.finished or deadline.expired:
                self._waited(ask, since_s, f"not encoded within {self._wait_s} s")
                return None
        self._waited(ask, since_s or self._clock.monotonic(), "nothing was stored, again and again")
        return None

    # -- encoding and keeping -----------------------------------------------------------------------------------------

    def _encode(self, ask: _Ask, encode: Callable[[], object]) -> object:
        self._missed(ask)
        self._tally.add(encodes=1)
        tree = encode()
        self._keep(ask, tree)
        return _placed(tree, ask.device)

    def _keep(self, ask: _Ask, tree: object) -> bool:
        try:
            packed = pack(ask.digest, tree)
        except UnsupportedTensor as exc:
            self._trouble(f"not kept: {exc}", path="memory", code=exc.code, ask=ask)
            return False
        kept = not self._closed and self._memory.put(ask.digest, packed)
        store = self._serving()
        if store is None:
            return kept
        started_s = self._clock.monotonic()
        try:
            stored = store.entries.put(
                ask.digest,
                packed.parts,
                packed.nbytes,
                ask.label,
                self._soon(self._conn.settings.store.put_timeout_s),
                on_quiet=packed.keep,
            )
        except MoonrelayError as exc:
            self._store_fails(exc, ask)
            return kept
        if stored:
            self._tally.add(bytes_store_written=packed.nbytes)
            self._tell(
                "cache_stored",
                ask,
                path="store",
                nbytes=packed.nbytes,
                duration_s=self._clock.monotonic() - started_s,
            )
        return kept or stored

    # -- the store's state --------------------------------------------------------------------------------------------

    def _serving(self) -> _Store | None:
        """Return the shared tier, opened on first use; ``None`` where there is none, or it rests after trouble."""
        with self._lock:
            resting = self._rest_until is not None and self._clock.monotonic() < self._rest_until
            if not self._use_shared or self._closed or resting:
                return None
        try:
            return self._opened()
        except MoonrelayError as exc:
            self._store_fails(exc, None)
            return None

    def _opened(self) -> _Store:
        """Return the shared tier. Blocks: seconds at most, when first called.

        Raises:
            ClosedError: The cache is closed, or the connector.
            PluginError, ConfigError, PeerLost: The store cannot be reached.
        """
        with self._opening:
            if self._closed:
                message = "the cache is closed"
                raise ClosedError(message)
            if self._store is None:
                relay = self._conn.store()
                capacity = self._store_bytes
                if parse_url(relay.url).scheme in _EMBEDDED:
                    capacity = min(capacity, max(1, self._conn.settings.store.capacity_bytes // 2))
                self._store = _Store(
                    SharedStore(
                        relay,
                        self._prefix,
                        capacity,
                        self._clock,
                        on_trouble=self._entry_fails,
                        on_evicted=self._store_evicted,
                    ),
                    SingleFlight(
                        relay,
                        self._prefix,
                        self._clock,
                        beat_s=self._dead_after_s / 6,
                        dead_after_s=self._dead_after_s,
                    ),
                )
            return self._store

    def _soon(self, at_most_s: float) -> Deadline:
        return Deadline(min(at_most_s, self._wait_s), self._clock)

    def _store_fails(self, error: MoonrelayError, ask: _Ask | None) -> None:
        """Leave the store alone for a while, and say so once."""
        with self._lock:
            now = self._clock.monotonic()
            resting = self._rest_until is not None and now < self._rest_until
            self._rest_until = now + self._retry_s
            if resting or self._closed:
                return
        self._trouble(f"the store is left alone for {self._retry_s} s: {error}", path="store", code=error.code, ask=ask)

    def _entry_fails(self, reason: str) -> None:
        self._trouble(reason, path="store")

    # -- counting and telling -----------------------------------------------------------------------------------------

    def _hit(self, ask: _Ask, path: str, nbytes: int) -> None:
        self._tally.add(**{f"hits_{path}": 1})
        self._tell("cache_hit", ask, path=path, nbytes=nbytes, duration_s=self._clock.monotonic() - ask.started_s)

    def _missed(self, ask: _Ask) -> None:
        self._tally.add(misses=1)
        self._tell("cache_miss", ask)

    def _waited(self, ask: _Ask, since_s: float, reason: str) -> None:
        self._tally.add(waits=1)
        self._tell("cache_wait", ask, duration_s=self._clock.monotonic() - since_s, reason=reason)

    def _trouble(self, reason: str, *, path: str, code: str | None = None, ask: _Ask | None = None) -> None:
        self._tally.add(trouble=1)
        self._tell("cache_trouble", ask, path=path, reason=reason, code=code)

    def _memory_evicted(self, nbytes: int) -> None:
        self._tally.add(evicted=1)
        self._tell("cache_evicted", None, path="memory", nbytes=nbytes, extra={"entries": 1})

    def _store_evicted(self, entries: int, nbytes: int) -> None:
        self._tally.add(evicted=entries)
        self._tell("cache_evicted", None, path="store", nbytes=nbytes, extra={"entries": entries})

    def _tell(
        self,
        name: EventName,
        ask: _Ask | None,
        *,
        path: str | None = None,
        nbytes: int | None = None,
        duration_s: float | None = None,
        reason: str | None = None,
        code: str | None = None,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        events = self._conn.events
        if not events.heeds(name):
            return
        events.emit(
            Event(
                name=name,
                request_id=ask.request_id if ask else None,
                kind=self.kind,
                stage=self._conn.settings.role,
                path=path,
                nbytes=nbytes,
                duration_s=duration_s,
                reason=reason,
                code=code,
                extra={**(ask.label if ask else {}), **(extra or {})},
            )
        )


def shared_prefix(store_namespace: str, namespace: str) -> str:
    """Return under which prefix a cache's entries stand in a relay.

    Raises:
        ConfigError: ``namespace`` is no word of at most 40 characters, or both together are too long.
    """
    if type(namespace) is not str or not _NAMESPACE.fullmatch(namespace):
        message = f"namespace={namespace!r} must be a word of at most 40 letters, digits, '.', '_' and '-'"
        raise ConfigError(message, field="namespace")
    # The entry's version is in the keys, so that two versions side by side do not drop each other's entries.
    return check_prefix(f"{store_namespace}/{namespace}.{VERSION}")


def _placed(tree: object, device: str | torch.device | None) -> object:
    """Return what was encoded just now, on the device that was asked for."""
    if device is None:
        return tree
    if type(tree) in (list, tuple):
        parts = (_placed(part, device) for part in tree)  # type: ignore[attr-defined]
        return list(parts) if type(tree) is list else tuple(parts)
    if type(tree) is dict:
        return {name: _placed(part, device) for name, part in tree.items()}
    import torch

    return tree.to(device) if isinstance(tree, torch.Tensor) else tree
