"""The vLLM-Omni adapter as a target of the conformance suite.

Owns the side: a connector as the host makes it, by its factory from a name and an ``extra``, of which ``put``,
``get_with_deadline``, ``abandon_get``, ``cleanup`` and ``health`` are called and nothing else. What that contract has
no word for (claims, chunks of one payload, aborts, a payload's state) is declared as unsupported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.connector import DiffusionConnector
from moonrelay.errors import ConfigError, DeadlineExceeded, MoonrelayError, WireError
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import RECORDS_BYTES, mode_of
from moonrelay_conformance.targets.adapter import AdapterSide, Encoded, Outgoing, PipelineRun, SideSettings, Ticket
from moonrelay_conformance.targets.connector import ConnectorGround, ConnectorTarget
from moonrelay_vllm_omni import plugin, real_run
from moonrelay_vllm_omni.directory import KeyDirectory
from moonrelay_vllm_omni.mapping import RawBuffer
from moonrelay_vllm_omni.real_encode import EncodeStage
from moonrelay_vllm_omni.receiving import is_lost

#: The edge on which all payloads of a run go.
FROM_STAGE: Final = "0"
TO_STAGE: Final = "1"
#: How long a sweep of the suite leaves records alone after their payload's time, in seconds.
_GRACE_S: Final = 0.5
_SWEEP_TIMEOUT_S: Final = 10.0


class VllmOmniSide(AdapterSide):
    """A stage's connector, as the host makes and calls it.

    How many readers a payload has, and how long it is kept, are settings of a connector, so a payload that asks for
    others is put by a second one, as a second edge's would be.
    """

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._numbers = itertools.count()
        self._usual = (1, settings.lease_ttl_s)
        self._connectors: dict[tuple[int, float], Any] = {}
        self._encoding: EncodeStage | None = None

    @classmethod
    def prepare(cls) -> None:
        plugin.register()  # imports the host

    def start(self) -> None:
        plugin.register()
        self._connector()

    def publish(self, outgoing: Outgoing) -> Ticket:
        if outgoing.metadata is not None:
            message = "the host's put takes no metadata beside the payload"
            raise ConfigError(message, field="metadata")
        if outgoing.num_chunks != 1:
            message = "the host's put takes a whole payload; its chunks are payloads of their own"
            raise ConfigError(message, field="num_chunks")
        ttl_s = self.settings.lease_ttl_s if outgoing.ttl_s is None else outgoing.ttl_s
        connector = self._connector(_readers(outgoing), ttl_s)
        # The host's keys are unique in a deployment, by the request's id.
        key = f"{outgoing.request_id}_{os.getpid()}.{id(self)}_{next(self._numbers)}"
        taken, _, metadata = connector.put(FROM_STAGE, TO_STAGE, key, outgoing.tree)
        if not taken:
            message = "put gave False without a reason"
            raise MoonrelayError(message)
        return {"key": key, "metadata": metadata}

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        key, metadata = _parts(ticket)
        connector = self._connector()
        deadline = SystemClock().monotonic() + timeout_s
        try:
            found = connector.get_with_deadline(FROM_STAGE, TO_STAGE, key, metadata, deadline=deadline)
        finally:
            connector.abandon_get(key)  # as the host does, always
        if found is None:
            message = f"nothing came under {key} within {timeout_s:g} s"
            raise DeadlineExceeded(message)
        data, _ = found
        return data.tensor if isinstance(data, RawBuffer) else data

    def release(self, ticket: Ticket, *, timeout_s: float) -> None:
        key, metadata = _parts(ticket)
        self._connector().cleanup(key, from_stage=FROM_STAGE, to_stage=TO_STAGE, metadata=metadata)

    def encode(self, prompt: str, negative: str, *, cached: bool) -> Encoded:
        if self._encoding is None:
            self._encoding = EncodeStage(self.extra(), Path(self.settings.extra["model"]))
        made = self._encoding.encode(prompt, negative, cached=cached)
        return Encoded(positive=dict(made.positive), negative=dict(made.negative), computed=made.computed)

    def in_use(self) -> Mapping[str, int]:
        """Return what is held; a connector that was made for other leases goes when it holds nothing more."""
        for lease, connector in list(self._connectors.items()):
            if lease != self._usual and not connector.health()["payloads"]:
                self._connectors.pop(lease).close()
        held = [connector.health() for connector in self._connectors.values()]
        names = ("payloads", "slots", "claims", "waiting")
        return {name: sum(health[name] for health in held) for name in names}

    def close(self) -> None:
        if self._encoding is not None:
            self._encoding.close()
        for connector in self._connectors.values():
            connector.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _connector(self, readers: int = 1, ttl_s: float | None = None) -> Any:
        """Return the connector for payloads of so many readers and such a life, made on first use."""
        life_s = self.settings.lease_ttl_s if ttl_s is None else ttl_s
        made = self._connectors.get((readers, life_s))
        if made is None:
            made = self._connectors[readers, life_s] = _create(
                {**self.extra(), **self._place(), "readers": readers, "lease_ttl_s": life_s}
            )
        return made

    def _place(self) -> dict[str, Any]:
        """Return what the host adds to a connector's ``extra``."""
        producer = self.settings.role == "producer"
        return {"role": "sender" if producer else "receiver", "stage_id": 0 if producer else 1}

    def extra(self) -> dict[str, Any]:
        """Return what a deploy YAML would hold.

        Raises:
            ConfigError: The route is none of the connector's.
        """
        settings = self.settings
        engine = str(settings.extra.get("engine", "shm"))
        options = dict(settings.extra.get("engine_options", {}))
        if settings.faults.engine:
            options |= {"inner": engine, "faults": list(settings.faults.engine)}
            engine = "faulty"
        extra: dict[str, Any] = {
            "transfer_mode": mode_of(settings.route),
            "engine": engine,
            "engine_options": options,
            "hostname": settings.host,
            "pool_bytes": settings.pool_bytes,
            "progress_timeout_s": settings.peer_timeout_s,
            "retry_s": min(0.5, settings.peer_timeout_s / 4),
            "peer_timeout_s": settings.peer_timeout_s,
            "renew_s": settings.renew_s,
            "claim_ttl_s": settings.claim_ttl_s,
            "control_options": {"drop": list(settings.faults.control)} if settings.faults.control else {},
            "spill_after_s": settings.spill_after_s,
            "drain_timeout_s": 2.0,
        }
        if settings.auth_key:
            extra["auth_key"] = settings.auth_key
        return extra | self._store()

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


