"""Whom a desk gives what: the rules, on plain state."""

from __future__ import annotations

import pytest

from moonrelay.errors import CapacityError
from moonrelay_lightx2v import rendezvous_book
from moonrelay_lightx2v.rendezvous_book import Book
from moonrelay_lightx2v.rendezvous_wire import Answer, Closing, Here, Names, NotYet, Refused


class Told:
    """A book, and what each find was told last."""

    def __init__(self, keep_failures_s: float = 600.0) -> None:
        self.book = Book(keep_failures_s)
        self.now = 0.0
        self.last: dict[str, Answer] = {}

    def want(self, find: str, *names: str, wait_s: float = 60.0) -> Answer:
        self.last[find] = self.book.want(find.encode(), b"route", names, wait_s, self.now)
        return self.last[find]

    def _heard(self, sendings: list[rendezvous_book.Sending]) -> list[str]:
        for sending in sendings:
            self.last[sending.token.decode()] = sending.answer
        return [sending.token.decode() for sending in sendings]

    def working(self, *names: str) -> list[str]:
        return self._heard(self.book.working(names))

    def offer(self, payload: str, *names: str) -> list[str]:
        self.replaced, sendings = self.book.offer(names, payload, payload.encode(), self.now)
        return self._heard(sendings)

    def refuse(self, text: str, *names: str, code: str = "aborted") -> list[str]:
        return self._heard(self.book.refuse(names, code, text, self.now))

    def forget(self, find: str, *, taken: bool) -> list[str]:
        return self._heard(self.book.forget(find.encode(), taken, self.now))

    def lost(self, find: str) -> list[str]:
        return self._heard(self.book.lost(find.encode(), self.now))

    def closing(self) -> list[str]:
        return self._heard(self.book.closing())


def here(payload: str) -> Here:
    return Here(handle=payload.encode())


def failed(text: str) -> Refused:
    return Refused(code="aborted", message=text)


NOTHING = NotYet(working=False)
WORKING = NotYet(working=True)


@pytest.mark.parametrize(
    ("wanted", "payload"),
    [
        (("task:1", "same:x"), "one"),
        (("task:2", "same:x"), "two"),
        (("task:9", "same:x"), "one"),
        (("task:9", "same:y"), None),
        (("same:x",), "one"),
        (("room:1",), None),
    ],
)
def test_the_most_exact_name_of_the_find_decides(wanted: Names, payload: str | None) -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.offer("two", "task:2", "same:x")
    assert told.want("find", *wanted) == (here(payload) if payload else NOTHING)


def test_of_several_that_are_the_same_each_find_gets_its_own_then_the_oldest() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.offer("two", "task:2", "same:x")
    assert told.want("a", "same:x") == here("one")
    assert told.want("b", "same:x") == here("two")
    assert told.want("c", "same:x") == here("one")


def test_a_find_that_asks_again_gets_the_same_again() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.offer("two", "task:2", "same:x")
    assert [told.want("a", "same:x") for _ in range(3)] == [here("one")] * 3
    assert told.want("b", "same:x") == here("two")


def test_who_waits_is_told_once_by_the_oldest_find_first() -> None:
    told = Told()
    assert told.want("a", "same:x") == NOTHING
    assert told.want("b", "same:x") == NOTHING
    assert told.offer("one", "task:1", "same:x") == ["a"]
    assert told.offer("two", "task:2", "same:x") == ["b"]
    assert told.last == {"a": here("one"), "b": here("two")}


def test_who_asks_for_that_very_request_is_told_before_an_older_find_for_the_same() -> None:
    told = Told()
    told.want("older", "task:8", "same:x")
    told.want("exact", "task:1", "same:x")
    assert told.offer("one", "task:1", "same:x") == ["exact"]


def test_a_find_whose_own_request_is_under_way_waits_for_it() -> None:
    told = Told()
    told.offer("other", "task:8", "same:x")
    told.working("task:1", "same:x")
    assert told.want("a", "task:1", "same:x") == WORKING
    assert told.offer("other2", "task:9", "same:x") == []
    assert told.offer("own", "task:1", "same:x") == ["a"]
    assert told.last["a"] == here("own")


