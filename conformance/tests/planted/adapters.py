"""Adapters that deliver something else than was published, refuse in the wrong way, or declare what is not so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moonrelay.errors import CapacityError, UnsupportedTensor
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import ConnectorSide
from moonrelay_conformance.targets.adapter import Outgoing, SidePublication, SideSettings, Ticket, not_supported
from planted.adapter_base import Catch, ChangedClaim, ChangedSide, Planted, UnprovedSide, mapped, raw, tensors_mapped

_NOT_PUBLISHED = "what was delivered is not what was published"


# -- bytes ------------------------------------------------------------------------------------------------------------


class StaleBytes(Planted):
    """The destination of the payload before is handed out again, with its old bytes in it."""

    caught = Catch("test_values_are_kept", _NOT_PUBLISHED, "bare-float16", also=("bare-float32",))

    class Side(ChangedSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.before: Any = None

        def changed(self, tree: Any) -> Any:
            before, self.before = self.before, raw(tree).clone()
            if before is None:
                return tree
            stale = tree.clone()
            common = min(len(before), len(raw(stale)))
            raw(stale)[:common] = before[:common]
            return stale


class ShortBytes(Planted):
    """Only the first half of every tensor is moved."""

    caught = Catch("test_values_are_kept", _NOT_PUBLISHED, "bare-float32")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return tensors_mapped(tree, self.half)

        @staticmethod
        def half(tensor: Any) -> Any:
            short = tensor.clone()
            raw(short)[len(raw(short)) // 2 :] = 0
            return short


class SwappedRequests(Planted):
    """Two requests in flight get each other's memory."""

    caught = Catch("test_requests_are_never_swapped", "was given the payload of request")

    class Side(ConnectorSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.first: str | None = None

        def publish(self, outgoing: Outgoing) -> Ticket:
            publication = self.connector.open(self._payload(outgoing))
            for chunk in range(outgoing.num_chunks):
                publication.ready(chunk)
            first, self.first = self.first, publication.handle.id
            ledger = self.connector._outbox.ledger
            with ledger.changed:
                if first in ledger._entries:
                    one, other = ledger._entries[first], ledger._entries[self.first]
                    one.placement, other.placement = other.placement, one.placement
                    mine, its = ledger._table._entries[first], ledger._table._entries[self.first]
                    mine.digests, its.digests = its.digests, mine.digests
                    self.first = None
            from moonrelay_conformance.sides.connector_side import ticket_of

            return ticket_of(publication.handle)


class CanonicalNan(Planted):
    """Not-a-numbers lose what they carry."""

    caught = Catch("test_values_are_kept", _NOT_PUBLISHED, "nan-float32")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return tensors_mapped(tree, lambda tensor: tensor.where(~tensor.isnan(), float("nan")))


class LazyConjugation(Planted):
    """The memory of a lazily conjugated view is sent as it lies there."""

    caught = Catch("test_values_are_kept", _NOT_PUBLISHED, "conj-complex64")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            tree = tensors_mapped(outgoing.tree, lambda tensor: tensor.conj() if tensor.is_conj() else tensor)
            return super().publish(msgspec.structs.replace(outgoing, tree=tree))


class StridesForgotten(Planted):
    """The memory of a transposed view is sent in the order in which it lies there."""

    caught = Catch("test_values_are_kept", _NOT_PUBLISHED, "transposed-bfloat16")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            import torch

            tree = tensors_mapped(
                outgoing.tree,
                lambda tensor: tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride()),
            )
            return super().publish(msgspec.structs.replace(outgoing, tree=tree))


# -- types, shapes and structure --------------------------------------------------------------------------------------


class WrongDtype(Planted):
    """bfloat16 travels as 16 bits, and arrives as the other type with so many."""

    caught = Catch("test_dtype_is_kept", _NOT_PUBLISHED, "mixed-dtypes")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            import torch

            return tensors_mapped(
                tree, lambda tensor: tensor.view(torch.float16) if tensor.dtype is torch.bfloat16 else tensor
            )


class ZeroDimBecomesOne(Planted):
    """A scalar tensor arrives with the shape (1,)."""

    caught = Catch("test_shape_is_kept", _NOT_PUBLISHED, "zero-dim-float32")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return tensors_mapped(tree, lambda tensor: tensor.reshape(tensor.shape or (1,)))


