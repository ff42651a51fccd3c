"""What the tests of step checkpoints work with: one store and two connectors for a run, requests of one test.

Owns the life of all of it. Two connectors stand for two workers, where a test needs none that it can kill.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from moonrelay import DiffusionConnector
from moonrelay.cache.checkpoint import Checkpointer, CheckpointSession, StepState
from moonrelay.clock import Deadline, SystemClock
from moonrelay.relay.base import Relay
from moonrelay_conformance.suites.base import Suite
from moonrelay_conformance.suites.checkpoint_loop import EULER, Kind, Loop, identity
from moonrelay_conformance.suites.part_between import Conn
from moonrelay_conformance.suites.part_process import HelperPool, HelperProcess
from moonrelay_conformance.suites.part_shared import once_per_class
from moonrelay_conformance.targets.caches import CheckpointTarget
from moonrelay_conformance.targets.parts import RelayGround
from moonrelay_conformance.targets.recipe import recipe

CAPACITY_BYTES = 64 << 20
#: How long saving or removing may take on a busy machine.
IDLE_S = 60.0
#: Until when what was removed must be gone.
GONE_S = 20.0
_MODULE = "moonrelay_conformance.suites.checkpoint_peer"


@dataclass(frozen=True, slots=True)
class CheckpointRun:
    """What all tests of one run share."""

    target: CheckpointTarget
    ground: RelayGround
    connectors: tuple[DiffusionConnector, DiffusionConnector]
    helpers: HelperPool


class CheckpointBench:
    """Checkpoints of one test.

    Args:
        run: What all tests of one run share.

    Attributes:
        request: A request of this test.
    """

    def __init__(self, run: CheckpointRun) -> None:
        self.target = run.target
        self.request = f"r{uuid.uuid4().hex[:12]}"
        self._run = run
        self._before = frozenset(run.ground.stored())
        self._made: list[Checkpointer] = []

    @property
    def relay(self) -> Relay:
        """The store, as a connector has it."""
        return self._run.connectors[0].store()

    @property
    def namespace(self) -> str:
        return self._run.connectors[0].settings.store.namespace

    def conn(self, number: int = 0) -> Conn:
        """Return a connector of the store; 0 and 1 are different ones."""
        return Conn(self._run.connectors[number])

    def checkpointer(self, conn: Conn | None = None, **settings: Any) -> Checkpointer:
        """Return a checkpointer, on the first connector unless another is given; after every step."""
        self._made.append(self.target.make(conn or self.conn(), **{"every": 1, **settings}))
        return self._made[-1]

    def session(self, kind: Kind = EULER, conn: Conn | None = None, **changes: Any) -> CheckpointSession:
        """Return a session on the second connector, as in another process, of this test's request."""
        return self.checkpointer(conn or self.conn(1)).session(self.identity(kind, **changes))

    def identity(self, kind: Kind = EULER, **changes: Any) -> Any:
        """Return what a run of this test's request is."""
        return identity(changes.pop("request_id", self.request), kind, **changes)

    def save(self, kind: Kind, *steps: int, conn: Conn | None = None, **settings: Any) -> Checkpointer:
        """Run a loop, and save its state after these steps, one after the other; return who saved."""
        checkpointer = self.checkpointer(conn, **settings)
        session = checkpointer.session(self.identity(kind))
        loop = Loop(kind)
        for step in steps:
            loop.run(step)
            assert session.save_now(step, loop.capture), f"the state after step {step} was not saved"
        return checkpointer

    def stored(self) -> list[str]:
        """Return what lies in the store since this test began, read around the checkpointer."""
        return sorted(frozenset(self._run.ground.stored()) - self._before)

    def until_gone(self) -> list[str]:
        """Wait until nothing of this test's lies in the store; return what does."""
        deadline = Deadline(GONE_S, SystemClock())
        while (left := self.stored()) and not deadline.expired:
            threading.Event().wait(0.05)
        return left

    def peer(self) -> HelperProcess:
        """Return a process with a connector of the same store."""
        return self._run.helpers.take()

    def close(self) -> None:
        """End processes and checkpointers, and remove what the test stored."""
        self._run.helpers.take_back()
        for checkpointer in self._made:
            checkpointer.close()
        deadline = Deadline(IDLE_S, SystemClock())
        self.relay.remove(self.relay.keys(f"{self.namespace}/ck/", deadline), deadline)


class CheckpointSuite(Suite):
    """Base of the suite's parts: its fixtures."""

    kind: ClassVar[str] = "checkpoint"

    @pytest.fixture
    def bench(
        self, request: pytest.FixtureRequest, target: Any, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[CheckpointBench]:
        """The run's store and connectors, with requests of one test."""

        def make() -> tuple[CheckpointRun, Callable[[], None]]:
            with contextlib.ExitStack() as stack:
                folder, logs = tmp_path_factory.mktemp("checkpoint"), tmp_path_factory.mktemp("logs")
                ground = stack.enter_context(target.ground(folder, capacity_bytes=CAPACITY_BYTES))
                settings = {"capacity_bytes": CAPACITY_BYTES, "namespace": "conformance"}
                first, second = (stack.enter_context(target.connector(ground.url, **settings)) for _ in range(2))
                helpers = HelperPool(_MODULE, logs, lambda: {"target": recipe(target), "url": ground.url, **settings})
                stack.callback(helpers.close)
                return CheckpointRun(target, ground, (first, second), helpers), stack.pop_all().close

        bench = CheckpointBench(once_per_class(request, _RUN, make))
        try:
            yield bench
        finally:
            bench.close()


_RUN = pytest.StashKey[CheckpointRun]()


def resumed(session: CheckpointSession, kind: Kind) -> tuple[Loop, StepState]:
    """Return a loop that goes on from the newest checkpoint, and the state as it was found.

    Raises:
        AssertionError: There is none.
    """
    state = session.resume()
    assert state is not None, "there is no checkpoint to go on from"
    loop = Loop(kind, seed=1234)  # what the state does not bring back is another run's
    loop.restore(state)
    return loop, state
