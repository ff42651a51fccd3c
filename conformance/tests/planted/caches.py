"""Caches with one fault each, as targets, and which test of the suite must catch each.

Importable as ``planted.caches:SharesItsHits``, also in the processes that the suite starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moonrelay.cache.embeddings import Connector, EmbeddingCache, _Ask, _Found
from moonrelay.cache.entry import HEADER_BYTES, Packed, Unusable, unpack
from moonrelay.cache.flight import Lead, SingleFlight
from moonrelay.cache.keys import EmbeddingKey, IncompleteKey
from moonrelay_conformance.targets.caches import CacheTarget


class PlantedCache(CacheTarget):
    """A faulty cache over the relay of one process, as a target."""

    cache: ClassVar[type[EmbeddingCache]] = EmbeddingCache
    backend: ClassVar[str] = "memory"

    def __init__(self, relay: str = "") -> None:
        super().__init__(relay or self.backend)
        self.name = type(self).__name__

    def make(self, conn: Connector, capacity_bytes: int, **settings: Any) -> EmbeddingCache:
        return self.cache(conn, capacity_bytes, **settings)


class PlantedAcross(PlantedCache):
    """A faulty cache over the relay in a folder, as a target."""

    backend = "local"


# -- keys ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Digest:
    digest: str
    label: Mapping[str, str]


def _key(**fields: Any) -> Any:
    """Return a key that says what it is given, and refuses nothing."""
    return _Digest(hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest(), {"role": "?"})


class ForgetsTheRole(PlantedCache):
    """A negative prompt is given what the positive one of the same words was."""

    def key(self, **fields: Any) -> EmbeddingKey:
        return super().key(**{**fields, "role": "positive"})


class ForgetsScales(PlantedCache):
    """A LoRA's scale is not part of the key."""

    def key(self, **fields: Any) -> EmbeddingKey:
        params = fields["params"]
        if isinstance(params.get("lora"), dict):
            params = {**params, "lora": dict.fromkeys(params["lora"], 1.0)}
        return super().key(**{**fields, "params": params})


class StaleRevision(PlantedCache):
    """After an update of the weights what the old ones made is given."""

    def key(self, **fields: Any) -> EmbeddingKey:
        if isinstance(fields["encoder"], str) and "@" in fields["encoder"]:
            fields["encoder"] = fields["encoder"].partition("@")[0] + "@latest"
        return super().key(**fields)


class StaleLora(PlantedCache):
    """Only the encoder's own revision counts."""

    def key(self, **fields: Any) -> EmbeddingKey:
        params = fields["params"]
        if isinstance(params.get("lora"), dict):
            lora = {f"{name.partition('@')[0]}@any": scale for name, scale in params["lora"].items()}
            params = {**params, "lora": lora}
        return super().key(**{**fields, "params": params})


class GuessesWhatItLacks(PlantedCache):
    """A key that is not complete is made all the same."""

    def key(self, **fields: Any) -> EmbeddingKey:
        try:
            return super().key(**fields)
        except IncompleteKey:
            guessed: EmbeddingKey = _key(**fields)
            return guessed


class _Short(EmbeddingCache):
    def _ask(self, key: Any, device: Any, request_id: str | None) -> _Ask:
        return super()._ask(_Digest(key.digest[:16] + "0" * 48, key.label), device, request_id)


class LooksAtTheBeginning(PlantedCache):
    """Entries are told apart by the first digits only."""

    cache = _Short


class DiffersByProcess(PlantedAcross):
    """A key has something of the process in it."""

    def key(self, **fields: Any) -> EmbeddingKey:
        return super().key(**{**fields, "template": [fields.get("template"), hash("moonrelay")]})


# -- hits ----------------------------------------------------------------------------------------------------------


class _Sharing(EmbeddingCache):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._trees: dict[str, object] = {}

    def _find_in_memory(self, ask: _Ask) -> _Found | None:
        found = super()._find_in_memory(ask)
        return None if found is None else _Found(self._trees.setdefault(ask.digest, found.tree))


class SharesItsHits(PlantedCache):
    """Every hit of a process is the same object."""

    cache = _Sharing


