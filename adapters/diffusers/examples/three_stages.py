"""Make a video in three stages and hold it against the undivided pipeline: ``python three_stages.py [MODEL]``.

Without a model it builds a tiny random Wan; nothing is downloaded. All three stages run in this one process here; what
moves between them is exactly what Moonrelay moves between processes.
"""

from __future__ import annotations

import sys
import tempfile

from moonrelay_diffusers import GenerationRequest, load_stage, tiny
from moonrelay_diffusers.frames import frames_digest
from moonrelay_diffusers.numerics import deterministic_setup
from moonrelay_diffusers.reference import undivided


def main(model: str) -> bool:
    """Run one request both ways and say whether the results are equal."""
    deterministic_setup(threads=1)
    request = GenerationRequest(
        prompt="a red fox in the snow", seed=7, height=96, width=96, num_frames=17, num_inference_steps=20
    )

    conditioning = load_stage(model, "encode").run(request)
    latents = load_stage(model, "denoise").run(conditioning)
    params = conditioning["params"]
    assert isinstance(params, dict)
    frames = load_stage(model, "decode").run_chunks(latents.tensor_split(3, dim=2), params)

    staged, whole = frames_digest(frames), frames_digest(undivided(model, request))
    print(f"three stages {staged}\nundivided    {whole}\nidentical    {staged == whole}")  # noqa: T201
    return staged == whole


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        chosen = sys.argv[1] if len(sys.argv) > 1 else str(tiny.build_wan(folder))
        sys.exit(0 if main(chosen) else 1)
