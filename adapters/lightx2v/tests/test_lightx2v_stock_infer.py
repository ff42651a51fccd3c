"""``python -m lightx2v.infer`` for each role, with the host's own transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightx2v_qwen_model
import pytest
from lightx2v_cluster import OneShot
from lightx2v_model import WITHOUT_IMAGE_ENCODER, image
from lightx2v_scenarios import RED, run_once

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

EXITS_NOT_IN_S = 10.0


def test_the_undivided_host_exits(wan: Path, environment: dict[str, str], tmp_path: Path) -> None:
    seen = run_once(OneShot(wan, tmp_path, environment, roles=()))
    assert seen.video
    assert seen.exit_codes == {"all-in-one": 0}


def test_three_roles_make_the_same_video_and_never_exit(wan: Path, environment: dict[str, str], tmp_path: Path) -> None:
    undivided = run_once(OneShot(wan, tmp_path / "undivided", environment, roles=()))
    seen = run_once(OneShot(wan, tmp_path / "roles", environment), RED, EXITS_NOT_IN_S)
    assert seen.video
    assert seen.video == undivided.video
    assert seen.exit_codes == {"encoder": None, "transformer": None, "decode": None}


def test_three_roles_make_the_same_video_of_an_image(
    wan_i2v: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    asked = {**RED, "image_path": str(image(tmp_path / "image.png"))}
    more: dict[str, Any] = {"task": "i2v", "config": {"all": WITHOUT_IMAGE_ENCODER}}
    undivided = run_once(OneShot(wan_i2v, tmp_path / "undivided", environment, roles=(), **more), asked)
    seen = run_once(OneShot(wan_i2v, tmp_path / "roles", environment, **more), asked, EXITS_NOT_IN_S)
    assert seen.video
    assert seen.video == undivided.video


def test_three_roles_make_the_same_image(qwen_image: Path, environment: dict[str, str], tmp_path: Path) -> None:
    asked = {**RED, "target_shape": [64, 64]}
    more: dict[str, Any] = {
        "model_cls": "qwen_image",
        "task": "t2i",
        "config": {"all": lightx2v_qwen_model.CONFIG},
    }
    undivided = run_once(OneShot(qwen_image, tmp_path / "undivided", environment, roles=(), **more), asked)
    seen = run_once(OneShot(qwen_image, tmp_path / "roles", environment, **more), asked, EXITS_NOT_IN_S)
    assert seen.video
    assert seen.video == undivided.video
