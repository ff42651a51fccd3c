"""``moonrelay demo`` as a user runs it, small: with kills, and what is left when it is itself interrupted or killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.segments import abandoned_segments

pytestmark = [
    pytest.mark.processes,
    pytest.mark.model,
    pytest.mark.mooncake,
    pytest.mark.slow,
    pytest.mark.timeout(400),
]

SMALL = ("--steps=2", "--frames=9", "--size=32")
#: A killed demo's children end by a broken pipe; the slowest of them has three seconds for an orderly end.
GONE_WITHIN_S = 30.0


class Demo:
    """A running demo, and everything that it started."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self.output = output
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moonrelay.cli.main", "demo", f"--output={output}", *SMALL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        self.seen: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """Return the descendants that run now, and remember them."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen |= {child.pid: child for child in found}
        return found

    def wait_for(self, true: Callable[[], bool], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            self.look()
            time.sleep(0.05)

    def survivors(self) -> list[str]:
        """Return the descendants that are still there after the time that they have to end."""
        psutil.wait_procs(list(self.seen.values()), timeout=GONE_WITHIN_S)
        return [
            " ".join(child.cmdline()) for child in self.seen.values() if child.is_running() and not _is_zombie(child)
        ]

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=350)
        return self.process.returncode, out, err

    def close(self) -> None:
        for child in self.seen.values():
            if child.is_running():
                child.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    demos: list[Demo] = []

    def make(*arguments: str) -> Demo:
        demos.append(Demo(tmp_path / "out", *arguments))
        return demos[-1]

    yield make
    for demo in demos:
        demo.close()


def check_summary(demo: Demo, out: str, *, requests: int) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(out)
    assert summary == json.loads((demo.output / "summary.json").read_text())
    assert summary["identical"] is True
    assert [request["request_id"] for request in summary["requests"]] == [f"r{n + 1:02d}" for n in range(requests)]
    for request in summary["requests"]:
        assert request["identical"] is True
        assert re.fullmatch("[0-9a-f]{32}", request["digest"])
        assert request["digest"] == request["undivided_digest"]
        assert request["frames"] == [9, 32, 32, 3]
        assert set(request["stages"]) == {"encode", "denoise", "decode"}
        assert set(request["path"]) == {"encode-denoise", "denoise-decode"}
        assert set(request["path"].values()) <= {"p2p", "store"}
        for name in ("denoise", "decode"):
            assert request["stages"][name]["input_bytes"] > 0
        video = Path(request["file"])
        assert video.parent == demo.output / "videos"
        assert video.stat().st_size > 0
    # Different prompts and seeds give different videos: the comparison compares something.
    assert len({request["digest"] for request in summary["requests"]}) == requests
    for picture in ("contact.png", "timeline.png"):
        assert (demo.output / picture).read_bytes().startswith(b"\x89PNG")
    assert not (demo.output / ".work").exists()
    return summary


def test_a_killed_decode_worker_changes_nothing(start: Callable[..., Demo]) -> None:
    demo = start("--requests=3", "--kill=decode", "--json")
    while demo.process.poll() is None:
        demo.look()
        if demo.process.stdout is not None and _readable(demo.process.stdout):
            break
    code, out, err = demo.finish()
    assert code == 0, err
    summary = check_summary(demo, out, requests=3)
    killed = summary["killed"]
    assert killed["stage"] == "decode"
    assert killed["survived"] is True
    assert killed["attempt_after"] > killed["attempt"]
    assert 0 < killed["fraction"] < 1
    hit = next(one for one in summary["requests"] if one["request_id"] == killed["request_id"])
    assert hit["stages"]["decode"]["attempt"] == killed["attempt_after"]
    assert hit["stages"]["decode"]["worker"] == killed["replacement"]
    assert summary["deliveries"] == {"completed": 9, "killed": 1}
    assert demo.seen
    assert demo.survivors() == []


@pytest.mark.alone  # other tests kill owners of segments meanwhile
def test_a_killed_encode_worker_with_the_other_parts(start: Callable[..., Demo]) -> None:
    abandoned = abandoned_segments()
    demo = start("--requests=1", "--kill=encode", "--engine=shm", "--store=local", "--json")
    code, out, err = demo.finish()
    assert code == 0, err
    summary = check_summary(demo, out, requests=1)
    assert summary["killed"]["request_id"] == "r01"
    assert summary["requests"][0]["stages"]["encode"]["attempt"] == 2
    assert abandoned_segments() <= abandoned


