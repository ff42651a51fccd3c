"""What a relayed payload's objects mean, on the in-memory relay: chunks, claims, fencing, graves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest

from moonrelay.clock import Deadline, ManualClock
from moonrelay.config import StoreConfig
from moonrelay.errors import (
    Aborted,
    CapacityError,
    ConfigError,
    IntegrityError,
    LeaseExpired,
    LeaseLost,
    PeerLost,
    TransferFailed,
    TransferTimeout,
    VersionError,
)
from moonrelay.handle import Extent
from moonrelay.relay import wire
from moonrelay.relay.base import OnQuiet
from moonrelay.relay.memory import MemoryRelay
from moonrelay.relay.records import MAX_ATTEMPTS, ClaimToken, Held, RelayedPayload, payload_prefix

PREFIX = "ns/payload-1"
DIGEST = bytes(range(16))
ROW = list[Extent]


class Faulty(MemoryRelay):
    """Fails the next put or get with the error put into ``fail``."""

    fail: Exception | None = None
    lost_answer = False
    late: OnQuiet | None = None

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        error, self.fail = self.fail, None
        if isinstance(error, TransferTimeout):
            self.late = on_quiet
            raise error
        if error is not None:
            if on_quiet is not None:
                on_quiet()
            raise error
        super().put(key, parts, deadline, on_quiet=on_quiet)

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        error, self.fail = self.fail, None
        if error is not None:
            self.late = on_quiet
            raise error
        return super().get(key, parts, deadline, on_quiet=on_quiet)

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        standing = super().put_if_absent(key, value, deadline)
        if self.lost_answer:
            self.lost_answer = False
            raise PeerLost("the answer was lost")
        return standing


@pytest.fixture
def deadline() -> Deadline:
    return Deadline(10.0, ManualClock())


@pytest.fixture
def relay():
    store = Faulty(StoreConfig(url=None))
    store.start()
    yield store
    store.close()


def memory(data: bytes) -> tuple[ctypes.Array[ctypes.c_char], ROW]:
    buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
    half = len(data) // 2
    base = ctypes.addressof(buffer)
    return buffer, [Extent(base, half), Extent(base + half, len(data) - half)]


def payload(relay: MemoryRelay, slots: int = 1, payload_id: str = "payload-1") -> RelayedPayload:
    return RelayedPayload(relay, PREFIX, payload_id, slots=slots)


def held(answer: ClaimToken | list[Held]) -> list[Held]:
    assert isinstance(answer, list)
    return answer


def token(answer: ClaimToken | list[Held] | None) -> ClaimToken:
    assert isinstance(answer, ClaimToken)
    return answer


def test_a_chunk_comes_back_with_its_digest(relay: Faulty, deadline: Deadline) -> None:
    source, parts = memory(b"some bytes of a chunk")
    payload(relay).put_chunk(3, parts, DIGEST, deadline)
    target, landing = memory(bytes(len(source)))
    quiet: list[int] = []
    record = payload(relay).get_chunk(3, landing, deadline, on_quiet=lambda: quiet.append(1))
    assert record is not None
    assert (record.chunk, record.nbytes, record.digest) == (3, len(source), DIGEST)
    assert target.raw == source.raw
    assert quiet == [1]


def test_an_absent_chunk_is_none_and_quiet(relay: Faulty, deadline: Deadline) -> None:
    _, landing = memory(b"1234")
    quiet: list[int] = []
    assert payload(relay).get_chunk(0, landing, deadline, on_quiet=lambda: quiet.append(1)) is None
    assert quiet == [1]


def test_a_chunk_without_bytes_and_without_digest_is_a_chunk(relay: Faulty, deadline: Deadline) -> None:
    payload(relay).put_chunk(0, [], b"", deadline)
    record = payload(relay).get_chunk(0, [], deadline)
    assert record is not None
    assert (record.nbytes, record.digest) == (0, b"")


@pytest.mark.parametrize("offset", [0, 9, 10, 12, 20, 40, 100, 119])
def test_a_torn_header_is_an_integrity_error(relay: Faulty, deadline: Deadline, offset: int) -> None:
    _, parts = memory(b"some bytes")
    payload(relay).put_chunk(0, parts, DIGEST, deadline)
    key = f"{PREFIX}/c/0/0"
    raw = bytearray(relay.get_bytes(key, deadline) or b"")
    raw[offset] ^= 0x40
    relay.remove([key], deadline)
    relay.put_if_absent(key, bytes(raw), deadline)
    with pytest.raises(IntegrityError):
        payload(relay).get_chunk(0, parts, deadline)


def test_a_header_of_another_chunk_payload_size_or_version_is_refused(relay: Faulty, deadline: Deadline) -> None:
    _, parts = memory(b"some bytes")
    payload(relay).put_chunk(0, parts, DIGEST, deadline)
    raw = relay.get_bytes(f"{PREFIX}/c/0/0", deadline) or b""
    relay.put_if_absent(f"{PREFIX}/c/1/0", raw, deadline)
    with pytest.raises(IntegrityError, match="holds chunk 0"):
        payload(relay).get_chunk(1, parts, deadline)
    with pytest.raises(IntegrityError, match="payload-1"):
        payload(relay, payload_id="payload-2").get_chunk(0, parts, deadline)
    with pytest.raises(IntegrityError):
        payload(relay).get_chunk(0, parts[:1], deadline)
    fields = bytearray(raw[: wire._FIELDS.size])
    fields[8] = 9
    check = wire._CHECK.pack(wire.xxhash.xxh3_64_intdigest(bytes(fields)))
    relay.put_if_absent(f"{PREFIX}/c/2/0", bytes(fields) + check + raw[wire.HEADER_BYTES :], deadline)
    with pytest.raises(VersionError, match=r"version 9.*reads 1"):
        payload(relay).get_chunk(2, parts, deadline)


def test_a_put_that_failed_is_repeated_under_a_fresh_key(relay: Faulty, deadline: Deadline) -> None:
    source, parts = memory(b"some bytes")
    writer = payload(relay)
    relay.fail = TransferFailed("no luck")
    with pytest.raises(TransferFailed):
        writer.put_chunk(0, parts, DIGEST, deadline)
    writer.put_chunk(0, parts, DIGEST, deadline)
    assert relay.keys("", deadline) == [f"{PREFIX}/c/0/1"]
    target, landing = memory(bytes(len(source)))
    assert payload(relay).get_chunk(0, landing, deadline) is not None
    assert target.raw == source.raw


def test_a_full_store_does_not_use_a_key_up(deadline: Deadline) -> None:
    small = MemoryRelay(StoreConfig(url=None, capacity_bytes=200))
    small.start()
    _, parts = memory(bytes(100))
    writer = payload(small)
    for _ in range(MAX_ATTEMPTS + 1):
        with pytest.raises(CapacityError):
            writer.put_chunk(0, parts, DIGEST, deadline)
    assert small.keys("", deadline) == []


def test_attempts_are_bounded(relay: Faulty, deadline: Deadline) -> None:
    _, parts = memory(b"some bytes")
    writer = payload(relay)
    for _ in range(MAX_ATTEMPTS):
        relay.fail = TransferFailed("no luck")
        with pytest.raises(TransferFailed):
            writer.put_chunk(0, parts, DIGEST, deadline)
    quiet: list[int] = []
    with pytest.raises(TransferFailed) as info:
        writer.put_chunk(0, parts, DIGEST, deadline, on_quiet=lambda: quiet.append(1))
    assert not info.value.retryable
    assert quiet == [1]


def test_quiet_comes_late_and_once_after_a_timeout(relay: Faulty, deadline: Deadline) -> None:
    _, parts = memory(b"some bytes")
    for act in (
        lambda told: payload(relay).put_chunk(0, parts, DIGEST, deadline, on_quiet=told),
        lambda told: payload(relay).get_chunk(0, parts, deadline, on_quiet=told),
    ):
        quiet: list[int] = []
        relay.fail = TransferTimeout("slow")
        with pytest.raises(TransferTimeout):
            act(lambda quiet=quiet: quiet.append(1))
        assert quiet == []
        assert relay.late is not None
        relay.late()
        assert quiet == [1]


def test_bad_arguments_are_named(relay: Faulty, deadline: Deadline) -> None:
    with pytest.raises(ConfigError, match="payload id"):
        payload(relay, payload_id="x" * 65)
    quiet: list[int] = []
    with pytest.raises(ConfigError, match="digest"):
        payload(relay).put_chunk(0, [], bytes(33), deadline, on_quiet=lambda: quiet.append(1))
    assert quiet == [1]
    with pytest.raises(ConfigError, match="owner"):
        payload(relay).claim("a", bytes(3000), deadline)
    with pytest.raises(ConfigError, match="kind"):
        payload(relay).tombstone("why", deadline, kind="bored")


def test_the_end_record_stands_once(relay: Faulty, deadline: Deadline) -> None:
    assert payload(relay).get_end(deadline) is None
    payload(relay).put_end(4, 60.0, deadline)
    payload(relay).put_end(4, 60.0, deadline)
    end = payload(relay).get_end(deadline)
    assert end is not None
    assert (end.count, end.ttl_s) == (4, 60.0)
    with pytest.raises(IntegrityError):
        payload(relay).put_end(5, 60.0, deadline)


@pytest.mark.parametrize("value", [b"\xff", b"not msgpack", b"\x81\xa4type\xa3odd", b"\x80"])
def test_a_malformed_record_is_an_integrity_error(relay: Faulty, deadline: Deadline, value: bytes) -> None:
    relay.put_if_absent(f"{PREFIX}/end", value, deadline)
    relay.put_if_absent(f"{PREFIX}/claim/0/0", value, deadline)
    with pytest.raises(IntegrityError):
        payload(relay).get_end(deadline)
    with pytest.raises(IntegrityError):
        payload(relay).claim("a", b"", deadline)


def test_a_record_of_another_kind_is_an_integrity_error(relay: Faulty, deadline: Deadline) -> None:
    payload(relay).tombstone("why", deadline)
    relay.put_if_absent(f"{PREFIX}/end", relay.get_bytes(f"{PREFIX}/tomb", deadline) or b"", deadline)
    with pytest.raises(IntegrityError):
        payload(relay).get_end(deadline)


def test_one_claim_at_a_time_and_the_next_after_a_nack(relay: Faulty, deadline: Deadline) -> None:
    first = token(payload(relay).claim("a", b"at a", deadline))
    assert payload(relay).is_mine(first, deadline)
    others = held(payload(relay).claim("b", b"at b", deadline))
    assert [(h.slot, h.epoch, h.reader_id, h.owner) for h in others] == [(0, 0, "a", b"at a")]
    assert payload(relay).nack(first, deadline)
    assert not payload(relay).is_mine(first, deadline)
    second = token(payload(relay).claim("b", b"at b", deadline))
    assert second.epoch > first.epoch
    assert payload(relay).nack(first, deadline), "repeating a nack is safe"
    with pytest.raises(LeaseLost):
        payload(relay).ack(first, deadline)
    assert payload(relay).ack(second, deadline)
    with pytest.raises(LeaseLost):
        payload(relay).claim("c", b"", deadline)


def test_a_dead_holder_is_taken_over_once_and_its_late_ack_loses(relay: Faulty, deadline: Deadline) -> None:
    dead = token(payload(relay).claim("dead", b"", deadline))
    seen = held(payload(relay).claim("b", b"", deadline))[0]
    winner = token(payload(relay).take_over(seen, "b", b"", deadline))
    assert payload(relay).take_over(seen, "c", b"", deadline) is None
    assert not payload(relay).is_mine(dead, deadline)
    assert payload(relay).is_mine(winner, deadline)
    with pytest.raises(LeaseLost):
        payload(relay).ack(dead, deadline)
    assert not payload(relay).nack(dead, deadline)
    assert payload(relay).ack(winner, deadline)


def test_an_ack_before_the_take_over_wins(relay: Faulty, deadline: Deadline) -> None:
    first = token(payload(relay).claim("a", b"", deadline))
    seen = held(payload(relay).claim("b", b"", deadline))[0]
    assert payload(relay).ack(first, deadline)
    assert payload(relay).take_over(seen, "b", b"", deadline) is None


@pytest.mark.parametrize("step", ["claim", "ack", "nack"])
def test_a_step_whose_answer_was_lost_can_be_repeated(relay: Faulty, deadline: Deadline, step: str) -> None:
    mine = token(payload(relay).claim("a", b"", deadline)) if step != "claim" else None
    relay.lost_answer = True

    def act() -> object:
        if mine is None:
            return payload(relay).claim("a", b"", deadline)
        return payload(relay).ack(mine, deadline) if step == "ack" else payload(relay).nack(mine, deadline)

    with pytest.raises(PeerLost):
        act()
    answer = act()
    assert answer is True or isinstance(answer, ClaimToken)


def test_shared_payloads_have_one_slot_per_reader(relay: Faulty, deadline: Deadline) -> None:
    tokens = [token(payload(relay, 3).claim(name, b"", deadline)) for name in "abc"]
    assert sorted(t.slot for t in tokens) == [0, 1, 2]
    assert len(held(payload(relay, 3).claim("d", b"", deadline))) == 3
    assert not payload(relay, 3).ack(tokens[1], deadline)
    assert len(held(payload(relay, 3).claim("d", b"", deadline))) == 2
    assert payload(relay, 3).nack(tokens[0], deadline)
    again = token(payload(relay, 3).claim("d", b"", deadline))
    assert again.slot == tokens[0].slot
    assert not payload(relay, 3).ack(again, deadline)
    assert payload(relay, 3).ack(tokens[2], deadline)
    with pytest.raises(LeaseLost):
        payload(relay, 3).claim("e", b"", deadline)


def test_any_number_of_readers_leave_no_records(relay: Faulty, deadline: Deadline) -> None:
    first = token(payload(relay, 0).claim("a", b"", deadline))
    assert payload(relay, 0).is_mine(first, deadline)
    assert payload(relay, 0).nack(first, deadline)
    assert not payload(relay, 0).ack(first, deadline)
    assert relay.keys("", deadline) == []
    payload(relay, 0).tombstone("done", deadline)
    assert not payload(relay, 0).is_mine(first, deadline)
    with pytest.raises(LeaseLost):
        payload(relay, 0).claim("b", b"", deadline)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("consumed", LeaseLost), ("released", LeaseLost), ("expired", LeaseExpired), ("aborted", Aborted)],
)
def test_a_grave_tells_late_readers_why(relay: Faulty, deadline: Deadline, kind: str, error: type[Exception]) -> None:
    _, parts = memory(b"some bytes")
    writer = payload(relay, 2)
    writer.put_chunk(0, parts, DIGEST, deadline)
    writer.put_end(1, None, deadline)
    writer.tombstone("the reason", deadline, kind=kind)
    writer.remove_all(1, deadline)
    assert relay.keys("", deadline) == [f"{PREFIX}/tomb"]
    with pytest.raises(error, match="the reason"):
        payload(relay, 2).claim("late", b"", deadline)
    assert relay.keys("", deadline) == [f"{PREFIX}/tomb"]
    assert payload(relay).tombstone_reason(deadline) == "the reason"


def test_a_fenced_reader_loses_also_when_everything_was_removed_meanwhile(relay: Faulty, deadline: Deadline) -> None:
    paused = token(payload(relay).claim("paused", b"", deadline))
    seen = held(payload(relay).claim("b", b"", deadline))[0]
    winner = token(payload(relay).take_over(seen, "b", b"", deadline))
    assert payload(relay).ack(winner, deadline)
    payload(relay).tombstone("consumed", deadline)
    payload(relay).remove_all(1, deadline)
    assert not payload(relay).is_mine(paused, deadline)
    with pytest.raises(LeaseLost):
        payload(relay).ack(paused, deadline)
    payload(relay).remove_all(1, deadline, keep_tombstone=False)
    with pytest.raises(LeaseLost):
        payload(relay).ack(paused, deadline)
    assert not payload(relay).nack(paused, deadline)
    assert relay.keys("", deadline) == []


def test_remove_all_finds_every_attempt_and_epoch(relay: Faulty, deadline: Deadline) -> None:
    _, parts = memory(b"some bytes")
    writer = payload(relay, 2)
    for chunk in range(3):
        relay.fail = TransferFailed("no luck")
        with pytest.raises(TransferFailed):
            writer.put_chunk(chunk, parts, DIGEST, deadline)
        writer.put_chunk(chunk, parts, DIGEST, deadline)
    writer.put_end(3, None, deadline)
    for _ in range(4):
        writer.nack(token(writer.claim("a", b"", deadline)), deadline)
    token(writer.claim("a", b"", deadline))
    token(writer.claim("b", b"", deadline))
    writer.tombstone("x", deadline)
    writer.remove_all(3, deadline, keep_tombstone=False)
    assert relay.keys("", deadline) == []
    writer.remove_all(3, deadline)


def test_keys_are_split_into_prefix_and_name() -> None:
    assert payload_prefix("ns/a/b/c/12/0") == ("ns/a/b", "c/12/0")
    assert payload_prefix("ns/a/claim/0/3") == ("ns/a", "claim/0/3")
    assert payload_prefix("ns/a/tomb") == ("ns/a", "tomb")
    assert payload_prefix("ns/a/other") is None
    assert payload_prefix("end") is None
