"""Sides with habits that the runner must live with: one that prints and reads, one that fails in every way, leaks."""

from __future__ import annotations

import base64
import mmap
import os
import sys
import threading
from typing import Any

from moonrelay.errors import CapacityError, MoonrelayError
from moonrelay_conformance.targets.adapter import AdapterSide, Outgoing, SideSettings, Ticket


class OwnError(MoonrelayError):
    """An error that the suite's process does not know."""


class LoudSide(AdapterSide):
    """Hands bytes over in the ticket itself; prints, reads its standard input, and fails as it is told to."""

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self.kept: list[Any] = []
        if settings.extra.get("refuse"):
            raise CapacityError("no room for a side", field="settings")

    def publish(self, outgoing: Outgoing) -> Ticket:
        print('{"n": 1, "ok": "not an answer"}', flush=True)
        os.write(1, b"raw bytes on descriptor 1\n")
        assert sys.stdin.read() == ""
        if outgoing.request_id == "typed":
            raise CapacityError("full", field="data['a']", wanted=7)
        if outgoing.request_id == "own":
            raise OwnError("of our own")
        if outgoing.request_id == "untyped":
            raise KeyError("a host's own")
        if outgoing.request_id == "exit":
            os._exit(3)
        if outgoing.request_id == "hang":
            threading.Event().wait()
        raw = outgoing.tree.numpy().tobytes()
        return {"raw": base64.b64encode(raw).decode()}

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        import torch

        raw = base64.b64decode(ticket["raw"])
        return torch.frombuffer(bytearray(raw), dtype=torch.float32)

    def in_use(self) -> dict[str, int]:
        return {"kept": len(self.kept)}

    def counters(self) -> dict[str, int]:
        """Leak what the settings say: a descriptor, a thread or a mapping per call."""
        match self.settings.extra.get("leak"):
            case "fd":
                self.kept.append(os.dup(1))
            case "thread":
                thread = threading.Thread(target=threading.Event().wait, name="moonrelay-leak", daemon=True)
                thread.start()
                self.kept.append(thread)
            case "map":
                self.kept.append(mmap.mmap(-1, 4096))
            case "pool":
                if len(self.kept) < 4:
                    self.kept.append(os.dup(1))
        return {"calls": len(self.kept)}

    def close(self) -> None:
        for kept in self.kept:
            if isinstance(kept, int):
                os.close(kept)
        self.kept.clear()


class PreparedSide(LoudSide):
    """Says in which process its host was imported."""

    prepared_in = 0

    @classmethod
    def prepare(cls) -> None:
        cls.prepared_in = os.getpid()

    def in_use(self) -> dict[str, int]:
        return {"prepared_in": self.prepared_in, "parent": os.getppid()}


class ThreadedSide(LoudSide):
    """Its host starts a thread when it is imported."""

    @classmethod
    def prepare(cls) -> None:
        threading.Thread(target=threading.Event().wait, name="host-ticker", daemon=True).start()


class NoSide:
    """No AdapterSide."""
