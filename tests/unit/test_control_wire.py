"""Frames and messages: what is packed comes back, everything else is refused or a WireError."""

from __future__ import annotations

import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonrelay.control import messages
from moonrelay.control.messages import Ack, Failure, Granted, Progress, Progressed, Renewed
from moonrelay.control.wire import (
    MAX_FRAME_BYTES,
    Complaints,
    Dialect,
    Frame,
    Kind,
    Refusal,
    Refused,
    Reject,
    ReplayWindow,
    Seal,
    decode_reject,
    encode_reject,
    rejection,
)
from moonrelay.errors import Aborted, ConfigError, MoonrelayError, PeerLost, VersionError, WireError
from moonrelay.handle import EngineAddress, Region, TensorLocation

FRAME = Frame(Kind.REQUEST, 7, b"s" * 16, b"r" * 16, b"e" * 8, b"body", 5)


def seal(key: str | bytes | None = None, version: int = 1) -> Seal:
    return Seal(key, Dialect(version=version))


@pytest.mark.parametrize("key", [None, "secret", b"secret"])
def test_frame_comes_back(key: str | bytes | None) -> None:
    back = seal(key).unpack(seal(key).pack(FRAME))
    assert isinstance(back, Frame)
    assert back == msgspec.structs.replace(FRAME, sealed=key is not None)


def test_str_and_bytes_are_the_same_key() -> None:
    assert isinstance(seal(b"secret").unpack(seal("secret").pack(FRAME)), Frame)


@pytest.mark.parametrize(
    ("theirs", "ours", "why"),
    [
        (None, "k", Refusal.AUTH_MISSING),
        ("k", None, Refusal.AUTH_UNEXPECTED),
        ("k", "other", Refusal.AUTH_WRONG),
    ],
)
def test_key_mismatch_is_refused(theirs: str | None, ours: str | None, why: Refusal) -> None:
    back = seal(ours).unpack(seal(theirs).pack(FRAME))
    assert isinstance(back, Refused)
    assert (back.why, back.seq, back.sender) == (why, 7, FRAME.sender)


def test_a_stranger_may_send_nothing_but_a_rejection() -> None:
    for kind in Kind:
        back = seal("k").unpack(seal().pack(msgspec.structs.replace(FRAME, kind=kind)))
        assert isinstance(back, Frame) == (kind is Kind.REJECT)
        assert not isinstance(back, Frame) or not back.sealed


def test_every_changed_byte_breaks_the_seal() -> None:
    data = seal("k").pack(FRAME)
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x10
        try:
            back = seal("k").unpack(bytes(changed))
        except WireError:
            continue
        # Without the flag of a seal it may only pass as a rejection, and not as a sealed one.
        assert isinstance(back, Refused) or (back.kind is Kind.REJECT and not back.sealed), position


def test_another_version_is_told_whatever_follows() -> None:
    back = seal(version=1).unpack(seal(version=2).pack(FRAME))
    assert isinstance(back, Refused)
    assert (back.why, back.version) == (Refusal.VERSION, 2)
    back = seal().unpack(b"MR\x09\x01")
    assert isinstance(back, Refused)
    assert back.version == 9


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_malformed(data: bytes) -> None:
    for each in (seal(), seal("k")):
        for raw in (data, b"MR" + data, b"MR\x01" + data, seal().pack(FRAME)[:-1] + data):
            try:
                back = each.unpack(raw)
            except WireError:
                continue
            assert isinstance(back, (Frame, Refused))


@given(st.binary(max_size=200))
def test_any_body_decodes_or_is_a_wire_error(data: bytes) -> None:
    for decode in (
        messages.decode_request,
        messages.decode_reply,
        messages.decode_push,
        messages.decode_hello,
        messages.decode_welcome,
        decode_reject,
    ):
        try:
            decode(data)
        except WireError:
            continue


def test_deep_nesting_is_a_wire_error() -> None:
    with pytest.raises(WireError):
        messages.decode_reply(b"\x91" * 100_000)


