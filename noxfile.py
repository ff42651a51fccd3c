"""Sessions: ``unit`` and ``wheel`` need no host; a session per host runs that host's adapter tests.

``conformance`` runs the suite against what lies here, ``vllm_omni`` and ``sglang`` against the adapters of hosts that
need environments of their own, ``lightx2v`` in the environment of who brings that host, ``third_party`` against an
adapter that somebody else wrote, and ``matrix`` joins the reports that they left in ``out/conformance``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import nox
from nox.command import CommandFailed

nox.options.sessions = ["unit", "wheel"]
nox.options.error_on_external_run = False
nox.needs_version = ">=2024.4"

ROOT = Path(__file__).parent
#: Sessions that run a host's own adapter tests in an environment of their own; .ci/run runs them all. Each leaves the
#: report of its adapter in REPORTS, as ``third_party`` does.
HOST_SESSIONS: tuple[str, ...] = ("vllm_omni", "sglang")
#: What needs no service and no process beside it.
FAST_TESTS = ("tests/unit", "tests/property", "tests/test_architecture.py")
#: What ``conformance`` runs the suite against, in the environment that runs nox.
TARGETS = (
    "adapter:diffusers",  # the longest
    "engine:memory",
    "engine:shm",
    "engine:mooncake",
    "relay:memory",
    "relay:local",
    "relay:mooncake",
    "queue:memory",
    "queue:sqlite",
    "cache:memory",
    "cache:local",
    "cache:mooncake",
    "checkpoint:local",
    "checkpoint:mooncake",
)
#: What names a Python that can import LightX2V, which is on no package index.
LIGHTX2V_PYTHON = "MOONRELAY_LIGHTX2V_PYTHON"
#: What that Python must have beside the host; by the modules' names.
LIGHTX2V_NEEDS = (
    "lightx2v",
    "msgspec",
    "zmq",
    "xxhash",
    "typer",
    "rich",
    "mooncake",
    "starlette",
    "uvicorn",
    "httpx",
    "pytest",
    "pytest_timeout",
    "xdist",
    "hypothesis",
)
REPORTS = ROOT / "out" / "conformance"
COMMITTED = ROOT / "conformance" / "matrix.md"
#: The test that must find the fault of docs/examples/third_party_adapter_faulty.
PLANTED = "test_structure_is_kept"


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """Run the fast tests in the environment that runs nox."""
    session.run(sys.executable, "tools/run_tests.py", *FAST_TESTS, *session.posargs)


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
    archive = built_wheel(session, scratch)
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
    session.run("python", str(ROOT / "tools" / "run_tests.py"), *FAST_TESTS, *session.posargs)


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """Run the suite against every engine, relay, queue, cache and adapter of this environment; leave a report of each.

    Two at a time, since most checks wait; what one says is shown when it has ended. Everything after ``--`` goes to
    each run, e.g. ``--level L1``.
    """
    shutil.rmtree(REPORTS, ignore_errors=True)
    REPORTS.mkdir(parents=True)

    def conforms(target: str) -> bool:
        started = monotonic()
        report = REPORTS / f"{target.replace(':', '-')}.json"
        command = (sys.executable, "-m", "moonrelay.cli.main", "conformance", target, "--json", str(report))
        try:
            shown = session.run(*command, *session.posargs, silent=True)
        except CommandFailed:  # nox has shown why; the others are run all the same
            return False
        finally:
            session.log(f"{target}: {monotonic() - started:.0f} s")
        session.log(f"{target}:\n{shown}")
        return True

    with ThreadPoolExecutor(2) as lanes:
        failed = [target for target, good in zip(TARGETS, lanes.map(conforms, TARGETS), strict=True) if not good]
    if failed:
        session.error(f"not conforming: {', '.join(failed)}")


@nox.session
def third_party(session: nox.Session) -> None:
    """Run the commands of docs/adapters.md in a clean environment: the wheel, and the examples beside that page.

    The good adapter must pass and leaves its report for the matrix; the faulty one must fail by the test named PLANTED.
    """
    archive = built_wheel(session, Path(session.create_tmp()).resolve())
    session.install("-c", "constraints.txt", "torch==2.13.0")
    session.install("-c", "constraints.txt", f"moonrelay[conformance] @ {archive.as_uri()}")
    session.env["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    session.env["PYTHONPATH"] = ""
    with tempfile.TemporaryDirectory(prefix="moonrelay-third-party-") as folder:  # outside: no settings of ours apply
        shutil.copytree(ROOT / "docs" / "examples", folder, dirs_exist_ok=True)
        session.chdir(folder)
        for command, code in page_commands(ROOT / "docs" / "adapters.md", "third_party"):
            session.run(*shlex.split(command), success_codes=[code])
        faulty = json.loads((Path(folder) / "acme-faulty.json").read_bytes())
        failed = (result["test"] for result in faulty["results"] if result["outcome"] == "failed")
        found = sorted({test.partition("[")[0] for test in failed})
        if found != [PLANTED]:
            session.error(f"the planted fault was to be found by {PLANTED} alone, not by {found}")
        REPORTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(folder) / "acme.json", REPORTS / "adapter-acme.json")


@nox.session(venv_backend="virtualenv")
def vllm_omni(session: nox.Session) -> None:
    """Run vLLM-Omni's tests and the suite against its adapter, with the wheel beside the host, on a CPU.

    Everything after ``--`` goes to pytest, e.g. ``-k registers``. ``-R`` keeps the environment of the run before, and
    its Moonrelay with it.
    """
    host_session(session, "vllm_omni", cpu_support="cpu_platform.install", parts=("tests", "examples"))


@nox.session(venv_backend="virtualenv")
def sglang(session: nox.Session) -> None:
    """Run SGLang's tests and the suite against its adapter, with the wheel beside the host, on a CPU.

    As ``vllm_omni`` does. Most tests need a cluster of the host's processes, which starts in a minute; those of a
    backend share one.
    """
    # An expected hang is bounded by its test; a stack of a waiting test after less would hide what failed.
    options = ("-o", "faulthandler_timeout=900")
    host_session(session, "sglang", cpu_support="cpu_support.install", parts=("tests",), pytest_options=options)


@nox.session(venv_backend="none")
def lightx2v(session: nox.Session) -> None:
    """Run LightX2V's tests and the suite against its adapter, by the Python that MOONRELAY_LIGHTX2V_PYTHON names.

    Nothing is installed there: the wheel is unpacked beside it, and found by the search path, its entry points too.
    Without the variable the suite alone is run, in the environment that runs nox and without the host; the adapter's
    tests that need no host are among `make test`. Everything after ``--`` goes to pytest.
    """
    took: dict[str, float] = {}
    report = REPORTS / "adapter-lightx2v.json"
    REPORTS.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    suite = ("-m", "moonrelay.cli.main", "conformance", "lightx2v", "--jobs", "2", "--json", str(report))
    python = os.environ.get(LIGHTX2V_PYTHON)  # noqa: TID251 - no setting of the package, but of this session
    if not python:
        with timed(session, took, "conformance"):
            session.run(sys.executable, *suite)
        session.warn(
            f"{LIGHTX2V_PYTHON} is not set, so nothing was run with the host: not its own programs and servers on our "
            "connector (pytest -m lightx2v), and the suite without its class"
        )
        return
    scratch = Path(session.create_tmp()).resolve()
    environment = lightx2v_environment(session, python, scratch)
    # A start of the host takes minutes on a busy machine; each test bounds its own waits.
    options = ("-o", "faulthandler_timeout=900", "--durations", "15")
    tests = ("-m", "lightx2v", *options, "adapters/lightx2v/tests", *session.posargs)
    failed = []
    session.chdir(scratch / "away")
    for part, command in {"conformance": suite, "tests": ("-m", "pytest", *tests)}.items():
        with timed(session, took, part):
            try:
                session.run(python, *command, env=environment)
            except CommandFailed:  # the other one is run all the same
                failed.append(part)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def lightx2v_environment(session: nox.Session, python: str, scratch: Path) -> dict[str, str]:
    """Lay out the wheel, the tests and the CPU support in a folder; return the variables by which they are found."""
    look = "from importlib.util import find_spec; print(*(n for n in {!r} if find_spec(n) is None))"
    missing = str(session.run(python, "-c", look.format(LIGHTX2V_NEEDS), silent=True)).split()
    if missing:
        session.error(f"{python} lacks {', '.join(missing)}; {LIGHTX2V_PYTHON} is to name one that has them all")
    unpacked, away, support = (scratch / name for name in ("wheel", "away", "cpu"))
    for folder in (unpacked, away, support):
        shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(built_wheel(session, scratch)) as archive:
        archive.extractall(unpacked)
    tests = away / "adapters" / "lightx2v" / "tests"
    shutil.copytree(ROOT / "adapters/lightx2v/tests", tests, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests/support", away / "tests" / "support", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", away)
    own = os.environ.get("PYTHONPATH")  # noqa: TID251 - as above
    searched = [str(unpacked), *([own] if own else [])]
    session.run(
        python,
        "-m",
        "lightx2v_cpu.install",
        str(support),
        env={"PYTHONPATH": os.pathsep.join([str(tests), *searched])},
        silent=True,
    )
    # The suite runs on host memory, and so may the host, whatever this machine has.
    environment = {"PLATFORM": "cpu", "PYTHONPATH": os.pathsep.join([str(support), str(tests), *searched])}
    where = session.run(python, "-c", "import moonrelay; print(moonrelay.__file__)", env=environment, silent=True)
    if str(unpacked) not in str(where):
        session.error(f"the tests would run against another Moonrelay: {where}")
    return environment


def host_session(
    session: nox.Session, name: str, *, cpu_support: str, parts: tuple[str, ...], pytest_options: tuple[str, ...] = ()
) -> None:
    """Install a host by its pins and the wheel beside it; run the host's tests, then the suite against its adapter.

    Args:
        session: The session, with an environment of its own.
        name: The folder in ``adapters``, and the tests' marker.
        cpu_support: Module of the adapter's tests that lets the host run on a CPU.
        parts: Folders of the adapter that the tests need.
        pytest_options: For the tests, before those after ``--``.
    """
    scratch = Path(session.create_tmp()).resolve()
    adapter = ROOT / "adapters" / name
    pins = adapter / "tests" / "requirements"
    took: dict[str, float] = {}
    with timed(session, took, "install"):
        archive = built_wheel(session, scratch)
        for step in sorted(pins.glob("[1-9]-*.txt")):
            alone = ("--no-deps",) if step.stem == "2-host" else ()
            session.install(*alone, "-c", str(pins / "constraints.txt"), "-r", str(step))
        session.install("--no-deps", "--force-reinstall", str(archive))
    # The tests without the checkout: they find the package of the wheel, which has the entry points.
    elsewhere = scratch / "away"
    shutil.rmtree(elsewhere, ignore_errors=True)
    away = elsewhere / "adapters" / name
    for part in parts:
        shutil.copytree(adapter / part, away / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", elsewhere)
    session.chdir(elsewhere)
    session.env["PYTHONPATH"] = str(away / "tests")
    session.run("python", "-m", cpu_support)
    session.env["PYTHONPATH"] = ""
    check_environment(session, pins / "constraints.txt")

    failed = []
    target = name.replace("_", "-")
    report = REPORTS / f"adapter-{target}.json"
    report.unlink(missing_ok=True)
    tests = ("-m", name, "--durations", "15", f"adapters/{name}/tests", *pytest_options, *session.posargs)
    for part, command in {
        "tests": ("python", "-m", "pytest", *tests),
        "conformance": ("moonrelay", "conformance", target, "--jobs", "2", "--json", str(report)),
    }.items():
        with timed(session, took, part):
            try:
                session.run(*command)
            except CommandFailed:  # the other one is run all the same
                failed.append(part)
    session.log(", ".join(f"{part} {seconds:.0f} s" for part, seconds in took.items()))
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Join the reports in ``out/conformance``; a cell that is worse than in conformance/matrix.md fails.

    ``-- --update`` writes conformance/matrix.md instead. With ``--keep``, columns of it that have no report here (hosts
    in environments of their own) stay as they are; without, as in CI, they are missing.
    """
    reports = sorted(str(path) for path in REPORTS.glob("*.json"))
    if not reports:
        session.error(f"no reports in {REPORTS.relative_to(ROOT)}; run `make conformance`")
    command = [sys.executable, "-m", "moonrelay.cli.main", "conformance", "--matrix", *reports]
    command += ["--html", str(REPORTS / "index.html")]
    kept = ["--keep"] if "--keep" in session.posargs else []
    if "--update" in session.posargs:
        # Tells what changes, columns that were not run among it, and writes it all the same.
        told = ["--against", str(COMMITTED), *kept] if COMMITTED.exists() else []
        session.run(*command, "--markdown", str(COMMITTED), *told, success_codes=[0, 1])
        return
    session.log(f"{REPORTS.relative_to(ROOT)}/index.html; where a change is meant: make matrix, and commit the file")
    session.run(*command, "--markdown", str(REPORTS / "matrix.md"), "--against", str(COMMITTED), *kept)