class ByKeySide(VllmOmniSide):
    """The same, whose consumers know a payload's key and nothing else, as those of diffusion stages do."""

    def publish(self, outgoing: Outgoing) -> Ticket:
        return {**super().publish(outgoing), "metadata": None}


class VllmOmniTarget(ConnectorTarget):
    """vLLM-Omni's stages, by the connector that its factory makes.

    Args:
        engine: ``shm`` by default, which every machine has; ``mooncake`` is what a deployment over several hosts takes.
        relay: ``local`` or ``mooncake``. There is always one, for the directory of keys.
    """

    name = "vllm-omni"
    side = "moonrelay_vllm_omni.conformance:VllmOmniSide"
    forked = True
    #: What the host's contract has no word for.
    WITHOUT: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.METADATA,
            Capability.CLAIM,
            Capability.CHUNKED,
            Capability.PINNED,
            Capability.ABORT,
            Capability.STATUS,
            Capability.ZERO_COPY,
        }
    )

    def capabilities(self) -> Mapping[Capability, Support]:
        runs, _ = self._platform
        return {
            **super().capabilities(),
            **dict.fromkeys(self.WITHOUT, Support.UNSUPPORTED),
            Capability.PIPELINE: Support.FULL if runs else Support.UNSUPPORTED,
            Capability.EMBEDDING_CACHE: Support.FULL if runs else Support.UNSUPPORTED,
        }

    @cached_property
    def _platform(self) -> tuple[bool, str]:
        """Whether the host's engine can run here: the same at each of the thousands of times that it is asked."""
        return real_run.platform()

    def host(self) -> str:
        version = plugin.host_version()
        if version is None:
            return f"vllm-omni not installed ({self.through()})"
        runs, reason = self._platform
        return f"vllm-omni {version} ({self.through()}{'' if runs else f'; no pipeline run: {reason}'})"

    def environment(self) -> Mapping[str, str]:
        return {"VLLM_LOGGING_LEVEL": "WARNING"}  # else each side says what it registered

    def pipeline(self, folder: Path, *, timeout_s: float) -> PipelineRun:
        """Run a tiny random Qwen-Image by the host's engine, undivided and in three stages.

        Args:
            folder: An empty folder for model, deploy YAML, store and logs.
            timeout_s: Bound of it all; a minute is usual on two cores, most of it imports of the host.

        Raises:
            DeadlineExceeded: It took too long; the message says what is missing.
            PeerLost: A process ended; the message holds its last words.
            MoonrelayError: The host failed, with its own error.
        """
        with self.ground(folder) as ground:
            settings = ground.settings(SideSettings(role="producer", route="spill", spill_after_s=5.0))
            painted = real_run.paint(VllmOmniSide(settings).extra(), folder, timeout_s=timeout_s)
        return PipelineRun(undivided=painted.undivided, divided=painted.divided, processes=real_run.STAGES)

    def ground(self, folder: Path) -> ConnectorGround:
        return VllmOmniGround(folder, engine=self.engine, relay=self.relay)


