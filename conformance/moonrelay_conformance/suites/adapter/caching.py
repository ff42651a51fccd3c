"""The host's own caches: what it encodes is kept for all its processes, and a denoising loop goes on elsewhere."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.stage import Actor, Cast, Stage, until
from moonrelay_conformance.suites.base import promise

#: A tiny model is made, loaded and run in a process of a busy machine, which imports its host for that.
MODEL_S = 180.0
_STEPS = 4
#: By when what a finished run removes must be gone.
GONE_S = 30.0


class EmbeddingCacheTests(AdapterSuite):
    """The host's encode stage with its cache, beside the same without it."""

    @pytest.mark.timeout(MODEL_S * 3)
    @promise(
        Level.L2,
        "With its cache of embeddings the host hands on bit for bit what it does without, and encodes a prompt once",
        requires=[Capability.EMBEDDING_CACHE],
    )
    def test_cached_embeddings_are_those_without_a_cache(self, stage: Stage) -> None:
        side = _sides(stage).producer
        fox, blurred, lake = (_prompt(word) for word in ("a fox", "blurred", "a lake"))
        plain = _encode(side, fox, blurred, cached=False)
        assert plain["computed"] > 0, "the host's encoder was not seen to compute; nothing could be counted"
        assert plain["positive"] != plain["negative"], "two prompts that differ gave the same"
        first = _encode(side, fox, blurred)
        assert _trees(first) == _trees(plain), "what was encoded for the cache is something else"
        assert first["computed"] == plain["computed"], f"with an empty cache it computed {first['computed']} times"
        again = _encode(side, fox, blurred)
        assert _trees(again) == _trees(plain), "a hit is something else than without a cache"
        assert again["computed"] == 0, f"the encoder computed {again['computed']} times for what is kept"
        half = _encode(side, lake, blurred)
        assert 0 < half["computed"] < plain["computed"] or plain["computed"] == 1, (
            f"one of two prompts is kept, and the encoder computed {half['computed']} times"
        )
        assert _trees(half) == _trees(_encode(side, lake, blurred, cached=False)), (
            "half from the cache is another whole"
        )

    @pytest.mark.timeout(MODEL_S * 3)
    @promise(
        Level.L2,
        "A prompt and a negative prompt of the same words are kept apart",
        requires=[Capability.EMBEDDING_CACHE],
    )
    def test_positive_and_negative_are_kept_apart(self, stage: Stage) -> None:
        side = _sides(stage).producer
        one, other = _prompt("one"), _prompt("other")
        _encode(side, one, other)
        turned = _encode(side, other, one)
        assert _trees(turned) == _trees(_encode(side, other, one, cached=False)), "turned round, other embeddings came"

    @pytest.mark.timeout(MODEL_S * 3)
    @promise(
        Level.L2,
        "What one process of the host encoded another one does not, also when the first is dead",
        requires=[Capability.EMBEDDING_CACHE],
    )
    def test_another_process_of_the_host_hits(self, stage: Stage) -> None:
        sides = _sides(stage)
        fox, blurred = _prompt("a fox"), _prompt("blurred")
        first = _encode(sides.producer, fox, blurred)
        assert first["computed"] > 0
        sides.producer.kill()
        found = _encode(sides.consumer, fox, blurred)
        assert found["computed"] == 0, f"another process computed {found['computed']} times for what is in the store"
        assert _trees(found) == _trees(first), "another process was given something else"


class CheckpointTests(AdapterSuite):
    """The host's denoising loop, left and taken up again."""

    @pytest.mark.timeout(MODEL_S * 4)
    @promise(
        Level.L3,
        "A denoise worker that is killed after any step: another process ends with the same bits, redoing nothing",
        requires=[Capability.CHECKPOINTS],
    )
    def test_a_killed_loop_goes_on_with_the_same_bits(self, stage: Stage) -> None:
        sides = _sides(stage)
        wanted = _denoise(sides.consumer, "unbroken")
        assert (wanted["first_step"], wanted["computed"]) == (0, _STEPS), f"an unbroken run: {wanted}"
        name = _prompt("killed")
        for step in (1, _STEPS - 1):
            left = _denoise(sides.producer, name, stop_after=step)
            assert left["computed"] > 0
            sides.producer.kill()
        end = _denoise(sides.consumer, name)
        assert end["first_step"] == _STEPS - 1, f"it went on from step {end['first_step']}, not {_STEPS - 1}"
        assert end["computed"] == 1, f"of {_STEPS} steps {end['computed']} were done again"
        assert end["result"] == wanted["result"], "resumed, the loop gives other bits"

    @pytest.mark.timeout(MODEL_S * 4)
    @promise(
        Level.L2,
        "A checkpoint of another run is not used: with another seed the loop starts afresh",
        requires=[Capability.CHECKPOINTS],
    )
    def test_another_runs_checkpoint_is_not_used(self, stage: Stage) -> None:
        side, name = _sides(stage).consumer, _prompt("edited")
        _denoise(side, name, stop_after=2)
        other = _denoise(side, name, seed=8)
        assert (other["first_step"], other["computed"]) == (0, _STEPS), f"it went on from another seed's: {other}"
        assert other["result"] == _denoise(side, "afresh", seed=8)["result"]

    @pytest.mark.timeout(MODEL_S * 4)
    @promise(Level.L2, "A loop that has ended leaves no checkpoint", requires=[Capability.CHECKPOINTS])
    def test_a_loop_that_has_ended_leaves_no_checkpoint(self, stage: Stage) -> None:
        side, name = _sides(stage).consumer, _prompt("ended")
        _denoise(side, "warm")  # whatever else a first run leaves
        before = set(stage.ground.store_keys())
        _denoise(side, name, stop_after=2)
        assert set(stage.ground.store_keys()) - before, "no checkpoint is in the store"
        _denoise(side, name)
        until(lambda: not set(stage.ground.store_keys()) - before, GONE_S)
        left = sorted(set(stage.ground.store_keys()) - before)
        assert not left, f"a loop that has ended left {len(left)} objects, e.g. {left[0]}"


def _sides(stage: Stage) -> Cast:
    routes = stage.target.routes()
    return stage.cast("store" if "store" in routes else routes[0])


def _prompt(words: str) -> str:
    return f"{words}, {uuid.uuid4().hex[:8]}"


def _encode(side: Actor, prompt: str, negative: str, *, cached: bool = True) -> dict[str, Any]:
    made: dict[str, Any] = side.do("encode", answer_s=MODEL_S, prompt=prompt, negative=negative, cached=cached)
    return made


def _trees(made: dict[str, Any]) -> tuple[str, str]:
    return made["positive"], made["negative"]


def _denoise(side: Actor, name: str, *, seed: int = 7, stop_after: int | None = None) -> dict[str, Any]:
    made: dict[str, Any] = side.do(
        "denoise", answer_s=MODEL_S, request_id=name, seed=seed, steps=_STEPS, stop_after=stop_after
    )
    return made
