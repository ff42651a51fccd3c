"""The suite of relays: `RelayConformance`, assembled from the modules beside it."""

from __future__ import annotations

from typing import ClassVar

from moonrelay_conformance.suites.base import Suite


class RelayConformance(Suite):
    """What every relay must do. Subclass it and set `target`."""

    kind: ClassVar[str] = "relay"
