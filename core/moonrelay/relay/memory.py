"""A relay inside one process: the reference for tests, and for pipelines that never leave the process.

Owns a dictionary per URL. Relays of this process with the same ``memory://name`` share it; it lives as long as one of
them is open.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
import weakref
from collections.abc import Iterable, Sequence
from typing import ClassVar

from moonrelay.clock import Deadline
from moonrelay.config import StoreConfig
from moonrelay.errors import CapacityError, ClosedError, ConfigError, IntegrityError
from moonrelay.handle import Extent
from moonrelay.relay import parse_url
from moonrelay.relay.base import OnQuiet, Relay
from moonrelay.relay.extents import check_key, check_parts, check_time, check_value


class _Objects:
    """One store's objects and their total size; ``lock`` guards both."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.by_key: dict[str, bytes] = {}
        self.used = 0


class MemoryRelay(Relay):
    """Objects in this process's heap.

    Args:
        config: ``url`` is ``memory://name`` or ``None`` (a store of its own); ``capacity_bytes`` bounds the total.
    """

    scheme: ClassVar[str] = "memory"
    # Two relays of one process meet by name, as two processes do by a port; weak, so that nothing outlives its users.
    _stores: ClassVar[weakref.WeakValueDictionary[str, _Objects]] = weakref.WeakValueDictionary()
    _stores_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, config: StoreConfig) -> None:
        self._capacity = config.capacity_bytes
        self._objects: _Objects | None = None
        if config.url is None:
            self._name = uuid.uuid4().hex
        else:
            url = parse_url(config.url)
            if url.scheme != self.scheme or not url.host or url.port is not None or url.path or url.query:
                message = f"store url {config.url!r} must be memory://name"
                raise ConfigError(message, field="url")
            self._name = url.host

    def start(self) -> None:
        if self._objects is None:
            with self._stores_lock:
                self._objects = self._stores.setdefault(self._name, _Objects())

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        try:
            objects = self._started()
            check_time(deadline, key)
            kept, _ = check_parts(parts)
            value = b"".join(ctypes.string_at(part.address, part.nbytes) for part in kept)
            if self._insert(objects, check_key(key), value) is not None:
                message = f"store key {key!r} exists already; keys are used once"
                raise IntegrityError(message, key=key)
        finally:
            if on_quiet is not None:
                on_quiet()

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        try:
            objects = self._started()
            check_time(deadline, key)
            kept, total = check_parts(parts)
            with objects.lock:
                value = objects.by_key.get(check_key(key))
            if value is None:
                return False
            if len(value) != total:
                message = f"object {key!r} has {len(value)} bytes, not {total}"
                raise IntegrityError(message, key=key)
            at = 0
            for part in kept:
                ctypes.memmove(part.address, value[at : at + part.nbytes], part.nbytes)
                at += part.nbytes
            return True
        finally:
            if on_quiet is not None:
                on_quiet()

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        check_time(deadline, key)
        standing = self._insert(self._started(), check_key(key), check_value(value))
        return value if standing is None else standing

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        check_time(deadline, key)
        objects = self._started()
        with objects.lock:
            return objects.by_key.get(check_key(key))

    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        del deadline
        objects = self._started()
        with objects.lock:
            for key in keys:
                objects.used -= len(objects.by_key.pop(check_key(key), b""))

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        del deadline
        objects = self._started()
        with objects.lock:
            return sorted(key for key in objects.by_key if key.startswith(prefix))

    def close(self) -> None:
        self._objects = None

    def _started(self) -> _Objects:
        objects = self._objects
        if objects is None:
            message = "the memory relay is not started, or closed"
            raise ClosedError(message)
        return objects

    def _insert(self, objects: _Objects, key: str, value: bytes) -> bytes | None:
        with objects.lock:
            standing = objects.by_key.get(key)
            if standing is not None:
                return standing
            if objects.used + len(value) > self._capacity:
                message = f"{len(value)} bytes do not fit the memory relay; raise capacity_bytes={self._capacity}"
                raise CapacityError(message, key=key, used=objects.used)
            objects.by_key[key] = value
            objects.used += len(value)
            return None
