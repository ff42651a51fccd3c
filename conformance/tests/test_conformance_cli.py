"""``moonrelay conformance`` and the run behind it: exit codes, where output goes, and seclusion from the folder."""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner
from typer.testing import Result as Invoked

from moonrelay.cli import conformance as command
from moonrelay.cli.main import make_app
from moonrelay.errors import MoonrelayError
from moonrelay_conformance.report import markdown
from moonrelay_conformance.results import Kind, Level, Outcome, Report, Result, TargetInfo
from moonrelay_conformance.run import RunBroken, RunInterrupted, run
from moonrelay_conformance.suites import chosen

HERE = Path(__file__).parent


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The small suite, in place of the queue's."""
    spec = importlib.util.spec_from_file_location("mr_mini", HERE / "mini.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mr_mini", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(chosen, "suite_for", lambda _kind: module.MiniConformance)
    return module


def invoke(*argv: str) -> Invoked:
    # The small suite stands in for the queue's in this process alone.
    here = ("--jobs", "1") if any(word.startswith("mr_mini:") for word in argv) else ()
    return CliRunner().invoke(make_app(["conformance"]), ["conformance", *argv, *here], env={"COLUMNS": "200"})


class Watcher:
    """Takes down what a run tells."""

    def __init__(self) -> None:
        self.total = 0
        self.began: list[str] = []
        self.results: list[Result] = []
        self.details: list[str] = []

    def begun(self, total: int) -> None:
        self.total = total

    def running(self, check: str) -> None:
        self.began.append(check)

    def ended(self, result: Result, details: str) -> None:
        self.results.append(result)
        self.details.append(details)
        print("seen")  # must come out where the caller's output goes


class TestRun:
    def test_a_run_gives_its_report_and_tells_how_it_goes(self, mini: Any, capsys: pytest.CaptureFixture[str]) -> None:
        watcher = Watcher()
        report = run(mini.BrokenTarget(), progress=watcher)
        assert not report.passed
        assert report.complete
        assert watcher.total == len(watcher.results) == len(report.results)
        assert "it-holds (store)" in watcher.began
        failed = [index for index, one in enumerate(watcher.results) if one.outcome is Outcome.FAILED]
        assert [watcher.results[index].id for index in failed] == ["it-holds"]
        assert "the store lost it" in watcher.details[failed[0]]
        assert capsys.readouterr().out == "seen\n" * watcher.total

    def test_runs_of_other_targets_do_not_mix(self, mini: Any) -> None:
        assert run(mini.MiniTarget()).passed
        assert not run(mini.BrokenTarget()).passed
        assert run(mini.MiniTarget()).target.name == "mini"

    def test_levels_and_selection(self, mini: Any) -> None:
        assert {one.level for one in run(mini.MiniTarget(), levels=["L2"]).results} == {Level.L2}
        chosen_ones = run(mini.BrokenTarget(), select=["numbers*"])
        ran = {one.id for one in chosen_ones.results if one.outcome is not Outcome.NOT_RUN}
        assert ran == {"no-test-is-overridden-or-removed", "numbers[1]", "numbers[2]"}
        assert not chosen_ones.complete

    def test_an_exact_id_selects_no_other(self, mini: Any) -> None:
        report = run(mini.MiniTarget(), select=["plain"])
        assert [one.route for one in report.results if one.id == "plain"] == ["p2p", "store"]
        assert {one.id for one in report.results if one.outcome is Outcome.DELIVERED} == {"plain"}

    def test_the_folder_has_no_say(self, mini: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_functions = check_*\n")
        (tmp_path / "conftest.py").write_text("raise OSError('somebody else')\n")
        monkeypatch.chdir(tmp_path)
        assert run(mini.MiniTarget()).passed
        assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "pytest.ini"]

    def test_a_check_that_hangs_fails_and_the_run_goes_on(self, mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        def hang(self: object, number: int) -> None:
            threading.Event().wait(60 if number == 1 else 0)

        hang.pytestmark = mini.MiniConformance.test_numbers.pytestmark  # type: ignore[attr-defined]
        monkeypatch.setattr(mini.MiniConformance, "test_numbers", hang)
        report = run(mini.MiniTarget(), timeout_s=0.5)
        ends = {one.id: (one.outcome.value, one.reason) for one in report.results}
        assert ends["numbers[1]"][0] == "failed"
        assert "Timeout" in ends["numbers[1]"][1]
        assert ends["numbers[2]"] == ("held", "")

    def test_the_callers_alarm_is_kept(self, mini: Any) -> None:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        left, _ = signal.setitimer(signal.ITIMER_REAL, 1000)
        try:
            run(mini.MiniTarget(), levels=["L1"])
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 500
        finally:
            signal.setitimer(signal.ITIMER_REAL, left)
            signal.signal(signal.SIGALRM, before)

    @pytest.mark.parametrize(("number", "handled"), [(signal.SIGINT, None), (signal.SIGTERM, lambda *_: None)])
    def test_a_signal_ends_the_run_with_what_it_found(
        self, mini: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, handled: Any
    ) -> None:
        def interrupted(self: object, number_of_test: int = 1) -> None:
            os.kill(os.getpid(), number)

        interrupted.pytestmark = mini.MiniConformance.test_it_has_a_name.pytestmark  # type: ignore[attr-defined]
        monkeypatch.setattr(mini.MiniConformance, "test_it_has_a_name", interrupted)
        before = signal.getsignal(number)
        if handled is not None:
            signal.signal(number, handled)
        try:
            with pytest.raises(RunInterrupted) as caught:
                run(mini.MiniTarget())
        finally:
            signal.signal(number, before)
        assert caught.value.signal_number == number
        report = caught.value.report
        assert report is not None
        assert not report.complete
        assert {one.id: one.outcome.value for one in report.results}["numbers[2]"] == "not_run"

    def test_a_suite_that_cannot_be_had_is_one_line(self, mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(chosen, "SUITES", {"queue": "moonrelay_conformance.suites.none:Nothing"})
        with pytest.raises(RunBroken, match="cannot be imported: No module named"):
            run(mini.MiniTarget())

    def test_it_leaves_no_file_and_no_thread(self, mini: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import tempfile
        import threading

        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # in the machine's, other runs come and go
        made: list[str] = []

        class Looks:
            def pytest_runtest_logstart(self) -> None:
                made.extend(path.name for path in tmp_path.iterdir())

        threads = set(threading.enumerate())
        run(mini.MiniTarget(), plugins=[Looks()])
        assert {name.rpartition("-")[0] for name in made} >= {"moonrelay-conformance"}
        assert list(tmp_path.iterdir()) == []
        assert set(threading.enumerate()) == threads


class TestCommand:
    def test_a_target_that_passes_is_0(self, mini: Any) -> None:
        done = invoke("mr_mini:MiniTarget")
        assert done.exit_code == 0, done.output
        assert "15/15 L3" in done.output
        assert "L1" in done.output
        assert "queue:mini: passed, 15 checks" in done.output

    def test_a_target_that_fails_is_1_and_says_how_to_rerun(self, mini: Any) -> None:
        done = invoke("mr_mini:BrokenTarget")
        assert done.exit_code == 1
        assert "✘ it-holds (store)  It holds on every route" in done.output
        assert "the store lost it" in done.output
        assert "moonrelay conformance mr_mini:BrokenTarget --only it-holds --verbose" in done.output
        assert "queue:broken: FAILED" in done.output

    def test_json_is_alone_on_stdout(self, mini: Any) -> None:
        done = invoke("mr_mini:MiniTarget", "--json", "-")
        assert done.exit_code == 0
        report = Report.from_json(done.stdout.encode())
        assert report.passed
        assert "15/15" in done.stderr

    def test_files_are_written(self, mini: Any, tmp_path: Path) -> None:
        done = invoke(
            "mr_mini:BrokenTarget", "--json", f"{tmp_path}/new/a.json", "--html", f"{tmp_path}/a.html", "--level", "L1"
        )
        assert done.exit_code == 0, done.output
        report = Report.from_json((tmp_path / "new/a.json").read_bytes())
        assert report.levels == ("L1",)
        assert "queue:broken" in (tmp_path / "a.html").read_text()

    def test_a_report_that_cannot_be_written_hides_no_result(self, mini: Any) -> None:
        done = invoke("mr_mini:BrokenTarget", "--json", "/dev/full")
        assert done.exit_code == 2
        assert "queue:broken: FAILED" in done.output
        assert "'/dev/full' cannot be written: No space left on device" in done.stderr

    def test_the_guard_alone_can_be_asked_for(self, mini: Any) -> None:
        assert invoke("mr_mini:MiniTarget", "--only", "no-test-is-overridden-or-removed").exit_code == 0
        assert invoke("mr_mini:MiniTarget", "--only", "test_no_test*").exit_code == 0

    def test_only_asks_for_less_and_passes_with_it(self, mini: Any) -> None:
        done = invoke("mr_mini:BrokenTarget", "--only", "plain")
        assert done.exit_code == 0, done.output
        assert "INCOMPLETE" in done.output
        assert invoke("mr_mini:BrokenTarget", "--only", "it-holds").exit_code == 1

    def test_verbose_shows_the_traceback(self, mini: Any) -> None:
        assert "assert not" in invoke("mr_mini:BrokenTarget", "--only", "it-holds", "--verbose").output

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            ([], "name one target"),
            (["a", "b"], "name one target"),
            (["sqlit"], "did you mean 'sqlite'"),
            (["memory"], "ambiguous"),
            (["mr_mini:MiniTarget", "--level", "L4"], "none of L1, L2, L3"),
            (["mr_mini:MiniTarget", "--only", "no-such-check"], "matches no check"),
            (["mr_mini:MiniTarget", "--only", "no-test-typed-wrong"], "matches no check"),
            (["mr_mini:MiniTarget", "--only", "plain", "--only", "pla1n"], "only='pla1n' matches no check"),
            (["mr_mini:MiniTarget", "--json", "/"], "'/' cannot be written: Is a directory"),
            (["mr_mini:MiniTarget", "--html", "/dev/null/a/b.html"], "'/dev/null/a/b.html' cannot be written"),
            (["--matrix", "a.json", "--json", "b.json"], "--json goes with a target"),
            (["--matrix", "a.json", "--only", "plain"], "--only goes with a target"),
            (["mr_mini:MiniTarget", "--markdown", "x.md"], "--markdown goes with --matrix"),
            (["--matrix", "a.json", "--keep"], "name it by --against"),
            (["--matrix"], "needs the reports"),
            (["--matrix", "no-such.json"], "cannot be read"),
        ],
    )
    def test_a_wrong_argument_is_2_and_one_line(self, mini: Any, argv: list[str], said: str) -> None:
        done = invoke(*argv)
        assert done.exit_code == 2, done.output
        assert said in done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith("error: ")
        assert "/15 L" not in done.output or "matches no check" in said  # told before minutes are spent

    def test_a_missing_extra_is_one_line(self, mini: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None if name == "torch" else object())
        done = invoke("mr_mini:MiniTarget")
        assert done.exit_code == 1
        assert "needs torch; pip install 'moonrelay[conformance]'" in done.stderr

    def test_an_adapter_without_its_host_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "moonrelay_diffusers.plugin.find_spec", lambda name: None if name == "diffusers" else object()
        )
        done = invoke("diffusers")
        assert done.exit_code == 1
        assert "pip install 'moonrelay[diffusers]'" in done.stderr

    def test_a_target_that_needs_no_host_runs_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("moonrelay_lightx2v.plugin.host_folder", lambda: None)
        done = invoke("lightx2v", "--only", "one-byte", "--jobs", "1")
        assert done.exit_code == 0, done.output
        assert "not installed" not in done.stderr
        assert "one-byte (p2p)" in done.output

    def test_the_list_says_what_there_is(self) -> None:
        done = invoke("--list")
        assert done.exit_code == 0
        assert all(name in done.output for name in ("adapter:diffusers", "engine:shm", "relay:local", "queue:sqlite"))

    def test_a_terminal_shows_a_bar_and_keeps_failures(self) -> None:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=120, highlight=False)
        failed = Result(id="a-case", kind=Kind.CASE, level=Level.L1, outcome=Outcome.FAILED, reason="it is lost")
        with command._display(console, verbose=True) as display:
            assert isinstance(display, command._Live)
            display.begun(2)
            display.running("a-case (p2p)")
            display.ended(failed, "the traceback")
        assert "a-case (p2p)" in out.getvalue()
        assert "1/2" in out.getvalue()
        assert "it is lost" in out.getvalue()
        assert "the traceback" in out.getvalue()


