"""The relay suite bites: each planted fault is caught by the test that is there for it, and whole relays pass."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moonrelay.errors import PluginError
from moonrelay_conformance.results import Outcome
from moonrelay_conformance.run import run
from moonrelay_conformance.suites import part_footprint, relay_bench
from moonrelay_conformance.suites.base import MARKER
from moonrelay_conformance.suites.relay import RelayConformance
from moonrelay_conformance.targets.base import Target
from moonrelay_conformance.targets.parts import RelayTarget
from moonrelay_conformance.targets.relays import FolderGround, InstalledRelay, target_for

sys.path.insert(0, str(Path(__file__).parent))
from planted import relays

TESTS = sorted(name for name in dir(RelayConformance) if name.startswith("test_"))
ACROSS = sorted(name for name in relays.CAUGHT_BY if issubclass(getattr(relays, name), relays.PlantedFolder))
WITHIN = sorted(set(relays.CAUGHT_BY) - set(ACROSS))


def failures(target: Target, test: str) -> list[str]:
    """Run one test against a target; return why it failed, once per parameter that did."""
    report = run(target, select=[test])
    assert report.results, f"{test} did not run"
    return [result.reason for result in report.results if result.outcome is Outcome.FAILED]


@pytest.mark.parametrize("name", WITHIN)
def test_a_planted_fault_is_caught_by_its_test(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(relay_bench, "STORED_S", 0.5)
    monkeypatch.setattr(part_footprint, "SETTLE_S", 2.0)
    assert failures(getattr(relays, name)(), relays.CAUGHT_BY[name]), f"not caught by {relays.CAUGHT_BY[name]}"


@pytest.mark.processes
@pytest.mark.parametrize("name", ACROSS)
def test_a_planted_fault_between_processes_is_caught_by_its_test(name: str) -> None:
    assert failures(getattr(relays, name)(), relays.CAUGHT_BY[name]), f"not caught by {relays.CAUGHT_BY[name]}"


def test_every_planted_relay_is_in_the_table_with_a_test_that_is_there() -> None:
    made = {
        name
        for name, one in vars(relays).items()
        if isinstance(one, type) and issubclass(one, RelayTarget) and hasattr(one, "relay")
    }
    assert made == set(relays.CAUGHT_BY)
    assert set(relays.CAUGHT_BY.values()) <= set(TESTS)


def test_every_test_promises_something() -> None:
    for name in TESTS:
        marks = [mark for mark in getattr(RelayConformance, name).pytestmark if mark.name == MARKER]
        assert len(marks) == 1, name
        assert marks[0].args[0].title


@pytest.mark.parametrize(
    "name",
    [
        "memory",
        pytest.param("local", marks=[pytest.mark.processes, pytest.mark.slow]),
        pytest.param("mooncake", marks=[pytest.mark.processes, pytest.mark.mooncake, pytest.mark.slow]),
    ],
)
def test_the_relays_of_the_core_pass(name: str) -> None:
    report = run(target_for(name))
    assert [f"{one.test}: {one.reason}" for one in report.results if one.outcome is Outcome.FAILED] == []
    assert report.passed


def test_a_relay_that_nobody_has_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"locl.*did you mean 'local'"):
        target_for("locl")


def test_a_folder_is_seen_around_its_relay(tmp_path: Path) -> None:
    with FolderGround("local", tmp_path / "store", frozenset({"lock"})) as ground:
        assert ground.stored() == ()
        relay = target_for("local").make(ground.url, capacity_bytes=1000, namespace="x")
        relay.start()
        assert ground.stored() == ()
        (tmp_path / "store" / "tmp" / "half").write_bytes(b"x")
        assert ground.stored() == ("tmp/half",)
        relay.close()


def test_the_store_of_a_third_partys_relay_is_a_folder(tmp_path: Path) -> None:
    with InstalledRelay("acme").ground(tmp_path, capacity_bytes=1000) as ground:
        assert ground.url == f"acme://{tmp_path}"