class PaddingDelivered(Planted):
    """Odd sizes are rounded up for the transfer, and not cut again."""

    caught = Catch("test_shape_is_kept", _NOT_PUBLISHED, "odd-byte-count")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            import torch

            return tensors_mapped(tree, lambda tensor: torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 8)))


class TupleBecomesList(Planted):
    """The wire's format has lists only."""

    caught = Catch("test_structure_is_kept", _NOT_PUBLISHED, "tuple-of-two")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return list(tree) if type(tree) is tuple else tree


class NoneDropped(Planted):
    """Lists arrive without their ``None``."""

    caught = Catch("test_structure_is_kept", _NOT_PUBLISHED, "none-between")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return [item for item in tree if item is not None] if type(tree) is list else tree


class KeysBecomeText(Planted):
    """The wire's format has text for keys only."""

    caught = Catch("test_structure_is_kept", _NOT_PUBLISHED, "int-keys")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return {str(key): value for key, value in tree.items()} if type(tree) is dict else tree


class DroppedSideField(Planted):
    """What is no tensor stays behind where its value is a number."""

    caught = Catch("test_plain_values_are_kept", _NOT_PUBLISHED, "plain-scalars")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return {key: value for key, value in tree.items() if type(value) is not int}


class RoundedFloat(Planted):
    """Numbers beside the tensors pass through 32 bits."""

    caught = Catch("test_plain_values_are_kept", _NOT_PUBLISHED, "float-exact")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            import torch

            return mapped(
                tree, lambda leaf: torch.tensor(leaf, dtype=torch.float32).item() if type(leaf) is float else leaf
            )


class IdentityLost(Planted):
    """One object in two places arrives as two."""

    caught = Catch("test_identity_is_kept", _NOT_PUBLISHED, "same-object-twice")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return tensors_mapped(tree, lambda tensor: tensor.clone())


class EmptyIsMissing(Planted):
    """Nothing to move is taken for nothing there."""

    caught = Catch("test_empty_is_not_missing", _NOT_PUBLISHED, "only-empty-tensor")

    class Side(ChangedSide):
        def changed(self, tree: Any) -> Any:
            return tensors_mapped(tree, lambda tensor: tensor if tensor.numel() else None)


class MetadataLost(Planted):
    """What travels with the ticket is not handed on."""

    caught = Catch("test_metadata_is_kept", "arrived as None", "metadata-scalars")

    class Side(ConnectorSide):
        def metadata(self, ticket: Ticket) -> dict[str, Any] | None:
            return None


# -- chunks -----------------------------------------------------------------------------------------------------------


class LostChunk(Planted):
    """One chunk in the middle is left out."""

    caught = Catch("test_chunks_arrive_once_in_order", "3 chunks were delivered, not 4", "chunks-in-order")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def chunks(self, *, timeout_s: float) -> Iterator[Any]:
                for number, chunk in enumerate(super().chunks(timeout_s=timeout_s)):
                    if number != 2:
                        yield chunk

        claims = Claim


class ChunkTwice(Planted):
    """One chunk is delivered again, in the place of the next."""

    caught = Catch("test_chunks_arrive_once_in_order", "chunks [2] are not those", "chunks-in-order")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def chunks(self, *, timeout_s: float) -> Iterator[Any]:
                before = None
                for number, chunk in enumerate(super().chunks(timeout_s=timeout_s)):
                    yield before if number == 2 else chunk
                    before = chunk

        claims = Claim


class ChunkTooMany(Planted):
    """The last chunk is delivered again, after the end."""

    caught = Catch("test_chunks_arrive_once_in_order", "more chunks were delivered than there are", "chunks-in-order")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def chunks(self, *, timeout_s: float) -> Iterator[Any]:
                chunk = None
                for chunk in super().chunks(timeout_s=timeout_s):
                    yield chunk
                yield chunk

        claims = Claim


class ChunksOutOfOrder(Planted):
    """Chunks are handed out as they came, not as they belong."""

    caught = Catch("test_chunks_arrive_once_in_order", "chunks [0, 1, 3] are not those", "chunks-out-of-order")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def chunks(self, *, timeout_s: float) -> Iterator[Any]:
                chunks = list(super().chunks(timeout_s=timeout_s))
                yield from (chunks[number] for number in (3, 0, 2, 1))

        claims = Claim


