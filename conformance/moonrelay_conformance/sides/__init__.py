"""Processes of producers and consumers: the runner inside, the handle outside, and what can be observed of them."""

from moonrelay_conformance.sides.probe import Held, Slack, beyond, leaks, look
from moonrelay_conformance.sides.process import SideEnded, SideFailed, SideHung, SidePool, SideProcess

__all__ = [
    "Held",
    "SideEnded",
    "SideFailed",
    "SideHung",
    "SidePool",
    "SideProcess",
    "Slack",
    "beyond",
    "leaks",
    "look",
]
