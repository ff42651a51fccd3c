"""A run in several jobs is the same run: the same checks, each once; and what happens when jobs end too early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moonrelay.cli.main import make_app
from moonrelay.clock import Deadline, SystemClock
from moonrelay_conformance import jobs as jobs_module
from moonrelay_conformance.jobs import default_jobs, run_jobs
from moonrelay_conformance.registry import resolve
from moonrelay_conformance.results import Outcome, Report, Result
from moonrelay_conformance.run import RunBroken, run
from moonrelay_conformance.targets import connector

HERE = str(Path(__file__).parent)
CHECKS = 12


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder for the jobs' notes; jobs find the samples."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    return tmp_path


class Watcher:
    """Takes down what a run tells."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.began: list[str] = []
        self.ends: list[tuple[Result, str]] = []

    def begun(self, total: int) -> None:
        self.totals.append(total)

    def running(self, check: str) -> None:
        self.began.append(check)

    def ended(self, result: Result, details: str) -> None:
        self.ends.append((result, details))


def seen(report: Report) -> list[tuple[str, ...]]:
    return [(one.id, one.route, one.level, one.outcome, one.reason, one.title, one.test) for one in report.results]


def outcomes(report: Report) -> dict[str, Outcome]:
    return {f"{one.id} {one.route}".strip(): one.outcome for one in report.results}


def eventually(found: Callable[[], Any], within_s: float = 60.0) -> Any:
    deadline = Deadline(within_s, SystemClock())
    while not (it := found()):
        assert not deadline.expired, "it did not come in time"
        threading.Event().wait(0.02)
    return it


@pytest.mark.processes
class TestTheSameRun:
    def test_every_check_runs_once_and_the_report_has_them_in_order(self, folder: Path) -> None:
        alone = run_jobs("job_samples:CalmTarget", jobs=1)
        assert sorted((folder / "ran").read_text().split()) == [str(number) for number in range(1, 9)]
        (folder / "ran").unlink()
        watcher = Watcher()
        divided = run_jobs("job_samples:CalmTarget", jobs=3, progress=watcher)
        assert sorted((folder / "ran").read_text().split()) == [str(number) for number in range(1, 9)]
        assert seen(divided) == seen(alone)
        assert divided.passed
        assert divided.target == alone.target
        assert divided.environment == alone.environment
        assert watcher.totals == [CHECKS]
        assert Counter(one.test for one, _ in watcher.ends) == Counter(one.test for one in divided.results)
        assert len(watcher.began) == CHECKS

    def test_a_class_is_set_up_and_cleaned_up_once_in_each_job(self, folder: Path) -> None:
        run_jobs("job_samples:CalmTarget", jobs=2)
        warm = {path.name.removeprefix("warm-") for path in folder.glob("warm-*")}
        assert 1 <= len(warm) <= 2
        assert {path.name.removeprefix("cold-") for path in folder.glob("cold-*")} == warm

    def test_a_failed_clean_up_is_a_checks_failure(self) -> None:
        report = run_jobs("job_samples:UnclearTarget", jobs=2)
        failed = [one for one in report.results if one.outcome is Outcome.FAILED]
        assert 1 <= len(failed) <= 2
        assert {one.reason for one in failed} == {"teardown: something is left"}

    def test_a_real_suite_gives_what_it_gives_in_one_process(self) -> None:
        alone = run(resolve("queue:memory"), levels=["L1"], select=["result-*"])
        divided = run_jobs("queue:memory", jobs=2, levels=alone.levels, select=["result-*"])
        assert seen(divided) == seen(alone)
        assert len([one for one in divided.results if one.outcome is Outcome.HELD]) > 10

    @pytest.mark.slow
    def test_an_adapters_checks_are_the_same_divided_and_undivided(self) -> None:
        guard = "no-test-is-overridden-or-removed"
        alone = run(resolve("adapter:diffusers"), select=[guard])
        divided = run_jobs("adapter:diffusers", jobs=2, select=[guard])
        assert seen(divided) == seen(alone)
        assert len(divided.results) > 500
        assert outcomes(divided)[guard] is Outcome.HELD

    def test_a_failure_comes_with_its_traceback(self) -> None:
        watcher = Watcher()
        report = run_jobs("job_samples:FailingTarget", jobs=2, progress=watcher)
        assert [one.id for one in report.results if one.outcome is Outcome.FAILED] == ["numbers[3]"]
        (details,) = (details for one, details in watcher.ends if one.outcome is Outcome.FAILED)
        assert "job_samples.py" in details
        assert "three is wrong" in details


