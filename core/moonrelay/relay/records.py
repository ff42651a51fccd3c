"""What the objects of one relayed payload mean: chunks, the end record, claims, a tombstone.

Owns the key names under a payload's prefix, the header inside a chunk's object, and the claim chain by which readers
share a payload whose producer is gone. Built on the `Relay` contract only: it moves no byte itself, keeps no thread and
never waits but inside a relay's call. Bytes are not digested here: the header carries the producer's digest to the
reader, who compares.

Keys, under ``prefix``::

    c/<chunk>/<attempt>      header + the chunk's bytes; a put that failed is repeated under the next attempt
    end                      End: how many chunks, and how long the payload may stay
    claim/<slot>/<epoch>     Holder, Free or Done; the record of the highest epoch is the state of the slot
    tomb                     Tomb: why the payload is no more; stays until the sweeper takes it

Nothing is ever overwritten: a state changes by creating the next epoch's record, which only one can, so a late ack or
take-over loses by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import (
    Aborted,
    CapacityError,
    ConfigError,
    IntegrityError,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    TransferFailed,
)
from moonrelay.handle import Extent
from moonrelay.relay.base import OnQuiet, Relay
from moonrelay.relay.wire import (
    HEADER_BYTES,
    TOMB_ERRORS,
    ChunkRecord,
    Done,
    End,
    Free,
    Holder,
    Record,
    Tomb,
    check_id,
    decoder,
    pack_header,
    unpack_header,
)

__all__ = ["ChunkRecord", "ClaimToken", "End", "Held", "RelayedPayload", "Tomb", "payload_prefix"]

#: Attempts that a chunk's put may take; a reader looks for them in turn.
MAX_ATTEMPTS = 3
#: Largest ``owner`` of a claim, in bytes.
MAX_OWNER_BYTES = 2048

_MAX_READER_CHARS = 200
_CLEAN_UP_S = 2.0
_KEY = re.compile(r"(?P<prefix>.+)/(?P<name>c/\d+/\d+|end|tomb|claim/\d+/\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimToken:
    """A claim that this reader won; ``slot`` -1 stands for a payload that any number may read."""

    slot: int
    epoch: int
    reader_id: str
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A slot held by another reader: ask ``owner`` whether it lives, then wait, or `take_over` this very epoch."""

    slot: int
    epoch: int
    reader_id: str
    owner: bytes


def payload_prefix(key: str) -> tuple[str, str] | None:
    """Split a key into a payload's prefix and the name under it; ``None`` for a key that is not of a payload."""
    found = _KEY.fullmatch(key)
    return None if found is None else (found["prefix"], found["name"])


