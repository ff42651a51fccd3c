"""The suite for queues: `QueueConformance`."""

from __future__ import annotations

from typing import ClassVar

from moonrelay_conformance.suites.base import Suite


class QueueConformance(Suite):
    """What every queue must do."""

    kind: ClassVar[str] = "queue"
