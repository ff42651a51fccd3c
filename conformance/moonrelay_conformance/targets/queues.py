"""Targets for queues that are installed under a URL scheme: the built-in ones, and third parties'.

Owns what is known of each scheme: the URL of a new queue, and what it can do. A backend of which more must be known
offers ``conformance_target()`` on its class.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

from moonrelay.clock import Clock
from moonrelay.errors import PluginError
from moonrelay.plugins import QUEUES, Registry
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import Pipeline
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.parts import QueueTarget, declared

#: What the built-in queues can do; of a third party's nothing is assumed.
_KNOWN: Final[Mapping[str, tuple[Capability, ...]]] = MappingProxyType(
    {"memory": (), "sqlite": (Capability.PROCESSES, Capability.DURABLE)}
)


class InstalledQueue(QueueTarget):
    """A queue of the entry-point group ``moonrelay.queues``, by its URL scheme.

    Args:
        name: The scheme.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(*_KNOWN.get(self.name, ()))

    def distribution(self) -> str:
        found = Registry(QUEUES).describe_one(self.name)
        return " ".join(filter(None, (found.distribution, found.version)))

    def url(self, folder: Path) -> str:
        if self.name == "memory":
            return "memory://"
        return f"{self.name}:///{quote(str(folder))}/queue-{secrets.token_hex(4)}.db"

    def open(
        self, url: str, *, clock: Clock | None, pipeline: Pipeline | None, config: Mapping[str, object] | None
    ) -> StageQueue:
        return StageQueue.connect(url, clock=clock, pipeline=pipeline, config=config)


def target_for(name: str) -> QueueTarget:
    """Return the target of an installed queue.

    Args:
        name: A URL scheme of the group ``moonrelay.queues``.

    Raises:
        PluginError: No queue of that name is installed; the message lists those that are.
    """
    names = Registry(QUEUES).names()
    if name not in names:
        message = f"queue {name!r} is not installed; use one of {', '.join(names)}"
        raise PluginError(message, group=QUEUES, plugin=name)
    return InstalledQueue(name)
