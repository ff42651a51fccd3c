"""The adapter's settings: the host's flags, and what they cannot say in one JSON.

Owns which flag means what to us and which keys the JSON has. It is the value of ``MOONRELAY_SGLANG``: a JSON object, or
the path of a file that holds one. Reads no environment by itself, `moonrelay.config` does; knows the host's
``ServerArgs`` by its fields' names only.

Flags of the host without a meaning here: ``--disagg-transfer-redundancy`` (buffers are not sized by a warm-up: payloads
take their own bytes of one pool) and ``--disagg-role-device`` (where a role computes is the host's affair).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from moonrelay import config
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.connector.caching import CacheChoice
from moonrelay.connector.settings import INTEGRITY, MODES
from moonrelay.errors import ConfigError

#: What ``--disagg-transfer-backend`` chooses us by.
BACKEND: Final = "moonrelay"
#: The host's dispatch policies, and ours.
STOCK_POLICIES: Final = ("round_robin", "max_free_slots")
OUR_POLICIES: Final = ("credits", "priority", "affinity")
#: The variable (``MOONRELAY_SGLANG``) with the JSON, without our prefix.
VARIABLE: Final = "SGLANG"

#: How many requests an instance takes at a time where nobody says: what the host's head assumes of each role. A
#: denoiser computes one and has the next one's input here already.
STOCK_SLOTS: Final[Mapping[str, int]] = {"denoiser": 2}
OTHER_SLOTS: Final = 4

#: Our key to the field of the core's settings that it sets.
_TRANSFER: Final[Mapping[str, str]] = {
    "engine": "engine",
    "protocol": "protocol",
    "hostname": "hostname",
    "nics": "nics",
    "device": "device",
    "pool_bytes": "pool_bytes",
    "window": "window",
    "piece_bytes": "piece_bytes",
    "progress_timeout_s": "progress_timeout_s",
    "engine_options": "options",
}
_STORE: Final[Mapping[str, str]] = {
    "store": "url",
    "namespace": "namespace",
    "store_capacity_bytes": "capacity_bytes",
    "put_timeout_s": "put_timeout_s",
    "sweep_interval_s": "sweep_interval_s",
    "store_options": "options",
}
_CONTROL: Final[Mapping[str, str]] = {
    "bind_host": "bind_host",
    "retry_s": "retry_s",
    "peer_timeout_s": "peer_timeout_s",
    "renew_s": "renew_s",
    "claim_ttl_s": "claim_ttl_s",
    "control_options": "options",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """What a head or a worker was asked to be, checked.

    Attributes:
        role: The host's role: ``encoder``, ``denoiser``, ``decoder``, ``server`` …
        instance: Name of the instance, for people.
        transfer_mode: ``p2p``, ``store`` or ``auto``. Where neither the JSON nor ``MOONRELAY_TRANSFER_MODE`` says,
            ``auto`` with a store that was named and ``p2p`` without: the embedded store is this machine's own, and a
            role on another one would not find there what waited too long.
        transfer: The direct engine.
        store: Where payloads are relayed.
        control: The peer channel.
        lease_ttl_s: How long a payload that nobody takes is kept, in seconds: as long as its request may live.
        spill_after_s: In ``auto``, how long an unclaimed payload stays in the sender's memory, in seconds.
        drain_timeout_s: How long a worker may take, when it ends, to bring unclaimed payloads to the store and let
            readers finish, in seconds. The host's launcher gives its roles one second in all, then kills them.
        integrity: ``auto``, ``full`` or ``off``.
        auth_key: Shared secret of the deployment.
        slots: How many requests the instance takes at a time.
        stage_timeout_s: How long a role waits for room in its pool for what it made, in seconds.
        fetch_timeout_s: How long taking one payload over may take, in seconds.
        beat_s: Pause between two signs of life, in seconds.
        dead_after_s: An instance without a sign of life for this long gets no work, and its work goes to others.
        max_attempts: How often a request is tried in one stage.
        labels: Of this instance, for affinity.
        policy: ``--disagg-dispatch-policy``.
        timeout_s: ``--disagg-timeout``: a request's whole life.
        queue_timeout_s: ``--disagg-downstream-wait-timeout``: its longest wait for an instance of one stage.
        send_all: Send every field on every hop, also those that the receiving role is known not to read.
        embedding_cache: A cache of what text encoding makes; ``None`` for none.
        condition_hook: ``package.module:make`` of what remembers it instead; see `moonrelay_sglang.conditioning`.
        encoder: Whose weights the text encoder has, for the cache's keys, where that is not the model's name.
        encoder_revision: Of those weights, where neither the host's ``--revision`` nor the hub's cache says it.
    """

    role: str
    instance: str
    transfer_mode: str = "p2p"
    transfer: TransferConfig = field(default_factory=TransferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    lease_ttl_s: float = 3660.0
    spill_after_s: float = 5.0
    drain_timeout_s: float = 0.5
    integrity: str = "auto"
    auth_key: str | None = field(default=None, repr=False)
    slots: int = OTHER_SLOTS
    stage_timeout_s: float = 30.0
    fetch_timeout_s: float = 60.0
    beat_s: float = 1.0
    dead_after_s: float = 5.0
    max_attempts: int = 3
    labels: Mapping[str, str] = field(default_factory=dict)
    policy: str = "round_robin"
    timeout_s: float = 3600.0
    queue_timeout_s: float = 1800.0
    send_all: bool = False
    embedding_cache: CacheChoice | None = None
    condition_hook: str | None = None
    encoder: str | None = None
    encoder_revision: str | None = None

    def __post_init__(self) -> None:
        config.require_positive(
            self,
            "lease_ttl_s",
            "drain_timeout_s",
            "slots",
            "stage_timeout_s",
            "fetch_timeout_s",
            "beat_s",
            "dead_after_s",
            "max_attempts",
            "timeout_s",
            "queue_timeout_s",
        )
        if self.spill_after_s < 0:
            message = f"spill_after_s={self.spill_after_s!r} must be a number of seconds, 0 or more"
            raise ConfigError(message, field="spill_after_s")
        if self.dead_after_s < 2 * self.beat_s:
            message = (
                f"dead_after_s={self.dead_after_s!r} must be at least twice beat_s={self.beat_s!r}: one may be late"
            )
            raise ConfigError(message, field="dead_after_s")
        config.require_one_of(self, "transfer_mode", MODES)
        config.require_one_of(self, "integrity", INTEGRITY)
        if self.embedding_cache is not None and self.condition_hook is not None:
            message = (
                f"embedding_cache and condition_hook={self.condition_hook!r} would both remember conditions; "
                "leave one of them out"
            )
            raise ConfigError(message, field="condition_hook")
        wrong = [name for name, value in self.labels.items() if not isinstance(name, str) or not isinstance(value, str)]
        if wrong:
            message = f"labels[{wrong[0]!r}] must be text, as its name"
            raise ConfigError(message, field="labels")


#: Our keys that are fields of `SglangConfig` itself.
_OWN: Final[Mapping[str, tuple[type, ...]]] = {
    "transfer_mode": (str,),
    "lease_ttl_s": (int, float),
    "spill_after_s": (int, float),
    "drain_timeout_s": (int, float),
    "integrity": (str,),
    "auth_key": (str,),
    "slots": (int,),
    "stage_timeout_s": (int, float),
    "fetch_timeout_s": (int, float),
    "beat_s": (int, float),
    "dead_after_s": (int, float),
    "max_attempts": (int,),
    "labels": (dict,),
    "instance": (str,),
    "send_all": (bool,),
    "embedding_cache": (bool, dict),
    "condition_hook": (str,),
    "encoder": (str,),
    "encoder_revision": (str,),
}
KEYS: Final = (*_OWN, *_TRANSFER, *_STORE, *_CONTROL)


def is_chosen(server_args: object) -> bool:
    """Return whether the host was asked to use us: ``--disagg-transfer-backend moonrelay``."""
    return getattr(server_args, "disagg_transfer_backend", None) == BACKEND


def role_of(server_args: object) -> str:
    """Return a process's role as the host writes it in messages."""
    role = getattr(server_args, "disagg_role", "monolithic")
    return str(getattr(role, "value", role))


