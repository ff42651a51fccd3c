"""The lease table: who may read, what a late token is told, when memory may be freed."""

from __future__ import annotations

import itertools

import pytest

from moonrelay.errors import Aborted, ConfigError, LeaseExpired, LeaseLost, MoonrelayError
from moonrelay.handle import LeaseTerms
from moonrelay.lease import Available, Claim, LeaseStatus, LeaseTable, Reclaim
from moonrelay.lease.states import TRANSITIONS, check_transition

ONCE = LeaseTerms(policy="delete_on_consume", readers=1, ttl_s=100.0)
TWO = LeaseTerms(policy="shared", readers=2, ttl_s=100.0)
MANY = LeaseTerms(policy="ttl", readers=0, ttl_s=100.0)
PINNED = LeaseTerms(policy="pinned", readers=0, ttl_s=None)


def ready(terms: LeaseTerms = ONCE, chunks: int = 1, *, tombstones: int = 16) -> LeaseTable:
    table = LeaseTable(tombstones=tombstones)
    assert table.add("p", terms, chunks, 0.0) == ()
    for chunk in range(chunks):
        table.mark_readable("p", chunk, 0.0)
    return table


def take(table: LeaseTable, reader: str = "a", now: float = 0.0, payload: str = "p") -> Claim:
    claim, _ = table.claim(payload, reader, 5.0, now)
    assert claim is not None
    table.check_invariants()
    return claim


def state(table: LeaseTable, now: float = 0.0) -> LeaseStatus:
    return table.snapshot("p", now).state


def test_claim_ack_consumes_and_frees_once() -> None:
    table = ready()
    claim = take(table)
    assert state(table) is LeaseStatus.CLAIMED
    assert table.ack("p", claim.token, 1.0) == (Reclaim("p", LeaseStatus.CONSUMED), Available("p"))
    assert table.ack("p", claim.token, 1.0) == ()  # repeated: told the same
    assert "p" not in table
    with pytest.raises(LeaseLost, match="consumed"):
        table.claim("p", "b", 5.0, 2.0)
    assert table.release("p") == ()
    assert table.abort("p", "late") == ()
    assert table.next_deadline() is None


def test_second_reader_is_told_held_and_woken_by_the_nack() -> None:
    table = ready()
    first = take(table, "a")
    assert table.claim("p", "b", 5.0, 1.0) == (None, ())
    assert table.nack("p", first.token, 1.0) == (Available("p"),)
    assert state(table) is LeaseStatus.READY
    second = take(table, "b", 1.0)
    assert second.token > first.token
    with pytest.raises(LeaseLost):
        table.ack("p", first.token, 1.0)
    table.ack("p", second.token, 1.0)


def test_repeated_claim_of_one_reader_gives_the_same_token_renewed() -> None:
    table = ready()
    first = take(table, "a", 0.0)
    again = take(table, "a", 3.0)
    assert again.token == first.token
    assert again.expires_at == 8.0
    assert take(table, "a", 9.0).token > first.token  # it had lapsed


def test_lapsed_claim_is_fenced_before_and_after_the_sweep() -> None:
    table = ready()
    claim = take(table)
    for operate in (table.ack, table.nack):
        with pytest.raises(LeaseLost):
            operate("p", claim.token, 5.0)
    with pytest.raises(LeaseLost):
        table.renew("p", claim.token, 5.0, 5.0)
    assert state(table) is LeaseStatus.CLAIMED  # nobody swept yet
    assert table.next_deadline() == 5.0
    assert table.expire(5.0) == (Available("p"),)
    assert state(table) is LeaseStatus.READY
    with pytest.raises(LeaseLost):
        table.ack("p", claim.token, 5.0)


def test_lapsed_claim_makes_room_without_a_sweep() -> None:
    table = ready()
    take(table, "a", 0.0)
    late = take(table, "b", 5.0)
    assert table.claims("p", 5.0) == (late,)
    assert table.expire(5.0) == ()


