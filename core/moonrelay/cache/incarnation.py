"""One life of a shared store, from its first entry to its clearing: where entries go, and what goes for them.

Owns the order of steps that keeps the bound and forgets nothing, whoever dies where. A generation is closed, then
emptied, then the one that takes its room is opened: so whoever opens finds all earlier ones emptied. Of an entry the
card goes first, then the bytes, and its slot in the log last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from moonrelay.cache.generations import Generations, Log, charge_of
from moonrelay.cache.wire import MARK, Card, Root, Slot, decoded, encoded, new_word
from moonrelay.clock import Clock, Deadline
from moonrelay.errors import TransferTimeout
from moonrelay.relay.base import Relay

#: How often a process that only reads looks for newer generations.
_LOOK_S = 1.0
#: Slots that are evicted at once.
_BATCH = 64
_MARKS_AT_ONCE = 256
#: Generations that one put may open before it gives up.
_ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Room that was won for one entry."""

    generation: int
    object: str
    slot_key: str


class Incarnation:
    """The keys and generations of one incarnation.

    Args:
        relay: A started relay.
        prefix: Of the store.
        root: The record that stands for it.
        clock: For `lately`.
        on_evicted: Told how many entries and bytes went.

    Threads: any; one of a process opens a generation, the others wait for it. Everything raises what the relay raises.
    """

    def __init__(
        self, relay: Relay, prefix: str, root: Root, clock: Clock, on_evicted: Callable[[int, int], None]
    ) -> None:
        self._relay = relay
        self._clock = clock
        self._on_evicted = on_evicted
        self._root_key = f"{prefix}/root"
        self.root = root
        self.base = f"{prefix}/{root.incarnation}"
        self.share_bytes = root.capacity_bytes // root.generations
        self.generations = Generations(relay, self.base)
        self._changing = threading.Condition()
        self._opening = False
        self._newest_log: tuple[int, Log] | None = None
        self._looked_s: float | None = None

    @property
    def end_key(self) -> str:
        """The key that says that this incarnation is being cleared."""
        return f"{self.base}/z"

    def card_key(self, digest: str) -> str:
        """Return where an entry's card stands."""
        return f"{self.base}/r/{digest}"

    def object_key(self, generation: int, word: str) -> str:
        """Return where an entry's bytes stand."""
        return f"{self.base}/o/{generation}/{word}"

    def log(self, n: int) -> Log:
        """Return the log of a generation, read anew."""
        return Log(self._relay, self.base, n, self.share_bytes)

    def fits(self, digest: str, nbytes: int, label: dict[str, str]) -> bool:
        """Return whether a generation's share has room for such an entry at all."""
        slot = Slot(digest=digest, object="0" * 16, nbytes=nbytes, end=self.share_bytes, label=label)
        return charge_of(slot) <= self.share_bytes

    def live(self, deadline: Deadline) -> range:
        """Return the numbers of the generations that may hold entries, the newest last."""
        newest = self.generations.newest(deadline)
        return range(0) if newest is None else range(max(0, newest + 1 - self.root.generations), newest + 1)

    def is_past(self, generation: int) -> bool:
        """Return whether that generation has gone, as far as this process knows."""
        known = self.generations.known
        return known is not None and generation + self.root.generations <= known

    def is_ageing(self, generation: int, deadline: Deadline) -> bool:
        """Return whether a generation is of the older half; looks for newer ones now and then."""
        now_s = self._clock.monotonic()
        with self._changing:
            due = self._looked_s is None or now_s - self._looked_s >= _LOOK_S
            if due:
                self._looked_s = now_s
        newest = self.generations.newest(deadline) if due else self.generations.known
        return newest is not None and newest - generation >= max(1, self.root.generations // 2)

    def take(self, digest: str, nbytes: int, label: dict[str, str], deadline: Deadline) -> Place | None:
        """Win room for an entry that `fits`; ``None`` when this incarnation ends, or others are always faster.

        Blocks: a few small calls; where a generation has to be opened, as long as it takes to empty the oldest.
        """
        word = new_word()
        newest = self.generations.newest(deadline)
        for _ in range(_ATTEMPTS):
            if newest is not None:
                slot_key = self._log_of(newest).take(digest, word, nbytes, label, deadline)
                if slot_key is not None:
                    return Place(generation=newest, object=word, slot_key=slot_key)
            newest = self._open_after(newest, deadline)
            if newest is None:
                return None
        return None

    def evict_oldest(self, deadline: Deadline) -> bool:
        """Empty the oldest generation that holds anything, but never the newest; return whether there was one."""
        for n in self.live(deadline)[:-1]:
            if self.log(n).length(deadline):
                self.generations.close(n, deadline)
                self.evict(n, deadline)
                return True
        return False

    def evict(self, n: int, deadline: Deadline) -> None:
        """Empty a closed generation. Whoever does it too, or goes on with it later, finds only what is left."""
        log = self.log(n)
        length, entries, nbytes = log.length(deadline), 0, 0
        try:
            while length:
                first = max(0, length - _BATCH)
                cards, objects = [], []
                for k in range(length - 1, first - 1, -1):
                    slot = log.read(k, deadline)
                    if slot is None:
                        continue  # taken back by its writer, or not readable
                    objects.append(self.object_key(n, slot.object))
                    if self._is_carded(slot, n, deadline):
                        cards.append(self.card_key(slot.digest))
                        entries, nbytes = entries + 1, nbytes + slot.nbytes
                self._relay.remove(cards + objects, deadline)
                # From the end, so that what is left of the log is still found from its beginning.
                self._relay.remove([log.key(k) for k in range(length - 1, first - 1, -1)], deadline)
                length = first
        finally:
            if entries:
                self._on_evicted(entries, nbytes)

    def keeps(self, generation: int, deadline: Deadline) -> bool:
        """Return whether what was put into a generation before this call will be seen by whoever evicts or clears."""
        return self.generations.takes_entries(generation, deadline) and not self.is_ending(deadline)

    def is_ending(self, deadline: Deadline) -> bool:
        """Return whether this incarnation is being cleared, or was."""
        # In this order: the mark goes after the root.
        ends = self._relay.get_bytes(self.end_key, deadline) is not None
        return ends or self._relay.get_bytes(self._root_key, deadline) != encoded(self.root)

    def end(self, deadline: Deadline) -> None:
        """Remove all that is in it, but for `last_keys`. Any number of processes may do it at once."""
        self._relay.put_if_absent(self.end_key, MARK, deadline)
        emptied = self._relay.get_bytes(self._emptied_key, deadline)
        if emptied is None:
            newest = self._empty(deadline)
            emptied = self._relay.put_if_absent(self._emptied_key, b"%d" % newest, deadline)
        # From here on the generations cannot be found any more, so their number stands there.
        marks = self.generations.marks(int(emptied) if emptied.isdigit() else 0)
        for at in range(0, len(marks), _MARKS_AT_ONCE):
            self._relay.remove(marks[at : at + _MARKS_AT_ONCE], deadline)
        self.generations.lost()

    def last_keys(self) -> list[str]:
        """Return the keys that `end` leaves, in the order in which they may go, after the root."""
        return [self._emptied_key, self.end_key]

    @property
    def _emptied_key(self) -> str:
        return f"{self.base}/y"

    def _empty(self, deadline: Deadline) -> int:
        """Close and empty all generations of an incarnation that ends; return the newest one's number, 0 for none."""
        emptied = -1
        while True:
            self.generations.lost()
            live = self.live(deadline)
            if not live or live[-1] <= emptied:
                return max(0, emptied)
            for n in live:  # an opener looks for the mark after it has opened: none is missed
                self.generations.close(n, deadline)
                self.evict(n, deadline)
            emptied = live[-1]

    def _is_carded(self, slot: Slot, n: int, deadline: Deadline) -> bool:
        """Return whether the card of a slot's digest should go with it."""
        value = self._relay.get_bytes(self.card_key(slot.digest), deadline)
        if value is None:
            return False
        card = decoded(Card, value)
        return card is None or (card.generation == n and card.object == slot.object)

    def _log_of(self, n: int) -> Log:
        """Return the log of the generation that is written to, with what is known of its end."""
        with self._changing:
            if self._newest_log is None or self._newest_log[0] != n:
                self._newest_log = (n, self.log(n))
            return self._newest_log[1]

    def _open_after(self, n: int | None, deadline: Deadline) -> int | None:
        """Open the generation behind ``n`` unless it stands; return the newest, or ``None`` at this life's end."""
        target = 0 if n is None else n + 1
        with self._changing:
            if not deadline.wait_for(self._changing, lambda: not self._opening):
                message = f"generation {target} of the shared cache was not opened within {deadline.timeout_s} s"
                raise TransferTimeout(message, prefix=self.base)
            self._opening = True
        try:
            if not self.generations.stands(target, deadline):
                oldest = target - self.root.generations
                if oldest >= 0:
                    self.generations.close(oldest, deadline)
                    self.evict(oldest, deadline)
                opened = self.generations.open(target, deadline)
                if self.is_ending(deadline):
                    if opened:
                        self.generations.take_back(target, deadline)
                    return None
            return self.generations.newest(deadline)
        finally:
            with self._changing:
                self._opening = False
                self._changing.notify_all()
