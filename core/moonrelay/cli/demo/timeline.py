"""The timeline: who worked on what and when, how the payloads went over, and where a worker was killed.

Owns its drawing. Times are seconds since the run began.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonrelay.cli.demo.board import Board, Mark, Span, WorkerRow
from moonrelay.cli.demo.summary import RequestReport, StageReport, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STAGE_COLOURS: Final = {"encode": "#59b3a9", "denoise": "#e1812c", "decode": "#3a923a"}
_PATH_COLOURS: Final = {"p2p": "#1f4e9c", "store": "#8e44ad", "cache": "#c2185b"}
_HIT: Final = "#c2185b"
_KILL: Final = "#b3261e"
_YIELD: Final = "#8a6d00"
_SAVED: Final = "#22242a"
_INK: Final = "#22242a"
_SOFT: Final = "#8a8c94"
_IDLE: Final = "#eceae4"
_LANE: Final = 0.62
_THIN: Final = 0.4
_TALL: Final = 0.56
#: Entries in one line of the legend.
_LEGEND: Final = 7
#: More requests than this get no row of their own.
MAX_ROWS: Final = 40
#: A hand-over is drawn at least this long, in parts of the whole time, so that it can be seen.
_VISIBLE: Final = 0.004


def draw_timeline(board: Board, summary: Summary, file: Path) -> None:
    """Draw both halves: the workers' occupancy, and each request's way through the stages.

    Args:
        board: Who did what when.
        summary: The hand-overs, and the kill.
        file: PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes = len(board.workers) + 1
    rows = min(MAX_ROWS, len(summary.requests))
    figure = Figure(figsize=(15, 2.6 + 0.42 * lanes + 0.68 * rows), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[lanes + 1, 1.6 * rows + 1])
    _workers(top, board, summary)
    _requests(bottom, board, summary)
    end = _end(board)
    for axes in (top, bottom):
        axes.set_xlim(_begin(board), end + 0.01 * (end - _begin(board)))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_SOFT)
        axes.tick_params(colors=_INK, length=0)
        axes.grid(axis="x", color=_IDLE, linewidth=0.8)
        axes.set_axisbelow(True)
    if summary.killed is not None:
        _kill_mark(top, bottom, summary)
    _yield_marks(top, bottom, summary)
    bottom.set_xlabel("seconds since the start", color=_INK)
    _legend(figure, board, summary)
    figure.savefig(file)


def _workers(axes: Axes, board: Board, summary: Summary) -> None:
    names = _ordered(board)
    lanes = {worker.name: number for number, worker in enumerate(names)}
    own = len(lanes)
    end = _end(board)
    for worker in names:
        _life(axes, board, worker, lanes[worker.name], end)
    for span in board.spans:
        if span.worker in lanes:
            _bar(axes, board, span, lanes[span.worker])
    for mark in board.marks:
        if mark.worker in lanes:
            _mark(axes, mark, mark.at_s - board.started_s, lanes[mark.worker])
    for span in board.undivided_spans:
        left, width = span.started_s - board.started_s, (span.ended_s or span.started_s) - span.started_s
        axes.barh(own, width, left=left, height=_LANE, color="#c9c6bd", edgecolor="white", linewidth=0.8)
        _label(axes, left, width, own, span.request_id, end - _begin(board), _INK)
    axes.set_yticks([*range(own), own], [*(worker.name for worker in names), "undivided"])
    axes.set_ylim(own + 0.6, -0.6)
    axes.set_title("Who works on which request", loc="left", fontsize=12, color=_INK, pad=10)
    for label, worker in zip(axes.get_yticklabels(), names, strict=False):
        if worker.phase in ("killed", "lost"):
            label.set_color(_KILL)


def _life(axes: Axes, board: Board, worker: WorkerRow, lane: int, end: float) -> None:
    """Draw a worker's life: loading hatched, ready plain."""
    began = worker.started_s - board.started_s
    gone = worker.ended_s - board.started_s if worker.ended_s is not None else end
    ready = worker.ready_s - board.started_s if worker.ready_s is not None else gone
    axes.barh(
        lane, ready - began, left=began, height=_LANE, color="white", edgecolor="#d3d0c7", hatch="////", linewidth=0
    )
    axes.barh(lane, gone - ready, left=ready, height=_LANE, color=_IDLE)


