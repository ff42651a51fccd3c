"""The directory of keys: which payload stands under ``(from_stage, to_stage, key)``, told by the store itself.

Owns the records' form, their names and their removal; no payload's bytes pass through it. The host's consumers know a
key and nothing else, so a producer leaves a small record in the store that all of them reach, and whoever ends the
payload takes it away. Names, below ``<namespace>.keys``::

    r/<digest of the edge and key>     Record: the handle itself, or how large it is
    h/<generation>                     the handle, where it is too large for a record

A record is created, never changed; a later payload under the same key replaces it. A generation is one payload.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import msgspec

from moonrelay.clock import Clock, Deadline
from moonrelay.config import StoreConfig
from moonrelay.errors import ClosedError, IntegrityError, WireError
from moonrelay.handle import MAX_HANDLE_BYTES, Extent, StageHandle
from moonrelay.plugins import RELAYS, Registry
from moonrelay.relay import parse_url
from moonrelay.relay.base import MAX_VALUE_BYTES, Relay

logger = logging.getLogger(__name__)

#: Largest handle that stands in the record itself; the rest of the value is the record's own fields.
INLINE_BYTES: Final = MAX_VALUE_BYTES - 256
#: How often a record of another payload is replaced before its writer gives up.
_TURNS: Final = 8
_ANOTHERS: Final = (
    "%s stood for a payload of another producer in %s and is replaced: a stage was started again, or two deployments "
    "share the namespace %s; give each of them one of its own"
)
#: How long after its payload's life a record may stay, in seconds.
GRACE_S: Final = 30.0
#: How long a record stands before its payload's owner is asked after, in seconds.
ASK_AFTER_S: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Edge:
    """One key between two stages."""

    from_stage: str
    to_stage: str
    key: str

    @cached_property
    def digest(self) -> str:
        """A name for it that every store accepts."""
        raw = msgspec.msgpack.encode([part.encode("utf-8", "surrogatepass") for part in self._parts])
        return hashlib.blake2b(raw, digest_size=16).hexdigest()

    @property
    def _parts(self) -> tuple[str, str, str]:
        return (self.from_stage, self.to_stage, self.key)

    def __str__(self) -> str:
        return f"{self.key} ({self.from_stage} to {self.to_stage})"


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What stands under a key.

    Attributes:
        generation: The payload's id.
        ttl_s: How long the payload is kept; ``None`` until released.
        handle: Its handle, which names the owner's control address; ``None`` where it is an object of its own.
        nbytes: Size of that object.
        version: Of this form; another one is no record of ours.
    """

    generation: str
    ttl_s: float | None = None
    handle: bytes | None = None
    nbytes: int = 0
    version: int = 1


def decode_record(raw: bytes) -> Record:
    """Return a record.

    Raises:
        WireError: The bytes are none, or of another version.
    """
    try:
        record = msgspec.msgpack.decode(raw, type=Record)
    except (msgspec.MsgspecError, ValueError) as exc:
        message = "the directory's record is malformed"
        raise WireError(message) from exc
    if record.version != 1:
        message = f"the directory's record has version {record.version}, this side knows 1; update the older side"
        raise WireError(message)
    return record


