"""The LightX2V adapter as a plugin: of the host by its entry point, of Moonrelay as ``lightx2v``.

Owns when and how the host's ``DisaggMixin`` is replaced by ours, and that a config which names our connector never runs
the host's own code because that did not work. The host loads plugins before its own modules and passes over one that
raises, so `register` plants a finder that waits for three of them: the mixin's, whose class is replaced as soon as it
is there; the runners' base, where each runner is looked at as it is made; and the base of the host's services, another
way to disaggregate that is not ours, which refuse a config that names us.

What is process-wide lies with the import system: the finder in ``sys.meta_path`` until it has done its work, where no
services run to the end, and what came of it on the host's modules. Nothing but the standard library is imported at the
top: whatever is broken here is said where a config asks for us.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moonrelay.cli.bench.host_lanes import HostBench
    from moonrelay.plugins import HostFinding
    from moonrelay_conformance.targets.adapter import AdapterTarget

logger = logging.getLogger(__name__)

_HOST: Final = "lightx2v"
#: The host's commits that the adapter is for, in words: its version has not changed since the first one.
SUPPORTED: Final = "commits from 16 June 2026 (its first with plugins) to f8aee98b of 21 August 2026"

#: The module and class that are replaced, those that every runner is made of, and those of every service.
MIXIN_MODULE: Final = "lightx2v.disagg.disagg_mixin"
MIXIN: Final = "DisaggMixin"
RUNNER_MODULE: Final = "lightx2v.models.runners.base_runner"
RUNNER: Final = "BaseRunner"
SERVICE_MODULE: Final = "lightx2v.disagg.services.base"
SERVICE: Final = "BaseService"
#: The mixin's methods that runners call, with the parameters after ``self``.
CONTRACT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "init_disagg": ("config",),
        "send_encoder_outputs": ("inputs", "latent_shape"),
        "receive_encoder_outputs": (),
        "send_transformer_outputs": ("latents",),
        "receive_transformer_outputs": (),
        "release_disagg": (),
    }
)

#: What `moonrelay_lightx2v.mixin` puts on the class that it makes.
_MARK: Final = "_moonrelay_dispatches"
#: On the mixin's module: why ours is not in place; on the host's functions: that they are guarded.
_WHY_NOT: Final = "_moonrelay_why_not"
_GUARDED: Final = "_moonrelay_guarded"
_CONNECTOR: Final = "moonrelay"


def register() -> None:
    """Arrange that the host's mixin is replaced when it is imported: the host's entry point.

    Imports nothing of the host, and raises nothing: what fails is said by a runner whose config names our connector.

    Threads: any; calling it again changes nothing.
    """
    hooks: Mapping[str, Callable[[ModuleType], None]] = {
        MIXIN_MODULE: _replace,
        RUNNER_MODULE: _watch,
        SERVICE_MODULE: _watch_services,
    }
    waiting = {}
    for name, hook in hooks.items():
        module = sys.modules.get(name)
        if module is None:
            waiting[name] = hook
        else:
            hook(module)
    if waiting and not any(isinstance(finder, PostImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, PostImport(waiting))


def enable() -> None:
    """Do what the host's entry point does, for a script: before it imports the host.

    Raises:
        PluginError: The host was imported before, or is none that we know.

    Threads: any; calling it again changes nothing.
    """
    register()
    why = why_not_active()
    if why is not None:
        raise _error(why)


def is_active() -> bool:
    """Return whether the host's mixin is imported, and ours has taken its place."""
    return _dispatches(getattr(sys.modules.get(MIXIN_MODULE), MIXIN, None))


def why_not_active() -> str | None:
    """Return why ours is not in the place of the host's mixin; ``None`` where it is, or nothing has failed so far."""
    why: str | None = getattr(sys.modules.get(MIXIN_MODULE), _WHY_NOT, None)
    return why


def differences(native: type | None) -> tuple[str, ...]:
    """Return in words where the host's mixin is not the one that we know; empty where it is."""
    if native is None:
        return (f"there is no {MIXIN}",)
    found = []
    for name, known in CONTRACT.items():
        method = getattr(native, name, None)
        if not callable(method):
            found.append(f"{name} is missing")
            continue
        there = list(inspect.signature(method).parameters.values())[1:]
        if tuple(one.name for one in there) != known or any(one.kind != one.POSITIONAL_OR_KEYWORD for one in there):
            found.append(f"{name}({', '.join(map(str, there))}) instead of {name}({', '.join(known)})")
    return tuple(found)


