"""What the tests of an adapter share: the base class with the fixture ``stage``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import pytest

from moonrelay_conformance.suites.adapter.stage import Stage
from moonrelay_conformance.suites.base import Suite

if TYPE_CHECKING:
    from moonrelay_conformance.sides.process import SidePool
    from moonrelay_conformance.targets.adapter import AdapterGround, AdapterTarget


class AdapterSuite(Suite):
    """Base of the classes of which `AdapterConformance` is made."""

    kind: ClassVar[str] = "adapter"

    @pytest.fixture(scope="class")
    @classmethod
    def stage(cls, target: AdapterTarget, pool: SidePool, ground: AdapterGround) -> Iterator[Stage]:
        """The sides that the tests of the class share."""
        made = Stage(target, pool, ground)
        yield made
        made.close()
