"""Adapters that keep what a payload held, and adapters that copy what they need not."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import CapacityError, MoonrelayError
from moonrelay_conformance.sides.connector_side import ConnectorPublication, ConnectorSide
from moonrelay_conformance.targets.adapter import Outgoing, SidePublication, SideSettings, Ticket
from planted.adapter_base import Catch, ChangedClaim, ChangedSide, Planted, entry_of


class KeepingSide(ConnectorSide):
    """A side that keeps things until it is closed, so that its process can serve other tests."""

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self.kept: list[Any] = []
        self.undo: list[Callable[[], object]] = []

    def keep_slot(self) -> None:
        """Take a piece of the pool, and never give it back."""
        import torch

        self.kept.append(self.connector.empty((16,), dtype=torch.uint8))

    def keep_memory(self, ticket: Ticket) -> None:
        """Hold a payload's memory once too often."""
        entry = entry_of(self, ticket)
        if entry is not None:
            entry.placement.hold()
            self.undo.append(entry.placement.release)

    def close(self) -> None:
        self.kept.clear()
        while self.undo:
            self.undo.pop()()
        super().close()


class DescriptorPerPayload(Planted):
    """Every payload that is taken over leaves a descriptor open."""

    caught = Catch("test_delivered_payloads_leave_nothing_behind", "descriptors more after")

    class Side(KeepingSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            read, write = os.pipe()
            self.undo += [lambda: os.close(read), lambda: os.close(write)]
            return super().receive(ticket, timeout_s=timeout_s)


class ThreadPerPayload(Planted):
    """Every payload that is published leaves a thread waiting."""

    caught = Catch("test_delivered_payloads_leave_nothing_behind", "threads more after")

    class Side(KeepingSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            closed = threading.Event()
            thread = threading.Thread(target=closed.wait, name="watcher", daemon=True)
            thread.start()
            self.undo += [thread.join, closed.set]
            return super().publish(outgoing)


class MappingPerPayload(Planted):
    """Every payload that is taken over leaves shared memory mapped."""

    caught = Catch("test_delivered_payloads_leave_nothing_behind", "shared mappings more after")

    class Side(KeepingSide):
        def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
            self.undo.append(mmap.mmap(-1, 4096).close)
            return super().receive(ticket, timeout_s=timeout_s)


class SlotPerPayload(Planted):
    """Every payload that was consumed keeps its memory."""

    caught = Catch("test_delivered_payloads_leave_nothing_behind", "producer holds")

    class Side(KeepingSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            ticket = super().publish(outgoing)
            self.keep_memory(ticket)
            return ticket


class NamePerPayload(Planted):
    """Every payload leaves a file in shared memory."""

    caught = Catch("test_delivered_payloads_leave_nothing_behind", "names, among them 'left-")

    class Side(KeepingSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            folder = Path(self.settings.extra["engine_options"]["directory"])
            (folder / f"left-{outgoing.request_id}").touch()
            return super().publish(outgoing)


class KeyPerPayload(Planted):
    """Every payload leaves a record in the store."""

    caught = Catch("test_delivered_payloads_leave_nothing_behind", "keys in the store")
    over = ("store",)

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            relay, namespace = self.connector._runtime.relay(), self.settings.extra["namespace"]
            key = f"{namespace}-left/{outgoing.request_id}"
            relay.put_if_absent(key, b"seen", Deadline(10.0, SystemClock()))
            return super().publish(outgoing)


class RefusalKeepsSlot(Planted):
    """What was taken for a payload is kept where the payload is refused."""

    caught = Catch("test_a_refusal_leaves_nothing_behind", "producer holds")

    class Side(KeepingSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            try:
                return super().publish(outgoing)
            except MoonrelayError:
                self.keep_slot()
                raise


class ShortageKeepsSlot(Planted):
    """What was taken for a payload is kept where the rest does not fit."""

    caught = Catch("test_a_capacity_refusal_leaves_nothing_behind", "producer holds")

    class Side(KeepingSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            try:
                return super().publish(outgoing)
            except CapacityError:
                self.keep_slot()
                raise


class AbortKeepsMemory(Planted):
    """A payload that is given up keeps its memory."""

    caught = Catch("test_an_abort_leaves_nothing_behind", "producer holds")

    class Side(KeepingSide):
        def abort(self, ticket: Ticket, reason: str) -> None:
            self.keep_memory(ticket)
            super().abort(ticket, reason)


class AbortKeepsDescriptor(Planted):
    """A payload that is given up leaves a descriptor open."""

    caught = Catch("test_an_abort_leaves_nothing_behind", "descriptors more after")

    class Side(KeepingSide):
        def abort(self, ticket: Ticket, reason: str) -> None:
            read, write = os.pipe()
            self.undo += [lambda: os.close(read), lambda: os.close(write)]
            super().abort(ticket, reason)


class AbortInTheMiddleKeepsMemory(Planted):
    """A payload that is given up before it is whole keeps its memory."""

    caught = Catch("test_an_abort_in_the_middle_leaves_nothing_behind", "producer holds")

    class Side(KeepingSide):
        def open(self, outgoing: Outgoing) -> SidePublication:
            side = self

            class Publication(ConnectorPublication):
                def abort(self, reason: str) -> None:
                    side.keep_memory(self.ticket)
                    super().abort(reason)

            return Publication(self.connector.open(self._payload(outgoing)))


class ExpiryKeepsMemory(Planted):
    """A payload whose time is over keeps its memory."""

    caught = Catch("test_an_expiry_leaves_nothing_behind", "after all payloads' time, producer holds")

    class Side(KeepingSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            ticket = super().publish(outgoing)
            if outgoing.ttl_s is not None:
                self.keep_memory(ticket)
            return ticket


class NackKeepsBytes(Planted):
    """What was read and given back stays in the reader's memory."""

    caught = Catch("test_a_nack_leaves_nothing_behind", "consumer holds")

    class Side(ChangedSide, KeepingSide):
        class Claim(ChangedClaim):
            def nack(self) -> None:
                self.side.keep_slot()  # type: ignore[attr-defined]
                super().nack()

        claims = Claim


class ReleaseKeepsMemory(Planted):
    """A payload that is dropped leaves a descriptor open at who dropped it."""

    caught = Catch("test_a_release_leaves_nothing_behind", "descriptors more after")

    class Side(KeepingSide):
        def release(self, ticket: Ticket, *, timeout_s: float) -> None:
            read, write = os.pipe()
            self.undo += [lambda: os.close(read), lambda: os.close(write)]
            super().release(ticket, timeout_s=timeout_s)


class RegisteredIsCopied(Planted):
    """Memory that is registered is copied all the same."""

    caught = Catch("test_registered_memory_is_not_copied", "registered memory was copied before it was published")

    class Side(ConnectorSide):
        def publish(self, outgoing: Outgoing) -> Ticket:
            return super().publish(msgspec.structs.replace(outgoing, registered=False))


class CopiesCountedAsNone(Planted):
    """Registered memory is copied, and the count of copies stays at zero whatever is copied."""

    caught = Catch("test_registered_memory_is_not_copied", "'staged' did not grow")

    class Side(RegisteredIsCopied.Side):
        def counters(self) -> dict[str, int]:
            return {**super().counters(), "staged": 0}


class CopiesNotCounted(Planted):
    """Registered memory is said to be published as it is, and no count shows it."""

    caught = Catch("test_registered_memory_is_not_copied", "must count its copies")

    class Side(ConnectorSide):
        def counters(self) -> dict[str, int]:
            return {}
