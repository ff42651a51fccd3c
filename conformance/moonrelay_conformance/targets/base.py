"""What every target is: something with a name, a kind, and declared capabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.results import TargetInfo


class Target(ABC):
    """Something that the suite is run against. Cheap to make; starts nothing and imports no host before it is asked to.

    Attributes:
        kind: ``adapter``, ``engine``, ``relay`` or ``queue``; set by the subclass for its kind.
        name: Its name among those of its kind.
    """

    kind: ClassVar[str]
    name: str

    @abstractmethod
    def capabilities(self) -> Mapping[Capability, Support]:
        """Return what it can do; a capability that is not named is unsupported."""

    def distribution(self) -> str:
        """Return who provides it, e.g. ``"moonrelay 0.1.0"``; empty where unknown."""
        return ""

    def host(self) -> str:
        """Return the framework with its version, e.g. ``"diffusers 0.42.1"``; empty where there is none."""
        return ""

    def routes(self) -> tuple[str, ...]:
        """Return the routes over which cases and scenarios are run; empty where the kind knows no routes."""
        return ()

    def named_routes(self) -> tuple[str, ...]:
        """Return further routes, over which only those checks are run that name them."""
        return ()

    def supports(self, *capabilities: Capability) -> bool:
        """Return whether all of ``capabilities`` are declared as there."""
        declared = self.capabilities()
        return all(declared.get(one, Support.UNSUPPORTED).there for one in capabilities)

    def lacking(self, *capabilities: Capability) -> tuple[Capability, ...]:
        """Return those of ``capabilities`` that are not there."""
        return tuple(one for one in capabilities if not self.supports(one))

    def info(self) -> TargetInfo:
        """Return what the report says of it."""
        declared = self.capabilities()
        return TargetInfo(
            kind=self.kind,
            name=self.name,
            distribution=self.distribution(),
            host=self.host(),
            capabilities={one.value: declared.get(one, Support.UNSUPPORTED).value for one in Capability},
            routes=self.routes(),
        )
