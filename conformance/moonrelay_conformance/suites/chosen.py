"""What pytest collects when a target is named and no file is: the suite for that target's kind, and no other.

Owns the table of kinds. A class is made for each session, so that sessions with other targets may be nested.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moonrelay.errors import PluginError
from moonrelay_conformance.suites.base import Suite

#: Kind of a target to the class of its suite.
SUITES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adapter": "moonrelay_conformance.suites.adapter:AdapterConformance",
        "engine": "moonrelay_conformance.suites.engine:EngineConformance",
        "relay": "moonrelay_conformance.suites.relay:RelayConformance",
        "queue": "moonrelay_conformance.suites.queue:QueueConformance",
        "cache": "moonrelay_conformance.suites.cache:CacheConformance",
        "checkpoint": "moonrelay_conformance.suites.checkpoint:CheckpointConformance",
    }
)


def suite_for(kind: str) -> type[Suite]:
    """Return the class of the suite for a kind of target; imports that suite only.

    Raises:
        PluginError: There is none, or it cannot be imported; the message says why.
    """
    where = SUITES.get(kind)
    if where is None:
        message = f"there is no suite for the kind {kind!r}; known: {', '.join(SUITES)}"
        raise PluginError(message, kind=kind)
    module, _, name = where.partition(":")
    try:
        found: type[Suite] = getattr(importlib.import_module(module), name)
    except ImportError as exc:
        message = f"the suite for the kind {kind!r} cannot be imported: {exc}; pip install 'moonrelay[conformance]'"
        raise PluginError(message, kind=kind) from exc
    return found


def class_for(kind: str) -> tuple[str, type[Suite]]:
    """Return a new class for pytest to collect, ``TestAdapter`` and so on, and its name."""
    base = suite_for(kind)
    name = f"Test{kind.capitalize()}"
    return name, type(name, (base,), {"__module__": __name__, "__doc__": base.__doc__})
