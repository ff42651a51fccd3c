"""The feature cache in one process: its keys, its bound, who owns what, and that approximation is by name only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector, Event, FeatureCache
from moonrelay.cache.features import (
    APPROXIMATIONS,
    UNCONDITIONAL,
    FeatureCounters,
    FeatureKey,
    PredictionKey,
    check_approximations,
)
from moonrelay.cache.keys import IncompleteKey
from moonrelay.cli.features import feature_bytes, give_features
from moonrelay.errors import ConfigError
from moonrelay.events import EVENT_NAMES

FEATURE: dict[str, Any] = {
    "feature": "cross_attention",
    "conditioning": "ab" * 32,
    "model": "wan@1",
    "layer": "transformer.blocks.0.attn2.k",
    "dtype": torch.bfloat16,
    "device": "cpu",
    "lora": {"style@1": 0.5},
    "params": {"threads": 1, "torch": "2.9"},
}
PREDICTION: dict[str, Any] = {
    "conditioning": "ab" * 32,
    "step": 3,
    "schedule": "cd" * 32,
    "shape": (1, 16, 5, 4, 8),
    "guidance": {"guidance_scale": 5.0, "guidance_scale_2": None},
    "model": "wan@1",
    "layer": "transformer",
    "dtype": torch.bfloat16,
    "device": "cpu",
    "lora": None,
    "params": {"threads": 1, "torch": "2.9"},
}
OTHER: dict[str, list[Any]] = {
    "feature": ["self_attention"],
    "conditioning": ["ac" * 32],
    "model": ["wan@2", "wam@1"],
    "layer": ["transformer_2.blocks.0.attn2.k"],
    "dtype": [torch.float32, "torch.bfloat16"],
    "device": ["cuda:0"],
    "lora": [{}, {"style@1": 0.25}, {"style@2": 0.5}, {"style@1": 0.5, "more@1": 1.0}],
    "params": [{"threads": 2, "torch": "2.9"}, {"threads": 1}, {"threads": "1", "torch": "2.9"}],
    "step": [2],
    "schedule": ["ce" * 32],
    "shape": [(1, 16, 5, 8, 4)],
    "guidance": [{"guidance_scale": 4.0, "guidance_scale_2": None}, {"guidance_scale": 5.0, "guidance_scale_2": 1.0}],
}
WRONG: dict[str, list[Any]] = {
    "feature": ["", None],
    "conditioning": ["", "a red fox", None],
    "model": ["wan", "wan@", "@1", None],
    "layer": ["", 3],
    "dtype": [None, "", object()],
    "device": ["", None],
    "lora": [{"style": 0.5}, {"style@1": float("nan")}, ["style@1"]],
    "params": [None, {1: 2}, {"what": object()}],
    "step": [-1, 1.0, True],
    "schedule": ["", "karras"],
    "shape": [(), [1, 2], (1, 2.0)],
    "guidance": [None, {"guidance_scale": object()}],
}
KEYS: list[tuple[Any, dict[str, Any]]] = [(FeatureKey, FEATURE), (PredictionKey, PREDICTION)]


def cases(values: dict[str, list[Any]]) -> list[Any]:
    return [
        pytest.param(kind, {**fields, name: value}, name, id=f"{kind.__name__}-{name}-{number}")
        for kind, fields in KEYS
        for name in fields
        for number, value in enumerate(values[name])
    ]


def key(layer: str = "k", **changes: Any) -> FeatureKey:
    return FeatureKey(**{**FEATURE, "layer": layer, **changes})


class Bench:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.conn = DiffusionConnector("denoise", "p2p", {"engine": "memory"}, observers=[self.events.append])

    def __call__(self, capacity: int = 1 << 20, **settings: Any) -> FeatureCache:
        return FeatureCache(self.conn, capacity, **settings)

    def told(self, *names: str) -> list[Event]:
        return [one for one in self.events if one.name in names or not names]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.conn.close()


def made(value: float = 1.0, count: int = 64) -> Callable[[], torch.Tensor]:
    return lambda: torch.full((count,), value)


def refuse() -> torch.Tensor:
    raise AssertionError


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "fields", "name"), cases(OTHER))
def test_every_field_of_a_key_changed_is_a_miss(kind: Any, fields: dict[str, Any], name: str, bench: Bench) -> None:
    first = kind(**(FEATURE if kind is FeatureKey else PREDICTION))
    if first.digest == kind(**fields).digest:
        # Only no adapters at all and an empty mapping of them are the same.
        assert (name, first.lora, fields["lora"]) == ("lora", None, {})
        return
    cache = bench(approximate=APPROXIMATIONS)
    with cache.run() as run:
        run.get_or_compute(first, made(1.0))
        assert run.get_or_compute(kind(**fields), made(2.0))[0] == 2.0
        assert run.get_or_compute(first, refuse)[0] == 1.0
    assert (run.counters().misses, run.counters().hits + run.counters().reused) == (2, 1)


@pytest.mark.parametrize(("kind", "fields", "name"), cases(WRONG))
def test_what_does_not_say_everything_is_no_key(kind: Any, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(IncompleteKey) as caught:
        kind(**fields)
    assert caught.value.context["field"] == name


def test_labels_say_where_and_never_what() -> None:
    assert FeatureKey(**FEATURE).label == {
        "feature": "cross_attention",
        "model": "wan@1",
        "layer": "transformer.blocks.0.attn2.k",
    }
    assert PredictionKey(**PREDICTION).label["step"] == "3"


def test_without_a_key_nothing_is_kept(bench: Bench) -> None:
    cache = bench()
    with cache.run() as run:
        assert [run.get_or_compute(None, made(n))[0] for n in (1.0, 2.0)] == [1.0, 2.0]
    assert (cache.counters(), bench.told()) == (FeatureCounters(), [])


# -- what is kept, and whose it is -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_hit_is_the_same_bits_in_every_later_run(dtype: torch.dtype, bench: Bench) -> None:
    cache = bench()
    wanted = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted.view(-1)[:2] = torch.tensor([float("nan"), -0.0], dtype=dtype)
    with cache.run() as run:
        run.get_or_compute(key(), wanted.clone)
    for lend in (True, False):
        with cache.run() as run:
            found = run.get_or_compute(key(), refuse, lend=lend)
        assert (found.dtype, found.shape) == (dtype, wanted.shape)
        assert found.view(torch.uint8).equal(wanted.view(torch.uint8))


def test_an_edit_of_what_was_given_harms_nobody(bench: Bench) -> None:
    cache = bench()
    with cache.run() as run:
        run.get_or_compute(key(), made()).zero_()
        run.get_or_compute(key(), refuse).zero_()
        assert run.get_or_compute(key(), refuse)[0] == 1.0
    assert cache.counters().trouble == 0


def test_an_edit_of_what_was_lent_makes_it_void(bench: Bench) -> None:
    cache = bench()
    with cache.run("r1") as run:
        run.get_or_compute(key(), made())
        run.get_or_compute(key(), refuse, lend=True)[1:].zero_()
    with cache.run("r2") as run:
        assert run.get_or_compute(key(), made()).sum() == 64.0
        assert run.get_or_compute(key(), refuse, lend=True).sum() == 64.0
    assert cache.counters().trouble == 1
    (event,) = bench.told("cache_trouble")
    assert (event.request_id, event.kind, event.code) == ("r2", "feature", "integrity_error")


def test_what_inference_mode_made_is_only_copied(bench: Bench) -> None:
    cache = bench()
    with torch.inference_mode(), cache.run() as run:
        run.get_or_compute(key(), made())
        run.get_or_compute(key(), refuse, lend=True).zero_()
        assert run.get_or_compute(key(), refuse, lend=True)[0] == 1.0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
        torch.eye(3).to_sparse(),
        torch.ones(1 << 19),
    ],
    ids=["history", "parameter", "sparse", "larger than all"],
)
def test_what_cannot_be_kept_is_computed(tensor: torch.Tensor, bench: Bench) -> None:
    cache = bench()
    with cache.run() as run:
        for _ in range(2):
            assert run.get_or_compute(key(), lambda: tensor) is tensor
    assert (cache.counters().misses, cache.counters().not_kept, cache.counters().entries) == (2, 2, 0)


def test_what_compute_raises_passes_and_nothing_is_kept(bench: Bench) -> None:
    cache = bench()
    with cache.run() as run:
        with pytest.raises(ZeroDivisionError):
            run.get_or_compute(key(), lambda: torch.ones(1) * (1 // 0))
        assert run.get_or_compute(key(), made(3.0))[0] == 3.0


# -- the bound ---------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_gives_way(bench: Bench) -> None:
    cache = bench(3 * 256)
    for layer in ("a", "b", "c", "a", "d"):
        with cache.run() as run:
            run.get_or_compute(key(layer), made())
    with cache.run() as run:
        for layer in ("c", "a", "d"):
            run.get_or_compute(key(layer), refuse)
    counters = cache.counters()
    assert (counters.evicted, counters.entries, counters.bytes_held) == (1, 3, 3 * 256)
    assert [one.nbytes for one in bench.told("cache_evicted")] == [256]


def test_a_run_too_large_for_the_bound_keeps_a_part_rather_than_nothing(bench: Bench) -> None:
    cache = bench(4 * 256)
    for _ in range(3):
        with cache.run() as run:
            for _ in range(5):
                for layer in range(6):
                    run.get_or_compute(key(str(layer)), made())
    # Plain least-recently-used would never hit here.
    assert run.counters().hits == 4 * 5
    assert cache.counters().evicted == 0
    with cache.run() as run:  # another prompt: the earlier one's give way
        for layer in range(6):
            run.get_or_compute(key(str(layer), conditioning="ef" * 32), made())
    assert cache.counters().evicted == 4


def test_the_bound_holds_under_many_keys(bench: Bench) -> None:
    cache = bench(10 * 256)
    for number in range(5000):
        with cache.run() as run:
            run.get_or_compute(key(str(number)), made())
    assert (cache.counters().entries, cache.counters().bytes_held) == (10, 2560)
    cache.clear()
    assert (cache.counters().entries, cache.counters().bytes_held) == (0, 0)


def test_a_closed_cache_computes(bench: Bench) -> None:
    with bench() as cache, cache.run() as run:
        run.get_or_compute(key(), made())
        cache.close()
        assert run.get_or_compute(key(), made(2.0))[0] == 2.0
    assert cache.counters().bytes_held == 0


def test_many_threads(bench: Bench) -> None:
    cache = bench(8 * 256)
    wrong: list[object] = []

    def work(seed: int) -> None:
        for number in range(300):
            value = float((number * seed) % 12)
            with cache.run() as run:
                if run.get_or_compute(key(str(value)), made(value), lend=bool(seed % 2)).ne(value).any():
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    counters = cache.counters()
    assert not wrong
    assert counters.hits + counters.misses == 1800
    assert counters.bytes_held <= 8 * 256


@pytest.mark.parametrize("capacity", [-1, 1.5, True, "1"])
def test_a_bound_that_is_none(capacity: Any, bench: Bench) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        bench(capacity)


# -- approximation -----------------------------------------------------------------------------------------------------


def test_an_approximation_is_refused_unless_it_was_named(bench: Bench) -> None:
    cache = bench()
    with cache.run() as run, pytest.raises(ConfigError, match=UNCONDITIONAL):
        run.get_or_compute(PredictionKey(**PREDICTION), made())
    assert cache.counters().entries == 0


def test_every_reuse_of_an_approximation_is_told(bench: Bench) -> None:
    cache = bench(approximate=[UNCONDITIONAL])
    for name in ("r1", "r2"):
        with cache.run(name) as run:
            for step in range(3):
                run.get_or_compute(PredictionKey(**{**PREDICTION, "step": step}), made())
    told = bench.told("cache_approximated")
    assert [(one.request_id, one.extra["step"]) for one in told] == [("r2", "0"), ("r2", "1"), ("r2", "2")]
    assert all(one.reason is not None and UNCONDITIONAL in one.reason for one in told)
    assert (run.counters().reused, run.counters().hits) == (3, 0)
    assert not bench.told("cache_hit")


def test_exact_hits_are_told_once_with_their_number(bench: Bench) -> None:
    cache = bench()
    for name in ("r1", "r2"):
        with cache.run(name) as run:
            for layer in "abc":
                run.get_or_compute(key(layer), made())
    told = [(one.name, one.request_id, one.extra["entries"], one.nbytes) for one in bench.told()]
    assert told == [("cache_miss", "r1", 3, None), ("cache_hit", "r2", 3, 3 * 256)]


@pytest.mark.parametrize("names", ["tea_cache", ["unconditional"], [UNCONDITIONAL, "more"]])
def test_an_unknown_approximation_is_refused(names: Any, bench: Bench) -> None:
    with pytest.raises(ConfigError, match="unconditional_prediction"):
        bench(approximate=names)


def test_one_name_is_a_name() -> None:
    assert check_approximations(UNCONDITIONAL) == check_approximations([UNCONDITIONAL, UNCONDITIONAL])


def test_the_event_is_one_that_observers_know() -> None:
    assert "cache_approximated" in EVENT_NAMES


# -- the worker's options ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "names", "bound"),
    [(None, None, None), ("off", [], None), ("2MiB", None, 2 << 20), ("1GiB", [UNCONDITIONAL], 1 << 30)],
)
def test_options(asked: str | None, names: list[str] | None, bound: int | None) -> None:
    assert feature_bytes(asked, names) == bound


@pytest.mark.parametrize(
    ("asked", "names", "field"),
    [("much", None, "feature_cache"), (None, [UNCONDITIONAL], "approximate"), ("1GiB", ["tea"], "approximate")],
)
def test_wrong_options(asked: str | None, names: list[str] | None, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        feature_bytes(asked, names)
    assert caught.value.context["field"] == field


def test_a_program_that_keeps_none_refuses_the_option(bench: Bench) -> None:
    from contextlib import ExitStack

    class Program:
        stage = "encode"

        def process(self, work: Any) -> Any: ...

    class Keeping(Program):
        given: list[object] = []

        def use_features(self, cache: FeatureCache) -> None:
            self.given.append(cache)

    with ExitStack() as stack:
        assert give_features(Program(), bench.conn, None, None, stack) is None
        with pytest.raises(ConfigError, match="encode"):
            give_features(Program(), bench.conn, 1 << 20, None, stack)
        cache = give_features(Keeping(), bench.conn, 1 << 20, [UNCONDITIONAL], stack)
        assert Keeping.given == [cache]
        assert cache is not None
        assert cache.approximate == (UNCONDITIONAL,)