@pytest.mark.processes
class TestJobsThatEnd:
    def test_a_killed_job_loses_the_check_that_it_was_at(self, folder: Path) -> None:
        report = run_jobs("job_samples:KilledTarget", jobs=2)
        lost = [one for one in report.results if one.outcome is Outcome.NOT_RUN]
        assert [one.id for one in lost] == ["numbers[3]"]
        assert "ended by signal 9 while it ran" in lost[0].reason
        assert not report.complete
        assert not report.passed
        assert len((folder / "ran").read_text().split()) == 8

    def test_what_the_last_job_had_not_begun_is_run_by_another(self, folder: Path) -> None:
        report = run_jobs("job_samples:KilledTarget", jobs=1)
        assert [one.id for one in report.results if one.outcome is Outcome.NOT_RUN] == ["numbers[3]"]
        assert len((folder / "ran").read_text().split()) == 8

    def test_where_all_are_killed_the_rest_says_so(self) -> None:
        report = run_jobs("job_samples:AllKilledTarget", jobs=2)
        reasons = Counter(one.reason.partition(":")[0] for one in report.results if one.outcome is Outcome.NOT_RUN)
        # As many jobs again were tried.
        assert sum("while it ran" in reason for reason in reasons) == 4
        assert reasons["no job was left to run it"] == 4
        assert not report.complete

    def test_a_job_of_which_nothing_is_heard_is_killed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def silent(job: Any) -> bool:
            stat = Path(f"/proc/{job.process.pid}/stat")
            return job.running is not None and stat.read_text().rpartition(")")[2].split()[0] in "Tt"

        monkeypatch.setattr(jobs_module._Job, "is_silent", silent)
        report = run_jobs("job_samples:StoppedTarget", jobs=2)
        assert [one.id for one in report.results if one.outcome is Outcome.NOT_RUN] == ["numbers[3]"]

    def test_silence_has_a_bound(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jobs_module, "SILENCE_S", -1.0)
        try:
            report = run_jobs("job_samples:CalmTarget", jobs=1, timeout_s=1.0)
        except RunBroken as exc:
            said = {exc.message}  # it was killed before it had collected
        else:
            assert not report.complete
            said = {one.reason for one in report.results if one.outcome is Outcome.NOT_RUN}
        assert any("job 1 ended by signal 9" in one for one in said)

    def test_a_check_with_a_longer_bound_of_its_own_may_be_silent_for_longer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[float | None] = []
        real = jobs_module._Job.may_be_silent

        def may_be_silent(job: Any, timeout_s: float | None) -> None:
            told.append(timeout_s)
            before = job._due.remaining()
            real(job, timeout_s)
            assert job._due.remaining() > 77.0 if timeout_s else job._due.remaining() <= before

        monkeypatch.setattr(jobs_module._Job, "may_be_silent", may_be_silent)
        assert run_jobs("job_samples:CalmTarget", jobs=1, timeout_s=10.0).passed
        assert told.count(77.0) == 2
        assert set(told) == {None, 77.0, jobs_module.BIRTH_TIMEOUT_S}

    def test_a_target_that_cannot_be_had_is_one_line(self) -> None:
        with pytest.raises(RunBroken, match="no_such_module"):
            run_jobs("no_such_module:Target", jobs=2)


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "moonrelay.cli.main", "conformance", *argv]


def started(folder: Path) -> subprocess.Popen[bytes]:
    argv = command("job_samples:WaitingTarget", "--jobs", "2", "--json", "r.json")
    env = {**os.environ, "PYTHONPATH": HERE}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log)


def waiting(folder: Path) -> list[int]:
    found = [int(path.name.removeprefix("waits-")) for path in folder.glob("waits-*")]
    return found if len(found) == 2 else []


def gone(pids: list[int]) -> bool:
    return not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.processes
