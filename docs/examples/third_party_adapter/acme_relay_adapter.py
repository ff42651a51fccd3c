"""A Moonrelay adapter that somebody else wrote, whole: a small host, its adapter, and the adapter's conformance target.

`AcmeHost` stands for the framework that you have: its API is what its users call, and it moves tensors by Moonrelay.
What you would write for yours are the three classes after it: a *side*, a *ground*, a *target*. See docs/adapters.md.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from moonrelay import DeleteOnConsume, DiffusionConnector, StagePayload
from moonrelay.errors import UnsupportedTensor, WireError
from moonrelay.transfer.shm import sweep_orphans
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.adapter import (
    AdapterGround,
    AdapterSide,
    AdapterTarget,
    Outgoing,
    SideSettings,
    Ticket,
    not_supported,
)

# -- the host ---------------------------------------------------------------------------------------------------------


class AcmeRefused(Exception):
    """Acme does not carry this; ``place`` says where it stands."""

    def __init__(self, place: str, why: str) -> None:
        super().__init__(f"{place} {why}")
        self.place = place


class AcmeHost:
    """One stage of an Acme pipeline. It sends a tree under a key, and hands the *baton* to the next stage in a message.

    Acme's trees are lists and dicts with text keys, of tensors and plain values: no tuples, no sets.
    """

    def __init__(self, stage: str, *, pool_bytes: int = 256 << 20, keep_s: float = 600.0, **connector: Any) -> None:
        engine = {"engine": "shm", "pool_bytes": pool_bytes, **connector.pop("engine", {})}
        self._connector = DiffusionConnector(
            stage, transfer_mode="p2p", te_config=engine, lease_ttl_s=keep_s, drain_timeout_s=1.0, **connector
        )

    def start(self) -> None:
        """Start now what would start with the first tree."""
        import torch  # noqa: F401 - takes seconds, which a reader should not spend while it holds a claim

        self._connector.start()

    def send(self, key: str, tree: object, *, keep_s: float | None = None) -> str:
        """Offer a tree to one stage; return the baton that fetches it."""
        _check(tree, "data")
        payload = StagePayload(request_id=key, kind="acme", data=tree, lease=DeleteOnConsume(keep_s))
        return base64.b64encode(self._connector.publish(payload).to_bytes()).decode()

    def fetch(self, baton: str, *, wait_s: float) -> Any:
        """Take a tree over; it is then gone at its sender."""
        return self._connector.receive(base64.b64decode(baton), timeout_s=wait_s)

    def drop(self, baton: str, *, wait_s: float) -> None:
        """Let go of a tree that nobody needs."""
        self._connector.release(base64.b64decode(baton), timeout_s=wait_s)

    def held(self) -> Mapping[str, int]:
        """Return what this stage still holds for trees, all zero when nothing is under way."""
        return self._connector.in_use()

    def shut(self) -> None:
        """End the stage."""
        self._connector.close()


def _check(tree: object, place: str) -> None:
    if place.count("[") > 64:
        return  # deeper than Moonrelay carries; it refuses that by itself
    if type(tree) in (tuple, set, frozenset):
        raise AcmeRefused(place, f"is a {type(tree).__name__}; Acme has lists and dicts only")
    if isinstance(tree, dict):
        for key, value in tree.items():
            if type(key) is not str:
                raise AcmeRefused(f"{place}[{key!r}]", "has a key that is no text")
            _check(value, f"{place}[{key!r}]")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            _check(value, f"{place}[{number}]")


# -- the conformance target: side, ground, target ---------------------------------------------------------------------


_LEASES = {"shared": Capability.SHARED_READERS, "ttl": Capability.TTL, "pinned": Capability.PINNED}


class AcmeSide(AdapterSide):
    """A producer or consumer in a process of its own: the suite's words in Acme's."""

    host_class: type[AcmeHost] = AcmeHost

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self.acme = self.host_class(
            settings.role,
            pool_bytes=settings.pool_bytes,
            keep_s=settings.lease_ttl_s,
            engine={"hostname": settings.host, "options": {"directory": settings.extra["folder"]}},
            control_config={
                "bind_host": settings.host,
                "claim_ttl_s": settings.claim_ttl_s,
                "renew_s": settings.renew_s,
                "peer_timeout_s": settings.peer_timeout_s,
            },
            auth_key=settings.auth_key or None,
        )

    def start(self) -> None:
        self.acme.start()

    def publish(self, outgoing: Outgoing) -> Ticket:
        if outgoing.metadata is not None:
            not_supported(Capability.METADATA)
        if outgoing.num_chunks > 1:
            not_supported(Capability.CHUNKED)
        if outgoing.lease != "delete_on_consume":
            not_supported(_LEASES[outgoing.lease])
        try:
            return {"baton": self.acme.send(outgoing.request_id, outgoing.tree, keep_s=outgoing.ttl_s)}
        except AcmeRefused as exc:  # the host's own exception, made one that Moonrelay knows
            raise UnsupportedTensor(str(exc), field=exc.place) from exc

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        return self.acme.fetch(_baton(ticket), wait_s=timeout_s)

    def release(self, ticket: Ticket, *, timeout_s: float) -> None:
        self.acme.drop(_baton(ticket), wait_s=timeout_s)

    def in_use(self) -> Mapping[str, int]:
        return self.acme.held()

    def close(self) -> None:
        self.acme.shut()


def _baton(ticket: Ticket) -> str:
    """Return a ticket's baton. What is none leaves as a typed error, not as whatever Acme would run into."""
    baton = ticket.get("baton")
    try:
        base64.b64decode(baton, validate=True)
    except (TypeError, ValueError) as exc:
        message = f"the ticket holds no baton: {exc}"
        raise WireError(message, field="baton") from exc
    return str(baton)


