"""The model of a lease, by hand."""

from __future__ import annotations

import pytest

from moonrelay_conformance.suites.adapter.lease_model import UNLIMITED, LeaseModel


def test_one_reader_at_a_time_and_one_in_all() -> None:
    model = LeaseModel(1)
    assert model.may_claim() == {"granted"}
    model.claimed("a")
    assert model.may_claim() == {"refused:lease_held"}
    assert model.states() == {"state:claimed"}
    model.left("a")
    assert model.may_claim() == {"granted"}
    model.claimed("b")
    model.acked("b")
    assert model.may_claim() == {"refused:lease_lost"}
    assert "state:consumed" in model.states()


def test_shared_lets_in_as_many_as_have_not_acknowledged() -> None:
    model = LeaseModel(2)
    model.claimed("a")
    assert model.may_claim() == {"granted"}
    model.claimed("b")
    assert model.may_claim() == {"refused:lease_held"}
    model.acked("a")
    assert model.may_claim() == {"refused:lease_held"}
    model.left("b")
    assert model.may_claim() == {"granted"}


def test_pinned_is_never_consumed() -> None:
    model = LeaseModel(UNLIMITED)
    for name in "abc":
        model.claimed(name)
        model.acked(name)
    assert model.may_claim() == {"granted"}
    assert not model.consumed


@pytest.mark.parametrize("end", ["abort", "release"])
def test_nothing_ends_twice(end: str) -> None:
    model = LeaseModel(1)
    model.claimed("a")
    model.acked("a")
    getattr(model, end)()
    assert model.ended == ""
    assert model.may_claim() == {"refused:lease_lost"}


def test_a_reader_may_finish_what_was_released_and_not_what_was_aborted() -> None:
    model = LeaseModel(1)
    model.claimed("a")
    model.release()
    assert model.may_read() == {"delivered"}
    assert model.may_ack() == {"done"}
    assert model.may_claim() == {"refused:lease_lost"}
    model.abort()
    assert model.may_ack() == {"refused:aborted"}
    assert model.may_claim() == {"refused:aborted"}


def test_an_abort_after_the_end_changes_nothing() -> None:
    model = LeaseModel(1)
    model.release()
    model.abort()
    assert model.ended == "released"
