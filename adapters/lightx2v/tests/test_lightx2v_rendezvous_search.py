"""What one find makes of answers and of silence, without a socket; and what a message may be."""

from __future__ import annotations

import msgspec
import pytest

from moonrelay.clock import Deadline, ManualClock
from moonrelay.control.wire import NO_SESSION, Frame, Kind, Seal
from moonrelay.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    VersionError,
    WireError,
)
from moonrelay_lightx2v.rendezvous_search import Search
from moonrelay_lightx2v.rendezvous_wire import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    WRONG_PHASE,
    Answer,
    Closing,
    Forget,
    Here,
    NotYet,
    Refused,
    Want,
    bare_host,
    check_names,
    pack_answer,
    pack_question,
    pack_reject,
    question_in,
    seal_for,
    shown,
)

SEAL = seal_for("secret")
ONE, TWO = b"1" * 16, b"2" * 16
NAMES = ("task:1", "same:x")


def search(desks: int = 1, seal: Seal = SEAL) -> Search:
    peers = [f"127.0.0.1:{5000 + number}" for number in range(desks)]
    return Search(NAMES, "encoder", peers, seal, now=100.0, peer_timeout_s=10.0, retry_s=1.0)


def tell(find: Search, answer: Answer, *, desk: int = 0, nonce: bytes = ONE, token: bytes | None = None) -> None:
    assert find.take(desk, pack_answer(SEAL, nonce, token or find.token, answer)) is None


def question(data: bytes) -> Want | Forget:
    frame = SEAL.unpack(data)
    assert isinstance(frame, Frame)
    return question_in(frame)


def test_desks_are_asked_at_once_and_then_every_retry() -> None:
    find = search(2)
    assert find.due(100.0) == [0, 1]
    find.asked(0, 100.0)
    assert find.due(100.0) == [1]
    find.asked(1, 100.5)
    assert find.next_at(100.5) == 101.0
    assert find.due(101.0) == [0]


@pytest.mark.parametrize(("left_s", "wait_ms"), [(None, 10_001), (60.0, 10_001), (2.5, 2501), (0.0, 1)])
def test_a_question_says_how_long_it_holds(left_s: float | None, wait_ms: int) -> None:
    assert question(search().question(left_s)) == Want(names=NAMES, phase="encoder", wait_ms=wait_ms)


def test_here_is_the_handle() -> None:
    find = search()
    tell(find, Here(handle=b"handle"))
    assert find.handle == b"handle"
    assert find.has_taken(0)


def test_an_answer_to_another_find_is_none() -> None:
    find = search()
    find.asked(0, 100.0)
    tell(find, Here(handle=b"handle"), token=b"x" * 16)
    assert find.handle is None
    with pytest.raises(PeerLost):
        find.check(110.0)


def test_a_refusal_carries_the_stages_text_and_code() -> None:
    find = search()
    with pytest.raises(Aborted, match="the encoder stage failed this request: bad image") as failure:
        tell(find, Refused(code="capacity_error", message="bad image"))
    assert failure.value.context["stage"] == "encoder"
    assert failure.value.context["cause"] == "capacity_error"
    assert question(find.farewell(0)) == Forget(taken=True)


def test_a_desk_that_gave_nothing_is_told_so() -> None:
    find = search(2)
    tell(find, Here(handle=b"handle"), desk=1)
    assert question(find.farewell(0)) == Forget(taken=False)
    assert not find.has_taken(0)
    assert find.has_taken(1)


def test_a_desk_that_never_answers_is_lost_after_its_time() -> None:
    find = search()
    find.asked(0, 100.0)
    find.check(109.9)
    with pytest.raises(PeerLost, match=r"127\.0\.0\.1:5000 does not answer for 10 s"):
        find.check(110.0)


def test_silence_counts_from_the_first_question_without_an_answer() -> None:
    find = search()
    find.asked(0, 100.0)
    tell(find, NotYet(working=False))
    find.check(500.0)  # this process stood still: nothing was asked meanwhile
    find.asked(0, 500.0)
    find.asked(0, 505.0)
    find.check(509.0)
    with pytest.raises(PeerLost, match="is silent for 10 s"):
        find.check(510.0)


def test_one_desk_that_answers_is_enough() -> None:
    find = search(2)
    find.asked(0, 100.0)
    find.asked(1, 100.0)
    tell(find, NotYet(working=False), desk=1)
    find.check(110.0)
    find.asked(0, 111.0)
    find.asked(1, 111.0)
    assert find.next_at(111.0) > 111.0  # the silent one keeps nobody awake
    with pytest.raises(PeerLost):
        find.check(121.0)


