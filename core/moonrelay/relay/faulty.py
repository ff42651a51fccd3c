"""A relay that loses, corrupts, fails and stalls, on command: what the fault tests run the store's route on.

Owns the script of faults. Wraps any relay, and its URL is the inner one's, so a peer with the plain relay reaches the
same objects. By name: ``{"url": "faulty://", "options": {"inner": "local:///folder", "faults": ["fail", "get:wrong",
"put:delay:0.5"]}}``.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Final

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.config import StoreConfig, unknown_key
from moonrelay.errors import ClosedError, ConfigError, TransferFailed, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay import parse_url
from moonrelay.relay.base import OnQuiet, Relay


class Fault(enum.Enum):
    """What goes wrong with one call. "Reports" is what the caller hears."""

    NONE = "none"
    #: Reports failure; nothing was done.
    FAIL = "fail"
    #: Reports failure although it was done.
    FAIL_AFTER = "fail_after"
    #: A put reports success, nothing is stored; a get, or a look at a record, says that there is no object.
    LOSE = "lose"
    #: Reports success; only the first half was stored, or read.
    SHORT = "short"
    #: Reports success; the last byte is another one.
    WRONG = "wrong"
    #: A get reports success; nothing was read.
    NOTHING = "nothing"
    #: Waits for ``seconds`` first.
    DELAY = "delay"
    #: Is done twice, as by a transport that repeats; the second outcome is reported.
    DUPLICATE = "duplicate"
    #: Does nothing until the deadline, or until the relay is closed.
    STALL = "stall"


#: What can go wrong with which call.
_POSSIBLE: Final[Mapping[str, frozenset[Fault]]] = MappingProxyType(
    {
        "put": frozenset(Fault) - {Fault.NOTHING},
        "get": frozenset(Fault),
        "put_if_absent": frozenset(Fault) - {Fault.NOTHING, Fault.SHORT, Fault.WRONG},
        "get_bytes": frozenset(Fault) - {Fault.NOTHING, Fault.SHORT, Fault.WRONG},
    }
)
#: Calls that a fault without a call's name is for: those that move payloads, rather than the records about them.
_PAYLOADS: Final = ("put", "get")


@dataclass(frozen=True, slots=True)
class Scripted:
    """A fault with its parameters.

    Attributes:
        fault: What goes wrong.
        seconds: For ``DELAY``, on the relay's clock.
        calls: With which calls it may go wrong.
    """

    fault: Fault
    seconds: float = 0.0
    calls: tuple[str, ...] = _PAYLOADS


class FaultyRelay(Relay):
    """A wrapper that gives scripted faults to calls, in their order; everything else is the inner relay's.

    A call gets the first fault of the script that is left and meant for it. ``fail`` is for the next put or get,
    whichever comes first; ``get:fail``, ``put:fail``, ``put_if_absent:fail`` and ``get_bytes:fail`` are for that call.

    Args:
        config: ``options`` holds ``inner`` (the URL of the relay to wrap), ``faults``, and the inner relay's options.
        inner: The relay to wrap; ``None`` makes the one that ``options['inner']`` names.
        faults: The script; ``None`` takes ``options['faults']``.
        clock: The clock of ``DELAY``.

    Attributes:
        inner: The relay that is wrapped.

    Raises:
        ConfigError: No inner relay is named, or a word of ``faults`` is not known.
    """

    scheme: ClassVar[str] = "faulty"

    def __init__(
        self,
        config: StoreConfig,
        *,
        inner: Relay | None = None,
        faults: Sequence[Scripted | Fault] | None = None,
        clock: Clock | None = None,
    ) -> None:
        scripted = parse_faults(config.options.get("faults", ())) if faults is None else faults
        self._script = deque(one if isinstance(one, Scripted) else Scripted(one) for one in scripted)
        self._clock: Clock = clock or SystemClock()
        self._waiting = threading.Condition()
        self._closed = False
        self._done: list[tuple[str, Fault]] = []
        self.inner = _inner_relay(config) if inner is None else inner

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def injected(self) -> tuple[tuple[str, Fault], ...]:
        """What went wrong so far: call and fault."""
        with self._waiting:
            return tuple(self._done)

    def start(self) -> None:
        self.inner.start()

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        fault = self._next("put", deadline, on_quiet)
        match fault:
            case Fault.LOSE:
                _quiet(on_quiet)
            case Fault.SHORT:
                half = max(1, sum(part.nbytes for part in parts) // 2)
                self.inner.put(key, _first(parts, half), deadline, on_quiet=on_quiet)
            case Fault.WRONG:
                raw = bytearray(b"".join(ctypes.string_at(part.address, part.nbytes) for part in parts))
                raw[-1] ^= 0x5A
                self._put_copy(key, raw, deadline, on_quiet)
            case Fault.DUPLICATE:
                self.inner.put(key, parts, deadline)
                self.inner.put(key, parts, deadline, on_quiet=on_quiet)
            case _:
                self.inner.put(key, parts, deadline, on_quiet=on_quiet)
                self._after(fault)

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        fault = self._next("get", deadline, on_quiet)
        match fault:
            case Fault.LOSE:
                _quiet(on_quiet)
                return False
            case Fault.NOTHING:
                _quiet(on_quiet)
                return True
            case Fault.SHORT:
                return self._get_half(key, parts, deadline, on_quiet)
            case Fault.DUPLICATE:
                self.inner.get(key, parts, deadline)
        found = self.inner.get(key, parts, deadline, on_quiet=None if fault is Fault.WRONG else on_quiet)
        if fault is Fault.WRONG:
            last = [part for part in parts if part.nbytes][-1]
            ctypes.c_uint8.from_address(last.address + last.nbytes - 1).value ^= 0x5A
            _quiet(on_quiet)
        self._after(fault)
        return found

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        fault = self._next("put_if_absent", deadline)
        if fault is Fault.LOSE:
            return value
        if fault is Fault.DUPLICATE:
            self.inner.put_if_absent(key, value, deadline)
        standing = self.inner.put_if_absent(key, value, deadline)
        self._after(fault)
        return standing

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        fault = self._next("get_bytes", deadline)
        if fault is Fault.LOSE:
            return None
        value = self.inner.get_bytes(key, deadline)
        self._after(fault)
        return value

    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        self.inner.remove(keys, deadline)

    def age_s(self, key: str) -> float | None:
        return self.inner.age_s(key)

    def register(self, address: int, nbytes: int) -> None:
        self.inner.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self.inner.unregister(address)

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        return self.inner.keys(prefix, deadline)

    def close(self) -> None:
        with self._waiting:
            self._closed = True
            self._waiting.notify_all()
        self.inner.close()

    def _next(self, call: str, deadline: Deadline, on_quiet: OnQuiet | None = None) -> Fault:
        """Take the call's fault from the script; do what comes before the call itself."""
        scripted = self._take(call)
        try:
            match scripted.fault:
                case Fault.FAIL:
                    message = f"injected: {call} failed before anything was done"
                    raise TransferFailed(message)
                case Fault.DELAY:
                    self._wait(scripted.seconds, call, deadline)
                case Fault.STALL:
                    self._wait(None, call, deadline)
        except BaseException:
            _quiet(on_quiet)
            raise
        return scripted.fault

    def _take(self, call: str) -> Scripted:
        with self._waiting:
            for scripted in self._script:
                if call in scripted.calls:
                    self._script.remove(scripted)
                    if scripted.fault is not Fault.NONE:
                        self._done.append((call, scripted.fault))
                    return scripted
        return Scripted(Fault.NONE)

    def _wait(self, seconds: float | None, call: str, deadline: Deadline) -> None:
        """Let time pass; raise where the deadline, or the relay's end, comes first."""
        until = Deadline(seconds, self._clock)
        with self._waiting:
            while not (self._closed or deadline.expired or until.expired):
                self._clock.wait(self._waiting, deadline.remaining(until.remaining()))
            if self._closed:
                message = f"the relay was closed while {call} waited"
                raise ClosedError(message)
        if not until.expired:
            message = f"injected: {call} was not done within {deadline.timeout_s} s"
            raise TransferTimeout(message)

    @staticmethod
    def _after(fault: Fault) -> None:
        if fault is Fault.FAIL_AFTER:
            message = "injected: failed after it was done"
            raise TransferFailed(message)

    def _put_copy(self, key: str, raw: bytearray, deadline: Deadline, on_quiet: OnQuiet | None) -> None:
        buffer = (ctypes.c_char * len(raw)).from_buffer(raw)
        try:
            self.inner.put(key, [Extent(ctypes.addressof(buffer), len(raw))], deadline)
        finally:
            _quiet(on_quiet)

    def _get_half(self, key: str, parts: Sequence[Extent], deadline: Deadline, on_quiet: OnQuiet | None) -> bool:
        size = sum(part.nbytes for part in parts)
        raw = bytearray(size)
        buffer = (ctypes.c_char * size).from_buffer(raw)
        try:
            found = self.inner.get(key, [Extent(ctypes.addressof(buffer), size)], deadline)
            at = 0
            for part in _first(parts, size // 2) if found else ():
                ctypes.memmove(part.address, ctypes.addressof(buffer) + at, part.nbytes)
                at += part.nbytes
        finally:
            _quiet(on_quiet)
        return found


def parse_faults(words: object) -> list[Scripted]:
    """Return the script that a list of words stands for: ``[call:]fault[:seconds]``.

    Raises:
        ConfigError: No list, or an unknown call, fault or number; the nearest word is suggested.
    """
    if isinstance(words, str) or not isinstance(words, Sequence):
        message = f"options.faults={words!r} must be a list such as ['fail', 'get:wrong', 'put:delay:0.5']"
        raise ConfigError(message, field="options.faults")
    return [_parse(str(word)) for word in words]


def _parse(text: str) -> Scripted:
    call, _, rest = text.partition(":")
    calls: tuple[str, ...] = (call,)
    if call not in _POSSIBLE:
        calls, rest = _PAYLOADS, text
    word, _, seconds = rest.partition(":")
    try:
        scripted = Scripted(Fault(word), float(seconds or 0.0), calls)
    except ValueError as exc:
        message = unknown_key(word, [*_POSSIBLE, *(fault.value for fault in Fault)], "options.faults")
        raise ConfigError(message, field="options.faults", value=text) from exc
    # Without a call's name it is for whichever can have it.
    possible = tuple(one for one in calls if scripted.fault in _POSSIBLE[one])
    if not possible:
        message = f"options.faults: {call} cannot go wrong by {word!r}"
        raise ConfigError(message, field="options.faults", value=text)
    return replace(scripted, calls=possible)


def _inner_relay(config: StoreConfig) -> Relay:
    from moonrelay.plugins import RELAYS, Registry

    url = config.options.get("inner")
    if not isinstance(url, str) or parse_url(url).scheme == FaultyRelay.scheme:
        message = f"options.inner={url!r} must be the URL of the relay to wrap, e.g. 'local:///folder'"
        raise ConfigError(message, field="options.inner")
    options = {key: value for key, value in config.options.items() if key not in ("inner", "faults")}
    relay = Registry(RELAYS).load_class(parse_url(url).scheme, Relay)  # type: ignore[type-abstract]
    return relay(replace(config, url=url, options=options))


def _first(parts: Sequence[Extent], nbytes: int) -> list[Extent]:
    """Return the first ``nbytes`` of extents."""
    kept = []
    for part in parts:
        if nbytes > 0 and part.nbytes:
            kept.append(Extent(part.address, min(part.nbytes, nbytes)))
            nbytes -= part.nbytes
    return kept


def _quiet(on_quiet: OnQuiet | None) -> None:
    if on_quiet is not None:
        on_quiet()
