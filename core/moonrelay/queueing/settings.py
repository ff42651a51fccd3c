"""Settings of a queue."""

from __future__ import annotations

from dataclasses import dataclass

from moonrelay.config import require_positive
from moonrelay.errors import ConfigError


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
        )
        for name in ("retry_delay_s", "affinity_wait_s"):
            value = getattr(self, name)
            if not value >= 0:
                message = f"{name}={value!r} must not be negative"
                raise ConfigError(message, field=name)
        if self.renew_s * 2 > self.lease_s:
            message = f"renew_s={self.renew_s!r} must be at most half of lease_s={self.lease_s!r}"
            raise ConfigError(message, field="renew_s")
