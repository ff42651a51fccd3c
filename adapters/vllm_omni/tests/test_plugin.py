"""Registration and the adapter's word on its host, where the host is not installed or has another version."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError, WireError
from moonrelay.plugins import ADAPTERS, HostFinding, Registry
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.targets.adapter import Outgoing, SideSettings
from moonrelay_vllm_omni import activity, plugin
from moonrelay_vllm_omni.conformance import VllmOmniSide, VllmOmniTarget

WITHOUT_A_HOST = """
import sys
sys.modules["vllm_omni"] = None  # neither found nor imported
from moonrelay_vllm_omni import plugin
plugin.register()
plugin.register()
print(sorted({"vllm", "torch", "mooncake"} & sys.modules.keys()), plugin.VllmOmniAdapter().available())
"""
#: What plain vLLM does in each of its processes, where it is installed alone.
PLAIN_VLLM = """
import sys
sys.modules["vllm_omni"] = None
import vllm
before = set(sys.modules)
from importlib.metadata import entry_points
(ours,) = entry_points(group="vllm.general_plugins", name="moonrelay")
ours.load()()
heavy = {"vllm_omni", "torch", "mooncake", "msgpack", "numpy"}
print(vllm.WHO, "moonrelay_vllm_omni" in sys.modules, sorted(heavy & (set(sys.modules) - before)))
"""


@pytest.mark.parametrize("found", ["0.30.0", "0.30.7", "0.30.0rc1", "0.30.1.dev3+g12ab"])
def test_supported_versions(found: str) -> None:
    assert plugin.version_refusal(found) is None


@pytest.mark.parametrize("found", ["0.29.9", "0.31.0", "1.30.0", "0.3.0", "", None, "main"])
def test_other_versions_are_refused_with_the_range(found: str | None) -> None:
    refusal = plugin.version_refusal(found)
    assert refusal is not None
    assert plugin.SUPPORTED in refusal
    assert "\n" not in refusal


def test_without_the_host_registering_does_nothing_and_imports_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_HOST], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("[] (False, ")
    assert "vllm-omni not installed; pip install" in done.stdout


def test_in_plain_vllm_the_entry_point_does_nothing_and_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("WHO = 'plain vLLM'\n")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_VLLM],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.stdout.strip() == "plain vLLM True []"
    assert done.stderr == ""


def test_the_adapter_is_found_by_its_name() -> None:
    assert Registry(ADAPTERS).load("vllm-omni") is plugin.VllmOmniAdapter


def test_an_unsupported_host_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda _name: object())
    monkeypatch.setattr(plugin, "host_version", lambda: "0.29.0")
    usable, why = plugin.VllmOmniAdapter().available()
    assert not usable
    assert plugin.SUPPORTED in why


@pytest.fixture
def host_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A supported host, as far as it shows from outside, in an environment that filters no plugin."""
    monkeypatch.setattr(plugin, "host_is_there", lambda: True)
    monkeypatch.setattr(plugin, "host_version", lambda: "0.30.0")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    points = [EntryPoint("moonrelay", "moonrelay_vllm_omni.plugin:register", group) for group in activity.GROUPS]
    monkeypatch.setattr(activity, "entry_points", EntryPoints(points).select)


def one_finding() -> HostFinding:
    (finding,) = plugin.VllmOmniAdapter().examine()
    return finding


def test_doctor_skips_a_host_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "host_is_there", lambda: False)
    assert one_finding() == HostFinding(status="skip", detail="not installed")


@pytest.mark.usefixtures("host_that_is_there")
def test_doctor_refuses_an_unsupported_host_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "host_version", lambda: "0.31.2")
    finding = one_finding()
    assert finding.status == "fail"
    assert finding.detail.startswith("0.31.2, plugin not active: ")
    assert plugin.SUPPORTED in finding.detail


@pytest.mark.usefixtures("host_that_is_there")
@pytest.mark.parametrize("allowed", ["", "lora", "lora,moonrelay2", "lora, moonrelay"])
def test_a_filter_that_leaves_the_plugin_out_is_told_by_doctor_and_list(
    monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    assert plugin.VllmOmniAdapter().available() == (True, "vllm-omni 0.30.0")
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    usable, why = plugin.VllmOmniAdapter().available()
    assert not usable
    finding = one_finding()
    assert finding.status == "warn"
    assert f"VLLM_PLUGINS={allowed!r}" in finding.detail
    assert f"VLLM_PLUGINS={allowed!r}" in why
    assert finding.remedy in why


@pytest.mark.usefixtures("host_that_is_there")
@pytest.mark.parametrize("allowed", ["moonrelay", "lora,moonrelay"])
def test_a_filter_that_names_the_plugin_takes_it(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", allowed)
    assert activity.why_not_loaded() is None
    assert plugin.VllmOmniAdapter().available()[0]


@pytest.mark.usefixtures("host_that_is_there")
@pytest.mark.parametrize("left", [(), activity.GROUPS[:1], activity.GROUPS[1:]])
def test_a_distribution_without_its_entry_points_is_told_by_doctor_and_list(
    monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...]
) -> None:
    points = [EntryPoint("moonrelay", "moonrelay_vllm_omni.plugin:register", group) for group in left]
    monkeypatch.setattr(activity, "entry_points", EntryPoints(points).select)
    finding = one_finding()
    assert finding.status == "fail"
    for group in activity.GROUPS:
        assert (group in finding.detail.split()) == (group not in left)
    assert "pip install" in finding.remedy
    assert not plugin.VllmOmniAdapter().available()[0]


def test_the_entry_points_are_those_of_the_distribution() -> None:
    assert activity.why_not_loaded() is None


def test_the_target_declares_what_the_hosts_contract_has_no_word_for() -> None:
    target = VllmOmniTarget()
    assert not any(target.supports(one) for one in VllmOmniTarget.WITHOUT)
    assert target.supports(Capability.SHARED_READERS, Capability.TTL, Capability.RELEASE, Capability.STORE)
    assert target.routes() == ("p2p", "store")


def test_the_side_refuses_what_the_host_cannot_be_asked_for() -> None:
    side = VllmOmniSide(SideSettings(role="producer", route="p2p"))
    for outgoing in (
        Outgoing(request_id="r", tree={}, metadata={"a": 1}),
        Outgoing(request_id="r", tree={}, num_chunks=2),
        Outgoing(request_id="r", tree={}, lease="pinned"),
    ):
        with pytest.raises(ConfigError):
            side.publish(outgoing)
    with pytest.raises(WireError):
        side.receive({"key": 7}, timeout_s=0.1)
    side.close()
