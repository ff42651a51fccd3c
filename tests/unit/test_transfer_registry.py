"""Registered memory of the caller: counted, never overlapping."""

from __future__ import annotations

import pytest

from moonrelay.config import TransferConfig
from moonrelay.errors import ClosedError, RegistrationError
from moonrelay.handle import Region
from moonrelay.transfer.memory import MemoryEngine
from moonrelay.transfer.registry import Registrations

BASE = 1 << 40


class CountingEngine(MemoryEngine):
    def __init__(self) -> None:
        super().__init__(TransferConfig(engine="memory"))
        self.registered: list[Region] = []
        self.unregistered: list[Region] = []

    def register(self, address: int, nbytes: int) -> Region:
        region = super().register(address, nbytes)
        self.registered.append(region)
        return region

    def unregister(self, region: Region) -> None:
        self.unregistered.append(region)
        super().unregister(region)


@pytest.fixture
def engine():
    made = CountingEngine()
    made.start()
    yield made
    made.close()


@pytest.fixture
def registrations(engine):
    return Registrations(engine)


def test_the_same_range_is_registered_once_and_counted(engine, registrations):
    first = registrations.add(BASE, 100)
    assert registrations.add(BASE, 100) == first
    assert registrations.add(BASE + 10, 20) == first  # a view of it
    assert len(engine.registered) == len(registrations) == 1
    registrations.remove(first)
    registrations.remove(first)
    assert not engine.unregistered
    registrations.remove(first)
    assert engine.unregistered == [first]
    registrations.remove(first)
    assert engine.unregistered == [first]
    assert registrations.find(BASE, 1) is None


@pytest.mark.parametrize(
    ("address", "nbytes"), [(BASE - 1, 2), (BASE + 99, 2), (BASE - 5, 200), (BASE - 5, 105), (BASE, 101)]
)
def test_a_partial_overlap_is_refused_and_changes_nothing(engine, registrations, address, nbytes):
    region = registrations.add(BASE, 100)
    with pytest.raises(RegistrationError, match="overlap"):
        registrations.add(address, nbytes)
    assert engine.registered == [region]
    assert registrations.find(BASE, 100) == region


def test_neighbours_are_no_overlap(registrations):
    regions = [registrations.add(BASE + 100 * n, 100) for n in (1, 0, 2)]
    assert len(registrations) == 3
    assert registrations.find(BASE + 150, 50) == regions[0]
    assert registrations.find(BASE + 150, 51) is None
    assert registrations.find(BASE - 1, 1) is None
    assert registrations.find(BASE + 150, 0) is None


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_registered(engine, registrations, nbytes):
    with pytest.raises(RegistrationError, match="nothing"):
        registrations.add(BASE, nbytes)
    assert not engine.registered


def test_what_the_engine_refuses_is_not_kept(engine, registrations):
    engine.register(BASE, 100)  # behind our back
    with pytest.raises(RegistrationError):
        registrations.add(BASE + 50, 10)
    assert len(registrations) == 0


def test_close_unregisters_everything_once(engine, registrations):
    regions = {registrations.add(BASE + 1000 * n, 10).base for n in range(3)}
    registrations.close()
    registrations.close()
    assert {region.base for region in engine.unregistered} == regions
    assert len(engine.unregistered) == 3
    with pytest.raises(ClosedError):
        registrations.add(BASE, 1)
    registrations.remove(Region(key="x", base=BASE, nbytes=10))
