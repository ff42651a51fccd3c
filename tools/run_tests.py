"""Run our tests with pytest: several at a time, then those marked ``alone`` one after the other.

Arguments are pytest's, e.g. ``-k lease``. Most tests wait, for leases and processes, so that there are two workers per
core; ``-n 0`` runs all one after the other. Only the workers' number is ours: what is run stands in pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Final

ALONE: Final = "alone"
WORKERS_PER_CORE: Final = 2
MOST_WORKERS: Final = 8
#: What pytest ends with when all is well, when tests failed, and when there was none to run.
PASSED, FAILED, NONE = 0, 1, 5


def main(argv: list[str]) -> int:
    """Run the parts; return the first exit status that is not well."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marked", default="")
    parser.add_argument("-n", "--numprocesses", dest="workers", type=int, default=workers())
    options, others = parser.parse_known_args(argv)
    if not options.workers:
        return pytest([*(["-m", options.marked] if options.marked else []), *others])
    also = f" and ({options.marked})" if options.marked else ""
    codes = []
    for expression, how in (
        (f"not {ALONE}{also}", ["-n", str(options.workers), "--dist", "worksteal"]),
        (f"{ALONE}{also}", []),
    ):
        codes.append(pytest(["-m", expression, *how, *others]))
        if codes[-1] not in (PASSED, FAILED, NONE):
            break  # interrupted, or used wrongly
    bad = [code for code in codes if code not in (PASSED, NONE)]
    return bad[0] if bad else min(codes)


def workers() -> int:
    """Return how many tests run at a time on this machine."""
    return min(MOST_WORKERS, WORKERS_PER_CORE * len(os.sched_getaffinity(0)))


def pytest(arguments: list[str]) -> int:
    """Run pytest in a process of its own; return its exit status."""
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
