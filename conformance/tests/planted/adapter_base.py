"""What the planted faults of adapters share: a target that is right but for one thing, and who must notice.

Owns how a fault says by which test it is caught; the faults themselves are `planted.adapters`, `planted.adapter_leases`
and `planted.adapter_leaks`. Nothing here changes more than one connector: processes of sides serve other tests too.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moonrelay import DiffusionConnector
from moonrelay.errors import LeaseLost
from moonrelay_conformance.sides.connector_side import ConnectorSide
from moonrelay_conformance.targets.adapter import SideClaim, Ticket
from moonrelay_conformance.targets.connector import ConnectorTarget

if TYPE_CHECKING:
    import torch

    from moonrelay.connector.entry import Entry


@dataclass(frozen=True, slots=True)
class Catch:
    """Who must catch a fault.

    Attributes:
        test: Name of the test function.
        says: Words of the reason that it gives; they say what broke.
        id: Case or scenario; empty is the test's own.
        param: The one parameter of the test that is tried; empty is all of them.
        also: Cases that must have gone before.
    """

    test: str
    says: str
    id: str = ""
    param: str = ""
    also: tuple[str, ...] = ()

    @property
    def select(self) -> tuple[str, ...]:
        """What of the suite has to be run."""
        test = f"{self.test}*{self.param}*" if self.param else self.test
        return (*self.also, self.id or test)


class Planted(ConnectorTarget):
    """`ConnectorTarget` with one fault: its `Side`, or what it declares. Abstract where ``caught`` is not set.

    Attributes:
        caught: Who must catch it.
        over: The only route that is tried.
        Side: The broken side; none where the fault is the declaration.
    """

    caught: ClassVar[Catch]
    over: ClassVar[tuple[str, ...]] = ("p2p",)
    Side: ClassVar[type[ConnectorSide]] = ConnectorSide

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
        if "Side" in vars(cls):
            cls.side = f"{cls.__module__}:{cls.__qualname__}.Side"

    def routes(self) -> tuple[str, ...]:
        return self.over


class ChangedClaim(SideClaim):
    """A claim that passes everything on; faults override what they break."""

    def __init__(self, claim: SideClaim, side: ChangedSide) -> None:
        self.claim = claim
        self.side = side

    def read(self, *, timeout_s: float) -> Any:
        return self.side.changed(self.claim.read(timeout_s=timeout_s))

    def chunks(self, *, timeout_s: float) -> Iterator[Any]:
        return self.claim.chunks(timeout_s=timeout_s)

    def ack(self, *, timeout_s: float) -> None:
        self.claim.ack(timeout_s=timeout_s)

    def nack(self) -> None:
        self.claim.nack()

    def metadata(self) -> dict[str, Any] | None:
        return self.claim.metadata()


class ChangedSide(ConnectorSide):
    """A side that delivers `changed` trees, by claims of the class ``claims``."""

    claims: ClassVar[type[ChangedClaim]] = ChangedClaim

    def changed(self, tree: Any) -> Any:
        """Return what is delivered in place of ``tree``."""
        return tree

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        return self.changed(super().receive(ticket, timeout_s=timeout_s))

    def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
        return self.claims(super().claim(ticket, timeout_s=timeout_s), self)


class LapsesOnce(Planted):
    """No fault: a side's first claim lapses, as on a machine that is too busy to renew it."""

    class Side(ConnectorSide):
        lapsed = False

        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            if not self.lapsed:
                self.lapsed = True
                self.claim(ticket, timeout_s=timeout_s).nack()
                message = "the claim lapsed"
                raise LeaseLost(message)
            return super().receive(ticket, timeout_s=timeout_s)


class UnprovedSide(ConnectorSide):
    """A side whose bytes carry no digest, so that nobody notices other ones on the way."""

    def make_connector(self) -> DiffusionConnector:
        return DiffusionConnector(**self.connector_arguments(), integrity="off")


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a tree with ``change`` applied to its leaves, tensors and plain values."""
    if type(tree) is dict:
        return {key: mapped(value, change) for key, value in tree.items()}
    if type(tree) in (list, tuple, set, frozenset):
        return type(tree)(mapped(value, change) for value in tree)
    return change(tree)


def tensors_mapped(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a tree with ``change`` applied to its tensors."""
    import torch

    return mapped(tree, lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, sharing its memory."""
    import torch

    return tensor.view(-1).view(torch.uint8)


def entry_of(side: ConnectorSide, ticket: Ticket) -> Entry | None:
    """Return what a producer's connector keeps for a payload; ``None`` where it has ended."""
    from moonrelay_conformance.sides.connector_side import handle_of

    ledger = side.connector._outbox.ledger
    with ledger.changed:
        return ledger._entries.get(handle_of(ticket).id)


def give_memory_back(entry: Entry) -> None:
    """Let the pool have a payload's memory while the payload lives: it is still served, and owned no more."""
    import torch

    from moonrelay.layout import tensor_from_buffer

    for leaf in entry.placement.leaves:
        memory = (ctypes.c_uint8 * leaf.spec.nbytes).from_address(leaf.address)
        leaf.tensor = leaf.source = tensor_from_buffer(torch.frombuffer(memory, dtype=torch.uint8), leaf.spec)
    freeing, entry.placement._on_release = entry.placement._on_release, []
    for free in freeing:
        free()
