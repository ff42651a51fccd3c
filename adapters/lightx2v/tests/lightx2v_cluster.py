"""LightX2V's disaggregated service as its users start it: one process per role, each with a JSON of its own.

How to, in a test that has the fixtures of ``conftest.py``::

    cluster = Cluster(model, folder, environment, connector="moonrelay", keys={"transformer": {"lease_ttl_s": 5}})
    with cluster.start():                            # servers; 10 s on an idle machine
        seen = cluster.ask(prompt="a red cat", seed=3)  # posts to decode, transformer, encoder; waits for decode
        assert seen.status == "completed"; seen.video  # the mp4's bytes, seen.digest
        cluster.kill("transformer"); cluster.restart("encoder"); cluster.threads("encoder"); cluster.logs("decode")

    runs = OneShot(model, folder, environment, connector=None).start(prompt="a red cat", seed=3)  # lightx2v.infer
    with runs:
        runs.video(within_s=60); runs.exit_codes(within_s=10)

`Monolith` is the undivided host's server, and ``OneShot(…, roles=())`` its one process. ``connector=None`` is the
host's own transfer; every other name goes to ``disagg_config.connector``. All listens on free ports of 127.0.0.1, but
for what the host binds to all addresses whatever it is told: its metrics and the sockets of its own transfer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

LOCAL = "127.0.0.1"
#: The host's words for its roles. A role may be there more than once: "transformer-1" is a second transformer.
ROLES = ("encoder", "transformer", "decode")
#: A process imports the host in 10 s on an idle machine, and in minutes on a busy one.
START_TIMEOUT_S = 420.0
#: A request takes less than a second of an idle machine.
WITHIN_S = 90.0
ENVIRONMENT = {
    "DTYPE": "BF16",
    "SENSITIVE_LAYER_DTYPE": "None",
    "HF_HUB_OFFLINE": "1",
    "MC_FORCE_TCP": "1",
    "MOONCAKE_LOCAL_HOSTNAME": LOCAL,
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
#: The host's own transfer reads this file, and nothing of it from its JSON.
MOONCAKE = {"local_hostname": LOCAL, "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "device_name": ""}
#: What every role's JSON says: kernels that a CPU has, and a small video.
CONFIG: dict[str, Any] = {
    "infer_steps": 2,
    "target_video_length": 5,
    "text_len": 32,
    "text_encoder_dim": 64,
    "target_height": 64,
    "target_width": 64,
    "self_attn_1_type": "torch_sdpa",
    "cross_attn_1_type": "torch_sdpa",
    "cross_attn_2_type": "torch_sdpa",
    "rms_norm_type": "torch",
    "layer_norm_type": "torch",
    "modulate_type": "torch",
    "rope_type": "torch_complex_rope",
    "sample_guide_scale": 5,
    "sample_shift": 5,
    "enable_cfg": True,
    "cpu_offload": False,
    "fps": 16,
}
#: What a request says where its test says nothing.
REQUEST: dict[str, Any] = {"negative_prompt": "blue dog", "seed": 42, "infer_steps": 2, "target_video_length": 5}
#: The host's ports: these, plus a role's rank, plus ten times the room.
_SENDER_PORT, _RECEIVER_PORT = 17788, 27788
#: Rooms whose ports are below those that the system gives to outgoing connections.
_ROOMS = range(2, 370)
#: Beside the host's, and below those of the system.
_PORTS = range(10_000, 17_000)
_RANKS = {"encoder": 0, "transformer": 1, "decode": 2}


def host_environment(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the whole environment of a process of the host's, with the file that its own transfer reads."""
    mooncake = folder / "mooncake.json"
    mooncake.write_text(json.dumps(MOONCAKE))
    return {**os.environ, **ENVIRONMENT, **environment, "MOONCAKE_CONFIG_PATH": str(mooncake)}


class NotStarted(Exception):
    """A process ended, or was not ready in time."""


class Refused(Exception):
    """A server answered a request with an error of HTTP; its text is the answer's."""


