"""Targets by name: what ``--moonrelay-adapter`` and ``moonrelay conformance`` take.

Owns the form of a name: ``kind:name``, a bare name where only one kind has it (an adapter's name always means the
adapter), or ``module:Class`` of a `Target`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moonrelay.errors import ConfigError, MoonrelayError, PluginError
from moonrelay.plugins import ADAPTERS, QUEUES, RELAYS, TRANSFERS, EntryPoints, Registry
from moonrelay_conformance.targets.adapter import OFFER
from moonrelay_conformance.targets.base import Target

#: Kind to entry-point group, in the order in which a bare name is looked for.
GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "adapter": ADAPTERS,
        "engine": TRANSFERS,
        "relay": RELAYS,
        "queue": QUEUES,
        "cache": RELAYS,
        "checkpoint": RELAYS,
    }
)
#: Kinds of what stands over a relay and has its name, to the class of the target. A bare name never means them.
_OVER: Final[Mapping[str, str]] = MappingProxyType({"cache": "CacheTarget", "checkpoint": "CheckpointTarget"})
#: Kind to the module that makes a target from a name alone.
_DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "engine": "moonrelay_conformance.targets.engines",
        "relay": "moonrelay_conformance.targets.relays",
        "queue": "moonrelay_conformance.targets.queues",
    }
)


class Targets:
    """What can be tested here.

    Args:
        entry_points: Gives a group's entry points; the installed distributions' by default.
    """

    def __init__(self, entry_points: EntryPoints | None = None) -> None:
        self._registries = {
            kind: Registry(group) if entry_points is None else Registry(group, entry_points=entry_points)
            for kind, group in GROUPS.items()
        }

    def names(self) -> tuple[str, ...]:
        """Return every ``kind:name`` that is installed; imports nothing."""
        return tuple(f"{kind}:{name}" for kind, registry in self._registries.items() for name in registry.names())

    def resolve(self, name: str) -> Target:
        """Return the target of a name.

        Args:
            name: ``kind:name``, a bare name, or ``module:Class``.

        Raises:
            ConfigError: The name is unknown (the nearest is suggested), or several kinds have it.
            PluginError: It cannot be loaded, or offers no target.
        """
        kind, colon, rest = name.partition(":")
        if not colon:
            return self._bare(name)
        if kind in self._registries:
            if rest not in self._registries[kind].names():
                raise ConfigError(self._unknown(name, self.names()), field="name")
            return self._named(kind, rest)
        try:
            return _of_path(name)
        except ConfigError:
            if difflib.get_close_matches(name, self.names(), n=1, cutoff=0.8):
                raise ConfigError(self._unknown(name, self.names()), field="name") from None
            raise

    def _bare(self, name: str) -> Target:
        kinds = [kind for kind, registry in self._registries.items() if kind not in _OVER and name in registry.names()]
        if not kinds:
            every = {one.partition(":")[2] for one in self.names()}
            raise ConfigError(self._unknown(name, (*every, *self.names())), field="name")
        if "adapter" not in kinds and len(kinds) > 1:
            message = f"name={name!r} is ambiguous; say {' or '.join(f'{kind}:{name}' for kind in kinds)}"
            raise ConfigError(message, field="name")
        return self._named(kinds[0], name)

    def _named(self, kind: str, name: str) -> Target:
        if kind in _OVER:
            caches = importlib.import_module("moonrelay_conformance.targets.caches")
            return _checked(getattr(caches, _OVER[kind])(self._named("relay", name)), f"{kind}:{name}", kind)
        default = _DEFAULTS.get(kind)
        if default is not None and not self._offers(kind, name):
            made = importlib.import_module(default).target_for(name)
        else:
            part = self._registries[kind].load(name)
            offer = getattr(part() if isinstance(part, type) and kind == "adapter" else part, OFFER, None)
            if offer is None:
                message = f"{kind} {name!r} offers no {OFFER}(); it cannot be tested before it does"
                raise PluginError(message, plugin=name)
            try:
                made = offer()
            except MoonrelayError:
                raise
            except (Exception, SystemExit) as exc:
                message = f"{kind} {name!r} gives no target: {type(exc).__name__}: {exc}"
                raise PluginError(message, plugin=name) from exc
        return _checked(made, f"{kind}:{name}", kind)

    def _offers(self, kind: str, name: str) -> bool:
        try:
            return hasattr(self._registries[kind].load(name), OFFER)
        except PluginError:
            # What cannot be imported offers nothing; the target made from its name says so when it is used.
            return False

    @staticmethod
    def _unknown(name: str, known: tuple[str, ...]) -> str:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        qualified = ", ".join(one for one in known if ":" in one)
        return f"name={name!r} is no target; {hint}known: {qualified}; or module:Class of a Target"


def resolve(name: str) -> Target:
    """Return the target of a name; see `Targets.resolve`."""
    return Targets().resolve(name)


def names() -> tuple[str, ...]:
    """Return every ``kind:name`` that is installed; see `Targets.names`."""
    return Targets().names()


def _of_path(name: str) -> Target:
    module, _, attribute = name.partition(":")
    try:
        part: object = importlib.import_module(module)
        for step in attribute.split("."):
            part = getattr(part, step)
    except (Exception, SystemExit) as exc:  # foreign code runs here; what it raises is why this target cannot be had
        kinds = ", ".join(GROUPS)
        message = (
            f"name={name!r} cannot be imported: {type(exc).__name__}: {exc}; it must be module:Class on PYTHONPATH, "
            f"or a name after one of the kinds {kinds}"
        )
        raise ConfigError(message, field="name") from exc
    if isinstance(part, type) and issubclass(part, Target):
        if inspect.isabstract(part):
            message = f"name={name!r} is abstract; it lacks {', '.join(sorted(part.__abstractmethods__))}"
            raise ConfigError(message, field="name")
        try:
            part = part()
        except (Exception, SystemExit) as exc:  # foreign code, too
            message = f"name={name!r} cannot be made: {type(exc).__name__}: {exc}"
            raise ConfigError(message, field="name") from exc
    return _checked(part, name, None)


def _checked(made: object, name: str, kind: str | None) -> Target:
    if not isinstance(made, Target):
        message = f"name={name!r} gives {made!r}, which is no Target"
        raise PluginError(message, plugin=name)
    try:
        made.info()
    except Exception as exc:  # foreign code, too: it is asked before anything is started
        message = f"name={name!r} cannot say what it is: {type(exc).__name__}: {exc}"
        raise PluginError(message, plugin=name) from exc
    if kind is not None and made.kind != kind:
        message = f"name={name!r} gives a target of the kind {made.kind!r}"
        raise PluginError(message, plugin=name)
    return made
