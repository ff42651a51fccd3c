"""The demo's folder, its children's messages, its pictures' arithmetic; a held job and a lifeline."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from moonrelay.cli.demo.contact import sample
from moonrelay.cli.demo.folders import OutputFolder
from moonrelay.cli.hold import HELD, HoldingProgram
from moonrelay.cli.lifeline import Lifeline
from moonrelay.cli.worker import load_adapter, parse_dtype
from moonrelay.clock import ManualClock
from moonrelay.errors import ConfigError, PluginError
from moonrelay.orchestrator import Outcome, Work
from moonrelay.queueing.job import Job


class TestFolder:
    def test_it_takes_away_what_an_earlier_run_left_and_nothing_else(self, tmp_path: Path) -> None:
        root = tmp_path / "out"
        with OutputFolder(root) as folder:
            (folder.work / "r01-5.mp4").write_bytes(b"video")
            assert folder.keep(folder.work / "r01-5.mp4", "r01") == root / "videos" / "r01.mp4"
            folder.summary.write_text("{}")
            (folder.logs / "x.log").touch()
            (root / "mine.txt").touch()
            (folder.videos / "mine.txt").touch()
        assert not folder.work.exists()
        with OutputFolder(root) as folder:
            assert folder.work.is_dir()
        left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
        assert left == [".lock", "mine.txt", "videos/mine.txt"]

    def test_two_runs_do_not_share_it(self, tmp_path: Path) -> None:
        with OutputFolder(tmp_path), pytest.raises(ConfigError, match="another demo"):
            OutputFolder(tmp_path)
        OutputFolder(tmp_path).close()

    def test_what_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "videos").write_text("a file in the way")
        with pytest.raises(ConfigError, match="cannot be used"):
            OutputFolder(tmp_path)
        (tmp_path / "videos").unlink()
        OutputFolder(tmp_path).close()


@pytest.mark.parametrize(
    ("count", "wanted", "numbers"),
    [(17, 5, [0, 4, 8, 12, 16]), (3, 5, [0, 1, 2]), (1, 5, [0]), (9, 1, [0]), (6, 2, [0, 5]), (0, 5, [])],
)
def test_sampled_frames(count: int, wanted: int, numbers: list[int]) -> None:
    assert sample(count, wanted) == numbers


class FakeJob:
    """Takes progress reports."""

    request_id = "r1"
    lost = None

    def __init__(self) -> None:
        self.reports: list[tuple[float, str]] = []

    def progress(self, fraction: float, note: str = "") -> None:
        self.reports.append((fraction, note))


class Stepping:
    """A program of four steps, or of none."""

    stage = "denoise"

    def __init__(self, steps: int = 4) -> None:
        self._steps = steps

    def process(self, work: Work) -> Outcome:
        for number in range(self._steps):
            work.report(number + 1, self._steps, "step")
        return Outcome(result=self._steps)


def work_of(job: FakeJob) -> Work:
    return Work(cast("Job", job), SimpleNamespace(), None)  # type: ignore[arg-type]


class TestHold:
    def test_the_first_job_is_held_once_in_its_middle(self) -> None:
        asked: list[int] = []
        job = FakeJob()

        def go_on() -> bool:
            asked.append(len(job.reports))
            return True

        program = HoldingProgram(Stepping(), 0.5, go_on)
        assert program.stage == "denoise"
        assert program.process(work_of(job)).result == 4
        assert job.reports == [(0.25, "step"), (0.5, "step"), (0.5, HELD), (0.75, "step"), (1.0, "step")]
        assert asked == [3]
        program.process(work_of(job))
        assert [note for _, note in job.reports].count(HELD) == 1

    def test_a_stage_without_progress_is_held_at_its_end(self) -> None:
        job = FakeJob()
        HoldingProgram(Stepping(0), 0.5, lambda: True).process(work_of(job))
        assert job.reports == [(1.0, HELD)]

    def test_nobody_is_held_for_ever(self) -> None:
        clock = ManualClock()
        job = FakeJob()
        looks = 0

        def never() -> bool:
            nonlocal looks
            looks += 1
            clock.advance(61.0)
            return False

        HoldingProgram(Stepping(), 0.5, never, clock).process(work_of(job))
        assert looks == 1
        assert job.reports[-1] == (1.0, "step")

    def test_a_lost_job_is_let_go(self) -> None:
        job = FakeJob()
        job.lost = RuntimeError("cancelled")  # type: ignore[assignment]
        HoldingProgram(Stepping(), 0.5, lambda: False, ManualClock()).process(work_of(job))

    @pytest.mark.parametrize("hold_at", [0.0, -1.0])
    def test_nothing_can_be_held_before_it_begins(self, hold_at: float) -> None:
        with pytest.raises(ConfigError, match="hold_at"):
            HoldingProgram(Stepping(), hold_at, lambda: True)


class TestLifeline:
    def test_a_byte_says_go_on_and_the_end_says_gone(self) -> None:
        reading, writing = os.pipe()
        gone = threading.Event()
        lifeline = Lifeline(reading, gone.set)
        assert not lifeline.go_on.is_set()
        os.write(writing, b"go on\n")
        assert lifeline.go_on.wait(30)
        assert not gone.is_set()
        os.close(writing)
        assert lifeline.join(30)
        assert gone.is_set()
        os.close(reading)

    def test_a_number_that_is_no_pipe_is_refused(self) -> None:
        reading, writing = os.pipe()
        os.close(writing)
        os.close(reading)
        with pytest.raises(ConfigError, match="parent_fd"):
            Lifeline(reading, lambda: None)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (None, None),
        ("bfloat16", "bfloat16"),
        ("default=bfloat16,vae=float32", {"default": "bfloat16", "vae": "float32"}),
        ("default = bfloat16 , vae = float32", {"default": "bfloat16", "vae": "float32"}),
    ],
)
def test_dtypes(text: str | None, dtype: object) -> None:
    assert parse_dtype(text) == dtype


@pytest.mark.parametrize("text", ["=", "vae=", "=float32", "a=b,c"])
def test_a_malformed_dtype_is_named(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_dtype(text)
    assert caught.value.context["field"] == "dtype"


def test_the_built_in_adapter_serves_workers() -> None:
    assert load_adapter("diffusers").stages == ("encode", "denoise", "decode")
    with pytest.raises(PluginError):
        load_adapter("nosuch")
