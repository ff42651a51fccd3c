"""Refusals: what an engine must not read is a typed failure, and writes nothing."""

from __future__ import annotations

import ctypes
import threading

import pytest

from moonrelay.errors import RegistrationError
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import OperationState
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.engine_bench import (
    CANARY,
    EngineBench,
    EngineSuite,
    Pair,
    deliver,
    ended,
    same,
    untouched,
)
from moonrelay_conformance.suites.part_footprint import Memory, at
from moonrelay_conformance.suites.part_process import pattern

SIZE = 64 << 10


class EngineRefusals(EngineSuite):
    """What reads must not bring."""

    @pytest.mark.parametrize(
        ("offset", "nbytes"),
        [(-1, 2), (0, SIZE + 1), (SIZE - 1, 2), (SIZE, 1), (0, 0), (10, -5), (1 << 62, 1)],
        ids=["before", "longer", "over-the-end", "behind", "empty", "negative", "far-away"],
    )
    @promise(Level.L1, "A range that does not lie in the region is refused, and nothing is written")
    def test_a_range_outside_the_region_is_refused(
        self, bench: EngineBench, pair: Pair, offset: int, nbytes: int
    ) -> None:
        source, target = bench.memory(pair.producer, SIZE, seed=1), bench.memory(pair.consumer, 2 * SIZE)
        operation = pair.consumer.read(pair.producer.address, source, source.base + offset, target.base, nbytes)
        assert ended(operation) is OperationState.FAILED, "a range outside the region was read"
        assert isinstance(operation.error, RegistrationError), f"refused as {operation.error!r}"
        assert operation.error.retryable is False, "a range outside the region will not lie inside later"
        untouched(target, "a refused read")

    @promise(Level.L1, "The producer's own record of a region decides, not what the reader says of it")
    def test_a_region_said_to_be_larger_than_it_is_is_refused(self, bench: EngineBench, pair: Pair) -> None:
        producer, consumer = pair.producer, bench.engine()
        source, target = bench.memory(producer, SIZE, seed=2), bench.memory(consumer, SIZE)
        deliver(consumer, producer.address, source, source.base, target.base, 100)
        ctypes.memset(target.base, CANARY, SIZE)
        # Far enough behind the end that no rounding to pages makes it belong.
        lie = Region(key=source.key, base=source.base, nbytes=1 << 40)
        operation = consumer.read(producer.address, lie, source.base + (1 << 39), target.base, SIZE)
        assert ended(operation) is OperationState.FAILED, "memory behind the region's end was read"
        untouched(target, "a refused read")

    @promise(Level.L1, "Released memory cannot be read any more")
    def test_what_was_released_cannot_be_read(self, bench: EngineBench, pair: Pair) -> None:
        producer, consumer = pair.producer, bench.engine()
        source, target = bench.memory(producer, SIZE, seed=3), bench.memory(consumer, SIZE)
        producer.release(source)
        operation = consumer.read(producer.address, source, source.base, target.base, SIZE)
        assert ended(operation) is OperationState.FAILED, "released memory was read"
        untouched(target, "a read of released memory")

    @promise(Level.L1, "A closed peer is a failure, not a hang")
    def test_a_closed_peer_is_a_failure_and_no_hang(self, bench: EngineBench) -> None:
        producer, consumer = bench.engine(), bench.engine()
        source, target = bench.memory(producer, SIZE, seed=4), bench.memory(consumer, SIZE)
        deliver(consumer, producer.address, source, source.base, target.base, SIZE)
        address = producer.address
        producer.close()
        consumer.forget(address)
        ctypes.memset(target.base, CANARY, SIZE)
        operation = consumer.read(address, source, source.base, target.base, SIZE)
        assert ended(operation) is OperationState.FAILED, "a closed peer's memory was read"
        untouched(target, "a read from a closed peer")

    @promise(Level.L1, "A peer that never was is a failure, not a hang")
    def test_an_address_where_nobody_is_fails(self, bench: EngineBench, pair: Pair) -> None:
        gone = bench.engine()
        source, address = bench.memory(gone, SIZE, seed=5), gone.address
        gone.release(source)
        gone.close()
        target = bench.memory(pair.consumer, SIZE)
        operation = pair.consumer.read(address, source, source.base, target.base, SIZE)
        assert ended(operation) is OperationState.FAILED, "nobody's memory was read"
        untouched(target, "a read from nobody")

    @promise(
        Level.L1, "An address with another life's nonce gives none of this life's bytes", requires=(Capability.LIVES,)
    )
    def test_another_lifes_nonce_is_refused(self, bench: EngineBench, pair: Pair) -> None:
        source, target = bench.memory(pair.producer, SIZE, seed=6), bench.memory(pair.consumer, SIZE)
        address = pair.producer.address
        other = EngineAddress(engine=address.engine, address=address.address, nonce="0" * len(address.nonce))
        operation = pair.consumer.read(other, source, source.base, target.base, SIZE)
        assert ended(operation) is OperationState.FAILED, "another life's memory was read"
        untouched(target, "a read from another life")

    @promise(Level.L1, "The answer of a read that has ended stays what it was")
    def test_an_ended_reads_answer_does_not_change(self, bench: EngineBench, pair: Pair) -> None:
        source, target = bench.memory(pair.producer, SIZE, seed=7), bench.memory(pair.consumer, SIZE)
        for nbytes in (SIZE, SIZE + 1):
            operation = pair.consumer.read(pair.producer.address, source, source.base, target.base, nbytes)
            state, error = ended(operation), operation.error
            for _ in range(20):
                assert operation.poll() is state, f"a read that was {state.value} is so no more"
                assert operation.error is error, "a failed read's reason changed"
            operation.abandon()
            assert operation.poll() is state, f"a read that was {state.value} is so no more when it is given up"

    @promise(Level.L1, "A read that was given up ends, and writes nothing after its end")
    def test_an_abandoned_read_ends_and_is_quiet(self, bench: EngineBench, pair: Pair) -> None:
        nbytes = 8 << 20
        source, target = bench.memory(pair.producer, nbytes, seed=8), bench.memory(pair.consumer, nbytes)
        reads = []
        for turn in range(8):
            size = nbytes // 8
            at_byte = turn * size
            reads.append(
                pair.consumer.read(pair.producer.address, source, source.base + at_byte, target.base + at_byte, size)
            )
            reads[-1].abandon()
        for operation in reads:
            ended(operation)
        ctypes.memset(target.base, CANARY, nbytes)
        threading.Event().wait(0.3)
        untouched(target, "a read that had ended")

    @promise(Level.L1, "Foreign memory is registered where that is declared, and refused by name where it is not")
    def test_foreign_memory_is_registered_or_refused(self, bench: EngineBench, pair: Pair) -> None:
        there = bench.target.supports(Capability.FOREIGN_MEMORY)
        assert pair.producer.registers_foreign_memory is there, "the engine says otherwise than its target"
        own = Memory(pattern(9, SIZE))
        if not there:
            with pytest.raises(RegistrationError) as caught:
                pair.producer.register(own.address, own.nbytes)
            assert caught.value.message, "the refusal says nothing"
            return
        region = pair.producer.register(own.address, own.nbytes)
        target = bench.memory(pair.consumer, SIZE)
        deliver(pair.consumer, pair.producer.address, region, own.address, target.base, SIZE)
        same(target.base, pattern(9, SIZE), "a read of registered memory")
        pair.producer.unregister(region)
        pair.producer.unregister(region)
        assert own.read() == pattern(9, SIZE), "registering wrote the memory"

    @promise(Level.L1, "Memory that was unregistered cannot be read any more", requires=(Capability.FOREIGN_MEMORY,))
    def test_unregistered_memory_cannot_be_read(self, bench: EngineBench, pair: Pair) -> None:
        producer, consumer = pair.producer, bench.engine()
        own = Memory(pattern(10, SIZE))
        region, target = producer.register(own.address, own.nbytes), bench.memory(consumer, SIZE)
        producer.unregister(region)
        operation = consumer.read(producer.address, region, own.address, target.base, SIZE)
        assert ended(operation) is OperationState.FAILED, "unregistered memory was read"
        untouched(target, "a read of unregistered memory")
        again = producer.register(own.address, own.nbytes)
        deliver(consumer, producer.address, again, own.address, target.base, SIZE)
        producer.unregister(again)

    @promise(Level.L1, "Memory is not registered twice, nor is nothing", requires=(Capability.FOREIGN_MEMORY,))
    def test_overlapping_registrations_are_refused(self, pair: Pair) -> None:
        own = Memory(bytes(SIZE))
        region = pair.producer.register(own.address, own.nbytes)
        for address, nbytes in ((own.address, own.nbytes), (own.address, 0)):
            with pytest.raises(RegistrationError):
                pair.producer.register(address, nbytes)
        pair.producer.unregister(region)

    @promise(Level.L1, "A read lands in registered memory, and in any memory where the engine says so")
    def test_a_read_lands_in_memory_of_the_readers_own(self, bench: EngineBench, pair: Pair) -> None:
        source = bench.memory(pair.producer, SIZE, seed=11)
        own = Memory(bytes(SIZE))
        if pair.consumer.lands_in_foreign_memory:
            deliver(pair.consumer, pair.producer.address, source, source.base, own.address, SIZE)
        elif pair.consumer.registers_foreign_memory:
            region = pair.consumer.register(own.address, own.nbytes)
            deliver(pair.consumer, pair.producer.address, source, source.base, own.address, SIZE)
            pair.consumer.unregister(region)
        else:
            return  # lands in allocated memory only, which all other tests do
        assert own.read() == at(source.base, SIZE), "other bytes landed"
