"""Step checkpoints with one fault each, as targets, and which test of the suite must catch each.

Importable as ``planted.checkpoints:LosesHistory``, also in the processes that the suite starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from moonrelay.cache.checkpoint import Checkpointer, CheckpointIdentity, CheckpointSession, StepState, StoreConnector
from moonrelay.cache.checkpoint_store import Description, Saved, Shelf, Snapshot
from moonrelay.clock import Deadline
from moonrelay.layout import host_extent, tensor_from_buffer
from moonrelay.payload import unflatten
from moonrelay_conformance.targets.caches import CheckpointTarget


class _Session(CheckpointSession):
    """A session that changes what it found."""

    changed: ClassVar[Callable[[StepState], StepState]]

    def resume(self, override: Iterable[str] = (), **choice: Any) -> StepState | None:
        state = super().resume(override, **choice)
        return None if state is None else type(self).changed(state)


class _Checkpointer(Checkpointer):
    session_class: ClassVar[type[CheckpointSession]] = CheckpointSession
    shelf_class: ClassVar[type[Shelf]] = Shelf

    def session(
        self, identity: CheckpointIdentity, *, keep: int | None = None, retain: bool = False
    ) -> CheckpointSession:
        return self.session_class(self, identity, keep=self.keep if keep is None else max(1, keep), retain=retain)

    def shelf(self) -> Shelf:
        return self.shelf_class(self._conn.store(), self._conn.settings.store.namespace)


class PlantedCheckpoints(CheckpointTarget):
    """Faulty checkpoints over the relay of one process, as a target."""

    checkpointer: ClassVar[type[Checkpointer]] = _Checkpointer
    backend: ClassVar[str] = "memory"

    def __init__(self, relay: str = "") -> None:
        super().__init__(relay or self.backend)
        self.name = type(self).__name__

    def make(self, conn: StoreConnector, **settings: Any) -> Checkpointer:
        return self.checkpointer(conn, **settings)


def _changing(change: Callable[[StepState], StepState]) -> type[Checkpointer]:
    """Return a checkpointer whose states come back changed."""
    session = type("Session", (_Session,), {"changed": staticmethod(change)})
    return type("Changing", (_Checkpointer,), {"session_class": session})


class LosesHistory(PlantedCheckpoints):
    """The scheduler's history does not come back."""

    checkpointer = _changing(lambda state: dataclasses.replace(state, scheduler={}))


class LosesTheOrder(PlantedCheckpoints):
    """The outputs come back, and not how many of them count."""

    checkpointer = _changing(
        lambda state: dataclasses.replace(state, scheduler={"outputs": state.scheduler["outputs"], "lower_order": 0})
    )


class LosesRandomness(PlantedCheckpoints):
    """Generators are not restored."""

    checkpointer = _changing(lambda state: dataclasses.replace(state, generators={}))


class WrongStep(PlantedCheckpoints):
    """The run goes on one step too late."""

    checkpointer = _changing(lambda state: dataclasses.replace(state, step=state.step + 1))


class RoundsLatents(PlantedCheckpoints):
    """Latents come back in half precision."""

    checkpointer = _changing(
        lambda state: dataclasses.replace(state, latents=state.latents.bfloat16().to(state.latents.dtype))
    )


class LosesTheRest(PlantedCheckpoints):
    """What a host puts beside the state does not come back."""

    checkpointer = _changing(lambda state: dataclasses.replace(state, extra=None))


class _OldestFirst(Shelf):
    def found(self, request: str, deadline: Deadline) -> list[Saved]:
        return sorted(super().found(request, deadline), key=lambda saved: saved.number)


class TakesAnOlder(PlantedCheckpoints):
    """An older one is taken where there are several."""

    checkpointer = type("Older", (_Checkpointer,), {"shelf_class": _OldestFirst})


class _HalfIsWhole(Shelf):
    def found(self, request: str, deadline: Deadline) -> list[Saved]:
        return [dataclasses.replace(saved, whole=True) for saved in super().found(request, deadline)]

    def describe(self, saved: Saved, deadline: Deadline) -> tuple[Description, int]:
        try:
            return super().describe(saved, deadline)
        except Exception:
            older = [one for one in super().found(saved.request, deadline) if one.whole]
            if not older:
                raise
            description, nbytes = super().describe(older[0], deadline)
            self.pretended = saved.step
            return description, nbytes

    def read(self, saved: Saved, description: Description, device: str | None, deadline: Deadline) -> object:
        if not hasattr(self, "pretended"):
            return super().read(saved, description, device, deadline)
        older = [one for one in Shelf.found(self, saved.request, deadline) if one.number != saved.number]
        tree: Any = super().read(older[0], description, device, deadline)
        return {**tree, "step": saved.step}


class TakesTheHalfWritten(PlantedCheckpoints):
    """A newer one counts before it is whole, with the older one's tensors where it has none."""

    checkpointer = type("Half", (_Checkpointer,), {"shelf_class": _HalfIsWhole})


class _OnlyTheNewest(CheckpointSession):
    def _look(self, shelf: Shelf, deadline: Deadline) -> list[Saved]:
        return super()._look(shelf, deadline)[:1]


class LooksAtTheNewestOnly(PlantedCheckpoints):
    """Where the newest cannot be used the run starts afresh, though an older one is whole."""

    checkpointer = type("Newest", (_Checkpointer,), {"session_class": _OnlyTheNewest})


