"""The two sides of a measurement: the producer's memory and connectors, and the consumer's.

Owns everything both processes hold while contenders take turns. All of them offer the same bytes, stamped anew each
time, and read into the same destination; the consumer compares the stamps, outside of what is timed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import zmq

from moonrelay.cli.bench.link import Answer, Offer, Offered, ProducerProcess, Ready, Setup
from moonrelay.cli.bench.raw import raw_engine
from moonrelay.clock import SystemClock
from moonrelay.connector import DiffusionConnector
from moonrelay.errors import IntegrityError
from moonrelay.payload import StagePayload
from moonrelay.transfer.mapping import copy

if TYPE_CHECKING:
    from types import TracebackType

    import torch

RAW = "raw"
MEMCPY = "memcpy"
_STAMP_BYTES = 8
_ECHO_POLL_MS = 200


def connector_of(setup: Setup, integrity: str, role: str) -> DiffusionConnector:
    """Return the connector whose contender is named as its integrity."""
    # Room for the source of an engine that serves only memory of its own; mapped as it is touched.
    te_config = {"engine": setup.engine, "pool_bytes": setup.largest + (1 << 20)}
    return DiffusionConnector(role, "p2p", te_config, integrity=integrity)


def serve(setup: Setup, swap: Callable[[Answer], Offer | None]) -> None:
    """Run the producer: offer what is asked for until the consumer is gone."""
    import torch

    clock = SystemClock()
    with ExitStack() as stack:
        echo = stack.enter_context(Echo())
        shared = torch.full((setup.largest,), 1, dtype=torch.uint8)
        offers: dict[str, Callable[[torch.Tensor], bytes]] = {}
        sources: dict[str, torch.Tensor] = {}
        for integrity in setup.integrities:
            connector = stack.enter_context(connector_of(setup, integrity, "producer"))
            sources[integrity] = _registered(connector, shared, setup, stack)
            offers[integrity] = _publisher(connector)
        raw = raw_engine(setup.engine)
        stack.callback(raw.close)
        sources[RAW] = raw.source(shared)
        offers[RAW] = raw.offer
        answer: Answer = Ready(echo=echo.address)
        while (order := swap(answer)) is not None:
            source = sources[order.contender][: order.nbytes]
            write_stamp(source, order.stamp)
            began = clock.monotonic()
            ticket = offers[order.contender](source)
            answer = Offered(began_s=began, took_s=clock.monotonic() - began, ticket=ticket)
        sources.clear()
        del shared, source


def _registered(connector: DiffusionConnector, shared: torch.Tensor, setup: Setup, stack: ExitStack) -> torch.Tensor:
    if setup.engine == "shm":
        own = connector.empty(shared.shape, dtype=shared.dtype)
        own.copy_(shared)
        return own
    stack.enter_context(connector.register(shared))
    return shared


def _publisher(connector: DiffusionConnector) -> Callable[[torch.Tensor], bytes]:
    def publish(source: torch.Tensor) -> bytes:
        return connector.publish(StagePayload(request_id="bench", kind="latent", tensor=source)).to_bytes()

    return publish


class Consumer:
    """The consumer's side, with the producer's process; a context manager.

    Threads: one.
    """

    def __init__(self, setup: Setup) -> None:
        import torch

        self._clock = SystemClock()
        self._stack = ExitStack()
        try:
            self.producer = self._stack.enter_context(ProducerProcess(serve, setup))
            self.destination = torch.zeros(setup.largest, dtype=torch.uint8)
            self.plain = torch.full((setup.largest,), 1, dtype=torch.uint8)
            self._takers: dict[str, Callable[[bytes, torch.Tensor], object]] = {}
            for integrity in setup.integrities:
                connector = self._stack.enter_context(connector_of(setup, integrity, "consumer"))
                if setup.engine != "shm":
                    self._stack.enter_context(connector.register(self.destination))
                self._takers[integrity] = _receiver(connector)
            raw = raw_engine(setup.engine)
            self._stack.callback(raw.close)
            raw.landing(self.destination)
            self._takers[RAW] = raw.take
        except BaseException:
            self.close()
            raise

    def copy(self, nbytes: int) -> float:
        """Copy ``nbytes`` of this process's own memory into the destination once; return the seconds it took."""
        destination, source = self.destination.data_ptr(), self.plain.data_ptr()
        began = self._clock.monotonic()
        copy(destination, source, nbytes)
        return self._clock.monotonic() - began

    def pass_on(self, contender: str, nbytes: int, stamp: int) -> Passed:
        """Let the producer offer ``nbytes`` and read them; return how long it took.

        Raises:
            IntegrityError: What arrived are not the bytes that were offered.
        """
        destination = self.destination[:nbytes]
        write_stamp(destination, 0)
        offered = self.producer.offer(contender, nbytes, stamp)
        arrived = self._clock.monotonic()
        self._takers[contender](offered.ticket, destination)
        ended = self._clock.monotonic()
        if read_stamp(destination) != (stamp, stamp):
            message = f"{contender} delivered other bytes than were offered"
            raise IntegrityError(message)
        return Passed(
            total_s=ended - offered.began_s,
            offer_s=offered.took_s,
            hop_s=arrived - offered.began_s - offered.took_s,
            take_s=ended - arrived,
        )

    def close(self) -> None:
        """End connectors and the producer. Idempotent."""
        self._takers = {}
        self._stack.close()

    def __enter__(self) -> Consumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Passed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one pass.

    Attributes:
        total_s: From the beginning of the offer to the end of the taking.
        offer_s: The offer (publishing).
        hop_s: The ticket's way through the pipe between the processes.
        take_s: The taking (claim, read, proof, acknowledgement).
    """

    total_s: float
    offer_s: float
    hop_s: float
    take_s: float


def _receiver(connector: DiffusionConnector) -> Callable[[bytes, torch.Tensor], object]:
    return lambda ticket, destination: connector.receive(ticket, dst=destination)


def write_stamp(tensor: torch.Tensor, stamp: int) -> None:
    """Write a number into the first and the last bytes."""
    import torch

    mark = torch.tensor([stamp], dtype=torch.int64).view(torch.uint8)
    tensor[:_STAMP_BYTES] = mark
    tensor[-_STAMP_BYTES:] = mark


def read_stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the numbers in the first and the last bytes."""
    first, last = tensor[:_STAMP_BYTES].tolist(), tensor[-_STAMP_BYTES:].tolist()
    return int.from_bytes(bytes(first), "little"), int.from_bytes(bytes(last), "little")


class Echo:
    """A plain ZeroMQ ROUTER that sends back what it gets, on a thread of its own; the unit of `latency`."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        port = self._router.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moonrelay-bench-echo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it. Idempotent."""
        self._ended.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def __enter__(self) -> Echo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._router.poll(_ECHO_POLL_MS):
                self._router.send_multipart(self._router.recv_multipart(), copy=True)
