"""The protocols of a transfer engine, a relay and a queue under test, and the targets made for a name.

A part that is installed under one of Moonrelay's entry-point groups needs no target of its own: `EngineTarget`,
`RelayTarget` and `QueueTarget` work with its name. A class that needs more (services, other settings) offers
``conformance_target()``, as an adapter does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.base import Target

if TYPE_CHECKING:
    from moonrelay.clock import Clock
    from moonrelay.config import TransferConfig
    from moonrelay.queueing.base import StageQueue
    from moonrelay.queueing.task import Pipeline
    from moonrelay.relay.base import Relay
    from moonrelay.transfer.base import TransferEngine


class EngineTarget(Target):
    """A transfer engine under test."""

    kind: ClassVar[str] = "engine"

    @abstractmethod
    def config(self, folder: Path, **changes: object) -> TransferConfig:
        """Return settings for an engine whose files, if any, lie in ``folder``; ``changes`` override fields."""

    @abstractmethod
    def make(self, config: TransferConfig) -> TransferEngine:
        """Return a new engine, not started. Importable names only: it is also made in processes of its own."""

    def memory_names(self, folder: Path) -> tuple[str, ...]:
        """Return the shared memory segments and files that engines made in ``folder``, read around the engine."""
        return ()


class RelayGround(AbstractContextManager["RelayGround"]):
    """A store for one run of the suite, and eyes on it."""

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the store."""

    @abstractmethod
    def stored(self) -> tuple[str, ...]:
        """Return what lies in the store, read around the relay; the form is the store's own."""


class RelayTarget(Target):
    """A relay under test."""

    kind: ClassVar[str] = "relay"

    @abstractmethod
    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        """Start, or name, a store of about ``capacity_bytes``."""

    @abstractmethod
    def make(self, url: str, *, capacity_bytes: int, namespace: str) -> Relay:
        """Return a new relay, not started."""


class QueueTarget(Target):
    """A queue under test.

    Attributes:
        takes_clock: Whether `open` goes by the clock given. Where the time is a server's, the suite waits instead.
    """

    kind: ClassVar[str] = "queue"
    takes_clock: ClassVar[bool] = True

    @abstractmethod
    def url(self, folder: Path) -> str:
        """Return the URL of a new, empty queue."""

    @abstractmethod
    def open(
        self, url: str, *, clock: Clock | None, pipeline: Pipeline | None, config: Mapping[str, object] | None
    ) -> StageQueue:
        """Open it; see `moonrelay.queueing.base.StageQueue.connect`."""


PART_CAPABILITIES = (
    Capability.PROCESSES,
    Capability.FOREIGN_MEMORY,
    Capability.LIVES,
    Capability.DURABLE,
    Capability.LISTING,
)


def declared(*there: Capability) -> Mapping[Capability, Support]:
    """Return a declaration in which ``there`` is supported and nothing else."""
    return {one: Support.FULL if one in there else Support.UNSUPPORTED for one in Capability}
