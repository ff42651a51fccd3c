"""A producer and a consumer in any order of calls, against a naive model: no two winners, no wrong bytes, no rest.

Time is the test's: nothing lapses or expires but by `Machine.lapse` and `Machine.expire`.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from moonrelay import (
    Aborted,
    DeleteOnConsume,
    DiffusionConnector,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
    Pinned,
    Publication,
    Shared,
    StagePayload,
)
from moonrelay.clock import Deadline, ManualClock, SystemClock
from moonrelay.connector import PayloadClaim

TTL_S = 1000.0
CLAIM_TTL_S = 100.0
CONTROL = {"claim_ttl_s": CLAIM_TTL_S, "renew_s": 30.0, "peer_timeout_s": 1e6, "retry_s": 0.2}
LEASES = [(DeleteOnConsume(TTL_S), 1), (DeleteOnConsume(TTL_S), 1), (Shared(2, TTL_S), 2), (Pinned(), 0)]
ENDED = {"aborted": Aborted, "released": LeaseLost, "consumed": LeaseLost, "expired": LeaseExpired}
_names = itertools.count()


@dataclass(eq=False)
class Model:
    """One payload, told the long way."""

    publication: Publication
    sent: torch.Tensor
    limit: int
    mortal: bool
    chunks: int
    ready: set[int] = field(default_factory=set)
    live: list[PayloadClaim] = field(default_factory=list)
    stale: list[PayloadClaim] = field(default_factory=list)
    wins: int = 0
    ended: str | None = None

    @property
    def whole(self) -> bool:
        return len(self.ready) == self.chunks

    @property
    def spent(self) -> bool:
        return 0 < self.limit <= self.wins

    @property
    def full(self) -> bool:
        return 0 < self.limit <= self.wins + len(self.live)


def until(predicate: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not predicate():
        assert time.monotonic() < limit, "it did not become true"
        threading.Event().wait(0.002)


class Machine(RuleBasedStateMachine):
    """One pair of connectors with memory engine and memory relay."""

    mode: ClassVar[str]
    payloads = Bundle("payloads")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        self.threads = threading.active_count()
        self.clock = ManualClock()
        self.models: list[Model] = []
        self.seeds = itertools.count()
        # Sweepers take an unfinished payload after ten minutes, which are soon over here.
        store = {"url": f"memory://machine-{next(_names)}", "sweep_interval_s": 1e9} if self.mode != "p2p" else None
        self.producer, self.consumer = (
            DiffusionConnector(
                role,
                self.mode,
                {"engine": "memory", "pool_bytes": 1 << 20},
                store,
                control_config=CONTROL,
                lease_ttl_s=TTL_S,
                spill_after_s=1e9,
                clock=self.clock,
            )
            for role in ("denoise", "decode")
        )
        if store is not None:
            self.producer._runtime.relay()
            self.consumer._runtime.relay()

    # The producer.

    @rule(
        target=payloads,
        rows=st.sampled_from([3, 4, 5]),
        width=st.sampled_from([0, 1, 333, 4096]),
        chunks=st.sampled_from([1, 2, 3]),
        lease=st.sampled_from(LEASES),
        registered=st.booleans(),
        now=st.booleans(),
    )
    def publish(
        self, rows: int, width: int, chunks: int, lease: tuple[object, int], registered: bool, now: bool
    ) -> Model:
        seed = next(self.seeds)
        made = torch.randint(0, 255, (rows, width), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        tensor = made.clone()
        if registered and self.mode != "store":
            tensor = self.producer.empty((rows, width), dtype=torch.uint8).copy_(made)
        policy, limit = lease
        payload = StagePayload(
            request_id=f"r{seed}",
            kind="latent",
            tensor=tensor,
            chunk_dim=0 if chunks > 1 else None,
            num_chunks=chunks,
            lease=policy,
        )
        model = Model(self.producer.open(payload), made, limit, not isinstance(policy, Pinned), chunks)
        self.models.append(model)
        if now:
            for chunk in range(chunks):
                self.ready(model, chunk)
        return model

    @rule(model=payloads, chunk=st.integers(0, 2))
    def ready(self, model: Model, chunk: int) -> None:
        if chunk >= model.chunks or chunk in model.ready:
            return
        try:
            model.publication.ready(chunk)
        except (Aborted, LeaseLost, LeaseExpired):
            assert model.ended is not None or model.spent
        else:
            assert model.ended is None
            model.ready.add(chunk)
            if self.mode == "store":
                state = self.producer.status
                handle = model.publication.handle
                until(lambda: state(handle).chunks_ready >= len(model.ready))

    @rule(model=payloads)
    def abort(self, model: Model) -> None:
        model.publication.abort("enough")
        if model.ended is None or (model.live and model.ended in ("released", "expired")):
            model.ended = model.ended if model.spent else "aborted"

    @rule(model=payloads)
    def release(self, model: Model) -> None:
        self.consumer.release(model.publication.handle)
        if not model.spent:
            model.ended = model.ended or "released"

    @rule()
    def spill(self) -> None:
        """Bring what is whole and not being read to the relay."""
        if self.mode != "auto":
            return
        ledger = self.producer._outbox.ledger
        ledger.make_room()
        for model in self.models:
            if model.whole and model.ended is None and not model.spent and not model.live:
                entry = ledger._entries[model.publication.handle.id]
                until(lambda entry=entry: entry.in_relay)  # type: ignore[misc]

    # The consumer.

    @rule(target=claims, model=payloads)
    def claim(self, model: Model) -> object:
        handle = model.publication.handle
        if model.ended is None and not model.spent and model.full:
            return multiple()  # see `crowd`
        # A reader whose claim lapsed and who lives keeps its record in the relay until it hears of that.
        for stale in model.stale:
            stale.nack()
        model.stale.clear()
        try:
            claim = self.consumer.claim(handle, timeout_s=20)
        except (Aborted, LeaseLost, LeaseExpired) as exc:
            self._is_right(model, exc)
            return multiple()
        assert model.ended is None
        assert not model.full, "more readers than the lease allows"
        model.live.append(claim)
        return (model, claim)

    @staticmethod
    def _is_right(model: Model, error: MoonrelayError) -> None:
        assert model.ended is not None or model.spent, f"refused by {error!r}"
        # What was acknowledged by all its readers counts as consumed, whatever was said of it meanwhile.
        assert type(error) is ENDED["consumed" if model.spent else model.ended or "consumed"]

    @rule(model=payloads)
    def crowd(self, model: Model) -> None:
        """Claim what others hold: told so at the deadline."""
        if not model.full or model.spent or model.ended is not None:
            return
        outcome: list[object] = []

        def ask() -> None:
            try:
                outcome.append(self.consumer.claim(model.publication.handle, timeout_s=1.0))
            except MoonrelayError as exc:
                outcome.append(exc)

        thread = threading.Thread(target=ask, name="test-crowd", daemon=True)
        thread.start()
        entry = self.producer._outbox.ledger._entries[model.publication.handle.id]
        until(lambda: bool(entry.waiters) or bool(outcome))
        self.clock.advance(0.75)
        thread.join(20)
        assert isinstance(outcome[0], LeaseHeld), outcome

    @rule(held=claims, piecemeal=st.booleans())
    def read(self, held: tuple[Model, PayloadClaim], piecemeal: bool) -> None:
        model, claim = held
        if not model.whole and model.ended != "aborted":
            return  # it would wait
        try:
            got = torch.cat([chunk.clone() for chunk in claim.chunks()]) if piecemeal else claim.read()
        except MoonrelayError:
            assert claim not in model.live or model.ended == "aborted"
        else:
            assert isinstance(got, torch.Tensor)
            assert torch.equal(got, model.sent)

    @rule(held=consumes(claims))
    def ack(self, held: tuple[Model, PayloadClaim]) -> None:
        model, claim = held
        try:
            claim.ack()
        except MoonrelayError:
            assert claim not in model.live or model.ended == "aborted"
            claim.nack()
        else:
            # In the relay the record counts, also of a reader whose claim lapsed at the producer.
            assert claim in model.live or claim.path == "store"
            assert model.ended != "aborted"
            model.wins += 1
            assert model.limit == 0 or model.wins <= model.limit, "two winners"
        self._forget(model, claim)

    @rule(held=consumes(claims))
    def nack(self, held: tuple[Model, PayloadClaim]) -> None:
        model, claim = held
        claim.nack()
        self._forget(model, claim)

    @staticmethod
    def _forget(model: Model, claim: PayloadClaim) -> None:
        model.live = [other for other in model.live if other is not claim]
        model.stale = [other for other in model.stale if other is not claim]

    # Time.

    @rule()
    def lapse(self) -> None:
        """Stop for so long that no claim was renewed."""
        self._pass(CLAIM_TTL_S + 1)
        for model in self.models:
            model.stale += model.live
            model.live = []

    def _pass(self, seconds: float) -> None:
        """Let time pass, and the producer take note of it."""
        ledger = self.producer._outbox.ledger
        self.clock.advance(seconds)

        def noted() -> bool:
            with ledger.changed:
                due = ledger._table.next_deadline()
                return due is None or due > self.clock.monotonic()

        until(noted)

    @rule()
    def expire(self) -> None:
        self.lapse()
        self._pass(TTL_S)
        for model in self.models:
            if model.mortal and not model.spent:
                model.ended = model.ended or "expired"

    # Always.

    @invariant()
    def the_table_is_sound(self) -> None:
        ledger = self.producer._outbox.ledger
        with ledger.changed:
            ledger._table.check_invariants()

    def teardown(self) -> None:
        for model in self.models:
            for claim in (*model.live, *model.stale):
                claim.nack()
            model.live, model.stale = [], []
            self.consumer.release(model.publication.handle)
        ledger = self.producer._outbox.ledger
        self.clock.advance(CLAIM_TTL_S + 1)
        until(lambda: not ledger._entries)
        assert not self.consumer._claims
        self.models.clear()
        gc.collect()
        for connector in (self.producer, self.consumer):
            if self.mode != "store":
                arena = connector._runtime.data().arena
                until(lambda arena=arena: (arena.live_slots, arena.used_bytes) == (0, 0))  # type: ignore[misc]
        if self.mode != "p2p":
            relay, deadline = self.consumer._runtime.relay(), Deadline(60, SystemClock())
            until(lambda: not relay.keys("moonrelay/", deadline))
        self.consumer.close()
        self.producer.close()
        until(lambda: threading.active_count() <= self.threads)


@pytest.mark.parametrize("mode", ["p2p", "auto", "store"])
def test_a_pair_of_connectors_in_any_order(mode: str) -> None:
    machine = type(f"Machine_{mode}", (Machine,), {"mode": mode})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
