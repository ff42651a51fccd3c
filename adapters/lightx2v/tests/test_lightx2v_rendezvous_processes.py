"""The rendezvous when a desk's process dies, stands still, comes late or comes back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from lightx2v_desk_process import TIMEOUT_S, DeskProcess, Finding, until, within

from moonrelay.errors import Aborted, DeadlineExceeded, PeerLost
from moonrelay_lightx2v import rendezvous_caller
from moonrelay_lightx2v.rendezvous import Caller
from moonrelay_lightx2v.rendezvous_search import Search

pytestmark = pytest.mark.processes

NAMES = ("task:1", "same:x")


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Search]:
    """The finds of this process, as they see the desks."""
    found: list[Search] = []

    class Watched(Search):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            found.append(self)

    monkeypatch.setattr(rendezvous_caller, "Search", Watched)
    return found


def until_it_knows_of_work(search: Search, desk: int = 0) -> None:
    until(lambda: search._desks[desk].working, "the find knows that a desk works on it")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def desk(stack: ExitStack, port: int = 0) -> DeskProcess:
    process = DeskProcess(port)
    stack.callback(process.end)
    return process


def caller(stack: ExitStack, *desks: DeskProcess, peer_timeout_s: float = 3.0, retry_s: float = 0.1) -> Caller:
    found = Caller(
        [process.address for process in desks], phase="encoder", peer_timeout_s=peer_timeout_s, retry_s=retry_s
    )
    stack.callback(found.close)
    return found


def test_a_handle_goes_from_one_process_to_another(stack: ExitStack) -> None:
    there = desk(stack)
    there.do("offer", NAMES, "p", "before")
    asking = caller(stack, there)
    assert asking.find(("same:x",), within(TIMEOUT_S)) == b"before"
    finding = Finding(asking, "same:y")
    there.until_waited_for()
    there.do("offer", ("same:y",), "q", "after")
    assert finding.result() == b"after"


@pytest.mark.parametrize("works", [False, True])
def test_a_desk_that_is_killed_while_a_find_waits_is_lost(
    stack: ExitStack, searches: list[Search], works: bool
) -> None:
    there = desk(stack)
    finding = Finding(caller(stack, there), *NAMES)
    there.until_waited_for()
    if works:
        there.do("working", NAMES)
        until_it_knows_of_work(searches[0])
    there.kill()
    killed_at = time.monotonic()
    with pytest.raises(PeerLost, match="is silent for 3 s"):
        finding.result()
    # Not before its time, and long before the find's own deadline.
    assert 1.0 < time.monotonic() - killed_at < TIMEOUT_S / 2


def test_a_desk_that_is_restarted_while_it_works_is_lost_at_once(stack: ExitStack, searches: list[Search]) -> None:
    there = desk(stack)
    # Silence alone would not end this find within the test.
    finding = Finding(caller(stack, there, peer_timeout_s=300.0), *NAMES, timeout_s=600.0)
    there.until_waited_for()
    there.do("working", NAMES)
    until_it_knows_of_work(searches[0])
    there.kill()
    desk(stack, there.port)
    with pytest.raises(PeerLost, match="was restarted while it worked on this request"):
        finding.result()


def test_a_desk_that_is_restarted_while_idle_serves_the_find(stack: ExitStack) -> None:
    there = desk(stack)
    finding = Finding(caller(stack, there, peer_timeout_s=60.0), *NAMES)
    there.until_waited_for()
    there.kill()
    again = desk(stack, there.port)
    again.until_waited_for()
    again.do("offer", NAMES, "p", "of the new one")
    assert finding.result() == b"of the new one"


def test_a_restart_between_two_finds_is_none_of_the_second_ones_business(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there, peer_timeout_s=60.0)
    there.do("working", NAMES)
    with pytest.raises(DeadlineExceeded, match="still works on it"):
        asking.find(NAMES, within(1.0))
    there.kill()
    again = desk(stack, there.port)
    again.do("offer", NAMES, "p", "handle")
    assert asking.find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_a_desk_may_start_after_the_find(stack: ExitStack) -> None:
    first = desk(stack)
    first.end()
    finding = Finding(caller(stack, first, peer_timeout_s=60.0), *NAMES)
    there = desk(stack, first.port)
    there.until_waited_for()
    there.do("offer", NAMES, "p", "handle")
    assert finding.result() == b"handle"


def test_a_desk_that_never_starts_is_lost(stack: ExitStack) -> None:
    first = desk(stack)
    first.end()
    with pytest.raises(PeerLost, match=f"127.0.0.1:{first.port} does not answer for 0.5 s; start that role"):
        caller(stack, first, peer_timeout_s=0.5).find(NAMES, within(TIMEOUT_S))


def test_a_desk_that_stands_still_is_lost_and_found_again(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there, peer_timeout_s=1.5)
    finding = Finding(asking, *NAMES)
    there.until_waited_for()
    there.stop()
    with pytest.raises(PeerLost, match=r"is silent for 1\.5 s"):
        finding.result()
    with pytest.raises(PeerLost, match="does not answer"):
        asking.find(NAMES, within(TIMEOUT_S))
    there.go_on()
    # What the finds before have left in its queue takes nothing from the next one.
    there.do("offer", NAMES, "p", "handle")
    assert asking.find(NAMES, within(TIMEOUT_S)) == b"handle"


def test_a_desk_that_stands_still_for_a_moment_only_is_not_lost(stack: ExitStack) -> None:
    there = desk(stack)
    finding = Finding(caller(stack, there, peer_timeout_s=60.0), *NAMES)
    there.until_waited_for()
    there.stop()
    there.go_on()
    there.do("offer", NAMES, "p", "handle")
    assert finding.result() == b"handle"


def test_a_closing_desk_tells_who_waits(stack: ExitStack) -> None:
    there = desk(stack)
    finding = Finding(caller(stack, there, peer_timeout_s=300.0), *NAMES, timeout_s=600.0)
    there.until_waited_for()
    there.do("close")
    with pytest.raises(PeerLost, match="closes"):
        finding.result()


def test_of_two_desks_the_one_that_has_it_answers_though_the_other_died(stack: ExitStack) -> None:
    one, two = desk(stack), desk(stack)
    asking = caller(stack, one, two, peer_timeout_s=1.0)
    finding = Finding(asking, *NAMES)
    one.until_waited_for()
    two.until_waited_for()
    one.kill()
    with pytest.raises(DeadlineExceeded):
        asking.find(("same:other",), within(3.0))  # more than its silence takes
    assert finding.waits
    two.do("offer", NAMES, "p", "of two")
    assert finding.result() == b"of two"


def test_of_two_desks_the_one_that_works_on_it_is_missed(stack: ExitStack, searches: list[Search]) -> None:
    one, two = desk(stack), desk(stack)
    finding = Finding(caller(stack, one, two, peer_timeout_s=1.0), *NAMES)
    one.until_waited_for()
    two.until_waited_for()
    one.do("working", NAMES)
    until_it_knows_of_work(searches[0])
    one.kill()
    with pytest.raises(PeerLost, match=f":{one.port} worked on this request"):
        finding.result()


def test_two_desks_that_die_are_both_missed(stack: ExitStack) -> None:
    one, two = desk(stack), desk(stack)
    finding = Finding(caller(stack, one, two, peer_timeout_s=1.0), *NAMES)
    one.until_waited_for()
    two.until_waited_for()
    one.kill()
    two.kill()
    with pytest.raises(PeerLost, match="is silent"):
        finding.result()


def test_the_failure_of_a_stage_reaches_another_process(stack: ExitStack) -> None:
    there = desk(stack)
    asking = caller(stack, there)
    finding = Finding(asking, *NAMES)
    there.until_waited_for()
    there.do("working", NAMES)
    there.do("refuse", NAMES, "capacity_error", "no room for 3 GiB")
    with pytest.raises(Aborted, match="no room for 3 GiB"):
        finding.result()


def test_a_caller_that_is_killed_takes_nothing_with_it(stack: ExitStack) -> None:
    there = desk(stack)
    script = f"""
        from moonrelay_lightx2v.rendezvous import Caller
        from moonrelay.clock import Deadline, SystemClock
        Caller([("127.0.0.1", {there.port})], phase="encoder").find(("same:x",), Deadline(600, SystemClock()))
    """
    doomed = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    try:
        there.until_waited_for()
    finally:
        doomed.kill()
        doomed.wait(TIMEOUT_S)
    finding = Finding(caller(stack, there, retry_s=60.0, peer_timeout_s=300.0), "same:x")
    there.until_waited_for(2)
    there.do("offer", ("same:x",), "p", "handle")
    # It is not asked again: the offer has to come to it when the other's connection is found gone.
    assert finding.result() == b"handle"


FORK = """
    import os, sys
    from moonrelay.clock import Deadline, SystemClock
    from moonrelay.errors import ClosedError
    from moonrelay_lightx2v.rendezvous import Caller, Desk

    def soon():
        return Deadline(20, SystemClock())

    desk = Desk("127.0.0.1", 0, phase="encoder")
    desk.start()
    caller = Caller([desk.address], phase="encoder")
    desk.offer(("a",), "a", b"a")
    assert caller.find(("a",), soon()) == b"a"
    # The worst moment: another thread holds the locks for ever, as far as the child knows.
    desk._lock.acquire()
    caller._changed.acquire()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: desk.offer(("b",), "b", b"b"), lambda: caller.find(("a",), soon()), desk.start):
            try:
                call()
            except ClosedError as exc:
                refused += "fork" in str(exc)
        caller.forget(("a",))
        desk.close()
        caller.close()
        os._exit(10 + refused)
    caller._changed.release()
    desk._lock.release()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    desk.offer(("c",), "c", b"c")
    assert caller.find(("c",), soon()) == b"c"
    caller.close()
    desk.close()
    sys.exit(code)
"""


def test_a_forked_child_is_refused_and_harms_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK)], timeout=60, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (13, "")
