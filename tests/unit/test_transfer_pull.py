"""The pull: a window that is never exceeded, order, one retry, and nothing in flight that nobody watches."""

from __future__ import annotations

import ctypes
import threading

import pytest

from moonrelay.clock import Deadline, ManualClock
from moonrelay.config import TransferConfig
from moonrelay.errors import Cancelled, ClosedError, RegistrationError, TransferFailed, TransferTimeout
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.arena import Arena
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay.transfer.faulty import Fault, FaultyEngine, Scripted, always, in_order
from moonrelay.transfer.memory import MemoryEngine
from moonrelay.transfer.pull import Move, Puller
from moonrelay.transfer.quarantine import Quarantine

PEER = EngineAddress(engine="fake", address="fake:1", nonce="n")
REGION = Region(key="r", base=0, nbytes=1 << 30)


class SteppingClock(ManualClock):
    """Whoever waits gets the time at once; what happens meanwhile is a call."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self.meanwhile = lambda: None

    def wait(self, condition: threading.Condition, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        assert len(self.waits) < 100_000
        with self._lock:
            self._now += timeout_s or 0.0
        self.meanwhile()
        return False


class FakeOperation(Operation):
    def __init__(self, number: int, offset: int, nbytes: int) -> None:
        self.number = number
        self.offset = offset
        self.nbytes = nbytes
        self.state = OperationState.RUNNING
        self.reason: TransferFailed | RegistrationError | None = None
        self.abandoned = False

    @property
    def error(self):
        return self.reason

    def poll(self) -> OperationState:
        return self.state

    def abandon(self) -> None:
        self.abandoned = True


class FakeEngine(TransferEngine):
    """Reads that end when the test says so."""

    name = "fake"

    def __init__(self) -> None:
        self.operations: list[FakeOperation] = []
        self.closed = False

    @property
    def running(self) -> list[FakeOperation]:
        return [one for one in self.operations if one.state is OperationState.RUNNING]

    def read(self, peer, region, remote_address, local_address, nbytes):
        if self.closed:
            message = "closed"
            raise ClosedError(message)
        assert peer is PEER
        assert region is REGION
        assert local_address - remote_address == 1000
        self.operations.append(FakeOperation(len(self.operations), remote_address, nbytes))
        return self.operations[-1]

    def start(self): ...
    @property
    def address(self):
        return PEER

    def allocate(self, nbytes): ...
    def release(self, region): ...
    def register(self, address, nbytes): ...
    def unregister(self, region): ...
    def close(self): ...


def moves(*sizes: int) -> list[Move]:
    found, start = [], 0
    for size in sizes:
        found.append(Move(region=REGION, remote_address=start, local_address=start + 1000, nbytes=size))
        start += size
    return found


class Rig:
    def __init__(self, window: int = 3, piece_bytes: int = 10) -> None:
        self.clock = SteppingClock()
        self.engine = FakeEngine()
        self.quarantine = Quarantine(self.clock)
        self.puller = Puller(
            self.engine, window=window, piece_bytes=piece_bytes, clock=self.clock, quarantine=self.quarantine
        )
        self.landed: list[tuple[int, int, int]] = []
        self.quiet = 0

    def pull(self, *sizes: int, timeout_s: float | None = 60.0, **kwargs) -> None:
        def on_quiet() -> None:
            self.quiet += 1

        self.puller.pull(
            PEER,
            moves(*sizes),
            Deadline(timeout_s, self.clock),
            on_landed=kwargs.pop("on_landed", lambda *where: self.landed.append(where)),
            on_quiet=on_quiet,
            **kwargs,
        )


@pytest.fixture
def rig():
    return Rig()


def finish(*operations: FakeOperation) -> None:
    for one in operations:
        one.state = OperationState.DONE


def fail(operation: FakeOperation, reason=None) -> None:
    operation.reason = reason or TransferFailed("spurious")
    operation.state = OperationState.FAILED


@pytest.mark.parametrize("last_first", [False, True])
def test_pieces_are_reported_in_order_and_the_window_holds(rig, last_first):
    def meanwhile() -> None:
        assert len(rig.engine.running) <= 3
        finish(rig.engine.running[-1 if last_first else 0])

    rig.clock.meanwhile = meanwhile
    rig.pull(25, 0, 10, 31)
    assert rig.landed == [
        (0, 0, 10), (0, 10, 10), (0, 20, 5), (1, 0, 0), (2, 0, 10), (3, 0, 10), (3, 10, 10), (3, 20, 10), (3, 30, 1),
    ]  # fmt: skip
    assert sorted((one.offset, one.nbytes) for one in rig.engine.operations) == [
        (0, 10), (10, 10), (20, 5), (25, 10), (35, 10), (45, 10), (55, 10), (65, 1),
    ]  # fmt: skip
    assert rig.quiet == 1
    assert rig.quarantine.busy == 0


def test_a_piece_is_digested_while_later_ones_are_in_flight(rig):
    flying: list[int] = []
    rig.clock.meanwhile = lambda: finish(rig.engine.running[0])
    rig.pull(60, on_landed=lambda *_: flying.append(len(rig.engine.running)))
    # The window is full again before the caller is told.
    assert flying == [3, 3, 3, 2, 1, 0]


def test_a_read_that_ends_at_once_is_reported_before_the_next_begins():
    rig = Rig(window=8)
    begun: list[int] = []
    read = rig.engine.read

    def read_at_once(*args):
        operation = read(*args)
        finish(operation)
        return operation

    rig.engine.read = read_at_once
    rig.pull(50, on_landed=lambda *_: begun.append(len(rig.engine.operations)))
    assert begun == [1, 2, 3, 4, 5]
    assert not rig.clock.waits


def test_an_engine_may_fix_the_piece_size():
    engine = FakeEngine()
    engine.fixed_piece_bytes = 100
    clock = SteppingClock()
    puller = Puller(engine, window=9, piece_bytes=10, clock=clock, quarantine=Quarantine(clock))
    clock.meanwhile = lambda: finish(*engine.running)
    puller.pull(PEER, moves(250), Deadline(9.0, clock))
    assert [one.nbytes for one in engine.operations] == [100, 100, 50]


def test_the_first_look_comes_shortly_before_the_end_by_the_pace_seen(rig):
    nbytes, took_s = 4 << 20, 0.010

    def meanwhile() -> None:
        if rig.clock.monotonic() >= began + took_s:
            finish(*rig.engine.running)

    rig.clock.meanwhile = meanwhile
    looks = []
    for _ in range(2):
        began, before = rig.clock.monotonic(), len(rig.clock.waits)
        rig.pull(nbytes, piecewise=False)
        looks.append(rig.clock.waits[before:])
    noticed_s = sum(looks[0])
    assert looks[0][0] == 50e-6
    assert looks[1][0] == pytest.approx(0.75 * noticed_s)
    assert len(looks[1]) < len(looks[0]) / 2
    assert took_s <= sum(looks[1]) < took_s * 17 / 16 + 1e-3


def test_without_work_on_the_pieces_a_move_is_one_read(rig):
    rig.clock.meanwhile = lambda: finish(*rig.engine.running)
    rig.pull(50, 35, piecewise=False)
    assert [one.nbytes for one in rig.engine.operations] == [50, 35]
    assert rig.landed == [(0, 0, 50), (1, 0, 35)]


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_nothing_to_read_is_done_at_once(rig, sizes):
    rig.pull(*sizes)
    assert rig.landed == [(index, 0, 0) for index in range(len(sizes))]
    assert rig.quiet == 1
    assert not rig.engine.operations


def test_it_sleeps_longer_and_longer_and_wakes_for_progress(rig):
    def meanwhile() -> None:
        if len(rig.clock.waits) in (150, 160):
            finish(*rig.engine.running)

    rig.clock.meanwhile = meanwhile
    rig.pull(60)
    waits, waited = rig.clock.waits, 0.0
    for pause in waits[:150]:
        assert pause == pytest.approx(min(max(50e-6, waited / 16), 1e-3), rel=1e-6)
        waited += pause
    assert max(waits) == 1e-3
    assert waits[150] == 50e-6  # after progress


def test_one_failure_is_retried_without_a_word(rig):
    def meanwhile() -> None:
        first = rig.engine.running[0]
        if first.number == 1:
            fail(first)
        else:
            finish(first)

    rig.clock.meanwhile = meanwhile
    rig.pull(40)
    assert rig.landed == [(0, 0, 10), (0, 10, 10), (0, 20, 10), (0, 30, 10)]
    assert [one.offset for one in rig.engine.operations].count(10) == 2
    assert rig.quiet == 1


def test_a_second_failure_of_a_piece_is_final_and_the_rest_is_quarantined(rig):
    reason = TransferFailed("dead")
    rig.clock.meanwhile = lambda: [fail(one, reason) for one in rig.engine.running if one.offset == 10]
    with pytest.raises(TransferFailed, match="dead") as caught:
        rig.pull(40)
    assert caught.value.__cause__ is reason
    assert caught.value.context["pending"] == 2
    assert caught.value.context["peer"] == "fake:1"
    assert [one.offset for one in rig.engine.operations].count(10) == 2
    assert rig.quiet == 0
    assert rig.quarantine.busy == 1
    finish(rig.engine.running[0])
    assert rig.quarantine.poll() == 1
    fail(rig.engine.running[0])
    assert rig.quarantine.poll() == 0
    assert rig.quarantine.poll() == 0
    assert rig.quiet == 1


def test_what_cannot_succeed_is_not_retried(rig):
    rig.clock.meanwhile = lambda: fail(rig.engine.running[0], RegistrationError("out of bounds"))
    with pytest.raises(TransferFailed, match="out of bounds"):
        rig.pull(5)
    assert len(rig.engine.operations) == 1
    assert rig.quiet == 1


def test_the_deadline_ends_the_wait_and_the_memory_waits_for_the_engine(rig):
    begun = rig.clock.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        rig.pull(100, timeout_s=2.0)
    assert rig.clock.monotonic() - begun == pytest.approx(2.0)
    assert caught.value.context["pending"] == 3
    assert all(one.abandoned for one in rig.engine.operations)
    assert rig.quiet == 0
    finish(*rig.engine.running)
    rig.quarantine.poll()
    assert rig.quiet == 1


def test_a_deadline_that_has_passed_already_still_ends(rig):
    with pytest.raises(TransferTimeout):
        rig.pull(10, timeout_s=0.0)
    assert rig.quarantine.busy == 1


def test_cancel_ends_the_pull_and_quarantines(rig):
    with pytest.raises(Cancelled):
        rig.pull(100, cancelled=lambda: len(rig.clock.waits) > 5)
    assert len(rig.engine.operations) == 3
    assert rig.quarantine.busy == 1
    assert rig.quiet == 0


def test_an_error_of_the_caller_quarantines(rig):
    def broken(*_: int) -> None:
        message = "digest differs"
        raise ZeroDivisionError(message)

    rig.clock.meanwhile = lambda: finish(rig.engine.running[0])
    with pytest.raises(ZeroDivisionError):
        rig.pull(100, on_landed=broken)
    assert rig.quarantine.busy == 1
    finish(*rig.engine.running)
    rig.quarantine.poll()
    assert rig.quiet == 1


def test_an_engine_closed_under_the_pull_is_closed_error(rig):
    def meanwhile() -> None:
        rig.engine.closed = True
        finish(rig.engine.running[0])

    rig.clock.meanwhile = meanwhile
    with pytest.raises(ClosedError):
        rig.pull(100)
    assert rig.quarantine.busy == 1


def test_quarantine_close_waits_and_gives_up_at_its_deadline(rig):
    with pytest.raises(TransferTimeout):
        rig.pull(100, timeout_s=1.0)
    assert rig.quarantine.close(3.0) is False
    assert rig.quarantine.busy == 1
    assert rig.quiet == 0
    rig.clock.meanwhile = lambda: finish(*rig.engine.running)
    assert rig.quarantine.close(3.0) is True
    assert rig.quarantine.close(3.0) is True
    assert rig.quiet == 1


def test_quarantine_calls_at_once_what_is_quiet_already():
    quarantine = Quarantine(ManualClock())
    calls: list[int] = []
    done = FakeOperation(0, 0, 1)
    finish(done)
    quarantine.hold([done], lambda: calls.append(1))
    quarantine.hold([], lambda: calls.append(2))
    assert calls == [1, 2]
    assert quarantine.busy == 0


# With real memory, through the fault-injecting engine.


class Memory:
    """A producer's pool with known bytes, and a consumer's pool, in one process."""

    def __init__(self, script, *, window: int = 2, piece_bytes: int = 1024) -> None:
        self.clock = SteppingClock()
        config = TransferConfig(engine="memory")
        self.producer = MemoryEngine(config)
        self.producer.start()
        self.consumer = FaultyEngine(config, inner=MemoryEngine(config), script=script, clock=self.clock)
        self.consumer.start()
        self.quarantine = Quarantine(self.clock)
        self.arena = Arena(self.consumer, 8192, self.clock)
        self.puller = Puller(
            self.consumer, window=window, piece_bytes=piece_bytes, clock=self.clock, quarantine=self.quarantine
        )
        self.source = self.producer.allocate(4096)
        self.expected = bytes(n * 7 % 256 for n in range(4096))
        ctypes.memmove(self.source.base, self.expected, 4096)

    def pull(self, slot, timeout_s: float = 5.0) -> None:
        move = Move(region=self.source, remote_address=self.source.base, local_address=slot.address, nbytes=4096)
        self.puller.pull(self.producer.address, [move], Deadline(timeout_s, self.clock), on_quiet=slot.quarantine())

    def bytes_of(self, slot) -> bytes:
        return ctypes.string_at(slot.address, 4096)

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()


@pytest.fixture
def make():
    made: list[Memory] = []

    def build(script, **kwargs) -> Memory:
        made.append(Memory(script, **kwargs))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("fault", [Fault.NONE, Fault.FAIL, Fault.FAIL_AFTER, Scripted(Fault.DELAY, 0.5)], ids=str)
def test_harmless_faults_give_the_right_bytes(make, fault):
    memory = make(in_order(Fault.NONE, fault, Fault.NONE, fault))
    with memory.arena.allocate(4096) as slot:
        memory.pull(slot)
        assert memory.bytes_of(slot) == memory.expected
    assert memory.consumer.most_in_flight <= 2
    assert memory.arena.live_slots == 0


@pytest.mark.parametrize("fault", [Fault.WRONG, Fault.SHORT, Fault.NOTHING])
def test_lies_go_through_the_puller_and_are_left_to_the_digest(make, fault):
    memory = make(in_order(Fault.NONE, fault))
    with memory.arena.allocate(4096) as slot:
        ctypes.memset(slot.address, 0xEE, 4096)
        memory.pull(slot)
        got = memory.bytes_of(slot)
    assert got != memory.expected
    assert got[:1024] == memory.expected[:1024]
    assert got[2048:] == memory.expected[2048:]
    assert {
        Fault.WRONG: got[1024:2047] == memory.expected[1024:2047],
        Fault.SHORT: got[1024:1536] == memory.expected[1024:1536] and got[1536:2048] == b"\xee" * 512,
        Fault.NOTHING: got[1024:2048] == b"\xee" * 1024,
    }[fault]


def test_bytes_that_come_late_do_not_fall_into_reused_memory(make):
    memory = make(in_order(Fault.NONE, Fault.LATE))
    slot = memory.arena.allocate(4096)
    with pytest.raises(TransferTimeout):
        memory.pull(slot)
    slot.release()
    assert memory.arena.quarantined_bytes == 4096
    other = memory.arena.allocate(4096)  # the other half of the pool
    with pytest.raises(Exception, match="no room now"):
        memory.arena.allocate(256)
    ctypes.memset(other.address, 0xAA, 4096)
    assert memory.consumer.let_late_writes() == 1
    assert memory.bytes_of(other) == b"\xaa" * 4096
    assert memory.quarantine.poll() == 0
    assert memory.arena.quarantined_bytes == 0
    assert memory.arena.live_slots == 1
    other.release()


def test_a_stalled_engine_keeps_the_memory_until_it_is_closed(make):
    memory = make(always(Fault.STALL))
    slot = memory.arena.allocate(4096)
    with pytest.raises(TransferTimeout):
        memory.pull(slot)
    slot.release()
    assert memory.quarantine.close(1.0) is False
    assert memory.arena.live_slots == 1
    memory.arena.close()
    memory.consumer.close()
    assert memory.quarantine.poll() == 0
    assert memory.arena.live_slots == 0