def written(folder: Path, name: str, *results: Result, kind: str = "adapter", complete: bool = True) -> str:
    info = TargetInfo(kind=kind, name=name)
    path = folder / f"{name}.json"
    path.write_bytes(Report(target=info, levels=tuple(Level), results=results, complete=complete).to_json())
    return str(path)


def case(outcome: Outcome, digest: str = "", id_: str = "a") -> Result:
    return Result(id=id_, kind=Kind.CASE, level=Level.L1, outcome=outcome, title="A case", digest=digest)


class TestMatrix:
    def test_reports_join_into_files(self, tmp_path: Path) -> None:
        one = written(tmp_path, "one", case(Outcome.DELIVERED, "1"))
        two = written(tmp_path, "two", case(Outcome.DELIVERED, "1"))
        done = invoke("--matrix", one, two, "--markdown", f"{tmp_path}/m.md", "--html", f"{tmp_path}/out/index.html")
        assert done.exit_code == 0, done.output
        assert "2 targets, 1 checks: everything holds" in done.output
        assert len(markdown.parse((tmp_path / "m.md").read_text())) == 2
        assert "adapter:two" in (tmp_path / "out/index.html").read_text()

    def test_without_a_file_the_markdown_is_alone_on_stdout(self, tmp_path: Path) -> None:
        done = invoke("--matrix", written(tmp_path, "one", case(Outcome.DELIVERED, "1")))
        assert done.stdout.startswith("# Conformance matrix")
        assert "everything holds" not in done.stdout
        assert "everything holds" in done.stderr

    def test_a_disagreement_is_1(self, tmp_path: Path) -> None:
        one = written(tmp_path, "one", case(Outcome.DELIVERED, "1"))
        done = invoke(
            "--matrix", one, written(tmp_path, "two", case(Outcome.DELIVERED, "2")), "--html", f"{tmp_path}/m"
        )
        assert done.exit_code == 1
        assert "✘ a: delivered different bytes: adapter:one: 1; adapter:two: 2" in done.output

    def test_a_failure_and_an_incomplete_report_are_1(self, tmp_path: Path) -> None:
        done = invoke("--matrix", written(tmp_path, "one", case(Outcome.FAILED)), "--html", f"{tmp_path}/m")
        assert done.exit_code == 1
        assert "✘ failed: adapter:one a" in done.output
        done = invoke("--matrix", written(tmp_path, "one", complete=False), "--html", f"{tmp_path}/m")
        assert done.exit_code == 1
        assert "adapter:one: the report is incomplete" in done.output

    def test_what_got_worse_than_committed_is_1(self, tmp_path: Path) -> None:
        good = written(tmp_path, "one", case(Outcome.DELIVERED, "1"), case(Outcome.FAILED, id_="b"))
        committed = f"{tmp_path}/matrix.md"
        invoke("--matrix", good, "--markdown", committed)
        same = invoke("--matrix", good, "--against", committed)
        assert same.exit_code == 0, same.output
        assert "nothing got worse" in same.output
        bad = written(tmp_path, "one", case(Outcome.UNSUPPORTED), case(Outcome.HELD, id_="b"))
        # The file that is compared with may be the one that is written.
        done = invoke("--matrix", bad, "--against", committed, "--markdown", committed)
        assert done.exit_code == 1
        assert "✘ worse: adapter:one a: delivered → unsupported" in done.output
        assert "✔ better: adapter:one b: failed → held" in done.output
        assert invoke("--matrix", bad, "--against", committed).exit_code == 0

    def test_a_column_that_was_not_run_is_missing_unless_it_is_kept(self, tmp_path: Path) -> None:
        one = written(tmp_path, "one", case(Outcome.DELIVERED, "1"))
        both = (one, written(tmp_path, "two", case(Outcome.DELIVERED, "1")))
        committed = tmp_path / "matrix.md"
        invoke("--matrix", *both, "--markdown", str(committed))
        before = committed.read_text()
        done = invoke("--matrix", one, "--against", str(committed))
        assert done.exit_code == 1
        assert "✘ missing: column adapter:two" in done.output
        done = invoke("--matrix", one, "--against", str(committed), "--markdown", str(committed), "--keep")
        assert done.exit_code == 0, done.output
        assert "○ kept as committed, not run: adapter:two" in done.output
        assert committed.read_text() == before

    def test_a_committed_file_that_is_none_is_2(self, tmp_path: Path) -> None:
        (tmp_path / "m.md").write_text("nothing\n")
        one = written(tmp_path, "one", case(Outcome.DELIVERED, "1"))
        done = invoke("--matrix", one, "--against", f"{tmp_path}/m.md")
        assert done.exit_code == 2
        assert "holds no table" in done.stderr


@pytest.mark.processes
def test_the_installed_command_runs_a_real_suite(tmp_path: Path) -> None:
    """From a folder whose pytest settings would break it, with the JSON on a pipe."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    argv = [sys.executable, "-m", "moonrelay.cli.main", "conformance", "queue:memory", "--level", "L1", "--json", "-"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    report = Report.from_json(done.stdout)
    assert report.passed
    assert len(report.results) > 20


def test_errors_of_a_run_are_ours() -> None:
    assert issubclass(RunBroken, MoonrelayError)
