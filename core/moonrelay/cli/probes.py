"""What can be asked of a machine, without judging the answers.

Owns the probes: child processes, system files, sockets and installed distributions. Whatever may abort, hang or import
a native library runs in a child process with a time limit. Tests plant another machine by overriding methods.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from moonrelay.plugins import ADAPTERS, COMMANDS, OBSERVERS, POLICIES, QUEUES, RELAYS, TRANSFERS, HostFinding

GROUPS: Final = (ADAPTERS, TRANSFERS, RELAYS, QUEUES, POLICIES, OBSERVERS, COMMANDS)

_LOAD_PLUGINS: Final = """
import dataclasses, json, sys
from moonrelay.plugins import Registry
for group in sys.argv[1].split(","):
    registry = Registry(group)
    for name in registry.names():
        if f"{group}/{name}" in sys.argv[2:]:
            continue
        print(json.dumps({"about": [group, name]}), flush=True)
        info = dataclasses.asdict(registry.describe_one(name))
        print(json.dumps({"info": info}), flush=True)
"""

#: First what is known without the host, in case asking ends the process.
_ASK_OF_HOST: Final = """
import dataclasses, json, sys
from moonrelay.plugins import ADAPTERS, Registry, ask_of_host, host_of
adapter = Registry(ADAPTERS).load(sys.argv[1])
print(json.dumps({"host": host_of(adapter)}), flush=True)
for finding in ask_of_host(adapter):
    print("\\n" + json.dumps({"finding": dataclasses.asdict(finding)}), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """How a child process ended.

    Attributes:
        code: Exit status; negative for a signal; ``None`` when it ran out of time or could not start.
        out: Its stdout.
        err: Its stderr, or why it did not start.
    """

    code: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line that it wrote to stderr, else to stdout; a Python child's exception stands there."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        if lines:
            return lines[-1]
        return "timed out" if self.code is None else f"exit status {self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginState:
    """What loading one plugin in a child process gave; fields as in `moonrelay.plugins.PluginInfo`."""

    group: str
    name: str
    target: str
    distribution: str
    version: str | None
    built_in: bool
    error: str | None
    shadowed: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.error is None}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """What an adapter said of its host in a child process.

    Attributes:
        host: The host's name, else the adapter's.
        version: The host's version, as far as the adapter knows it.
        findings: What it found.
        error: What ended the question early, in one line; ``None`` where nothing did.
    """

    host: str
    version: str | None
    findings: tuple[HostFinding, ...]
    error: str | None


