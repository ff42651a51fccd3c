"""What a process holds of things that must not pile up: descriptors, threads, mappings of shared memory.

Owns the look into ``/proc`` and the two comparisons. Nothing of the code under test is asked: what the system lists is
believed. Only the *names* of Python's threads come from inside, from the runner, and only sort what the system counted.

Two ways to compare, for two questions:

- `beyond` holds one look against an earlier one, for a single scenario. What may differ without being a leak is named:
  workers of pools (``ThreadPoolExecutor`` numbers its threads, and makes them as they are first needed), and a slack.
- `leaks` looks at a series, one look per cycle. A pool, a cache of connections or of mappings grows until it is full
  and then stays; a leak grows with the number of cycles. So what still rose by about one per cycle in the second half
  of the series is a leak, however small, and what stopped rising is none, however large.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: How ``ThreadPoolExecutor`` and most native pools name their workers: a number at the end.
_NUMBERED = re.compile(r"[-_#]?\d+\Z")
#: Shared mappings are memory that another process may hold too: segments, memfds, SysV and POSIX shared memory.
_SHARED_FIELD = 3
#: Fewer cycles cannot tell a pool that fills from a leak.
FEWEST_CYCLES = 6


@dataclass(frozen=True, slots=True)
class Slack:
    """How much more a process may hold after a scenario than before, beyond workers of pools.

    Attributes:
        fds: Descriptors: connections to peers that stay open for the next payload.
        threads: Threads that no pool's numbering explains.
        maps: Shared mappings: segments of peers that stay mapped for the next read.
    """

    fds: int = 0
    threads: int = 0
    maps: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds, counted by name.

    Attributes:
        fd_names: Descriptors by what they lead to, numbers left out: ``socket``, ``anon_inode:[eventfd]``, a path.
        thread_names: Threads by name; those that Python knows by Python's name, a trailing number left out.
        map_names: Mappings of shared memory by name, numbers and nonces kept.
        pooled: How many of the threads are numbered workers of a pool.
    """

    fd_names: Mapping[str, int] = field(default_factory=dict)
    thread_names: Mapping[str, int] = field(default_factory=dict)
    map_names: Mapping[str, int] = field(default_factory=dict)
    pooled: int = 0

    @property
    def fds(self) -> int:
        """Number of open descriptors."""
        return sum(self.fd_names.values())

    @property
    def threads(self) -> int:
        """Number of threads, pools' workers included."""
        return sum(self.thread_names.values())

    @property
    def maps(self) -> int:
        """Number of mappings of shared memory."""
        return sum(self.map_names.values())

    def counts(self) -> dict[str, int]:
        """Return the three numbers by name."""
        return {"fds": self.fds, "threads": self.threads, "maps": self.maps}


def look(pid: int, names: Mapping[int, str] | None = None) -> Held:
    """Return what process ``pid`` holds now.

    Args:
        pid: A process of this user.
        names: Names of its threads by their kernel's id, as far as they are known.

    Raises:
        ProcessLookupError: There is no such process.
    """
    root = Path(f"/proc/{pid}")
    if not root.exists():
        message = f"process {pid} is gone"
        raise ProcessLookupError(message)
    known = names or {}
    fds: Counter[str] = Counter()
    for entry in _entries(root / "fd"):
        try:
            fds[_kind_of(str(entry.readlink()))] += 1
        except OSError:  # closed while we looked
            continue
    threads: Counter[str] = Counter()
    pooled = 0
    for entry in _entries(root / "task"):
        name = known.get(int(entry.name))
        if name is not None and _NUMBERED.search(name):
            pooled += 1
            name = _NUMBERED.sub("", name)
        try:
            threads[name or (entry / "comm").read_text().strip()] += 1
        except OSError:  # ended while we looked
            continue
    return Held(dict(fds), dict(threads), dict(_shared_mappings(root)), pooled)


def beyond(before: Held, after: Held, slack: Slack | None = None) -> list[str]:
    """Return what a process holds more than before, in words; empty where that is nothing beyond the slack.

    Workers of pools are not counted: they are made as they are first needed, up to a number. A pool that is made anew
    for every payload is seen by `leaks`.
    """
    allowed = slack or Slack()
    rose = {
        "descriptors": (after.fds - before.fds, allowed.fds, _risen(before.fd_names, after.fd_names)),
        "threads": (
            (after.threads - after.pooled) - (before.threads - before.pooled),
            allowed.threads,
            _risen(before.thread_names, after.thread_names),
        ),
        "shared mappings": (after.maps - before.maps, allowed.maps, _risen(before.map_names, after.map_names)),
    }
    return [f"{by} {what} more: {names}" for what, (by, free, names) in rose.items() if by > free]


def leaks(series: Sequence[Held]) -> list[str]:
    """Return what grows with the number of cycles, in words; empty where nothing does.

    Args:
        series: One look after each of at least `FEWEST_CYCLES` equal cycles, with nothing in flight at the look.

    Raises:
        ValueError: The series is too short to tell.
    """
    if len(series) < FEWEST_CYCLES:
        message = f"{len(series)} looks cannot tell a leak from a pool that fills; take at least {FEWEST_CYCLES}"
        raise ValueError(message)
    middle = len(series) // 2
    half = series[middle:]
    cycles = len(half) - 1
    # The lowest of two looks at each end: a connection that is just being closed is no leak.
    found = []
    for what, count in (("descriptors", "fds"), ("threads", "threads"), ("shared mappings", "maps")):
        start = min(half[0].counts()[count], half[1].counts()[count])
        end = min(half[-1].counts()[count], half[-2].counts()[count])
        # One in ten may be explained by chance; one per cycle is what is looked for.
        if end - start >= max(2, round(0.8 * (cycles - 1))):
            names = {"fds": "fd_names", "threads": "thread_names", "maps": "map_names"}[count]
            risen = _risen(getattr(half[0], names), getattr(half[-1], names))
            found.append(f"{end - start} {what} more after {cycles} cycles: {risen}")
    return found


def _risen(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    risen = {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}
    return ", ".join(f"{name} +{by}" for name, by in sorted(risen.items())) or "none by name"


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _kind_of(target: str) -> str:
    """Return what a descriptor leads to without what is new each time: ``socket:[123]`` is a socket."""
    if target.startswith(("socket:", "pipe:")):
        return target.partition(":")[0]
    return target.removesuffix(" (deleted)")


def _shared_mappings(root: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    try:
        lines = (root / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        parts = line.split(maxsplit=5)
        if len(parts) > 1 and parts[1][_SHARED_FIELD] == "s":
            found[parts[5].removesuffix(" (deleted)") if len(parts) > 5 else "anonymous"] += 1
    return found
