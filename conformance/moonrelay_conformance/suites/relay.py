"""The suite of relays: `RelayConformance`, assembled from the modules beside it.

All tests of a run share one store of about 32 MiB and one started relay; each has keys of its own and removes them.
"""

from __future__ import annotations

from moonrelay_conformance.suites.relay_limits import RelayLimits
from moonrelay_conformance.suites.relay_objects import RelayObjects
from moonrelay_conformance.suites.relay_processes import RelayProcesses
from moonrelay_conformance.suites.relay_values import RelayValues


class RelayConformance(RelayObjects, RelayValues, RelayLimits, RelayProcesses):
    """What every relay must do. Subclass it and set `target`."""
