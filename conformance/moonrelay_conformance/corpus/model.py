"""What a case and a scenario of the corpus are, and the checks that hold them to it.

Owns the JSON form. A file that is wrong is refused with one line that names the file, the entry and the remedy; nothing
here builds a tensor or runs a step.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from moonrelay.errors import ConfigError, MoonrelayError
from moonrelay.lease import LeaseStatus
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus.description import check
from moonrelay_conformance.results import Level
from moonrelay_conformance.targets.adapter import Faults


class PromiseName(enum.StrEnum):
    """What a case is about; the suite has one test for each."""

    STRUCTURE = "structure_is_kept"
    DTYPE = "dtype_is_kept"
    SHAPE = "shape_is_kept"
    VALUES = "values_are_kept"
    PLAIN = "plain_values_are_kept"
    IDENTITY = "identity_is_kept"
    EMPTY = "empty_is_not_missing"
    METADATA = "metadata_is_kept"
    CHUNKS = "chunks_arrive_once_in_order"
    REFUSED = "refused_by_name"
    CAPACITY = "capacity_is_a_typed_refusal"


class Expected(enum.StrEnum):
    """The right outcome of a case."""

    DELIVERED = "delivered"
    REFUSED = "refused"
    #: Delivered, or refused with one of the codes: where the edge lies is the target's affair.
    EITHER = "either"


class At(enum.StrEnum):
    """Where a refusal must come."""

    PUBLISH = "publish"
    RECEIVE = "receive"
    #: Of the producer, or of its reader at the first try: what is relayed may meet the store's bound after `publish`.
    ANYWHERE = "anywhere"


class Reason(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why something goes wrong in the field.

    Attributes:
        text: One or two sentences.
        provenance: Public reports, code or probes that show it.
    """

    text: str
    provenance: tuple[str, ...]


class Sending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a payload is published; the fields of `moonrelay_conformance.targets.adapter.Outgoing` without the tree.

    Attributes:
        ready_order: Order in which the chunks become final; empty publishes them all at once.
    """

    chunk_dim: int | None = None
    num_chunks: int = 1
    lease: str = "delete_on_consume"
    readers: int = 1
    ttl_s: float | None = None
    attempt: int = 0
    metadata: dict[str, Any] | None = None
    registered: bool = False
    ready_order: tuple[int, ...] = ()


class SideChanges(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of sides that differ from `SideSettings`' defaults; ``None`` is no change."""

    host: str | None = None
    pool_bytes: int | None = None
    lease_ttl_s: float | None = None
    claim_ttl_s: float | None = None
    renew_s: float | None = None
    peer_timeout_s: float | None = None
    spill_after_s: float | None = None
    auth_key: str | None = None
    faults: Faults | None = None

    def given(self) -> dict[str, Any]:
        """Return the changes alone, by the names of `SideSettings`' fields."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


class Expectation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The right outcome of a case.

    Attributes:
        outcome: Delivered identical, or refused, or either.
        digest: Of the tree as it must arrive; `moonrelay_conformance.corpus.trees.digest`.
        chunks: Digest of each chunk, in chunk order.
        codes: Error codes of which a refusal must have one.
        field: What the refusal's ``context['field']`` must contain.
        at: Where the refusal must come.
        within_s: How soon, in seconds.
    """

    outcome: Expected
    digest: str = ""
    chunks: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    field: str = ""
    at: At = At.PUBLISH
    within_s: float | None = None


