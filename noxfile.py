"""Sessions: ``unit`` and ``wheel`` need no host; a session per host runs that host's adapter tests."""

from __future__ import annotations

import json
import shutil
import sys
import sysconfig
from pathlib import Path

import nox

nox.options.sessions = ["unit", "wheel"]
nox.options.error_on_external_run = False
nox.needs_version = ">=2024.4"

ROOT = Path(__file__).parent
#: Sessions that run a host's own adapter tests in an environment of their own; .ci/run runs them all.
HOST_SESSIONS: tuple[str, ...] = ()


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """Run the fast tests in the environment that runs nox."""
    session.run(
        sys.executable,
        "-m",
        "pytest",
        "tests/unit",
        "tests/property",
        "tests/test_architecture.py",
        *session.posargs,
    )


@nox.session(venv_backend="none")
def diffusers(session: nox.Session) -> None:
    """Run the reference host's tests in the environment that runs nox."""
    session.run(sys.executable, "-m", "pytest", "adapters/diffusers/tests", *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build the wheel, try it with its core dependencies alone, then run its tests outside the checkout.

    torch, mooncake and the test tools are borrowed from the environment that runs nox, by a path file: what is tested
    is the wheel of Moonrelay, not of torch.
    """
    scratch = Path(session.create_tmp()).resolve()
    built = scratch / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run(sys.executable, "-m", "build", "--wheel", "--outdir", str(built), str(ROOT), external=True, silent=True)
    (archive,) = built.glob("moonrelay-*.whl")
    lender = scratch_path_file(session)
    lender.unlink(missing_ok=True)
    session.install("--force-reinstall", "-c", "constraints.txt", str(archive))

    elsewhere = scratch / "away"
    shutil.rmtree(elsewhere, ignore_errors=True)
    shutil.copytree(ROOT / "tests", elsewhere / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", elsewhere)
    session.chdir(elsewhere)
    session.env["PYTHONPATH"] = ""

    # Alone: no torch, no mooncake.
    session.run("moonrelay", "--help", silent=True)
    session.run("moonrelay", "version")
    session.run(
        "python", "-c", "import moonrelay, sys; assert 'torch' not in sys.modules and 'mooncake' not in sys.modules"
    )

    lender.write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = session.run(
        "python", "-c", "import json, moonrelay, torch; print(json.dumps(moonrelay.__file__))", silent=True
    )
    if str(ROOT / "core") in json.loads(str(where)):
        session.error(f"the tests would run against the checkout: {where}")
    session.run(
        "python", "-m", "pytest", "tests/unit", "tests/property", "tests/test_architecture.py", *session.posargs
    )


def scratch_path_file(session: nox.Session) -> Path:
    """Return where the path file lies that lends the session the packages of the environment that runs nox."""
    (site,) = Path(session.virtualenv.location).glob("lib/python3*/site-packages")
    return site / "zz-lent.pth"