@dataclass(frozen=True)
class Outcome:
    """What a server said of a request, last.

    Attributes:
        status: The host's word: pending, processing, completed, failed, cancelled.
        error: The host's text where it failed.
        video: The mp4 where there is one.
    """

    status: str
    error: str | None = None
    video: bytes | None = None

    @property
    def digest(self) -> str | None:
        """The video's, to compare and to read in a failed test."""
        return None if self.video is None else hashlib.sha256(self.video).hexdigest()[:16]


class Ports:
    """Hands out ports and rooms that are free, each once."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._random = random.Random()

    def take(self) -> int:
        return self._choose(_PORTS, lambda port: (port,))

    def take_rooms(self) -> tuple[int, int]:
        """Return the two phases' rooms, such that the ports of all ranks are free."""

        def ports(room: int) -> Iterable[int]:
            return (base + rank + 10 * room for base in (_SENDER_PORT, _RECEIVER_PORT) for rank in _RANKS.values())

        return self._choose(_ROOMS, ports), self._choose(_ROOMS, ports)

    def _choose(self, among: Sequence[int], ports: Callable[[int], Iterable[int]]) -> int:
        for _ in range(1000):
            chosen = self._random.choice(among)
            wanted = set(ports(chosen))
            if not wanted & self._given and all(map(_is_free, wanted)):
                self._given |= wanted
                return chosen
        message = "no free ports"
        raise NotStarted(message)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


Seen = TypeVar("Seen")


def wait_for(look: Callable[[], Seen], within_s: float) -> Seen:
    """Look until there is something true to see, and return what was seen last."""
    end = time.monotonic() + within_s
    while not (seen := look()) and time.monotonic() < end:
        _pause(0.05)
    return seen


