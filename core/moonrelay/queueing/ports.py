"""What a worker and its jobs ask of a queue: the narrow side that each backend gives them.

Owns the contract between `Worker`/`Job` and a backend, so that a backend with rules of its own (on a server) can use
both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import MoonrelayError
from moonrelay.queueing.delivery import Delivery
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.states import State
from moonrelay.queueing.store import WorkerRow
from moonrelay.queueing.task import Plain, StageTask


class WorkerPort(Protocol):
    """A backend's side towards workers. All methods raise `ClosedError` once the queue is closed.

    Threads: any.
    """

    @property
    def clock(self) -> Clock: ...

    @property
    def config(self) -> QueueConfig: ...

    def join(self, worker: WorkerRow) -> WorkerRow:
        """Register a worker; return its row with a unique id."""
        ...

    def leave(self, worker: WorkerRow) -> None:
        """Remove a worker; its jobs go back to the queue."""
        ...

    def claim(self, worker: WorkerRow, deadline: Deadline, stopped: Callable[[], bool]) -> Delivery | None:
        """Take the next job. Blocks: until there is one, the deadline, or ``stopped()``."""
        ...

    def renew(self, worker: WorkerRow, held: Mapping[str, int]) -> Mapping[str, MoonrelayError]:
        """Renew the registration and the claims ``held``; return why each lost one is lost."""
        ...

    def advance(self, request_id: str, token: int, task: StageTask) -> None:
        """Complete a stage with the next one's task."""
        ...

    def finish(self, request_id: str, token: int, result: Plain) -> None:
        """Complete a request."""
        ...

    def fail(self, request_id: str, token: int, error: MoonrelayError, retryable: bool) -> State:
        """Report a failure; return the state that it led to."""
        ...

    def give_back(self, request_id: str, token: int, note: str, *, counts: bool = True) -> State:
        """Return a job unfinished; ``counts`` says whether it was an attempt."""
        ...

    def lose_input(self, request_id: str, token: int, error: MoonrelayError) -> State:
        """Send a request back to the stage that made the job's input."""
        ...

    def progress(self, request_id: str, token: int, fraction: float, note: str) -> None:
        """Note how far a job is."""
        ...

    def make_way(self, request_id: str, token: int, *, willing: bool) -> str:
        """Return the waiting request that a job is to make way for, or an empty text.

        ``willing`` says whether the job can be left at its next boundary, and leaving it is worth it; the rule is
        `moonrelay.queueing.preemption`'s.
        """
        ...

    def wake(self) -> None:
        """Make everybody who waits in this process look again."""
        ...
