"""Three stages against the undivided pipeline: equal bit for bit, however the latents are cut."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from moonrelay.errors import Cancelled, ConfigError
from moonrelay_diffusers import load_stage
from moonrelay_diffusers.families import family_named
from moonrelay_diffusers.frames import frames_digest, to_pixels
from moonrelay_diffusers.reference import Reference, undivided

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("same_bits")]

VIDEO = ("wan2.1", "wan2.2-a14b", "wan2.2-ti2v")
KINDS = (*VIDEO, "qwen_image")
Models: TypeAlias = Any  # the class in conftest.py


class Stages:
    """All three stages of a model, and what they made of a request."""

    def __init__(self, models: Models, folder: str, **options: Any) -> None:
        self.request = models.request
        self._made: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.encode = load_stage(folder, "encode", **options)
        self.denoise = load_stage(folder, "denoise", **options)
        self.decode = load_stage(folder, "decode", **options)

    def latents(self, kind: str, **changes: object) -> tuple[Any, dict[str, Any]]:
        """Return latents and params; those of the unchanged request are computed once."""
        key = kind if not changes else ""
        if not key or key not in self._made:
            tree: dict[str, Any] = dict(self.encode.run(self.request(kind, **changes)))
            self._made[key] = self.denoise.run(tree), tree["params"]
        return self._made[key]

    def frames(self, kind: str, **changes: object) -> Any:
        latents, params = self.latents(kind, **changes)
        return self.decode.run(latents, params, kind="float")


_loaded: dict[str, Stages] = {}


@pytest.fixture
def stages(models: Models) -> Any:
    def of(kind: str) -> Stages:
        if kind not in _loaded:
            _loaded[kind] = Stages(models, models.folder(kind))
        return _loaded[kind]

    return of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"guidance_scale": 1.0}, {"negative_prompt": None}, {"seed": 2**63 - 1, "num_inference_steps": 3}],
    ids=["guided", "unguided", "no negative", "other seed"],
)
def test_three_stages_equal_the_undivided_pipeline(
    kind: str, changes: dict[str, object], models: Models, stages: Any
) -> None:
    reference = models.reference(kind).run(models.request(kind, **changes), kind="float")
    frames = stages(kind).frames(kind, **changes)
    assert frames.dtype == reference.dtype == np.float32
    assert frames_digest(frames) == frames_digest(reference)
    assert reference.std() > 0.02


@pytest.mark.parametrize(
    ("kind", "cuts"),
    [
        *(("wan2.1", cuts) for cuts in ((5,), (1, 1, 1, 1, 1), (2, 3), (1, 4), (4, 1), (2, 2, 1))),
        ("wan2.2-a14b", (3, 2)),
        ("wan2.2-ti2v", (1, 1, 1, 1, 1)),
        ("wan2.2-ti2v", (2, 3)),
    ],
    ids=str,
)
def test_frames_decoded_as_latents_land_are_the_same(
    kind: str, cuts: tuple[int, ...], models: Models, stages: Any
) -> None:
    latents, params = stages(kind).latents(kind)
    progress: list[tuple[int, int]] = []
    frames = stages(kind).decode.run_chunks(
        latents.split(cuts, dim=2), params, on_frames=lambda done, total: progress.append((done, total))
    )
    assert frames.dtype == np.uint8
    assert frames_digest(frames) == models.digest(kind)
    assert progress == [(1, 17), (5, 17), (9, 17), (13, 17), (17, 17)]


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_the_floats_rounded(kind: str, models: Models, stages: Any) -> None:
    latents, params = stages(kind).latents(kind)
    decode = stages(kind).decode
    floats = decode.run(latents, params, kind="float")
    pixels = decode.run(latents, params)
    assert np.array_equal(pixels, to_pixels(floats))
    request = models.request(kind)
    assert pixels.shape == (request.num_frames, request.height, request.width, 3)
    assert np.array_equal(decode.run_chunks([latents], params, kind="float"), floats)


def test_an_image_in_pieces_is_gathered_first(stages: Any) -> None:
    latents, params = stages("qwen_image").latents("qwen_image")
    decode = stages("qwen_image").decode
    assert not decode.incremental
    assert stages("qwen_image").denoise.chunk_dim is None
    whole = decode.run(latents, params)
    assert np.array_equal(decode.run_chunks(latents.split(3, dim=1), params), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_should_matter_does(kind: str, stages: Any) -> None:
    frames = {} if kind == "qwen_image" else {"num_frames": 5}
    digests = [
        frames_digest(to_pixels(stages(kind).frames(kind, **frames, **changes)))
        for changes in (
            {},
            {"prompt": "A red fox in the snoW"},
            {"negative_prompt": "blurreD"},
            {"seed": 12},
            {"num_inference_steps": 5},
            {"guidance_scale": 2.5},
        )
    ]
    assert len(set(digests)) == len(digests)


def test_both_transformers_of_wan22_work(models: Models, stages: Any) -> None:
    kind = "wan2.2-a14b"
    assert stages(kind).denoise.components == ("transformer", "transformer_2", "scheduler")
    changed = {"guidance_scale_2": 1.5}
    frames = stages(kind).frames(kind, **changed)
    assert not np.array_equal(frames, stages(kind).frames(kind))
    reference = models.reference(kind).run(models.request(kind, **changed), kind="float")
    assert frames_digest(frames) == frames_digest(reference)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_land_in_the_memory_given(kind: str, models: Models, stages: Any) -> None:
    import torch

    denoise = stages(kind).denoise
    tree = stages(kind).encode.run(models.request(kind))
    expected = denoise.run(tree)
    asked: list[Any] = []

    def memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Off torch's alignment, as a pool's slot may be.
        room = torch.full((expected.numel() + 3,), torch.nan, dtype=dtype)
        asked.append((shape, dtype, room[3:].view(shape)))
        return asked[-1][2]

    landed = denoise.run(tree, out=memory)
    assert [entry[:2] for entry in asked] == [denoise.latent_spec(tree)]
    assert landed.data_ptr() == asked[0][2].data_ptr()
    assert landed.data_ptr() % 64
    assert torch.equal(landed, expected)
    frames = stages(kind).decode.run(landed, tree["params"])
    assert np.array_equal(frames, stages(kind).decode.run(expected, tree["params"]))


def test_steps_are_reported_and_a_cancel_ends_the_run(models: Models, stages: Any) -> None:
    denoise = stages("wan2.1").denoise
    tree = stages("wan2.1").encode.run(models.request("wan2.1"))
    expected = denoise.run(tree)
    steps: list[tuple[int, int]] = []
    denoise.run(tree, on_step=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    steps.clear()
    with pytest.raises(Cancelled, match="after step 2 of 4"):
        denoise.run(tree, on_step=lambda done, total: steps.append((done, total)), cancelled=lambda: len(steps) == 2)
    assert steps == [(1, 4), (2, 4)]
    with pytest.raises(Cancelled, match="before the first step"):
        denoise.run(tree, cancelled=lambda: True)
    # A cancelled run leaves nothing behind that the next one would meet.
    assert (denoise.run(tree) == expected).all()


@pytest.mark.parametrize("kind", ["wan2.1", "qwen_image"])
def test_a_cancel_ends_decoding(kind: str, stages: Any) -> None:
    latents, params = stages(kind).latents(kind)
    decode = stages(kind).decode
    with pytest.raises(Cancelled):
        decode.run_chunks([latents], params, cancelled=lambda: True)
    assert np.array_equal(decode.run_chunks([latents], params), decode.run(latents, params))


def test_a_chunks_memory_may_be_used_again_for_the_next(stages: Any) -> None:
    import torch

    latents, params = stages("wan2.1").latents("wan2.1")
    window = torch.empty_like(latents[:, :, :1])

    def through_one_window() -> Iterator[torch.Tensor]:
        for index in range(latents.shape[2]):
            window.copy_(latents[:, :, index : index + 1])
            yield window
            window.fill_(torch.nan)

    decode = stages("wan2.1").decode
    assert np.array_equal(decode.run_chunks(through_one_window(), params), decode.run(latents, params))


def test_chunks_that_do_not_add_up_are_refused(stages: Any) -> None:
    latents, params = stages("wan2.1").latents("wan2.1")
    decode = stages("wan2.1").decode
    for chunks in ([latents[:, :, :3]], [], [latents, latents[:, :, :1]], [latents[..., :2]], [latents[0]]):
        with pytest.raises(ConfigError) as caught:
            decode.run_chunks(chunks, params)
        assert caught.value.context["field"] == "latents"
    with pytest.raises(ConfigError, match="as params say"):
        decode.run(latents[:, :, :3], params)
    with pytest.raises(ConfigError, match="no latents came"):
        stages("qwen_image").decode.run_chunks([], stages("qwen_image").latents("qwen_image")[1])


@pytest.mark.parametrize("kind", ["wan2.1", "qwen_image"])
def test_a_tree_that_lacks_something_is_refused_by_name(kind: str, models: Models, stages: Any) -> None:
    tree = stages(kind).encode.run(models.request(kind))
    for field in ("prompt_embeds", "params"):
        with pytest.raises(ConfigError) as caught:
            stages(kind).denoise.run({key: value for key, value in tree.items() if key != field})
        assert caught.value.context["field"] == field
    with pytest.raises(ConfigError, match="must be a tensor, not str"):
        stages(kind).denoise.run(tree | {"prompt_embeds": "text"})


def test_guidance_decides_what_is_encoded(models: Models, stages: Any) -> None:
    wan, qwen = stages("wan2.1").encode, stages("qwen_image").encode
    assert wan.run(models.request("wan2.1", guidance_scale=1.0))["negative_prompt_embeds"] is None
    assert wan.run(models.request("wan2.1", negative_prompt=None))["negative_prompt_embeds"] is not None
    assert qwen.run(models.request("qwen_image", negative_prompt=None))["negative_prompt_embeds"] is None
    assert qwen.run(models.request("qwen_image"))["negative_prompt_embeds"] is not None


@pytest.mark.parametrize("kind", ["wan2.1", "qwen_image"])
def test_a_text_embeds_the_same_in_either_role(kind: str, models: Models, stages: Any) -> None:
    encode = stages(kind).encode
    tree = encode.run(models.request(kind))
    alone = encode.embed("blurred", max_sequence_length=64)["prompt_embeds"]
    assert (alone == tree["negative_prompt_embeds"]).all()


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [("wan2.1", None), ("wan2.1", "FlowMatchEulerDiscreteScheduler"), ("qwen_image", None)],
)
def test_the_type_of_latents_is_known_before(kind: str, scheduler: str | None, models: Models, tmp_path: Path) -> None:
    import torch

    folder = models.folder(kind)
    if scheduler is not None:
        folder = str(shutil.copytree(folder, tmp_path / "model"))
        index = Path(folder, "model_index.json")
        content = json.loads(index.read_text()) | {"scheduler": ["diffusers", scheduler]}
        index.write_text(json.dumps(content))
        Path(folder, "scheduler", "scheduler_config.json").write_text(json.dumps({"_class_name": scheduler}))
    half = Stages(models, folder, dtype="bfloat16")
    tree = half.encode.run(models.request(kind))
    latents = half.denoise.run(tree)
    assert half.denoise.latent_spec(tree) == (tuple(latents.shape), latents.dtype)
    assert latents.dtype == (torch.float32 if scheduler is None and kind == "wan2.1" else torch.bfloat16)
    frames = half.decode.run_chunks([latents], tree["params"])
    assert np.array_equal(frames, Reference(folder, dtype="bfloat16").run(models.request(kind)))


def test_types_can_differ_by_module(models: Models) -> None:
    import torch

    dtype = {"vae": "float32", "default": "bfloat16"}
    mixed = Stages(models, models.folder("wan2.1"), dtype=dtype)
    tree = mixed.encode.run(models.request("wan2.1"))
    embeds: Any = tree["prompt_embeds"]
    assert embeds.dtype == torch.bfloat16
    latents = mixed.denoise.run(tree)
    pieces = latents.split(2, dim=2)
    assert np.array_equal(
        mixed.decode.run_chunks(pieces, tree["params"]),
        undivided(models.folder("wan2.1"), models.request("wan2.1"), dtype=dtype),
    )
    with pytest.raises(ConfigError, match="dtype='int8'"):
        load_stage(models.folder("wan2.1"), "decode", dtype="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_needs_only_its_own_modules(kind: str, models: Models, stages: Any, tmp_path: Path) -> None:
    """Load each stage from a folder that has of the other stages' modules nothing but ``config.json``."""
    loaded: dict[str, Any] = {}
    for stage, own in family_named("qwen_image" if kind == "qwen_image" else "wan").components.items():
        folder = shutil.copytree(models.folder(kind), tmp_path / stage)
        for path in folder.glob("*/*"):
            if path.parent.name not in own and path.name != "config.json":
                path.unlink()
        loaded[stage] = load_stage(str(folder), stage)
    tree = loaded["encode"].run(models.request(kind))
    latents = loaded["denoise"].run(tree)
    frames = loaded["decode"].run(latents, tree["params"], kind="float")
    assert frames_digest(frames) == frames_digest(stages(kind).frames(kind))
    with pytest.raises(ConfigError):
        load_stage(str(tmp_path / "decode"), "encode")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def _garble(path: Path) -> None:
    path.write_text("{")


