"""What the tests of one class share, made by the first that asks and ended with the class; and threads of one test.

Shared things are no fixtures of class scope: those may be neither methods of a class that is subclassed nor functions
beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from moonrelay.clock import Deadline, SystemClock

ThingT = TypeVar("ThingT")


def once_per_class(
    request: pytest.FixtureRequest, key: pytest.StashKey[ThingT], make: Callable[[], tuple[ThingT, Callable[[], None]]]
) -> ThingT:
    """Return what the tests of the running test's class share.

    Args:
        request: Of the running test.
        key: Under which it is kept.
        make: Makes it, and returns it with what ends it.
    """
    node: pytest.Class | None = request.node.getparent(pytest.Class)
    assert node is not None, "a suite's tests are methods of a class"
    shared = node.stash.get(key, None)
    if shared is not None:
        return shared
    made, end = make()
    node.stash[key] = made

    def finish() -> None:
        del node.stash[key]
        end()

    node.addfinalizer(finish)
    return made


def in_threads(count: int, work: Callable[[int], None], *, within_s: float = 90.0) -> None:
    """Run ``work`` in threads at once, each with its number.

    Raises:
        AssertionError: One has not ended after ``within_s``; it is left behind.
    """
    threads = [
        threading.Thread(target=work, args=(me,), name=f"moonrelay-suite-{me}", daemon=True) for me in range(count)
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(within_s, SystemClock())
    for thread in threads:
        thread.join(deadline.remaining())
        assert not thread.is_alive(), f"{thread.name} still waits after {within_s} s"
