"""vLLM-Omni's lanes for ``moonrelay bench host vllm-omni``: its own connectors and ours, through its own factory.

Owns how each connector is set up, and the fixes by which those of the host run where they otherwise could not. A fix
is made in the bench's processes only, and said in the report.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from moonrelay.cli.bench.host_lanes import PRODUCER, End, HostBench, Lane, Room
from moonrelay.errors import TransferFailed, TransferTimeout
from moonrelay_vllm_omni import plugin

EDGE: Final = ("0", "1")
#: Bound of one `get`, in seconds.
GET_TIMEOUT_S: Final = 120.0
#: What a connector's memory holds beside the tensors.
_SLACK: Final = 32 << 20
_NO_STAGES: Final = "has no get_with_deadline: cannot carry the host's diffusion stages"

Settings = Callable[[str, Room], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OmniLane:
    """A lane, the connector that it takes, and its ``extra``."""

    lane: Lane
    connector: str
    extra: Settings
    fix: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    #: Ours are found by key alone, as the host's diffusion stages do; the host's own are told all that ``put`` gave.
    told: bool = True
    needs: tuple[str, ...] = field(default=())


class OmniBench(HostBench):
    """See `moonrelay.cli.bench.host_lanes.HostBench`."""

    host = f"vllm-omni {plugin.host_version() or '?'}"

    def lanes(self) -> tuple[Lane, ...]:
        return tuple(one.lane for one in LANES)

    @contextmanager
    def shared(self, lanes: Sequence[str], largest: int, folder: Path) -> Iterator[Mapping[str, str]]:
        needs = {need for one in LANES if one.lane.name in lanes for need in one.needs}
        told = {"port": str(_free_port()), "folder": str(folder), "run": secrets.token_hex(4)}
        if "master" not in needs:
            yield told
            return
        from moonrelay.relay.cluster import MooncakeCluster

        # Its pool daemon serves the smallest pool: the host's connectors bring memory of their own.
        cluster = MooncakeCluster(folder / "mooncake", pool_bytes=16 << 20)
        try:
            cluster.start()
            yield {**told, "master": cluster.url.removeprefix("mooncake://").partition("?")[0]}
        finally:
            cluster.close()

    def open(self, lane: str, side: str, room: Room, *, fixed: bool) -> End:
        from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
        from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

        plugin.register()
        chosen = next(one for one in LANES if one.lane.name == lane)
        with chosen.fix() if fixed else contextlib.nullcontext():
            connector = OmniConnectorFactory.create_connector(ConnectorSpec(chosen.connector, chosen.extra(side, room)))
        return OmniEnd(connector, told=chosen.told)


class OmniEnd(End):
    """One end: a connector of the host's kind, called as its stages call it."""

    def __init__(self, connector: Any, *, told: bool) -> None:
        self._connector = connector
        self._told = told

    def put(self, key: str, data: dict[str, Any]) -> bytes:
        taken, _, metadata = self._connector.put(*EDGE, key, data)
        if not taken:
            message = "put returned False; the reason is in the connector's log"
            raise TransferFailed(message)
        return json.dumps(metadata).encode() if self._told and metadata is not None else b""

    def get(self, key: str, ticket: bytes) -> object:
        metadata = json.loads(ticket) if ticket else None
        found = self._wait(key, metadata) if self._waits else self._connector.get(*EDGE, key, metadata)
        if found is None:
            message = "get returned None; the reason is in the connector's log"
            raise TransferFailed(message)
        return found[0]

    def discard(self, key: str) -> None:
        store = getattr(self._connector, "store", None)
        if store is not None:
            # Its cleanup() removes nothing; the pool would be full after the first payload.
            store.remove(self._connector._make_key(key, *EDGE), True)  # noqa: SLF001 - the host's own key

    def notes(self) -> Sequence[str]:
        return () if self._waits else (_NO_STAGES,)

    def close(self) -> None:
        self._connector.close()

    @property
    def _waits(self) -> bool:
        from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase

        return type(self._connector).get_with_deadline is not OmniConnectorBase.get_with_deadline

    def _wait(self, key: str, metadata: object) -> Any:
        found = self._connector.get_with_deadline(*EDGE, key, metadata, deadline=time.monotonic() + GET_TIMEOUT_S)
        if found is None:
            message = f"nothing came under {key} within {GET_TIMEOUT_S:g} s"
            raise TransferTimeout(message)
        return found


