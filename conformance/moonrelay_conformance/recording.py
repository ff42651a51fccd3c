"""A session's run of the suite: which checks there are, which are tried, and how each one ended.

Owns the way from pytest's items and reports to `Result` and `Report`. Nothing a class, a ``conftest.py`` or an option
does to the collected items makes a check disappear: what was to run and did not is in the report as not run.
"""

from __future__ import annotations

import enum
import fnmatch
import importlib.metadata
import platform
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import pytest

from moonrelay.clock import SystemClock
from moonrelay.errors import ConfigError
from moonrelay_conformance import guard
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.collecting import GuardItem, SuiteClass, target_of
from moonrelay_conformance.plugin import HANDOVER
from moonrelay_conformance.registry import resolve
from moonrelay_conformance.results import Kind, Level, Outcome, Report, Result, TargetInfo
from moonrelay_conformance.suites.base import Note, Promise, Suite

if TYPE_CHECKING:
    from moonrelay_conformance.sides.process import SidePool
    from moonrelay_conformance.targets.adapter import AdapterTarget
    from moonrelay_conformance.targets.base import Target

_NOTE: Final = pytest.StashKey[Note]()
_LONGEST_REASON: Final = 400
#: Reason of what was left out because only some checks were asked for.
NOT_SELECTED: Final = "not selected"
#: Distributions whose versions a report names.
_VERSIONS: Final = ("moonrelay", "torch", "pytest", "mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")


class Progress(Protocol):
    """Is told how a run goes. Threads: the run's."""

    def begun(self, total: int) -> None:
        """So many checks will run."""

    def running(self, check: str) -> None:
        """A check begins."""

    def ended(self, result: Result, details: str) -> None:
        """A check ended; ``details`` is the traceback of one that failed."""


@dataclass(kw_only=True)
class Handover:
    """What `moonrelay_conformance.run` gives to the session that it starts.

    Attributes:
        target: What is tested.
        levels: Levels that are run.
        select: Patterns of ids and of names of tests; empty is all.
        pool: Processes of sides to share with other runs; ``None`` makes some for this run.
        progress: Is told how the run goes.
        reports: Filled at the end, one for each target.
        problems: Why classes could not be collected.
    """

    target: Target
    levels: tuple[Level, ...] = tuple(Level)
    select: tuple[str, ...] = ()
    pool: SidePool | None = None
    progress: Progress | None = None
    reports: list[Report] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    #: Pytest registers a plugin under it.
    __name__ = HANDOVER


@dataclass(kw_only=True)
class _Check:
    """One check of one target, as it is known so far."""

    label: str
    id: str
    kind: Kind
    level: Level
    title: str
    test: str
    route: str = ""
    expected: str = ""
    unsupported: str = ""
    known: str | None = None
    outcome: Outcome = Outcome.NOT_RUN
    reason: str = ""
    details: str = ""
    seconds: float = 0.0
    note: Note = field(default_factory=Note)

    @property
    def name(self) -> str:
        return f"{self.id} ({self.route})" if self.route else self.id

    def fail(self, reason: str, details: str = "") -> None:
        """Count it as failed; the first failure stays."""
        if self.outcome is not Outcome.FAILED:
            self.outcome, self.reason, self.details = Outcome.FAILED, reason, details

    def passed(self) -> None:
        if self.outcome is Outcome.FAILED:
            return  # an earlier try: a flaky promise is a broken one
        if self.note.outcome is Outcome.FAILED:
            self.fail("the test noted a failure and did not fail")
            return
        usual = Outcome.HELD
        if self.kind is Kind.CASE:
            refused = self.expected.partition(":")[0] == Outcome.REFUSED.value
            usual = Outcome.REFUSED if refused else Outcome.DELIVERED
        self.outcome, self.reason = self.note.outcome or usual, ""

    def result(self) -> Result:
        return Result(
            id=self.id,
            kind=self.kind,
            level=self.level,
            outcome=self.outcome,
            title=self.title,
            route=self.route,
            expected=self.expected,
            code=self.note.code,
            digest=self.note.digest,
            steps=tuple(self.note.steps or ()),
            reason=self.reason,
            test=self.test,
            seconds=round(self.seconds, 3),
        )


