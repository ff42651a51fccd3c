"""A small suite for jobs, which see it since they import this module by a target's name. Never import it in a test.

What a check does depends on the target. Notes for the test go to files in the working folder, which jobs inherit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites import chosen
from moonrelay_conformance.suites.base import Suite, promise
from moonrelay_conformance.targets.base import Target


class CalmTarget(Target):
    """Passes everything but what it lacks."""

    kind = "queue"
    name = "calm"

    def capabilities(self) -> Mapping[Capability, Support]:
        return {Capability.P2P: Support.FULL, Capability.STORE: Support.FULL}

    def routes(self) -> tuple[str, ...]:
        return ("p2p", "store")

    def check(self, number: int) -> None:
        """Do what the target is for."""


class FailingTarget(CalmTarget):
    def check(self, number: int) -> None:
        assert number != 3, "three is wrong"


class KilledTarget(CalmTarget):
    """A check takes its job along."""

    def check(self, number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGKILL)


class AllKilledTarget(CalmTarget):
    def check(self, number: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class StoppedTarget(CalmTarget):
    """A check hangs where no bound of pytest's reaches."""

    def check(self, number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGSTOP)


class WaitingTarget(CalmTarget):
    """From the fourth check on everything waits."""

    def check(self, number: int) -> None:
        if number > 3:
            Path(f"waits-{os.getpid()}").touch()
            threading.Event().wait(100)


class UnclearTarget(CalmTarget):
    """Its clean-up fails."""

    name = "unclear"


class Samples(Suite):
    kind = "queue"

    @pytest.fixture(scope="class")
    @classmethod
    def warm(cls, target: Target) -> Iterator[None]:
        Path(f"warm-{os.getpid()}").touch(exist_ok=False)
        yield
        Path(f"cold-{os.getpid()}").touch(exist_ok=False)
        assert target.name != "unclear", "something is left"

    @promise(Level.L1, "Numbers")
    @pytest.mark.parametrize("number", range(1, 9))
    def test_numbers(self, target: CalmTarget, number: int, warm: None) -> None:
        with Path("ran").open("a") as ran:
            ran.write(f"{number}\n")
        target.check(number)

    @promise(Level.L2, "It expires", requires=[Capability.TTL])
    def test_it_expires(self) -> None:
        pytest.fail("must not be run")

    @pytest.mark.timeout(77)
    @promise(Level.L3, "Routes")
    def test_routes(self, route: str, warm: None) -> None:
        assert route


def _suite_for(_kind: str) -> Any:
    return Samples


chosen.suite_for = _suite_for
