"""What the tests of one class share: made by the first that asks, ended with the class.

Not fixtures of class scope, because those may be neither methods of a class that is subclassed nor functions beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

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
