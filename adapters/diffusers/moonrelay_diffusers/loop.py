"""The denoising loop inside a pipeline's ``__call__``: watched, left at a step boundary, and taken up again there.

Owns the hooks round diffusers' own loop, which stays the one that computes. A resumed run goes through the very same
call: the loop passes over the steps that are done (by the pipeline's own ``interrupt``, which it asks before each
step), latents and history are put in their place, and the generator stands where it stood. So every step sees what it
would have seen in an unbroken run, its number included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cache.checkpoint import Checkpointer, CheckpointSession, StepState
from moonrelay.cache.checkpoint_identity import mismatch
from moonrelay.errors import Cancelled, CheckpointMismatch, ConfigError, Preempted
from moonrelay_diffusers.scheduling import ScheduleHistory, captured, seeded_steps

if TYPE_CHECKING:
    import torch

    from moonrelay.cache.checkpoint import CheckpointIdentity

Untyped = Any

#: Name of the request's generator in a checkpoint.
NOISE: Final = "noise"


@dataclass(slots=True, kw_only=True)
class RunCheckpoints:
    """The checkpoints of one run: what is wanted before it, what came of it afterwards.

    Attributes:
        checkpointer: Where they are kept.
        request_id: Whose they are.
        leaving: Asked after each step: whether the run shall be left there, its state saved.
        of: Another request, from one of whose checkpoints to go on where this one has none of its own.
        step: Which of those: the one after so many steps; the newest by default.
        override: Fields of the identity in which this run differs from that one; ``("conditioning",)`` for an edit.
        retain: Leave this run's checkpoints to their lease when it ends, for others to go on from.
        keep: How many of them are kept; the checkpointer's number by default.
        session: What the run made; ``None`` when it is not checkpointed.
        resumed_step: Steps that it did not have to do.
    """

    checkpointer: Checkpointer
    request_id: str
    leaving: Callable[[], bool] | None = None
    of: str | None = None
    step: int | None = None
    override: tuple[str, ...] = ()
    retain: bool = False
    keep: int | None = None
    session: CheckpointSession | None = None
    resumed_step: int = 0

    def finish(self) -> None:
        """Remove the run's checkpoints, unless they are retained. Call it when nobody needs them. Returns at once."""
        if self.session is not None:
            self.session.finish()
        elif not self.retain:
            self.checkpointer.drop(self.request_id)


