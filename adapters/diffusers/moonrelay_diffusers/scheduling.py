"""A scheduler's history: what it carries from step to step, taken out and put back, and the noise that it draws.

Owns the list of schedulers that are known, with the names of what each one carries. Another one is refused by name, and
so is a known one that carries something else than it should (another version of diffusers, a subclass): nothing is
guessed. Source: diffusers' own scheduler classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cache.checkpoint_identity import mismatch
from moonrelay.cache.keys import digest_of
from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    import torch

Untyped = Any

#: What each known scheduler changes while it steps. ``multistep``: earlier model outputs decide the next step.
_HISTORY: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "FlowMatchEulerDiscreteScheduler": ("_step_index", "_begin_index"),
        "UniPCMultistepScheduler": (
            "_step_index",
            "_begin_index",
            "model_outputs",
            "timestep_list",
            "lower_order_nums",
            "this_order",
            "last_sample",
        ),
        "DPMSolverMultistepScheduler": ("_step_index", "_begin_index", "model_outputs", "lower_order_nums"),
    }
)

#: Settings by which a scheduler draws noise in its steps.
_STOCHASTIC: Final[Mapping[str, tuple[str, tuple[object, ...]]]] = MappingProxyType(
    {
        "FlowMatchEulerDiscreteScheduler": ("stochastic_sampling", (True,)),
        "DPMSolverMultistepScheduler": ("algorithm_type", ("sde-dpmsolver", "sde-dpmsolver++")),
    }
)


@contextmanager
def seeded_steps(scheduler: Untyped, generator: torch.Generator) -> Iterator[None]:
    """Let a stochastic scheduler draw its noise from the request's generator, so that equal seeds give equal bits.

    The pipelines give their scheduler none, so it would draw from the process's, which every other request moves on.
    """
    name, values = _STOCHASTIC.get(type(scheduler).__name__, ("", ()))
    if not name or scheduler.config.get(name) not in values:
        yield
        return
    scheduler.step = partial(type(scheduler).step, scheduler, generator=generator)
    try:
        yield
    finally:
        del scheduler.step


class ScheduleHistory:
    """Takes a scheduler's history out, and puts one back.

    Args:
        scheduler: A scheduler whose timesteps are set, before its first step of a run.

    Raises:
        ConfigError: It is of no known class, or set up with what is not known; ``context['field']`` names it.
    """

    def __init__(self, scheduler: Untyped) -> None:
        kind = type(scheduler)
        names = _HISTORY.get(kind.__name__)
        if names is None or not kind.__module__.startswith("diffusers."):
            message = (
                f"scheduler {kind.__module__}.{kind.__name__} is not one whose history is known; "
                f"checkpoints are taken of {', '.join(_HISTORY)}"
            )
            raise ConfigError(message, field="scheduler")
        if getattr(scheduler, "solver_p", None) is not None:
            message = "the scheduler's solver_p is a scheduler with a history of its own, which is not known"
            raise ConfigError(message, field="scheduler.solver_p")
        self.kind = kind.__name__
        self._scheduler = scheduler
        self._names = names
        self._before = self._others()

    def config_digest(self) -> str:
        """Return a digest of the scheduler's settings, by their values."""
        settings = {name: value for name, value in self._scheduler.config.items() if not name.startswith("_")}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
        return digest_of(self.kind, plain)

    def sigmas_digest(self) -> str:
        """Return a digest of the noise levels of this run."""
        return digest_of(self._scheduler.sigmas)

    def timesteps_digest(self) -> str:
        """Return a digest of the timesteps of this run."""
        return digest_of(self._scheduler.timesteps)

    def capture(self) -> dict[str, object]:
        """Return the history; see `captured` for its tensors.

        Raises:
            ConfigError: The scheduler changed something that is no known part of its history.
        """
        for name, mark in self._others().items():
            if self._before.get(name) != mark:
                message = f"{self.kind} changed {name} while it stepped, which is no known part of its history"
                raise ConfigError(message, field=f"scheduler.{name}")
        history = {name: captured(getattr(self._scheduler, name, None)) for name in self._names}
        outputs, timesteps = history.get("model_outputs"), history.get("timestep_list")
        if isinstance(outputs, list) and isinstance(timesteps, list):
            # Setting the timesteps clears the outputs of the run before and leaves these, which nobody reads.
            history["timestep_list"] = [
                None if output is None else timestep for output, timestep in zip(outputs, timesteps, strict=True)
            ]
        return history

    def check(self, history: Mapping[str, object], step: int, latents: torch.Tensor) -> None:
        """Hold a history against the scheduler.

        Args:
            history: What `capture` gave.
            step: Steps done.
            latents: The latents after them.

        Raises:
            CheckpointMismatch: Something is missing or does not fit; ``context['field']`` names it.
        """
        for name in self._names:
            if name not in history:
                raise mismatch(f"scheduler.{name}", "nothing", f"a part of a {self.kind}'s history")
        for name in history:
            if name not in self._names:
                raise mismatch(f"scheduler.{name}", "a part", f"no part of a {self.kind}'s history")
        order = int(self._scheduler.config.get("solver_order", 1))
        known = min(step, order)
        wanted: dict[str, object] = {"_step_index": step, "_begin_index": 0, "lower_order_nums": known}
        for name, value in wanted.items():
            if name in history and (type(history[name]) is not int or history[name] != value):
                raise mismatch(f"scheduler.{name}", history[name], value)
        if "this_order" in history:
            now = history["this_order"]
            if type(now) is not int or not 1 <= now <= known:
                raise mismatch("scheduler.this_order", now, f"1 to {known}")
        for name in ("model_outputs", "timestep_list"):
            if name in history:
                _check_list(name, history[name], order, known, latents if name == "model_outputs" else None)
        if "last_sample" in history and not _fits(history["last_sample"], latents):
            raise mismatch("scheduler.last_sample", _shown(history["last_sample"]), f"{tuple(latents.shape)}")

    def restore(self, history: Mapping[str, object]) -> None:
        """Put a history back that `check` found good; the scheduler goes on from there."""
        for name in self._names:
            setattr(self._scheduler, name, history[name])

    def _others(self) -> dict[str, object]:
        """Return a mark of everything that is no history; equal as long as nobody touched it."""
        marked = {name: value for name, value in vars(self._scheduler).items() if name not in self._names}
        return {name: _mark(value) for name, value in marked.items()}


