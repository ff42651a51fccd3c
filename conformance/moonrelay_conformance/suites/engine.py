"""The suite of transfer engines: `EngineConformance`, assembled from the modules beside it.

A test is run against an engine of the target's making. Reads that fail with a retryable error are tried again twice,
as the connector does; whatever an engine does beyond that is held to the letter of `moonrelay.transfer.base`.
"""

from __future__ import annotations

from moonrelay_conformance.suites.engine_bytes import EngineBytes
from moonrelay_conformance.suites.engine_life import EngineLife
from moonrelay_conformance.suites.engine_processes import EngineProcesses
from moonrelay_conformance.suites.engine_refusals import EngineRefusals


class EngineConformance(EngineBytes, EngineRefusals, EngineLife, EngineProcesses):
    """What every transfer engine must do. Subclass it and set `target`."""