class _Aliasing(EmbeddingCache):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._made: dict[str, object] = {}

    def _encode(self, ask: _Ask, encode: Callable[[], object]) -> object:
        self._made[ask.digest] = super()._encode(ask, encode)
        return self._made[ask.digest]

    def _find_in_memory(self, ask: _Ask) -> _Found | None:
        found = super()._find_in_memory(ask)
        return found if found is None or ask.digest not in self._made else _Found(self._made[ask.digest])


class KeepsTheEncodersOwn(PlantedCache):
    """What the encoder gave is kept, not a snapshot."""

    cache = _Aliasing


class _Trusting(EmbeddingCache):
    """Takes the bytes as they are: makes the checks agree with them."""

    check_key: ClassVar[bool] = True

    def _find_in_store(self, ask: _Ask) -> _Found | None:
        store = self._serving()
        try:
            hit = None if store is None else store.entries.get(ask.digest, self._soon(3.0))
            return None if hit is None else _Found(self._believed(bytearray(hit.data), ask))
        except Exception:
            return super()._find_in_store(ask)

    def _believed(self, data: bytearray, ask: _Ask) -> object:
        from moonrelay.cache import entry

        if self.check_key and data[24:56].hex() != ask.digest:
            message = "another key's"
            raise Unusable(message)
        data[24:56] = bytes.fromhex(ask.digest)
        data[HEADER_BYTES - 16 : HEADER_BYTES] = entry._content_digest(data)
        return unpack(data, ask.digest)


class ServesDamage(PlantedCache):
    """An entry's digest is not looked at."""

    cache = _Trusting


class _AnyKey(_Trusting):
    check_key = False


class ServesAnotherKeys(PlantedCache):
    """Whatever is found under a key is taken for its own."""

    cache = _AnyKey


class _Swallowing(EmbeddingCache):
    def _encode(self, ask: _Ask, encode: Callable[[], object]) -> object:
        try:
            return super()._encode(ask, encode)
        except Exception as exc:
            raise RuntimeError(str(exc)) from exc


class WrapsTheEncodersError(PlantedCache):
    """What an encoder raises arrives as something else."""

    cache = _Swallowing


class _Uncounted(EmbeddingCache):
    def _hit(self, ask: _Ask, path: str, nbytes: int) -> None:
        super()._hit(ask, "memory", nbytes)


class CountsEveryHitAsMemory(PlantedCache):
    """A hit in the store is counted as one in memory."""

    cache = _Uncounted


# -- trouble -------------------------------------------------------------------------------------------------------


class _Raising(EmbeddingCache):
    def _store_fails(self, error: Any, ask: Any) -> None:
        super()._store_fails(error, ask)
        raise error


class FailsWithItsStore(PlantedCache):
    """A store that is gone fails the request."""

    cache = _Raising


class _NeverAgain(EmbeddingCache):
    def _store_fails(self, error: Any, ask: Any) -> None:
        super()._store_fails(error, ask)
        self._use_shared = False


class NeverUsesTheStoreAgain(PlantedCache):
    """After trouble the store is left alone for good."""

    cache = _NeverAgain


# -- flights -------------------------------------------------------------------------------------------------------


class _Everybody(EmbeddingCache):
    def _take_turn(self, ask: _Ask) -> _Found | Lead | None:
        return None


class TwoEncoders(PlantedCache):
    """Whoever misses encodes."""

    cache = _Everybody


class _OwnOnly(EmbeddingCache):
    def _take_turn(self, ask: _Ask) -> _Found | Lead | None:
        return self._queue(ask, self._alone)


class OneEncoderPerCache(PlantedCache):
    """Threads take turns, processes do not."""

    cache = _OwnOnly


class OneEncoderPerProcess(PlantedAcross):
    """Threads take turns, processes do not."""

    cache = _OwnOnly


class _Waiting(EmbeddingCache):
    def _queue(self, ask: _Ask, flight: SingleFlight) -> _Found | Lead | None:
        self._wait_s = 40.0
        return super()._queue(ask, flight)


class WaitsBeyondItsDeadline(PlantedCache):
    """A slow encoder keeps everybody."""

    cache = _Waiting


class _NoTakeover(EmbeddingCache):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "dead_after_s": 1000.0, "wait_s": 3.0})


