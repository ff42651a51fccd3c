"""What `moonrelay doctor` makes of a machine: findings, each with a remedy.

Owns the judgement only; it is pure but for the probes of `moonrelay.cli.probes`. What a part needs stands here, once.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import urlsplit

from moonrelay.cli.probes import HostState, Machine, PluginState
from moonrelay.plugins import ADAPTERS

Status = Literal["ok", "warn", "fail", "skip"]

#: Shared library to the Debian package that brings it.
DEBIAN_PACKAGES: Final = (
    ("libibverbs.so.1", "libibverbs1"),
    ("libnuma.so.1", "libnuma1"),
    ("libcurl.so.4", "libcurl4"),
    ("libstdc++.so.6", "libstdc++6"),
)
#: Only needed with RDMA devices.
RDMA_PACKAGES: Final = (("librdmacm.so.1", "librdmacm1"),)

MOONCAKE_DISTRIBUTIONS: Final = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-npu",
)
MOONCAKE_MODULES: Final = ("mooncake", "mooncake.engine", "mooncake.store")
#: Hosts that are looked for by name where no adapter speaks for them.
HOSTS: Final = (("diffusers", "diffusers"), ("vllm-omni", "vllm_omni"), ("sglang", "sglang"), ("lightx2v", "lightx2v"))
CORE_MODULES: Final = (
    ("msgspec", "msgspec"),
    ("zmq", "pyzmq"),
    ("xxhash", "xxhash"),
    ("pluggy", "pluggy"),
)

#: A pool and a few payloads; Docker gives 64 MiB unless told otherwise.
SHM_ENOUGH_BYTES: Final = 1 << 30
#: What registering a pool with an RDMA device locks, at least.
MEMLOCK_ENOUGH_BYTES: Final = 1 << 30
SQLITE_OLDEST: Final = (3, 35, 0)

_MISSING_LIBRARY = re.compile(r"(lib[\w+.-]+\.so(?:\.\d+)*): cannot open shared object file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: ``ok``; ``warn`` (works without, or less well); ``fail`` (required, and broken); ``skip`` (does not
            apply).
        detail: What was found, with the true error.
        remedy: What to do; empty when there is nothing to do.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine(machine: Machine, queue_url: str | None = None) -> Iterator[Finding]:
    """Look at everything, in an order that puts causes before effects.

    Args:
        machine: What is looked at.
        queue_url: The deployment's queue; looked at when it is a server's.

    Blocks: up to minutes where imports are slow; findings come as they are made.
    """
    checks: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
        _python,
        _core_modules,
        _libraries,
        _mooncake,
        _mooncake_programs,
        _rdma,
        _shared_memory,
        _ports,
        _torch,
        _plugins_and_hosts,
        _sqlite,
    )
    for check in checks:
        yield from check(machine)
    yield _queue(machine, queue_url)


def _python(machine: Machine) -> Iterator[Finding]:
    version = machine.python_version()
    shown = ".".join(map(str, version))
    if version >= (3, 11):
        yield Finding(name="python", status="ok", detail=shown)
    else:
        yield Finding(name="python", status="fail", detail=shown, remedy="use Python 3.11 or newer")
    system, processor, release = machine.platform()
    detail = f"{system} {release} {processor}"
    if system == "Linux":
        yield Finding(name="platform", status="ok", detail=detail)
    else:
        yield Finding(name="platform", status="fail", detail=detail, remedy="use Linux (a container or WSL will do)")


def _core_modules(machine: Machine) -> Iterator[Finding]:
    for module, distribution in CORE_MODULES:
        error = machine.import_error(module)
        if error is None:
            yield Finding(name=distribution, status="ok", detail=machine.version(distribution) or "imports")
        else:
            yield Finding(
                name=distribution, status="fail", detail=error, remedy=f"pip install --force-reinstall {distribution}"
            )


def _mooncake_distribution(machine: Machine) -> str | None:
    """Return ``distribution version`` of Mooncake's wheel, ``None`` when none is installed."""
    for distribution in MOONCAKE_DISTRIBUTIONS:
        version = machine.version(distribution)
        if version is not None:
            return f"{distribution} {version}"
    return None


def _libraries(machine: Machine) -> Iterator[Finding]:
    needed = _mooncake_distribution(machine) is not None
    for soname, package in DEBIAN_PACKAGES:
        yield _library(machine, soname, package, "fail" if needed else "warn", "Mooncake's wheel needs it")
    has_rdma = bool(machine.rdma_devices())
    for soname, package in RDMA_PACKAGES:
        if has_rdma:
            yield _library(machine, soname, package, "warn", "RDMA tools need it")
        else:
            yield Finding(name=soname, status="skip", detail="no RDMA device here")


