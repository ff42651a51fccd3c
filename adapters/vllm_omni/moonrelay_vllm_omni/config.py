"""The connector's settings out of a deploy YAML's ``extra``.

Owns which keys are ours, which are the host's or its models' and are left alone, and what a misspelled one is told.
Reads no environment by itself: `moonrelay.config` does, for what ``extra`` does not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moonrelay import config
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.connector.settings import INTEGRITY, MODES
from moonrelay.errors import ConfigError

#: Keys that the host adds to ``extra``, or that stand there for other connectors' sake. None of them limits what this
#: connector can do: one instance sends and receives, whatever its ``role`` says.
HOST_KEYS: Final = frozenset(
    {
        "role",
        "stage_id",
        "from_stage",
        "to_stage",
        "outgoing",
        "zmq_port",
        "sender_host",
        "sender_zmq_port",
        "replica",
        "replica_id",
        "rank",
        "local_rank",
        "tp_rank",
        "rank_mapping",
        "name",
        "type",
    }
)
#: Settings of the host's models and of its polling that its deploy files keep in a connector's ``extra``.
_MODEL_KEYS: Final = re.compile(r"codec|latent|decod|predictor|talker|speech|_graph|crossfade|^ref_|^connector_get_")

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
class OmniSettings:
    """What the connector was asked to be, checked.

    Attributes:
        transfer_mode: ``p2p``, ``store`` or ``auto``; ``None`` takes ``MOONRELAY_TRANSFER_MODE``, else ``auto``.
        transfer: The direct engine.
        store: Where payloads are relayed, and where the directory of keys lies.
        control: The peer channel.
        lease_ttl_s: How long a payload that nobody takes is kept, in seconds; nothing of the host's ends it earlier.
        spill_after_s: In ``auto``, how long an unclaimed payload stays in the producer's memory, in seconds.
        drain_timeout_s: How long `close` may take to bring unclaimed payloads to the store, in seconds.
        readers: How many consumers each take every payload once; 0 is any number until ``lease_ttl_s``.
        snapshot: Copy every payload before ``put`` returns, as the host's own connectors do: a stage may write into its
            tensors afterwards (static buffers of a captured graph). False copies in the background, or not at all where
            the memory is registered; the stage must then leave its tensors alone until they are taken.
        integrity: ``auto``, ``full`` or ``off``.
        auth_key: Shared secret of the deployment.
        fetch_timeout_s: How long one fetch that ``get`` started may take, in seconds.
        fetchers: How many payloads are fetched at a time.
        stage_id: The host's number of the stage; -1 where it gave none.
    """

    transfer_mode: str | None = None
    transfer: TransferConfig = field(default_factory=TransferConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    lease_ttl_s: float = 600.0
    spill_after_s: float = 5.0
    drain_timeout_s: float = 10.0
    readers: int = 1
    snapshot: bool = True
    integrity: str = "auto"
    auth_key: str | None = None
    fetch_timeout_s: float = 30.0
    fetchers: int = 8
    stage_id: int = -1

    def __post_init__(self) -> None:
        config.require_positive(self, "lease_ttl_s", "drain_timeout_s", "fetch_timeout_s", "fetchers")
        if self.readers < 0:
            message = f"readers={self.readers!r} must be 1 or more, or 0 for any number until lease_ttl_s"
            raise ConfigError(message, field="readers")
        if self.spill_after_s < 0:
            message = f"spill_after_s={self.spill_after_s!r} must be a number of seconds, 0 or more"
            raise ConfigError(message, field="spill_after_s")
        if self.transfer_mode is not None:
            config.require_one_of(self, "transfer_mode", MODES)
        config.require_one_of(self, "integrity", INTEGRITY)


#: Our keys that are fields of `OmniSettings` itself.
_OWN: Final = (
    "transfer_mode",
    "lease_ttl_s",
    "spill_after_s",
    "drain_timeout_s",
    "readers",
    "snapshot",
    "integrity",
    "auth_key",
    "fetch_timeout_s",
    "fetchers",
)
KEYS: Final = (*_OWN, *_TRANSFER, *_STORE, *_CONTROL)


def parse(extra: Mapping[str, Any]) -> OmniSettings:
    """Read a connector's ``extra``.

    Args:
        extra: As the host hands it to the constructor; our keys with underscores or dashes.

    Raises:
        ConfigError: An unknown key (the nearest valid one is suggested), one given twice, or a wrong value; names the
            field, the value and the remedy.
    """
    if not isinstance(extra, Mapping):
        message = f"extra is a {type(extra).__name__}; give a mapping of the connector's settings"
        raise ConfigError(message, field="extra")
    given: dict[str, Any] = {}
    for key, value in extra.items():
        name = str(key).replace("-", "_")
        if name in KEYS:
            if name in given:
                message = f"{name} is given twice, with dashes and with underscores; give it once"
                raise ConfigError(message, field=name)
            given[name] = value
        elif name not in HOST_KEYS and not _MODEL_KEYS.search(name):
            raise ConfigError(config.unknown_key(key, KEYS, "MoonrelayConnector"), field=str(key))
    own = {name: given[name] for name in _OWN if name in given}
    transfer = config.build(TransferConfig, _section(given, _TRANSFER), env_prefix="TE")
    # One numeric address serves both planes unless the user separates them.
    control = {"bind_host": transfer.hostname, **_section(given, _CONTROL)}
    return OmniSettings(
        **{name: _checked(name, value) for name, value in own.items()},
        transfer=transfer,
        store=config.build(StoreConfig, _section(given, _STORE), env_prefix="STORE"),
        control=config.build(ControlConfig, control, env_prefix="CONTROL"),
        stage_id=stage_of(extra.get("stage_id")),
    )


def stage_of(value: object) -> int:
    """Return a stage's number as the host gives it; -1 for none."""
    try:
        return int(value) if isinstance(value, (int, str)) else -1
    except ValueError:
        return -1


def _section(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {target: given[name] for name, target in names.items() if name in given}


def _checked(name: str, value: object) -> Any:
    """Return a value of our own fields, of the right type."""
    if name == "snapshot":
        if isinstance(value, bool):
            return value
        message = f"snapshot={value!r} must be true or false"
        raise ConfigError(message, field=name)
    text = name in ("transfer_mode", "integrity", "auth_key")
    whole = name in ("readers", "fetchers")
    wanted: tuple[type, ...] = (str,) if text else (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        message = f"{name}={value!r} must be {' or '.join(kind.__name__ for kind in wanted)}"
        raise ConfigError(message, field=name)
    return value
