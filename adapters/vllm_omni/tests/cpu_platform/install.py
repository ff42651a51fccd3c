"""Put the CPU platform into an environment, or take it out: ``PYTHON -m cpu_platform.install [--remove]``.

Run by the Python of that environment with this package's parent folder as ``PYTHONPATH``. The files stay where they
are; the environment gets a path file, which also runs the shim, and the metadata that holds the entry point.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
from pathlib import Path

PATH_FILE = "_moonrelay_cpu_platform.pth"
METADATA = "moonrelay_cpu_platform-0.dist-info"


def install(site: Path) -> None:
    """Write both into a ``site-packages``; again is the same."""
    tests = Path(__file__).resolve().parents[1]
    (site / PATH_FILE).write_text(f"{tests}\nimport cpu_platform.torchvision_shim\n", encoding="utf-8")
    folder = site / METADATA
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: moonrelay-cpu-platform\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm_omni.platform_plugins]\nmoonrelay_cpu = cpu_platform:activate\n")


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
