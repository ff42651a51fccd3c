"""A request: its limits, its wire form, and what a model's family adds to the limits."""

from __future__ import annotations

import dataclasses
import math

import pytest

from moonrelay.errors import ConfigError
from moonrelay_diffusers.request import GenerationRequest, StageParams

FULL = {
    "prompt": "a fox",
    "negative_prompt": "blur",
    "seed": 5,
    "height": 480,
    "width": 832,
    "num_frames": 81,
    "num_inference_steps": 50,
    "guidance_scale": 5.0,
    "guidance_scale_2": 3.0,
    "max_sequence_length": 512,
}


def test_a_request_survives_its_wire_form() -> None:
    request = GenerationRequest(**FULL)  # type: ignore[arg-type]
    assert request.to_payload() == FULL
    assert GenerationRequest.from_payload(request.to_payload()) == request
    sparse = GenerationRequest(prompt="a fox")
    assert GenerationRequest.from_payload(sparse.to_payload()) == sparse
    assert GenerationRequest.from_payload({"prompt": "a fox"}) == sparse


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", ""),
        ("prompt", " \n"),
        ("prompt", None),
        ("prompt", ["a", "b"]),
        ("negative_prompt", 3),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", 1.5),
        ("seed", True),
        ("seed", None),
        ("height", 0),
        ("height", "480"),
        ("width", -16),
        ("num_frames", 17.0),
        ("num_inference_steps", 0),
        ("num_inference_steps", 2**40),
        ("guidance_scale", math.nan),
        ("guidance_scale", math.inf),
        ("guidance_scale", -1.0),
        ("guidance_scale", "5"),
        ("guidance_scale_2", False),
        ("max_sequence_length", 0),
    ],
)
def test_a_wrong_value_is_refused_by_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationRequest.from_payload(FULL | {field: value})
    assert caught.value.context["field"] == field
    assert f"{field}={value!r}" in str(caught.value) or f"{field}={value}" in str(caught.value)


def test_an_unknown_field_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'num_frames'"):
        GenerationRequest.from_payload(FULL | {"num_frame": 81})


@pytest.mark.parametrize("payload", [{}, {"seed": 1}, [("prompt", "a")], None])
def test_what_is_no_request_is_refused(payload: object) -> None:
    with pytest.raises(ConfigError):
        GenerationRequest.from_payload(payload)  # type: ignore[arg-type]


def test_params_carry_no_text_and_ignore_what_a_later_version_adds() -> None:
    params = GenerationRequest(**FULL).params()  # type: ignore[arg-type]
    plain = params.to_payload()
    assert set(FULL) - set(plain) == {"prompt", "negative_prompt"}
    assert StageParams.from_payload(plain | {"shift": 3.0}) == params


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(StageParams)])
def test_params_that_lack_something_are_refused_by_name(field: str) -> None:
    plain = GenerationRequest(**FULL).params().to_payload()  # type: ignore[arg-type]
    del plain[field]
    if field == "guidance_scale_2":
        assert StageParams.from_payload(plain).guidance_scale_2 is None
        return
    with pytest.raises(ConfigError) as caught:
        StageParams.from_payload(plain)
    assert caught.value.context["field"] == field


def test_an_unresolved_request_has_no_params() -> None:
    with pytest.raises(ConfigError):
        GenerationRequest(prompt="a fox").params()
