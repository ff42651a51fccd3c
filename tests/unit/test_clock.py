"""Clocks and deadlines."""

from __future__ import annotations

import threading

import pytest

from moonrelay.clock import Deadline, ManualClock, SystemClock


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(start_s=5.0)
    assert clock.monotonic() == 5.0
    clock.advance(2.5)
    assert clock.monotonic() == 7.5


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    seen = [clock.monotonic() for _ in range(100)]
    assert seen == sorted(seen)


def test_a_deadline_counts_down_and_stays_at_zero() -> None:
    clock = ManualClock()
    deadline = Deadline(10.0, clock)
    clock.advance(4.0)
    assert deadline.remaining() == pytest.approx(6.0)
    assert deadline.remaining(at_most=1.0) == 1.0
    assert not deadline.expired
    clock.advance(6.0)
    assert deadline.expired
    assert deadline.remaining() == 0.0
    clock.advance(1.0)
    assert deadline.remaining() == 0.0


def test_a_deadline_without_end() -> None:
    clock = ManualClock()
    deadline = Deadline(None, clock)
    clock.advance(1e9)
    assert not deadline.expired
    assert deadline.remaining() is None
    assert deadline.remaining(at_most=3.0) == 3.0


def test_a_deadline_of_zero_has_expired() -> None:
    assert Deadline(0.0, ManualClock()).expired


def test_wait_for_returns_at_once_when_true_also_after_the_deadline() -> None:
    clock = ManualClock()
    deadline = Deadline(1.0, clock)
    clock.advance(2.0)
    condition = threading.Condition()
    with condition:
        assert deadline.wait_for(condition, lambda: True)
        assert not deadline.wait_for(condition, lambda: False)


def test_wait_for_is_woken_by_a_notification() -> None:
    clock = ManualClock()
    condition = threading.Condition()
    happened: list[bool] = []
    asked = threading.Event()

    def ready() -> bool:
        asked.set()
        return bool(happened)

    answers: list[bool] = []

    def wait() -> None:
        with condition:
            answers.append(Deadline(60.0, clock).wait_for(condition, ready))

    waiter = threading.Thread(target=wait, name="moonrelay-test-waiter", daemon=True)
    waiter.start()
    assert asked.wait(10)
    with condition:
        happened.append(True)
        condition.notify_all()
    waiter.join(10)
    assert answers == [True]


def test_wait_for_ends_when_a_manual_clock_passes_the_deadline() -> None:
    clock = ManualClock()
    condition = threading.Condition()
    asked = threading.Event()
    answers: list[bool] = []

    def never() -> bool:
        asked.set()
        return False

    def wait() -> None:
        with condition:
            answers.append(Deadline(60.0, clock).wait_for(condition, never))

    waiter = threading.Thread(target=wait, name="moonrelay-test-waiter", daemon=True)
    waiter.start()
    assert asked.wait(10)
    while waiter.is_alive():
        clock.advance(30.0)
        waiter.join(0.01)
    assert answers == [False]
