"""Sides of a lease in memory, in this process: what the scenario player and the tests of leases are tried on.

`FakeWorld` is the one thing that all fake sides share: the payloads. Its ``faults`` plant one defect by name, so that a
test can be seen to fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moonrelay.errors import Aborted, LeaseHeld, LeaseLost, UnsupportedTensor
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.probe import Held
from moonrelay_conformance.sides.process import SideEnded, SideFailed, SideHung
from moonrelay_conformance.targets.adapter import AdapterGround, AdapterTarget, SideSettings


class FakeWorld:
    """The payloads of all sides.

    Args:
        faults: Names of what is broken: ``wrong_bytes``, ``twice``, ``leak``, ``hang``, ``untyped``, ``swap``,
            ``nack_keeps``, ``two_winners``, ``accepts_all``.
    """

    def __init__(self, *faults: str) -> None:
        self.faults = frozenset(faults)
        self.payloads: dict[str, dict[str, Any]] = {}
        self.serial = itertools.count()
        self.started: list[FakeProcess] = []

    # What a pool offers.

    def start(self, side: str, settings: SideSettings) -> FakeProcess:
        process = FakeProcess(self, settings)
        self.started.append(process)
        return process

    def take_back(self) -> None:
        """End all sides."""


class FakeProcess:
    """A side; see `moonrelay_conformance.sides.process.SideProcess`."""

    def __init__(self, world: FakeWorld, settings: SideSettings) -> None:
        self._world = world
        self.settings = settings
        self.pid = 1000 + next(world.serial)
        self._claims: dict[str, str] = {}
        self._trees: dict[str, str] = {}
        self._sent: list[Callable[[], Any]] = []
        self.dead = False

    def do(self, op: str, *, within_s: float | None = None, **arguments: Any) -> Any:
        if self.dead:
            message = "the side's process ended"
            raise SideEnded(message)
        if "hang" in self._world.faults and op == "receive":
            message = "no answer"
            raise SideHung(message)
        if "untyped" in self._world.faults and op == "receive":
            message = "the side's 'receive' raised KeyError: 'x'"
            raise SideFailed(message, type="KeyError")
        return getattr(self, f"_{op}")(**arguments)

    def send(self, op: str, **arguments: Any) -> None:
        self._sent.append(lambda: self.do(op, **arguments))

    def answer(self, timeout_s: float = 0.0) -> Any:
        return self._sent.pop(0)()

    def probe(self) -> Held:
        return Held()

    def kill(self) -> None:
        self.dead = True
        for payload in self._world.payloads.values():
            payload["live"] -= {claim for claim in payload["live"] if claim.startswith(f"{self.pid}/")}

    def stop(self) -> None:
        """Stand still."""

    def go_on(self) -> None:
        """Go on."""

    def reset(self) -> bool:
        return not self.dead

    # Operations.

    def _start(self, side: str, settings: dict[str, Any]) -> None:
        self._claims.clear()

    def _collect(self) -> None:
        """Nothing to collect."""

    def _publish(self, name: str, tree: Any, outgoing: dict[str, Any]) -> dict[str, Any]:
        if "foreign" in repr(tree) and "accepts_all" not in self._world.faults:
            message = "a function cannot be carried"
            raise UnsupportedTensor(message, field="data['hook']")
        digest = f"digest of {tree!r}"
        number = f"t{next(self._world.serial)}"
        limit = outgoing.get("readers", 1) if outgoing.get("lease") == "shared" else 1
        limit = 0 if outgoing.get("lease") == "pinned" else limit
        self._world.payloads[number] = {"digest": digest, "limit": limit, "acks": 0, "live": set(), "ended": None}
        return {"ticket": {"number": number}, "digest": digest}

    def _payload(self, ticket: dict[str, Any]) -> dict[str, Any]:
        payload = self._world.payloads[ticket["number"]]
        if payload["ended"] is not None and "twice" not in self._world.faults:
            raise payload["ended"]
        return payload

    def _claim(self, ticket: dict[str, Any], name: str, timeout_s: float) -> None:
        payload = self._payload(ticket)
        full = payload["limit"] and payload["acks"] + len(payload["live"]) >= payload["limit"]
        if full and not self._world.faults & {"two_winners", "twice"}:
            message = "held"
            raise LeaseHeld(message)
        self._claims[name] = ticket["number"]
        payload["live"].add(f"{self.pid}/{name}")

    def _read(self, name: str, timeout_s: float) -> dict[str, Any]:
        number = self._claims[name]
        if "swap" in self._world.faults:
            number = next(iter(self._world.payloads))
        payload = self._world.payloads[number]
        if isinstance(payload["ended"], Aborted):
            raise payload["ended"]
        digest = "other bytes" if "wrong_bytes" in self._world.faults else payload["digest"]
        self._trees[name] = digest
        return {"digest": digest, "metadata": None}

    def _ack(self, name: str, timeout_s: float) -> None:
        payload = self._world.payloads[self._claims[name]]
        key = f"{self.pid}/{name}"
        if isinstance(payload["ended"], Aborted):
            raise payload["ended"]
        if key in payload["live"]:
            payload["live"].discard(key)
            payload["acks"] += 1
        if payload["limit"] and payload["acks"] >= payload["limit"]:
            payload["ended"] = LeaseLost("consumed")

    def _nack(self, name: str) -> None:
        if "nack_keeps" not in self._world.faults:
            self._world.payloads[self._claims[name]]["live"].discard(f"{self.pid}/{name}")

    def _receive(self, ticket: dict[str, Any], timeout_s: float, name: str = "whole") -> dict[str, Any]:
        self._claim(ticket, name, timeout_s)
        answer = self._read(name, timeout_s)
        self._ack(name, timeout_s)
        return answer

    def _abort_ticket(self, ticket: dict[str, Any], reason: str) -> None:
        payload = self._world.payloads[ticket["number"]]
        if payload["ended"] is None or payload["live"]:
            payload["ended"] = Aborted(reason)

    def _release(self, ticket: dict[str, Any]) -> None:
        payload = self._world.payloads[ticket["number"]]
        payload["ended"] = payload["ended"] or LeaseLost("released")

    def _status(self, ticket: dict[str, Any]) -> str:
        payload = self._world.payloads[ticket["number"]]
        if payload["limit"] and payload["acks"] >= payload["limit"]:
            return "consumed"
        if payload["ended"] is not None:
            ended = "aborted" if isinstance(payload["ended"], Aborted) else "released"
            return "cancel_pending" if payload["live"] else ended
        return "claimed" if payload["live"] else "ready"

    def _recheck(self, name: str) -> dict[str, Any]:
        return {"digest": self._trees[name]}

    def _edit(self, name: str) -> None:
        self._trees[name] += " edited"

    def _drop(self, name: str) -> None:
        self._trees.pop(name, None)

    def _in_use(self) -> dict[str, int]:
        held = sum(payload["ended"] is None or bool(payload["live"]) for payload in self._world.payloads.values())
        return {"payloads": len(self._world.payloads) if "leak" in self._world.faults else held}


class FakeGround(AdapterGround):
    """No services."""

    def settings(self, settings: SideSettings) -> SideSettings:
        return settings

    def close(self) -> None:
        """Nothing to end."""


class FakeTarget(AdapterTarget):
    """All that the fake sides can do."""

    name = "fake"
    side = "fake_side:FakeProcess"

    def __init__(self, *lacking: Capability) -> None:
        self._lacking = lacking

    def capabilities(self) -> dict[Capability, Support]:
        return {one: Support.UNSUPPORTED if one in self._lacking else Support.FULL for one in Capability}

    def routes(self) -> tuple[str, ...]:
        return ("p2p",)

    def ground(self, folder: Path) -> FakeGround:
        return FakeGround()
