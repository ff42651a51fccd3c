"""A side whose host hands payloads over by `moonrelay.DiffusionConnector` itself.

Owns the translation between the suite's words and the connector's methods, one for one, so that what is tested is what
a user calls. An adapter whose host calls the connector directly subclasses `ConnectorSide`, or takes it as it is.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from moonrelay import DeleteOnConsume, DiffusionConnector, Pinned, Shared, StageHandle, StagePayload, Ttl
from moonrelay.errors import ConfigError, WireError
from moonrelay.events import EVENT_NAMES, Event
from moonrelay_conformance.targets.adapter import (
    AdapterSide,
    Outgoing,
    SideClaim,
    SidePublication,
    SideSettings,
    Ticket,
)

if TYPE_CHECKING:
    from moonrelay.connector.claim import PayloadClaim
    from moonrelay.connector.publication import Publication

#: The connector's mode for a route.
MODES: Final[Mapping[str, str]] = {"p2p": "p2p", "store": "store", "spill": "auto"}
#: What an embedded store needs beside payloads: end records, claims, tombstones.
RECORDS_BYTES: Final = 64 << 10
#: Kind of all payloads; the suite does not look at it.
KIND: Final = "latents"


def mode_of(route: str) -> str:
    """Return the connector's ``transfer_mode`` for a route.

    Raises:
        ConfigError: The route is none of the connector's.
    """
    if route not in MODES:
        message = f"route={route!r} is not known; use one of {', '.join(MODES)}"
        raise ConfigError(message, field="route")
    return MODES[route]


class ConnectorSide(AdapterSide):
    """A `DiffusionConnector` as producer and consumer.

    ``settings.extra`` is what `moonrelay_conformance.targets.connector.ConnectorGround.settings` gives: ``engine`` and
    ``engine_options``, ``store_url``, ``namespace`` and ``store_used``. A subclass overrides `make_connector`, or
    `connector_arguments`.
    """

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.connector = self.make_connector()

    def make_connector(self) -> DiffusionConnector:
        """Return the connector; called once, by the constructor."""
        return DiffusionConnector(**self.connector_arguments())

    def connector_arguments(self) -> dict[str, Any]:
        """Return the arguments that follow from the settings, `count` among the observers.

        Raises:
            ConfigError: The route is none of the connector's.
        """
        settings = self.settings
        return {
            "role": settings.role,
            "transfer_mode": mode_of(settings.route),
            "te_config": self._transfer(),
            "store_config": self._store(),
            "control_config": {
                "bind_host": settings.host,
                "retry_s": min(0.5, settings.peer_timeout_s / 4),
                "peer_timeout_s": settings.peer_timeout_s,
                "renew_s": settings.renew_s,
                "claim_ttl_s": settings.claim_ttl_s,
                "options": {"drop": list(settings.faults.control)} if settings.faults.control else {},
            },
            "lease_ttl_s": settings.lease_ttl_s,
            "spill_after_s": settings.spill_after_s,
            "drain_timeout_s": 2.0,
            "auth_key": settings.auth_key or None,
            "observers": [self.count],
        }

    def count(self, event: Event) -> None:
        """Count an event (an observer of the connector)."""
        with self._counting:
            self._counts[event.name] += 1
            if event.name in ("staged", "delivered"):
                self._counts[f"{event.name}_bytes"] += event.nbytes or 0
            if event.name == "delivered":
                self._counts[f"delivered_{event.path}"] += 1

    def start(self) -> None:
        """Start the connector, and map its pool, so that what a payload leaves behind is told from a first use."""
        self.connector.start()
        if self.connector.settings.serves_directly:
            import torch

            self.connector.empty((1,), dtype=torch.uint8)

    # -- producing --------------------------------------------------------------------------------------------------

    def publish(self, outgoing: Outgoing) -> Ticket:
        return ticket_of(self.connector.publish(self._payload(outgoing)))

    def open(self, outgoing: Outgoing) -> SidePublication:
        return ConnectorPublication(self.connector.open(self._payload(outgoing)))

    def abort(self, ticket: Ticket, reason: str) -> None:
        self.connector.abort(handle_of(ticket), reason)

    # -- consuming --------------------------------------------------------------------------------------------------

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        return self.connector.receive(handle_of(ticket), timeout_s=timeout_s)

    def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
        return ConnectorClaim(self.connector.claim(handle_of(ticket), timeout_s=timeout_s))

    def release(self, ticket: Ticket, *, timeout_s: float) -> None:
        self.connector.release(handle_of(ticket), timeout_s=timeout_s)

    def status(self, ticket: Ticket, *, timeout_s: float) -> str:
        return str(self.connector.status(handle_of(ticket), timeout_s=timeout_s).state)

    def metadata(self, ticket: Ticket) -> dict[str, Any] | None:
        return handle_of(ticket).metadata

    # -- what is seen -----------------------------------------------------------------------------------------------

    def in_use(self) -> Mapping[str, int]:
        return self.connector.in_use()

    def counters(self) -> Mapping[str, int]:
        """Return how often each event happened, with ``staged_bytes``, ``delivered_bytes``, ``delivered_p2p`` and
        ``delivered_store``."""
        extra = ("staged_bytes", "delivered_bytes", "delivered_p2p", "delivered_store")
        with self._counting:
            return {name: self._counts[name] for name in (*EVENT_NAMES, *extra)}

    def close(self) -> None:
        self.connector.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _transfer(self) -> dict[str, Any]:
        settings = self.settings
        engine = str(settings.extra.get("engine", "shm"))
        options = dict(settings.extra.get("engine_options", {}))
        if settings.faults.engine:
            options |= {"inner": engine, "faults": list(settings.faults.engine)}
            engine = "faulty"
        return {
            "engine": engine,
            "hostname": settings.host,
            "pool_bytes": settings.pool_bytes,
            "progress_timeout_s": settings.peer_timeout_s,
            "options": options,
        }

    def _store(self) -> dict[str, Any] | None:
        settings = self.settings
        url = settings.extra.get("store_url")
        if url is None:
            return None
        config: dict[str, Any] = {"url": url, "namespace": settings.extra.get("namespace", "moonrelay")}
        if settings.route == "store":
            # Nothing lies in the pool on this route: the bound that the suite sets is the embedded store's.
            config["capacity_bytes"] = settings.pool_bytes + RECORDS_BYTES + int(settings.extra.get("store_used", 0))
        if settings.faults.relay:
            config |= {"url": "faulty://", "options": {"inner": url, "faults": list(settings.faults.relay)}}
        return config

    def _payload(self, outgoing: Outgoing) -> StagePayload:
        import torch

        tree = self._registered(outgoing.tree, {}) if outgoing.registered else outgoing.tree
        what = {"tensor": tree} if isinstance(tree, torch.Tensor) else {"data": tree}
        return StagePayload(
            request_id=outgoing.request_id,
            kind=KIND,
            chunk_dim=outgoing.chunk_dim,
            num_chunks=outgoing.num_chunks,
            lease=self._lease(outgoing),
            attempt=outgoing.attempt,
            metadata=outgoing.metadata,
            **what,
        )

    def _lease(self, outgoing: Outgoing) -> object:
        match outgoing.lease:
            case "delete_on_consume":
                return DeleteOnConsume(outgoing.ttl_s)
            case "shared":
                return Shared(outgoing.readers, outgoing.ttl_s)
            case "ttl":
                return Ttl(self.settings.lease_ttl_s if outgoing.ttl_s is None else outgoing.ttl_s)
            case "pinned":
                return Pinned()
            case other:
                return other

    def _registered(self, tree: Any, known: dict[int, Any]) -> Any:
        """Return a tree with its tensors in the connector's registered memory; one object stays one object."""
        import torch

        if type(tree) is torch.Tensor:
            if id(tree) not in known:
                own = self.connector.empty(tuple(tree.shape), dtype=tree.dtype)
                own.copy_(tree.detach())
                known[id(tree)] = own
            return known[id(tree)]
        if type(tree) in (list, tuple, set, frozenset):
            return type(tree)(self._registered(item, known) for item in tree)
        if type(tree) is dict:
            return {key: self._registered(item, known) for key, item in tree.items()}
        return tree


