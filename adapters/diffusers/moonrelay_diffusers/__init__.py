"""Runs diffusers pipelines as three stages: encode, denoise and decode, each with its own modules only.

Importing this package imports neither torch nor diffusers.
"""

from moonrelay_diffusers.request import GenerationRequest
from moonrelay_diffusers.stages import load_stage, resolve_request

__all__ = ["GenerationRequest", "load_stage", "resolve_request"]
