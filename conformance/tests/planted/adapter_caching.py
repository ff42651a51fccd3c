"""Adapters whose host keeps embeddings and takes checkpoints, with one fault each: see `planted.adapter_base`."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any, ClassVar

from moonrelay.cache.checkpoint import Checkpointer, CheckpointSession, StepState
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.keys import EmbeddingKey
from moonrelay.errors import CheckpointMismatch
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import ConnectorSide
from moonrelay_conformance.suites.checkpoint_loop import BOTH, Loop, identity
from moonrelay_conformance.targets.adapter import Denoised, Encoded
from planted.adapter_base import Catch, Planted


class SoundSide(ConnectorSide):
    """A host that does both, with a small encoder and a small loop."""

    shared: ClassVar[bool] = True
    _cache: EmbeddingCache | None = None
    _computed = 0

    def encode(self, prompt: str, negative: str, *, cached: bool) -> Encoded:
        before = self._computed
        made = [self._text(text, role, cached) for text, role in ((prompt, "positive"), (negative, "negative"))]
        return Encoded(positive=made[0], negative=made[1], computed=self._computed - before)

    def _text(self, text: str, role: str, cached: bool) -> Any:
        if not cached:
            return self._forward(text, role)
        if self._cache is None:
            self._cache = EmbeddingCache(self.connector, 1 << 20, shared=self.shared)
        return self.hit(self._cache.get_or_encode(self.key(text, role), lambda: self._forward(text, role)))

    def _forward(self, text: str, role: str) -> Any:
        import torch

        self._computed += 1
        dice = torch.Generator().manual_seed(zlib.crc32(f"{role}:{text}".encode()))
        return torch.randn(1, 8, generator=dice)

    def key(self, text: str, role: str) -> EmbeddingKey:
        params = {"dtype": "float32", "max_length": 8, "lora": None}
        return EmbeddingKey(encoder="small@1", prompt=text, role=role, params=params)

    def hit(self, tree: Any) -> Any:
        return tree

    def denoise(self, request_id: str, *, seed: int, steps: int, stop_after: int | None) -> Denoised:
        with Checkpointer(self.connector, every=1) as checkpointer:
            session = checkpointer.session(identity(request_id, BOTH, num_steps=steps, seed=self.seed(seed)))
            loop, first = Loop(BOTH, seed=seed), 0
            try:
                state = session.resume()
            except CheckpointMismatch:
                state = None
            if state is not None:
                loop.restore(self.found(state))
                first = loop.step
            while loop.step < (stop_after or steps):
                loop.run(loop.step + 1, session=session)
                checkpointer.wait_idle(30.0)
            if stop_after is not None:
                return Denoised(result=None, first_step=first, computed=loop.computed)
            self.finish(session)
            checkpointer.wait_idle(30.0)
        return Denoised(result=loop.latents, first_step=first, computed=loop.computed)

    def seed(self, seed: int) -> int:
        return seed

    def found(self, state: StepState) -> StepState:
        return state

    def finish(self, session: CheckpointSession) -> None:
        session.finish()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        super().close()


class PlantedCaches(Planted):
    """Declares both."""

    over = ("store",)
    Side: ClassVar[type[ConnectorSide]] = SoundSide

    def capabilities(self) -> Mapping[Capability, Support]:
        there = dict.fromkeys((Capability.EMBEDDING_CACHE, Capability.CHECKPOINTS), Support.FULL)
        return {**super().capabilities(), **there}


class RoundsHits(PlantedCaches):
    """What comes from the cache has lost bits."""

    caught = Catch("test_cached_embeddings_are_those_without_a_cache", "is something else")

    class Side(SoundSide):
        def hit(self, tree: Any) -> Any:
            return tree.bfloat16().float()


class EncodesAllTheSame(PlantedCaches):
    """The encoder runs for what is kept, too."""

    caught = Catch("test_cached_embeddings_are_those_without_a_cache", "for what is kept")

    class Side(SoundSide):
        asked = 0

        def hit(self, tree: Any) -> Any:
            self.asked += 1
            if self.asked > 2:
                self._computed += 1
            return tree


class OneRoleForBoth(PlantedCaches):
    """A negative prompt is given what the prompt of the same words was."""

    caught = Catch("test_positive_and_negative_are_kept_apart", "other embeddings came")

    class Side(SoundSide):
        def key(self, text: str, role: str) -> EmbeddingKey:
            return super().key(text, "any")


class KeepsForItself(PlantedCaches):
    """Every process encodes for itself."""

    caught = Catch("test_another_process_of_the_host_hits", "another process computed")

    class Side(SoundSide):
        shared = False


class ForgetsItsNoise(PlantedCaches):
    """The generator is not restored."""

    caught = Catch("test_a_killed_loop_goes_on_with_the_same_bits", "other bits")

    class Side(SoundSide):
        def found(self, state: StepState) -> StepState:
            return dataclasses.replace(state, generators={})


class TakesAnySeed(PlantedCaches):
    """The seed is no part of what a run is."""

    caught = Catch("test_another_runs_checkpoint_is_not_used", "another seed's")

    class Side(SoundSide):
        def seed(self, seed: int) -> int:
            return 0


class LeavesItsCheckpoints(PlantedCaches):
    """Nobody says that the run has ended."""

    caught = Catch("test_a_loop_that_has_ended_leaves_no_checkpoint", "objects, e.g.")

    class Side(SoundSide):
        def finish(self, session: CheckpointSession) -> None:
            pass
