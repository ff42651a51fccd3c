"""Limits: a full store, a deadline, the end; who is told that memory is quiet; and that nothing is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moonrelay.errors import CapacityError, ClosedError, IntegrityError, MoonrelayError, TransferTimeout
from moonrelay.relay.base import Relay
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.part_footprint import Memory, footprint, settles_at
from moonrelay_conformance.suites.part_process import pattern
from moonrelay_conformance.suites.relay_bench import CAPACITY_BYTES, Quiet, RelayBench, RelaySuite, cut, soon

_OBJECT = 4 << 20
_CYCLES = 50
_SLACK_BYTES = 256 << 20


class RelayLimits(RelaySuite):
    """Where a relay must say no, and what it leaves."""

    @promise(
        Level.L2,
        "A full store refuses by name, keeps what it has, and takes more once there is room",
        requires=(Capability.CAPACITY,),
    )
    def test_a_full_store_refuses_and_keeps_what_it_has(self, bench: RelayBench) -> None:
        source = Memory(pattern(1, _OBJECT))
        stored: list[str] = []
        before = bench.stored()

        def put_one_more(number: int) -> None:
            quiet, key = Quiet(), bench.key(f"full/{number}")
            try:
                bench.relay.put(key, cut(source), soon(), on_quiet=quiet)
            finally:
                quiet.once(f"put {number} into a store that fills up")
            stored.append(key)

        def put_twice_what_fits() -> None:
            for number in range(2 * CAPACITY_BYTES // _OBJECT):
                put_one_more(number)

        with pytest.raises(CapacityError):
            put_twice_what_fits()
        assert stored, "not one object fits the store"
        assert len(set(bench.stored()) - set(before)) == len(stored), "a refused object left something in the store"
        for key in stored:
            assert bench.get(key, _OBJECT) == pattern(1, _OBJECT), "a full store gave up an object that it had taken"
        bench.relay.remove(stored[:2], soon())
        bench.relay.put(bench.key("full/again"), cut(source), soon())
        assert bench.get(bench.key("full/again"), _OBJECT) == pattern(1, _OBJECT)

    @promise(Level.L2, "An object larger than the store is refused by name", requires=(Capability.CAPACITY,))
    def test_an_object_larger_than_the_store_is_refused(self, bench: RelayBench) -> None:
        before, quiet = bench.stored(), Quiet()
        with pytest.raises(CapacityError):
            bench.relay.put(bench.key("huge"), cut(Memory(bytes(CAPACITY_BYTES + 1))), soon(), on_quiet=quiet)
        quiet.once("a put that does not fit")
        assert set(bench.stored()) <= set(before), "a refused object left something in the store"

    @promise(Level.L1, "A deadline in the past is a timeout, and leaves nothing")
    def test_a_deadline_in_the_past_is_a_timeout_and_leaves_nothing(self, bench: RelayBench) -> None:
        before, memory, there = bench.stored(), Memory(pattern(2, 1000)), bench.key("there")
        for what in ("put", "get"):
            quiet = Quiet()
            move = bench.relay.put if what == "put" else bench.relay.get
            with pytest.raises(TransferTimeout):
                move(bench.key(f"late-{what}"), cut(memory), soon(0.0), on_quiet=quiet)
            quiet.once(f"a {what} that was too late", at_once=False)
        with pytest.raises(TransferTimeout):
            bench.relay.get_bytes(there, soon(0.0))
        left = bench.until_stored(before)
        assert not left, f"a put that was too late is stored: {left}"
        assert memory.read() == pattern(2, 1000), "a get that was too late wrote memory"

    @promise(Level.L1, "It is said exactly once that memory is quiet, whatever comes of a put or get")
    def test_quiet_is_said_exactly_once(self, bench: RelayBench) -> None:
        key, memory = bench.key("quiet"), Memory(pattern(3, 100_000))
        closed = bench.new()
        closed.close()
        cases: list[tuple[str, type[MoonrelayError] | None, Callable[[Quiet], object]]] = [
            ("a put", None, lambda quiet: bench.relay.put(key, cut(memory), soon(), on_quiet=quiet)),
            ("a get", None, lambda quiet: bench.relay.get(key, cut(memory), soon(), on_quiet=quiet)),
            (
                "a get of nothing",
                None,
                lambda quiet: bench.relay.get(bench.key("none"), cut(memory), soon(), on_quiet=quiet),
            ),
            (
                "a second put",
                IntegrityError,
                lambda quiet: bench.relay.put(key, cut(memory), soon(), on_quiet=quiet),
            ),
            (
                "a get of another size",
                IntegrityError,
                lambda quiet: bench.relay.get(key, cut(Memory(bytes(99))), soon(), on_quiet=quiet),
            ),
            ("a put after close", ClosedError, lambda quiet: closed.put(key, cut(memory), soon(), on_quiet=quiet)),
            ("a get after close", ClosedError, lambda quiet: closed.get(key, cut(memory), soon(), on_quiet=quiet)),
        ]
        for what, error, call in cases:
            quiet = Quiet()
            if error is None:
                call(quiet)
            else:
                with pytest.raises(error):
                    call(quiet)
            quiet.once(what)

    @promise(Level.L1, "A put or get that does not ask to be told works the same")
    def test_nobody_needs_to_ask_for_quiet(self, bench: RelayBench) -> None:
        key, memory = bench.key("unasked"), Memory(pattern(4, 1000))
        bench.relay.put(key, cut(memory), soon(), on_quiet=None)
        assert bench.relay.get(key, cut(memory), soon(), on_quiet=None) is True
        with pytest.raises(IntegrityError):
            bench.relay.put(key, cut(memory), soon())

    @promise(Level.L1, "Before its start and after its end a relay does nothing, and says so")
    def test_nothing_works_before_start_or_after_close(self, bench: RelayBench) -> None:
        never, ended = bench.new(), bench.new()
        ended.start()
        ended.close()
        key, memory = bench.key("closed"), Memory(b"data")
        for relay in (never, ended):
            for call in _calls(relay, key, memory):
                with pytest.raises(ClosedError):
                    call()
        assert bench.get(key, 4) is None, "a relay that is not open stored something"

    @promise(Level.L1, "Closing twice, or before the start, is fine, and what was stored stays")
    def test_close_is_idempotent_and_what_was_stored_stays(self, bench: RelayBench) -> None:
        bench.new().close()
        second = bench.another()
        second.start()
        key, value = bench.key("stays"), bench.key("value-stays")
        second.put(key, cut(Memory(pattern(5, 3000))), soon())
        second.put_if_absent(value, b"value", soon())
        for _ in range(2):
            second.close()
        assert bench.get(key, 3000) == pattern(5, 3000), "an object went with the relay that stored it"
        assert bench.relay.get_bytes(value, soon()) == b"value", "a value went with the relay that stored it"

    @promise(Level.L1, "Fifty cycles leave no descriptor, thread, mapping or object behind")
    def test_fifty_cycles_leave_nothing(self, bench: RelayBench) -> None:
        nbytes = 300_007
        source, target = Memory(pattern(6, nbytes)), Memory(bytes(nbytes))

        def cycle(name: str) -> None:
            key, value = bench.key(name), bench.key(f"{name}/end")
            bench.relay.put(key, cut(source, 100), soon())
            bench.relay.put_if_absent(value, b"end", soon())
            assert bench.relay.get(key, cut(target), soon())
            with pytest.raises(IntegrityError):
                bench.relay.put(key, cut(source), soon())
            bench.relay.remove([key, value], soon())

        for number in range(8):  # threads of a pool start as they are first needed
            cycle(f"warm/{number}")
        folder = bench.target_folder
        before, stored = footprint(folder), bench.stored()
        for number in range(_CYCLES):
            cycle(f"cycle/{number}")
        settles_at(before, folder, slack_bytes=_SLACK_BYTES)
        left = bench.until_stored(stored)
        assert not left, f"removed objects are still in the store: {left[:3]}"

    @promise(Level.L1, "Relays that lived and ended leave nothing behind")
    def test_several_lives_leave_nothing(self, bench: RelayBench) -> None:
        before = None
        for number in range(3):
            relay, key = bench.new(), bench.key(f"life/{number}")
            relay.start()
            relay.put(key, cut(Memory(pattern(7, 100_000))), soon())
            relay.remove([key], soon())
            relay.close()
            del relay
            # A library may keep some threads of its own from its first life on.
            if before is None:
                before = footprint(bench.target_folder)
        assert before is not None
        settles_at(before, bench.target_folder, slack_bytes=_SLACK_BYTES)


def _calls(relay: Relay, key: str, memory: Memory) -> tuple[Callable[[], object], ...]:
    return (
        lambda: relay.put(key, cut(memory), soon()),
        lambda: relay.get(key, cut(memory), soon()),
        lambda: relay.put_if_absent(key, b"x", soon()),
        lambda: relay.get_bytes(key, soon()),
        lambda: relay.remove([key], soon()),
        lambda: relay.keys(key, soon()),
    )
