"""LightX2V's lanes for ``moonrelay bench host lightx2v``: the host's own mixin, and ours in its place.

Owns how each is set up. A hand-over is what the host's runners call: ``send_encoder_outputs`` in one role,
``receive_encoder_outputs`` in the next, with the payloads of Wan image-to-video in their own shapes. The host's buffers
are made by its config for one video's shape, so each end has a runner for each payload.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from moonrelay.cli.bench.host_lanes import PRODUCER, End, HostBench, HostPayload, Lane, Room
from moonrelay.config import default_environment
from moonrelay.errors import ConfigError
from moonrelay_lightx2v import config, plugin

_HOSTNAME: Final = "127.0.0.1"
_TEXT: Final = (1, 512, 4096)
_CLIP: Final = (257, 1280)
_FRAMES: Final = 81
#: What a pool of ours holds beside the tensors.
_SLACK: Final = 32 << 20
#: Where our sender tells its desk's port, in the bench's folder.
_DESK: Final = "desk.json"
#: Where the host's engine reads what it is to be, in the bench's folder: by name, and by the variable that says so.
_ENGINE_FILE: Final = "mooncake.json"
_ENGINE: Final[Mapping[str, str]] = {
    "local_hostname": _HOSTNAME,
    "metadata_server": "P2PHANDSHAKE",
    "protocol": "tcp",
    "device_name": "",
}
#: The host's formula of ports: of its sender and its receiver of one room, with its ranks 0 and 1.
_PORTS: Final = (17788, 27789)
_PER_ROOM: Final = 10
#: Rooms that one measurement may use: each opening of the host's lane takes one for each payload.
_ROOMS: Final = 256
_FIX: Final = "without an accelerator: pin_memory and torch.cuda.synchronize do nothing, AI_DEVICE is cpu"


def _image_to_video(name: str, height: int, width: int) -> HostPayload:
    """Return what an encoder of Wan's image-to-video sends, with guidance."""
    latents = (20, 1 + (_FRAMES - 1) // 4, height // 8, width // 8)
    tensors = {
        "context": ("bfloat16", _TEXT),
        "context_null": ("bfloat16", _TEXT),
        "clip_encoder_out": ("bfloat16", _CLIP),
        "vae_encoder_out": ("bfloat16", latents),
    }
    elements = 2 * _TEXT[1] * _TEXT[2] + _CLIP[0] * _CLIP[1] + latents[0] * latents[1] * latents[2] * latents[3]
    values = {"latent_shape": [16, *latents[1:]]}
    return HostPayload(name=name, nbytes=2 * elements, tensors=tensors, values=values)


#: Height and width by the payload's name.
VIDEOS: Final[Mapping[str, tuple[int, int]]] = {"wan-i2v-480p": (480, 832), "wan-i2v-720p": (720, 1280)}
PAYLOADS: Final = tuple(_image_to_video(name, *video) for name, video in VIDEOS.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Lightx2vLane:
    """A lane, and how an end of it is opened: side, what it is told, whether the bench's fix is in place."""

    lane: Lane
    open: Callable[[str, Room, bool], End]


class Lightx2vBench(HostBench):
    """See `moonrelay.cli.bench.host_lanes.HostBench`."""

    host = f"lightx2v {plugin.host_version() or '?'}"
    payloads = PAYLOADS

    def lanes(self) -> tuple[Lane, ...]:
        return tuple(one.lane for one in LANES)

    @contextmanager
    def shared(self, lanes: Sequence[str], largest: int, folder: Path) -> Iterator[Mapping[str, str]]:
        (folder / _ENGINE_FILE).write_text(json.dumps(dict(_ENGINE)), "utf-8")
        yield {"folder": str(folder)}

    def open(self, lane: str, side: str, room: Room, *, fixed: bool) -> End:
        return next(one for one in LANES if one.lane.name == lane).open(side, room, fixed)


# -- the host's own ----------------------------------------------------------------------------------------------------


class NativeEnd(End):
    """A role's runners with the host's own mixin, made by its own config."""

    def __init__(self, side: str, room: Room, fixed: bool) -> None:
        folder = Path(room.shared["folder"])
        default_environment(
            {"MOONCAKE_CONFIG_PATH": str(folder / _ENGINE_FILE), "MOONCAKE_LOCAL_HOSTNAME": _HOSTNAME, **_IMPORT}
        )
        if fixed:
            _mend()
        native = _native_mixin()
        self._runners: dict[tuple[int, ...], Any] = {}
        for payload, number in zip(PAYLOADS, _rooms(side, folder), strict=True):
            height, width = VIDEOS[payload.name]
            runner = _native_runner(native, _native_config(side, number, height, width))
            self._runners[tuple(payload.values["latent_shape"])] = runner
        self._side = side

    def put(self, key: str, data: dict[str, Any]) -> bytes:
        inputs, latent_shape = _as_sent(data)
        self._runners[tuple(latent_shape)].send_encoder_outputs(inputs, latent_shape)
        return json.dumps(latent_shape).encode()

    def get(self, key: str, ticket: bytes) -> object:
        return _as_put(self._runners[tuple(json.loads(ticket))].receive_encoder_outputs())

    def close(self) -> None:
        for runner in self._runners.values():
            # It ends the threads, which release_disagg leaves; both give the buffers back, and only that one may fail.
            runner._disagg_data_mgr.release()  # noqa: SLF001
            runner.release_disagg()
        self._runners.clear()


def _native_runner(native: type, settings: Mapping[str, Any]) -> Any:
    class Runner(native):  # type: ignore[misc]
        """What the mixin needs of a runner."""

        config = settings

    runner = Runner()
    runner.init_disagg(settings)
    return runner


def _native_config(side: str, room: int, height: int, width: int) -> dict[str, Any]:
    return {
        "model_cls": "wan2.1",
        "task": "i2v",
        "enable_cfg": True,
        "use_image_encoder": True,
        "text_len": _TEXT[1],
        "text_encoder_dim": _TEXT[2],
        # The host's own default has room for one of CLIP's 257 vectors.
        "clip_embed_dim": _CLIP[0] * _CLIP[1],
        "target_video_length": _FRAMES,
        "target_height": height,
        "target_width": width,
        "disagg_mode": config.ENCODER if side == PRODUCER else config.TRANSFORMER,
        "disagg_config": {
            "bootstrap_addr": _HOSTNAME,
            "bootstrap_room": room,
            "sender_engine_rank": 0,
            "receiver_engine_rank": 1,
        },
    }


def _native_mixin() -> type:
    from moonrelay_lightx2v.roles import native_mixin

    return native_mixin()


def _rooms(side: str, folder: Path) -> list[int]:
    """Return a room for each payload, the same ones at both ends, whose ports are free.

    The producer, which is opened first, chooses.
    """
    told = folder / "rooms.json"
    if side != PRODUCER:
        rooms: list[int] = json.loads(told.read_text("utf-8"))["now"]
        return rooms
    used: list[int] = json.loads(told.read_text("utf-8"))["used"] if told.exists() else []
    free = (room for room in range(_ROOMS) if room not in used and all(map(_is_free, _ports(room))))
    found = list(itertools.islice(free, len(PAYLOADS)))
    if len(found) < len(PAYLOADS):
        message = f"no room of 0 to {_ROOMS - 1} has both its ports free ({_ports(0)} and so on)"
        raise ConfigError(message, field="bootstrap_room")
    told.write_text(json.dumps({"now": found, "used": used + found}), "utf-8")
    return found


def _ports(room: int) -> tuple[int, ...]:
    return tuple(first + _PER_ROOM * room for first in _PORTS)


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind((_HOSTNAME, port))
        except OSError:
            return False
    return True


#: The host refuses to be imported where its accelerator is missing.
_IMPORT: Final[Mapping[str, str]] = {"SKIP_PLATFORM_CHECK": "1"}


def _mend() -> None:
    """Have the host's mixin run without an accelerator; where there is one, nothing is changed."""
    import torch

    if torch.cuda.is_available():
        return
    mixin: Any = importlib.import_module(plugin.MIXIN_MODULE)
    mixin.AI_DEVICE = "cpu"
    torch.cuda.synchronize = lambda *_args: None
    allocate = torch.empty
    if getattr(allocate, "__wrapped__", None) is None:

        @functools.wraps(allocate)
        def empty(*args: Any, pin_memory: bool = False, **more: Any) -> Any:
            return allocate(*args, **more)

        torch.empty = empty  # type: ignore[assignment]


# -- ours -------------------------------------------------------------------------------------------------------------


class OurEnd(End):
    """A role's runner with our mixin, made by the host's config with our connector named in it."""

    def __init__(self, side: str, room: Room, _fixed: bool, *, engine: str, integrity: str) -> None:
        default_environment(_IMPORT)
        from moonrelay_lightx2v import roles

        self._roles = roles
        told = Path(room.shared["folder"]) / _DESK
        section: dict[str, Any] = {
            "connector": config.CONNECTOR,
            "local_hostname": _HOSTNAME,
            "protocol": "tcp",
            "engine": engine,
            "integrity": integrity,
            "transfer_mode": "p2p",
            "staging_bytes": 2 * room.largest + _SLACK,
            "rendezvous_port": 0,
        }
        if side == PRODUCER:
            self._runner = roles.runner_class()(config.ENCODER, section)
            told.write_text(json.dumps(roles.link_of(self._runner).address), "utf-8")
        else:
            host, port = json.loads(told.read_text("utf-8"))
            section["bootstrap_addr"] = f"{host}:{port}"
            self._runner = roles.runner_class()(config.TRANSFORMER, section)

    def put(self, key: str, data: dict[str, Any]) -> bytes:
        inputs, latent_shape = _as_sent(data)
        self._roles.serve(self._runner, key, lambda runner: runner.send_encoder_outputs(inputs, latent_shape))
        return b""

    def get(self, key: str, ticket: bytes) -> object:
        came: list[Any] = []
        self._roles.serve(self._runner, key, lambda runner: came.append(runner.receive_encoder_outputs()))
        return _as_put(came[0])

    def close(self) -> None:
        self._runner.release_disagg()


def _as_sent(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return a payload as the host's encoder hands it over: its outputs, and the shape of the latents to make."""
    inputs = {
        "text_encoder_output": {name: data[name] for name in ("context", "context_null")},
        "image_encoder_output": {name: data[name] for name in ("clip_encoder_out", "vae_encoder_out")},
    }
    return inputs, data["latent_shape"]


def _as_put(came: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the host's transformer gets as the payload that was put."""
    return {
        **came["text_encoder_output"],
        **came["image_encoder_output"],
        "latent_shape": list(came["latent_shape"]),
    }


def _our_lane(engine: str, wire: str, *, integrity: str) -> Lightx2vLane:
    name = f"moonrelay-{wire}{'' if integrity == 'auto' else '-unchecked'}"
    digests = "digests (the default)" if integrity == "auto" else "integrity off"
    return Lightx2vLane(
        lane=Lane(name=name, says=f"its mixin with connector moonrelay, engine {engine}, {digests}", ours=True),
        open=partial(OurEnd, engine=engine, integrity=integrity),
    )


LANES: Final[tuple[Lightx2vLane, ...]] = (
    Lightx2vLane(
        lane=Lane(name="host", says="DisaggMixin, Mooncake over tcp, its digests as always", fix=_FIX), open=NativeEnd
    ),
    *(
        _our_lane(engine, wire, integrity=integrity)
        for engine, wire in (("mooncake", "tcp"), ("shm", "shm"))
        for integrity in ("auto", "off")
    ),
)