def test_the_store_takes_it_all_and_the_one_of_two_that_has_the_job_is_killed(start: Callable[..., Demo]) -> None:
    demo = start("--requests=1", "--kill=denoise", "--transfer-mode=store")
    code, out, err = demo.finish()
    assert code == 0, err
    summary = check_summary(demo, (demo.output / "summary.json").read_text(), requests=1)
    assert summary["paths"] == {"store": 2}
    assert summary["requests"][0]["stages"]["denoise"]["attempt"] == 2
    # No terminal: plain lines, one for each happening.
    assert "\x1b" not in out
    assert re.search(r"kill -9 of denoise-[12] \(pid \d+\) in the middle of r01", out)
    assert "1 of 1 identical to the undivided pipeline, bit for bit" in out


def test_an_interactive_request_overtakes_a_batch_one(start: Callable[..., Demo]) -> None:
    demo = start("--requests=3", "--preempt", "--steps=8", "--store=local", "--json")
    code, out, err = demo.finish()
    assert code == 0, err
    summary = check_summary(demo, out, requests=3)
    [made_way] = summary["yields"]
    assert (made_way["made_way_for"], made_way["worker"]) == ("r03", "denoise-1")
    assert (made_way["resumed_step"], made_way["steps_redone"]) == (4, 0)
    hit = next(one for one in summary["requests"] if one["request_id"] == made_way["request_id"])
    last = summary["requests"][-1]
    assert hit["stages"]["denoise"]["attempt"] == 2
    assert last["stages"]["denoise"]["started_s"] < hit["stages"]["denoise"]["started_s"]
    assert summary["deliveries"] == {"completed": 9, "preempted": 1}
    assert summary["checkpoints"] >= 1
    assert demo.survivors() == []


def test_repeated_prompts_go_past_encode(start: Callable[..., Demo]) -> None:
    demo = start("--requests=12", "--store=local", "--json")
    code, out, err = demo.finish()
    assert code == 0, err
    summary = json.loads(out)
    assert summary["identical"] is True
    repeats = [one for one in summary["requests"] if one["embeddings"]["past_encode"]]
    assert [one["request_id"] for one in repeats] == ["r11", "r12"]
    for one in repeats:
        assert one["embeddings"]["misses"] == 0
        assert set(one["stages"]) == {"denoise", "decode"}
    # 10 prompts and 3 negative prompts, the empty one among them; each is encoded once.
    assert summary["embeddings"] == {"hits": 11, "misses": 13}
    assert summary["paths"]["cache"] == 2
    assert (demo.output / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert demo.survivors() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_the_demo_ends_early(start: Callable[..., Demo], number: signal.Signals) -> None:
    demo = start("--requests=2")

    def workers() -> list[psutil.Process]:
        return [child for child in demo.look() if "worker" in _cmdline(child)]

    demo.wait_for(lambda: len(workers()) == 4)
    names = {Path(_cmdline(child)[0]).name for child in demo.look() if _cmdline(child)}
    assert {"mooncake_master", "mooncake_client"} <= names
    demo.process.send_signal(number)
    code, _, err = demo.finish()
    assert code == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert "Traceback" not in err
    assert demo.survivors() == []
    if number != signal.SIGKILL:
        assert not (demo.output / ".work").exists()


def test_two_demos_do_not_share_a_folder(start: Callable[..., Demo]) -> None:
    first = start("--requests=1")
    first.wait_for((first.output / ".work").exists)
    second = start("--requests=1")
    code, _, err = second.finish()
    assert code == 2
    assert "another demo" in err
    first.process.send_signal(signal.SIGINT)
    assert first.finish()[0] == 130


def test_what_the_model_cannot_do_is_one_line(start: Callable[..., Demo]) -> None:
    demo = start("--requests=1", "--size=33", "--transfer-mode=p2p")
    code, _, err = demo.finish()
    assert code == 2
    assert err.count("\n") == 1
    assert "height=33" in err


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _readable(stream: Any) -> bool:
    import select

    readable, _, _ = select.select([stream], [], [], 0.2)
    return bool(readable)