def test_renewal_moves_the_deadline() -> None:
    table = ready()
    claim = take(table)
    assert table.renew("p", claim.token, 5.0, 3.0).expires_at == 8.0
    assert table.expire(7.9) == ()
    assert table.next_deadline() == 8.0
    assert table.holds_claim("p", "a", 7.9)
    assert not table.holds_claim("p", "a", 8.0)
    assert not table.holds_claim("p", "b", 7.9)


def test_expiry_of_something_unread_frees_it() -> None:
    table = ready()
    assert table.next_deadline() == 100.0
    with pytest.raises(LeaseExpired):
        table.claim("p", "a", 5.0, 100.0)  # also before the sweep
    assert table.expire(99.9) == ()
    assert table.expire(100.0) == (Reclaim("p", LeaseStatus.EXPIRED), Available("p"))
    with pytest.raises(LeaseExpired):
        table.claim("p", "a", 5.0, 101.0)


def test_expiry_of_something_being_read_waits_for_the_reader() -> None:
    table = ready()
    claim = take(table, "a", 98.0)
    assert table.expire(100.0) == (Available("p"),)
    assert state(table) is LeaseStatus.EXPIRE_PENDING
    with pytest.raises(LeaseExpired):
        table.claim("p", "b", 5.0, 100.0)
    claim = table.renew("p", claim.token, 5.0, 101.0)
    assert table.expire(105.9) == ()
    assert table.ack("p", claim.token, 105.9) == (Reclaim("p", LeaseStatus.CONSUMED),)


def test_expiry_pending_ends_when_the_claim_lapses() -> None:
    table = ready()
    take(table, "a", 98.0)
    table.expire(100.0)
    assert table.next_deadline() == 103.0
    assert table.expire(103.0) == (Reclaim("p", LeaseStatus.EXPIRED),)


def test_claim_and_payload_that_end_together_end_in_one_sweep() -> None:
    table = ready()
    take(table, "a", 95.0)
    assert table.expire(100.0) == (Reclaim("p", LeaseStatus.EXPIRED), Available("p"))


@pytest.mark.parametrize(
    ("end", "error", "final"),
    [
        (lambda table: table.release("p"), LeaseLost, LeaseStatus.RELEASED),
        (lambda table: table.abort("p", "out of memory"), Aborted, LeaseStatus.ABORTED),
    ],
)
def test_cancel_of_something_being_read_waits_for_the_reader(end, error, final) -> None:  # type: ignore[no-untyped-def]
    table = ready()
    claim = take(table)
    assert end(table) == (Available("p"),)
    assert end(table) == ()
    assert state(table) is LeaseStatus.CANCEL_PENDING
    with pytest.raises(error):
        table.claim("p", "b", 5.0, 0.0)
    table.renew("p", claim.token, 5.0, 1.0)
    assert table.nack("p", claim.token, 2.0) == (Reclaim("p", final),)
    with pytest.raises(error):
        table.claim("p", "b", 5.0, 3.0)


def test_release_unread_frees_at_once_and_is_idempotent() -> None:
    table = ready()
    assert table.release("p") == (Reclaim("p", LeaseStatus.RELEASED), Available("p"))
    assert table.release("p") == ()
    assert table.release("never heard of") == ()


def test_abort_reaches_every_late_comer_with_its_reason() -> None:
    table = LeaseTable()
    table.add("p", ONCE, 3, 0.0)
    claim = take(table)
    table.abort("p", "out of memory")
    assert table.readiness("p").reason == "out of memory"
    with pytest.raises(Aborted, match="out of memory"):
        table.ack("p", claim.token, 1.0)
    assert table.holds_claim("p", "a", 1.0)  # a refused ack changed nothing
    table.nack("p", claim.token, 1.0)
    with pytest.raises(Aborted, match="out of memory"):
        table.mark_readable("p", 1, 1.0)
    assert table.snapshot("p", 1.0).reason == "out of memory"


