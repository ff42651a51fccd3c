"""What the head's scheduler is asked to keep to, and what it tells its caller to do.

Owns the values alone; they are decided in `moonrelay_sglang.scheduling` and carried out in `moonrelay_sglang.head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from moonrelay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Give a request to an instance.

    Attributes:
        stage: The instance's stage.
        index: Its place among the stage's endpoints.
        epoch: The process that is meant; a successor at the same endpoint must not take it.
        request_id: The request.
        attempt: Number of this delivery, never used again; comes back with everything that follows from it.
        given: What the stage before made; ``None`` at the first stage.
    """

    stage: str
    index: int
    epoch: str
    request_id: str
    attempt: int
    given: StageInput | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Tell an instance to drop what it still holds of a delivery."""

    stage: str
    index: int
    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Tell the client that its request failed, and why, in one line."""

    request_id: str
    error: str
    code: str


Action: TypeAlias = Dispatch | Release | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInput:
    """What a stage made for the next one: the payload's manifest, and the values that travel beside it."""

    manifest: Mapping[str, Any]
    scalar_fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the head, in seconds where not said otherwise.

    Attributes:
        request_s: A request's whole life.
        queued_s: Its longest wait in one stage's queue; ``None`` is no bound but ``request_s``.
        dead_after_s: An instance that gave no sign of life for this long is dead.
        attempts: Deliveries of one stage's work at most.
        affinity_wait_s: After this long in the queue a request goes to any instance.
    """

    request_s: float = 3600.0
    queued_s: float | None = None
    dead_after_s: float = 5.0
    attempts: int = 3
    affinity_wait_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("request_s", "dead_after_s", "attempts"):
            if not getattr(self, name) > 0:
                message = f"{name}={getattr(self, name)!r} must be above 0"
                raise ConfigError(message, field=name)
        if self.queued_s is not None and not self.queued_s > 0:
            message = f"queued_s={self.queued_s!r} must be above 0, or None"
            raise ConfigError(message, field="queued_s")