def test_the_desk_that_works_on_it_is_missed_though_another_answers() -> None:
    find = search(2)
    tell(find, NotYet(working=True), desk=0)
    find.asked(0, 100.0)
    find.check(109.0)
    tell(find, NotYet(working=False), desk=1)
    with pytest.raises(PeerLost, match=r"5000 worked on this request and is silent"):
        find.check(110.0)


def test_a_restart_is_told_only_where_there_was_work() -> None:
    find = search()
    tell(find, NotYet(working=False), nonce=ONE)
    tell(find, NotYet(working=True), nonce=TWO)
    tell(find, NotYet(working=True), nonce=TWO)
    with pytest.raises(PeerLost, match="was restarted while it worked"):
        tell(find, NotYet(working=False), nonce=ONE)


def test_work_that_ended_is_no_reason_to_miss_a_desk() -> None:
    find = search()
    tell(find, NotYet(working=True), nonce=ONE)
    tell(find, NotYet(working=False), nonce=ONE)
    tell(find, NotYet(working=False), nonce=TWO)


def test_what_a_restarted_desk_has_is_taken() -> None:
    find = search()
    tell(find, NotYet(working=True), nonce=ONE)
    tell(find, Here(handle=b"handle"), nonce=TWO)
    assert find.handle == b"handle"


def test_the_last_desk_that_closes_is_lost_at_once() -> None:
    find = search(2)
    tell(find, Closing(), desk=0)
    with pytest.raises(PeerLost, match="5001 closes"):
        tell(find, Closing(), desk=1)


def test_a_closing_desk_that_worked_on_it_is_lost_at_once() -> None:
    find = search(2)
    tell(find, NotYet(working=True), desk=0)
    with pytest.raises(PeerLost, match="5000 closes"):
        tell(find, Closing(), desk=0)


def test_the_last_words_of_a_desk_that_was_followed_by_another_are_nothing() -> None:
    find = search()
    tell(find, NotYet(working=False), nonce=TWO)
    tell(find, Closing(), nonce=ONE)


@pytest.mark.parametrize(
    ("code", "error", "text"),
    [
        (WRONG_PHASE, ConfigError, "hands over 'denoiser', and this role wants 'encoder'"),
        ("auth_wrong", ConfigError, "auth_key"),
        ("auth_missing", ConfigError, "auth_key"),
        ("auth_unexpected", ConfigError, "auth_key"),
        ("nonce", ConfigError, "another part of Moonrelay"),
        ("something new", WireError, "refused"),
    ],
)
def test_a_rejection_becomes_its_error(code: str, error: type[MoonrelayError], text: str) -> None:
    find = search()
    with pytest.raises(error, match=text) as failure:
        find.take(0, pack_reject(SEAL, ONE, find.token, code, "denoiser"))
    assert failure.value.context["peer"] == "127.0.0.1:5000"


def test_another_version_is_told() -> None:
    find = search()
    with pytest.raises(VersionError, match="protocol 7, this side 1"):
        find.take(0, pack_reject(seal_for(None, 7), ONE, find.token, "version", ""))


def test_an_unsealed_rejection_after_sealed_answers_is_a_strangers() -> None:
    find = search()
    tell(find, NotYet(working=False))
    assert "unsealed" in str(find.take(0, pack_reject(SEAL, ONE, find.token, "auth_wrong", "")))


@pytest.mark.parametrize(
    "make",
    [
        lambda token: b"",
        lambda token: b"GET / HTTP/1.1\r\n\r\n" * 8,
        lambda token: pack_answer(seal_for(None), ONE, token, Here(handle=b"forged")),
        lambda token: pack_answer(seal_for("other"), ONE, token, Here(handle=b"forged")),
        lambda token: SEAL.pack(Frame(Kind.REPLY, 0, ONE, token, NO_SESSION, b"\xc1")),
        lambda token: SEAL.pack(Frame(Kind.REPLY, 0, ONE, token, NO_SESSION, b"\x91" * 5000)),
        lambda token: SEAL.pack(Frame(Kind.REJECT, 0, ONE, token, NO_SESSION, b"junk")),
        lambda token: SEAL.pack(
            Frame(Kind.REQUEST, 0, ONE, token, NO_SESSION, msgspec.msgpack.encode(Here(handle=b"forged")))
        ),
    ],
    ids=["empty", "http", "unsealed", "other key", "no msgpack", "deep", "no rejection", "of a caller"],
)
def test_what_is_no_answer_is_dropped_with_a_reason(make: object) -> None:
    find = search()
    assert find.take(0, make(find.token))  # type: ignore[operator]
    assert find.handle is None


