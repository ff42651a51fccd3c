"""Each stage in a real process of its own, on a machine that has only that stage's weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moonrelay_diffusers.frames import frames_digest

pytestmark = [pytest.mark.model, pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("same_bits")]

KIND = "wan2.2-a14b"
#: For each stage: the folders it may read, and the class of the model that lives in its process.
OWN = {
    "encode": ({"tokenizer", "text_encoder"}, "UMT5EncoderModel"),
    "denoise": ({"transformer", "transformer_2", "scheduler"}, "WanTransformer3DModel"),
    "decode": ({"vae"}, "AutoencoderKLWan"),
}


def test_a_stage_needs_and_loads_its_own_modules_only(models: Any, tmp_path: Path) -> None:
    request = models.request(KIND)
    (tmp_path / "request.json").write_text(json.dumps(request.to_payload()))
    for stage, (own, model_class) in OWN.items():
        report = _run(stage, _only(models.folder(KIND), tmp_path / stage, own), tmp_path)
        foreign = {other for _, other in OWN.values()} - {model_class}
        assert model_class in report["modules"]
        assert not foreign & set(report["modules"])
        read = {Path(name).parts[0] for name in report["files"] if not name.endswith("config.json")}
        assert read <= own | {"model_index.json"}
        assert any(Path(name).parts[0] in own for name in report["files"])
    frames = np.load(tmp_path / "frames.npy")
    assert frames_digest(frames) == frames_digest(models.reference(KIND).run(request))


def _only(model: str, target: Path, own: set[str]) -> Path:
    """Copy a model, leaving of the foreign modules nothing but their ``config.json``."""

    def foreign(folder: str, names: list[str]) -> list[str]:
        name = Path(folder).name
        return [] if folder == model or name in own else [entry for entry in names if entry != "config.json"]

    return Path(shutil.copytree(model, target, ignore=foreign))


def _run(stage: str, model: Path, work: Path) -> dict[str, list[str]]:
    script = Path(__file__).with_name("stage_process.py")
    done = subprocess.run(
        [sys.executable, str(script), stage, str(model), str(work)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, list[str]] = json.loads(done.stdout.strip().splitlines()[-1])
    return report