def test_an_offer_that_another_has_waits_for_work_under_way() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.want("a", "same:x")
    told.working("task:2", "same:x")
    assert told.want("b", "same:x") == WORKING
    told.book.done(("task:2", "same:x"))
    assert told.want("b", "same:x") == here("one")


def test_who_comes_after_another_took_its_own_gets_one_that_is_the_same() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    assert told.want("busy with another before", "task:2", "same:x") == here("one")
    told.working("task:2", "same:x")
    assert told.want("first", "task:1", "same:x") == WORKING
    told.forget("first", taken=False)
    told.offer("two", "task:2", "same:x")
    assert told.want("first again", "task:1", "same:x") == here("two")
    assert told.want("both are given", "task:1", "same:x") == here("one")


def test_what_another_took_goes_before_a_failure_of_one_that_is_the_same() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.want("a", "task:1", "same:x")
    told.refuse("out of memory", "task:2", "same:x")
    assert told.want("b", "task:1", "same:x") == here("one")


def test_work_is_told_to_who_waits_and_ends_with_done() -> None:
    told = Told()
    told.want("a", "task:1", "same:x")
    told.want("b", "same:y")
    assert told.working("task:1", "same:x") == ["a"]
    assert told.want("a", "task:1", "same:x") == WORKING
    told.book.done(("task:1", "same:x"))
    assert told.want("a", "task:1", "same:x") == NOTHING


def test_an_offer_ends_the_work() -> None:
    told = Told()
    told.working("task:1", "same:x")
    told.offer("one", "task:1", "same:x")
    told.book.withdraw("one")
    assert told.want("a", "task:1", "same:x") == NOTHING


def test_an_offer_under_the_same_first_name_replaces() -> None:
    told = Told()
    told.offer("one", "room:1")
    assert told.replaced is None
    told.offer("two", "room:1")
    assert told.replaced == "one"
    assert told.want("a", "room:1") == here("two")
    told.offer("two", "room:1")
    assert told.replaced is None


def test_offers_of_the_same_are_kept_one_after_the_other() -> None:
    told = Told()
    told.offer("one", "same:x")
    told.offer("two", "same:x")
    assert told.replaced is None
    assert told.want("a", "same:x") == here("one")
    assert told.want("b", "same:x") == here("two")


def test_an_offer_that_shares_only_a_later_name_replaces_nothing() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.offer("two", "task:2", "same:x")
    assert told.replaced is None


def test_a_new_request_under_a_used_id_never_gets_the_payload_of_before() -> None:
    told = Told()
    told.offer("old", "room:1")
    told.working("room:1")
    assert told.want("a", "room:1") == WORKING
    assert told.refuse("bad image", "room:1") == ["a"]
    assert told.want("b", "room:1") == NOTHING
    assert told.offer("new", "room:1") == ["b"]
    assert told.replaced == "old"


def test_a_failure_is_told_to_all_who_wait_for_that_request() -> None:
    told = Told()
    told.want("a", "task:1", "same:x")
    told.want("b", "task:1", "same:x")
    told.want("c", "task:2", "same:x")
    assert told.refuse("bad image", "task:1", "same:x") == ["a", "b"]
    assert told.last["a"] == failed("bad image")
    assert told.last["c"] == NOTHING


def test_a_failure_is_told_to_one_of_those_who_ask_for_the_same() -> None:
    told = Told()
    told.want("a", "task:11", "same:x")
    told.want("b", "task:12", "same:x")
    assert told.refuse("bad image", "task:1", "same:x") == ["a"]


