"""A producer of the engine suite in a process of its own: ``python -m moonrelay_conformance.suites.engine_peer``.

Owns one engine and the memory that it serves, filled from seeds.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import msgspec

from moonrelay.handle import Region
from moonrelay_conformance.suites.part_process import pattern, serve
from moonrelay_conformance.targets.recipe import made_from


class EnginePeer:
    """The served object; its methods are the orders."""

    def __init__(self, target: list[str], folder: str, changes: dict[str, Any]) -> None:
        made = made_from(target)
        self._engine = made.make(made.config(Path(folder), **changes))
        self._regions: dict[str, Region] = {}
        self._engine.start()

    def address(self) -> Any:
        """Return the engine's address."""
        return msgspec.to_builtins(self._engine.address)

    def allocate(self, name: str, nbytes: int, seed: int) -> Any:
        """Allocate memory and fill it; return its region."""
        region = self._engine.allocate(nbytes)
        self._engine.commit(region, 0, nbytes)
        self._regions[name] = region
        self.fill(name, seed)
        return msgspec.to_builtins(region)

    def fill(self, name: str, seed: int) -> None:
        """Fill memory anew."""
        region = self._regions[name]
        ctypes.memmove(region.base, pattern(seed, region.nbytes), region.nbytes)

    def release(self, name: str) -> None:
        """Release memory."""
        self._engine.release(self._regions.pop(name))

    def reset(self) -> None:
        """Release everything."""
        while self._regions:
            self._engine.release(self._regions.popitem()[1])

    def close(self) -> None:
        """Release everything, and close the engine."""
        self.reset()
        self._engine.close()


if __name__ == "__main__":
    serve(EnginePeer)
