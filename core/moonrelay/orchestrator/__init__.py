"""The service round the queue: workers that take a stage's jobs, move the payloads and settle the jobs."""

from moonrelay.orchestrator.program import CachesEmbeddings, CachesFeatures, Outcome, StageProgram, Work
from moonrelay.orchestrator.worker import StageLoop

__all__ = ["CachesEmbeddings", "CachesFeatures", "Outcome", "StageLoop", "StageProgram", "Work"]
