"""Adapters whose leases do not hold: too many readers, too long, too short, or not at all."""

from __future__ import annotations

import base64
import mmap
import threading
from pathlib import Path
from typing import Any

import msgspec

from moonrelay.errors import Aborted, LeaseLost, WireError
from moonrelay_conformance.sides.connector_side import ConnectorSide, handle_of
from moonrelay_conformance.targets.adapter import Outgoing, SideClaim, SideSettings, Ticket
from planted.adapter_base import (
    Catch,
    ChangedClaim,
    ChangedSide,
    Planted,
    UnprovedSide,
    entry_of,
    give_memory_back,
    raw,
)


def _changed(outgoing: Outgoing, **fields: Any) -> Outgoing:
    return msgspec.structs.replace(outgoing, **fields)


# -- who may read -----------------------------------------------------------------------------------------------------


class DoubleDelivery(Planted):
    """A payload that was taken over is given back instead of acknowledged."""

    caught = Catch("test_a_payload_is_never_delivered_twice_after_its_ack", "a refusal lease_lost, saw ok")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            claim = self.claim(ticket, timeout_s=timeout_s)
            try:
                return claim.read(timeout_s=timeout_s)
            finally:
                claim.nack()


class UntypedLoss(Planted):
    """That a payload is gone ends in a `KeyError`."""

    caught = Catch("test_a_payload_is_never_delivered_twice_after_its_ack", "raised KeyError")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            try:
                return super().receive(ticket, timeout_s=timeout_s)
            except LeaseLost as exc:
                raise KeyError(str(exc)) from exc


class SecondWinner(Planted):
    """A payload for one reader is published for several."""

    caught = Catch("test_a_race_has_one_winner", "a race must have one winner")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            return super().publish(_changed(outgoing, lease="shared", readers=2))


class UsedTicket(Planted):
    """Tickets name slots, and slots are used again."""

    caught = Catch("test_a_used_ticket_never_yields_the_next_payload", "a refusal lease_lost, saw ok")

    class Side(ConnectorSide):
        slots = 3

        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.folder = Path(settings.extra["engine_options"]["directory"]).with_name("tickets")
            self.folder.mkdir(exist_ok=True)
            self.count = 0

        def publish(self, outgoing: Outgoing) -> Ticket:
            ticket = super().publish(outgoing)
            slot, self.count = self.count % self.slots, self.count + 1
            (self.folder / f"{slot}").write_text(ticket["handle"])
            return {"slot": slot}

        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            return super().receive({"handle": (self.folder / f"{ticket['slot']}").read_text()}, timeout_s=timeout_s)

        def metadata(self, ticket: Ticket) -> dict[str, Any] | None:
            return None


class TicketNotLookedAt(Planted):
    """What a ticket must hold is taken to be there."""

    caught = Catch("test_a_damaged_ticket_is_refused", "typed error, not untyped", param="missing")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            return self.connector.receive(base64.b64decode(ticket["handle"]), timeout_s=timeout_s)


class TicketOfAnyType(Planted):
    """What a ticket holds is taken to be text."""

    caught = Catch("test_a_damaged_ticket_is_refused", "typed error, not untyped", param="retyped")
    Side = TicketNotLookedAt.Side


class TicketGuessed(Planted):
    """For a ticket of which the end is missing the last payload is handed out."""

    caught = Catch("test_a_damaged_ticket_is_refused", "something was delivered", param="truncated")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            import torch

            try:
                return super().receive(ticket, timeout_s=timeout_s)
            except WireError:
                return torch.zeros(16, 16)

        def metadata(self, ticket: Ticket) -> dict[str, Any] | None:
            return None


class TicketOfNothing(Planted):
    """For a ticket that names nothing an empty payload is handed out."""

    caught = Catch("test_a_damaged_ticket_is_refused", "something was delivered", param="replaced")
    Side = TicketGuessed.Side


class AckCountsTwice(Planted):
    """An ack that is repeated takes another reader's share."""

    caught = Catch("test_an_ack_given_twice_counts_once", "consumed")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            again = False

            def ack(self, *, timeout_s: float) -> None:
                if self.again:
                    claim = self.side.connector.claim(self.claim._claim.handle, timeout_s=timeout_s)  # type: ignore[attr-defined]
                    claim.ack()
                self.again = True
                super().ack(timeout_s=timeout_s)

        claims = Claim


class OneReaderMore(Planted):
    """A shared payload outlives its last reader."""

    caught = Catch("test_a_shared_payload_has_as_many_readers_as_it_says", "a refusal lease_lost, saw ok")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            return super().publish(_changed(outgoing, readers=outgoing.readers + 1))


class SharedEdit(Planted):
    """Readers on one machine are given the same memory."""

    caught = Catch("test_an_edit_by_one_reader_is_not_seen_by_another", "other bytes than those published")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            import torch

            tree = super().receive(ticket, timeout_s=timeout_s)
            folder = Path(self.settings.extra["engine_options"]["directory"]).with_name("cache")
            folder.mkdir(exist_ok=True)
            path = folder / handle_of(ticket).id
            if not path.exists():
                path.write_bytes(bytes(raw(tree).tolist()))
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            return torch.frombuffer(memory, dtype=tree.dtype).view(tree.shape)


