"""Processes: bytes come from another process, and what its death or its silence does to reads."""

from __future__ import annotations

import ctypes
import threading

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
from moonrelay_conformance.suites.part_process import pattern

MIB = 1 << 20
_POOL = 32 * MIB
_PIECES = 16


class EngineProcesses(EngineSuite):
    """A producer in a process of its own."""

    @promise(Level.L1, "Bytes arrive from another process", requires=(Capability.PROCESSES,))
    def test_bytes_arrive_from_another_process(self, bench: EngineBench, pair: Pair) -> None:
        peer = bench.peer()
        source, target = peer.memory(5 * MIB + 3, seed=1), bench.memory(pair.consumer, 5 * MIB + 3)
        content = pattern(1, source.nbytes)
        for offset, nbytes in ((0, source.nbytes), (12_345, 4097), (source.nbytes - 1, 1), (0, 1)):
            ctypes.memset(target.base, CANARY, target.nbytes)
            deliver(pair.consumer, peer.address, source, source.base + offset, target.base, nbytes)
            same(target.base, content[offset : offset + nbytes], f"{nbytes} bytes from another process")
            rest = bytes([CANARY]) * (target.nbytes - nbytes)
            same(target.base + nbytes, rest, "memory behind the destination")
        peer.process.do("fill", name="pool", seed=2)
        deliver(pair.consumer, peer.address, source, source.base, target.base, source.nbytes)
        same(target.base, pattern(2, source.nbytes), "bytes that another process wrote after a first read")

    @promise(Level.L1, "Reads from two processes do not swap their bytes", requires=(Capability.PROCESSES,))
    def test_two_processes_are_told_apart(self, bench: EngineBench, pair: Pair) -> None:
        peers = [bench.peer(), bench.peer()]
        sources = [peer.memory(MIB, seed=11 + n) for n, peer in enumerate(peers)]
        target = bench.memory(pair.consumer, 8 * MIB)
        for n in range(2):  # first contact
            deliver(pair.consumer, peers[n].address, sources[n], sources[n].base, target.base, 1)
        reads = [
            pair.consumer.read(peers[n % 2].address, sources[n % 2], sources[n % 2].base, target.base + n * MIB, MIB)
            for n in range(8)
        ]
        for n, operation in enumerate(reads):
            if ended(operation) is OperationState.FAILED:
                deliver(
                    pair.consumer, peers[n % 2].address, sources[n % 2], sources[n % 2].base, target.base + n * MIB, MIB
                )
        for n in range(8):
            same(target.base + n * MIB, pattern(11 + n % 2, MIB), f"a read from process {n % 2 + 1} of two")

    @promise(Level.L1, "What another process released cannot be read any more", requires=(Capability.PROCESSES,))
    def test_what_another_process_released_cannot_be_read(self, bench: EngineBench) -> None:
        peer, consumer = bench.peer(), bench.engine()
        source, target = peer.memory(MIB, seed=21), bench.memory(consumer, MIB)
        peer.process.do("release", name="pool")
        operation = consumer.read(peer.address, source, source.base, target.base, MIB)
        assert ended(operation) is OperationState.FAILED, "memory that another process released was read"
        untouched(target, "a read of released memory")

    @promise(
        Level.L3,
        "When the peer is killed in the middle, reads end: whole, or failed with a typed reason",
        requires=(Capability.PROCESSES,),
    )
    def test_a_peer_killed_in_the_middle_ends_its_reads(self, bench: EngineBench) -> None:
        peer, consumer = bench.peer(), bench.engine()
        source, target = peer.memory(_POOL, seed=31), bench.memory(consumer, _POOL)
        content, size = pattern(31, _POOL), _POOL // _PIECES
        deliver(consumer, peer.address, source, source.base, target.base, 1)
        ctypes.memset(target.base, CANARY, _POOL)
        reads = [
            consumer.read(peer.address, source, source.base + n * size, target.base + n * size, size)
            for n in range(_PIECES)
        ]
        ended(reads[0])
        peer.process.kill()
        for n, operation in enumerate(reads):
            if ended(operation) is OperationState.DONE:
                same(target.base + n * size, content[n * size : (n + 1) * size], "a read whose peer was killed")
        ctypes.memset(target.base, CANARY, _POOL)
        threading.Event().wait(0.3)
        untouched(target, "a read that had ended, from a killed peer,")
        later = consumer.read(peer.address, source, source.base, target.base, MIB)
        if ended(later) is OperationState.DONE:
            same(target.base, content[:MIB], "a read begun after the peer's death")

    @promise(
        Level.L3,
        "When the peer falls silent, reads end by the engine's own deadline, and late bytes never land",
        requires=(Capability.PROCESSES,),
    )
    def test_a_silent_peer_ends_its_reads_and_writes_nothing_late(self, bench: EngineBench) -> None:
        peer, consumer = bench.peer(), bench.engine()
        source, target = peer.memory(_POOL, seed=41), bench.memory(consumer, _POOL)
        content, size = pattern(41, _POOL), _POOL // 4
        deliver(consumer, peer.address, source, source.base, target.base, 1)
        ctypes.memset(target.base, CANARY, _POOL)
        reads = [
            consumer.read(peer.address, source, source.base + n * size, target.base + n * size, size) for n in range(4)
        ]
        peer.process.stop()
        for n, operation in enumerate(reads):
            if ended(operation) is OperationState.DONE:
                same(target.base + n * size, content[n * size : (n + 1) * size], "a read whose peer fell silent")
        ctypes.memset(target.base, CANARY, _POOL)
        peer.process.go_on()
        threading.Event().wait(0.5)
        untouched(target, "a read that had ended")
        deliver(consumer, peer.address, source, source.base, target.base, MIB)
        same(target.base, content[:MIB], "a read after the peer went on")

    @promise(Level.L3, "One peer's death disturbs no read from another", requires=(Capability.PROCESSES,))
    def test_a_peers_death_does_not_disturb_reads_from_another(self, bench: EngineBench, pair: Pair) -> None:
        doomed, healthy = bench.peer(), bench.peer()
        gone, source = doomed.memory(8 * MIB, seed=51), healthy.memory(8 * MIB, seed=52)
        targets = [bench.memory(pair.consumer, 8 * MIB) for _ in range(2)]
        deliver(pair.consumer, doomed.address, gone, gone.base, targets[0].base, 1)
        under_way = pair.consumer.read(doomed.address, gone, gone.base, targets[0].base, gone.nbytes)
        doomed.process.kill()
        for _ in range(3):
            ctypes.memset(targets[1].base, CANARY, source.nbytes)
            deliver(pair.consumer, healthy.address, source, source.base, targets[1].base, source.nbytes)
            same(targets[1].base, pattern(52, source.nbytes), "a read from a healthy peer")
        ended(under_way)

    @promise(
        Level.L3,
        "What a killed process left in shared memory is gone after the next start",
        requires=(Capability.PROCESSES,),
    )
    def test_a_killed_owner_leaves_nothing_after_the_next_start(self, bench: EngineBench) -> None:
        before = bench.names()
        peer = bench.peer()
        for n in range(3):
            peer.memory(MIB, seed=n, name=f"pool-{n}")
        peer.process.kill()
        engine = bench.engine()
        region = engine.allocate(MIB)
        engine.release(region)
        engine.close()
        left = set(bench.names()) - set(before)
        assert not left, f"a killed process's shared memory is still there: {sorted(left)}"
