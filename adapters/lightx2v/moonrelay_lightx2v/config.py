"""The adapter's settings: what ``disagg_config`` in the host's own JSON says, and the variables the host reads too.

Owns which key means what, and where a role's rendezvous is. A config is ours when its ``disagg_config`` has
``"connector": "moonrelay"``. The host's keys keep their meaning; those that its own code reads nowhere (``protocol``,
``local_hostname``, ``metadata_server``, ``device_name``) are honoured, with ``MOONCAKE_*`` over them and the file of
``MOONCAKE_CONFIG_PATH`` below them, as the host's code has it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from moonrelay import config
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.connector.caching import CacheChoice
from moonrelay.connector.settings import INTEGRITY, MODES
from moonrelay.errors import ConfigError

#: What ``disagg_config.connector`` chooses us by; absent, or this, chooses the host's own code.
CONNECTOR: Final = "moonrelay"
NATIVE: Final = "native"
#: The host's roles (``disagg_mode``).
ENCODER: Final = "encoder"
TRANSFORMER: Final = "transformer"
DECODER: Final = "decode"
ROLES: Final = (ENCODER, TRANSFORMER, DECODER)
#: What a role sends, by the role: the name of the hand-over.
PHASES: Final[Mapping[str, str]] = {ENCODER: "encoder outputs", TRANSFORMER: "transformer outputs"}

#: The host's formula of a sender's port.
_FIRST_PORT: Final = 17788
_PORTS_PER_ROOM: Final = 10
_LAST_PORT: Final = 65535
#: Of the host: keys of ``disagg_config`` that are no settings of ours.
_HOSTS: Final = frozenset(
    {
        "connector",
        "bootstrap_addr",
        "bootstrap_room",
        "sender_engine_rank",
        "receiver_engine_rank",
        "decoder_engine_rank",
        "decoder_bootstrap_room",
        "protocol",
        "local_hostname",
        "metadata_server",
        "device_name",
        "decentralized_queue",
        "encoder_engine_rank",
        "transformer_engine_rank",
        "ranks",
    }
)
#: The host's variables over its keys.
_VARIABLES: Final[Mapping[str, str]] = {
    "protocol": "MOONCAKE_PROTOCOL",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_METADATA_SERVER",
    "device_name": "MOONCAKE_DEVICE_NAME",
}
_FILE: Final = "MOONCAKE_CONFIG_PATH"
_HANDSHAKE: Final = "P2PHANDSHAKE"

#: Our key to the field of the core's settings that it sets.
_TRANSFER: Final[Mapping[str, str]] = {
    "engine": "engine",
    "pool_device": "device",
    "staging_bytes": "pool_bytes",
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
    "retry_s": "retry_s",
    "renew_s": "renew_s",
    "claim_ttl_s": "claim_ttl_s",
    "control_options": "options",
}
_NUMBER: Final = (int, float)
#: Our keys that are fields of `LinkConfig` itself.
_OWN: Final[Mapping[str, tuple[type, ...]]] = {
    "pairing": (str,),
    "transfer_mode": (str,),
    "lease_ttl_s": _NUMBER,
    "spill_after_s": _NUMBER,
    "transfer_timeout_s": _NUMBER,
    "send_timeout_s": _NUMBER,
    "peer_timeout_s": _NUMBER,
    "linger_s": _NUMBER,
    "integrity": (str,),
    "auth_key": (str,),
    "rendezvous_port": (int,),
    "embedding_cache": (bool, Mapping),
    "encoder_revision": (str,),
}
KEYS: Final = tuple(sorted({*_OWN, *_TRANSFER, *_STORE, *_CONTROL}))
_PAIRINGS: Final = ("auto", "id")
#: What a role's pool holds where nobody says; mapped as it is used.
_STAGING_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What one role was asked to be, checked.

    Attributes:
        role: ``encoder``, ``transformer`` or ``decode``.
        listens: Where the receivers of what this role sends find it; ``None`` for a role that sends nothing (a decoder,
            and a transformer that decodes itself). Port 0 takes a free one.
        dials: Where this role finds what it receives; empty for an encoder.
        pairing: ``auto``: requests are paired by their ids, and those without one by what they ask for. ``id``: by ids
            alone. See `moonrelay_lightx2v.pairing`.
        transfer_mode: ``p2p``, ``store`` or ``auto``; where nobody says, ``auto`` with a store that was named and
            ``p2p`` without.
        transfer: The direct engine.
        store: Where payloads are relayed.
        control: The peer channel.
        lease_ttl_s: How long what was sent is kept for a receiver that does not come, in seconds: one comes
            late that is at work on what was asked before.
        spill_after_s: In ``auto``, how long an unclaimed payload stays in the sender's memory, in seconds.
        transfer_timeout_s: How long a receiver waits for its input, in seconds: the stages before it compute meanwhile.
        send_timeout_s: How long a sender waits for room in its pool, in seconds.
        peer_timeout_s: A role before this one that does not answer for so long is lost, in seconds.
        linger_s: How long a process that ends waits until what it sent was taken, in seconds.
        integrity: ``auto``, ``full`` or ``off``.
        auth_key: Shared secret of the deployment.
        embedding_cache: For an encoder: a cache of what its text encoder makes; ``None`` for none.
        encoder_revision: Of the text encoder's weights and tokenizer; where nobody says, their files are read.
    """

    role: str
    listens: tuple[str, int] | None = None
    dials: tuple[tuple[str, int], ...] = ()
    pairing: str = "auto"
    transfer_mode: str = "p2p"
    transfer: TransferConfig = field(default_factory=TransferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    lease_ttl_s: float = 3600.0
    spill_after_s: float = 5.0
    transfer_timeout_s: float = 3600.0
    send_timeout_s: float = 60.0
    peer_timeout_s: float = 30.0
    linger_s: float = 600.0
    integrity: str = "auto"
    auth_key: str | None = field(default=None, repr=False)
    embedding_cache: CacheChoice | None = None
    encoder_revision: str | None = None

    def __post_init__(self) -> None:
        config.require_positive(
            self, "lease_ttl_s", "transfer_timeout_s", "send_timeout_s", "peer_timeout_s", "linger_s"
        )
        if self.spill_after_s < 0:
            message = f"spill_after_s={self.spill_after_s!r} must be a number of seconds, 0 or more"
            raise ConfigError(message, field="spill_after_s")
        config.require_one_of(self, "pairing", _PAIRINGS)
        config.require_one_of(self, "transfer_mode", MODES)
        config.require_one_of(self, "integrity", INTEGRITY)

    @property
    def sends(self) -> str | None:
        """What this role sends, in words; ``None`` where it sends nothing."""
        return PHASES[self.role] if self.listens is not None else None

    @property
    def receives(self) -> str | None:
        """What this role receives, in words; ``None`` for an encoder."""
        return None if self.role == ENCODER else PHASES[TRANSFORMER if self.role == DECODER else ENCODER]


def is_chosen(given: object) -> bool:
    """Return whether a config of the host chooses us.

    Args:
        given: The host's config, a mapping.

    Raises:
        ConfigError: It names a connector that nobody knows.
    """
    section = given.get("disagg_config") if isinstance(given, Mapping) else None
    name = section.get("connector") if isinstance(section, Mapping) else None
    if name is None or name == NATIVE:
        return False
    if name == CONNECTOR:
        return True
    message = f"disagg_config.connector={name!r} is not known; use {CONNECTOR!r}, or leave it out for LightX2V's own"
    raise ConfigError(message, field="connector")


def parse(given: Mapping[str, Any]) -> LinkConfig:
    """Read a role's settings from the host's config.

    Args:
        given: The host's config: ``disagg_mode`` and ``disagg_config`` of it.

    Raises:
        ConfigError: An unknown key (the nearest valid one is suggested) or a wrong value; names the field.
    """
    role = given.get("disagg_mode")
    if role not in ROLES:
        message = f"disagg_mode={role!r} is not known; use one of {', '.join(ROLES)}"
        raise ConfigError(message, field="disagg_mode")
    section: Mapping[str, Any] = given.get("disagg_config") or {}
    _check(section)
    base = _base(section)
    usual = {} if config.from_environment("TE_POOL_BYTES") else {"pool_bytes": _STAGING_BYTES}
    transfer: dict[str, Any] = {**usual, **base, **_section(section, _TRANSFER)}
    own = {name: section[name] for name in _OWN if section.get(name) is not None and name != "rendezvous_port"}
    own["embedding_cache"] = CacheChoice.parse(section.get("embedding_cache"))
    own.setdefault("auth_key", config.from_environment("AUTH_KEY"))  # the host logs its whole JSON: not for secrets
    built = config.build(TransferConfig, transfer, env_prefix="TE")
    store = config.build(StoreConfig, _section(section, _STORE), env_prefix="STORE")
    own.setdefault(
        "transfer_mode", config.from_environment("TRANSFER_MODE") or ("p2p" if store.url is None else "auto")
    )
    return LinkConfig(
        role=role,
        **own,
        listens=_listens(role, section, built.hostname),
        dials=_dials(role, section),
        transfer=built,
        store=store,
        control=config.build(
            ControlConfig, {"bind_host": built.hostname, **_section(section, _CONTROL)}, env_prefix="CONTROL"
        ),
    )


def numeric(hostname: str, name: str) -> str:
    """Return a host's numeric address. Blocks: to resolve a name.

    Args:
        hostname: A name or an address; an IPv6 literal with or without brackets.
        name: The key that it comes from.

    Raises:
        ConfigError: It cannot be resolved.
    """
    bare = hostname.strip().removeprefix("[").removesuffix("]")
    if bare == "localhost":
        return "127.0.0.1"  # whatever this machine resolves it to, all roles on it must agree
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        message = (
            f"{name}={hostname!r} cannot be resolved: {exc}; give this machine's address, as the other roles dial it"
        )
        raise ConfigError(message, field=name) from exc
    return str(found[0][4][0])


# -- inside -----------------------------------------------------------------------------------------------------------


def _check(section: Mapping[str, Any]) -> None:
    for key, value in section.items():
        name = str(key)
        if name.startswith("rdma_") or name in _HOSTS:
            continue
        if name not in KEYS:
            raise ConfigError(config.unknown_key(name, {*KEYS, *_HOSTS}, "disagg_config"), field=name)
        wanted = _OWN.get(name)
        if value is None or wanted is None:
            continue
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            said = f"{name}, a secret," if name == "auth_key" else f"{name}={value!r}"
            message = f"{said} must be {' or '.join(kind.__name__ for kind in wanted)}"
            raise ConfigError(message, field=name)
    if section.get("decentralized_queue"):
        message = (
            "disagg_config.decentralized_queue goes with LightX2V's own connector only; leave it out: with "
            "moonrelay every request is paired by its id, and several transformers may take from one encoder"
        )
        raise ConfigError(message, field="decentralized_queue")


def _section(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, target in names.items():
        value = given.get(name)
        if value is None:
            continue
        if target == "options":
            if not isinstance(value, Mapping):
                message = f"disagg_config.{name}={value!r} must be an object of the engine's, store's or channel's own"
                raise ConfigError(message, field=name)
            value = _plain(value)  # the host's own kind of dict is locked later
        found[target] = value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _base(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the host calls its transfer engine's settings, in the core's words."""
    below = _from_file()
    found: dict[str, str] = {}
    for name, variable in _VARIABLES.items():
        value = (config.hosts_variable(variable) or "").strip() or section.get(name) or below.get(name)
        if value is not None and value != "":
            if not isinstance(value, str):
                message = f"disagg_config.{name}={value!r} must be text"
                raise ConfigError(message, field=name)
            found[name] = value
    metadata = found.get("metadata_server", _HANDSHAKE)
    if metadata != _HANDSHAKE:
        message = (
            f"metadata_server={metadata!r}: Moonrelay's peers find one another without a metadata service; "
            f"set it to {_HANDSHAKE!r}, or leave it out"
        )
        raise ConfigError(message, field="metadata_server")
    base: dict[str, Any] = {}
    if "protocol" in found:
        base["protocol"] = found["protocol"]
    if "device_name" in found:
        base["nics"] = found["device_name"]
    if "local_hostname" in found:
        base["hostname"] = numeric(found["local_hostname"], "local_hostname")
    return base


def _from_file() -> Mapping[str, Any]:
    """Return the host's file of its engine's settings; nothing where none is named."""
    path = config.hosts_variable(_FILE)
    if not path:
        return {}
    try:
        found = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.MsgspecError) as exc:
        message = f"{_FILE}={path} cannot be read: {exc}; mend it, or unset it: disagg_config can hold the same keys"
        raise ConfigError(message, field=_FILE) from exc
    if not isinstance(found, Mapping):
        message = f"{_FILE}={path} holds a {type(found).__name__}; it is to hold a JSON object"
        raise ConfigError(message, field=_FILE)
    return found


def _listens(role: str, section: Mapping[str, Any], hostname: str) -> tuple[str, int] | None:
    if role == DECODER or (role == TRANSFORMER and section.get("decoder_engine_rank") is None):
        return None
    if section.get("rendezvous_port") is not None:
        port = int(section["rendezvous_port"])
        if not 0 <= port <= _LAST_PORT:
            message = f"rendezvous_port={port} must be a port, 0 to {_LAST_PORT}; 0 takes a free one"
            raise ConfigError(message, field="rendezvous_port")
        return hostname, port
    # As the host: a transformer sends under the rank by which it receives.
    rank, room = ("sender_engine_rank", "bootstrap_room")
    usual = 0
    if role == TRANSFORMER:
        rank, room, usual = "receiver_engine_rank", "decoder_bootstrap_room", 1
    return hostname, _port(section, (rank, usual), (room, usual))


def _dials(role: str, section: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    if role == ENCODER:
        return ()
    usual = 1 if role == DECODER else 0
    given = section.get("bootstrap_addr", "127.0.0.1")
    named: Sequence[Any] = [given] if isinstance(given, str) else given
    if not isinstance(named, Sequence) or not named or not all(isinstance(one, str) and one.strip() for one in named):
        message = f"bootstrap_addr={given!r} must be the sender's 'host' or 'host:port', or a list of such"
        raise ConfigError(message, field="bootstrap_addr")
    found: list[tuple[str, int]] = []
    for one in named:
        host, port = _parted(one.strip())
        if port is None:
            port = _port(section, ("sender_engine_rank", usual), ("bootstrap_room", usual))
        found.append((numeric(host, "bootstrap_addr"), port))
    return tuple(dict.fromkeys(found))


def _parted(address: str) -> tuple[str, int | None]:
    """Return host and port of ``host``, ``host:port``, ``[v6]:port`` or ``v6``."""
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")) or address.endswith("]"):
        return address, None
    if not port.isdigit() or not 0 < int(port) <= _LAST_PORT:
        message = f"bootstrap_addr={address!r} has no port after its colon; write 'host:port' with 1 to {_LAST_PORT}"
        raise ConfigError(message, field="bootstrap_addr")
    return host, int(port)


def _port(section: Mapping[str, Any], rank: tuple[str, int], room: tuple[str, int]) -> int:
    """Return the port of a rank in a room: the host's formula, where it stays within the ports there are."""
    numbers: list[int] = []
    for name, usual in (rank, room):
        value = section.get(name, usual)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)  # the host takes it, too
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            message = f"disagg_config.{name}={value!r} must be a whole number, 0 or more"
            raise ConfigError(message, field=name)
        numbers.append(value)
    port = _FIRST_PORT + numbers[0] + _PORTS_PER_ROOM * numbers[1]
    if port > _LAST_PORT:
        message = (
            f"{rank[0]}={numbers[0]} and {room[0]}={numbers[1]} make port {port}, and there are {_LAST_PORT}; give a "
            "smaller room, or rendezvous_port at the sender and 'host:port' as bootstrap_addr at the receiver"
        )
        raise ConfigError(message, field=room[0])
    return port