def _bar(axes: Axes, board: Board, span: Span, lane: int) -> None:
    left = span.started_s - board.started_s
    width = (span.ended_s if span.ended_s is not None else span.started_s) - span.started_s
    broken = span.how != "completed"
    colour = _broken_colour(span)
    axes.barh(
        lane,
        width,
        left=left,
        height=_LANE,
        color="white" if broken else _STAGE_COLOURS[span.stage],
        edgecolor=colour if broken else "white",
        hatch="xxxx" if broken else None,
        linewidth=1.2 if broken else 0.8,
    )
    again = f" #{span.attempt}" if span.attempt > 1 else ""
    _label(axes, left, width, lane, span.request_id + again, _end(board) - _begin(board), colour if broken else "white")


def _broken_colour(span: Span) -> str:
    """Return the colour of a delivery that was not completed: left on purpose, or lost."""
    return _YIELD if span.how == "preempted" else _KILL


def _mark(axes: Axes, mark: Mark, at_s: float, lane: int) -> None:
    """Mark a checkpoint: a tick where one was saved, an arrow where a job was taken up from one, a cross if refused."""
    if mark.what == "checkpoint_saved":
        axes.plot([at_s, at_s], [lane + 0.5 * _LANE, lane + 0.3 * _LANE], color=_SAVED, linewidth=1.0, zorder=4)
        return
    resumed = mark.what == "checkpoint_resumed"
    axes.plot([at_s], [lane], ">" if resumed else "x", color=_YIELD if resumed else _KILL, markersize=7, zorder=5)
    text = f"from step {mark.step}" if resumed else "refused"
    axes.annotate(text, (at_s, lane), xytext=(5, 14), textcoords="offset points", fontsize=7, color=_INK, zorder=5)


def _label(axes: Axes, left: float, width: float, lane: float, text: str, whole: float, colour: str) -> None:
    if width > whole * 0.0078 * len(text):
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8} if colour in (_KILL, _YIELD) else None
        axes.text(left + width / 2, lane, text, ha="center", va="center", fontsize=8, color=colour, bbox=box)


def _requests(axes: Axes, board: Board, summary: Summary) -> None:
    reports = summary.requests[:MAX_ROWS]
    begin, end = _begin(board), _end(board)
    for number, report in enumerate(reports):
        _way(axes, report, number, begin, end)
        for span in board.spans:
            if span.request_id == report.prompt.request_id and span.how not in ("completed", ""):
                left = span.started_s - board.started_s
                width = (span.ended_s or span.started_s) - span.started_s
                axes.barh(
                    number,
                    width,
                    left=left,
                    height=_THIN,
                    color="white",
                    edgecolor=_broken_colour(span),
                    hatch="xxxx",
                    linewidth=1.0,
                )
    names = [f"{report.prompt.request_id} {'✓' if report.identical else '✗'}" for report in reports]
    axes.set_yticks(range(len(reports)), names)
    for label, report in zip(axes.get_yticklabels(), reports, strict=True):
        label.set_color("#1c7c4a" if report.identical else _KILL)
    axes.set_ylim(len(reports) - 0.4, -0.6)
    axes.set_title("Each request's way: stages, waits and hand-overs", loc="left", fontsize=12, color=_INK, pad=10)


def _way(axes: Axes, report: RequestReport, row: int, begin: float, end: float) -> None:
    stages = list(report.stages.items())
    if stages:
        first, last = stages[0][1], stages[-1][1]
        axes.plot(
            [first.started_s, last.started_s + last.seconds], [row, row], color="#cfccc3", linewidth=1.4, zorder=1
        )
    for number, (name, stage) in enumerate(stages):
        colour = _STAGE_COLOURS.get(name, _SOFT)
        axes.barh(row, stage.seconds, left=stage.started_s, height=_THIN, color=colour, zorder=2)
        if stage.cache_hits:
            _hits(axes, stage, row, (end - begin) * _VISIBLE)
        if stage.path is not None:
            _hand_over(axes, stage, row, above=number % 2 == 1, begin=begin, end=end)


def _hits(axes: Axes, stage: StageReport, row: int, apart: float) -> None:
    """Mark a stage's embeddings that came from the cache, one diamond each."""
    places = [stage.started_s + apart * (1 + 2 * number) for number in range(stage.cache_hits)]
    axes.plot(places, [row] * len(places), "D", color=_HIT, markeredgecolor="white", markersize=6, zorder=4)