def _library(machine: Machine, soname: str, package: str, when_missing: Status, why: str) -> Finding:
    error = machine.library_error(soname)
    if error is None:
        return Finding(name=soname, status="ok", detail="loads")
    return Finding(name=soname, status=when_missing, detail=f"{error}; {why}", remedy=f"apt-get install {package}")


def _mooncake(machine: Machine) -> Iterator[Finding]:
    distribution = _mooncake_distribution(machine)
    if distribution is None and machine.package_folder("mooncake") is None:
        yield Finding(
            name="mooncake",
            status="warn",
            detail="not installed; engines shm and memory and relay local work without",
            remedy="pip install 'moonrelay[mooncake-cpu]', or 'moonrelay[mooncake]' where CUDA is",
        )
        return
    for module in MOONCAKE_MODULES:
        error = machine.import_error(module)
        if error is None:
            yield Finding(name=module, status="ok", detail=distribution or "without metadata")
        else:
            yield Finding(name=module, status="fail", detail=error, remedy=import_remedy(error))


def import_remedy(error: str) -> str:
    """Return what to do about Mooncake's import error."""
    found = _MISSING_LIBRARY.search(error)
    library = found.group(1) if found else ""
    packages = dict((*DEBIAN_PACKAGES, *RDMA_PACKAGES))
    if library in packages:
        return f"apt-get install {packages[library]}"
    if library.startswith(("libcuda", "libcudart", "libnv")):
        return "no CUDA here: pip uninstall mooncake-transfer-engine, then pip install 'moonrelay[mooncake-cpu]'"
    if library:
        return f"install the package that brings {library} (apt-file search {library})"
    if "MC_LOG_DIR" in error or "signal 6" in error:
        return "unset MC_LOG_DIR, which aborts Mooncake at import; else reinstall the wheel"
    return "pip install --force-reinstall 'moonrelay[mooncake-cpu]' (or [mooncake]); never both wheels at once"


def _mooncake_programs(machine: Machine) -> Iterator[Finding]:
    folder = machine.package_folder("mooncake")
    for program in ("mooncake_master", "mooncake_client"):
        if folder is None:
            yield Finding(name=program, status="skip", detail="mooncake is not installed")
            continue
        ran = machine.run([str(folder / program), "--version"])
        if ran.code == 0:
            yield Finding(name=program, status="ok", detail=(ran.out.strip() or ran.err.strip()).splitlines()[0])
        else:
            yield Finding(name=program, status="fail", detail=ran.last_line, remedy=import_remedy(ran.last_line))


def _rdma(machine: Machine) -> Iterator[Finding]:
    devices = machine.rdma_devices()
    memlock = machine.memlock_bytes()
    limit = "unlimited" if memlock is None else _size(memlock)
    if not devices:
        yield Finding(name="rdma", status="skip", detail="no device in /sys/class/infiniband; use protocol tcp")
        yield Finding(name="memlock", status="skip", detail=f"{limit}; matters with RDMA only")
        return
    yield Finding(name="rdma", status="ok", detail=", ".join(devices))
    if memlock is None or memlock >= MEMLOCK_ENOUGH_BYTES:
        yield Finding(name="memlock", status="ok", detail=limit)
    else:
        yield Finding(
            name="memlock",
            status="warn",
            detail=f"{limit}: registering a pool with {devices[0]} will fail",
            remedy="ulimit -l unlimited, or --ulimit memlock=-1 for a container",
        )


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    remedy = "mount a tmpfs there; for a container: --shm-size=8g"
    try:
        total, free = machine.shm_bytes()
    except OSError as exc:
        yield Finding(name="/dev/shm", status="fail", detail=str(exc), remedy=remedy)
        return
    enough = free >= SHM_ENOUGH_BYTES
    yield Finding(
        name="/dev/shm",
        status="ok" if enough else "warn",
        detail=f"{_size(total)}, {_size(free)} free",
        remedy="" if enough else remedy,
    )


def _ports(machine: Machine) -> Iterator[Finding]:
    error = machine.bind_error("127.0.0.1")
    if error is None:
        yield Finding(name="ports 127.0.0.1", status="ok", detail="a port can be bound and reached")
    else:
        yield Finding(name="ports 127.0.0.1", status="fail", detail=error, remedy="ip link set lo up")
    error = machine.bind_error("::1")
    if error is None:
        yield Finding(name="ports ::1", status="ok", detail="a port can be bound and reached")
    else:
        yield Finding(
            name="ports ::1", status="warn", detail=f"{error}; IPv4 works without", remedy="enable IPv6 on lo"
        )


_TORCH: Final = """
import json, torch
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"version": torch.__version__, "build": torch.version.cuda, "names": names}))
"""


