"""Names of requests: the same for what belongs together, different for what does not, none where nobody can tell."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightx2v_double import I2VInputInfo, T2VInputInfo

from moonrelay_lightx2v.pairing import asked_of, names_of, said

BODY: dict[str, Any] = {
    "prompt": "a red cat",
    "negative_prompt": "",
    "seed": 7,
    "target_shape": [32, 48],
    "infer_steps": 4,
    "resize_mode": "adaptive",
}


def posted(**more: Any) -> tuple[str, ...]:
    return names_of({**BODY, **more}, T2VInputInfo())


@pytest.mark.parametrize("name", ["data_bootstrap_room", "disagg_bootstrap_room"])
def test_a_room_is_the_only_name(name: str) -> None:
    assert posted(task_id="t", **{name: 0}) == ("room:0",)


def test_a_task_id_comes_first_and_what_is_asked_for_second() -> None:
    first, second = posted(task_id="t")
    assert first == "task:t"
    assert second.startswith("same:")


def test_one_body_with_ids_of_each_server_shares_a_name() -> None:
    assert set(posted(task_id="a")) & set(posted(task_id="b")) == {posted()[0]}


@pytest.mark.parametrize(
    "more",
    [
        {"save_result_path": "elsewhere.mp4"},
        {"return_result_tensor": True},
        {"presigned_url": "http://x"},
        {"disagg_decoder_bootstrap_room": 5},
        {"disagg_phase1_receiver_engine_rank": 5},
        {"task": "t2v"},
        {"video_frame_interpolation": {"target_fps": 30}},
        {"last_frame_path": ""},
        {"talk_objects": None},
        {"src_ref_images": []},
    ],
)
def test_what_decides_nothing_makes_no_other_request(more: dict[str, Any]) -> None:
    assert posted(**more) == posted()


@pytest.mark.parametrize(
    "more",
    [
        {"seed": 8},
        {"seed": 7.0},
        {"seed": "7"},
        {"seed": True},
        {"prompt": "a red cat "},
        {"prompt": ["a red cat"]},
        {"negative_prompt": "x"},
        {"target_shape": [48, 32]},
        {"target_shape": [32, 48, 1]},
        {"infer_steps": 5},
        {"aspect_ratio": "1:1"},
        {"a_field_of_tomorrow": 1},
        {"talk_objects": [{"audio": "a", "mask": "b"}]},
    ],
)
def test_what_decides_anything_makes_another_request(more: dict[str, Any]) -> None:
    assert posted(**more) != posted()


def test_fields_do_not_run_into_one_another() -> None:
    assert posted(prompt="ab", x="c") != posted(prompt="a", x="bc")
    assert posted(x=["a", "b"]) != posted(x=["ab"])
    assert posted(x=[["a"], "b"]) != posted(x=["a", ["b"]])


def test_by_ids_alone_where_the_deployment_says_so() -> None:
    assert names_of({**BODY, "task_id": "t"}, T2VInputInfo(), by_content=False) == ("task:t",)
    assert names_of(BODY, T2VInputInfo(), by_content=False) == ()
    assert names_of(None, T2VInputInfo(), by_content=False) == ()


def test_a_long_id_stays_a_name_of_its_own() -> None:
    first, second = posted(task_id="x" * 5000)[0], posted(task_id="x" * 4999 + "y")[0]
    assert first != second
    assert len(first) < 100


def test_a_server_counts_what_was_posted_alone() -> None:
    """Its `input_info` is one for all requests, and roles leave in it what they compute."""
    used = T2VInputInfo(prompt="an older one", latent_shape=[1, 2], target_shape=[1, 1, 16, 4, 4])
    assert names_of(BODY, used) == names_of(BODY, T2VInputInfo())


def test_without_a_server_what_was_asked_counts() -> None:
    one = names_of(None, T2VInputInfo(prompt="a", seed=1))
    assert one == names_of(None, T2VInputInfo(prompt="a", seed=1, save_result_path="x", latent_shape=[1]))
    assert one != names_of(None, T2VInputInfo(prompt="a", seed=2))
    assert all(name.startswith("same:") for name in one)


class _UnsetType:
    """The host's own is called so."""


@dataclass
class Odd:
    prompt: str = "a"
    image: Any = None
    overlap_frame: Any = None
    nobody_said: Any = field(default_factory=_UnsetType)


def test_what_has_no_exact_form_has_no_name() -> None:
    assert names_of(None, Odd(image=object())) == ()
    assert names_of({"task_id": "t", "image": torch.zeros(2)}, Odd()) == ("task:t",)


def test_what_a_role_computed_and_what_nobody_said_do_not_count() -> None:
    assert names_of(None, Odd(overlap_frame=torch.zeros(2))) == names_of(None, Odd()) != ()