def test_a_request_that_its_client_gave_up_fails_no_other_one_that_asks_for_the_same() -> None:
    """Such as the front's next attempt, or one that was sent twice and given up once."""
    told = Told()
    told.want("own", "task:1", "same:x")
    told.want("other", "task:1.2", "same:x")
    told.working("task:1", "same:x")
    assert told.refuse("given up", "task:1", "same:x", code="cancelled") == ["own"]
    assert told.last["own"] == Refused(code="cancelled", message="given up")
    assert told.want("other", "task:1.2", "same:x") == NOTHING
    told.refuse("given up", "task:2", "same:x", code="cancelled")
    assert told.want("later", "task:3", "same:x") == NOTHING
    assert told.want("its own", "task:2", "same:x") == Refused(code="cancelled", message="given up")
    told.refuse("given up", "same:y", code="cancelled")
    assert told.want("no id", "same:y") == Refused(code="cancelled", message="given up")


def test_a_failure_is_told_to_the_first_who_comes_as_often_as_it_asks() -> None:
    told = Told()
    told.refuse("bad image", "task:1", "same:x")
    assert told.want("a", "task:11", "same:x") == failed("bad image")
    assert told.want("a", "task:11", "same:x") == failed("bad image")
    assert told.want("next attempt", "task:12", "same:x") == NOTHING
    assert told.want("next attempt with that id", "task:1", "same:x") == NOTHING


def test_a_failure_never_replaces_an_offer_of_its_request() -> None:
    told = Told()
    told.working("task:1", "same:x")
    told.offer("one", "task:1", "same:x")
    told.refuse("after the fact", "task:1", "same:x")
    assert told.want("a", "task:1", "same:x") == here("one")
    told.offer("two", "same:y")
    told.refuse("after the fact", "same:y")
    assert [told.want(find, "same:y") for find in "bc"] == [here("two")] * 2


def test_a_failure_of_a_later_request_for_the_same_comes_after_its_offer() -> None:
    told = Told()
    told.offer("one", "same:x")
    told.working("same:x")
    told.refuse("out of memory", "same:x")
    assert told.want("a", "same:x") == here("one")
    assert told.want("b", "same:x") == failed("out of memory")


def test_a_failure_for_the_same_waits_for_work_under_way() -> None:
    told = Told()
    told.refuse("bad image", "task:1", "same:x")
    told.working("task:2", "same:x")
    assert told.want("a", "task:11", "same:x") == WORKING
    assert told.want("b", "task:1", "same:x") == failed("bad image")
    assert told.offer("two", "task:2", "same:x") == ["a"]


def test_what_is_taken_back_is_the_oldest_that_came_back_and_nobody_has() -> None:
    told = Told()
    for payload in ("new", "given", "failed", "failed again"):
        told.offer(payload, f"task:{payload}")
    for find in ("given", "failed", "failed again"):
        told.want(find, f"task:{find}")
    assert told.book.take_back() is None
    told.forget("failed", taken=False)
    told.forget("failed again", taken=False)
    told.want("another try", "task:failed")
    assert [told.book.take_back(), told.book.take_back()] == ["failed again", None]
    assert told.want("late", "task:failed again") == NotYet(working=False, over=True)


@pytest.mark.parametrize("again", ["working", "offer"])
def test_a_request_that_is_tried_again_has_no_failure(again: str) -> None:
    told = Told()
    told.refuse("bad image", "task:1", "same:x")
    if again == "working":
        told.working("task:1", "same:x")
        assert told.want("a", "task:1", "same:x") == WORKING
    else:
        told.offer("one", "task:1", "same:x")
        assert told.want("a", "task:1", "same:x") == here("one")
        assert told.want("b", "task:1", "same:x") == here("one")


def test_a_failure_is_kept_for_its_time() -> None:
    told = Told(keep_failures_s=10.0)
    told.refuse("early", "task:1")
    told.refuse("earlier told", "task:2")
    told.now = 9.0
    assert told.want("a", "task:2") == failed("earlier told")
    told.now = 10.0
    assert told.want("b", "task:1") == NOTHING


def test_a_withdrawn_offer_is_nobodys() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.want("a", "task:1", "same:x")
    told.book.withdraw("one")
    told.book.withdraw("never was")
    assert told.want("a", "task:1", "same:x") == NOTHING
    assert told.want("b", "same:x") == NOTHING
    assert told.offer("two", "task:1", "same:x") == ["a"]


