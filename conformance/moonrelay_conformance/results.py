"""What a run found: one `Result` per check, and the `Report` of a run.

Owns the report's schema, which programs parse and which `--matrix` joins; see `REPORT_VERSION`. Nothing here runs tests
or draws pages.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from moonrelay.errors import VersionError, WireError

#: Grows when a required check is added (minor) or the meaning of one changes (major).
SUITE_VERSION: Final = "1.0"
#: Of the JSON form of `Report`.
REPORT_VERSION: Final = 1


class Level(enum.StrEnum):
    """Which promise a check belongs to."""

    L1 = "L1"  # every target
    L2 = "L2"  # every target that declares the capability
    L3 = "L3"  # under faults

    @property
    def upto(self) -> tuple[Level, ...]:
        """This level and those below it."""
        order = tuple(Level)
        return order[: order.index(self) + 1]


class Kind(enum.StrEnum):
    CASE = "case"  # a payload of the corpus
    SCENARIO = "scenario"  # a lease scenario of the corpus
    PROMISE = "promise"  # any other test


class Outcome(enum.StrEnum):
    """How a check ended. The order is from best to worst."""

    DELIVERED = "delivered"  # a case: identical
    REFUSED = "refused"  # a case: refused, as it should be
    HELD = "held"  # a scenario or a promise
    UNSUPPORTED = "unsupported"  # the target does not declare the operation
    NOT_RUN = "not_run"  # deselected, or the run ended before
    FAILED = "failed"

    @property
    def good(self) -> bool:
        return self in (Outcome.DELIVERED, Outcome.REFUSED, Outcome.HELD)


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One check of one target.

    Attributes:
        id: Case or scenario id of the corpus, or the test's name; the same for every target.
        kind: What was checked.
        level: Its level.
        title: What is promised, in one line.
        route: ``p2p``, ``store`` ...; empty where the check has none.
        outcome: How it ended.
        expected: What the corpus expects: an outcome, for a case.
        code: Error code of a refusal.
        digest: Digest of the canonical bytes that were delivered.
        steps: What was observed at each step of a scenario.
        reason: Why it failed, or why it is unsupported, in one line.
        test: Name of the test that found it.
        seconds: How long it took; not for comparisons.
    """

    id: str
    kind: Kind
    level: Level
    outcome: Outcome
    title: str = ""
    route: str = ""
    expected: str = ""
    code: str = ""
    digest: str = ""
    steps: tuple[str, ...] = ()
    reason: str = ""
    test: str = ""
    seconds: float = 0.0


class TargetInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was tested.

    Attributes:
        kind: ``adapter``, ``engine``, ``relay``, ``queue``.
        name: Its name among those of its kind.
        distribution: Who provides it, with the version.
        host: The framework and its version; empty where there is none.
        capabilities: Declared capabilities by name.
        routes: Routes that were tried.
    """

    kind: str
    name: str
    distribution: str = ""
    host: str = ""
    capabilities: dict[str, str] = {}
    routes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.kind}:{self.name}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the suite against one target.

    Attributes:
        target: What was tested.
        levels: Levels that were asked for.
        results: One per check and route.
        environment: Versions that may matter (python, torch, moonrelay, system); no paths, no names of machines.
        complete: Whether every check of those levels ran: nothing deselected, nothing interrupted.
        suite_version: Of the suite.
        corpus_version: Of the corpus; checks are compared only within one.
        report_version: Of this schema.
        seconds: Duration of the run.
    """

    target: TargetInfo
    levels: tuple[Level, ...]
    results: tuple[Result, ...]
    environment: dict[str, str] = {}
    complete: bool = True
    suite_version: str = SUITE_VERSION
    corpus_version: int = 1
    report_version: int = REPORT_VERSION
    seconds: float = 0.0

    @property
    def whole(self) -> bool:
        """Whether it is complete by what it says and by what it holds: there are checks, and all of them ran."""
        return self.complete and bool(self.results) and all(one.outcome is not Outcome.NOT_RUN for one in self.results)

    @property
    def passed(self) -> bool:
        """Whether everything asked for ran and nothing failed."""
        return self.whole and not any(result.outcome is Outcome.FAILED for result in self.results)

    def counts(self) -> Mapping[Level, Mapping[Outcome, int]]:
        """Return how many checks of each level ended how."""
        return {
            level: dict(Counter(result.outcome for result in self.results if result.level is level))
            for level in self.levels
        }

    def to_json(self) -> bytes:
        """Return the report as indented JSON, UTF-8."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @classmethod
    def from_json(cls, raw: bytes, *, source: str = "the report") -> Report:
        """Read a report.

        Args:
            raw: What `to_json` gave.
            source: What to call it in an error.

        Raises:
            WireError: It is no report; the message names ``source`` and the place.
            VersionError: It is of another version.
        """
        try:
            version = msgspec.json.decode(raw, type=_Versioned).report_version
        except (msgspec.MsgspecError, ValueError) as exc:
            message = f"{source} is no conformance report: {exc}"
            raise WireError(message, field="report") from exc
        if version != REPORT_VERSION:
            message = f"{source} has report version {version}, this side reads {REPORT_VERSION}; run it again"
            raise VersionError(message, field="report_version")
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.MsgspecError, ValueError) as exc:
            message = f"{source} is no conformance report: {exc}"
            raise WireError(message, field="report") from exc


class _Versioned(msgspec.Struct):
    report_version: int
