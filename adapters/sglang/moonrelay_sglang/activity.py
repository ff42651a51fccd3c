"""Whether the plugin is active in the host: what `moonrelay doctor` asks, in a process of its own.

Owns the two looks, from outside by the installed metadata and from inside by the host's own loader, and their remedies.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final

from moonrelay import config
from moonrelay.plugins import HostFinding
from moonrelay_sglang import plugin

#: What loads us: in the launcher, the head and every role's processes.
GROUP: Final = "sglang.multimodal_gen.plugins"
ENTRY_POINT: Final = "moonrelay"
_TARGET: Final = "moonrelay_sglang.plugin:register"
_ALLOWED: Final = "SGLANG_PLUGINS"
_REINSTALL: Final = "pip install --force-reinstall --no-deps moonrelay (in a checkout: pip install -e .)"


def why_not_loaded() -> HostFinding | None:
    """Return why the host will not load the plugin, as far as that shows without the host; ``None`` where it will."""
    named = [point for point in entry_points(group=GROUP) if point.name == ENTRY_POINT]
    if not any(point.value == _TARGET for point in named):
        return HostFinding(
            status="fail",
            detail=f"moonrelay is installed without its entry point in {GROUP}",
            remedy=_REINSTALL,
        )
    allowed = config.hosts_variable(_ALLOWED)
    # As the host reads it: an empty one leaves nothing out, one of commas alone everything.
    if allowed and ENTRY_POINT not in (name.strip() for name in allowed.split(",")):
        return HostFinding(
            status="warn",
            detail=f"{_ALLOWED}={allowed!r} leaves {ENTRY_POINT!r} out",
            remedy=f"add {ENTRY_POINT} to {_ALLOWED}, or unset it",
        )
    return None


def examine() -> Iterator[HostFinding]:
    """Look at the host; where nothing speaks against it from outside, have it load its plugins and apply their hooks.

    Yields:
        One finding: how many of our hooks are in place, and what keeps the first of the others out.

    Raises:
        Exception: What the host raises when its registry of plugins is imported, or runs.

    Blocks: some twenty seconds for the host's imports, not at all where it is not installed or not supported.
    """
    if not plugin.host_is_there():
        yield HostFinding(status="skip", detail="not installed")
        return
    refusal = plugin.version_refusal(plugin.host_version())
    if refusal is not None:
        yield _inactive(HostFinding(status="fail", detail=refusal))
        return
    reason = why_not_loaded()
    if reason is not None:
        yield _inactive(reason)
        return
    yield _seen_from_inside()


def _seen_from_inside() -> HostFinding:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, apply_plugin_hooks

    apply_plugin_hooks()
    # The host swallows what loading a plugin and applying a hook raise, so both are tried here again.
    ours = {
        target
        for target, hooks in HookRegistry._hooks.items()  # noqa: SLF001  nothing public says
        if any(getattr(hook, "__module__", None) == plugin.__name__ for _, hook, *_ in hooks)
    }
    if not ours:
        reason = _load_error() or "its loader ran, and registered no hook of ours"
        return _inactive(HostFinding(status="fail", detail=reason, remedy="pip install --force-reinstall 'moonrelay'"))
    patched = HookRegistry._patched  # noqa: SLF001
    missing = [hook.target for hook in plugin.HOOKS if hook.target not in ours or hook.target not in patched]
    count = f"{len(plugin.HOOKS) - len(missing)} of {len(plugin.HOOKS)} hooks applied"
    if not missing:
        return HostFinding(status="ok", detail=f"{plugin.host_version()}, plugin active: {count}")
    why = _resolve_error(missing[0]) or "see the host's log"
    detail = f"{count}, not the one on {missing[0]}: {why}"
    remedy = f"install what the line names; moonrelay supports sglang {plugin.SUPPORTED}, as released"
    return _inactive(HostFinding(status="fail", detail=detail, remedy=remedy))


def _inactive(why: HostFinding) -> HostFinding:
    detail = f"{plugin.host_version() or 'no version known'}, plugin not active: {why.detail}"
    return HostFinding(status=why.status, detail=detail, remedy=why.remedy)


def _load_error() -> str | None:
    for point in entry_points(group=GROUP, name=ENTRY_POINT):
        try:
            point.load()
        except Exception as exc:  # noqa: BLE001 - an import runs here; the finding is what it raises
            return f"{type(exc).__name__}: {exc}".splitlines()[0]
    return None


def _resolve_error(target: str) -> str | None:
    parts = target.split(".")
    try:
        for end in range(1, len(parts)):
            # The host's way to a name hides what fails within a module.
            module = ".".join(parts[:end])
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as exc:
                if exc.name != module:
                    raise
                break
        pkgutil.resolve_name(target)
    except Exception as exc:  # noqa: BLE001 - as above
        return f"{type(exc).__name__}: {exc}".splitlines()[0]
    return None
