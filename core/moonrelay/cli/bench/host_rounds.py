"""The measurement of ``moonrelay bench host``: lanes take turns, one copy of the same bytes is the unit.

Owns the order of things and the figures. In each round every lane has one turn, in an order drawn anew: it is opened,
and for each size one payload goes through that is not counted among the others (the first one touches the lane's
memory, and is reported apart), then some that are, each after one ``copy_``. Then it is closed with all its memory, so
only one lane's memory is held at a time. Every payload is compared, byte for byte, outside of what is timed.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from moonrelay.cli.bench.host_lanes import HostBench, Lane, Room
from moonrelay.cli.bench.host_pair import Copy, Discard, Get, LaneFailed, Pair, Put
from moonrelay.cli.bench.host_payload import smallest_of
from moonrelay.cli.bench.samples import median_s
from moonrelay.errors import MoonrelayError

#: Payloads of one turn that are counted: as many as fit into this, between the bounds.
_TURN_BYTES: Final = 192 << 20
_MOST: Final = 10


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane took for one size; seconds are medians.

    Attributes:
        lane: Its name.
        size_bytes: Tensor bytes of the payload.
        put_s: The call of ``put``.
        get_s: The call of ``get``, begun when ``put`` had returned.
        sum_s: Both, of the same payload.
        usable_s: From the beginning of ``put`` to the end of ``get``, with the message between the processes.
        first_s: ``sum_s`` of the first payload after the lane was opened, which touches its memory.
        cpu_s: Processor time of both processes for one payload, all their threads; another load distorts it little.
        copy_s: One ``copy_`` of so many bytes, right before.
        copy_cpu_s: Its processor time.
        ratio_to_copy: ``sum_s`` in copies.
        sum_quartiles_s: Quartiles of ``sum_s``: what the noise of the machine makes of it.
        passes: How many were counted.
        payload: Its name, where it is one of the host's own.
    """

    lane: str
    size_bytes: int
    put_s: float
    get_s: float
    sum_s: float
    usable_s: float
    first_s: float
    cpu_s: float
    copy_s: float
    copy_cpu_s: float
    ratio_to_copy: float
    sum_quartiles_s: tuple[float, float]
    passes: int
    payload: str = ""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a lane fared.

    Attributes:
        lane: Its name.
        says: What it is.
        ours: Whether Moonrelay moves the bytes.
        as_released: ``runs``, or why it does not run as the host was released.
        fix: What the bench changed so that it runs; empty for nothing.
        error: Why it was not measured, or not to the end; empty where it was.
        notes: What its ends say of themselves.
    """

    lane: str
    says: str
    ours: bool
    as_released: str
    fix: str
    error: str
    notes: tuple[str, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole measurement."""

    lanes: tuple[LaneReport, ...]
    rows: tuple[Row, ...]


@dataclass(slots=True)
class _Pass:
    put_s: float
    get_s: float
    usable_s: float
    cpu_s: float
    copy_s: float
    copy_cpu_s: float

    @property
    def sum_s(self) -> float:
        return self.put_s + self.get_s


@dataclass(slots=True)
class _Known:
    """What is known of one lane."""

    lane: Lane
    as_released: str = "runs"
    error: str = ""
    notes: tuple[str, ...] = ()
    first: dict[int, list[float]] = field(default_factory=dict)
    passes: dict[int, list[_Pass]] = field(default_factory=dict)


def measure(
    bench: type[HostBench],
    lanes: Sequence[Lane],
    sizes: Sequence[int],
    rounds: int,
    folder: Path,
    tell: Callable[[str], None] = lambda _line: None,
) -> Report:
    """Measure lanes against each other.

    Args:
        bench: The host's lanes.
        lanes: The chosen ones.
        sizes: Tensor bytes.
        rounds: How many.
        folder: For files of the measurement.
        tell: Is told of its progress.

    Raises:
        MoonrelayError: The processes cannot be started. A lane's own failure is in the report.

    Blocks: for the measurement, minutes. Ctrl-C ends it with the figures so far.
    """
    known = {lane.name: _Known(lane) for lane in lanes}
    with bench().shared(tuple(known), max(sizes), folder) as shared:
        room = Room(largest=max(sizes), shared=shared)
        with _Runs(bench, room, folder) as runs:
            try:
                _take_turns(runs, known, sizes, rounds, tell)
            except KeyboardInterrupt:
                tell("stopped; these are the figures so far")
    names = {one.nbytes: one.name for one in bench.payloads}
    rows = [row for nbytes in sizes for one in known.values() for row in _rows(one, nbytes, names.get(nbytes, ""))]
    return Report(lanes=tuple(_report(one) for one in known.values()), rows=tuple(rows))


