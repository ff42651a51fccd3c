"""Frames as files: written under a temporary name, then moved, so that nobody sees half a file.

Owns the formats. Which name a file gets is the caller's business.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    from moonrelay_diffusers.families.base import Frames

FORMATS = ("mp4", "gif", "png", "npy")
FPS = 16


def write_frames(frames: Frames, folder: Path, name: str, file_format: str) -> Path:
    """Write uint8 frames to ``folder/name.format``. Atomic.

    Args:
        frames: ``[frames, height, width, 3]``, uint8. One frame becomes a PNG whatever video format was asked for.
        folder: Made when missing.
        name: File name without ending.
        file_format: One of `FORMATS`; ``npy`` keeps the very bytes.

    Returns:
        The file.

    Raises:
        ConfigError: An unknown format, or the library that writes it is not installed.
    """
    if file_format not in FORMATS:
        message = f"file_format={file_format!r} is not known; use one of {', '.join(FORMATS)}"
        raise ConfigError(message, field="file_format")
    if frames.shape[0] == 1 and file_format in ("mp4", "gif"):
        file_format = "png"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.{file_format}"
    part = folder / f".{name}.part.{file_format}"
    try:
        _write(frames, part, file_format)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _write(frames: Frames, part: Path, file_format: str) -> None:
    if file_format == "npy":
        import numpy as np

        with part.open("wb") as file:
            np.save(file, frames, allow_pickle=False)
        return
    try:
        import imageio.v3 as iio
    except ImportError as exc:
        message = f"writing {file_format} needs imageio; pip install 'moonrelay[demo]'"
        raise ConfigError(message, field="file_format") from exc
    if file_format == "png":
        iio.imwrite(part, frames[0], extension=".png")
    elif file_format == "gif":
        iio.imwrite(part, frames, extension=".gif", duration=1000 / FPS, loop=0)
    else:
        iio.imwrite(part, frames, extension=".mp4", fps=FPS, macro_block_size=2, output_params=["-loglevel", "error"])
