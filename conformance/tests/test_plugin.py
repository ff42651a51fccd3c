"""The pytest plugin: what it collects, what it makes of results, and what no class, option or conftest can hide."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moonrelay_conformance import collecting, fixtures, guard, recording  # noqa: F401 - outlive pytester's snapshots
from moonrelay_conformance.report import page, text  # noqa: F401
from moonrelay_conformance.results import Outcome, Report
from moonrelay_conformance.suites import chosen

pytest_plugins = ["pytester"]

HERE = Path(__file__).parent


@pytest.fixture
def folder(pytester: pytest.Pytester) -> pytest.Pytester:
    """A folder of somebody else's, with the small suite beside it."""
    (pytester.path / "mini_suite.py").write_text((HERE / "mini.py").read_text())
    pytester.syspathinsert()
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider\n")
    return pytester


def run(folder: pytest.Pytester, source: str, *options: str, code: int | None = None) -> tuple[Report, str]:
    """Run a module of tests; return its one report and what was printed."""
    folder.makepyfile(test_mine=f"import pytest\nfrom mini_suite import *\nfrom mini_suite import Helped\n{source}")
    result = folder.runpytest_inprocess("--moonrelay-json=out.json", *options)
    printed = "\n".join(result.outlines)
    if code is not None:
        assert result.ret == code, printed
    reports = list(folder.path.glob("out*.json"))
    assert len(reports) == 1, printed
    return Report.from_json(reports[0].read_bytes()), printed


def outcomes(report: Report) -> dict[str, str]:
    return {f"{one.id}:{one.route}" if one.route else one.id: one.outcome.value for one in report.results}


WHOLE = {
    "no-test-is-overridden-or-removed": "held",
    "it-has-a-name": "held",
    "it-expires": "unsupported",
    "it-holds:p2p": "held",
    "it-holds:store": "held",
    "plain:p2p": "delivered",
    "plain:store": "delivered",
    "refused:p2p": "refused",
    "refused:store": "refused",
    "chunks:p2p": "unsupported",
    "chunks:store": "unsupported",
    "only-store:store": "delivered",
    "only-spill": "unsupported",
    "numbers[1]": "held",
    "numbers[2]": "held",
}
MINE = "class TestMine(MiniConformance):\n    target = MiniTarget\n"


def test_a_class_with_a_target_runs_its_suite(folder: pytest.Pytester) -> None:
    report, printed = run(folder, MINE, code=0)
    assert outcomes(report) == WHOLE
    assert report.passed
    assert "queue:mini: passed (L1 2 delivered, 2 held; L2" in printed
    assert list(report.counts()) == ["L1", "L2", "L3"]


def test_a_result_says_what_was_checked(folder: pytest.Pytester) -> None:
    report, _ = run(folder, MINE)
    found = {one.id: one for one in report.results}
    assert (found["plain"].kind, found["plain"].level, found["plain"].title) == ("case", "L1", "A plain case")
    assert (found["plain"].digest, found["plain"].expected) == ("plain-digest", "delivered")
    assert (found["refused"].code, found["refused"].expected) == ("unsupported_tensor", "refused:unsupported_tensor")
    assert found["it-has-a-name"].steps == ("looked",)
    assert found["it-expires"].reason == "needs ttl (not implemented yet)"
    assert found["chunks"].reason == "needs chunked (not declared)"
    assert found["only-spill"].reason == "the target has no route spill"


def test_a_named_route_runs_only_what_names_it(folder: pytest.Pytester) -> None:
    source = (
        "class Spilling(MiniTarget):\n    def named_routes(self):\n        return ('spill',)\n"
        "class TestMine(MiniConformance):\n    target = Spilling\n"
    )
    report, _ = run(folder, source, code=0)
    usual = {name: outcome for name, outcome in WHOLE.items() if name != "only-spill"}
    assert outcomes(report) == {**usual, "only-spill:spill": "delivered"}


def test_an_instance_is_as_good_as_a_class(folder: pytest.Pytester) -> None:
    report, _ = run(folder, "class TestMine(MiniConformance):\n    target = MiniTarget()\n", code=0)
    assert outcomes(report) == WHOLE


def test_a_broken_promise_fails_by_name(folder: pytest.Pytester) -> None:
    report, printed = run(folder, "class TestMine(MiniConformance):\n    target = BrokenTarget\n", code=1)
    assert [one.reason for one in report.results if one.outcome is Outcome.FAILED] == ["the store lost it"]
    assert "queue:broken: FAILED" in printed
    assert "1 failed" in printed


