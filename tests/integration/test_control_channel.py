"""The peer channel on loopback: requests, loss, repetition, replay, refusal, pushes, closing."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonrelay.config import ControlConfig
from moonrelay.control import PeerChannel
from moonrelay.control.messages import Ack, Done, Nack, Pending, Ping, Progressed, Query, Renew
from moonrelay.control.wire import Dialect, Frame, Kind, Seal
from moonrelay.errors import (
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    VersionError,
    WireError,
)
from moonrelay.handle import ControlAddress
from support.control_peers import CLOCK, PUSH, Owner, Proxy, answer, channel, deadline

ACK = Ack(payload_id="p", token=1)
QUERY = Query(payload_id="p")
KEYS = pytest.mark.parametrize("key", [None, "secret"])


@KEYS
def test_request_reply_and_failure(key: str | None) -> None:
    owner = Owner()
    with channel(owner, auth_key=key) as there, channel(auth_key=key) as here:
        assert here.request(there.address, ACK, deadline()) == Done()
        assert here.request(there.address, Ping(), deadline()) == Done()
        with pytest.raises(LeaseLost, match="no such claim") as caught:
            here.request(there.address, Ack(payload_id="p", token=0), deadline())
        assert caught.value.context["remote"] is True
        assert [type(request) for request in owner.handled] == [Ack, Ack]
        assert owner.peers[0].nonce == here.address.nonce


def test_a_defect_of_the_handler_reaches_the_asker_and_stops_nothing() -> None:
    with channel(Owner()) as there, channel() as here:
        with pytest.raises(MoonrelayError, match="ValueError: a defect of the handler"):
            here.request(there.address, Ack(payload_id="p", token=-1), deadline())
        assert here.request(there.address, ACK, deadline()) == Done()


def test_a_channel_without_handler_answers_only_pings() -> None:
    with channel() as there, channel() as here:
        assert here.request(there.address, Ping(), deadline()) == Done()
        with pytest.raises(MoonrelayError, match="answers no requests"):
            here.request(there.address, ACK, deadline())


def test_a_channel_may_ask_itself() -> None:
    with channel(Owner()) as both:
        assert both.request(both.address, ACK, deadline()) == Done()


def test_ipv6() -> None:
    config = ControlConfig(bind_host="::1", retry_s=0.05)
    with channel(Owner(), config) as there, channel(config=config) as here:
        assert there.address.address.startswith("tcp://[::1]:")
        assert here.request(there.address, ACK, deadline()) == Done()


def test_an_ipv4_channel_asks_an_ipv6_one() -> None:
    with channel(Owner(), ControlConfig(bind_host="::1")) as there, channel() as here:
        assert here.request(there.address, ACK, deadline()) == Done()


# Deferred replies.


def test_a_deferred_reply_comes_from_any_thread_and_once() -> None:
    owner = Owner()
    with channel(owner) as there, channel() as here:
        replies: list[object] = []
        thread = threading.Thread(target=lambda: replies.append(here.request(there.address, QUERY, deadline())))
        thread.start()
        (respond,) = owner.wait_deferred(1)
        assert respond.waiting
        respond.reply(Pending())
        assert respond.waiting
        respond.reply(answer(3))
        thread.join(10.0)
        assert replies == [answer(3)]
        assert not respond.waiting
        with pytest.raises(MoonrelayError, match="answered before"):
            respond.reply(answer(4))
        here.request(there.address, ACK, deadline())  # settles the first
        respond.reply(answer(5))  # nobody waits any more


def test_a_living_peer_that_defers_is_not_lost_and_the_deadline_says_so() -> None:
    config = ControlConfig(retry_s=0.05, peer_timeout_s=0.4)
    with channel(Owner(), config) as there, channel(config=config) as here:
        with pytest.raises(DeadlineExceeded, match="the peer is alive") as caught:
            here.request(there.address, QUERY, deadline(1.2))
        assert caught.value.context["pending"] is True


def test_pending_is_returned_on_request() -> None:
    with channel(Owner()) as there, channel() as here:
        assert here.request(there.address, QUERY, deadline(), keep_waiting=False) == Pending()


def test_one_slow_request_holds_nobody_else() -> None:
    owner = Owner()
    with channel(owner) as there, channel() as here:
        got: list[object] = []
        slow = [
            threading.Thread(target=lambda: got.append(here.request(there.address, QUERY, deadline(20.0))))
            for _ in range(4)
        ]
        for thread in slow:
            thread.start()
        owner.wait_deferred(4)
        for _ in range(50):
            assert here.request(there.address, ACK, deadline()) == Done()
        for number, respond in enumerate(owner.wait_deferred(4)):
            respond.reply(answer(number))
        for thread in slow:
            thread.join(10.0)
        assert sorted(reply.acks for reply in got) == [0, 1, 2, 3]  # type: ignore[attr-defined]
        assert len(owner.handled) == 54


def test_many_threads_share_a_link_and_each_gets_its_own_answer() -> None:
    class Echo(Owner):
        def handle(self, peer, request, respond) -> None:  # type: ignore[no-untyped-def]
            respond.reply(answer(request.token))

    with channel(Echo(), ControlConfig()) as there, channel(config=ControlConfig()) as here:
        wrong: list[object] = []

        def ask(first: int) -> None:
            for token in range(first, first + 100):
                reply = here.request(there.address, Renew(payload_id="p", token=token), deadline(30.0))
                if reply != answer(token):
                    wrong.append((token, reply))

        threads = [threading.Thread(target=ask, args=(number * 1000,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert wrong == []
        assert len(here._links) == 1


# Loss, repetition, order, replay.


def losing(kind: type, direction: str, times: int) -> Callable[[str, object], bool]:
    left = Counter({"n": times})

    def drop(where: str, message: object) -> bool:
        if where != direction or not isinstance(message, kind) or left["n"] == 0:
            return False
        left["n"] -= 1
        return True

    return drop


@pytest.mark.parametrize(
    ("side", "kind", "direction"),
    [
        ("here", Ack, "send"),
        ("there", Ack, "receive"),
        ("there", Done, "send"),
        ("here", Done, "receive"),
    ],
)
def test_a_lost_message_is_healed_and_acts_once(side: str, kind: type, direction: str) -> None:
    owner = Owner()
    drops = {side: losing(kind, direction, 3)}
    with channel(owner, drop=drops.get("there")) as there, channel(drop=drops.get("here")) as here:
        assert here.request(there.address, ACK, deadline()) == Done()
        assert owner.handled == [ACK]


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_a_lost_handshake_is_healed(direction: str) -> None:
    lost = Counter[str]()

    def lose_first(where: str, data: bytes) -> list[bytes]:
        lost[where] += 1
        return [] if where == direction and lost[where] <= 2 else [data]

    with channel(Owner()) as there, channel() as here, Proxy(there.address, lose_first) as proxy:
        assert here.request(proxy.address, ACK, deadline()) == Done()


@KEYS
def test_duplicates_act_once(key: str | None) -> None:
    owner = Owner()
    with channel(owner, auth_key=key) as there, channel(auth_key=key) as here:
        with Proxy(there.address, lambda _, data: [data, data, data]) as proxy:
            for token in range(1, 20):
                assert here.request(proxy.address, Ack(payload_id="p", token=token), deadline()) == Done()
        assert [request.token for request in owner.handled] == list(range(1, 20))  # type: ignore[union-attr]


def test_reordered_messages_act_once_and_find_their_askers() -> None:
    held: list[bytes] = []

    def swap(where: str, data: bytes) -> list[bytes]:
        """Pass each pair of requests in reverse order; a repeated one comes alone."""
        if where == "to_client" or data[3] != Kind.REQUEST:
            return [data]
        held.append(data)
        if len(held) < 2:
            return []
        pair = [held[1], held[0]]
        held.clear()
        return pair

    owner = Owner()
    with channel(owner) as there, channel() as here, Proxy(there.address, swap) as proxy:
        wrong: list[BaseException] = []

        def ask(first: int) -> None:
            try:
                for token in range(first, first + 20):
                    assert here.request(proxy.address, Ack(payload_id="p", token=token), deadline()) == Done()
            except BaseException as exc:
                wrong.append(exc)

        threads = [threading.Thread(target=ask, args=(1 + 1000 * number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert wrong == []
        assert set(Counter(request.token for request in owner.handled).values()) == {1}  # type: ignore[union-attr]


@KEYS
def test_a_replayed_recording_has_no_second_effect(key: str | None) -> None:
    owner = Owner()
    with channel(owner, auth_key=key) as there, channel(auth_key=key) as here, Proxy(there.address) as proxy:
        for token in range(1, 6):
            here.request(proxy.address, Ack(payload_id="p", token=token), deadline())
        for data in [data for where, data in proxy.seen if where == "to_server"]:
            proxy.replay(data)
        here.request(proxy.address, Ack(payload_id="p", token=99), deadline())
        assert [request.token for request in owner.handled] == [1, 2, 3, 4, 5, 99]  # type: ignore[union-attr]


def test_a_recording_is_worthless_after_the_server_forgot_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonrelay.control.server.MAX_SESSIONS", 1)
    owner = Owner()
    with channel(owner, auth_key="k") as there, channel(auth_key="k") as here, Proxy(there.address) as proxy:
        here.request(proxy.address, ACK, deadline())
        with channel(auth_key="k") as other:
            other.request(there.address, NACK, deadline())
        for data in [data for where, data in proxy.seen if where == "to_server"]:
            proxy.replay(data)
        # The client whose session was forgotten says hello again by itself.
        assert here.request(proxy.address, Ack(payload_id="p", token=2), deadline()) == Done()
        assert owner.handled == [ACK, NACK, Ack(payload_id="p", token=2)]


NACK = Nack(payload_id="p", token=1)


def test_replies_are_kept_only_while_their_askers_may_ask_again() -> None:
    with channel(Owner()) as there, channel() as here:
        for token in range(1, 300):
            here.request(there.address, Ack(payload_id="p", token=token), deadline())
        (session,) = there._server._sessions.values()
        assert len(session.unsettled) <= 2


# Pushes.


class Inbox:
    def __init__(self) -> None:
        self.got: list[tuple[ControlAddress, Progressed]] = []
        self.changed = threading.Condition()

    def __call__(self, peer: ControlAddress, message: Progressed) -> None:
        with self.changed:
            self.got.append((peer, message))
            self.changed.notify_all()

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.got) >= count, timeout=10.0)


@KEYS
def test_pushes_reach_the_reader_also_while_it_asks_nothing(key: str | None) -> None:
    owner, inbox = Owner(), Inbox()
    with channel(owner, auth_key=key) as there, channel(auth_key=key, on_push=inbox) as here:
        here.request(there.address, ACK, deadline())
        for _ in range(3):
            assert there.push(owner.peers[0].route, PUSH)
        inbox.wait(3)
        assert inbox.got == [(there.address, PUSH)] * 3
        assert not there.push(b"nobody", PUSH)


def test_pushes_reach_the_reader_while_it_waits_for_an_answer() -> None:
    owner, inbox = Owner(), Inbox()
    with channel(owner) as there, channel(on_push=inbox) as here:
        thread = threading.Thread(target=here.request, args=(there.address, QUERY, deadline()))
        thread.start()
        (respond,) = owner.wait_deferred(1)
        there.push(owner.peers[0].route, PUSH)
        inbox.wait(1)
        respond.reply(answer())
        thread.join(10.0)


def test_a_replayed_push_is_told_once() -> None:
    owner, inbox = Owner(), Inbox()

    def twice(where: str, data: bytes) -> list[bytes]:
        return [data, data] if data[3] == Kind.PUSH else [data]

    with channel(owner) as there, channel(on_push=inbox) as here, Proxy(there.address, twice) as proxy:
        here.request(proxy.address, ACK, deadline())
        there.push(owner.peers[0].route, PUSH)
        here.request(proxy.address, ACK, deadline())
        there.push(owner.peers[0].route, PUSH)
        inbox.wait(2)
        here.request(proxy.address, ACK, deadline())
        assert len(inbox.got) == 2


def test_a_failing_push_callback_stops_nothing() -> None:
    owner = Owner()
    called = threading.Event()

    def fail(_peer: ControlAddress, _message: Progressed) -> None:
        called.set()
        raise ValueError("boom")

    with channel(owner) as there, channel(on_push=fail) as here:
        here.request(there.address, ACK, deadline())
        there.push(owner.peers[0].route, PUSH)
        assert called.wait(10.0)
        assert here.request(there.address, ACK, deadline()) == Done()


def test_a_request_from_the_io_thread_is_refused() -> None:
    owner = Owner()
    told: list[BaseException] = []
    done = threading.Event()

    with channel(owner) as there:

        def ask(peer: ControlAddress, _message: Progressed) -> None:
            try:
                here.request(peer, ACK, deadline())
            except MoonrelayError as exc:
                told.append(exc)
            done.set()

        with channel(on_push=ask) as here:
            here.request(there.address, ACK, deadline())
            there.push(owner.peers[0].route, PUSH)
            assert done.wait(10.0)
    assert "wait for itself" in str(told[0])


# Refusals: each is a typed error long before the deadline.


@pytest.mark.parametrize(("ours", "theirs"), [("a", "b"), (None, "b"), ("a", None)])
def test_a_wrong_key_is_a_clear_error(ours: str | None, theirs: str | None, caplog: pytest.LogCaptureFixture) -> None:
    owner = Owner()
    with channel(owner, auth_key=theirs) as there, channel(auth_key=ours) as here:
        limit = deadline(60.0)
        with pytest.raises(ConfigError, match="wrong auth_key"):
            here.request(there.address, ACK, limit)
        assert (limit.remaining() or 0.0) > 50.0
        assert owner.handled == []
        assert "dropped a message, auth_" in caplog.text
        with channel(auth_key=theirs) as friend:
            assert friend.request(there.address, ACK, deadline()) == Done()


@pytest.mark.parametrize("versions", [(1, 2), (2, 1)])
def test_another_version_is_refused_naming_both(versions: tuple[int, int]) -> None:
    ours, theirs = versions
    owner = Owner()
    with channel(owner, dialect=Dialect(version=theirs)) as there, channel(dialect=Dialect(version=ours)) as here:
        with pytest.raises(VersionError, match=f"protocol {theirs}, this side {ours}"):
            here.request(there.address, ACK, deadline(60.0))
        assert owner.handled == []


def test_an_unknown_required_feature_is_refused_and_an_optional_one_ignored() -> None:
    with channel(Owner(), dialect=Dialect(known=("zip",))) as there:
        with channel(dialect=Dialect(required=("zip",), optional=("zap",))) as here:
            assert here.request(there.address, ACK, deadline()) == Done()
        with channel(dialect=Dialect(required=("zap",))) as here:
            with pytest.raises(VersionError, match="'zap'"):
                here.request(there.address, ACK, deadline(60.0))


@KEYS
def test_another_process_at_the_address_is_not_the_peer(key: str | None) -> None:
    owner = Owner()
    with channel(owner, auth_key=key) as there, channel(auth_key=key) as here:
        stale = ControlAddress(address=there.address.address, nonce="0" * 32)
        limit = deadline(60.0)
        with pytest.raises(PeerLost, match="another process"):
            here.request(stale, ACK, limit)
        assert (limit.remaining() or 0.0) > 50.0
        assert owner.handled == []
        assert here.request(there.address, ACK, deadline()) == Done()


def test_a_peer_reborn_at_the_same_port_with_the_link_still_open_is_lost() -> None:
    first = channel(Owner())
    first.start()
    port = int(first.address.address.rsplit(":", 1)[1])
    with channel() as here:
        here.request(first.address, ACK, deadline())
        first.close()
        with channel(Owner(), port=port) as reborn:
            with pytest.raises(PeerLost):
                here.request(first.address, ACK, deadline())
            assert here.request(reborn.address, ACK, deadline()) == Done()


@pytest.mark.parametrize(
    "address",
    ["", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "ipc:///x", "tcp://host:5", "tcp://*:5"],
)
def test_a_malformed_address_is_a_wire_error(address: str) -> None:
    with channel() as here, pytest.raises(WireError, match="malformed"):
        here.request(ControlAddress(address=address, nonce="0" * 32), ACK, deadline())


@pytest.mark.parametrize("nonce", ["", "xyz", "0" * 31, "G" * 32])
def test_a_malformed_nonce_is_a_wire_error(nonce: str) -> None:
    with channel() as here, pytest.raises(WireError, match="malformed"):
        here.request(ControlAddress(address="tcp://127.0.0.1:5", nonce=nonce), ACK, deadline())


def test_too_large_a_request_is_refused_here_and_a_reply_there() -> None:
    class Large(Owner):
        def handle(self, peer, request, respond) -> None:  # type: ignore[no-untyped-def]
            respond.reply(answer().__class__(**{**_fields(answer()), "reason": "x" * (5 << 20)}))

    with channel(Large()) as there, channel() as here:
        with pytest.raises(WireError, match="exceeds"):
            here.request(there.address, Query(payload_id="x" * (5 << 20)), deadline())
        with pytest.raises(WireError, match="exceeds"):
            here.request(there.address, ACK, deadline())


def _fields(message: object) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}  # type: ignore[attr-defined]


# Loss of the peer.


def test_a_refused_connection_is_lost_in_about_a_second() -> None:
    with channel() as gone:
        address = gone.address
    with channel(config=ControlConfig(peer_timeout_s=60.0)) as here:
        limit = deadline(60.0)
        with pytest.raises(PeerLost, match="refuses"):
            here.request(address, ACK, limit)
        assert (limit.remaining() or 0.0) > 45.0


def test_a_silent_peer_is_lost_after_the_timeout() -> None:
    with channel(Owner()) as there, channel() as here:
        with Proxy(there.address, lambda _, __: []) as proxy:
            with pytest.raises(PeerLost, match="no sign of life for 2 s"):
                here.request(proxy.address, ACK, deadline(60.0))


def test_a_port_that_speaks_something_else_is_lost() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, channel() as here:
        stop = threading.Event()

        def slam() -> None:
            server.settimeout(0.1)
            while not stop.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=slam)
        thread.start()
        try:
            port = server.getsockname()[1]
            with pytest.raises(PeerLost):
                here.request(ControlAddress(address=f"tcp://127.0.0.1:{port}", nonce="0" * 32), ACK, deadline(30.0))
        finally:
            stop.set()
            thread.join(10.0)


def test_a_short_deadline_is_kept() -> None:
    with channel(Owner()) as there, channel() as here:
        with Proxy(there.address, lambda _, __: []) as proxy:
            with pytest.raises(DeadlineExceeded, match="silent"):
                here.request(proxy.address, ACK, deadline(0.2))


def test_an_unused_link_to_a_peer_that_left_is_forgotten() -> None:
    there = channel(Owner())
    there.start()
    with channel() as here:
        here.request(there.address, ACK, deadline())
        there.close()
        done = threading.Event()
        for _ in range(100):
            if not here._links and not here._retiring:
                done.set()
                break
            threading.Event().wait(0.1)
        assert done.is_set(), "the link stays for ever"


def test_any_start_order() -> None:
    import socket

    with socket.socket() as reserve:
        reserve.bind(("127.0.0.1", 0))
        port = reserve.getsockname()[1]
    nonce = "ab" * 16
    replies: list[object] = []
    with channel() as here:
        address = ControlAddress(address=f"tcp://127.0.0.1:{port}", nonce=nonce)
        thread = threading.Thread(target=lambda: replies.append(here.request(address, ACK, deadline())))
        thread.start()
        threading.Event().wait(0.3)
        with channel(Owner(), port=port, nonce=nonce):
            thread.join(20.0)
    assert replies == [Done()]


# Garbage.


@KEYS
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_garbage_never_stops_the_loop(key: str | None, data: st.DataObject) -> None:
    with channel(Owner(), auth_key=key) as there, channel(auth_key=key) as here:
        seal = Seal(key, Dialect())
        ours = bytes.fromhex(there.address.nonce)
        frames = st.builds(
            lambda kind, seq, session, body, floor: seal.pack(Frame(kind, seq, b"c" * 16, ours, session, body, floor)),
            st.sampled_from(Kind),
            st.integers(0, 2**64 - 1),
            st.binary(min_size=8, max_size=8),
            st.binary(max_size=60),
            st.integers(0, 2**64 - 1),
        )
        raw = st.one_of(
            st.binary(max_size=120),
            st.binary(max_size=120).map(lambda tail: b"MR\x01" + tail),
            frames,
            st.tuples(frames, st.integers(0, 90), st.integers(0, 255)).map(
                lambda t: t[0][: t[1]] + bytes([t[2]]) + t[0][t[1] + 1 :]
            ),
        )
        messages = data.draw(st.lists(st.lists(raw, min_size=1, max_size=3), min_size=1, max_size=12))
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 1000)
            stranger.connect(there.address.address)
            for parts in messages:
                stranger.send_multipart(parts)
            assert here.request(there.address, ACK, deadline()) == Done()
        assert here.request(there.address, ACK, deadline()) == Done()
        assert there._failure is None


def test_garbage_from_a_server_never_stops_the_client() -> None:
    def pollute(where: str, data: bytes) -> list[bytes]:
        if where == "to_server":
            return [data]
        return [b"", b"MR", os.urandom(90), data[:-3], data[:3] + b"\x07" + data[4:], data]

    with channel(Owner(), auth_key="k") as there, channel(auth_key="k") as here:
        with Proxy(there.address, pollute) as proxy:
            for _ in range(10):
                assert here.request(proxy.address, ACK, deadline()) == Done()


def test_an_oversized_frame_ends_only_its_own_connection() -> None:
    with channel(Owner()) as there, channel() as here:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.set(zmq.LINGER, 0)
            stranger.connect(there.address.address)
            stranger.send(bytes(8 << 20))
            assert here.request(there.address, ACK, deadline()) == Done()
            assert not stranger.poll(200)


# Closing.


def test_close_wakes_whoever_waits() -> None:
    owner = Owner()
    with channel(owner) as there:
        here = channel()
        here.start()
        told: list[BaseException] = []

        def ask() -> None:
            try:
                here.request(there.address, QUERY, deadline(60.0))
            except ClosedError as exc:
                told.append(exc)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        owner.wait_deferred(3)
        here.close()
        for thread in threads:
            thread.join(10.0)
        assert len(told) == 3
        with pytest.raises(ClosedError):
            here.request(there.address, ACK, deadline())
        with pytest.raises(ClosedError):
            here.start()
        assert not here.push(b"x", PUSH)
        owner.deferred[0].reply(answer())  # the asker is gone: nothing happens


def test_close_is_idempotent_also_half_built() -> None:
    made = channel()
    made.close()
    made.close()
    with pytest.raises(ClosedError):
        made.start()
    with pytest.raises(ClosedError):
        _ = made.address
    unbindable = channel(config=ControlConfig(bind_host="192.0.2.1"))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        unbindable.start()
    unbindable.close()
    with channel() as here, pytest.raises(ClosedError, match="not started"):
        channel().request(here.address, ACK, deadline())


@pytest.mark.parametrize(
    ("config", "more", "field"),
    [
        (ControlConfig(bind_host="localhost"), {}, "bind_host"),
        (ControlConfig(bind_host="0.0.0.0"), {}, "advertise_host"),
        (ControlConfig(), {"advertise_host": "somewhere"}, "advertise_host"),
        (ControlConfig(), {"nonce": "short"}, "nonce"),
        (ControlConfig(), {"auth_key": ""}, "auth_key"),
    ],
)
def test_bad_settings_are_refused_by_name(config: ControlConfig, more: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PeerChannel(config, clock=CLOCK, **{"auth_key": None, **more})  # type: ignore[arg-type]
    assert caught.value.context["field"] == field


def test_a_wildcard_is_bound_and_another_address_advertised() -> None:
    with channel(Owner(), ControlConfig(bind_host="0.0.0.0"), advertise_host="127.0.0.1") as there, channel() as here:
        assert there.address.address.startswith("tcp://127.0.0.1:")
        assert here.request(there.address, ACK, deadline()) == Done()


def test_200_lives_leave_no_descriptor_and_no_thread() -> None:
    def live() -> None:
        with channel(Owner(), auth_key="k") as there, channel(auth_key="k") as here:
            assert here.request(there.address, ACK, deadline()) == Done()

    live()
    fds, threads = len(os.listdir("/proc/self/fd")), threading.enumerate()
    native = len(os.listdir("/proc/self/task"))
    for _ in range(200):
        live()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert threading.enumerate() == threads
    assert len(os.listdir("/proc/self/task")) == native


def test_the_thread_is_named_and_a_daemon() -> None:
    before = set(threading.enumerate())
    with channel(name="denoise"):
        (thread,) = set(threading.enumerate()) - before
        assert (thread.name, thread.daemon) == ("moonrelay-control-denoise", True)
