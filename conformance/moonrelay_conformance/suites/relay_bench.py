"""What the tests of relays work with: a store, relays that are closed again, keys that are removed again.

Owns the life of all of it. One store and one relay are shared by the tests of one run.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from moonrelay_conformance.suites.base import Suite
from moonrelay_conformance.suites.part_footprint import Memory
from moonrelay_conformance.suites.part_process import HelperPool, HelperProcess
from moonrelay_conformance.suites.part_shared import once_per_class
from moonrelay_conformance.targets.parts import RelayGround, RelayTarget
from moonrelay_conformance.targets.recipe import recipe

#: Of the store.
CAPACITY_BYTES = 32 << 20
NAMESPACE = "conformance"
#: Until when what was removed, or was never finished, must be gone.
STORED_S = 20.0
_TIMEOUT_S = 30.0
_MODULE = "moonrelay_conformance.suites.relay_peer"


class Quiet:
    """An ``on_quiet`` that counts its calls."""

    def __init__(self) -> None:
        self._calls = 0
        self._changed = threading.Condition()

    def __call__(self) -> None:
        with self._changed:
            self._calls += 1
            self._changed.notify_all()

    def once(self, what: str, *, at_once: bool = True) -> None:
        """Check that there was one call, or wait for it, and that none follows.

        Raises:
            AssertionError: None came, or more than one.
        """
        with self._changed:
            if not at_once:
                self._changed.wait_for(lambda: self._calls > 0, 20.0)
            assert self._calls > 0, f"{what}: nobody was told that the memory is quiet"
            self._changed.wait_for(lambda: self._calls > 1, 0.02)
            assert self._calls == 1, f"{what}: it was said {self._calls} times that the memory is quiet"


@dataclass(frozen=True, slots=True)
class RelayRun:
    """What all tests of one run share.

    Attributes:
        target: What is tested.
        ground: The store.
        relay: A started relay of that store.
        folder: The store's folder, if it has files.
        helpers: Processes with a relay of that store.
    """

    target: RelayTarget
    ground: RelayGround
    relay: Relay
    folder: Path
    helpers: HelperPool


class RelayBench:
    """A relay, and what a test stores with it.

    Args:
        run: What all tests of one run share.
    """

    def __init__(self, run: RelayRun) -> None:
        self.target = run.target
        self.relay = run.relay
        self.target_folder = run.folder
        self._run = run
        self._stack = contextlib.ExitStack()
        self._stack.callback(run.helpers.take_back)
        self._keys: list[str] = []
        self._prefix = f"{NAMESPACE}/{uuid.uuid4().hex[:12]}"

    def key(self, name: str) -> str:
        """Return a key of this test; what lies there is removed at its end."""
        self._keys.append(f"{self._prefix}/{name}")
        return self._keys[-1]

    def keys(self, prefix: str = "") -> list[str]:
        """Return this test's keys that the relay lists, without what all have in common."""
        start = f"{self._prefix}/"
        return sorted(key.removeprefix(start) for key in self.relay.keys(start + prefix, soon()))

    def stored(self) -> tuple[str, ...]:
        """Return what lies in the store, read around the relay."""
        return tuple(self._run.ground.stored())

    def until_stored(self, wanted: Sequence[str]) -> list[str]:
        """Wait until nothing but ``wanted`` lies in the store; return what else does."""
        deadline = Deadline(STORED_S, SystemClock())
        while (left := sorted(set(self.stored()) - set(wanted))) and not deadline.expired:
            threading.Event().wait(0.05)
        return left

    def new(self) -> Relay:
        """Return a relay of the store, not started, that is closed with the bench."""
        relay = self.target.make(self._run.ground.url, capacity_bytes=CAPACITY_BYTES, namespace=NAMESPACE)
        self._stack.callback(relay.close)
        return relay

    def another(self) -> Relay:
        """Return a second relay of the store, by the url that the first one gives."""
        relay = self.target.make(self.relay.url, capacity_bytes=CAPACITY_BYTES, namespace=NAMESPACE)
        self._stack.callback(relay.close)
        relay.start()
        return relay

    def put(self, key: str, content: bytes) -> None:
        """Store bytes."""
        self.relay.put(key, cut(Memory(content)), soon())

    def get(self, key: str, nbytes: int) -> bytes | None:
        """Return an object's bytes, ``None`` where there is none."""
        memory = Memory(bytes(nbytes))
        return memory.read() if self.relay.get(key, cut(memory), soon()) else None

    def peer(self) -> HelperProcess:
        """Return a process with a relay of the same store."""
        return self._run.helpers.take()

    def close(self) -> None:
        """End processes and further relays, and remove what the test stored."""
        self._stack.close()
        self.relay.remove(self._keys, soon())


class RelaySuite(Suite):
    """Base of the suite's parts: its fixtures."""

    kind: ClassVar[str] = "relay"

    @pytest.fixture
    def bench(
        self, request: pytest.FixtureRequest, target: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[RelayBench]:
        """The run's store and relay, with keys of one test."""

        def make() -> tuple[RelayRun, Callable[[], None]]:
            with contextlib.ExitStack() as stack:
                folder, logs = tmp_path_factory.mktemp("relay"), tmp_path_factory.mktemp("logs")
                ground = stack.enter_context(target.ground(folder, capacity_bytes=CAPACITY_BYTES))
                relay = target.make(ground.url, capacity_bytes=CAPACITY_BYTES, namespace=NAMESPACE)
                stack.callback(relay.close)
                relay.start()
                helpers = HelperPool(
                    _MODULE,
                    logs,
                    lambda: {
                        "target": recipe(target),
                        "url": relay.url,
                        "capacity_bytes": CAPACITY_BYTES,
                        "namespace": NAMESPACE,
                    },
                )
                stack.callback(helpers.close)
                return RelayRun(target, ground, relay, folder, helpers), stack.pop_all().close

        bench = RelayBench(once_per_class(request, _RUN, make))
        try:
            yield bench
        finally:
            bench.close()


_RUN = pytest.StashKey[RelayRun]()


def soon(seconds: float = _TIMEOUT_S) -> Deadline:
    """Return a deadline that a sound relay keeps."""
    return Deadline(seconds, SystemClock())


class Parts(list[Extent]):
    """Extents that keep their memory, so that a call may be given memory that nobody else holds."""

    def __init__(self, memory: Memory, extents: Iterable[Extent]) -> None:
        super().__init__(extents)
        self.memory = memory


def cut(memory: Memory, *at: int) -> Parts:
    """Return memory as extents that meet at the given offsets."""
    bounds = [0, *at, memory.nbytes]
    return Parts(memory, (Extent(memory.address + a, b - a) for a, b in itertools.pairwise(bounds)))