def _take_turns(
    runs: _Runs, known: Mapping[str, _Known], sizes: Sequence[int], rounds: int, tell: Callable[[str], None]
) -> None:
    for one in known.values():
        if one.lane.fix:
            tell(f"{one.lane.name} as released")
            one.as_released = runs.as_released(one.lane)
    draw = random.Random(0)
    for number in range(rounds):
        for name in draw.sample(list(known), len(known)):
            one = known[name]
            if not one.error:
                tell(f"round {number + 1} of {rounds}: {name}")
                runs.turn(one, sizes)


class _Runs:
    """The pair of processes, made anew where a lane has ended one."""

    def __init__(self, bench: type[HostBench], room: Room, folder: Path) -> None:
        self._bench = bench
        self._room = room
        self._folder = folder
        self._pair: Pair | None = None
        self._keys = itertools.count(1)

    def __enter__(self) -> _Runs:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def as_released(self, lane: Lane) -> str:
        """Say whether a lane runs without the bench's fix."""
        try:
            self._open().open(lane.name, fixed=False)
            self._pass(smallest_of(self._bench.payloads))
        except MoonrelayError as exc:
            self._recover(exc)
            return exc.message
        self._shut()
        return "runs"

    def turn(self, one: _Known, sizes: Sequence[int]) -> None:
        """Let one lane run through all sizes."""
        try:
            one.notes = self._open().open(one.lane.name)
            for nbytes in sizes:
                one.first.setdefault(nbytes, []).append(self._pass(nbytes).sum_s)
                for _ in range(turn_passes(nbytes)):
                    one.passes.setdefault(nbytes, []).append(self._pass(nbytes))
        except MoonrelayError as exc:
            one.error = exc.message
            self._recover(exc)
            return
        self._shut()

    def _pass(self, nbytes: int) -> _Pass:
        """Put and get one payload."""
        pair, number = self._open(), next(self._keys)
        key = f"mr-bench-{number}"
        copied = pair.consumer.ask(Copy(nbytes=nbytes))
        put = pair.producer.ask(Put(key=key, nbytes=nbytes, stamp=number))
        got = pair.consumer.ask(Get(key=key, nbytes=nbytes, stamp=number, ticket=put.ticket))
        pair.consumer.ask(Discard(key=key))
        # The producer's work may go on behind `put`, so it is counted until here.
        left = pair.producer.ask(Discard(key=key))
        return _Pass(
            put_s=put.took_s,
            get_s=got.took_s,
            usable_s=got.began_s + got.took_s - put.began_s,
            cpu_s=left.cpu_s - put.cpu_s + got.cpu_s,
            copy_s=copied.took_s,
            copy_cpu_s=copied.cpu_s,
        )

    def _open(self) -> Pair:
        if self._pair is None:
            self._pair = Pair(self._bench, self._room, self._folder)
        return self._pair

    def _shut(self) -> None:
        try:
            self._open().shut()
        except MoonrelayError:
            self._drop()

    def _recover(self, error: MoonrelayError) -> None:
        """After a failure: close what is open, or begin with new processes."""
        if isinstance(error, LaneFailed):
            self._shut()
        else:
            self._drop()

    def _drop(self) -> None:
        pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()


def turn_passes(nbytes: int) -> int:
    """Return how many payloads of a size are counted in one turn."""
    return max(1, min(_MOST, _TURN_BYTES // nbytes))


def _rows(one: _Known, nbytes: int, payload: str) -> list[Row]:
    passes = one.passes.get(nbytes)
    if not passes:
        return []
    sums = [each.sum_s for each in passes]
    low, _, high = statistics.quantiles(sums, n=4) if len(sums) > 1 else (sums[0], sums[0], sums[0])
    copy_s = statistics.median(each.copy_s for each in passes)
    return [
        Row(
            lane=one.lane.name,
            size_bytes=nbytes,
            payload=payload,
            put_s=median_s([each.put_s for each in passes]),
            get_s=median_s([each.get_s for each in passes]),
            sum_s=median_s(sums),
            usable_s=median_s([each.usable_s for each in passes]),
            first_s=median_s(one.first[nbytes]),
            cpu_s=median_s([each.cpu_s for each in passes]),
            copy_s=round(copy_s, 7),
            copy_cpu_s=median_s([each.copy_cpu_s for each in passes]),
            ratio_to_copy=round(statistics.median(sums) / copy_s, 2),
            sum_quartiles_s=(round(low, 7), round(high, 7)),
            passes=len(passes),
        )
    ]


def _report(one: _Known) -> LaneReport:
    lane = one.lane
    return LaneReport(
        lane=lane.name,
        says=lane.says,
        ours=lane.ours,
        as_released=one.as_released if lane.fix or not one.error else one.error,
        fix=lane.fix,
        error=one.error,
        notes=one.notes,
    )
