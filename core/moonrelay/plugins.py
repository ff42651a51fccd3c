"""Parts by name: transfer engines, relays, queues, policies, adapters, observers, and commands that adapters bring.

Owns the look-up of entry points, and the sentence a user reads when one cannot be loaded. Nothing is imported before it
is asked for by name, and a broken plugin hurts only its own name. Holds no process-wide state: a cache lives in its
`Registry`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Final, Literal, TypeVar

from moonrelay.errors import PluginError

PartT = TypeVar("PartT")

#: Our own distribution; its entry points are the built-ins again, and never count as a third party's.
DISTRIBUTION: Final = "moonrelay"

TRANSFERS: Final = "moonrelay.transfers"
RELAYS: Final = "moonrelay.relays"
QUEUES: Final = "moonrelay.queues"
POLICIES: Final = "moonrelay.policies"
ADAPTERS: Final = "moonrelay.adapters"
OBSERVERS: Final = "moonrelay.observers"
#: Commands of ``moonrelay`` that the core does not have: ``module:attribute`` of a function for typer, or of a group.
COMMANDS: Final = "moonrelay.commands"

#: Built-ins by group; they resolve first, also from a plain checkout that has no distribution metadata.
BUILT_IN: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        TRANSFERS: MappingProxyType(
            {
                "memory": "moonrelay.transfer.memory:MemoryEngine",
                "shm": "moonrelay.transfer.shm:ShmEngine",
                "mooncake": "moonrelay.transfer.mooncake:MooncakeEngine",
                "faulty": "moonrelay.transfer.faulty:FaultyEngine",
            }
        ),
        RELAYS: MappingProxyType(
            {
                "local": "moonrelay.relay.local:LocalRelay",
                "mooncake": "moonrelay.relay.mooncake_store:MooncakeRelay",
                "memory": "moonrelay.relay.memory:MemoryRelay",
                "faulty": "moonrelay.relay.faulty:FaultyRelay",
            }
        ),
        QUEUES: MappingProxyType(
            {
                "sqlite": "moonrelay.queueing.sqlite:SqliteQueue",
                "memory": "moonrelay.queueing.memory:MemoryQueue",
            }
        ),
        POLICIES: MappingProxyType(
            {
                "delete_on_consume": "moonrelay.lease.policies:DeleteOnConsume",
                "shared": "moonrelay.lease.policies:Shared",
                "ttl": "moonrelay.lease.policies:Ttl",
                "pinned": "moonrelay.lease.policies:Pinned",
            }
        ),
        ADAPTERS: MappingProxyType(
            {
                "diffusers": "moonrelay_diffusers.plugin:DiffusersAdapter",
                "vllm-omni": "moonrelay_vllm_omni.plugin:VllmOmniAdapter",
                "sglang": "moonrelay_sglang.plugin:SglangAdapter",
                "lightx2v": "moonrelay_lightx2v.plugin:Lightx2vAdapter",
            }
        ),
        OBSERVERS: MappingProxyType({"metrics": "moonrelay.metrics:Metrics"}),
        COMMANDS: MappingProxyType({"lightx2v-front": "moonrelay_lightx2v.front.command:front"}),
    }
)

#: Which extra of our distribution brings a top-level module.
_EXTRA_OF: Final[Mapping[str, str]] = MappingProxyType(
    {
        "torch": "torch",
        "mooncake": "mooncake",
        "diffusers": "diffusers",
        "transformers": "diffusers",
        "accelerate": "diffusers",
        "ftfy": "diffusers",
        "redis": "redis",
        "vllm": "vllm-omni",
        "vllm_omni": "vllm-omni",
        "sglang": "sglang",
        "starlette": "lightx2v",
        "uvicorn": "lightx2v",
        "httpx": "lightx2v",
        "imageio": "demo",
        "matplotlib": "demo",
        "PIL": "demo",
    }
)

EntryPoints = Callable[[str], Iterable[EntryPoint]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginInfo:
    """What is known of one name in a group.

    Attributes:
        group: Entry-point group.
        name: Name that `Registry.load` takes.
        target: ``module:attribute``; empty where two distributions claim the name.
        distribution: Who provides it.
        version: Version of that distribution; ``None`` in a checkout without metadata.
        built_in: Whether it is one of ours.
        error: Why it cannot be loaded, in one line; ``None`` when it loads.
        shadowed: Distributions whose entry point of this name is not used, because a built-in has the name.
    """

    group: str
    name: str
    target: str
    distribution: str
    version: str | None
    built_in: bool
    error: str | None = None
    shadowed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """What an adapter says of its host: a line of ``moonrelay doctor``.

    Attributes:
        status: ``ok``, its plugin is active there; ``warn``, less than that, or by somebody's choice not; ``fail``, the
            host is there and the adapter does not work in it; ``skip``, the host is not installed.
        detail: The host's version and what was found, with the true error.
        remedy: What to do; empty when there is nothing to do.
    """

    status: Literal["ok", "warn", "fail", "skip"]
    detail: str
    remedy: str = ""


def ask_of_host(adapter: object) -> Iterator[HostFinding]:
    """Ask an adapter's ``examine() -> Iterable[HostFinding]``; where it has none, its ``available()``.

    Args:
        adapter: What the group ``moonrelay.adapters`` names, an object or its class.

    Raises:
        Exception: Whatever the adapter or its host raises.

    Blocks: an adapter may import its host here, so ask it in a process of its own, with a deadline.
    """
    asked = adapter() if isinstance(adapter, type) else adapter
    examine = getattr(asked, "examine", None)
    if examine is not None:
        yield from examine()
        return
    available = getattr(asked, "available", None)
    usable, detail = available() if available is not None else (True, "cannot be asked; its adapter loads")
    if usable:
        yield HostFinding(status="ok", detail=str(detail))
    else:
        # Not an error where nobody wanted the host here.
        there = host_of(asked)[1] is not None
        yield HostFinding(status="fail" if there else "skip", detail=str(detail))


def host_of(adapter: object) -> tuple[str | None, str | None]:
    """Return the name of an adapter's host and its version, as the adapter says; ``None`` for what it does not."""
    asked = adapter() if isinstance(adapter, type) else adapter
    ask_version = getattr(asked, "host_version", None)
    return getattr(asked, "host", None), ask_version() if ask_version is not None else None


