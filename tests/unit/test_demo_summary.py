"""The demo's settings, prompts, summary and verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonrelay.cli.demo.board import Board, Span
from moonrelay.cli.demo.prompts import demo_prompts
from moonrelay.cli.demo.settings import STAGES, DemoSettings
from moonrelay.cli.demo.summary import Kill, RequestReport, Summary, Yield, read_result
from moonrelay.errors import ConfigError


def trace(stage: str, worker: str, started_s: float, **more: object) -> dict[str, object]:
    return {"stage": stage, "worker": worker, "attempt": 1, "started_s": started_s, "ended_s": started_s + 2, **more}


def result(**more: object) -> dict[str, object]:
    return {
        "file": "/tmp/r01-9.mp4",
        "digest": "ab" * 16,
        "frames": [9, 32, 32, 3],
        "trace": [
            trace("encode", "encode-1-1", 11.0, output_bytes=100),
            trace(
                *("denoise", "denoise-2-3", 14.0),
                input_bytes=100,
                path="p2p",
                transfer_s=0.25,
                output_bytes=50,
                steps=20,
                resumed_step=5,
                steps_redone=2,
            ),
            trace("decode", "decode-1-4", 17.0, input_bytes=50, path="store", transfer_s=0.5, attempt=2),
        ],
        **more,
    }


def report(number: int = 1, undivided: str | None = "ab" * 16) -> RequestReport:
    made = RequestReport(prompt=demo_prompts(number, 0)[-1], undivided_digest=undivided, undivided_s=1.23456)
    names = {"encode-1-1": "encode-1", "denoise-2-3": "denoise-2", "decode-1-4": "decode-1"}
    assert read_result(made, result(), began_s=10.0, names=names) == Path("/tmp/r01-9.mp4")  # type: ignore[arg-type]
    return made


def test_a_result_becomes_a_report() -> None:
    made = report()
    assert made.identical
    entry = made.as_dict()
    assert entry["path"] == {"encode-denoise": "p2p", "denoise-decode": "store"}
    assert entry["stages"] == {
        "encode": {
            "worker": "encode-1",
            "attempt": 1,
            "started_s": 1.0,
            "seconds": 2.0,
            "input_bytes": 0,
            "output_bytes": 100,
            "path": None,
            "transfer_s": 0.0,
            "resumed_step": 0,
            "steps_redone": 0,
            "embeddings": {},
        },
        "denoise": {
            "worker": "denoise-2",
            "attempt": 1,
            "started_s": 4.0,
            "seconds": 2.0,
            "input_bytes": 100,
            "output_bytes": 50,
            "path": "p2p",
            "transfer_s": 0.25,
            "resumed_step": 5,
            "steps_redone": 2,
            "embeddings": {},
        },
        "decode": {
            "worker": "decode-1",
            "attempt": 2,
            "started_s": 7.0,
            "seconds": 2.0,
            "input_bytes": 50,
            "output_bytes": 0,
            "path": "store",
            "transfer_s": 0.5,
            "resumed_step": 0,
            "steps_redone": 0,
            "embeddings": {},
        },
    }
    assert entry["steps_redone"] == 2
    assert entry["embeddings"] == {"hits": 0, "misses": 0, "past_encode": False}


def past_encode() -> RequestReport:
    made = RequestReport(prompt=demo_prompts(2, 0)[-1], undivided_digest="ab" * 16)
    kept = {"positive": "kept", "negative": "kept"}
    stages = [trace("denoise", "d", 14.0, path="cache", embeddings=kept), trace("decode", "e", 17.0, path="p2p")]
    read_result(made, result(trace=stages), began_s=10.0, names={})  # type: ignore[arg-type]
    return made


def test_hits_and_misses_are_counted_by_request() -> None:
    first = RequestReport(prompt=demo_prompts(1, 0)[0], undivided_digest="ab" * 16)
    stages = [trace("encode", "e", 11.0, embeddings={"positive": "encoded", "negative": "store"})]
    read_result(first, result(trace=stages), began_s=10.0, names={})  # type: ignore[arg-type]
    assert first.as_dict()["embeddings"] == {"hits": 1, "misses": 1, "past_encode": False}
    assert past_encode().as_dict()["embeddings"] == {"hits": 2, "misses": 0, "past_encode": True}
    both = summary(first, past_encode())
    assert both.as_dict()["embeddings"] == {"hits": 3, "misses": 1}
    assert both.verdict().endswith(
        "; hand-overs: 1 by cache, 1 by p2p; embeddings: 3 from the cache, 1 encoded, 1 requests past encode"
    )


@pytest.mark.parametrize("undivided", [None, "cd" * 16])
def test_identical_needs_two_equal_digests(undivided: str | None) -> None:
    assert not report(undivided=undivided).identical
    assert not RequestReport(prompt=demo_prompts(1, 0)[0]).identical  # two absent digests are not equal


def test_a_result_of_another_form_is_a_problem_and_no_crash() -> None:
    made = RequestReport(prompt=demo_prompts(1, 0)[0])
    assert read_result(made, "surprise", began_s=0.0, names={}) is None
    assert made.problem is not None
    assert read_result(made, {"digest": 5, "trace": [None, {}], "frames": None}, began_s=0.0, names={}) is None
    assert made.digest is None


def summary(*reports: RequestReport, **more: object) -> Summary:
    return Summary(requests=list(reports), settings={}, **more)  # type: ignore[arg-type]


def kill(attempt_after: int | None) -> Kill:
    return Kill(
        stage="denoise",
        worker="denoise-2",
        pid=4711,
        request_id="r01",
        attempt=1,
        fraction=0.5,
        at_s=1.23456,
        attempt_after=attempt_after,
    )


def test_the_summary_holds_what_a_program_reads() -> None:
    made = json.loads(json.dumps(summary(report(), killed=kill(2)).as_dict()))
    assert made["identical"] is True
    assert made["paths"] == {"p2p": 1, "store": 1}
    assert made["killed"]["survived"] is True
    assert made["killed"]["at_s"] == 1.235
    assert made["versions"]["python"]


def test_an_empty_run_is_not_identical() -> None:
    assert not summary().identical


@pytest.mark.parametrize(("after", "survived"), [(None, False), (1, False), (2, True)])
def test_a_kill_counts_when_the_attempt_went_up(after: int | None, survived: bool) -> None:
    assert kill(after).survived is survived


def test_the_verdict_names_paths_and_the_kill() -> None:
    assert summary(report(), killed=kill(2)).verdict() == (
        "1 of 1 identical to the undivided pipeline, bit for bit; hand-overs: 1 by p2p, 1 by store; "
        "denoise-2 was killed in the middle of r01, done again as attempt 2 from step 5, 2 steps done twice"
    )


def made_way() -> Yield:
    return Yield(
        request_id="r01",
        made_way_for="r04",
        stage="denoise",
        worker="denoise-1",
        attempt=1,
        at_s=51.92345,
        note="preempted: made way for r04: left after step 5 of 20",
    )


def test_the_verdict_and_the_summary_say_who_made_way_and_what_was_done_twice() -> None:
    made = summary(report(), yields=[made_way()], checkpoints=9)
    assert made.verdict().endswith(
        "; r01 made way on denoise-1 at 51.9 s for r04, and went on from step 5, 2 steps done twice"
    )
    [told] = json.loads(json.dumps(made.as_dict()))["yields"]
    assert (told["request_id"], told["made_way_for"], told["worker"], told["at_s"]) == (
        "r01",
        "r04",
        "denoise-1",
        51.923,
    )
    assert (told["resumed_step"], told["steps_redone"]) == (5, 2)
    assert made.as_dict()["checkpoints"] == 9


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("checkpoint_every", {"checkpoint_every": 0}),
        ("steps", {"steps": 7}),
        ("requests", {"requests": 2, "denoise_workers": 2}),
        ("kill", {"kill": "denoise"}),
    ],
)
def test_what_preemption_needs_is_named(field: str, settings: dict[str, Any]) -> None:
    DemoSettings(preempt=True)
    with pytest.raises(ConfigError, match=f"{field}=.* with preempt must be") as caught:
        DemoSettings(preempt=True, **settings)
    assert caught.value.context["field"] == field


def test_the_timeline_shows_hits_checkpoints_who_made_way_and_who_went_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    from moonrelay.cli.demo.timeline import draw_timeline

    drawn: list[Figure] = []
    save = Figure.savefig

    def look(self: Figure, file: Path) -> None:
        drawn.append(self)
        save(self, file)

    monkeypatch.setattr(Figure, "savefig", look)
    board = Board(demo_prompts(1, 0), STAGES, 100.0)
    board.worker_started("denoise-1", "denoise", 7, 100.0)
    board.worker_ready("denoise-1", 101.0)
    for attempt, began, ended, how in ((1, 102.0, 104.0, "preempted"), (2, 106.0, 109.0, "completed")):
        board.spans.append(
            Span(
                worker="denoise-1",
                stage="denoise",
                request_id="r01",
                attempt=attempt,
                started_s=began,
                ended_s=ended,
                how=how,
            )
        )
    made = summary(past_encode(), yields=[replace(made_way(), at_s=4.0)])
    draw_timeline(board, made, tmp_path / "plain.png")
    board.checkpoint("denoise-1", "checkpoint_saved", "r01", 5, 103.0)
    board.checkpoint("denoise-1", "checkpoint_resumed", "r01", 5, 106.0)
    board.checkpoint("denoise-1", "checkpoint_refused", "r01", 0, 107.0)
    draw_timeline(board, made, tmp_path / "timeline.png")
    plain, full = drawn
    lines = [len(figure.axes[0].lines) for figure in (plain, full)]
    assert lines[1] == lines[0] + 3  # a tick, an arrow, a cross
    texts = {text.get_text() for text in full.axes[0].texts}
    assert {"from step 5", "refused", "r01 makes way for r04"} <= texts
    labels = {text.get_text() for text in full.legends[0].get_texts()}
    assert {"checkpoint", "taken up from one", "made way", "embedding from the cache"} <= labels
    assert "lost with its worker" not in labels
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_verdict_names_what_differs() -> None:
    wrong = report(2, undivided="cd" * 16)
    assert summary(report(), wrong).verdict() == (
        f"only 1 of 2 are identical to the undivided pipeline; not r02 (digest {'ab' * 16}, undivided {'cd' * 16})"
    )


def test_prompts_are_sentences_with_ids_and_seeds_of_their_own() -> None:
    prompts = demo_prompts(25, 7)
    assert [prompt.seed for prompt in prompts] == list(range(7, 32))
    assert len({prompt.request_id for prompt in prompts}) == 25
    assert prompts[:8] == demo_prompts(8, 7)
    first = demo_prompts(8, 0)
    assert len({prompt.prompt for prompt in first}) == 8
    negatives = [prompt.negative_prompt for prompt in first if prompt.negative_prompt]
    assert len(negatives) > len(set(negatives)) > 1  # some share one
    assert None in {prompt.negative_prompt for prompt in first}
    assert demo_prompts(100, 0)[0].request_id == "r001"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests", 0),
        ("denoise_workers", 0),
        ("transfer_mode", "teleport"),
        ("kill", "everything"),
        ("size", 0),
        ("frames", -1),
        ("seed", -1),
        ("checkpoint_every", -1),
        ("timeout_s", 0.0),
        ("engine", "memory"),
        ("store", "memory://here"),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        DemoSettings(**{field: value})  # type: ignore[arg-type]
    assert caught.value.context["field"] == field


def test_a_store_is_started_only_where_one_is_used() -> None:
    assert DemoSettings().starts_store
    assert not DemoSettings(transfer_mode="p2p").starts_store
    assert not DemoSettings(store="local").starts_store
