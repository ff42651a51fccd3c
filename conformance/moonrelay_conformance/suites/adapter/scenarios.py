"""The lease scenarios of the corpus, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from moonrelay_conformance.corpus.load import scenarios
from moonrelay_conformance.corpus.model import Scenario
from moonrelay_conformance.results import Kind, Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.play import Player
from moonrelay_conformance.suites.adapter.stage import Stage
from moonrelay_conformance.suites.base import promise

if TYPE_CHECKING:
    from moonrelay_conformance.suites.base import Note


class ScenarioTests(AdapterSuite):
    """Every lease scenario, on every route on which it makes sense."""

    @pytest.mark.parametrize("scenario", [pytest.param(one, id=one.id) for one in scenarios()])
    @promise(Level.L1, "Every step of a lease is observed as it should be", kind=Kind.SCENARIO)
    def test_lease_scenario(self, scenario: Scenario, route: str, stage: Stage, note: Note) -> None:
        Player(stage, scenario, route, note).play()
