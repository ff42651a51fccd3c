"""From where a claimed payload is read: the producer's memory, or the relay.

Owns one claim at one owner: its token, its renewal and its end. Each source reads one chunk at a time into a landing
place and proves the bytes; what to do when that fails is the claim's business (`moonrelay.connector.claim`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import msgspec

from moonrelay import integrity
from moonrelay.clock import Deadline
from moonrelay.connector.landing import Landing
from moonrelay.connector.progress import ProgressView
from moonrelay.connector.runtime import Runtime
from moonrelay.control import messages as wire
from moonrelay.errors import (
    ConfigError,
    DeadlineExceeded,
    IntegrityError,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    TransferFailed,
    TransferTimeout,
    WireError,
)
from moonrelay.handle import ControlAddress, RelayAddress, StageHandle
from moonrelay.relay.records import ClaimToken, Held, RelayedPayload
from moonrelay.transfer.pull import Move

if TYPE_CHECKING:
    from moonrelay.relay.base import Relay

logger = logging.getLogger(__name__)

#: Pause between two looks at a relayed payload that another reader holds, in seconds.
HELD_POLL_S = 0.2
END_TIMEOUT_S = 5.0
#: Time left for the owner's answer to a claim that has waited, in seconds.
ANSWER_MARGIN_S = 0.5


class Source(ABC):
    """One claim at the owner of a payload's bytes.

    Threads: `fetch` by one thread at a time; `renew` and `close` from any.
    """

    #: ``p2p`` or ``store``, as it stands in events and summaries.
    path: ClassVar[str]

    def __init__(self, runtime: Runtime, handle: StageHandle, progress: ProgressView) -> None:
        self._runtime = runtime
        self.handle = handle
        self.progress = progress

    @abstractmethod
    def fetch(self, chunk: int, landing: Landing, deadline: Deadline, cancelled: Callable[[], bool]) -> None:
        """Read one readable chunk and prove it. Blocks: until the deadline.

        Raises:
            IntegrityError: The bytes are not the producer's.
            TransferFailed, TransferTimeout, PeerLost, Cancelled: Not read.
            LeaseLost: The claim is no longer ours.
        """

    @property
    @abstractmethod
    def claim_ttl_s(self) -> float | None:
        """After how long the owner drops the claim unless it is renewed; ``None`` where it need not be."""

    @abstractmethod
    def renew(self) -> None:
        """Keep the claim; called several times per ``claim_ttl_s``. Blocks: for one request."""

    @abstractmethod
    def ack(self, deadline: Deadline) -> None:
        """Say that the payload was consumed. Raises `LeaseLost` when another reader has it."""

    @abstractmethod
    def nack(self) -> None:
        """Give the claim back, best effort. Blocks: for one request."""


class DirectSource(Source):
    """A claim granted by the producer, read from its memory."""

    path = "p2p"

    def __init__(
        self,
        runtime: Runtime,
        handle: StageHandle,
        progress: ProgressView,
        owner: ControlAddress,
        granted: wire.Granted,
        asked_at: float,
    ) -> None:
        super().__init__(runtime, handle, progress)
        self._owner = owner
        self._granted = granted
        self._confirmed_at = asked_at

    def fetch(self, chunk: int, landing: Landing, deadline: Deadline, cancelled: Callable[[], bool]) -> None:
        moves, where = [], []
        for leaf, offset, extent in landing.leaf_extents(chunk):
            location = self._granted.tensors[leaf]
            moves.append(
                Move(
                    region=location.region,
                    remote_address=location.address + offset,
                    local_address=extent.address,
                    nbytes=extent.nbytes,
                )
            )
            where.append(extent.address)
        digest = integrity.digester(self.handle.digest)
        coverage = integrity.Coverage(self.handle.chunk_nbytes(chunk))
        starts = _starts(moves)

        def landed(move: int, offset: int, nbytes: int) -> None:
            # The digest runs while later pieces are on their way.
            coverage.add(starts[move] + offset, nbytes)
            landing.update_digest(digest, where[move] + offset, nbytes)

        if moves:
            if self._granted.engine is None:
                message = "the producer granted a direct read without an engine"
                raise TransferFailed(message, request_id=self.handle.request_id)
            try:
                self._runtime.data().puller.pull(
                    self._granted.engine,
                    moves,
                    deadline,
                    on_landed=landed,
                    cancelled=cancelled,
                    on_quiet=landing.keep_until_quiet(),
                    piecewise=self.handle.digest != integrity.OFF,
                )
            except BaseException:
                self._runtime.watch_quarantine()
                raise
        if not coverage.complete:
            message = f"chunk {chunk} is not covered by what the engine moved"
            raise IntegrityError(message, request_id=self.handle.request_id)
        if self.handle.digest == integrity.OFF:
            self._confirm_claim()
            if self.progress.failure is not None:
                raise self.progress.failure
        elif digest.digest() != self.progress.digest(chunk, deadline):
            message = f"chunk {chunk} differs from what the producer published"
            raise IntegrityError(message, request_id=self.handle.request_id, path=self.path)

    @property
    def claim_ttl_s(self) -> float | None:
        return self._granted.claim_ttl_s

    def renew(self) -> None:
        reply = self._ask(wire.Renew(payload_id=self.handle.id, token=self._granted.token))
        if isinstance(reply, wire.Renewed):
            self.progress.update(reply.progress)

    def ack(self, deadline: Deadline) -> None:
        message = wire.Ack(payload_id=self.handle.id, token=self._granted.token)
        self._runtime.channel().request(self._owner, message, deadline)

    def nack(self) -> None:
        try:
            self._ask(wire.Nack(payload_id=self.handle.id, token=self._granted.token))
        except MoonrelayError as exc:
            logger.debug("nack of %s did not arrive, the claim will lapse: %s", self.handle.id, exc)

    def release(self, deadline: Deadline) -> None:
        """Tell the producer that nobody needs the payload any more."""
        self._runtime.channel().request(self._owner, wire.Release(payload_id=self.handle.id), deadline)

    def forget(self) -> None:
        """Let the engine drop what it keeps for a producer that is gone."""
        if self._granted.engine is not None:
            self._runtime.data().engine.forget(self._granted.engine)

    def _confirm_claim(self) -> None:
        """Without digests only the claim proves that the memory was not reused while it was read."""
        if self._runtime.clock.monotonic() - self._confirmed_at > self._granted.claim_ttl_s / 2:
            self.renew()

    def _ask(self, message: wire.Request) -> wire.Reply:
        control = self._runtime.settings.control
        asked_at = self._runtime.clock.monotonic()
        deadline = Deadline(control.peer_timeout_s, self._runtime.clock)
        reply = self._runtime.channel().request(self._owner, message, deadline)
        # Reckoned from before the question: the owner counts from its arrival, which is later.
        self._confirmed_at = asked_at
        return reply


class RelaySource(Source):
    """A claim on a relayed payload, decided by the relay's own records; the producer may be gone.

    When the producer lives, ``direct`` is the claim that it granted: it is renewed and acknowledged too, and the
    producer removes the objects. Otherwise the last reader removes them.
    """

    path = "store"

    def __init__(
        self,
        runtime: Runtime,
        handle: StageHandle,
        progress: ProgressView,
        relayed: RelayedPayload,
        token: ClaimToken,
        direct: DirectSource | None,
    ) -> None:
        super().__init__(runtime, handle, progress)
        self._relayed = relayed
        self._token = token
        self._direct = direct

    def fetch(self, chunk: int, landing: Landing, deadline: Deadline, cancelled: Callable[[], bool]) -> None:
        parts = landing.extents(chunk)
        record = self._relayed.get_chunk(chunk, parts, deadline, on_quiet=landing.keep_until_quiet())
        if record is None:
            message = f"chunk {chunk} is not in the relay any more"
            raise LeaseLost(message, request_id=self.handle.request_id)
        digest = integrity.digester(self.handle.digest)
        for part in parts:
            landing.update_digest(digest, part.address, part.nbytes)
        if digest.digest() != record.digest:
            message = f"chunk {chunk} differs from what the producer put into the relay"
            raise IntegrityError(message, request_id=self.handle.request_id, path=self.path)

    @property
    def claim_ttl_s(self) -> float | None:
        direct = self._direct
        return None if direct is None else direct.claim_ttl_s

    def renew(self) -> None:
        direct = self._direct
        if direct is None:
            return
        try:
            direct.renew()
        except LeaseLost:
            # The renewal came too late, but who reads is decided by the relay's record, which still is ours.
            self._claim_again()
        except PeerLost:
            # The relay's record stands without the producer, but what it had not stored will not come any more.
            self._go_on_alone()

    def _claim_again(self) -> None:
        """Ask the producer once more, which may have given our place to a reader that now waits for our record.

        Raises:
            LeaseLost, LeaseExpired, Aborted: The payload is gone, whoever holds the record.
        """
        deadline = Deadline(self._runtime.settings.control.peer_timeout_s, self._runtime.clock)
        reader = self._token.reader_id
        try:
            self._direct, _ = claim_directly(self._runtime, self.handle, self.progress, reader, deadline)
        except (LeaseHeld, PeerLost, TransferTimeout):
            self._go_on_alone()

    def _go_on_alone(self) -> None:
        """Go on without the producer, where everything was stored; else raise the error being handled."""
        if self._relayed.get_end(Deadline(END_TIMEOUT_S, self._runtime.clock)) is None:
            raise  # noqa: PLE0704 - called by handlers only
        self._direct = None
        self.progress.clear_failure()
        self.progress.complete()

    def ack(self, deadline: Deadline) -> None:
        last = self._relayed.ack(self._token, deadline)
        if self._acknowledged_by_owner(last, deadline) or not last:
            return
        # Nobody else is left to remove the objects; a late reader finds the tombstone.
        self._relayed.tombstone("consumed", deadline)
        self._relayed.remove_all(self.handle.num_chunks, deadline)

    def _acknowledged_by_owner(self, last: bool, deadline: Deadline) -> bool:
        """Tell the producer, where it lives, that the relay's record says consumed; return whether it will clean up."""
        direct = self._direct
        if direct is None:
            return False
        try:
            direct.ack(deadline)
        except LeaseLost:
            # The claim lapsed there, but nobody can win besides the record: a later reader is turned away by it.
            if last:
                try:
                    direct.release(deadline)
                except (PeerLost, DeadlineExceeded):
                    return False
        except (PeerLost, DeadlineExceeded):
            return False
        return True

    def nack(self) -> None:
        deadline = Deadline(END_TIMEOUT_S, self._runtime.clock)
        try:
            self._relayed.nack(self._token, deadline)
        except MoonrelayError as exc:
            logger.warning("claim on relayed %s could not be given back: %s", self.handle.id, exc)
        if self._direct is not None:
            self._direct.nack()


