"""The fixtures of the suites' tests; registered in a session when the first class of a suite is collected.

Owns nothing that outlives a session: the target is its class's, the pools of side processes are the run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from moonrelay_conformance.plugin import activate

if TYPE_CHECKING:
    from moonrelay_conformance.sides.process import SidePool
    from moonrelay_conformance.suites.base import Note
    from moonrelay_conformance.targets.adapter import AdapterGround, AdapterTarget
    from moonrelay_conformance.targets.base import Target


@pytest.fixture(scope="class")
def target(request: pytest.FixtureRequest) -> Target:
    """What is tested: the class's ``target``, or what the command line names."""
    from moonrelay_conformance.collecting import target_of

    return target_of(request.node)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    """Where a test says how a check ended, beside pass and fail."""
    from moonrelay_conformance.recording import note_of

    return note_of(request.node)


@pytest.fixture(scope="class")
def pool(request: pytest.FixtureRequest, target: AdapterTarget) -> Iterator[SidePool]:
    """Processes for sides, shared by the whole session; what a class still uses is ended after it."""
    pool = activate(request.config).pool_for(target)
    yield pool
    pool.take_back()


@pytest.fixture(scope="class")
def ground(target: AdapterTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterGround]:
    """The services that sides need, one set for a class."""
    with target.ground(tmp_path_factory.mktemp("ground")) as ground:
        yield ground
