"""Native calls left behind, the plan of one transfer, and the table of return codes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.errors import CapacityError, ClosedError, IntegrityError, PeerLost, TransferFailed, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay import mooncake_native as native
from moonrelay.relay.native import NativeCalls


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, SystemClock())


def leave_one(calls: NativeCalls, release: threading.Event, **hooks: Any) -> None:
    """Leave a call at its deadline, which comes when the call has begun, however busy the machine is."""
    clock = ManualClock()

    def slow() -> bool:
        return any(clock.advance(1.0) or release.wait(0.02) for _ in range(1000))

    with pytest.raises(TransferTimeout):
        calls.call(slow, Deadline(0.05, clock), what="slow", **hooks)


@pytest.fixture
def calls():
    pool = NativeCalls("test", 2)
    yield pool
    pool.close(10.0, lambda: None)


def test_a_call_returns_its_result_and_tells_quiet_once(calls: NativeCalls) -> None:
    quiet: list[int] = []
    assert calls.call(lambda: 7, soon(), what="seven", on_quiet=lambda: quiet.append(1)) == 7
    assert quiet == [1]


def test_a_call_raises_what_the_work_raised_and_tells_quiet_once(calls: NativeCalls) -> None:
    quiet: list[int] = []

    def fail() -> None:
        raise PeerLost("gone")

    with pytest.raises(PeerLost):
        calls.call(fail, soon(), what="failure", on_quiet=lambda: quiet.append(1))
    assert quiet == [1]


def test_a_call_left_at_its_deadline_tells_quiet_only_when_it_ended(calls: NativeCalls) -> None:
    release, quiet, late = threading.Event(), threading.Event(), []
    leave_one(calls, release, on_quiet=quiet.set, on_late=late.append)
    assert not quiet.is_set()
    assert calls.running == 1
    release.set()
    assert quiet.wait(10.0)
    calls.close(10.0, lambda: None)
    assert late == [True]


def test_a_call_that_never_began_is_quiet_at_once(calls: NativeCalls) -> None:
    release, began, quiet = threading.Event(), [], []
    for _ in range(2):
        leave_one(calls, release)
    with pytest.raises(TransferTimeout):
        calls.call(lambda: began.append(1), soon(0.05), what="queued", on_quiet=lambda: quiet.append(1))
    assert quiet == [1]
    release.set()
    assert calls.call(lambda: 1, soon(), what="next") == 1
    assert not began


def test_close_waits_then_runs_last_once_and_leaves_no_thread() -> None:
    before = threading.active_count()
    pool = NativeCalls("test-close", 2)
    pool.call(lambda: 1, soon(), what="one")
    last: list[int] = []
    assert pool.close(10.0, lambda: last.append(1))
    assert last == [1]
    assert threading.active_count() == before
    with pytest.raises(ClosedError):
        pool.call(lambda: 1, soon(), what="late")


def test_close_with_a_call_left_behind_lets_that_call_run_last() -> None:
    pool = NativeCalls("test-left", 1)
    release, last = threading.Event(), threading.Event()
    leave_one(pool, release)
    assert not pool.close(0.02, last.set)
    assert not last.is_set()
    release.set()
    assert last.wait(10.0)


@pytest.mark.parametrize(
    ("code", "kind", "retryable"),
    [
        (native.NO_ROOM, CapacityError, False),
        (native.EXISTS, IntegrityError, False),
        (native.NOT_FOUND, TransferFailed, True),
        (native.NOT_COMPLETE, TransferFailed, True),
        (-707, TransferFailed, True),
        (-800, TransferFailed, True),
        (-801, IntegrityError, False),
        (-900, PeerLost, True),
        (-901, PeerLost, True),
        (-12345, TransferFailed, True),
    ],
)
def test_every_code_has_its_error(code: int, kind: type[Exception], retryable: bool) -> None:
    error = native.translate(code, "object not stored", "some/key")
    assert type(error) is kind
    assert error.retryable is retryable
    assert error.context == {"code": code, "key": "some/key"}


def test_a_missing_library_is_named_with_its_debian_package() -> None:
    text = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    assert "apt-get install libibverbs1" in native.library_remedy(text)
    assert "non-cuda" in native.import_remedy(ImportError("libcudart.so.12: cannot open shared object file"))
    assert "pip install" in native.import_remedy(ModuleNotFoundError("No module named 'mooncake'"))


sizes = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(
    sizes=sizes,
    threshold=st.integers(1, 50),
    stage=st.integers(4, 40),
    entries=st.integers(1, 4),
    room=st.integers(4, 60),
)
def test_a_plan_covers_every_byte_once_and_keeps_its_bounds(
    sizes: list[int], threshold: int, stage: int, entries: int, room: int
) -> None:
    """The plan is run on byte arrays as the relay runs it on memory: gathered, then written by offset."""
    source = bytes(i % 251 for i in range(sum(sizes) + 1))
    parts, at = [], 1
    for size in sizes:
        parts.append(Extent(at, size))
        at += size
    written = bytearray(sum(sizes))
    covered = bytearray(sum(sizes))
    for move in native.plan(
        parts, lambda part: part.nbytes >= threshold, stage_bytes=stage, max_entries=entries, max_bytes=room
    ):
        buffer = bytearray(stage)
        for address, offset, nbytes in move.copies:
            buffer[offset : offset + nbytes] = source[address : address + nbytes]
        assert 1 <= len(move.entries) <= entries
        assert move.nbytes <= room
        for entry in move.entries:
            memory: bytes | bytearray = buffer if entry.staged else source
            written[entry.offset : entry.offset + entry.nbytes] = memory[entry.address : entry.address + entry.nbytes]
            for byte in range(entry.offset, entry.offset + entry.nbytes):
                covered[byte] += 1
    assert written == source[1:]
    assert set(covered) == {1}
