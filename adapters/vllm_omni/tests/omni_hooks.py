"""A condition hook that a deploy YAML can name: remembers in its process, and takes notes for the test.

The key says whose encoder it is for; a test gives the file for the notes as that name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


class Remembers:
    """Encodes each key once."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def __call__(self, key: Any, encode: Callable[[], object]) -> object:
        hit = key.digest in self.kept
        if not hit:
            self.kept[key.digest] = encode()
        with Path(key.encoder).open("a", encoding="utf-8") as notes:
            notes.write(f"{'hit' if hit else 'miss'} {key.arguments['prompt'][0]}\n")
        return self.kept[key.digest]
