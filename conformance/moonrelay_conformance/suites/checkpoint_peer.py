"""A denoise worker that can be killed: ``python -m moonrelay_conformance.suites.checkpoint_peer``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moonrelay_conformance.suites.checkpoint_loop import KINDS, Loop, identity
from moonrelay_conformance.suites.part_process import serve
from moonrelay_conformance.targets.recipe import made_from

_IDLE_S = 60.0


class CheckpointPeer:
    """The served object; its methods are the orders."""

    def __init__(self, target: list[str], url: str, capacity_bytes: int, namespace: str) -> None:
        self._target = made_from(target)
        self._conn = self._target.connector(url, capacity_bytes=capacity_bytes, namespace=namespace)
        self._conn.store()

    def run(self, request: str, kind: str, until: int, every: int) -> Iterator[dict[str, Any]]:
        """Run a loop from its newest checkpoint on, and leave its checkpoints.

        Yields:
            ``step`` right after each step was handed to be saved, ``whole`` once that is done, ``digest`` at the end.
        """
        chosen = next(one for one in KINDS if one.name == kind)
        with self._target.make(self._conn, every=every) as checkpointer:
            session = checkpointer.session(identity(request, chosen))
            state = session.resume()
            loop = Loop(chosen, seed=7)
            if state is not None:
                loop.restore(state)
            first = loop.step
            while loop.step < until:
                loop.run(loop.step + 1, session=session)
                yield {"step": loop.step}
                checkpointer.wait_idle(_IDLE_S)
                yield {"whole": loop.step}
            yield {"digest": loop.digest(), "first": first, "computed": loop.computed}

    def reset(self) -> None:
        """Nothing of a test is kept here."""

    def close(self) -> None:
        """Disconnect."""
        self._conn.close()


if __name__ == "__main__":
    serve(CheckpointPeer)
