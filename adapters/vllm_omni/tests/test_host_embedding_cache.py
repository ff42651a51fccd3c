"""A stage's own embedding cache in the host: the same pixels, and how often the text encoder computes.

The host has no stage started again by itself: where a stage ends, the engine is, and so the next one is a new process.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cpu_platform import counts
from omni_engine import PROMPTS, SIZES, Engine, on_a_cpu

from moonrelay_conformance.sides import SidePool
from moonrelay_conformance.targets.adapter import SideSettings
from moonrelay_vllm_omni.conformance import VllmOmniTarget

pytestmark = [pytest.mark.vllm_omni, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[1] / "examples"
#: Of the first engine of a family, by the name of what it paints: the encoder's calls. None is for "shared", whose
#: prompts came with others before.
FIRST = {
    "qwen_image": {"guided": 2, "plain": 0, "text": 1, "shared": 0},
    "wan": {"guided": 2, "plain": 1, "text": 1, "shared": 0},
}

Undivided = Callable[[str], dict[str, dict[str, Any]]]
Start = Callable[[str, str], Engine]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder in shared memory for the engines' store and segments."""
    folder = Path("/dev/shm") / f"moonrelay-omni-test-{secrets.token_hex(6)}"
    (folder / "segments").mkdir(parents=True, mode=0o700)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Tells how often text encoders computed since it was asked last."""
    file = tmp_path / "calls"
    file.touch()
    monkeypatch.setenv(counts.VARIABLE, str(file))
    seen = 0

    def since() -> int:
        nonlocal seen
        before, seen = seen, len(file.read_text().splitlines())
        return seen - before

    return since


@pytest.fixture
def start(tiny: Callable[[str], Path], tmp_path: Path, place: Path) -> Iterator[Start]:
    """Starts engines by an example, with nothing more in it but the one setting; they are ended at the end."""
    started: list[Engine] = []

    def start_one(family: str, name: str) -> Engine:
        deploy: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
        deploy["connectors"]["mr"]["extra"].update(
            engine="shm",
            engine_options={"directory": str(place / "segments")},
            store=f"local://{place / 'store'}",
            pool_bytes=64 << 20,
            lease_ttl_s=30.0,
        )
        deploy["stages"][0]["model_config"] = {"moonrelay": {"embedding_cache": True}}
        file = tmp_path / f"deploy{len(started)}.yaml"
        file.write_text(yaml.safe_dump(on_a_cpu(deploy)))
        started.append(Engine(tiny(family), file, tmp_path / f"log{len(started)}"))
        return started[-1]

    yield start_one
    for engine in started:
        engine.end()


def paint_all(
    engine: Engine, family: str, whole: dict[str, dict[str, Any]], calls: Callable[[], int]
) -> dict[str, int]:
    """Paint what the undivided pipeline painted, without a cache; return the encoder's calls for each."""
    counted = {}
    for name, prompt in PROMPTS.items():
        painted = engine.do("paint", prompt=prompt, **SIZES[family])
        assert painted["sha256"] == whole[name]["sha256"], name
        counted[name] = calls()
    return counted


@pytest.mark.parametrize(
    ("family", "first", "second"),
    [
        ("qwen_image", "qwen_image_three_stages", "qwen_image_three_stages"),
        ("wan", "wan_decode_apart", "wan_three_stages"),
    ],
    ids=["qwen_image", "wan"],
)
def test_what_was_encoded_is_never_encoded_again(
    undivided: Undivided, start: Start, calls: Callable[[], int], family: str, first: str, second: str
) -> None:
    """Not for another request, and not in the next engine, even where the encoder's stage is another class."""
    whole = undivided(family)
    nothing = dict.fromkeys(PROMPTS, 0)
    calls()
    engine = start(family, first)
    warm_up = calls()
    assert paint_all(engine, family, whole, calls) == FIRST[family]
    assert paint_all(engine, family, whole, calls) == nothing
    engine.end()  # as by a crash
    engine = start(family, second)
    assert (warm_up, calls()) == (1, 0)
    assert paint_all(engine, family, whole, calls) == nothing
    log = engine.log.read_text(errors="replace")
    engine.leave(60.0)
    assert "cache_trouble" not in log


def test_the_conformance_suites_sides_encode_as_the_host_does(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    target = VllmOmniTarget()
    pool = SidePool(env=target.environment())
    with target.ground(tmp_path) as ground:
        try:
            settings = ground.settings(SideSettings(role="producer", route="spill"))
            sides = [pool.start(target.side, settings) for _ in range(2)]

            def encode(side: int, prompt: str, *, cached: bool = True) -> tuple[int, list[str]]:
                found = sides[side].do("encode", timeout_s=300.0, prompt=prompt, negative="blurry", cached=cached)
                return found["computed"], [found["positive"], found["negative"]]

            plain = encode(0, "a fox", cached=False)
            assert plain[0] == 2
            assert encode(0, "a fox") == plain
            assert encode(0, "a fox") == (0, plain[1])
            assert encode(1, "a fox") == (0, plain[1])
            other = encode(1, "a lighthouse")
            assert other[0] == 1
            assert encode(0, "a lighthouse", cached=False) == (2, other[1])
        finally:
            pool.close()