def claim_directly(
    runtime: Runtime, handle: StageHandle, progress: ProgressView, reader: str, deadline: Deadline
) -> tuple[DirectSource, wire.Granted]:
    """Ask the producer for the payload. Blocks: until granted, or the deadline.

    Raises:
        LeaseHeld, LeaseLost, LeaseExpired, Aborted: The producer's answer.
        PeerLost: The producer is gone.
        TransferTimeout: It did not answer by the deadline, nor was it silent for long enough to be gone.
        ConfigError: It serves by another engine than ours.
    """
    if handle.direct is None:
        message = "the handle names no producer"
        raise PeerLost(message, request_id=handle.request_id)
    if deadline.expired:
        # Asked all the same, the producer would grant a claim that nobody is there to take.
        message = f"timeout_s={deadline.timeout_s} leaves no time to ask the producer"
        raise TransferTimeout(message, request_id=handle.request_id)
    asked_at = runtime.clock.monotonic()
    left_s = deadline.remaining(runtime.settings.lease_ttl_s) or 0.0
    # The owner gives up a little sooner than we do, so that its answer, not our deadline, says why.
    wait_s = max(left_s - ANSWER_MARGIN_S, left_s / 2)
    request = wire.Claim(payload_id=handle.id, reader=reader, wait_s=wait_s)
    try:
        granted = runtime.channel().request(handle.direct.control, request, deadline)
    except DeadlineExceeded as exc:
        text = f"the producer did not answer a claim within {deadline.timeout_s} s: {exc.message}"
        raise TransferTimeout(text, request_id=handle.request_id) from exc
    if not isinstance(granted, wire.Granted):
        text = f"the producer answered a claim with {type(granted).__name__}"
        raise PeerLost(text, request_id=handle.request_id)
    progress.update(granted.progress)
    source = DirectSource(runtime, handle, progress, handle.direct.control, granted, asked_at)
    if granted.where == "direct":
        try:
            if len(granted.tensors) != len(handle.tensors):
                text = f"the producer granted {len(granted.tensors)} tensors, the handle names {len(handle.tensors)}"
                raise WireError(text, request_id=handle.request_id)
            _check_engine(runtime, handle, granted)
        except MoonrelayError:
            source.nack()
            raise
    return source, granted


