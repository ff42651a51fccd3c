"""The lease table against a naive model: never too many readers, fenced acks, memory freed once and not too early."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from moonrelay.errors import Aborted, LeaseExpired, LeaseLost, MoonrelayError
from moonrelay.handle import LeaseTerms
from moonrelay.lease import Available, Effects, LeaseStatus, LeaseTable, Reclaim

CLAIM_TTL_S = 5.0
TERMS = st.sampled_from(
    [
        LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=None),
        LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=20.0),
        LeaseTerms(policy="shared", readers=2, ttl_s=20.0),
        LeaseTerms(policy="shared", readers=3, ttl_s=None),
        LeaseTerms(policy="ttl", readers=0, ttl_s=12.0),
        LeaseTerms(policy="pinned", readers=0, ttl_s=None),
    ]
)
PAYLOADS = st.sampled_from(["p0", "p1", "p2"])
ENDED = {"released": LeaseLost, "consumed": LeaseLost, "expired": LeaseExpired, "aborted": Aborted}


@dataclass
class Model:
    """What a payload should be, told the long way."""

    terms: LeaseTerms
    chunks: int
    over_at: float | None
    readable: set[int] = field(default_factory=set)
    claims: dict[int, tuple[str, float]] = field(default_factory=dict)  # token -> reader, lapses at
    acked: list[int] = field(default_factory=list)
    holds: int = 0
    ended: str | None = None
    reclaimed: list[LeaseStatus] = field(default_factory=list)

    def alive(self, now: float) -> dict[int, str]:
        return {token: reader for token, (reader, until) in self.claims.items() if until > now}

    @property
    def spent(self) -> bool:
        return 0 < self.terms.readers <= len(self.acked)

    @property
    def final(self) -> str | None:
        return "consumed" if self.spent and self.ended != "aborted" else self.ended

    def refuses(self, now: float) -> type[MoonrelayError] | None:
        """Return what a new claim is told."""
        if self.ended is not None:
            return ENDED[self.ended]
        return LeaseExpired if self.over_at is not None and now >= self.over_at else None


class LeaseMachine(RuleBasedStateMachine):
    """Owners and readers in any order, late ones among them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.table = LeaseTable()
        self.models: dict[str, Model] = {}
        self.tokens: list[tuple[str, int]] = [("p0", 10**9)]  # never given; goes when one was
        self.last_token = 0

    # Few rules of many kinds: hypothesis leaves out half of the rules in each run.

    @rule(payload=PAYLOADS, how=st.sampled_from(["release", "abort"]))
    def end(self, payload: str, how: str) -> None:
        {"release": self.release, "abort": self.abort}[how](payload)

    @rule(payload=PAYLOADS, how=st.sampled_from(["hold", "unhold"]))
    def touch(self, payload: str, how: str) -> None:
        {"hold": self.hold, "unhold": self.unhold}[how](payload)

    @rule(pick=st.integers(0, 3), how=st.sampled_from(["renew", "ack", "nack"]))
    def use(self, pick: int, how: str) -> None:
        """Use one of the latest tokens (lapsed, fenced and acknowledged ones among them)."""
        payload, token = self.tokens[-1 - pick % len(self.tokens)]
        {"renew": self.renew, "ack": self.ack, "nack": self.nack}[how](payload, token)

    # The owner.

    @initialize(terms=st.tuples(TERMS, TERMS, TERMS), chunks=st.integers(1, 3))
    def add_some(self, terms: tuple[LeaseTerms, ...], chunks: int) -> None:
        for number, each in enumerate(terms):
            self.models[f"p{number}"] = Model(each, chunks, None if each.ttl_s is None else self.now + each.ttl_s)
            self.apply(self.table.add(f"p{number}", each, chunks, self.now))

    @rule(payload=PAYLOADS, chunk=st.integers(0, 2))
    def mark_readable(self, payload: str, chunk: int) -> None:
        model = self.models[payload]
        if chunk >= model.chunks or chunk in model.readable:
            return
        if model.reclaimed:
            self.raises(ENDED[model.final or ""], lambda: self.table.mark_readable(payload, chunk, self.now))
            return
        model.readable.add(chunk)
        self.apply(self.table.mark_readable(payload, chunk, self.now))

    def hold(self, payload: str) -> None:
        model = self.models[payload]
        if model.ended is not None:
            self.raises(ENDED[model.final if model.reclaimed else model.ended], lambda: self.table.hold(payload))
            return
        model.holds += 1
        self.apply(self.table.hold(payload))

    def unhold(self, payload: str) -> None:
        model = self.models[payload]
        if model.holds == 0:
            self.raises(MoonrelayError, lambda: self.table.unhold(payload))
            return
        model.holds -= 1
        self.apply(self.table.unhold(payload))

    def release(self, payload: str) -> None:
        model = self.models[payload]
        model.ended = model.ended or "released"
        self.apply(self.table.release(payload))

    def abort(self, payload: str) -> None:
        model = self.models[payload]
        if not model.reclaimed and model.ended in (None, "released", "expired"):
            model.ended = "aborted"
        self.apply(self.table.abort(payload, "because"))

    # Readers.

    @rule(payload=PAYLOADS, reader=st.sampled_from("abcd"))
    def claim(self, payload: str, reader: str) -> None:
        model = self.models[payload]
        alive = model.alive(self.now)
        why = ENDED[model.final or ""] if model.reclaimed else model.refuses(self.now)
        if why is not None:
            self.raises(why, lambda: self.table.claim(payload, reader, CLAIM_TTL_S, self.now))
            return
        claim, effects = self.table.claim(payload, reader, CLAIM_TTL_S, self.now)
        mine = [token for token, owner in alive.items() if owner == reader]
        full = 0 < model.terms.readers <= len(model.acked) + len(alive)
        if mine:
            assert claim is not None
            assert claim.token == mine[0]
        elif full:
            assert claim is None
            assert effects == ()
            return
        else:
            assert claim is not None
            assert claim.token > self.last_token, "a token was given twice, or out of order"
            self.last_token = claim.token
            model.claims = {token: model.claims[token] for token in alive}
        model.claims[claim.token] = (reader, self.now + CLAIM_TTL_S)
        self.tokens = [*self.tokens[1 if self.tokens[0][1] == 10**9 else 0 :], (payload, claim.token)]
        self.apply(effects)

    def renew(self, payload: str, token: int) -> None:
        model = self.models[payload]
        if token not in model.alive(self.now):
            why = ENDED[model.final or ""] if model.reclaimed else LeaseLost
            self.raises(why, lambda: self.table.renew(payload, token, CLAIM_TTL_S, self.now))
            return
        self.table.renew(payload, token, CLAIM_TTL_S, self.now)
        model.claims[token] = (model.claims[token][0], self.now + CLAIM_TTL_S)

    def ack(self, payload: str, token: int) -> None:
        model = self.models[payload]
        if token in model.acked:
            assert self.table.ack(payload, token, self.now) == ()
            return
        if token not in model.alive(self.now):
            why = ENDED[model.final or ""] if model.reclaimed else LeaseLost
            self.raises(why, lambda: self.table.ack(payload, token, self.now))
            return
        if model.ended == "aborted":
            self.raises(Aborted, lambda: self.table.ack(payload, token, self.now))
            return
        del model.claims[token]
        model.acked.append(token)
        if model.spent and model.ended is None:
            model.ended = "consumed"
        self.apply(self.table.ack(payload, token, self.now))

    def nack(self, payload: str, token: int) -> None:
        model = self.models[payload]
        if token not in model.alive(self.now):
            why = ENDED[model.final or ""] if model.reclaimed else LeaseLost
            self.raises(why, lambda: self.table.nack(payload, token, self.now))
            return
        del model.claims[token]
        effects = self.table.nack(payload, token, self.now)
        if model.refuses(self.now) is None and model.terms.readers > 0:
            assert Available(payload) in effects, "a waiting reader is not told"
        self.apply(effects)

    # Time.

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.9, 5.0, 9.0, None]))
    def wait(self, seconds: float | None) -> None:
        """Time passes, or comes to the next deadline, and nobody sweeps."""
        self.now = max(self.now, self.table.next_deadline() or 0.0) if seconds is None else self.now + seconds

    @rule()
    def sweep(self) -> None:
        told = set()
        for payload, model in self.models.items():
            if model.ended is None and model.over_at is not None and self.now >= model.over_at:
                model.ended = "expired"
                told.add(payload)
            elif model.ended is None and model.terms.readers > 0 and len(model.claims) > len(model.alive(self.now)):
                told.add(payload)
            model.claims = {token: model.claims[token] for token in model.alive(self.now)}
        effects = self.table.expire(self.now)
        assert {effect.id for effect in effects if isinstance(effect, Available)} >= told
        self.apply(effects)
        for payload, model in self.models.items():
            unused = not model.claims and model.holds == 0
            assert bool(model.reclaimed) == (model.ended is not None and unused), f"{payload} leaks, or went too early"
        assert self.table.expire(self.now) == ()
        deadline = self.table.next_deadline()
        assert deadline is None or deadline > self.now

    # What always holds.

    @invariant()
    def never_more_readers_than_allowed(self) -> None:
        for payload, model in self.models.items():
            alive = self.table.claims(payload, self.now)
            assert {claim.token for claim in alive} == set(model.alive(self.now))
            assert model.terms.readers == 0 or len(alive) + len(model.acked) <= model.terms.readers

    @invariant()
    def sound(self) -> None:
        self.table.check_invariants()

    @invariant()
    def snapshot_agrees(self) -> None:
        for payload, model in self.models.items():
            shot = self.table.snapshot(payload, self.now)
            assert (shot.acks, shot.chunks_ready) == (len(model.acked), len(model.readable))
            assert shot.state.ending == (model.ended is not None)
            assert shot.state.final == bool(model.reclaimed)

    @invariant()
    def deadline_is_never_late(self) -> None:
        times = [until for model in self.models.values() for _, until in model.claims.values()]
        times += [m.over_at for m in self.models.values() if m.over_at is not None and m.ended is None]
        deadline = self.table.next_deadline()
        if times:
            assert deadline is not None
            assert deadline <= min(times)

    def teardown(self) -> None:
        """Whatever happened: when all let go, every payload is freed, once."""
        for payload, model in self.models.items():
            self.release(payload)
            while model.holds:
                self.unhold(payload)
        self.now += 100.0
        self.sweep()
        assert all(len(model.reclaimed) == 1 for model in self.models.values())
        assert len(self.table) == 0
        assert self.table.next_deadline() is None

    # Inside.

    def apply(self, effects: Effects) -> None:
        for effect in effects:
            model = self.models[effect.id]
            if isinstance(effect, Reclaim):
                assert not model.alive(self.now), "memory freed under a reader"
                assert model.holds == 0, "memory freed under its owner"
                model.reclaimed.append(effect.final_state)
                assert len(model.reclaimed) == 1, "memory freed twice"
                assert effect.final_state.value == model.final

    def raises(self, kind: type[MoonrelayError], call) -> None:  # type: ignore[no-untyped-def]
        before = repr(self.table._entries)
        with pytest.raises(kind):
            call()
        assert repr(self.table._entries) == before, "a refused call changed something"


LeaseMachine.TestCase.settings = settings(max_examples=250, stateful_step_count=80, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
