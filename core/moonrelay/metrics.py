"""Counters and histograms of what the events say.

Owns the numbers of one process. Fed by events only; labels are closed sets or bounded words, and never hold an id.
Rendering is Prometheus' text format 0.0.4, with no client library.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from moonrelay.events import Event

#: Upper bounds of the histograms' buckets.
SECONDS_BUCKETS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
BYTES_BUCKETS: Final = tuple(float(1 << power) for power in range(10, 33, 2))

#: Distinct words kept per label that a user may choose freely (``kind``, ``stage``); later ones count as ``other``.
MAX_WORDS: Final = 64

#: Metric name to (type, help).
_HELP: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "moonrelay_events_total": ("counter", "Events, by name, stage, kind and path."),
        "moonrelay_errors_total": ("counter", "Failures, retries, fallbacks and cache troubles, by event and code."),
        "moonrelay_bytes_total": ("counter", "Bytes of published, staged, spilled, delivered and cached payloads."),
        "moonrelay_duration_seconds": ("histogram", "How long an event's work took."),
        "moonrelay_payload_bytes": ("histogram", "Sizes of published payloads."),
    }
)

#: Events that count as errors, and those whose bytes are counted.
_ERRORS: Final = frozenset(
    {"failed", "retried", "fallback", "cache_trouble", "checkpoint_failed", "checkpoint_refused"}
)
_MOVES: Final = frozenset(
    {
        "published",
        "staged",
        "spilled",
        "delivered",
        "cache_hit",
        "cache_stored",
        "cache_evicted",
        "cache_approximated",
        "checkpoint_saved",
    },
)

Labels = tuple[tuple[str, str], ...]
Snapshot = dict[str, dict[Labels, "float | HistogramValue"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramValue:
    """One histogram at one moment.

    Attributes:
        buckets: Upper bound to cumulative count; the last bound is infinity.
        count: Number of observations.
        total: Their sum.
    """

    buckets: tuple[tuple[float, int], ...]
    count: int
    total: float


@dataclass(slots=True)
class _Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def value(self) -> HistogramValue:
        running = tuple(itertools.accumulate(self.counts))
        bounds = (*self.bounds, float("inf"))
        return HistogramValue(buckets=tuple(zip(bounds, running, strict=True)), count=running[-1], total=self.total)


class Metrics:
    """An observer that counts; give it to an `EventBus`.

    Threads: any.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, _Histogram]] = {}
        self._words: dict[str, set[str]] = {}

    def __call__(self, event: Event) -> None:
        """Count one event."""
        with self._lock:
            stage, kind = self._word("stage", event.stage), self._word("kind", event.kind)
            path, code = self._word("path", event.path), self._word("code", event.code)
            self._count("moonrelay_events_total", 1, event=event.name, stage=stage, kind=kind, path=path)
            if event.name in _ERRORS:
                self._count("moonrelay_errors_total", 1, event=event.name, stage=stage, code=code)
            if event.nbytes is not None and event.name in _MOVES:
                self._count("moonrelay_bytes_total", event.nbytes, event=event.name, stage=stage, path=path)
            if event.duration_s is not None:
                self._observe(
                    "moonrelay_duration_seconds", SECONDS_BUCKETS, event.duration_s, event=event.name, path=path
                )
            if event.nbytes is not None and event.name == "published":
                self._observe("moonrelay_payload_bytes", BYTES_BUCKETS, event.nbytes, kind=kind)

    def snapshot(self) -> Snapshot:
        """Return a copy of all numbers: metric name, then label pairs, then a number or a `HistogramValue`."""
        with self._lock:
            copied: Snapshot = {name: dict(series) for name, series in self._counters.items()}
            for name, histograms in self._histograms.items():
                copied[name] = {labels: histogram.value() for labels, histogram in histograms.items()}
            return copied

    def render(self) -> str:
        """Return all numbers in Prometheus' text format, sorted."""
        snapshot = self.snapshot()
        lines: list[str] = []
        for name, (kind, text) in _HELP.items():
            if name not in snapshot:
                continue
            lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
            for labels, value in sorted(snapshot[name].items(), key=lambda item: item[0]):
                lines += _lines_of(name, labels, value)
        return "\n".join(lines) + "\n" if lines else ""

    def _count(self, name: str, amount: float, **labels: str) -> None:
        series = self._counters.setdefault(name, {})
        key = tuple(labels.items())
        series[key] = series.get(key, 0) + amount

    def _observe(self, name: str, bounds: tuple[float, ...], value: float, **labels: str) -> None:
        series = self._histograms.setdefault(name, {})
        key = tuple(labels.items())
        if key not in series:
            series[key] = _Histogram(bounds)
        series[key].add(value)

    def _word(self, label: str, word: str | None) -> str:
        if word is None:
            return ""
        known = self._words.setdefault(label, set())
        if word not in known:
            if len(known) >= MAX_WORDS:
                return "other"
            known.add(word)
        return word


def _lines_of(name: str, labels: Labels, value: float | HistogramValue) -> Iterable[str]:
    if not isinstance(value, HistogramValue):
        yield f"{name}{_braces(labels)} {_number(value)}"
        return
    for bound, count in value.buckets:
        yield f"{name}_bucket{_braces((*labels, ('le', _number(bound))))} {count}"
    yield f"{name}_sum{_braces(labels)} {_number(value.total)}"
    yield f"{name}_count{_braces(labels)} {value.count}"


def _braces(labels: Labels) -> str:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
    return f"{{{shown}}}" if shown else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