def _check_engine(runtime: Runtime, handle: StageHandle, granted: wire.Granted) -> None:
    ours = runtime.data().engine.address.engine
    theirs = granted.engine.engine if granted.engine is not None else None
    if theirs != ours:
        message = (
            f"the producer serves by engine {theirs!r}, this connector reads by {ours!r}; "
            f"give both the same te_config engine"
        )
        raise ConfigError(message, field="te_config.engine", request_id=handle.request_id)


def claim_in_relay(
    runtime: Runtime,
    handle: StageHandle,
    progress: ProgressView,
    reader: str,
    deadline: Deadline,
    *,
    direct: DirectSource | None,
) -> RelaySource | None:
    """Claim a payload by the relay's records. Blocks: until claimed, or the deadline.

    Args:
        direct: The producer's grant; ``None`` when the producer is gone, and then only a complete payload counts.

    Returns:
        The source; ``None`` when the relay has no complete payload.

    Raises:
        LeaseHeld: Another living reader had it until the deadline.
        LeaseLost, LeaseExpired, Aborted: It was consumed or buried.
    """
    if handle.relay is None:
        return None
    relay = runtime.relay_at(handle.relay)
    relayed = relayed_payload(relay, handle, handle.relay, runtime)
    if direct is None:
        relayed.check_buried(deadline)
        if relayed.get_end(deadline) is None:
            return None
    owner = msgspec.msgpack.encode(runtime.channel().address)
    held = False
    while True:
        try:
            claimed = relayed.claim(reader, owner, deadline)
        except TransferTimeout as exc:
            if not held:
                raise
            raise _still_held(handle, deadline) from exc
        if isinstance(claimed, ClaimToken):
            break
        held = True
        taken = _take_over_dead(runtime, handle, relayed, claimed, reader, owner, deadline)
        if taken is not None:
            claimed = taken
            break
        if deadline.expired:
            raise _still_held(handle, deadline)
        runtime.pause(deadline.remaining(HELD_POLL_S))
    if direct is None:
        progress.clear_failure()
        progress.complete()
    return RelaySource(runtime, handle, progress, relayed, claimed, direct)


