"""Trees on their way: plain containers, the very same tensors, and back on the role's device."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from lightx2v_double import LockableDict

from moonrelay_lightx2v import fields

Pair = namedtuple("Pair", "left right")


def test_the_hosts_dicts_become_plain_and_tensors_stay_themselves() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    given = LockableDict({"a": {"b": [tensor, None]}, "c": (1, "x"), "shape": tensor.shape})
    found = fields.carriable(given)
    assert type(found) is dict
    assert type(found["a"]) is dict
    assert found["a"]["b"][0] is tensor
    assert found["a"]["b"][1] is None
    assert found["c"] == (1, "x")
    assert type(found["shape"]) is torch.Size


@pytest.mark.parametrize("value", [OrderedDict(b=1), Pair(1, "x"), np.int64(3)], ids=["dict", "tuple", "number"])
def test_what_would_arrive_as_something_else_is_left_for_the_core_to_refuse(value: object) -> None:
    found = fields.carriable({"text_encoder_output": {"context": [value]}})
    assert found["text_encoder_output"]["context"][0] is value


def test_a_cycle_is_left_for_the_core_to_refuse() -> None:
    value: list[object] = []
    value.append(value)
    assert fields.carriable({"a": value})["a"][0] is value


def test_what_the_host_sends_as_json() -> None:
    info = {
        "vae_image_info_list": [(np.int64(32), np.int32(48)), Pair(64, 48)],
        "scale": np.float64(0.1),
        "on": np.bool_(1),
    }
    found = fields.carriable({"text_encoder_output": {"image_info": info}, "latent_shape": [np.int64(16), 3]})
    found_info = found["text_encoder_output"]["image_info"]
    assert found_info == {"vae_image_info_list": [(32, 48), (64, 48)], "scale": 0.1, "on": True}
    assert {type(value) for pair in found_info["vae_image_info_list"] for value in pair} == {int}
    assert [type(pair) for pair in found_info["vae_image_info_list"]] == [tuple, tuple]
    assert (type(found_info["scale"]), type(found_info["on"])) == (float, bool)
    assert [type(number) for number in found["latent_shape"]] == [int, int]
    assert type(fields.plain(np.int64(5))) is int


def test_what_is_there_already_is_not_copied() -> None:
    tensor = torch.zeros(3)
    given = {"a": [tensor, (tensor, None)], "b": "text"}
    found = fields.on_device(given, "cpu")
    assert found["a"][0] is tensor
    assert found["a"][1] == (tensor, None)
    assert found["b"] == "text"


def test_a_tensor_in_two_places_is_one_on_the_device_too() -> None:
    tensor = torch.zeros(3)
    found = fields.on_device({"a": tensor, "b": [tensor]}, "meta")
    assert found["a"] is found["b"][0]
    assert found["a"].device.type == "meta"


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(torch.zeros(3), 12), ({"a": [torch.zeros(2, dtype=torch.bfloat16), None]}, 4), ((1, "x"), 0)],
)
def test_nbytes(value: object, nbytes: int) -> None:
    assert fields.nbytes_of(value) == nbytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_keeps_what_was_moved(device: str) -> None:
    """A pool gets its memory back when the tensors die, not when garbage is collected."""
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        fields.on_device({"a": [tensor]}, device)
        fields.carriable({"a": [tensor]})
        del tensor
        assert gone() is None
    finally:
        gc.enable()
