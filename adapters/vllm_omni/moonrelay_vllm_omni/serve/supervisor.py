"""The engine's life: started, watched, closed when a stage dies, and started again so many times.

Owns the state and the thread that changes it. What an engine is, `Engine` says; the host's is `engine.HostEngine`.
Requests never pass through here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from moonrelay.clock import Clock, Deadline
from moonrelay_vllm_omni.serve.errors import EngineUnavailable
from moonrelay_vllm_omni.serve.schema import Order

logger = logging.getLogger(__name__)

#: What a client waits where no start was timed yet, and the most it is told to wait, in seconds.
_FIRST_GUESS_S: Final = 30.0
_LONGEST_RETRY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A stage that died; ``stage`` is ``None`` where it is the engine as a whole."""

    stage: int | None
    text: str


class Engine(Protocol):
    """What makes images or videos, in stages that may die."""

    #: ``image`` or ``video``.
    makes: str
    #: The stages' names, by number.
    stages: tuple[str, ...]

    def paint(self, order: Order) -> Awaitable[list[Any]]:
        """Return the frames of one image or video.

        Raises:
            StageDied: A stage died, or the engine was closed.
            ServeError: This request failed, and the engine lives.
        """
        ...

    def deaths(self) -> list[Death]:
        """Return the stages that are dead. Threads: any. Does not block."""
        ...

    def close(self) -> None:
        """End the engine with all of its processes, also half dead. Idempotent. Blocks: for seconds."""
        ...


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is told of the engine at one moment.

    Attributes:
        state: In the supervisor's words.
        deaths: Which stages were dead when the engine was last seen, or began to be started again.
        restarts: How many engines were started after the first.
        reason: Why it is not ready; empty where it is.
        retry_after_s: When it may be.
    """

    state: State
    deaths: tuple[Death, ...]
    restarts: int
    reason: str
    retry_after_s: float


class Supervisor:
    """Keeps one engine alive.

    Args:
        start: Makes an engine; blocks for a minute.
        interrupt: Has a start under way fail soon; called again and again while the supervisor is being closed.
        clock: For the watch and the pauses.
        watch_s: Pause between two looks at the stages.
        attempts: How many starts in a row may fail, or last shorter than ``steady_s``, before it is given up.
        backoff_s: Pause after the first of these, doubled after each.
        backoff_max_s: Longest pause.
        steady_s: An engine that lived so long counts as sound.
        changed: Called after every change of state, in any thread; must return at once.

    The first start is not tried again: what fails there is a setting.

    Threads: any, but `close` from no callback.
    """

    def __init__(
        self,
        start: Callable[[], Engine],
        *,
        interrupt: Callable[[], None],
        clock: Clock,
        watch_s: float = 1.0,
        attempts: int = 5,
        backoff_s: float = 1.0,
        backoff_max_s: float = 60.0,
        steady_s: float = 120.0,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._start_engine = start
        self._interrupt = interrupt
        self._clock = clock
        self._watch_s = watch_s
        self._attempts = attempts
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._steady_s = steady_s
        self._told = changed
        self._condition = threading.Condition()
        self._state = State.STARTING
        self._engine: Engine | None = None
        self._deaths: tuple[Death, ...] = ()
        self._reason = "the engine starts"
        self._restarts = 0
        self._start_took_s = _FIRST_GUESS_S
        self._ending = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread = threading.Thread(target=self._run, name="moonrelay-serve-supervisor", daemon=True)
        self._thread.start()

    def status(self) -> Status:
        with self._condition:
            return Status(
                state=self._state,
                deaths=self._deaths,
                restarts=self._restarts,
                reason=self._reason,
                retry_after_s=max(1.0, min(self._start_took_s, _LONGEST_RETRY_S)),
            )

    def engine(self) -> Engine:
        """Return the engine.

        Raises:
            EngineUnavailable: It is not ready.
        """
        with self._condition:
            if self._engine is not None and self._state is State.READY:
                return self._engine
        status = self.status()
        retry = None if status.state in (State.FAILED, State.CLOSED) else status.retry_after_s
        message = f"the engine is {status.state.value}: {status.reason}"
        raise EngineUnavailable(message, retry_after_s=retry)

    def look(self) -> None:
        """Look at the stages now: a request has failed in a way that they may be the reason of."""
        with self._condition:
            engine = self._engine
        if engine is not None:
            self._see(engine)

    def stop_soon(self) -> None:
        """Start nothing any more: the end is near, and stages may be dying of it. What runs may go on until `close`.

        Returns at once; a signal's handler may call it.
        """
        with self._condition:
            self._ending = True
            self._condition.notify_all()

    def close(self, timeout_s: float = 60.0) -> bool:
        """Close the engine, and end. Idempotent.

        Blocks: until ``timeout_s`` at most.

        Returns:
            Whether all is over.
        """
        with self._condition:
            self._ending = self._closing = True
            self._condition.notify_all()
        thread = self._thread
        deadline = Deadline(timeout_s, self._clock)
        while thread is not None and thread.is_alive() and not deadline.expired:
            with self._condition:
                under_way = self._engine is None
            if under_way:
                self._interrupt()
            thread.join(0.2)
        return thread is None or not thread.is_alive()

    def _run(self) -> None:
        failed = 0
        first = True
        while True:
            began_s = self._clock.monotonic()
            try:
                engine = self._start_engine()
            except Exception as exc:
                text = f"the engine could not be started: {type(exc).__name__}: {exc}"
                if self._is_ending():
                    break
                failed += 1
                logger.exception("%s (attempt %d of %d)", text, failed, 1 if first else self._attempts)
                if first or failed >= self._attempts:
                    self._become(State.FAILED, text)
                    return
                self._become(State.RESTARTING, text)
            else:
                ready_s = self._clock.monotonic()
                self._ready(engine, ready_s - began_s)
                first = False
                self._watch(engine)
                self._close_engine(engine)
                if self._is_ending():
                    break
                failed = 1 if self._clock.monotonic() - ready_s >= self._steady_s else failed + 1
                if failed >= self._attempts:
                    self._become(State.FAILED, f"{failed} engines in a row died soon; the last: {self.status().reason}")
                    return
            if not self._pause(failed):
                break
            with self._condition:
                self._restarts += 1
            logger.warning("the engine is started again, for the %d. time", self.status().restarts)
        self._become(State.CLOSED, "the server ends")

    def _ready(self, engine: Engine, took_s: float) -> None:
        with self._condition:
            self._engine = engine
            self._start_took_s = took_s
            self._deaths = ()
        logger.info("the engine is ready after %.0f s: %s", took_s, ", ".join(engine.stages))
        self._become(State.READY, "")

    def _watch(self, engine: Engine) -> None:
        """Return when the engine has died, or is to be closed."""
        while not self._see(engine):
            with self._condition:
                if self._closing:
                    return
                if self._state is State.READY:
                    self._clock.wait(self._condition, self._watch_s)

    def _see(self, engine: Engine) -> bool:
        deaths = engine.deaths()
        with self._condition:
            if self._engine is not engine or self._state is not State.READY:
                return True
            if self._ending or not deaths:
                return False
            self._deaths = tuple(deaths)
            died = ", ".join("engine" if one.stage is None else f"stage {one.stage}" for one in deaths)
            self._state = State.RESTARTING
            self._reason = f"{died} died: {deaths[0].text}"
            self._condition.notify_all()
        logger.error("%s", self._reason)
        self._told()
        return True

    def _close_engine(self, engine: Engine) -> None:
        try:
            engine.close()
        except Exception:
            logger.exception("the engine did not close as it should")
        with self._condition:
            self._engine = None

    def _pause(self, failed: int) -> bool:
        """Wait before the next start; False where there is to be none."""
        pause = Deadline(min(self._backoff_s * 2 ** (failed - 1), self._backoff_max_s), self._clock)
        with self._condition:
            return not pause.wait_for(self._condition, lambda: self._ending)

    def _become(self, state: State, reason: str) -> None:
        with self._condition:
            self._state, self._reason = state, reason
            self._condition.notify_all()
        self._told()

    def _is_ending(self) -> bool:
        with self._condition:
            return self._ending
