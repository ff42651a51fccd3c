"""Life: what an engine does before its start and after its end, and that it leaves nothing."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable

import pytest

from moonrelay.errors import CapacityError, ClosedError
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.engine_bench import (
    CANARY,
    EngineBench,
    EngineSuite,
    Pair,
    deliver,
    ended,
    fill,
    same,
    untouched,
)
from moonrelay_conformance.suites.part_footprint import footprint, settles_at
from moonrelay_conformance.suites.part_process import pattern

MIB = 1 << 20
SIZE = 64 << 10
ALLOCATIONS = 50
READS = 100
LIVES = 2
#: The C library keeps this much address space for a thread's heap, so mappings smaller than it are not looked for.
_ARENA_BYTES = 64 * MIB


class EngineLife(EngineSuite):
    """Before the start, after the end, and what is left."""

    @promise(Level.L1, "Before its start an engine does nothing, and says so")
    def test_nothing_works_before_start(self, bench: EngineBench, pair: Pair) -> None:
        engine = bench.new()
        source = bench.memory(pair.producer, SIZE, seed=1)
        with pytest.raises(ClosedError):
            _ = engine.address
        for call in (
            lambda: engine.allocate(SIZE),
            lambda: engine.read(pair.producer.address, source, source.base, source.base, 1),
        ):
            with pytest.raises(ClosedError):
                call()
        engine.forget(pair.producer.address)

    @promise(Level.L1, "After its end an engine does nothing, and says so")
    def test_nothing_works_after_close(self, bench: EngineBench, pair: Pair) -> None:
        engine = bench.engine()
        region = bench.memory(engine, SIZE)
        source = bench.memory(pair.producer, SIZE, seed=2)
        engine.close()
        calls: tuple[Callable[[], object], ...] = (
            lambda: engine.allocate(SIZE),
            lambda: engine.read(pair.producer.address, source, source.base, region.base, SIZE),
            lambda: engine.register(source.base, SIZE),
            engine.start,
        )
        for call in calls:
            with pytest.raises(ClosedError):
                call()
        untouched(region, "a closed engine")

    @promise(Level.L1, "Closing twice, or before the start, is fine, and so is releasing after it")
    def test_close_is_idempotent_also_half_built(self, bench: EngineBench) -> None:
        never = bench.new()
        never.close()
        never.close()
        with pytest.raises(ClosedError):
            never.start()
        engine = bench.engine()
        region = engine.allocate(SIZE)
        for _ in range(2):
            engine.close()
            engine.release(region)

    @promise(Level.L1, "Starting twice changes nothing")
    def test_start_is_idempotent(self, bench: EngineBench) -> None:
        engine = bench.engine()
        address = engine.address
        engine.start()
        assert engine.address == address, "a second start gave the engine another address"

    @promise(Level.L1, "No two engines have the same nonce")
    def test_every_engine_has_a_nonce_of_its_own(self, pair: Pair) -> None:
        found = [one.address.nonce for one in (pair.producer, pair.consumer, pair.third)]
        assert all(found), "an engine has no nonce"
        assert len(set(found)) == len(found), "two engines have the same nonce"

    @promise(Level.L1, "Allocated regions are whole, writable and apart from each other")
    def test_allocated_regions_do_not_overlap(self, pair: Pair) -> None:
        regions = [pair.producer.allocate(size) for size in (1, 4095, SIZE, MIB, MIB)]
        try:
            for seed, region in enumerate(regions):
                pair.producer.commit(region, 0, region.nbytes)
                fill(region, seed)
            for seed, region in enumerate(regions):
                same(region.base, pattern(seed, region.nbytes), f"region {seed} after the others were filled")
            by_base = sorted(regions, key=lambda region: region.base)
            for lower, upper in itertools.pairwise(by_base):
                assert lower.base + lower.nbytes <= upper.base, "two regions overlap"
        finally:
            for region in regions:
                pair.producer.release(region)
                pair.producer.release(region)

    @promise(Level.L1, "Memory that the system does not have is refused by name, and the engine goes on")
    def test_memory_beyond_the_system_is_a_capacity_error(self, bench: EngineBench, pair: Pair) -> None:
        names = bench.names()
        with pytest.raises(CapacityError):
            pair.producer.allocate(1 << 60)
        assert bench.names() == names, "the refused memory has a name"
        bench.memory(pair.producer, SIZE, seed=3)

    @promise(Level.L1, "Allocated memory stays mapped after the end, until it is released")
    def test_allocated_memory_outlives_close(self, bench: EngineBench) -> None:
        engine = bench.engine()
        region = bench.memory(engine, SIZE)
        engine.close()
        fill(region, 4)
        same(region.base, pattern(4, SIZE), "memory of a closed engine")

    @promise(Level.L1, "Closing an engine ends its reads, and none of them writes afterwards")
    def test_close_ends_reads_under_way(self, bench: EngineBench, pair: Pair) -> None:
        engine = bench.engine()
        nbytes = 16 * MIB
        source, target = bench.memory(pair.producer, nbytes, seed=5), bench.memory(engine, nbytes)
        deliver(engine, pair.producer.address, source, source.base, target.base, SIZE)
        size = nbytes // 8
        reads = [
            engine.read(pair.producer.address, source, source.base + n * size, target.base + n * size, size)
            for n in range(8)
        ]
        engine.close()
        for operation in reads:
            ended(operation)
        ctypes.memset(target.base, CANARY, nbytes)
        threading.Event().wait(0.3)
        untouched(target, "a read of a closed engine that had ended")

    @promise(Level.L1, "Fifty allocations leave no descriptor, thread, mapping or name behind")
    def test_fifty_allocations_leave_nothing(self, bench: EngineBench) -> None:
        engine = bench.engine()
        engine.release(engine.allocate(8 * MIB))
        before, names = footprint(bench.folder), bench.names()
        for _ in range(ALLOCATIONS):
            region = engine.allocate(8 * MIB)
            engine.commit(region, 0, 4096)
            ctypes.memset(region.base, 1, 4096)
            engine.release(region)
        settles_at(before, bench.folder, slack_bytes=_ARENA_BYTES)
        assert bench.names() == names, "released memory still has a name"

    @promise(Level.L1, "A hundred reads leave no descriptor, thread or mapping behind")
    def test_a_hundred_reads_leave_nothing(self, bench: EngineBench, pair: Pair) -> None:
        producer, consumer = pair.producer, bench.engine()
        source, target = bench.memory(producer, 2 * MIB, seed=6), bench.memory(consumer, 2 * MIB)
        for _ in range(5):
            deliver(consumer, producer.address, source, source.base, target.base, 2 * MIB)
        before, names = footprint(bench.folder), bench.names()
        for turn in range(READS):
            nbytes = 1 + (turn * 7919) % (2 * MIB)
            deliver(consumer, producer.address, source, source.base, target.base, nbytes)
            beyond = consumer.read(producer.address, source, source.base, target.base, 4 * MIB)
            ended(beyond)
        settles_at(before, bench.folder, slack_bytes=2 * _ARENA_BYTES)
        assert bench.names() == names, "a read made shared memory that stays"

    @promise(Level.L1, "Engines that lived and ended leave nothing behind")
    def test_several_lives_leave_nothing(self, bench: EngineBench) -> None:
        before, names = None, bench.names()
        for _ in range(LIVES):
            producer, consumer = bench.engine(), bench.engine()
            source, target = producer.allocate(8 * MIB), consumer.allocate(8 * MIB)
            producer.commit(source, 0, SIZE)
            consumer.commit(target, 0, SIZE)
            fill(type(source)(key=source.key, base=source.base, nbytes=SIZE), 7)
            deliver(consumer, producer.address, source, source.base, target.base, SIZE)
            consumer.release(target)
            for engine in (consumer, producer):
                engine.close()
            producer.release(source)
            del producer, consumer
            # A library may keep some threads of its own from its first life on.
            if before is None:
                before = footprint(bench.folder)
        assert before is not None
        settles_at(before, bench.folder, slack_bytes=_ARENA_BYTES)
        left = set(bench.names()) - set(names)
        assert not left, f"closed engines left shared memory: {sorted(left)}"