def from_server_args(server_args: object, more: Mapping[str, Any] | None = None) -> SglangConfig:
    """Read the host's flags, and over them the JSON.

    Args:
        server_args: The host's ``ServerArgs``, by name of its fields; an absent one counts as its default.
        more: The JSON's content; ``None`` reads ``MOONRELAY_SGLANG``.

    Raises:
        ConfigError: An unknown key (the nearest valid one is suggested) or a wrong value; names the field.
    """
    given = _checked(_from_variable() if more is None else more)
    role = role_of(server_args)
    hostname = str(_flag(server_args, "disagg_p2p_hostname", "127.0.0.1") or "127.0.0.1")
    nics = str(_flag(server_args, "disagg_ib_device", None) or "")
    if _flag(server_args, "disagg_transfer_pin_memory", "auto") == "required":
        message = (
            "--disagg-transfer-pin-memory required: Moonrelay does not register its pool with CUDA; "
            "use auto or off, or put the pool on the device with 'device' in MOONRELAY_SGLANG"
        )
        raise ConfigError(message, field="disagg_transfer_pin_memory")
    timeout_s = float(_flag(server_args, "disagg_timeout", 3600))
    transfer: dict[str, Any] = {
        "pool_bytes": int(_flag(server_args, "disagg_transfer_pool_size", 256 << 20)),
        "nics": nics,
        "hostname": _numeric(hostname),
    }
    if nics:
        # As the host: who names a NIC wants it used.
        transfer["protocol"] = "rdma"
    transfer.update(_section(given, _TRANSFER))
    if "hostname" in given:
        transfer["hostname"] = _numeric(str(given["hostname"]))
    own = {name: given[name] for name in _OWN if name in given}
    own["embedding_cache"] = CacheChoice.parse(own.get("embedding_cache"))
    own.setdefault("instance", _instance(server_args, role, hostname))
    own.setdefault("slots", _slots(server_args, role))
    # An input is needed until the request's end: its next role's instance may die, and another one then takes it.
    own.setdefault("lease_ttl_s", timeout_s + 60.0)
    built = config.build(TransferConfig, transfer, env_prefix="TE")
    store = config.build(StoreConfig, _section(given, _STORE), env_prefix="STORE")
    mode = config.from_environment("TRANSFER_MODE") or ("p2p" if store.url is None else "auto")
    own.setdefault("transfer_mode", mode)
    return SglangConfig(
        role=role,
        **own,
        transfer=built,
        store=store,
        # One numeric address serves both planes unless the user separates them.
        control=config.build(
            ControlConfig, {"bind_host": built.hostname, **_section(given, _CONTROL)}, env_prefix="CONTROL"
        ),
        policy=str(_flag(server_args, "disagg_dispatch_policy", "round_robin")),
        timeout_s=timeout_s,
        queue_timeout_s=float(_flag(server_args, "disagg_downstream_wait_timeout", 1800)),
    )


