"""Settings of a queue."""

from __future__ import annotations

from dataclasses import dataclass

from moonrelay.config import require_positive
from moonrelay.errors import ConfigError
from moonrelay.queueing.precedence import Precedence, read_precedence


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """How a queue behaves; read from ``MOONRELAY_QUEUE_*`` where not given.

    Attributes:
        lease_s: A claim, and a worker's registration, that was not renewed for this long is lost.
        renew_s: Pause between two renewals.
        max_depth: Requests under way at most; `StageQueue.submit` beyond it raises `QueueFull`.
        max_attempts: Deliveries of one stage's work at most, where the task does not say.
        retry_delay_s: Pause before the second attempt after a retryable failure; it doubles with each further one.
        retry_delay_max_s: Bound of that pause.
        affinity_wait_s: After this long in the queue a task goes to any worker, whatever its affinity.
        keep_ended: Ended requests that are kept for `StageQueue.result`; the oldest go first.
        keep_events: Events kept for `StageQueue.events`.
        max_task_bytes: Bound of one task's payload, and of one result, encoded.
        busy_timeout_s: Longest wait for the backend's own lock.
        preempt: Which classes' waiting tasks make a running job of which other class go back to the queue at a boundary
            from where it can go on: ``interactive>batch``, ``interactive>standard+batch, standard>batch``; empty, the
            default, for none. What counts is the setting of the process that runs the job.
        preempt_least_s: A job that is expected to end sooner is not left.
        preempt_least_steps: Nor is one with fewer steps to go.
        preempt_at_most: How often one stage's work of one request makes way; afterwards it runs to its end.
        poll_s: Longest pause between two looks at the backend while somebody waits, should a wake-up be lost.
    """

    lease_s: float = 10.0
    renew_s: float = 2.0
    max_depth: int = 10_000
    max_attempts: int = 3
    retry_delay_s: float = 0.1
    retry_delay_max_s: float = 5.0
    affinity_wait_s: float = 2.0
    keep_ended: int = 1_000
    keep_events: int = 10_000
    max_task_bytes: int = 1 << 20
    busy_timeout_s: float = 10.0
    preempt: str = ""
    preempt_least_s: float = 2.0
    preempt_least_steps: int = 2
    preempt_at_most: int = 3
    poll_s: float = 0.5

    def __post_init__(self) -> None:
        require_positive(
            self,
            "lease_s",
            "renew_s",
            "max_depth",
            "max_attempts",
            "retry_delay_max_s",
            "keep_ended",
            "keep_events",
            "max_task_bytes",
            "busy_timeout_s",
            "poll_s",
            "preempt_least_steps",
            "preempt_at_most",
        )
        for name in ("retry_delay_s", "affinity_wait_s", "preempt_least_s"):
            value = getattr(self, name)
            if not value >= 0:
                message = f"{name}={value!r} must not be negative"
                raise ConfigError(message, field=name)
        if self.renew_s * 2 > self.lease_s:
            message = f"renew_s={self.renew_s!r} must be at most half of lease_s={self.lease_s!r}"
            raise ConfigError(message, field="renew_s")
        read_precedence(self.preempt)

    @property
    def precedence(self) -> Precedence:
        """What `preempt` says, by the class that is preempted."""
        return read_precedence(self.preempt)
