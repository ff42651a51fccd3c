"""What the head's scheduler keeps of instances, deliveries under way and requests.

Owns the rows alone; `moonrelay_sglang.scheduling` reads and writes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from moonrelay.queueing.job import Job
from moonrelay.queueing.worker import Worker
from moonrelay_sglang.actions import Release, StageInput

#: How many earlier processes of an endpoint are remembered, so that none of them takes its place back.
_KEEP_EPOCHS: Final = 16


@dataclass(slots=True, kw_only=True)
class Instance:
    """One endpoint of a stage, and the process that answers there now."""

    stage: str
    index: int
    endpoint: str
    epoch: str = ""
    name: str = ""
    slots: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    heard_at_s: float | None = None
    worker: Worker | None = None
    deaths: int = 0
    #: Processes that another one followed.
    past: deque[str] = field(default_factory=lambda: deque(maxlen=_KEEP_EPOCHS))

    def __str__(self) -> str:
        return f"{self.stage}[{self.index}] at {self.endpoint}"


@dataclass(slots=True, kw_only=True)
class Running:
    """A delivery under way."""

    job: Job
    instance: Instance
    given_at_s: float
    unheld: int = 0
    #: When its result was said to be on its way.
    sent_at_s: float | None = None

    @property
    def attempt(self) -> int:
        """Number of the delivery."""
        return self.job.token


@dataclass(slots=True, kw_only=True)
class Request:
    """What the queue does not keep of a request."""

    #: By stage: what it is to be given.
    inputs: dict[str, StageInput] = field(default_factory=dict)
    #: Every delivery whose result may still be held somewhere.
    made: list[Release] = field(default_factory=list)
