"""The pull: many pieces read from a peer in a window, reported in order, never left half watched.

Owns the pieces of one call and their retries. What is still in flight when a call ends early goes to the quarantine.
Payload bytes pass only through the engine.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import Cancelled, MoonrelayError, TransferFailed, TransferTimeout
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay.transfer.quarantine import Quarantine

logger = logging.getLogger(__name__)

_POLL_MIN_S = 50e-6
_POLL_MAX_S = 1e-3
#: A pause is this part of the time since the last read ended: what ended is noticed a few percent late, at any size.
_POLL_PART = 1 / 16
#: The first pause lasts this part of what a read takes by the fastest pace seen, at most `_FIRST_POLL_MAX_S`: a poll's
#: work would be taken from the threads that move the bytes.
_FIRST_POLL_PART = 0.75
_FIRST_POLL_MAX_S = 20e-3
#: Calls of fewer bytes say little about the pace.
_PACE_BYTES = 1 << 20
#: Largest read where nobody works on pieces as they land: it bounds for how long a call that ended early is not quiet.
_LARGEST_READ = 256 << 20
#: Reads of one piece: the first, and one more, since engines fail now and then on a healthy peer.
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One contiguous range to read.

    Attributes:
        region: The peer's region that holds it.
        remote_address: First byte, in the peer's address space.
        local_address: Destination in this process.
        nbytes: Length; zero is fine.
    """

    region: Region
    remote_address: int
    local_address: int
    nbytes: int


class Landing(enum.Enum):
    """Where a piece is on its way."""

    WAITING = "waiting"
    IN_FLIGHT = "in flight"
    LANDED = "landed"


class _Piece:
    __slots__ = ("attempts", "began_s", "landing", "move", "move_index", "nbytes", "offset", "operation")

    def __init__(self, move: Move, move_index: int, offset: int, nbytes: int) -> None:
        self.move = move
        self.move_index = move_index
        self.offset = offset
        self.nbytes = nbytes
        self.attempts = 0
        self.began_s = 0.0
        self.landing = Landing.WAITING
        self.operation: Operation | None = None


