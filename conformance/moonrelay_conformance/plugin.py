"""The pytest plugin (entry point ``pytest11``): options, markers, and the moment when the suite comes into play.

It is loaded in every pytest session of everybody who has Moonrelay installed, so it owns the least it can: without a
class of a suite, and without one of its options, a session is as if it were not there. What does the work is registered
when the first class of a suite is collected: `moonrelay_conformance.fixtures`, `moonrelay_conformance.collecting` and
`moonrelay_conformance.recording`. Everything belongs to one session and lies in its ``config.stash``, so that sessions
may be nested. (PYTEST_DONT_REWRITE: no test's assertions are here.)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from moonrelay_conformance.recording import Run

#: The module of which pytest is told when a target is named and no file is.
CHOSEN: Final = Path(__file__).with_name("suites") / "chosen.py"
#: Name under which `moonrelay_conformance.run` hands objects to a session that it starts.
HANDOVER: Final = "moonrelay-conformance-handover"

_BASE: Final = "moonrelay_conformance.suites.base"
_RUN: Final = pytest.StashKey["Run"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; all begin with ``--moonrelay-``."""
    group = parser.getgroup("moonrelay", "moonrelay conformance")
    group.addoption(
        "--moonrelay-adapter",
        "--moonrelay-target",
        dest="moonrelay_target",
        metavar="NAME",
        help="run the conformance suite against this adapter; also kind:name, or module:Class of a target",
    )
    group.addoption(
        "--moonrelay-level", dest="moonrelay_level", metavar="LEVEL", help="L1, L2 or L3: this level and those below"
    )
    group.addoption("--moonrelay-json", dest="moonrelay_json", metavar="FILE", help="write the report as JSON")
    group.addoption("--moonrelay-html", dest="moonrelay_html", metavar="FILE", help="write the report as a page")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; with a target named, take the suite's module where no file is given."""
    config.addinivalue_line("markers", "moonrelay_promise(promise): what a test of a conformance suite promises")
    config.addinivalue_line("markers", "timeout(seconds): bound of one test, where pytest-timeout is installed")
    pytest.register_assert_rewrite("moonrelay_conformance.suites")
    named = config.getoption("moonrelay_target", None)
    if named:
        activate(config)
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args[:] = [str(CHOSEN)]
    elif config.pluginmanager.has_plugin(HANDOVER):
        activate(config)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the suite's own module by way of the chosen target's kind."""
    if module_path != CHOSEN:
        return None
    from moonrelay_conformance.collecting import ChosenModule

    activate(parent.config)
    return ChosenModule.make(parent, module_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> pytest.Collector | list[pytest.Collector] | None:
    """Collect the classes of a suite; leave everything else to pytest."""
    if not isinstance(obj, type) or _BASE not in sys.modules:
        return None
    from moonrelay_conformance.suites.base import Suite

    if not issubclass(obj, Suite):
        return None
    from moonrelay_conformance.collecting import make_suite_class

    activate(collector.config)
    return make_suite_class(collector, name, obj)


def activate(config: pytest.Config) -> Run:
    """Return the session's run of the suite; the first call registers fixtures and hooks.

    Raises:
        pytest.UsageError: An option is wrong.
    """
    known = config.stash.get(_RUN, None)
    if known is not None:
        return known
    from moonrelay.errors import MoonrelayError
    from moonrelay_conformance import fixtures
    from moonrelay_conformance.recording import Run

    try:
        run = Run(config)
    except MoonrelayError as exc:
        raise pytest.UsageError(str(exc)) from exc
    config.stash[_RUN] = run
    config.pluginmanager.register(fixtures, "moonrelay-conformance-fixtures")
    config.pluginmanager.register(run, "moonrelay-conformance-run")
    return run