class ConnectorPublication(SidePublication):
    """A `moonrelay.Publication`."""

    def __init__(self, publication: Publication) -> None:
        self._publication = publication

    @property
    def ticket(self) -> Ticket:
        return ticket_of(self._publication.handle)

    def ready(self, chunk: int) -> None:
        self._publication.ready(chunk)

    def abort(self, reason: str) -> None:
        self._publication.abort(reason)


class ConnectorClaim(SideClaim):
    """A `moonrelay.PayloadClaim`."""

    def __init__(self, claim: PayloadClaim) -> None:
        self._claim = claim

    def read(self, *, timeout_s: float) -> Any:
        return self._claim.read(timeout_s=timeout_s)

    def chunks(self, *, timeout_s: float) -> Iterator[Any]:
        return self._claim.chunks(timeout_s=timeout_s)

    def ack(self, *, timeout_s: float) -> None:
        self._claim.ack(timeout_s=timeout_s)

    def nack(self) -> None:
        self._claim.nack()

    def metadata(self) -> dict[str, Any] | None:
        return self._claim.handle.metadata


def ticket_of(handle: StageHandle) -> Ticket:
    """Return a handle as plain JSON values."""
    return {"handle": base64.b64encode(handle.to_bytes()).decode()}


def handle_of(ticket: Ticket) -> StageHandle:
    """Return the handle that a ticket holds.

    Raises:
        WireError, VersionError: The ticket is malformed, or of another version.
    """
    text = ticket.get("handle")
    if not isinstance(text, str):
        message = "the ticket holds no handle"
        raise WireError(message, field="handle")
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as exc:
        message = f"the ticket's handle is no base64: {exc}"
        raise WireError(message, field="handle") from exc
    return StageHandle.from_bytes(raw)
