"""A small denoising loop with everything that a checkpoint must bring back: the runs of the checkpoint suite.

Owns the loop. It goes wrong silently where its state is not whole, as real ones do: without its history a multistep
scheduler begins again at its first order, a generator that was not restored gives other noise. Imports torch in
functions only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from moonrelay.cache.checkpoint import CheckpointIdentity, CheckpointSession, StepState

SHAPE = (1, 4, 3, 8, 8)
STEPS = 8


@dataclass(frozen=True)
class Kind:
    """A kind of loop.

    Attributes:
        name: Of its scheduler.
        order: How many earlier outputs the scheduler takes into account.
        noise: Whether each step draws noise.
        dtype: Of the latents.
    """

    name: str
    order: int = 1
    noise: bool = False
    dtype: str = "float32"


EULER = Kind("euler")
MULTISTEP = Kind("multistep", order=3)
STOCHASTIC = Kind("stochastic", noise=True)
BOTH = Kind("multistep-stochastic", order=2, noise=True, dtype="bfloat16")
KINDS = (EULER, MULTISTEP, STOCHASTIC, BOTH)


def identity(request_id: str, kind: Kind = EULER, **changes: Any) -> CheckpointIdentity:
    """Return what a run of this loop is."""
    from moonrelay.cache.checkpoint import CheckpointIdentity

    fields: dict[str, Any] = {
        "request_id": request_id,
        "model": "tiny@abc",
        "loras": {"style@1": 0.5},
        "scheduler": kind.name,
        "scheduler_config": "c1",
        "sigmas": "s1",
        "timesteps": "t1",
        "num_steps": STEPS,
        "guidance": {"guidance_scale": 5.0, "guidance_scale_2": None},
        "latent_shape": SHAPE,
        "latent_dtype": kind.dtype,
        "conditioning": "e1",
        "numerics": {"threads": 1, "attention": "math"},
        "seed": 7,
    }
    return CheckpointIdentity(**{**fields, **changes})


@dataclass
class Loop:
    """One run.

    Args:
        kind: Of the loop.
        seed: Decides its noise.

    Attributes:
        step: Steps done.
        computed: How many of them here.
    """

    kind: Kind
    seed: int = 7
    step: int = 0
    computed: int = 0
    latents: torch.Tensor = field(init=False)
    _history: list[torch.Tensor | None] = field(init=False)
    _lower_order: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        import torch

        self._dice = torch.Generator().manual_seed(self.seed)
        self.latents = torch.randn(SHAPE, generator=self._dice).to(getattr(torch, self.kind.dtype))
        self._history = [None] * self.kind.order

    def advance(self) -> None:
        """Do one step; the latents are changed in place."""
        import torch

        output = torch.tanh(self.latents * (1.0 + 0.1 * self.step)) + 0.01 * self.step
        self._history = [*self._history[1:], output]
        order = min(self._lower_order + 1, self.kind.order)
        for back in range(1, order):
            earlier = self._history[-1 - back]
            if earlier is not None:  # as at the beginning: a scheduler without its history takes a lower order
                output = output + (0.5 / back) * (output - earlier)
        self._lower_order = order
        self.latents.sub_(output / STEPS)
        if self.kind.noise:
            noise = torch.randn(SHAPE, generator=self._dice)
            self.latents.add_(noise.to(self.latents.dtype), alpha=0.05)
        self.step += 1
        self.computed += 1

    def capture(self) -> StepState:
        """Return the state between two steps: a copy of what a step changes in place."""
        from moonrelay.cache.checkpoint import StepState

        return StepState(
            step=self.step,
            latents=self.latents.clone(),
            scheduler={"outputs": list(self._history), "lower_order": self._lower_order},
            generators={"noise": self._dice.get_state()},
            extra={"seen": (self.step, None, 0.5)},
        )

    def restore(self, state: StepState) -> None:
        """Go on from a state; what it lacks stays as at the beginning, as a careless host has it."""
        self.step = state.step
        self.latents = state.latents
        outputs = state.scheduler.get("outputs")
        if isinstance(outputs, list):
            self._history = list(outputs)
        lower_order = state.scheduler.get("lower_order")
        if isinstance(lower_order, int):
            self._lower_order = lower_order
        if "noise" in state.generators:
            self._dice.set_state(state.generators["noise"])

    def run(
        self,
        until: int = STEPS,
        *,
        session: CheckpointSession | None = None,
        each: Callable[[Loop], None] | None = None,
    ) -> str:
        """Do the steps up to ``until``; return the digest of the latents.

        Args:
            until: Steps in all.
            session: Is told after each.
            each: Called after each.
        """
        while self.step < until:
            self.advance()
            if session is not None:
                session.after_step(self.step, self.capture)
            if each is not None:
                each(self)
        return self.digest()

    def digest(self) -> str:
        """Return the digest of the latents' bytes."""
        import torch

        raw = self.latents.contiguous().view(-1).view(torch.uint8)
        return hashlib.sha256(bytes(raw.tolist())).hexdigest()


def unbroken(kind: Kind) -> str:
    """Return what a run gives that nothing interrupts."""
    return Loop(kind).run()
