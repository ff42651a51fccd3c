"""Identity: a checkpoint of another run is refused by the name of what differs, and an override must be named."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from moonrelay.cache.checkpoint import CheckpointIdentity, StepState
from moonrelay.errors import CheckpointMismatch, ConfigError
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.checkpoint_bench import IDLE_S, CheckpointBench, CheckpointSuite
from moonrelay_conformance.suites.checkpoint_loop import EULER, SHAPE, STEPS, Loop

#: Another value for every field by which a found checkpoint can differ, and how the refusal names it.
_OTHER: tuple[tuple[str, Any, str], ...] = (
    ("model", "tiny@abd", "model"),
    ("loras", {"style@1": 0.25}, "loras.style@1"),
    ("loras", {"style@2": 0.5}, "loras"),
    ("loras", {}, "loras.style@1"),
    ("scheduler", "unipc", "scheduler"),
    ("scheduler_config", "c2", "scheduler_config"),
    ("sigmas", "s2", "sigmas"),
    ("timesteps", "t2", "timesteps"),
    ("num_steps", STEPS + 1, "num_steps"),
    ("guidance", {"guidance_scale": 4.0, "guidance_scale_2": None}, "guidance.guidance_scale"),
    ("guidance", {"guidance_scale": 5.0, "guidance_scale_2": 5.0}, "guidance.guidance_scale_2"),
    ("latent_shape", (*SHAPE[:-1], SHAPE[-1] + 1), "latent_shape"),
    ("latent_dtype", "bfloat16", "latent_dtype"),
    ("conditioning", "e2", "conditioning"),
    ("numerics", {"threads": 2, "attention": "math"}, "numerics.threads"),
    ("numerics", {"threads": 1.0, "attention": "math"}, "numerics.threads"),
    ("numerics", {"threads": 1, "attention": "flash"}, "numerics.attention"),
    ("seed", 8, "seed"),
    ("approximate", ("features",), "approximate"),
)
#: Fields that a caller may let differ, by name.
_OVERRIDABLE = ("model", "loras", "guidance", "conditioning", "numerics", "approximate", "seed")


class CheckpointIdentities(CheckpointSuite):
    """Whose checkpoint it is."""

    @promise(Level.L1, "Every field of the identity, changed alone, is a refusal that names it")
    def test_every_field_of_the_identity_is_compared(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 4)
        fields = {entry.name for entry in dataclasses.fields(CheckpointIdentity)}
        assert fields - {"request_id"} == {name for name, _, _ in _OTHER}, "this test knows other fields"
        for name, value, named in _OTHER:
            conn = bench.conn(1)
            session = bench.session(conn=conn, **{name: value})
            with pytest.raises(CheckpointMismatch) as caught:
                pytest.fail(f"with another {name} the state of step {_step(session.resume())} was given")
            assert str(caught.value.context["field"]).startswith(named), f"{name}: {caught.value}"
            assert named.partition(".")[0] in str(caught.value), f"the message names no field: {caught.value}"
            assert session.resumed_step == 0
            (told,) = conn.told("checkpoint_refused")
            assert str(told.fields()["field"]).startswith(named)

    @promise(Level.L1, "Another request's checkpoint is not found")
    def test_another_requests_is_not_found(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 4)
        assert bench.session(request_id=f"{bench.request}x").resume() is None
        elsewhere = bench.checkpointer(bench.conn(1), scope="another queue").session(bench.identity())
        assert elsewhere.resume() is None, "a deployment that names requests alike was given another one's"

    @promise(Level.L2, "What may differ does when it is named, and only that")
    def test_an_override_is_by_name(self, bench: CheckpointBench) -> None:
        bench.save(EULER, 4)
        values = {name: value for name, value, _ in reversed(_OTHER)}
        for name in _OVERRIDABLE:
            changed = {name: values[name]}
            assert _step(bench.session(**changed).resume(override=(name,))) == 4
            other = next(one for one in _OVERRIDABLE if one != name)
            with pytest.raises(CheckpointMismatch):
                bench.session(**changed).resume(override=(other,))
        for name in sorted({*values, "weather"} - {*_OVERRIDABLE}):
            with pytest.raises(ConfigError, match=name):
                bench.session().resume(override=(name,))

    @promise(Level.L2, "Another request goes on from a retained checkpoint, when it names what differs")
    def test_another_request_goes_on_from_a_retained_one(self, bench: CheckpointBench) -> None:
        checkpointer = bench.checkpointer(keep=2)
        session = checkpointer.session(bench.identity(), retain=True)
        loop = Loop(EULER)
        for step in (3, 6):
            loop.run(step)
            assert session.save_now(step, loop.capture)
        session.finish()
        assert checkpointer.wait_idle(IDLE_S)
        edited: dict[str, Any] = {"request_id": f"{bench.request}-edited", "conditioning": "e2"}
        with pytest.raises(CheckpointMismatch, match="conditioning"):
            bench.session(**edited).resume(of=bench.request, step=3)
        assert _step(bench.session(**edited).resume(override=("conditioning",), of=bench.request, step=3)) == 3

    @promise(Level.L1, "A state that could not be resumed is not saved, and is told of by name")
    def test_a_state_that_lacks_something_is_not_saved(self, bench: CheckpointBench) -> None:
        conn = bench.conn()
        checkpointer = bench.checkpointer(conn)
        session = checkpointer.session(bench.identity())
        loop = Loop(EULER)
        loop.run(2)
        whole = loop.capture()
        wrong: dict[str, StepState] = {
            "step": dataclasses.replace(whole, step=STEPS + 1),
            "latents": dataclasses.replace(whole, latents=whole.latents[:, :1]),
            "generators": dataclasses.replace(whole, generators={"noise": whole.latents}),
            "extra": dataclasses.replace(whole, extra=object()),
        }
        for number, (name, state) in enumerate(wrong.items(), 1):
            saved = session.after_step(number, partial(_given, state))
            assert not saved, f"a state with a wrong {name} was saved"
            assert name in str(conn.told("checkpoint_failed")[-1].reason)
        assert checkpointer.wait_idle(IDLE_S)
        assert not bench.until_gone()
        assert bench.session().resume() is None


def _given(state: StepState) -> StepState:
    return state


def _step(state: StepState | None) -> int | None:
    return None if state is None else state.step