class Case(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A payload and its right outcome.

    Attributes:
        id: Its name in reports.
        level: L1 where every adapter must carry it.
        promise: What it is about.
        title: What is promised, in one line.
        provenance: Where it comes from.
        reason: Code in the list of reasons.
        requires: Capabilities that it needs.
        tree: Description of the payload; see `moonrelay_conformance.corpus.description`.
        outgoing: How it is published.
        side: Settings of both sides.
        expect: The right outcome.
    """

    id: str
    level: Level
    promise: PromiseName
    title: str
    provenance: tuple[str, ...]
    reason: str
    tree: Any
    expect: Expectation
    requires: tuple[Capability, ...] = ()
    outgoing: Sending = Sending()
    side: SideChanges = SideChanges()

    def __str__(self) -> str:
        return self.id


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One step of a scenario: somebody does something, and what may then be observed.

    Attributes:
        do: The verb; see `VERBS`.
        expect: Observations of which one must be made.
        side: Who does it: ``producer``, ``producer2``, ``consumer``, ``consumer2``, ``consumer3``.
        of: Name of the publication (`publish`, `open`) or of the claim or receipt that it is about.
        name: Under what name the result is kept; ``as`` in JSON.
        timeout_s: Deadline handed to the adapter.
        within_s: A later answer counts as ``late``.
        payload: Tree to publish; the scenario's by default.
        request: Request id; the name by default.
        lease, readers, ttl_s, attempt, chunk_dim, chunks, registered: How it is published; ``chunks`` is their number.
        chunk: Number of a chunk.
        text: Reason of an abort.
        state: Words of `moonrelay.lease.LeaseStatus` that are waited for.
        seconds: How much time passes.
        bytes: How much memory is written over.
        step: With ``begin``: the step that is begun and not waited for.
    """

    do: str
    expect: tuple[str, ...]
    side: str = ""
    of: str = ""
    name: str = msgspec.field(name="as", default="")
    timeout_s: float = 10.0
    within_s: float | None = None
    payload: Any = None
    request: str = ""
    lease: str = "delete_on_consume"
    readers: int = 1
    ttl_s: float | None = None
    attempt: int = 0
    chunk_dim: int | None = None
    chunks: int = 1
    registered: bool = False
    chunk: int = 0
    text: str = ""
    state: tuple[str, ...] = ()
    seconds: float = 0.0
    bytes: int = 0
    step: Step | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What happens to a lease, step by step.

    Attributes:
        id: Its name in reports.
        level: Its level.
        title: What is promised, in one line.
        provenance: Where it comes from.
        reason: Code in the list of reasons.
        requires: Capabilities that it needs.
        routes: Over which routes it makes sense; empty is all that the target has.
        side: Settings of all sides.
        sides: Further settings by side.
        payload: What is published where a step names nothing else.
        steps: What happens, flat: repetitions are unrolled.
    """

    id: str
    level: Level
    title: str
    provenance: tuple[str, ...]
    reason: str
    payload: Any
    steps: tuple[Step, ...]
    requires: tuple[Capability, ...] = ()
    routes: tuple[str, ...] = ()
    side: SideChanges = SideChanges()
    sides: dict[str, SideChanges] = {}

    def __str__(self) -> str:
        return self.id


#: Sides that a scenario may name.
SIDES: Final = ("producer", "producer2", "consumer", "consumer2", "consumer3")

#: Verbs, with what may be observed of them. ``refused`` stands for ``refused:CODE``, ``state`` for ``state:WORD``.
VERBS: Final[dict[str, tuple[str, ...]]] = {
    "publish": ("published", "refused"),
    "open": ("opened", "refused"),
    "ready": ("done", "refused"),
    "abort": ("done", "refused"),
    "receive": ("delivered", "wrong_bytes", "refused"),
    "claim": ("granted", "refused"),
    "read": ("delivered", "wrong_bytes", "refused"),
    "next_chunk": ("delivered", "wrong_bytes", "end", "refused"),
    "ack": ("done", "refused"),
    "nack": ("done", "refused"),
    "release": ("done", "refused"),
    "status": ("state", "refused"),
    "until_status": ("state", "refused"),
    "kill": ("done",),
    "stop": ("done",),
    "go_on": ("done",),
    "restart": ("done",),
    "pass_time": ("done",),
    "reuse": ("done", "refused"),
    "recheck": ("unchanged", "changed"),
    "edit": ("done",),
    "begin": ("done",),
    "finish": (),
    "settled": ("settled",),
}

#: What of a step must be given, beside ``expect``.
_NEEDS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("publish", "open"), ("side", "name")),
    "claim": ("side", "of", "name"),
    **dict.fromkeys(
        ("ready", "abort", "receive", "read", "next_chunk", "ack", "nack", "release", "status", "recheck", "edit"),
        ("side", "of"),
    ),
    "until_status": ("side", "of", "state", "within_s"),
    **dict.fromkeys(("kill", "stop", "go_on", "restart"), ("side",)),
    "pass_time": ("seconds",),
    "reuse": ("side", "bytes"),
    "begin": ("side", "step"),
    "finish": ("side", "within_s"),
    "settled": (),
}

#: Verbs that speak of a publication by its ticket, and those that speak of a claim or receipt.
_OF_TICKETS: Final = frozenset({"ready", "abort", "receive", "claim", "release", "status", "until_status"})
_OF_CLAIMS: Final = frozenset({"read", "next_chunk", "ack", "nack", "recheck", "edit"})

_ID: Final = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_ROUTES: Final = frozenset({"p2p", "store", "spill"})


def known_codes() -> frozenset[str]:
    """Return the codes of all errors that an expectation may name."""
    found: set[str] = set()
    pending: list[type[MoonrelayError]] = [MoonrelayError]
    while pending:
        one = pending.pop()
        found.add(one.code)
        pending += one.__subclasses__()
    return frozenset(found)


def check_case(case: Case, reasons: Iterable[str], place: str) -> None:
    """Refuse a case that contradicts itself.

    Args:
        case: What was read.
        reasons: Known codes of reasons.
        place: File, for the message.

    Raises:
        ConfigError: With the file, the case and what is wrong.
    """
    place = f"{place}: case {case.id!r}"
    _check_common(case, reasons, place)
    check(case.tree, f"{place}: tree")
    expect, outgoing = case.expect, case.outgoing
    _require(outgoing.num_chunks >= 1, f"{place}: num_chunks={outgoing.num_chunks} must be at least 1")
    order = sorted(outgoing.ready_order)
    _require(not order or order == list(range(outgoing.num_chunks)), f"{place}: ready_order must name each chunk once")
    unknown = sorted(set(expect.codes) - known_codes())
    _require(not unknown, f"{place}: unknown error code {unknown}")
    may_refuse = expect.outcome is not Expected.DELIVERED
    _require(may_refuse == bool(expect.codes), f"{place}: codes are given where a refusal is allowed, and only there")
    _require(may_refuse or not expect.field, f"{place}: a delivery has no field")
    digests = bool(expect.digest or expect.chunks)
    _require(not digests or expect.outcome is not Expected.REFUSED, f"{place}: a refusal has no digest")
    if case.level is Level.L1:
        _require(not case.requires, f"{place}: L1 is for every target, it may not require {case.requires}")
    else:
        _require(bool(case.requires), f"{place}: above L1 a case says which capability it requires")


def check_scenario(scenario: Scenario, reasons: Iterable[str], place: str) -> None:
    """Refuse a scenario that contradicts itself; arguments and errors as for `check_case`."""
    place = f"{place}: scenario {scenario.id!r}"
    _check_common(scenario, reasons, place)
    check(scenario.payload, f"{place}: payload")
    unknown = sorted(set(scenario.routes) - _ROUTES)
    _require(not unknown, f"{place}: unknown route {unknown}; use {', '.join(sorted(_ROUTES))}")
    strange = sorted(set(scenario.sides) - set(SIDES))
    _require(not strange, f"{place}: unknown side {strange}; use {', '.join(SIDES)}")
    _require(bool(scenario.steps), f"{place}: no steps")
    _Names(place).follow(scenario.steps)


def _check_common(one: Case | Scenario, reasons: Iterable[str], place: str) -> None:
    _require(_ID.fullmatch(one.id) is not None, f"{place}: an id is lower-case words with dashes")
    _require(bool(one.title) and "\n" not in one.title, f"{place}: needs a title of one line")
    _require(bool(one.provenance), f"{place}: needs provenance")
    known = frozenset(reasons)
    _require(one.reason in known, f"{place}: reason {one.reason!r} is not in reasons.json")


class _Names:
    """Follows which names the steps of a scenario have made."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._published: set[str] = set()
        self._held: set[tuple[str, str]] = set()
        self._begun: dict[str, Step] = {}
        self._codes = known_codes()

    def follow(self, steps: Iterable[Step]) -> None:
        for number, step in enumerate(steps):
            self._step(step, f"{self._place}: step {number} ({step.do})", observed=True)
        _require(not self._begun, f"{self._place}: begun on {', '.join(self._begun)} and never finished")

    def _step(self, step: Step, place: str, *, observed: bool) -> None:
        _require(step.do in VERBS, f"{place}: unknown verb {step.do!r}; use one of {', '.join(VERBS)}")
        for name in _NEEDS[step.do]:
            text = "as" if name == "name" else name
            _require(getattr(step, name) not in ("", None, (), 0), f"{place}: needs {text}")
        _require(not step.side or step.side in SIDES, f"{place}: unknown side {step.side!r}; use {', '.join(SIDES)}")
        if step.payload is not None:
            check(step.payload, f"{place}: payload")
        for word in step.state:
            _require(word in frozenset(LeaseStatus), f"{place}: unknown state {word!r}")
        self._check_of(step, place)
        if step.do in ("begin", "finish"):
            self._check_background(step, place)
        if observed:
            about = self._begun.pop(step.side) if step.do == "finish" else step
            self._check_expected(step, about.do, place)
        if step.do in ("publish", "open") and "published" in (*step.expect, "published"):
            self._published.add(step.name)
        if step.do == "claim" or (step.do == "receive" and step.name):
            self._held.add((step.side, step.name))

    def _check_of(self, step: Step, place: str) -> None:
        if step.do in _OF_TICKETS:
            _require(step.of in self._published, f"{place}: {step.of!r} was not published before")
        if step.do in _OF_CLAIMS:
            found = (step.side, step.of) in self._held
            _require(found, f"{place}: {step.side} has no claim or receipt {step.of!r} at this point")

    def _check_background(self, step: Step, place: str) -> None:
        if step.do == "finish":
            _require(step.side in self._begun, f"{place}: nothing was begun on {step.side}")
            return
        assert step.step is not None
        _require(step.side not in self._begun, f"{place}: {step.side} is still busy with what was begun")
        _require(step.step.do not in ("begin", "finish"), f"{place}: {step.step.do} cannot be begun")
        inner = msgspec.structs.replace(step.step, side=step.step.side or step.side)
        _require(inner.side == step.side, f"{place}: the begun step is on another side")
        self._step(inner, f"{place}.step", observed=False)
        self._begun[step.side] = inner

    def _check_expected(self, step: Step, verb: str, place: str) -> None:
        _require(bool(step.expect), f"{place}: needs expect")
        for word in step.expect:
            base, _, rest = word.partition(":")
            _require(base in VERBS[verb], f"{place}: {verb} cannot be observed as {word!r}")
            if base == "refused":
                _require(rest in self._codes, f"{place}: unknown error code in {word!r}")
            elif base == "state":
                _require(rest in frozenset(LeaseStatus), f"{place}: unknown state in {word!r}")
            else:
                _require(not rest, f"{place}: {word!r} is no observation")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message, field="corpus")
