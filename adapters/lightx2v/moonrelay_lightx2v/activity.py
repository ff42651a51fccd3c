"""Whether the plugin is active in the host: what `moonrelay doctor` asks, in a process of its own.

Owns the two looks, from outside by the installed metadata and the host's files, and from inside by importing the host,
and their remedies.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from moonrelay.plugins import HostFinding
from moonrelay_lightx2v import plugin

#: What loads us: every process that imports the host.
GROUP: Final = "lightx2v.platform_plugins"
ENTRY_POINT: Final = "moonrelay"
_TARGET: Final = "moonrelay_lightx2v.plugin:register"
_REINSTALL: Final = "pip install --force-reinstall --no-deps moonrelay (in a checkout: pip install -e .)"
_LAUNCHER: Final = "start the host with python -m moonrelay_lightx2v lightx2v.server|lightx2v.infer …"


def why_not_loaded() -> HostFinding | None:
    """Return why the host will not load the plugin, as far as that shows without the host; ``None`` where it will."""
    named = [point for point in entry_points(group=GROUP) if point.name == ENTRY_POINT]
    if not any(point.value == _TARGET for point in named):
        return HostFinding(
            status="fail",
            detail=f"moonrelay is installed without its entry point in {GROUP}",
            remedy=f"{_REINSTALL}, or {_LAUNCHER}",
        )
    if not _host_loads_plugins():
        return HostFinding(
            status="fail",
            detail="this LightX2V is older than its plugins, of 16 June 2026",
            remedy=f"take a newer one, or {_LAUNCHER}",
        )
    return None


def examine() -> Iterator[HostFinding]:
    """Look at the host; where nothing speaks against it from outside, import it, and see whose its mixin is.

    Yields:
        One finding: whether ours is in place, and what keeps it out. ``warn`` where the host cannot be imported here.

    Blocks: some twenty seconds for the host's imports, not at all where it is not there.
    """
    if plugin.host_folder() is None:
        yield HostFinding(status="skip", detail="not installed")
        return
    reason = why_not_loaded()
    yield _inactive(reason) if reason is not None else _seen_from_inside()


def host_commit() -> str | None:
    """Return the commit of the host's checkout, shortened; ``None`` where it is no checkout. Runs no git."""
    folder = plugin.host_folder()
    git = folder.parent / ".git" if folder is not None else None
    try:
        if git is None or not git.exists():
            return None
        commit = _commit_of(git)
    except (OSError, UnicodeDecodeError):
        return None
    return commit[:8] if commit else None


def _commit_of(git: Path) -> str | None:
    if git.is_file():  # a worktree's names the folder of its own HEAD
        git = git.parent / git.read_text().partition("gitdir:")[2].strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head
    name = head.partition("ref:")[2].strip()
    common = git / "commondir"
    shared = git / common.read_text().strip() if common.exists() else git
    if (shared / name).exists():
        return (shared / name).read_text().strip()
    for line in (shared / "packed-refs").read_text().splitlines():
        commit, _, packed = line.partition(" ")
        if packed == name:
            return commit
    return None


def _host_loads_plugins() -> bool:
    spec = find_spec("lightx2v_platform")
    if spec is None or spec.origin is None:
        return True  # it moved; importing the host will show
    loader = Path(spec.origin).parent / "set_ai_device.py"
    return not loader.exists() or GROUP in loader.read_text(encoding="utf-8")


def _seen_from_inside() -> HostFinding:
    try:
        importlib.import_module("lightx2v")
        importlib.import_module(plugin.MIXIN_MODULE)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - foreign code runs here; the finding is what it raises
        return HostFinding(
            status="warn",
            detail=f"{_version()}, entry point in place, but the host cannot be imported here: {_line(exc)}",
            remedy="ask again where the host runs, with its environment (PLATFORM, its requirements)",
        )
    if plugin.is_active():
        return HostFinding(status="ok", detail=f"{_version()}, plugin active: {plugin.MIXIN} is ours")
    reason = plugin.why_not_active() or _load_error() or "the host imported its mixin, and did not load our entry point"
    return _inactive(HostFinding(status="fail", detail=reason, remedy=f"{_REINSTALL}, or {_LAUNCHER}"))


def _inactive(why: HostFinding) -> HostFinding:
    return HostFinding(status=why.status, detail=f"{_version()}, plugin not active: {why.detail}", remedy=why.remedy)


def _version() -> str:
    commit = host_commit()
    return f"{plugin.host_version() or 'no version known'}{f' (commit {commit})' if commit else ''}"


def _load_error() -> str | None:
    for point in entry_points(group=GROUP, name=ENTRY_POINT):
        try:
            point.load()
        except Exception as exc:  # noqa: BLE001 - an import runs here; the finding is what it raises
            return _line(exc)
    return None


def _line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}".splitlines()[0]