def _torch(machine: Machine) -> Iterator[Finding]:
    if machine.version("torch") is None:
        yield Finding(
            name="torch",
            status="warn",
            detail="not installed; queue and relay work without, payloads of tensors do not",
            remedy="pip install 'moonrelay[torch]'",
        )
        return
    ran = machine.python(_TORCH)
    try:
        answer = json.loads(ran.out.splitlines()[-1]) if ran.code == 0 and ran.out.strip() else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        yield Finding(name="torch", status="fail", detail=ran.last_line, remedy="pip install --force-reinstall torch")
        return
    yield Finding(name="torch", status="ok", detail=f"{answer['version']}")
    if answer["names"]:
        yield Finding(name="cuda", status="ok", detail=f"{answer['build']}: {', '.join(answer['names'])}")
    else:
        build = "torch is built for CPU" if answer["build"] is None else f"torch is built for CUDA {answer['build']}"
        yield Finding(name="cuda", status="skip", detail=f"no device; {build}")


def _plugins_and_hosts(machine: Machine) -> Iterator[Finding]:
    states = machine.plugins()
    yield from _plugins(states)
    spoken_for = set()
    for state in states:
        if state.group == ADAPTERS and state.error is None:
            host = machine.host(state.name)
            spoken_for.add(host.host)
            yield from _host(host, built_in=state.built_in)
    for distribution, package in HOSTS:
        if distribution in spoken_for:
            continue
        version = machine.version(distribution)
        if version is None and machine.package_folder(package) is None:
            yield Finding(name=distribution, status="skip", detail="not installed")
        else:
            found = version or "importable, without metadata"
            yield Finding(name=distribution, status="skip", detail=f"{found}; no adapter for it is installed")


def _host(state: HostState, *, built_in: bool) -> Iterator[Finding]:
    for finding in state.findings:
        yield Finding(name=state.host, status=finding.status, detail=finding.detail, remedy=finding.remedy)
    if state.error is not None:
        yield Finding(
            name=state.host,
            status="fail" if built_in else "warn",
            detail=f"{state.version or 'no version known'}: asking it failed: {state.error}",
            remedy=f"try {state.host} without Moonrelay, and reinstall it if it fails alone too",
        )


def _plugins(states: Sequence[PluginState]) -> Iterator[Finding]:
    for state in states:
        name = f"{state.group}/{state.name}"
        source = f"{state.distribution} {state.version or ''}".strip()
        if state.error is not None:
            # The message holds its own remedy. A third party's failure hurts only its own name: no failure of ours.
            yield Finding(name=name, status="fail" if state.built_in else "warn", detail=state.error)
        elif state.shadowed:
            others = ", ".join(state.shadowed)
            yield Finding(
                name=name,
                status="warn",
                detail=f"built in; the one of {others} is not used",
                remedy=f"rename or uninstall the entry point of {others}",
            )
        else:
            yield Finding(name=name, status="ok", detail=source)


def _sqlite(machine: Machine) -> Iterator[Finding]:
    remedy = "use a Python with a newer SQLite, and a folder on a local file system"
    try:
        version, mode = machine.sqlite()
    except (sqlite3.Error, OSError) as exc:
        yield Finding(name="sqlite", status="fail", detail=str(exc), remedy=remedy)
        return
    detail = f"{version}, journal mode {mode}"
    if tuple(int(part) for part in version.split(".")) < SQLITE_OLDEST or mode != "wal":
        oldest = ".".join(map(str, SQLITE_OLDEST))
        yield Finding(name="sqlite", status="fail", detail=f"{detail}; {oldest} with WAL is needed", remedy=remedy)
    else:
        yield Finding(name="sqlite", status="ok", detail=detail)


def _queue(machine: Machine, url: str | None) -> Finding:
    parts = urlsplit(url or "")
    if url is None or parts.scheme not in ("redis", "rediss", "valkey"):
        return Finding(name="redis", status="skip", detail="no redis:// queue is configured")
    try:
        host, port = parts.hostname or "localhost", parts.port or 6379
    except ValueError as exc:
        return Finding(name="redis", status="fail", detail=f"{url!r}: {exc}", remedy="write redis://host:port/db")
    shown = f"{parts.scheme}://{host}:{port}"
    if machine.version("redis") is None:
        return Finding(
            name="redis",
            status="fail",
            detail=f"{shown} is configured, and its client is not installed",
            remedy="pip install 'moonrelay[redis]'",
        )
    try:
        answer = machine.redis_answer(host, port, tls=parts.scheme == "rediss")
    except OSError as exc:
        return Finding(
            name="redis", status="fail", detail=f"{shown}: {exc}", remedy="start the server, or correct the URL"
        )
    if answer.startswith(("+PONG", "-NOAUTH")):
        return Finding(name="redis", status="ok", detail=f"{shown} answers {answer}")
    return Finding(
        name="redis", status="fail", detail=f"{shown} answers {answer!r}", remedy="point the URL at a Redis or Valkey"
    )


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.3g} {unit}"
    return f"{nbytes} B"
