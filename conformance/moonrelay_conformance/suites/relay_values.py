"""Small values: the first one stands, whoever races for it; and the whole relay against a dictionary."""

from __future__ import annotations

import threading
import uuid

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from moonrelay.errors import IntegrityError, MoonrelayError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.part_process import pattern
from moonrelay_conformance.suites.part_shared import in_threads
from moonrelay_conformance.suites.relay_bench import RelayBench, RelaySuite, soon

_THREADS = 4
_KEYS = 25


class RelayValues(RelaySuite):
    """Put if absent."""

    @promise(Level.L1, "The first small value stands, and everybody is told which that is")
    def test_the_first_small_value_stands(self, bench: RelayBench) -> None:
        key = bench.key("value")
        assert bench.relay.put_if_absent(key, b"one", soon()) == b"one"
        for other in (b"two", b"longer than one", b"1", b"one"):
            assert bench.relay.put_if_absent(key, other, soon()) == b"one", "the first value does not stand"
            assert bench.relay.get_bytes(key, soon()) == b"one", "a later value took the first one's place"
        bench.relay.remove([key], soon())
        assert bench.relay.get_bytes(key, soon()) is None, "a removed value is still there"
        assert bench.relay.put_if_absent(key, b"three", soon()) == b"three"

    @promise(Level.L1, "Small values of one byte to 4 KiB come back, every byte of them")
    def test_small_values_come_back(self, bench: RelayBench) -> None:
        for nbytes in (1, 2, 255, 4095, 4096):
            key, value = bench.key(f"value/{nbytes}"), pattern(nbytes, nbytes)
            assert bench.relay.put_if_absent(key, value, soon()) == value
            assert bench.relay.get_bytes(key, soon()) == value
        zeros = bench.key("zeros")
        bench.relay.put_if_absent(zeros, bytes(100), soon())
        assert bench.relay.get_bytes(zeros, soon()) == bytes(100)

    @promise(Level.L1, "Of threads that race for a small value, exactly one wins, and all agree")
    def test_threads_racing_for_a_value_have_one_winner(self, bench: RelayBench) -> None:
        together = threading.Barrier(_THREADS)
        answers: list[list[bytes]] = [[] for _ in range(_THREADS)]
        failures: list[str] = []
        keys = [bench.key(f"race/{n}") for n in range(_KEYS)]

        def racer(me: int) -> None:
            try:
                for key in keys:
                    together.wait(30)
                    answers[me].append(bench.relay.put_if_absent(key, b"thread %d" % me, soon()))
            except (MoonrelayError, threading.BrokenBarrierError) as exc:
                failures.append(f"thread {me}: {exc!r}")
                together.abort()

        in_threads(_THREADS, racer)
        assert not failures, failures[0]
        _one_winner(bench, keys, answers, [b"thread %d" % me for me in range(_THREADS)])

    @promise(
        Level.L1,
        "Of processes that race for a small value, exactly one wins, and all agree",
        requires=(Capability.PROCESSES,),
    )
    def test_processes_racing_for_a_value_have_one_winner(self, bench: RelayBench) -> None:
        peers = [bench.peer() for _ in range(3)]
        prefix = bench.key("processes")
        keys = [bench.key(f"processes/{n}") for n in range(_KEYS)]
        for me, peer in enumerate(peers):
            peer.send("race", prefix=prefix, count=_KEYS, value=f"process {me}")
        answers = [[text.encode() for text in peer.answer()] for peer in peers]
        _one_winner(bench, keys, answers, [b"process %d" % me for me in range(3)])

    @promise(Level.L1, "Whatever is done in whatever order, the store holds what a dictionary would")
    def test_the_store_equals_a_dictionary(self, bench: RelayBench) -> None:
        class Machine(_StoreMachine):
            def __init__(self) -> None:
                super().__init__(bench)

        budget = hypothesis.settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[hypothesis.Phase.generate],  # looking for a shorter history takes a minute of a slow store
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        stateful.run_state_machine_as_test(Machine, settings=budget)


