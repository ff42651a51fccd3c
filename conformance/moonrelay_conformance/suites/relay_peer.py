"""A client of the relay suite in a process of its own: ``python -m moonrelay_conformance.suites.relay_peer``.

Owns one relay. Objects are made from seeds, so that a writer that was killed leaves something whose right bytes are
known.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

from moonrelay.clock import Deadline, SystemClock
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from moonrelay_conformance.suites.part_process import pattern, serve
from moonrelay_conformance.targets.recipe import made_from

_TIMEOUT_S = 30.0


class RelayPeer:
    """The served object; its methods are the orders."""

    def __init__(self, target: list[str], url: str, capacity_bytes: int, namespace: str) -> None:
        made = made_from(target)
        self._relay: Relay = made.make(url, capacity_bytes=capacity_bytes, namespace=namespace)
        self._relay.start()

    def put(self, key: str, seed: int, nbytes: int) -> None:
        """Store what a seed stands for."""
        buffer = ctypes.create_string_buffer(pattern(seed, nbytes), nbytes)
        self._relay.put(key, [Extent(ctypes.addressof(buffer), nbytes)], _soon())

    def get(self, key: str, seed: int, nbytes: int) -> str:
        """Say how an object compares with what a seed stands for: ``same``, ``other``, ``absent``."""
        buffer = ctypes.create_string_buffer(nbytes)
        if not self._relay.get(key, [Extent(ctypes.addressof(buffer), nbytes)], _soon()):
            return "absent"
        return "same" if buffer.raw == pattern(seed, nbytes) else "other"

    def race(self, prefix: str, count: int, value: str) -> list[str]:
        """Try to be the first with ``value`` under ``count`` keys; return what stands under each."""
        return [self._relay.put_if_absent(f"{prefix}/{n}", value.encode(), _soon()).decode() for n in range(count)]

    def churn(self, prefix: str, nbytes: int, keep: int) -> Iterator[list[object]]:
        """Store one object after the other, number ``n`` from seed ``n``, keeping the last ones; never ends.

        Yields:
            ``["begin", n]`` right before an object is stored, ``["stored", n]`` right after.
        """
        for n in itertools.count():
            buffer = ctypes.create_string_buffer(pattern(n, nbytes), nbytes)
            yield ["begin", n]
            self._relay.put(f"{prefix}/{n}", [Extent(ctypes.addressof(buffer), nbytes)], _soon())
            yield ["stored", n]
            if n >= keep:
                self._relay.remove([f"{prefix}/{n - keep}"], _soon())

    def reset(self) -> None:
        """Nothing of a test is kept here."""

    def close(self) -> None:
        """Disconnect."""
        self._relay.close()


def _soon() -> Deadline:
    return Deadline(_TIMEOUT_S, SystemClock())


if __name__ == "__main__":
    serve(RelayPeer)
