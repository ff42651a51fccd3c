"""An engine that lies, fails, stalls and writes late, on command: what the fault tests run the connector on.

Owns the script of faults and the reads it holds back. Wraps any engine; addresses are the inner engine's, so a peer
with a plain engine can be read through it. By name: ``{"engine": "faulty", "options": {"inner": "memory",
"faults": ["fail", "none", "delay:0.5"]}}``.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moonrelay.clock import Clock, SystemClock
from moonrelay.config import TransferConfig, unknown_key
from moonrelay.errors import ClosedError, ConfigError, MoonrelayError, TransferFailed
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay.transfer.operations import Finished


class Fault(enum.Enum):
    """What goes wrong with one read."""

    NONE = "none"
    #: Reports failure; nothing was moved.
    FAIL = "fail"
    #: Reports failure although every byte was moved.
    FAIL_AFTER = "fail_after"
    #: Reports success; one byte is not the peer's.
    WRONG = "wrong"
    #: Reports success; only the first half was moved.
    SHORT = "short"
    #: Reports success; nothing was moved.
    NOTHING = "nothing"
    #: Runs until ``seconds`` have passed, then moves.
    DELAY = "delay"
    #: Runs until `FaultyEngine.let_late_writes`, which moves the bytes although nobody may wait for them any more.
    LATE = "late"
    #: Runs, moving nothing, until the engine is closed.
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Scripted:
    """A fault with its parameter.

    Attributes:
        fault: What goes wrong.
        seconds: For ``DELAY``, on the engine's clock.
    """

    fault: Fault
    seconds: float = 0.0


#: Decides by the number of the read (0, 1 ... over the engine's life) and its size.
Script = Callable[[int, int], Scripted]


def in_order(*faults: Fault | Scripted) -> Script:
    """Return a script: the first read gets the first fault, and so on; reads beyond get none."""
    scripted = [one if isinstance(one, Scripted) else Scripted(one) for one in faults]

    def script(number: int, nbytes: int) -> Scripted:
        return scripted[number] if number < len(scripted) else Scripted(Fault.NONE)

    return script


def always(fault: Fault, seconds: float = 0.0) -> Script:
    """Return a script that gives every read the same fault."""
    return lambda _number, _nbytes: Scripted(fault, seconds)


class _HeldBack(Operation):
    """A read that has not begun in the inner engine, or a failure to report after it has ended."""

    def __init__(
        self, scripted: Scripted, due: float, now: Callable[[], float], begin: Callable[[], Operation]
    ) -> None:
        self._fault = scripted.fault
        self._due = due
        self._now = now
        self._begin = begin
        self._inner: Operation | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._error: MoonrelayError | None = None

    @property
    def error(self) -> MoonrelayError | None:
        return self._error

    @property
    def fault(self) -> Fault:
        return self._fault

    def poll(self) -> OperationState:
        with self._lock:
            if self._closed and self._inner is None:
                message = "the faulty engine is closed"
                self._error = ClosedError(message)
                return OperationState.FAILED
            if self._inner is None and self._is_due():
                self.let_go()
            if self._inner is None:
                return OperationState.RUNNING
            state = self._inner.poll()
            self._error = self._inner.error
            if state is OperationState.DONE and self._fault is Fault.FAIL_AFTER:
                message = "injected: failed after the bytes were moved"
                self._error = TransferFailed(message)
                return OperationState.FAILED
            return state

    def let_go(self) -> None:
        """Begin the read that was held back."""
        with self._lock:
            if self._inner is None and not self._closed:
                self._inner = self._begin()

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def _is_due(self) -> bool:
        return self._fault is Fault.FAIL_AFTER or (self._fault is Fault.DELAY and self._now() >= self._due)


class _Altered(Operation):
    """A read that reports success whatever happened to the bytes."""

    def __init__(self, inner: Operation | None, last_byte: int | None) -> None:
        self._inner = inner
        self._last_byte = last_byte

    @property
    def error(self) -> MoonrelayError | None:
        return None if self._inner is None else self._inner.error

    def poll(self) -> OperationState:
        state = OperationState.DONE if self._inner is None else self._inner.poll()
        if state is OperationState.DONE and self._last_byte is not None:
            ctypes.c_uint8.from_address(self._last_byte).value ^= 0x5A
            self._last_byte = None
        return state


class FaultyEngine(TransferEngine):
    """A wrapper that gives scripted faults to reads; everything else is the inner engine's.

    Args:
        config: Settings; ``options`` holds ``inner``, ``faults`` and the inner engine's own options.
        inner: The engine to wrap; ``None`` makes the one that ``options['inner']`` names.
        script: Which fault each read gets; ``None`` takes ``options['faults']``.
        clock: The clock of ``DELAY``.

    Attributes:
        reads: How many reads were begun.
        most_in_flight: The largest number of reads that ran at once, as far as polls told.
    """

    name: ClassVar[str] = "faulty"

    def __init__(
        self,
        config: TransferConfig,
        *,
        inner: TransferEngine | None = None,
        script: Script | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.inner = _inner_engine(config) if inner is None else inner
        self.registers_foreign_memory = self.inner.registers_foreign_memory
        self.lands_in_foreign_memory = self.inner.lands_in_foreign_memory
        self.script = script if script is not None else in_order(*_parsed(config))
        self.reads = 0
        self.most_in_flight = 0
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._flying: list[Operation] = []

    def start(self) -> None:
        self.inner.start()

    @property
    def address(self) -> EngineAddress:
        return self.inner.address

    def allocate(self, nbytes: int) -> Region:
        return self.inner.allocate(nbytes)

    def release(self, region: Region) -> None:
        self.inner.release(region)

    def commit(self, region: Region, offset: int, nbytes: int) -> None:
        self.inner.commit(region, offset, nbytes)

    def register(self, address: int, nbytes: int) -> Region:
        return self.inner.register(address, nbytes)

    def unregister(self, region: Region) -> None:
        self.inner.unregister(region)

    def forget(self, peer: EngineAddress) -> None:
        self.inner.forget(peer)

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        with self._lock:
            scripted = self.script(self.reads, nbytes)
            self.reads += 1

            def begin(size: int = nbytes) -> Operation:
                return self.inner.read(peer, region, remote_address, local_address, size)

            operation = self._operation(scripted, begin, local_address, nbytes)
            self._flying = [one for one in self._flying if one.poll() is OperationState.RUNNING]
            self._flying.append(operation)
            self.most_in_flight = max(self.most_in_flight, len(self._flying))
            return operation

    def let_late_writes(self) -> int:
        """Move the bytes of every ``LATE`` read now, whoever waits or not; return how many there were."""
        with self._lock:
            late = [one for one in self._flying if isinstance(one, _HeldBack) and one.fault is Fault.LATE]
            for one in late:
                one.let_go()
            return len(late)

    def close(self) -> None:
        with self._lock:
            for one in self._flying:
                if isinstance(one, _HeldBack):
                    one.close()
            self._flying = []
        self.inner.close()

    def _operation(
        self, scripted: Scripted, begin: Callable[..., Operation], local_address: int, nbytes: int
    ) -> Operation:
        match scripted.fault:
            case Fault.NONE:
                return begin()
            case Fault.FAIL:
                message = "injected: failed before any byte was moved"
                return Finished(TransferFailed(message))
            case Fault.WRONG:
                return _Altered(begin(), local_address + nbytes - 1)
            case Fault.SHORT:
                return _Altered(begin(nbytes // 2) if nbytes > 1 else None, None)
            case Fault.NOTHING:
                return _Altered(None, None)
            case _:
                now = self._clock.monotonic
                return _HeldBack(scripted, now() + scripted.seconds, now, begin)


def _inner_engine(config: TransferConfig) -> TransferEngine:
    from moonrelay.plugins import TRANSFERS, Registry

    name = str(config.options.get("inner", "memory"))
    options = {key: value for key, value in config.options.items() if key not in ("inner", "faults")}
    engine = Registry(TRANSFERS).load_class(name, TransferEngine)  # type: ignore[type-abstract]
    return engine(replace(config, engine=name, options=options))


def _parsed(config: TransferConfig) -> Sequence[Scripted]:
    faults = config.options.get("faults", ())
    if isinstance(faults, str) or not isinstance(faults, Sequence):
        message = f"options.faults={faults!r} must be a list such as ['fail', 'none', 'delay:0.5']"
        raise ConfigError(message, field="faults")
    return [_parse(str(text)) for text in faults]


def _parse(text: str) -> Scripted:
    word, _, seconds = text.partition(":")
    try:
        return Scripted(Fault(word), float(seconds or 0.0))
    except ValueError as exc:
        message = unknown_key(word, (fault.value for fault in Fault), "options.faults")
        raise ConfigError(message, field="faults", value=text) from exc
