"""The shared cache tier under deaths, failures and stalls at any call: bounded always, never wrong, clear is clear.

An operation of one process may stop at any of its relay calls: for good (its process died, before the call, after it,
or in the middle of a removal), with an error, or for as long as another process does something.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonrelay.cache.shared import SharedStore
from moonrelay.clock import Deadline, ManualClock
from moonrelay.config import StoreConfig
from moonrelay.errors import TransferFailed
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay
from moonrelay.relay.memory import MemoryRelay

PREFIX = "ns/cache"
CAPACITY, GENERATIONS = 6400, 4
NODES, KEYS = 3, 12
#: Marks of generations and the root, of which there are few.
MARKS = 400
#: What the records about one entry take at most.
RECORDS = 400


class Died(BaseException):
    """The process that did this is no more."""


@dataclass(frozen=True)
class Plan:
    """What happens at the ``at``-th relay call of an operation."""

    at: int
    what: str
    then: Step | None = None


@dataclass(frozen=True)
class Step:
    """One operation of one node."""

    node: int
    what: str
    key: int
    plan: Plan


class Hooked(Relay):
    """A process's way to the relay, where its plan strikes."""

    scheme = "hooked"

    def __init__(self, inner: MemoryRelay, watch: Callable[[], None]) -> None:
        self.inner = inner
        self.watch = watch
        self.plan = Plan(0, "none")
        self.calls = 0
        self.dead = self.gone = False
        self.stall: Callable[[Step], None] = lambda _: None

    def begin(self, plan: Plan) -> None:
        self.plan, self.calls, self.gone = plan, 0, False

    def start(self) -> None:
        self.inner.start()

    @property
    def url(self) -> str:
        return self.inner.url

    def _do(self, call: Callable[[], object], half: Callable[[], object] | None = None) -> object:
        if self.dead:
            raise Died
        if self.gone:
            raise TransferFailed("injected: the store is gone")
        struck = self.calls == self.plan.at
        self.calls += 1
        what = self.plan.what if struck else "none"
        if what == "stall" and self.plan.then is not None:
            self.stall(self.plan.then)
        if what == "stall_and_die" and self.plan.then is not None:
            self.stall(self.plan.then)
            call()
        if what in ("die_after", "fail_after"):
            (half or call)()
        self.watch()
        if what in ("die_before", "die_after", "stall_and_die"):
            self.dead = True
            raise Died
        if what in ("fail_before", "fail_after", "gone"):
            self.gone = what == "gone"
            raise TransferFailed("injected: the call failed")
        answer = call()
        self.watch()
        return answer

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        try:
            self._do(lambda: self.inner.put(key, parts, deadline))
        finally:
            if on_quiet is not None:
                on_quiet()

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        try:
            return bool(self._do(lambda: self.inner.get(key, parts, deadline)))
        finally:
            if on_quiet is not None:
                on_quiet()

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        answer = self._do(lambda: self.inner.put_if_absent(key, value, deadline))
        assert isinstance(answer, bytes)
        return answer

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        answer = self._do(lambda: self.inner.get_bytes(key, deadline))
        assert answer is None or isinstance(answer, bytes)
        return answer

    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        names = list(keys)
        self._do(
            lambda: self.inner.remove(names, deadline), lambda: self.inner.remove(names[: len(names) // 2], deadline)
        )

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        return self.inner.keys(prefix, deadline)

    def close(self) -> None:
        self.inner.close()


def digest(key: int) -> str:
    return hashlib.sha256(b"%d" % key).hexdigest()


def data(key: int) -> bytes:
    return (b"%03d-" % key * 400)[: 100 + 97 * key]


calls = st.integers(0, 45)
operations = st.sampled_from(["put", "put", "put", "put", "get", "promote", "forget", "clear"])
nodes, keys = st.integers(0, NODES - 1), st.integers(0, KEYS - 1)
faults = st.sampled_from(["die_before", "die_after", "fail_before", "fail_after", "gone"])
simple = st.one_of(
    st.just(Plan(0, "none")),
    st.builds(Plan, calls, faults),
)
inner_steps = st.builds(Step, nodes, operations, keys, simple)
plans = st.one_of(
    st.just(Plan(0, "none")),
    st.builds(Plan, calls, faults),
    st.builds(Plan, calls, st.just("stall"), inner_steps),
    st.builds(Plan, calls, st.just("stall_and_die"), inner_steps),
)


class SharedCache(RuleBasedStateMachine):
    """What was put may be forgotten at any time, but what is found is right; a quiet put is found."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.deadline = Deadline(600.0, self.clock)
        self.relay = MemoryRelay(StoreConfig(url=None))
        self.relay.start()
        self.allowed = 0  # by writers that stalled inside a put, now or for good
        self.hooks: list[Hooked] = []
        self.stores: list[SharedStore] = []
        for node in range(NODES):
            self.hooks.append(Hooked(self.relay, self.bounded))
            self.stores.append(self.store(self.hooks[node]))

    def store(self, relay: Relay) -> SharedStore:
        return SharedStore(relay, PREFIX, CAPACITY, self.clock, generations=GENERATIONS, on_trouble=lambda _: None)

    def bounded(self) -> None:
        objects = self.relay._objects
        assert objects is not None
        assert objects.used <= CAPACITY + MARKS + self.allowed

    @rule(node=nodes, what=operations, key=keys, plan=plans, age=st.sampled_from([0.0, 5.0]))
    def step(self, node: int, what: str, key: int, plan: Plan, age: float) -> None:
        self.clock.advance(age)
        self.run(Step(node, what, key, plan))

    @rule(node=nodes, first=st.integers(0, KEYS - 1), count=st.integers(3, 12))
    def fill(self, node: int, first: int, count: int) -> None:
        for key in range(first, first + count):
            self.run(Step(node, "put", key % KEYS, Plan(0, "none")))

    def run(self, step: Step) -> None:
        hook, store, plan = self.hooks[step.node], self.stores[step.node], step.plan
        before = self.allowed

        def stall(inner: Step) -> None:
            self.allowed += len(data(step.key)) + RECORDS
            if inner.node == step.node:  # as another thread of that process would be, but on a relay of its own
                inner = Step((inner.node + 1) % NODES, inner.what, inner.key, inner.plan)
            self.run(inner)

        hook.begin(plan)
        hook.stall = stall
        leaks = False
        try:
            self.do(store, step)
        except TransferFailed:
            leaks = True
        except Died:
            leaks = True
            self.hooks[step.node] = Hooked(self.relay, self.bounded)
            self.stores[step.node] = self.store(self.hooks[step.node])
        if not leaks:
            self.allowed = before if plan.what != "stall" else self.allowed_by_others(step, before)
        hook.begin(Plan(0, "none"))

    def allowed_by_others(self, step: Step, before: int) -> int:
        inner = step.plan.then
        died = inner is not None and inner.plan.what != "none"
        return before + (len(data(step.key)) + RECORDS if died else 0)

    def do(self, store: SharedStore, step: Step) -> None:
        quiet = step.plan.what == "none"
        match step.what:
            case "put":
                raw = data(step.key)
                block = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
                told: list[int] = []
                try:
                    kept = store.put(
                        digest(step.key),
                        [Extent(ctypes.addressof(block), len(raw))],
                        len(raw),
                        {"key": str(step.key)},
                        self.deadline,
                        on_quiet=lambda: told.append(1),
                    )
                finally:
                    assert told == [1]
                if quiet:
                    assert kept
                    for other in self.stores:
                        self.right(other, step.key, must=True)
            case "get":
                self.right(store, step.key, must=False)
            case "promote":
                hit = store.get(digest(step.key), self.deadline)
                if hit is not None:
                    promoted = store.promote(digest(step.key), hit, {}, self.deadline)
                    if quiet:
                        assert promoted
                        self.right(store, step.key, must=True)
            case "forget":
                store.forget(digest(step.key), self.deadline)
                if quiet:
                    assert store.get(digest(step.key), self.deadline) is None
            case "clear":
                store.clear(self.deadline)
                if quiet:
                    assert self.relay.keys(PREFIX, self.deadline) == []
                    self.allowed = 0

    def right(self, store: SharedStore, key: int, *, must: bool) -> None:
        hit = store.get(digest(key), self.deadline)
        assert hit is not None or not must
        assert hit is None or bytes(hit.data) == data(key)

    @invariant()
    def the_bound_holds(self) -> None:
        self.bounded()

    def teardown(self) -> None:
        last = self.store(self.relay)
        self.do(last, Step(0, "put", 1, Plan(0, "none")))
        listed = {entry.digest: entry.nbytes for entry in last.entries(self.deadline)}
        assert listed[digest(1)] == len(data(1))
        for key in range(KEYS):
            self.right(last, key, must=digest(key) in listed)
        last.clear(self.deadline)
        assert self.relay.keys("", self.deadline) == []
        self.relay.close()


TestSharedCache = SharedCache.TestCase
TestSharedCache.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