class PostImport(MetaPathFinder):
    """Finds nothing itself: has others find a module, and calls a function when its own loader has run.

    Args:
        waiting: Module to function. A finder that waits for none any more is no longer in ``sys.meta_path``.

    Threads: any.
    """

    def __init__(self, waiting: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._waiting = dict(waiting)
        self._asking = threading.local()

    @property
    def waiting(self) -> frozenset[str]:
        """The modules that it waits for."""
        return frozenset(self._waiting)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with our loader round theirs."""
        # Another finder of this kind may ask all finders in its turn, us too.
        asking: set[str] = vars(self._asking).setdefault("names", set())
        if fullname not in self._waiting or fullname in asking:
            return None
        asking.add(fullname)
        try:
            spec = self._ask_others(fullname, path, target)
        finally:
            asking.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenCall(spec.loader, self._loaded)
        return spec

    def _ask_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in tuple(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return spec
        return None

    def _loaded(self, module: ModuleType) -> None:
        hook = self._waiting.pop(module.__name__, None)
        if hook is not None:
            hook(module)
        if not self._waiting:
            # A new list: another thread that walks along this one would pass over a finder.
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]


class _ThenCall(Loader):
    """A module's own loader, and a function after it. The module keeps no trace of this one."""

    def __init__(self, own: Any, then: Callable[[ModuleType], None]) -> None:
        self._own = own
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._then(module)

    def __getattr__(self, name: str) -> Any:
        # For those that ask for a module's source or code, and do not load it.
        return getattr(self._own, name)


def _dispatches(found: object) -> bool:
    return isinstance(found, type) and getattr(found, _MARK, False) is True


def _replace(module: ModuleType) -> None:
    """Put ours in the place of the host's mixin; where that cannot be, guard the host's, and say why."""
    native = getattr(module, MIXIN, None)
    if _dispatches(native) or hasattr(module, _WHY_NOT):
        return
    why = _why_not_replaced(module, native)
    if why is None:
        return
    setattr(module, _WHY_NOT, why)
    logger.error("%s", why)
    if isinstance(native, type) and callable(getattr(native, "init_disagg", None)):
        # In the class that others were made of too.
        native.init_disagg = _refusing(native.init_disagg, why)  # type: ignore[attr-defined]


def _why_not_replaced(module: ModuleType, native: Any) -> str | None:
    """Replace the mixin, and return ``None``; or leave it, and return why."""
    try:
        different = differences(native)
        if different:
            return (
                f"moonrelay does not know this LightX2V: in {MIXIN_MODULE}, {'; '.join(different)}; "
                f"supported are {SUPPORTED}"
            )
        users = _users_of(native, module)
        if users:
            return (
                f"moonrelay came too late: {users[0]} has taken LightX2V's own {MIXIN} already; "
                "import moonrelay_lightx2v.enable before anything of lightx2v, or install moonrelay's entry point"
            )
        from moonrelay_lightx2v.mixin import dispatching

        setattr(module, MIXIN, dispatching(native))
    except Exception as exc:  # noqa: BLE001 - whatever it is, a config that names us is told it, and no other one sees it
        cause = f"{type(exc).__name__}: {exc}".splitlines()[0]
        return f"moonrelay could not take the place of LightX2V's {MIXIN}: {cause}; see `moonrelay doctor`"
    return None


def _users_of(native: type, module: ModuleType) -> tuple[str, ...]:
    """Return who has the host's class already: classes made of it, modules that took its name."""
    made: list[type] = type.__subclasses__(native)
    classes = [f"{one.__module__}.{one.__qualname__}" for one in made]
    modules = [
        name
        for name, other in sys.modules.copy().items()
        if name.partition(".")[0] == _HOST and other is not module and vars(other).get(MIXIN) is native
    ]
    return (*classes, *modules)


def _refusing(own: Callable[..., Any], why: str) -> Callable[..., Any]:
    """Return a method of the host that refuses a config which names us."""

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(map(_names_us, (*args, *kwargs.values()))):
            raise _error(why)
        return own(self, *args, **kwargs)

    setattr(method, _GUARDED, True)
    return method


def _watch(module: ModuleType) -> None:
    """Have the base of all runners refuse a config that names us where the runner is not made of ours.

    Runners without the mixin, or with one that has moved, would do all the work alone, and say nothing.
    """
    base = getattr(module, RUNNER, None)
    own: Any = getattr(base, "__init__", None)
    if not isinstance(base, type) or own is object.__init__:
        logger.error("moonrelay does not know this LightX2V: no %s in %s; supported are %s", RUNNER, module, SUPPORTED)
        return
    if getattr(own, _GUARDED, False):
        return

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _dispatches(type(self)):
            for given in (*args, *kwargs.values()):
                if _names_us(given) and given.get("disagg_mode"):
                    raise _error(why_not_active() or _without_mixin(type(self), given))
        own(self, *args, **kwargs)

    setattr(init, _GUARDED, True)
    base.__init__ = init  # type: ignore[misc]


def _watch_services(module: ModuleType) -> None:
    """Have the host's services refuse a config that names us: they hand over by code of their own, and say nothing."""
    base = getattr(module, SERVICE, None)
    if not isinstance(base, type):
        logger.error("moonrelay does not know this LightX2V: no %s in %s; supported are %s", SERVICE, module, SUPPORTED)
        return
    made: list[type] = type.__subclasses__(base)
    for service in made:
        _guard_service(service)
    own = getattr(base.__init_subclass__, "__func__", None)
    if getattr(own, _GUARDED, False):
        return

    def init_subclass(cls: type[Any], /, **kwargs: Any) -> None:
        if own is None:
            super(base, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            own(cls, **kwargs)
        _guard_service(cls)

    setattr(init_subclass, _GUARDED, True)
    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def _guard_service(service: type) -> None:
    """Guard what a service takes its config by: all but the controller when they are made, that one when it runs."""
    why = (
        f"LightX2V's {service.__name__} hands over by code of its own, which moonrelay does not reach; take connector "
        "out of its disagg_config, or run the roles as lightx2v.server or lightx2v.infer"
    )
    for name in ("__init__", "run"):
        own = vars(service).get(name)
        if own is not None and not getattr(own, _GUARDED, False):
            setattr(service, name, _refusing(own, why))


def _without_mixin(runner: type, config: Mapping[str, Any]) -> str:
    return (
        f"model_cls={config.get('model_cls')!r} cannot be disaggregated: LightX2V's {runner.__name__} is not made of "
        f"{MIXIN} (supported are {SUPPORTED}); take disagg_mode and disagg_config out of its config"
    )


def _names_us(given: object) -> bool:
    """As `moonrelay_lightx2v.config.is_chosen`, which is not there to be asked where we are broken."""
    section = given.get("disagg_config") if isinstance(given, Mapping) else None
    return isinstance(section, Mapping) and section.get("connector") == _CONNECTOR


def _error(message: str) -> Exception:
    try:
        from moonrelay.errors import PluginError
    except Exception:  # noqa: BLE001 - its text matters more than its type
        return RuntimeError(message)
    return PluginError(message, plugin=_HOST)


def host_folder() -> Path | None:
    """Return the folder of the host's package, ``None`` where it is not to be found; imports nothing."""
    spec = find_spec(_HOST)
    # A folder of that name that lies in the working directory is a namespace, without origin.
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def host_version() -> str | None:
    """Return LightX2V's version, ``None`` where it is not there; it has had one only."""
    folder = host_folder()
    if folder is None:
        return None
    try:
        return importlib.metadata.version(_HOST)
    except importlib.metadata.PackageNotFoundError:
        # As its users have it: a checkout on the path.
        found = re.search(r"""^__version__ = ["']([\w.+-]+)["']""", (folder / "__init__.py").read_text(), re.MULTILINE)
        return found[1] if found is not None else None


class Lightx2vAdapter:
    """LightX2V as a host: its disaggregation, handed over by Moonrelay where ``disagg_config.connector`` says so."""

    name = "lightx2v"
    host = "lightx2v"

    def host_version(self) -> str | None:
        """Return LightX2V's version, ``None`` where it is not there."""
        return host_version()

    def available(self) -> tuple[bool, str]:
        """Say whether the adapter can be used here, and why not; imports nothing heavy.

        Returns:
            ``(True, versions in words)`` or ``(False, what is missing and how to get it)``.
        """
        if host_folder() is None:
            return False, f"{_HOST} cannot be imported; put a checkout of it on PYTHONPATH, it is on no package index"
        return True, f"{_HOST} {host_version() or 'without version'}"

    def examine(self) -> Iterator[HostFinding]:
        """Look whether the plugin is active in the host; see `moonrelay_lightx2v.activity.examine`."""
        from moonrelay_lightx2v import activity

        yield from activity.examine()

    def host_bench(self) -> type[HostBench]:
        """Return what ``moonrelay bench host lightx2v`` measures; see `moonrelay_lightx2v.bench`."""
        from moonrelay_lightx2v.bench import Lightx2vBench

        return Lightx2vBench

    def conformance_target(self) -> AdapterTarget:
        """Return what the conformance suite tests; see `moonrelay_lightx2v.conformance`."""
        from moonrelay_lightx2v.conformance import Lightx2vTarget

        return Lightx2vTarget()
