"""The run as a value: what ``summary.json`` says, and the one line at the end.

Owns the summary's form. Pure functions over what was collected; an absent value is ``null``, never a guess.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from moonrelay.cli.demo.prompts import DemoPrompt
from moonrelay.queueing.task import Plain

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_PACKAGES: Final = (
    "moonrelay",
    "torch",
    "diffusers",
    "transformers",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "pyzmq",
    "xxhash",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """What one stage did for one request.

    Attributes:
        worker: Who.
        attempt: The delivery that counted; above 1 after a fault.
        started_s: Seconds since the run began.
        seconds: How long it took.
        input_bytes: Bytes of the payload read; 0 for the first stage.
        output_bytes: Bytes handed on.
        path: How the input came: ``p2p``, ``store``, ``None`` for the first stage.
        transfer_s: Seconds spent claiming and reading the input.
        resumed_step: Steps that an earlier delivery had done and that were kept.
        steps_redone: Steps that an earlier delivery had done and that were done again.
        embeddings: Where each text's embedding came from, by role: ``encoded``, or ``memory`` or ``store`` of the
            cache; ``kept`` in the stage that read it there because the request went past encode.
    """

    worker: str
    attempt: int
    started_s: float
    seconds: float
    input_bytes: int
    output_bytes: int
    path: str | None
    transfer_s: float
    resumed_step: int = 0
    steps_redone: int = 0
    embeddings: Mapping[str, str] = field(default_factory=dict)

    @property
    def cache_hits(self) -> int:
        """Embeddings that were not encoded for this request."""
        return sum(found != "encoded" for found in self.embeddings.values())


@dataclass(slots=True, kw_only=True)
class RequestReport:
    """One request's end.

    Attributes:
        prompt: What was asked.
        stages: Its stages, by name.
        digest: Of the frames that came out of the stages.
        undivided_digest: Of the undivided pipeline's frames.
        undivided_s: How long that took, in seconds.
        frames: Shape of the frames.
        file: The video.
        problem: Why there is none.
    """

    prompt: DemoPrompt
    stages: dict[str, StageReport] = field(default_factory=dict)
    digest: str | None = None
    undivided_digest: str | None = None
    undivided_s: float | None = None
    frames: Sequence[int] = ()
    file: Path | None = None
    problem: str | None = None

    @property
    def identical(self) -> bool:
        """Whether both digests are there and equal."""
        return self.digest is not None and self.digest == self.undivided_digest

    @property
    def steps_redone(self) -> int:
        """How many steps were done twice."""
        return sum(stage.steps_redone for stage in self.stages.values())

    @property
    def cache_hits(self) -> int:
        """How many embeddings came from the cache."""
        return sum(stage.cache_hits for stage in self.stages.values())

    @property
    def cache_misses(self) -> int:
        """How many embeddings were encoded and kept."""
        return sum(len(stage.embeddings) - stage.cache_hits for stage in self.stages.values())

    @property
    def past_encode(self) -> bool:
        """Whether it went past the encode stage, its embeddings being there."""
        return any("kept" in stage.embeddings.values() for stage in self.stages.values())

    def as_dict(self) -> dict[str, Json]:
        """Return the request's entry of the summary."""
        names = list(self.stages)
        hops = {f"{before}-{after}": self.stages[after].path for before, after in itertools.pairwise(names)}
        return {
            "request_id": self.prompt.request_id,
            "prompt": self.prompt.prompt,
            "negative_prompt": self.prompt.negative_prompt,
            "seed": self.prompt.seed,
            "identical": self.identical,
            "digest": self.digest,
            "undivided_digest": self.undivided_digest,
            "undivided_seconds": _rounded(self.undivided_s),
            "frames": list(self.frames),
            "path": hops,
            "steps_redone": self.steps_redone,
            "embeddings": {"hits": self.cache_hits, "misses": self.cache_misses, "past_encode": self.past_encode},
            "stages": {name: _stage_dict(stage) for name, stage in self.stages.items()},
            "file": str(self.file) if self.file is not None else None,
            "problem": self.problem,
        }


