"""The run as it is watched: a live table in a terminal, one line per happening elsewhere.

Owns rendering only; the state is `moonrelay.cli.demo.board`'s.
"""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol

from moonrelay.cli.demo.board import Board, RequestRow, StageCell
from moonrelay.clock import Clock

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

_BAR: Final = 10
_NOTES: Final = 6
_STYLES: Final = {"waiting": "dim", "queued": "dim", "running": "cyan", "done": "green", "failed": "bold red"}
_PHASES: Final = {"starting": "dim", "ready": "green", "killed": "bold red", "lost": "bold red", "ended": "dim"}


class Display(Protocol):
    """Shows a board. Threads: one at a time."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, board: Board, headline: str) -> None:
        """Show the board as it is now."""
        ...


class PlainDisplay:
    """A line for every stage of every request, and for every note; for logs and CI.

    Args:
        console: Where lines go.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spans = 0
        self._notes = 0
        self._ended: set[int] = set()
        self._headline = ""
        self._compared: set[str] = set()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, board: Board, headline: str) -> None:
        """Print what is new."""
        lines = [(note.at_s, note.text) for note in board.notes[self._notes :]]
        self._notes = len(board.notes)
        for number, span in enumerate(board.spans):
            if number >= self._spans:
                again = f", attempt {span.attempt}" if span.attempt > 1 else ""
                lines.append((span.started_s, f"{span.request_id} {span.stage} on {span.worker}{again}"))
            if span.ended_s is not None and number not in self._ended:
                self._ended.add(number)
                if span.how == "completed":
                    took = span.ended_s - span.started_s
                    lines.append((span.ended_s, f"{span.request_id} {span.stage} done in {took:.2f} s"))
        self._spans = len(board.spans)
        for at_s, text in sorted(lines):
            self._print(at_s - board.started_s, text)
        for name, row in board.requests.items():
            if row.identical is not None and name not in self._compared:
                self._compared.add(name)
                verdict = "identical to the undivided pipeline" if row.identical else "DIFFERS from the undivided one"
                self._console.print(f"          {name} {verdict}", markup=False, highlight=False)
        if headline != self._headline:
            self._headline = headline
            self._console.print(headline, markup=False, highlight=False)

    def _print(self, elapsed_s: float, text: str) -> None:
        self._console.print(f"{elapsed_s:7.2f} s {text}", markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A table that is drawn over and over.

    Args:
        console: A terminal.
        clock: For the elapsed time.
    """

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None

    def __enter__(self) -> LiveDisplay:
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def update(self, board: Board, headline: str) -> None:
        """Draw the board."""
        if self._live is not None:
            self._live.update(self._render(board, headline), refresh=True)

    def _render(self, board: Board, headline: str) -> Group:
        from rich.console import Group
        from rich.text import Text

        elapsed = self._clock.monotonic() - board.started_s
        identical = sum(1 for row in board.requests.values() if row.identical)
        title = Text.assemble(
            ("moonrelay demo ", "bold"),
            (f"{elapsed:5.1f} s  ", "dim"),
            headline,
            (f"   undivided {board.undivided_done}/{len(board.requests)}   ", "dim"),
            (f"identical {identical}/{len(board.requests)}", "green" if identical else "dim"),
        )
        notes = [
            Text(
                f"{note.at_s - board.started_s:6.1f} s  {note.text}",
                style="yellow" if note.grave else "dim",
                overflow="ellipsis",
                no_wrap=True,
            )
            for note in board.notes[-_NOTES:]
        ]
        return Group(title, Text(), self._requests(board), Text(), self._workers(board), Text(), *notes)

    def _requests(self, board: Board) -> Table:
        from rich.table import Table
        from rich.text import Text

        # What does not fit the screen is counted, those under way come first.
        room = max(4, self._console.size.height - 12 - _NOTES)
        rows = list(board.requests.items())
        if len(rows) > room:
            rows.sort(key=lambda item: ("running", "failed", "queued", "waiting", "done").index(item[1].state))
        table = Table(box=None, pad_edge=False, expand=True)
        table.add_column("request")
        table.add_column("prompt", ratio=1, no_wrap=True, overflow="ellipsis")
        for stage in board.stages:
            table.add_column(stage, no_wrap=True, min_width=_BAR + 14)
        table.add_column("check", no_wrap=True, min_width=9)
        for name, row in rows[:room]:
            cells = [_cell(row.cells[stage]) for stage in board.stages]
            table.add_row(Text(name, style=_STYLES[row.state]), Text(row.prompt.prompt), *cells, _verdict(row))
        hidden = rows[room:]
        if hidden:
            counts = Counter(row.state for _, row in hidden)
            table.add_row("", Text("and " + ", ".join(f"{count} {state}" for state, count in counts.items()), "dim"))
        return table

    @staticmethod
    def _workers(board: Board) -> Text:
        from rich.text import Text

        line = Text("workers  ", style="dim")
        for worker in board.workers.values():
            line.append(worker.name, style=_PHASES[worker.phase])
            line.append(f" {worker.phase}   ", style="dim")
        return line


def make_display(console: Console, clock: Clock) -> Display:
    """Return a live table for a terminal, lines for anything else."""
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, clock)
    return PlainDisplay(console)


def _cell(cell: StageCell) -> Text:
    from rich.text import Text

    if cell.phase == "waiting":
        return Text("·", style="dim")
    full = round(cell.fraction * _BAR)
    bar = "━" * full + "─" * (_BAR - full)
    again = f" #{cell.attempt}" if cell.attempt > 1 else ""
    label = "queued" if cell.phase == "queued" else f"{cell.worker}{again}"
    return Text.assemble((bar, _STYLES[cell.phase]), f" {label}")


def _verdict(row: RequestRow) -> Text:
    from rich.text import Text

    if row.state == "failed":
        return Text("failed", style="bold red")
    if row.identical is None:
        return Text("")
    return Text("identical", style="green") if row.identical else Text("DIFFERS", style="bold red")
