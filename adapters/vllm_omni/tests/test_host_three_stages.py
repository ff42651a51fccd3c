"""Qwen-Image and Wan in several processes of the host, by the examples' YAML: the same pixels, and a stage that dies.

Each engine costs a minute of imports, so one serves several prompts, and is killed at the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omni_engine import PROMPTS, SIZES, Engine, EngineFailed, on_a_cpu

from moonrelay.transfer.shm import sweep_orphans

pytestmark = [pytest.mark.vllm_omni, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[1] / "examples"
DIES_IN_S = 60.0

Start = Callable[[str, dict[str, Any]], Engine]
Undivided = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder in shared memory for the stages' store and segments."""
    folder = Path("/dev/shm") / f"moonrelay-omni-test-{secrets.token_hex(6)}"
    (folder / "segments").mkdir(parents=True, mode=0o700)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def start(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts engines with tiny models of a family; they are ended at the end."""
    folder = tmp_path_factory.mktemp("omni")
    started: list[Engine] = []

    def start_one(family: str, deploy: dict[str, Any]) -> Engine:
        file = folder / f"deploy{len(started)}.yaml"
        file.write_text(yaml.safe_dump(on_a_cpu(deploy)))
        engine = Engine(tiny(family), file, folder / f"log{len(started)}")
        started.append(engine)
        return engine

    yield start_one
    for engine in started:
        engine.end()


def example(name: str, place: Path) -> dict[str, Any]:
    """Return an example's deploy YAML, with a store and segments of the test's own."""
    deploy: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    deploy["connectors"]["mr"]["extra"].update(
        engine="shm",
        engine_options={"directory": str(place / "segments")},
        store=f"local://{place / 'store'}",
        pool_bytes=64 << 20,
        lease_ttl_s=30.0,
    )
    return deploy


def compare(engine: Engine, family: str, whole: dict[str, dict[str, Any]], stages: int) -> None:
    """Have an engine paint what the undivided pipeline has painted, and compare bit by bit."""
    assert len({one["sha256"] for one in whole.values()}) == len(PROMPTS)
    assert all(one["values"] > 16 for one in whole.values()), "a flat picture would be equal to any other"
    assert len({engine.do("stage_pid", stage=stage) for stage in range(stages)}) == stages
    for asked, prompt in PROMPTS.items():
        painted = engine.do("paint", prompt=prompt, **SIZES[family])
        assert painted["shape"] == whole[asked]["shape"]
        assert painted["sha256"] == whole[asked]["sha256"], asked


@pytest.fixture(scope="module")
def notes(place: Path) -> Path:
    """Where the encode stage's condition hook takes notes."""
    return place / "notes"


@pytest.fixture(scope="module")
def engine(start: Start, place: Path, notes: Path) -> Engine:
    """The example's three stages, for all tests of them; a hook looks on at what is encoded."""
    deploy = example("qwen_image_three_stages", place)
    settings = {"condition_hook": "omni_hooks:Remembers", "encoder": str(notes), "encoder_revision": "tiny"}
    deploy["stages"][0]["model_config"] = {"moonrelay": settings}
    return start("qwen_image", deploy)


def test_three_processes_paint_what_one_paints(undivided: Undivided, engine: Engine) -> None:
    compare(engine, "qwen_image", undivided("qwen_image"), 3)


def test_what_a_condition_hook_remembers_paints_the_same(undivided: Undivided, engine: Engine, notes: Path) -> None:
    whole = undivided("qwen_image")
    compare(engine, "qwen_image", whole, 3)
    before = notes.read_text().splitlines()
    compare(engine, "qwen_image", whole, 3)
    asked = notes.read_text().splitlines()[len(before) :]
    texts = ["a fox in the snow", "blurry", "a fox in the snow", *["a lighthouse at night"] * 2, "blurry"]
    assert asked == [f"hit {text}" for text in texts]
    assert {f"miss {text}" for text in texts} <= set(before)


def test_a_killed_decode_stage_fails_the_request_in_time_and_leaves_nothing(engine: Engine, place: Path) -> None:
    killed = engine.do("stage_pid", stage=2)
    os.kill(killed, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineFailed) as failure:
        engine.do("paint", timeout_s=2 * DIES_IN_S, prompt=PROMPTS["plain"], **SIZES["qwen_image"])
    assert time.monotonic() - started < DIES_IN_S
    assert failure.value.kind == "OmniEngineDeadError"
    assert failure.value.stage == 2
    # The host ends an engine whose request failed so; it is to take all of its processes with it.
    engine.leave(60.0)
    end = time.monotonic() + 60.0
    while left := engine.processes():
        assert time.monotonic() < end, f"processes {left} were left\n{engine.tail()}"
        threading.Event().wait(0.05)
    # Only the killed process could not clear its segment away; whoever comes next there does.
    segments = place / "segments"
    assert all(f"-{killed}-" in path.name for path in segments.iterdir())
    sweep_orphans(segments)
    assert list(segments.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "name", "stages"),
    [
        ("qwen_image", "qwen_image_decode_apart", 2),
        ("wan", "wan_three_stages", 3),
        ("wan", "wan_decode_apart", 2),
    ],
    ids=["qwen_image_decode_apart", "wan_three_stages", "wan_decode_apart"],
)
def test_the_other_examples_paint_the_same(
    undivided: Undivided, start: Start, place: Path, family: str, name: str, stages: int
) -> None:
    whole = undivided(family)
    engine = start(family, example(name, place))
    compare(engine, family, whole, stages)
    engine.end()
