"""Whether the plugin is active in the host: what `moonrelay adapters` asks quickly, and `moonrelay doctor` thoroughly.

Owns the two looks, from outside by the installed metadata and from inside by the host's own loader, and their remedies.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Final

from moonrelay import config
from moonrelay.plugins import HostFinding
from moonrelay_vllm_omni import plugin

#: What loads us, by group: the first one while a command line is parsed, the second in every process of the host.
GROUPS: Final = ("vllm.general_plugins", "vllm_omni.general_plugins")
ENTRY_POINT: Final = "moonrelay"
_TARGET: Final = "moonrelay_vllm_omni.plugin:register"
_ALLOWED: Final = "VLLM_PLUGINS"


def why_not_loaded() -> HostFinding | None:
    """Return why the host will not load the plugin, as far as that shows without the host; ``None`` where it will."""
    missing = [group for group in GROUPS if not any(point.value == _TARGET for point in entry_points(group=group))]
    if missing:
        return HostFinding(
            status="fail",
            detail=f"moonrelay is installed without its entry point in {' and '.join(missing)}",
            remedy="pip install --force-reinstall --no-deps moonrelay (in a checkout: pip install -e .)",
        )
    allowed = config.hosts_variable(_ALLOWED)
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return HostFinding(
            status="warn",
            detail=f"{_ALLOWED}={allowed!r} leaves {ENTRY_POINT!r} out",
            remedy=f"add {ENTRY_POINT} to {_ALLOWED}, without spaces, or unset it",
        )
    return None


def examine() -> Iterator[HostFinding]:
    """Look at the host; where nothing speaks against it from outside, load its plugins as it does, and see.

    Yields:
        One finding: whether the connector is registered, and how many pipelines in stages.

    Raises:
        Exception: What the host raises when it is imported.

    Blocks: some ten seconds for the host's import, not at all where it is not installed or not supported.
    """
    found = plugin.host_version()
    if not plugin.host_is_there():
        yield HostFinding(status="skip", detail="not installed")
        return
    refusal = plugin.version_refusal(found)
    if refusal is not None:
        yield _inactive(found, HostFinding(status="fail", detail=refusal))
        return
    reason = why_not_loaded()
    if reason is not None:
        yield _inactive(found, reason)
        return
    yield _seen_from_inside(found)


def _seen_from_inside(found: str | None) -> HostFinding:
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.plugins import load_omni_general_plugins

    load_omni_general_plugins()
    if plugin.NAME not in OmniConnectorFactory.list_registered_connectors():
        # The host swallows what loading a plugin raises, so it is raised here again.
        reason = _load_error() or f"its loader ran, and {plugin.NAME} is not registered"
        remedy = "pip install --force-reinstall 'moonrelay[vllm-omni]'"
        return _inactive(found, HostFinding(status="fail", detail=reason, remedy=remedy))
    active = f"{found}, plugin active: {plugin.NAME} registered"
    try:
        count = _count_pipelines()
    except (ImportError, AttributeError, OSError, RuntimeError) as exc:
        reason = f"{type(exc).__name__}: {exc}".splitlines()[0]
        return HostFinding(
            status="warn",
            detail=f"{active}, no pipelines in stages, because the host's diffusion engine does not import: {reason}",
            remedy="install what the line names; language stages work without",
        )
    return HostFinding(status="ok", detail=f"{active}, {count} pipelines in stages")


def _inactive(found: str | None, why: HostFinding) -> HostFinding:
    detail = f"{found or 'no version known'}, plugin not active: {why.detail}"
    return HostFinding(status=why.status, detail=detail, remedy=why.remedy)


def _load_error() -> str | None:
    for group in GROUPS:
        for point in entry_points(group=group, name=ENTRY_POINT):
            try:
                point.load()
            except Exception as exc:  # noqa: BLE001 - an import runs here; the finding is what it raises
                return f"{group}: {type(exc).__name__}: {exc}".splitlines()[0]
    return None


def _count_pipelines() -> int:
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES

    from moonrelay_vllm_omni.pipelines import registration

    registration.register()
    return sum(name in OMNI_PIPELINES for name in registration.names())
