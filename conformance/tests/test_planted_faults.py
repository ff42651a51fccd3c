"""The adapter suite bites: each planted fault is caught, by the test that is there for it and with a reason that tells.

What is broken, and who must notice, stands in ``planted``; for the queue suite see ``test_queue_suite.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from planted import adapter_caching, adapter_faults, adapter_leaks, adapter_leases, adapters
from planted.adapter_base import Catch, LapsesOnce, Planted

from moonrelay_conformance import guard
from moonrelay_conformance.results import Outcome, Result
from moonrelay_conformance.run import run
from moonrelay_conformance.sides.process import SidePool
from moonrelay_conformance.suites.adapter import AdapterConformance, caching, faults, leaks, peers, stage

MODULES = (adapters, adapter_leases, adapter_leaks, adapter_faults, adapter_caching)


def faults_of(module: ModuleType) -> list[type[Planted]]:
    """Return the faults that a module plants, in its order."""
    made = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Planted)]
    return [one for one in made if one.__module__ == module.__name__ and hasattr(one, "caught")]


FAULTS = [fault for module in MODULES for fault in faults_of(module)]


#: Over which route the checks of a module are tried without a fault; over the others they are in the session
#: ``conformance``, which runs them all.
SOUND = ((adapters, "p2p"), (adapter_leases, "p2p"), (adapter_leaks, "p2p"), (adapter_faults, "store"))
#: The connector has no pipeline of its own; those of hosts are run in the hosts' tests.
PIPELINE = "test_divided_pipeline_equals_undivided"


class Unbroken(Planted):
    """The same adapter without a fault.

    Args:
        route: The route over which it is tried.
    """

    def __init__(self, route: str) -> None:
        super().__init__()
        self.over = (route,)  # type: ignore[misc]


@pytest.fixture(scope="module")
def pool() -> Iterator[SidePool]:
    """Processes that all runs share."""
    with SidePool() as made:
        yield made


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a planted fault keeps it keeps for ever, and what it waits for never comes: see it soon."""
    monkeypatch.setattr(stage, "GRACE_S", 1.0)
    monkeypatch.setattr(leaks, "SETTLE_S", 1.0)
    monkeypatch.setattr(peers, "SETTLE_S", 3.0)
    monkeypatch.setattr(peers, "LAPSE_S", 4.0)
    monkeypatch.setattr(peers, "GONE_S", 3.0)
    # Longer, so that a reader is surely reading when it is killed: what it has told its producer by then stands.
    monkeypatch.setattr(peers, "READING_S", 0.3)
    monkeypatch.setattr(faults, "SLOW_S", 3.0)
    monkeypatch.setattr(caching, "GONE_S", 1.0)
    monkeypatch.setitem(stage.Stage.settle.__kwdefaults__, "within_s", 1.0)


def caught_by(results: tuple[Result, ...], catch: Catch) -> list[Result]:
    """Return the results of the test that must catch a fault."""
    return [
        result
        for result in results
        if result.test.partition("[")[0] == catch.test
        and catch.id in ("", result.id)
        and catch.param in result.test.partition("[")[2]
    ]


@pytest.mark.processes
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", FAULTS, ids=[one.__name__ for one in FAULTS])
def test_a_planted_fault_is_caught_by_its_test(fault: type[Planted], pool: SidePool) -> None:
    report = run(fault(), select=fault.caught.select, pool=pool)
    ran = caught_by(report.results, fault.caught)
    assert ran, f"{fault.caught.test} is no test of the suite, or has no such case"
    failed = [result for result in ran if result.outcome is Outcome.FAILED]
    assert failed, f"{fault.__name__} is not caught: {ran}"
    assert any(fault.caught.says in result.reason for result in failed), [result.reason for result in failed]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "route"), SOUND, ids=[f"{module.__name__.rpartition('.')[2]}-{route}" for module, route in SOUND]
)
def test_without_a_fault_the_same_checks_pass(module: ModuleType, route: str, pool: SidePool) -> None:
    faults = [fault for fault in faults_of(module) if route in fault.over and fault.caught.test != PIPELINE]
    chosen = dict.fromkeys(pattern for fault in faults for pattern in fault.caught.select)
    report = run(Unbroken(route), select=tuple(chosen), pool=pool)
    assert [result for result in report.results if result.outcome is Outcome.FAILED] == []
    for fault in faults:
        ran = caught_by(report.results, fault.caught)
        assert ran, fault.__name__
        assert all(result.outcome.good for result in ran), fault.__name__


@pytest.mark.processes
def test_without_a_fault_a_hosts_caches_pass(pool: SidePool) -> None:
    chosen = dict.fromkeys(fault.caught.test for fault in faults_of(adapter_caching))
    report = run(adapter_caching.PlantedCaches(), select=tuple(chosen), pool=pool)
    assert [result for result in report.results if result.outcome is Outcome.FAILED] == []
    assert all(caught_by(report.results, Catch(test, ""))[0].outcome is Outcome.HELD for test in chosen)


@pytest.mark.processes
def test_a_claim_that_lapsed_is_no_payload_lost(pool: SidePool) -> None:
    report = run(LapsesOnce(), select=("test_a_full_pool_loses_nothing_and_recovers",), pool=pool)
    assert [result.reason for result in report.results if result.outcome is Outcome.FAILED] == []


def test_every_test_of_the_suite_has_a_planted_fault() -> None:
    caught = {fault.caught.test for fault in FAULTS}
    tests = set(guard.tests_of(AdapterConformance))
    assert caught <= tests
    assert tests - caught == set()


def test_the_faults_are_told_apart() -> None:
    names = [fault.__name__ for fault in FAULTS]
    assert len(set(names)) == len(names) >= 20
    assert all(fault.__doc__ for fault in FAULTS)