class Process:
    """One process of the host's, in a session of its own; its output goes to a file."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = [sys.executable, *command]
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
                cwd=self.log.parent,
                start_new_session=True,
            )

    def still_there(self) -> None:
        if not self.alive:
            message = f"{self.name} ended with {self.exit_code}\n{self.tail()}"
            raise NotStarted(message)

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill -9, it and all it spawned, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self._process.wait()

    def terminate(self, within_s: float = 30.0) -> int | None:
        """Send SIGTERM; return the exit code, ``None`` where it is still there."""
        self.signal(signal.SIGTERM)
        wait_for(lambda: not self.alive, within_s)
        return self.exit_code

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        return self.text()[-4000:]


class _Deployment:
    """The processes of some roles, or one that does everything: their JSON, their ports, their end."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        environment: Mapping[str, str],
        *,
        connector: str | None = None,
        roles: Sequence[str] = ROLES,
        keys: Mapping[str, Mapping[str, Any]] | None = None,
        config: Mapping[str, Mapping[str, Any]] | None = None,
        variables: Mapping[str, Mapping[str, str]] | None = None,
        model_cls: str = "wan2.1",
        task: str = "t2v",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.connector = connector
        self.ports = Ports()
        self.processes: dict[str, Process] = {}
        self._rooms = self.ports.take_rooms()
        self._two_stages = bool(roles) and "decode" not in roles
        self._keys, self._config, self._variables = keys or {}, config or {}, variables or {}
        self._suffix = "png" if task.endswith("2i") else "mp4"
        self._said = ["--model_cls", model_cls, "--task", task, "--model_path", str(model.resolve())]
        self._environment = host_environment(environment, folder)
        for name in roles or ("all-in-one",):
            path = self._write_json(name)
            self.processes[name] = self._process(name, [*self._said, "--config_json", str(path)])

    def _process(self, name: str, said: list[str]) -> Process:
        raise NotImplementedError

    def _environment_of(self, name: str, **more: str) -> dict[str, str]:
        return {**self._environment, **more, **_of(self._variables, name)}

    def _write_json(self, name: str) -> Path:
        role = _role(name)
        said: dict[str, Any] = {**CONFIG, **_of(self._config, name)}
        if role in ROLES:
            said |= {"disagg_mode": role, "disagg_config": {**self._links(role), **_of(self._keys, name)}}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(said, indent=1))
        return path

    def _links(self, role: str) -> dict[str, Any]:
        """What the host's example says in a role's ``disagg_config``."""
        first, second = self._rooms
        phase = (second, "transformer", "decode") if role == "decode" else (first, "encoder", "transformer")
        links: dict[str, Any] = {
            "bootstrap_addr": LOCAL,
            "bootstrap_room": phase[0],
            "sender_engine_rank": _RANKS[phase[1]],
            "receiver_engine_rank": _RANKS[phase[2]],
            "protocol": "tcp",
            "local_hostname": LOCAL,
            "metadata_server": "P2PHANDSHAKE",
        }
        if role == "transformer" and not self._two_stages:
            links |= {"decoder_engine_rank": _RANKS["decode"], "decoder_bootstrap_room": second}
        if self.connector is not None:
            links["connector"] = self.connector
        return links

    @property
    def last(self) -> str:
        """The process that has the video."""
        return [*self.processes][-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()

    def kill(self, name: str) -> None:
        """Kill -9, and wait until it is gone."""
        self.processes[name].kill()

    def threads(self, name: str) -> int:
        return self.processes[name].threads()

    def descriptors(self, name: str) -> int:
        return self.processes[name].descriptors()

    def logs(self, name: str) -> str:
        """Return what a process has written, over all its starts."""
        return self.processes[name].text()


def _role(name: str) -> str:
    return name.partition("-")[0]


def _of(said: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """What is said for all, for a process's role and for itself; the last one wins."""
    return {key: value for part in ("all", _role(name), name) for key, value in said.get(part, {}).items()}


class OneShot(_Deployment):
    """``python -m lightx2v.infer``, one process per role, or the undivided host where there are no roles.

    Args:
        model: The model's folder.
        folder: Where JSON, logs and videos go.
        environment: Variables of a process that runs the host; see `lightx2v_cpu.install.place`.
        connector: ``disagg_config.connector``; without one the key is not given.
        roles: Which processes there are; without "decode" the transformer decodes.
        keys: More of ``disagg_config``, for ``all``, for a role or for one process.
        config: More of the JSON beside it, likewise.
        variables: More of a process's environment, likewise.
        model_cls: The host's word for the model.
        task: The host's word for what it does.
    """

    def _process(self, name: str, said: list[str]) -> Process:
        return Process(name, ["-m", "lightx2v.infer", *said], self.folder, self._environment_of(name))

    def start(self, *, order: Sequence[str] | None = None, **request: Any) -> Self:
        """Start all with one request's fields, which are options of the host's command."""
        said = {"negative_prompt": REQUEST["negative_prompt"], "seed": REQUEST["seed"], **request}
        for name in order or self.processes:
            process = self.processes[name]
            for key, value in said.items():
                words = value if isinstance(value, (list, tuple)) else [value]
                process._command += [f"--{key}", *map(str, words)]
            process._command += ["--save_result_path", str(self._result_of(name))]
            process.start()
        return self

    def _result_of(self, name: str) -> Path:
        return self.folder / f"{name}.{self._suffix}"

    def video(self, within_s: float = START_TIMEOUT_S) -> bytes | None:
        """Wait until the video or image is saved; ``None`` where it is not in time, or its process ended before."""
        saved = "mage saved" if self._suffix == "png" else "Video saved successfully"
        process = self.processes[self.last]
        wait_for(lambda: saved in process.text() or not process.alive, within_s)
        return self._result_of(self.last).read_bytes() if saved in process.text() else None

    def exit_codes(self, within_s: float = 30.0) -> dict[str, int | None]:
        """Wait until all have ended; ``None`` stands for one that has not in time."""
        wait_for(lambda: not any(process.alive for process in self.processes.values()), within_s)
        return {name: process.exit_code for name, process in self.processes.items()}


class Cluster(_Deployment):
    """``python -m lightx2v.server`` for each role. Arguments are those of `OneShot`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.http_ports: dict[str, int] = {}
        super().__init__(*args, **kwargs)

    def _process(self, name: str, said: list[str]) -> Process:
        port = self.http_ports[name] = self.ports.take()
        command = ["-m", "lightx2v.server", *said, "--host", LOCAL, "--port", str(port)]
        more = {
            "LIGHTX2V_METRIC_PORT": str(self.ports.take()),
            "LIGHTX2V_CACHE_DIR": str(self.folder / f"{name}-cache"),
        }
        return Process(name, command, self.folder, self._environment_of(name, **more))

    def start(self, *, but: Sequence[str] = ()) -> Self:
        """Start all together and wait until they take requests; leave out those named."""
        names = [name for name in self.processes if name not in but]
        try:
            for name in names:
                self.processes[name].start()
            for name in names:
                self.wait_ready(name)
        except BaseException:
            self.end()
            raise
        return self

    def wait_ready(self, name: str) -> None:
        process = self.processes[name]

        def listens() -> bool:
            process.still_there()
            with contextlib.suppress(OSError), socket.create_connection((LOCAL, self.http_ports[name]), timeout=1.0):
                return True
            return False

        if not wait_for(listens, START_TIMEOUT_S):
            message = f"{name} does not listen\n{process.tail()}"
            raise NotStarted(message)

    def restart(self, name: str) -> None:
        """Kill a process and start it anew; wait until it takes requests."""
        self.processes[name].kill()
        self.processes[name].start()
        self.wait_ready(name)

    def afresh(self) -> Self:
        """Kill all and start all anew, as if nothing had been."""
        self.end()
        return self.start()

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        self.processes[name].signal(signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        """SIGCONT."""
        self.processes[name].signal(signal.SIGCONT)

    def post(self, name: str, *, path: str = "/v1/tasks/video/", **request: Any) -> str:
        """Give one process a request, over `REQUEST`; return the id of its task.

        Raises:
            Refused: It did not take it.
        """
        body = json.dumps({**REQUEST, **request}).encode()
        return str(json.loads(self._http(name, "POST", path, body))["task_id"])

    def post_all(self, *, order: Sequence[str] | None = None, **request: Any) -> dict[str, str]:
        """Give every process the same request, first those that will wait; return the ids by process."""
        names = order or [*reversed(self.processes)]
        return {name: self.post(name, **request) for name in names}

    def status(self, name: str, task: str) -> Outcome:
        """Ask once; with the video where the task is completed and has one."""
        said = json.loads(self._http(name, "GET", f"/v1/tasks/{task}/status"))
        video = None
        if said["status"] == "completed":
            with contextlib.suppress(Refused):
                video = self._http(name, "GET", f"/v1/tasks/{task}/result")
        return Outcome(said["status"], said.get("error") or None, video)

    def wait(self, name: str, task: str, within_s: float = WITHIN_S) -> Outcome:
        """Wait for a task's end; after that time return what it is by then."""
        end = time.monotonic() + within_s
        while True:
            seen = self.status(name, task)
            if seen.status not in {"pending", "processing"} or time.monotonic() > end:
                return seen
            _pause(0.1)

    def wait_all(self, tasks: Mapping[str, str], within_s: float = WITHIN_S) -> dict[str, Outcome]:
        """Wait for the ends of a request's tasks, all of them within that time."""
        end = time.monotonic() + within_s
        return {name: self.wait(name, task, max(0.0, end - time.monotonic())) for name, task in tasks.items()}

    def delete(self, name: str, task: str) -> None:
        """Give a task up at one process."""
        self._http(name, "DELETE", f"/v1/tasks/{task}")

    def ask(self, within_s: float = WITHIN_S, **request: Any) -> Outcome:
        """Give every process the request; return what becomes of it at the one that has the video."""
        tasks = self.post_all(**request)
        return self.wait(self.last, tasks[self.last], within_s)

    def _http(self, name: str, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://{LOCAL}:{self.http_ports[name]}{path}",
            data=body,
            method=method,
            headers={"Content-Type": "application/json"} if body else {},
        )
        try:
            with urllib.request.urlopen(request, timeout=30.0) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            message = f"{method} {path}: {error.code} {error.read()[:1000].decode(errors='replace')}"
            raise Refused(message) from None


class Monolith(Cluster):
    """``python -m lightx2v.server`` that does everything; the process is called "all-in-one"."""

    def __init__(self, model: Path, folder: Path, environment: Mapping[str, str], **more: Any) -> None:
        super().__init__(model, folder, environment, roles=(), **more)
