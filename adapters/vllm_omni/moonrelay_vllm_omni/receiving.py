"""The consumer's side: keys that somebody asked for, the looks into the directory for them, and their fetches.

Owns every wait, so that a caller that polls never blocks and one that waits does so until its deadline. A payload is
acknowledged when it is complete and still wanted; one whose reader gave up is given back unread.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import (
    Aborted,
    ClosedError,
    DeadlineExceeded,
    IntegrityError,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from moonrelay.handle import StageHandle
from moonrelay_vllm_omni.directory import Edge, KeyDirectory
from moonrelay_vllm_omni.mapping import EDGE_FIELD

if TYPE_CHECKING:
    from moonrelay.connector import DiffusionConnector
    from moonrelay.connector.claim import PayloadClaim

logger = logging.getLogger(__name__)

#: The payload is no more, for this reader or for anybody: a record that names it is useless.
GONE: Final = (LeaseLost, LeaseExpired, Aborted, PeerLost)
#: It may be had a little later: another reader holds it, or a transfer had no luck.
NOT_YET: Final = (LeaseHeld, TransferFailed, TransferTimeout, DeadlineExceeded)
#: Pause between two looks for a key: a fraction of the time it was waited for, between these bounds, in seconds.
LOOK_FRACTION: Final = 0.05
LOOK_MIN_S: Final = 0.001
LOOK_MAX_S: Final = 0.05
#: Pause after a look or a fetch that failed, in seconds.
RETRY_S: Final = 0.25
#: How often a fetch that had no luck is begun again before its reader is told.
RETRIES: Final = 2
#: A key that nobody asked for again is not looked for any more after this long, in seconds.
FORGET_S: Final = 10.0
#: How long a payload that was fetched for a reader that never came back is kept, in seconds, at most.
KEEP_S: Final = 60.0
#: Bound of one look, in seconds.
LOOK_TIMEOUT_S: Final = 5.0
#: A fetch ends this much before its reader's deadline, so that the reader hears why: a part of the time, and a bound.
MARGIN: Final = 0.1
MARGIN_MAX_S: Final = 0.3
#: Bound of the question how a payload stands, in seconds.
ASK_TIMEOUT_S: Final = 3.0
#: Payloads that were taken here, whose record may still stand for a moment.
TAKEN_KEPT: Final = 4096


class _State(enum.Enum):
    LOOKING = "looking"
    FETCHING = "fetching"
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False, slots=True, kw_only=True)
class _Wanted:
    """One key that somebody asked for. Guarded by the receiver's lock."""

    edge: Edge
    since_s: float
    asked_s: float
    look_s: float
    until: Deadline
    state: _State = _State.LOOKING
    handle: StageHandle | None = None
    told: StageHandle | None = None
    claim: PayloadClaim | None = field(default=None, repr=False)
    data: object = None
    failure: MoonrelayError | None = None
    waiting: int = 0
    retries: int = 0
    given_up: bool = False
    acking: bool = False


@dataclass(frozen=True, slots=True)
class Received:
    """A payload that was taken over: its tree, and the handle that it came by."""

    data: object
    handle: StageHandle


