"""The suite of transfer engines: `EngineConformance`, assembled from the modules beside it."""

from __future__ import annotations

from typing import ClassVar

from moonrelay_conformance.suites.base import Suite


class EngineConformance(Suite):
    """What every transfer engine must do. Subclass it and set `target`."""

    kind: ClassVar[str] = "engine"
