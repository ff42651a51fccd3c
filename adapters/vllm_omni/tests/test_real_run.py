"""Whether a real run is offered, and how it fails; that it paints the same is the conformance suite's to say."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from moonrelay.cli.demo.children import Child
from moonrelay.errors import DeadlineExceeded, MoonrelayError, PeerLost
from moonrelay_conformance.capability import Capability, Support
from moonrelay_vllm_omni import plugin, real_run
from moonrelay_vllm_omni.conformance import VllmOmniTarget

#: In place of an engine: reads its order, and does what the case says.
STAND_IN = "import sys, json, os, signal; sys.stdin.readline(); {does}"


def say(**fields: str) -> str:
    return f"print(json.dumps({fields!r}), flush=True); sys.stdin.read()"


class StandIn:
    """What the stand-ins do, by name, and their pids."""

    def __init__(self) -> None:
        self.does = dict.fromkeys((real_run.DIVIDED, real_run.UNDIVIDED), say(event="painted", digest="d"))
        self.pids: list[int] = []


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the host were installed, without a GPU or a platform of any other kind."""
    monkeypatch.setattr(plugin.VllmOmniAdapter, "available", lambda _self: (True, "vllm-omni 0.30.0"))
    monkeypatch.setattr(plugin, "host_version", lambda: "0.30.0")
    monkeypatch.setattr(real_run, "_has_cuda", lambda: False)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Lets other processes stand in for the host's."""
    stand = StandIn()

    def child(name: str, _command: list[str], *rest: Any, **more: Any) -> Child:
        made = Child(name, [sys.executable, "-c", STAND_IN.format(does=stand.does[name])], *rest, **more)
        stand.pids.append(made.pid)
        return made

    monkeypatch.setattr(real_run, "_BUILD", "pass")
    monkeypatch.setattr(real_run, "_has_cuda", lambda: False)
    monkeypatch.setattr(real_run, "Child", child)
    return stand


def test_without_a_platform_it_is_not_offered_and_says_why(host: None) -> None:
    target = VllmOmniTarget()
    assert target.capabilities()[Capability.PIPELINE] is Support.UNSUPPORTED
    assert "no GPU, and no platform" in target.host()


@pytest.mark.parametrize("cuda", [True, False], ids=["cuda", "platform"])
def test_with_one_it_is(host: None, monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    if cuda:
        monkeypatch.setattr(real_run, "_has_cuda", lambda: True)
    else:
        entry = metadata.EntryPoint("some_cpu", "x:y", real_run.PLATFORMS)
        monkeypatch.setattr(metadata, "entry_points", lambda **_: (entry,))
    target = VllmOmniTarget()
    assert target.capabilities()[Capability.PIPELINE] is Support.FULL
    assert "no pipeline run" not in target.host()


def test_without_the_host_it_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.VllmOmniAdapter, "available", lambda _self: (False, "not installed"))
    assert real_run.platform() == (False, "the host is not installed")


def test_every_edge_of_the_divided_one_goes_by_the_connector() -> None:
    deploy = real_run.divided_deploy({"engine": "shm"})
    first, second, third = deploy["stages"]
    assert deploy["connectors"] == {"mr": {"name": plugin.NAME, "extra": {"engine": "shm"}}}
    assert first["output_connectors"] == {"to_stage_1": "mr"}
    assert second["input_connectors"] == {"from_stage_0": "mr"}
    assert second["output_connectors"] == {"to_stage_2": "mr"}
    assert third["input_connectors"] == {"from_stage_1": "mr"}


@pytest.mark.processes
def test_both_digests_come_back_and_all_processes_go(stand_in: StandIn, tmp_path: Path) -> None:
    painted = real_run.paint({}, tmp_path, timeout_s=60.0)
    assert painted == real_run.Painted(undivided="d", divided="d")
    assert len(stand_in.pids) == 2
    for pid in stand_in.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("does", "error", "text"),
    [
        (say(event="error", message="RuntimeError: no such thing"), MoonrelayError, "no such thing"),
        ("print('its last words', file=sys.stderr); sys.exit(3)", PeerLost, "code 3: its last words"),
        ("os.kill(os.getpid(), signal.SIGKILL)", PeerLost, "code -9"),
        ("sys.stdin.read()", DeadlineExceeded, real_run.DIVIDED),
    ],
    ids=["error", "exit", "killed", "silent"],
)
def test_a_run_that_fails_says_how_and_leaves_no_process(
    stand_in: StandIn, tmp_path: Path, does: str, error: type[Exception], text: str
) -> None:
    stand_in.does[real_run.DIVIDED] = does
    with pytest.raises(error, match=text):
        real_run.paint({}, tmp_path, timeout_s=3.0 if error is DeadlineExceeded else 60.0)
    for pid in stand_in.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.processes
def test_a_model_that_cannot_be_built_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(real_run, "_BUILD", "raise SystemExit('no diffusers here')")
    with pytest.raises(PeerLost, match="no diffusers here"):
        real_run.paint({}, tmp_path, timeout_s=60.0)
