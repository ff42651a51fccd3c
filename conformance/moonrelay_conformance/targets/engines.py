"""Targets for transfer engines that are installed under a name.

Owns what each built-in engine can do and how its memory is seen from outside, and the default for everybody else's.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moonrelay.config import TransferConfig
from moonrelay.errors import ConfigError
from moonrelay.plugins import TRANSFERS, Registry
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.parts import EngineTarget, declared

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonrelay.transfer.base import TransferEngine


class InstalledEngine(EngineTarget):
    """An engine by its name in the entry-point group ``moonrelay.transfers``.

    What it cannot know of a third party's engine it takes as there: that another process is reached, that two lives of
    one address are told apart, and that foreign memory is registered where the class says so. An engine of which that
    is not true, or that needs options, offers a target of its own.

    Args:
        name: As in the entry point.
    """

    operations: ClassVar[tuple[Capability, ...]] = (Capability.PROCESSES, Capability.LIVES)

    def __init__(self, name: str) -> None:
        self.name = name
        self.recipe = ("moonrelay_conformance.targets.engines:target_for", name)

    def capabilities(self) -> Mapping[Capability, Support]:
        foreign = (Capability.FOREIGN_MEMORY,) if self.engine_class().registers_foreign_memory else ()
        return declared(*self.operations, *foreign)

    def distribution(self) -> str:
        info = Registry(TRANSFERS).describe_one(self.name)
        return f"{info.distribution} {info.version}" if info.version else info.distribution

    def config(self, folder: Path, **changes: object) -> TransferConfig:
        settings: dict[str, Any] = {"engine": self.name, "options": self.options(folder), **changes}
        return TransferConfig(**settings)

    def make(self, config: TransferConfig) -> TransferEngine:
        return self.engine_class()(config)

    def options(self, folder: Path) -> Mapping[str, object]:
        """Return the engine's own options; its files, if any, go to ``folder``."""
        del folder
        return {}

    def engine_class(self) -> type[TransferEngine]:
        """Return the class behind the name.

        Raises:
            PluginError: It is unknown or cannot be loaded.
        """
        from moonrelay.transfer.base import TransferEngine

        return Registry(TRANSFERS).load_class(self.name, TransferEngine)  # type: ignore[type-abstract]


class MemoryTarget(InstalledEngine):
    """The engine of one process."""

    operations = (Capability.LIVES,)


class ShmTarget(InstalledEngine):
    """The engine of one host: its segments are files in the folder."""

    def options(self, folder: Path) -> Mapping[str, object]:
        return {"directory": str(folder)}

    def memory_names(self, folder: Path) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in folder.iterdir()))


class MooncakeTarget(InstalledEngine):
    """The engine over Mooncake; its memory has no name.

    The library knows peers by address alone: that the peer is the one meant is proved on the control channel.
    """

    operations = (Capability.PROCESSES,)

    def host(self) -> str:
        return mooncake_wheel()


def target_for(name: str) -> EngineTarget:
    """Return the target of an installed engine.

    Args:
        name: Name in the entry-point group ``moonrelay.transfers``.

    Raises:
        ConfigError: It is the engine that fails on purpose.
        PluginError: No engine has the name, or it cannot be loaded.
    """
    if name == "faulty":
        message = "engine 'faulty' breaks the promises on purpose; test the engine that it wraps, e.g. engine:memory"
        raise ConfigError(message, field="engine")
    known = {"memory": MemoryTarget, "shm": ShmTarget, "mooncake": MooncakeTarget}
    target = known.get(name, InstalledEngine)(name)
    target.engine_class()
    return target


def mooncake_wheel() -> str:
    """Return the installed Mooncake wheel with its version; empty where there is none."""
    for wheel in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        try:
            return f"{wheel} {importlib.metadata.version(wheel)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


__all__ = ["InstalledEngine", "MemoryTarget", "MooncakeTarget", "ShmTarget", "mooncake_wheel", "target_for"]
