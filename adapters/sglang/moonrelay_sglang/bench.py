"""SGLang's lanes for ``moonrelay bench host sglang``: its own engine, pool and manager, and ours in their place.

Owns how each is set up and which calls make a hand-over: what the host's threads call, without the messages by which
its head leads them. So the host's lane is told the receiver's slot beforehand, as if its head had said all in no time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from moonrelay.cli.bench.host_lanes import PRODUCER, End, HostBench, Lane, Room
from moonrelay.config import default_environment
from moonrelay.errors import TransferFailed
from moonrelay_sglang import config, plugin
from moonrelay_sglang.manager import manager_class

#: What a pool of ours holds beside the tensors.
_SLACK: Final = 32 << 20
#: The smallest block of the host's pool.
_BLOCK: Final = 1 << 20
#: The host's own way to have Mooncake take TCP.
_TCP: Final[Mapping[str, str]] = {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}
_HOSTNAME: Final = "127.0.0.1"
#: Where the host's receiver tells its slot, in the bench's folder.
_SLOT: Final = "slot.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLane:
    """A lane, and how an end of it is opened."""

    lane: Lane
    open: Callable[[str, Room], End]


class SglangBench(HostBench):
    """See `moonrelay.cli.bench.host_lanes.HostBench`."""

    host = f"sglang {plugin.host_version() or '?'}"

    def lanes(self) -> tuple[Lane, ...]:
        return tuple(one.lane for one in LANES)

    @contextmanager
    def shared(self, lanes: Sequence[str], largest: int, folder: Path) -> Iterator[Mapping[str, str]]:
        yield {"folder": str(folder)}

    def open(self, lane: str, side: str, room: Room, *, fixed: bool) -> End:
        return next(one for one in LANES if one.lane.name == lane).open(side, room)


# -- the host's own ----------------------------------------------------------------------------------------------------


class NativeEnd(End):
    """A role's manager over the host's engine and pool, made as the host makes them.

    A receiver has one slot that was allocated beforehand, as large as the largest payload: the host's quickest way.
    """

    def __init__(self, side: str, room: Room) -> None:
        default_environment(_TCP)
        from sglang.multimodal_gen.runtime.disaggregation.transport.buffer import TransferTensorBuffer
        from sglang.multimodal_gen.runtime.disaggregation.transport.engine import create_transfer_engine
        from sglang.multimodal_gen.runtime.disaggregation.transport.manager import DiffusionTransferManager
        from sglang.multimodal_gen.runtime.platforms import current_platform

        engine = create_transfer_engine(hostname=_HOSTNAME, gpu_id=0, ib_device=None)
        self._device = f"{current_platform.device_type}:0"
        pool_bytes = max(room.largest, _BLOCK)
        buffer = TransferTensorBuffer(
            pool_size=pool_bytes,
            device=self._device if engine.supports_gpu_direct else "cpu",
            role_name="encoder" if side == PRODUCER else "denoiser",
        )
        self._manager = DiffusionTransferManager(engine=engine, buffer=buffer)
        self._told = Path(room.shared["folder"]) / _SLOT
        self._target: tuple[str, int] | None = None
        if side != PRODUCER:
            self._slot = buffer.allocate(pool_bytes, "prealloc_0")
            address = self._manager.pool_data_ptr + self._slot.offset
            self._told.write_text(json.dumps([self._manager.session_id, address]), "utf-8")

    def put(self, key: str, data: dict[str, Any]) -> bytes:
        tensors, scalars = _parted(data)
        staged, event = self._manager.stage_tensors_async(key, tensors, scalars, None)
        if staged is None:
            message = "nothing was staged; the reason is in the log"
            raise TransferFailed(message)
        if event is not None:
            event.synchronize()
        session, address = self._receiver()
        pushed = self._manager.push_to_peer(key, session, address, staged.slot.size)
        self._manager.free_staged(key)
        if not pushed:
            message = "push_to_peer gave False; the reason is in the log"
            raise TransferFailed(message)
        return json.dumps([staged.manifest, staged.scalar_fields]).encode()

    def get(self, key: str, ticket: bytes) -> object:
        manifest, scalars = json.loads(ticket)
        self._manager.register_prealloc_as_receive(key, self._slot)
        tensors, event = self._manager.load_tensors_async(key, manifest, device=self._device, stream=None)
        if event is not None:
            event.synchronize()
        return {**tensors, **scalars}

    def close(self) -> None:
        self._manager.cleanup()

    def _receiver(self) -> tuple[str, int]:
        """Return the receiver's session and its slot's address, which the host's head would say."""
        if self._target is None:
            session, address = json.loads(self._told.read_text("utf-8"))
            self._target = (session, address)
        return self._target


# -- ours -------------------------------------------------------------------------------------------------------------


class OurEnd(End):
    """A role's manager of ours, made as the worker makes it."""

    def __init__(self, side: str, room: Room, *, engine: str, integrity: str) -> None:
        flags = _Flags(
            disagg_role="encoder" if side == PRODUCER else "denoiser",
            disagg_transfer_pool_size=2 * room.largest + _SLACK,
        )
        self._manager = manager_class()(
            config.from_server_args(flags, {"engine": engine, "integrity": integrity, "transfer_mode": "p2p"}),
            epoch=secrets.token_hex(8),
        )
        self._manager.start()

    def put(self, key: str, data: dict[str, Any]) -> bytes:
        tensors, scalars = _parted(data)
        staged, _ = self._manager.stage_tensors_async(key, tensors, scalars, None)
        return json.dumps([staged.manifest, staged.scalar_fields]).encode()

    def get(self, key: str, ticket: bytes) -> object:
        manifest, scalars = json.loads(ticket)
        loaded, _ = self._manager.load_tensors_async(key, manifest)
        self._manager.acknowledge(key)
        return {**loaded, **scalars}

    def close(self) -> None:
        self._manager.cleanup()


@dataclass(frozen=True)
class _Flags:
    """What we read of a role's ``ServerArgs``."""

    disagg_role: str
    disagg_transfer_pool_size: int
    disagg_p2p_hostname: str = _HOSTNAME
    disagg_transfer_backend: str = config.BACKEND


def _our_lane(engine: str, wire: str, *, integrity: str) -> SglangLane:
    name = f"moonrelay-{wire}{'' if integrity == 'auto' else '-unchecked'}"
    digests = "digests (the default)" if integrity == "auto" else "integrity off"
    return SglangLane(
        lane=Lane(name=name, says=f"MoonrelayTransferManager, engine {engine}, {digests}", ours=True),
        open=partial(OurEnd, engine=engine, integrity=integrity),
    )


LANES: Final[tuple[SglangLane, ...]] = (
    SglangLane(
        lane=Lane(
            name="host", says="DiffusionTransferManager, MooncakeDiffusionEngine, tcp; no messages of its head counted"
        ),
        open=NativeEnd,
    ),
    *(
        _our_lane(engine, wire, integrity=integrity)
        for engine, wire in (("mooncake", "tcp"), ("shm", "shm"))
        for integrity in ("auto", "off")
    ),
)


def _parted(data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tensors and all else, as the host parts a request's fields."""
    import torch

    tensors = {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in data.items() if name not in tensors}
