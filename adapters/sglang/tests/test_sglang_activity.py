"""What `moonrelay doctor` says of the host, with a double of its registry: it is asked without being there."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from moonrelay.plugins import HostFinding
from moonrelay_sglang import activity, plugin


class Host:
    """The host's registry and loader; the loader runs our `register`, and applies the hooks that it is told to."""

    def __init__(self) -> None:
        self._hooks: Any = defaultdict(list)
        self._patched: set[str] = set()
        self.loads = True
        self.left_out: set[str] = set()

    def register(self, target: str, hook: Any, kind: str) -> None:
        self._hooks[target].append((kind, hook, None))

    def apply(self) -> None:
        if self.loads:
            plugin.register()
        self._patched = set(self._hooks) - self.left_out


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    name = "sglang.multimodal_gen.runtime.platforms.plugins"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    module: Any = sys.modules[name]
    module.HookRegistry = found
    module.HookType = types.SimpleNamespace(AROUND="around", AFTER="after")
    module.apply_plugin_hooks = found.apply
    monkeypatch.setattr(plugin, "host_is_there", lambda: True)
    monkeypatch.setattr(plugin, "host_version", lambda: "0.5.23")
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    with_points(monkeypatch, "moonrelay_sglang.plugin:register")
    return found


def with_points(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint(activity.ENTRY_POINT, value, activity.GROUP) for value in values]
    monkeypatch.setattr(activity, "entry_points", EntryPoints(points).select)


def ask() -> HostFinding:
    (finding,) = plugin.SglangAdapter().examine()
    return finding


def test_a_host_that_is_not_there_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "host_is_there", lambda: False)
    assert ask() == HostFinding(status="skip", detail="not installed")


def test_an_active_plugin_counts_its_hooks(host: Host) -> None:
    count = len(plugin.HOOKS)
    assert ask() == HostFinding(status="ok", detail=f"0.5.23, plugin active: {count} of {count} hooks applied")


@pytest.mark.parametrize("found", ["0.5.22", "0.6.0", None])
def test_an_unsupported_version_is_not_loaded(host: Host, monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(plugin, "host_version", lambda: found)
    finding = ask()
    assert finding.status == "fail"
    assert plugin.SUPPORTED in finding.detail
    assert not host._patched


@pytest.mark.parametrize(
    ("allowed", "status"),
    [
        ("none", "warn"),
        ("other", "warn"),
        (",", "warn"),
        ("moonrelays", "warn"),
        ("", "ok"),
        ("moonrelay", "ok"),
        ("other, moonrelay", "ok"),
    ],
)
def test_the_hosts_filter_is_told(host: Host, monkeypatch: pytest.MonkeyPatch, allowed: str, status: str) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    finding = ask()
    assert finding.status == status
    assert ("SGLANG_PLUGINS" in finding.remedy) == (status == "warn")
    assert bool(host._patched) == (status == "ok")


@pytest.mark.parametrize("values", [(), ("another_package:register",)])
def test_a_missing_entry_point_is_told(host: Host, monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...]) -> None:
    with_points(monkeypatch, *values)
    finding = ask()
    assert finding.status == "fail"
    assert activity.GROUP in finding.detail
    assert finding.remedy


def test_a_hook_that_was_not_applied_is_named_with_the_reason(host: Host) -> None:
    host.left_out = {plugin.HOOKS[4].target}
    finding = ask()
    assert finding.status == "fail"
    assert f"{len(plugin.HOOKS) - 1} of {len(plugin.HOOKS)} hooks applied" in finding.detail
    assert plugin.HOOKS[4].target in finding.detail
    assert "AttributeError" in finding.detail  # the double has no such module
    assert plugin.SUPPORTED in finding.remedy


def test_what_fails_within_a_module_is_the_reason(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_host_module.py").write_text("import libcudart_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "broken_host_module.Class.method"
    monkeypatch.setattr(plugin, "HOOKS", (plugin.Hook(target, "head:around_stop"),))
    host.left_out = {target}
    assert "ModuleNotFoundError: No module named 'libcudart_is_not_there'" in ask().detail


def test_a_hook_of_somebody_else_on_our_target_does_not_count(host: Host) -> None:
    host.loads = False
    for hook in plugin.HOOKS:
        host.register(hook.target, print, "around")
    finding = ask()
    assert finding.status == "fail"
    assert "registered no hook of ours" in finding.detail


def test_a_plugin_that_does_not_import_is_told_with_its_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.loads = False
    monkeypatch.setattr(plugin, "register", None)
    monkeypatch.setitem(sys.modules, "moonrelay_sglang.plugin", None)
    finding = next(activity.examine())
    assert finding.status == "fail"
    assert "ModuleNotFoundError" in finding.detail or "ImportError" in finding.detail