class _Undigested(Shelf):
    def read(self, saved: Saved, description: Description, device: str | None, deadline: Deadline) -> object:
        import torch

        buffers = [torch.empty(spec.nbytes, dtype=torch.uint8) for spec in description.specs]
        extents = [host_extent(buffer) for buffer in buffers if buffer.numel()]
        self._payload(saved).get_chunk(2, extents, deadline)
        leaves = [tensor_from_buffer(buffer, spec) for buffer, spec in zip(buffers, description.specs, strict=True)]
        return unflatten(description.tree, leaves)


class ServesDamage(PlantedCheckpoints):
    """The tensors' digest is not looked at."""

    checkpointer = type("Undigested", (_Checkpointer,), {"shelf_class": _Undigested})


class _Anybodys(CheckpointSession):
    def resume(self, override: Iterable[str] = (), **choice: Any) -> StepState | None:
        from moonrelay.cache.checkpoint_identity import OVERRIDABLE

        return super().resume({*override, *(OVERRIDABLE - {"request_id"})}, **choice)


class IgnoresMismatches(PlantedCheckpoints):
    """A checkpoint of another model, prompt or seed is taken."""

    checkpointer = type("Anybodys", (_Checkpointer,), {"session_class": _Anybodys})


class _NoScope(_Checkpointer):
    def __init__(self, conn: StoreConnector, **settings: Any) -> None:
        super().__init__(conn, **{**settings, "scope": ""})


class OneScopeForAll(PlantedCheckpoints):
    """Two deployments that name requests alike share them."""

    checkpointer = _NoScope


class _NeverEnding(CheckpointSession):
    def finish(self) -> None:
        pass


class LeavesFinishedOnes(PlantedCheckpoints):
    """What a run that has ended saved stays until its lease ends."""

    checkpointer = type("Leaving", (_Checkpointer,), {"session_class": _NeverEnding})


class _ForEver(Shelf):
    def write(self, saved: Saved, snapshot: Snapshot, identity: dict[str, object], ttl_s: float, *rest: Any) -> int:
        return super().write(saved, snapshot, identity, 1e9, *rest)


class NeverSwept(PlantedCheckpoints):
    """A checkpoint has no lease to speak of."""

    checkpointer = type("ForEver", (_Checkpointer,), {"shelf_class": _ForEver})


class _KeepsAll(_Checkpointer):
    def session(
        self, identity: CheckpointIdentity, *, keep: int | None = None, retain: bool = False
    ) -> CheckpointSession:
        return super().session(identity, keep=99, retain=retain)


class KeepsTheOlder(PlantedCheckpoints):
    """An older one stays when the newer is whole."""

    checkpointer = _KeepsAll


class _Waits(CheckpointSession):
    def after_step(self, step: int, capture: Callable[[], StepState]) -> bool:
        begun = super().after_step(step, capture)
        self._owner.wait_idle(10.0)
        return begun


class WaitsForTheStore(PlantedCheckpoints):
    """A step waits until its checkpoint is whole."""

    checkpointer = type("Waiting", (_Checkpointer,), {"session_class": _Waits})


class _Raises(_Checkpointer):
    def trouble(self, request_id: str | None, what: str, error: Exception, step: int | None = None) -> None:
        super().trouble(request_id, what, error, step)
        raise error


class FailsWithItsStore(PlantedCheckpoints):
    """A store that is gone fails the run."""

    checkpointer = _Raises


class DropsForOthers(PlantedCheckpoints):
    """Another process never finds anything."""

    backend = "local"

    class _Own(_Checkpointer):
        def shelf(self) -> Shelf:
            import os

            return Shelf(self._conn.store(), f"{self._conn.settings.store.namespace}-{os.getpid()}")

    checkpointer = _Own


#: The test that must catch each.
CAUGHT_BY: dict[str, str] = {
    "LosesHistory": "test_the_schedulers_history_comes_back",
    "LosesTheOrder": "test_the_schedulers_history_comes_back",
    "LosesRandomness": "test_random_generators_go_on_where_they_were",
    "WrongStep": "test_the_step_is_the_one_that_was_saved",
    "RoundsLatents": "test_resumed_at_any_step_it_is_the_unbroken_run",
    "LosesTheRest": "test_the_whole_state_comes_back",
    "TakesAnOlder": "test_the_newest_whole_one_is_taken",
    "TakesTheHalfWritten": "test_a_half_written_newer_one_hides_no_older_one",
    "LooksAtTheNewestOnly": "test_a_damaged_newer_one_hides_no_older_one",
    "ServesDamage": "test_damaged_tensors_are_a_fresh_start",
    "IgnoresMismatches": "test_every_field_of_the_identity_is_compared",
    "OneScopeForAll": "test_another_requests_is_not_found",
    "LeavesFinishedOnes": "test_a_finished_run_leaves_nothing",
    "NeverSwept": "test_an_abandoned_run_is_swept",
    "KeepsTheOlder": "test_every_kth_step_is_saved_and_the_older_one_goes",
    "WaitsForTheStore": "test_a_slow_store_keeps_no_step_waiting",
    "FailsWithItsStore": "test_a_store_that_is_gone_fails_no_run",
    "DropsForOthers": "test_a_killed_worker_is_replaced_by_the_same_bits",
}
