"""The peer channel between processes: killed, stopped and continued, started late."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading

import pytest

from moonrelay.config import ControlConfig
from moonrelay.control.messages import Ack, Done, Query
from moonrelay.errors import PeerLost
from moonrelay.handle import ControlAddress
from support.control_peers import channel, deadline, process

pytestmark = pytest.mark.processes

ACK = Ack(payload_id="p", token=1)
PATIENT = ControlConfig(retry_s=0.2, peer_timeout_s=60.0)


def test_a_killed_peer_is_lost_in_time() -> None:
    with process() as peer, channel(config=PATIENT) as here:
        address = peer.address()
        assert here.request(address, ACK, deadline()) == Done()
        killer = threading.Timer(0.3, peer.signal, (signal.SIGKILL,))
        killer.start()
        limit = deadline(60.0)
        with pytest.raises(PeerLost, match="closed its connection"):
            here.request(address, Query(payload_id="p"), limit)  # it is never answered
        killer.join()
        assert (limit.remaining() or 0.0) > 40.0
        with pytest.raises(PeerLost):
            here.request(address, ACK, deadline(60.0))


def test_a_stopped_peer_that_goes_on_answers() -> None:
    with process() as peer, channel(config=PATIENT) as here:
        address = peer.address()
        assert here.request(address, ACK, deadline()) == Done()
        peer.signal(signal.SIGSTOP)
        again = threading.Timer(1.5, peer.signal, (signal.SIGCONT,))
        again.start()
        assert here.request(address, ACK, deadline(60.0)) == Done()
        again.join()


def test_a_peer_stopped_for_too_long_is_lost_and_found_again() -> None:
    with process() as peer, channel(config=ControlConfig(retry_s=0.2, peer_timeout_s=1.0)) as here:
        address = peer.address()
        assert here.request(address, ACK, deadline()) == Done()
        peer.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match="no sign of life"):
            here.request(address, ACK, deadline(60.0))
        peer.signal(signal.SIGCONT)
        assert here.request(address, ACK, deadline(60.0)) == Done()


def test_a_peer_stopped_before_first_contact_is_lost() -> None:
    with process() as peer, channel(config=ControlConfig(retry_s=0.2, peer_timeout_s=1.0)) as here:
        address = peer.address()
        peer.signal(signal.SIGSTOP)
        with pytest.raises(PeerLost, match="no sign of life"):
            here.request(address, ACK, deadline(60.0))


def test_the_port_may_change_hands() -> None:
    """A process that inherits a dead peer's port is not taken for it."""
    with channel(config=PATIENT) as here:
        with process() as peer:
            address = peer.address()
            here.request(address, ACK, deadline())
        port = int(address.address.rsplit(":", 1)[1])
        with process(port=port) as heir:
            inherited = heir.address()
            assert inherited.address == address.address
            with pytest.raises(PeerLost):
                here.request(address, ACK, deadline(60.0))
            assert here.request(inherited, ACK, deadline()) == Done()


def test_the_server_may_start_first_or_last() -> None:
    with process() as peer:
        address = peer.address()
        with channel() as here:
            assert here.request(address, ACK, deadline()) == Done()
    with socket.socket() as reserve:
        reserve.bind(("127.0.0.1", 0))
        port = reserve.getsockname()[1]
    early = ControlAddress(address=f"tcp://127.0.0.1:{port}", nonce="cd" * 16)
    with channel(config=PATIENT) as here:
        # The process takes seconds to start; whoever has its address early asks again: PeerLost is retryable.
        with process(port=port, nonce=early.nonce) as peer:
            limit, reply = deadline(60.0), None
            while reply is None:
                with contextlib.suppress(PeerLost):
                    reply = here.request(early, ACK, limit)
            assert reply == Done()
            assert peer.address() == early
