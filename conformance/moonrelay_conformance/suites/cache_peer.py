"""A process with a cache, for the cache suite: ``python -m moonrelay_conformance.suites.cache_peer``.

Owns one connector; a cache is made for each order. Encoding writes the process's number into a file as it begins, so
that the suite can count and kill. What it encodes is unlike what any other call encodes.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from pathlib import Path
from typing import Any

from moonrelay_conformance.corpus import trees
from moonrelay_conformance.suites.cache_bench import FIELDS, MEMORY_BYTES, entry
from moonrelay_conformance.suites.part_process import serve
from moonrelay_conformance.targets.recipe import made_from


class CachePeer:
    """The served object; its methods are the orders."""

    def __init__(self, target: list[str], url: str, capacity_bytes: int, namespace: str) -> None:
        self._target = made_from(target)
        self._conn = self._target.connector(url, capacity_bytes=capacity_bytes, namespace=namespace)
        self._conn.store()

    def key(self, changes: dict[str, Any]) -> str:
        """Return the digest of the key with these changes."""
        return str(self._target.key(**{**FIELDS, **changes}).digest)

    def ask(
        self, word: str, prompt: str, begun: str, first_s: float, hold_s: float, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Ask a new cache for a prompt; return the digest of what came, and the counters.

        Args:
            word: Namespace of the cache.
            prompt: The prompt.
            begun: File of those that began to encode.
            first_s: How long the first of all takes for it.
            hold_s: How long a later one does.
            settings: Further ones of the cache.
        """

        def encode() -> object:
            with open(begun, "ab", buffering=0) as file:
                file.write(f"{os.getpid()}\n".encode())
            first = Path(begun).read_text().split()[0] == str(os.getpid())
            threading.Event().wait(first_s if first else hold_s)
            return trees.build(entry(secrets.randbelow(1 << 30)))

        with self._target.make(self._conn, MEMORY_BYTES, namespace=word, **settings) as cache:
            tree = cache.get_or_encode(self._target.key(**{**FIELDS, "prompt": prompt}), encode)
            return {"digest": trees.digest(tree), **dataclasses.asdict(cache.counters())}

    def reset(self) -> None:
        """Nothing of a test is kept here."""

    def close(self) -> None:
        """Disconnect."""
        self._conn.close()


if __name__ == "__main__":
    serve(CachePeer)