class WaitsForTheDead(PlantedAcross):
    """Nobody takes a dead one's place; all who waited encode."""

    cache = _NoTakeover


# -- bounds --------------------------------------------------------------------------------------------------------


class _Unbounded(EmbeddingCache):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if settings.get("store_bytes"):
            self._store_bytes = 1 << 40


class UnboundedStore(PlantedCache):
    """The store's bound is not kept."""

    cache = _Unbounded


class _NoPromotion(EmbeddingCache):
    def _find_in_store(self, ask: _Ask) -> _Found | None:
        store = self._serving()
        if store is None:
            return None
        hit = store.entries.get(ask.digest, self._soon(3.0))
        if hit is None or not hit.ageing:
            return super()._find_in_store(ask)
        return _Found(Packed(ask.digest, hit.data).tree(ask.device))


class OldestFirst(PlantedCache):
    """What was stored first goes first, used or not."""

    cache = _NoPromotion


class _FirstOut(EmbeddingCache):
    def _find_in_memory(self, ask: _Ask) -> _Found | None:
        before = list(self._memory._entries)
        found = super()._find_in_memory(ask)
        for digest in before:
            if digest in self._memory._entries:
                self._memory._entries.move_to_end(digest)
        return found


class MemoryOldestFirst(PlantedCache):
    """In memory what came first goes first, used or not."""

    cache = _FirstOut


class _LeavesRecords(EmbeddingCache):
    def clear(self) -> None:
        self._memory.clear()
        store = self._serving()
        if store is not None:
            for one in list(store.entries.entries(self._soon(10.0))):
                store.entries.forget(one.digest, self._soon(10.0))


class ClearsTheRecordsOnly(PlantedCache):
    """After a clear nothing is found, and the objects stay."""

    cache = _LeavesRecords


class _LeavesMemory(EmbeddingCache):
    def clear(self) -> None:
        store = self._serving()
        if store is not None:
            store.entries.clear(self._soon(10.0))


class ClearsTheStoreOnly(PlantedCache):
    """After a clear memory still has everything."""

    cache = _LeavesMemory


#: The test that must catch each.
CAUGHT_BY: dict[str, str] = {
    "ForgetsTheRole": "test_every_field_of_the_key_separates",
    "ForgetsScales": "test_every_field_of_the_key_separates",
    "StaleRevision": "test_another_revision_is_a_miss",
    "StaleLora": "test_another_revision_is_a_miss",
    "GuessesWhatItLacks": "test_an_incomplete_key_caches_nothing",
    "LooksAtTheBeginning": "test_keys_that_differ_in_one_digit_are_two",
    "DiffersByProcess": "test_every_process_makes_the_same_key",
    "SharesItsHits": "test_a_hit_is_the_callers_own",
    "KeepsTheEncodersOwn": "test_a_hit_is_the_callers_own",
    "ServesDamage": "test_a_damaged_entry_is_a_miss",
    "ServesAnotherKeys": "test_an_entry_of_another_key_is_never_given",
    "WrapsTheEncodersError": "test_an_encoders_error_is_the_callers",
    "CountsEveryHitAsMemory": "test_counters_and_events_say_what_happened",
    "FailsWithItsStore": "test_a_store_that_is_gone_fails_no_request",
    "NeverUsesTheStoreAgain": "test_the_store_is_used_again_after_trouble",
    "TwoEncoders": "test_threads_that_ask_at_once_encode_once",
    "OneEncoderPerCache": "test_two_caches_that_are_asked_at_once_encode_once",
    "OneEncoderPerProcess": "test_processes_that_ask_at_once_encode_once",
    "WaitsBeyondItsDeadline": "test_a_slow_encoder_keeps_nobody_beyond_the_deadline",
    "WaitsForTheDead": "test_a_killed_encoder_is_replaced_by_one",
    "UnboundedStore": "test_the_store_stays_within_its_bound",
    "OldestFirst": "test_a_used_entry_outlives_unused_ones",
    "MemoryOldestFirst": "test_memory_is_bounded_and_the_least_recently_used_goes_first",
    "ClearsTheRecordsOnly": "test_a_clear_leaves_nothing",
    "ClearsTheStoreOnly": "test_a_clear_leaves_nothing",
}
