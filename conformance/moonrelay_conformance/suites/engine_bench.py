"""What the tests of engines work with: engines that are closed again, memory with known bytes, peers in processes.

Owns the life of all of it. Three engines are shared by the tests of one run, since starting one may cost a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import MoonrelayError
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay_conformance.suites.base import Suite
from moonrelay_conformance.suites.part_footprint import at, differs
from moonrelay_conformance.suites.part_process import HelperPool, HelperProcess, pattern
from moonrelay_conformance.suites.part_shared import once_per_class
from moonrelay_conformance.targets.parts import EngineTarget
from moonrelay_conformance.targets.recipe import recipe

#: After this long without progress an engine gives a read up.
PROGRESS_S = 1.0
#: When a read must have ended whatever happened to the peer; more than any engine's own patience.
END_S = 45.0
#: What memory holds before a read.
CANARY = 0xA5
_PAUSE_S = 0.0005
_SETTINGS = {"progress_timeout_s": PROGRESS_S, "hostname": "127.0.0.1"}
_MODULE = "moonrelay_conformance.suites.engine_peer"


class EnginePeerProcess:
    """A producer in a process of its own: its engine's address, and its memory."""

    def __init__(self, process: HelperProcess) -> None:
        self.process = process
        self.address = msgspec.convert(process.do("address"), EngineAddress)

    def memory(self, nbytes: int, seed: int, name: str = "pool") -> Region:
        """Let it allocate and fill memory."""
        return msgspec.convert(self.process.do("allocate", name=name, nbytes=nbytes, seed=seed), Region)


class EngineBench:
    """Engines and memory of one test.

    Args:
        target: What is tested.
        folder: For the engines' files; one for all benches whose engines are to meet.
        helpers: Processes with a producer.
    """

    def __init__(self, target: EngineTarget, folder: Path, helpers: HelperPool) -> None:
        self.target = target
        self.folder = folder
        self._helpers = helpers
        self._stack = contextlib.ExitStack()
        self._stack.callback(helpers.take_back)

    def new(self, **changes: object) -> TransferEngine:
        """Return an engine, not started, that is closed with the bench."""
        engine = self.target.make(self.target.config(self.folder, **{**_SETTINGS, **changes}))
        self._stack.callback(engine.close)
        return engine

    def engine(self) -> TransferEngine:
        """Return a started engine."""
        engine = self.new()
        engine.start()
        return engine

    def memory(self, engine: TransferEngine, nbytes: int, seed: int | None = None) -> Region:
        """Allocate memory, filled from a seed, or with the canary; it is released with the bench."""
        region = engine.allocate(nbytes)
        self._stack.callback(engine.release, region)
        engine.commit(region, 0, nbytes)
        if seed is None:
            ctypes.memset(region.base, CANARY, nbytes)
        else:
            fill(region, seed)
        return region

    def peer(self) -> EnginePeerProcess:
        """Return a process with a producer."""
        return EnginePeerProcess(self._helpers.take())

    def names(self) -> tuple[str, ...]:
        """Return the names of shared memory, read around the engine."""
        return tuple(self.target.memory_names(self.folder))

    def close(self) -> None:
        """Release and close everything, the latest first."""
        self._stack.close()


@dataclass(frozen=True, slots=True)
class Pair:
    """A producer and a consumer, and a third that is either; all started."""

    producer: TransferEngine
    consumer: TransferEngine
    third: TransferEngine


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What all benches of one run share: the target, the folder, the processes."""

    target: EngineTarget
    folder: Path
    helpers: HelperPool


class EngineSuite(Suite):
    """Base of the suite's parts: its fixtures."""

    kind: ClassVar[str] = "engine"

    @pytest.fixture
    def bench(self, run: EngineRun) -> Iterator[EngineBench]:
        """Engines and memory of one test."""
        bench = EngineBench(run.target, run.folder, run.helpers)
        try:
            yield bench
        finally:
            bench.close()

    @pytest.fixture
    def pair(self, request: pytest.FixtureRequest, run: EngineRun) -> Pair:
        """Engines for the tests of one run that neither close nor disturb them."""

        def make() -> tuple[Pair, Callable[[], None]]:
            bench = EngineBench(run.target, run.folder, run.helpers)
            try:
                return Pair(bench.engine(), bench.engine(), bench.engine()), bench.close
            except BaseException:
                bench.close()
                raise

        return once_per_class(request, _PAIR, make)

    @pytest.fixture
    def run(self, request: pytest.FixtureRequest, target: Any, tmp_path_factory: pytest.TempPathFactory) -> EngineRun:
        """What all benches of one run share."""

        def make() -> tuple[EngineRun, Callable[[], None]]:
            folder, logs = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("logs")
            helpers = HelperPool(
                _MODULE,
                logs,
                lambda: {"target": recipe(target), "folder": str(folder), "changes": _SETTINGS},
            )
            return EngineRun(target, folder, helpers), helpers.close

        return once_per_class(request, _RUN, make)


_RUN = pytest.StashKey[EngineRun]()
_PAIR = pytest.StashKey[Pair]()


def fill(region: Region, seed: int) -> None:
    """Fill memory of this process from a seed."""
    ctypes.memmove(region.base, pattern(seed, region.nbytes), region.nbytes)


def ended(operation: Operation) -> OperationState:
    """Poll a read to its end, and hold its answer to what an operation promises.

    Raises:
        AssertionError: It runs on, changes its answer, or fails without a typed reason.
    """
    deadline = Deadline(END_S, SystemClock())
    while (state := operation.poll()) is OperationState.RUNNING:
        assert not deadline.expired, f"a read still runs after {END_S} s"
        threading.Event().wait(_PAUSE_S)
    error = operation.error
    if state is OperationState.DONE:
        assert error is None, f"a read that is done has an error: {error!r}"
    else:
        assert isinstance(error, MoonrelayError), f"a failed read gives {error!r} as its reason, no typed error"
        assert type(error) is not MoonrelayError, f"a failed read's reason has no class of its own: {error!r}"
        assert error.message, "a failed read's reason says nothing"
        assert "\n" not in error.message, f"a failed read's reason has several lines: {error.message!r}"
    return state


def deliver(
    consumer: TransferEngine,
    peer: EngineAddress,
    region: Region,
    remote_address: int,
    local_address: int,
    nbytes: int,
) -> None:
    """Read, until it is done; a failure that says it may pass is tried again twice, as the connector does.

    Raises:
        AssertionError: It fails.
    """
    error: MoonrelayError | None = None
    for _ in range(3):
        operation = consumer.read(peer, region, remote_address, local_address, nbytes)
        if ended(operation) is OperationState.DONE:
            return
        error = operation.error
        if error is not None and not error.retryable:
            break
    message = f"a read of {nbytes} bytes failed: {error!r}"
    raise AssertionError(message)


def same(local_address: int, wanted: bytes, what: str = "a read that is done") -> None:
    """Compare memory with what it should hold.

    Raises:
        AssertionError: It differs; the message says where.
    """
    wrong = differs(at(local_address, len(wanted)), wanted)
    assert not wrong, f"{what}: {wrong}"


def untouched(region: Region, what: str) -> None:
    """Check that memory holds nothing but the canary.

    Raises:
        AssertionError: It was written.
    """
    wrong = differs(at(region.base, region.nbytes), bytes([CANARY]) * region.nbytes)
    assert not wrong, f"{what} wrote memory: {wrong}"
