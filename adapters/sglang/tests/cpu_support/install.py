"""Put the CPU support into an environment, or take it out: ``PYTHON -m cpu_support.install [--remove]``.

Run by the Python of that environment with this package's parent folder as ``PYTHONPATH``. The files stay where they
are; the environment gets a path file, which also runs the shims, and the metadata that holds the entry points.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
from pathlib import Path

PATH_FILE = "_moonrelay_sglang_cpu_support.pth"
METADATA = "moonrelay_sglang_cpu_support-0.dist-info"
ENTRY_POINTS = """\
[sglang.multimodal_gen.plugins]
moonrelay_test_cpu = cpu_support.cures:register
moonrelay_test_faults = cpu_support.faults:register
moonrelay_test_counts = cpu_support.counts:register
"""


def install(site: Path) -> None:
    """Write both into a ``site-packages``; again is the same."""
    tests = Path(__file__).resolve().parents[1]
    (site / PATH_FILE).write_text(f"{tests}\nimport cpu_support.import_shims\n", encoding="utf-8")
    folder = site / METADATA
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moonrelay-sglang-cpu-support\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)


def remove(site: Path) -> None:
    """Take both out of a ``site-packages``."""
    (site / PATH_FILE).unlink(missing_ok=True)
    shutil.rmtree(site / METADATA, ignore_errors=True)


def installed() -> bool:
    """Say whether the environment of this process has it."""
    return (Path(sysconfig.get_paths()["purelib"]) / METADATA).is_dir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--site", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    options = parser.parse_args()
    (remove if options.remove else install)(options.site)


if __name__ == "__main__":
    main()
