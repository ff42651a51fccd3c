"""Features of prompts in this host: the same frames with fewer projections, or what is in the way is named."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector, Event, FeatureCache
from moonrelay.cache.checkpoint import Checkpointer
from moonrelay.cache.features import UNCONDITIONAL, FeatureCounters
from moonrelay.errors import CheckpointMismatch, ConfigError, Preempted
from moonrelay.orchestrator import CachesFeatures, StageLoop
from moonrelay.queueing import StageQueue, StageTask
from moonrelay_diffusers import load_stage
from moonrelay_diffusers.frames import frames_digest
from moonrelay_diffusers.loop import RunCheckpoints
from moonrelay_diffusers.programs import DecodeProgram, DenoiseProgram, EncodeProgram

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("same_bits")]

WANS = ("wan2.1", "wan2.2-a14b", "wan2.2-ti2v")
STEPS = 4
#: Of the tiny models; keys and values of two prompts.
LAYERS = 8
ONCE = LAYERS * 2 * 2

_stages: dict[tuple[str, str], Any] = {}


def stage(models: Any, kind: str, name: Any) -> Any:
    if (kind, name) not in _stages:
        _stages[kind, name] = load_stage(models.folder(kind), name)
    return _stages[kind, name]


def fresh(models: Any) -> Any:
    """Return a denoise stage that a test may spoil."""
    return load_stage(models.folder("wan2.1"), "denoise")


class Projections:
    """Counts what torch's linear layers compute, told apart by what they are in the transformers."""

    def __init__(self, runner: Any, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        names = {
            id(getattr(block.attn2, part)): part
            for name in runner.components
            if name.startswith("transformer")
            for block in getattr(runner._pipe, name).blocks
            for part in ("to_q", "to_k", "to_v")
        }
        plain = torch.nn.Linear.forward

        def forward(module: torch.nn.Linear, given: torch.Tensor) -> torch.Tensor:
            if id(module) in names:
                self.counts[names[id(module)]] += 1
            return plain(module, given)

        patch.setattr(torch.nn.Linear, "forward", forward)

    def taken(self) -> tuple[int, int]:
        """Return how many of keys and values, and of queries, since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts["to_k"] + counts["to_v"], counts["to_q"]


class Bench:
    def __init__(self, models: Any) -> None:
        self.models = models
        self.events: list[Event] = []
        self.conn = DiffusionConnector("denoise", "p2p", {"engine": "memory"}, observers=[self.events.append])

    def cache(self, capacity: int = 256 << 20, **settings: Any) -> FeatureCache:
        return FeatureCache(self.conn, capacity, **settings)

    def tree(self, kind: str = "wan2.1", **changes: Any) -> dict[str, Any]:
        return dict(stage(self.models, kind, "encode").run(self.models.request(kind, **changes)))

    def told(self, name: str) -> list[Event]:
        return [one for one in self.events if one.name == name]


@pytest.fixture
def bench(models: Any) -> Iterator[Bench]:
    made = Bench(models)
    yield made
    made.conn.close()


def run(runner: Any, tree: Any, cache: FeatureCache, **options: Any) -> tuple[torch.Tensor, FeatureCounters]:
    with cache.run("r") as used:
        latents = runner.run(tree, features=used, **options)
    return latents, used.counters()


# -- exact -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WANS)
def test_frames_are_identical_and_keys_and_values_computed_once(
    kind: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, decode = stage(bench.models, kind, "denoise"), stage(bench.models, kind, "decode")
    count = Projections(runner, monkeypatch)
    tree = bench.tree(kind)
    plain = runner.run(tree)
    each, queries = count.taken()
    assert each == 2 * queries == 2 * LAYERS * 2 * STEPS
    runner.check_features()
    count.taken()
    # Each of two transformers has its own keys and values.
    once = ONCE * sum(name.startswith("transformer") for name in runner.components)
    with bench.cache() as cache:
        first, counters = run(runner, tree, cache)
        assert count.taken() == (once, queries)
        assert (counters.misses, counters.hits) == (once, each - once)
        again, _ = run(runner, tree, cache)
        assert count.taken() == (0, queries)
        # Another prompt and another seed: the negative prompt's are there.
        changed = bench.tree(kind, prompt="A lighthouse in the fog", seed=12)
        later, _ = run(runner, changed, cache)
        assert count.taken() == (once // 2, queries)
    assert later.equal(runner.run(changed))
    assert first.equal(plain)
    assert again.equal(plain)
    assert frames_digest(decode.run(again, tree["params"])) == bench.models.digest(kind)
    assert not bench.told("cache_trouble")
    assert not bench.told("cache_approximated")


def test_nothing_of_it_stays_on_the_model(bench: Bench) -> None:
    runner = stage(bench.models, "wan2.1", "denoise")
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        run(runner, bench.tree(), cache)
        with pytest.raises(KeyboardInterrupt), cache.run() as used:
            runner.run(bench.tree(), features=used, on_step=interrupted)
    for module in runner._pipe.transformer.modules():
        assert "forward" not in vars(module)
        assert "cache_context" not in vars(module)


def interrupted(_done: int, _total: int) -> None:
    raise KeyboardInterrupt


def test_a_small_bound_keeps_a_part_and_the_bits(bench: Bench) -> None:
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree()
    plain = runner.run(tree)
    with bench.cache(7 * 64 * 128 * 4) as cache:  # seven of the 32
        for _ in range(2):
            latents, counters = run(runner, tree, cache)
            assert latents.equal(plain)
            assert cache.counters().entries == 7
    assert counters.hits == 7 * STEPS
    assert counters.not_kept == (ONCE - 7) * STEPS


def test_guidance_off(bench: Bench) -> None:
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree(guidance_scale=1.0)
    plain = runner.run(tree)
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        for _ in range(2):
            latents, counters = run(runner, tree, cache)
            assert latents.equal(plain)
    assert (counters.misses, counters.reused) == (0, 0)
    assert not bench.told("cache_trouble")


def test_bfloat16(bench: Bench) -> None:
    runner = load_stage(bench.models.folder("wan2.1"), "denoise", dtype="bfloat16")
    tree = bench.tree()
    plain = runner.run(tree)
    runner.check_features()
    with bench.cache() as cache:
        for _ in range(2):
            latents, counters = run(runner, tree, cache)
            assert latents.equal(plain)
    assert (counters.misses, counters.hits) == (0, ONCE * STEPS)


def test_a_resumed_run_has_the_same_bits(bench: Bench, tmp_path: Path) -> None:
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree()
    plain = runner.run(tree)
    with (
        DiffusionConnector("denoise", "store", store_config={"url": f"local://{tmp_path}/store"}) as conn,
        Checkpointer(conn, every=1) as keeper,
        bench.cache() as cache,
    ):
        left = RunCheckpoints(checkpointer=keeper, request_id="r", leaving=lambda: True)
        with pytest.raises(Preempted):
            run(runner, tree, cache, checkpoints=left)
        # Exact features change nothing in what a run is: it goes on with them or without.
        goes_on = RunCheckpoints(checkpointer=keeper, request_id="r")
        assert runner.run(tree, checkpoints=goes_on).equal(plain)
        assert goes_on.resumed_step == 1
        latents, _ = run(runner, tree, cache, checkpoints=RunCheckpoints(checkpointer=keeper, request_id="r"))
        assert latents.equal(plain)


# -- what decides keys and values, one at a time -----------------------------------------------------------------------


def other_weights(runner: Any) -> None:
    with torch.no_grad():
        runner._pipe.transformer.blocks[3].attn2.to_v.weight[0, 0] += 1


def other_tensors(runner: Any) -> None:
    layer = runner._pipe.transformer.blocks[3].attn2.to_k
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


def other_text_projection(runner: Any) -> None:
    with torch.no_grad():
        runner._pipe.transformer.condition_embedder.text_embedder.linear_1.weight.mul_(2)


def other_type(runner: Any) -> None:
    runner._pipe.transformer.to(torch.bfloat16)


def other_lora(runner: Any) -> None:
    # Where an adapter is active in layers that keep nothing themselves, its scale is part of the key all the same.
    model = runner._pipe.transformer
    model.peft_config = {"style": object()}
    model.proj_out.scaling, model.proj_out.active_adapters = {"style": 0.5}, ["style"]


def other_threads(_runner: Any) -> None:
    torch.set_num_threads(2)


def other_precision(_runner: Any) -> None:
    torch.set_float32_matmul_precision("medium")


CHANGES: list[Callable[[Any], None]] = [
    other_weights,
    other_tensors,
    other_text_projection,
    other_type,
    other_lora,
    other_threads,
    other_precision,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_decides_keys_and_values_changed_is_a_miss(change: Callable[[Any], None], bench: Bench) -> None:
    runner, tree = fresh(bench.models), bench.tree()
    precision = torch.get_float32_matmul_precision()
    with bench.cache() as cache:
        run(runner, tree, cache)
        try:
            change(runner)
            latents, counters = run(runner, tree, cache)
            assert (counters.misses, counters.hits) == (ONCE, ONCE * (STEPS - 1))
            assert counters.trouble == 0
            assert latents.equal(runner.run(tree))
        finally:
            torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"prompt": "A lighthouse"}, ONCE // 2),
        ({"negative_prompt": "dark"}, ONCE // 2),
        ({"max_sequence_length": 48}, ONCE),
        ({"seed": 99, "num_inference_steps": 3, "guidance_scale": 3.0, "height": 64}, 0),
    ],
    ids=["prompt", "negative prompt", "length", "what does not matter"],
)
def test_what_of_a_request_decides_them(changes: dict[str, Any], missed: int, bench: Bench) -> None:
    runner = stage(bench.models, "wan2.1", "denoise")
    with bench.cache() as cache:
        run(runner, bench.tree(), cache)
        tree = bench.tree(**changes)
        latents, counters = run(runner, tree, cache)
    assert counters.misses == missed
    assert latents.equal(runner.run(tree))


def test_one_bit_of_the_embeddings_is_another_prompt(bench: Bench) -> None:
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree()
    with bench.cache() as cache:
        run(runner, tree, cache)
        tree["prompt_embeds"] = tree["prompt_embeds"].clone()
        tree["prompt_embeds"].view(torch.int32)[0, 0, 0] ^= 1
        latents, counters = run(runner, tree, cache)
    assert counters.misses == ONCE // 2
    assert latents.equal(runner.run(tree))


def test_embeddings_edited_during_a_run_are_another_prompt(bench: Bench) -> None:
    """A callback of a pipeline may change them in place."""
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree()

    def edit(done: int, _total: int) -> None:
        if done == 2:
            tree["prompt_embeds"].mul_(0.5)

    kept = tree["prompt_embeds"].clone()
    plain = runner.run(tree, on_step=edit)
    tree["prompt_embeds"].copy_(kept)
    with bench.cache() as cache:
        latents, counters = run(runner, tree, cache, on_step=edit)
    assert not plain.equal(runner.run({**tree, "prompt_embeds": kept}))
    assert latents.equal(plain)
    assert counters.misses == ONCE + ONCE // 2


def test_an_edit_of_kept_keys_harms_no_later_request(bench: Bench) -> None:
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree()
    plain = runner.run(tree)
    with bench.cache() as cache:
        run(runner, tree, cache)
        for entry in list(cache._entries.values())[::5]:
            entry.tensor.zero_()
        latents, counters = run(runner, tree, cache)
    assert latents.equal(plain)
    assert counters.trouble == 7
    assert {one.code for one in bench.told("cache_trouble")} == {"integrity_error"}


# -- what is not known is refused by name ------------------------------------------------------------------------------


def lora_layer(runner: Any) -> None:
    class LoraLinear(torch.nn.Linear):
        pass

    runner._pipe.transformer.blocks[2].attn2.to_k.__class__ = LoraLinear


def own_processor(runner: Any) -> None:
    attention = runner._pipe.transformer.blocks[2].attn2
    attention.processor = type("Own", (type(attention.processor),), {})()


def own_transformer(runner: Any) -> None:
    model = runner._pipe.transformer
    model.__class__ = type("Own", (type(model),), {})


def fused(runner: Any) -> None:
    runner._pipe.transformer.blocks[2].attn2.fuse_projections()


def hooked(runner: Any) -> None:
    runner._pipe.transformer.blocks[2].register_forward_pre_hook(lambda *_: None)


def offloaded(runner: Any) -> None:
    layer = runner._pipe.transformer.blocks[2].attn2.to_v
    layer.forward = lambda given: torch.nn.Linear.forward(layer, given)


def compiled(runner: Any) -> None:
    runner._pipe.transformer._compiled_call_impl = runner._pipe.transformer.forward


def cached(runner: Any) -> None:
    from diffusers import FirstBlockCacheConfig

    runner._pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))


def two_scales(runner: Any) -> None:
    other_lora(runner)
    block = runner._pipe.transformer.blocks[0].ffn
    block.scaling, block.active_adapters = {"style": 0.25}, ["style"]


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "lora": (lora_layer, r"blocks\.2\.attn2\.to_k is a .*LoraLinear"),
    "processor": (own_processor, r"blocks\.2\.attn2\.processor is a .*Own"),
    "transformer": (own_transformer, r"transformer is a .*Own"),
    "fused": (fused, r"blocks\.2\.attn2 is fused"),
    "hooks": (hooked, r"blocks\.2 is one with hooks"),
    "offloaded": (offloaded, r"blocks\.2\.attn2\.to_v is one whose forward"),
    "compiled": (compiled, "transformer is compiled"),
    "another cache": (cached, "transformer"),
    "two scales": (two_scales, "different scales"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_by_name(name: str, bench: Bench) -> None:
    spoil, message = REFUSED[name]
    runner = fresh(bench.models)
    runner.check_features()
    spoil(runner)
    with pytest.raises(ConfigError, match=message):
        runner.check_features()
    with bench.cache() as cache, pytest.raises(ConfigError, match=message):
        DenoiseProgram(runner).use_features(cache)
    if name == "compiled":
        return  # it cannot really run
    # What happens while the worker serves costs the cache, not the request.
    tree = bench.tree()
    plain = runner.run(tree)
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        latents, counters = run(runner, tree, cache)
    assert latents.equal(plain)
    assert (counters.misses, counters.hits, counters.trouble) == (0, 0, 1)
    (event,) = bench.told("cache_trouble")
    assert event.reason is not None
    assert "no features are kept in this run" in event.reason


def test_a_layer_that_gives_other_bits_with_kept_keys_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another version of diffusers put something between the projection and the norm."""
    runner = fresh(bench.models)
    kind = type(runner._pipe.transformer.blocks[0].attn2.processor)
    plain = kind.__call__

    def call(self: Any, attention: Any, latents: Any, text: Any = None, *rest: Any) -> Any:
        if text is not None:
            text = text + attention.to_k(text).mean()
        return plain(self, attention, latents, text, *rest)

    monkeypatch.setattr(kind, "__call__", call)
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn2 is one that does not give the same"):
        runner.check_features()


def test_a_family_without_such_features_is_refused(bench: Bench) -> None:
    runner = stage(bench.models, "qwen_image", "denoise")
    with pytest.raises(ConfigError, match="qwen_image"):
        runner.check_features()


# -- approximate -------------------------------------------------------------------------------------------------------


def test_no_prediction_is_reused_unless_it_was_named(bench: Bench) -> None:
    runner = stage(bench.models, "wan2.1", "denoise")
    forwards: list[object] = []
    handle = runner._pipe.transformer.register_forward_hook(lambda *_: forwards.append(None))
    try:
        with bench.cache() as cache:
            for seed in (1, 2):
                latents, counters = run(runner, bench.tree(seed=seed), cache)
                assert latents.equal(runner.run(bench.tree(seed=seed)))
                assert counters.reused == 0
    finally:
        handle.remove()
    assert len(forwards) == 4 * STEPS * 2


@pytest.mark.parametrize("kind", WANS)
def test_a_named_approximation_reuses_and_tells(kind: str, bench: Bench) -> None:
    runner = stage(bench.models, kind, "denoise")
    first, other = bench.tree(kind), bench.tree(kind, prompt="A lighthouse", seed=12)
    exact, plain = runner.run(first), runner.run(other)
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        latents, counters = run(runner, first, cache)
        assert latents.equal(exact)  # whoever comes first computes all of it
        assert counters.reused == 0
        latents, counters = run(runner, first, cache)
        assert latents.equal(exact)  # the very same request has the very same latents
        assert counters.reused == STEPS
        latents, counters = run(runner, other, cache)
        assert counters.reused == STEPS
        assert not latents.equal(plain)
    told = bench.told("cache_approximated")
    assert [one.extra["step"] for one in told] == [str(step) for step in range(STEPS)] * 2
    assert all(one.request_id == "r" for one in told)


@pytest.mark.parametrize(
    "changes",
    [
        {"negative_prompt": "dark"},
        {"num_inference_steps": STEPS + 1},
        {"height": 64},
        {"guidance_scale": 4.0},
    ],
    ids=["negative prompt", "schedule", "shape", "guidance"],
)
def test_what_of_a_request_a_prediction_hangs_on(changes: dict[str, Any], bench: Bench) -> None:
    runner = stage(bench.models, "wan2.1", "denoise")
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        run(runner, bench.tree(), cache)
        tree = bench.tree(**changes)
        latents, counters = run(runner, tree, cache)
    assert counters.reused == 0
    assert latents.equal(runner.run(tree))


@pytest.mark.parametrize("change", [*CHANGES, "scheduler"], ids=lambda change: getattr(change, "__name__", change))
def test_what_of_the_host_a_prediction_hangs_on(change: Any, bench: Bench) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    runner, tree = fresh(bench.models), bench.tree()
    precision = torch.get_float32_matmul_precision()
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        run(runner, tree, cache)
        try:
            if change == "scheduler":
                runner._pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
            else:
                change(runner)
            _, counters = run(runner, tree, cache)
        finally:
            torch.set_float32_matmul_precision(precision)
    assert (counters.reused, counters.trouble) == (0, 0)


def test_a_scheduler_that_is_not_known_is_not_approximated(bench: Bench) -> None:
    runner, tree = fresh(bench.models), bench.tree()
    scheduler = runner._pipe.scheduler
    runner._pipe.scheduler = type("Own", (type(scheduler),), {}).from_config(scheduler.config)
    with bench.cache(approximate=[UNCONDITIONAL]) as cache:
        for _ in range(2):
            latents, counters = run(runner, tree, cache)
    assert (counters.reused, counters.trouble) == (0, 1)
    assert counters.hits == ONCE * STEPS
    assert latents.equal(runner.run(tree))


def test_a_checkpoint_says_whether_an_approximation_was_on(bench: Bench, tmp_path: Path) -> None:
    runner, tree = stage(bench.models, "wan2.1", "denoise"), bench.tree()
    exact = runner.run(tree)
    with (
        DiffusionConnector("denoise", "store", store_config={"url": f"local://{tmp_path}/store"}) as conn,
        Checkpointer(conn, every=1) as keeper,
        bench.cache(approximate=[UNCONDITIONAL]) as approximate,
        bench.cache() as plain,
    ):

        def left_at_one(cache: FeatureCache, request_id: str) -> None:
            wanted = RunCheckpoints(checkpointer=keeper, request_id=request_id, leaving=lambda: True)
            with pytest.raises(Preempted):
                run(runner, tree, cache, checkpoints=wanted)

        left_at_one(approximate, "r1")
        afresh = RunCheckpoints(checkpointer=keeper, request_id="r1")
        assert runner.run(tree, checkpoints=afresh).equal(exact)
        assert afresh.resumed_step == 0
        left_at_one(plain, "r2")
        afresh = RunCheckpoints(checkpointer=keeper, request_id="r2")
        run(runner, tree, approximate, checkpoints=afresh)
        assert afresh.resumed_step == 0
        left_at_one(approximate, "r3")
        same = RunCheckpoints(checkpointer=keeper, request_id="r3")
        run(runner, tree, approximate, checkpoints=same)
        assert same.resumed_step == 1
        # By name one may go on all the same.
        left_at_one(approximate, "r4")
        edited = RunCheckpoints(checkpointer=keeper, request_id="r5", of="r4", override=("request_id",))
        with pytest.raises(CheckpointMismatch) as caught:
            runner.run(tree, checkpoints=edited)
        assert caught.value.context["field"] == "approximate"
        edited = dataclasses.replace(edited, override=("request_id", "approximate"))
        runner.run(tree, checkpoints=edited)
        assert edited.resumed_step == 1


# -- a worker ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("approximate", [(), (UNCONDITIONAL,)], ids=["exact", "approximate"])
def test_a_worker_says_in_the_trace_what_was_kept(approximate: tuple[str, ...], models: Any, tmp_path: Path) -> None:
    queue = StageQueue.connect("memory://", config={"retry_delay_s": 0.0})
    conns = {
        name: DiffusionConnector(name, "p2p", {"engine": "memory", "pool_bytes": 32 << 20})
        for name in ("encode", "denoise", "decode")
    }
    denoise = DenoiseProgram(stage(models, "wan2.1", "denoise"))
    programs: list[Any] = [
        EncodeProgram(stage(models, "wan2.1", "encode")),
        denoise,
        DecodeProgram(stage(models, "wan2.1", "decode"), output=tmp_path, file_format="npy"),
    ]
    assert [isinstance(one, CachesFeatures) for one in programs] == [False, True, False]
    cache = FeatureCache(conns["denoise"], 64 << 20, approximate=approximate)
    denoise.use_features(cache)
    found = SimpleNamespace(features=[], digests=[])
    workers = {one.stage: queue.register_worker(one.stage) for one in programs}
    for name in ("r1", "r2"):
        payload = {"request": models.request("wan2.1").to_payload()}
        queue.submit(StageTask(stage="encode", request_id=name, payload=payload))
        for program in programs:
            job = workers[program.stage].take(timeout_s=10)
            assert job is not None
            StageLoop(queue, conns[program.stage], program).do(job)
        result: Any = queue.result(name, timeout_s=10)
        found.digests.append(result["digest"])
        found.features += [entry["features"] for entry in result["trace"] if entry["stage"] == "denoise"]
    first, second = found.features
    assert found.digests == [models.digest("wan2.1")] * 2
    predictions = STEPS if approximate else 0
    assert first == {"kept": ONCE * (STEPS - 1), "computed": ONCE + predictions, "approximated": 0}
    kept = ONCE * STEPS // (2 if approximate else 1)
    assert second == {"kept": kept, "computed": 0, "approximated": predictions}
    for part in (*workers.values(), queue, cache, *conns.values()):
        part.close()