@pytest.mark.parametrize(
    ("stage", "files", "damage"),
    [
        ("encode", "text_encoder/*.safetensors", _cut),
        ("encode", "text_encoder/*.safetensors", Path.unlink),
        ("encode", "text_encoder/config.json", _garble),
        ("encode", "tokenizer/*", Path.unlink),
        ("denoise", "transformer/*.safetensors", _cut),
        ("denoise", "scheduler/*", Path.unlink),
        ("denoise", "scheduler/*", _garble),
        ("decode", "vae/*.safetensors", Path.unlink),
        ("decode", "vae/config.json", _garble),
        ("decode", "vae/config.json", lambda path: path.write_text('{"z_dim": "many"}')),
    ],
)
def test_a_damaged_model_is_refused(
    stage: Any, files: str, damage: Callable[[Path], object], models: Models, tmp_path: Path
) -> None:
    folder = shutil.copytree(models.folder("qwen_image"), tmp_path / "model")
    found = list(folder.glob(files))
    assert found
    for path in found:
        damage(path)
    with pytest.raises(ConfigError) as caught:
        load_stage(str(folder), stage)
    assert caught.value.context["field"] == "model"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["nosuch", "meta:x", "xpu"])
def test_a_device_that_is_not_here_is_refused(device: str, models: Models) -> None:
    with pytest.raises(ConfigError) as caught:
        load_stage(models.folder("wan2.1"), "decode", device=device)
    assert caught.value.context["field"] == "device"


def test_equal_seeds_build_equal_models(models: Models, tmp_path: Path) -> None:
    again = models.build("wan2.1", tmp_path / "again")
    first = Path(models.folder("wan2.1"))
    names = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    for name in names:
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert sum((first / name).stat().st_size for name in names) < 16 << 20


def test_the_request_is_held_against_the_model_at_the_first_stage(models: Models, stages: Any) -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        stages("wan2.1").encode.run(dataclasses.replace(models.request("wan2.1"), height=40))