@dataclass(slots=True, kw_only=True)
class Kill:
    """The one worker that was killed on purpose.

    Attributes:
        stage: Its stage.
        worker: Its name.
        pid: Its process id.
        request_id: The request whose job it held.
        attempt: That delivery's number.
        fraction: How far the job had come.
        at_s: When, in seconds since the run began.
        replacement: Name of the worker started in its place.
        attempt_after: The delivery that completed the stage; above ``attempt``.
    """

    stage: str
    worker: str
    pid: int
    request_id: str
    attempt: int
    fraction: float
    at_s: float
    replacement: str | None = None
    attempt_after: int | None = None

    @property
    def where(self) -> str:
        """How far the job had come, in words; a stage that reports no progress is caught at its end."""
        return f"at {self.fraction:.0%}" if self.fraction < 1 else "at its end, the job not settled yet"

    @property
    def survived(self) -> bool:
        """Whether the job that it held was provably done again by a later delivery."""
        return self.attempt_after is not None and self.attempt_after > self.attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Yield:
    """A batch job that was left for the interactive request.

    Attributes:
        request_id: Whose job it was.
        made_way_for: The interactive request.
        stage: Where.
        worker: Who left it.
        attempt: That delivery's number.
        at_s: When, in seconds since the run began.
        note: How far it had come, in the worker's words.
    """

    request_id: str
    made_way_for: str
    stage: str
    worker: str
    attempt: int
    at_s: float
    note: str


@dataclass(slots=True, kw_only=True)
class Summary:
    """The whole run."""

    requests: list[RequestReport]
    settings: Mapping[str, Json]
    numerics: Mapping[str, Json] = field(default_factory=dict)
    killed: Kill | None = None
    yields: list[Yield] = field(default_factory=list)
    checkpoints: int = 0
    deliveries: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    problem: str | None = None

    @property
    def identical(self) -> bool:
        """Whether every request came out identical."""
        return bool(self.requests) and all(report.identical for report in self.requests)

    @property
    def paths(self) -> Counter[str]:
        """How many hand-overs took which path."""
        return Counter(
            stage.path for report in self.requests for stage in report.stages.values() if stage.path is not None
        )

    def as_dict(self) -> dict[str, Json]:
        """Return what goes into ``summary.json``."""
        return {
            "identical": self.identical,
            "requests": [report.as_dict() for report in self.requests],
            "killed": None
            if self.killed is None
            else {**asdict(self.killed), "at_s": _rounded(self.killed.at_s), "survived": self.killed.survived},
            "yields": [self._yield_dict(one) for one in self.yields],
            "checkpoints": self.checkpoints,
            "paths": dict(self.paths),
            "embeddings": {"hits": self._embeddings("cache_hits"), "misses": self._embeddings("cache_misses")},
            "deliveries": dict(self.deliveries),
            "versions": versions(),
            "numerics": dict(self.numerics),
            "settings": dict(self.settings),
            "seconds": _rounded(self.seconds),
            "problem": self.problem,
        }

    def verdict(self) -> str:
        """Return the run in one line."""
        same = sum(report.identical for report in self.requests)
        count = len(self.requests)
        if self.problem is not None:
            return self.problem
        if not self.identical:
            wrong = [report for report in self.requests if not report.identical]
            first = wrong[0]
            why = first.problem or f"digest {first.digest}, undivided {first.undivided_digest}"
            names = ", ".join(report.prompt.request_id for report in wrong)
            return f"only {same} of {count} are identical to the undivided pipeline; not {names} ({why})"
        paths = ", ".join(f"{number} by {path}" for path, number in sorted(self.paths.items()))
        line = f"{same} of {count} identical to the undivided pipeline, bit for bit; hand-overs: {paths}"
        hits = self._embeddings("cache_hits")
        if hits:
            past = sum(report.past_encode for report in self.requests)
            line += f"; embeddings: {hits} from the cache, {self._embeddings('cache_misses')} encoded"
            line += f", {past} requests past encode" if past else ""
        if self.killed is not None:
            line += (
                f"; {self.killed.worker} was killed in the middle of {self.killed.request_id}, "
                f"done again as attempt {self.killed.attempt_after}{self._taken_up(self.killed)}"
            )
        for one in self.yields:
            line += (
                f"; {one.request_id} made way on {one.worker} at {one.at_s:.1f} s for {one.made_way_for}, and went on"
            )
            line += self._went_on(one.request_id, one.stage)
        return line

    def _yield_dict(self, one: Yield) -> dict[str, Json]:
        stage = self._stage(one.request_id, one.stage)
        plain: dict[str, Json] = asdict(one)
        return plain | {
            "at_s": _rounded(one.at_s),
            "resumed_step": None if stage is None else stage.resumed_step,
            "steps_redone": None if stage is None else stage.steps_redone,
        }

    def _stage(self, request_id: str, stage: str) -> StageReport | None:
        stages = (report.stages for report in self.requests if report.prompt.request_id == request_id)
        return next((found[stage] for found in stages if stage in found), None)

    def _went_on(self, request_id: str, stage: str) -> str:
        """Say from where a job went on that had been left."""
        found = self._stage(request_id, stage)
        return "" if found is None else f" from step {found.resumed_step}, {found.steps_redone} steps done twice"

    def _embeddings(self, which: str) -> int:
        return sum(int(getattr(report, which)) for report in self.requests)

    def _taken_up(self, killed: Kill) -> str:
        """Say from where a killed worker's job went on; nothing for a stage without steps."""
        stage = self._stage(killed.request_id, killed.stage)
        if stage is None or not (stage.resumed_step or stage.steps_redone):
            return ""
        return f" from step {stage.resumed_step}, {stage.steps_redone} steps done twice"


