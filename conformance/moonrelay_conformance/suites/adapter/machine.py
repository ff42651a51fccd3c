"""Random histories of a few payloads with one producer and two consumers, each observation held against the model.

Owns the choice of steps. A history that fails is printed; histories are the same in each run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.adapter.base import AdapterSuite
from moonrelay_conformance.suites.adapter.lease_model import UNLIMITED, LeaseModel
from moonrelay_conformance.suites.adapter.stage import Actor, Cast, Sent, Stage, bytes_of, outcome, until
from moonrelay_conformance.suites.base import promise

if TYPE_CHECKING:
    from collections.abc import Iterable

EXAMPLES: Final = 14
STEPS: Final = 18
#: No claim lapses while the machine is busy: readers live, and the model knows no time.
PATIENT: Final = {"claim_ttl_s": 30.0, "peer_timeout_s": 10.0}
#: Deadline of a claim that nobody gives way to; each costs this long.
HELD_S: Final = 0.4
#: How many such claims one history may make.
MOST_HELD: Final = 1
#: What was said to one side is seen by another within this long.
SEEN_S: Final = 8.0
#: Payloads of one history; few, so that their readers meet.
MOST_PAYLOADS: Final = 2
#: What happens, by weight.
WEIGHED: Final = (*("claim",) * 4, *("read",) * 2, *("ack",) * 2, "nack", "publish", "abort", "release", "status")
READERS: Final = ("consumer", "consumer2")
_INDEX = st.integers(0, 11)


@dataclass(eq=False)
class Played:
    """A payload of a history, and its model."""

    sent: Sent
    model: LeaseModel


@dataclass(eq=False)
class Held:
    """A live claim."""

    name: str
    of: Played
    reader: Actor


class LeaseMachine(RuleBasedStateMachine):
    """One history.

    Args:
        sides: Its sides, which other histories used before and will use after it.
        leases: The leases that the target has, with how many acknowledgements consume a payload.
    """

    def __init__(self, sides: Cast, leases: Iterable[tuple[str, int]]) -> None:
        super().__init__()
        self._sides = sides
        self._stage = sides.stage
        self._leases = tuple(leases)
        self._payloads: list[Played] = []
        self._claims: list[Held] = []
        self._held = 0
        self._sound = True

    def _payload(self, index: int) -> Played:
        return self._payloads[index % len(self._payloads)]

    def _claim_of(self, index: int) -> Held:
        return self._claims[index % len(self._claims)]

    @staticmethod
    def _check(observed: str, allowed: frozenset[str], did: str) -> None:
        told = "; ".join(sorted(allowed))
        assert observed in allowed, f"{did} was answered with {observed}; the model allows {told}"

    @initialize(lease=_INDEX)
    def begin(self, lease: int) -> None:
        """Begin with a payload."""
        self._publish(lease)

    @rule(what=st.sampled_from(WEIGHED), payload=_INDEX, claim=_INDEX, reader=st.sampled_from(READERS))
    def step(self, what: str, payload: int, claim: int, reader: str) -> None:
        """Take one step: with a claim where there is one, with a payload else."""
        self._sound = False
        if what in ("read", "ack", "nack") and not self._claims:
            what = "claim"
        if what == "publish" and len(self._payloads) >= MOST_PAYLOADS:
            what = "claim"
        match what:
            case "publish":
                self._publish(payload)
            case "claim":
                self._claim_it(payload, reader)
            case "read":
                self._read(claim)
            case "ack":
                self._ack(claim)
            case "nack":
                self._nack(claim)
            case "abort" if self._stage.supports(Capability.ABORT):
                self._abort(payload)
            case "release":
                self._release(payload)
            case "status" if self._stage.supports(Capability.STATUS):
                self._status(payload)
        self._sound = True

    def _publish(self, lease: int) -> None:
        """Publish a payload."""
        word, limit = self._leases[lease % len(self._leases)]
        readers = {"readers": limit} if word == "shared" else {}
        seed = len(self._payloads)
        sent = self._sides.producer.publish(bytes_of(512 + 8 * seed, seed), lease=word, **readers)
        self._payloads.append(Played(sent, LeaseModel(limit)))

    def _claim_it(self, payload: int, reader: str) -> None:
        """Claim a payload; where others hold it, wait for a moment in vain."""
        one, actor = self._payload(payload), self._sides(reader)
        allowed = one.model.may_claim()
        crowded = allowed == {"refused:lease_held"}
        if crowded:
            if self._held >= MOST_HELD:
                return
            self._held += 1
        names: list[str] = []
        observed = outcome(lambda: names.append(actor.claim(one.sent, timeout_s=HELD_S if crowded else 20.0)))
        self._check("granted" if observed == "ok" else observed, allowed, "a claim")
        if names:
            one.model.claimed(names[0])
            self._claims.append(Held(names[0], one, actor))

    def _read(self, claim: int) -> None:
        """Read what is claimed."""
        held = self._claim_of(claim)
        got: list[str] = []
        observed = outcome(lambda: got.append(held.reader.read(held.name)))
        assert got in ([], [held.of.sent.digest]), "a reader was given bytes that are not the payload's"
        self._check("delivered" if observed == "ok" else observed, held.of.model.may_read(), "a read")

    def _ack(self, claim: int) -> None:
        """Acknowledge."""
        held = self._claim_of(claim)
        observed = outcome(lambda: held.reader.ack(held.name))
        self._check("done" if observed == "ok" else observed, held.of.model.may_ack(), "an ack")
        if observed == "ok":
            held.of.model.acked(held.name)
        else:
            outcome(lambda: held.reader.nack(held.name))
            held.of.model.left(held.name)
        self._forget(held)

    def _nack(self, claim: int) -> None:
        """Give a claim back."""
        held = self._claim_of(claim)
        observed = outcome(lambda: held.reader.nack(held.name))
        self._check(observed, frozenset({"ok"}), "a nack")
        held.of.model.left(held.name)
        self._forget(held)

    def _abort(self, payload: int) -> None:
        """Give a payload up."""
        one = self._payload(payload)
        self._check(outcome(lambda: self._sides.producer.abort(one.sent)), frozenset({"ok"}), "an abort")
        one.model.abort()

    def _release(self, payload: int) -> None:
        """Drop a payload."""
        one = self._payload(payload)
        self._check(outcome(lambda: self._sides.consumer.release(one.sent)), frozenset({"ok"}), "a release")
        one.model.release()

    def _status(self, payload: int) -> None:
        """Ask how a payload stands."""
        one, seen = self._payload(payload), ""

        def told() -> bool:
            nonlocal seen
            words: list[str] = []
            observed = outcome(lambda: words.append(self._sides.consumer.status(one.sent)))
            seen = f"state:{words[0]}" if words else observed
            return seen in one.model.states()

        until(told, SEEN_S)
        self._check(seen, one.model.states(), "a question for the state")

    def _forget(self, held: Held) -> None:
        held.reader.drop(held.name)
        self._claims = [other for other in self._claims if other is not held]

    def teardown(self) -> None:
        """Give everything back, and see that it is."""
        for held in list(self._claims):
            outcome(lambda held=held: held.reader.nack(held.name))  # type: ignore[misc]
            outcome(lambda held=held: held.reader.drop(held.name))  # type: ignore[misc]
        for one in self._payloads:
            if self._stage.supports(Capability.RELEASE):
                outcome(lambda one=one: self._sides.consumer.release(one.sent))  # type: ignore[misc]
            elif self._stage.supports(Capability.ABORT):
                outcome(lambda one=one: self._sides.producer.abort(one.sent))  # type: ignore[misc]
        if self._sound:  # else it is known what is wrong
            left = self._stage.settle(self._sides.producer, self._sides.consumer, self._sides("consumer2"))
            assert not left, f"after a history in which everything was given back, {left}"


class ModelTests(AdapterSuite):
    """The lease behaves as its model in random histories."""

    @promise(
        Level.L2,
        "In random histories every answer about a lease is one that the model allows",
        requires=[Capability.CLAIM, Capability.RELEASE],
    )
    def test_leases_behave_as_their_model(self, stage: Stage, route: str) -> None:
        sides = stage.cast(route, PATIENT)
        leases = [("delete_on_consume", 1)]
        if stage.supports(Capability.SHARED_READERS):
            leases.append(("shared", 2))
        if stage.supports(Capability.PINNED):
            leases.append(("pinned", UNLIMITED))

        class Machine(LeaseMachine):
            def __init__(self) -> None:
                super().__init__(sides, leases)

        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                derandomize=True,
                database=None,
                # Shrinking would start anew what takes seconds each time; a history is short, and the same in each run.
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )
