"""The language in which payloads are described."""

from __future__ import annotations

from typing import Any


def check(description: Any, place: str = "tree") -> None:
    """Raise `ConfigError` naming the place where a description is wrong. Loads no torch."""
