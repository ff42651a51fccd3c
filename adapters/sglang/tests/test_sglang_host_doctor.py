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
from moonrelay_sglang import activity, plugin

pytestmark = pytest.mark.sglang

FOUND = plugin.host_version()


def ask() -> HostFinding:
    """Return the one thing that a child process says of the host, as the command shows it."""
    answer = Machine().host("sglang", timeout_s=300.0)
    assert answer.error is None
    (finding,) = answer.findings
    return finding


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_plugin_is_active() -> None:
    count = len(plugin.HOOKS)
    assert ask() == HostFinding(status="ok", detail=f"{FOUND}, plugin active: {count} of {count} hooks applied")


@pytest.mark.processes
def test_the_command_names_the_host_and_its_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    command = Path(sysconfig.get_path("scripts")) / "moonrelay"
    done = subprocess.run(
        [sys.executable, str(command), "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    (found,) = (one for one in json.loads(done.stdout)["findings"] if one["name"] == "sglang")
    assert found["status"] == "warn"
    assert found["detail"] == f"{FOUND}, plugin not active: SGLANG_PLUGINS='none' leaves 'moonrelay' out"
    assert "SGLANG_PLUGINS" in found["remedy"]


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize("allowed", ["", ",", " moonrelay", "moonrelay", "other,moonrelay", "other, moonrelay", "none"])
def test_the_filter_is_read_as_the_host_reads_it(monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    """What is said without the host must hold in it."""
    from sglang.multimodal_gen.runtime.platforms import plugins

    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    assert (activity.ENTRY_POINT in plugins._discover()) == (activity.why_not_loaded() is None)


@pytest.mark.processes
def test_an_unsupported_version_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    info = tmp_path / "sglang-0.5.22.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finding = ask()
    assert finding.status == "fail"
    assert finding.detail.startswith("0.5.22, plugin not active: ")
    assert plugin.SUPPORTED in finding.detail


@pytest.mark.processes
def test_a_host_that_does_not_import_is_told_with_its_last_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('planted: libcudart.so.13 is not there')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = Machine().host("sglang", timeout_s=300.0)
    assert (answer.host, answer.version, answer.findings) == ("sglang", FOUND, ())
    assert answer.error == "ImportError: planted: libcudart.so.13 is not there"