class Machine:
    """This machine.

    Blocks: each method for at most its time limit.
    """

    def run(self, command: Sequence[str], timeout_s: float = 30.0) -> Ran:
        """Run a command with this process's environment; it is killed at the time limit."""
        try:
            done = subprocess.run(
                list(command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired as exc:
            said = exc.stdout.decode("utf-8", "replace") if isinstance(exc.stdout, bytes) else exc.stdout or ""
            return Ran(code=None, out=said, err=f"no answer within {timeout_s:g} s")
        except OSError as exc:
            return Ran(code=None, out="", err=str(exc))
        return Ran(code=done.returncode, out=done.stdout, err=done.stderr)

    def python(self, code: str, *arguments: str, timeout_s: float = 120.0) -> Ran:
        """Run Python code in a child that finds the packages this process finds."""
        bootstrap = f"import sys; sys.path[:] = {[path for path in sys.path if path]!r}\n{code}"
        return self.run([sys.executable, "-c", bootstrap, *arguments], timeout_s=timeout_s)

    def python_version(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    def platform(self) -> tuple[str, str, str]:
        """Return system, processor and release, e.g. ``("Linux", "x86_64", "6.1")``."""
        return platform.system(), platform.machine(), platform.release()

    def version(self, distribution: str) -> str | None:
        """Return an installed distribution's version, ``None`` when it is not installed."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def package_folder(self, package: str) -> Path | None:
        """Return where a top-level package lies, without importing it; ``None`` when there is none."""
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            return None
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations)))

    def import_error(self, module: str) -> str | None:
        """Import a module in a child process; return the true error in one line, ``None`` when it imports."""
        ran = self.python(f"import {module}")
        if ran.code == 0:
            return None
        if ran.code is not None and ran.code < 0:
            return f"the import was ended by signal {-ran.code}: {ran.last_line}"
        return ran.last_line

    def library_error(self, soname: str) -> str | None:
        """Load a shared library in a child process; return the loader's error, ``None`` when it loads."""
        ran = self.python("import ctypes; ctypes.CDLL(sys.argv[1])", soname)
        return None if ran.code == 0 else ran.last_line

    def rdma_devices(self) -> list[str]:
        """Return the names of InfiniBand and RoCE devices."""
        return _names_in(Path("/sys/class/infiniband"))

    def memlock_bytes(self) -> int | None:
        """Return the soft limit of locked memory, ``None`` when there is no limit."""
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft

    def shm_bytes(self) -> tuple[int, int]:
        """Return size and free bytes of ``/dev/shm``.

        Raises:
            OSError: There is none, or it cannot be written.
        """
        usage = shutil.disk_usage("/dev/shm")
        if not os.access("/dev/shm", os.W_OK):
            raise PermissionError(13, "not writable", "/dev/shm")
        return usage.total, usage.free

    def bind_error(self, host: str) -> str | None:
        """Bind a port that the system chooses, connect to it and close it; return the error."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with (
                socket.socket(family, socket.SOCK_STREAM) as server,
                socket.socket(family, socket.SOCK_STREAM) as client,
            ):
                server.bind((host, 0))
                server.listen(1)
                client.settimeout(2.0)
                client.connect(server.getsockname()[:2])
        except OSError as exc:
            return str(exc)
        return None

    def sqlite(self) -> tuple[str, str]:
        """Return SQLite's version and the journal mode that a new file can be given.

        Raises:
            sqlite3.Error, OSError: It does not work here.
        """
        import tempfile

        with tempfile.TemporaryDirectory(prefix="moonrelay-doctor-") as folder:
            with contextlib.closing(sqlite3.connect(Path(folder) / "probe.db")) as connection:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
        return sqlite3.sqlite_version, str(mode)

    def redis_answer(self, host: str, port: int, *, tls: bool = False, timeout_s: float = 3.0) -> str:
        """Send ``PING`` to a Redis or Valkey server and return the first line of its answer.

        Raises:
            OSError: Nobody answers.
        """
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, port), timeout=timeout_s))
            if tls:
                context = ssl.create_default_context()
                connection = stack.enter_context(context.wrap_socket(connection, server_hostname=host))
            connection.sendall(b"PING\r\n")
            return connection.recv(256).split(b"\r\n")[0].decode("utf-8", "replace")

    def plugins(self) -> list[PluginState]:
        """Load every plugin of every group in child processes.

        A plugin that ends or hangs its process is reported so, and the others are loaded in a new one.
        """
        states: list[PluginState] = []
        done: list[str] = []
        while True:
            ran = self.python(_LOAD_PLUGINS, ",".join(GROUPS), *done)
            broken: tuple[str, str] | None = None
            for message in _messages(ran.out, "about", "info"):
                if "about" in message:
                    broken = (message["about"][0], message["about"][1])
                else:
                    info = message["info"]
                    states.append(PluginState(**{**info, "shadowed": tuple(info["shadowed"])}))
                    done.append(f"{info['group']}/{info['name']}")
                    broken = None
            if broken is None:
                return states if ran.code == 0 or states else [_loader_failed(ran)]
            reason = f"signal {-ran.code}" if ran.code is not None and ran.code < 0 else ran.last_line
            states.append(_ended(broken, f"loading it ends the process: {reason}"))
            done.append(f"{broken[0]}/{broken[1]}")

    def host(self, adapter: str, timeout_s: float = 120.0) -> HostState:
        """Have an adapter look at its host, in a child process: hosts are slow to import, and may end their process."""
        ran = self.python(_ASK_OF_HOST, adapter, timeout_s=timeout_s)
        host: str | None = None
        version: str | None = None
        findings: list[HostFinding] = []
        for message in _messages(ran.out, "host", "finding"):
            if "finding" in message:
                findings.append(HostFinding(**message["finding"]))
            else:
                host, version = message["host"]
        error = None
        if ran.code != 0:
            error = f"signal {-ran.code}: {ran.last_line}" if ran.code is not None and ran.code < 0 else ran.last_line
        return HostState(host=host or adapter, version=version, findings=tuple(findings), error=error)


def _messages(text: str, *keys: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            message = json.loads(line)
        except ValueError:
            continue
        if isinstance(message, dict) and any(key in message for key in keys):
            yield message


def _ended(plugin: tuple[str, str], error: str) -> PluginState:
    return PluginState(
        group=plugin[0],
        name=plugin[1],
        target="",
        distribution="",
        version=None,
        built_in=False,
        error=error,
        shadowed=(),
    )


def _loader_failed(ran: Ran) -> PluginState:
    return _ended(("moonrelay", "plugins"), ran.last_line)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
