"""Handles: a small versioned wire form; what is not understood is kept or refused, never misread."""

from __future__ import annotations

import copy
import math
import tracemalloc
from typing import Any

import msgspec
import pytest
import torch

from moonrelay.errors import ConfigError, VersionError, WireError
from moonrelay.handle import (
    MAX_HANDLE_BYTES,
    ControlAddress,
    DirectAddress,
    EngineAddress,
    LeaseTerms,
    RelayAddress,
    StageHandle,
)
from moonrelay.payload import ChunkPlan, StagePayload, TensorSpec, flatten

HEADER = 5


def handle_of(payload: StagePayload, **fields: Any) -> StageHandle:
    flat = flatten(payload)
    given: dict[str, Any] = {
        "id": "0123456789abcdef" * 2,
        "request_id": payload.request_id,
        "kind": payload.kind,
        "attempt": payload.attempt,
        "tree": flat.tree,
        "tensors": flat.specs,
        "chunks": flat.chunks,
        "digest": "xxh3_128",
        "lease": LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=600.0),
        "direct": DirectAddress(
            control=ControlAddress(address="tcp://127.0.0.1:7001", nonce="c1"),
            engine=EngineAddress(engine="mooncake", address="127.0.0.1:7002", nonce="e1"),
        ),
        "relay": RelayAddress(url="local:///run/x", prefix="moonrelay/r1/0"),
        "schema": payload.schema,
        "metadata": payload.metadata,
    }
    return StageHandle(**{**given, **fields})


def chunked() -> StageHandle:
    tensor = torch.zeros(1, 16, 7, 4, 6, dtype=torch.bfloat16)
    return handle_of(
        StagePayload(
            "r1", "latent", tensor=tensor, chunk_dim=2, num_chunks=3, schema="wan.latents/1", metadata={"fps": 16.0}
        )
    )


def tree() -> StageHandle:
    data = {"prompt_embeds": [torch.zeros(3, 5), torch.zeros(2, 2).T], "mask": torch.zeros(0), "guidance": 5.0}
    return handle_of(StagePayload("r1", "embedding", data=data), direct=None)


def body_of(handle: StageHandle) -> dict[str, Any]:
    body = msgspec.msgpack.decode(handle.to_bytes()[HEADER:])
    assert isinstance(body, dict)
    return body


def wire(body: object, version: bytes = b"\x01\x00") -> bytes:
    return b"MRH" + version + msgspec.msgpack.encode(body)


@pytest.mark.parametrize("make", [chunked, tree])
def test_a_handle_survives_the_wire(make: Any) -> None:
    handle = make()
    raw = handle.to_bytes()
    assert StageHandle.from_bytes(raw) == handle
    assert StageHandle.from_bytes(bytearray(raw)) == StageHandle.from_bytes(memoryview(raw)) == handle
    assert StageHandle.from_bytes(raw).to_bytes() == raw


def test_a_handle_says_what_it_refers_to() -> None:
    handle = chunked()
    assert handle.nbytes == 16 * 7 * 4 * 6 * 2
    assert handle.num_chunks == 3
    assert [handle.chunk_nbytes(chunk) for chunk in range(3)] == [16 * n * 4 * 6 * 2 for n in (3, 2, 2)]
    assert handle.spec == TensorSpec(shape=(1, 16, 7, 4, 6), dtype="bfloat16")
    with pytest.raises(ConfigError, match="chunk 3 does not exist"):
        handle.chunk_nbytes(3)
    other = tree()
    assert other.num_chunks == 1
    assert other.nbytes == other.chunk_nbytes(0) == (15 + 4) * 4
    assert other.spec == {
        "prompt_embeds": [
            TensorSpec(shape=(3, 5), dtype="float32"),
            TensorSpec(shape=(2, 2), dtype="float32", order=(1, 0)),
        ],
        "mask": TensorSpec(shape=(0,), dtype="float32"),
        "guidance": 5.0,
    }


def test_ordinary_payloads_have_small_handles() -> None:
    data = {
        f"block_{layer}": {name: [torch.empty(1, 512, 64), torch.empty(1, 512)] for name in ("key", "value")}
        for layer in range(100)
    }
    large = {"prompt": "a fox " * 5000, "image": bytes(3_000_000), "latents": torch.empty(64, 1024, 1024)}
    handle = handle_of(StagePayload("r1", "checkpoint", data=[data, large]))
    assert len(handle.tensors) == 403
    assert len(handle.to_bytes()) < 64 << 10
    assert len(chunked().to_bytes()) < 600


