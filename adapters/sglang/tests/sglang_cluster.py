"""SGLang's diffusion service as its users start it: one ``sglang serve`` for the head and one for each role.

Everything listens on free ports of 127.0.0.1, but for the sockets that a role takes work from: the host binds those to
0.0.0.0 whatever it is told. Each process leads a session of its own, so that ending it ends the workers it spawned.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

LOCAL = "127.0.0.1"
#: A process imports the host in 20 s on an idle machine, and in minutes on a busy one.
START_TIMEOUT_S = 420.0
#: The first request of a process compiles, which the later ones need not.
FIRST_TIMEOUT_S = 300.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "MC_FORCE_TCP": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu",
    "PYTHONUNBUFFERED": "1",
}
#: What a request asks for where it says nothing: half a second of work.
SMALL: dict[str, Any] = {
    "size": "64x64",
    "num_frames": 5,
    "num_inference_steps": 2,
    "fps": 16,
    "generator_device": "cpu",
}
#: A payload of more than 1 MiB, by the latents of one cheap step.
LARGE: dict[str, Any] = {"size": "256x192", "num_frames": 81, "num_inference_steps": 1, "guidance_scale": 1.0}
PROMPTS = ("a cat", "two dogs in snow", "a zebra runs fast", "three blind mice")
#: Some 4 MiB of latents.
HUGE: dict[str, Any] = {**LARGE, "size": "512x384"}
#: All that tests compare with the undivided host's videos.
REQUESTS: tuple[dict[str, Any], ...] = (*({"prompt": prompt} for prompt in PROMPTS), {"prompt": "a cat", **LARGE})
#: Below the ports that the system gives to outgoing connections.
_PORTS = range(10_000, 32_000)


class RequestFailed(Exception):
    """The service answered that a request failed; its text is the answer's."""


class NoAnswer(Exception):
    """The service said nothing of a request's end in time."""


class NotStarted(Exception):
    """A process ended, or was not ready in time."""


def key_of(prompt: str, **more: Any) -> str:
    """Return one word for a request, to keep its video by."""
    return json.dumps([prompt, sorted(more.items())])


class Ports:
    """Hands out ports that are free, each once."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._random = random.Random()

    def take(self, *beside: int) -> int:
        """Return a port such that it and those at these distances above it are free."""
        for _ in range(1000):
            port = self._random.choice(_PORTS)
            wanted = {port, *(port + distance for distance in beside)}
            if not wanted & self._given and all(map(_is_free, wanted)):
                self._given |= wanted
                return port
        message = "no free ports"
        raise NotStarted(message)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((LOCAL, port), timeout=1.0):
        return True
    return False


class Served:
    """One ``sglang serve`` and what it spawned."""

    def __init__(
        self, name: str, model: Path, folder: Path, options: Sequence[str], environment: Mapping[str, str], ready: int
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.ready_port = ready
        self.environment = dict(environment)
        program = Path(sys.executable).with_name("sglang")
        self._command = [str(program), "serve", "--model-path", str(model), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        """Start it, for this time with more options and variables than it always has; the last of two options wins."""
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **ENVIRONMENT, **self.environment, **(environment or {})},
                cwd=self.log.parent,
                start_new_session=True,
            )

    def wait_ready(self, until: float) -> None:
        """Wait until its port takes connections."""
        while not listens(self.ready_port):
            self.still_there()
            if time.monotonic() > until:
                message = f"{self.name} does not listen on port {self.ready_port}\n{self.tail()}"
                raise NotStarted(message)
            _pause(0.2)

    def still_there(self) -> None:
        if not self.alive:
            code = None if self._process is None else self._process.poll()
            message = f"{self.name} ended with {code}\n{self.tail()}"
            raise NotStarted(message)

    def kill(self) -> None:
        """Kill -9, it and all it spawned, and wait until it is gone."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            until = time.monotonic() + 10
            while _session(self._process.pid) and time.monotonic() < until:
                _pause(0.05)
        self._stopped = False

    def stop(self) -> None:
        """SIGSTOP all of it."""
        os.killpg(self.pid, signal.SIGSTOP)
        self._stopped = True

    def go_on(self) -> None:
        """SIGCONT all of it."""
        os.killpg(self.pid, signal.SIGCONT)
        self._stopped = False

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def tail(self) -> str:
        return self.text()[-4000:]