def test_an_offer_that_is_over_is_told_under_its_exact_name_until_the_request_is_sent_again() -> None:
    told = Told()
    told.offer("one", "task:1", "same:x")
    told.offer("two", "same:y")
    told.book.withdraw("one", over=True)
    told.book.withdraw("two", over=True)
    over = NotYet(working=False, over=True)
    assert told.want("a", "task:1", "same:x") == over
    assert told.want("b", "task:2", "same:x") == NOTHING, "another request may ask for the same"
    assert told.want("c", "same:y") == NOTHING
    told.working("task:1", "same:x")
    assert told.want("a", "task:1", "same:x") == WORKING
    assert told.offer("again", "task:1", "same:x") == ["a"]
    told.book.withdraw("again")
    assert told.want("d", "task:1", "same:x") == NOTHING


def test_what_is_over_is_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_book, "MAX_ENTRIES", 8)
    told = Told()
    for number in range(9):
        told.offer(f"p{number}", f"task:{number}")
        told.book.withdraw(f"p{number}", over=True)
    assert told.want("a", "task:0") == NOTHING
    assert told.want("b", "task:1") == NotYet(working=False, over=True)


def test_what_a_find_did_not_take_goes_to_the_next() -> None:
    told = Told()
    told.offer("one", "same:x")
    told.offer("two", "same:x")
    told.want("a", "same:x")
    assert told.forget("a", taken=False) == []
    assert told.want("b", "same:x") == here("one")
    told.forget("b", taken=True)
    assert told.want("c", "same:x") == here("two")


def test_what_a_find_did_not_take_goes_to_who_waits() -> None:
    told = Told()
    told.want("a", "same:x")
    told.want("b", "same:x")
    assert told.offer("one", "same:x") == ["a"]
    assert told.lost("a") == ["b"]
    assert told.last["b"] == here("one")


@pytest.mark.parametrize("ended", ["withdrawn", "overtaken", "dropped failure"])
def test_what_has_ended_goes_to_nobody_when_it_comes_back(ended: str) -> None:
    told = Told()
    told.want("a", "room:1")
    if ended == "dropped failure":
        told.refuse("bad image", "room:1")
    else:
        told.offer("one", "room:1")
    if ended == "withdrawn":
        told.book.withdraw("one")
    else:
        told.working("room:1")
    told.want("c", "room:1")
    assert told.lost("a") == []


def test_a_find_that_does_not_ask_again_is_forgotten() -> None:
    told = Told()
    told.want("a", "same:x", wait_s=5.0)
    told.now = 4.0
    told.want("b", "same:x", wait_s=5.0)
    told.now = 6.0
    assert told.offer("one", "same:x") == ["b"]


def test_a_find_that_asks_again_keeps_its_place() -> None:
    told = Told()
    told.want("a", "same:x", wait_s=5.0)
    told.want("b", "same:x", wait_s=50.0)
    told.now = 4.0
    told.want("a", "same:x", wait_s=5.0)
    told.now = 6.0
    assert told.offer("one", "same:x") == ["a"]


def test_all_who_wait_hear_that_the_desk_closes() -> None:
    told = Told()
    told.want("a", "same:x")
    told.want("b", "task:1")
    assert told.closing() == ["a", "b"]
    assert told.last["a"] == Closing()


def test_everything_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_book, "MAX_ENTRIES", 8)
    told = Told()
    for number in range(30):
        told.refuse("bad", f"task:f{number}")
        told.working(f"task:w{number}")
        told.want(f"find{number}", f"task:q{number}")
    book = told.book
    assert [len(shelf) for shelf in (book._failures, book._works, book._waiters)] == [8, 8, 8]
    assert told.want("a", "task:f29") == failed("bad")
    assert told.want("b", "task:f0") == NOTHING
    for number in range(8):
        told.offer(f"p{number}", f"task:{number}")
    with pytest.raises(CapacityError, match="8 offers wait"):
        told.offer("p8", "task:8")
    told.offer("p7 again", "task:7")
    for number in range(30):
        told.want(f"again{number}", "task:7")
    assert len(book._given) == 8
