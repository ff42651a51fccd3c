"""A Mooncake store of our own on loopback: master and pool daemon from the wheel, for the demo and for tests.

Owns two child processes, their ports, their log files and their end. They end with this object, and also when this
process is killed: a small watcher holds the other end of a pipe and ends them when the pipe breaks. A cluster that
serves more than one machine is started by whoever runs it, and reached by its URL.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.config import require_positive
from moonrelay.errors import ConfigError, PeerLost, PluginError
from moonrelay.relay.mooncake_native import library_remedy

_HOST = "127.0.0.1"
_PAUSE_S = 0.02
_STOP_TIMEOUT_S = 5.0
_ATTEMPTS = 3
_LOG_TAIL_BYTES = 2000
#: Below this the pool daemon does not start.
_MIN_POOL_BYTES = 16 << 20

# Reads "pid start-time" lines; when the pipe breaks, ends those processes that still are the ones named.
_WATCHER = """
import os, signal, sys
named = [line.split() for line in sys.stdin]
for pid, started in named:
    try:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[19] == started:
                os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass
"""


class MooncakeCluster:
    """``mooncake_master`` and ``mooncake_client`` (the pool) as children that die with this process.

    Args:
        folder: Where the logs go; made when absent.
        pool_bytes: Size of the pool; its memory is mapped lazily. At least 16 MiB.
        lease_ttl_s: How long a read protects an object from unforced removal; longer than the slowest read.
        put_timeout_s: After this long an unfinished object of a dead writer gives its key and its room back.
        start_timeout_s: Until when both must answer.
        clock: For deadlines; the system's by default.

    Threads: one at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pool_bytes: int = 1 << 30,
        lease_ttl_s: float = 20.0,
        put_timeout_s: float = 30.0,
        start_timeout_s: float = 30.0,
        clock: Clock | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.pool_bytes = pool_bytes
        self.lease_ttl_s = lease_ttl_s
        self.put_timeout_s = put_timeout_s
        self.start_timeout_s = start_timeout_s
        require_positive(self, "pool_bytes", "lease_ttl_s", "put_timeout_s", "start_timeout_s")
        if pool_bytes < _MIN_POOL_BYTES:
            message = f"pool_bytes={pool_bytes} is too small for a pool; give at least {_MIN_POOL_BYTES}"
            raise ConfigError(message, field="pool_bytes")
        self._clock = clock or SystemClock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._watcher: subprocess.Popen[bytes] | None = None
        self._rpc_port = 0
        self._http_port = 0
        self._started = False

    def start(self) -> None:
        """Start both and wait until they answer. Idempotent. Blocks: until ``start_timeout_s``.

        Raises:
            PluginError: The wheel, or a library that its programs need, is missing; the message says how to get it.
            PeerLost: One ended or did not answer in time; the message holds its log's tail.
        """
        if self._started:
            return
        deadline = Deadline(self.start_timeout_s, self._clock)
        programs = _programs()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for attempt in range(_ATTEMPTS):
                try:
                    self._start(programs, deadline)
                    break
                except PeerLost:
                    # Somebody may have taken a port between our choosing and the child's binding it.
                    self.close()
                    if attempt == _ATTEMPTS - 1 or deadline.expired:
                        raise
        except BaseException:
            self.close()
            raise
        self._started = True

    @property
    def url(self) -> str:
        """``mooncake://127.0.0.1:<rpc>?metrics=127.0.0.1:<http>``, for `StoreConfig.url`."""
        if not self._started:
            message = "the Mooncake cluster is not started"
            raise PeerLost(message)
        return f"mooncake://{_HOST}:{self._rpc_port}?metrics={_HOST}:{self._http_port}"

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of what runs, by name: ``master``, ``client``."""
        return {name: child.pid for name, child in self._children.items() if child.poll() is None}

    def kill_master(self) -> None:
        """SIGKILL the master and wait until it is gone; for fault tests."""
        self._kill("master")

    def kill_client(self) -> None:
        """SIGKILL the pool daemon and wait until it is gone; for fault tests."""
        self._kill("client")

    def close(self) -> None:
        """End both. Idempotent, also half-built. Blocks: seconds at most."""
        self._started = False
        children = [self._children.pop(name) for name in ("client", "master") if name in self._children]
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(_STOP_TIMEOUT_S)
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            if watcher.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    watcher.stdin.close()
            try:
                watcher.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                watcher.kill()
                watcher.wait(_STOP_TIMEOUT_S)

    def __enter__(self) -> MooncakeCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, programs: dict[str, Path], deadline: Deadline) -> None:
        self._rpc_port, self._http_port, pool_port = _free_ports(3)
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHER], stdin=subprocess.PIPE, cwd="/", start_new_session=True
        )
        self._spawn(
            "master",
            programs,
            f"--rpc_address={_HOST}",
            f"--rpc_port={self._rpc_port}",
            f"--metrics_host={_HOST}",
            f"--metrics_port={self._http_port}",
            f"--default_kv_lease_ttl={int(self.lease_ttl_s * 1000)}ms",
            f"--put_start_discard_timeout_sec={max(1, round(self.put_timeout_s))}",
            f"--put_start_release_timeout_sec={max(2, round(self.put_timeout_s * 2))}",
            "--client_ttl=10",
            "--logtostderr=true",
        )
        self._wait("master", lambda: b'"service_ready":true' in self._ask("/health"), deadline)
        self._spawn(
            "client",
            programs,
            f"--host={_HOST}",
            f"--port={pool_port}",
            f"--global_segment_size={self.pool_bytes}",
            "--local_buffer_size=16MB",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={_HOST}:{self._rpc_port}",
            "--protocol=tcp",
            "--logtostderr=true",
        )
        self._wait("client", lambda: bool(self._ask("/get_all_segments").strip()), deadline)

    def _spawn(self, name: str, programs: dict[str, Path], *arguments: str) -> None:
        with self._log_path(name).open("wb") as log:
            child = subprocess.Popen(
                [programs[name], *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is ours to handle, not theirs
            )
        self._children[name] = child
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.write(f"{child.pid} {_started_at(child.pid)}\n".encode())
            self._watcher.stdin.flush()

    def _wait(self, name: str, ready: Callable[[], bool], deadline: Deadline) -> None:
        pause = threading.Condition()
        while not ready():
            code = self._children[name].poll()
            if code is not None:
                tail = self._log_tail(name)
                if "error while loading shared libraries" in tail:
                    message = f"mooncake_{name} cannot start: {tail.strip()}; {library_remedy(tail)}"
                    raise PluginError(message)
                message = f"mooncake_{name} ended with code {code}; its log's end: {tail}"
                raise PeerLost(message, log=str(self._log_path(name)))
            if deadline.expired:
                message = f"mooncake_{name} did not answer within {self.start_timeout_s} s; its log's end: "
                raise PeerLost(message + self._log_tail(name), log=str(self._log_path(name)))
            with pause:
                self._clock.wait(pause, _PAUSE_S)

    def _ask(self, path: str) -> bytes:
        """Return what the master's admin port answers; empty while it does not."""
        connection = http.client.HTTPConnection(_HOST, self._http_port, timeout=1.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.read() if response.status == http.HTTPStatus.OK else b""
        except (OSError, http.client.HTTPException):
            return b""
        finally:
            connection.close()

    def _kill(self, name: str) -> None:
        child = self._children.get(name)
        if child is not None:
            child.send_signal(signal.SIGKILL)
            child.wait(_STOP_TIMEOUT_S)

    def _log_path(self, name: str) -> Path:
        return self.folder / f"mooncake-{name}.log"

    def _log_tail(self, name: str) -> str:
        try:
            raw = self._log_path(name).read_bytes()
        except FileNotFoundError:
            return ""
        return raw[-_LOG_TAIL_BYTES:].decode(errors="replace")


def _programs() -> dict[str, Path]:
    """Return the wheel's programs by name; without importing it.

    Raises:
        PluginError: It is not installed.
    """
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        programs = {name: Path(folder) / f"mooncake_{name}" for name in ("master", "client")}
        if all(os.access(path, os.X_OK) for path in programs.values()):
            return programs
    message = "mooncake_master and mooncake_client are not installed; pip install 'moonrelay[mooncake-cpu]'"
    raise PluginError(message)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [one.getsockname()[1] for one in sockets]


def _started_at(pid: int) -> str:
    """Return the kernel's start time of a process, which tells two processes with one id apart."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return "0"
        raise
    return text.rpartition(")")[2].split()[19]
