"""The two processes of ``moonrelay bench host``: a stage that puts and a stage that gets.

Owns the processes: spawned, told what to do in small messages, their output kept in files, ended with the measurement
however that ends. The command's own process imports no host, so a host that takes its process down ends one pass.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from moonrelay.cli.bench.host_lanes import CONSUMER, PRODUCER, End, HostBench, Room
from moonrelay.cli.bench.host_payload import Payloads
from moonrelay.clock import Clock, SystemClock
from moonrelay.errors import MoonrelayError, PeerLost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import TracebackType

    import torch

logger = logging.getLogger(__name__)

#: Bound of an answer, in seconds; the first one holds the host's imports.
ANSWER_TIMEOUT_S: Final = 300.0
_END_TIMEOUT_S: Final = 20.0
_TAIL_BYTES: Final = 2000


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Open an end of a lane."""

    lane: str
    fixed: bool


class Close(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """Close the open end."""


class Put(msgspec.Struct, frozen=True, kw_only=True, tag="put"):
    """Put a payload."""

    key: str
    nbytes: int
    stamp: int


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Get a payload, then compare it."""

    key: str
    nbytes: int
    stamp: int
    ticket: bytes


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag="copy"):
    """Copy so many bytes once by ``copy_``, between memory that was touched before."""

    nbytes: int


class Discard(msgspec.Struct, frozen=True, kw_only=True, tag="discard"):
    """Drop what is left of a payload."""

    key: str


Order: TypeAlias = Open | Close | Put | Get | Copy | Discard


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """It was done.

    Attributes:
        began_s: When, on the machine's monotonic clock, which all its processes share.
        took_s: How long it took, in seconds.
        cpu_s: Processor time of the whole process: spent by a get, spent in all by the begin of a put or a discard.
        ticket: What the consumer needs.
        notes: What an opened end says of itself.
    """

    began_s: float = 0.0
    took_s: float = 0.0
    cpu_s: float = 0.0
    ticket: bytes = b""
    notes: tuple[str, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It could not be done; the process goes on."""

    message: str


Answer: TypeAlias = Done | Failed
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class LaneFailed(MoonrelayError):
    """A lane did not do what it was told; the message is its own."""

    code = "lane_failed"


class Stage:
    """One of the two processes, as the command sees it.

    Args:
        bench: The host's lanes.
        side: `PRODUCER` or `CONSUMER`.
        room: What it is told.
        log: Where its output goes.

    Threads: one.
    """

    def __init__(self, bench: type[HostBench], side: str, room: Room, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._side = side
        self._log = log
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_main, args=(bench, side, room.largest, dict(room.shared), str(log), theirs), name=f"bench-{side}"
        )
        self._process.start()
        theirs.close()

    def ask(self, order: Order) -> Done:
        """Have something done. Blocks: until it is.

        Raises:
            LaneFailed: It could not be done.
            PeerLost: The process is gone, or does not answer.
        """
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode(order))
            data = self._pipe.recv_bytes() if self._pipe.poll(ANSWER_TIMEOUT_S) else None
        except (EOFError, OSError) as exc:
            message = f"the {self._side}'s process ended: {self.tail() or exc or 'without a word'}"
            raise PeerLost(message) from exc
        if data is None:
            message = f"the {self._side} did not answer within {ANSWER_TIMEOUT_S:g} s"
            raise PeerLost(message)
        answer = _answers.decode(data)
        if isinstance(answer, Failed):
            raise LaneFailed(f"{self._side}: {answer.message}")
        return answer

    def tail(self) -> str:
        """Return the last line that the process wrote."""
        try:
            text = self._log.read_bytes()[-_TAIL_BYTES:].decode("utf-8", "replace")
        except OSError:
            return ""
        lines = text.strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End the process. Idempotent. Blocks: seconds."""
        self._pipe.close()
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            logger.warning("the %s did not end in time and is killed", self._side)
            self._process.kill()
            self._process.join(_END_TIMEOUT_S)


class Pair:
    """Both processes; a context manager.

    Args:
        bench: The host's lanes.
        room: What both are told.
        folder: For their output.
    """

    def __init__(self, bench: type[HostBench], room: Room, folder: Path) -> None:
        self.producer = Stage(bench, PRODUCER, room, folder / "producer.log")
        try:
            self.consumer = Stage(bench, CONSUMER, room, folder / "consumer.log")
        except BaseException:
            self.producer.close()
            raise

    def open(self, lane: str, *, fixed: bool = True) -> tuple[str, ...]:
        """Open a lane; return what its ends say of themselves. Blocks and raises as `Stage.ask`."""
        order = Open(lane=lane, fixed=fixed)
        said = (*self.producer.ask(order).notes, *self.consumer.ask(order).notes)
        return tuple(dict.fromkeys(said))

    def shut(self) -> None:
        """Close the open lane, also one that is half open. Blocks and raises as `Stage.ask`."""
        self.consumer.ask(Close())
        self.producer.ask(Close())

    def close(self) -> None:
        """End both. Idempotent."""
        self.consumer.close()
        self.producer.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Worker:
    """What one of the processes does.

    Args:
        bench: The host's lanes.
        side: Which end it opens.
        room: What it was told.
        clock: Time.
    """

    def __init__(self, bench: HostBench, side: str, room: Room, clock: Clock) -> None:
        self._bench = bench
        self._side = side
        self._room = room
        self._clock = clock
        self._payloads = Payloads(room.largest, bench.payloads)
        self._scratch: torch.Tensor | None = None
        self._end: End | None = None

    def do(self, order: Order) -> Done:
        """Follow an order.

        Raises:
            Exception: Whatever the lane raises.
        """
        if isinstance(order, Open):
            self._end = self._bench.open(order.lane, self._side, self._room, fixed=order.fixed)
            return Done(notes=tuple(self._end.notes()))
        if isinstance(order, Close):
            return self.close()
        if isinstance(order, Copy):
            return self._copy(order.nbytes)
        if self._end is None:
            message = "no lane is open"
            raise LaneFailed(message)
        if isinstance(order, Put):
            return self._put(self._end, order)
        if isinstance(order, Get):
            return self._get(self._end, order)
        cpu_s = _processor_s()
        self._end.discard(order.key)
        return Done(cpu_s=cpu_s)

    def close(self) -> Done:
        """Close the open end, if any."""
        end, self._end = self._end, None
        try:
            if end is not None:
                end.close()
        finally:
            del end
            gc.collect()
        return Done()

    def _put(self, end: End, order: Put) -> Done:
        data = self._payloads.make(order.nbytes, order.stamp)
        cpu_s = _processor_s()
        began = self._clock.monotonic()
        ticket = end.put(order.key, data)
        return Done(began_s=began, took_s=self._clock.monotonic() - began, cpu_s=cpu_s, ticket=ticket)

    def _get(self, end: End, order: Get) -> Done:
        cpu_s = _processor_s()
        began = self._clock.monotonic()
        found = end.get(order.key, order.ticket)
        took = self._clock.monotonic() - began
        cpu_s = _processor_s() - cpu_s
        self._payloads.check(found, order.nbytes, order.stamp)
        return Done(began_s=began, took_s=took, cpu_s=cpu_s)

    def _copy(self, nbytes: int) -> Done:
        import torch

        if self._scratch is None:
            self._scratch = torch.zeros(self._room.largest, dtype=torch.uint8)
        source, destination = self._payloads.raw(nbytes), self._scratch[:nbytes]
        cpu_s = _processor_s()
        began = self._clock.monotonic()
        destination.copy_(source)
        took = self._clock.monotonic() - began
        return Done(began_s=began, took_s=took, cpu_s=_processor_s() - cpu_s)


def _main(
    bench: type[HostBench],
    side: str,
    largest: int,
    shared: Mapping[str, str],
    log: str,
    pipe: Connection[bytes, bytes],
) -> None:
    # Ctrl-C in a terminal reaches all processes; the command ends this one by the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Native libraries write to the descriptors themselves.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    worker = Worker(bench(), side, Room(largest=largest, shared=shared), SystemClock())
    try:
        while True:
            order = _orders.decode(pipe.recv_bytes())
            answer: Answer
            try:
                answer = worker.do(order)
            except Exception as exc:
                logger.exception("%s failed", type(order).__name__)
                answer = Failed(message=_line(exc))
            pipe.send_bytes(msgspec.msgpack.encode(answer))
    except (EOFError, OSError):
        worker.close()
    finally:
        pipe.close()


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _line(error: BaseException) -> str:
    """Return an error's innermost reason in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