def test_the_largest_payload_that_is_accepted_has_an_acceptable_handle() -> None:
    shape = (1,) * 8
    handle = handle_of(StagePayload("r1", "checkpoint", data=[torch.empty(shape) for _ in range(8192)]))
    raw = handle.to_bytes()
    assert len(raw) < MAX_HANDLE_BYTES
    assert StageHandle.from_bytes(raw) == handle


# Versions.


def test_another_major_version_is_refused_naming_both() -> None:
    raw = chunked().to_bytes()
    with pytest.raises(VersionError, match=r"version 2\.7, this side speaks 1\.0"):
        StageHandle.from_bytes(raw[:3] + b"\x02\x07" + raw[HEADER:])


def test_a_newer_minor_version_is_read() -> None:
    raw = chunked().to_bytes()
    assert StageHandle.from_bytes(raw[:3] + b"\x01\x09" + raw[HEADER:]) == chunked()


def test_an_unknown_required_feature_is_refused_naming_both() -> None:
    body = body_of(chunked())
    body["requires"] = ["erasure"]
    body["attempt"] = {"form": "of a newer version"}
    with pytest.raises(VersionError, match=r"version 1\.4 requires \['erasure'\], this side's version 1\.0 knows \[\]"):
        StageHandle.from_bytes(wire(body, b"\x01\x04"))


def test_an_unknown_digest_is_refused() -> None:
    body = body_of(chunked())
    body["digest"] = "blake9"
    with pytest.raises(VersionError, match="blake9"):
        StageHandle.from_bytes(wire(body))


def with_news(body: dict[str, Any]) -> dict[str, Any]:
    """Return the body as a newer version might write it, with fields unknown here at every level."""
    body = copy.deepcopy(body)
    body["tenant"] = {"name": "a", "n": [1, 2.5, None, b"x"]}
    body["direct"]["via"] = "proxy"
    body["direct"]["control"]["cert"] = b"\x00\x01"
    body["direct"]["engine"]["rails"] = [1, 2]
    body["relay"]["zone"] = 3
    body["lease"]["grace_s"] = 1.5
    body["chunks"]["overlap"] = 2
    body["tensors"][0]["name"] = "latents"
    return body


def test_unknown_optional_fields_are_kept_and_passed_on() -> None:
    body = with_news(body_of(chunked()))
    handle = StageHandle.from_bytes(wire(body))
    assert handle.request_id == "r1"
    assert body_of(handle) == body
    assert StageHandle.from_bytes(handle.to_bytes()) == handle


def test_unknown_fields_stay_when_a_known_one_changes_and_go_with_what_held_them() -> None:
    body = with_news(body_of(chunked()))
    moved = msgspec.structs.replace(StageHandle.from_bytes(wire(body)), direct=None, attempt=3)
    after = body_of(moved)
    assert "direct" not in after
    assert after["attempt"] == 3
    assert after["tenant"] == body["tenant"]
    assert after["relay"] == body["relay"]
    assert StageHandle.from_bytes(moved.to_bytes()).direct is None


# Malformed ones.


