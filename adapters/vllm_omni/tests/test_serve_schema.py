"""What a request may say: every field's refusal names the field, the value and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from moonrelay_vllm_omni.serve.errors import BadRequest, NotFound, StageDied
from moonrelay_vllm_omni.serve.schema import SEEDS, Limits, Order, image_orders, video_order

LIMITS = Limits(default_size=(64, 32), default_seconds=1.0)


def images(**body: Any) -> list[Order]:
    return image_orders(body, LIMITS, model="m", seed=9)


def video(**body: Any) -> Order:
    return video_order(body, LIMITS, model="m", seed=9)


def test_a_bare_prompt_gets_the_defaults() -> None:
    assert images(prompt="a fox") == [Order(prompt="a fox", width=64, height=32, seed=9)]
    assert video(prompt="a fox") == Order(prompt="a fox", width=64, height=32, seed=9, num_frames=17, fps=16)


def test_every_field_reaches_the_order() -> None:
    asked: dict[str, Any] = {
        "negative_prompt": "blurry",
        "num_inference_steps": 4,
        "guidance_scale": 2,
        "true_cfg_scale": 3.5,
    }
    (order,) = images(prompt="a", model="m", size="128x64", seed=3, user="u", response_format="b64_json", **asked)
    assert (order.width, order.height, order.seed) == (128, 64, 3)
    assert {name: getattr(order, name) for name in asked} == asked


def test_each_of_several_images_has_a_seed_of_its_own() -> None:
    assert [order.seed for order in images(prompt="a", n=3, seed=5)] == [5, 6, 7]
    assert [order.seed for order in images(prompt="a", n=2, seed=SEEDS - 1)] == [SEEDS - 1, 0]


@pytest.mark.parametrize(
    ("body", "frames", "seconds"),
    [
        ({"seconds": "2"}, 33, "2.0625"),
        ({"seconds": 0.5, "fps": 8}, 5, "0.625"),
        ({"num_frames": 5, "fps": "10"}, 5, "0.5"),
        ({"num_frames": 1}, 1, "0.0625"),
        ({"seconds": LIMITS.max_frames / 16}, 257, "16.0625"),
    ],
)
def test_a_videos_length_is_what_its_vae_can_make(body: dict[str, Any], frames: int, seconds: str) -> None:
    order = video(prompt="a", **body)
    assert (order.num_frames, order.seconds) == (frames, seconds)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "prompt", "say what is to be seen"),
        ({"prompt": " "}, "prompt", "say what"),
        ({"prompt": ["a"]}, "prompt", "must be a string"),
        ({"prompt": "a" * 32_001}, "prompt", "32001 characters; at most 32000"),
        ({"prompt": "a\ud800"}, "prompt", "lone surrogate"),
        ({"negative_prompt": 3}, "negative_prompt", "must be a string"),
        ({"size": "big"}, "size", "WIDTHxHEIGHT"),
        ({"size": [64, 64]}, "size", "WIDTHxHEIGHT"),
        ({"size": "63x64"}, "size", "multiples of 16; 48x64 would do"),
        ({"size": "0x64"}, "size", "multiples of 16; 16x64 would do"),
        ({"size": "4096x4096"}, "size", "at most 4194304"),
        ({"n": 0}, "n", "between 1 and 10"),
        ({"n": 11}, "n", "between 1 and 10"),
        ({"n": 1.5}, "n", "must be an integer"),
        ({"n": True}, "n", "must be an integer"),
        ({"seed": -1}, "seed", "between 0"),
        ({"seed": "9" * 21}, "seed", "must be an integer"),
        ({"num_inference_steps": 0}, "num_inference_steps", "between 1 and 200"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "must be a number"),
        ({"guidance_scale": 101}, "guidance_scale", "between 0 and 100"),
        ({"guidance_scale": "much"}, "guidance_scale", "must be a number"),
        ({"response_format": "url"}, "response_format", "keeps no images; use b64_json"),
        ({"quality": "hd"}, "quality", "only 'auto' or 'standard'"),
        ({"stream": True}, "stream", "only False"),
        ({"negativ_prompt": "a"}, "negativ_prompt", "negative_prompt"),
        ({"seconds": 4}, "seconds", "seconds"),
    ],
)
def test_what_an_image_request_may_not_say(body: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        images(**{"prompt": "a", **body} if body else body)
    assert refusal.value.param == param
    assert told in refusal.value.message
    assert len(refusal.value.message) < 400


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"seconds": "long"}, "seconds", "must be a number"),
        ({"seconds": 100}, "seconds", "between"),
        ({"seconds": 0}, "seconds", "between"),
        ({"num_frames": 6}, "num_frames", "a multiple of 4, and one; 5 would do"),
        ({"num_frames": 1000}, "num_frames", "between 1 and 257"),
        ({"num_frames": 5, "seconds": "1"}, "seconds", "leave one out"),
        ({"fps": 0}, "fps", "between 1 and 120"),
        ({"input_reference": object()}, "input_reference", "takes text only"),
        ({"n": 2}, "n", "n"),
    ],
)
def test_what_a_video_request_may_not_say(body: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        video(prompt="a", **body)
    assert refusal.value.param == param
    assert told in refusal.value.message


def test_another_model_is_not_found() -> None:
    with pytest.raises(NotFound, match="'gpt' is not served here; use 'm'") as refusal:
        images(prompt="a", model="gpt")
    assert refusal.value.status == 404


def test_errors_have_openais_form() -> None:
    with pytest.raises(BadRequest) as refusal:
        images(prompt="a", n=0)
    error = refusal.value.body()["error"]
    assert error == {
        "message": "n=0: must be between 1 and 10",
        "type": "invalid_request_error",
        "code": "invalid_request",
        "param": "n",
    }
    assert "stage 2 (decode) died" in StageDied(2, "killed", name="decode").body()["error"]["message"]
