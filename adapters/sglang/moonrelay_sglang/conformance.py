"""The SGLang adapter as a target of the conformance suite.

Owns the side: a transfer manager as a role's worker makes and calls it. It stages, and what the host's head would be
told goes through JSON; it loads, which claims and reads; it acknowledges or gives back. What that contract has no word
for (several readers, chunks of one payload, a payload's state) is declared as unsupported.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from moonrelay.errors import ConfigError, LeaseLost, WireError
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import RECORDS_BYTES, mode_of
from moonrelay_conformance.targets.adapter import AdapterSide, Outgoing, SideClaim, SideSettings, Ticket
from moonrelay_conformance.targets.connector import ConnectorTarget
from moonrelay_sglang import config, plugin, protocol
from moonrelay_sglang.manager import Loaded, PayloadManager, manager_class

#: The field of a request in which a payload travels.
FIELD: Final = "latents"
#: How long staging waits for room: a role's worker waits longer, which no expectation of the suite is for.
_STAGE_TIMEOUT_S: Final = 1.0


@dataclasses.dataclass(frozen=True)
class Flags:
    """What we read of a role's ``ServerArgs``."""

    disagg_role: str
    disagg_p2p_hostname: str
    disagg_transfer_pool_size: int
    disagg_transfer_backend: str = config.BACKEND


class SglangSide(AdapterSide):
    """A role's manager, as the host's worker has it.

    How long a payload is kept is a setting of a role, so a payload that asks for another time is staged by a second
    manager, as another role's would be.
    """

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._numbers = itertools.count()
        self._managers: dict[float, PayloadManager] = {}
        self._attempts: dict[str, int] = {}

    @classmethod
    def prepare(cls) -> None:
        class_of_manager()  # imports the host

    def start(self) -> None:
        self._manager()

    def publish(self, outgoing: Outgoing) -> Ticket:
        _refuse_what_has_no_word(outgoing)
        # As the host's, a request's id is its own in a deployment.
        request_id = f"{outgoing.request_id}-{os.getpid()}.{id(self)}.{next(self._numbers)}"
        self._attempts[request_id] = outgoing.attempt
        try:
            staged, event = self._manager(outgoing.ttl_s).stage_tensors_async(request_id, {FIELD: outgoing.tree}, {})
        finally:
            del self._attempts[request_id]
        if event is not None:
            event.synchronize()
        told = {
            "msg_type": protocol.READY,
            "request_id": request_id,
            "manifest": staged.manifest,
            "slot_offset": staged.slot.offset,
            "scalar_fields": staged.scalar_fields,
        }
        ticket: Ticket = json.loads(json.dumps(told))
        return ticket

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        claim = self.claim(ticket, timeout_s=timeout_s)
        try:
            tree = claim.read(timeout_s=timeout_s)
        except BaseException:
            claim.nack()
            raise
        claim.ack(timeout_s=timeout_s)
        return tree

    def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
        ready = protocol.parse(ticket, protocol.Ready)
        manager = self._manager()
        loaded = manager.load(ready.request_id, ready.manifest, timeout_s=timeout_s)
        return LoadedClaim(manager, ready.request_id, {**ready.scalar_fields, **loaded.values}, loaded)

    def abort(self, ticket: Ticket, reason: str) -> None:
        ready = protocol.parse(ticket, protocol.Ready)
        for manager in self._managers.values():
            manager.free_staged(ready.request_id, reason)

    def in_use(self) -> Mapping[str, int]:
        """Return what is held; a manager that was made for another time goes when it holds nothing more."""
        for ttl_s, manager in list(self._managers.items()):
            if ttl_s != self.settings.lease_ttl_s and not manager.in_use().payloads:
                self._managers.pop(ttl_s).cleanup()
        held = [manager.in_use() for manager in self._managers.values()]
        return {name: sum(getattr(one, name) for one in held) for name in protocol.InUse.__struct_fields__}

    def close(self) -> None:
        for manager in self._managers.values():
            manager.cleanup()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _manager(self, ttl_s: float | None = None) -> PayloadManager:
        """Return the manager for payloads of such a life, made on first use as a role's worker makes it."""
        life_s = self.settings.lease_ttl_s if ttl_s is None else ttl_s
        made = self._managers.get(life_s)
        if made is None:
            role = "encoder" if self.settings.role == "producer" else "denoiser"
            flags = Flags(role, self.settings.host, self.settings.pool_bytes)
            made = class_of_manager()(
                config.from_server_args(flags, {**self.more(), "lease_ttl_s": life_s}),
                epoch=secrets.token_hex(8),
                attempt_of=lambda request_id: self._attempts.get(request_id, 0),
            )
            made.start()
            self._managers[life_s] = made
        return made

    def more(self) -> dict[str, Any]:
        """Return what ``MOONRELAY_SGLANG`` would hold.

        Raises:
            ConfigError: The route is none of the connector's.
        """
        settings = self.settings
        engine = str(settings.extra.get("engine", "shm"))
        options = dict(settings.extra.get("engine_options", {}))
        if settings.faults.engine:
            options |= {"inner": engine, "faults": list(settings.faults.engine)}
            engine = "faulty"
        more: dict[str, Any] = {
            "transfer_mode": mode_of(settings.route),
            "engine": engine,
            "engine_options": options,
            "progress_timeout_s": settings.peer_timeout_s,
            "retry_s": min(0.5, settings.peer_timeout_s / 4),
            "peer_timeout_s": settings.peer_timeout_s,
            "renew_s": settings.renew_s,
            "claim_ttl_s": settings.claim_ttl_s,
            "control_options": {"drop": list(settings.faults.control)} if settings.faults.control else {},
            "spill_after_s": settings.spill_after_s,
            "drain_timeout_s": 2.0,
            "stage_timeout_s": _STAGE_TIMEOUT_S,
        }
        if settings.auth_key:
            more["auth_key"] = settings.auth_key
        return more | self._store()

    def _store(self) -> dict[str, Any]:
        settings = self.settings
        url = settings.extra.get("store_url")
        if url is None:
            return {}
        store: dict[str, Any] = {"store": url, "namespace": settings.extra.get("namespace", "moonrelay")}
        if settings.route == "store":
            # Nothing lies in the pool on this route: the bound that the suite sets is the embedded store's.
            used = int(settings.extra.get("store_used", 0))
            store["store_capacity_bytes"] = settings.pool_bytes + RECORDS_BYTES + used
        if settings.faults.relay:
            store |= {"store": "faulty://", "store_options": {"inner": url, "faults": list(settings.faults.relay)}}
        return store


