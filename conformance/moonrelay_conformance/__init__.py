"""Moonrelay's conformance suite: what every adapter, engine, relay and queue must pass.

Importing this package loads neither torch nor a host.
"""

from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.results import Kind, Level, Outcome, Report, Result, TargetInfo

__all__ = ["Capability", "Kind", "Level", "Outcome", "Report", "Result", "Support", "TargetInfo"]
