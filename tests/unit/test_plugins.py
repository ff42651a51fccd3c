"""Plugins: looked up by name, loaded lazily, broken alone."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path

import pytest

from moonrelay.errors import MoonrelayError, PluginError
from moonrelay.plugins import BUILT_IN, COMMANDS, Registry

GROUP = "moonrelay.transfers"


class FakeDistribution(Distribution):
    """A distribution that is installed nowhere."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def metadata(self):  # type: ignore[no-untyped-def, override]
        return {"Name": self._name}

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path):  # type: ignore[no-untyped-def, override]
        return path


def point(name: str, value: str, distribution: str) -> EntryPoint:
    made = EntryPoint(name=name, value=value, group=GROUP)
    vars(made)["dist"] = FakeDistribution(distribution)
    return made


def registry(*points: EntryPoint, built_in: dict[str, str] | None = None) -> Registry:
    def entry_points(group: str) -> Iterable[EntryPoint]:
        assert group == GROUP
        return points

    return Registry(GROUP, built_in=built_in or {}, entry_points=entry_points)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path; modules written into it are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path  # type: ignore[misc]
    for name in set(sys.modules) - before:
        if name.startswith("mr_"):
            del sys.modules[name]


def test_a_third_partys_part_is_loaded_by_name_and_once(modules: Path) -> None:
    (modules / "mr_third.py").write_text("class Engine:\n    class Inner: ...\n")
    parts = registry(point("mine", "mr_third:Engine", "third"), point("inner", "mr_third:Engine.Inner", "third"))
    assert parts.names() == ("inner", "mine")
    assert "mr_third" not in sys.modules
    engine = parts.load("mine")
    assert engine is parts.load("mine")
    assert engine is sys.modules["mr_third"].Engine
    assert parts.load("inner") is sys.modules["mr_third"].Engine.Inner


def test_an_unknown_name_suggests_the_nearest_and_lists_all() -> None:
    parts = registry(built_in={"mooncake": "a:b", "shm": "c:d"})
    with pytest.raises(
        PluginError, match=r"no transfer engine 'moncake'.*did you mean 'mooncake'\? known: mooncake, shm"
    ):
        parts.load("moncake")
    with pytest.raises(PluginError, match="known: mooncake, shm") as caught:
        parts.load("zzz")
    assert "did you mean" not in caught.value.message
    assert caught.value.context == {"group": GROUP, "plugin": "zzz"}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import mr_is_missing", "ModuleNotFoundError: No module named 'mr_is_missing'"),
        ("raise ImportError('libibverbs.so.1: cannot open shared object file')", "libibverbs.so.1: cannot open"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("x = (", "SyntaxError"),
        ("y = 1", "AttributeError"),
    ],
)
def test_a_broken_plugin_tells_the_true_error_and_hurts_only_its_name(modules: Path, source: str, reason: str) -> None:
    (modules / "mr_broken.py").write_text(source)
    (modules / "mr_fine.py").write_text("Engine = object()")
    parts = registry(point("broken", "mr_broken:Engine", "broken-dist"), point("fine", "mr_fine:Engine", "fine-dist"))
    with pytest.raises(PluginError) as caught:
        parts.load("broken")
    assert reason in caught.value.message
    assert "broken-dist" in caught.value.message
    assert caught.value.__cause__ is not None
    assert parts.load("fine") is sys.modules["mr_fine"].Engine
    assert parts.names() == ("broken", "fine")
    assert [(info.name, info.ok) for info in parts.describe()] == [("broken", False), ("fine", True)]


def test_a_plugin_that_is_mended_loads_the_next_time(modules: Path) -> None:
    parts = registry(point("mine", "mr_late:Engine", "third"))
    with pytest.raises(PluginError):
        parts.load("mine")
    (modules / "mr_late.py").write_text("Engine = object()")
    import importlib

    importlib.invalidate_caches()
    assert parts.load("mine") is not None


