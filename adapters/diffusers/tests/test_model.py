"""Finding a model and telling its family, without loading anything of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError
from moonrelay_diffusers import GenerationRequest, load_stage, resolve_request
from moonrelay_diffusers.model import inspect_model
from moonrelay_diffusers.plugin import DiffusersAdapter

WAN_INDEX = {
    "_class_name": "WanPipeline",
    "boundary_ratio": None,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def write_model(root: Path, index: object, vae: object = None, transformer: object = None) -> str:
    (root / "vae").mkdir()
    (root / "transformer").mkdir()
    (root / "model_index.json").write_text(json.dumps(index))
    (root / "vae" / "config.json").write_text(json.dumps(vae or {"z_dim": 16}))
    (root / "transformer" / "config.json").write_text(json.dumps(transformer or {"patch_size": [1, 2, 2]}))
    return str(root)


def test_a_family_is_told_by_the_index(tmp_path: Path) -> None:
    info = inspect_model(write_model(tmp_path, WAN_INDEX))
    assert info.family == "wan"
    assert info.components() == ("scheduler", "transformer", "vae")
    assert "transformer_2" in info.all_slots()


def test_an_unknown_family_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    model = write_model(tmp_path, {"_class_name": "StableDiffusionPipeline"})
    with pytest.raises(ConfigError, match=r"StableDiffusionPipeline.*wan \(WanPipeline\), qwen_image") as caught:
        load_stage(model, "encode")
    assert caught.value.context["field"] == "model"


def test_a_family_can_be_given(tmp_path: Path) -> None:
    model = write_model(tmp_path, WAN_INDEX | {"_class_name": "MyWanPipeline"})
    assert inspect_model(model, family="wan").family == "wan"
    with pytest.raises(ConfigError, match=r"family='flux'.*supported: wan"):
        inspect_model(model, family="flux")


def test_an_unknown_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stage='upscale'.*encode, denoise, decode"):
        load_stage(write_model(tmp_path, WAN_INDEX), "upscale")  # type: ignore[call-overload]


@pytest.mark.parametrize("model", ["", " ", "./no-such-folder", "/no/such/folder", "a b/c", "owner/name/more"])
def test_what_is_neither_folder_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="give a folder"):
        inspect_model(model)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"no": "class"}', '{"_class_name": 3}', "\xff"])
def test_a_damaged_index_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "model_index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"model_index\.json"):
        inspect_model(str(tmp_path))


def test_a_hub_that_does_not_answer_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[object] = []

    def unreachable(*args: object, **options: object) -> str:
        asked.append((args, options))
        message = "offline"
        raise LocalEntryNotFoundError(message)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ConfigError, match="obtainable from the hub"):
        inspect_model("owner/name@v1")
    assert asked == [(("owner/name", "model_index.json"), {"revision": "v1"})]


@pytest.mark.parametrize(
    ("field", "changes", "remedy"),
    [
        ("height", {"height": 50}, "multiple of 16; the nearest is 48"),
        ("width", {"width": 8}, "multiple of 16; the nearest is 16"),
        ("num_frames", {"num_frames": 16}, r"4\*k\+1; the nearest are 13 and 17"),
        ("guidance_scale_2", {"guidance_scale_2": 2.0}, "leave it out"),
    ],
)
def test_wan_refuses_what_it_cannot_make(tmp_path: Path, field: str, changes: dict[str, int], remedy: str) -> None:
    model = write_model(tmp_path, WAN_INDEX)
    with pytest.raises(ConfigError, match=remedy) as caught:
        resolve_request(model, GenerationRequest(prompt="a fox", **changes))  # type: ignore[arg-type]
    assert caught.value.context["field"] == field


def test_wan_with_larger_patches_needs_larger_multiples(tmp_path: Path) -> None:
    model = write_model(tmp_path, WAN_INDEX, vae={"z_dim": 48, "scale_factor_spatial": 16})
    resolve_request(model, GenerationRequest(prompt="a fox", height=64, width=96))
    with pytest.raises(ConfigError, match="multiple of 32"):
        resolve_request(model, GenerationRequest(prompt="a fox", height=48, width=96))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("height", {"height": 24}),
        ("num_frames", {"num_frames": 5}),
        ("guidance_scale_2", {"guidance_scale_2": 2.0}),
        ("max_sequence_length", {"max_sequence_length": 1025}),
    ],
)
def test_qwen_image_refuses_what_it_cannot_make(tmp_path: Path, field: str, changes: dict[str, int]) -> None:
    vae = {"temperal_downsample": [False, True, True]}
    model = write_model(tmp_path, {"_class_name": "QwenImagePipeline"}, vae, {"in_channels": 64})
    with pytest.raises(ConfigError) as caught:
        resolve_request(model, GenerationRequest(prompt="a fox", **changes))  # type: ignore[arg-type]
    assert caught.value.context["field"] == field


def test_the_familys_defaults_are_filled_in(tmp_path: Path) -> None:
    full = resolve_request(write_model(tmp_path, WAN_INDEX), GenerationRequest(prompt="a fox", guidance_scale=0.0))
    assert (full.height, full.width, full.num_frames, full.num_inference_steps) == (480, 832, 81, 50)
    assert full.guidance_scale == 0.0
    assert full.negative_prompt is None


def test_importing_the_adapter_loads_no_framework() -> None:
    code = (
        "import sys, moonrelay_diffusers, moonrelay_diffusers.plugin as p, moonrelay_diffusers.tiny\n"
        "assert p.DiffusersAdapter().available()[0]\n"
        "print([m for m in ('torch', 'numpy', 'diffusers', 'transformers', 'mooncake') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_adapter_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from moonrelay_diffusers import plugin

    found: Callable[[str], object] = importlib.util.find_spec
    monkeypatch.setattr(plugin, "find_spec", lambda name: None if name == "diffusers" else found(name))
    ready, reason = DiffusersAdapter().available()
    assert not ready
    assert "diffusers not installed" in reason
    assert "moonrelay[diffusers]" in reason


def test_the_adapter_describes_itself() -> None:
    adapter = DiffusersAdapter()
    assert adapter.name == "diffusers"
    assert adapter.stages == ("encode", "denoise", "decode")
    assert adapter.families() == ("wan", "qwen_image")
    assert adapter.host_version()
