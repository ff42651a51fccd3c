"""Single flight: of all processes that miss one key, one makes it and the others wait, for as long as that one lives.

Owns who leads. A lead that dies is taken over, and one that was only slow learns that it was; its late result has the
same bytes and does no harm. Nothing is overwritten: a lead changes by the next epoch's record, which only one can
create, and the end of a flight is such a record too, so an overtaken lead ends nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from moonrelay.cache.generations import gallop
from moonrelay.cache.wire import MARK, Head, Turn, check_digest, check_prefix, decoded, encoded, new_word
from moonrelay.clock import Clock, Deadline
from moonrelay.errors import ClosedError, ConfigError, MoonrelayError, TransferTimeout
from moonrelay.relay.base import Relay

if TYPE_CHECKING:
    from typing import Self

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGER = 0.002, 0.05, 1.5
#: How long ending a flight may take.
_FINISH_S = 5.0
_CLOSE_S = 5.0
#: Stands for the number of beats of a lead that needs none any more.
_OVERTAKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """Somebody else led.

    Attributes:
        finished: Whether that lead has ended: look into the store, and enter again where nothing is there. False at the
            deadline.
    """

    finished: bool


class Lead:
    """The right to make the value of one digest. Look into the store once more first; end it with `finish`, always.

    A context manager: leaving it finishes.

    Attributes:
        digest: What it is for.
        epoch: 0 for the first lead of a flight; each that died adds one, so above 0 this is a take-over.

    Threads: any.
    """

    def __init__(self, flights: SingleFlight, digest: str, flight: str, epoch: int) -> None:
        self._flights = flights
        self.digest = digest
        self.flight = flight
        self.epoch = epoch

    def stands(self) -> bool:
        """Return whether nobody has taken over. Blocks: two small reads. A store that does not answer: False."""
        return self._flights._stands(self)  # noqa: SLF001 - two halves of one thing

    def finish(self) -> None:
        """Let the others go, whether the value was stored or not. Idempotent. Blocks: some seconds at most.

        Never raises because of the store: what is left behind is taken over and removed by the next who asks.
        """
        self._flights._finish(self)  # noqa: SLF001 - two halves of one thing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class _Here:
    """What this process does about one digest: its threads wait for the one that asks the store."""

    __slots__ = ("lead", "outcome")

    def __init__(self) -> None:
        self.lead: Lead | None = None
        #: ``left``: whoever asked gave up, and another may ask.
        self.outcome: Literal["", "finished", "left"] = ""


@dataclass(slots=True)
class _Sight:
    """What one waiter saw of a flight; times on its own clock."""

    flight: str
    changed_s: float
    looked_s: float = float("-inf")
    epoch: int = 0
    beats: int = 0
    ended: bool = False


class SingleFlight:
    """Flights by digest in a relay.

    Args:
        relay: A started relay.
        prefix: As of `SharedStore`.
        clock: All waiting is reckoned on it.
        beat_s: How often a lead says that it lives.
        dead_after_s: After this long without a sign of life a lead is taken over.

    Threads: all methods from any thread; any number of processes at once. Threads of one process that want the same
    digest wait for each other without the store. One thread of its own, only while something of this process leads.
    """

    def __init__(
        self, relay: Relay, prefix: str, clock: Clock, *, beat_s: float = 0.5, dead_after_s: float = 3.0
    ) -> None:
        if not 0 < beat_s <= dead_after_s / 2:
            message = f"beat_s={beat_s!r} must be above 0 and at most half of dead_after_s={dead_after_s!r}"
            raise ConfigError(message, field="beat_s")
        self._relay = relay
        self._prefix = check_prefix(prefix)
        self._clock = clock
        self._beat_s = beat_s
        self._dead_after_s = dead_after_s
        self._changed = threading.Condition()
        self._here: dict[str, _Here] = {}
        self._beats: dict[Lead, int] = {}  # how many each lead of this process gave, while it leads
        self._beater: threading.Thread | None = None
        self._closed = False

    def enter(self, digest: str, deadline: Deadline) -> Lead | Waited:
        """Lead, or wait until whoever leads has ended.

        Blocks: while another leads, until the deadline at most.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer; this one leads nothing.
        """
        check_digest(digest)
        mine = _Here()
        with self._changed:
            if self._closed:
                message = "the single flight is closed"
                raise ClosedError(message)
            while (other := self._here.setdefault(digest, mine)) is not mine:
                deadline.wait_for(self._changed, functools.partial(self._is_over, other))
                if other.outcome != "left" or self._closed:
                    return Waited(finished=other.outcome == "finished")
        outcome: Lead | Waited | None = None
        try:
            outcome = self._watch(digest, deadline)
        except TransferTimeout:
            if not deadline.expired:
                raise
            outcome = Waited(finished=False)
        finally:
            with self._changed:
                if isinstance(outcome, Lead):
                    mine.lead = outcome
                    self._beats[outcome] = 0
                    self._start_beating()
                else:
                    self._let_go(digest, mine, finished=outcome is not None and outcome.finished)
        return outcome

    def close(self) -> None:
        """Finish all leads of this process, let its waiters go with ``finished=False``, end the thread. Idempotent."""
        with self._changed:
            self._closed = True
            leads = list(self._beats)
            beater = self._beater
            self._changed.notify_all()
        for lead in leads:
            self._finish(lead)
        if beater is not None:
            beater.join(_CLOSE_S)

    def _is_over(self, here: _Here) -> bool:
        return bool(here.outcome) or self._closed

    # Waiting, on the caller's thread.

    def _watch(self, digest: str, deadline: Deadline) -> Lead | Waited:
        flight = new_word()
        sight: _Sight | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            head = self._head(digest, None if sight is not None else flight, deadline)
            if sight is None:
                if head == flight:
                    return Lead(self, digest, flight, 0)
                if head is None:
                    continue  # was not readable, and is removed
                sight = _Sight(flight=head, changed_s=self._clock.monotonic())
            elif head != sight.flight:
                return Waited(finished=True)
            elif self._clock.monotonic() - sight.looked_s >= self._beat_s / 2:
                if self._look(sight, deadline):
                    return Waited(finished=True)
                if self._clock.monotonic() - sight.changed_s >= self._dead_after_s:
                    lead = self._take_over(digest, sight, deadline)
                    if lead is not None:
                        return lead
            with self._changed:
                if self._closed or deadline.expired:
                    return Waited(finished=False)
                self._clock.wait(self._changed, deadline.remaining(pause_s))
            pause_s = min(_LONGEST_PAUSE_S, pause_s * _LONGER)

    def _head(self, digest: str, flight: str | None, deadline: Deadline) -> str | None:
        """Return the flight that is on; begin ``flight`` where there is none and one is given."""
        key = self._key(digest)
        if flight is None:
            value = self._relay.get_bytes(key, deadline)
        else:
            try:
                value = self._relay.put_if_absent(key, encoded(Head(flight=flight)), deadline)
            except MoonrelayError:
                self._take_back(key, encoded(Head(flight=flight)))
                raise
        if value is None:
            return None
        head = decoded(Head, value)
        if head is None:
            _log.warning("flight record %s is of another version, or damaged; removed", key)
            self._relay.remove([key], deadline)
            return None
        return head.flight

    def _look(self, sight: _Sight, deadline: Deadline) -> bool:
        """Look for signs of life; return whether the flight has ended since the look before."""
        was_new = sight.looked_s == float("-inf")
        before = (sight.epoch, sight.beats, sight.ended)
        while (turn := self._turn(sight.flight, sight.epoch + 1, deadline)) is not None:
            sight.epoch, sight.beats, sight.ended = sight.epoch + 1, 0, turn.ends
            if turn.ends:
                break
        if not sight.ended:
            sight.beats = self._count_beats(sight.flight, sight.epoch, sight.beats, deadline)
        sight.looked_s = self._clock.monotonic()
        if (sight.epoch, sight.beats, sight.ended) != before:
            sight.changed_s = sight.looked_s
        # One that was over at the first look may be what somebody left who died while it finished.
        return sight.ended and not before[2] and not was_new

    def _take_over(self, digest: str, sight: _Sight, deadline: Deadline) -> Lead | None:
        """Lead in place of one that gives no sign of life, or remove what one left that died while it finished."""
        if sight.ended:
            self._clean(digest, sight.flight, sight.epoch, deadline)
            return None
        key, mine = self._key(f"{sight.flight}/{sight.epoch + 1}"), encoded(Turn(by=new_word(), ends=False))
        try:
            standing = self._relay.put_if_absent(key, mine, deadline)
            if standing != mine:
                return None
            if self._head(digest, None, deadline) == sight.flight:
                return Lead(self, digest, sight.flight, sight.epoch + 1)
        except MoonrelayError:
            self._take_back(key, mine)
            raise
        self._take_back(key, mine)  # the flight has ended meanwhile
        return None

    # Leading.

    def _stands(self, lead: Lead) -> bool:
        try:
            return self._leads(lead, Deadline(self._dead_after_s, self._clock))
        except MoonrelayError:
            return False

    def _leads(self, lead: Lead, deadline: Deadline) -> bool:
        if self._turn(lead.flight, lead.epoch + 1, deadline) is not None:
            return False
        return self._head(lead.digest, None, deadline) == lead.flight

    def _finish(self, lead: Lead) -> None:
        with self._changed:
            beats = self._beats.pop(lead, None)
            self._changed.notify_all()
        if beats is None:
            return  # finished already
        deadline = Deadline(_FINISH_S, self._clock)
        key, mine = self._key(f"{lead.flight}/{lead.epoch + 1}"), encoded(Turn(by=new_word(), ends=True))
        try:
            if self._relay.put_if_absent(key, mine, deadline) == mine:
                self._clean(lead.digest, lead.flight, lead.epoch + 1, deadline)
        except MoonrelayError as error:
            _log.warning("flight %.16s was not ended: %s", lead.digest, error)
        finally:
            with self._changed:
                here = self._here.get(lead.digest)
                if here is not None and here.lead is lead:
                    self._let_go(lead.digest, here, finished=True)

    def _clean(self, digest: str, flight: str, last: int, deadline: Deadline) -> None:
        """Remove a flight that has ended, whose end is epoch ``last``: its head goes last, and is what others see."""
        gone: list[str] = []
        for epoch in range(last):
            beats = self._count_beats(flight, epoch, 0, deadline)
            gone += [self._beat_key(flight, epoch, k) for k in range(beats)]
        gone += [self._key(f"{flight}/{epoch}") for epoch in range(1, last + 1)]
        if self._head(digest, None, deadline) == flight:
            gone.append(self._key(digest))
        self._relay.remove(gone, deadline)

    def _start_beating(self) -> None:
        """Start the thread unless it runs. The lock is held."""
        if self._beater is None:
            self._beater = threading.Thread(target=self._beat_on, name="moonrelay-cache-beat", daemon=True)
            self._beater.start()

    def _beat_on(self) -> None:
        due = Deadline(self._beat_s, self._clock)
        while True:
            with self._changed:
                deadline_passed = False
                while self._beats and not (deadline_passed := due.expired):
                    self._clock.wait(self._changed, due.remaining())
                if not deadline_passed:
                    self._beater = None
                    return
                due = Deadline(self._beat_s, self._clock)
                leads = [(lead, k) for lead, k in self._beats.items() if k != _OVERTAKEN]
            for lead, k in leads:
                self._beat(lead, k)

    def _beat(self, lead: Lead, k: int) -> None:
        deadline = Deadline(self._dead_after_s / 2, self._clock)
        key = self._beat_key(lead.flight, lead.epoch, k)
        with contextlib.suppress(MoonrelayError):  # the next one may get through
            self._relay.put_if_absent(key, MARK, deadline)
            leads = self._leads(lead, deadline)
            with self._changed:
                if lead in self._beats:
                    self._beats[lead] = k + 1 if leads else _OVERTAKEN
            if not leads:
                # Overtaken, or ended: whoever cleaned up did not see this one.
                self._relay.remove([key], deadline)

    def _count_beats(self, flight: str, epoch: int, known: int, deadline: Deadline) -> int:
        def stands(k: int) -> bool:
            return self._relay.get_bytes(self._beat_key(flight, epoch, k), deadline) is not None

        return gallop(stands, known - 1) + 1

    def _turn(self, flight: str, epoch: int, deadline: Deadline) -> Turn | None:
        value = self._relay.get_bytes(self._key(f"{flight}/{epoch}"), deadline)
        # One that is not readable was created by somebody all the same.
        return None if value is None else decoded(Turn, value) or Turn(by="0" * 16, ends=False)

    def _take_back(self, key: str, value: bytes) -> None:
        """Remove a record of our own, if it stands; what can't be removed is taken over like a dead lead's."""
        deadline = Deadline(1.0, self._clock)
        with contextlib.suppress(MoonrelayError):
            if self._relay.get_bytes(key, deadline) == value:
                self._relay.remove([key], deadline)

    def _let_go(self, digest: str, here: _Here, *, finished: bool) -> None:
        """Wake the threads that wait for this process's own. The lock is held."""
        here.outcome = "finished" if finished else "left"
        if self._here.get(digest) is here:
            del self._here[digest]
        self._changed.notify_all()

    def _beat_key(self, flight: str, epoch: int, k: int) -> str:
        return self._key(f"{flight}/{epoch}/b/{k}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/f/{name}"