@pytest.mark.parametrize(
    ("missing", "remedy"),
    [
        ("torch", "pip install 'moonrelay[torch]'"),
        ("mooncake.engine", "pip install 'moonrelay[mooncake]'"),
        ("diffusers", "pip install 'moonrelay[diffusers]'"),
        ("redis", "pip install 'moonrelay[redis]'"),
    ],
)
def test_a_missing_extra_is_the_remedy(modules: Path, missing: str, remedy: str) -> None:
    (modules / "mr_needs.py").write_text(f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')")
    with pytest.raises(PluginError) as caught:
        registry(built_in={"x": "mr_needs:X"}).load("x")
    assert remedy in caught.value.message


def test_two_third_parties_with_one_name_hurt_only_that_name(modules: Path) -> None:
    (modules / "mr_two.py").write_text("A = 1\nB = 2\nC = 3\n")
    parts = registry(
        point("both", "mr_two:A", "beta"), point("both", "mr_two:B", "alpha"), point("other", "mr_two:C", "beta")
    )
    with pytest.raises(PluginError, match="'both' is claimed by alpha and beta; uninstall one of them"):
        parts.load("both")
    assert parts.load("other") == 3
    both, other = parts.describe()
    assert not both.ok
    assert both.target == ""
    assert other.ok


def test_one_distribution_seen_twice_is_no_conflict(modules: Path) -> None:
    (modules / "mr_twice.py").write_text("A = 1\n")
    assert registry(point("a", "mr_twice:A", "My_Dist"), point("a", "mr_twice:A", "my-dist")).load("a") == 1


def test_a_built_in_resolves_first_and_the_shadowed_one_is_told(modules: Path) -> None:
    (modules / "mr_ours.py").write_text("A = 'ours'\n")
    (modules / "mr_theirs.py").write_text("A = 'theirs'\n")
    parts = registry(point("a", "mr_theirs:A", "third"), built_in={"a": "mr_ours:A"})
    assert parts.load("a") == "ours"
    (info,) = parts.describe()
    assert info.built_in
    assert info.ok
    assert info.shadowed == ("third",)
    assert "mr_theirs" not in sys.modules


def test_our_own_entry_points_are_no_third_party() -> None:
    parts = registry(point("errors", "moonrelay.errors:MoonrelayError", "moonrelay"), built_in={})
    assert parts.names() == ()


def test_built_ins_load_without_distribution_metadata() -> None:
    parts = Registry(GROUP, built_in={"errors": "moonrelay.errors:MoonrelayError"}, entry_points=lambda _group: ())
    assert parts.load("errors") is MoonrelayError


def test_the_table_and_pyproject_say_the_same() -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["entry-points"]
    ours = {group: points for group, points in declared.items() if group.startswith("moonrelay.")}
    assert ours == {group: dict(table) for group, table in BUILT_IN.items()}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, table in BUILT_IN.items() for name in table])
def test_every_built_in_loads(group: str, name: str) -> None:
    part = Registry(group).load(name)
    assert callable(part)
    assert isinstance(part, type) is (group != COMMANDS), "a command is a function, everything else a class"


def test_load_class_checks_what_it_loads() -> None:
    parts = registry(
        built_in={
            "error": "moonrelay.errors:PluginError",
            "abstract": "moonrelay.transfer.base:TransferEngine",
            "function": "moonrelay.errors:from_wire",
        }
    )
    assert parts.load_class("error", MoonrelayError) is PluginError
    from moonrelay.transfer.base import TransferEngine

    for name in ("error", "abstract", "function"):
        with pytest.raises(PluginError, match="no concrete subclass of TransferEngine"):
            parts.load_class(name, TransferEngine)


def test_registries_share_nothing() -> None:
    one = registry(built_in={"errors": "moonrelay.errors:MoonrelayError"})
    other = registry(built_in={})
    one.load("errors")
    with pytest.raises(PluginError):
        other.load("errors")