def test_what_was_there_and_is_over_is_a_lost_lease_when_the_time_is_over() -> None:
    find = search()
    tell(find, NotYet(working=False, over=True))
    find.check(0.0)
    error = find.too_late(Deadline(5.0, ManualClock()))
    assert isinstance(error, LeaseLost)
    assert "task:1" in str(error)
    assert "send the request to all roles again" in str(error)
    tell(find, NotYet(working=True))
    assert isinstance(find.too_late(Deadline(5.0, ManualClock())), DeadlineExceeded)


def test_what_has_expired_is_told_as_that() -> None:
    find = search()
    with pytest.raises(LeaseExpired, match="nobody took it"):
        tell(find, Refused(code="lease_expired", message="nobody took it within lease_ttl_s=1"))


def test_too_late_says_what_to_do() -> None:
    def text(find: Search) -> str:
        return str(find.too_late(Deadline(5.0, ManualClock())))

    find = search()
    assert "task:1, same:x within 5 s; no desk answered" in text(find)
    tell(find, NotYet(working=False))
    assert "data_bootstrap_room or task_id" in text(find)
    tell(find, NotYet(working=True))
    assert "transfer_timeout_s" in text(find)


@pytest.mark.parametrize(
    "names",
    [(), ("",), ("x" * (MAX_NAME_CHARS + 1),), tuple(map(str, range(MAX_NAMES + 1))), "task:1", (1,), ("\ud800",)],
)
def test_unusable_names_are_refused(names: object) -> None:
    with pytest.raises(ConfigError) as failure:
        check_names(names)  # type: ignore[arg-type]
    assert failure.value.context["field"] == "names"


def test_usable_names_are_kept_once_each() -> None:
    assert check_names(("b", "a", "b")) == ("b", "a")
    assert check_names(("x" * MAX_NAME_CHARS,) * MAX_NAMES) == ("x" * MAX_NAME_CHARS,)


@pytest.mark.parametrize(
    "fields",
    [
        {"names": []},
        {"names": ["x"] * (MAX_NAMES + 1)},
        {"names": ["x" * (MAX_NAME_CHARS + 1)]},
        {"names": [""]},
        {"names": [1]},
        {"phase": ""},
        {"phase": "x" * 65},
        {"wait_ms": -1},
        {"wait_ms": 3_600_001},
        {"wait_ms": 1.5},
        {"type": "other"},
    ],
)
def test_a_question_out_of_bounds_is_malformed(fields: dict[str, object]) -> None:
    right: dict[str, object] = {"type": "want", "names": ["x"], "phase": "encoder", "wait_ms": 1}

    def decode(what: dict[str, object]) -> Want | Forget:
        return question(SEAL.pack(Frame(Kind.REQUEST, 0, ONE, TWO, NO_SESSION, msgspec.msgpack.encode(what))))

    assert decode(right) == Want(names=("x",), phase="encoder", wait_ms=1)
    with pytest.raises(WireError, match="malformed"):
        decode({**right, **fields})


def test_a_key_of_this_protocol_is_not_the_control_channels() -> None:
    from moonrelay.control.wire import Dialect, Refusal
    from moonrelay.control.wire import Refused as Unreadable

    found = Seal("secret", Dialect()).unpack(pack_question(SEAL, ONE, Forget(taken=True)))
    assert isinstance(found, Unreadable)
    assert found.why is Refusal.AUTH_WRONG


@pytest.mark.parametrize(
    ("host", "bare"), [("::1", "::1"), ("[::1]", "::1"), ("127.0.0.1", "127.0.0.1"), ("node-7", "node-7")]
)
def test_hosts(host: str, bare: str) -> None:
    assert bare_host(host, "bootstrap_addr") == bare


@pytest.mark.parametrize("host", ["", "[]", "tcp://node", "node:5000", "a b", "*", "::1:99999"])
def test_what_is_no_host(host: str) -> None:
    with pytest.raises(ConfigError, match="bootstrap_addr"):
        bare_host(host, "bootstrap_addr")


def test_ipv6_is_shown_in_brackets() -> None:
    assert [shown("::1", 5), shown("node", 5)] == ["[::1]:5", "node:5"]