class ChunkReadyEarly(Planted):
    """All chunks are said to be final when the payload is opened."""

    caught = Catch("test_chunks_arrive_once_in_order", "are not those", "chunks-in-order")

    class Side(UnprovedSide):
        def open(self, outgoing: Outgoing) -> SidePublication:
            publication = super().open(outgoing)
            for chunk in range(outgoing.num_chunks):
                publication.ready(chunk)
            publication.ready = lambda chunk: None  # type: ignore[method-assign]
            return publication


# -- refusals ---------------------------------------------------------------------------------------------------------


class UntypedRefusal(Planted):
    """What cannot be carried ends in whatever the code runs into."""

    caught = Catch(
        "test_what_cannot_be_carried_is_refused_by_name",
        "must leave as a typed error, not as KeyError",
        "refuses-function",
    )

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            try:
                return super().publish(outgoing)
            except UnsupportedTensor as exc:
                raise KeyError(str(exc)) from exc


class NamelessRefusal(Planted):
    """A refusal that does not say which part of the payload it is about."""

    caught = Catch("test_what_cannot_be_carried_is_refused_by_name", "the refusal must name", "refuses-function")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            try:
                return super().publish(outgoing)
            except UnsupportedTensor as exc:
                message = "the payload cannot be carried"
                raise UnsupportedTensor(message) from exc


class ForeignDropped(Planted):
    """What cannot be carried is left out, and the rest is delivered."""

    caught = Catch(
        "test_what_cannot_be_carried_is_refused_by_name", "must be refused with unsupported_tensor", "refuses-function"
    )

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            tree = {key: value for key, value in outgoing.tree.items() if not callable(value)}
            return super().publish(msgspec.structs.replace(outgoing, tree=tree))


class UntypedShortage(Planted):
    """What does not fit ends in a `MemoryError`."""

    caught = Catch("test_capacity_is_a_typed_refusal", "typed error, not as MemoryError", "one-byte-over")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            try:
                return super().publish(outgoing)
            except CapacityError as exc:
                raise MemoryError(str(exc)) from exc


class FullForEver(Planted):
    """After one payload that did not fit, none passes."""

    caught = Catch("test_capacity_is_a_typed_refusal", "a small payload does not pass any more", "one-byte-over")

    class Side(ConnectorSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.full: CapacityError | None = None

        def publish(self, outgoing: Outgoing) -> Ticket:
            if self.full is not None:
                raise self.full
            try:
                return super().publish(outgoing)
            except CapacityError as exc:
                self.full = exc
                raise


# -- declarations -----------------------------------------------------------------------------------------------------


class OverDeclared(Planted):
    """Tuples are declared, and refused."""

    caught = Catch("test_structure_is_kept", "must be delivered, and was refused", "tuple-of-two")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            if type(outgoing.tree) is tuple:
                message = "data is a tuple; this host carries lists only"
                raise UnsupportedTensor(message, field="data")
            return super().publish(outgoing)


class OverDeclaredOperation(Planted):
    """Chunks are declared, and the side has no operation for them."""

    caught = Catch("test_chunks_arrive_once_in_order", "must be delivered, and was refused", "chunks-in-order")

    class Side(ConnectorSide):
        def open(self, outgoing: Outgoing) -> SidePublication:
            not_supported(Capability.CHUNKED)


class UnderDeclared(Planted):
    """Tuples are delivered, and not declared: the declaration is older than the adapter."""

    caught = Catch("test_structure_is_kept", "the declaration is stale", "tuple-of-two")

    def capabilities(self) -> Mapping[Capability, Support]:
        return {**super().capabilities(), Capability.TUPLES: Support.UNSUPPORTED}


class RefusedUntyped(Planted):
    """Tuples are not declared, and end in an error that is none of Moonrelay's."""

    caught = Catch("test_structure_is_kept", "typed error, not as TypeError", "tuple-of-two")

    def capabilities(self) -> Mapping[Capability, Support]:
        return {**super().capabilities(), Capability.TUPLES: Support.UNSUPPORTED}

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            if type(outgoing.tree) is tuple:
                message = "unhashable"
                raise TypeError(message)
            return super().publish(outgoing)
