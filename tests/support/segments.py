"""Shared-memory segments of the shm engine, told apart by their owners: other deployments may run on the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PREFIX = "moonrelay-te-"


def _owners() -> dict[str, int]:
    """Return the segments that there are, by name, with their owner's process id."""
    names = (name for name in os.listdir("/dev/shm") if name.startswith(PREFIX))
    return {name: int(name.removeprefix(PREFIX).partition("-")[0]) for name in names}


def segments_of(pids: Iterable[int]) -> set[str]:
    """Return the segments of the processes ``pids``, also of dead ones."""
    wanted = set(pids)
    return {name for name, pid in _owners().items() if pid in wanted}


def abandoned_segments() -> set[str]:
    """Return the segments whose owner is gone."""
    return {name for name, pid in _owners().items() if not Path(f"/proc/{pid}").exists()}
