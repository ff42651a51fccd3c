"""The undivided pipeline: what the three stages must equal.

Owns the yardstick. It calls diffusers' own pipeline class, and of ours only what turns a request into arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonrelay_diffusers.families import family_named
from moonrelay_diffusers.families.base import Placement
from moonrelay_diffusers.frames import of_kind
from moonrelay_diffusers.model import inspect_model
from moonrelay_diffusers.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from moonrelay_diffusers.families.base import FrameKind, Frames
    from moonrelay_diffusers.stages import DTypes


class Reference:
    """A whole pipeline, loaded once.

    Args:
        model: As for `load_stage`.
        device: Where all modules live.
        dtype: As for `load_stage`.
        family: As for `load_stage`.

    Threads: one `run` at a time. Blocks: while loading.
    """

    def __init__(self, model: str, *, device: str = "cpu", dtype: DTypes = None, family: str | None = None) -> None:
        from moonrelay_diffusers.families.common import load_pipeline

        self.info = inspect_model(model, family=family)
        self._family = family_named(self.info.family)
        self._pipe = load_pipeline(
            self.info,
            self._family.pipeline_class,
            self.info.components(),
            Placement(device=device, dtype=dtype),
        )

    def run(
        self,
        request: GenerationRequest,
        *,
        kind: FrameKind = "uint8",
        on_step: Callable[[int, int], None] | None = None,
    ) -> Frames:
        """Run the pipeline's own ``__call__`` with the request's seed.

        Returns:
            Frames as ``[frames, height, width, 3]``; one frame for an image.

        Raises:
            ConfigError: The model cannot do what the request asks.
        """
        from moonrelay_diffusers.families.common import noise_source, step_callback
        from moonrelay_diffusers.scheduling import seeded_steps

        resolved = self._family.resolve(request, self.info)
        arguments = self._family.call_arguments(resolved)
        if on_step is not None:
            arguments |= step_callback(resolved.num_inference_steps or 0, on_step, None)
        generator = noise_source(resolved.seed)
        with seeded_steps(self._pipe.scheduler, generator):
            output = self._pipe(**arguments, generator=generator, output_type="np", return_dict=False)[0]
        return of_kind(output[0] if output.ndim == 5 else output, kind)


def undivided(
    model: str, request: GenerationRequest, *, device: str = "cpu", dtype: DTypes = None, kind: FrameKind = "uint8"
) -> Frames:
    """Load the whole pipeline, run one request and drop it again; see `Reference` for more than one."""
    return Reference(model, device=device, dtype=dtype).run(request, kind=kind)
