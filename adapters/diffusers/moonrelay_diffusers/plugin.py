"""The diffusers adapter as the plugin `moonrelay.adapters:diffusers`.

Owns what the command line and the workers ask of a host: is it there, which version, which stages, load one. Imports
neither torch nor diffusers until a stage is loaded.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from moonrelay_diffusers.families import FAMILIES
from moonrelay_diffusers.families.base import STAGES, Stage, StageRunner
from moonrelay_diffusers.stages import DTypes, load_stage

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