def test_abort_overrides_a_pending_release_and_a_pending_expiry() -> None:
    table = ready()
    claim = take(table)
    table.release("p")
    assert table.abort("p", "bad") == ()
    assert table.nack("p", claim.token, 1.0) == (Reclaim("p", LeaseStatus.ABORTED),)
    table = ready()
    claim = take(table, "a", 98.0)
    table.expire(100.0)
    table.abort("p", "bad")
    assert state(table) is LeaseStatus.CANCEL_PENDING
    assert table.nack("p", claim.token, 101.0) == (Reclaim("p", LeaseStatus.ABORTED),)


def test_shared_counts_acknowledgements() -> None:
    table = ready(TWO)
    a, b = take(table, "a"), take(table, "b")
    assert table.claim("p", "c", 5.0, 0.0) == (None, ())
    assert table.ack("p", a.token, 1.0) == ()
    assert table.claim("p", "c", 5.0, 1.0) == (None, ())  # b may be the second
    assert table.nack("p", b.token, 1.0) == (Available("p"),)
    c = take(table, "c", 1.0)
    assert table.ack("p", c.token, 1.0) == (Reclaim("p", LeaseStatus.CONSUMED), Available("p"))
    assert table.ack("p", a.token, 2.0) == ()
    assert table.snapshot("p", 2.0).acks == 2


@pytest.mark.parametrize("terms", [MANY, PINNED])
def test_any_number_of_readers(terms: LeaseTerms) -> None:
    table = ready(terms)
    claims = [take(table, f"r{i}") for i in range(20)]
    for claim in claims:
        assert table.ack("p", claim.token, 1.0) == ()
    assert state(table) is LeaseStatus.READY
    assert table.snapshot("p", 1.0).acks == 20
    assert table.release("p")[0] == Reclaim("p", LeaseStatus.RELEASED)


def test_pinned_has_no_deadline() -> None:
    table = ready(PINNED)
    assert table.next_deadline() is None
    assert table.snapshot("p", 1e9).expires_in_s is None


def test_open_payload_may_be_claimed_and_becomes_ready_meanwhile() -> None:
    table = LeaseTable()
    table.add("p", ONCE, 3, 0.0)
    assert state(table) is LeaseStatus.OPEN
    claim = take(table)
    table.mark_readable("p", 1, 0.0, digest=b"d1")
    table.nack("p", claim.token, 0.0)
    assert state(table) is LeaseStatus.OPEN
    table.mark_readable("p", 0, 0.0)
    table.set_digest("p", 0, b"d0")
    table.mark_readable("p", 2, 0.0)
    assert state(table) is LeaseStatus.READY
    made = table.readiness("p")
    assert (made.readable, made.digests, made.chunks) == ((0, 1, 2), {0: b"d0", 1: b"d1"}, 3)
    shot = table.snapshot("p", 40.0)
    assert (shot.chunks, shot.chunks_ready, shot.expires_in_s) == (3, 3, 60.0)


def test_a_chunk_is_final_once() -> None:
    table = LeaseTable()
    table.add("p", ONCE, 2, 0.0)
    table.mark_readable("p", 0, 0.0, digest=b"x")
    table.set_digest("p", 0, b"x")
    with pytest.raises(ConfigError, match="chunk 0"):
        table.mark_readable("p", 0, 0.0)
    with pytest.raises(ConfigError, match="another one"):
        table.set_digest("p", 0, b"y")
    for chunk in (-1, 2, True, 1.0):
        with pytest.raises(ConfigError, match="does not exist"):
            table.mark_readable("p", chunk, 0.0)  # type: ignore[arg-type]


def test_a_hold_keeps_the_memory_whatever_ends_the_payload() -> None:
    for end, final in (
        (lambda table: table.release("p"), LeaseStatus.RELEASED),
        (lambda table: table.abort("p", "x"), LeaseStatus.ABORTED),
        (lambda table: table.expire(100.0), LeaseStatus.EXPIRED),
    ):
        table = ready()
        table.hold("p")
        table.hold("p")
        assert end(table) == (Available("p"),)
        table.check_invariants()
        assert table.unhold("p") == ()
        assert table.unhold("p") == (Reclaim("p", final),)


