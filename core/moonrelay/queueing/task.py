"""What is queued, and through which stages it goes.

Owns the task as its maker writes it and the description of the pipeline. Nothing here knows a backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    from moonrelay.handle import StageHandle

#: Priority classes, the most urgent first. None of them starves another; see `moonrelay.queueing.fairness`.
Priority: TypeAlias = Literal["interactive", "standard", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)

#: How a stage takes work: ``work`` is taken by any worker at any time, ``admission`` only against a credit downstream.
StageKind: TypeAlias = Literal["work", "admission"]

#: What a task may carry beside its handle, and what a result may be.
Plain: TypeAlias = (
    "bool | int | float | str | bytes | Sequence[Plain] | Mapping[str, Plain] | Mapping[int, Plain] | None"
)

MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """One stage's work for one request.

    Attributes:
        stage: Name of a stage of the queue's pipeline.
        request_id: The request; needed by `StageQueue.submit`, filled in by `Job.complete`.
        payload: Plain values (``None``, bool, int of 64 bits, float, str, bytes, lists, mappings with str or int keys).
            A tuple comes back as a list.
        handle: The stage's input: a `StageHandle`, or its bytes. It comes back as what was given.
        priority: Class of the request; ``None`` is ``standard`` on submit and "as before" on `Job.complete`.
        deadline_s: Seconds from now by which the whole request must have ended; ``None`` is "never" on submit and "as
            before" on `Job.complete`, where a deadline can only come nearer.
        affinity: Labels of the workers that should rather have it, e.g. ``{"host": "n1"}``; a soft preference.
        attempt: Deliveries of this stage's work so far; the first delivery is attempt 1.
        max_attempts: Deliveries at most before the request is a dead letter; ``None`` takes the queue's setting.
    """

    stage: str
    request_id: str | None = None
    payload: Plain = None
    handle: StageHandle | bytes | None = None
    priority: Priority | None = None
    deadline_s: float | None = None
    affinity: Mapping[str, str] | None = None
    attempt: int = 0
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        check_name("stage", self.stage)
        if self.request_id is not None:
            check_name("request_id", self.request_id)
        if self.priority is not None and self.priority not in PRIORITIES:
            message = f"priority={self.priority!r} is not known; use one of {', '.join(PRIORITIES)}"
            raise ConfigError(message, field="priority")
        if self.deadline_s is not None and (not _is_number(self.deadline_s) or not 0 < self.deadline_s < float("inf")):
            message = f"deadline_s={self.deadline_s!r} must be a number of seconds above 0, or None"
            raise ConfigError(message, field="deadline_s")
        for name, least, value in (("attempt", 0, self.attempt), ("max_attempts", 1, self.max_attempts)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                message = f"{name}={value!r} must be a whole number of at least {least}"
                raise ConfigError(message, field=name)
        check_affinity(self.affinity)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage as the queue knows it.

    Attributes:
        name: The stage's name.
        kind: ``work`` or ``admission``.
        downstream: The stage that takes its results; ``None`` where the request ends here. An ``admission`` stage takes
            a credit there for each job; without a downstream stage it needs none.
    """

    name: str
    kind: StageKind = "work"
    downstream: str | None = None


class Pipeline:
    """The stages of a queue, in order; stored with the queue so that all processes agree.

    Args:
        stages: In the order in which a request passes them. A stage's ``downstream`` must come after it.

    Raises:
        ConfigError: No stage, a name twice, an unknown kind, or a downstream stage that does not come later.
    """

    __slots__ = ("_index", "stages")

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        self.stages = tuple(stages)
        self._index = {spec.name: number for number, spec in enumerate(self.stages)}
        if not self.stages:
            raise ConfigError("a pipeline needs at least one stage", field="stages")
        if len(self._index) != len(self.stages):
            raise ConfigError("a stage's name stands twice in the pipeline", field="stages")
        for spec in self.stages:
            check_name("stage", spec.name)
            if spec.kind not in get_args(StageKind):
                message = f"kind={spec.kind!r} of stage {spec.name!r} must be 'work' or 'admission'"
                raise ConfigError(message, field="kind")
            below = spec.downstream
            if below is not None and self._index.get(below, -1) <= self._index[spec.name]:
                message = f"downstream={below!r} of stage {spec.name!r} must be a stage that comes after it"
                raise ConfigError(message, field="downstream")

    def __getitem__(self, name: str) -> StageSpec:
        """Return the stage called ``name``, or raise `ConfigError` with the names that there are."""
        number = self._index.get(name)
        if number is None:
            message = f"stage={name!r} is not in this queue's pipeline; it has {', '.join(self._index)}"
            raise ConfigError(message, field="stage")
        return self.stages[number]

    def __iter__(self) -> Iterator[StageSpec]:
        return iter(self.stages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pipeline) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def __repr__(self) -> str:
        return f"Pipeline({' -> '.join(f'{spec.name}({spec.kind})' for spec in self.stages)})"

    def position(self, name: str) -> int:
        """Return the stage's place in the order, 0 first."""
        self[name]
        return self._index[name]

    def feeding(self, name: str) -> tuple[StageSpec, ...]:
        """Return the admission stages whose jobs hold a credit of stage ``name``."""
        return tuple(spec for spec in self.stages if spec.kind == "admission" and spec.downstream == name)


def check_name(field: str, value: object) -> None:
    """Raise `ConfigError` unless ``value`` is a non-empty, printable str of at most 200 characters."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS or not value.isprintable():
        message = f"{field}={str(value)[:40]!r} must be a printable text of 1 to {MAX_NAME_CHARS} characters"
        raise ConfigError(message, field=field)


def check_affinity(affinity: object) -> None:
    """Raise `ConfigError` unless ``affinity`` is ``None`` or a mapping of texts."""
    if affinity is None:
        return
    if not isinstance(affinity, Mapping):
        message = f"affinity={affinity!r} must be a mapping of labels, e.g. {{'host': 'n1'}}"
        raise ConfigError(message, field="affinity")
    for key, value in affinity.items():
        check_name("affinity key", key)
        check_name(f"affinity[{key!r}]", value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


#: encode and decode are work queues, denoise is an admission queue.
DEFAULT_PIPELINE = Pipeline(
    (
        StageSpec(name="encode", kind="work", downstream="denoise"),
        StageSpec(name="denoise", kind="admission", downstream="decode"),
        StageSpec(name="decode", kind="work"),
    )
)
