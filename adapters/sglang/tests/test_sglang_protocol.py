"""Messages between head and workers: what is written is read, what is wrong is named."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from moonrelay.errors import CapacityError, PeerLost, VersionError, WireError
from moonrelay_sglang import protocol

REGISTRATION = protocol.Registration(
    version=protocol.VERSION, epoch="e1", instance="denoiser-0", slots=2, beat_s=0.5, labels={"rack": "a"}
)
REGISTER = protocol.Register(role="denoiser", work_endpoint="tcp://127.0.0.1:19001", moonrelay=REGISTRATION)
MANIFEST = protocol.manifest_of(b"\x01handle", epoch="e0", nbytes=65, attempt=1)
STAMP = protocol.Stamp(version=protocol.VERSION, epoch="e1", attempt=1)
MESSAGES = [
    REGISTER,
    protocol.Staged(request_id="r", manifest=MANIFEST, data_size=65, moonrelay=STAMP),
    protocol.Done(request_id="r", staged_for_decoder=True, manifest=MANIFEST, moonrelay=STAMP),
    protocol.Done(request_id="r", error="no", moonrelay=STAMP),
    protocol.Beat(
        moonrelay=1,
        role="denoiser",
        work_endpoint="tcp://127.0.0.1:19001",
        epoch="e1",
        registration=REGISTER,
        holding=(("r", 0), ("s", 2)),
        in_use=protocol.InUse(payloads=1, bytes=65),
        counters=protocol.Counters(delivered=3),
    ),
    protocol.Failed(
        moonrelay=1,
        request_id="r",
        attempt=1,
        epoch="e1",
        phase="load",
        error=protocol.Failure(code="peer_lost", retryable=True, message="gone"),
        lost_input=True,
    ),
    protocol.Finished(moonrelay=1, request_id="r", attempt=1, epoch="e1"),
    protocol.Ready(request_id="r", manifest=MANIFEST, scalar_fields={"seed": 42}),
    protocol.Release(moonrelay=1, request_id="r"),
    protocol.Release(moonrelay=1, request_id="r", attempt=0),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Any) -> None:
    frames = protocol.encode(message)
    assert frames[0] == b"__transfer__"
    assert protocol.parse_any(protocol.decode(frames)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_missing_field_is_named(message: Any) -> None:
    complete = protocol.decode(protocol.encode(message))
    needed = [field.name for field in msgspec.structs.fields(type(message)) if field.required]
    assert needed
    for name in needed:
        with pytest.raises(WireError) as caught:
            protocol.parse({key: value for key, value in complete.items() if key != name}, type(message))
        assert caught.value.context["field"] == name


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"role": 3}, "role"),
        ({"role": ""}, "role"),
        ({"moonrelay": {}}, "moonrelay.version"),
        ({"moonrelay": {"version": 1, "epoch": "e", "instance": "i", "slots": 0, "beat_s": 1.0}}, "moonrelay.slots"),
        ({"moonrelay": {"version": 1, "epoch": "e", "instance": "i", "slots": 1, "beat_s": -1.0}}, "moonrelay.beat_s"),
        ({"msg_type": "transfer_staged"}, "msg_type"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], field: str) -> None:
    message = {**protocol.decode(protocol.encode(REGISTER)), **changes}
    with pytest.raises(WireError) as caught:
        protocol.parse(message, protocol.Register)
    assert caught.value.context["field"] == field


def test_another_version_is_told() -> None:
    message = protocol.decode(protocol.encode(REGISTER))
    message["moonrelay"]["version"] = 2
    with pytest.raises(VersionError, match="version 2"):
        protocol.parse(message, protocol.Register)
    with pytest.raises(VersionError):
        protocol.located({"moonrelay": {**MANIFEST["moonrelay"], "version": 9}})


def test_a_stock_workers_registration_has_nothing_of_ours() -> None:
    stock = {"msg_type": "transfer_register", "role": "encoder", "session_id": "10.0.0.1:12345", "pool_ptr": 1 << 46}
    assert protocol.parse(stock, protocol.Register).moonrelay is None


@pytest.mark.parametrize(
    "frames", [[], [b"__transfer__"], [b"x", b"{}"], [b"__transfer__", b"{"], [b"__transfer__", b"[]"]]
)
def test_other_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        protocol.decode(frames)


def test_a_message_of_the_hosts_alone_is_none_of_ours() -> None:
    assert protocol.parse_any({"msg_type": "transfer_alloc", "request_id": "r"}) is None


def test_a_manifest_locates_its_payload() -> None:
    found = protocol.located(MANIFEST)
    assert found is not None
    assert (found.handle_bytes(), found.epoch, found.nbytes, found.attempt) == (b"\x01handle", "e0", 65, 1)
    again = protocol.located(protocol.for_attempt(MANIFEST, 4))
    assert again is not None
    assert (again.attempt, again.handle_bytes()) == (4, b"\x01handle")
    assert protocol.located({}) is None
    assert protocol.located({"latents": {"offset": 0}}) is None


@pytest.mark.parametrize(
    "ours", [None, {}, {**MANIFEST["moonrelay"], "nbytes": -1}, {**MANIFEST["moonrelay"], "handle": ""}]
)
def test_a_damaged_manifest_is_refused(ours: object) -> None:
    with pytest.raises(WireError, match="manifest"):
        protocol.located({"moonrelay": ours})


def test_a_damaged_handle_is_refused() -> None:
    found = protocol.located({"moonrelay": {**MANIFEST["moonrelay"], "handle": "%%%"}})
    assert found is not None
    with pytest.raises(WireError, match="damaged handle"):
        found.handle_bytes()
    assert base64.b64decode(MANIFEST["moonrelay"]["handle"]) == b"\x01handle"


def test_an_encoders_work_carries_its_attempt() -> None:
    frames = protocol.encoder_frames("r", 3, b"work")
    assert (frames[0], frames[-1], protocol.encoder_attempt(frames)) == (b"r", b"work", 3)
    assert protocol.encoder_attempt([b"r", b"work"]) == 0
    assert protocol.encoder_attempt([b"r", b"\xff", b"work"]) == 0


@pytest.mark.parametrize(
    "frames",
    [
        [b'{"tensor_descriptors":[],"scalar_fields":{"request_id":"r"}}', b"pixels"],
        [b"__transfer__", b'{"msg_type":"transfer_done","request_id":"r"}'],
    ],
)
def test_a_result_is_stamped_and_keeps_the_rest(frames: list[bytes]) -> None:
    assert protocol.stamp_of(frames) is None
    stamped = protocol.stamped(frames, STAMP)
    assert protocol.stamp_of(stamped) == STAMP
    assert stamped[-1] == b"pixels" or stamped[0] == b"__transfer__"
    assert b'"request_id":"r"' in b"".join(stamped)


def test_what_is_no_json_cannot_be_stamped() -> None:
    with pytest.raises(WireError):
        protocol.stamped([b"\x80pickle"], STAMP)
    with pytest.raises(WireError):
        protocol.stamp_of([b"\x80pickle"])


def test_errors_cross_the_wire() -> None:
    lost = protocol.Failure.of(PeerLost("the encoder is gone", peer="x"))
    assert lost.code == "peer_lost"
    assert lost.retryable
    assert isinstance(lost.error(), PeerLost)
    assert isinstance(protocol.Failure.of(CapacityError("full")).error(), CapacityError)
    other = protocol.Failure.of(RuntimeError("two\nlines"))
    assert (other.retryable, other.message) == (False, "RuntimeError: two lines")
    assert str(other.error()) == "RuntimeError: two lines", "a client reads it"
