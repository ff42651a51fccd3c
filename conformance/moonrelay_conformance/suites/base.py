"""The base of every suite class, and how a test says what it promises.

Owns the vocabulary between the tests and the plugin. A test of a suite is a method ``test_...`` of a `Suite` subclass
with a `promise`; its name says what is broken when it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeVar

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Kind, Level, Outcome
from moonrelay_conformance.targets.base import Target

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

#: Name of the marker that carries a `Promise`.
MARKER: Final = "moonrelay_promise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a test checks.

    Attributes:
        level: Its level.
        title: What is promised, in one line, as it stands in the report.
        requires: Operations that the target must declare; where it does not, the test counts as unsupported.
        kind: What is checked; for corpus tests every parameter brings its own id, level, title and requirements.
    """

    level: Level
    title: str
    requires: tuple[Capability, ...] = ()
    kind: Kind = Kind.PROMISE


def promise(
    level: Level, title: str, *, requires: Sequence[Capability] = (), kind: Kind = Kind.PROMISE
) -> Callable[[FunctionT], FunctionT]:
    """Mark a test of a suite with what it promises."""
    made = Promise(level=level, title=title, requires=tuple(requires), kind=kind)

    def mark(function: FunctionT) -> FunctionT:
        marked: FunctionT = getattr(pytest.mark, MARKER)(made)(function)
        return marked

    return mark


@dataclass(slots=True)
class Note:
    """What a running test tells the report beside pass and fail; given by the fixture ``note``.

    Attributes:
        outcome: How a check that did not fail ended; the kind's usual word by default.
        code: Error code of a refusal.
        digest: Digest of what was delivered.
        steps: Observations so far, also of a scenario that then fails.
    """

    outcome: Outcome | None = None
    code: str = ""
    digest: str = ""
    steps: list[str] | None = None

    def step(self, text: str) -> None:
        """Add an observation."""
        self.steps = [*(self.steps or []), text]


class Suite:
    """Base of the suites' classes. A third party subclasses one of them and sets `target`.

    Attributes:
        target: What is tested; ``None`` takes what the command line names.
    """

    target: ClassVar[Target | type[Target] | None] = None
    #: The kind of target that the suite is for.
    kind: ClassVar[str]
