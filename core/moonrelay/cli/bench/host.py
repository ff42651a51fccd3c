"""What a measurement was made on: the machine, its load, and the versions of what moves bytes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("moonrelay", "torch", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "pyzmq", "xxhash")


def describe() -> dict[str, object]:
    """Return the facts by name; load is the mean number of runnable processes of the last minute."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": load(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def load() -> float:
    """Return the one-minute load average."""
    return round(os.getloadavg()[0], 2)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
