"""The suites of caches and of step checkpoints bite: each planted fault is caught by its test, and whole ones pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moonrelay.errors import ConfigError
from moonrelay_conformance.registry import names, resolve
from moonrelay_conformance.results import Outcome
from moonrelay_conformance.run import run
from moonrelay_conformance.suites import cache_bench, cache_damage, checkpoint_bench, checkpoint_life
from moonrelay_conformance.suites.base import MARKER
from moonrelay_conformance.suites.cache import CacheConformance
from moonrelay_conformance.suites.checkpoint import CheckpointConformance
from moonrelay_conformance.targets.base import Target

sys.path.insert(0, str(Path(__file__).parent))
from planted import caches, checkpoints

_MODULES: dict[str, tuple[Any, type, type]] = {
    "cache": (caches, CacheConformance, caches.PlantedCache),
    "checkpoint": (checkpoints, CheckpointConformance, checkpoints.PlantedCheckpoints),
}


def _cases() -> list[Any]:
    found = []
    for kind, (module, _, _) in _MODULES.items():
        for name in module.CAUGHT_BY:
            across = getattr(module, name).backend != "memory"
            found.append(pytest.param(kind, name, marks=[pytest.mark.processes] if across else [], id=f"{kind}-{name}"))
    return found


def failures(target: Target, test: str) -> list[str]:
    """Run one test against a target; return why it failed."""
    report = run(target, select=[test])
    assert report.results, f"{test} did not run"
    return [f"{one.test}: {one.reason}" for one in report.results if one.outcome is Outcome.FAILED]


# A fault that raises in a thread of its own is told of later, in whatever test runs then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("kind", "name"), _cases())
def test_a_planted_fault_is_caught_by_its_test(monkeypatch: pytest.MonkeyPatch, kind: str, name: str) -> None:
    monkeypatch.setattr(cache_bench, "GONE_S", 0.5)
    monkeypatch.setattr(checkpoint_bench, "GONE_S", 0.5)
    monkeypatch.setattr(cache_damage, "_PATIENCE_S", 5.0)
    monkeypatch.setattr(checkpoint_life, "_SHUT_S", 5.0)
    module = _MODULES[kind][0]
    found = failures(getattr(module, name)(), module.CAUGHT_BY[name])
    assert found, f"not caught by {module.CAUGHT_BY[name]}"
    assert found[0].startswith(module.CAUGHT_BY[name])


@pytest.mark.parametrize("kind", _MODULES)
def test_every_planted_fault_is_in_the_table_with_a_test_that_is_there(kind: str) -> None:
    module, suite, base = _MODULES[kind]
    made = {
        name
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, base) and not name.startswith(("_", "Planted"))
    }
    assert made == set(module.CAUGHT_BY)
    assert all(hasattr(suite, test) for test in module.CAUGHT_BY.values())


@pytest.mark.parametrize("kind", _MODULES)
def test_every_test_promises_something(kind: str) -> None:
    suite = _MODULES[kind][1]
    for name in (one for one in dir(suite) if one.startswith("test_")):
        marks = [mark for mark in getattr(suite, name).pytestmark if mark.name == MARKER]
        assert len(marks) == 1, name
        assert marks[0].args[0].title


@pytest.mark.parametrize("kind", _MODULES)
@pytest.mark.parametrize(
    "name",
    [
        "memory",
        pytest.param("local", marks=[pytest.mark.processes, pytest.mark.slow]),
        pytest.param("mooncake", marks=[pytest.mark.processes, pytest.mark.mooncake, pytest.mark.slow]),
    ],
)
def test_those_of_the_core_pass(kind: str, name: str) -> None:
    report = run(resolve(f"{kind}:{name}"))
    assert [f"{one.test}: {one.reason}" for one in report.results if one.outcome is Outcome.FAILED] == []
    assert report.passed


def test_they_have_the_names_of_the_relays_under_them_and_no_bare_ones() -> None:
    assert {"cache:local", "cache:mooncake", "checkpoint:local", "checkpoint:mooncake"} <= set(names())
    assert resolve("cache:local").info().label == "cache:local"
    assert resolve("local").kind == "relay"
    with pytest.raises(ConfigError, match="did you mean 'cache:local'"):
        resolve("cache:locl")
