"""Who may come in: so many requests at work at once, so many waiting, and no more.

Owns the count. Belongs to one event loop and holds no lock.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from moonrelay_vllm_omni.serve.errors import QueueIsFull

#: What a client that was refused is told to wait, at least.
RETRY_AFTER_S = 2.0


class Place:
    """One request's place: waiting until ``async with`` gets its turn, at work inside, gone after it.

    `leave` gives a place up that never had its turn. Idempotent.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._inside = True

    async def __aenter__(self) -> None:
        if not self._inside:
            message = "the place was left already"
            raise RuntimeError(message)
        await self._gate.turns.acquire()
        self._gate.running += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.running -= 1
        self._gate.turns.release()
        self.leave()

    def leave(self) -> None:
        """Let the next one in."""
        if self._inside:
            self._inside = False
            self._gate.inside -= 1


class Gate:
    """Places for ``running`` requests at work and ``waiting`` before them, in the order in which they came."""

    def __init__(self, running: int, waiting: int) -> None:
        self.places = running + waiting
        self.inside = 0
        self.running = 0
        self.turns = asyncio.Semaphore(running)

    @property
    def waiting(self) -> int:
        return self.inside - self.running

    def enter(self, count: int = 1) -> list[Place]:
        """Return ``count`` places, or none of them.

        Raises:
            QueueIsFull: There are not so many left.
        """
        if self.inside + count > self.places:
            message = (
                f"{self.inside} requests are under way or wait, of {self.places} that may, "
                f"and this one needs {count} place{'s'[: count != 1]}; send it again later"
            )
            raise QueueIsFull(message, retry_after_s=RETRY_AFTER_S)
        self.inside += count
        return [Place(self) for _ in range(count)]
