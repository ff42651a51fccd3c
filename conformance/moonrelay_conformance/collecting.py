"""How pytest collects the classes of a suite.

Owns the collectors: the class with its guard in front, and the module that stands for the chosen kind. A class's target
is made once, here, and lies in the class node's stash.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Never

import pytest

from moonrelay.errors import MoonrelayError
from moonrelay_conformance import guard
from moonrelay_conformance.plugin import activate
from moonrelay_conformance.suites.base import Suite
from moonrelay_conformance.targets.base import Target

_TARGET: Final = pytest.StashKey[Target]()


class SuiteClass(pytest.Class):
    """A class of a suite: the guard first, then the tests."""

    #: Names of the test functions that were collected; the guard compares.
    names: set[str]
    #: Which of the suite's fixtures the tests would not get, and who replaced them.
    replaced: tuple[str, ...]

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        target = suite_target(self)
        found: list[pytest.Item | pytest.Collector] = [GuardItem.from_parent(self, name=guard.NAME)]
        if not guard.not_collectable(self.obj):
            found += super().collect()
        functions = [one for one in found if isinstance(one, pytest.Function)]
        self.names = {one.originalname for one in functions}
        self.replaced = guard.replaced_fixtures(self.obj, functions)
        return activate(self.config).admit(self, target, found)

    def funcnamefilter(self, name: str) -> bool:
        """Take the suite's tests whatever the session's ``python_functions`` says."""
        return name.startswith("test_")


class GuardItem(pytest.Item):
    """The test that no class can override, since it is none of the class's."""

    def runtest(self) -> None:
        node = suite_node(self)
        assert node is not None
        functions = [one for one in self.session.items if isinstance(one, pytest.Function) and suite_node(one) is node]
        found = [
            *guard.complaints(self.suite, node.names),
            *node.replaced,
            *guard.replaced_functions(self.suite, functions),
        ]
        if found:
            pytest.fail("; ".join(found), pytrace=False)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"{self.suite.__name__}.{self.name}"

    @property
    def suite(self) -> type[Suite]:
        node = suite_node(self)
        assert node is not None
        found: type[Suite] = node.obj
        return found


class ChosenModule(pytest.Module):
    """`moonrelay_conformance.suites.chosen` as a session collects it: with the class of the chosen kind."""

    @classmethod
    def make(cls, parent: pytest.Collector, path: Path) -> ChosenModule:
        """Make it for the session that ``parent`` belongs to."""
        module: ChosenModule = cls.from_parent(parent, path=path)
        return module

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        target = activate(self.config).target
        if target is None:
            _stop("no target is named; give --moonrelay-adapter NAME")
        from moonrelay_conformance.suites import chosen

        try:
            name, cls = chosen.class_for(target.kind)
        except MoonrelayError as exc:
            _stop(str(exc))
        module = types.ModuleType(chosen.__name__, chosen.__doc__)
        setattr(module, name, cls)
        self.obj = module
        return super().collect()


def make_suite_class(
    collector: pytest.Module | pytest.Class, name: str, cls: type[Suite]
) -> pytest.Collector | list[pytest.Collector] | None:
    """Collect a class of a suite; an imported suite without a target of its own is not meant to be run."""
    own = cls.__module__ == collector.obj.__name__
    if not isinstance(collector, ChosenModule):
        if not collector.classnamefilter(name):
            return None
        if not own and cls.target is None:
            return []
    made: SuiteClass = SuiteClass.from_parent(collector, name=name, obj=cls)
    return made


def suite_node(node: pytest.Item | pytest.Collector) -> SuiteClass | None:
    """Return the class of a suite that a node lies in."""
    return node.getparent(SuiteClass)


def suite_target(node: SuiteClass) -> Target:
    """Return a class's target; the same one every time.

    Raises:
        pytest.Collector.CollectError: There is none, it cannot be made, or it is of another kind.
    """
    known = node.stash.get(_TARGET, None)
    if known is not None:
        return known
    cls: type[Suite] = node.obj
    given = cls.target
    try:
        made = given() if isinstance(given, type) else given
    except Exception as exc:  # noqa: BLE001 - foreign code: its target cannot be made, and that is the failure
        _stop(f"{cls.__name__}.target cannot be made: {type(exc).__name__}: {exc}")
    if made is None:
        made = activate(node.config).target
    if made is None:
        _stop(f"{cls.__name__} has no target; set `target = ...` in the class, or give --moonrelay-adapter NAME")
    kind = getattr(cls, "kind", None)
    if not isinstance(made, Target):
        _stop(f"{cls.__name__}.target is {made!r}, which is no Target")
    if kind is not None and made.kind != kind:
        _stop(f"{cls.__name__} is for the kind {kind!r}, and its target {made.name!r} is of the kind {made.kind!r}")
    node.stash[_TARGET] = made
    return made


def target_of(node: pytest.Item | pytest.Collector) -> Target:
    """Return the target of the class that a node lies in."""
    found = suite_node(node)
    assert found is not None, "the fixtures of the suite are for classes of a suite only"
    return suite_target(found)


def _stop(message: str) -> Never:
    raise pytest.Collector.CollectError(message)
