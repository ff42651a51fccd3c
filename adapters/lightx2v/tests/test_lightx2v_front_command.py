"""``moonrelay lightx2v-front`` as its user has it: settings, refusals, and a real process with signals."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest
from lightx2v_front_roles import RoleProcess

from moonrelay.errors import ConfigError
from moonrelay_lightx2v.front.settings import FrontConfig

URLS = {"encoder": ("http://127.0.0.1:8002",), "transformer": ("http://127.0.0.1:8003",)}
COMMAND = [sys.executable, "-m", "moonrelay.cli.main", "lightx2v-front"]
BARE = ["--encoder", "http://127.0.0.1:1", "--transformer", "http://127.0.0.1:2"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def test_stages_are_in_the_order_in_which_a_request_passes_them() -> None:
    two = FrontConfig(**URLS)  # type: ignore[arg-type]
    assert [name for name, _ in two.stages] == ["encoder", "transformer"]
    three = FrontConfig(
        encoder=("http://a:1/", "https://[::1]:2/prefix/"), transformer=("http://b",), decoder=("http://c",)
    )
    assert three.stages == (
        ("encoder", ("http://a:1", "https://[::1]:2/prefix")),
        ("transformer", ("http://b",)),
        ("decoder", ("http://c",)),
    )
    assert three.host == "127.0.0.1", "there is no authentication"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"encoder": ()}, "encoder is missing"),
        ({"transformer": ("127.0.0.1:8003",)}, "transformer='127.0.0.1:8003' is no server's URL; it must be like http"),
        ({"decoder": ("ftp://x",)}, "--decoder"),
        ({"decoder": ("http://",)}, "no server's URL"),
        ({"decoder": ("http://x:99999",)}, "is no URL"),
        ({"decoder": ("http://x:0",)}, "no server's URL"),
        ({"decoder": ("http://[::1",)}, "is no URL"),
        ({"decoder": ("http://me:pass@x",)}, "without user"),
        ({"decoder": ("http://x?a=1",)}, "query"),
        ({"decoder": ("http://x y",)}, "no server's URL"),
        ({"decoder": ("http://127.0.0.1:8002/",)}, "http://127.0.0.1:8002 is given 2 times"),
        ({"port": -1}, "port=-1"),
        ({"port": 65_536}, "port=65536"),
        ({"request_timeout_s": 0}, "request_timeout_s=0"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s=inf must be"),
        ({"request_timeout_s": float("nan")}, "request_timeout_s=nan"),
        ({"poll_interval_s": -1.0}, "poll_interval_s"),
        ({"restart_wait_s": 1e9}, "restart_wait_s"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"attempts": 0}, "attempts=0"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FrontConfig(**{**URLS, **settings})  # type: ignore[arg-type]
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_help_needs_none_of_the_libraries() -> None:
    code = (
        "import sys; import moonrelay_lightx2v.front.command; "
        "print(sorted({'starlette', 'uvicorn', 'httpx', 'torch', 'lightx2v'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
    shown = run("--help")
    assert shown.returncode == 0
    options = set(re.findall(r"--[a-z-]+", shown.stdout))
    assert options >= {
        "--encoder",
        "--transformer",
        "--decoder",
        "--host",
        "--port",
        "--request-timeout",
        "--max-requests",
        "--attempts",
        "--poll-interval",
        "--restart-wait",
    }


@pytest.mark.parametrize("library", ["starlette", "uvicorn", "httpx"])
def test_a_missing_library_is_one_line(library: str) -> None:
    code = (
        f"import sys; sys.modules[{library!r}] = None\n"
        "from moonrelay.cli.main import main\n"
        f"main(['lightx2v-front', *{BARE!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"needs the library {library}" in done.stderr
    assert "pip install 'moonrelay[lightx2v]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--encoder", "nowhere", "--transformer", "http://127.0.0.1:2"], "encoder='nowhere' is no server's URL"),
        ([*BARE, "--attempts", "0"], "attempts=0 must be a number above 0"),
        (["--transformer", "http://127.0.0.1:2"], "--encoder"),
        ([*BARE, "--max-requests", "many"], "--max-requests"),
        ([*BARE, "--host", "no.such.host.invalid"], "host='no.such.host.invalid'"),
    ],
)
def test_a_wrong_command_line_is_2_and_says_why(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(*BARE, "--port", str(port))
    assert done.returncode == 2
    assert f"port={port}: cannot be listened on" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.fixture(scope="module")
def roles() -> Iterator[list[RoleProcess]]:
    started: list[RoleProcess] = []
    try:
        started += [RoleProcess(stage) for stage in ("encoder", "transformer", "decoder")]
        yield started
    finally:
        for role in started:
            role.kill()


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_command_serves_and_a_signal_ends_it(roles: list[RoleProcess], number: signal.Signals, code: int) -> None:
    arguments = [word for role in roles for word in (f"--{role.stage}", role.url)]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--port", "0", "--poll-interval", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "the command did not start"
        line = process.stdout.readline()
        assert line.startswith("serving encoder + transformer + decoder on http://127.0.0.1:")
        with httpx.Client(base_url=line.split()[-1], timeout=30, trust_env=False) as client:
            assert client.get("/health").json()["status"] == "ok"
            task_id = client.post("/v1/tasks/video/", json={"prompt": "a fox"}).json()["task_id"]
            assert re.fullmatch(r"[0-9A-F]{20}", task_id)
            for _ in range(600):
                if client.get(f"/v1/tasks/{task_id}/status").json()["status"] == "completed":
                    break
                threading.Event().wait(0.05)
            assert len(client.get(f"/v1/tasks/{task_id}/result").content) == 1000
            hung = client.post("/v1/tasks/video/", json={"prompt": "decoder: hang"}).json()["task_id"]
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert process.returncode == code
    assert err == ""
    assert hung in roles[-1].seen()["cancelled"]


@pytest.mark.processes
def test_who_listens_to_others_is_warned(roles: list[RoleProcess]) -> None:
    arguments = [word for role in roles for word in (f"--{role.stage}", role.url)]
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--host", "0.0.0.0", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving")
    finally:
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "no authentication" in err