def _installed(group: str) -> Iterable[EntryPoint]:
    return importlib.metadata.entry_points(group=group)


class Registry:
    """The parts of one entry-point group, loaded lazily by name.

    Args:
        group: One of the groups of this module, or a group of the caller's own.
        built_in: Names that resolve first; ``None`` takes our table for ``group``.
        entry_points: Gives a group's entry points; the installed distributions' by default.

    Threads: any; two threads that load one name at once get the same object.
    """

    def __init__(
        self,
        group: str,
        *,
        built_in: Mapping[str, str] | None = None,
        entry_points: EntryPoints = _installed,
    ) -> None:
        self.group = group
        self._built_in = dict(BUILT_IN.get(group, {}) if built_in is None else built_in)
        self._entry_points = entry_points
        self._third_party: dict[str, tuple[EntryPoint, ...]] | None = None
        self._loaded: dict[str, object] = {}

    def __repr__(self) -> str:
        return f"<Registry {self.group}: {len(self._loaded)} loaded>"

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted; imports nothing."""
        return tuple(sorted({*self._built_in, *self._found()}))

    def provider(self, name: str) -> str:
        """Return which distributions have ``name``, without importing it; ours alone where it is a built-in."""
        if name in self._built_in:
            return DISTRIBUTION
        return " and ".join(_distribution_name(point) for point in self._found().get(name, ())) or "nobody"

    def load(self, name: str) -> object:
        """Import the part called ``name`` and return what its entry point names.

        Args:
            name: As in `names`.

        Returns:
            The object, usually a class; the same one every time.

        Raises:
            PluginError: The name is unknown (the nearest is suggested), claimed by two distributions, or its import
                failed (the message holds the true error and the remedy).
        """
        if name in self._loaded:
            return self._loaded[name]
        target, distribution = self._resolve(name)
        part = self._import(name, target, distribution)
        return self._loaded.setdefault(name, part)

    def load_class(self, name: str, base: type[PartT]) -> type[PartT]:
        """Load ``name`` and check that it is a concrete subclass of ``base``.

        Raises:
            PluginError: As `load`, or it is something else; the message says what.
        """
        part = self.load(name)
        if isinstance(part, type) and issubclass(part, base) and not inspect.isabstract(part):
            return part
        message = f"{self._label()} {name!r} is {part!r}, which is no concrete subclass of {base.__name__}"
        raise PluginError(message, group=self.group, plugin=name)

    def describe(self) -> tuple[PluginInfo, ...]:
        """Load every name and say how it went; for ``moonrelay doctor`` and ``moonrelay adapters``.

        Blocks: for as long as the plugins' imports take.
        """
        return tuple(self.describe_one(name) for name in self.names())

    def describe_one(self, name: str) -> PluginInfo:
        """Load one name and say how it went; see `describe`."""
        found = self._found().get(name, ())
        built_in = name in self._built_in
        error = None
        try:
            self.load(name)
        except PluginError as exc:
            error = exc.message
        if built_in:
            target, distribution, version = self._built_in[name], DISTRIBUTION, _version_of(DISTRIBUTION)
        else:
            target = found[0].value if len(found) == 1 else ""
            distribution = ", ".join(_distribution_name(point) for point in found)
            version = _version_of(distribution) if len(found) == 1 else None
        return PluginInfo(
            group=self.group,
            name=name,
            target=target,
            distribution=distribution,
            version=version,
            built_in=built_in,
            error=error,
            shadowed=tuple(_distribution_name(point) for point in found) if built_in else (),
        )

    def _found(self) -> dict[str, tuple[EntryPoint, ...]]:
        """Return third parties' entry points by name, one per distribution, read once."""
        if self._third_party is None:
            by_name: dict[str, dict[str, EntryPoint]] = {}
            for point in self._entry_points(self.group):
                distribution = _distribution_name(point)
                if distribution != DISTRIBUTION:
                    by_name.setdefault(point.name, {}).setdefault(distribution, point)
            self._third_party = {name: tuple(points.values()) for name, points in by_name.items()}
        return self._third_party

    def _resolve(self, name: str) -> tuple[str, str]:
        if name in self._built_in:
            return self._built_in[name], DISTRIBUTION
        found = self._found().get(name, ())
        if not found:
            raise PluginError(self._unknown(name), group=self.group, plugin=name)
        if len(found) > 1:
            owners = " and ".join(sorted(_distribution_name(point) for point in found))
            message = f"{self._label()} {name!r} is claimed by {owners}; uninstall one of them"
            raise PluginError(message, group=self.group, plugin=name)
        return found[0].value, _distribution_name(found[0])

    def _import(self, name: str, target: str, distribution: str) -> object:
        module_name, _, attribute = target.partition(":")
        try:
            part: object = importlib.import_module(module_name.strip())
            for step in attribute.split("[")[0].strip().split(".") if attribute else ():
                part = getattr(part, step)
        except (Exception, SystemExit) as exc:  # foreign code runs here; what it raises is this one name's failure
            reason = f"{type(exc).__name__}: {exc}".splitlines()[0]
            message = (
                f"{self._label()} {name!r} ({target} of {distribution}) cannot be loaded: {reason}; "
                f"{_remedy(exc, distribution)}"
            )
            raise PluginError(message, group=self.group, plugin=name) from exc
        return part

    def _label(self) -> str:
        kind = self.group.rpartition(".")[2]
        return {
            "transfers": "transfer engine",
            "relays": "relay",
            "queues": "queue",
            "policies": "lease policy",
            "adapters": "adapter",
            "observers": "observer",
            "commands": "command",
        }.get(kind, kind)

    def _unknown(self, name: str) -> str:
        known = self.names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listed = ", ".join(known) or "none"
        return f"no {self._label()} {name!r} in entry-point group {self.group}; {hint}known: {listed}"


def missing_extra(module: str) -> str | None:
    """Return the extra of our distribution that brings ``module``, ``None`` where none does."""
    return _EXTRA_OF.get(module.partition(".")[0])


def _remedy(exc: BaseException, distribution: str) -> str:
    module = exc.name if isinstance(exc, ModuleNotFoundError) else None
    extra = missing_extra(module) if module else None
    if extra is not None:
        return f"pip install 'moonrelay[{extra}]'"
    if module == "moonrelay_diffusers":
        return "pip install moonrelay, or put adapters/diffusers on PYTHONPATH"
    if distribution == DISTRIBUTION:
        return "see `moonrelay doctor`"
    return f"reinstall or upgrade {distribution}, or tell its authors"


def _distribution_name(point: EntryPoint) -> str:
    return point.dist.name.lower().replace("_", "-") if point.dist is not None else "an unnamed distribution"


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