def test_levels_leave_out_what_is_above(folder: pytest.Pytester) -> None:
    report, _ = run(folder, MINE, "--moonrelay-level=L1", code=0)
    assert {one.level for one in report.results} == {"L1"}
    assert report.complete
    assert report.levels == ("L1",)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def test_it_has_a_name(self): pass", "overrides the test"),
        ("test_it_has_a_name = None", "removes the test"),
        ("@pytest.mark.xfail\n    def test_it_has_a_name(self): assert 0", "overrides the test"),
        ("@pytest.mark.xfail(False, reason='x')\n    def test_it_has_a_name(self): pass", "overrides the test"),
        ("@pytest.mark.skip(reason='x')\n    def test_it_has_a_name(self): pass", "overrides the test"),
        ("__test__ = False", "removes all of its tests"),
        ("def __init__(self): pass", "keeps pytest from running"),
    ],
)
def test_no_override_goes_unseen(folder: pytest.Pytester, body: str, said: str) -> None:
    report, printed = run(folder, f"{MINE}    {body}\n", code=1)
    assert outcomes(report)["no-test-is-overridden-or-removed"] == "failed"
    assert said in printed


def test_an_override_of_a_part_is_seen(folder: pytest.Pytester) -> None:
    source = "class TestMine(Helped):\n    target = MiniTarget\n    def sizes(self): return ()\n"
    _, printed = run(folder, source, code=1)
    assert "TestMine.sizes overrides a part of the suite" in printed


def test_an_override_further_up_is_seen(folder: pytest.Pytester) -> None:
    source = (
        "class Mixin:\n    def test_it_has_a_name(self): pass\n"
        "class TestMine(Mixin, MiniConformance):\n    target = MiniTarget\n"
    )
    _, printed = run(folder, source, code=1)
    assert "Mixin.test_it_has_a_name overrides the test" in printed


def test_wrapping_the_target_is_fine(folder: pytest.Pytester) -> None:
    source = (
        "class Wrapped(MiniTarget):\n    def supports(self, *c): return super().supports(*c)\n"
        "class TestMine(MiniConformance):\n    target = Wrapped()\n    def helper_of_mine(self): pass\n"
        "    def test_of_mine(self): pass\n"
    )
    report, _ = run(folder, source, code=0)
    assert outcomes(report) == WHOLE


KNOWN = (
    "class TestMine(MiniConformance):\n    target = BrokenTarget\n"
    "    @pytest.mark.xfail(reason='issue 7')\n"
    "    def test_it_holds(self, target, route): {}\n"
)


def test_a_known_failure_counts_as_unsupported_with_its_reason(folder: pytest.Pytester) -> None:
    report, _ = run(folder, KNOWN.format("assert 0"), code=0)
    held = [one for one in report.results if one.id == "it-holds"]
    assert [(one.outcome.value, one.reason) for one in held] == [("unsupported", "known: issue 7")] * 2
    assert held[0].title == "It holds on every route"


def test_a_known_failure_that_passes_fails(folder: pytest.Pytester) -> None:
    report, printed = run(folder, KNOWN.format("pass"), code=1)
    assert outcomes(report)["it-holds:p2p"] == "failed"
    assert "issue 7" in printed


@pytest.mark.parametrize(
    "mark",
    ["@pytest.mark.xfail(reason='all of it')\n", "@pytest.mark.skip(reason='all of it')\n"],
)
def test_a_mark_on_the_class_hides_nothing(folder: pytest.Pytester, mark: str) -> None:
    source = f"{mark}class TestMine(MiniConformance):\n    target = BrokenTarget\n"
    report, _ = run(folder, source, code=1)
    assert outcomes(report)["it-holds:store"] == "failed"


def test_a_skip_inside_a_test_fails(folder: pytest.Pytester) -> None:
    source = (
        "class Skipping(MiniTarget):\n    @property\n    def name(self): return pytest.skip('not today')\n"
        "    def info(self): return MiniTarget().info()\n"
        "class TestMine(MiniConformance):\n    target = Skipping\n"
    )
    report, printed = run(folder, source, code=1)
    assert outcomes(report)["it-has-a-name"] == "failed"
    assert "a suite's test may not skip (not today)" in printed


def test_a_failed_setup_and_a_failed_teardown_count(folder: pytest.Pytester) -> None:
    folder.makeconftest(
        "import pytest\n@pytest.fixture(autouse=True)\ndef around(request):\n"
        "    if 'numbers[1]' in request.node.name: raise OSError('no room')\n"
        "    yield\n    assert 'numbers[2]' not in request.node.name, 'left over'\n"
    )
    report, _ = run(folder, MINE, code=1)
    reasons = {one.id: one.reason for one in report.results}
    assert reasons["numbers[1]"] == "setup: OSError: no room"
    assert reasons["numbers[2]"] == "teardown: left over"


def test_what_was_deselected_is_in_the_report(folder: pytest.Pytester) -> None:
    report, printed = run(folder, MINE, "-k", "has_a_name", code=0)
    assert not report.complete
    assert outcomes(report)["it-holds:p2p"] == "not_run"
    assert outcomes(report)["it-has-a-name"] == "held"
    assert "INCOMPLETE" in printed


