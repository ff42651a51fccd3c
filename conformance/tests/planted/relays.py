"""Relays with one fault each, as targets, and which test of the suite must catch each.

Importable as ``planted.relays:LastPutWins``, also in the processes that the suite starts.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from moonrelay.clock import Deadline
from moonrelay.config import StoreConfig
from moonrelay.errors import CapacityError, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay
from moonrelay.relay.local import LocalRelay, _name_of
from moonrelay.relay.memory import MemoryRelay
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.targets.parts import RelayGround, RelayTarget, declared
from moonrelay_conformance.targets.relays import FolderGround, MemoryGround


class PlantedRelay(RelayTarget):
    """A faulty relay of one process, as a target."""

    relay: ClassVar[type[Relay]]

    def __init__(self) -> None:
        self.name = type(self).__name__

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(Capability.LISTING, Capability.CAPACITY)

    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        return MemoryGround(MemoryRelay(StoreConfig(capacity_bytes=capacity_bytes)))

    def make(self, url: str, *, capacity_bytes: int, namespace: str) -> Relay:
        return self.relay(StoreConfig(url=url, capacity_bytes=capacity_bytes, namespace=namespace))


class PlantedFolder(PlantedRelay):
    """A faulty relay in a folder, as a target."""

    def capabilities(self) -> Mapping[Capability, Support]:
        return declared(Capability.PROCESSES, Capability.DURABLE, Capability.LISTING, Capability.CAPACITY)

    def ground(self, folder: Path, *, capacity_bytes: int) -> RelayGround:
        return FolderGround("local", folder, frozenset({"lock"}))


class _LastWins(MemoryRelay):
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        if key and self._objects is not None:
            self.remove([key], deadline)
        super().put(key, parts, deadline, on_quiet=on_quiet)


class LastPutWins(PlantedRelay):
    """A second put takes the first one's place."""

    relay = _LastWins


class _OwnValue(MemoryRelay):
    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        super().put_if_absent(key, value, deadline)
        return value


class TellsEverybodyTheyWon(PlantedRelay):
    """Whoever puts a value is told that it stands."""

    relay = _OwnValue


class _TrueOnAbsent(MemoryRelay):
    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        super().get(key, parts, deadline, on_quiet=on_quiet)
        return True


class TrueOnAbsent(PlantedRelay):
    """An object that is not there was read."""

    relay = _TrueOnAbsent


class _ZeroesFirst(MemoryRelay):
    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        for part in parts:
            if part.address:
                ctypes.memset(part.address, 0, part.nbytes)
        return super().get(key, parts, deadline, on_quiet=on_quiet)


class ClearsBeforeItLooks(PlantedRelay):
    """Memory is written before it is known that there is an object."""

    relay = _ZeroesFirst


class _NeverQuiet(MemoryRelay):
    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        found = super().get(key, parts, deadline)
        if on_quiet is not None:
            on_quiet()
        return found


class NotQuietAfterAFailure(PlantedRelay):
    """A get that fails does not say that memory is quiet."""

    relay = _NeverQuiet


class _QuietTwice(MemoryRelay):
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        super().put(key, parts, deadline, on_quiet=on_quiet)
        if on_quiet is not None:
            on_quiet()


class QuietTwice(PlantedRelay):
    """A put says twice that memory is quiet."""

    relay = _QuietTwice


class _Evicting(MemoryRelay):
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        try:
            super().put(key, parts, deadline, on_quiet=on_quiet)
        except CapacityError:
            self.remove(self.keys("", deadline)[:1], deadline)
            raise


class EvictsWhenFull(PlantedRelay):
    """A full store refuses, and drops an object."""

    relay = _Evicting


class _Reversed(MemoryRelay):
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        super().put(key, list(reversed(parts)), deadline, on_quiet=on_quiet)


class PartsInTheWrongOrder(PlantedRelay):
    """The last part is stored first."""

    relay = _Reversed


class _AnySize(MemoryRelay):
    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        value = None if self._objects is None else self._objects.by_key.get(key)
        if value is not None and parts and parts[0].nbytes < len(value) and len(parts) == 1:
            ctypes.memmove(parts[0].address, value, parts[0].nbytes)
            if on_quiet is not None:
                on_quiet()
            return True
        return super().get(key, parts, deadline, on_quiet=on_quiet)


class AnySizeWillDo(PlantedRelay):
    """Of a larger object the beginning is read."""

    relay = _AnySize


