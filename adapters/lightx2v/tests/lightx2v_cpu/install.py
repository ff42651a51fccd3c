"""Lets processes find the CPU support: by the path that they search alone, so that no environment is changed.

``python -m lightx2v_cpu.install FOLDER`` writes the metadata there and says which variables a process needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

METADATA = "moonrelay_lightx2v_cpu_support-0.dist-info"
ENTRY_POINTS = """\
[lightx2v.platform_plugins]
moonrelay_test_cpu = lightx2v_cpu.platform:register
"""
#: Where a process says "1" the host's text encoder and VAE, whose sizes it has in its code, are tiny.
TINY = "MOONRELAY_TEST_LIGHTX2V_TINY"
#: Path of a file to which a process writes what its text encoder does, a word and a line's end for each.
COUNTS = "MOONRELAY_TEST_LIGHTX2V_COUNTS"


def place(folder: Path) -> dict[str, str]:
    """Write the metadata that holds the entry point into a folder; again is the same.

    Returns:
        The variables of a process that is to run the host on a CPU, with tiny models.
    """
    metadata = folder / METADATA
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: moonrelay-lightx2v-cpu-support\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    tests = Path(__file__).resolve().parents[1]
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    searched = [str(folder.resolve()), str(tests), *(place for place in others if place)]
    return {"PLATFORM": "cpu", TINY: "1", "PYTHONPATH": os.pathsep.join(searched)}


if __name__ == "__main__":
    for name, value in place(Path(sys.argv[1])).items():
        print(f"export {name}={value}")