def test_too_large_a_message_is_refused_by_its_sender() -> None:
    with pytest.raises(WireError, match="exceeds"):
        seal().pack(msgspec.structs.replace(FRAME, body=bytes(MAX_FRAME_BYTES)))


@pytest.mark.parametrize(("key", "said"), [("", "is empty"), (b"", "is empty"), (5, "not int")])
def test_bad_key_is_refused(key: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        Seal(key, Dialect())  # type: ignore[arg-type]
    assert caught.value.context["field"] == "auth_key"


def test_granted_comes_back() -> None:
    location = TensorLocation(region=Region(key="k", base=1 << 63, nbytes=5), address=(1 << 63) + 2)
    sent = Granted(
        token=5,
        claim_ttl_s=5.0,
        where="direct",
        tensors=(location,),
        engine=EngineAddress(engine="shm", address="a", nonce="n"),
        progress=Progress(readable=(0, 2), digests={0: b"\x00\xff"}, failure=Failure.of(Aborted("why"))),
    )
    assert messages.decode_reply(messages.encode(sent)) == sent
    renewed = Renewed(progress=sent.progress, where="relay")
    assert messages.decode_reply(messages.encode(renewed)) == renewed
    pushed = Progressed(payload_id="p", progress=sent.progress)
    assert messages.decode_push(messages.encode(pushed)) == pushed


def test_unknown_optional_field_is_ignored_and_unknown_message_is_not() -> None:
    raw = msgspec.msgpack.encode({"type": "ack", "payload_id": "p", "token": 3, "added_later": [1]})
    assert messages.decode_request(raw) == Ack(payload_id="p", token=3)
    for bad in (
        {"type": "added_later"},
        {"type": "ack", "payload_id": 5, "token": 3},
        {"type": "ack"},
        {"type": "done"},
    ):
        with pytest.raises(WireError):
            messages.decode_request(msgspec.msgpack.encode(bad))


def test_a_failure_is_rebuilt() -> None:
    error = Failure.of(Aborted("out of memory", payload_id="p")).error()
    assert isinstance(error, Aborted)
    assert "out of memory" in str(error)
    assert error.context["remote"] is True


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("version", VersionError, "protocol 2, this side 1"),
        ("feature", VersionError, "what they said"),
        ("nonce", PeerLost, "another process"),
        ("auth_wrong", ConfigError, "wrong auth_key"),
        ("auth_missing", ConfigError, "wrong auth_key"),
        ("auth_unexpected", ConfigError, "wrong auth_key"),
        ("of a later version", WireError, "what they said"),
    ],
)
def test_rejections_have_their_errors(code: str, kind: type[MoonrelayError], said: str) -> None:
    body = encode_reject(Reject(code=code, message="what they said", version=2))
    reject = decode_reject(body)
    error = rejection(reject.code, reject.message, peer="tcp://x", ours=1, theirs=reject.version)
    assert type(error) is kind
    assert said in error.message
    assert error.context["peer"] == "tcp://x"


@given(st.lists(st.integers(1, 60)))
def test_replay_window_takes_nothing_twice(seqs: list[int]) -> None:
    window = ReplayWindow(size=8)
    taken = [seq for seq in seqs if window.fresh(seq)]
    assert len(taken) == len(set(taken))
    highest = 0
    for seq in seqs:
        if seq > highest:
            assert seq in taken
            highest = seq


def test_replay_window_stays_small() -> None:
    window = ReplayWindow(size=8)
    for seq in range(1, 1000):
        assert window.fresh(seq)
    assert len(window._seen) <= 17
    assert not window.fresh(980)


def test_complaints_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger("test.complaints"), "me")
    with caplog.at_level(logging.WARNING, "test.complaints"):
        for _ in range(1000):
            complaints.drop("malformed", "x")
    assert len(caplog.records) == 10
    assert complaints.count("malformed") == 1000
