"""The reaper runs jobs at their time, on the injected clock, and survives their failures."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from moonrelay.clock import ManualClock
from moonrelay.errors import ClosedError
from moonrelay.lease import Job, Reaper


class Recorder:
    """Notes the times at which it ran; tests wait for a count of runs."""

    def __init__(self) -> None:
        self.ran: list[float] = []
        self.changed = threading.Condition()
        self.then: Callable[[float], float | None] = lambda now: None

    def __call__(self, now: float) -> float | None:
        with self.changed:
            self.ran.append(now)
            self.changed.notify_all()
        return self.then(now)

    def wait(self, runs: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ran) >= runs, timeout=10.0), self.ran


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def reaper(clock: ManualClock) -> Iterator[Reaper]:
    made = Reaper(clock, retry_s=2.0)
    yield made
    made.close()


def advance(reaper: Reaper, clock: ManualClock, seconds: float) -> None:
    """Move time and make sure that the reaper looks, also when it was just about to wait."""
    clock.advance(seconds)
    with contextlib.suppress(ClosedError):
        reaper.at(clock.monotonic(), "poke", lambda: None)


def settle(reaper: Reaper, clock: ManualClock) -> None:
    """Run everything that is due now, by a job behind it."""
    marker = Recorder()
    reaper.job("marker", marker).due_by(clock.monotonic())
    marker.wait(1)


def test_a_job_runs_when_due_and_not_before(reaper: Reaper, clock: ManualClock) -> None:
    work = Recorder()
    reaper.job("work", work).due_by(105.0)
    advance(reaper, clock, 4.9)
    settle(reaper, clock)
    assert work.ran == []
    advance(reaper, clock, 0.1)
    work.wait(1)
    assert work.ran == [pytest.approx(105.0)]


def test_an_earlier_time_wins_and_a_later_one_changes_nothing(reaper: Reaper, clock: ManualClock) -> None:
    work = Recorder()
    job = reaper.job("work", work)
    job.due_by(110.0)
    job.due_by(150.0)
    job.due_by(103.0)
    job.due_by(None)
    advance(reaper, clock, 3.0)
    work.wait(1)
    advance(reaper, clock, 60.0)
    settle(reaper, clock)
    assert work.ran == [103.0]


def test_a_job_names_its_next_time(reaper: Reaper, clock: ManualClock) -> None:
    work = Recorder()
    work.then = lambda now: now + 10.0 if now < 115.0 else None
    reaper.job("work", work).due_by(101.0)
    for seconds in (1.0, 10.0, 10.0, 10.0):
        advance(reaper, clock, seconds)
        settle(reaper, clock)
    assert work.ran == [101.0, 111.0, 121.0]


def test_a_request_during_the_run_is_not_lost(reaper: Reaper, clock: ManualClock) -> None:
    work = Recorder()
    job = reaper.job("work", work)

    def then(now: float) -> float | None:
        if len(work.ran) == 1:
            job.due_by(102.0)
            return 500.0
        return None

    work.then = then
    job.due_by(101.0)
    advance(reaper, clock, 1.0)
    work.wait(1)
    advance(reaper, clock, 1.0)
    work.wait(2)
    assert work.ran == [101.0, 102.0]


def test_jobs_run_in_the_order_of_their_times(reaper: Reaper, clock: ManualClock) -> None:
    order: list[str] = []
    done = Recorder()
    reaper.at(103.0, "late", lambda: order.append("late"))
    reaper.at(101.0, "early", lambda: order.append("early"))
    reaper.job("end", done).due_by(104.0)
    advance(reaper, clock, 10.0)
    done.wait(1)
    assert order == ["early", "late"]


def test_a_cancelled_job_does_not_run(reaper: Reaper, clock: ManualClock) -> None:
    work = Recorder()
    job = reaper.job("work", work)
    job.due_by(101.0)
    job.cancel()
    job.cancel()
    job.due_by(101.0)
    advance(reaper, clock, 5.0)
    settle(reaper, clock)
    assert work.ran == []


def test_a_failing_job_is_told_aloud_runs_again_and_stops_nobody(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[str, str]] = []

    def on_failure(job: Job, error: Exception) -> None:
        told.append((job.name, str(error)))
        raise RuntimeError("the owner fails too")

    reaper = Reaper(clock, on_failure=on_failure, retry_s=2.0)
    bad, good = Recorder(), Recorder()

    def fail(now: float) -> float | None:
        if len(bad.ran) == 1:
            raise ValueError("boom")
        return None

    bad.then = fail
    with caplog.at_level(logging.ERROR, "moonrelay.lease.reaper"):
        reaper.job("bad", bad).due_by(101.0)
        reaper.job("good", good).due_by(101.5)
        advance(reaper, clock, 1.5)
        good.wait(1)
        advance(reaper, clock, 2.0)
        bad.wait(2)
        reaper.close()
    assert told == [("bad", "boom")]
    assert "job bad failed" in caplog.text
    assert "owner's failure callback failed" in caplog.text


def test_close_is_idempotent_joins_and_refuses_more(clock: ManualClock) -> None:
    before = set(threading.enumerate())
    reaper = Reaper(clock)
    job = reaper.job("work", Recorder())
    job.due_by(1000.0)
    started = set(threading.enumerate()) - before
    assert [(thread.name, thread.daemon) for thread in started] == [("moonrelay-reaper", True)]
    reaper.close()
    reaper.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(ClosedError):
        job.due_by(1.0)
    job.cancel()


def test_an_idle_reaper_has_no_thread(clock: ManualClock) -> None:
    before = set(threading.enumerate())
    reaper = Reaper(clock)
    reaper.job("work", Recorder())
    assert set(threading.enumerate()) == before
    reaper.close()


def test_a_job_may_close_the_reaper(clock: ManualClock) -> None:
    reaper = Reaper(clock)
    closed = threading.Event()

    def close() -> None:
        reaper.close()
        closed.set()

    reaper.at(101.0, "close", close)
    advance(reaper, clock, 1.0)
    assert closed.wait(10.0)
    thread = reaper._thread
    assert thread is not None
    thread.join(10.0)
    assert not thread.is_alive()