def test_what_a_conftest_takes_away_fails_the_session(folder: pytest.Pytester) -> None:
    folder.makeconftest(
        "def pytest_collection_modifyitems(items): items[:] = [one for one in items if 'holds' not in one.name]\n"
    )
    report, printed = run(folder, MINE, code=1)
    assert not report.complete
    assert outcomes(report)["it-holds:store"] == "not_run"
    assert "INCOMPLETE" in printed


def test_what_a_conftest_does_not_collect_is_seen(folder: pytest.Pytester) -> None:
    folder.makeconftest(
        "import pytest\n@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
        "def pytest_pycollect_makeitem(collector, name, obj):\n"
        "    found = yield\n    return [] if name == 'test_it_holds' else found\n"
    )
    _, printed = run(folder, MINE, code=1)
    assert "pytest was kept from collecting test_it_holds" in printed


def test_an_interrupted_run_is_incomplete(folder: pytest.Pytester) -> None:
    folder.makeconftest("def pytest_runtest_call(item):\n    if 'it_holds' in item.name: raise KeyboardInterrupt\n")
    folder.makepyfile(test_mine=f"from mini_suite import *\n{MINE}")
    # In a process of its own: pytester hands an inner Ctrl-C on.
    result = folder.runpytest_subprocess("--moonrelay-json=out.json")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    report = Report.from_json((folder.path / "out.json").read_bytes())
    assert not report.complete
    assert outcomes(report)["plain:p2p"] == "not_run"
    assert outcomes(report)["it-has-a-name"] == "held"


def test_two_targets_in_a_module_have_a_report_each(folder: pytest.Pytester) -> None:
    source = MINE + "class TestOther(MiniConformance):\n    target = BrokenTarget\n"
    folder.makepyfile(test_mine=f"from mini_suite import *\n{source}")
    result = folder.runpytest_inprocess("--moonrelay-json=out/a.json", "--moonrelay-html=out/a.html")
    result.stdout.fnmatch_lines(["queue:mini: passed*", "queue:broken: FAILED*"])
    names = {path.name for path in (folder.path / "out").iterdir()}
    assert names == {"a-queue-mini.json", "a-queue-broken.json", "a-queue-mini.html", "a-queue-broken.html"}


