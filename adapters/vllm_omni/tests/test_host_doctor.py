"""`moonrelay doctor` on the real host: the plugin active, filtered, not for it, or the host broken."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from moonrelay.cli.probes import Machine
from moonrelay.plugins import HostFinding
from moonrelay_vllm_omni import activity, plugin
from moonrelay_vllm_omni.pipelines import registration

pytestmark = pytest.mark.vllm_omni

FOUND = plugin.host_version()


def ask() -> HostFinding:
    """Return the one thing that a child process says of the host, as the command shows it."""
    answer = Machine().host("vllm-omni", timeout_s=300.0)
    assert answer.error is None
    (finding,) = answer.findings
    return finding


def test_the_command_names_host_and_version_and_says_that_the_plugin_is_active() -> None:
    command = Path(sysconfig.get_path("scripts")) / "moonrelay"
    done = subprocess.run(
        [sys.executable, str(command), "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    (found,) = (one for one in json.loads(done.stdout)["findings"] if one["name"] == "vllm-omni")
    count = len(registration.names())
    assert found == {
        "name": "vllm-omni",
        "status": "ok",
        "detail": f"{FOUND}, plugin active: MoonrelayConnector registered, {count} pipelines in stages",
        "remedy": "",
    }


def test_a_filter_of_the_hosts_leaves_the_plugin_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    finding = ask()
    assert finding.status == "warn"
    assert finding.detail.startswith(f"{FOUND}, plugin not active: VLLM_PLUGINS=")
    assert "VLLM_PLUGINS" in finding.remedy


def test_the_filter_is_read_as_the_host_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said without the host must hold in it."""
    for allowed in ("", " moonrelay", "moonrelay", "other,moonrelay", "other, moonrelay"):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        taken = plugin_names()
        assert (activity.ENTRY_POINT in taken) == (activity.why_not_loaded() is None), allowed


def plugin_names() -> set[str]:
    """Return which plugins the host would load of its own group, in this environment."""
    from vllm_omni.plugins import OMNI_DEFAULT_PLUGINS_GROUP, load_omni_plugins_by_group

    return set(load_omni_plugins_by_group(OMNI_DEFAULT_PLUGINS_GROUP))


def test_an_unsupported_version_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "vllm_omni-0.29.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.29.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = ask()
    assert finding.status == "fail"
    assert finding.detail.startswith("0.29.1, plugin not active: ")
    assert plugin.SUPPORTED in finding.detail


def test_a_host_that_does_not_import_is_told_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "vllm_omni"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('planted: libcudart.so.13 is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = Machine().host("vllm-omni", timeout_s=300.0)
    assert (answer.host, answer.version, answer.findings) == ("vllm-omni", FOUND, ())
    assert answer.error == "ImportError: planted: libcudart.so.13 is not there"
