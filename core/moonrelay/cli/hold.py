"""A program that stops in the middle of its first job, so that a kill provably lands there.

Owns a fault demonstration's only trick. The worker's heartbeat goes on meanwhile, as during a long step of a real
model: to the queue and to its peers the job is simply under way.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.config import require_positive
from moonrelay.orchestrator.program import Outcome, StageProgram, Work

logger = logging.getLogger(__name__)

#: Note of the progress report with which a job is held; a supervisor looks for it.
HELD = "held"
#: A held job goes on by itself after this long, in seconds.
HOLD_S = 60.0
_LOOK_S = 0.1


class HoldingProgram:
    """Holds the first job once it has come far enough.

    A stage that reports no progress is held at its end: its result is published, the job not settled yet.

    Args:
        program: What the stage computes.
        hold_at: Fraction of the job at which it is held, above 0 to 1.
        go_on: Says whether a held job shall go on.
        clock: Time.

    Raises:
        ConfigError: ``hold_at`` is out of range.
    """

    def __init__(
        self, program: StageProgram, hold_at: float, go_on: Callable[[], bool], clock: Clock | None = None
    ) -> None:
        self.hold_at = hold_at
        require_positive(self, "hold_at")
        self.stage = program.stage
        self._program = program
        self._go_on = go_on
        self._clock: Clock = clock or SystemClock()
        self._held = False

    def process(self, work: Work) -> Outcome:
        """Do one job; the first one with a pause."""
        if self._held:
            return self._program.process(work)
        outcome = self._program.process(_HeldWork(work, self._reached))
        self._reached(work, 1.0)
        return outcome

    def _reached(self, work: Work, fraction: float) -> None:
        if self._held or fraction < self.hold_at:
            return
        self._held = True
        work.job.progress(min(1.0, fraction), HELD)
        logger.warning("holding %s of %s at %.0f %%", self.stage, work.job.request_id, fraction * 100)
        pause = threading.Condition()
        deadline = Deadline(HOLD_S, self._clock)
        while not (self._go_on() or work.stopped() or deadline.expired):
            with pause:
                self._clock.wait(pause, _LOOK_S)


class _HeldWork(Work):
    """A `Work` whose progress reports are looked at."""

    __slots__ = ("_reached",)
    _reached: Callable[[Work, float], None]

    def __init__(self, work: Work, reached: Callable[[Work, float], None]) -> None:
        super().__init__(work.job, work.connector, work.claim, work.leaving, work._yielding)  # noqa: SLF001 - its own kind
        object.__setattr__(self, "_reached", reached)

    def report(self, done: int, total: int, note: str = "") -> None:
        super().report(done, total, note)
        self._reached(self, done / max(1, total))