UNMADE = """
class Bad(MiniTarget):
    def __init__(self): raise OSError('no host')
class TestMine(MiniConformance):
    target = Bad
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class TestMine(MiniConformance): pass\n", "has no target"),
        ("class TestMine(MiniConformance):\n    target = 3\n", "which is no Target"),
        ("class Bad(MiniTarget):\n    kind = 'relay'\nclass TestMine(MiniConformance):\n    target = Bad\n", "'relay'"),
        (UNMADE, "target cannot be made: OSError: no host"),
    ],
)
def test_a_class_without_a_fit_target_is_an_error(folder: pytest.Pytester, source: str, said: str) -> None:
    folder.makepyfile(test_mine=f"from mini_suite import *\n{source}")
    result = folder.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert said in "\n".join(result.outlines)


def test_an_imported_suite_is_not_collected(folder: pytest.Pytester) -> None:
    folder.makepyfile(test_mine="from mini_suite import MiniConformance as TestImported\ndef test_a(): pass\n")
    folder.runpytest_inprocess().assert_outcomes(passed=1)


def test_a_named_target_is_run_without_a_file(folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    import mini_suite

    monkeypatch.setitem(sys.modules, "mini_suite", mini_suite)
    monkeypatch.setattr(chosen, "suite_for", lambda _kind: mini_suite.MiniConformance)
    folder.makepyfile(test_mine="def test_not_of_the_suite(): pass\n")
    result = folder.runpytest_inprocess("--moonrelay-adapter=mini_suite:MiniTarget", "--moonrelay-json=out.json")
    assert result.ret == 0
    assert outcomes(Report.from_json((folder.path / "out.json").read_bytes())) == WHOLE
    assert "test_mine" not in "\n".join(result.outlines)


def test_a_class_without_a_target_takes_the_named_one(folder: pytest.Pytester) -> None:
    report, _ = run(
        folder,
        "class TestMine(MiniConformance): pass\n",
        "test_mine.py",
        "--moonrelay-target=mini_suite:MiniTarget",
        code=0,
    )
    assert outcomes(report) == WHOLE


def test_a_suite_that_cannot_be_imported_says_so(folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen, "SUITES", {"queue": "moonrelay_conformance.suites.not_there:Queue"})
    result = folder.runpytest_inprocess("--moonrelay-adapter=mini_suite:MiniTarget")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "the suite for the kind 'queue' cannot be imported: No module named" in "\n".join(result.outlines)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--moonrelay-adapter=difusers"], "did you mean 'diffusers'?"),
        (["--moonrelay-adapter=queue:memory", "--moonrelay-level=L7"], "level='L7' is none of L1, L2, L3"),
    ],
)
def test_a_wrong_option_is_one_line(folder: pytest.Pytester, options: list[str], said: str) -> None:
    result = folder.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in "\n".join(result.errlines)


def test_a_session_without_a_suite_notices_nothing(folder: pytest.Pytester) -> None:
    folder.makepyfile(
        """
        import sys
        import pytest

        @pytest.fixture
        def target(): return "mine"

        def test_fixtures_are_ones_own(target): assert target == "mine"

        def test_pool_is_no_fixture(request):
            with pytest.raises(pytest.FixtureLookupError):
                request.getfixturevalue("pool")

        def test_nothing_is_loaded():
            ours = {name for name in sys.modules if name.partition(".")[0] in ("moonrelay", "moonrelay_conformance")}
            assert ours == {"moonrelay_conformance", "moonrelay_conformance.plugin"}
            assert "torch" not in sys.modules
        """
    )
    result = folder.runpytest_subprocess()
    result.assert_outcomes(passed=3)
    assert "moonrelay conformance" not in "\n".join(result.outlines)


def test_reports_can_be_parsed_by_anybody(folder: pytest.Pytester) -> None:
    run(folder, MINE)
    parsed: dict[str, Any] = json.loads((folder.path / "out.json").read_text())
    assert parsed["report_version"] == 1
    assert parsed["target"]["name"] == "mini"
    assert {one["outcome"] for one in parsed["results"]} == {"held", "unsupported", "delivered", "refused"}
    assert str(folder.path) not in (folder.path / "out.json").read_text()


def test_a_failure_stays_one_when_the_test_is_tried_again(folder: pytest.Pytester) -> None:
    """As plugins that repeat flaky tests do it: the last try is what pytest counts."""
    folder.makeconftest(
        "import pytest\nfrom _pytest.runner import runtestprotocol\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_runtest_protocol(item, nextitem):\n"
        "    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)\n"
        "    runtestprotocol(item, nextitem=nextitem, log=False)\n"
        "    runtestprotocol(item, nextitem=nextitem)\n"
        "    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)\n"
        "    return True\n"
    )
    source = (
        "class Flaky(MiniTarget):\n    tries = 0\n    @property\n    def name(self):\n"
        "        type(self).tries += 1\n        assert self.tries != 1, 'the first time'\n        return 'mini'\n"
        "    def info(self): return MiniTarget().info()\n"
        "class TestMine(MiniConformance):\n    target = Flaky\n"
    )
    report, _ = run(folder, source, code=1)
    assert outcomes(report) == {**WHOLE, "it-has-a-name": "failed"}
    assert "the first time" in {one.reason for one in report.results}


@pytest.mark.parametrize("where", ["module", "class"])
def test_a_fixture_of_the_suite_that_is_replaced_is_seen(folder: pytest.Pytester, where: str) -> None:
    fixture = "@pytest.fixture\ndef note(): return None\n"
    body = "    @pytest.fixture\n    def note(self): return None\n" if where == "class" else ""
    report, printed = run(folder, (fixture if where == "module" else "") + MINE + body, code=1)
    assert outcomes(report)["no-test-is-overridden-or-removed"] == "failed"
    assert "the suite's fixture `note` is replaced in" in printed


def test_another_function_in_a_tests_place_is_seen(folder: pytest.Pytester) -> None:
    folder.makeconftest(
        "def pytest_itemcollected(item):\n    if 'it_holds' in item.name: item.obj = lambda target, route: None\n"
    )
    report, printed = run(folder, "class TestMine(MiniConformance):\n    target = BrokenTarget\n", code=1)
    assert outcomes(report)["no-test-is-overridden-or-removed"] == "failed"
    assert "another function stands in the place of test_it_holds" in printed


def test_a_class_that_chooses_the_routes_is_seen(folder: pytest.Pytester) -> None:
    source = (
        "@pytest.mark.parametrize('route', ['p2p'])\nclass TestMine(MiniConformance):\n    target = BrokenTarget\n"
        "    @pytest.fixture(autouse=True)\n    def every(self, route): pass\n"
    )
    report, printed = run(folder, source, code=1)
    assert outcomes(report)["no-test-is-overridden-or-removed"] == "failed"
    assert "parametrize on TestMine" in printed


def test_a_session_that_only_collects_is_no_failure(folder: pytest.Pytester) -> None:
    """Editors list tests so."""
    folder.makepyfile(test_mine=f"from mini_suite import *\n{MINE}")
    result = folder.runpytest_inprocess("--collect-only", "--moonrelay-json=out.json")
    assert result.ret == 0
    assert not (folder.path / "out.json").exists()
    assert "INCOMPLETE" not in "\n".join(result.outlines)
