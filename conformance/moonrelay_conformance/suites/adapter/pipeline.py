"""The host's own pipeline: divided over processes it gives what it gives undivided."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.targets.adapter import AdapterTarget

#: A tiny random model, in several processes of a busy machine, each of which imports its host anew.
PIPELINE_S = 300.0


class PipelineTests(AdapterSuite):
    """A real pipeline of the host."""

    @pytest.mark.timeout(PIPELINE_S + 30.0)  # a single check's usual bound is for one that starts nothing so large
    @promise(
        Level.L2,
        "The host's pipeline, divided over processes, gives bit for bit what it gives undivided",
        requires=[Capability.PIPELINE],
    )
    def test_divided_pipeline_equals_undivided(self, target: AdapterTarget, tmp_path: Path) -> None:
        run = target.pipeline(tmp_path, timeout_s=PIPELINE_S)
        assert run.processes > 1, "the divided pipeline ran in one process; nothing was handed over"
        assert run.undivided, "the undivided pipeline gave nothing to compare with"
        assert run.divided == run.undivided, "the divided pipeline gave something else than the undivided one"
