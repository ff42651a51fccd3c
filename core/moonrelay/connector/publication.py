"""What a producer holds on to: one payload's state, and the way to say that a chunk is final."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING, Protocol

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import ConfigError, DeadlineExceeded, MoonrelayError
from moonrelay.handle import StageHandle

if TYPE_CHECKING:
    from types import TracebackType


class PublicationState(enum.StrEnum):
    """Where a payload is in its life, as its producer sees it."""

    OPEN = "open"
    READY = "ready"
    SPILLED = "spilled"
    CLAIMED = "claimed"
    CANCEL_PENDING = "cancel_pending"
    EXPIRE_PENDING = "expire_pending"
    CONSUMED = "consumed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    RELEASED = "released"


TERMINAL = frozenset(
    {PublicationState.CONSUMED, PublicationState.ABORTED, PublicationState.EXPIRED, PublicationState.RELEASED}
)


class ChunkSink(Protocol):
    """What a publication tells its connector."""

    def chunk_final(self, payload_id: str, chunk: int) -> None: ...

    def abort(self, payload_id: str, reason: str) -> None: ...


class Publication:
    """One published payload, from its producer's side.

    Threads: all methods from any thread. Leaving it as a context manager by an exception aborts it with that reason.
    """

    def __init__(self, handle: StageHandle, sink: ChunkSink, clock: Clock) -> None:
        self.handle = handle
        self._sink = sink
        self._clock = clock
        self._changed = threading.Condition()
        self._state = PublicationState.OPEN
        self._failure: MoonrelayError | None = None
        self._final: set[int] = set()

    def __repr__(self) -> str:
        return f"<Publication {self.handle.request_id}/{self.handle.kind} {self._state.name}>"

    @property
    def state(self) -> PublicationState:
        """The current state; compares equal to its lower-case name."""
        with self._changed:
            return self._state

    @property
    def all_final(self) -> bool:
        """Whether every chunk was said to be final."""
        with self._changed:
            return len(self._final) == self.handle.num_chunks

    @property
    def failure(self) -> MoonrelayError | None:
        """Why the payload was aborted; ``None`` while it was not."""
        with self._changed:
            return self._failure

    def ready(self, chunk: int) -> None:
        """Say that chunk ``chunk`` is final; any order, each once.

        On a GPU an event is recorded on the caller's current stream: the chunk counts once that has completed. Returns
        at once.

        Raises:
            ConfigError: No such chunk, or it was final already.
            Aborted, LeaseExpired, LeaseLost: The payload is no more.
        """
        count = self.handle.num_chunks
        if isinstance(chunk, bool) or not isinstance(chunk, int) or not 0 <= chunk < count:
            message = f"chunk={chunk!r} does not exist; the payload has chunks 0 to {count - 1}"
            raise ConfigError(message, field="chunk", request_id=self.handle.request_id)
        with self._changed:
            if chunk in self._final:
                message = f"chunk={chunk} was said to be ready before; say it once"
                raise ConfigError(message, field="chunk", request_id=self.handle.request_id)
            self._final.add(chunk)
        try:
            self._sink.chunk_final(self.handle.id, chunk)
        except BaseException:
            with self._changed:
                self._final.discard(chunk)
            raise

    def abort(self, reason: str) -> None:
        """Give the payload up: readers get `Aborted` with ``reason``. Idempotent; no effect on a payload that ended."""
        self._sink.abort(self.handle.id, reason)

    def wait(self, state: PublicationState | str, timeout_s: float) -> PublicationState:
        """Wait until the payload is in ``state``. Blocks: until ``timeout_s``.

        Raises:
            ConfigError: No such state.
            DeadlineExceeded: It did not come in time.
            MoonrelayError: The payload ended otherwise (`Aborted`, `LeaseExpired` ...).
        """
        try:
            wanted = PublicationState(str(state).lower())
        except ValueError as exc:
            names = ", ".join(member.value for member in PublicationState)
            message = f"state={state!r} is not known; use one of {names}"
            raise ConfigError(message, field="state") from exc
        deadline = Deadline(timeout_s, self._clock)
        with self._changed:
            deadline.wait_for(self._changed, lambda: self._state == wanted or self._state in TERMINAL)
            if self._state == wanted:
                return self._state
            if self._state in TERMINAL:
                if self._failure is not None:
                    raise self._failure
                message = f"the payload is {self._state.value}, it cannot become {wanted.value} any more"
                raise MoonrelayError(message, request_id=self.handle.request_id)
            message = f"the payload is {self._state.value}, not {wanted.value}, after {timeout_s} s"
            raise DeadlineExceeded(message, request_id=self.handle.request_id)

    def update(self, state: PublicationState, failure: MoonrelayError | None = None) -> None:
        """Take over the state that the connector decided on (called by the connector only)."""
        with self._changed:
            if self._state in TERMINAL:
                return
            self._state = state
            self._failure = failure or self._failure
            self._changed.notify_all()

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