def _hand_over(axes: Axes, stage: StageReport, row: int, *, above: bool, begin: float, end: float) -> None:
    colour = _PATH_COLOURS.get(stage.path or "", _INK)
    width = max(stage.transfer_s, (end - begin) * _VISIBLE)
    axes.barh(row, width, left=stage.started_s, height=_TALL, color=colour, zorder=3)
    text = f"{_size(stage.input_bytes)} {stage.path}, {_time(stage.transfer_s)}"
    late = stage.started_s > begin + 0.9 * (end - begin)
    axes.annotate(
        text,
        (stage.started_s + (width if late else 0.0), row + (-_TALL if above else _TALL) / 2),
        xytext=(0, 1 if above else -1),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom" if above else "top",
        fontsize=7,
        color=colour,
    )


def _kill_mark(top: Axes, bottom: Axes, summary: Summary) -> None:
    killed = summary.killed
    if killed is None:
        return
    for axes in (top, bottom):
        axes.axvline(killed.at_s, color=_KILL, linewidth=1.2, linestyle=(0, (4, 3)), zorder=4)
    top.annotate(
        f"kill -9 {killed.worker} with {killed.request_id}, {killed.where}",
        (killed.at_s, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(5, 4),
        textcoords="offset points",
        color=_KILL,
        fontsize=9,
        va="bottom",
    )


def _yield_marks(top: Axes, bottom: Axes, summary: Summary) -> None:
    for one in summary.yields:
        for axes in (top, bottom):
            axes.axvline(one.at_s, color=_YIELD, linewidth=1.0, linestyle=(0, (2, 2)), zorder=4)
        top.annotate(
            f"{one.request_id} makes way for {one.made_way_for}",
            (one.at_s, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(5, 4),
            textcoords="offset points",
            color=_YIELD,
            fontsize=9,
            va="bottom",
        )


def _legend(figure: Figure, board: Board, summary: Summary) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Line2D | Patch] = [Patch(color=colour, label=stage) for stage, colour in _STAGE_COLOURS.items()]
    handles += [
        Patch(color=_PATH_COLOURS[path], label=f"hand-over by {path}") for path in _PATH_COLOURS if summary.paths[path]
    ]
    if any(stage.cache_hits for report in summary.requests for stage in report.stages.values()):
        handles.append(Line2D([], [], color=_HIT, marker="D", linestyle="none", label="embedding from the cache"))
    handles.append(Patch(facecolor="white", edgecolor="#bdb9ae", hatch="////", label="loading"))
    said = {mark.what for mark in board.marks}
    if "checkpoint_saved" in said:
        handles.append(Line2D([], [], linestyle="", marker="|", color=_SAVED, label="checkpoint"))
    if "checkpoint_resumed" in said:
        handles.append(Line2D([], [], linestyle="", marker=">", color=_YIELD, label="taken up from one"))
    if summary.yields:
        handles.append(Patch(facecolor="white", edgecolor=_YIELD, hatch="xxxx", label="made way"))
    if summary.killed is not None:
        handles.append(Patch(facecolor="white", edgecolor=_KILL, hatch="xxxx", label="lost with its worker"))
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=min(_LEGEND, len(handles)),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
    )


def _ordered(board: Board) -> list[WorkerRow]:
    """Return workers by stage, in the order in which they were started."""
    return [worker for stage in board.stages for worker in board.workers.values() if worker.stage == stage]


def _begin(board: Board) -> float:
    """Return where the drawing begins: when the first worker was started; before that there is nothing to see."""
    return min((worker.started_s for worker in board.workers.values()), default=board.started_s) - board.started_s


def _end(board: Board) -> float:
    ends = [span.ended_s or span.started_s for span in (*board.spans, *board.undivided_spans)]
    ends += [worker.ready_s or worker.started_s for worker in board.workers.values()]
    return max(1.0, max(ends, default=board.started_s) - board.started_s)


def _size(nbytes: int) -> str:
    if nbytes >= 1 << 20:
        return f"{nbytes / (1 << 20):.1f} MiB"
    return f"{nbytes / (1 << 10):.0f} KiB" if nbytes >= 1 << 10 else f"{nbytes} B"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
