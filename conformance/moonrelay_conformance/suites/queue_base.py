"""What the queue suite's modules share: queues that are opened and closed for a test, time, and short words for acts.

Owns the settings under which the suite runs a queue. Times in the tests are in *units*: seconds of a clock that the
test moves where the target takes one, else short stretches of real time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import ClassVar, Final

import pytest

from moonrelay.clock import ManualClock
from moonrelay.queueing import Job, Pipeline, QueueEvent, RequestView, StageQueue, StageTask, Worker
from moonrelay_conformance.suites.base import Suite
from moonrelay_conformance.targets.parts import QueueTarget

#: A claim's life, in units; see `OpenQueue`.
LEASE: Final = 10.0
#: How long a call that should come back may take on a busy machine, in real seconds.
PATIENCE_S: Final = 60.0
#: Kinds of events that are a request's end.
ENDS: Final = ("done", "failed", "cancelled", "dead")
#: Within this a call that waits must come back, in real seconds; below the 30 s after which a `ManualClock` wakes it.
_WOKEN_S: Final = 20.0
_REAL_UNIT_S: Final = 0.2


class Pace:
    """The passing of time, in units.

    Args:
        manual: Whether the queue takes a clock that the test moves.

    Attributes:
        clock: To be given to the queue; ``None`` is the machine's.
    """

    def __init__(self, *, manual: bool) -> None:
        self.clock = ManualClock() if manual else None
        self._unit_s = 1.0 if manual else _REAL_UNIT_S

    def s(self, units: float) -> float:
        """Return ``units`` in seconds of the queue's clock."""
        return units * self._unit_s

    def advance(self, units: float) -> None:
        """Let time pass. Blocks: for as long, where the clock is the machine's."""
        if self.clock is not None:
            self.clock.advance(self.s(units))
        else:
            threading.Event().wait(self.s(units))


class OpenQueue:
    """Opens queues of the target and closes them after the test.

    Args:
        target: Whose queues.
        pace: Time.
        folder: Of the test.
    """

    def __init__(self, target: QueueTarget, pace: Pace, folder: Path) -> None:
        self._target = target
        self._pace = pace
        self._folder = folder
        self._opened: list[StageQueue] = []

    def __call__(self, *, url: str | None = None, pipeline: Pipeline | None = None, **settings: object) -> StageQueue:
        """Open a queue.

        Args:
            url: Of a queue that was opened before; a new one by default.
            pipeline: As in `StageQueue.connect`.
            **settings: Fields of `moonrelay.queueing.QueueConfig`, times in seconds; they override the suite's.
        """
        pace = self._pace
        config: dict[str, object] = {
            "lease_s": pace.s(LEASE),
            "renew_s": pace.s(2),
            "retry_delay_s": pace.s(1),
            "retry_delay_max_s": pace.s(5),
            "affinity_wait_s": pace.s(2),
            **settings,
        }
        place = self._target.url(self._folder) if url is None else url
        queue = self._target.open(place, clock=pace.clock, pipeline=pipeline, config=config)
        self._opened.append(queue)
        return queue

    def close(self) -> None:
        """Close what was opened."""
        for queue in self._opened:
            queue.close()


class QueueSuite(Suite):
    """Base of the queue suite's modules."""

    kind: ClassVar[str] = "queue"

    @pytest.fixture
    def pace(self, target: QueueTarget) -> Pace:
        """Time, as the target takes it."""
        return Pace(manual=target.takes_clock)

    @pytest.fixture
    def open_queue(self, target: QueueTarget, pace: Pace, tmp_path: Path) -> Iterator[OpenQueue]:
        """A way to open queues."""
        opened = OpenQueue(target, pace, tmp_path)
        yield opened
        opened.close()

    @pytest.fixture
    def queue(self, open_queue: OpenQueue) -> StageQueue:
        """A new queue."""
        return open_queue()


def join(
    queue: StageQueue,
    stage: str,
    *,
    slots: int = 1,
    buffers: int | None = None,
    affinity: Mapping[str, str] | None = None,
) -> Worker:
    """Register a worker that renews only when told."""
    return queue.register_worker(stage, slots=slots, buffers=buffers, affinity=affinity, heartbeat=False)


def take(worker: Worker) -> Job:
    """Take a job that must be there."""
    job = worker.take(timeout_s=0)
    assert job is not None, f"{worker!r} was given no job though one waits for it"
    return job


def idle(worker: Worker) -> bool:
    """Return whether a worker is given nothing now."""
    job = worker.take(timeout_s=0)
    if job is None:
        return True
    job.give_back()
    return False


def view(queue: StageQueue, request_id: str) -> RequestView:
    """Return how a request stands."""
    found = [one for one in queue.requests() if one.request_id == request_id]
    assert len(found) == 1, f"request {request_id} stands {len(found)} times in the queue"
    return found[0]


def at(queue: StageQueue, request_id: str) -> tuple[str, str]:
    """Return a request's state and stage."""
    one = view(queue, request_id)
    return one.state, one.stage


def kinds(queue: StageQueue, request_id: str) -> list[str]:
    """Return the kinds of a request's events, in order."""
    return [event.kind for event in all_events(queue) if event.request_id == request_id]


def all_events(queue: StageQueue) -> list[QueueEvent]:
    """Return every event that is kept, page by page."""
    found: list[QueueEvent] = []
    while page := queue.events(found[-1].number if found else 0):
        found += page
    return found


def submit(queue: StageQueue, request_id: str, stage: str = "encode", **fields: object) -> None:
    """Submit a request that must be taken in."""
    task = StageTask(stage=stage, request_id=request_id, **fields)  # type: ignore[arg-type]
    assert queue.submit(task) is True


class Aside:
    """A call in a thread of its own, and what came of it.

    Args:
        act: The call.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self._value: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="moonrelay-aside", daemon=True)
        self._thread.start()

    def outcome(self) -> object:
        """Return what the call returned, or raise what it raised. Blocks: until then, `_WOKEN_S` at most."""
        self._thread.join(_WOKEN_S)
        assert not self._thread.is_alive(), f"the call did not come back within {_WOKEN_S:g} s"
        if self._error is not None:
            raise self._error
        return self._value

    def running(self, for_s: float = 0.1) -> bool:
        """Return whether the call is still waiting after ``for_s``. Blocks: as long at most."""
        self._thread.join(for_s)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._value = self._act()
        except BaseException as exc:  # noqa: BLE001 - it is raised where the outcome is asked for
            self._error = exc
