"""Claims on a relayed payload, in whatever order: no two readers consume one slot, a fenced one never wins."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonrelay.clock import Deadline, ManualClock
from moonrelay.config import StoreConfig
from moonrelay.errors import LeaseLost
from moonrelay.relay.memory import MemoryRelay
from moonrelay.relay.records import ClaimToken, Held, RelayedPayload

SLOTS = 2
readers = st.sampled_from(["a", "b", "c", "d"])


class Claims(RuleBasedStateMachine):
    """Each reader remembers its token and what it saw held, however stale; the model knows each slot's true holder."""

    def __init__(self) -> None:
        super().__init__()
        self.deadline = Deadline(60.0, ManualClock())
        self.relay = MemoryRelay(StoreConfig(url=None))
        self.relay.start()
        self.tokens: dict[str, ClaimToken] = {}
        self.seen: dict[str, list[Held]] = {}
        self.holder: dict[int, ClaimToken | None] = dict.fromkeys(range(SLOTS))
        self.consumed: dict[int, ClaimToken] = {}
        self.buried = False

    def payload(self) -> RelayedPayload:
        return RelayedPayload(self.relay, "ns/p", "p", slots=SLOTS)

    @rule(reader=readers)
    def claim(self, reader: str) -> None:
        try:
            answer = self.payload().claim(reader, reader.encode(), self.deadline)
        except LeaseLost:
            assert self.buried or len(self.consumed) == SLOTS
            return
        assert not self.buried
        if isinstance(answer, ClaimToken):
            holder = self.holder[answer.slot]
            assert answer.slot not in self.consumed
            assert holder is None or holder == answer, "a held slot was given to another reader"
            self.holder[answer.slot] = answer
            self.tokens[reader] = answer
        else:
            held = {one.slot: one.reader_id for one in answer}
            assert held == {slot: token.reader_id for slot, token in self.holder.items() if token is not None}
            assert reader not in held.values()
            self.seen[reader] = answer

    @rule(reader=readers, pick=st.integers(0, SLOTS - 1))
    def take_over(self, reader: str, pick: int) -> None:
        for held in self.seen.get(reader, [])[pick : pick + 1]:
            try:
                token = self.payload().take_over(held, reader, b"", self.deadline)
            except LeaseLost:
                assert self.buried
                return
            current = self.holder[held.slot]
            if token is not None and token != current:
                assert current is not None
                assert current.epoch == held.epoch
                self.holder[held.slot] = self.tokens[reader] = token

    @rule(reader=readers)
    def ack(self, reader: str) -> None:
        token = self.tokens.get(reader)
        if token is None:
            return
        standing = self.holder[token.slot] == token and not self.buried
        try:
            last = self.payload().ack(token, self.deadline)
        except LeaseLost:
            assert not standing
            return
        assert standing or self.consumed.get(token.slot) == token, "a fenced reader's ack was accepted"
        self.holder[token.slot] = None
        self.consumed[token.slot] = token
        assert last == (len(self.consumed) == SLOTS)
        if last:
            self.payload().tombstone("consumed", self.deadline)
            self.payload().remove_all(1, self.deadline)
            self.buried = True

    @rule(reader=readers)
    def nack(self, reader: str) -> None:
        token = self.tokens.get(reader)
        if token is not None and self.payload().nack(token, self.deadline) and self.holder[token.slot] == token:
            self.holder[token.slot] = None

    @invariant()
    def only_the_holder_is_told_that_it_holds(self) -> None:
        for token in self.tokens.values():
            mine = self.payload().is_mine(token, self.deadline)
            assert mine == (not self.buried and self.holder[token.slot] == token)

    @invariant()
    def a_grave_holds_nothing_but_its_stone(self) -> None:
        if self.buried:
            assert self.relay.keys("", self.deadline) == ["ns/p/tomb"]

    def teardown(self) -> None:
        self.relay.close()


TestClaims = Claims.TestCase
TestClaims.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