class Puller:
    """Reads ranges of a peer's memory into local memory.

    Args:
        engine: A started engine.
        window: Reads in flight per call.
        piece_bytes: Largest single read of a call that works on pieces as they land; an engine may have a size of its
            own. Other calls read each move at once, since an engine moves one large range faster than its pieces.
        clock: The clock on which it waits.
        quarantine: Takes what is in flight when a call ends early.

    Threads: ``pull`` from any thread, also several at once.
    """

    def __init__(
        self, engine: TransferEngine, *, window: int, piece_bytes: int, clock: Clock, quarantine: Quarantine
    ) -> None:
        self._engine = engine
        self._window = window
        self._piece_bytes = engine.fixed_piece_bytes or piece_bytes
        self._read_bytes = max(_LARGEST_READ, self._piece_bytes)
        self._pace = 0.0  # seconds per byte; a stale value of another thread does no harm
        self._clock = clock
        self._quarantine = quarantine

    def pull(
        self,
        peer: EngineAddress,
        moves: Sequence[Move],
        deadline: Deadline,
        *,
        on_landed: Callable[[int, int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_quiet: Callable[[], None] | None = None,
        piecewise: bool = True,
    ) -> None:
        """Read all moves; return when every byte has landed.

        Args:
            peer: Whose memory.
            moves: What to read where. Destinations must not overlap.
            deadline: Until when.
            on_landed: Called as ``(move_index, offset, nbytes)``, in this thread, in the order of the moves and of the
                bytes in them, as soon as a piece and all before it have landed; later ones are in flight meanwhile. A
                move of zero bytes is reported too.
            cancelled: Asked between polls; true ends the call.
            on_quiet: Called exactly once, whichever way the call ends, as soon as no read of it can write any more:
                before ``pull`` returns, or later by the quarantine (then ``context['pending']`` of the error says how
                many reads are in flight). Must not raise.
            piecewise: Whether ``on_landed`` works on the bytes: then they come in pieces that are in the caches when
                they are reported, while the next ones are on their way.

        Raises:
            TransferFailed: A piece failed twice; ``__cause__`` is the engine's reason.
            TransferTimeout: The deadline passed.
            Cancelled: ``cancelled()`` was true.
            ClosedError: The engine was closed.

        Blocks: until done, or the deadline.
        """
        size = self._piece_bytes if piecewise else self._read_bytes
        run = _Run(self._engine, peer, self._window, _pieces(moves, size), self._clock)
        try:
            self._drive(run, deadline, on_landed, cancelled)
        except BaseException as exc:
            running = run.running()
            if isinstance(exc, MoonrelayError) and running:
                exc.context["pending"] = len(running)
            self._quarantine.hold(running, on_quiet or _nothing)
            raise
        if on_quiet is not None:
            on_quiet()

    def _drive(
        self,
        run: _Run,
        deadline: Deadline,
        on_landed: Callable[[int, int, int], None] | None,
        cancelled: Callable[[], bool] | None,
    ) -> None:
        began_s = self._clock.monotonic()
        idle: threading.Condition | None = None
        quiet_since: float | None = None
        while True:
            if cancelled is not None and cancelled():
                message = "the pull was cancelled"
                raise Cancelled(message, peer=run.peer.address)
            progress = run.collect()
            progress |= run.fill()
            if progress:
                quiet_since = None
            landed = run.next_landed()
            if landed is not None:
                if on_landed is not None:
                    on_landed(landed.move_index, landed.offset, landed.nbytes)
                continue
            if run.finished:
                self._learn(run.landed_bytes, self._clock.monotonic() - began_s)
                return
            if deadline.expired:
                message = f"{run.landed_bytes} bytes arrived within {deadline.timeout_s} s, not all"
                raise TransferTimeout(message, peer=run.peer.address)
            now = self._clock.monotonic()
            quiet_since = now if quiet_since is None else quiet_since
            pause = min(max(_POLL_MIN_S, (now - quiet_since) * _POLL_PART), _POLL_MAX_S)
            pause = max(pause, min(run.head_due(self._pace * _FIRST_POLL_PART) - now, _FIRST_POLL_MAX_S))
            idle = idle or threading.Condition()
            with idle:
                self._clock.wait(idle, deadline.remaining(pause))

    def _learn(self, nbytes: int, took_s: float) -> None:
        """Keep the fastest pace, and doubt it a little each time that it was not reached."""
        if nbytes >= _PACE_BYTES:
            seen = took_s / nbytes
            self._pace = min(seen, self._pace * 1.1) if self._pace else seen


class _Run:
    """The pieces of one pull: what waits, what flies, what has landed and was not reported."""

    def __init__(
        self, engine: TransferEngine, peer: EngineAddress, window: int, pieces: Iterator[_Piece], clock: Clock
    ) -> None:
        self.peer = peer
        self._clock = clock
        self.landed_bytes = 0
        self._engine = engine
        self._window = window
        self._pieces = pieces
        self._again: deque[_Piece] = deque()
        self._flying: list[_Piece] = []
        self._unreported: deque[_Piece] = deque()
        self._exhausted = False

    @property
    def finished(self) -> bool:
        return self._exhausted and not self._unreported

    def collect(self) -> bool:
        """Ask about every read in flight; say whether any ended."""
        flying = [piece for piece in self._flying if not self._ended(piece)]
        ended = len(flying) < len(self._flying)
        self._flying = flying
        return ended

    def fill(self) -> bool:
        """Start reads until the window is full, or one has landed at once and wants to be reported first."""
        started = False
        while len(self._flying) < self._window:
            piece = self._next_piece()
            if piece is None:
                return started
            started = True
            if piece.nbytes == 0:
                piece.landing = Landing.LANDED
                return True
            piece.attempts += 1
            piece.began_s = self._clock.monotonic()
            piece.operation = self._engine.read(
                self.peer,
                piece.move.region,
                piece.move.remote_address + piece.offset,
                piece.move.local_address + piece.offset,
                piece.nbytes,
            )
            piece.landing = Landing.IN_FLIGHT
            self._flying.append(piece)
            if piece.operation.poll() is not OperationState.RUNNING:
                self.collect()
                return True
        return started

    def next_landed(self) -> _Piece | None:
        """Take the first piece not reported, when it has landed."""
        if self._unreported and self._unreported[0].landing is Landing.LANDED:
            return self._unreported.popleft()
        return None

    def head_due(self, pace: float) -> float:
        """Return when the read that was begun first would end at ``pace``, in seconds per byte."""
        head = self._flying[0] if self._flying else None
        return 0.0 if head is None else head.began_s + head.nbytes * pace

    def running(self) -> list[Operation]:
        """Return the reads that are not terminal."""
        operations = [piece.operation for piece in self._flying if piece.operation is not None]
        return [operation for operation in operations if operation.poll() is OperationState.RUNNING]

    def _next_piece(self) -> _Piece | None:
        if self._again:
            return self._again.popleft()
        piece = next(self._pieces, None)
        if piece is None:
            self._exhausted = True
            return None
        self._unreported.append(piece)
        return piece

    def _ended(self, piece: _Piece) -> bool:
        operation = piece.operation
        if operation is None:
            return True
        state = operation.poll()
        if state is OperationState.RUNNING:
            return False
        if state is OperationState.DONE:
            piece.landing = Landing.LANDED
            self.landed_bytes += piece.nbytes
            return True
        reason = operation.error
        if piece.attempts >= _ATTEMPTS or (reason is not None and not reason.retryable):
            message = f"a read of {piece.nbytes} bytes failed after {piece.attempts} attempt(s): {reason}"
            raise TransferFailed(message, peer=self.peer.address) from reason
        logger.debug("read of %d bytes from %s failed, trying again: %s", piece.nbytes, self.peer.address, reason)
        piece.landing = Landing.WAITING
        piece.operation = None
        self._again.append(piece)
        return True


def _pieces(moves: Sequence[Move], piece_bytes: int) -> Iterator[_Piece]:
    for index, move in enumerate(moves):
        if move.nbytes == 0:
            yield _Piece(move, index, 0, 0)
        for offset in range(0, move.nbytes, piece_bytes):
            yield _Piece(move, index, offset, min(piece_bytes, move.nbytes - offset))


def _nothing() -> None:
    """Do nothing: nobody waits for the memory."""
