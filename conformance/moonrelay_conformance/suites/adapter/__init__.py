"""The suite for host adapters: corpus, leases, leaks, faults, and a model of the lease to compare with."""

from __future__ import annotations

from moonrelay_conformance.suites.adapter.caching import CheckpointTests, EmbeddingCacheTests
from moonrelay_conformance.suites.adapter.cases import CorpusTests
from moonrelay_conformance.suites.adapter.faults import ControlFaultTests, EngineFaultTests, RelayFaultTests
from moonrelay_conformance.suites.adapter.leaks import LeakTests
from moonrelay_conformance.suites.adapter.leases import LeaseTests
from moonrelay_conformance.suites.adapter.machine import ModelTests
from moonrelay_conformance.suites.adapter.peers import DeadConsumerTests, DeadProducerTests, WreckTests
from moonrelay_conformance.suites.adapter.pipeline import PipelineTests
from moonrelay_conformance.suites.adapter.scenarios import ScenarioTests

__all__ = ["AdapterConformance"]


class AdapterConformance(
    CorpusTests,
    ScenarioTests,
    LeaseTests,
    ModelTests,
    LeakTests,
    EngineFaultTests,
    RelayFaultTests,
    ControlFaultTests,
    DeadProducerTests,
    DeadConsumerTests,
    WreckTests,
    PipelineTests,
    EmbeddingCacheTests,
    CheckpointTests,
):
    """What every host adapter must pass. Subclass it and set ``target``."""
