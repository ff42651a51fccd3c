"""What a desk knows, and whom it gives what: decisions over plain state.

Owns offers, failures, work under way and the finds that wait, each within a bound. No socket, no thread, no clock: the
desk calls it under its lock and sends what it is told to.

The rules. An offer answers a find when they share a name; the find's most exact name decides first. Of several, the
oldest that was given to nobody under any of its names, else the oldest. A find that waits is told at once, the one with
the same exact name before one that only asks for the same. What a find was given it is given again when it asks again.
A failure is told to those who wait for that request, or to the first who comes: a later one asks for another attempt.
Where only the shared name fits, work under way goes before a failure, and before what another was given. That a client
gave a request up is told under the request's own id alone, where it has one: another that asks for the same goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from moonrelay.errors import Cancelled, CapacityError
from moonrelay_lightx2v.rendezvous_wire import (
    MAX_CODE_CHARS,
    MAX_TEXT_CHARS,
    Answer,
    Closing,
    Here,
    Names,
    NotYet,
    Refused,
    described,
    is_shared,
)

#: Most offers, failures, works, waiting finds, and finds remembered: each of them.
MAX_ENTRIES: Final = 4096


class _Named(Protocol):
    @property
    def names(self) -> Names: ...


K = TypeVar("K")
T = TypeVar("T", bound=_Named)


@dataclass(slots=True, eq=False)
class Offer:
    """A payload that may be fetched.

    Attributes:
        names: What its request goes by.
        payload_id: Of the payload.
        handle: What the finder gets.
        given: How many finds have it.
        returned: One that had it did not need it, or failed with it.
        overtaken: A new request under the same exact name has begun; this one answers nobody any more.
    """

    names: Names
    payload_id: str
    handle: bytes
    given: int = 0
    returned: bool = False
    overtaken: bool = False

    @property
    def answer(self) -> Answer:
        return Here(handle=self.handle)


@dataclass(slots=True, eq=False)
class Failure:
    """A request that this stage failed.

    Attributes:
        number: Its key; counts up.
        names: What it goes by.
        code: Of the error.
        message: Its text.
        until: When it is forgotten.
        given: How many finds were told.
    """

    number: int
    names: Names
    code: str
    message: str
    until: float
    given: int = 0

    @property
    def answer(self) -> Answer:
        return Refused(code=self.code[:MAX_CODE_CHARS], message=self.message[:MAX_TEXT_CHARS])


@dataclass(slots=True, eq=False)
class Work:
    """A request under way."""

    names: Names


@dataclass(slots=True, eq=False)
class Waiter:
    """A find that waits.

    Attributes:
        names: What it asks for.
        token: Its name.
        route: The connection it asked by last.
        until: When it is forgotten unless it asks again.
    """

    names: Names
    token: bytes
    route: bytes
    until: float


@dataclass(frozen=True, slots=True)
class Sending:
    """What the desk has to send: an answer, to a find, by a connection."""

    route: bytes
    token: bytes
    answer: Answer


class _Shelf(Generic[K, T]):
    """Things by key and by each of their names, in the order they came."""

    def __init__(self) -> None:
        self._things: OrderedDict[K, T] = OrderedDict()
        self._by_name: dict[str, dict[K, T]] = {}

    def __len__(self) -> int:
        return len(self._things)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._things.values()))

    def get(self, key: K) -> T | None:
        return self._things.get(key)

    def put(self, key: K, thing: T) -> None:
        self.pop(key)
        self._things[key] = thing
        for name in thing.names:
            self._by_name.setdefault(name, {})[key] = thing

    def pop(self, key: K) -> T | None:
        thing = self._things.pop(key, None)
        if thing is not None:
            for name in thing.names:
                named = self._by_name[name]
                del named[key]
                if not named:
                    del self._by_name[name]
        return thing

    def make_room(self) -> None:
        """Forget the oldest where there are as many as there may be."""
        while len(self._things) >= MAX_ENTRIES:
            self.pop(next(iter(self._things)))

    def oldest(self) -> T | None:
        return next(iter(self._things.values()), None)

    def under(self, name: str) -> list[T]:
        return list(self._by_name.get(name, {}).values())

    def any_under(self, names: Iterable[str]) -> bool:
        return any(name in self._by_name for name in names)


class Book:
    """What a desk knows.

    Args:
        keep_failures_s: How long a failure is told to who comes, in seconds.

    Threads: none of its own; the caller holds a lock.
    """

    def __init__(self, keep_failures_s: float) -> None:
        self._keep_failures_s = keep_failures_s
        self._offers: _Shelf[str, Offer] = _Shelf()
        self._failures: _Shelf[int, Failure] = _Shelf()
        self._works: _Shelf[str, Work] = _Shelf()
        self._waiters: _Shelf[bytes, Waiter] = _Shelf()
        self._given: OrderedDict[bytes, Offer | Failure] = OrderedDict()
        self._over: OrderedDict[str, None] = OrderedDict()
        self._failed = 0

    # What the stage says.

    def working(self, names: Names) -> list[Sending]:
        """Note that a request has begun; return what the finds that wait for it are told."""
        first = names[0]
        self._over.pop(first, None)
        self._works.pop(first)
        self._works.make_room()
        self._works.put(first, Work(names))
        if not is_shared(first):
            # An id that a client uses again: neither the payload nor the failure of before is this request's.
            for offer in self._offers.under(first):
                offer.overtaken = offer.overtaken or offer.names[0] == first
            self._drop_failures(first)
        waiting = {waiter.token: waiter for name in names for waiter in self._waiters.under(name)}
        return [Sending(waiter.route, waiter.token, NotYet(working=True)) for waiter in waiting.values()]

    def offer(self, names: Names, payload_id: str, handle: bytes, now: float) -> tuple[str | None, list[Sending]]:
        """Note an offer; return the id of the one it replaces, and what has to be sent.

        Raises:
            CapacityError: There are too many offers.
        """
        first = names[0]
        self._over.pop(first, None)
        self._works.pop(first)
        replaced: str | None = None
        if not is_shared(first):
            self._drop_failures(first)
            for older in self._offers.under(first):
                if older.names[0] == first:
                    self._offers.pop(older.payload_id)
                    replaced = older.payload_id if older.payload_id != payload_id else replaced
        self._offers.pop(payload_id)
        if len(self._offers) >= MAX_ENTRIES:
            message = f"{len(self._offers)} offers wait; nobody fetches them, or they outlive their leases"
            raise CapacityError(message, names=described(names))
        offer = Offer(names, payload_id, handle)
        self._offers.put(payload_id, offer)
        return replaced, self._push(offer, now)

    def refuse(self, names: Names, code: str, message: str, now: float) -> list[Sending]:
        """Note that a request failed, unless its offer is there; return what has to be sent."""
        first = names[0]
        begun = self._works.pop(first) is not None
        if code == Cancelled.code and not is_shared(first):
            # Its client gave up this one, and nobody who asks for the same under another id.
            names = tuple(name for name in names if not is_shared(name))
        if any(offer.names[0] == first and not offer.overtaken for offer in self._offers.under(first)):
            # Under a shared name the offer may be another request's: it is, when this one began after it.
            if not (is_shared(first) and begun):
                return []
        elif not is_shared(first):
            self._drop_failures(first)
        self._expire(now)
        self._failures.make_room()
        self._failed += 1
        failure = Failure(self._failed, names, code, message, now + self._keep_failures_s)
        self._failures.put(failure.number, failure)
        return self._push(failure, now)

    def done(self, names: Names) -> None:
        """Note that a request is no longer under way."""
        self._works.pop(names[0])

    def withdraw(self, payload_id: str, over: bool = False) -> None:
        """Forget an offer; with ``over``, remember by its exact name that it has ended."""
        offer = self._offers.pop(payload_id)
        if offer is None or not over or is_shared(offer.names[0]) or self._works.any_under(offer.names[:1]):
            return
        self._over[offer.names[0]] = None
        self._over.move_to_end(offer.names[0])
        while len(self._over) > MAX_ENTRIES:
            self._over.popitem(last=False)

    def take_back(self) -> str | None:
        """Forget the oldest offer that came back and that nobody has now; return its payload's id."""
        for offer in self._offers:
            if offer.returned and not offer.given:
                self.withdraw(offer.payload_id, over=True)
                return offer.payload_id
        return None

    def closing(self) -> list[Sending]:
        """Return what the finds that wait are told when the desk closes."""
        return [Sending(waiter.route, waiter.token, Closing()) for waiter in self._waiters]

    # What finds say.

    def want(self, token: bytes, route: bytes, names: Names, wait_s: float, now: float) -> Answer:
        """Return what a find is told now; it waits here when that is nothing yet."""
        self._expire(now)
        found = self._given_before(token) or self._match(names)
        if found is not None:
            return self._give(token, found)
        waiter = self._waiters.get(token)
        if waiter is None:
            self._waiters.make_room()
            self._waiters.put(token, Waiter(names, token, route, now + wait_s))
        else:
            waiter.route, waiter.until = route, now + wait_s
        return NotYet(working=self._works.any_under(names), over=names[0] in self._over)

    def forget(self, token: bytes, taken: bool, now: float) -> list[Sending]:
        """Forget a find; what it was given and did not take goes to another."""
        self._waiters.pop(token)
        found = self._given.pop(token, None)
        if found is None or taken:
            return []
        found.given -= 1
        if isinstance(found, Offer):
            found.returned = True
        self._expire(now)
        return self._push(found, now) if found.given == 0 and self._is_for_others(found) else []

    def lost(self, token: bytes, now: float) -> list[Sending]:
        """Note that a find's connection is gone, and what was sent to it with it."""
        return self.forget(token, False, now)

    # Whom what is given.

    def _match(self, names: Names) -> Offer | Failure | None:
        exact = [name for name in names if not is_shared(name)]
        if self._works.any_under(exact):
            return None  # its own is being made
        taken: Offer | None = None  # another has it: the last resort, for that one may still fail
        for name in names:
            offers = [offer for offer in self._offers.under(name) if not offer.overtaken]
            fresh = next((offer for offer in offers if not offer.given), None)
            if fresh is not None:
                return fresh
            if is_shared(name) and self._works.any_under((name,)):
                return None
            failure = next((failure for failure in self._failures.under(name) if not failure.given), None)
            if failure is not None and taken is None:
                return failure
            taken = taken or next(iter(offers), None)
        return taken

    def _push(self, found: Offer | Failure, now: float) -> list[Sending]:
        """Give what has come to who waits for it."""
        chosen: list[Waiter] = []
        for name in found.names:
            for waiter in self._waiters.under(name):
                if waiter.until <= now:
                    self._waiters.pop(waiter.token)
                elif not is_shared(name):
                    if waiter not in chosen:
                        chosen.append(waiter)
                elif not self._works.any_under(own for own in waiter.names if not is_shared(own)):
                    chosen = chosen or [waiter]
        if isinstance(found, Offer):
            # One reader's policy is the payload's; a second one asks again and gets it, or the next.
            chosen = chosen[:1]
        return [Sending(waiter.route, waiter.token, self._give(waiter.token, found)) for waiter in chosen]

    def _give(self, token: bytes, found: Offer | Failure) -> Answer:
        self._waiters.pop(token)
        if self._given.get(token) is not found:
            found.given += 1
            self._given[token] = found
        self._given.move_to_end(token)
        while len(self._given) > MAX_ENTRIES:
            self._given.popitem(last=False)
        return found.answer

    def _given_before(self, token: bytes) -> Offer | Failure | None:
        found = self._given.get(token)
        # A failure stays true for who was told of it, also when nobody else is told any more.
        if isinstance(found, Offer) and self._offers.get(found.payload_id) is not found:
            del self._given[token]
            return None
        return found

    def _is_for_others(self, found: Offer | Failure) -> bool:
        if isinstance(found, Offer):
            return self._offers.get(found.payload_id) is found and not found.overtaken
        return self._failures.get(found.number) is found

    def _drop_failures(self, first: str) -> None:
        for failure in self._failures.under(first):
            if failure.names[0] == first:
                self._failures.pop(failure.number)

    def _expire(self, now: float) -> None:
        while (oldest := self._failures.oldest()) is not None and oldest.until <= now:
            self._failures.pop(oldest.number)
