"""The engine suite bites: each planted fault is caught by the test that is there for it, and whole engines pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moonrelay.errors import ConfigError, PluginError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Outcome
from moonrelay_conformance.run import run
from moonrelay_conformance.suites import engine_bench, part_footprint
from moonrelay_conformance.suites.base import MARKER
from moonrelay_conformance.suites.engine import EngineConformance
from moonrelay_conformance.targets.base import Target
from moonrelay_conformance.targets.engines import target_for
from moonrelay_conformance.targets.parts import EngineTarget
from moonrelay_conformance.targets.recipe import made_from, recipe

sys.path.insert(0, str(Path(__file__).parent))
from planted import engines

TESTS = sorted(name for name in dir(EngineConformance) if name.startswith("test_"))
ACROSS = sorted(name for name in engines.CAUGHT_BY if issubclass(getattr(engines, name), engines.PlantedShm))
WITHIN = sorted(set(engines.CAUGHT_BY) - set(ACROSS))


def failures(target: Target, test: str) -> list[str]:
    """Run one test against a target; return why it failed, once per parameter that did."""
    report = run(target, select=[test])
    assert report.results, f"{test} did not run"
    return [result.reason for result in report.results if result.outcome is Outcome.FAILED]


@pytest.mark.parametrize("name", WITHIN)
def test_a_planted_fault_is_caught_by_its_test(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(engine_bench, "END_S", 2.0)
    monkeypatch.setattr(part_footprint, "SETTLE_S", 2.0)
    assert failures(getattr(engines, name)(), engines.CAUGHT_BY[name]), f"not caught by {engines.CAUGHT_BY[name]}"


@pytest.mark.processes
@pytest.mark.parametrize("name", ACROSS)
def test_a_planted_fault_between_processes_is_caught_by_its_test(name: str) -> None:
    assert failures(getattr(engines, name)(), engines.CAUGHT_BY[name]), f"not caught by {engines.CAUGHT_BY[name]}"


def test_every_planted_engine_is_in_the_table_with_a_test_that_is_there() -> None:
    made = {
        name
        for name, one in vars(engines).items()
        if isinstance(one, type) and issubclass(one, EngineTarget) and hasattr(one, "engine")
    }
    assert made == set(engines.CAUGHT_BY)
    assert set(engines.CAUGHT_BY.values()) <= set(TESTS)


def test_every_test_promises_something() -> None:
    for name in TESTS:
        marks = [mark for mark in getattr(EngineConformance, name).pytestmark if mark.name == MARKER]
        assert len(marks) == 1, name
        assert marks[0].args[0].title


@pytest.mark.parametrize(
    "name",
    [
        "memory",
        pytest.param("shm", marks=[pytest.mark.processes, pytest.mark.slow]),
        pytest.param("mooncake", marks=[pytest.mark.processes, pytest.mark.mooncake, pytest.mark.slow]),
    ],
)
def test_the_engines_of_the_core_pass(name: str) -> None:
    report = run(target_for(name))
    assert [f"{one.test}: {one.reason}" for one in report.results if one.outcome is Outcome.FAILED] == []
    assert report.passed
    lacking = {one.reason for one in report.results if one.outcome is Outcome.UNSUPPORTED}
    assert bool(lacking) is bool(
        target_for(name).lacking(Capability.PROCESSES, Capability.FOREIGN_MEMORY, Capability.LIVES)
    )


def test_the_engine_that_fails_on_purpose_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="on purpose"):
        target_for("faulty")


def test_an_engine_that_nobody_has_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"memroy.*did you mean 'memory'"):
        target_for("memroy")


def test_a_target_is_made_anew_from_its_recipe() -> None:
    assert made_from(recipe(target_for("shm"))).name == "shm"
    assert isinstance(made_from(recipe(engines.ReadsShort())), engines.ReadsShort)

    class Local(engines.PlantedEngine):
        pass

    with pytest.raises(ConfigError, match="top of a module"):
        recipe(Local())
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        made_from(["no_such_module:Target"])
