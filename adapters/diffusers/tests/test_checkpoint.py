"""Step checkpoints in this host: a resumed run gives the same bits at every step, or what differs is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch

from moonrelay import CheckpointMismatch, DiffusionConnector, Preempted
from moonrelay.cache.checkpoint import Checkpointer, CheckpointSession, StepState
from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import (
    Cancelled,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    LeaseLost,
    MoonrelayError,
    TransferFailed,
)
from moonrelay.events import Event
from moonrelay_diffusers import load_stage
from moonrelay_diffusers.loop import RunCheckpoints
from moonrelay_diffusers.programs import _is_the_end
from moonrelay_diffusers.reference import Reference
from moonrelay_diffusers.scheduling import ScheduleHistory

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("same_bits")]

Models: TypeAlias = Any  # the class in conftest.py
STEPS = 5


class Killed(BaseException):
    """Stands for the worker's death: nothing is tidied up."""


def euler(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler(shift=3.0, **changes)

    return make


def unipc(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from diffusers import UniPCMultistepScheduler

        return UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, **changes
        )

    return make


def dpm(**changes: Any) -> Callable[[], Any]:
    def make() -> Any:
        from diffusers import DPMSolverMultistepScheduler

        return DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, **changes
        )

    return make


#: Kind of model and scheduler, by a short name; ``None`` is the model's own.
RUNS: dict[str, tuple[str, Callable[[], Any] | None]] = {
    "wan, unipc": ("wan2.1", None),
    "wan, unipc of order 3": ("wan2.1", unipc(solver_order=3, solver_type="bh1")),
    "wan, euler": ("wan2.1", euler()),
    "wan, euler with noise": ("wan2.1", euler(stochastic_sampling=True)),
    "wan, dpm": ("wan2.1", dpm()),
    "wan, dpm with noise": ("wan2.1", dpm(algorithm_type="sde-dpmsolver++")),
    "wan with two transformers": ("wan2.2-a14b", None),
    "wan with a timestep per token": ("wan2.2-ti2v", None),
    "qwen image, euler": ("qwen_image", None),
    "qwen image, euler with noise": ("qwen_image", None),
}


class Bench:
    """Denoise stages, two of each kind as two workers have them, and a store."""

    def __init__(self, models: Models, root: Path) -> None:
        self.models = models
        self.events: list[Event] = []
        self.conn = DiffusionConnector(
            "denoise", "store", store_config={"url": f"local://{root / 'store'}"}, observers=[self.events.append]
        )
        self.made: list[Checkpointer] = []

    def tree(self, kind: str, **changes: object) -> dict[str, Any]:
        key = (kind, *sorted(changes.items()))
        if key not in _trees:
            encode = _stage(self.models, kind, "encode", 0)
            _trees[key] = dict(encode.run(self.models.request(kind, num_inference_steps=STEPS, **changes)))
        return _trees[key]

    def runner(self, name: str, number: int) -> Any:
        kind, scheduler = RUNS[name]
        runner = _stage(self.models, kind, "denoise", number)
        own = _schedulers.setdefault((kind, number), runner._pipe.scheduler)
        if name.startswith("qwen") and name.endswith("noise"):
            own = type(own).from_config({**own.config, "stochastic_sampling": True})
        runner._pipe.scheduler = own if scheduler is None else scheduler()
        return runner

    def checkpointer(self, **options: Any) -> Checkpointer:
        self.made.append(Checkpointer(self.conn, **{"every": 1, **options}))
        return self.made[-1]

    def wanted(self, request_id: str = "r1", **options: Any) -> RunCheckpoints:
        own = {name: options.pop(name) for name in list(options) if name in ("every", "keep", "scope", "ttl_s")}
        return RunCheckpoints(checkpointer=self.checkpointer(**own), request_id=request_id, **options)

    def run_until(self, runner: Any, tree: Any, wanted: RunCheckpoints, step: int) -> None:
        """Run, and die after that step; what was being saved is."""

        def dying(done: int, _total: int) -> None:
            wanted.checkpointer.wait_idle(30)
            if done == step:
                raise Killed

        with pytest.raises(Killed):
            runner.run(tree, checkpoints=wanted, on_step=dying)

    def run(self, runner: Any, tree: Any, wanted: RunCheckpoints | None) -> tuple[torch.Tensor, list[int]]:
        steps: list[int] = []

        def on_step(done: int, _total: int) -> None:
            steps.append(done)
            if wanted is not None:
                wanted.checkpointer.wait_idle(30)

        latents = runner.run(tree, checkpoints=wanted, on_step=on_step)
        return latents, steps

    def left(self) -> list[str]:
        return self.conn.store().keys("moonrelay/", Deadline(10, SystemClock()))

    def told(self, name: str) -> list[dict[str, object]]:
        return [event.fields() for event in self.events if event.name == name]

    def close(self) -> None:
        for checkpointer in self.made:
            checkpointer.close()
        self.conn.close()


