"""Connectors in folders of their own, peers in processes of their own, and which tests need the host."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from cpu_platform.install import installed
from omni_engine import PROMPTS, SIZES, Engine, on_a_cpu
from omni_peer import StagePeer, new_place, settings_in

from moonrelay.transfer.shm import sweep_orphans
from moonrelay_vllm_omni.connector import StageConnector

HOST_IS_THERE = find_spec("vllm_omni") is not None
#: Files whose every test needs the host; only `nox -s vllm_omni` has it.
HOST_FILES = sorted(path.name for path in Path(__file__).parent.glob("test_host_*.py"))
collect_ignore = [] if HOST_IS_THERE else HOST_FILES

Make = Callable[..., StageConnector]
Peer = Callable[..., StagePeer]
Tiny = Callable[[str], Path]
Undivided = Callable[[str], dict[str, dict[str, Any]]]


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "vllm_omni" and not HOST_IS_THERE:
        message = "vllm-omni is not installed here, so its tests cannot run; use nox -s vllm_omni"
        raise pytest.UsageError(message)
    if HOST_IS_THERE:
        # The host's own imports warn of much, which no test of ours can mend; here no filter makes errors of it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("vllm_omni.worker.omni_connector_model_runner_mixin")


def pytest_report_header() -> str | None:
    if HOST_IS_THERE:
        return None
    return f"vllm-omni is not installed: {', '.join(HOST_FILES)} are left to nox -s vllm_omni"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = {item.path.name for item in items if item.get_closest_marker("vllm_omni")}
    if marked and not HOST_IS_THERE:
        message = f"tests marked vllm_omni stand in test_host_*.py, so that it is said where they are not run: {marked}"
        raise pytest.UsageError(message)


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in shared memory for one test's store and segments."""
    folder = new_place()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def extra(place: Path) -> dict[str, Any]:
    """What a deploy YAML would hold, with short times."""
    return settings_in(place)


@pytest.fixture
def make(extra: dict[str, Any]) -> Iterator[Make]:
    """Makes connectors that are closed at the end; keywords change the settings."""
    made: list[StageConnector] = []

    def make_one(**changes: Any) -> StageConnector:
        connector = StageConnector({**extra, **changes})
        made.append(connector)
        return connector

    yield make_one
    for connector in made:
        connector.close()


@pytest.fixture
def peer(extra: dict[str, Any], place: Path) -> Iterator[Peer]:
    """Starts peers, whose connectors lie in the same places; they are ended afterwards."""
    started: list[StagePeer] = []

    def start(*, host: bool = False, **changes: Any) -> StagePeer:
        one = StagePeer({**extra, **changes}, host=host)
        started.append(one)
        return one

    yield start
    for one in started:
        one.end()
    sweep_orphans(place / "segments")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Makes a family's tiny random model, once."""
    if not installed():
        pytest.fail("the host has no CPU platform here; run `python -m cpu_platform.install`, as nox -s vllm_omni does")
    folder = tmp_path_factory.mktemp("tiny")

    def of(family: str) -> Path:
        model = folder / family
        if not model.exists():
            build = f"import sys; from moonrelay_diffusers import tiny; tiny.build_{family}(sys.argv[1])"
            subprocess.run([sys.executable, "-c", build, str(model)], timeout=300, check=True)
        return model

    return of


@pytest.fixture(scope="session")
def undivided(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Undivided:
    """What the host's own pipeline of a family paints of `PROMPTS`, in one stage; its engine starts once."""
    folder = tmp_path_factory.mktemp("undivided")
    seen: dict[str, dict[str, dict[str, Any]]] = {}

    def of(family: str) -> dict[str, dict[str, Any]]:
        if family not in seen:
            file = folder / f"{family}.yaml"
            stage = {"stage_id": 0, "devices": "0", "max_num_seqs": 1}
            deploy = {"pipeline": f"moonrelay_test_{family}", "async_chunk": False, "stages": [stage]}
            file.write_text(yaml.safe_dump(on_a_cpu(deploy)))
            engine = Engine(tiny(family), file, folder / f"{family}.log")
            try:
                seen[family] = {name: engine.do("paint", prompt=one, **SIZES[family]) for name, one in PROMPTS.items()}
            finally:
                engine.end()
        return seen[family]

    return of