# -- the host's own ----------------------------------------------------------------------------------------------------


def _host_shm(_side: str, _room: Room) -> dict[str, Any]:
    return {}


def _host_engine(side: str, room: Room) -> dict[str, Any]:
    common = {"host": "127.0.0.1", "protocol": "tcp", "memory_pool_size": room.largest + _SLACK}
    port = int(room.shared["port"])
    if side == PRODUCER:
        return {**common, "role": "sender", "zmq_port": port}
    return {**common, "role": "receiver", "sender_host": "127.0.0.1", "sender_zmq_port": port}


def _host_store(_side: str, room: Room) -> dict[str, Any]:
    # With a sixteenth more than the payload its put fails; with half more it does not.
    size = 2 * room.largest + _SLACK
    master = room.shared["master"]
    return {"host": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "master": master, "segment": size, "localbuf": size}


@contextmanager
def without_pinning() -> Iterator[None]:
    """Let ``Tensor.pin_memory`` return the tensor, while a connector is made: without an accelerator it raises."""
    import torch

    original = torch.Tensor.pin_memory
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.pin_memory = original  # type: ignore[method-assign]


@contextmanager
def with_soft_pin() -> Iterator[None]:
    """Give Mooncake's ``ReplicateConfig`` the field that the host sets, while a connector is made."""
    from vllm_omni.distributed.omni_connectors.connectors import mooncake_store_connector as module

    original = module.ReplicateConfig

    class Fixed(original):  # type: ignore[misc,valid-type]
        with_soft_pin = False

    module.ReplicateConfig = Fixed
    try:
        yield
    finally:
        module.ReplicateConfig = original


# -- ours -------------------------------------------------------------------------------------------------------------


def _ours(side: str, room: Room, *, engine: str, snapshot: bool, integrity: str) -> dict[str, Any]:
    return {
        "engine": engine,
        "pool_bytes": 2 * room.largest + _SLACK,
        "store": f"local://{room.shared['folder']}/store",
        "namespace": f"bench-{room.shared['run']}",
        "snapshot": snapshot,
        "integrity": integrity,
        "stage_id": EDGE[0] if side == PRODUCER else EDGE[1],
    }


def _our_lane(engine: str, wire: str, *, snapshot: bool, integrity: str) -> OmniLane:
    name = f"moonrelay-{wire}{'' if snapshot else '-nocopy'}{'' if integrity == 'auto' else '-unchecked'}"
    copies = "snapshot true" if snapshot else "snapshot false"
    digests = "digests" if integrity == "auto" else "integrity off"
    default = " (the defaults)" if snapshot and integrity == "auto" else ""
    return OmniLane(
        lane=Lane(name=name, says=f"MoonrelayConnector, engine {engine}, {copies}, {digests}{default}", ours=True),
        connector=plugin.NAME,
        extra=partial(_ours, engine=engine, snapshot=snapshot, integrity=integrity),
        told=False,
    )


LANES: Final[tuple[OmniLane, ...]] = (
    OmniLane(
        lane=Lane(name="host-shm", says="SharedMemoryConnector"), connector="SharedMemoryConnector", extra=_host_shm
    ),
    OmniLane(
        lane=Lane(
            name="host-te",
            says="MooncakeTransferEngineConnector, tcp",
            fix="Tensor.pin_memory returns the tensor",
        ),
        connector="MooncakeTransferEngineConnector",
        extra=_host_engine,
        fix=without_pinning,
    ),
    OmniLane(
        lane=Lane(
            name="host-store",
            says="MooncakeStoreConnector, tcp",
            fix="ReplicateConfig takes with_soft_pin; the bench removes payloads, cleanup() does not",
        ),
        connector="MooncakeStoreConnector",
        extra=_host_store,
        fix=with_soft_pin,
        needs=("master",),
    ),
    *(
        _our_lane(engine, wire, snapshot=snapshot, integrity=integrity)
        for engine, wire in (("shm", "shm"), ("mooncake", "tcp"))
        for snapshot in (True, False)
        for integrity in ("auto", "off")
    ),
)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