def read_result(report: RequestReport, result: Plain, *, began_s: float, names: Mapping[str, str]) -> Path | None:
    """Fill a report from what the last stage gave.

    Args:
        report: The request's.
        result: The queue's result.
        began_s: When the run began, on the workers' clock.
        names: Workers' names by the queue's ids.

    Returns:
        The file that the last stage wrote, where it says one.
    """
    if not isinstance(result, Mapping):
        report.problem = f"the result is a {type(result).__name__}, not a mapping"
        return None
    found: Mapping[object, object] = result  # type: ignore[assignment]  # keys may be numbers
    digest, file, frames, trace = (found.get(key) for key in ("digest", "file", "frames", "trace"))
    report.digest = digest if isinstance(digest, str) else None
    report.frames = [int(size) for size in frames] if isinstance(frames, list) else ()
    for entry in trace if isinstance(trace, list) else []:
        if isinstance(entry, dict):
            report.stages[str(entry.get("stage"))] = _stage_report(entry, began_s, names)
    return Path(file) if isinstance(file, str) else None


def versions() -> dict[str, str]:
    """Return the versions of what took part."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _stage_report(entry: Mapping[str, object], began_s: float, names: Mapping[str, str]) -> StageReport:
    worker = str(entry.get("worker"))
    started, ended = _number(entry.get("started_s")), _number(entry.get("ended_s"))
    path, embeddings = entry.get("path"), entry.get("embeddings")
    return StageReport(
        worker=names.get(worker, worker),
        attempt=int(_number(entry.get("attempt"))),
        started_s=started - began_s,
        seconds=ended - started,
        input_bytes=int(_number(entry.get("input_bytes"))),
        output_bytes=int(_number(entry.get("output_bytes"))),
        path=path if isinstance(path, str) else None,
        transfer_s=_number(entry.get("transfer_s")),
        resumed_step=int(_number(entry.get("resumed_step"))),
        steps_redone=int(_number(entry.get("steps_redone"))),
        embeddings={str(role): str(found) for role, found in embeddings.items()}
        if isinstance(embeddings, dict)
        else {},
    )


def _stage_dict(stage: StageReport) -> dict[str, Json]:
    plain: dict[str, Json] = asdict(stage)
    return plain | {
        "started_s": _rounded(stage.started_s),
        "seconds": _rounded(stage.seconds),
        "transfer_s": _rounded(stage.transfer_s, 6),
    }


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
