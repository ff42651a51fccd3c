"""Targets for relays that are installed under a URL scheme.

Owns how each built-in store is started for a run of the suite and how it is seen from outside, and the default for
everybody else's: ``scheme://`` and a folder.
"""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qs, urlsplit

from moonrelay.config import StoreConfig
from moonrelay.plugins import RELAYS, Registry
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.engines import mooncake_wheel
from moonrelay_conformance.targets.parts import RelayGround, RelayTarget, declared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonrelay.relay.base import Relay

_EVERYTHING = (Capability.PROCESSES, Capability.DURABLE, Capability.LISTING, Capability.CAPACITY)
#: The Mooncake master discards a dead writer's unfinished object after this long.
_MOONCAKE_PUT_TIMEOUT_S = 2.0


class FolderGround(RelayGround):
    """A store that is a folder; what lies in it is its files.

    Args:
        scheme: Of the relay.
        folder: The store; made by whoever stores first.
        ignore: Names of files that are the store's own and always there.
    """

    def __init__(self, scheme: str, folder: Path, ignore: frozenset[str] = frozenset()) -> None:
        self._url = f"{scheme}://{folder}"
        self._folder = folder
        self._ignore = ignore

    @property
    def url(self) -> str:
        return self._url

    def stored(self) -> tuple[str, ...]:
        files = (path for path in self._folder.rglob("*") if path.is_file() and path.name not in self._ignore)
        return tuple(sorted(str(path.relative_to(self._folder)) for path in files))

    def __exit__(self, *exc: object) -> None:
        """Nothing to end: the folder is the caller's."""


class MemoryGround(RelayGround):
    """A store of this process. It has no outside: a relay of our own keeps it alive and looks into it."""

    def __init__(self, keeper: Relay) -> None:
        self._keeper = keeper

    def __enter__(self) -> MemoryGround:
        self._keeper.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._keeper.close()

    @property
    def url(self) -> str:
        return self._keeper.url

    def stored(self) -> tuple[str, ...]:
        from moonrelay.clock import Deadline, SystemClock

        return tuple(self._keeper.keys("", Deadline(10.0, SystemClock())))


class MooncakeGround(RelayGround):
    """A Mooncake master and one pool on loopback, seen through the master's admin port."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        from moonrelay.relay.cluster import MooncakeCluster

        self._cluster = MooncakeCluster(
            folder, pool_bytes=max(16 << 20, capacity_bytes), put_timeout_s=_MOONCAKE_PUT_TIMEOUT_S
        )

    def __enter__(self) -> MooncakeGround:
        self._cluster.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cluster.close()

    @property
    def url(self) -> str:
        return self._cluster.url

    def stored(self) -> tuple[str, ...]:
        admin = parse_qs(urlsplit(self._cluster.url).query)["metrics"][0]
        connection = http.client.HTTPConnection(admin, timeout=10.0)
        try:
            connection.request("GET", "/get_all_keys")
            return tuple(sorted(connection.getresponse().read().decode().split()))
        finally:
            connection.close()


class InstalledRelay(RelayTarget):
    """A relay by its scheme in the entry-point group ``moonrelay.relays``.

    Of a third party's relay everything is taken as there, in a store ``scheme://folder``. One of which that is not
    true, or that needs a service, offers a target of its own.

    Args:
        name: The scheme.
    """

    operations: ClassVar[tuple[Capability, ...]] = _EVERYTHING

    def __init__(self, name: str) -> None:
        self.name = name
        self.recipe = ("moonrelay_conformance.targets.relays:target_for", name)

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(*self.operations)

    def distribution(self) -> str:
        info = Registry(RELAYS).describe_one(self.name)
        return f"{info.distribution} {info.version}" if info.version else info.distribution

    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        del capacity_bytes
        return FolderGround(self.name, folder)

    def make(self, url: str, *, capacity_bytes: int, namespace: str) -> Relay:
        return self.relay_class()(StoreConfig(url=url, capacity_bytes=capacity_bytes, namespace=namespace))

    def relay_class(self) -> type[Relay]:
        """Return the class behind the scheme.

        Raises:
            PluginError: It is unknown or cannot be loaded.
        """
        from moonrelay.relay.base import Relay

        return Registry(RELAYS).load_class(self.name, Relay)  # type: ignore[type-abstract]


class LocalTarget(InstalledRelay):
    """The embedded relay: files in a folder, beside a lock that holds their count."""

    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        del capacity_bytes
        return FolderGround(self.name, folder, frozenset({"lock"}))


class MemoryTarget(InstalledRelay):
    """The relay of one process."""

    operations = (Capability.LISTING, Capability.CAPACITY)

    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        del folder
        return MemoryGround(self.relay_class()(StoreConfig(capacity_bytes=capacity_bytes)))


class MooncakeTarget(InstalledRelay):
    """The relay over a Mooncake store, which the ground starts."""

    def host(self) -> str:
        return mooncake_wheel()

    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        return MooncakeGround(folder, capacity_bytes)


def target_for(name: str) -> RelayTarget:
    """Return the target of an installed relay.

    Args:
        name: Scheme, the name in the entry-point group ``moonrelay.relays``.

    Raises:
        PluginError: No relay has the name, or it cannot be loaded.
    """
    known = {"local": LocalTarget, "memory": MemoryTarget, "mooncake": MooncakeTarget}
    target = known.get(name, InstalledRelay)(name)
    target.relay_class()
    return target


__all__ = [
    "FolderGround",
    "InstalledRelay",
    "LocalTarget",
    "MemoryGround",
    "MemoryTarget",
    "MooncakeGround",
    "MooncakeTarget",
    "target_for",
]
