"""What becomes of a request that its client gives up while a role waits for its input: the role is free in a second.

From the find up to the host's server, whose DELETE only sets an event on the task.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from lightx2v_desk_process import TIMEOUT_S, Finding, until, within

from moonrelay.errors import Cancelled, DeadlineExceeded
from moonrelay_lightx2v.rendezvous import Caller, Desk

NAMES = ("task:1", "same:x")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def desk(stack: ExitStack) -> Desk:
    found = Desk("127.0.0.1", 0, phase="encoder")
    stack.callback(found.close)
    found.start()
    return found


def caller(stack: ExitStack, there: Desk) -> Caller:
    """A caller that would not look at anything for a long time."""
    found = Caller([there.address], phase="encoder", retry_s=1000.0, peer_timeout_s=3000.0)
    stack.callback(found.close)
    return found


def until_waited_for(there: Desk, finds: int = 1) -> None:
    def waiting() -> bool:
        with there._lock:
            return len(there._book._waiters) == finds

    until(waiting, f"{finds} finds wait")


# -- the find ---------------------------------------------------------------------------------------------------------


def test_a_find_that_is_cancelled_ends_soon_and_is_forgotten_by_the_desk(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there)
    stop = threading.Event()
    finding = Finding(asking, *NAMES, cancelled=stop.is_set)
    until_waited_for(there)
    stop.set()
    with pytest.raises(Cancelled, match=r"task:1, same:x was cancelled while it waited for the encoder stage"):
        finding.result()
    until_waited_for(there, 0)
    there.offer(NAMES, "p", b"handle")
    assert asking.find(NAMES, within(TIMEOUT_S), cancelled=stop.is_set) == b"handle", "it is there, and was not given"


def test_a_find_looks_now_and_then_whether_it_is_cancelled(stack: ExitStack) -> None:
    looks: list[None] = []
    with pytest.raises(DeadlineExceeded):
        caller(stack, desk(stack)).find(NAMES, within(1.0), cancelled=lambda: bool(looks.append(None)))
    assert 2 <= len(looks) <= 20
