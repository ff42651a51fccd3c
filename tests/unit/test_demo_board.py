"""The demo's board: what the queue's events make of it, and how it is shown as lines."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console

from moonrelay.cli.demo.board import Board, short_name
from moonrelay.cli.demo.display import LiveDisplay, PlainDisplay, make_display
from moonrelay.cli.demo.prompts import demo_prompts
from moonrelay.cli.demo.settings import STAGES
from moonrelay.cli.demo.submitting import Submitter
from moonrelay.clock import ManualClock
from moonrelay.orchestrator.shortcut import KEPT
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.views import QueueEvent


class Feed:
    """Makes events and applies them."""

    def __init__(self, requests: int = 2) -> None:
        self.board = Board(demo_prompts(requests, 0), STAGES, 100.0)
        self._number = 0

    def tell(
        self,
        kind: str,
        at_s: float,
        stage: str = "encode",
        request_id: str = "r01",
        worker: str = "encode-1-1",
        attempt: int = 1,
        fraction: float = 0.0,
        note: str = "",
    ) -> None:
        self._number += 1
        self.board.apply(
            QueueEvent(
                number=self._number,
                at_s=at_s,
                kind=kind,
                request_id=request_id,
                stage=stage,
                attempt=attempt,
                worker=worker,
                fraction=fraction,
                note=note,
            )
        )


@pytest.fixture
def feed() -> Feed:
    return Feed()


def through(feed: Feed, request_id: str, at_s: float) -> None:
    """Let a request go through all stages, a second each."""
    feed.tell("submitted", at_s, request_id=request_id, worker="")
    for number, stage in enumerate(STAGES):
        worker = f"{stage}-1-{number}"
        feed.tell("claimed", at_s + number, stage, request_id, worker)
        feed.tell("progress", at_s + number + 0.5, stage, request_id, worker, fraction=0.5)
        feed.tell("completed", at_s + number + 1, stage, request_id, worker)
    feed.tell("done", at_s + 3, "decode", request_id)


def test_a_request_goes_through_its_stages(feed: Feed) -> None:
    row = feed.board.requests["r01"]
    feed.tell("submitted", 100.0, worker="")
    assert (row.state, row.cells["encode"].phase) == ("queued", "queued")
    feed.tell("claimed", 101.0)
    feed.tell("progress", 101.5, fraction=0.25)
    assert (row.state, row.cells["encode"].phase, row.cells["encode"].fraction) == ("running", "running", 0.25)
    assert row.cells["encode"].worker == "encode-1"
    feed.tell("completed", 102.0)
    assert (row.cells["encode"].phase, row.cells["denoise"].phase) == ("done", "queued")
    assert not feed.board.finished
    for name in ("r01", "r02"):
        through(feed, name, 110.0)
    assert feed.board.finished
    spans = [span for span in feed.board.spans if span.request_id == "r02"]
    assert [(span.stage, span.started_s, span.ended_s, span.how) for span in spans] == [
        ("encode", 110.0, 111.0, "completed"),
        ("denoise", 111.0, 112.0, "completed"),
        ("decode", 112.0, 113.0, "completed"),
    ]


def test_a_request_that_begins_further_on_has_no_work_before_that(feed: Feed) -> None:
    row = feed.board.requests["r01"]
    feed.tell("submitted", 100.0, "denoise", worker="")
    assert [cell.phase for cell in row.cells.values()] == ["done", "queued", "waiting"]
    feed.tell("claimed", 101.0, "denoise", worker="denoise-1-1")
    feed.tell("rewound", 102.0, "denoise", worker="denoise-1-1", note="evicted")
    assert [cell.phase for cell in row.cells.values()] == ["queued", "waiting", "waiting"]


class TestSubmitter:
    class Cache:
        """Holds what a test says."""

        def __init__(self) -> None:
            self.held: set[str] = set()

        def holds(self, keys: Iterable[Any]) -> bool:
            return {key.digest for key in keys} <= self.held

    def make(self, feed: Feed, names: dict[str, str | None]) -> tuple[Submitter, StageQueue, Cache]:
        queue = StageQueue.connect("memory://")
        ahead = {
            name: {KEPT: {"positive": {"digest": digest, "label": {}}}}
            for name, digest in names.items()
            if digest is not None
        }
        cache = self.Cache()
        requests = {name: {"prompt": name} for name in names}
        return Submitter(queue, STAGES, requests, ahead, cache), queue, cache  # type: ignore[arg-type]

    def at(self, queue: StageQueue) -> dict[str, str]:
        return {view.request_id: view.stage for view in queue.requests()}

    def test_the_interactive_request_waits_until_it_is_let_go(self, feed: Feed) -> None:
        queue = StageQueue.connect("memory://")
        requests = {name: {"prompt": name} for name in ("r01", "r02", "r03")}
        made = Submitter(queue, STAGES, requests, {}, None, "r03")
        with queue:
            made.submit_due(feed.board)
            assert {view.request_id: view.priority for view in queue.requests()} == {"r01": "batch", "r02": "batch"}
            made.release()
            made.submit_due(feed.board)
            assert queue.requests()[-1].priority == "interactive"

    def test_a_repeated_text_waits_for_the_first_and_goes_past_encode(self, feed: Feed) -> None:
        made, queue, cache = self.make(feed, {"r01": "aa", "r02": "aa", "r03": "bb", "r04": None})
        with queue:
            made.submit_due(feed.board)
            assert self.at(queue) == {"r01": "encode", "r03": "encode", "r04": "encode"}
            made.submit_due(feed.board)
            assert "r02" not in self.at(queue)
            cache.held = {"aa"}
            feed.tell("submitted", 100.0, worker="")
            feed.tell("claimed", 101.0)
            feed.tell("completed", 102.0)
            made.submit_due(feed.board)
            assert self.at(queue)["r02"] == "denoise"

    @pytest.mark.parametrize("end", ["completed", "failed"])
    def test_nobody_waits_for_ever(self, feed: Feed, end: str) -> None:
        made, queue, _ = self.make(feed, {"r01": "aa", "r02": "aa"})
        with queue:
            made.submit_due(feed.board)
            feed.tell("claimed", 101.0)
            feed.tell(end, 102.0)
            made.submit_due(feed.board)
            assert self.at(queue)["r02"] == "encode"  # nothing was kept


def test_a_killed_workers_span_ends_at_the_kill(feed: Feed) -> None:
    feed.board.worker_started("encode-1", "encode", 4711, 100.0)
    feed.board.worker_ready("encode-1", 100.5)
    feed.tell("claimed", 101.0)
    feed.board.worker_gone("encode-1", "killed", 102.0)
    feed.tell("redelivered", 106.0, note="peer_lost: it stopped renewing\nmore")
    feed.tell("claimed", 107.0, worker="encode-2-5", attempt=2)
    feed.tell("completed", 108.0, worker="encode-2-5", attempt=2)
    lost, again = feed.board.spans
    assert (lost.worker, lost.ended_s, lost.how) == ("encode-1", 102.0, "killed")
    assert (again.worker, again.ended_s, again.how, again.attempt) == ("encode-2", 108.0, "completed", 2)
    assert feed.board.workers["encode-1"].phase == "killed"
    assert feed.board.notes[-1].text == "r01 redelivered at encode (attempt 1): peer_lost: it stopped renewing"
    assert feed.board.notes[-1].grave


def test_a_job_that_makes_way_is_shown_as_left_and_not_as_lost(feed: Feed) -> None:
    feed.tell("submitted", 100.0, "denoise", worker="")
    feed.tell("claimed", 101.0, "denoise", worker="denoise-1-2")
    feed.tell("asked_to_yield", 102.0, "denoise", worker="denoise-1-2", note="for r02 (interactive), which waits")
    feed.board.checkpoint("denoise-1", "checkpoint_saved", "r01", 6, 102.5)
    feed.tell("preempted", 103.0, "denoise", worker="denoise-1-2", note="preempted: made way for r02: after step 6")
    feed.tell("claimed", 105.0, "denoise", worker="denoise-1-2", attempt=2)
    feed.board.checkpoint("denoise-1", "checkpoint_resumed", "r01", 6, 105.5)
    feed.tell("completed", 106.0, "denoise", worker="denoise-1-2", attempt=2)
    spans = [(span.attempt, span.started_s, span.ended_s, span.how) for span in feed.board.spans]
    assert spans == [(1, 101.0, 103.0, "preempted"), (2, 105.0, 106.0, "completed")]
    assert [note.text for note in feed.board.notes] == [
        "r01 is asked to make way at denoise for r02 (interactive), which waits",
        "r01 preempted at denoise (attempt 1): preempted: made way for r02: after step 6",
        "denoise-1 takes r01 up again after step 6",
    ]
    assert not any(note.grave for note in feed.board.notes)
    assert [(mark.what, mark.step, mark.at_s) for mark in feed.board.marks] == [
        ("checkpoint_saved", 6, 102.5),
        ("checkpoint_resumed", 6, 105.5),
    ]


def test_a_lost_input_sends_the_request_back(feed: Feed) -> None:
    feed.tell("claimed", 101.0)
    feed.tell("completed", 102.0)
    feed.tell("claimed", 103.0, "denoise", worker="denoise-1-2")
    feed.tell("rewound", 104.0, "denoise", worker="denoise-1-2", note="lease_lost: gone")
    cells = feed.board.requests["r01"].cells
    assert (cells["encode"].phase, cells["denoise"].phase) == ("queued", "waiting")


@pytest.mark.parametrize("kind", ["failed", "dead", "cancelled"])
def test_a_request_that_fails_says_why(feed: Feed, kind: str) -> None:
    feed.tell("claimed", 101.0)
    feed.tell(kind, 102.0, note="config_error: no such size")
    row = feed.board.requests["r01"]
    assert (row.state, row.problem) == ("failed", "config_error: no such size")


def test_events_of_strangers_change_nothing(feed: Feed) -> None:
    feed.tell("worker_joined", 100.0, request_id="")
    feed.tell("claimed", 100.0, request_id="somebody-else")
    assert feed.board.spans == []


@pytest.mark.parametrize(
    ("worker_id", "name"),
    [("denoise-1-12", "denoise-1"), ("x-3", "x"), ("plain", "plain"), ("-3", "-3"), ("a-b", "a-b")],
)
def test_short_names(worker_id: str, name: str) -> None:
    assert short_name(worker_id) == name


def test_lines_say_each_thing_once(feed: Feed) -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=200), ManualClock())
    assert isinstance(display, PlainDisplay)
    with display:
        feed.board.note(100.2, "the store is up")
        display.update(feed.board, "loading")
        through(feed, "r01", 101.0)
        display.update(feed.board, "working")
        feed.board.requests["r01"].identical = True
        display.update(feed.board, "working")
        feed.board.requests["r02"].identical = False
        display.update(feed.board, "working")
    assert out.getvalue().splitlines() == [
        "   0.20 s the store is up",
        "loading",
        "   1.00 s r01 encode on encode-1",
        "   2.00 s r01 denoise on denoise-1",
        "   2.00 s r01 encode done in 1.00 s",
        "   3.00 s r01 decode on decode-1",
        "   3.00 s r01 denoise done in 1.00 s",
        "   4.00 s r01 decode done in 1.00 s",
        "working",
        "          r01 identical to the undivided pipeline",
        "          r02 DIFFERS from the undivided one",
    ]


def test_a_terminal_gets_a_table_with_everything() -> None:
    feed = Feed(requests=3)
    out = io.StringIO()
    console = Console(
        file=out, width=160, height=50, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}
    )
    display = make_display(console, ManualClock(130.0))
    assert isinstance(display, LiveDisplay)
    feed.board.worker_started("encode-1", "encode", 1, 100.0)
    through(feed, "r01", 101.0)
    feed.tell("claimed", 102.0, request_id="r02", attempt=2)
    feed.tell("progress", 103.0, request_id="r02", attempt=2, fraction=0.5)
    feed.board.requests["r01"].identical = True
    feed.board.note(103.5, "kill -9 of somebody", grave=True)
    with display:
        display.update(feed.board, "working")
    text = out.getvalue()
    for expected in ("30.0 s", "identical 1/3", "encode-1 #2", "━━━━━─────", "kill -9 of somebody", "A paper lantern"):
        assert expected in text


def test_a_table_that_does_not_fit_counts_what_it_leaves_out() -> None:
    feed = Feed(requests=40)
    out = io.StringIO()
    console = Console(
        file=out, width=160, height=30, force_terminal=True, color_system=None, _environ={"TERM": "xterm"}
    )
    feed.tell("submitted", 101.0, request_id="r40", worker="")
    feed.tell("claimed", 102.0, request_id="r40")
    with LiveDisplay(console, ManualClock(130.0)) as display:
        display.update(feed.board, "working")
    assert "r40" in out.getvalue()  # what is under way comes first
    assert "and 28 waiting" in out.getvalue()