class KeyDirectory:
    """Records of keys in a relay of its own connection, so that it outlives the connector's at the end.

    Args:
        config: The store.
        clock: All ages are reckoned on it.
        default_ttl_s: Life of a handle's object without a record.
        grace_s: How long a record may outlive its payload.

    Threads: any. All methods block as the relay does, until their deadline, and raise its errors.
    """

    def __init__(
        self, config: StoreConfig, clock: Clock, *, default_ttl_s: float = 600.0, grace_s: float = GRACE_S
    ) -> None:
        self._clock = clock
        self._prefix = f"{config.namespace}.keys"
        self._default_ttl_s = default_ttl_s
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._started = False
        #: Whether it was closed.
        self.closed = False
        self._relay = _relay_of(config)
        self._sights: dict[str, _Sight] = {}

    @property
    def url(self) -> str:
        """The store's address."""
        return self._relay.url

    def start(self) -> None:
        """Connect. Idempotent. Blocks: seconds at most. Raises as `Relay.start`."""
        if self._started:
            return
        with self._lock:
            if self.closed:
                message = "the directory is closed"
                raise ClosedError(message)
            if not self._started:
                self._relay.start()
                self._started = True

    def write(self, edge: Edge, handle: StageHandle, deadline: Deadline, *, instead_of: str | None = None) -> None:
        """Let ``edge`` stand for ``handle``, instead of whatever it stood for; another producer's payload is told.

        Args:
            edge: The key.
            handle: The payload.
            deadline: Bound of the attempt.
            instead_of: The payload of this very producer that may stand there.

        Raises:
            CapacityError, TransferFailed, TransferTimeout, PeerLost: It may not stand.
        """
        self.start()
        raw = handle.to_bytes()
        inline = len(raw) <= INLINE_BYTES
        if not inline:
            self._put_handle(handle.id, raw, deadline)
        record = Record(
            generation=handle.id,
            ttl_s=handle.lease.ttl_s,
            handle=raw if inline else None,
            nbytes=0 if inline else len(raw),
        )
        value = msgspec.msgpack.encode(record)
        key = self._record_key(edge.digest)
        for _ in range(_TURNS):
            standing = self._relay.put_if_absent(key, value, deadline)
            if standing == value:
                return
            replaced = _or_none(standing)
            if replaced is not None and replaced.generation not in (instead_of, handle.id):
                logger.warning(_ANOTHERS, edge, self.url, self._prefix.removesuffix(".keys"))
            self._remove(key, replaced, deadline)
        message = f"another producer puts the key {edge} all the time; a key belongs to one producer"
        raise IntegrityError(message, key=edge.key)

    def find(self, edge: Edge, deadline: Deadline) -> StageHandle | None:
        """Return what ``edge`` stands for now; ``None`` where it stands for nothing.

        Raises:
            WireError, VersionError: What stands there is no handle of ours.
        """
        self.start()
        return self._read(self._record_key(edge.digest), deadline)

    def drop(self, edge: Edge, generation: str, deadline: Deadline) -> None:
        """Take the record of one payload away; another payload's stays. Idempotent."""
        self.start()
        key = self._record_key(edge.digest)
        raw = self._relay.get_bytes(key, deadline)
        record = None if raw is None else _or_none(raw)
        if record is not None and record.generation == generation:
            self._remove(key, record, deadline)

    def sweep(
        self, deadline: Deadline, *, lost: Callable[[StageHandle], bool] | None = None, ask_after_s: float = ASK_AFTER_S
    ) -> int:
        """Remove the records of payloads whose time is over or that are lost, and handles without a record.

        Args:
            deadline: Bound of the sweep.
            lost: Says whether a payload can never be had any more, because its owner's process is gone.
            ask_after_s: Only of records that have stood for so long, in seconds.

        Blocks: until done.

        Returns:
            How many keys were removed.
        """
        self.start()
        now = self._clock.monotonic()
        keys = self._relay.keys(f"{self._prefix}/", deadline)
        self._sights = {key: sight for key, sight in self._sights.items() if key in set(keys)}
        for key in keys:
            if key not in self._sights:
                self._sights[key] = self._look(key, now, deadline)
        asked = [key for key, sight in self._sights.items() if sight.generation and now - sight.since_s >= ask_after_s]
        dead = set() if lost is None else {key for key in asked if self._is_lost(key, lost, deadline)}
        named = {sight.generation for sight in self._sights.values()}
        gone = [
            key
            for key, sight in self._sights.items()
            if (sight.over(now, self._grace_s) or key in dead) and key.removeprefix(f"{self._prefix}/h/") not in named
        ]
        if gone:
            self._relay.remove(gone, deadline)
        return len(gone)

    def close(self) -> None:
        """Disconnect; what stands there stays. Idempotent. Blocks: seconds at most."""
        with self._lock:
            self.closed = True
            self._relay.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _read(self, key: str, deadline: Deadline) -> StageHandle | None:
        raw = self._relay.get_bytes(key, deadline)
        if raw is None:
            return None
        record = decode_record(raw)
        if record.handle is not None:
            return StageHandle.from_bytes(record.handle)
        if not 0 < record.nbytes <= MAX_HANDLE_BYTES:
            message = f"the directory's record names a handle of {record.nbytes} bytes"
            raise WireError(message, key=key)
        memory = (ctypes.c_char * record.nbytes)()
        kept = [memory]  # as in `_put_handle`: it may be written to until then
        if not self._relay.get(self._handle_key(record.generation), [_extent(memory)], deadline, on_quiet=kept.clear):
            return None  # taken away between the two looks
        return StageHandle.from_bytes(memory.raw)

    def _is_lost(self, key: str, lost: Callable[[StageHandle], bool], deadline: Deadline) -> bool:
        try:
            handle = self._read(key, deadline)
        except WireError as exc:
            logger.warning("a record of the directory is left to its age: %s", exc)
            return False
        return handle is not None and lost(handle)

    def _record_key(self, digest: str) -> str:
        return f"{self._prefix}/r/{digest}"

    def _handle_key(self, generation: str) -> str:
        return f"{self._prefix}/h/{generation}"

    def _put_handle(self, generation: str, raw: bytes, deadline: Deadline) -> None:
        memory = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
        kept = [memory]  # the relay may read it until it says that it is quiet, even after its deadline
        with contextlib.suppress(IntegrityError):  # stored by an attempt before this one
            self._relay.put(self._handle_key(generation), [_extent(memory)], deadline, on_quiet=kept.clear)

    def _remove(self, key: str, record: Record | None, deadline: Deadline) -> None:
        keys = [key]
        if record is not None and record.handle is None:
            keys.append(self._handle_key(record.generation))
        self._relay.remove(keys, deadline)

    def _look(self, key: str, now: float, deadline: Deadline) -> _Sight:
        since_s = now - (self._relay.age_s(key) or 0.0)
        if not key.startswith(self._record_key("")):
            return _Sight(since_s=since_s, ttl_s=self._default_ttl_s)
        raw = self._relay.get_bytes(key, deadline)
        record = None if raw is None else _or_none(raw)
        if record is None:
            return _Sight(since_s=since_s, ttl_s=self._default_ttl_s)
        return _Sight(since_s=since_s, ttl_s=record.ttl_s, generation=record.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """What a sweep knows of one key; times on its own clock."""

    since_s: float
    ttl_s: float | None
    generation: str = field(default="")

    def over(self, now: float, grace_s: float) -> bool:
        return self.ttl_s is not None and now - self.since_s >= self.ttl_s + grace_s


def _relay_of(config: StoreConfig) -> Relay:
    scheme = "local" if config.url is None else parse_url(config.url).scheme
    relay_class = Registry(RELAYS).load_class(scheme, Relay)  # type: ignore[type-abstract]
    return relay_class(config)


def _or_none(raw: bytes) -> Record | None:
    try:
        return decode_record(raw)
    except WireError as exc:
        logger.warning("a record of the directory is replaced or removed: %s", exc)
        return None


def _extent(memory: ctypes.Array[ctypes.c_char]) -> Extent:
    return Extent(ctypes.addressof(memory), len(memory))


__all__ = ["GRACE_S", "INLINE_BYTES", "Edge", "KeyDirectory", "Record", "decode_record"]
