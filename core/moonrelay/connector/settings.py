"""What a connector was asked to be: validated once, before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moonrelay import config
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.control.lossy import losses
from moonrelay.errors import ConfigError

MODES = ("p2p", "store", "auto")
INTEGRITY = ("auto", "full", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSettings:
    """A connector's settings, complete and checked.

    Attributes:
        role: The stage this connector serves; any non-empty name.
        mode: ``p2p``, ``store`` or ``auto``.
        transfer: How payloads move directly.
        store: Where they are relayed.
        control: The peer channel.
        lease_ttl_s: Life of a payload that names no other.
        spill_after_s: In ``auto``, how long an unclaimed payload stays in the producer's memory.
        drain_timeout_s: How long ``close`` may take to bring unclaimed payloads to the relay and let readers finish.
        integrity: ``auto``, ``full`` or ``off``.
        auth_key: Shared secret of the deployment, or ``None``.
    """

    role: str
    mode: str
    transfer: TransferConfig
    store: StoreConfig
    control: ControlConfig
    lease_ttl_s: float
    spill_after_s: float
    drain_timeout_s: float
    integrity: str
    auth_key: str | None

    @property
    def relays(self) -> bool:
        """Whether payloads may go through the relay."""
        return self.mode != "p2p"

    @property
    def serves_directly(self) -> bool:
        """Whether payloads may be read from the producer's memory."""
        return self.mode != "store"


def make_settings(
    *,
    role: str,
    transfer_mode: str | None,
    te_config: TransferConfig | Mapping[str, Any] | None,
    store_config: StoreConfig | Mapping[str, Any] | str | None,
    control_config: ControlConfig | Mapping[str, Any] | None,
    lease_ttl_s: float,
    spill_after_s: float,
    drain_timeout_s: float,
    integrity: str,
    auth_key: str | None,
) -> ConnectorSettings:
    """Check and complete the arguments of `DiffusionConnector`.

    Raises:
        ConfigError: Naming the field, the value and the remedy.
    """
    if not isinstance(role, str) or not role:
        message = f"role={role!r} must be a non-empty name such as 'encode', 'denoise' or 'decode'"
        raise ConfigError(message, field="role")
    mode = transfer_mode or config.from_environment("TRANSFER_MODE") or "auto"
    _one_of("transfer_mode", mode, MODES)
    _one_of("integrity", integrity, INTEGRITY)
    for name, value in (("lease_ttl_s", lease_ttl_s), ("drain_timeout_s", drain_timeout_s)):
        if not _is_number(value) or not value > 0:
            message = f"{name}={value!r} must be a number of seconds above 0"
            raise ConfigError(message, field=name)
    if not _is_number(spill_after_s) or spill_after_s < 0:
        message = f"spill_after_s={spill_after_s!r} must be a number of seconds, 0 or more"
        raise ConfigError(message, field="spill_after_s")
    if auth_key is not None and (not isinstance(auth_key, str) or not auth_key):
        message = "auth_key must be a non-empty string, or None for a deployment without one"
        raise ConfigError(message, field="auth_key")
    if isinstance(store_config, str):
        store_config = {"url": store_config}
    transfer = config.build(TransferConfig, te_config, env_prefix="TE")
    if not isinstance(control_config, ControlConfig):
        # One numeric address serves both planes unless the user separates them.
        control_config = {"bind_host": transfer.hostname, **(control_config or {})}
    control = config.build(ControlConfig, control_config, env_prefix="CONTROL")
    losses(control.options)
    return ConnectorSettings(
        role=role,
        mode=mode,
        transfer=transfer,
        store=config.build(StoreConfig, store_config, env_prefix="STORE"),
        control=control,
        lease_ttl_s=float(lease_ttl_s),
        spill_after_s=float(spill_after_s),
        drain_timeout_s=float(drain_timeout_s),
        integrity=integrity,
        auth_key=auth_key or config.from_environment("AUTH_KEY"),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        message = f"{name}={value!r} is not known; use one of {', '.join(allowed)}"
        raise ConfigError(message, field=name)
