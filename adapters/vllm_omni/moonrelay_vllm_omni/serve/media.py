"""Pixels to files: PNG and MP4. CPU work, for a thread beside the event loop."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from moonrelay_vllm_omni.serve.errors import GenerationFailed

if TYPE_CHECKING:
    import numpy as np

#: H.264 where PyAV has it, and what it always has.
_CODECS = ("libx264", "mpeg4")


def png(frames: Sequence[Any]) -> bytes:
    """Return the one image of ``frames`` as PNG.

    Raises:
        GenerationFailed: It is not one image.
    """
    from PIL import Image

    pixels = _pixels(frames)
    if len(pixels) != 1:
        raise GenerationFailed(f"the decode stage gave {len(pixels)} images where one was asked for")
    held = io.BytesIO()
    Image.fromarray(pixels[0]).save(held, format="PNG")
    return held.getvalue()


def mp4(frames: Sequence[Any], fps: int) -> bytes:
    """Return ``frames`` as an MP4 of so many frames a second.

    Raises:
        GenerationFailed: They are no frames.
    """
    import av

    pixels = _pixels(frames)
    codec = next(name for name in _CODECS if name in av.codecs_available)
    held = io.BytesIO()
    with av.open(held, mode="w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(fps))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for one in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(one, format="rgb24")))
        container.mux(stream.encode())
    return held.getvalue()


def _pixels(frames: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return frames of any of the host's forms as one array of bytes: frame, row, column, colour."""
    import numpy as np

    each = [np.asarray(one) for one in frames]
    if not each or any(one.ndim < 3 or one.shape[-1] != 3 for one in each):
        shapes = [one.shape for one in each]
        raise GenerationFailed(f"the decode stage gave arrays of {shapes} where RGB pixels were due")
    pixels = np.concatenate([one.reshape(-1, *one.shape[-3:]) for one in each])
    if pixels.dtype != np.uint8:
        pixels = np.rint(np.clip(np.nan_to_num(pixels), 0.0, 1.0) * 255.0).astype(np.uint8)
    return np.ascontiguousarray(pixels)
