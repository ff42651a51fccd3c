"""What this adapter offers to the conformance suite; the suite itself is run by ``moonrelay conformance diffusers``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError, DeadlineExceeded, MoonrelayError, PeerLost
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.sides.connector_side import ConnectorSide
from moonrelay_conformance.targets.adapter import AdapterTarget
from moonrelay_diffusers import conformance
from moonrelay_diffusers.conformance import DiffusersSide, DiffusersTarget, MooncakeDiffusersTarget
from moonrelay_diffusers.plugin import DiffusersAdapter


def test_the_adapter_offers_a_target_that_says_what_it_is() -> None:
    target = DiffusersAdapter().conformance_target()
    assert isinstance(target, AdapterTarget)
    info = target.info()
    assert info.label == "adapter:diffusers"
    assert info.host.startswith("diffusers ")
    assert info.host.endswith("(engine shm, relay local)")
    assert info.routes == ("p2p", "store")
    assert target.supports(Capability.PIPELINE, Capability.SPILL, Capability.CAPACITY)


def test_the_engine_is_named_never_fallen_back_on() -> None:
    assert MooncakeDiffusersTarget().info().host.endswith("(engine mooncake, relay mooncake)")
    with pytest.raises(ConfigError, match="engine='best'"):
        DiffusersTarget(engine="best")


def test_without_the_host_there_is_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiffusersAdapter, "available", lambda _self: (False, "not installed"))
    assert not DiffusersTarget().supports(Capability.PIPELINE)


def test_the_side_is_the_connectors() -> None:
    module, _, name = DiffusersTarget.side.partition(":")
    assert getattr(sys.modules[module], name) is DiffusersSide
    assert issubclass(DiffusersSide, ConnectorSide)


def test_asking_for_the_target_loads_neither_torch_nor_the_host() -> None:
    program = (
        "import sys; from moonrelay_diffusers.plugin import DiffusersAdapter; "
        "print(DiffusersAdapter().conformance_target().info().host); "
        "assert not {'torch', 'diffusers', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.model
def test_three_real_processes_make_the_frames_of_the_undivided_pipeline(tmp_path: Path) -> None:
    run = DiffusersTarget().pipeline(tmp_path, timeout_s=150)
    assert run.processes == 3
    assert len(run.undivided) == 32
    assert run.divided == run.undivided


@pytest.mark.processes
@pytest.mark.model
def test_a_run_is_bounded_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match=r"the tiny model took more than 0\.1 s"):
        DiffusersTarget().pipeline(tmp_path, timeout_s=0.1)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.model
def test_a_worker_that_dies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = conformance._Run._worker

    def broken(self: conformance._Run, stage: str, queue_url: str, store: str | None) -> list[str]:
        return [*worker(self, stage, queue_url, store), *(["--no-such-option"] if stage == "denoise" else [])]

    monkeypatch.setattr(conformance._Run, "_worker", broken)
    with pytest.raises(PeerLost, match="denoise ended with code"):
        DiffusersTarget().pipeline(tmp_path, timeout_s=100)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.model
def test_frames_that_differ_have_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault: the workers are given another seed than the undivided pipeline."""

    def listened(self: conformance._Run, message: conformance.Message) -> None:
        original(self, message)
        if message.event == "model":
            assert isinstance(self._request, dict)
            self._request = {**self._request, "seed": 12}

    original = conformance._Run._from_undivided
    monkeypatch.setattr(conformance._Run, "_from_undivided", listened)
    try:
        run = DiffusersTarget().pipeline(tmp_path, timeout_s=150)
    except MoonrelayError as exc:
        pytest.fail(f"the run itself failed: {exc}")
    assert run.divided != run.undivided