class AcmeGround(AdapterGround):
    """What Acme's stages share: a folder for their memory. Acme has no store and needs no service."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "acme"
        self.folder.mkdir()

    def settings(self, settings: SideSettings) -> SideSettings:
        return msgspec.structs.replace(settings, extra={"folder": str(self.folder)})

    def memory_names(self) -> tuple[str, ...]:
        return tuple(sorted(entry.name for entry in self.folder.iterdir()))

    def sweep(self) -> None:
        sweep_orphans(self.folder)  # as the start of the next stage on this machine would

    def close(self) -> None:
        """Nothing was started; the suite removes the folder."""


class AcmeTarget(AdapterTarget):
    """What the suite is run against. It declares what Acme can; the suite holds it to that in both directions."""

    name = "acme"
    side = "acme_relay_adapter:AcmeSide"

    def capabilities(self) -> Mapping[Capability, Support]:
        there = (
            *(Capability.ZERO_DIM, Capability.EMPTY, Capability.FP8, Capability.UNUSUAL_DTYPES, Capability.NESTED),
            *(Capability.SIDE_FIELDS, Capability.VIEWS, Capability.SHARED_OBJECTS),
            *(Capability.P2P, Capability.RELEASE, Capability.CAPACITY),
        )
        return {**dict.fromkeys(there, Support.FULL), Capability.CHUNKED: Support.NOT_IMPLEMENTED}

    def distribution(self) -> str:
        return f"acme-relay-adapter {version('acme-relay-adapter')}"

    def host(self) -> str:
        return "acme 0.9"

    def ground(self, folder: Path) -> AcmeGround:
        return AcmeGround(folder)


# -- the plugin -------------------------------------------------------------------------------------------------------


class AcmeAdapter:
    """What the entry point names: `moonrelay adapters` asks whether the host is there, the suite for a target."""

    name = "acme"

    def available(self) -> tuple[bool, str]:
        return True, "acme 0.9"

    def conformance_target(self) -> AcmeTarget:
        return AcmeTarget()