class TestCommand:
    @pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
    def test_a_signal_ends_the_jobs_and_the_report_is_written(
        self, folder: Path, number: signal.Signals, status: int
    ) -> None:
        process = started(folder)
        pids = eventually(lambda: waiting(folder))
        process.send_signal(number)
        assert process.wait(60) == status, (folder / "log").read_text()
        assert gone(pids)
        # The jobs cleaned up.
        assert {path.name for path in folder.glob("cold-*")} == {f"cold-{pid}" for pid in pids}
        report = Report.from_json((folder / "r.json").read_bytes())
        assert not report.complete
        ends = Counter(one.outcome for one in report.results)
        assert ends[Outcome.NOT_RUN] >= 2
        assert ends[Outcome.HELD] >= 1
        assert not ends[Outcome.FAILED]

    def test_jobs_die_with_their_parent(self, folder: Path) -> None:
        process = started(folder)
        pids = eventually(lambda: waiting(folder))
        process.kill()
        process.wait(10)
        eventually(lambda: gone(pids))

    def test_there_is_one_count_and_a_killed_job_is_1(self, folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": HERE}
        argv = command("job_samples:KilledTarget", "--jobs", "2")
        done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stderr
        counted = [line.split()[0] for line in done.stdout.splitlines() if f"/{CHECKS} " in line]
        assert counted == [f"{number}/{CHECKS}" for number in range(1, CHECKS)]
        assert "INCOMPLETE" in done.stdout


@pytest.mark.processes
@pytest.mark.parametrize(("target", "ends"), [("KilledTarget", 1), ("CalmTarget", 0)])
def test_a_check_that_takes_its_process_along_costs_the_command_one_check(folder: Path, target: str, ends: int) -> None:
    """Native code of an engine can; also where nobody asked for jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "moonrelay.cli.main", "conformance", f"job_samples:{target}", "--json", "out.json"],
        env={**os.environ, "PYTHONPATH": HERE},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == ends, done.stderr.decode()
    report = Report.from_json((folder / "out.json").read_bytes())
    lost = [one.id for one in report.results if one.outcome is Outcome.NOT_RUN]
    assert lost == (["numbers[3]"] if ends else [])


@pytest.mark.processes
@pytest.mark.parametrize("target", ["CalmTarget", "KilledTarget"])
def test_a_job_that_is_killed_leaves_no_folder(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    run_jobs(f"job_samples:{target}", jobs=1)
    assert list(scratch.iterdir()) == []


def test_no_job_is_2() -> None:
    done = CliRunner().invoke(make_app(["conformance"]), ["conformance", "queue:memory", "--jobs", "0"])
    assert done.exit_code == 2


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_folder_that_another_run_removes_before_it_is_locked_is_made_anew(
    moment: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock a folder looks like one that a killed run left."""
    monkeypatch.setattr(connector, "_SHARED_MEMORY", folder / "none")
    module = {"open": connector.os, "flock": connector.fcntl}[moment]
    real, removed = getattr(module, moment), []

    def interfered(*arguments: Any) -> Any:
        monkeypatch.setattr(module, moment, real)
        removed.extend(folder.iterdir())
        connector._remove_if_left(removed[0])
        assert not removed[0].exists()
        return real(*arguments)

    monkeypatch.setattr(module, moment, interfered)
    own = connector._OwnFolder(folder)
    try:
        assert len(removed) == 1
        assert [own.path] == list(folder.iterdir())
        # It is locked now: another run leaves it alone.
        connector._remove_if_left(own.path)
        assert own.path.exists()
    finally:
        own.close()
    assert not list(folder.iterdir())


def test_a_folder_that_is_being_removed_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run holds the lock while it removes; its descriptor is not ours to wait for."""
    path = folder / "own"
    real = connector.os.open

    def interfered(*arguments: Any) -> Any:
        monkeypatch.setattr(connector.os, "open", real)
        taken.append(real(*arguments))
        connector.fcntl.flock(taken[0], connector.fcntl.LOCK_EX)
        return real(*arguments)

    taken: list[int] = []
    monkeypatch.setattr(connector.os, "open", interfered)
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert connector._locked(path) is None
    os.close(taken[0])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_sweep_takes_what_a_dead_writer_had_not_finished(folder: Path) -> None:
    with connector.ConnectorTarget().ground(folder) as ground:
        assert isinstance(ground, connector.ConnectorGround)
        files = [ground._own.path / "store" / "tmp" / name for name in ("dead", "alive")]
        for file in files:
            file.write_bytes(b"half of it")
        with files[1].open("rb") as written:
            connector.fcntl.flock(written, connector.fcntl.LOCK_EX)
            assert ground.store_keys() == ("tmp/alive", "tmp/dead")
            ground.sweep()
            assert ground.store_keys() == ("tmp/alive",)
        ground.sweep()
        assert ground.store_keys() == ()


def test_only_adapters_are_divided_by_themselves() -> None:
    assert 2 <= default_jobs("adapter") <= 3
    assert default_jobs("adapter", narrowed=True) == 1
    assert {default_jobs(kind) for kind in ("engine", "relay", "queue")} == {1}
