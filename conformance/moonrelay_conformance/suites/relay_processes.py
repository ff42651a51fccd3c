"""Processes: what one stored another reads, and what its death or its silence leaves."""

from __future__ import annotations

import json
import threading

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import MoonrelayError, TransferFailed, TransferTimeout
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.part_footprint import Memory, differs
from moonrelay_conformance.suites.part_process import pattern
from moonrelay_conformance.suites.relay_bench import RelayBench, RelaySuite, cut, soon

_OBJECT = 1 << 20
_LARGE = 4 << 20
#: Objects that a writer which is to be killed keeps in the store.
_KEEP = 3
#: How far into a put it is killed.
_KILLED_AFTER_S = (0.0, 0.002, 0.02)
#: More than a writer gets to before it is killed.
_MOST = 2000


class RelayProcesses(RelaySuite):
    """Clients in processes of their own."""

    @promise(Level.L1, "What one process stored another reads", requires=(Capability.PROCESSES,))
    def test_another_process_reads_what_was_stored(self, bench: RelayBench) -> None:
        peer = bench.peer()
        ours, theirs = bench.key("ours"), bench.key("theirs")
        bench.put(ours, pattern(1, _OBJECT + 3))
        assert peer.do("get", key=ours, seed=1, nbytes=_OBJECT + 3) == "same"
        peer.do("put", key=theirs, seed=2, nbytes=_OBJECT + 5)
        assert bench.get(theirs, _OBJECT + 5) == pattern(2, _OBJECT + 5)
        with pytest.raises(MoonrelayError) as caught:
            peer.do("put", key=ours, seed=3, nbytes=100)
        assert caught.value.code == "integrity_error", f"a key that another process used: {caught.value!r}"
        bench.relay.remove([theirs], soon())
        assert peer.do("get", key=theirs, seed=2, nbytes=_OBJECT + 5) == "absent"

    @promise(
        Level.L3,
        "What was stored survives the kill of its writer; what was half written is never readable",
        requires=(Capability.PROCESSES, Capability.DURABLE),
    )
    def test_a_killed_writers_objects_are_whole_or_absent(self, bench: RelayBench) -> None:
        before = bench.stored()
        for turn, wait_s in enumerate(_KILLED_AFTER_S):
            peer = bench.peer()
            prefix = bench.key(f"killed/{turn}")
            peer.send("churn", prefix=prefix, nbytes=_LARGE, keep=_KEEP)
            last = -1
            while (said := peer.answer()) != ["begin", _KEEP + turn]:
                last = said[1] if said[0] == "stored" else last
            threading.Event().wait(wait_s)  # a moment into the put
            peer.kill()
            said = [json.loads(line)["ok"] for line in peer.rest()]
            last = max([last, *(n for what, n in said if what == "stored")])
            keys = {n: bench.key(f"killed/{turn}/{n}") for n in range(last + 3)}
            for n, key in keys.items():
                found = bench.get(key, _LARGE)
                if found is not None:
                    wrong = differs(found, pattern(n, _LARGE))
                    assert not wrong, f"object {n} of a killed writer is readable and not whole: {wrong}"
                elif last - _KEEP < n <= last:
                    message = f"object {n} was stored, and went with its writer"
                    raise AssertionError(message)
            bench.relay.remove(list(keys.values()), soon())
        bench.another()  # a start clears up, where the store itself does not
        left = bench.until_stored(before)
        assert not left, f"a killed writer's unfinished objects stay for ever: {left}"

    @promise(
        Level.L3,
        "A small value whose writer was killed is the writer's, or nobody's",
        requires=(Capability.PROCESSES, Capability.DURABLE),
    )
    def test_a_killed_racer_leaves_one_value_or_none(self, bench: RelayBench) -> None:
        peer = bench.peer()
        prefix, count = bench.key("racer"), _MOST
        peer.do("race", prefix=prefix, count=1, value="theirs")
        peer.send("race", prefix=prefix, count=count, value="theirs")
        deadline = Deadline(20.0, SystemClock())
        while bench.relay.get_bytes(f"{prefix}/20", soon()) is None and not deadline.expired:
            threading.Event().wait(0.001)
        peer.kill()
        keys = [bench.key(f"racer/{n}") for n in range(count)]
        assert bench.relay.get_bytes(keys[0], soon()) == b"theirs", "a value went with its writer"
        unfinished = []
        for key in keys[:60]:
            try:
                found = bench.relay.get_bytes(key, soon())
            except TransferFailed as exc:
                # A store may keep the key of a put that was under way until it gives its writer up: told, not guessed.
                if not exc.retryable:
                    raise
                unfinished.append(key)
                continue
            assert found in (None, b"theirs"), f"a killed writer's value is {found!r}"
            standing = bench.relay.put_if_absent(key, b"ours", soon())
            assert standing == (found or b"ours"), f"{standing!r} stands where {found!r} stood"
        assert len(unfinished) <= 1, f"a writer of one value at a time left {len(unfinished)} unfinished ones"

    @promise(
        Level.L3,
        "A writer that falls silent keeps nobody longer than the deadline",
        requires=(Capability.PROCESSES,),
    )
    def test_a_silent_writer_keeps_nobody_beyond_the_deadline(self, bench: RelayBench) -> None:
        peer = bench.peer()
        there = bench.key("there")
        bench.put(there, pattern(3, _OBJECT))
        peer.send("churn", prefix=bench.key("silent"), nbytes=_OBJECT, keep=_KEEP)
        while peer.answer() != ["begin", 2]:
            pass
        peer.stop()
        target = Memory(bytes(_OBJECT))
        try:
            for number in range(3):
                bound = Deadline(30.0, SystemClock())
                try:
                    bench.relay.put(bench.key(f"beside/{number}"), cut(Memory(pattern(4, 1000))), soon(3.0))
                    assert bench.get(bench.key(f"beside/{number}"), 1000) == pattern(4, 1000)
                    assert bench.relay.get(there, cut(target), soon(3.0)), "an object is gone beside a silent writer"
                    assert target.read() == pattern(3, _OBJECT)
                except TransferTimeout:
                    pass  # the silent writer may hold a lock: the deadline was kept, that is all that is promised
                assert not bound.expired, "a deadline of 3 s took more than 30"
        finally:
            peer.kill()
            keys = [bench.key(f"silent/{n}") for n in range(_MOST // 10)]
            bench.relay.remove(keys, soon())