class _NotAtomic(MemoryRelay):
    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        standing = self.get_bytes(key, deadline)
        if standing is not None:
            return standing
        threading.Event().wait(0.002)
        self.remove([key], deadline)
        return super().put_if_absent(key, value, deadline)


class LooksThenPuts(PlantedRelay):
    """Between the look and the put of a value somebody else may put one."""

    relay = _NotAtomic


class _StoresLate(MemoryRelay):
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        late = deadline.expired
        super().put(key, parts, Deadline(10.0, deadline.clock) if late else deadline, on_quiet=on_quiet)
        if late:
            message = "too late"
            raise TransferTimeout(message)


class StoresAfterTheDeadline(PlantedRelay):
    """A put that was too late is stored."""

    relay = _StoresLate


class _Tombstones(MemoryRelay):
    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        keys = list(keys)
        super().remove(keys, deadline)
        for key in keys:
            self.put_if_absent(f"{key}.gone", b"x", deadline)


class LeavesTombstones(PlantedRelay):
    """Each removed key leaves an object."""

    relay = _Tombstones


class _Forgetting(MemoryRelay):
    def close(self) -> None:
        if self._objects is not None:
            with self._objects.lock:
                self._objects.by_key.clear()
                self._objects.used = 0
        super().close()


class ForgetsOnClose(PlantedRelay):
    """What was stored goes with the relay."""

    relay = _Forgetting


class _Folders(MemoryRelay):
    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        folder = prefix if prefix.endswith("/") or not prefix else f"{prefix}/"
        return super().keys(folder, deadline)


class ListsFolders(PlantedRelay):
    """A prefix is taken for a folder."""

    relay = _Folders


class _Two(MemoryRelay):
    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        several = list(dict.fromkeys(keys))
        super().remove(several[:2] if len(several) == 3 else several, deadline)


class RemovesTwoOfThree(PlantedRelay):
    """Of three keys that are removed together one stays."""

    relay = _Two


class _InPlace(LocalRelay):
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        content = b"".join(ctypes.string_at(part.address, part.nbytes) for part in parts)
        path = self._started().objects / _name_of(key)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, len(content))
            os.pwrite(fd, content[: len(content) // 2], 0)
            threading.Event().wait(0.05)
            os.pwrite(fd, content[len(content) // 2 :], len(content) // 2)
        finally:
            os.close(fd)
            if on_quiet is not None:
                on_quiet()


class WritesInPlace(PlantedFolder):
    """An object can be read while it is written, and half written when its writer is killed."""

    relay = _InPlace


class _OwnProcess(LocalRelay):
    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self._seen: dict[str, bytes] = {}

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        if key in self._seen:
            return self._seen[key]
        super().put_if_absent(key, value, deadline)
        return self._seen.setdefault(key, value)


class KnowsItsOwnProcessOnly(PlantedFolder):
    """Of processes that race for a value, each is told that it won."""

    relay = _OwnProcess


#: The test that must catch each.
CAUGHT_BY: dict[str, str] = {
    "LastPutWins": "test_a_key_is_used_once",
    "TellsEverybodyTheyWon": "test_the_first_small_value_stands",
    "TrueOnAbsent": "test_an_absent_object_is_false_and_touches_nothing",
    "ClearsBeforeItLooks": "test_an_absent_object_is_false_and_touches_nothing",
    "NotQuietAfterAFailure": "test_quiet_is_said_exactly_once",
    "QuietTwice": "test_quiet_is_said_exactly_once",
    "EvictsWhenFull": "test_a_full_store_refuses_and_keeps_what_it_has",
    "PartsInTheWrongOrder": "test_an_object_comes_back_however_it_is_cut",
    "AnySizeWillDo": "test_another_size_than_the_objects_is_refused",
    "LooksThenPuts": "test_threads_racing_for_a_value_have_one_winner",
    "StoresAfterTheDeadline": "test_a_deadline_in_the_past_is_a_timeout_and_leaves_nothing",
    "LeavesTombstones": "test_fifty_cycles_leave_nothing",
    "ForgetsOnClose": "test_close_is_idempotent_and_what_was_stored_stays",
    "ListsFolders": "test_keys_are_listed_by_prefix",
    "RemovesTwoOfThree": "test_the_store_equals_a_dictionary",
    "WritesInPlace": "test_a_killed_writers_objects_are_whole_or_absent",
    "KnowsItsOwnProcessOnly": "test_processes_racing_for_a_value_have_one_winner",
}