class Run:
    """The hooks and the state of one session.

    Raises:
        MoonrelayError: An option names no target, or no level.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        given: Handover | None = config.pluginmanager.get_plugin(HANDOVER)
        self._handover = given
        named: str | None = config.getoption("moonrelay_target", None)
        self.target: Target | None = given.target if given else resolve(named) if named else None
        self.levels = given.levels if given else level_named(config.getoption("moonrelay_level", None) or "L3").upto
        self._select = given.select if given else ()
        self._clock = SystemClock()
        self._started_s = self._clock.monotonic()
        self._checks: dict[str, _Check] = {}
        self._infos: dict[str, TargetInfo] = {}
        self._pools: dict[tuple[str, tuple[tuple[str, str], ...], bool], SidePool] = {}
        self.reports: tuple[Report, ...] = ()

    def pool_for(self, target: AdapterTarget) -> SidePool:
        """Return the session's processes for this target's interpreter and environment."""
        from moonrelay_conformance.sides.process import SidePool

        if self._handover and self._handover.pool is not None:
            return self._handover.pool
        key = (target.python(), tuple(sorted(target.environment().items())), target.forked)
        if key not in self._pools:
            self._pools[key] = SidePool(python=target.python(), env=target.environment(), forked=target.forked)
        return self._pools[key]

    def check_of(self, nodeid: str) -> _Check | None:
        """Return what is known of a collected test."""
        return self._checks.get(nodeid)

    def known(self) -> dict[str, Result]:
        """Return every check by its test, as it is known so far, in the order of the report."""
        return {nodeid: check.result() for nodeid, check in self._checks.items()}

    # Collection.

    def admit(
        self, node: SuiteClass, target: Target, found: Sequence[pytest.Item | pytest.Collector]
    ) -> list[pytest.Item | pytest.Collector]:
        """Take down a class's tests; return those that are to run."""
        info = target.info()
        self._infos.setdefault(info.label, info)
        kept: list[pytest.Item | pytest.Collector] = []
        checks: list[tuple[pytest.Item, _Check]] = []
        for one in found:
            check = self._check(node, target, one, info.label) if isinstance(one, pytest.Item) else None
            if isinstance(one, pytest.Item) and check is not None:
                checks.append((one, check))
            elif not isinstance(one, pytest.Item) or guard.inherited_promise(node.obj, _test_name(one)) is None:
                kept.append(one)
        exact = {check.id for _, check in checks} & set(self._select)
        for item, check in checks:
            self._checks[item.nodeid] = check
            if isinstance(item, GuardItem) or self._selected(check, exact):
                kept.append(item)
            else:
                check.reason = NOT_SELECTED
        return kept

    def _check(self, node: SuiteClass, target: Target, item: pytest.Item, label: str) -> _Check | None:
        """Return the check that a test is; ``None`` where it is none, or not of a level asked for, or not here."""
        if isinstance(item, GuardItem):
            return _Check(
                label=label,
                id=_id(item.name),
                kind=Kind.PROMISE,
                level=self.levels[0],
                title=guard.TITLE,
                test=item.name,
            )
        if not isinstance(item, pytest.Function):
            return None
        cls: type[Suite] = node.obj
        name = item.originalname
        promise = guard.inherited_promise(cls, name)
        if promise is None:
            return None
        params: Mapping[str, object] = item.callspec.params if hasattr(item, "callspec") else {}
        corpus = next((value for value in params.values() if _is_corpus(value)), None)
        check = _Check(
            label=label,
            id=_promise_id(item, name, params) if corpus is None else str(_attribute(corpus, "id")),
            kind=promise.kind if corpus is None else _kind_of(corpus, promise),
            level=promise.level if corpus is None else Level(_attribute(corpus, "level")),
            title=promise.title if corpus is None else str(_attribute(corpus, "title")),
            route=str(params.get("route", "")),
            expected=_expected(corpus),
            test=item.name,
            known=guard.known_failure(cls, name),
        )
        if check.level not in self.levels or not self._fits(check, corpus, target):
            return None
        requires = [*promise.requires, *(_attribute(corpus, "requires") if corpus is not None else ())]
        lacking = target.lacking(*(one for one in map(Capability, dict.fromkeys(requires)) if not one.carried))
        if lacking:
            check.unsupported = _lacks(target, lacking)
        return check

    @staticmethod
    def _fits(check: _Check, corpus: object, target: Target) -> bool:
        """Return whether a corpus entry is for this route; one whose routes the target lacks stays, as unsupported."""
        only = tuple(str(one) for one in getattr(corpus, "routes", None) or ())
        if not only or not check.route:
            return check.route not in target.named_routes()
        here = [route for route in (*target.routes(), *target.named_routes()) if route in only]
        if here:
            return check.route in here
        if check.route != target.routes()[0]:
            return False
        check.route = ""
        check.unsupported = f"the target has no route {' or '.join(only)}"
        return True

    def _selected(self, check: _Check, exact: Collection[str]) -> bool:
        if not self._select:
            return True
        if check.id in exact:
            return True
        return any(matches(pattern, check.id, check.test) for pattern in self._select if pattern not in exact)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run tests that name ``route`` over each of the target's routes."""
        node = metafunc.definition.getparent(SuiteClass)
        if node is None or "route" not in metafunc.fixturenames:
            return
        if any("route" in _names_of(mark) for mark in metafunc.definition.iter_markers("parametrize")):
            return
        target = target_of(node)
        if not target.routes():
            message = f"target {target.name!r} has no route; declare p2p or store"
            raise pytest.Collector.CollectError(message)
        metafunc.parametrize("route", (*target.routes(), *target.named_routes()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why something could not be collected."""
        if report.failed and self._handover:
            self._handover.problems.append(str(report.longrepr))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Tell how many checks will run."""
        if self._handover and self._handover.progress:
            self._handover.progress.begun(sum(item.nodeid in self._checks for item in session.items))

    # Running.

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tell that a check begins."""
        check = self._checks.get(nodeid)
        if check and self._handover and self._handover.progress:
            self._handover.progress.running(check.name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave out what needs an operation that the target does not declare, before anything is started for it."""
        check = self._checks.get(item.nodeid)
        if check is not None and check.unsupported:
            pytest.skip(f"unsupported: {check.unsupported}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Take down how a phase of a test ended; outermost, so that nothing changes it afterwards."""
        report = yield
        check = self._checks.get(item.nodeid)
        if check is not None:
            check.note = item.stash.get(_NOTE, check.note)
            self._see(check, call, report)
        return report

    def _see(self, check: _Check, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        check.seconds += report.duration
        known = hasattr(report, "wasxfail")
        if report.failed:
            phase = "" if report.when == "call" else f"{report.when}: "
            check.fail(phase + self._reason(call, report), report.longreprtext)
        elif report.skipped and check.unsupported and not known:
            check.outcome, check.reason = Outcome.UNSUPPORTED, check.unsupported
        elif known and report.skipped and check.known is not None:
            check.outcome, check.reason = Outcome.UNSUPPORTED, f"known: {check.known}"
        elif known and report.skipped:
            _turn(check, report, "only an override of a suite's test may be marked as a known failure")
        elif report.skipped:
            _turn(check, report, f"a suite's test may not skip ({self._reason(call, report)})")
        elif report.when == "call" and (known or check.known is not None):
            _turn(check, report, f"it was to fail ({check.known}) and does not; remove the override")
        elif report.when == "call":
            check.passed()
            if check.outcome is Outcome.FAILED:
                _turn(check, report, check.reason)

    def _reason(self, call: pytest.CallInfo[None], report: pytest.TestReport) -> str:
        """Return the one line that says what went wrong."""
        if call.excinfo is None:
            return _one_line(report.longreprtext)
        error = call.excinfo.value
        text = str(error) or type(error).__name__
        if not isinstance(error, AssertionError | pytest.fail.Exception | pytest.skip.Exception):
            text = f"{type(error).__name__}: {error}"
        return _one_line(text)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Tell how a check ended."""
        check = self._checks.get(nodeid)
        if check and self._handover and self._handover.progress:
            self._handover.progress.ended(check.result(), check.details)

    # The end.

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """End the side processes, make the reports, and fail a session that lost checks without being asked to."""
        try:
            yield
        finally:
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()
            # A session that lists tests, as editors do, has nothing to report.
            labels = () if session.config.option.collectonly else tuple(self._infos)
            self.reports = tuple(self._report(label) for label in labels)
            if self._handover:
                self._handover.reports.extend(self.reports)
        self._write()
        lost = any(not report.complete for report in self.reports)
        if lost and session.exitstatus == pytest.ExitCode.OK and not self._narrowed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print one line for each target."""
        from moonrelay_conformance.report.text import one_line

        if self.reports:
            terminalreporter.section("moonrelay conformance")
        for report in self.reports:
            markup = {"green": True} if report.passed else {"red": True}
            terminalreporter.write_line(one_line(report), **markup)

    def _report(self, label: str) -> Report:
        results = [check.result() for check in self._checks.values() if check.label == label]
        return Report(
            target=self._infos[label],
            levels=self.levels,
            results=tuple(results),
            environment=environment(),
            complete=all(result.outcome is not Outcome.NOT_RUN for result in results),
            corpus_version=_corpus_version(),
            seconds=round(self._clock.monotonic() - self._started_s, 2),
        )

    def _narrowed(self) -> bool:
        """Return whether the user asked for some of the tests only."""
        option = self._config.option
        chosen = [option.keyword, option.markexpr, getattr(option, "deselect", None), getattr(option, "lf", False)]
        return any(chosen) or bool(self._select) or any("::" in argument for argument in self._config.args)

    def _write(self) -> None:
        if hasattr(self._config, "workerinput"):
            return
        several = len(self.reports) > 1
        for report in self.reports:
            for option, make in (("moonrelay_json", Report.to_json), ("moonrelay_html", _page)):
                given: str | None = self._config.getoption(option, None)
                if given:
                    path = Path(given)
                    own = path.with_name(f"{path.stem}-{report.target.kind}-{report.target.name}{path.suffix}")
                    _write_file(own if several else path, make(report))


def note_of(item: pytest.Item) -> Note:
    """Return the note of a running test."""
    return item.stash.setdefault(_NOTE, Note())


def level_named(name: str) -> Level:
    """Return the level of a name.

    Raises:
        ConfigError: There is none.
    """
    try:
        return Level(name.upper())
    except ValueError:
        message = f"level={name!r} is none of {', '.join(Level)}"
        raise ConfigError(message, field="level") from None


def matches(pattern: str, id_: str, test: str) -> bool:
    """Return whether a pattern of a selection means the check with this id and test."""
    plain = not any(sign in pattern for sign in "*?[")
    return any(fnmatch.fnmatchcase(name, pattern) or (plain and pattern in name) for name in (id_, test))


def environment() -> dict[str, str]:
    """Return versions that may matter; imports nothing."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _page(report: Report) -> bytes:
    from moonrelay_conformance.report.page import page

    return page(report).encode()


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _corpus_version() -> int:
    from moonrelay_conformance.corpus.load import CORPUS_VERSION

    return CORPUS_VERSION


def _turn(check: _Check, report: pytest.TestReport, reason: str) -> None:
    """Make a report that pytest takes for good one of a failure."""
    check.fail(reason)
    report.outcome = "failed"
    report.longrepr = reason
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _one_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST_REASON else f"{line[: _LONGEST_REASON - 1]}…"


def _test_name(item: pytest.Item) -> str:
    return item.originalname if isinstance(item, pytest.Function) else item.name


def _id(name: str) -> str:
    return name.removeprefix("test_").replace("_", "-")


def _is_corpus(value: object) -> bool:
    return all(hasattr(value, name) for name in ("id", "level", "title", "requires"))


def _attribute(value: object, name: str) -> Any:
    return getattr(value, name)


def _kind_of(corpus: object, promise: Promise) -> Kind:
    if promise.kind is not Kind.PROMISE:
        return promise.kind
    return Kind.SCENARIO if hasattr(corpus, "steps") else Kind.CASE


def _expected(corpus: object) -> str:
    """Return what the corpus expects of a case: ``delivered``, or ``refused:code``."""
    expect = getattr(corpus, "expect", None)
    outcome = getattr(expect, "outcome", None)
    if outcome is None:
        return ""
    word = outcome.value if isinstance(outcome, enum.Enum) else str(outcome)
    codes = tuple(getattr(expect, "codes", ()) or ())
    return f"{word}:{'|'.join(codes)}" if codes else word


def _promise_id(item: pytest.Function, name: str, params: Mapping[str, object]) -> str:
    others = [value for key, value in params.items() if key != "route"]
    if not others:
        return _id(name)
    words = [_word(value) for value in others]
    if any(word is None for word in words):
        route = str(params.get("route", ""))
        parts = [part for part in item.callspec.id.split("-") if part != route]
        return f"{_id(name)}[{'-'.join(parts)}]"
    return f"{_id(name)}[{'-'.join(str(word) for word in words)}]"


def _word(value: object) -> str | None:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if value is None or isinstance(value, str | int | float):
        return str(value)
    for name in ("id", "name", "__name__"):
        found = getattr(value, name, None)
        if isinstance(found, str):
            return found
    return None


def _names_of(mark: pytest.Mark) -> tuple[str, ...]:
    names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)


def _lacks(target: Target, lacking: Sequence[Capability]) -> str:
    declared = target.capabilities()
    words = []
    for one in lacking:
        later = declared.get(one) is Support.NOT_IMPLEMENTED
        words.append(f"{one.value} ({'not implemented yet' if later else 'not declared'})")
    return f"needs {', '.join(words)}"


__all__ = ["NOT_SELECTED", "Handover", "Progress", "Run", "environment", "level_named", "matches", "note_of"]
