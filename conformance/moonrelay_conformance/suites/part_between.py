"""A relay between a cache and its store, in the hands of a test: it changes, misleads, fails and waits.

Owns nothing but that; where it is told nothing it is the relay behind it. The connector that a cache is given with it
is real, but for what its ``store()`` returns and who hears its events.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import MoonrelayError, TransferTimeout
from moonrelay.events import Event, EventBus
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay

if TYPE_CHECKING:
    from moonrelay import DiffusionConnector
    from moonrelay.connector.settings import ConnectorSettings


class Between(Relay):
    """A started relay, with a test's hand in it.

    Args:
        inner: The relay.

    Attributes:
        error: Raised by every call, where it is set.
        failing: Names of the calls that `error` is for; empty is all.
        mislead: Gives the key that is read instead of the one asked for.
        spoil: Changes the bytes of an object that was read: given its parts' bytes as one, returns others.
        records: Changes what `get_bytes` found.
        stall: Makes every call wait for its deadline.
        dies_at: A key's part; a put of such a key, and everything after it, fails as if the process had died there.
        gate: Where it is set, `put` waits for it; `entered` is set when one does.
    """

    scheme: ClassVar[str] = "between"

    def __init__(self, inner: Relay) -> None:
        self._inner = inner
        self.error: MoonrelayError | None = None
        self.failing: tuple[str, ...] = ()
        self.mislead: Callable[[str], str] = _as_it_is
        self.spoil: Callable[[bytes], bytes] | None = None
        self.records: Callable[[str, bytes | None], bytes | None] | None = None
        self.stall = False
        self.dies_at = ""
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self._dead = False

    @property
    def url(self) -> str:
        return self._inner.url

    def start(self) -> None:
        """It is started."""

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        try:
            self.entered.set()
            if self.gate is not None:
                assert self.gate.wait(60.0), "nobody opened the gate"
            self._go_wrong("put", deadline, key)
        except BaseException:
            if on_quiet is not None:
                on_quiet()
            raise
        self._inner.put(key, parts, deadline, on_quiet=on_quiet)

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        try:
            self._go_wrong("get", deadline)
        except BaseException:
            if on_quiet is not None:
                on_quiet()
            raise
        if self.spoil is None:
            return self._inner.get(self.mislead(key), parts, deadline, on_quiet=on_quiet)
        try:
            found = self._inner.get(self.mislead(key), parts, deadline)
            if found:
                _write(parts, self.spoil(b"".join(ctypes.string_at(part.address, part.nbytes) for part in parts)))
            return found
        finally:
            if on_quiet is not None:
                on_quiet()

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        self._go_wrong("put_if_absent", deadline, key)
        return self._inner.put_if_absent(key, value, deadline)

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        self._go_wrong("get_bytes", deadline)
        found = self._inner.get_bytes(self.mislead(key), deadline)
        return found if self.records is None else self.records(key, found)

    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        self._go_wrong("remove", deadline)
        self._inner.remove(keys, deadline)

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        self._go_wrong("keys", deadline)
        return self._inner.keys(prefix, deadline)

    def age_s(self, key: str) -> float | None:
        return self._inner.age_s(key)

    def register(self, address: int, nbytes: int) -> None:
        self._inner.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._inner.unregister(address)

    def close(self) -> None:
        """It is the connector's."""

    def _go_wrong(self, call: str, deadline: Deadline, key: str = "") -> None:
        if self.dies_at and self.dies_at in f"{key}/":
            self._dead = True
        if self._dead:
            message = "the process died here"
            raise TransferTimeout(message)
        if self.stall:
            # Another clock than the deadline's has no place here: it is the system's, by which the cache waits too.
            threading.Event().wait(deadline.remaining(30.0))
            message = f"{call} was not done within {deadline.timeout_s} s"
            raise TransferTimeout(message)
        if self.error is not None and (not self.failing or call in self.failing):
            raise self.error


class Conn:
    """A connector as a cache sees it, with its store in a test's hands.

    Args:
        conn: The real one.

    Attributes:
        between: Its store.
        seen: Events so far.
    """

    def __init__(self, conn: DiffusionConnector) -> None:
        self._conn = conn
        self.between = Between(conn.store())
        self.seen: list[Event] = []
        self.events = EventBus([self.seen.append], conn.clock)

    @property
    def settings(self) -> ConnectorSettings:
        return self._conn.settings

    @property
    def clock(self) -> Clock:
        return self._conn.clock

    def store(self) -> Relay:
        return self.between

    def told(self, name: str) -> list[Event]:
        """Return the events of that name."""
        return [event for event in self.seen if event.name == name]


def flipped(at: int) -> Callable[[bytes], bytes]:
    """Return what changes one bit of some bytes; ``at`` counts from the end where it is negative."""

    def spoil(raw: bytes) -> bytes:
        other = bytearray(raw)
        if -len(raw) <= at < len(raw):
            other[at] ^= 0x10
        return bytes(other)

    return spoil


def _as_it_is(key: str) -> str:
    return key


def _write(parts: Sequence[Extent], raw: bytes) -> None:
    at = 0
    for part in parts:
        ctypes.memmove(part.address, raw[at : at + part.nbytes], part.nbytes)
        at += part.nbytes