class Receiver:
    """Fetches payloads by key for callers that poll and callers that wait.

    Args:
        connector: Claims and reads.
        directory: Says which payload a key stands for.
        clock: All deadlines are on it.
        fetchers: How many payloads are fetched at a time.
        fetch_timeout_s: Bound of a fetch that a polling caller started.
        keep_s: How long an uncollected payload is kept.
        on_trouble: Told each failure that is no reader's to hear.

    Threads: any.
    """

    def __init__(
        self,
        connector: DiffusionConnector,
        directory: KeyDirectory,
        clock: Clock,
        *,
        fetchers: int,
        fetch_timeout_s: float,
        keep_s: float,
        on_trouble: Callable[[MoonrelayError], None],
    ) -> None:
        self._connector = connector
        self._directory = directory
        self._clock = clock
        self._fetch_timeout_s = fetch_timeout_s
        self._keep_s = min(keep_s, KEEP_S)
        self._on_trouble = on_trouble
        self._changed = threading.Condition()
        self._wanted: dict[Edge, _Wanted] = {}
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._closed = False
        self._pool = ThreadPoolExecutor(fetchers, thread_name_prefix="moonrelay-omni-fetch")
        self._looker = threading.Thread(target=self._look_around, name="moonrelay-omni-look", daemon=True)
        self._looker.start()

    @property
    def waiting(self) -> int:
        """How many keys are looked for or being fetched."""
        with self._changed:
            return sum(wanted.state in (_State.LOOKING, _State.FETCHING) for wanted in self._wanted.values())

    def poll(self, edge: Edge, told: StageHandle | None = None) -> Received | None:
        """Return the payload under ``edge`` if it is here; see to it that it will be. Never blocks.

        Args:
            edge: The key.
            told: Its handle, where the caller has it: then the directory is not asked.

        Raises:
            MoonrelayError: It will never come, or not unharmed; said once, then the key is as if never asked for.
            ClosedError: The receiver is closed.
        """
        with self._changed:
            wanted = self._want(edge, told, Deadline(self._fetch_timeout_s, self._clock))
            try:
                return self._collect(wanted)
            except NOT_YET as exc:
                if wanted.retries >= RETRIES:
                    raise
                self._again(wanted, exc)
                return None

    def wait(self, edge: Edge, told: StageHandle | None, deadline: Deadline) -> Received | None:
        """Return the payload under ``edge``; ``None`` where it did not come by ``deadline``. Blocks: until then.

        Raises: as `poll`.
        """
        left_s = deadline.remaining() or 0.0
        margin_s = min(MARGIN * left_s, MARGIN_MAX_S)
        last: MoonrelayError | None = None
        with self._changed:
            while True:
                wanted = self._want(edge, told, Deadline((deadline.remaining() or 0.0) - margin_s, self._clock))
                wanted.waiting += 1
                try:
                    ended = deadline.wait_for(self._changed, partial(self._ended, wanted))
                finally:
                    wanted.waiting -= 1
                if not ended:
                    if last is not None:
                        raise last
                    return None
                try:
                    found = self._collect(wanted)
                except MoonrelayError as exc:
                    late = (deadline.remaining() or 0.0) <= margin_s
                    if late or not isinstance(exc, NOT_YET) or wanted.retries >= RETRIES:
                        raise
                    last = exc
                    self._again(wanted, exc)
                    continue
                if found is not None or wanted.given_up:
                    return found

    def give_up(self, key: str, edge: Edge | None = None) -> None:
        """Look for ``key`` no more, and give back what is being fetched of it; what is complete stays for a while.

        Args:
            key: On every edge.
            edge: On this one only.
        """
        claims = []
        with self._changed:
            for wanted in [one for one in self._wanted.values() if one.edge.key == key]:
                if (edge is not None and wanted.edge != edge) or wanted.acking or wanted.state is _State.DONE:
                    continue
                wanted.given_up = True
                del self._wanted[wanted.edge]
                if wanted.claim is not None:
                    claims.append(wanted.claim)
            self._changed.notify_all()
            if not self._closed:
                for claim in claims:
                    self._pool.submit(claim.nack)

    def prune(self) -> None:
        """Forget keys that nobody asks for any more, and payloads that nobody collects. Returns at once."""
        with self._changed:
            self._prune()

    def stop(self) -> None:
        """Take no more orders, and wake all who wait. Idempotent. Blocks: for a look under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._looker.join(LOOK_TIMEOUT_S)

    def close(self) -> None:
        """End the fetches' threads; called when the connector has ended its claims. Idempotent."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._changed:
            self._wanted.clear()

    # -- asking (the lock is held) ----------------------------------------------------------------------------------

    def _want(self, edge: Edge, told: StageHandle | None, until: Deadline) -> _Wanted:
        if self._closed:
            message = "the connector is closed; make a new one"
            raise ClosedError(message, key=edge.key)
        now = self._clock.monotonic()
        wanted = self._wanted.get(edge)
        if wanted is None:
            wanted = _Wanted(edge=edge, since_s=now, asked_s=now, look_s=now, until=until)
            self._wanted[edge] = wanted
            self._changed.notify_all()
        wanted.asked_s = now
        if wanted.state is _State.LOOKING:
            wanted.until = until
            if told is not None and wanted.told is None:
                wanted.told = told
                self._fetch(wanted, told)
        return wanted

    def _ended(self, wanted: _Wanted) -> bool:
        return self._closed or wanted.given_up or wanted.state in (_State.DONE, _State.FAILED)

    def _collect(self, wanted: _Wanted) -> Received | None:
        if self._closed:
            message = "the connector was closed"
            raise ClosedError(message, key=wanted.edge.key)
        if wanted.given_up or wanted.state not in (_State.DONE, _State.FAILED):
            return None
        if self._wanted.get(wanted.edge) is not wanted:
            return None  # another caller was faster
        del self._wanted[wanted.edge]
        if wanted.failure is not None:
            raise wanted.failure
        # Nothing of ours may keep the caller's tensors, and with them pool memory.
        data, wanted.data = wanted.data, None
        return None if wanted.handle is None else Received(data, wanted.handle)

    def _again(self, failed: _Wanted, error: MoonrelayError) -> None:
        """Try once more, after a pause, what may have luck then."""
        logger.warning("fetching %s failed, it is tried again: %s", failed.edge, error)
        self._on_trouble(error)
        now = self._clock.monotonic()
        self._wanted[failed.edge] = _Wanted(
            edge=failed.edge,
            since_s=now,
            asked_s=now,
            look_s=now + RETRY_S,
            until=Deadline(self._fetch_timeout_s, self._clock),
            told=failed.told,
            retries=failed.retries + 1,
        )
        self._changed.notify_all()

    def _prune(self) -> None:
        now = self._clock.monotonic()
        for edge, wanted in list(self._wanted.items()):
            idle_s = now - wanted.asked_s
            if wanted.waiting or wanted.state is _State.FETCHING:
                continue
            if idle_s >= (self._keep_s if wanted.state is _State.DONE else FORGET_S):
                del self._wanted[edge]
                wanted.data = None
                if wanted.state is _State.DONE:
                    logger.warning("%s was fetched and never collected, it is dropped after %.3g s", edge, idle_s)

    # -- looking ----------------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                self._prune()
                now = self._clock.monotonic()
                looking = [one for one in self._wanted.values() if one.state is _State.LOOKING]
                due = [one for one in looking if one.look_s <= now]
                if not due:
                    next_s = min((one.look_s for one in looking), default=now + FORGET_S)
                    self._clock.wait(self._changed, max(next_s - now, 0.0))
                    continue
            for wanted in due:
                self._look(wanted)

    def _look(self, wanted: _Wanted) -> None:
        """Look once for one key. The lock is not held."""
        handle: StageHandle | None = None
        pause_s = 0.0
        try:
            handle = wanted.told or self._directory.find(wanted.edge, Deadline(LOOK_TIMEOUT_S, self._clock))
            if handle is not None:
                _check_edge(handle, wanted.edge)
        except MoonrelayError as exc:
            handle, pause_s = None, RETRY_S
            self._on_trouble(exc)
            logger.warning("looking for %s failed, it is looked for again: %s", wanted.edge, exc)
        except Exception as exc:
            handle, pause_s = None, RETRY_S
            self._on_trouble(MoonrelayError(f"looking for a key failed: {type(exc).__name__}: {exc}"))
            logger.exception("looking for %s failed", wanted.edge)
        with self._changed:
            if wanted.state is not _State.LOOKING or wanted.given_up or self._closed:
                return
            if handle is not None and handle.id not in self._taken:
                self._fetch(wanted, handle)
                return
            now = self._clock.monotonic()
            pause_s = max(pause_s, min(max((now - wanted.since_s) * LOOK_FRACTION, LOOK_MIN_S), LOOK_MAX_S))
            wanted.look_s = now + pause_s

    # -- fetching ---------------------------------------------------------------------------------------------------

    def _fetch(self, wanted: _Wanted, handle: StageHandle) -> None:
        """Begin a fetch. The lock is held."""
        wanted.state, wanted.handle = _State.FETCHING, handle
        self._pool.submit(self._run, wanted, handle)

    def _run(self, wanted: _Wanted, handle: StageHandle) -> None:
        """Take one payload over (in a thread of the pool)."""
        try:
            _check_edge(handle, wanted.edge)
            with self._changed:
                if wanted.given_up or self._closed:
                    return
                until = wanted.until
                if until.expired:
                    # The caller's time went by before this thread had its turn: not a failure, and not asked yet.
                    wanted.state, wanted.look_s = _State.LOOKING, self._clock.monotonic()
                    wanted.until = Deadline(self._fetch_timeout_s, self._clock)
                    self._changed.notify_all()
                    return
            with self._connector.claim(handle, timeout_s=until.remaining() or 0.0) as claim:
                with self._changed:
                    if wanted.given_up:
                        return
                    wanted.claim = claim
                data = claim.read(timeout_s=until.remaining())
                with self._changed:
                    if wanted.given_up:
                        return
                    wanted.acking = True
                claim.ack(timeout_s=until.remaining())
                relayed = claim.path == "store"
        except MoonrelayError as exc:
            self._failed(wanted, handle, exc)
        except Exception as exc:
            logger.exception("fetching %s failed", wanted.edge)
            self._failed(wanted, handle, MoonrelayError(f"fetching failed: {type(exc).__name__}: {exc}"))
        else:
            self._done(wanted, handle, data)
            if relayed and handle.lease.readers == 1:
                # Its owner may be dead; where it lives it does the same.
                self._drop(wanted.edge, handle)

    def _done(self, wanted: _Wanted, handle: StageHandle, data: object) -> None:
        with self._changed:
            if handle.lease.readers == 1:
                self._taken[handle.id] = None
                while len(self._taken) > TAKEN_KEPT:
                    self._taken.popitem(last=False)
            wanted.data, wanted.claim, wanted.acking = data, None, False
            wanted.state = _State.DONE
            wanted.asked_s = self._clock.monotonic()
            self._changed.notify_all()

    def _failed(self, wanted: _Wanted, handle: StageHandle, error: MoonrelayError) -> None:
        """Note why a fetch failed, unless the key stands for another payload by now."""
        newer: StageHandle | None = None
        if isinstance(error, GONE):
            newer = self._newer(wanted.edge, handle)
            if newer is None and not (isinstance(error, PeerLost) and not _is_dead(error)):
                self._drop(wanted.edge, handle)
        with self._changed:
            wanted.claim, wanted.acking = None, False
            if wanted.given_up or self._closed:
                self._changed.notify_all()
                return
            if newer is not None and newer.id not in self._taken:
                self._fetch(wanted, newer)
                return
            wanted.failure, wanted.state = error, _State.FAILED
            wanted.asked_s = self._clock.monotonic()
            self._changed.notify_all()

    def _newer(self, edge: Edge, handle: StageHandle) -> StageHandle | None:
        """Return the payload that replaced ``handle``; ``None`` where none did, or nobody can say."""
        try:
            found = self._directory.find(edge, Deadline(LOOK_TIMEOUT_S, self._clock))
        except MoonrelayError as exc:
            logger.warning("looking for %s failed: %s", edge, exc)
            return None
        return None if found is None or found.id == handle.id else found

    def _drop(self, edge: Edge, handle: StageHandle) -> None:
        try:
            self._directory.drop(edge, handle.id, Deadline(LOOK_TIMEOUT_S, self._clock))
        except MoonrelayError as exc:
            logger.warning("the record of %s is left to the sweep: %s", edge, exc)


def _check_edge(handle: StageHandle, edge: Edge) -> None:
    """Refuse a handle that was made for another key.

    Raises:
        IntegrityError: It was.
    """
    made_for = (handle.metadata or {}).get(EDGE_FIELD)
    if made_for != [edge.digest]:
        message = f"the handle found for {edge} was made for another key"
        raise IntegrityError(message, key=edge.key)


def is_lost(connector: DiffusionConnector, handle: StageHandle) -> bool:
    """Whether a payload's owner is gone for good, and nothing of it was relayed. Blocks: seconds at most."""
    try:
        connector.status(handle, timeout_s=ASK_TIMEOUT_S)
    except PeerLost as exc:
        return _is_dead(exc)
    except LeaseLost:
        return True
    except MoonrelayError as exc:
        logger.debug("nothing is known of %s: %s", handle.id, exc)
    return False


def _is_dead(error: MoonrelayError) -> bool:
    """Whether a lost peer's process is gone, rather than silent: that one may come back."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MoonrelayError) and cause.context.get("gone"):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
