"""Helpers of the control tests: a peer in a process of its own, a proxy that mistreats frames, raw sockets."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import zmq

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import ControlConfig
from moonrelay.control import PeerChannel, PeerInfo, Responder
from moonrelay.control.messages import Ack, Done, Progress, Progressed, Query, Request, State
from moonrelay.errors import LeaseLost
from moonrelay.handle import ControlAddress

CLOCK = SystemClock()
#: Fast repeats, so that tests of loss are short.
QUICK = ControlConfig(retry_s=0.05, peer_timeout_s=2.0)
PUSH = Progressed(payload_id="p", progress=Progress(readable=(0,)))


def deadline(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, CLOCK)


class Owner:
    """A handler that counts: ``ack`` with token 0 fails, ``query`` is answered when told to."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.handled: list[Request] = []
        self.peers: list[PeerInfo] = []
        self.deferred: list[Responder] = []

    def handle(self, peer: PeerInfo, request: Request, respond: Responder) -> None:
        with self.lock:
            self.handled.append(request)
            self.peers.append(peer)
            if isinstance(request, Query):
                self.deferred.append(respond)
            self.lock.notify_all()
        if isinstance(request, Query):
            return
        if isinstance(request, Ack) and request.token == 0:
            message = "no such claim"
            raise LeaseLost(message, payload_id=request.payload_id)
        if isinstance(request, Ack) and request.token == -1:
            message = "a defect of the handler"
            raise ValueError(message)
        respond.reply(Done())

    def wait_deferred(self, count: int) -> list[Responder]:
        with self.lock:
            assert self.lock.wait_for(lambda: len(self.deferred) >= count, timeout=10.0)
            return list(self.deferred)


def answer(acks: int = 0) -> State:
    return State(state="ready", readers=0, acks=acks, chunks=1, chunks_ready=1, expires_in_s=None)


def channel(owner: Owner | None = None, config: ControlConfig = QUICK, **more: object) -> PeerChannel:
    """Return a channel that was not started."""
    more.setdefault("auth_key", None)
    return PeerChannel(config, clock=CLOCK, handler=owner, **more)  # type: ignore[arg-type]


class Proxy:
    """Stands between a client and a server, and does to each frame what the test says.

    ``on_frame(direction, data)`` returns the frames to pass on, in order; ``direction`` is ``"to_server"`` or
    ``"to_client"``. The frames are recorded.
    """

    def __init__(self, server: ControlAddress, on_frame: Callable[[str, bytes], list[bytes]] | None = None) -> None:
        self.on_frame = on_frame or (lambda _direction, data: [data])
        self.seen: list[tuple[str, bytes]] = []
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop_there = self._context.socket(zmq.PAIR)
        for socket in (self._front, self._back, self._stop, self._stop_there):
            socket.set(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self._back.connect(server.address)
        self._stop.bind("inproc://stop")
        self._stop_there.connect("inproc://stop")
        self.address = ControlAddress(address=f"tcp://127.0.0.1:{port}", nonce=server.nonce)
        self._client = b""
        self._thread = threading.Thread(target=self._run, name="test-proxy", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in (self._front, self._back, self._stop_there):
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop_there in ready:
                sent = self._stop_there.recv()
                if not sent:
                    return
                self._back.send(sent)
            if self._front in ready:
                self._client, data = self._front.recv_multipart()
                self.seen.append(("to_server", data))
                for each in self.on_frame("to_server", data):
                    self._back.send(each)
            if self._back in ready:
                data = self._back.recv()
                self.seen.append(("to_client", data))
                for each in self.on_frame("to_client", data):
                    self._front.send_multipart([self._client, each])

    def replay(self, data: bytes) -> None:
        """Send a frame to the server, as if the client had."""
        self._stop.send(data)

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join(10.0)
        for socket in (self._front, self._back, self._stop, self._stop_there):
            socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(pipe: Connection, port: int, nonce: str | None) -> None:
    owner = Owner()
    with channel(owner, ControlConfig(), port=port, nonce=nonce) as peer:
        pipe.send((peer.address.address, peer.address.nonce))
        with contextlib.suppress(EOFError):
            pipe.recv()


class Process:
    """A peer in a process of its own; ends with the test."""

    def __init__(self, *, port: int = 0, nonce: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there, port, nonce), daemon=True)
        self.process.start()
        there.close()

    def address(self) -> ControlAddress:
        """Return where it listens. Blocks: until it does."""
        assert self._pipe.poll(60.0)
        address, nonce = self._pipe.recv()
        return ControlAddress(address=address, nonce=nonce)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            # The signal is sent, not yet obeyed: a running thread may answer once more.
            state = Path(f"/proc/{self.process.pid}/stat")
            until = time.monotonic() + 5.0
            while state.read_text().rpartition(")")[2].split()[0] not in "Tt" and time.monotonic() < until:
                select.select([], [], [], 0.005)

    def end(self) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.join(10.0)
        self.process.close()
        self._pipe.close()


@contextlib.contextmanager
def process(*, port: int = 0, nonce: str | None = None) -> Iterator[Process]:
    made = Process(port=port, nonce=nonce)
    try:
        yield made
    finally:
        made.end()
