"""What a request's stages note down for a summary: who did what, when, how the input came.

Times are of the worker's monotonic clock, comparable on one machine only; ``host`` says which one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from moonrelay.clock import Clock, SystemClock
from moonrelay.orchestrator.program import Work
from moonrelay.queueing.task import Plain

KEY = "trace"


class StageTrace:
    """One stage's entry in a request's trace.

    Args:
        work: The job.
        clock: Time.
    """

    def __init__(self, work: Work, clock: Clock | None = None) -> None:
        self._work = work
        self._clock: Clock = clock or SystemClock()
        self._embeddings: dict[str, Plain] = {}
        self._entry: dict[str, Plain] = {
            "stage": work.job.stage,
            "worker": work.job.worker_id,
            "host": socket.gethostname(),
            "attempt": work.job.attempt,
            "started_s": self._clock.monotonic(),
        }

    def input_read(self, nbytes: int, path: str, duration_s: float) -> None:
        """Note how the input came: its bytes, ``p2p`` or ``store``, and the seconds that reading took."""
        self._entry |= {"input_bytes": nbytes, "path": path, "transfer_s": duration_s}

    def embedding(self, role: str, found: str) -> None:
        """Note where a text's embedding came from: ``encoded``, ``memory`` or ``store``; ``kept`` past the encoder."""
        self._embeddings[role] = found

    def now(self) -> float:
        return self._clock.monotonic()

    def finish(self, payload: Mapping[str, Plain], **more: Plain) -> list[Plain]:
        """Return the trace of the task so far, with this stage's entry at its end."""
        before = payload.get(KEY)
        if self._embeddings:
            self._entry["embeddings"] = dict(self._embeddings)
        entry = self._entry | more | {"ended_s": self._clock.monotonic()}
        return [*(before if isinstance(before, list) else []), entry]
