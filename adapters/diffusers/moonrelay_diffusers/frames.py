"""Frames: from the pipeline's floats to pixels, and a digest that says whether two results are the same.

Owns the form of a result. Decoding happens elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from moonrelay_diffusers.families.base import FrameKind, Frames

DIGEST_ALGORITHM = "xxh3_128"


def to_pixels(floats: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Turn floats in 0..1 into pixels 0..255, rounding as diffusers does for ``output_type="pil"``."""
    import numpy as np

    return (floats * 255).round().astype(np.uint8)


def of_kind(floats: npt.NDArray[np.float32], kind: FrameKind) -> Frames:
    """Return the floats as they are, or as pixels."""
    return floats if kind == "float" else to_pixels(floats)


def frames_digest(frames: Frames) -> str:
    """Return a digest of frames: 32 hex digits over type, shape and bytes in C order.

    Equal digests mean equal bits; the type is part of it, so pixels and floats never compare equal.
    """
    import numpy as np
    import xxhash

    canonical = np.ascontiguousarray(frames)
    digest = xxhash.xxh3_128()
    digest.update(f"{canonical.dtype.str}{canonical.shape}".encode())
    digest.update(canonical.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