def _still_held(handle: StageHandle, deadline: Deadline) -> LeaseHeld:
    message = f"another reader holds the relayed payload after {deadline.timeout_s} s"
    return LeaseHeld(message, request_id=handle.request_id)


def relayed_payload(relay: Relay, handle: StageHandle, address: RelayAddress, runtime: Runtime) -> RelayedPayload:
    """Return the relay's view of a handle's payload."""
    return RelayedPayload(relay, address.prefix, handle.id, slots=handle.lease.readers)


def _take_over_dead(
    runtime: Runtime,
    handle: StageHandle,
    relayed: RelayedPayload,
    holders: list[Held],
    reader: str,
    owner: bytes,
    deadline: Deadline,
) -> ClaimToken | None:
    """Claim in place of a holder that does not answer, or that answers that it holds nothing."""
    for held in holders:
        if _lives(runtime, handle, held, deadline):
            continue
        logger.warning("claim of %s on relayed %s is taken over, its holder is gone", held.reader_id, handle.id)
        token = relayed.take_over(held, reader, owner, deadline)
        if token is not None:
            return token
    return None


def _lives(runtime: Runtime, handle: StageHandle, held: Held, deadline: Deadline) -> bool:
    control = runtime.settings.control
    patience = Deadline(deadline.remaining(control.peer_timeout_s), runtime.clock)
    try:
        address = msgspec.msgpack.decode(held.owner, type=ControlAddress)
        reply = runtime.channel().request(
            address, wire.HoldsClaim(payload_id=handle.id, reader=held.reader_id), patience
        )
    except (PeerLost, WireError, msgspec.MsgspecError):
        return False
    except (DeadlineExceeded, TransferTimeout):
        # Silent for less than the peer timeout is not dead.
        return True
    return isinstance(reply, wire.Holding) and reply.held


def _starts(moves: list[Move]) -> list[int]:
    starts, total = [], 0
    for move in moves:
        starts.append(total)
        total += move.nbytes
    return starts