class DenoiseLoop:
    """One run of a pipeline's loop.

    Args:
        pipe: The pipeline.
        steps: Steps in all.
        generator: The request's generator, as it is before the first noise.
        identify: Returns what the run is, once its schedule is set.
        on_step: Called after each step with (steps done, steps in all).
        cancelled: Asked after each step; true ends the run.
        checkpoints: ``None`` for a run without.

    Threads: used once, by one thread.
    """

    def __init__(
        self,
        pipe: Untyped,
        steps: int,
        generator: torch.Generator,
        *,
        identify: Callable[[str, ScheduleHistory], CheckpointIdentity] | None = None,
        on_step: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        checkpoints: RunCheckpoints | None = None,
    ) -> None:
        self._pipe = pipe
        self._steps = steps
        self._generator = generator
        self._identify = identify
        self._on_step = on_step
        self._cancelled = cancelled
        self._checkpoints = checkpoints
        self._history: ScheduleHistory | None = None
        self._dice: list[torch.Tensor] = []
        self._state: StepState | None = None
        self._asked = 0

    def run(self, arguments: Mapping[str, object]) -> Untyped:
        """Call the pipeline; return the first thing that it gives.

        Raises:
            Cancelled: ``cancelled`` said so.
            Preempted: The run was to be left, and its state is saved.
            CheckpointMismatch: It was to go on from another request's checkpoint, and cannot.
        """
        with seeded_steps(self._pipe.scheduler, self._generator):
            if self._checkpoints is None or self._identify is None:
                return self._call(arguments)
            try:
                with self._watched():
                    return self._call(arguments)
            except _Found as found:
                self._state = found.state
            return self._resumed(arguments, self._state)

    def _call(self, arguments: Mapping[str, object]) -> Untyped:
        return self._pipe(
            **arguments,
            generator=self._generator,
            return_dict=False,
            callback_on_step_end=self._after_step,
            callback_on_step_end_tensor_inputs=["latents"],
        )[0]

    def _resumed(self, arguments: Mapping[str, object], state: StepState) -> Untyped:
        self._asked = 0
        self._generator.set_state(state.generators[NOISE])
        latents = state.latents
        # Not as the argument ``latents``: the pipeline would cast it, and draw the noise that was drawn already.
        self._pipe.prepare_latents = lambda *_given, **_named: latents
        try:
            with self._watched():
                return self._call(arguments)
        finally:
            del self._pipe.prepare_latents

    # -- what the pipeline's loop asks and says -------------------------------------------------------------------

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Let the pipeline ask us before each step whether to pass over it."""
        loop, kind = self, type(self._pipe)

        def interrupt(pipe: Untyped) -> bool:
            return loop._before_step() or bool(pipe._interrupt)  # noqa: SLF001 - both sides of the hook

        self._pipe.__class__ = type(kind.__name__, (kind,), {"interrupt": property(interrupt)})
        try:
            yield
        finally:
            self._pipe.__class__ = kind

    def _before_step(self) -> bool:
        index = self._asked
        self._asked += 1
        state = self._state
        if index == 0 and state is None:
            self._begin()
        elif index == 0 and state is not None:
            # The call has set the schedule anew.
            self._history = ScheduleHistory(self._pipe.scheduler)
            self._history.restore(state.scheduler)
        return state is not None and index < state.step

    def _after_step(
        self, _pipe: Untyped, index: int, _timestep: object, tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, object]:
        done = index + 1
        session = self._checkpoints.session if self._checkpoints is not None else None

        def capture() -> StepState:
            return self._capture(done, tensors["latents"])

        if session is not None:
            session.after_step(done, capture)
        if self._on_step is not None:
            self._on_step(done, self._steps)
        if self._cancelled is not None and self._cancelled():
            message = f"cancelled after step {done} of {self._steps}"
            raise Cancelled(message)
        # What could not be saved is not left: the run goes on, and is cut off when its time is over.
        if session is not None and self._leaving(done) and session.save_now(done, capture):
            message = f"left after step {done} of {self._steps}, from where another worker goes on"
            raise Preempted(message)
        return {}

    def _leaving(self, done: int) -> bool:
        wanted = self._checkpoints
        return wanted is not None and wanted.leaving is not None and done < self._steps and wanted.leaving()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Find out, with the schedule set and nothing computed yet, what the run is and whether a part is done."""
        wanted = self._checkpoints
        if wanted is None or self._identify is None:
            return
        try:
            self._history = ScheduleHistory(self._pipe.scheduler)
            identity = self._identify(wanted.request_id, self._history)
        except ConfigError as exc:
            wanted.checkpointer.trouble(wanted.request_id, "no checkpoints of this run", exc)
            if wanted.of is not None:
                raise
            return
        wanted.session = wanted.checkpointer.session(identity, keep=wanted.keep, retain=wanted.retain)
        self._dice = self._global_dice()
        state = self._own_state(wanted.session)
        if state is None and wanted.of is not None:
            state = wanted.session.resume(wanted.override, of=wanted.of, step=wanted.step, device=self._device())
            if state is None:
                raise mismatch("step", f"none of request {wanted.of!r}", wanted.step or "the newest")
            self._check(state)
        if state is not None:
            wanted.resumed_step = state.step
            raise _Found(state)

    def _own_state(self, session: CheckpointSession) -> StepState | None:
        try:
            state = session.resume(device=self._device())
        except CheckpointMismatch:
            return None
        try:
            if state is not None:
                self._check(state)
        except CheckpointMismatch as exc:
            session.refuse(exc)
            return None
        return state

    def _check(self, state: StepState) -> None:
        import torch

        if self._history is not None:
            self._history.check(state.scheduler, state.step, state.latents)
        for name in sorted({NOISE, *state.generators}):
            if name not in state.generators or name != NOISE:
                raise mismatch(f"generators.{name}", "nothing" if name == NOISE else "a state", f"{NOISE!r} alone")
        try:
            torch.Generator(self._generator.device).set_state(state.generators[NOISE])
        except (RuntimeError, TypeError) as exc:
            raise mismatch(f"generators.{NOISE}", "no state of such a generator", str(exc)) from exc

    def _capture(self, done: int, latents: torch.Tensor) -> StepState:
        if self._history is None:
            message = "the schedule was not looked at before the first step"
            raise ConfigError(message, field="scheduler")
        for before, now in zip(self._dice, self._global_dice(), strict=True):
            if not before.equal(now):
                message = "something drew from the process's own random generator, whose state no checkpoint has"
                raise ConfigError(message, field="generators.default")
        return StepState(
            step=done,
            latents=captured(latents),  # type: ignore[arg-type]  # a tensor as it was
            scheduler=self._history.capture(),
            generators={NOISE: self._generator.get_state()},
        )

    def _global_dice(self) -> list[torch.Tensor]:
        import torch

        states = [torch.random.get_rng_state()]
        if self._pipe.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._pipe.device))
        return states

    def _device(self) -> str:
        return str(self._pipe.device)


class _Found(Exception):
    """A checkpoint was found once the schedule was set; the call begins again from there."""

    def __init__(self, state: StepState) -> None:
        super().__init__("a checkpoint was found")
        self.state = state
