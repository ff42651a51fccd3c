"""The diffusers adapter as the plugin `moonrelay.adapters:diffusers`.

Owns what the command line and the workers ask of a host: is it there, which version, which stages, load one. Imports
neither torch nor diffusers until a stage is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moonrelay_diffusers.families import FAMILIES
from moonrelay_diffusers.families.base import STAGES, Stage, StageRunner
from moonrelay_diffusers.reference import Reference
from moonrelay_diffusers.request import GenerationRequest
from moonrelay_diffusers.stages import DTypes, load_stage, resolve_request

if TYPE_CHECKING:
    from moonrelay.cache.checkpoint import Checkpointer
    from moonrelay.orchestrator.program import StageProgram
    from moonrelay.queueing.task import Plain
    from moonrelay_conformance.targets.adapter import AdapterTarget

#: Packages that the stages import, and the extra that brings them.
_NEEDED = ("torch", "diffusers", "transformers")
_REMEDY = "pip install 'moonrelay[diffusers]'"


class DiffusersAdapter:
    """Plain diffusers as a host: any supported pipeline, on CPU or GPU, in three stages."""

    name = "diffusers"
    host = "diffusers"
    stages: tuple[Stage, ...] = STAGES

    def host_version(self) -> str | None:
        """Return diffusers' version, ``None`` where it is not installed."""
        try:
            return version("diffusers")
        except PackageNotFoundError:
            return None

    def available(self) -> tuple[bool, str]:
        """Say whether stages can be loaded here, and why not; imports nothing heavy.

        Returns:
            ``(True, versions in words)`` or ``(False, what is missing and how to get it)``.
        """
        missing = [package for package in _NEEDED if find_spec(package) is None]
        if missing:
            return False, f"{', '.join(missing)} not installed; {_REMEDY}"
        found = ", ".join(f"{package} {version(package)}" for package in _NEEDED)
        return True, found

    def families(self) -> tuple[str, ...]:
        """Return the names of the supported families."""
        return tuple(family.name for family in FAMILIES)

    def load_stage(
        self, model: str, stage: Stage, *, device: str = "cpu", dtype: DTypes = None, family: str | None = None
    ) -> StageRunner:
        """Load one stage; see `moonrelay_diffusers.stages.load_stage`."""
        return load_stage(model, stage, device=device, dtype=dtype, family=family)

    def prepare(self, threads: int) -> dict[str, Plain]:
        """Make this process compute the same bits as all others; see `moonrelay_diffusers.numerics`.

        Returns:
            What decides bits here, as plain values; processes in which they are equal give equal results.
        """
        from moonrelay_diffusers.numerics import deterministic_setup

        return asdict(deterministic_setup(threads))

    def load_program(
        self,
        model: str,
        stage: Stage,
        *,
        output: Path,
        device: str = "cpu",
        dtype: DTypes = None,
        file_format: str = "mp4",
        checkpointer: Checkpointer | None = None,
    ) -> StageProgram:
        """Load one stage as a program of the worker loop; see `moonrelay_diffusers.programs.load_program`."""
        from moonrelay_diffusers.programs import load_program

        return load_program(
            model,
            stage,
            output=output,
            device=device,
            dtype=dtype,
            file_format=file_format,
            checkpointer=checkpointer,
        )

    def load_reference(
        self, model: str, *, device: str = "cpu", dtype: DTypes = None, family: str | None = None
    ) -> Reference:
        """Load the undivided pipeline, against which results are held."""
        return Reference(model, device=device, dtype=dtype, family=family)

    def resolve_request(
        self, model: str, request: GenerationRequest, *, family: str | None = None
    ) -> GenerationRequest:
        """Hold a request against a model; see `moonrelay_diffusers.stages.resolve_request`."""
        return resolve_request(model, request, family=family)

    def random_encoder(self, width: int, depth: int, inner: int, tokens: int) -> tuple[Callable[[], object], int]:
        """Make a text encoder of a stated size to be timed; see `moonrelay_diffusers.bench`."""
        from moonrelay_diffusers.bench import random_t5

        return random_t5(width, depth, inner, tokens)

    def conformance_target(self) -> AdapterTarget:
        """Return what the conformance suite tests; see `moonrelay_diffusers.conformance`."""
        from moonrelay_diffusers.conformance import DiffusersTarget

        return DiffusersTarget()