# -- files ------------------------------------------------------------------------------------------------------------


def test_an_image_counts_by_what_is_in_it(tmp_path: Path) -> None:
    """The host's servers each write the image of a request to a path of their own."""
    one, two, other = tmp_path / "1.png", tmp_path / "2.png", tmp_path / "3.png"
    one.write_bytes(b"picture")
    two.write_bytes(b"picture")
    other.write_bytes(b"another")
    assert posted(image_path=str(one)) == posted(image_path=str(two))
    assert posted(image_path=str(one)) != posted(image_path=str(other))
    assert posted(image_path=f"{one},{other}") == posted(image_path=f"{two},{other}")
    assert posted(image_path=f"{one},{other}") != posted(image_path=f"{other},{one}")
    assert posted(last_frame_path=str(one)) != posted(image_path=str(one))


def test_a_file_that_changed_makes_another_request(tmp_path: Path) -> None:
    file = tmp_path / "1.png"
    file.write_bytes(b"picture")
    before = posted(image_path=str(file))
    file.write_bytes(b"Picture")
    assert posted(image_path=str(file)) != before


def test_a_folder_counts_with_all_that_is_in_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "mask.png").write_bytes(b"mask")
        (tmp_path / name / "image.png").write_bytes(b"image")
    assert posted(audio_path=str(tmp_path / "a")) == posted(audio_path=str(tmp_path / "b"))
    (tmp_path / "b" / "image.png").rename(tmp_path / "b" / "picture.png")
    assert posted(audio_path=str(tmp_path / "a")) != posted(audio_path=str(tmp_path / "b"))


def test_a_servers_file_that_cannot_be_seen_leaves_the_ids() -> None:
    assert posted(task_id="t", image_path="/nowhere/1.png") == ("task:t",)
    assert posted(image_path="/nowhere/1.png") == ()
    assert posted(image_path="a\0b") == ()


def test_a_folder_counts_whatever_the_servers_call_an_image_and_its_mask(tmp_path: Path) -> None:
    for name, image, mask in (("a", b"image", b"mask"), ("b", b"image", b"mask"), ("c", b"mask", b"image")):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}17.png").write_bytes(image)
        (tmp_path / name / f"{name}17_mask.png").write_bytes(mask)
    assert posted(image_path=str(tmp_path / "a")) == posted(image_path=str(tmp_path / "b"))
    assert posted(image_path=str(tmp_path / "a")) != posted(image_path=str(tmp_path / "c"))


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "/proc"])
def test_what_a_client_names_cannot_keep_a_role_busy(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert posted(task_id="a", image_path=str(tmp_path / path)) == ("task:a",)


def test_without_a_server_a_file_that_cannot_be_seen_counts_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "1.png"
    file.write_bytes(b"picture")
    seen = names_of(None, I2VInputInfo(image_path=str(file)))
    file.unlink()
    unseen = names_of(None, I2VInputInfo(image_path=str(file)))
    assert len(seen) == 2
    assert unseen == seen[1:]


def test_an_address_counts_as_it_is_written() -> None:
    assert len(posted(last_frame_path="https://example.invalid/1.png")) == 1
    assert len(posted(last_frame_path="data:image/png;base64,AAAA")) == 1
    assert len(posted(last_frame_path="A" * 5000)) == 1


def test_said() -> None:
    assert said(("task:a", "same:b")) == "task:a"
    assert said(()) == "a request without a name"


def test_what_is_asked_for_is_told_apart_field_by_field(tmp_path: Path) -> None:
    image, other = tmp_path / "1.png", tmp_path / "2.png"
    image.write_bytes(b"a")
    other.write_bytes(b"b")
    given = {"prompt": "a", "negative_prompt": "n", "target_shape": [32, 48], "image_path": str(image), "seed": 1}
    found = asked_of(given, object())
    assert sorted(found) == ["image_path", "negative_prompt", "prompt", "target_shape"]
    for name, value in {
        "prompt": "b",
        "negative_prompt": "",
        "target_shape": [48, 32],
        "image_path": str(other),
    }.items():
        changed = asked_of({**given, name: value}, object())
        assert {key for key in found if changed.get(key) != found[key]} == {name}
    assert asked_of({**given, "seed": 2, "image_path": str(tmp_path / "gone")}, object()).keys() == found.keys() - {
        "image_path"
    }
    assert asked_of(None, T2VInputInfo(prompt="a")) == asked_of({"prompt": "a", "target_shape": []}, T2VInputInfo())
    assert asked_of({"prompt": ""}, T2VInputInfo(prompt="a")) == asked_of(None, object()) == {}