def test_every_truncation_and_every_trailing_byte_is_refused() -> None:
    raw = tree().to_bytes()
    for length in range(len(raw)):
        with pytest.raises(WireError):
            StageHandle.from_bytes(raw[:length])
    with pytest.raises(WireError):
        StageHandle.from_bytes(raw + b"\xc0")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"MRH",
        b"MRH\x01\x00",
        b"PK\x03\x04" + bytes(40),
        b"MRH\x01\x00\xc1",
        b"MRH\x01\x00\x90",
        b"MRH\x01\x00\x80",
        b"MRH\x01\x00" + b"\xdf\xff\xff\xff\xff",
        b"MRH\x01\x00" + b"\xdd\xff\xff\xff\xff" * 50,
        b"MRH\x01\x00" + b"\x91" * 100_000,
        b"MRH\x01\x00" + b"\x81\xa1x" * 100_000,
        b"MRH\x01\x00\x81\x90\x01",
        b"MRH\x01\x00\x81\x80\x01",
        b"MRH\x01\x00\x81\xa1\xff\x01",
        b"MRH\x01\x00" + bytes(MAX_HANDLE_BYTES),
    ],
    ids=range(15),
)
def test_bytes_that_are_no_handle_are_wire_errors_and_cost_little(raw: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            StageHandle.from_bytes(raw)
        assert tracemalloc.get_traced_memory()[1] < (1 << 20) + 2 * len(raw)
    finally:
        tracemalloc.stop()


SPEC = {"shape": [2, 3], "dtype": "float32"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", ""),
        ("id", 7),
        ("id", "a\x00b"),
        ("request_id", "x" * 600),
        ("kind", None),
        ("schema", ""),
        ("attempt", -1),
        ("attempt", True),
        ("attempt", 1.0),
        ("attempt", 1 << 40),
        ("tree", "text"),
        ("tree", b""),
        ("tree", b"\x93\x01\x02\x92\xa1T\x00"),
        ("tree", b"\x93\x01\x01\x92\xa1T\x01"),
        ("tree", b"\x93\x02\x01\x92\xa1T\x00"),
        ("tensors", []),
        ("tensors", [SPEC, SPEC]),
        ("tensors", [SPEC] * 9000),
        ("tensors", {"0": SPEC}),
        ("tensors", [{**SPEC, "shape": [-1, 3]}]),
        ("tensors", [{**SPEC, "shape": [1 << 62, 1 << 62]}]),
        ("tensors", [{**SPEC, "shape": [0, 1 << 62, 1 << 62]}]),
        ("tensors", [{**SPEC, "shape": [1 << 63]}]),
        ("tensors", [{**SPEC, "shape": [1.0]}]),
        ("tensors", [{**SPEC, "shape": [1] * 65}]),
        ("tensors", [{**SPEC, "dtype": "float999"}]),
        ("tensors", [{**SPEC, "dtype": "qint8"}]),
        ("tensors", [{**SPEC, "dtype": "qint8", "width": 1}]),
        ("tensors", [{**SPEC, "dtype": "float 99", "width": 1}]),
        ("tensors", [{**SPEC, "dtype": "float99", "width": 0}]),
        ("tensors", [{**SPEC, "width": 2}]),
        ("tensors", [{**SPEC, "order": [0, 0]}]),
        ("tensors", [{**SPEC, "order": [0]}]),
        ("tensors", [{**SPEC, "order": [0, 2]}]),
        ("chunks", {"dim": None, "sizes": []}),
        ("chunks", {"dim": None, "sizes": [2]}),
        ("chunks", {"dim": None, "sizes": [1, 1]}),
        ("chunks", {"dim": 2, "sizes": []}),
        ("chunks", {"dim": 2, "sizes": [3, 3]}),
        ("chunks", {"dim": 2, "sizes": [8, -1]}),
        ("chunks", {"dim": 2, "sizes": [7, 0]}),
        ("chunks", {"dim": 5, "sizes": [7]}),
        ("chunks", {"dim": -1, "sizes": [6]}),
        ("chunks", {"dim": 2}),
        ("lease", None),
        ("lease", {"policy": "", "readers": 1, "ttl_s": None}),
        ("lease", {"policy": "x", "readers": -1, "ttl_s": None}),
        ("lease", {"policy": "x", "readers": 1, "ttl_s": -1.0}),
        ("lease", {"policy": "x", "readers": 1, "ttl_s": math.nan}),
        ("lease", {"policy": "x", "readers": 1, "ttl_s": math.inf}),
        ("direct", {}),
        ("direct", {"control": {"address": 1, "nonce": "x"}}),
        ("direct", {"control": {"address": "x", "nonce": "x", 3: 4}}),
        ("relay", "local:///"),
        ("metadata", [1]),
        ("metadata", {"a": b"bytes"}),
        ("metadata", {"a": {1: 2}}),
        ("metadata", {1: 2}),
        ("requires", "erasure"),
        ("requires", [1]),
        ("unknown", {"a": 1}),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_wrong_values_are_wire_errors(path: str, value: object) -> None:
    body = body_of(chunked())
    body[path] = value
    with pytest.raises(WireError):
        StageHandle.from_bytes(wire(body))


def test_a_dtype_of_a_newer_torch_is_passed_through() -> None:
    body = body_of(chunked())
    body["tensors"][0].update(dtype="float99", width=3)
    handle = StageHandle.from_bytes(wire(body))
    assert handle.nbytes == 16 * 7 * 4 * 6 * 3
    assert body_of(handle) == body


def test_an_invalid_handle_is_not_sent() -> None:
    for fields in (
        {"request_id": ""},
        {"chunks": ChunkPlan(dim=9, sizes=(1,))},
        {"digest": "blake9"},
        {"metadata": {"a": (1, 2)}},
        {"lease": LeaseTerms(policy="x", readers=-1, ttl_s=None)},
        {"tree": b""},
    ):
        with pytest.raises(ConfigError, match="not valid"):
            msgspec.structs.replace(chunked(), **fields).to_bytes()
    with pytest.raises(ConfigError, match="at most"):
        msgspec.structs.replace(chunked(), unknown={"new": bytes(MAX_HANDLE_BYTES)}).to_bytes()