class MooncakeVllmOmniTarget(VllmOmniTarget):
    """The same by Mooncake's engine and store: ``moonrelay_vllm_omni.conformance:MooncakeVllmOmniTarget``."""

    name = "vllm-omni-mooncake"

    def __init__(self) -> None:
        super().__init__(engine="mooncake", relay="mooncake")


class ByKeyVllmOmniTarget(VllmOmniTarget):
    """The same by keys alone: ``moonrelay_vllm_omni.conformance:ByKeyVllmOmniTarget``.

    For what is delivered, level L1: of a key that stands for nothing nobody can say any more why.
    """

    name = "vllm-omni-by-key"
    side = "moonrelay_vllm_omni.conformance:ByKeySide"


class VllmOmniGround(ConnectorGround):
    """The connector's ground, whose sweep looks after the directory of keys too; and a place for a tiny model."""

    def __init__(self, folder: Path, *, engine: str, relay: str) -> None:
        self._keys: KeyDirectory | None = None
        self._model = folder / "encoding" / "model"
        super().__init__(folder, engine=engine, relay=relay)

    def settings(self, settings: SideSettings) -> SideSettings:
        made = super().settings(settings)
        return msgspec.structs.replace(made, extra={**made.extra, "model": str(self._model)})

    def sweep(self) -> None:
        super().sweep()
        if self._keys is None and self.store_url is not None:
            config = StoreConfig(url=self.store_url, namespace=self._namespace)
            self._keys = KeyDirectory(config, self._clock, default_ttl_s=_GRACE_S, grace_s=_GRACE_S)
        if self._keys is not None:
            deadline = Deadline(_SWEEP_TIMEOUT_S, self._clock)
            with DiffusionConnector(role="sweep", store_config=self.store_url) as asking:
                self._keys.sweep(deadline, lost=partial(is_lost, asking), ask_after_s=0.0)

    def close(self) -> None:
        if self._keys is not None:
            self._keys.close()
        super().close()


def _create(extra: dict[str, Any]) -> Any:
    """Have the host's factory make a connector.

    Raises:
        MoonrelayError: What our constructor raised; the factory makes a ValueError of it.
    """
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    try:
        return OmniConnectorFactory.create_connector(ConnectorSpec(name=plugin.NAME, extra=extra))
    except ValueError as exc:
        if isinstance(exc.__context__, MoonrelayError):
            raise exc.__context__ from exc
        raise


def _readers(outgoing: Outgoing) -> int:
    """Return how many readers a payload's lease is for.

    Raises:
        ConfigError: The connector's settings have no such lease.
    """
    readers = {"delete_on_consume": 1, "shared": outgoing.readers, "ttl": 0}.get(outgoing.lease)
    if readers is None:
        message = f"lease={outgoing.lease!r} is not known; use delete_on_consume, shared or ttl"
        raise ConfigError(message, field="lease")
    return readers


def _parts(ticket: Ticket) -> tuple[str, dict[str, Any] | None]:
    """Return a ticket's key and metadata.

    Raises:
        WireError: The ticket is malformed.
    """
    key, metadata = ticket.get("key"), ticket.get("metadata")
    if not isinstance(key, str) or not key or not (metadata is None or isinstance(metadata, dict)):
        message = "the ticket holds no key of the host's"
        raise WireError(message, field="key")
    return key, metadata
