"""What the undivided host answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightx2v_cluster import Monolith, Outcome


class Right:
    """The undivided host's answers, each asked for once; its server starts with the first question."""

    def __init__(self, model: Path, folder: Path, environment: dict[str, str]) -> None:
        self._server = Monolith(model, folder, environment)
        self._started = False
        self._known: dict[str, Outcome] = {}

    def __call__(self, **request: Any) -> Outcome:
        """Return what the undivided host makes of a request."""
        key = repr(sorted(request.items()))
        if key not in self._known:
            if not self._started:
                self._server.start()
                self._started = True
            self._known[key] = self._server.ask(**request)
        return self._known[key]

    def end(self) -> None:
        self._server.end()
