"""Moonrelay's conformance suite: what every adapter, engine, relay and queue must pass.

Importing this package loads neither torch nor a host. Its names are looked up on first use, since pytest imports the
package in every session of everybody who has Moonrelay installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moonrelay_conformance.capability import Capability, Support
    from moonrelay_conformance.results import Kind, Level, Outcome, Report, Result, TargetInfo

__all__ = ["Capability", "Kind", "Level", "Outcome", "Report", "Result", "Support", "TargetInfo"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    module = "capability" if name in ("Capability", "Support") else "results"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
