"""The states of a request, and the only steps between them."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from moonrelay.errors import MoonrelayError

State: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled", "dead"]
Step: TypeAlias = Literal["claim", "advance", "finish", "retry", "rewind", "fail", "bury", "cancel"]

STATES: tuple[State, ...] = get_args(State)
#: Ends: nothing leads out of them.
ENDED: frozenset[State] = frozenset({"done", "failed", "cancelled", "dead"})

TABLE: dict[tuple[State, Step], State] = {
    ("queued", "claim"): "running",
    ("queued", "fail"): "failed",  # its deadline passed
    ("queued", "cancel"): "cancelled",
    ("running", "advance"): "queued",  # in the next stage's queue
    ("running", "finish"): "done",
    ("running", "retry"): "queued",  # same stage again: failed, returned, or its worker died
    ("running", "rewind"): "queued",  # in an earlier stage's queue: the input is gone
    ("running", "fail"): "failed",
    ("running", "bury"): "dead",  # attempts used up
    ("running", "cancel"): "cancelled",
}


def step(state: State, what: Step) -> State:
    """Return the state that ``what`` leads to.

    Raises:
        MoonrelayError: The table has no such step; a defect in the rules, not in the caller's input.
    """
    after = TABLE.get((state, what))
    if after is None:
        message = f"a {state} request cannot {what}"
        raise MoonrelayError(message, state=state, step=what)
    return after
