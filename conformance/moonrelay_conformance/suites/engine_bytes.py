"""Bytes: what a read brings is exactly what was asked for, where it was asked for, whatever else is under way."""

from __future__ import annotations

import ctypes
import threading

import pytest

from moonrelay.transfer.base import Operation, OperationState
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
)
from moonrelay_conformance.suites.part_footprint import at, differs
from moonrelay_conformance.suites.part_process import pattern
from moonrelay_conformance.suites.part_shared import in_threads

MIB = 1 << 20
SIZES = (1, 2, 63, 4095, 4096, 4097, MIB + 3, 5 * MIB)
#: Before and after the destination.
_MARGIN = 4096 + 57


class EngineBytes(EngineSuite):
    """What reads bring."""

    @pytest.mark.parametrize("nbytes", SIZES)
    @promise(Level.L1, "A read brings exactly the bytes of its range, from any offset to any offset")
    def test_a_read_brings_exactly_the_range(self, bench: EngineBench, pair: Pair, nbytes: int) -> None:
        source = bench.memory(pair.producer, nbytes + 200, seed=nbytes)
        target = bench.memory(pair.consumer, nbytes + 200)
        content = pattern(nbytes, nbytes + 200)
        for remote, local in ((0, 0), (13, 57), (200, 101)):
            deliver(pair.consumer, pair.producer.address, source, source.base + remote, target.base + local, nbytes)
            same(target.base + local, content[remote : remote + nbytes], f"a read from offset {remote} to {local}")

    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, MIB + 3])
    @promise(Level.L1, "A read writes nothing outside its destination")
    def test_nothing_outside_the_destination_is_written(self, bench: EngineBench, pair: Pair, nbytes: int) -> None:
        source = bench.memory(pair.producer, nbytes + 2 * _MARGIN, seed=1)
        target = bench.memory(pair.consumer, nbytes + 2 * _MARGIN)
        deliver(pair.consumer, pair.producer.address, source, source.base + _MARGIN, target.base + _MARGIN, nbytes)
        guard = bytes([CANARY]) * _MARGIN
        same(target.base, guard, "memory before the destination")
        same(target.base + _MARGIN + nbytes, guard, "memory after the destination")

    @promise(Level.L1, "A read leaves the producer's memory as it is")
    def test_the_producers_memory_is_not_written(self, bench: EngineBench, pair: Pair) -> None:
        source = bench.memory(pair.producer, MIB, seed=3)
        target = bench.memory(pair.consumer, MIB)
        deliver(pair.consumer, pair.producer.address, source, source.base, target.base, MIB)
        ctypes.memset(target.base, 0, MIB)
        same(source.base, pattern(3, MIB), "the producer's memory after a read")

    @promise(Level.L1, "A read brings the bytes of now, not those of an earlier read")
    def test_a_second_read_sees_what_was_written_meanwhile(self, bench: EngineBench, pair: Pair) -> None:
        source = bench.memory(pair.producer, MIB, seed=4)
        target = bench.memory(pair.consumer, MIB)
        for seed in (4, 5, 6):
            fill(source, seed)
            deliver(pair.consumer, pair.producer.address, source, source.base, target.base, MIB)
            same(target.base, pattern(seed, MIB), "a read after the producer's memory was filled anew")

    @promise(Level.L1, "When a read says that it is done, its last byte is there")
    def test_the_bytes_are_there_when_a_read_is_done(self, bench: EngineBench, pair: Pair) -> None:
        nbytes = 8 * MIB
        source = bench.memory(pair.producer, nbytes, seed=7)
        target = bench.memory(pair.consumer, nbytes)
        wanted = pattern(7, nbytes)
        for _ in range(3):
            ctypes.memset(target.base, CANARY, nbytes)
            operation = pair.consumer.read(pair.producer.address, source, source.base, target.base, nbytes)
            while operation.poll() is OperationState.RUNNING:
                pass  # not a moment between the answer and the look
            # Backwards, since an engine that answers too early is likely to be behind at the end.
            found = b"".join(reversed([at(target.base + start, MIB) for start in range(nbytes - MIB, -1, -MIB)]))
            if ended(operation) is OperationState.DONE:
                wrong = differs(found, wanted)
                assert not wrong, f"a read said that it is done too early: {wrong}"

    @promise(Level.L1, "Reads that are in flight together each bring their own bytes")
    def test_reads_in_flight_do_not_swap_their_bytes(self, bench: EngineBench, pair: Pair) -> None:
        count, most = 24, 70_001
        sources = [bench.memory(pair.producer, most + 7, seed=100 + n) for n in range(4)]
        target = bench.memory(pair.consumer, count * most)
        begun: list[tuple[Operation, tuple[int, int, int]]] = []
        for n in range(count):
            nbytes = most - n % 3
            place = (n, target.base + n * most, nbytes)
            source = sources[n % 4]
            read = pair.consumer.read(pair.producer.address, source, source.base + n % 7, place[1], nbytes)
            begun.append((read, place))
        for operation, (n, local, nbytes) in reversed(begun):
            if ended(operation) is OperationState.FAILED:
                source = sources[n % 4]
                deliver(pair.consumer, pair.producer.address, source, source.base + n % 7, local, nbytes)
        for _, (n, local, nbytes) in begun:
            wanted = pattern(100 + n % 4, most + 7)[n % 7 : n % 7 + nbytes]
            same(local, wanted, f"read {n} of {count} that were in flight together")

    @promise(Level.L1, "Two producers of one consumer are told apart")
    def test_two_producers_are_not_mixed_up(self, bench: EngineBench, pair: Pair) -> None:
        other = pair.third
        sources = [(pair.producer, bench.memory(pair.producer, MIB, seed=21)), (other, bench.memory(other, MIB, 22))]
        target = bench.memory(pair.consumer, MIB)
        for turn in range(4):
            engine, source = sources[turn % 2]
            deliver(pair.consumer, engine.address, source, source.base, target.base, MIB)
            same(target.base, pattern(21 + turn % 2, MIB), f"a read from producer {turn % 2 + 1} of two")

    @promise(Level.L1, "Two consumers read the same memory at once")
    def test_two_consumers_read_the_same_memory(self, bench: EngineBench, pair: Pair) -> None:
        other = pair.third
        source = bench.memory(pair.producer, MIB, seed=31)
        targets = [(one, bench.memory(one, MIB)) for one in (pair.consumer, other)]
        reads = [one.read(pair.producer.address, source, source.base, target.base, MIB) for one, target in targets]
        for operation, (one, target) in zip(reads, targets, strict=True):
            if ended(operation) is OperationState.FAILED:
                deliver(one, pair.producer.address, source, source.base, target.base, MIB)
            same(target.base, pattern(31, MIB), "one of two consumers' reads")

    @promise(Level.L1, "Threads that read at once each get their own bytes")
    def test_threads_reading_at_once_get_their_own_bytes(self, bench: EngineBench, pair: Pair) -> None:
        nbytes, turns = 300_007, 10
        sources = [bench.memory(pair.producer, nbytes, seed=40 + n) for n in range(4)]
        targets = [bench.memory(pair.consumer, nbytes) for _ in range(4)]
        together = threading.Barrier(4)
        failures: list[str] = []

        def reader(me: int) -> None:
            try:
                for turn in range(turns):
                    together.wait(30)
                    source = sources[(me + turn) % 4]
                    address = pair.producer.address
                    deliver(pair.consumer, address, source, source.base, targets[me].base, nbytes)
                    same(targets[me].base, pattern(40 + (me + turn) % 4, nbytes), "a read beside other threads'")
            except (AssertionError, threading.BrokenBarrierError) as exc:
                failures.append(f"thread {me}: {exc!r}")
                together.abort()

        in_threads(4, reader)
        assert not failures, failures[0]
