"""Engines with one fault each, as targets, and which test of the suite must catch each.

Importable as ``planted.engines:ReadsShort``, also in the processes that the suite starts.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from moonrelay.config import TransferConfig
from moonrelay.errors import MoonrelayError, TransferFailed
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay.transfer.mapping import map_memory
from moonrelay.transfer.memory import _PEERS, MemoryEngine
from moonrelay.transfer.operations import Finished
from moonrelay.transfer.shm import ShmEngine
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.parts import EngineTarget, declared


class PlantedEngine(EngineTarget):
    """A faulty engine of one process, as a target."""

    engine: ClassVar[type[TransferEngine]]

    def __init__(self) -> None:
        self.name = type(self).__name__

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(Capability.FOREIGN_MEMORY, Capability.LIVES)

    def config(self, folder: Path, **changes: object) -> TransferConfig:
        settings: dict[str, Any] = {"engine": "memory", **changes}
        return TransferConfig(**settings)

    def make(self, config: TransferConfig) -> TransferEngine:
        return self.engine(config)


class PlantedShm(PlantedEngine):
    """A faulty engine of one host, as a target."""

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(Capability.PROCESSES, Capability.LIVES)

    def config(self, folder: Path, **changes: object) -> TransferConfig:
        return super().config(folder, options={"directory": str(folder)}, **changes)

    def memory_names(self, folder: Path) -> tuple[str, ...]:
        return tuple(sorted(path.name for path in folder.iterdir()))


class _Short(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        return super().read(peer, region, remote_address, local_address, nbytes - 1 if nbytes > 4096 else nbytes)


class ReadsShort(PlantedEngine):
    """The last byte of a large read does not come."""

    engine = _Short


class _Past(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        rounded = -(-nbytes // 8) * 8
        fits = remote_address + rounded <= region.base + region.nbytes
        return super().read(peer, region, remote_address, local_address, rounded if fits else nbytes)


class WritesPastTheEnd(PlantedEngine):
    """Sizes are rounded up to words."""

    engine = _Past


class _Waiting(Operation):
    """A read that is made when it is polled, unless a later one of the same size took its source."""

    def __init__(self, engine: _Swapping, arguments: list[Any]) -> None:
        self.arguments = arguments
        self._engine = engine
        self._end: Operation | None = None

    @property
    def error(self) -> MoonrelayError | None:
        return None if self._end is None else self._end.error

    def poll(self) -> OperationState:
        if self._end is None:
            self._end = self._engine.settle(self)
        return self._end.poll()


class _Swapping(MemoryEngine):
    def __init__(self, config: TransferConfig) -> None:
        super().__init__(config)
        self._waiting: list[_Waiting] = []

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        self.address  # noqa: B018 - raises where the engine was not started
        self._waiting.append(_Waiting(self, [peer, region, remote_address, local_address, nbytes]))
        return self._waiting[-1]

    def settle(self, operation: _Waiting) -> Operation:
        self._waiting.remove(operation)
        for other in self._waiting:
            if other.arguments[4] == operation.arguments[4]:
                mine, theirs = operation.arguments, other.arguments
                mine[:3], theirs[:3] = theirs[:3], mine[:3]
                break
        return super().read(*operation.arguments)


class SwapsTwo(PlantedEngine):
    """Of two reads of one size that are in flight, each gets the other's bytes."""

    engine = _Swapping


def _again(address: int, content: bytes, keep: object, *, every_s: float = 0.03, times: int = 60) -> None:
    """Write late, and late again; ``keep`` keeps the memory mapped meanwhile."""

    def write() -> None:
        for _ in range(times):
            threading.Event().wait(every_s)
            ctypes.memmove(address, content, len(content))
        del keep_alive[:]

    keep_alive = [keep]
    threading.Thread(target=write, name="late", daemon=True).start()