def _from_variable() -> Mapping[str, Any]:
    text = config.from_environment(VARIABLE)
    if text is None:
        return {}
    where = f"MOONRELAY_{VARIABLE}"
    if not text.lstrip().startswith("{"):
        if '"' in text:
            # Not repeated: there may be a secret in it.
            message = f"{where} is neither a JSON object nor the path of a file that holds one; write {{...}}"
            raise ConfigError(message, field=VARIABLE)
        where = f"{where}={text}"
        try:
            text = Path(text).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            message = f"{where} cannot be read: {exc}; give a JSON object, or a file that holds one"
            raise ConfigError(message, field=VARIABLE) from exc
    try:
        found = msgspec.json.decode(text)
    except msgspec.MsgspecError as exc:
        message = f"{where} is no JSON: {exc}"
        raise ConfigError(message, field=VARIABLE) from exc
    if not isinstance(found, dict):
        message = f"{where} holds a {type(found).__name__}; give a JSON object of settings"
        raise ConfigError(message, field=VARIABLE)
    return found


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in KEYS:
            raise ConfigError(config.unknown_key(key, KEYS, f"MOONRELAY_{VARIABLE}"), field=str(key))
        if name in found:
            message = f"{name} is given twice, with dashes and with underscores; give it once"
            raise ConfigError(message, field=name)
        wanted = _OWN.get(name)
        if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
            said = f"{name}, a secret," if name == "auth_key" else f"{name}={value!r}"
            message = f"{said} must be {' or '.join(kind.__name__ for kind in wanted)}"
            raise ConfigError(message, field=name)
        found[name] = value
    return found


def _section(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {target: given[name] for name, target in names.items() if name in given}


def _flag(server_args: object, name: str, default: object) -> Any:
    return getattr(server_args, name, default)


def _slots(server_args: object, role: str) -> int:
    """Return ``--disagg-max-slots-per-instance`` where somebody gave it, else what the host's head assumes."""
    usual = STOCK_SLOTS.get(role, OTHER_SLOTS)
    explicit = getattr(server_args, "_explicit_arg_names", ())
    given = _flag(server_args, "disagg_max_slots_per_instance", None)
    return int(given) if given is not None and "disagg_max_slots_per_instance" in explicit else usual


def _instance(server_args: object, role: str, hostname: str) -> str:
    if "disagg_instance_id" in getattr(server_args, "_explicit_arg_names", ()):
        return f"{role}-{_flag(server_args, 'disagg_instance_id', 0)}"
    # The endpoint's port is what the head's URLs say; the host moves ``scheduler_port`` where that one is taken.
    endpoint = str(_flag(server_args, "pool_work_endpoint", None) or f":{_flag(server_args, 'scheduler_port', 0)}")
    return f"{role}@{hostname}:{endpoint.rpartition(':')[2]}"


def _numeric(hostname: str) -> str:
    """Return a host's numeric address; both planes bind to it and tell peers to dial it. Blocks: to resolve a name."""
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError as exc:
        message = f"--disagg-p2p-hostname {hostname}: {exc}; give this machine's address, as the other roles dial it"
        raise ConfigError(message, field="disagg_p2p_hostname") from exc
    return str(found[0][4][0])
