"""The second process of a measurement, and the pipe to it.

Owns the process: started by spawn, told what to do in small messages, ended with the measurement however that ends (it
stops when the pipe breaks). Payload bytes never pass through the pipe; the contenders move them.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from moonrelay.errors import MoonrelayError, PeerLost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import TracebackType

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 20.0


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Ask the producer to stamp ``nbytes`` of its memory and to offer them by a contender."""

    contender: str
    nbytes: int
    stamp: int


class Offered(msgspec.Struct, frozen=True, kw_only=True, tag="offered"):
    """What the consumer needs to read.

    Attributes:
        began_s: When the offering began, on the machine's monotonic clock, which all its processes share.
        took_s: How long it took, in seconds.
        ticket: The handle, or the address.
    """

    began_s: float
    took_s: float
    ticket: bytes


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The producer has started.

    Attributes:
        echo: Where its ZeroMQ echo listens.
    """

    echo: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The producer could not do it."""

    message: str


Answer: TypeAlias = Ready | Offered | Failed
_orders: msgspec.msgpack.Decoder[Offer] = msgspec.msgpack.Decoder(Offer)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both processes build.

    Attributes:
        engine: ``mooncake`` or ``shm``.
        integrities: One connector is made for each.
        largest: Size of the memory that everything is read from, in bytes.
    """

    engine: str
    integrities: tuple[str, ...]
    largest: int


class ProducerProcess:
    """The producer, as the consumer sees it; a context manager.

    Args:
        serve: What the process runs: gets the setup, and a function that waits for the next order and is given the
            answer to the last one (``None`` tells the end). Importable by name, since the process is spawned.
        setup: What it builds.

    Raises:
        PeerLost: It could not start.

    Blocks: until it is ready, seconds.
    """

    def __init__(self, serve: Callable[[Setup, Callable[[Answer], Offer | None]], None], setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(serve, setup, theirs), name="moonrelay-bench-producer")
        self._process.start()
        theirs.close()
        try:
            ready = self._answer()
            if not isinstance(ready, Ready):
                message = f"the producer began with {type(ready).__name__}"
                raise PeerLost(message)
        except BaseException:
            self.close()
            raise
        self.echo = ready.echo

    def offer(self, contender: str, nbytes: int, stamp: int) -> Offered:
        """Let the producer offer its memory. Blocks: until it has."""
        self._pipe.send_bytes(msgspec.msgpack.encode(Offer(contender=contender, nbytes=nbytes, stamp=stamp)))
        answer = self._answer()
        if not isinstance(answer, Offered):
            message = f"the producer answered with {type(answer).__name__}"
            raise PeerLost(message)
        return answer

    def close(self) -> None:
        """End the process. Idempotent. Blocks: seconds."""
        self._pipe.close()
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            logger.warning("the producer did not end in time and is killed")
            self._process.kill()
            self._process.join(_END_TIMEOUT_S)

    def __enter__(self) -> ProducerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Answer:
        try:
            data = self._pipe.recv_bytes() if self._pipe.poll(ANSWER_TIMEOUT_S) else None
        except (EOFError, OSError) as exc:
            message = f"the producer's process ended: {exc or 'without a word'}"
            raise PeerLost(message) from exc
        if data is None:
            message = f"the producer did not answer within {ANSWER_TIMEOUT_S:g} s"
            raise PeerLost(message)
        answer = _answers.decode(data)
        if isinstance(answer, Failed):
            raise MoonrelayError(answer.message)
        return answer


def _main(
    serve: Callable[[Setup, Callable[[Answer], Offer | None]], None],
    setup: Setup,
    pipe: Connection[bytes, bytes],
) -> None:
    # Ctrl-C in a terminal reaches both processes; the consumer ends this one by the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def swap(answer: Answer) -> Offer | None:
        try:
            pipe.send_bytes(msgspec.msgpack.encode(answer))
            return _orders.decode(pipe.recv_bytes())
        except (EOFError, OSError):
            return None

    try:
        serve(setup, swap)
    except Exception as exc:  # noqa: BLE001 - outermost frame of the process: the consumer says it aloud
        try:
            pipe.send_bytes(msgspec.msgpack.encode(Failed(message=f"the producer failed: {exc}")))
        except OSError:
            logger.exception("the producer failed")
    finally:
        pipe.close()