def _session(leader: int) -> list[int]:
    """Return the living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, _, _, session = entry.joinpath("stat").read_text().rsplit(")", 1)[1].split()[:4]
                if int(session) == leader and state not in "ZX":
                    found.append(int(entry.name))
    return found


def _connections_to(port: int) -> int:
    """Count the connections to a port of this machine that somebody has not closed yet."""
    closing = ("01", "08")  # established; closed by the other end alone
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return sum(int(line[2].rpartition(":")[2], 16) == port and line[3] in closing for line in lines)


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)


Seen = TypeVar("Seen")


def until(
    look: Callable[[], Seen | None], within_s: float = 60.0, *, otherwise: Callable[[], object] | None = None
) -> Seen:
    """Look until there is something to see, and return it.

    Args:
        look: Returns something true once it is so.
        within_s: For how long.
        otherwise: Says what there is instead.
    """
    end = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > end:
            message = f"not in {within_s} s: {seen if otherwise is None else otherwise()}"
            raise AssertionError(message)
        _pause(0.05)
    return seen


class Service:
    """What takes requests over HTTP: the head of a cluster, or one process that does everything."""

    def __init__(self, http_port: int) -> None:
        self.http_port = http_port

    def get(self, path: str, timeout_s: float = 10.0) -> Any:
        return json.loads(self._http("GET", path, None, timeout_s))

    def health(self) -> tuple[int, Any]:
        """Return the status code and what ``/health`` says."""
        try:
            with urllib.request.urlopen(f"http://{LOCAL}:{self.http_port}/health", timeout=10.0) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def submit(self, prompt: str, seed: int = 42, **more: Any) -> str:
        """Ask for a video; return the request's id."""
        body = {"prompt": prompt, "seed": seed, **SMALL, **more}
        answer = json.loads(self._http("POST", "/v1/videos", json.dumps(body).encode(), 30.0))
        return str(answer["id"])

    def result(self, request: str, within_s: float) -> bytes:
        """Wait for a request's end; return the video's file.

        Raises:
            RequestFailed: The service says that it failed.
            NoAnswer: It has said nothing in time.
        """
        until = time.monotonic() + within_s
        while True:
            job = self.get(f"/v1/videos/{request}")
            if job["status"] == "completed":
                return self._http("GET", f"/v1/videos/{request}/content", None, 30.0)
            if job["status"] == "failed":
                raise RequestFailed((job.get("error") or {}).get("message"))
            if time.monotonic() > until:
                message = f"{request} is {job['status']!r} after {within_s} s"
                raise NoAnswer(message)
            _pause(0.1)

    def result_or_failure(self, request: str, within_s: float) -> bytes | None:
        """Return a request's video; ``None`` where the service says that it failed."""
        try:
            return self.result(request, within_s)
        except RequestFailed:
            return None

    def ask(self, prompt: str, seed: int = 42, *, within_s: float = 60.0, **more: Any) -> bytes:
        """Ask for a video and wait for it; see `submit` and `result`."""
        return self.result(self.submit(prompt, seed, **more), within_s)

    def wait_healthy(self, served: Served, until: float) -> None:
        while True:
            with contextlib.suppress(OSError):
                if self.health()[0] == 200:
                    return
            served.still_there()
            if time.monotonic() > until:
                message = f"{served.name} is not healthy\n{served.tail()}"
                raise NotStarted(message)
            _pause(0.2)

    def _http(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        request = urllib.request.Request(
            f"http://{LOCAL}:{self.http_port}{path}",
            data=body,
            method=method,
            headers={"Content-Type": "application/json"} if body else {},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            message = f"{method} {path}: {error.code} {error.read()[:1000].decode(errors='replace')}"
            raise RequestFailed(message) from None


class Monolith(Service):
    """A ``sglang serve`` with all roles in one process."""

    def __init__(self, model: Path, folder: Path) -> None:
        ports = Ports()
        super().__init__(ports.take(1))
        options = _options(
            {
                "host": LOCAL,
                "port": self.http_port,
                "scheduler_port": ports.take(),
                "master_port": ports.take(),
                "output_path": folder / "monolith",
                "num_gpus": 1,
                "warmup_mode": "off",
            }
        )
        self.served = Served("monolith", model, folder, options, {}, self.http_port)
        self.served.start()
        try:
            self.wait_healthy(self.served, time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        self.served.kill()


class Cluster(Service):
    """A head and its roles.

    Args:
        model: Folder of the model.
        folder: Where logs and videos go.
        backend: Value of ``--disagg-transfer-backend``; without one the flag is not given.
        encoders: Number of encoders.
        denoisers: Number of denoisers.
        decoders: Number of decoders.
        timeout_s: ``--disagg-timeout`` of the head.
        options: Flags of a role (``denoiser``) or of one process (``denoiser-0``), by name with underscores; those of
            one process win. The name ``all`` stands for every process.
        environment: Variables of a role or of one process, likewise.

    The processes are called ``head``, ``encoder-0``, ``denoiser-0``, ``denoiser-1``, ``decoder-0`` and so on.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        backend: str | None = None,
        encoders: int = 1,
        denoisers: int = 1,
        decoders: int = 1,
        timeout_s: int = 600,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        environment: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ports = Ports()
        super().__init__(ports.take(1))
        self.backend = backend
        #: Whether a test has put limits on the head.
        self.limited = False
        self.served: dict[str, Served] = {}
        head_port = ports.take(1, 2, 3, 4, 5)
        flags = {"disagg_transfer_backend": backend} if backend else {}
        common: dict[str, Any] = {"host": LOCAL, "num_gpus": 1, "strict_ports": True, **flags}
        counts = {"encoder": encoders, "denoiser": denoisers, "decoder": decoders}
        urls: dict[str, list[str]] = {role: [] for role in counts}

        def add(name: str, role: str, own: Mapping[str, Any], ready: int) -> None:
            def of(what: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
                return {key: value for part in ("all", role, name) for key, value in (what or {}).get(part, {}).items()}

            said = _options({**common, **own, **of(options)})
            self.served[name] = Served(name, model, folder, said, of(environment), ready)

        for role, count in counts.items():
            for number in range(count):
                port = ports.take(100)
                urls[role].append(f"tcp://{LOCAL}:{port}")
                own = {
                    "disagg_role": role,
                    "disagg_server_addr": f"tcp://{LOCAL}:{head_port}",
                    "scheduler_port": port,
                    "master_port": ports.take(),
                }
                add(f"{role}-{number}", role, own, port)
        own = {
            "disagg_role": "server",
            "disagg_timeout": timeout_s,
            "port": self.http_port,
            "scheduler_port": head_port,
            "master_port": ports.take(),
            "output_path": folder / "videos",
            **{f"{role}_urls": ";".join(of_role) for role, of_role in urls.items()},
        }
        add("head", "head", own, self.http_port)

    def start(self, *, but: Sequence[str] = ()) -> Cluster:
        """Start all processes together and wait for them; leave out those named."""
        try:
            names = [name for name in self.served if name not in but]
            for name in names:
                self.served[name].start()
            self._wait(*names)
        except BaseException:
            self.end()
            raise
        return self

    def warm(self) -> bytes:
        """Have each process do its slow first request, as many as there are of a role; return a video."""
        most = max(sum(name.startswith(role) for name in self.served) for role in ("encoder", "denoiser", "decoder"))
        for _ in range(most):
            video = self.ask("a first request", within_s=FIRST_TIMEOUT_S)
        return video

    def kill(self, name: str) -> None:
        """Kill -9, and wait until the head's connection to it is closed at both ends.

        What the head sends from then on waits for a successor; a moment earlier it may or may not be lost.
        """
        served = self.served[name]
        served.kill()
        until = time.monotonic() + 10
        while _connections_to(served.ready_port) and time.monotonic() < until:
            _pause(0.02)

    def stop(self, name: str) -> None:
        self.served[name].stop()

    def go_on(self, name: str) -> None:
        self.served[name].go_on()

    def restart(
        self,
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Kill a process and start it anew, until the next time with more variables and options; wait until it serves.

        A role serves when the head has heard of this very process. A head of the host's hears of no role that was there
        before it; a head of ours serves when it has heard of all.
        """
        served = self.served[name]
        before = {} if name == "head" else self.registrations()
        served.kill()
        served.start(_options(options or {}), environment)
        self._wait(name, before=before)

    def logs(self, name: str) -> str:
        return self.served[name].text()

    def stats(self) -> Any:
        """Return what a head of ours has in ``/stats``."""
        return self.get("/stats")["disagg"]["moonrelay"]

    def registrations(self) -> dict[str, object]:
        """Return what the head knows of its roles: a word for each, another one once another process is there."""
        if self.backend != "moonrelay":
            text = self.logs("head").rpartition("Starting DiffusionServer")[2]
            ports = {name: served.ready_port for name, served in self.served.items() if name != "head"}
            lines = {name: len(re.findall(rf"registered .*:{port}\b", text)) for name, port in ports.items()}
            return {name: count for name, count in lines.items() if count}
        try:
            stages = self.stats()["stages"]
        except (OSError, RequestFailed):
            return {}  # no head is there
        return {
            f"{stage}-{number}": one["epoch"]
            for stage, found in stages.items()
            for number, one in enumerate(found["instances"])
            if one["alive"]
        }

    def end(self) -> None:
        """Kill what is left; idempotent."""
        for served in self.served.values():
            served.kill()

    def _wait(self, *names: str, before: Mapping[str, object] | None = None) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        for name in names:
            # A role's port may take connections for a moment before it is the role's: the host tries it first.
            if name == "head":
                self.wait_healthy(self.served[name], until)
            else:
                self.served[name].wait_ready(until)
        wanted = {name for name in names if name != "head"}
        if "head" in names and self.backend == "moonrelay":
            wanted = {name for name, served in self.served.items() if name != "head" and served.alive}
        known = before or {}
        while missing := wanted - {name for name, word in self.registrations().items() if word != known.get(name)}:
            for name in missing:
                self.served[name].still_there()
            if time.monotonic() > until:
                message = f"the head has not heard of {', '.join(sorted(missing))}\n{self.served['head'].tail()}"
                raise NotStarted(message)
            _pause(0.1)


def _options(said: Mapping[str, Any]) -> list[str]:
    """Spell options as the command line wants them; `True` is a flag without a value."""
    words = []
    for name, value in said.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return words
