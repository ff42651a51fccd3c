"""Frames: pixels as diffusers rounds them, and digests that tell results apart."""

from __future__ import annotations

import numpy as np

from moonrelay_diffusers.frames import frames_digest, to_pixels


def test_pixels_are_rounded_as_diffusers_does_it() -> None:
    from diffusers.image_processor import VaeImageProcessor

    floats = np.random.default_rng(1).random((2, 16, 16, 3), dtype=np.float32)
    floats.reshape(-1)[:4] = (0.0, 1.0, 0.5, 0.5 / 255)
    images = VaeImageProcessor.numpy_to_pil(floats)
    assert np.array_equal(to_pixels(floats), np.stack([np.asarray(image) for image in images]))


def test_a_digest_is_over_type_shape_and_bytes() -> None:
    frames = np.arange(48, dtype=np.uint8).reshape(2, 2, 4, 3)
    changed = frames.copy()
    changed[1, 1, 3, 2] ^= 1
    digests = {
        frames_digest(frames),
        frames_digest(changed),
        frames_digest(frames.reshape(2, 4, 2, 3)),
        frames_digest(frames.view(np.int8)),  # type: ignore[arg-type]
    }
    assert len(digests) == 4
    assert all(len(digest) == 32 for digest in digests)
    strided = np.asfortranarray(frames)
    assert not strided.flags.c_contiguous
    assert frames_digest(strided) == frames_digest(frames)