def _mark(value: object) -> object:
    import torch

    if isinstance(value, torch.Tensor):
        return id(value), value._version  # noqa: SLF001 - the counter of changes in place, torch's only word on it
    if isinstance(value, (list, tuple)):
        return tuple(_mark(part) for part in value)
    if isinstance(value, (str, int, float, bool, type(None))):
        return type(value), value
    return id(value)


def captured(value: object) -> object:
    """Return a value of the loop's for a checkpoint: lists of their own, tensors that nobody changes.

    In host memory the loop's own tensors are taken: pipelines and schedulers replace them and change none in place, and
    where one was changed, torch has counted it, and the checkpoint is void. On a device they are copied, which costs
    next to nothing there: recorded graphs write into the same memory again, uncounted.
    """
    import torch

    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        return tensor.clone() if tensor.device.type != "cpu" or tensor.is_inference() else tensor
    if isinstance(value, list):
        return [captured(part) for part in value]
    return value


def _check_list(name: str, value: object, order: int, known: int, like: torch.Tensor | None) -> None:
    import torch

    field = f"scheduler.{name}"
    if not isinstance(value, list) or len(value) != order:
        raise mismatch(field, _shown(value), f"a list of {order}")
    for index, part in enumerate(value):
        # The newest stand last; what a run before left in the places that this one has not reached counts for nothing.
        if index >= order - known and not isinstance(part, torch.Tensor):
            raise mismatch(f"{field}[{index}]", _shown(part), "a tensor")
        if index >= order - known and like is not None and not _fits(part, like):
            raise mismatch(f"{field}[{index}]", _shown(part), f"{tuple(like.shape)}")


def _fits(value: object, like: torch.Tensor) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.shape == like.shape and value.is_floating_point()


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{tuple(shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
