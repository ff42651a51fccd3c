"""The rendezvous over real sockets, in one process: keys, phases, versions, strangers, threads, ends."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from lightx2v_desk_process import TIMEOUT_S, Finding, held, until, within

from moonrelay.clock import ManualClock
from moonrelay.errors import (
    Aborted,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    MoonrelayError,
    PeerLost,
    VersionError,
    WireError,
)
from moonrelay_lightx2v import rendezvous_caller
from moonrelay_lightx2v.rendezvous import Caller, Desk
from moonrelay_lightx2v.rendezvous_wire import (
    MAX_HANDLE_BYTES,
    MAX_TEXT_CHARS,
    Here,
    Want,
    pack_answer,
    pack_question,
    seal_for,
)

NAMES = ("task:1", "same:x")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def desk(stack: ExitStack, host: str = "127.0.0.1", port: int = 0, **more: Any) -> Desk:
    found = Desk(host, port, **{"phase": "encoder", **more})
    stack.callback(found.close)
    found.start()
    return found


def caller(stack: ExitStack, *desks: Desk, **more: Any) -> Caller:
    more = {"phase": "encoder", "peer_timeout_s": 20.0, "retry_s": 0.1, **more}
    found = Caller([there.address for there in desks], **more)
    stack.callback(found.close)
    return found


def waiting(there: Desk) -> int:
    with there._lock:
        return len(there._book._waiters)


def until_waited_for(there: Desk, finds: int = 1) -> None:
    until(lambda: waiting(there) == finds, f"{finds} finds wait")


@pytest.mark.parametrize("key", [None, "secret"])
def test_an_offer_is_found_before_and_after_it_is_made(stack: ExitStack, key: str | None) -> None:
    there = desk(stack, auth_key=key)
    asking = caller(stack, there, auth_key=key)
    assert there.offer(NAMES, "p", b"before") is None
    assert asking.find(("task:9", "same:x"), within(TIMEOUT_S)) == b"before"
    finding = Finding(asking, "task:2")
    until_waited_for(there)
    there.offer(("task:2", "same:x"), "q", b"after")
    assert finding.result() == b"after"
    assert there.offer(NAMES, "p2", b"again") == "p"


def test_an_offer_comes_to_who_waits_without_being_asked_again(stack: ExitStack) -> None:
    there = desk(stack)
    finding = Finding(caller(stack, there, retry_s=1000.0, peer_timeout_s=3000.0), *NAMES)
    until_waited_for(there)
    there.offer(NAMES, "p", b"handle")
    assert finding.result() == b"handle"


def test_large_handles_arrive_and_larger_ones_are_refused(stack: ExitStack) -> None:
    there = desk(stack, auth_key="secret")
    largest = b"h" * MAX_HANDLE_BYTES
    there.offer(NAMES, "p", largest)
    assert caller(stack, there, auth_key="secret").find(NAMES, within(TIMEOUT_S)) == largest
    with pytest.raises(WireError, match=f"exceeds {MAX_HANDLE_BYTES}"):
        there.offer(NAMES, "q", largest + b"h")


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_is_told_before_and_after_it_is_asked_for(stack: ExitStack, late: bool) -> None:
    there = desk(stack)
    asking = caller(stack, there)
    there.working(NAMES)
    if late:
        there.refuse(NAMES, "capacity_error", "no room")
    finding = Finding(asking, *NAMES)
    if not late:
        until_waited_for(there)
        there.refuse(NAMES, "capacity_error", "no room")
    with pytest.raises(Aborted, match="the encoder stage failed this request: no room") as failure:
        finding.result()
    assert failure.value.context["cause"] == "capacity_error"
    with pytest.raises(DeadlineExceeded):  # told once: what comes now is another attempt
        asking.find(NAMES, within(0.3))


def test_a_failure_of_any_length_is_told(stack: ExitStack) -> None:
    there = desk(stack)
    there.refuse(NAMES, "x" * 1000, "long " * MAX_TEXT_CHARS)
    with pytest.raises(Aborted, match="long long"):
        caller(stack, there).find(NAMES, within(TIMEOUT_S))


def test_an_offer_that_is_withdrawn_while_a_find_is_on_its_way_is_not_found(stack: ExitStack) -> None:
    there = desk(stack)
    there.offer(NAMES, "p", b"handle")
    there.withdraw("p")
    finding = Finding(caller(stack, there), *NAMES)
    until_waited_for(there)
    there.offer(("task:2", "same:y"), "q", b"another's")
    there.withdraw("q")
    assert finding.waits
    there.offer(NAMES, "r", b"its own")
    assert finding.result() == b"its own"


def test_too_late_names_what_was_looked_for(stack: ExitStack) -> None:
    there = desk(stack)
    with pytest.raises(DeadlineExceeded, match=r"nobody offered task:1, same:x within 0\.3 s") as failure:
        caller(stack, there).find(NAMES, within(0.3))
    assert failure.value.context["peer"] == f"127.0.0.1:{there.address[1]}"
    until_waited_for(there, 0)  # it has said that it is over


def test_a_deadline_that_is_over_still_asks_nobody_for_long(stack: ExitStack) -> None:
    with pytest.raises(DeadlineExceeded):
        caller(stack, desk(stack)).find(NAMES, within(0.0))


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        ("one", "two", "set the same auth_key on both sides"),
        (None, "two", "set auth_key on this side"),
        ("one", None, "set auth_key on the peer"),
    ],
)
def test_keys_that_differ_are_told(stack: ExitStack, ours: str | None, theirs: str | None, text: str) -> None:
    there = desk(stack, auth_key=theirs)
    there.offer(NAMES, "p", b"handle")
    asking = caller(stack, there, auth_key=ours)
    for _ in range(2):
        with pytest.raises(ConfigError, match=text) as failure:
            asking.find(NAMES, within(TIMEOUT_S))
        assert failure.value.context["field"] == "auth_key"
    assert caller(stack, there, auth_key=theirs).find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_another_phase_is_told(stack: ExitStack) -> None:
    there = desk(stack, phase="denoiser", auth_key="secret")
    there.offer(NAMES, "p", b"handle")
    with pytest.raises(ConfigError, match="hands over 'denoiser', and this role wants 'encoder'") as failure:
        caller(stack, there, auth_key="secret").find(NAMES, within(TIMEOUT_S))
    assert failure.value.context["field"] == "bootstrap_addr"


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("newer", ["desk", "caller"])
def test_another_version_is_told(stack: ExitStack, key: str | None, newer: str) -> None:
    there = Desk("127.0.0.1", 0, phase="encoder", auth_key=key)
    stack.callback(there.close)
    if newer == "desk":
        there._seal = seal_for(key, 2)
    there.start()
    asking = caller(stack, there, auth_key=key)
    if newer == "caller":
        asking._seal = seal_for(key, 2)
    with pytest.raises(VersionError, match="install the same Moonrelay on both"):
        asking.find(NAMES, within(TIMEOUT_S))


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6(stack: ExitStack, host: str) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as exc:
        if exc.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise
        pytest.skip("this machine has no IPv6 loopback")
    there = desk(stack, host)
    there.offer(NAMES, "p", b"handle")
    assert there.address[0] == "::1"
    assert caller(stack, there).find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_a_name_of_this_machine_may_be_bound_and_dialled(stack: ExitStack) -> None:
    there = desk(stack, "localhost")
    there.offer(NAMES, "p", b"handle")
    assert there.address[0] == "localhost"
    assert caller(stack, there).find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_a_port_that_is_taken_is_told(stack: ExitStack) -> None:
    there = desk(stack)
    port = there.address[1]
    second = Desk("127.0.0.1", port, phase="encoder")
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is taken") as failure:
        second.start()
    for key in ("rendezvous_port", "sender_engine_rank", "bootstrap_room"):
        assert key in str(failure.value)
    there.close()
    second.start()  # it can be tried again
    assert second.address == ("127.0.0.1", port)
    second.close()


@pytest.mark.parametrize(
    ("host", "text"),
    [("192.0.2.1", "cannot be bound"), ("no-such-host.invalid", "cannot be resolved"), ("tcp://127.0.0.1", "no host")],
)
def test_an_address_that_is_not_ours_is_told(host: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as failure:
        Desk(host, 0, phase="encoder").start()
    assert failure.value.context["field"] == "local_hostname"


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_told(port: int) -> None:
    with pytest.raises(ConfigError, match="rendezvous_port"):
        Desk("127.0.0.1", port, phase="encoder")
    with pytest.raises(ConfigError, match="rendezvous_port"):
        Caller([("127.0.0.1", port)], phase="encoder")


@pytest.mark.parametrize(
    "wrong",
    [
        {"addresses": []},
        {"addresses": [("127.0.0.1", 0)]},
        {"addresses": [("", 5000)]},
        {"phase": ""},
        {"auth_key": ""},
        {"retry_s": 0.0},
        {"peer_timeout_s": float("nan")},
        {"peer_timeout_s": float("inf")},
    ],
)
def test_a_caller_with_wrong_settings_is_refused(wrong: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"addresses": [("127.0.0.1", 5000)], "phase": "encoder", **wrong}
    with pytest.raises(ConfigError):
        Caller(settings.pop("addresses"), **settings)


def test_two_desks_are_both_asked(stack: ExitStack) -> None:
    one, two = desk(stack), desk(stack)
    asking = caller(stack, one, two)
    two.offer(NAMES, "p", b"of two")
    assert asking.find(NAMES, within(TIMEOUT_S)) == b"of two"
    until_waited_for(one, 0)
    finding = Finding(asking, "same:y")
    until_waited_for(one)
    until_waited_for(two)
    one.offer(("same:y",), "q", b"of one")
    assert finding.result() == b"of one"
    until_waited_for(two, 0)


def test_what_a_second_desk_gave_too_is_given_back(stack: ExitStack) -> None:
    desks = [desk(stack), desk(stack)]
    asking = caller(stack, *desks)
    for number in range(20):
        for there in desks:
            there.offer((f"task:{number}",), f"p{number}", b"handle")
        assert asking.find((f"task:{number}",), within(TIMEOUT_S)) == b"handle"

    def given() -> int:
        return sum(offer.given for there in desks for offer in there._book._offers)

    until(lambda: given() == 20, "each find has one offer")
    asking.close()
    # The other desk may hear the last question only now, and that it is settled right after.
    until(lambda: given() == 20, "each find has one offer, also once the caller is closed")


def test_one_of_two_desks_that_closes_leaves_the_other(stack: ExitStack) -> None:
    one, two = desk(stack), desk(stack)
    asking = caller(stack, one, two, peer_timeout_s=300.0)
    finding = Finding(asking, *NAMES)
    until_waited_for(one)
    until_waited_for(two)
    one.close()
    two.offer(NAMES, "p", b"handle")
    assert finding.result() == b"handle"


def test_a_desk_that_closes_tells_who_waits(stack: ExitStack) -> None:
    asking: Caller | None = None
    for _ in range(30):  # its last words were lost once in thirty
        there = desk(stack)
        asking = caller(stack, there, peer_timeout_s=300.0)
        finding = Finding(asking, *NAMES)
        until_waited_for(there)
        there.close()
        with pytest.raises(PeerLost, match="closes"):
            finding.result()


def test_finds_in_several_threads_are_served_together(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there)
    findings = [Finding(asking, f"task:{number}") for number in range(6)]
    until_waited_for(there, 6)
    for number in reversed(range(6)):
        there.offer((f"task:{number}",), f"p{number}", b"%d" % number)
    assert [finding.result() for finding in findings] == [b"%d" % number for number in range(6)]
    assert len(asking._idle) <= 4
    assert not asking._busy


def test_sockets_are_used_again(stack: ExitStack) -> None:
    there = desk(stack)
    there.offer(NAMES, "p", b"handle")
    asking = caller(stack, there)
    asking.find(NAMES, within(TIMEOUT_S))
    lines = asking._idle[0]
    with pytest.raises(DeadlineExceeded):
        asking.find(("task:none",), within(0.2))
    asking.find(NAMES, within(TIMEOUT_S))
    assert asking._idle == [lines]


def test_a_find_that_is_forgotten_is_remembered_by_nobody(stack: ExitStack) -> None:
    there = desk(stack)
    there.offer(NAMES, "p", b"handle")
    asking = caller(stack, there)
    asking.find(NAMES, within(TIMEOUT_S))
    assert len(there._book._given) == len(asking._tokens) == 1
    asking.forget(NAMES)
    until(lambda: not there._book._given, "the desk forgot")
    assert not asking._tokens
    asking.forget(NAMES)
    asking.forget(("never asked for",))


def test_closing_a_caller_ends_its_finds(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there, retry_s=1000.0, peer_timeout_s=3000.0)
    findings = [Finding(asking, "same:x", timeout_s=3000.0) for _ in range(2)]
    until_waited_for(there, 2)
    asking.close()
    for finding in findings:
        with pytest.raises(ClosedError):
            finding.result()
    until_waited_for(there, 0)
    with pytest.raises(ClosedError):
        asking.find(NAMES, within(TIMEOUT_S))
    asking.forget(NAMES)
    asking.close()


def test_a_closed_desk_says_so(stack: ExitStack) -> None:
    there = desk(stack)
    there.close()
    there.close()
    for call in (
        there.start,
        lambda: there.working(NAMES),
        lambda: there.offer(NAMES, "p", b"handle"),
        lambda: there.refuse(NAMES, "aborted", "late"),
    ):
        with pytest.raises(ClosedError):
            call()
    there.done(NAMES)
    there.withdraw("p")


def test_a_desk_that_was_not_started_has_no_address_and_closes() -> None:
    there = Desk("127.0.0.1", 0, phase="encoder")
    with pytest.raises(ClosedError):
        _ = there.address
    there.offer(NAMES, "p", b"handle")
    there.close()


def test_what_was_said_before_the_start_holds(stack: ExitStack) -> None:
    there = Desk("127.0.0.1", 0, phase="encoder")
    stack.callback(there.close)
    there.offer(NAMES, "p", b"handle")
    there.start()
    there.start()
    assert caller(stack, there).find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_unusable_names_are_refused_everywhere(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there)
    for call in (
        lambda: there.working(()),
        lambda: there.offer((), "p", b""),
        lambda: there.refuse((), "aborted", ""),
        lambda: there.done(()),
        lambda: asking.find((), within(1.0)),
    ):
        with pytest.raises(ConfigError, match="1 to 8 names"):
            call()


def test_failures_are_kept_on_the_desks_clock(stack: ExitStack) -> None:
    clock = ManualClock()
    there = desk(stack, clock=clock, keep_failures_s=10.0)
    there.refuse(("task:1",), "aborted", "kept")
    there.refuse(("task:2",), "aborted", "too old")
    clock.advance(9.0)
    with pytest.raises(Aborted):
        caller(stack, there).find(("task:1",), within(TIMEOUT_S))
    clock.advance(1.0)
    with pytest.raises(DeadlineExceeded):
        caller(stack, there).find(("task:2",), within(0.3))


STRANGE = [
    [b""],
    [b"\0" * 100],
    [b"MR"],
    [b"MR\x01\x03" + b"\xff" * 200],
    [b"MR\x63\x03 of another version"],
    [b"one", b"two", b"three"],
    [b"x" * (3 << 20)],
]


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_strangers_frames_harm_nothing(stack: ExitStack, caplog: pytest.LogCaptureFixture, key: str | None) -> None:
    there = desk(stack, auth_key=key)
    finding = Finding(caller(stack, there, auth_key=key), *NAMES)
    until_waited_for(there)
    context = zmq.Context()
    stack.callback(context.term)
    with caplog.at_level(logging.WARNING), context.socket(zmq.DEALER) as stranger:
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{there.address[1]}")
        for _ in range(40):
            for parts in STRANGE:
                stranger.send_multipart(parts)
        seal = seal_for(key)
        # With the key, and still wrong: out of bounds, and what only a desk says.
        stranger.send(pack_question(seal, b"s" * 16, Want(names=("n" * 513,), phase="encoder", wait_ms=1)))
        stranger.send(pack_answer(seal, b"s" * 16, b"t" * 16, Here(handle=b"forged")))
        stranger.send(pack_question(seal, b"s" * 16, Want(names=("same:last",), phase="encoder", wait_ms=60_000)))
        until_waited_for(there, 2)
    assert there._complaints.count("malformed") >= 40 * 4 + 2
    # Each reason at most once per doubling.
    assert 0 < len(caplog.records) < 40
    there.offer(NAMES, "p", b"handle")
    assert finding.result() == b"handle"


def test_a_frame_that_is_too_large_ends_its_connection_only(stack: ExitStack) -> None:
    there = desk(stack)
    context = zmq.Context()
    stack.callback(context.term)
    with context.socket(zmq.DEALER) as stranger, stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        stranger.set(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{there.address[1]}")
        stranger.send(b"x" * (5 << 20))
        assert monitor.poll(TIMEOUT_S * 1000)
        stranger.disable_monitor()
    there.offer(NAMES, "p", b"handle")
    assert caller(stack, there).find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_no_zeromq_at_all_is_a_stranger_too(stack: ExitStack) -> None:
    there = desk(stack)
    with socket.create_connection(there.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: desk\r\n\r\n")
        there.offer(NAMES, "p", b"handle")
        assert caller(stack, there).find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_something_else_at_the_desks_address_is_no_desk(stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    asking = Caller([("127.0.0.1", listener.getsockname()[1])], phase="encoder", peer_timeout_s=0.5)
    stack.callback(asking.close)
    with pytest.raises(PeerLost, match="does not answer"):
        asking.find(NAMES, within(TIMEOUT_S))
    assert not asking._idle  # the connection may be dead without knowing it: the next find dials anew


def test_a_forged_answer_is_dropped(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    context = zmq.Context()
    stack.callback(context.term)
    forger = stack.enter_context(context.socket(zmq.ROUTER))
    forger.set(zmq.LINGER, 0)
    port = forger.bind_to_random_port("tcp://127.0.0.1")
    asking = Caller([("127.0.0.1", port)], phase="encoder", auth_key="secret", peer_timeout_s=1.0, retry_s=0.1)
    stack.callback(asking.close)
    finding = Finding(asking, *NAMES)
    route, question = forger.recv_multipart()
    token = seal_for("secret").unpack(question).sender
    for seal in (seal_for(None), seal_for("guessed")):
        forger.send_multipart([route, pack_answer(seal, b"f" * 16, token, Here(handle=b"forged"))])
    forger.send_multipart([route, b"two", b"parts"])
    with pytest.raises(PeerLost, match="does not answer"):
        finding.result()
    assert asking._complaints.count("malformed") == 3


def test_a_defect_of_the_desk_does_not_end_it(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    there = desk(stack)
    right = there._book.want
    failing = [True]

    def want(*arguments: Any) -> Any:
        if failing:
            failing.pop()
            message = "a defect"
            raise RuntimeError(message)
        return right(*arguments)

    monkeypatch.setattr(there._book, "want", want)
    there.offer(NAMES, "p", b"handle")
    assert caller(stack, there).find(NAMES, within(TIMEOUT_S)) == b"handle"
    assert there._complaints.count("a defect of the desk") == 1


def test_a_caller_remembers_a_bounded_number_of_finds(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_caller, "_TOKENS_KEPT", 3)
    there = desk(stack)
    asking = caller(stack, there)
    for number in range(6):
        there.offer((f"task:{number}",), f"p{number}", b"handle")
        asking.find((f"task:{number}",), within(TIMEOUT_S))
    assert list(asking._tokens) == [("task:3",), ("task:4",), ("task:5",)]


def test_three_hundred_rounds_leave_nothing(stack: ExitStack) -> None:
    there = desk(stack, auth_key="secret")
    asking = caller(stack, there, auth_key="secret")

    def round_(number: int) -> None:
        names = (f"task:{number}", "same:x")
        there.working(names)
        there.offer(names, f"p{number}", b"%d" % number)
        assert asking.find(names, within(TIMEOUT_S)) == b"%d" % number
        there.withdraw(f"p{number}")
        asking.forget(names)
        if number % 10 == 0:
            there.refuse((f"failed:{number}",), "aborted", "x")
            with pytest.raises(Aborted):
                asking.find((f"failed:{number}",), within(TIMEOUT_S))

    for number in range(1, 11):
        round_(number)
    before = held()
    for number in range(11, 311):
        round_(number)
    # A connection's end takes the network's threads a moment.
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), f"{before}, not {held()}")
    book = there._book
    until(lambda: not book._given, "the desk forgot all finds")
    assert [len(shelf) for shelf in (book._offers, book._works, book._waiters)] == [0, 0, 0]
    assert set(book._offers._by_name) | set(book._works._by_name) | set(book._waiters._by_name) == set()


def test_opening_and_closing_leaves_nothing() -> None:
    def once() -> None:
        with ExitStack() as stack:
            one, two = desk(stack), desk(stack)
            asking = caller(stack, one, two)
            one.offer(NAMES, "p", b"handle")
            asking.find(NAMES, within(TIMEOUT_S))
            with pytest.raises(MoonrelayError):
                caller(stack, one, two, phase="denoiser").find(NAMES, within(TIMEOUT_S))
            with pytest.raises(ConfigError):
                desk(stack, port=one.address[1])

    once()
    threads = threading.active_count()
    fds, tasks = held()
    for _ in range(20):
        once()
    assert threading.active_count() == threads
    until(lambda: held() == (fds, tasks), f"{fds} descriptors and {tasks} tasks, not {held()}")


def test_one_thread_for_a_desk_and_none_for_a_caller(stack: ExitStack) -> None:
    before = set(threading.enumerate())
    there = desk(stack)
    there.offer(NAMES, "p", b"handle")
    caller(stack, there).find(NAMES, within(TIMEOUT_S))
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    assert thread.name == "moonrelay-desk-encoder"
