"""A tiny random Wan that SGLang serves: a folder in the layout of diffusers, named as its registry wants it."""

from __future__ import annotations

from pathlib import Path

#: The host knows models by the last part of their path.
NAME = "Wan2.1-T2V-1.3B-Diffusers"


def build(folder: Path) -> Path:
    """Build the model below a folder; return its own."""
    from moonrelay_diffusers import tiny

    return tiny.build_wan(folder / NAME)
