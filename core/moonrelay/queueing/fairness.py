"""Which priority class is served next: weighted shares by virtual time, so that no class starves another.

Owns the choice as a pure function. Each class with waiting work carries a *pass*, its place on a virtual time that
stands at 0 at the last choice; the smallest pass is served and moves on by the class's stride. A class that waits keeps
its pass, so it is served after a bounded number of others; a class that had nothing waiting comes back one stride after
now, so idleness earns nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeAlias

from moonrelay.queueing.task import PRIORITIES, Priority

#: Places on the virtual time, relative to the last choice; only classes with waiting work have one.
Passes: TypeAlias = Mapping[Priority, int]

#: Share of deliveries when all classes have work waiting: 16 to 4 to 1.
WEIGHTS: Mapping[Priority, int] = MappingProxyType({"interactive": 16, "standard": 4, "batch": 1})
_STRIDES: Mapping[Priority, int] = MappingProxyType({name: 16 // weight for name, weight in WEIGHTS.items()})


def choose(waiting: Collection[Priority], candidates: Collection[Priority], passes: Passes) -> tuple[Priority, Passes]:
    """Choose the class to serve.

    Args:
        waiting: Classes with work in the queue.
        candidates: Of these, the classes with work that the asking worker may take now; not empty.
        passes: State after the last choice.

    Returns:
        The class, and the state after this choice.
    """
    now = {name: passes.get(name, _STRIDES[name]) for name in PRIORITIES if name in waiting or name in candidates}
    chosen = min((name for name in now if name in candidates), key=lambda name: (now[name], PRIORITIES.index(name)))
    start = now[chosen]
    now[chosen] = start + _STRIDES[chosen]
    return chosen, {name: max(0, place - start) for name, place in now.items()}


def longest_wait(priority: Priority) -> int:
    """Return how many deliveries of other classes can come before the first waiting task of ``priority`` at most."""
    stride = _STRIDES[priority]
    return sum(stride // _STRIDES[name] + 1 for name in PRIORITIES if name != priority)
