"""The HTTP front over the real engine: Qwen-Image in three processes, asked by OpenAI's client, and a stage that dies.

One front and engine for all tests of images, in the order in which they stand here; another one for videos.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from omni_engine import PROMPTS, on_a_cpu
from PIL import Image

from moonrelay.transfer.shm import sweep_orphans

pytestmark = [
    pytest.mark.vllm_omni,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLES = Path(__file__).parents[1] / "examples"
#: An engine's start takes a minute on an idle machine, and several on a busy one.
START_S = 600.0
DIES_IN_S = 60.0
#: As `SIZES` has it, in OpenAI's words.
ASKED: dict[str, Any] = {"seed": 3, "size": "64x64", "num_inference_steps": 4}
GUIDED, PLAIN = PROMPTS["guided"], PROMPTS["plain"]
#: Long enough to be met under way, also on a busy machine: the host ends no denoising that has begun.
LONG = {"prompt": "a fox", "seed": 3, "size": "128x128", "num_inference_steps": 200}


class Server:
    """``python -m moonrelay_vllm_omni.serve`` in a session of its own, by which whatever it leaves behind is found."""

    def __init__(self, model: Path, deploy: Path, log: Path, **options: Any) -> None:
        self.log = log
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        command = [sys.executable, "-m", "moonrelay_vllm_omni.serve", "--model", str(model)]
        command += ["--deploy-config", str(deploy), "--port", str(self.port), "--served-model-name", "tiny"]
        command += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def ask(self, method: str, path: str, body: Any = None, *, timeout_s: float = 120.0) -> tuple[int, Any, Any]:
        """Return status, headers, and the JSON body, or bytes where it is none."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, headers, raw = answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as refused:
            status, headers, raw = refused.code, refused.headers, refused.read()
        return status, headers, json.loads(raw) if headers.get_content_type() == "application/json" else raw

    def images(self, **body: Any) -> tuple[int, Any, Any]:
        return self.ask("POST", "/v1/images/generations", body)

    def ready(self) -> None:
        self.until(lambda: self.ask("GET", "/health")[0] == 200, START_S)

    def until(self, seen: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                if seen():
                    return
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}\n{self.tail()}"
            assert time.monotonic() < end, f"not in {timeout_s:g} s\n{self.tail()}"
            threading.Event().wait(0.1)

    def client(self, **options: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", **options)

    def stages(self) -> list[int]:
        """Return the living stages' processes, as they were started: one after the other."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("vLLM-Omni::"):
                    found.append((int(_stat(pid)[19]), pid))
        return [pid for _, pid in sorted(found)]

    def processes(self) -> list[int]:
        """Return the living processes of the server's session, without itself."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                with contextlib.suppress(OSError, ValueError):
                    state, _, _, session = _stat(int(entry.name))[:4]
                    if int(session) == self.process.pid and state != "Z":
                        found.append(int(entry.name))
        return sorted(found)

    def ends(self, code: int, timeout_s: float = 120.0) -> None:
        """Hold that the server ends so, and leaves no process."""
        try:
            assert self.process.wait(timeout_s) == code, self.tail()
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end in {timeout_s:g} s\n{self.tail()}")
        end = time.monotonic() + 30.0
        while left := self.processes():
            assert time.monotonic() < end, f"processes {left} were left\n{self.tail()}"
            threading.Event().wait(0.05)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in shared memory for the stages' stores and segments."""
    folder = Path("/dev/shm") / f"moonrelay-omni-test-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


Serve = Callable[..., Server]


@pytest.fixture(scope="module")
def serve(place: Path, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Starts servers of a family's tiny model; they are killed at the end where they live."""
    folder = tmp_path_factory.mktemp("serve")
    started: list[Server] = []

    def start(family: str, **options: Any) -> Server:
        deploy: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{family}_three_stages.yaml").read_text())
        segments = place / family / "segments"
        segments.mkdir(parents=True, mode=0o700)
        deploy["connectors"]["mr"]["extra"].update(
            engine="shm",
            engine_options={"directory": str(segments)},
            store=f"local://{place / family / 'store'}",
            pool_bytes=64 << 20,
            lease_ttl_s=30.0,
        )
        file = folder / f"{family}.yaml"
        file.write_text(yaml.safe_dump(on_a_cpu(deploy)))
        server = Server(tiny(family), file, folder / f"{family}.log", **options)
        started.append(server)
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def painted(server: Server, undivided: Callable[[str], dict[str, dict[str, Any]]]) -> dict[str, str]:
    """What the host's own pipeline paints in one stage, without HTTP; it starts while the server does."""
    return {name: one["sha256"] for name, one in undivided("qwen_image").items()}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Server:
    return serve("qwen_image", size="64x64", drain_s=60)


def pixels(item: Any) -> str:
    """Return the digest of an answer's image."""
    image = Image.open(io.BytesIO(base64.b64decode(item if isinstance(item, str) else item["b64_json"])))
    assert image.format == "PNG"
    assert (image.size, image.mode) == ((64, 64), "RGB")
    return hashlib.sha256(np.asarray(image).tobytes()).hexdigest()


def test_while_it_starts_it_says_so(server: Server) -> None:
    server.until(lambda: server.ask("GET", "/health")[1] is not None, START_S)
    status, headers, body = server.ask("GET", "/health")
    assert (status, body["status"]) == (503, "starting")
    status, headers, body = server.images(**PLAIN, **ASKED)
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert int(headers["Retry-After"]) >= 1


def test_two_clients_get_what_one_process_paints(server: Server, painted: dict[str, str]) -> None:
    server.ready()
    assert painted["guided"] != painted["plain"]
    assert len(server.stages()) == 3
    more = {name: ASKED[name] for name in ("seed", "num_inference_steps")}

    def ask(asked: dict[str, str]) -> list[str]:
        with server.client(max_retries=0) as client:
            extra = {**more, **{name: text for name, text in asked.items() if name != "prompt"}}
            painted = client.images.generate(prompt=asked["prompt"], model="tiny", size="64x64", extra_body=extra)
            return [pixels(item.b64_json) for item in painted.data]

    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            guided, plain = pool.map(ask, (GUIDED, PLAIN))
            assert guided == [painted["guided"]]
            assert plain == [painted["plain"]]


def test_several_images_differ_by_their_seeds(server: Server, painted: dict[str, str]) -> None:
    server.ready()
    status, _, body = server.images(**PLAIN, **ASKED, n=3)
    assert status == 200
    assert [item["seed"] for item in body["data"]] == [3, 4, 5]
    digests = [pixels(item) for item in body["data"]]
    assert len(set(digests)) == 3
    assert digests[0] == painted["plain"]


def test_what_cannot_be_done_is_refused_and_harms_nothing(server: Server, painted: dict[str, str]) -> None:
    server.ready()
    for body, status, param in (
        ({**PLAIN, "size": "63x64"}, 400, "size"),
        ({**PLAIN, "size": "64x64", "steps": 3}, 400, "steps"),
        ({**PLAIN, "model": "dall-e-3"}, 404, "model"),
        ({"prompt": "fox " * 5000, **ASKED}, 400, "prompt"),  # the text encoder's word, not ours
    ):
        answer = server.images(**body)
        assert (answer[0], answer[2]["error"]["param"]) == (status, param), answer
        assert answer[2]["error"]["type"] == "invalid_request_error"
    assert server.ask("POST", "/v1/images/generations", b"{")[0] == 400
    assert server.ask("POST", "/v1/videos", PLAIN)[2]["error"]["message"].endswith("use /v1/images/generations")
    status, _, body = server.images(**PLAIN, **ASKED)
    assert status == 200
    assert pixels(body["data"][0]) == painted["plain"]


def test_a_client_that_goes_away_harms_nothing(server: Server, painted: dict[str, str]) -> None:
    server.ready()
    body = json.dumps(LONG).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as gone:
        gone.sendall(head + body)
        server.until(lambda: server.ask("GET", "/health")[2]["running"] > 0, 60.0)
    server.until(lambda: server.ask("GET", "/health")[2]["running"] == 0, 60.0)
    assert b'status="499"' in server.ask("GET", "/metrics")[2]
    status, _, answer = server.images(**PLAIN, **ASKED)
    assert status == 200
    assert pixels(answer["data"][0]) == painted["plain"]


def test_a_killed_decode_stage_fails_in_time_and_the_next_request_works(
    server: Server, painted: dict[str, str], place: Path
) -> None:
    server.ready()
    before = server.stages()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.images, **LONG, n=5)
        server.until(lambda: server.ask("GET", "/health")[2]["running"] > 0, 60.0)
        started = time.monotonic()
        os.kill(before[2], signal.SIGKILL)
        status, _, body = under_way.result(DIES_IN_S)
        assert time.monotonic() - started < DIES_IN_S
    assert (status, body["error"]["code"]) == (503, "stage_died")
    assert "stage 2 (decode) died" in body["error"]["message"]
    status, headers, body = server.ask("GET", "/health")
    assert (status, body["status"], body["dead_stages"]) == (503, "restarting", [2])
    status, headers, body = server.images(**PLAIN, **ASKED)
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert int(headers["Retry-After"]) >= 1

    server.ready()
    status, _, body = server.images(**PLAIN, **ASKED)
    assert status == 200
    assert pixels(body["data"][0]) == painted["plain"]
    assert server.ask("GET", "/health")[2]["restarts"] == 1
    after = server.stages()
    assert len(after) == 3
    assert not {*before} & {*after, *server.processes()}
    # The next engine's connectors have cleared away what the killed process could not.
    segments = place / "qwen_image" / "segments"
    assert not [path.name for path in segments.iterdir() if any(f"-{pid}-" in path.name for pid in before)]


def test_asked_to_terminate_it_leaves_nothing(server: Server, place: Path) -> None:
    server.ready()
    with ThreadPoolExecutor(1) as pool:
        under_way = pool.submit(server.images, **PLAIN, **{**ASKED, "num_inference_steps": 50}, n=10)
        server.until(lambda: server.ask("GET", "/health")[2]["running"] > 0, 60.0)
        os.kill(server.process.pid, signal.SIGTERM)
        assert under_way.result(90.0)[0] == 200, "what is under way may end first"
    server.ends(143)
    segments = place / "qwen_image" / "segments"
    sweep_orphans(segments)
    assert list(segments.iterdir()) == []


def test_videos_are_made_beside_their_requests_and_ctrl_c_ends_all(serve: Serve) -> None:
    import av

    server = serve("wan", size="64x64", drain_s=1)
    server.ready()
    with server.client(max_retries=0) as client:
        more = {"num_frames": 5, "num_inference_steps": 3, "seed": 3}
        made = client.videos.create(prompt="a fox in the snow", model="tiny", size="64x64", extra_body=more)
        assert (made.object, made.size, made.seconds) == ("video", "64x64", "0.3125")
        server.until(lambda: client.videos.retrieve(made.id).status == "completed", 300.0)
        raw = client.videos.download_content(made.id).read()
        with av.open(io.BytesIO(raw)) as video:
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
        assert [frame.shape for frame in frames] == [(64, 64, 3)] * 5
        assert len(np.unique(frames[0])) > 16, "a flat picture would be equal to any other"
        assert not np.array_equal(frames[0], frames[4])
        assert client.videos.delete(made.id).deleted
        assert server.ask("GET", f"/v1/videos/{made.id}")[0] == 404
        # One under way is given up, and the next one is made.
        long = client.videos.create(prompt="a", size="64x64", extra_body={**more, "num_inference_steps": 30})
        server.until(lambda: client.videos.retrieve(long.id).status == "in_progress", 60.0)
        assert client.videos.delete(long.id).deleted
        again = client.videos.create(prompt="a fox", size="64x64", extra_body=more)
        server.until(lambda: client.videos.retrieve(again.id).status == "completed", 300.0)
    # As a terminal does it: the stages get the signal too.
    os.killpg(server.process.pid, signal.SIGINT)
    server.ends(130)
