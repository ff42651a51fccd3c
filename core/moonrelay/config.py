"""Settings: one frozen dataclass per component, and the only place that reads the environment.

Order of precedence: an explicit argument, then ``MOONRELAY_*`` in the environment, then the default. An unknown key is
refused by name with the nearest valid one suggested.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moonrelay.errors import ConfigError

ConfigT = TypeVar("ConfigT")

#: Extra keys that a plugin's engine or relay may take, e.g. ``{"engine": "mine", "options": {...}}``.
Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How payloads move directly between two processes.

    Attributes:
        engine: Name of an engine in the entry-point group ``moonrelay.transfers``: ``mooncake``, ``shm``, ``memory``.
        protocol: Mooncake's protocol: ``tcp``, ``rdma`` or ``nvlink``.
        hostname: Numeric address that peers dial for data and control; IPv6 literals without brackets.
        nics: Mooncake's device list, e.g. ``mlx5_0,mlx5_1``; empty lets the engine choose.
        device: Where the pool lives: ``cpu`` or ``cuda:N``.
        pool_bytes: Size of the registered pool, in bytes; mapped lazily on the host.
        window: Reads in flight per payload. Mooncake carries four at a time per peer; more only lengthen the time until
            a stalled peer's reads are quiet (about ``progress_timeout_s`` for each four).
        piece_bytes: Largest single read of a payload that is digested as it lands, in bytes; without digests each
            tensor is one read.
        progress_timeout_s: After this long without progress the engine gives a read up (and is quiet afterwards).
    """

    engine: str = "mooncake"
    protocol: str = "tcp"
    hostname: str = "127.0.0.1"
    nics: str = ""
    device: str = "cpu"
    pool_bytes: int = 256 << 20
    window: int = 4
    piece_bytes: int = 4 << 20
    progress_timeout_s: float = 10.0
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive(self, "pool_bytes", "window", "piece_bytes", "progress_timeout_s")
        require_one_of(self, "protocol", ("tcp", "rdma", "nvlink"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Where payloads are relayed.

    Attributes:
        url: ``local:///path`` or ``mooncake://host:port`` (the master), or a plugin's scheme. ``None`` gives the
            embedded relay in a per-user folder of the machine's shared memory.
        namespace: Prefix of all keys; deployments that share a store use different ones.
        capacity_bytes: Bound of the embedded relay's total size; a cluster's store has its own.
        put_timeout_s: Longest time that one object's put may take.
        sweep_interval_s: Pause between two looks for orphans.
    """

    url: str | None = None
    namespace: str = "moonrelay"
    capacity_bytes: int = 2 << 30
    put_timeout_s: float = 60.0
    sweep_interval_s: float = 30.0
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive(self, "capacity_bytes", "put_timeout_s", "sweep_interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """The channel between two peers.

    Attributes:
        bind_host: Numeric address to listen on; the port is chosen by the system.
        retry_s: A request without an answer is sent again after this long.
        peer_timeout_s: A peer that gave no sign of life for this long is lost.
        renew_s: Pause between two renewals of a claim.
        claim_ttl_s: A claim that was not renewed for this long is given up by its owner.
        options: For tests: ``{"drop": ["send:ack:2", "receive:granted"]}`` loses the first two acknowledgements that
            this side sends and the first grant that it receives; ``all`` as the number loses every one. The words are
            the messages' names on the wire.
    """

    bind_host: str = "127.0.0.1"
    retry_s: float = 0.5
    peer_timeout_s: float = 5.0
    renew_s: float = 1.0
    claim_ttl_s: float = 5.0
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_positive(self, "retry_s", "peer_timeout_s", "renew_s", "claim_ttl_s")


def require_positive(config: object, *names: str) -> None:
    """Raise `ConfigError` naming the first of the fields ``names`` that is not a number above zero."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            message = f"{name}={value!r} must be a number above 0"
            raise ConfigError(message, field=name)


def require_one_of(config: object, name: str, allowed: tuple[str, ...]) -> None:
    """Raise `ConfigError` when the field ``name`` is not one of ``allowed``."""
    value = getattr(config, name)
    if value not in allowed:
        message = f"{name}={value!r} is not known; use one of {', '.join(allowed)}"
        raise ConfigError(message, field=name)


def build(cls: type[ConfigT], given: ConfigT | Mapping[str, Any] | None, *, env_prefix: str) -> ConfigT:
    """Make a config from what a caller gave, the environment and the defaults.

    Args:
        cls: A dataclass of this module, or of a plugin.
        given: An instance (taken as it is), a mapping of field names, or ``None``.
        env_prefix: Environment variables are ``MOONRELAY_<env_prefix>_<FIELD>``.

    Raises:
        ConfigError: An unknown key (the nearest valid one is suggested) or a value of the wrong type.
    """
    if isinstance(given, cls):
        return given
    if given is not None and not isinstance(given, Mapping):
        message = f"{cls.__name__} takes a mapping or a {cls.__name__}, not {type(given).__name__}"
        raise ConfigError(message, value=repr(given)[:80])
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name in fields:
        text = os.environ.get(f"MOONRELAY_{env_prefix}_{name.upper()}")
        if text is not None:
            values[name] = _from_text(text, hints[name], f"MOONRELAY_{env_prefix}_{name.upper()}")
    for key, value in (given or {}).items():
        if key not in fields:
            raise ConfigError(unknown_key(key, fields, cls.__name__), field=str(key))
        values[key] = _checked(key, value, hints[key])
    return cls(**values)


def unknown_key(key: object, valid: typing.Iterable[str], owner: str) -> str:
    """Return the one-line message for an unknown key, with the nearest valid name."""
    names = sorted(valid)
    near = difflib.get_close_matches(str(key), names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"valid: {', '.join(names)}"
    return f"{owner} has no setting {key!r}; {hint}"


def from_environment(name: str) -> str | None:
    """Return ``MOONRELAY_<name>`` of the environment, ``None`` where it is absent or empty."""
    return os.environ.get(f"MOONRELAY_{name}") or None


def hosts_variable(name: str) -> str | None:
    """Return a variable of a host's own, to tell what the host will do; ``None`` where it is absent.

    An empty one is not an absent one: to some hosts it means "nothing".
    """
    return os.environ.get(name)


def child_environment(added: Mapping[str, str], *, stands_for_us: bool = False) -> dict[str, str]:
    """Return the environment for a child that is told everything: ours without ``MOONRELAY_*``, and ``added``.

    Args:
        added: Variables of the child's own.
        stands_for_us: The child does a part of what this process was called for, so ``MOONRELAY_*`` is for it too.
    """
    ours = os.environ.items()
    return {**{name: value for name, value in ours if stands_for_us or not name.startswith("MOONRELAY_")}, **added}


def default_environment(values: Mapping[str, str]) -> None:
    """Set variables that a native library reads at import, unless the user set them already."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def _accepts(hint: Any) -> tuple[type, ...]:
    if isinstance(hint, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _accepts(part))
    origin = typing.get_origin(hint) or hint
    return (float, int) if origin is float else (origin,) if isinstance(origin, type) else (object,)


def _checked(name: str, value: Any, hint: Any) -> Any:
    kinds = _accepts(hint)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        message = f"{name}={value!r} must be {wanted}, not {type(value).__name__}"
        raise ConfigError(message, field=name)
    return value


def _from_text(text: str, hint: Any, name: str) -> Any:
    kinds = _accepts(hint)
    for kind in (bool, int, float):
        if kind in kinds:
            try:
                return _parse_bool(text) if kind is bool else kind(text)
            except ValueError:
                continue
    if str in kinds:
        return text
    message = f"{name}={text!r} is not a {' or '.join(kind.__name__ for kind in kinds)}"
    raise ConfigError(message, field=name)


def _parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError(text)