class _Early(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        if nbytes < 1 << 20:
            return super().read(peer, region, remote_address, local_address, nbytes)
        operation = super().read(peer, region, remote_address, local_address, nbytes - 4096)
        rest = ctypes.string_at(remote_address + nbytes - 4096, 4096)
        _again(local_address + nbytes - 4096, rest, list(self._mapped.values()), times=1)
        return operation


class DoneTooEarly(PlantedEngine):
    """A large read is done before its last page is there."""

    engine = _Early


class _Caching(MemoryEngine):
    def __init__(self, config: TransferConfig) -> None:
        super().__init__(config)
        self._cache: dict[tuple[object, ...], bytes] = {}

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        key = (peer.nonce, region.key, remote_address, nbytes)
        if key in self._cache:
            ctypes.memmove(local_address, self._cache[key], nbytes)
            return Finished()
        operation = super().read(peer, region, remote_address, local_address, nbytes)
        if operation.poll() is OperationState.DONE:
            self._cache[key] = ctypes.string_at(local_address, nbytes)
        return operation


class KeepsOldBytes(PlantedEngine):
    """The same range is read once only."""

    engine = _Caching


class _Clamping(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        first = max(remote_address, region.base)
        last = min(remote_address + nbytes, region.base + region.nbytes)
        if last <= first:
            return super().read(peer, region, remote_address, local_address, nbytes)
        return super().read(peer, region, first, local_address, last - first)


class ReadsWhatThereIs(PlantedEngine):
    """A range that reaches over the region's end is cut to it, and done."""

    engine = _Clamping


class _Serving(MemoryEngine):
    def release(self, region: Region) -> None:
        """Give nothing back."""


class ServesReleased(PlantedEngine):
    """Released memory can still be read."""

    engine = _Serving


class _AnyLife(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        for nonce, engine in list(_PEERS.items()):
            if engine.address.address == peer.address:
                peer = EngineAddress(engine=peer.engine, address=peer.address, nonce=nonce)
        return super().read(peer, region, remote_address, local_address, nbytes)


class AnyLife(PlantedEngine):
    """A peer is known by its address, whatever the nonce."""

    engine = _AnyLife


class _Fickle(Operation):
    def __init__(self, inner: Operation) -> None:
        self._inner = inner
        self._polls = 0

    @property
    def error(self) -> MoonrelayError | None:
        return self._inner.error

    def poll(self) -> OperationState:
        self._polls += 1
        state = self._inner.poll()
        return OperationState.RUNNING if self._polls > 5 and state is OperationState.DONE else state


class _ChangingItsMind(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        return _Fickle(super().read(peer, region, remote_address, local_address, nbytes))


class ChangesItsMind(PlantedEngine):
    """A read that was done runs again."""

    engine = _ChangingItsMind


class _Hanging(Operation):
    def poll(self) -> OperationState:
        return OperationState.RUNNING


class _Patient(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        operation = super().read(peer, region, remote_address, local_address, nbytes)
        return operation if peer.nonce in _PEERS else _Hanging()


class WaitsForTheDead(PlantedEngine):
    """A read from a closed peer never ends."""

    engine = _Patient


class _LateFailure(Operation):
    """Fails at once, although the bytes still come."""

    @property
    def error(self) -> MoonrelayError | None:
        return TransferFailed("gave up")

    def poll(self) -> OperationState:
        return OperationState.FAILED


class _LateAfterAbandon(Finished):
    def __init__(self, inner: Operation, local_address: int, nbytes: int, keep: object) -> None:
        super().__init__(inner.error)
        self._late = (local_address, ctypes.string_at(local_address, nbytes), keep)

    def abandon(self) -> None:
        _again(*self._late)


class _Late(MemoryEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        operation = super().read(peer, region, remote_address, local_address, nbytes)
        return _LateAfterAbandon(operation, local_address, nbytes, list(self._mapped.values()))


class WritesAfterTheEnd(PlantedEngine):
    """A read that was given up has ended, and writes."""

    engine = _Late


class _LateShm(ShmEngine):
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        operation = super().read(peer, region, remote_address, local_address, nbytes)
        if nbytes <= 1 << 20:
            return operation
        keep = [segment.mapping for segment in self._segments.values()]
        _again(local_address, ctypes.string_at(local_address, nbytes), keep, times=100)
        return _LateFailure()


class LateBytes(PlantedShm):
    """Large reads fail, and their bytes land afterwards."""

    engine = _LateShm


class _Untidy(ShmEngine):
    def start(self) -> None:
        from moonrelay.transfer import shm

        sweep, shm.sweep_orphans = shm.sweep_orphans, lambda _directory: []
        try:
            super().start()
        finally:
            shm.sweep_orphans = sweep


class LeavesTheDeadsMemory(PlantedShm):
    """A start does not clear what a killed process left."""

    engine = _Untidy


class _Leaking(MemoryEngine):
    def __init__(self, config: TransferConfig) -> None:
        super().__init__(config)
        self._kept: list[object] = []

    def release(self, region: Region) -> None:
        self._kept.append(self._mapped.get(region.key))
        super().release(region)


class LeaksMappings(PlantedEngine):
    """Released memory stays mapped."""

    engine = _Leaking


class _Descriptors(MemoryEngine):
    def __init__(self, config: TransferConfig) -> None:
        super().__init__(config)
        self._fds: list[int] = []

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        self._fds.append(os.open(os.devnull, os.O_RDONLY))
        return super().read(peer, region, remote_address, local_address, nbytes)

    def close(self) -> None:
        super().close()
        while self._fds:
            os.close(self._fds.pop())


class LeaksDescriptors(PlantedEngine):
    """Each read leaves a descriptor."""

    engine = _Descriptors


class _Open(MemoryEngine):
    def allocate(self, nbytes: int) -> Region:
        if not self._closed:
            return super().allocate(nbytes)
        mapping = map_memory(nbytes)
        self._mapped["late"] = mapping
        return Region(key="late", base=mapping.address, nbytes=nbytes)


class WorksAfterClose(PlantedEngine):
    """A closed engine allocates."""

    engine = _Open


class _OneStage(MemoryEngine):
    _stage = b""

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        operation = super().read(peer, region, remote_address, local_address, nbytes)
        if operation.poll() is OperationState.DONE:
            self._stage = ctypes.string_at(remote_address, nbytes)
            threading.Event().wait(0.001)
            ctypes.memmove(local_address, self._stage, min(nbytes, len(self._stage)))
        return operation


class MixesThreads(PlantedEngine):
    """All threads read through one buffer."""

    engine = _OneStage


class _Overlapping(MemoryEngine):
    def register(self, address: int, nbytes: int) -> Region:
        if nbytes > 0:
            for region, mapping in list(self._served.values()):
                if region.base == address and mapping is None:
                    return region
        return super().register(address, nbytes)


class RegistersTwice(PlantedEngine):
    """Memory that is registered is registered again."""

    engine = _Overlapping


class _OtherError(MemoryEngine):
    def allocate(self, nbytes: int) -> Region:
        if nbytes > 1 << 50:
            message = "no"
            raise TransferFailed(message)
        return super().allocate(nbytes)


class WrongNameForFull(PlantedEngine):
    """Memory that is not there is refused by another name."""

    engine = _OtherError


#: The test that must catch each.
CAUGHT_BY: dict[str, str] = {
    "ReadsShort": "test_a_read_brings_exactly_the_range",
    "WritesPastTheEnd": "test_nothing_outside_the_destination_is_written",
    "SwapsTwo": "test_reads_in_flight_do_not_swap_their_bytes",
    "DoneTooEarly": "test_the_bytes_are_there_when_a_read_is_done",
    "KeepsOldBytes": "test_a_second_read_sees_what_was_written_meanwhile",
    "ReadsWhatThereIs": "test_a_range_outside_the_region_is_refused",
    "ServesReleased": "test_what_was_released_cannot_be_read",
    "AnyLife": "test_another_lifes_nonce_is_refused",
    "ChangesItsMind": "test_an_ended_reads_answer_does_not_change",
    "WaitsForTheDead": "test_a_closed_peer_is_a_failure_and_no_hang",
    "WritesAfterTheEnd": "test_an_abandoned_read_ends_and_is_quiet",
    "LateBytes": "test_a_silent_peer_ends_its_reads_and_writes_nothing_late",
    "LeavesTheDeadsMemory": "test_a_killed_owner_leaves_nothing_after_the_next_start",
    "LeaksMappings": "test_fifty_allocations_leave_nothing",
    "LeaksDescriptors": "test_a_hundred_reads_leave_nothing",
    "WorksAfterClose": "test_nothing_works_after_close",
    "MixesThreads": "test_threads_reading_at_once_get_their_own_bytes",
    "RegistersTwice": "test_overlapping_registrations_are_refused",
    "WrongNameForFull": "test_memory_beyond_the_system_is_a_capacity_error",
}
