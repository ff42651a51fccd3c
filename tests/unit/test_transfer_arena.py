"""The pool: slots never overlap, come back when their last user lets go, and a full pool says so."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.config import TransferConfig
from moonrelay.errors import CapacityError, ClosedError
from moonrelay.handle import Region
from moonrelay.transfer.arena import ALIGNMENT, Arena, Slot
from moonrelay.transfer.memory import MemoryEngine

POOL = 64 * ALIGNMENT


class WatchedEngine(MemoryEngine):
    """Remembers what is asked of it."""

    def __init__(self) -> None:
        super().__init__(TransferConfig(engine="memory"))
        self.allocated: list[Region] = []
        self.released: list[Region] = []
        self.committed: list[tuple[int, int]] = []
        self.full = False

    def allocate(self, nbytes: int) -> Region:
        region = super().allocate(nbytes)
        self.allocated.append(region)
        return region

    def release(self, region: Region) -> None:
        self.released.append(region)
        super().release(region)

    def commit(self, region: Region, offset: int, nbytes: int) -> None:
        if self.full:
            message = "no room"
            raise CapacityError(message, wanted=nbytes, fits=True)
        self.committed.append((offset, nbytes))


@pytest.fixture
def engine():
    made = WatchedEngine()
    made.start()
    yield made
    made.close()


@pytest.fixture
def arena(engine):
    return Arena(engine, POOL, SystemClock())


def test_nothing_is_mapped_before_the_first_slot(engine, arena):
    assert not engine.allocated
    arena.allocate(0).release()
    assert not engine.allocated
    arena.allocate(1).release()
    assert [region.nbytes for region in engine.allocated] == [POOL]


def test_slots_are_aligned_and_counted(arena):
    slots = [arena.allocate(n) for n in (1, 256, 257)]
    assert all(slot.address % ALIGNMENT == 0 for slot in slots)
    assert [slot.nbytes for slot in slots] == [1, 256, 257]
    assert arena.used_bytes == 4 * ALIGNMENT
    assert arena.live_slots == 3
    slots[1].retain()
    for slot in slots:
        slot.release()
    assert arena.live_slots == 1
    slots[1].release()
    assert arena.used_bytes == 0
    assert arena.free_bytes == arena.capacity_bytes == POOL


def test_best_fit_takes_the_smallest_hole_and_joins_neighbours(arena):
    a, b, c, d = (arena.allocate(n * ALIGNMENT) for n in (4, 1, 2, 1))
    tail = arena.allocate(POOL - 8 * ALIGNMENT)
    a_address, c_address = a.address, c.address
    a.release()
    c.release()
    assert arena.allocate(2 * ALIGNMENT).address == c_address
    assert arena.allocate(3 * ALIGNMENT).address == a_address
    b.release()
    whole = arena.allocate(2 * ALIGNMENT)  # the last quarter of a and all of b
    assert whole.address == a_address + 3 * ALIGNMENT
    assert d.address
    assert tail.address


def test_a_full_pool_says_that_it_would_fit_later(arena):
    kept = arena.allocate(POOL - ALIGNMENT)
    with pytest.raises(CapacityError) as caught:
        arena.allocate(2 * ALIGNMENT)
    assert caught.value.context == {
        "wanted": 2 * ALIGNMENT,
        "free": ALIGNMENT,
        "largest": ALIGNMENT,
        "pool": POOL,
        "fits": True,
    }
    kept.release()
    assert arena.allocate(2 * ALIGNMENT)


def test_what_is_larger_than_the_pool_never_fits(arena):
    with pytest.raises(CapacityError) as caught:
        arena.allocate(POOL + 1)
    assert caught.value.context["fits"] is False
    assert str(POOL + 1) in caught.value.message
    with pytest.raises(CapacityError):
        arena.allocate(-1)


def test_a_pool_takes_its_whole_size_also_when_that_is_odd(engine):
    assert Arena(engine, 1000, SystemClock()).allocate(1000).nbytes == 1000


def test_allocate_waits_for_room_until_the_deadline(engine):
    clock = ManualClock()
    arena = Arena(engine, POOL, clock)
    kept = arena.allocate(POOL)
    got: list[Slot | CapacityError] = []

    def wait() -> None:
        try:
            got.append(arena.allocate(POOL, Deadline(5.0, clock)))
        except CapacityError as exc:
            got.append(exc)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not clock._waiting:
        pass
    assert not got
    kept.release()
    waiter.join(10)
    assert isinstance(got[0], Slot)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while not clock._waiting:
        pass
    clock.advance(6.0)
    waiter.join(10)
    assert isinstance(got[1], CapacityError)


def test_zero_bytes_take_no_room(arena):
    full = arena.allocate(POOL)
    empty = arena.allocate(0)
    assert empty.nbytes == 0
    assert arena.live_slots == 2
    assert empty.tensor().numel() == 0
    empty.release()
    assert arena.live_slots == 1
    full.release()


def test_find_knows_what_lies_inside_a_live_slot(arena):
    slot = arena.allocate(1000)
    other = arena.allocate(100)
    assert arena.find(slot.address, 1000) is slot
    assert arena.find(slot.address + 999, 1) is slot
    assert arena.find(other.address, 100) is other
    assert arena.find(slot.address, 1001) is None
    assert arena.find(slot.address + 1000, 1) is None
    assert arena.find(slot.address - 1, 1) is None
    assert arena.find(slot.address, 0) is None
    slot.release()
    assert arena.find(slot.address, 1000) is None


def test_a_tensor_keeps_its_slot_until_the_last_view_dies(arena):
    slot = arena.allocate(64)
    tensor = slot.tensor()
    slot.release()
    tensor.fill_(3)
    view = tensor[8:24].view(torch.int32).reshape(2, 2)
    assert view.data_ptr() == slot.address + 8
    del tensor
    assert arena.live_slots == 1
    assert view.tolist() == [[0x03030303] * 2] * 2
    del view
    assert arena.live_slots == 0


def test_a_slot_that_is_free_gives_no_tensor(arena):
    slot = arena.allocate(64)
    slot.release()
    with pytest.raises(ClosedError):
        slot.tensor()
    with pytest.raises(ClosedError):
        slot.retain()


def test_one_release_too_many_frees_nobody_elses_memory(arena, caplog):
    slot = arena.allocate(POOL)
    slot.release()
    other = arena.allocate(POOL)
    slot.release()
    assert arena.live_slots == 1
    assert "more often" in caplog.text
    other.release()
    assert arena.live_slots == 0


def test_quarantine_keeps_memory_from_reuse_and_ends_once(arena):
    slot = arena.allocate(POOL)
    lift = slot.quarantine()
    second = slot.quarantine()
    slot.release()
    assert arena.quarantined_bytes == POOL
    lift()
    lift()
    assert arena.live_slots == 1
    assert arena.quarantined_bytes == POOL
    with pytest.raises(CapacityError):
        arena.allocate(1)
    second()
    assert arena.quarantined_bytes == 0
    assert arena.live_slots == 0


def test_with_releases_also_after_an_error(arena):
    with pytest.raises(ZeroDivisionError), arena.allocate(10):
        raise ZeroDivisionError
    assert arena.live_slots == 0


def test_pages_are_committed_once_before_their_first_use(engine, arena):
    first = arena.allocate(ALIGNMENT)
    second = arena.allocate(2 * ALIGNMENT)
    first.release()
    second.release()
    arena.allocate(2 * ALIGNMENT).release()
    assert engine.committed == [(0, ALIGNMENT), (ALIGNMENT, 2 * ALIGNMENT)]


def test_a_system_without_memory_costs_no_room_in_the_pool(engine, arena):
    engine.full = True
    with pytest.raises(CapacityError):
        arena.allocate(POOL)
    assert arena.used_bytes == 0
    engine.full = False
    arena.allocate(POOL).release()


def test_close_releases_the_region_when_the_last_tensor_dies(engine, arena):
    slot = arena.allocate(64)
    tensor = slot.tensor()
    slot.release()
    arena.close()
    arena.close()
    with pytest.raises(ClosedError):
        arena.allocate(1)
    engine.close()
    assert not engine.released
    tensor.fill_(9)  # still mapped
    assert int(tensor.sum()) == 9 * 64
    del tensor
    assert engine.released == engine.allocated


def test_close_of_an_unused_pool_releases_nothing(engine, arena):
    arena.close()
    assert not engine.released


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.me = self


@pytest.mark.parametrize("where", ["allocate", "find", "used_bytes", "retain"])
def test_a_collection_inside_the_pools_lock_does_not_deadlock(engine, arena, where, monkeypatch):
    slot = arena.allocate(64)
    Cycle(slot.tensor())
    slot.release()
    other = arena.allocate(64)
    settle = arena._settle

    def collect_inside() -> None:
        settle()
        gc.collect()  # runs the tensor's finalizer while this thread holds the lock

    monkeypatch.setattr(arena, "_settle", collect_inside)
    calls = {
        "allocate": lambda: arena.allocate(1).release(),
        "find": lambda: arena.find(1, 1),
        "used_bytes": lambda: arena.used_bytes,
        "retain": other.retain,
    }
    worker = threading.Thread(target=calls[where], daemon=True)
    worker.start()
    worker.join(20)
    assert not worker.is_alive()
    # Nobody asked since: the finalizer's release was settled when the lock was given back.
    assert slot.references == 0


def test_many_threads_leave_the_pool_as_it_was(arena):
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for turn in range(200):
                try:
                    slot = arena.allocate((seed * 31 + turn * 17) % 3000)
                except CapacityError:
                    continue
                if slot.nbytes:
                    tensor = slot.tensor()
                    tensor.fill_(seed)
                    assert bool((tensor == seed).all())
                slot.release()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert arena.live_slots == 0
    assert arena.free_bytes == POOL


class ArenaMachine(RuleBasedStateMachine):
    """Against the plain rule: live slots never overlap, and what is not in one is free."""

    slots = Bundle("slots")
    tensors = Bundle("tensors")
    lifts = Bundle("lifts")

    def __init__(self) -> None:
        super().__init__()
        self.engine = WatchedEngine()
        self.engine.start()
        self.arena = Arena(self.engine, POOL, SystemClock())
        self.counts: dict[Slot, int] = {}
        self.owned: list[Slot] = []
        self.values: dict[int, int] = {}
        self.lifted: dict[int, tuple[Slot, Callable[[], None]]] = {}
        self.held: dict[int, tuple[Slot, torch.Tensor]] = {}
        self.serial = 0

    def drop(self, slot: Slot) -> None:
        self.counts[slot] -= 1
        if not self.counts[slot]:
            del self.counts[slot]

    @rule(target=slots, nbytes=st.integers(0, POOL + 10))
    def allocate(self, nbytes):
        used = sum(slot.size for slot in self.counts)
        try:
            slot = self.arena.allocate(nbytes)
        except CapacityError as exc:
            facts = exc.context
            slot = None
        if slot is None:
            assert nbytes
            assert facts["fits"] == (nbytes <= POOL)
            assert facts["largest"] < nbytes
            assert facts["free"] == POOL - used
            return None
        self.counts[slot] = 1
        self.owned.append(slot)
        return slot

    @rule(slot=consumes(slots))
    def release(self, slot):
        if slot is not None:
            slot.release()
            self.owned.remove(slot)
            self.drop(slot)

    @rule(target=tensors, slot=slots)
    def tensor(self, slot):
        if slot is None or slot.nbytes == 0 or slot not in self.counts:
            return None
        self.serial += 1
        tensor = slot.tensor()
        value = self.serial % 251
        tensor.fill_(value)
        for other, (owner, _) in self.held.items():
            if owner is slot:
                self.values[other] = value  # the same memory
        self.values[self.serial] = value
        self.held[self.serial] = (slot, tensor)
        self.counts[slot] += 1
        return self.serial

    @rule(serial=consumes(tensors))
    def tensor_dies(self, serial):
        if serial is not None:
            slot, _ = self.held.pop(serial)
            self.drop(slot)

    @rule(target=lifts, slot=slots)
    def quarantine(self, slot):
        if slot is None or slot not in self.counts:
            return None
        self.counts[slot] += 1
        self.serial += 1
        self.lifted[self.serial] = (slot, slot.quarantine())
        return self.serial

    @rule(serial=consumes(lifts))
    def lift(self, serial):
        if serial is not None:
            slot, call = self.lifted.pop(serial)
            call()
            call()
            self.drop(slot)

    @invariant()
    def live_slots_never_overlap(self):
        ranges = sorted((slot.address, slot.address + slot.size) for slot in self.counts if slot.size)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
        assert self.arena.used_bytes == sum(slot.size for slot in self.counts)
        assert self.arena.live_slots == len(self.counts)
        assert self.arena.quarantined_bytes == sum(slot.size for slot in {slot for slot, _ in self.lifted.values()})
        for serial, (_, tensor) in self.held.items():
            assert bool((tensor == self.values[serial]).all())
        for slot in self.counts:
            assert slot.nbytes == 0 or self.arena.find(slot.address, slot.nbytes) is slot

    def teardown(self):
        self.held.clear()
        for slot in self.owned:
            slot.release()
        for _, call in self.lifted.values():
            call()
        assert self.arena.live_slots == self.arena.quarantined_bytes == 0
        self.arena.allocate(POOL).release()  # in one piece again
        self.arena.close()
        assert self.engine.released == self.engine.allocated
        self.engine.close()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
