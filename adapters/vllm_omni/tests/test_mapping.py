"""Which of the host's values are translated, and that nothing else is touched."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from moonrelay.lease import DeleteOnConsume, Shared, Ttl
from moonrelay.payload import flatten, unflatten
from moonrelay_vllm_omni.directory import Edge
from moonrelay_vllm_omni.mapping import RawBuffer, plain, request_id_of, to_host, to_payload

EDGE = Edge(from_stage="0", to_stage="1", key="r1_0_0")


class Meta(msgspec.Struct, omit_defaults=True, kw_only=True):
    finished: bool | None = None
    step: int = 0
    seen: list[int] = msgspec.field(default_factory=list)


class Payload(msgspec.Struct, omit_defaults=True, kw_only=True):
    latent: Any = None
    meta: Meta | None = None
    named: int = msgspec.field(default=0, name="renamed")


class Whole(msgspec.Struct):
    a: int = 1
    b: Any = None


class Listed(msgspec.Struct, array_like=True):
    a: int
    b: str = "x"


class Tagged(msgspec.Struct, tag="kind-of"):
    a: int


def test_a_struct_becomes_the_dict_that_msgspec_would_make() -> None:
    cases = [
        Meta(),
        Meta(finished=False, step=0, seen=[1]),
        Payload(meta=Meta(finished=True), named=3),
        Whole(),
        Whole(a=1, b=[Meta(step=1), {"m": Whole(a=2)}]),
        Listed(a=1),
        Tagged(a=5),
    ]
    for case in cases:
        assert plain(case) == msgspec.msgpack.decode(msgspec.msgpack.encode(case))


def test_a_structs_tensors_stay_the_very_objects() -> None:
    latent = torch.randn(2, 3)
    out = plain({"outer": [Payload(latent=latent)]})
    assert out == {"outer": [{"latent": latent}]}
    assert out["outer"][0]["latent"] is latent


def test_an_unset_field_is_left_out() -> None:
    class Sparse(msgspec.Struct):
        a: int | msgspec.UnsetType = msgspec.UNSET
        b: int = 2

    assert plain(Sparse()) == {"b": 2}


def test_what_holds_no_struct_is_returned_as_it_is() -> None:
    look_alike = {"finished": True, "images": [torch.ones(1)], "request_id": "r", "outputs": (1, None), "s": {1, 2}}
    assert plain(look_alike) is look_alike


def test_tuples_stay_tuples_around_a_struct() -> None:
    assert plain((1, Meta(step=2))) == (1, {"step": 2})


@pytest.mark.parametrize(
    "value",
    [
        {"finished": True, "images": [1]},
        {"finished": True, "final_output_type": "image"},
        (1, [None, {"a": ()}]),
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5, dtype=torch.bfloat16)},
        {1: {2, 3}, None: frozenset({"x"})},
        b"\x00\x01" * 5000,
        None,
        {},
    ],
    ids=repr,
)
def test_host_values_come_back_equal(value: object) -> None:
    flat = flatten(to_payload(EDGE, value, readers=1, ttl_s=5.0))
    back = to_host(unflatten(flat.tree, flat.leaves))
    assert repr(back) == repr(value)


def test_a_bare_tensor_is_published_as_one() -> None:
    tensor = torch.zeros(3)
    payload = to_payload(EDGE, tensor, readers=1, ttl_s=5.0)
    assert payload.tensor is tensor


def test_flat_bytes_come_back_as_the_hosts_kv_path_takes_them() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    buffer = to_host(tensor)
    assert isinstance(buffer, RawBuffer)
    assert buffer.tensor is tensor
    assert len(buffer) == 10
    buffer.release()
    buffer.release()
    assert len(buffer) == 0
    with pytest.raises(ValueError, match="released"):
        _ = buffer.tensor


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int8)])
def test_other_tensors_come_back_as_tensors(tensor: torch.Tensor) -> None:
    assert to_host(tensor) is tensor


@pytest.mark.parametrize(
    ("readers", "lease"), [(1, DeleteOnConsume(5.0)), (3, Shared(3, 5.0)), (0, Ttl(5.0))], ids=["one", "three", "any"]
)
def test_readers_decide_the_lease(readers: int, lease: object) -> None:
    assert to_payload(EDGE, {}, readers=readers, ttl_s=5.0).lease == lease


@pytest.mark.parametrize("key", ["r1_0_0", "a" * 200, "\n", "", "x" * 5000, "\ud800"])
def test_any_key_gives_a_request_id_that_a_handle_can_hold(key: str) -> None:
    edge = Edge(from_stage="0", to_stage="1", key=key)
    payload = to_payload(edge, {}, readers=1, ttl_s=5.0)
    assert payload.request_id == request_id_of(key)


def test_what_is_nested_too_deep_is_refused_not_recursed_into() -> None:
    value: Any = Meta(step=1)
    for _ in range(3000):
        value = [value]
    with pytest.raises(TypeError):
        flatten(to_payload(EDGE, value, readers=1, ttl_s=5.0))
