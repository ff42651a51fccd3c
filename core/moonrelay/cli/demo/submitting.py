"""When the demo submits which request, and past which stage.

A request whose texts another one is about to encode waits until they are, and then goes past the encode stage; all
others are submitted at once. Owns that order only; the queue decides the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moonrelay.orchestrator import shortcut
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import Plain, Priority, StageTask

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.cli.demo.board import Board


class Submitter:
    """Submits the run's requests.

    Args:
        queue: Where to.
        stages: Names of the pipeline's stages.
        requests: Each request's fields, by id.
        ahead: Payload of the ``denoise`` task of those that could go past encode, by id.
        cache: Asked whether embeddings are there; ``None`` where none is used.
        interactive: The one request that is interactive, all others being batch, and that waits for `release`.

    Threads: one.
    """

    def __init__(
        self,
        queue: StageQueue,
        stages: tuple[str, ...],
        requests: Mapping[str, Mapping[str, Plain]],
        ahead: Mapping[str, Mapping[str, Plain]],
        cache: EmbeddingCache | None,
        interactive: str | None = None,
    ) -> None:
        self._queue = queue
        self._stages = stages
        self._waiting = dict(requests)
        self._ahead = ahead if cache is not None else {}
        self._cache = cache
        self.interactive = interactive
        self._held_back = interactive
        #: Which request encodes what.
        self._promised: dict[str, str] = {}

    def release(self) -> None:
        """Let the interactive request be submitted with the next look."""
        self._held_back = None

    def _priority(self, name: str) -> Priority | None:
        if self.interactive is None:
            return None
        return "interactive" if name == self.interactive else "batch"

    def submit_due(self, board: Board) -> None:
        """Submit what need not wait, or need not wait any more."""
        for name in list(self._waiting):
            if name == self._held_back:
                continue
            payload = self._ahead.get(name)
            digests = [key.digest for key in shortcut.kept_in(payload).values()]
            owners = {self._promised.get(digest) for digest in digests}
            if owners and None not in owners and not all(_encoded(board, owner) for owner in owners):
                continue
            for digest in digests:
                self._promised.setdefault(digest, name)
            shortcut.submit(
                self._queue,
                StageTask(
                    request_id=name,
                    stage=self._stages[0],
                    payload={"request": self._waiting.pop(name)},
                    priority=self._priority(name),
                ),
                ahead=None if payload is None else StageTask(stage=self._stages[1], payload=payload),
                cache=self._cache,
            )


def _encoded(board: Board, name: str | None) -> bool:
    row = board.requests.get(name or "")
    return row is None or row.state in ("done", "failed") or row.cells[board.stages[0]].phase in ("done", "failed")