_trees: dict[Any, dict[str, Any]] = {}
_stages: dict[Any, Any] = {}
_schedulers: dict[Any, Any] = {}


def _stage(models: Models, kind: str, stage: Any, number: int) -> Any:
    key = (kind, stage, number)
    if key not in _stages:
        _stages[key] = load_stage(models.folder(kind), stage)
    return _stages[key]


@pytest.fixture
def bench(models: Models, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(models, tmp_path)
    try:
        yield made
    finally:
        made.close()


def bits(value: object) -> object:
    """Return a tree's content in a form that can be compared."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: bits(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(part) for part in value]
    return value


def states(wanted: RunCheckpoints) -> dict[int, StepState]:
    """Return the states that a run saved, by step."""
    assert wanted.session is not None
    found: dict[int, StepState] = {}
    for step in range(1, STEPS + 1):
        session = wanted.checkpointer.session(wanted.session.identity)
        try:
            state = session.resume(step=step)
        except CheckpointMismatch:
            continue
        assert state is not None
        found[step] = state
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_has_the_same_bits_at_every_step(name: str, bench: Bench) -> None:
    tree = bench.tree(RUNS[name][0])
    plain, steps = bench.run(bench.runner(name, 0), tree, None)
    assert steps == list(range(1, STEPS + 1))
    watched = bench.wanted(scope="whole", keep=99, retain=True)
    unbroken, _ = bench.run(bench.runner(name, 0), tree, watched)
    assert bits(unbroken) == bits(plain), "watching changed the bits"
    whole = states(watched)
    assert sorted(whole) == list(range(1, STEPS + 1))
    for killed_at in range(1, STEPS + 1):
        first = bench.wanted(scope=f"at {killed_at}", keep=99)
        bench.run_until(bench.runner(name, 0), tree, first, killed_at)
        second = bench.wanted(scope=f"at {killed_at}", keep=99, retain=True)
        # Another worker, which has done other work in between.
        other = bench.runner(name, 1)
        resumed, steps = bench.run(other, tree, second)
        assert second.resumed_step == killed_at
        assert steps == list(range(killed_at + 1, STEPS + 1)), "the number of a step is its own"
        assert bits(resumed) == bits(plain)
        after = states(second)
        for step in range(1, STEPS + 1):
            if step in after:
                assert bits(after[step].tree()) == bits(whole[step].tree()), f"killed at {killed_at}, step {step}"
        assert set(after) >= set(range(killed_at, STEPS + 1))


def test_noise_in_the_steps_comes_from_the_requests_seed(bench: Bench, models: Models) -> None:
    tree = bench.tree("wan2.1")
    calm, _ = bench.run(bench.runner("wan, euler", 0), tree, None)
    torch.manual_seed(1)
    one, _ = bench.run(bench.runner("wan, euler with noise", 0), tree, None)
    torch.manual_seed(2)
    torch.randn(7)
    other, _ = bench.run(bench.runner("wan, euler with noise", 1), tree, None)
    assert bits(one) == bits(other)
    assert bits(one) != bits(calm)
    assert "step" not in vars(bench.runner("wan, euler with noise", 0)._pipe.scheduler)
    # The undivided pipeline, too.
    reference = Reference(models.folder("wan2.1"))
    reference._pipe.scheduler = euler(stochastic_sampling=True)()
    frames = reference.run(models.request("wan2.1", num_inference_steps=STEPS))
    decode = _stage(models, "wan2.1", "decode", 0)
    assert (decode.run(one, tree["params"]) == frames).all()


@pytest.mark.parametrize("every", [2, 4, 10])
def test_at_most_k_steps_are_done_twice(every: int, bench: Bench) -> None:
    tree = bench.tree("wan2.1")
    plain, _ = bench.run(bench.runner("wan, unipc", 0), tree, None)
    for killed_at in range(1, STEPS + 1):
        scope = str(killed_at)
        bench.run_until(bench.runner("wan, unipc", 0), tree, bench.wanted(every=every, scope=scope), killed_at)
        second = bench.wanted(every=every, scope=scope)
        resumed, steps = bench.run(bench.runner("wan, unipc", 1), tree, second)
        assert bits(resumed) == bits(plain)
        assert second.resumed_step == killed_at // every * every
        assert steps == list(range(second.resumed_step + 1, STEPS + 1))


def test_a_run_that_is_left_is_saved_first(bench: Bench) -> None:
    tree = bench.tree("wan2.1")
    plain, _ = bench.run(bench.runner("wan, unipc", 0), tree, None)
    asked: list[int] = []

    def leaving() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(Preempted, match="after step 3 of 5"):
        bench.run(bench.runner("wan, unipc", 0), tree, bench.wanted(every=0, leaving=leaving))
    second = bench.wanted(every=0)
    resumed, steps = bench.run(bench.runner("wan, unipc", 1), tree, second)
    assert bits(resumed) == bits(plain)
    assert steps == [4, 5]
    # It is not left at its end, and not where it cannot be saved.
    third = bench.wanted(every=0, scope="third", leaving=lambda: len(asked) > 3)
    third.checkpointer.close()
    latents, steps = bench.run(bench.runner("wan, unipc", 0), tree, third)
    assert bits(latents) == bits(plain)
    assert steps == [1, 2, 3, 4, 5]


def test_a_request_is_edited_and_goes_on_from_a_step(bench: Bench) -> None:
    tree, edited = bench.tree("wan2.1"), bench.tree("wan2.1", prompt="A blue whale")
    first = bench.wanted(keep=99, retain=True)
    plain, _ = bench.run(bench.runner("wan, unipc", 0), tree, first)
    first.finish()
    assert first.checkpointer.wait_idle(30)
    with pytest.raises(CheckpointMismatch) as caught:
        bench.run(bench.runner("wan, unipc", 1), edited, bench.wanted("r2", of="r1", step=2))
    assert caught.value.context["field"] == "conditioning"
    outcomes = {}
    for step in (2, 4):
        wanted = bench.wanted(f"edit {step}", of="r1", step=step, override=("conditioning",))
        outcomes[step], steps = bench.run(bench.runner("wan, unipc", 1), edited, wanted)
        assert steps == list(range(step + 1, STEPS + 1))
        assert wanted.resumed_step == step
    fresh, _ = bench.run(bench.runner("wan, unipc", 0), edited, None)
    assert len({bits(one)[2] for one in (plain, fresh, *outcomes.values())}) == 4  # type: ignore[index]
    # With the prompt unchanged it is the same request again.
    again, _ = bench.run(bench.runner("wan, unipc", 1), tree, bench.wanted("r3", of="r1", step=4))
    assert bits(again) == bits(plain)
    for step, what in ((None, "none of request 'r9'"), (3, "3")):
        with pytest.raises(CheckpointMismatch, match=what) as caught:
            bench.run(bench.runner("wan, unipc", 1), tree, bench.wanted("r4", of="r9", step=step))
        assert caught.value.context["field"] == "step"


def test_nothing_is_left_of_a_run_that_is_finished(bench: Bench) -> None:
    wanted = bench.wanted()
    bench.run(bench.runner("wan, unipc", 0), bench.tree("wan2.1"), wanted)
    assert bench.left()
    wanted.finish()
    assert wanted.checkpointer.wait_idle(30)
    assert bench.left() == []


def test_a_cancelled_run_is_cancelled(bench: Bench) -> None:
    runner = bench.runner("wan, unipc", 0)
    kind = type(runner._pipe)
    with pytest.raises(Cancelled):
        runner.run(bench.tree("wan2.1"), checkpoints=bench.wanted(), cancelled=iter([False, False, True]).__next__)
    assert type(runner._pipe) is kind
    assert "prepare_latents" not in vars(runner._pipe)


# -- what differs is named -----------------------------------------------------------------------------------------


def _changed_weights(runner: Any) -> Callable[[], None]:
    parameter = next(runner._pipe.transformer.parameters())
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[0] += 1

    def undo() -> None:
        with torch.no_grad():
            parameter.copy_(kept)

    return undo


def _changed_threads(_runner: Any) -> Callable[[], None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    return lambda: torch.set_num_threads(threads)


def _id_of(value: object) -> str:
    """Name a test's parameter alike in every process of a run."""
    return str(getattr(value, "__name__", value))


def _scheduler(make: Callable[[], Any]) -> Callable[[Any], Callable[[], None]]:
    def change(runner: Any) -> Callable[[], None]:
        before = runner._pipe.scheduler
        runner._pipe.scheduler = make()

        def undo() -> None:
            runner._pipe.scheduler = before

        return undo

    return change


@pytest.mark.parametrize(
    ("field", "request_changes", "process_change"),
    [
        ("model", {}, _changed_weights),
        ("scheduler", {}, _scheduler(euler())),
        ("scheduler_config", {}, _scheduler(unipc(solver_order=3))),
        ("guidance.guidance_scale", {"guidance_scale": 3.0}, None),
        ("latent_shape", {"num_frames": 9}, None),
        ("conditioning", {"prompt": "A blue whale"}, None),
        ("conditioning", {"negative_prompt": "Noise"}, None),
        ("seed", {"seed": 12}, None),
        ("numerics.threads", {}, _changed_threads),
    ],
    ids=_id_of,
)
def test_whatever_differs_is_named_and_the_run_starts_afresh(
    field: str,
    request_changes: dict[str, object],
    process_change: Callable[[Any], Callable[[], None]] | None,
    bench: Bench,
) -> None:
    bench.run_until(bench.runner("wan, unipc", 0), bench.tree("wan2.1"), bench.wanted(), 3)
    tree = bench.tree("wan2.1", **request_changes)
    runner = bench.runner("wan, unipc", 1)
    undo = process_change(runner) if process_change is not None else None
    try:
        fresh, _ = bench.run(runner, tree, None)
        wanted = bench.wanted()
        latents, steps = bench.run(runner, tree, wanted)
    finally:
        if undo is not None:
            undo()
    assert [told["field"] for told in bench.told("checkpoint_refused")] == [field]
    assert steps == list(range(1, STEPS + 1))
    assert bits(latents) == bits(fresh)
    assert wanted.resumed_step == 0
    # Its own checkpoints have taken the place of the other.
    assert len({key.rpartition("/c/")[0] for key in bench.left() if "/c/" in key}) == 1


def test_another_number_of_steps_is_named(bench: Bench, models: Models) -> None:
    bench.run_until(bench.runner("wan, unipc", 0), bench.tree("wan2.1"), bench.wanted(), 3)
    encode = _stage(models, "wan2.1", "encode", 0)
    tree = dict(encode.run(models.request("wan2.1", num_inference_steps=STEPS + 1)))
    _, steps = bench.run(bench.runner("wan, unipc", 1), tree, bench.wanted())
    assert len(steps) == STEPS + 1
    # The schedule itself differs, and comes first.
    assert [told["field"] for told in bench.told("checkpoint_refused")] == ["sigmas"]


def _without(name: str) -> Callable[[StepState], StepState]:
    def change(state: StepState) -> StepState:
        return dataclasses.replace(state, scheduler={key: part for key, part in state.scheduler.items() if key != name})

    return change


def _with(name: str, value: object) -> Callable[[StepState], StepState]:
    def change(state: StepState) -> StepState:
        new = value(state) if callable(value) else value
        return dataclasses.replace(state, scheduler={**state.scheduler, name: new})

    return change


@pytest.mark.parametrize(
    ("field", "change"),
    [
        *((f"scheduler.{name}", _without(name)) for name in ("_step_index", "_begin_index", "model_outputs")),
        *((f"scheduler.{name}", _without(name)) for name in ("timestep_list", "lower_order_nums", "last_sample")),
        ("scheduler.this_order", _without("this_order")),
        ("scheduler.weather", _with("weather", 1)),
        ("scheduler._step_index", _with("_step_index", 2)),
        ("scheduler._begin_index", _with("_begin_index", None)),
        ("scheduler.lower_order_nums", _with("lower_order_nums", 1)),
        ("scheduler.this_order", _with("this_order", 3)),
        ("scheduler.model_outputs", _with("model_outputs", [])),
        ("scheduler.model_outputs[0]", _with("model_outputs", lambda state: [None, state.latents])),
        ("scheduler.model_outputs[1]", _with("model_outputs", lambda state: [state.latents, torch.zeros(2)])),
        ("scheduler.timestep_list[1]", _with("timestep_list", [torch.tensor(1), None])),
        ("scheduler.last_sample", _with("last_sample", None)),
        ("generators.noise", lambda state: dataclasses.replace(state, generators={})),
        (
            "generators.noise",
            lambda state: dataclasses.replace(state, generators={"noise": torch.zeros(3, dtype=torch.uint8)}),
        ),
        (
            "generators.more",
            lambda state: dataclasses.replace(
                state, generators={**state.generators, "more": state.generators["noise"]}
            ),
        ),
        ("latents", lambda state: dataclasses.replace(state, latents=state.latents[:, :1])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_missing_in_a_state_is_named_and_the_run_starts_afresh(
    field: str, change: Callable[[StepState], StepState], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = bench.tree("wan2.1")
    plain, _ = bench.run(bench.runner("wan, unipc", 0), tree, None)
    first = bench.wanted(every=3)
    bench.run_until(bench.runner("wan, unipc", 0), tree, first, 3)
    assert first.session is not None
    good = first.checkpointer.session(first.session.identity).resume()
    assert good is not None
    bad = change(good)
    # A writer that forgets something writes no checkpoint; so it is forged here.
    with monkeypatch.context() as patched:
        patched.setattr(StepState, "from_tree", classmethod(lambda cls, tree, identity: None))
        session = first.checkpointer.session(first.session.identity)
        assert session.save_now(3, lambda: bad)
    latents, steps = bench.run(bench.runner("wan, unipc", 1), tree, bench.wanted())
    assert [told["field"] for told in bench.told("checkpoint_refused")] == [field]
    assert steps == list(range(1, STEPS + 1))
    assert bits(latents) == bits(plain)


# -- what is not known is not guessed ------------------------------------------------------------------------------


def test_an_unknown_scheduler_is_refused_by_name_and_the_run_goes_on(bench: Bench) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

    with pytest.raises(ConfigError, match="FlowMatchHeunDiscreteScheduler"):
        ScheduleHistory(FlowMatchHeunDiscreteScheduler())

    class Own(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
        """A subclass may carry anything."""

    runner = bench.runner("wan, euler", 0)
    runner._pipe.scheduler = Own(shift=3.0)
    wanted = bench.wanted()
    _, steps = bench.run(runner, bench.tree("wan2.1"), wanted)
    assert len(steps) == STEPS
    assert wanted.session is None
    [told] = bench.told("checkpoint_failed")
    assert "Own" in str(told["reason"])
    assert bench.left() == []
    wanted.finish()


def test_a_history_that_is_not_known_is_refused_by_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = bench.runner("wan, euler", 0)
    scheduler = runner._pipe.scheduler
    original = type(scheduler).step

    def step(self: Any, *given: Any, **named: Any) -> Any:
        self.carried = object()
        return original(self, *given, **named)

    monkeypatch.setattr(type(scheduler), "step", step)
    _, steps = bench.run(runner, bench.tree("wan2.1"), bench.wanted())
    assert len(steps) == STEPS
    assert bench.told("checkpoint_saved") == []
    assert all("changed carried" in str(told["reason"]) for told in bench.told("checkpoint_failed"))
    assert len(bench.told("checkpoint_failed")) == STEPS


def test_noise_from_nowhere_is_refused_by_name(bench: Bench) -> None:
    runner = bench.runner("wan, euler", 0)
    original = runner._pipe.transformer.forward

    def forward(*given: Any, **named: Any) -> Any:
        torch.randn(1)
        return original(*given, **named)

    runner._pipe.transformer.forward = forward
    try:
        bench.run(runner, bench.tree("wan2.1"), bench.wanted())
    finally:
        del runner._pipe.transformer.forward
    assert bench.told("checkpoint_saved") == []
    assert all("random generator" in str(told["reason"]) for told in bench.told("checkpoint_failed"))


def test_a_cache_in_the_model_is_refused_by_name(bench: Bench) -> None:
    runner = bench.runner("wan, euler", 0)
    runner._pipe.transformer._cache_config = object()
    try:
        bench.run(runner, bench.tree("wan2.1"), bench.wanted())
    finally:
        runner._pipe.transformer._cache_config = None
    assert bench.told("checkpoint_saved") == []
    assert "cache" in str(bench.told("checkpoint_failed")[0]["reason"])


def test_without_a_store_the_run_is_the_same(bench: Bench) -> None:
    tree = bench.tree("wan2.1")
    plain, _ = bench.run(bench.runner("wan, unipc", 0), tree, None)
    wanted = bench.wanted()
    bench.conn.close()
    latents, _ = bench.run(bench.runner("wan, unipc", 0), tree, wanted)
    assert bits(latents) == bits(plain)
    assert {told["code"] for told in bench.told("checkpoint_failed")} == {"closed_error"}
    assert isinstance(wanted.session, CheckpointSession)


@pytest.mark.parametrize(
    ("error", "lost", "over"),
    [
        (Cancelled("x"), None, True),
        (DeadlineExceeded("x"), None, True),
        (ConfigError("x"), None, True),
        (CheckpointMismatch("x"), None, True),
        (Preempted("x"), None, False),
        (TransferFailed("x"), None, False),
        (ClosedError("x"), None, False),
        (LeaseLost("x"), None, False),
        (Cancelled("x"), LeaseLost("another has it"), False),
        (Cancelled("x"), Cancelled("by its client"), True),
    ],
    ids=str,
)
def test_checkpoints_are_removed_when_the_request_is_over_and_kept_for_whoever_goes_on(
    error: MoonrelayError, lost: MoonrelayError | None, over: bool
) -> None:
    work = SimpleNamespace(job=SimpleNamespace(lost=lost))
    assert _is_the_end(work, error) is over  # type: ignore[arg-type]