@contextmanager
def timed(session: nox.Session, parts: dict[str, float], name: str) -> Iterator[None]:
    """Put down how long a part of a session took, however it ends."""
    started = monotonic()
    try:
        yield
    finally:
        parts[name] = monotonic() - started
        session.log(f"{name}: {parts[name]:.0f} s")


def check_environment(session: nox.Session, pins: Path) -> None:
    """Fail where an environment holds what its pins do not name, or Moonrelay is not the wheel's."""
    named = {line.partition("==")[0] for line in pins.read_text(encoding="utf-8").splitlines() if "==" in line}
    held = json.loads(str(session.run("python", "-m", "pip", "list", "--format", "json", silent=True)))
    own = {"moonrelay", "moonrelay-cpu-platform", "moonrelay-sglang-cpu-support", "pip", "setuptools", "wheel"}
    unnamed = sorted({normal(one["name"]) for one in held} - {normal(name) for name in named} - own)
    if unnamed:
        session.error(f"{', '.join(unnamed)} came in; {pins.relative_to(ROOT)} is to name everything, and no triton")
    where = str(session.run("python", "-c", "import moonrelay; print(moonrelay.__file__)", silent=True))
    if str(ROOT / "core") in where:
        session.error(f"the tests would run against the checkout: {where}")


