"""The tier in the relay: entries that every process may read, bounded by bytes, the least recently used out first.

Owns what is kept and what goes. What an entry's bytes mean, and whether they are whole, is for ``entry`` to say.

A segmented LRU. Entries go into the newest generation; when its share of the bound is taken the oldest generation is
removed, and then a new one opened, so no more than the bound is ever stored. An entry that is read in an old generation
is put again into the newest. Any step may be the last of the process that does it: what it leaves is named in the log
of a generation, and goes with it. One case is left: a writer that stands still inside its put while all generations
pass, and dies right after it, leaves one entry that only `SharedStore.clear` finds, by listing.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moonrelay.cache.incarnation import Incarnation, Place
from moonrelay.cache.wire import (
    Card,
    Root,
    check_digest,
    check_prefix,
    decoded,
    encoded,
    new_word,
    short_label,
)
from moonrelay.clock import Clock, Deadline
from moonrelay.errors import CapacityError, ConfigError, IntegrityError, MoonrelayError
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay

_log = logging.getLogger(__name__)

#: How long cleaning up after oneself may take.
_CLEAN_UP_S = 2.0
_ATTEMPTS = 3
_MAX_GENERATIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An entry that was found: fresh memory of the caller's own.

    Attributes:
        data: The bytes that were put, not yet checked.
        ageing: Whether it will be evicted soon unless it is promoted.
    """

    data: memoryview
    ageing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEntry:
    """What `SharedStore.entries` tells of one entry."""

    digest: str
    nbytes: int
    label: Mapping[str, str]
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """How full a store is: an upper bound, since what was replaced or given up counts until its generation goes.

    Attributes:
        entries: Places taken.
        nbytes: Bytes charged, the records about the entries included.
        capacity_bytes: The bound that stands.
        generations: How many hold something.
    """

    entries: int
    nbytes: int
    capacity_bytes: int
    generations: int


