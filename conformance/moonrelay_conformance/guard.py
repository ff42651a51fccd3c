"""The guard: what a class does to the suite that it inherits.

Owns the rule that a third party's class may name its target and nothing else: it neither overrides nor removes a test,
except as a known failure, ``@pytest.mark.xfail(reason=...)`` on the override.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import pytest

from moonrelay_conformance.suites.base import MARKER, Promise, Suite

NAME: Final = "test_no_test_is_overridden_or_removed"
TITLE: Final = "The class runs every test of its suite as it is"

_OURS: Final = "moonrelay_conformance."
#: What a class may set.
_FREE: Final = frozenset({"target", "kind", "pytestmark"})


def complaints(cls: type[Suite], collected: Collection[str]) -> list[str]:
    """Return what is wrong with a class, in lines; empty where it runs its suite as it is.

    Args:
        cls: The collected class.
        collected: Names of the test functions that pytest collected in it.
    """
    found = not_collectable(cls)
    changed: set[str] = set()
    for position, one in enumerate(cls.__mro__):
        if one.__module__.startswith(_OURS) or one is object:
            continue
        if any(mark.name == "parametrize" for mark in _marks(vars(one))):
            found.append(f"parametrize on {one.__name__} chooses what the suite's tests run over")
        rest = cls.__mro__[position + 1 :]
        for name, value in vars(one).items():
            if name in _FREE or name in changed or (name.startswith("__") and name.endswith("__")):
                continue
            owner = next((base for base in rest if name in vars(base) and issubclass(base, Suite)), None)
            if owner is None:
                continue
            complaint = _of_override(one, name, value, vars(owner)[name])
            if complaint:
                changed.add(name)
                found.append(complaint)
    missing = [name for name in tests_of(cls) if name not in collected and name not in changed]
    if missing and not found:
        found.append(f"pytest was kept from collecting {', '.join(missing)}")
    return found


def not_collectable(cls: type[Suite]) -> list[str]:
    """Return what keeps pytest from collecting any test of a class."""
    found = [] if getattr(cls, "__test__", True) else ["`__test__ = False` removes all of its tests"]
    changed = [name for name in ("__init__", "__new__") if getattr(cls, name) is not getattr(object, name)]
    return [*found, *(f"`{name}` keeps pytest from running its tests" for name in changed)]


def replaced_fixtures(cls: type[Suite], functions: Iterable[pytest.Function]) -> tuple[str, ...]:
    """Return which of the suite's fixtures its tests would not get, since a module, class or conftest has one so named.

    Args:
        cls: The collected class.
        functions: What pytest collected in it.
    """
    found: dict[str, None] = {}
    for function in functions:
        if inherited_promise(cls, function.originalname) is None:
            continue
        for name, definitions in function._fixtureinfo.name2fixturedefs.items():  # noqa: SLF001 - no public way
            modules = [str(getattr(one.func, "__module__", "")) for one in definitions]
            if any(one.startswith(_OURS) for one in modules) and not modules[-1].startswith(_OURS):
                found[f"the suite's fixture `{name}` is replaced in {modules[-1]}; give yours another name"] = None
    return tuple(found)


def replaced_functions(cls: type[Suite], functions: Iterable[pytest.Function]) -> list[str]:
    """Return which tests would run another function than the class has by their name; a conftest can do that."""
    changed: dict[str, None] = {}
    for function in functions:
        name = function.originalname
        own = next((vars(one)[name] for one in cls.__mro__ if name in vars(one)), None)
        if inherited_promise(cls, name) is not None and getattr(function.obj, "__func__", None) is not own:
            changed[name] = None
    return [f"another function stands in the place of {name}" for name in changed]


def tests_of(cls: type[Suite]) -> tuple[str, ...]:
    """Return the names of all tests that a class inherits from its suite, whether it overrides them or not."""
    names: dict[str, None] = {}
    for one in reversed(cls.__mro__):
        for name, value in vars(one).items():
            if name.startswith("test_") and promise_of(value) is not None:
                names[name] = None
    return tuple(names)


def inherited_promise(cls: type[Suite], name: str) -> Promise | None:
    """Return the promise of a test: that of the suite, also where the class overrides the test."""
    for one in reversed(cls.__mro__):
        promise = promise_of(vars(one)[name]) if name in vars(one) else None  # asked thousands of times in a run
        if promise is not None:
            return promise
    return None


def known_failure(cls: type[Suite], name: str) -> str | None:
    """Return the reason of an override that is a known failure; ``None`` where the test is the suite's own."""
    for one in cls.__mro__:
        if name in vars(one):
            if one.__module__.startswith(_OURS) or not _overrides(cls, one, name):
                return None
            return _reason(vars(one)[name])
    return None


def promise_of(function: object) -> Promise | None:
    """Return the promise that a function is marked with."""
    for mark in _marks(function):
        if mark.name == MARKER and mark.args and isinstance(mark.args[0], Promise):
            return mark.args[0]
    return None


def _overrides(cls: type[Suite], one: type, name: str) -> bool:
    rest = cls.__mro__[cls.__mro__.index(one) + 1 :]
    return any(name in vars(base) for base in rest)


def _of_override(cls: type, name: str, value: object, original: object) -> str | None:
    where = f"{cls.__name__}.{name}"
    if name.startswith("test_"):
        if not callable(value):
            return f"{where} removes the test"
        if _reason(value) is None:
            return f"{where} overrides the test without `@pytest.mark.xfail(reason=...)`, without a condition, on it"
        return None
    if isinstance(original, Callable | classmethod | staticmethod | property):  # type: ignore[arg-type]
        return f"{where} overrides a part of the suite"
    return None


def _reason(function: object) -> str | None:
    """Return the reason of an unconditional xfail mark; ``None`` where there is none."""
    for mark in _marks(function):
        if mark.name == "xfail" and not mark.args and "condition" not in mark.kwargs:
            reason = mark.kwargs.get("reason")
            if isinstance(reason, str) and reason.strip():
                return reason.strip()
    return None


def _marks(of: object) -> list[pytest.Mark]:
    marks = of.get("pytestmark", []) if isinstance(of, Mapping) else getattr(of, "pytestmark", [])
    marks = [getattr(mark, "mark", mark) for mark in (marks if isinstance(marks, list) else [marks])]
    return [mark for mark in marks if isinstance(mark, pytest.Mark)]