def normal(name: str) -> str:
    """Return a distribution's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def built_wheel(session: nox.Session, scratch: Path) -> Path:
    """Build the wheel of this checkout and return it."""
    built = scratch / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.run(sys.executable, "-m", "build", "--wheel", "--outdir", str(built), str(ROOT), external=True, silent=True)
    (archive,) = built.glob("moonrelay-*.whl")
    return archive


def page_commands(page: Path, session_name: str) -> Iterator[tuple[str, int]]:
    """Yield the commands of a page that a session runs, each with the exit code that it must have.

    They stand in the ``console`` blocks that follow a line ``<!-- run by nox: NAME -->``, after ``$ ``; a comment
    ``# exit 1`` says that the command ends with 1.
    """
    block = rf"<!-- run by nox: {session_name} -->\n+```console\n(.*?)^```"
    for text in re.findall(block, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
        for line in text.splitlines():
            command, _, comment = line.partition("  #")
            if command.startswith("$ "):
                code = re.match(r" exit (\d+)", comment)
                yield command.removeprefix("$ ").strip(), int(code[1]) if code else 0


def scratch_path_file(session: nox.Session) -> Path:
    """Return where the path file lies that lends the session the packages of the environment that runs nox."""
    (site,) = Path(session.virtualenv.location).glob("lib/python3*/site-packages")
    return site / "zz-lent.pth"
