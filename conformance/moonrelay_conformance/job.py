"""A job of a run that is divided: the suite in a process of its own, which runs the checks that it is handed.

Owns the wire to `moonrelay_conformance.jobs`, JSON lines. A job collects everything, says what there is (`Collected`),
and asks for one test after the other (`Wanted`, answered with an `Order`); each that ended is told with its result
(`Done`).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import IO, Final, Never

import msgspec
import pytest

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.child import die_with, private_wire
from moonrelay_conformance.plugin import activate
from moonrelay_conformance.registry import resolve
from moonrelay_conformance.results import Level, Result, TargetInfo
from moonrelay_conformance.run import CHECK_TIMEOUT_S, RunInterrupted, run
from moonrelay_conformance.targets.adapter import AdapterTarget

#: Exit status of a job that was interrupted.
INTERRUPTED: Final = 130


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is for: the arguments of `moonrelay_conformance.run.run`, the target by its name."""

    name: str
    levels: tuple[Level, ...] = tuple(Level)
    select: tuple[str, ...] = ()
    timeout_s: float = CHECK_TIMEOUT_S


class Collected(msgspec.Struct, frozen=True, tag=True):
    """First message: what there is.

    Attributes:
        target: What is tested.
        checks: Every check by its test, in the report's order, not run yet.
        tests: The tests to run; an `Order` is an index into them.
    """

    target: TargetInfo
    checks: dict[str, Result]
    tests: tuple[str, ...]


class Wanted(msgspec.Struct, frozen=True, tag=True):
    """The job asks for one test more. It does so before it runs the one it has, whose clean-up depends on the next."""


class Running(msgspec.Struct, frozen=True, tag=True):
    """A test begins.

    Attributes:
        test: Which.
        check: What to call it.
        timeout_s: Its own bound, where it has one.
    """

    test: str
    check: str
    timeout_s: float | None = None


class Done(msgspec.Struct, frozen=True, tag=True):
    """A test and its clean-up ended; ``details`` is the traceback of a failure."""

    test: str
    result: Result
    details: str = ""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The suite cannot be run at all."""

    message: str


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Last message: everything that was handed over was run, and everything is cleaned up."""


class Order(msgspec.Struct, frozen=True):
    """Answer to `Wanted`: index of a test, or ``None`` where none is left."""

    test: int | None


Event = Collected | Wanted | Running | Done | Broken | Finished


class Feed:
    """Stands in pytest's loop over its tests, and tells how each one went. Threads: one."""

    def __init__(self, orders: IO[bytes], events: IO[bytes]) -> None:
        self._orders = orders
        self._events = events
        self._current = ""
        self._timeout_s: float | None = None

    def tell(self, event: Event) -> None:
        """Send a message."""
        self._events.write(msgspec.json.encode(event) + b"\n")

    # Of a plugin of pytest.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run what is handed over, instead of everything."""
        if session.testsfailed:
            return None  # something could not be collected; pytest's own loop stops for it
        tests = session.items
        suite = activate(session.config)
        assert suite.target is not None
        self.tell(Collected(suite.target.info(), suite.known(), tuple(item.nodeid for item in tests)))
        if isinstance(suite.target, AdapterTarget):
            # The time that a host's import takes is no check's.
            suite.pool_for(suite.target).prepare(suite.target.side)
        index = self._next()
        while index is not None:
            following = self._next()
            item, self._current = tests[index], tests[index].nodeid
            own = item.get_closest_marker("timeout")
            self._timeout_s = float(own.args[0]) if own is not None and own.args else None
            nextitem = None if following is None else tests[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            index = following
        return True

    def _next(self) -> int | None:
        self.tell(Wanted())
        line = self._orders.readline()
        return msgspec.json.decode(line, type=Order).test if line else None

    # Of `Progress`.

    def begun(self, total: int) -> None:
        """Tell nothing; who hands the tests over counts them."""

    def running(self, check: str) -> None:
        """Tell that the current test begins."""
        self.tell(Running(self._current, check, self._timeout_s))

    def ended(self, result: Result, details: str) -> None:
        """Tell how it went."""
        self.tell(Done(self._current, result, details))


def main(arguments: Sequence[str]) -> int:
    """Run the tests that the parent hands over.

    Args:
        arguments: The parent's process id and a `Task` as JSON.
    """
    parent, task = arguments
    if not die_with(int(parent)):
        return 1
    signal.signal(signal.SIGTERM, _interrupt)
    feed = Feed(*private_wire())
    given = msgspec.json.decode(task, type=Task)
    try:
        target = resolve(given.name)
        run(
            target,
            levels=given.levels,
            select=given.select,
            progress=feed,
            timeout_s=given.timeout_s,
            plugins=[feed],
        )
    except (RunInterrupted, KeyboardInterrupt):
        return INTERRUPTED
    except MoonrelayError as exc:
        feed.tell(Broken(exc.message))
        return 1
    feed.tell(Finished())
    return 0


def _interrupt(_number: int, _frame: FrameType | None) -> Never:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