def test_an_ack_during_a_hold_consumes_now_and_frees_later() -> None:
    table = ready()
    claim = take(table)
    table.hold("p")
    assert table.ack("p", claim.token, 1.0) == (Available("p"),)
    table.check_invariants()
    with pytest.raises(LeaseLost, match="consumed"):
        table.claim("p", "b", 5.0, 1.0)
    with pytest.raises(LeaseLost):
        table.hold("p")
    assert table.ack("p", claim.token, 1.0) == ()
    assert table.abort("p", "too late") == ()
    assert table.unhold("p") == (Reclaim("p", LeaseStatus.CONSUMED),)
    with pytest.raises(MoonrelayError, match="unhold without hold"):
        table.unhold("p")


def test_unknown_payloads_are_lost() -> None:
    table = LeaseTable()
    with pytest.raises(LeaseLost, match="unknown or long gone"):
        table.claim("nope", "a", 5.0, 0.0)
    with pytest.raises(LeaseLost, match="unknown or long gone"):
        table.snapshot("nope", 0.0)
    assert not table.holds_claim("nope", "a", 0.0)


def test_memory_of_the_ended_is_bounded() -> None:
    table = LeaseTable(tombstones=3)
    for i in range(10):
        table.add(f"p{i}", ONCE, 1, 0.0)
        table.release(f"p{i}")
    assert table.snapshot("p7", 0.0).state is LeaseStatus.RELEASED
    with pytest.raises(LeaseLost, match="unknown"):
        table.snapshot("p6", 0.0)
    assert table.next_deadline() is None
    assert not table._due


def test_the_heap_does_not_grow_with_renewals() -> None:
    table = ready(PINNED)
    claim = take(table)
    for i in range(1000):
        table.renew("p", claim.token, 5.0, i * 1.0)
        table.next_deadline()
    assert len(table._due) < 5


@pytest.mark.parametrize("chunks", [0, -1, True, 1.5])
def test_bad_chunk_count_is_refused(chunks: int) -> None:
    with pytest.raises(ConfigError, match="chunks="):
        LeaseTable().add("p", ONCE, chunks, 0.0)


def test_an_id_is_used_once() -> None:
    table = ready()
    with pytest.raises(ConfigError, match="used before"):
        table.add("p", ONCE, 1, 0.0)
    table.release("p")
    with pytest.raises(ConfigError, match="used before"):
        table.add("p", ONCE, 1, 0.0)


def test_bad_terms_are_refused() -> None:
    with pytest.raises(ConfigError, match="readers"):
        LeaseTable().add("p", LeaseTerms(policy="x", readers=-1, ttl_s=None), 1, 0.0)
    with pytest.raises(ConfigError, match="ttl_s"):
        LeaseTable().add("p", LeaseTerms(policy="x", readers=1, ttl_s=-1.0), 1, 0.0)
    with pytest.raises(ConfigError, match="tombstones"):
        LeaseTable(tombstones=0)


def test_every_transition_not_in_the_table_raises() -> None:
    for before, after in itertools.product(LeaseStatus, LeaseStatus):
        if after in TRANSITIONS[before]:
            check_transition("p", before, after)
        else:
            with pytest.raises(MoonrelayError, match="illegal lease transition"):
                check_transition("p", before, after)


def test_final_states_lead_nowhere() -> None:
    assert [status for status in LeaseStatus if not TRANSITIONS[status]] == [s for s in LeaseStatus if s.final]


def test_a_broken_table_is_noticed() -> None:
    table = ready()
    table._entries["p"].claims[1] = Claim(1, "ghost", 5.0)
    with pytest.raises(MoonrelayError, match="CLAIMED"):
        table.check_invariants()
