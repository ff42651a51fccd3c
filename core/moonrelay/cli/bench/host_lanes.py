"""What an adapter gives to ``moonrelay bench host``: the ways a payload may take through its host, as lanes.

Owns the contract between the bench and adapters. The bench knows no host: the adapter's object, found by its entry
point, has a method ``host_bench()`` that returns a subclass of `HostBench`, usually of its module ``bench``. Importing
this module loads neither torch nor a host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moonrelay.errors import ConfigError, PluginError
from moonrelay.plugins import ADAPTERS, Registry

#: The two ends of a lane; each is opened in a process of its own.
PRODUCER: Final = "producer"
CONSUMER: Final = "consumer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One way a payload may take.

    Attributes:
        name: Short; letters, digits, dashes.
        says: What it is, with the settings that matter, in a few words.
        ours: Whether Moonrelay moves the bytes.
        fix: What the bench changes so that it runs here, in a few words; empty where it runs as released.
    """

    name: str
    says: str
    ours: bool = False
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPayload:
    """A payload of the host's own, in the shapes that its stages exchange.

    Attributes:
        name: Short; as ``--sizes`` takes it.
        nbytes: Bytes of all its tensors.
        tensors: Field to dtype, by torch's name, and shape.
        values: Plain values beside them.
    """

    name: str
    nbytes: int
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What both ends of a lane are told.

    Attributes:
        largest: Tensor bytes of the largest payload; memory that a lane reserves must do for it.
        shared: What `HostBench.shared` gave.
    """

    largest: int
    shared: Mapping[str, str]


class End(ABC):
    """One end of an open lane. Threads: one."""

    @abstractmethod
    def put(self, key: str, data: dict[str, Any]) -> bytes:
        """Offer a payload as the host's stages do; called at the producer's end, and timed.

        Returns:
            What the lane's consumer needs beside the key, if anything.

        Raises:
            Exception: It was not taken.
        """

    @abstractmethod
    def get(self, key: str, ticket: bytes) -> object:
        """Return the payload; called at the consumer's end, and timed. Blocks: until it is complete.

        Raises:
            Exception: It did not come.
        """

    def discard(self, key: str) -> None:  # noqa: B027 - most lanes keep nothing
        """Drop what the lane itself keeps of a payload that was consumed; at both ends, not timed."""

    def notes(self) -> Sequence[str]:
        """Return what a reader of the figures should know of this end as it was found."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """End it, with all its memory."""


class HostBench(ABC):
    """A host's lanes. Made without arguments, anew in each process; importable by name.

    Threads: one.
    """

    #: The host's name and version, for the report.
    host: str = ""
    #: What is measured, where the host carries nothing but its own shapes; empty for dicts of any size.
    payloads: tuple[HostPayload, ...] = ()

    @abstractmethod
    def lanes(self) -> tuple[Lane, ...]:
        """Return all lanes, in the order of the report. Imports no host."""

    @abstractmethod
    def shared(self, lanes: Sequence[str], largest: int, folder: Path) -> AbstractContextManager[Mapping[str, str]]:
        """Start what several processes need, such as a store, and end it afterwards; in the command's process.

        Args:
            lanes: Which lanes are measured.
            largest: Tensor bytes of the largest payload.
            folder: For files; removed afterwards.
        """

    @abstractmethod
    def open(self, lane: str, side: str, room: Room, *, fixed: bool) -> End:
        """Open one end of a lane, in a process of its own.

        Args:
            lane: Its name.
            side: `PRODUCER` or `CONSUMER`; the producer's end is opened first.
            room: What both are told.
            fixed: False leaves the host as it was released.

        Raises:
            Exception: It cannot be used; said in the report.
        """


def host_bench(adapter: str) -> type[HostBench]:
    """Return an adapter's lanes.

    Args:
        adapter: Its name in the entry-point group ``moonrelay.adapters``.

    Raises:
        PluginError: There is no such adapter, it cannot be loaded, or its host is not here.
        ConfigError: It has no lanes to measure.
    """
    found = Registry(ADAPTERS).load(adapter)
    made: Any = found() if isinstance(found, type) else found
    offer = getattr(made, "host_bench", None)
    if offer is None:
        message = f"adapter {adapter!r} has nothing to measure against its host: it has no host_bench()"
        raise ConfigError(message, field="name")
    available = getattr(made, "available", None)
    usable, reason = available() if available is not None else (True, "")
    if not usable:
        raise PluginError(str(reason), group=ADAPTERS, plugin=adapter)
    bench = offer()
    if not (isinstance(bench, type) and issubclass(bench, HostBench)):
        message = f"adapter {adapter!r}: host_bench() gave {bench!r}, which is no subclass of HostBench"
        raise PluginError(message, group=ADAPTERS, plugin=adapter)
    return bench


def choose(lanes: Sequence[Lane], names: str) -> tuple[Lane, ...]:
    """Return the lanes of a comma-separated list; all for an empty one.

    Raises:
        ConfigError: A name is unknown.
    """
    wanted = [part.strip() for part in names.split(",") if part.strip()]
    known = {lane.name: lane for lane in lanes}
    for name in wanted:
        if name not in known:
            message = f"lanes: {name!r} is none; use some of {', '.join(known)}"
            raise ConfigError(message, field="lanes")
    return tuple(lane for lane in lanes if not wanted or lane.name in wanted)
