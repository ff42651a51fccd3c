"""What `moonrelay doctor` says of the host; with the double, and of a host that is not one we know."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import lightx2v_double
import pytest
from lightx2v_double import installed

from moonrelay.plugins import HostFinding
from moonrelay_lightx2v import activity, plugin

COMMIT = "f8aee98b0123456789abcdef0123456789abcdef"
MIXIN_FILE = "lightx2v/disagg/disagg_mixin.py"


@pytest.fixture(autouse=True)
def entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    with_points(monkeypatch, "moonrelay_lightx2v.plugin:register")
    monkeypatch.setattr(plugin.importlib.metadata, "version", no_version)


def no_version(name: str) -> str:
    raise plugin.importlib.metadata.PackageNotFoundError(name)


def with_points(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [EntryPoint(activity.ENTRY_POINT, value, activity.GROUP) for value in values]
    monkeypatch.setattr(activity, "entry_points", EntryPoints(points).select)


#: The host's loader names its group, as the double's need not.
LOADER = {
    "lightx2v_platform/set_ai_device.py": (
        lightx2v_double.TREE["lightx2v_platform/set_ai_device.py"] + f"\ngroup = {activity.GROUP!r}\n"
    )
}


@contextmanager
def host(
    folder: Path, *plugins: Callable[[], None], changes: dict[str, str] | None = None, git: str | None = COMMIT
) -> Iterator[None]:
    if git is not None:
        (folder / ".git").mkdir(parents=True)
        (folder / ".git" / "HEAD").write_text(f"{git}\n")
    with installed(folder, changes={**LOADER, **(changes or {})}, plugins=plugins):
        yield


def ask() -> HostFinding:
    (finding,) = plugin.Lightx2vAdapter().examine()
    return finding


def test_a_host_that_is_not_there_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda _: None)
    assert ask() == HostFinding(status="skip", detail="not installed")


def test_an_active_plugin_is_told_with_the_hosts_commit(tmp_path: Path) -> None:
    with host(tmp_path, plugin.register):
        assert ask() == HostFinding(status="ok", detail="0.1.0 (commit f8aee98b), plugin active: DisaggMixin is ours")


@pytest.mark.parametrize("values", [(), ("somebody.elses:register",)])
def test_without_our_entry_point_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: tuple[str, ...]
) -> None:
    with_points(monkeypatch, *values)
    with host(tmp_path, plugin.register):
        found = ask()
        assert "lightx2v" not in sys.modules
    assert found.status == "fail"
    assert found.detail == (
        "0.1.0 (commit f8aee98b), plugin not active: moonrelay is installed without its entry point in "
        "lightx2v.platform_plugins"
    )
    assert "pip install" in found.remedy
    assert "python -m moonrelay_lightx2v" in found.remedy


def test_a_host_older_than_its_plugins_is_told(tmp_path: Path) -> None:
    with host(tmp_path, changes={"lightx2v_platform/set_ai_device.py": "init_ai_device = None\n"}):
        found = ask()
        assert "lightx2v" not in sys.modules
    assert found.status == "fail"
    assert "older than its plugins" in found.detail
    assert "python -m moonrelay_lightx2v" in found.remedy


@pytest.mark.parametrize("package", [None, "namespace"])
def test_a_loader_that_has_moved_is_left_to_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str | None
) -> None:
    find = activity.find_spec
    none = None if package is None else plugin.ModuleSpec("lightx2v_platform", None, is_package=True)
    monkeypatch.setattr(activity, "find_spec", lambda name: none if name == "lightx2v_platform" else find(name))
    with host(tmp_path, plugin.register):
        assert ask().status == "ok"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "raise RuntimeError(\"AI device for platform 'cuda' is not available\")",
            "RuntimeError: AI device for platform 'cuda' is not available",
        ),
        ("import triton_of_no_name", "ModuleNotFoundError: No module named 'triton_of_no_name'"),
        ("raise SystemExit('no device')", "SystemExit: no device"),
    ],
)
def test_a_host_that_cannot_be_imported_here_is_a_warning(tmp_path: Path, text: str, error: str) -> None:
    changes = {"lightx2v/__init__.py": f'__version__ = "0.1.0"\n{text}\n'}
    with host(tmp_path, plugin.register, changes=changes):
        found = ask()
    assert found.status == "warn"
    assert found.detail == (
        f"0.1.0 (commit f8aee98b), entry point in place, but the host cannot be imported here: {error}"
    )
    assert "PLATFORM" in found.remedy


def test_a_mixin_that_is_not_known_fails(tmp_path: Path) -> None:
    changes = {MIXIN_FILE: f"{lightx2v_double.TREE[MIXIN_FILE]}\ndel DisaggMixin.release_disagg\n"}
    with host(tmp_path, plugin.register, changes=changes):
        found = ask()
    assert found.status == "fail"
    assert "plugin not active" in found.detail
    assert "release_disagg is missing" in found.detail
    assert plugin.SUPPORTED in found.detail


def test_a_plugin_that_does_not_load_is_told_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only warns, in its own log."""
    with host(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(EntryPoint, "load", cannot_load)
            found = ask()
    assert found.status == "fail"
    assert "ImportError: libzmq.so" in found.detail


def cannot_load(_point: EntryPoint) -> None:
    raise ImportError("libzmq.so\nand more")


def test_a_host_that_did_not_ask_for_us_is_told(tmp_path: Path) -> None:
    with host(tmp_path):
        found = ask()
    assert found.status == "fail"
    assert "did not load our entry point" in found.detail


# -- the commit -------------------------------------------------------------------------------------------------------


def commit_of(folder: Path, files: dict[str, str]) -> str | None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with host(folder, git=None):
        return activity.host_commit()


@pytest.mark.parametrize(
    "files",
    [
        {".git/HEAD": f"{COMMIT}\n"},
        {".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{COMMIT}\n"},
        {
            ".git/HEAD": "ref: refs/heads/main\n",
            ".git/packed-refs": f"# pack-refs with: peeled\n{'0' * 40} refs/heads/mai\n{COMMIT} refs/heads/main\n",
        },
        {
            ".git": "gitdir: bare/worktrees/w\n",
            "bare/worktrees/w/HEAD": "ref: refs/heads/w\n",
            "bare/worktrees/w/commondir": "../..\n",
            "bare/refs/heads/w": f"{COMMIT}\n",
        },
    ],
    ids=["detached", "branch", "packed", "worktree"],
)
def test_the_commit_is_read(tmp_path: Path, files: dict[str, str]) -> None:
    assert commit_of(tmp_path, files) == "f8aee98b"


@pytest.mark.parametrize(
    "files",
    [{}, {".git/HEAD": "ref: refs/heads/main\n"}, {".git/config": ""}, {".git/HEAD": ""}],
    ids=["no-checkout", "no-commit", "no-head", "empty-head"],
)
def test_where_there_is_none_nothing_is_said(tmp_path: Path, files: dict[str, str]) -> None:
    assert commit_of(tmp_path, files) is None


def test_a_branch_that_was_not_packed_has_none(tmp_path: Path) -> None:
    files = {".git/HEAD": "ref: refs/heads/main\n", ".git/packed-refs": f"{COMMIT} refs/heads/other\n"}
    assert commit_of(tmp_path, files) is None


def test_without_the_host_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda _: None)
    assert activity.host_commit() is None
