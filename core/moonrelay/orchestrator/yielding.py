"""Whether a job is worth leaving for a waiting one: its pace, and what is left of it.

Owns the worker's half of preemption. The queue's half, who makes way for whom, is `moonrelay.queueing.preemption`.
"""

from __future__ import annotations

from moonrelay.clock import Clock
from moonrelay.queueing.job import Job
from moonrelay.queueing.settings import QueueConfig


class Yielding:
    """One job's readiness to be left, which it offers to the queue.

    A job is offered once its program asks whether to leave it, which says that it can be, and for as long as more than
    `QueueConfig.preempt_least_steps` and ``preempt_least_s`` say is left. How long it takes is known from its second
    step on, so that a job that was taken up again gets on before it can be left again.

    Args:
        job: The job.
        settings: The queue's.
        clock: Time.

    Threads: the one that does the job.
    """

    def __init__(self, job: Job, settings: QueueConfig, clock: Clock) -> None:
        self._job = job
        self._settings = settings
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._left_steps = 0
        self._left_s: float | None = None

    def step(self, done: int, total: int) -> None:
        """Take note of steps done."""
        now = self._clock.monotonic()
        self._left_steps = max(0, total - done)
        if self._first is None or done < self._first[0]:
            self._first = (done, now)
        elif done > self._first[0]:
            began, at_s = self._first
            self._left_s = (now - at_s) / (done - began) * self._left_steps

    def asked(self) -> bool:
        """Offer the job, or take the offer back; return whether the queue wants it left."""
        worth = self._worth()
        self._job.offer(worth)
        return worth and self._job.yield_to != ""

    def _worth(self) -> bool:
        if self._left_steps < self._settings.preempt_least_steps or self._left_s is None:
            return False
        return self._left_s >= self._settings.preempt_least_s