class LoadedClaim(SideClaim):
    """What a role has taken over: claimed and read at once, and held until it is done with it."""

    def __init__(self, manager: PayloadManager, request_id: str, values: Mapping[str, Any], loaded: Loaded) -> None:
        self._manager = manager
        self._request_id = request_id
        self._loaded: tuple[Mapping[str, Any], Loaded] | None = (values, loaded)

    def read(self, *, timeout_s: float) -> Any:
        if self._loaded is None:
            message = "it was given back"
            raise LeaseLost(message)
        values, loaded = self._loaded
        if loaded.event is not None:
            loaded.event.synchronize()
        found = {**values, **loaded.tensors}
        if found.keys() != {FIELD}:
            message = f"fields {sorted(found)} arrived, and {FIELD} was sent"
            raise WireError(message, field=FIELD)
        return found[FIELD]

    def ack(self, *, timeout_s: float) -> None:
        self._loaded = None
        self._manager.acknowledge(self._request_id, timeout_s)

    def nack(self) -> None:
        self._loaded = None
        self._manager.give_back(self._request_id)


class SglangTarget(ConnectorTarget):
    """SGLang's roles, by the transfer manager that their workers are given.

    It runs without the host too: the host's own class, which the manager is a subclass of where the host is, lends it
    no method (a test of the adapter holds that), so the code that is run is the same.

    Args:
        engine: ``shm`` by default, which every machine has; ``mooncake`` is what a deployment over several hosts takes.
        relay: ``local``, ``mooncake`` or ``none``.
    """

    name = "sglang"
    side = "moonrelay_sglang.conformance:SglangSide"
    forked = True
    #: What the host's contract has no word for; and a run of the host, which takes four processes and a test's cures
    #: for CPUs: the adapter's tests compare its videos.
    WITHOUT: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.METADATA,
            Capability.CHUNKED,
            Capability.SHARED_READERS,
            Capability.PINNED,
            Capability.RELEASE,
            Capability.STATUS,
            Capability.ZERO_COPY,
            Capability.PIPELINE,
        }
    )

    def capabilities(self) -> Mapping[Capability, Support]:
        return {**super().capabilities(), **dict.fromkeys(self.WITHOUT, Support.UNSUPPORTED)}

    def host(self) -> str:
        version = plugin.host_version()
        if version is None:
            return f"sglang not installed: its manager without the host's base class ({self.through()})"
        return f"sglang {version} ({self.through()}; a run of the host is among the adapter's tests, nox -s sglang)"

    def environment(self) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1"}


class MooncakeSglangTarget(SglangTarget):
    """The same by Mooncake's engine and store: ``moonrelay_sglang.conformance:MooncakeSglangTarget``."""

    name = "sglang-mooncake"

    def __init__(self) -> None:
        super().__init__(engine="mooncake", relay="mooncake")


def class_of_manager() -> type[PayloadManager]:
    """Return the class that a role's worker makes; without the host, what it is made of."""
    return manager_class() if plugin.host_is_there() else PayloadManager


def _refuse_what_has_no_word(outgoing: Outgoing) -> None:
    """Refuse what a role cannot ask of its manager.

    Raises:
        ConfigError: Names it.
    """
    asked = {
        "metadata": outgoing.metadata is not None,
        "num_chunks": outgoing.num_chunks != 1,
        "lease": outgoing.lease != "delete_on_consume",
    }
    for name, given in asked.items():
        if given:
            message = f"{name}={getattr(outgoing, name)!r}: the host's manager stages one whole payload for one reader"
            raise ConfigError(message, field=name)
