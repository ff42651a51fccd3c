"""Step checkpoints: what they add to a step, and what they save when a worker dies.

What is timed:

- step: a denoising loop of steps of a given length (one thread multiplies matrices), over latents of a real video's
  size with the history of a multistep scheduler (two earlier results and the last sample), without checkpoints and with
  one after every 1, 5 and 10 steps. A round is ten steps of each, in an order drawn anew; before each turn the store is
  at rest. What is compared is the whole turn by ten, what is still being saved at its end left out of it; beside it
  stands for how long the loop itself was kept, which a busy machine changes less than the saving thread's share of it.
- recovery: a loop is cut off within a job; from finding its checkpoint in a new checkpointer to the step at which it
  was cut off, against starting over.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonrelay.cache.checkpoint import Checkpointer, CheckpointSession, StepState
from moonrelay.cache.checkpoint_identity import CheckpointIdentity
from moonrelay.cli.bench.samples import median_s, ratio, rounds, spread, take_turns
from moonrelay.clock import Clock

if TYPE_CHECKING:
    import torch

    from moonrelay.connector import DiffusionConnector

Row = dict[str, object]

#: Steps of one turn.
STEPS: Final = 10
#: Checkpoints after every so many steps.
EVERY: Final = (1, 5, 10)
#: Wan 2.1 at 480 x 832 with 81 frames.
LATENTS: Final = (1, 16, 21, 60, 104)
#: The cut-off job: after which step, with a checkpoint after every so many.
CUT_AFTER: Final = 33
CUT_EVERY: Final = 5
_SIDE: Final = 768
_REST_S: Final = 60.0


@dataclass(slots=True)
class Loop:
    """A loop that does what a denoising loop does to memory, and takes as long as it is told."""

    latents: torch.Tensor
    history: list[torch.Tensor]
    last: torch.Tensor
    matrix: torch.Tensor
    repeats: int = 1

    @classmethod
    def of(cls, step_s: float, clock: Clock) -> Loop:
        """Make a loop whose steps take at least ``step_s``."""
        import torch

        torch.set_num_threads(1)
        dice = torch.Generator().manual_seed(0)
        parts = [torch.randn(LATENTS, generator=dice) for _ in range(4)]
        loop = cls(parts[0], parts[1:3], parts[3], torch.randn(_SIDE, _SIDE, generator=dice) / _SIDE)
        loop.step()
        while True:
            took = min(_timed(loop.step, clock) for _ in range(3))
            if took >= step_s:
                return loop
            loop.repeats = max(loop.repeats + 1, int(loop.repeats * min(4.0, 1.05 * step_s / took)))

    def step(self) -> None:
        """Do one step: new latents, the history moved on by one."""
        product = self.matrix
        for _ in range(self.repeats):
            product = product @ self.matrix
        self.last = self.latents
        self.history = [self.history[1], self.latents * 0.5]
        self.latents = self.latents * 0.99 + product[0, 0]

    def state(self, step: int) -> StepState:
        """Capture the state, as a host does: the tensors themselves, which the loop replaces and does not change."""
        import torch

        return StepState(
            step=step,
            latents=self.latents,
            scheduler={"model_outputs": list(self.history), "last_sample": self.last, "lower_order_nums": 2},
            generators={"noise": torch.Generator().manual_seed(step).get_state()},
        )

    @property
    def state_bytes(self) -> int:
        return sum(part.nbytes for part in (self.latents, self.last, *self.history))


def measure(step_s: float, count: int | None, store: str | None, clock: Clock) -> Iterator[Row]:
    """Yield a row for each distance of checkpoints, and one of a recovery.

    Args:
        step_s: How long a step takes at least.
        count: Rounds; ``None`` takes seven.
        store: The relay's URL; ``None`` for an embedded one in a folder of its own.
        clock: Time.

    Blocks: for the measurement.
    """
    from moonrelay.connector import DiffusionConnector

    with ExitStack() as stack:
        url = store or f"local://{Path(stack.enter_context(tempfile.TemporaryDirectory())) / 'store'}"
        conn = stack.enter_context(DiffusionConnector("denoise", "store", store_config={"url": url}))
        loop = Loop.of(step_s, clock)
        yield from _overhead(conn, loop, count, stack, clock)
        yield _recovery(conn, loop, clock)


def _overhead(conn: DiffusionConnector, loop: Loop, count: int | None, stack: ExitStack, clock: Clock) -> Iterator[Row]:
    keepers = {every: stack.enter_context(Checkpointer(conn, every=every, scope="bench")) for every in EVERY}

    stalls: dict[int, list[float]] = {every: [] for every in EVERY}

    def contender(every: int) -> Callable[[int], float]:
        def turn(number: int) -> float:
            keeper = keepers.get(every)
            session = None if keeper is None else keeper.session(_identity(f"{every}-{number}", STEPS))
            began = clock.monotonic()
            stalled = _run(loop, session, 0, STEPS, clock)
            took = clock.monotonic() - began
            if session is not None and number >= 0:
                stalls[every].append(stalled / STEPS)
            if session is not None and keeper is not None:
                session.finish()
                keeper.wait_idle(_REST_S)
            return took / STEPS

        return turn

    seconds = take_turns({str(every): contender(every) for every in (0, *EVERY)}, rounds(count or 7, 0.0, clock))
    plain = seconds["0"]
    yield {"every": 0, "step_s": median_s(plain), "rounds": len(plain)}
    for every in EVERY:
        ours, counters = seconds[str(every)], keepers[every].counters()
        yield {
            "every": every,
            "step_s": median_s(ours),
            "ratio": ratio(ours, plain),
            "ratio_quartiles": spread(ours, plain),
            "ratio_of_least": round(min(ours) / min(plain), 3),
            "call_s": median_s(stalls[every]),
            "call_of_step": round(median_s(stalls[every]) / median_s(plain), 5),
            "saved": counters.saved,
            "skipped": counters.skipped,
            "failed": counters.failed,
            "state_bytes": loop.state_bytes,
            "rounds": len(ours),
        }


def _recovery(conn: DiffusionConnector, loop: Loop, clock: Clock) -> Row:
    identity = _identity("cut", 50)
    with Checkpointer(conn, every=CUT_EVERY, scope="bench") as first:
        over_s = _timed(lambda: _run(loop, first.session(identity), 0, CUT_AFTER, clock), clock)
        first.wait_idle(_REST_S)
    with Checkpointer(conn, every=CUT_EVERY, scope="bench") as second:
        session = second.session(identity)
        began = clock.monotonic()
        state = session.resume()
        resume_s = clock.monotonic() - began
        found = 0 if state is None else state.step
        _run(loop, None, found, CUT_AFTER, clock)
        recovered_s = clock.monotonic() - began
        session.finish()
        second.wait_idle(_REST_S)
    return {
        "recovery": True,
        "every": CUT_EVERY,
        "cut_after": CUT_AFTER,
        "resumed_step": found,
        "resume_s": round(resume_s, 6),
        "recovered_s": round(recovered_s, 6),
        "started_over_s": round(over_s, 6),
        "ratio": round(recovered_s / over_s, 3),
    }


def _run(loop: Loop, session: CheckpointSession | None, since: int, until: int, clock: Clock) -> float:
    """Run steps; return the seconds for which checkpoints kept the loop from its next one."""
    stalled = 0.0
    for done in range(since + 1, until + 1):
        loop.step()
        if session is not None:
            began = clock.monotonic()
            session.after_step(done, lambda step=done: loop.state(step))  # type: ignore[misc]
            stalled += clock.monotonic() - began
    return stalled


def _identity(name: str, steps: int) -> CheckpointIdentity:
    return CheckpointIdentity(
        request_id=name,
        model="bench@1",
        loras={},
        scheduler="UniPCMultistepScheduler",
        scheduler_config="bench",
        sigmas="bench",
        timesteps="bench",
        num_steps=steps,
        guidance={"guidance_scale": 5.0},
        latent_shape=LATENTS,
        latent_dtype="float32",
        conditioning="bench",
        numerics={"threads": 1},
        seed=0,
    )


def _timed(work: Callable[[], object], clock: Clock) -> float:
    began = clock.monotonic()
    work()
    return clock.monotonic() - began
