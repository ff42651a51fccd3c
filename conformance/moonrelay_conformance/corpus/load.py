"""Reads the corpus that is shipped with the suite.

Owns where it lies and in which order it comes. Files are read once a process and never changed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, Final, TypeVar

import msgspec

from moonrelay.errors import ConfigError
from moonrelay_conformance.corpus.model import Case, Reason, Scenario, check_case, check_scenario

#: Grows with each change of an input, an expectation or a digest; reports are compared only within one version.
CORPUS_VERSION: Final = 1

EntryT = TypeVar("EntryT", Case, Scenario)


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return the payloads of the corpus, in the order of their files.

    Raises:
        ConfigError: A file is wrong; the message names it, the entry and the remedy.
    """
    found = _entries("cases_", Case)
    for name, case in found:
        check_case(case, reasons(), name)
    return _unique(found)


@functools.cache
def scenarios() -> tuple[Scenario, ...]:
    """Return the lease scenarios of the corpus, in the order of their files.

    Raises:
        ConfigError: As `cases`.
    """
    found = _entries("scenarios_", Scenario)
    for name, scenario in found:
        check_scenario(scenario, reasons(), name)
    return _unique(found)


@functools.cache
def reasons() -> Mapping[str, Reason]:
    """Return why things go wrong in the field, by code."""
    name = "reasons.json"
    try:
        return msgspec.json.decode(_data(name), type=dict[str, Reason])
    except msgspec.MsgspecError as exc:
        message = f"{name}: {exc}"
        raise ConfigError(message, field="corpus") from exc


def files(prefix: str) -> tuple[str, ...]:
    """Return the names of the corpus's files that begin with ``prefix``."""
    folder = resources.files(__package__) / "data"
    return tuple(sorted(one.name for one in folder.iterdir() if one.name.startswith(prefix)))


def decode(raw: bytes, kind: type[EntryT], name: str) -> tuple[EntryT, ...]:
    """Read one file's entries; repetitions of steps are unrolled.

    Args:
        raw: A JSON list.
        kind: `Case` or `Scenario`.
        name: File, for messages.

    Raises:
        ConfigError: It is no list of such.
    """
    try:
        entries = json.loads(raw)
    except ValueError as exc:
        message = f"{name}: no JSON: {exc}"
        raise ConfigError(message, field="corpus") from exc
    if not isinstance(entries, list):
        message = f"{name}: holds a {type(entries).__name__}; give a list of entries"
        raise ConfigError(message, field="corpus")
    return tuple(_decoded(entry, kind, f"{name}: entry {number}") for number, entry in enumerate(entries))


def _decoded(entry: Any, kind: type[EntryT], place: str) -> EntryT:
    if isinstance(entry, dict):
        place = f"{place} ({entry.get('id', 'without id')})"
        if isinstance(entry.get("steps"), list):
            entry = {**entry, "steps": _unrolled(entry["steps"])}
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError as exc:
        message = f"{place}: {exc}"
        raise ConfigError(message, field="corpus") from exc


def _unrolled(steps: list[Any]) -> list[Any]:
    """Return the steps with ``{"repeat": n, "steps": [...]}`` written out; ``{i}`` becomes the round's number."""
    found: list[Any] = []
    for step in steps:
        if isinstance(step, dict) and set(step) == {"repeat", "steps"}:
            for number in range(step["repeat"]):
                text = json.dumps(step["steps"]).replace("{i}", str(number))
                found += _unrolled(json.loads(text))
        else:
            found.append(step)
    return found


def _entries(prefix: str, kind: type[EntryT]) -> list[tuple[str, EntryT]]:
    return [(name, entry) for name in files(prefix) for entry in decode(_data(name), kind, name)]


def _unique(found: Iterable[tuple[str, EntryT]]) -> tuple[EntryT, ...]:
    seen: dict[str, str] = {}
    for name, entry in found:
        if entry.id in seen:
            message = f"{name}: id {entry.id!r} is also in {seen[entry.id]}; ids are used once"
            raise ConfigError(message, field="corpus")
        seen[entry.id] = name
    return tuple(entry for _, entry in found)


def _data(name: str) -> bytes:
    return (resources.files(__package__) / "data" / name).read_bytes()
