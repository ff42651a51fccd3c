"""Which generations of a store were opened, which still take entries, and what was put into each of them.

Owns two things that a relay without listing and without overwriting does not offer. `Generations` is a number that only
grows, found by anybody in a few dozen small reads and kept in a number of keys that grows by its logarithm. `Log` is
the list of a generation's entries with their running sum, which every writer extends and none can exceed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moonrelay.cache.wire import MARK, Card, Slot, decoded, encoded
from moonrelay.clock import Deadline
from moonrelay.relay.base import Relay

#: Entries of one generation; a store of small ones forgets by their number.
MAX_SLOTS = 4096

_RUNG = 32
_TOP = 3
#: Rungs of a level that stay behind the newest, and how many below those are looked after when some are removed.
_KEPT, _LOOKED = 2 * _RUNG, 4 * _RUNG
_ATTEMPTS = 5


class Generations:
    """The number of the newest generation of one incarnation, and which generations are closed.

    Opening n writes ``g0/<n>``, after ``g<level>/<i>`` for every power of `_RUNG` passed; the lower rungs are removed
    once the newest is far beyond. So the rungs of every level are without a hole from some number up to the last.

    Args:
        relay: A started relay.
        base: Prefix of this incarnation's keys.

    Threads: any. Everything here raises what the relay raises.
    """

    def __init__(self, relay: Relay, base: str) -> None:
        self._relay = relay
        self._base = base
        self._lock = threading.Lock()
        self._known: int | None = None

    def newest(self, deadline: Deadline) -> int | None:
        """Return the newest generation's number; ``None`` when none was ever opened."""
        with self._lock:
            known = self._known
        if known is not None:
            for ahead in range(3):
                if not self._stands(0, known + ahead + 1, deadline):
                    return self._learned(known + ahead)
        found = self._search(deadline)
        return None if found is None else self._learned(found)

    @property
    def known(self) -> int | None:
        """The newest generation that this process heard of."""
        with self._lock:
            return self._known

    def lost(self) -> None:
        """Forget what is known: what was taken for the newest generation is not there any more."""
        with self._lock:
            self._known = None

    def open(self, n: int, deadline: Deadline) -> bool:
        """Open generation ``n``, whose predecessor stands; return False where it is long past."""
        for level in range(1, _TOP + 1) if n else ():
            self._relay.put_if_absent(self._rung(level, (n - 1) // _RUNG**level), MARK, deadline)
        self._relay.put_if_absent(self._rung(0, n), MARK, deadline)
        newest = self._search(deadline)
        if newest is None or newest >= n + _KEPT:
            self._relay.remove([self._rung(0, n)], deadline)  # this process stood still for a whole age
            return False
        for level in range(_TOP):
            if n % _RUNG ** (level + 1) == 0:
                top = n // _RUNG**level - _KEPT
                gone = range(max(0, top - _LOOKED), top)
                self._relay.remove([self._rung(level, i) for i in gone], deadline)
                if level == 0:  # after the rungs, see `takes_entries`
                    self._relay.remove([self._closed(i) for i in gone], deadline)
        self._learned(n)
        return True

    def take_back(self, n: int, deadline: Deadline) -> None:
        """Undo an `open` that should not have been."""
        self._relay.remove([self._rung(0, n)], deadline)

    def stands(self, n: int, deadline: Deadline) -> bool:
        """Return whether generation ``n`` was opened, and not so long ago that it is forgotten."""
        return self._stands(0, n, deadline)

    def close(self, n: int, deadline: Deadline) -> None:
        """Let generation ``n`` take no more entries: what is put there from now on is taken back by its writer."""
        self._relay.put_if_absent(self._closed(n), MARK, deadline)

    def takes_entries(self, n: int, deadline: Deadline) -> bool:
        """Return whether what was put into generation ``n`` before this call will be seen by whoever evicts it."""
        # In this order: the closing mark is removed only after the rung.
        return self._relay.get_bytes(self._closed(n), deadline) is None and self._stands(0, n, deadline)

    def marks(self, newest: int | None) -> list[str]:
        """Return all keys that may stand here, in the order in which they may be removed."""
        top = 0 if newest is None else newest + 1
        rungs: list[str] = []
        for level in range(_TOP + 1):
            last = top // _RUNG**level
            first = 0 if level == _TOP else max(0, last - _KEPT - _LOOKED - _RUNG)
            rungs += [self._rung(level, i) for i in range(first, last + 1)]
        first = max(0, top - _KEPT - _LOOKED - _RUNG)
        return rungs + [self._closed(i) for i in range(first, top + 1)]

    def _search(self, deadline: Deadline) -> int | None:
        for _ in range(_ATTEMPTS):
            at = 0
            for level in range(_TOP, -1, -1):
                at = gallop(functools.partial(self._stands_at, level, deadline), at * _RUNG)
            # The rung where the search of the lowest level began is taken for granted; so look whether it is there.
            if self._stands(0, at, deadline):
                return at
            if at == 0 and not self._stands(_TOP, 0, deadline):
                return None
        return None  # rungs are being removed: this incarnation is being cleared

    def _learned(self, n: int) -> int:
        with self._lock:
            self._known = n if self._known is None else max(self._known, n)
        return n

    def _stands(self, level: int, i: int, deadline: Deadline) -> bool:
        return self._relay.get_bytes(self._rung(level, i), deadline) is not None

    def _stands_at(self, level: int, deadline: Deadline, i: int) -> bool:
        return self._stands(level, i, deadline)

    def _rung(self, level: int, i: int) -> str:
        return f"{self._base}/g{level}/{i}"

    def _closed(self, n: int) -> str:
        return f"{self._base}/x/{n}"


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a generation's log ends: the next slot, and the sum of the charges before it."""

    slot: int
    end: int


class Log:
    """What was put into one generation, in order.

    Args:
        relay: A started relay.
        base: Prefix of this incarnation's keys.
        n: The generation.
        share_bytes: What its charges may sum up to.

    Threads: any. Everything here raises what the relay raises.
    """

    def __init__(self, relay: Relay, base: str, n: int, share_bytes: int) -> None:
        self._relay = relay
        self._base = base
        self._n = n
        self._share = share_bytes
        self._lock = threading.Lock()
        self._tail = Tail(0, 0)

    def take(self, digest: str, word: str, nbytes: int, label: dict[str, str], deadline: Deadline) -> str | None:
        """Win room for an entry; return the key of its slot, or ``None`` when the generation is full."""
        with self._lock:
            tail = self._tail
        if tail.slot == 0:
            tail = self._look(tail, deadline)
        longest = Slot(digest=digest, object=word, nbytes=nbytes, end=self._share, label=label)
        charge = charge_of(longest)
        while tail.slot < MAX_SLOTS and tail.end + charge <= self._share:
            mine = Slot(digest=digest, object=word, nbytes=nbytes, end=tail.end + charge, label=label)
            value, key = encoded(mine), self.key(tail.slot)
            standing = self._relay.put_if_absent(key, value, deadline)
            if standing == value:
                self._learned(Tail(tail.slot + 1, mine.end))
                return key
            tail = self._look(self._after(tail.slot, standing), deadline)
        return None

    def tail(self, deadline: Deadline) -> Tail:
        """Return where the log ends now."""
        with self._lock:
            tail = self._tail
        return self._look(tail, deadline)

    def slots(self, deadline: Deadline) -> Iterator[Slot]:
        """Tell the slots, the newest first; what is not readable is left out."""
        for k in range(self.length(deadline) - 1, -1, -1):
            value = self._relay.get_bytes(self.key(k), deadline)
            slot = None if value is None else decoded(Slot, value)
            if slot is not None:
                yield slot

    def length(self, deadline: Deadline) -> int:
        """Return how many slots stand now, whatever this process knew."""
        return gallop(lambda k: self._relay.get_bytes(self.key(k), deadline) is not None, -1) + 1

    def read(self, k: int, deadline: Deadline) -> Slot | None:
        """Return a slot; ``None`` when there is none, or none that is readable."""
        value = self._relay.get_bytes(self.key(k), deadline)
        return None if value is None else decoded(Slot, value)

    def key(self, k: int) -> str:
        """Return the key of slot ``k``."""
        return f"{self._base}/l/{self._n}/{k}"

    def _look(self, tail: Tail, deadline: Deadline) -> Tail:
        """Return where the log ends, at ``tail`` or beyond."""
        values: dict[int, bytes] = {}

        def stands(k: int) -> bool:
            value = self._relay.get_bytes(self.key(k), deadline)
            if value is not None:
                values[k] = value
            return value is not None

        last = gallop(stands, tail.slot - 1)
        return self._learned(tail if last < tail.slot else self._after(last, values[last]))

    def _after(self, k: int, value: bytes) -> Tail:
        slot = decoded(Slot, value)
        # Without the sum nobody may go on here: the generation counts as full.
        return Tail(k + 1, self._share if slot is None else slot.end)

    def _learned(self, tail: Tail) -> Tail:
        with self._lock:
            if tail.slot > self._tail.slot:
                self._tail = tail
        return tail


def charge_of(slot: Slot) -> int:
    """Return what an entry costs: its bytes, and those of the records about it."""
    card = Card(generation=1 << 31, object=slot.object, nbytes=slot.nbytes)
    return slot.nbytes + len(encoded(slot)) + len(encoded(card))


def gallop(stands: Callable[[int], bool], start: int) -> int:
    """Return the last number from ``start`` on for which ``stands``, which holds up to it without a hole.

    ``start`` itself is taken for granted. Asks about twice the logarithm of the distance.
    """
    low, step = start, 1
    while stands(low + step):
        low += step
        step *= 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if stands(middle):
            low = middle
        else:
            high = middle
    return low
