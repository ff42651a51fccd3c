"""A small suite and targets for it, to test what runs suites rather than what suites find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.results import Kind, Level, Outcome
from moonrelay_conformance.suites.base import Note, Suite, promise
from moonrelay_conformance.targets.base import Target


class MiniTarget(Target):
    """Passes everything."""

    kind = "queue"
    name = "mini"
    broken = False

    def capabilities(self) -> Mapping[Capability, Support]:
        return {Capability.P2P: Support.FULL, Capability.STORE: Support.FULL, Capability.TTL: Support.NOT_IMPLEMENTED}

    def routes(self) -> tuple[str, ...]:
        return ("p2p", "store")


class BrokenTarget(MiniTarget):
    """Breaks one promise, on one route."""

    name = "broken"
    broken = True


@dataclass(frozen=True)
class Expect:
    outcome: str
    codes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MiniCase:
    id: str
    level: Level
    title: str
    requires: tuple[Capability, ...] = ()
    expect: Expect = Expect("delivered")
    routes: tuple[str, ...] = ()


CASES = (
    MiniCase("plain", Level.L1, "A plain case"),
    MiniCase("refused", Level.L2, "A refusal", (Capability.FP8,), Expect("refused", ("unsupported_tensor",))),
    MiniCase("chunks", Level.L2, "Chunks", (Capability.CHUNKED,)),
    MiniCase("only-store", Level.L2, "Only on one route", routes=("store",)),
    MiniCase("only-spill", Level.L3, "On no route of this target", routes=("spill",)),
)


class MiniConformance(Suite):
    """Few promises."""

    kind = "queue"

    @promise(Level.L1, "The target has a name")
    def test_it_has_a_name(self, target: Target, note: Note) -> None:
        note.step("looked")
        assert target.name

    @promise(Level.L2, "It expires", requires=[Capability.TTL])
    def test_it_expires(self) -> None:
        pytest.fail("must not be run")

    @promise(Level.L3, "It holds on every route")
    def test_it_holds(self, target: Target, route: str) -> None:
        assert not (getattr(target, "broken", False) and route == "store"), "the store lost it"

    @promise(Level.L2, "A case is kept", kind=Kind.CASE)
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
    def test_a_case_is_kept(self, case: MiniCase, route: str, note: Note) -> None:
        if case.expect.outcome == "refused":
            note.outcome, note.code = Outcome.REFUSED, "unsupported_tensor"
        else:
            note.digest = f"{case.id}-digest"

    @promise(Level.L3, "Numbers", requires=[])
    @pytest.mark.parametrize("number", [1, 2])
    def test_numbers(self, number: int) -> None:
        assert number


class Helped(MiniConformance):
    """A suite with a part that is no test."""

    def sizes(self) -> tuple[int, ...]:
        return (1, 2)