def _one_winner(bench: RelayBench, keys: list[str], answers: list[list[bytes]], values: list[bytes]) -> None:
    for key, standing in zip(keys, zip(*answers, strict=True), strict=True):
        assert len(set(standing)) == 1, f"racers for one key do not agree: {standing}"
        assert standing[0] in values, f"a value that nobody put stands: {standing[0]!r}"
        assert bench.relay.get_bytes(key, soon()) == standing[0], "another value stands than the racers were told"


class _StoreMachine(stateful.RuleBasedStateMachine):
    """Puts, gets and removals beside a dictionary. A key of an object is never used again, as the contract says."""

    def __init__(self, bench: RelayBench) -> None:
        super().__init__()
        self._bench = bench
        self._objects: dict[str, bytes] = {}
        self._values: dict[str, bytes] = {}
        self._removed: list[str] = []
        self._run = uuid.uuid4().hex[:8]
        self._count = 0

    def teardown(self) -> None:
        self._bench.relay.remove([*self._objects, *self._values], soon())

    def _key(self, name: str) -> str:
        return self._bench.key(f"machine/{self._run}/{name}")

    @stateful.rule(content=st.binary(min_size=1, max_size=5000))
    def put_new(self, content: bytes) -> None:
        self._count += 1
        key = self._key(f"o{self._count}")
        self._bench.put(key, content)
        self._objects[key] = content

    @stateful.precondition(lambda self: self._objects or self._values)
    @stateful.rule(data=st.data(), content=st.binary(min_size=1, max_size=100))
    def put_again(self, data: st.DataObject, content: bytes) -> None:
        key = data.draw(st.sampled_from(sorted([*self._objects, *self._values])))
        try:
            self._bench.put(key, content)
        except IntegrityError:
            return
        message = f"a second put under {key} was not refused"
        raise AssertionError(message)

    @stateful.rule(name=st.sampled_from(["v1", "v2", "v3"]), value=st.binary(min_size=1, max_size=100))
    def put_if_absent(self, name: str, value: bytes) -> None:
        key = self._key(name)
        standing = self._values.setdefault(key, value)
        assert self._bench.relay.put_if_absent(key, value, soon()) == standing

    @stateful.rule(name=st.sampled_from(["v1", "v2", "v3"]))
    def get_value(self, name: str) -> None:
        key = self._key(name)
        assert self._bench.relay.get_bytes(key, soon()) == self._values.get(key)

    @stateful.precondition(lambda self: self._objects)
    @stateful.rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self._objects)))
        assert self._bench.get(key, len(self._objects[key])) == self._objects[key]

    @stateful.precondition(lambda self: self._objects)
    @stateful.rule(data=st.data(), more=st.sampled_from([1, 7, 5000]))
    def get_too_much(self, data: st.DataObject, more: int) -> None:
        key = data.draw(st.sampled_from(sorted(self._objects)))
        try:
            found = self._bench.get(key, len(self._objects[key]) + more)
        except IntegrityError:
            return
        message = f"{more} bytes more than the object has were got: {found is not None}"
        raise AssertionError(message)

    @stateful.precondition(lambda self: self._removed)
    @stateful.rule(data=st.data())
    def get_removed(self, data: st.DataObject) -> None:
        assert self._bench.get(data.draw(st.sampled_from(self._removed)), 10) is None

    @stateful.precondition(lambda self: self._objects or self._values)
    @stateful.rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        known = st.sampled_from(sorted([*self._objects, *self._values]))
        keys = data.draw(st.lists(known, min_size=1, max_size=4, unique=True))
        self._bench.relay.remove(keys, soon())
        for key in keys:
            if self._values.pop(key, None) is not None:
                assert self._bench.relay.get_bytes(key, soon()) is None, f"{key} was removed and is there"
            if self._objects.pop(key, None) is not None:
                self._removed.append(key)
                assert self._bench.get(key, 10) is None, f"{key} was removed and is there"

    @stateful.precondition(lambda self: self._bench.target.supports(Capability.LISTING))
    @stateful.rule(prefix=st.sampled_from(["", "o", "v", "o1", "none"]))
    def keys(self, prefix: str) -> None:
        start = f"machine/{self._run}/"
        found = [name.removeprefix(start) for name in self._bench.keys(f"{start}{prefix}")]
        wanted = sorted(key.rpartition("/")[2] for key in (*self._objects, *self._values))
        assert found == [name for name in wanted if name.startswith(prefix)]
