"""The suite for host adapters: corpus, leases, leaks, faults, and a model of the lease to compare with."""

from __future__ import annotations

from moonrelay_conformance.suites.adapter.base import AdapterSuite

__all__ = ["AdapterConformance"]


class AdapterConformance(AdapterSuite):
    """What every host adapter must pass. Subclass it and set ``target``."""
