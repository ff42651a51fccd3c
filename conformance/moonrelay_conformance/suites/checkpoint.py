"""The suite of step checkpoints: `CheckpointConformance`, assembled from the modules beside it.

All tests of a run share one store and two connectors; each has requests of its own, and removes what it left.
"""

from __future__ import annotations

from moonrelay_conformance.suites.checkpoint_identity import CheckpointIdentities
from moonrelay_conformance.suites.checkpoint_life import CheckpointLife
from moonrelay_conformance.suites.checkpoint_resume import CheckpointResume


class CheckpointConformance(CheckpointResume, CheckpointIdentities, CheckpointLife):
    """What step checkpoints must do over every relay. Subclass it and set `target`."""
