"""Names of targets: what each form means, and what a wrong one is told."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError, PluginError
from moonrelay_conformance import registry
from moonrelay_conformance.registry import Targets
from moonrelay_conformance.targets.base import Target

SOURCE = (Path(__file__).parent / "mini.py").read_text()
ADDED = """
class MiniAdapterTarget(MiniTarget):
    kind = "adapter"
    name = "shm"

class Adapter:
    def conformance_target(self):
        return MiniAdapterTarget()

class Silent:
    pass

class Liar:
    def conformance_target(self):
        return MiniTarget()

class Wrong:
    def conformance_target(self):
        return 3

class Engine:
    @classmethod
    def conformance_target(cls):
        made = MiniTarget()
        made.kind = "engine"
        return made
"""


class _Distribution:
    name = "third-party"


@pytest.fixture
def targets(monkeypatch: pytest.MonkeyPatch) -> Targets:
    """What can be tested where a third party has installed adapters and an engine."""
    module = types.ModuleType("mr_third_party")
    monkeypatch.setitem(sys.modules, "mr_third_party", module)
    exec(compile(SOURCE + ADDED, "mr_third_party.py", "exec"), module.__dict__)  # noqa: S102
    installed = {
        "moonrelay.adapters": {"shm": "Adapter", "silent": "Silent", "liar": "Liar", "wrong": "Wrong", "gone": "Gone"},
        "moonrelay.transfers": {"own": "Engine"},
    }

    def entry_points(group: str) -> list[EntryPoint]:
        found = []
        for name, attribute in installed.get(group, {}).items():
            point = EntryPoint(name=name, value=f"mr_third_party:{attribute}", group=group)
            object.__setattr__(point, "dist", _Distribution())
            found.append(point)
        return found

    return Targets(entry_points)


def test_names_are_qualified_and_complete(targets: Targets) -> None:
    names = targets.names()
    assert {"adapter:shm", "engine:shm", "engine:own", "relay:local", "queue:sqlite"} <= set(names)
    assert names[0].startswith("adapter:")


def test_a_qualified_name_is_that_kind(targets: Targets) -> None:
    assert targets.resolve("engine:shm").kind == "engine"
    assert targets.resolve("adapter:shm").kind == "adapter"


def test_a_bare_name_of_an_adapter_means_the_adapter(targets: Targets) -> None:
    assert targets.resolve("shm").kind == "adapter"


def test_a_bare_name_of_one_kind_is_that_kind(targets: Targets) -> None:
    assert targets.resolve("sqlite").kind == "queue"


def test_a_bare_name_of_several_kinds_is_refused(targets: Targets) -> None:
    with pytest.raises(ConfigError, match="ambiguous; say engine:memory or relay:memory or queue:memory"):
        targets.resolve("memory")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sqlit", "did you mean 'sqlite'"),
        ("queue:sqlit", "did you mean 'queue:sqlite'"),
        ("quue:sqlite", "did you mean 'queue:sqlite'"),
        ("adapter:sqlite", "is no target"),
        ("no.such.module:Class", "No module named 'no'"),
        ("mr_third_party:NoSuch", "has no attribute 'NoSuch'"),
    ],
)
def test_an_unknown_name_is_told_what_is_known(targets: Targets, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        targets.resolve(name)


def test_a_class_by_its_module_is_a_target(targets: Targets) -> None:
    assert targets.resolve("mr_third_party:BrokenTarget").name == "broken"


def test_what_is_no_target_is_refused(targets: Targets) -> None:
    with pytest.raises(PluginError, match="which is no Target"):
        targets.resolve("mr_third_party:CASES")


def test_an_abstract_target_is_told_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="abstract; it lacks capabilities"):
        registry.resolve("moonrelay_conformance.targets.base:Target")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("silent", "offers no conformance_target"),
        ("liar", "of the kind 'queue'"),
        ("wrong", "gives 3, which is no Target"),
        ("gone", "cannot be loaded"),
    ],
)
def test_an_adapter_without_a_fit_target_is_refused(targets: Targets, name: str, said: str) -> None:
    with pytest.raises(PluginError, match=said):
        targets.resolve(name)


FOREIGN = """
from mr_third_party import MiniTarget
class Unmade(MiniTarget):
    def __init__(self): raise OSError("no host")
class Mute(MiniTarget):
    def capabilities(self): raise RuntimeError("not today")
class Leaving(MiniTarget):
    def __init__(self): raise SystemExit(0)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mr_foreign:Unmade", "OSError: no host"),
        ("mr_foreign:Mute", "RuntimeError: not today"),
        ("mr_foreign:Leaving", "SystemExit: 0"),
        ("mr_leaves:Target", "SystemExit: 0"),
    ],
)
def test_what_foreign_code_raises_is_one_line(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    """A module that ends the process when it is imported would otherwise end the command, with 0."""
    (tmp_path / "mr_foreign.py").write_text(FOREIGN)
    (tmp_path / "mr_leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mr_foreign", raising=False)
    with pytest.raises((ConfigError, PluginError), match=said):
        targets.resolve(name)


def test_an_adapter_that_ends_the_process_when_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mr_leaves.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def entry_points(group: str) -> list[EntryPoint]:
        point = EntryPoint(name="leaving", value="mr_leaves:Adapter", group=group)
        object.__setattr__(point, "dist", _Distribution())
        return [point]

    with pytest.raises(PluginError, match="cannot be loaded: SystemExit: 0"):
        Targets(entry_points).resolve("adapter:leaving")


def test_a_part_may_offer_a_target_of_its_own(targets: Targets) -> None:
    assert targets.resolve("engine:own").name == "mini"


@pytest.mark.parametrize("name", ["adapter:diffusers", "engine:shm", "relay:local", "queue:memory"])
def test_what_we_ship_has_a_target(name: str) -> None:
    made = registry.resolve(name)
    assert isinstance(made, Target)
    assert made.info().label == name


def test_everything_we_ship_is_listed() -> None:
    assert {"adapter:diffusers", "engine:mooncake", "relay:mooncake", "queue:sqlite"} <= set(registry.names())
