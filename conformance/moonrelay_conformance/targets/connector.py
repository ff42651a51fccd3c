"""Moonrelay's own connector as a target, and the ground for every adapter whose host uses it.

Owns where a run's shared memory and store lie: in a place of their own, so that what is seen there was made by this run
and by nothing else on the machine. Observes both by the system's listing, not through the connector.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import ConfigError
from moonrelay.plugins import RELAYS, Registry
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.adapter import AdapterGround, AdapterTarget, SideSettings

if TYPE_CHECKING:
    from moonrelay.relay.base import Relay
    from moonrelay.relay.cluster import MooncakeCluster
    from moonrelay.relay.sweeper import Sweeper

ENGINES: Final = ("shm", "mooncake")
#: Names of relays that a ground starts by itself; ``none`` leaves the store route out.
STORES: Final = ("local", "mooncake", "none")
_SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "moonrelay-conformance-"
#: How long a sweep leaves claims and unfinished payloads alone, in seconds; a deployment waits minutes.
_GRACE_S: Final = 0.5
_LOOK_TIMEOUT_S: Final = 10.0


class ConnectorTarget(AdapterTarget):
    """`moonrelay.DiffusionConnector`, without a host.

    Args:
        engine: ``shm``, or ``mooncake`` (TCP on loopback).
        relay: ``local`` (the embedded store), ``mooncake`` (a store that the ground starts), or ``none``: then there is
            only the direct route.

    Raises:
        ConfigError: Another engine or relay.
    """

    name = "connector"
    side = "moonrelay_conformance.sides.connector_side:ConnectorSide"
    #: What it can do whatever engine and relay are chosen.
    ALWAYS: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(one for one in Capability if one.carried),
            Capability.P2P,
            Capability.CLAIM,
            Capability.CHUNKED,
            Capability.SHARED_READERS,
            Capability.TTL,
            Capability.PINNED,
            Capability.ABORT,
            Capability.RELEASE,
            Capability.STATUS,
            Capability.ZERO_COPY,
            Capability.RESUME,
            Capability.IPV6,
            Capability.INJECT_ENGINE,
            Capability.INJECT_CONTROL,
        }
    )

    def __init__(self, *, engine: str = "shm", relay: str = "local") -> None:
        for field, value, allowed in (("engine", engine, ENGINES), ("relay", relay, STORES)):
            if value not in allowed:
                message = f"{field}={value!r} is none that the suite can start; use one of {', '.join(allowed)}"
                raise ConfigError(message, field=field)
        self.engine = engine
        self.relay = relay

    def capabilities(self) -> Mapping[Capability, Support]:
        there = set(self.ALWAYS)
        if self.relay != "none":
            there |= {Capability.STORE, Capability.SPILL, Capability.INJECT_STORE}
        if self.relay != "mooncake":
            # A cluster's store has a bound of its own, which a side cannot set.
            there.add(Capability.CAPACITY)
        return {one: Support.FULL if one in there else Support.UNSUPPORTED for one in Capability}

    def distribution(self) -> str:
        return f"moonrelay {metadata.version('moonrelay')}"

    def host(self) -> str:
        return self.through()

    def through(self) -> str:
        """Return which engine and relay are used, for the report: ``engine shm, relay local``."""
        return f"engine {self.engine}, relay {self.relay}"

    def ground(self, folder: Path) -> ConnectorGround:
        return ConnectorGround(folder, engine=self.engine, relay=self.relay)


class ConnectorGround(AdapterGround):
    """A folder of this run's own in shared memory, and a store.

    Args:
        folder: For logs, and for everything where the machine has no ``/dev/shm``.
        engine: See `ConnectorTarget`.
        relay: See `ConnectorTarget`.

    Raises:
        PluginError: Mooncake is asked for, and is not installed.
        PeerLost: The store that was started does not answer.
    """

    def __init__(self, folder: Path, *, engine: str = "shm", relay: str = "local") -> None:
        self._engine = engine
        self._clock = SystemClock()
        self._namespace = f"conformance-{secrets.token_hex(4)}"
        self._cluster: MooncakeCluster | None = None
        self._relay: Relay | None = None
        self._sweeper: Sweeper | None = None
        self._own = _OwnFolder(folder)
        self._segments = self._own.path / "segments"
        self._segments.mkdir()
        try:
            self._start(folder, relay)
        except BaseException:
            self.close()
            raise

    @property
    def store_url(self) -> str | None:
        """URL of the store; ``None`` where there is none."""
        return None if self._relay is None else self._relay.url

    def settings(self, settings: SideSettings) -> SideSettings:
        """Return ``settings`` with the engine, the store and this run's own places.

        Raises:
            ConfigError: A route through the store is asked for, and there is none.
        """
        if settings.route != "p2p" and self._relay is None:
            message = f"route={settings.route!r} needs a store; give the target a relay"
            raise ConfigError(message, field="route")
        extra = {
            **settings.extra,
            "engine": self._engine,
            "engine_options": {"directory": str(self._segments)} if self._engine == "shm" else {},
            "store_url": self.store_url,
            "namespace": self._namespace,
            "store_used": self._used(),
        }
        return msgspec.structs.replace(settings, extra=extra)

    def store_keys(self) -> tuple[str, ...]:
        if self._relay is None:
            return ()
        if self._cluster is None:
            store = self._own.path / "store"
            return tuple(sorted(f"{path.parent.name}/{path.name}" for path in store.glob("*/*")))
        return tuple(sorted(self._relay.keys(self._namespace, Deadline(_LOOK_TIMEOUT_S, self._clock))))

    def memory_names(self) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in self._segments.iterdir()))

    def sweep(self) -> None:
        """Remove segments of dead processes, and payloads and tombstones that are over.

        Only what a deployment waits for beside a payload's own life is shortened: a payload whose ``ttl_s`` is not over
        stays, so what an acknowledgement forgot is still seen. Its age counts from the first look where the store does
        not tell it; call again until it is gone.
        """
        from moonrelay.transfer.shm import sweep_orphans

        sweep_orphans(self._segments)
        if self._relay is not None and self._cluster is None:
            # What a writer that died had not finished is removed by the next process that starts on its folder.
            self._relay.close()
            self._relay.start()
        if self._sweeper is not None:
            self._sweeper.sweep()

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
        if self._cluster is not None:
            self._cluster.close()
        self._own.close()

    def _used(self) -> int:
        """Return the bytes that earlier tests left in the embedded store; what is swept meanwhile counts as nothing."""
        used = 0
        for path in (self._own.path / "store").glob("*/*"):
            with contextlib.suppress(OSError):
                used += path.stat().st_size
        return used

    def _start(self, folder: Path, relay: str) -> None:
        if relay == "none":
            return
        from moonrelay.relay.base import Relay
        from moonrelay.relay.sweeper import Sweeper

        url = f"local://{self._own.path / 'store'}"
        if relay == "mooncake":
            from moonrelay.relay.cluster import MooncakeCluster

            self._cluster = MooncakeCluster(folder / "mooncake", lease_ttl_s=5.0, put_timeout_s=5.0)
            self._cluster.start()
            url = self._cluster.url
        relay_class = Registry(RELAYS).load_class(relay, Relay)  # type: ignore[type-abstract]
        self._relay = relay_class(StoreConfig(url=url, namespace=self._namespace))
        self._relay.start()
        self._sweeper = Sweeper(
            self._relay,
            self._namespace,
            self._clock,
            default_ttl_s=_GRACE_S,
            tombstone_ttl_s=0.0,
            claim_grace_s=_GRACE_S,
        )


class _OwnFolder:
    """A folder in shared memory, locked while it is used, so that one that a killed run left is known and removed."""

    def __init__(self, fallback: Path) -> None:
        shared = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else fallback
        for left in shared.glob(f"{_PREFIX}*"):
            _remove_if_left(left)
        made = None
        while made is None:
            made = _locked(shared / f"{_PREFIX}{secrets.token_hex(8)}")
        self.path, self._fd = made

    def close(self) -> None:
        """Remove it. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(fd)


def _locked(path: Path) -> tuple[Path, int] | None:
    """Make a folder and lock it; ``None`` where another run took it for a left one before the lock was ours."""
    path.mkdir(mode=0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = os.fstat(fd).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        there = False
    if there:
        return path, fd
    os.close(fd)
    return None


def _remove_if_left(path: Path) -> None:
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.stat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