class SharedStore:
    """Entries by digest in a relay.

    Args:
        relay: A started relay.
        prefix: Prefix of all keys, without a trailing slash, at most 80 characters; nothing else lies under it but the
            flights of `SingleFlight`.
        capacity_bytes: Bound of all bytes, records included. What the first process says stands until `clear`.
        clock: For looking after new generations now and then.
        generations: In how many steps the store forgets.
        on_trouble: Told in one line what was wrong with a record, or why an entry was not kept; logged by default.
        on_evicted: Told how many entries and bytes this process evicted.

    Threads: all methods from any thread; any number of processes at once.
    """

    def __init__(
        self,
        relay: Relay,
        prefix: str,
        capacity_bytes: int,
        clock: Clock,
        *,
        generations: int = 8,
        on_trouble: Callable[[str], None] | None = None,
        on_evicted: Callable[[int, int], None] | None = None,
    ) -> None:
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < 1:
            message = f"capacity_bytes={capacity_bytes!r} must be a whole number above 0"
            raise ConfigError(message, field="capacity_bytes")
        if not 2 <= generations <= _MAX_GENERATIONS:
            message = f"generations={generations!r} must be from 2 to {_MAX_GENERATIONS}"
            raise ConfigError(message, field="generations")
        self._relay = relay
        self._prefix = check_prefix(prefix)
        self._capacity = capacity_bytes
        self._generations = generations
        self._clock = clock
        self._trouble = on_trouble or _complain
        self._on_evicted = on_evicted or _unheard
        self._lock = threading.Lock()
        self._current: Incarnation | None = None

    def get(self, digest: str, deadline: Deadline) -> Hit | None:
        """Read an entry.

        Args:
            digest: Its key's digest, 64 hex digits.
            deadline: When to give up.

        Blocks: two small reads and one of the entry's size, until the deadline at most.

        Returns:
            The bytes in fresh memory; ``None`` when there is no entry, or its records are not readable.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer.
        """
        check_digest(digest)
        for fresh in (False, True):
            life, moved = self._known(deadline, fresh=fresh)
            value = None
            if life is not None and (moved or not fresh):
                value = self._relay.get_bytes(life.card_key(digest), deadline)
            if life is not None and value is not None:
                return self._read(life, digest, value, deadline)
        return None

    def contains(self, digest: str, deadline: Deadline) -> bool:
        """Return whether an entry stands, without reading it. Raises as `get`."""
        check_digest(digest)
        life, _ = self._known(deadline, fresh=True)
        if life is None:
            return False
        value = self._relay.get_bytes(life.card_key(digest), deadline)
        return value is not None and decoded(Card, value) is not None

    def put(
        self,
        digest: str,
        parts: Sequence[Extent],
        nbytes: int,
        label: Mapping[str, str],
        deadline: Deadline,
        *,
        on_quiet: OnQuiet | None = None,
    ) -> bool:
        """Keep an entry, unless it is there already.

        Args:
            digest: Its key's digest, 64 hex digits.
            parts: Its bytes, in host memory that nobody changes until this is quiet.
            nbytes: Their sum.
            label: What `entries` tells of it; cut when long.
            deadline: When to give up.
            on_quiet: Called exactly once when nothing can read ``parts`` any more, see `Relay`.

        Blocks: until stored; a put that opens a generation removes the oldest first.

        Returns:
            Whether the entry stands now. False: it is too large, there is no room, or the store was cleared meanwhile.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer; nothing half is visible.
        """
        quiet = _Quiet(on_quiet)
        try:
            check_digest(digest)
            if nbytes < 1 or nbytes != sum(part.nbytes for part in parts):
                message = f"nbytes={nbytes} must be above 0, and the sum of the parts"
                raise ConfigError(message, field="nbytes")
            return self._put(_Entry(digest, parts, nbytes, short_label(label), False, quiet), deadline)
        finally:
            quiet.leave()

    def promote(self, digest: str, hit: Hit, label: Mapping[str, str], deadline: Deadline) -> bool:
        """Put an ageing entry into the newest generation, one attempt. ``hit.data`` must be whole: check it first.

        Returns:
            Whether it stands there now. Never raises because of the store.
        """
        memory = (ctypes.c_char * hit.data.nbytes).from_buffer(hit.data)
        parts = [Extent(ctypes.addressof(memory), hit.data.nbytes)]
        held: list[object] = [memory]
        quiet = _Quiet(held.clear)  # whoever calls it keeps the memory until then
        try:
            entry = _Entry(check_digest(digest), parts, hit.data.nbytes, short_label(label), True, quiet)
            return self._put(entry, deadline)
        except MoonrelayError as error:
            self._trouble(f"entry {digest:.16} was not promoted: {error}")
            return False
        finally:
            quiet.leave()

    def forget(self, digest: str, deadline: Deadline) -> None:
        """Drop an entry, for instance a damaged one, so that the next put replaces it. Raises as `get`."""
        check_digest(digest)
        life, _ = self._known(deadline, fresh=True)
        if life is not None:
            self._relay.remove([life.card_key(digest)], deadline)

    def entries(self, deadline: Deadline) -> Iterator[StoredEntry]:
        """Tell the entries, the newest generation first. Raises as `get`, also in the middle."""
        life, _ = self._known(deadline, fresh=True)
        if life is None or life.is_ending(deadline):
            return
        for n in reversed(life.live(deadline)):
            for slot in life.log(n).slots(deadline):
                value = self._relay.get_bytes(life.card_key(slot.digest), deadline)
                card = None if value is None else decoded(Card, value)
                if card is not None and (card.generation, card.object) == (n, slot.object):
                    yield StoredEntry(digest=slot.digest, nbytes=slot.nbytes, label=slot.label, generation=n)

    def usage(self, deadline: Deadline) -> StoreUsage:
        """Return how full the store is, by a few small reads per generation. Raises as `get`."""
        life, _ = self._known(deadline, fresh=True)
        if life is None or life.is_ending(deadline):
            return StoreUsage(entries=0, nbytes=0, capacity_bytes=self._capacity, generations=0)
        tails = [tail for n in life.live(deadline) if (tail := life.log(n).tail(deadline)).slot]
        return StoreUsage(
            entries=sum(tail.slot for tail in tails),
            nbytes=sum(tail.end for tail in tails),
            capacity_bytes=life.root.capacity_bytes,
            generations=len(tails),
        )

    def clear(self, deadline: Deadline) -> None:
        """Remove everything under the prefix, flights included; what is put meanwhile may stay, whole.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: Not done; the next put or clear goes on with it.
        """
        value = self._relay.get_bytes(self._root_key, deadline)
        root = None if value is None else decoded(Root, value)
        if root is not None:
            self._end(self._life_of(root), deadline)
        elif value is not None:
            self._relay.remove([self._root_key], deadline)
        try:
            self._sweep(deadline)
        except MoonrelayError as error:
            # What can be reached by name is gone; a store that does not list may keep what nobody can reach.
            self._trouble(f"the store does not list its keys, so orphans under {self._prefix} may be left: {error}")

    @property
    def _root_key(self) -> str:
        return f"{self._prefix}/root"

    # Which incarnation stands.

    def _known(self, deadline: Deadline, *, fresh: bool) -> tuple[Incarnation | None, bool]:
        """Return the incarnation that stands, for reading, and whether another one was known before."""
        with self._lock:
            before = self._current
        if before is not None and not fresh:
            return before, False
        value = self._relay.get_bytes(self._root_key, deadline)
        root = None if value is None else self._checked(value)
        life = None if root is None else self._life_of(root)
        with self._lock:
            self._current = life
        return life, life is not before

    def _writable(self, deadline: Deadline, *, fresh: bool) -> Incarnation | None:
        """Return an incarnation to put into, made where there is none; ``None`` where a root is not ours to read."""
        for _ in range(_ATTEMPTS):
            life, moved = self._known(deadline, fresh=fresh)
            if life is None:
                mine = Root(incarnation=new_word(), capacity_bytes=self._capacity, generations=self._generations)
                value = self._relay.put_if_absent(self._root_key, encoded(mine), deadline)
                root = self._checked(value)
                if root is None:
                    return None
                life, moved = self._life_of(root), True
                with self._lock:
                    self._current = life
            if not (fresh or moved):
                return life
            if not life.is_ending(deadline):
                if life.root.capacity_bytes != self._capacity:
                    bound = life.root.capacity_bytes
                    self._trouble(f"the store's bound is {bound} bytes, not {self._capacity}, until it is cleared")
                return life
            self._end(life, deadline)
            fresh = True
        return None

    def _life_of(self, root: Root) -> Incarnation:
        with self._lock:
            if self._current is not None and self._current.root == root:
                return self._current
        return Incarnation(self._relay, self._prefix, root, self._clock, self._on_evicted)

    def _checked(self, value: bytes) -> Root | None:
        root = decoded(Root, value)
        if root is None:
            self._trouble(f"{self._root_key} is of another version, or damaged; the shared cache is not used")
        return root

    # Reading.

    def _read(self, life: Incarnation, digest: str, value: bytes, deadline: Deadline) -> Hit | None:
        card = decoded(Card, value)
        if card is None or card.nbytes > life.root.capacity_bytes:
            self._trouble(f"the record of entry {digest:.16} is of another version, or damaged")
            self._relay.remove([life.card_key(digest)], deadline)
            return None
        data = bytearray(card.nbytes)
        memory = (ctypes.c_char * card.nbytes).from_buffer(data)
        held: list[object] = [memory]
        parts = [Extent(ctypes.addressof(memory), card.nbytes)]
        key = life.object_key(card.generation, card.object)
        try:
            found = self._relay.get(key, parts, deadline, on_quiet=held.clear)
        except IntegrityError as error:
            self._trouble(f"entry {digest:.16} is damaged: {error}")
            found = False
        if not found:
            # Evicted this moment, or its bytes are gone: in the latter case nobody else would take the card away.
            if self._relay.get_bytes(life.card_key(digest), deadline) == value:
                self._relay.remove([life.card_key(digest)], deadline)
            return None
        ageing = False
        with contextlib.suppress(MoonrelayError):
            ageing = life.is_ageing(card.generation, deadline)
        return Hit(data=memoryview(data), ageing=ageing)

    # Writing.

    def _put(self, entry: _Entry, deadline: Deadline) -> bool:
        for fresh in (False, True):
            life = self._writable(deadline, fresh=fresh)
            if life is None:
                return False
            if not life.fits(entry.digest, entry.nbytes, entry.label):
                self._trouble(f"entry of {entry.nbytes} bytes is larger than a share of {life.share_bytes}; not kept")
                return False
            try:
                stands = self._put_into(life, entry, deadline)
            except CapacityError as error:
                if fresh or not life.evict_oldest(deadline):
                    self._trouble(f"no room for an entry of {entry.nbytes} bytes: {error}")
                    return False
                continue
            if stands is not None:
                return stands
            life.generations.lost()
        self._trouble(f"entry {entry.digest:.16} was not kept: the store was cleared, or forgets faster than this put")
        return False

    def _put_into(self, life: Incarnation, entry: _Entry, deadline: Deadline) -> bool | None:
        """Put an entry; ``None`` when there it would not be kept, and nothing is left of it."""
        if self._is_there(life, entry, deadline):
            return True
        place = life.take(entry.digest, entry.nbytes, entry.label, deadline)
        return None if place is None else self._fill(life, place, entry, deadline)

    def _is_there(self, life: Incarnation, entry: _Entry, deadline: Deadline) -> bool:
        value = self._relay.get_bytes(life.card_key(entry.digest), deadline)
        card = None if value is None else decoded(Card, value)
        if card is None or life.is_past(card.generation):
            return False
        return not (entry.replaces and life.is_ageing(card.generation, deadline))

    def _fill(self, life: Incarnation, place: Place, entry: _Entry, deadline: Deadline) -> bool | None:
        """Put an entry where it has room; ``None`` when its generation was closed meanwhile, and all is taken back."""
        key = life.object_key(place.generation, place.object)
        card = Card(generation=place.generation, object=place.object, nbytes=entry.nbytes)
        try:
            self._relay.put(key, entry.parts, deadline, on_quiet=entry.quiet.begin())
            mine = self._show(life, entry, card, deadline)
            kept = life.keeps(place.generation, deadline)
        except MoonrelayError:
            self._take_back(life, entry.digest, card, [key])
            raise
        if not kept:  # and so nobody extends that log any more
            self._take_back(life, entry.digest, card, [key, place.slot_key])
            return None
        if not mine:
            self._relay.remove([key], deadline)
        return True

    def _show(self, life: Incarnation, entry: _Entry, card: Card, deadline: Deadline) -> bool:
        """Write the card; return whether it is this one that stands. One that is outdated gives way."""
        key, value = life.card_key(entry.digest), encoded(card)
        for _ in range(_ATTEMPTS):
            standing = self._relay.put_if_absent(key, value, deadline)
            if standing == value:
                return True
            other = decoded(Card, standing)
            gone = [key]
            if other is not None:
                past = life.is_past(other.generation)
                if not past and not (entry.replaces and other.generation < card.generation):
                    return False
                if past:
                    gone.append(life.object_key(other.generation, other.object))
            self._relay.remove(gone, deadline)
        return False

    def _take_back(self, life: Incarnation, digest: str, card: Card, keys: list[str]) -> None:
        """Remove what a put left; what can't be removed is in the log, and goes with its generation."""
        deadline = Deadline(_CLEAN_UP_S, self._clock)
        with contextlib.suppress(MoonrelayError):
            if self._relay.get_bytes(life.card_key(digest), deadline) == encoded(card):
                self._relay.remove([life.card_key(digest)], deadline)
        with contextlib.suppress(MoonrelayError):
            self._relay.remove(keys, deadline)

    # Clearing.

    def _end(self, life: Incarnation, deadline: Deadline) -> None:
        life.end(deadline)
        value = self._relay.get_bytes(self._root_key, deadline)
        gone = [self._root_key] if value == encoded(life.root) else []
        self._relay.remove(gone + life.last_keys(), deadline)
        with self._lock:
            if self._current is life:
                self._current = None

    def _sweep(self, deadline: Deadline) -> None:
        """Remove whatever else is listed, but for an incarnation that began meanwhile."""
        for _ in range(_ATTEMPTS):
            listed = self._relay.keys(f"{self._prefix}/", deadline)
            value = self._relay.get_bytes(self._root_key, deadline)
            root = None if value is None else decoded(Root, value)
            kept = () if root is None else (self._root_key, f"{self._prefix}/{root.incarnation}/")
            orphans = [key for key in listed if not (kept and key.startswith(kept))]
            if not orphans:
                return
            for at in range(0, len(orphans), 256):
                self._relay.remove(orphans[at : at + 256], deadline)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one put puts; ``replaces`` says that an older card gives way."""

    digest: str
    parts: Sequence[Extent]
    nbytes: int
    label: dict[str, str]
    replaces: bool
    quiet: _Quiet


class _Quiet:
    """Passes ``on_quiet`` on once no call of the relay can touch the parts any more, and none will be made."""

    def __init__(self, on_quiet: OnQuiet | None) -> None:
        self._on_quiet = on_quiet
        self._lock = threading.Lock()
        self._open = 1

    def begin(self) -> OnQuiet:
        """Count one more call of the relay; return what it is given."""
        with self._lock:
            self._open += 1
        return self.leave

    def leave(self) -> None:
        """Count one less."""
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last and self._on_quiet is not None:
            self._on_quiet()


def _complain(text: str) -> None:
    _log.warning("%s", text)


def _unheard(entries: int, nbytes: int) -> None:
    """Nobody asked to be told of evictions."""
