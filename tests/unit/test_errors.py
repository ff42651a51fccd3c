"""Errors: one class per failure, and what crosses a wire."""

from __future__ import annotations

import pytest

from moonrelay import errors
from moonrelay.errors import MoonrelayError, from_wire


def leaves(root: type[MoonrelayError] = MoonrelayError) -> list[type[MoonrelayError]]:
    own = [root] if root.__module__ == errors.__name__ else []
    return own + [leaf for child in root.__subclasses__() for leaf in leaves(child)]


RETRYABLE = {
    *("QueueFull", "LeaseHeld", "InputLost", "NoCredit", "Preempted"),
    *("TransferFailed", "TransferTimeout", "PeerLost"),
}


def test_what_is_worth_retrying_is_what_the_architecture_says() -> None:
    assert {leaf.__name__ for leaf in leaves() if leaf.retryable} == RETRYABLE


def test_codes_are_snake_case_and_different() -> None:
    codes = [leaf.code for leaf in leaves()]
    assert len(codes) == len(set(codes))
    assert errors.TransferTimeout.code == "transfer_timeout"
    assert errors.NoCredit.code == "no_credit"


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.__name__)
def test_every_class_crosses_the_wire(leaf: type[MoonrelayError]) -> None:
    raised = leaf("it broke", request_id="r1", peer=None)
    rebuilt = from_wire(*raised.to_wire())
    assert type(rebuilt) is leaf
    assert rebuilt.retryable is leaf.retryable
    assert "it broke" in str(rebuilt)
    assert "request_id='r1'" in str(rebuilt)
    assert rebuilt.context["remote"] is True


def test_the_peers_judgement_overrides_the_class() -> None:
    assert from_wire("integrity_error", True, "x").retryable is True
    assert errors.IntegrityError.retryable is False


def test_an_unknown_code_is_kept() -> None:
    rebuilt = from_wire("made_up_later", True, "x")
    assert type(rebuilt) is MoonrelayError
    assert rebuilt.context["code"] == "made_up_later"
    assert rebuilt.retryable is True


def test_a_plugins_subclass_gets_a_code_and_is_found() -> None:
    class MyEngineFailed(errors.TransferFailed):
        """A plugin's own."""

    assert MyEngineFailed.code == "my_engine_failed"
    assert type(from_wire("my_engine_failed", True, "x")) is MyEngineFailed


def test_context_leaves_out_none_and_shows_the_rest() -> None:
    error = errors.ConfigError("bad", field="window", value=None)
    assert error.context == {"field": "window"}
    assert str(error) == "bad (field='window')"
    assert str(errors.ConfigError("bad")) == "bad"


def test_no_error_is_a_value_error() -> None:
    assert not any(issubclass(leaf, ValueError) for leaf in leaves())


@pytest.mark.parametrize(
    ("leaf", "builtin"),
    [
        (errors.LeaseHeld, TimeoutError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.TransferTimeout, TimeoutError),
        (errors.PeerLost, ConnectionError),
        (errors.UnsupportedTensor, TypeError),
    ],
)
def test_leaves_are_the_builtin_that_a_caller_expects(leaf: type[MoonrelayError], builtin: type[Exception]) -> None:
    assert issubclass(leaf, builtin)