class PinnedIsConsumed(Planted):
    """A pinned payload goes with its first reader."""

    caught = Catch("test_a_pinned_payload_stays_until_released", "consumed")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            lease = "delete_on_consume" if outgoing.lease == "pinned" else outgoing.lease
            return super().publish(_changed(outgoing, lease=lease))


class NackConsumes(Planted):
    """What is given back unread counts as read."""

    caught = Catch("test_a_nack_gives_the_payload_back", "consumed")

    class Side(ChangedSide):
        class Claim(ChangedClaim):
            def nack(self) -> None:
                self.claim.ack(timeout_s=10.0)

        claims = Claim


class ClaimNotRenewed(Planted):
    """A reader that works longer than a claim lives loses it."""

    caught = Catch("test_a_claimed_payload_is_nobody_elses", "a refusal lease_held, saw ok")

    class Side(ConnectorSide):
        def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
            claim = super().claim(ticket, timeout_s=timeout_s)
            claim._claim.renew = lambda: None  # type: ignore[attr-defined]
            return claim


# -- for how long -----------------------------------------------------------------------------------------------------


class NeverExpires(Planted):
    """A payload's life is not handed on."""

    caught = Catch("test_an_unread_payload_expires", "a refusal lease_expired or lease_lost, saw ok")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            return super().publish(_changed(outgoing, ttl_s=None))


class ExpiresEarly(Planted):
    """Every payload lives as long as the side's default."""

    caught = Catch("test_a_payload_does_not_expire_early", "a payload ended long before its time")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            return super().publish(_changed(outgoing, ttl_s=None))


class FreedUnderReader(Planted):
    """Memory goes back to the pool when its ticket is handed out."""

    caught = Catch("test_memory_is_not_freed_under_a_reader", "memory was freed under a reader")

    class Side(UnprovedSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            ticket = super().publish(outgoing)
            entry = entry_of(self, ticket)
            if entry is not None:
                give_memory_back(entry)
            return ticket


class ExpiredUnderReader(Planted):
    """A payload's memory goes back to the pool when its time is over, whoever reads it."""

    caught = Catch("test_expiry_never_frees_memory_under_a_reader", "memory that had been freed at its expiry")

    class Side(UnprovedSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.timers: list[threading.Timer] = []

        def publish(self, outgoing: Outgoing) -> Ticket:
            ticket = super().publish(_changed(outgoing, ttl_s=None))
            entry = entry_of(self, ticket)
            if outgoing.ttl_s is not None and entry is not None:
                self.timers.append(threading.Timer(outgoing.ttl_s, give_memory_back, [entry]))
                self.timers[-1].start()
            return ticket

        def close(self) -> None:
            for timer in self.timers:
                timer.cancel()
            super().close()


class BufferReused(Planted):
    """What was delivered lies in a buffer that the next payload is read into."""

    caught = Catch("test_delivered_bytes_do_not_change_afterwards", "changed when its memory was used")

    class Side(ChangedSide):
        def __init__(self, settings: SideSettings) -> None:
            super().__init__(settings)
            self.buffer: Any = None

        def changed(self, tree: Any) -> Any:
            if self.buffer is None or len(self.buffer) < len(raw(tree)):
                self.buffer = raw(tree).clone()
            mine = self.buffer[: len(raw(tree))]
            mine.copy_(raw(tree))
            return mine.view(tree.dtype).view(tree.shape)


# -- what the other side is told --------------------------------------------------------------------------------------


class AbortNotTold(Planted):
    """A payload that is given up is gone for its readers, as if it had been read."""

    caught = Catch("test_an_abort_reaches_the_reader", "was refused as lease_lost")

    class Side(ConnectorSide):
        def abort(self, ticket: Ticket, reason: str) -> None:
            self.connector.release(handle_of(ticket))


class AbortReasonLost(Planted):
    """Readers hear that a payload was given up, and not why."""

    caught = Catch("test_an_abort_reaches_the_reader", "the reader must hear the reason")

    class Side(ConnectorSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            try:
                return super().receive(ticket, timeout_s=timeout_s)
            except Aborted:
                message = "something went wrong"
                raise Aborted(message) from None


class AbortIgnored(Planted):
    """A payload that is given up is delivered."""

    caught = Catch("test_an_abort_reaches_the_reader", "an aborted payload was delivered")

    class Side(ConnectorSide):
        def abort(self, ticket: Ticket, reason: str) -> None:
            pass


class ReleasedIsReadable(Planted):
    """A release drops nothing."""

    caught = Catch("test_a_release_leaves_nothing_behind", "a refusal lease_lost, saw ok")

    class Side(ConnectorSide):
        def release(self, ticket: Ticket, *, timeout_s: float) -> None:
            pass


class StatusLies(Planted):
    """A payload is ready for ever, and from the first."""

    caught = Catch("test_lease_scenario", "observed state:ready", "status-of-a-life")

    class Side(ConnectorSide):
        def status(self, ticket: Ticket, *, timeout_s: float) -> str:
            return "ready"


class ConsumedIsForgotten(Planted):
    """How a payload ended is not remembered."""

    caught = Catch("test_status_tells_that_a_payload_was_consumed", "nobody remembers this payload")

    class Side(ConnectorSide):
        def status(self, ticket: Ticket, *, timeout_s: float) -> str:
            said = super().status(ticket, timeout_s=timeout_s)
            if said == "consumed":
                message = "nobody remembers this payload"
                raise LeaseLost(message)
            return said