class RelayedPayload:
    """The objects of one payload.

    Args:
        relay: A started relay.
        prefix: Prefix of all keys, unique to this attempt, without a trailing slash.
        payload_id: The handle's id (1 to 64 ASCII characters); compared with each chunk's header.
        slots: How many readers may each consume the payload once (1 for delete-on-consume, n for shared, 0 for any
            number, which then needs no claim records).

    Threads: all methods from any thread. All block as long as the relay does, until their deadline, and raise the
    relay's errors.
    """

    def __init__(self, relay: Relay, prefix: str, payload_id: str, *, slots: int = 1) -> None:
        self._relay = relay
        self._prefix = prefix
        self._id = check_id(payload_id)
        self._slots = slots
        self._lock = threading.Lock()
        self._attempts: dict[int, int] = {}  # next attempt by chunk, as far as this process put it

    # Chunks.

    def put_chunk(
        self,
        chunk: int,
        parts: Sequence[Extent],
        digest: bytes,
        deadline: Deadline,
        *,
        on_quiet: OnQuiet | None = None,
    ) -> None:
        """Store a chunk. After a retryable failure call it again: it uses a fresh key, a few times.

        Args:
            chunk: Its number.
            parts: Its bytes; may be none.
            digest: The producer's digest of them, at most 32 bytes; empty where digests are off.
            deadline: When to give up.
            on_quiet: See `Relay`.
        """
        try:
            packed = pack_header(self._id, chunk, sum(part.nbytes for part in parts), digest)
        except ConfigError:
            _holding(None, on_quiet)()
            raise
        header = (ctypes.c_char * HEADER_BYTES).from_buffer_copy(packed)
        quiet = _holding(header, on_quiet)
        with self._lock:
            attempt = self._attempts.get(chunk, 0)
            self._attempts[chunk] = attempt + 1
        if attempt >= MAX_ATTEMPTS:
            quiet()
            message = f"chunk {chunk} could not be stored in {MAX_ATTEMPTS} attempts"
            error = TransferFailed(message, prefix=self._prefix)
            error.retryable = False
            raise error
        extents = [Extent(ctypes.addressof(header), HEADER_BYTES), *parts]
        try:
            self._relay.put(self._chunk_key(chunk, attempt), extents, deadline, on_quiet=quiet)
        except CapacityError:
            with self._lock:
                self._attempts[chunk] = attempt  # nothing was stored: the key is as good as new
            raise

    def get_chunk(
        self, chunk: int, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None
    ) -> ChunkRecord | None:
        """Read a chunk into ``parts``. The caller compares the digest with the bytes.

        Returns:
            Its record; ``None`` when it is not there (yet).

        Raises:
            IntegrityError: The object is not this chunk, has another size, or its header is torn.
        """
        header = (ctypes.c_char * HEADER_BYTES)()
        extents = [Extent(ctypes.addressof(header), HEADER_BYTES), *parts]
        quiet = _holding(header, on_quiet)
        for attempt in range(MAX_ATTEMPTS):
            gate = _Gate(quiet)
            try:
                found = self._relay.get(self._chunk_key(chunk, attempt), extents, deadline, on_quiet=gate.one_quiet)
            except BaseException:
                gate.open()
                raise
            if found:
                break
        quiet()
        return unpack_header(header.raw, self._id, chunk, sum(part.nbytes for part in parts)) if found else None

    def put_end(self, count: int, ttl_s: float | None, deadline: Deadline) -> None:
        """Say that all chunks are stored. Repeating it is safe.

        Args:
            count: How many there are.
            ttl_s: How long the sweeper leaves the payload alone; ``None`` until it is released.
            deadline: When to give up.

        Raises:
            IntegrityError: Another end was written before.
        """
        end = End(count=count, ttl_s=None if ttl_s is None else float(ttl_s))
        if self._create("end", end, deadline) != end:
            message = f"payload {self._id} has another end record already"
            raise IntegrityError(message, prefix=self._prefix)

    def get_end(self, deadline: Deadline) -> End | None:
        """Return the end record; ``None`` while the payload is not complete in the store."""
        record = self._read("end", deadline)
        if record is not None and not isinstance(record, End):
            raise self._wrong("end")
        return record

    # Claims: for readers that can't ask the producer.

    def claim(self, reader_id: str, owner: bytes, deadline: Deadline) -> ClaimToken | list[Held]:
        """Take a free slot.

        Args:
            reader_id: Who claims; of its own for each claim, so that repeating a claim that failed finds its record.
            owner: Whatever lets others ask whether the reader lives (its control address); at most 2 KiB.
            deadline: When to give up.

        Returns:
            A token; or, when no slot is free, who holds those that are not consumed (never empty).

        Raises:
            LeaseLost, LeaseExpired, Aborted: Every slot is consumed, or the payload was buried.
        """
        if self._slots == 0:
            self._check_tomb(deadline)
            return ClaimToken(slot=-1, epoch=0, reader_id=reader_id, nonce=b"")
        mine = _holder(reader_id, owner)
        held: list[Held] = []
        for slot in range(self._slots):
            epoch = 0
            while True:
                standing = self._create(f"claim/{slot}/{epoch}", mine, deadline)
                top = self._read(f"claim/{slot}/{epoch + 1}", deadline)
                while top is not None:
                    epoch, standing = epoch + 1, top
                    top = self._read(f"claim/{slot}/{epoch + 1}", deadline)
                if not isinstance(standing, Free):
                    break
                epoch += 1  # given back: the next epoch is anybody's
            if isinstance(standing, Holder):
                if standing.reader_id == reader_id:
                    return self._won(slot, epoch, standing, deadline)
                held.append(Held(slot=slot, epoch=epoch, reader_id=standing.reader_id, owner=standing.owner))
            elif not isinstance(standing, Done):
                raise self._wrong(f"claim/{slot}/{epoch}")
        if not held:
            self._check_tomb(deadline)
            message = f"payload {self._id} was consumed"
            raise LeaseLost(message, prefix=self._prefix)
        return held

    def take_over(self, held: Held, reader_id: str, owner: bytes, deadline: Deadline) -> ClaimToken | None:
        """Claim in place of a dead holder; ``None`` when somebody was faster, or the holder moved on: claim again."""
        mine = _holder(reader_id, owner)
        epoch = held.epoch + 1
        standing = self._create(f"claim/{held.slot}/{epoch}", mine, deadline)
        if not isinstance(standing, Holder) or standing.reader_id != reader_id:
            return None
        token = self._won(held.slot, epoch, standing, deadline)
        # A repeated call may find its own record of an earlier claim, which was given back or taken over since.
        return token if self.is_mine(token, deadline) else None

    def is_mine(self, token: ClaimToken, deadline: Deadline) -> bool:
        """Return whether the claim still stands: not taken over, given back, acknowledged or buried."""
        if token.slot < 0:
            return self.tomb(deadline) is None
        return (
            self._read(f"claim/{token.slot}/{token.epoch + 1}", deadline) is None
            and self._stands(token, deadline)
            and self.tomb(deadline) is None
        )

    def nack(self, token: ClaimToken, deadline: Deadline) -> bool:
        """Give the slot back; False when it was taken over before."""
        return token.slot < 0 or self._leave(token, Free(nonce=token.nonce), deadline)

    def ack(self, token: ClaimToken, deadline: Deadline) -> bool:
        """Mark the slot consumed. Repeating it after a retryable failure is safe.

        Returns:
            True when every slot is now consumed, so that the payload can be buried. Always False with ``slots`` 0.

        Raises:
            LeaseLost: The slot was taken over, or the payload was buried, before.
        """
        if token.slot < 0:
            return False
        if not self._leave(token, Done(nonce=token.nonce), deadline):
            message = f"the claim on payload {self._id} was taken over; what was read must not be used up"
            raise LeaseLost(message, prefix=self._prefix, epoch=token.epoch)
        return all(slot == token.slot or self._is_done(slot, deadline) for slot in range(self._slots))

    def mark_consumed(self, slots: int, deadline: Deadline) -> None:
        """Enter that so many readers consumed the payload before it was complete in the store. Repeating it is safe.

        Call before any reader can claim here: a slot that somebody holds already is left alone.
        """
        for slot in range(min(slots, self._slots)):
            self._create(f"claim/{slot}/0", Done(nonce=secrets.token_bytes(16)), deadline)

    # The end of it.

    def check_buried(self, deadline: Deadline) -> None:
        """Raise what became of the payload, when it was buried.

        Raises:
            LeaseLost, LeaseExpired, Aborted: By the kind of its tombstone.
        """
        self._check_tomb(deadline)

    def tombstone(self, reason: str, deadline: Deadline, *, kind: str = "consumed") -> None:
        """Leave a record that the payload is no more, so that a late reader is told; the first one stands.

        Args:
            reason: For people; cut to 500 characters.
            deadline: When to give up.
            kind: ``consumed``, ``released``, ``expired`` or ``aborted``: what `claim` raises.
        """
        if kind not in TOMB_ERRORS:
            message = f"tombstone kind {kind!r} must be one of {', '.join(TOMB_ERRORS)}"
            raise ConfigError(message, field="kind")
        self._create("tomb", Tomb(kind=kind, reason=reason[:500]), deadline)

    def tomb(self, deadline: Deadline) -> Tomb | None:
        """Return the tombstone; ``None`` when there is none."""
        record = self._read("tomb", deadline)
        if record is not None and not isinstance(record, Tomb):
            raise self._wrong("tomb")
        return record

    def tombstone_reason(self, deadline: Deadline) -> str | None:
        """Return the tombstone's reason; ``None`` when there is none."""
        tomb = self.tomb(deadline)
        return None if tomb is None else tomb.reason

    def remove_all(self, count: int, deadline: Deadline, *, keep_tombstone: bool = True) -> None:
        """Remove every key of the payload, whatever attempts and epochs there were. Idempotent.

        Args:
            count: How many chunks there may be.
            deadline: When to give up; what is left then is the sweeper's.
            keep_tombstone: Leave a tombstone where it is.
        """
        names = ["end"]
        names += [f"c/{chunk}/{attempt}" for chunk in range(count) for attempt in range(MAX_ATTEMPTS)]
        self._relay.remove([self._key(name) for name in names], deadline)
        for slot in range(self._slots):
            # One epoch more than is there: a late writer may be about to create it. Ascending, so that whoever creates
            # an epoch afterwards finds the one before it gone.
            epoch = 0
            while self._read(f"claim/{slot}/{epoch}", deadline) is not None:
                epoch += 1
            for gone in range(epoch + 1):
                self._relay.remove([self._key(f"claim/{slot}/{gone}")], deadline)
        if not keep_tombstone:
            self._relay.remove([self._key("tomb")], deadline)

    def _won(self, slot: int, epoch: int, mine: Holder, deadline: Deadline) -> ClaimToken:
        """Check that the payload was not buried while the claim was made; a grave must not look alive."""
        try:
            self._check_tomb(deadline)
        except (LeaseLost, LeaseExpired, Aborted):
            self._clean_up(f"claim/{slot}/{epoch}", deadline.clock)
            raise
        return ClaimToken(slot=slot, epoch=epoch, reader_id=mine.reader_id, nonce=mine.nonce)

    def _leave(self, token: ClaimToken, record: Free | Done, deadline: Deadline) -> bool:
        name = f"claim/{token.slot}/{token.epoch + 1}"
        if self._create(name, record, deadline) != record:
            return False
        if self._stands(token, deadline) and self.tomb(deadline) is None:
            return True
        self._clean_up(name, deadline.clock)  # everything was removed meanwhile, so nobody was there to lose against
        return False

    def _stands(self, token: ClaimToken, deadline: Deadline) -> bool:
        record = self._read(f"claim/{token.slot}/{token.epoch}", deadline)
        return isinstance(record, Holder) and record.nonce == token.nonce

    def _is_done(self, slot: int, deadline: Deadline) -> bool:
        epoch, top = 0, None
        while (record := self._read(f"claim/{slot}/{epoch}", deadline)) is not None:
            epoch, top = epoch + 1, record
        return isinstance(top, Done)

    def _check_tomb(self, deadline: Deadline) -> None:
        tomb = self.tomb(deadline)
        if tomb is not None:
            message = f"payload {self._id} is no more: {tomb.reason}"
            raise TOMB_ERRORS.get(tomb.kind, LeaseLost)(message, prefix=self._prefix)

    def _clean_up(self, name: str, clock: Clock) -> None:
        # What can't be removed now has no end record and is the sweeper's.
        with contextlib.suppress(MoonrelayError):
            self._relay.remove([self._key(name)], Deadline(_CLEAN_UP_S, clock))

    def _create(self, name: str, record: Record, deadline: Deadline) -> Record:
        value = msgspec.msgpack.encode(record)
        return self._decoded(name, self._relay.put_if_absent(self._key(name), value, deadline))

    def _read(self, name: str, deadline: Deadline) -> Record | None:
        value = self._relay.get_bytes(self._key(name), deadline)
        return None if value is None else self._decoded(name, value)

    def _decoded(self, name: str, value: bytes) -> Record:
        try:
            return decoder.decode(value)
        except msgspec.MsgspecError as error:
            raise self._wrong(name) from error

    def _wrong(self, name: str) -> IntegrityError:
        message = f"record {self._key(name)!r} is not what it should be"
        return IntegrityError(message, prefix=self._prefix)

    def _chunk_key(self, chunk: int, attempt: int) -> str:
        return self._key(f"c/{chunk}/{attempt}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


class _Gate:
    """Passes a relay's ``on_quiet`` on only once the caller opened it, exactly once, whichever comes first."""

    def __init__(self, on_quiet: OnQuiet) -> None:
        self._on_quiet = on_quiet
        self._lock = threading.Lock()
        self._wanted = 2

    def one_quiet(self) -> None:
        with self._lock:
            self._wanted -= 1
            ready = self._wanted == 0
        if ready:
            self._on_quiet()

    open = one_quiet


def _holding(memory: object, on_quiet: OnQuiet | None) -> OnQuiet:
    """Return an ``on_quiet`` that keeps ``memory`` alive until it is called."""
    held = [memory]

    def quiet() -> None:
        held.clear()
        if on_quiet is not None:
            on_quiet()

    return quiet


def _holder(reader_id: str, owner: bytes) -> Holder:
    if len(owner) > MAX_OWNER_BYTES or len(reader_id) > _MAX_READER_CHARS:
        message = f"a claim's owner takes {MAX_OWNER_BYTES} bytes, its reader id {_MAX_READER_CHARS} characters"
        raise ConfigError(message, field="owner")
    return Holder(reader_id=reader_id, owner=owner, nonce=secrets.token_bytes(16))
