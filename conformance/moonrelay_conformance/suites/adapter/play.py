"""The scenario player: gives the orders of a lease scenario and writes down what is seen at each step.

Owns what a verb does and what its observation is called. What should be seen stands in the corpus only; nothing here
knows an adapter or a route.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus.trees import chunk_digests
from moonrelay_conformance.sides.probe import Held, Slack, beyond
from moonrelay_conformance.sides.process import SideEnded, SideFailed, SideHung
from moonrelay_conformance.suites.adapter.stage import (
    CALL_S,
    GRACE_S,
    PATIENT,
    SETTLE_S,
    Actor,
    Cast,
    Sent,
    Stage,
    until,
)

if TYPE_CHECKING:
    from moonrelay_conformance.corpus.model import Scenario, Step
    from moonrelay_conformance.suites.base import Note

#: Connections and caches may come to their size meanwhile; leaks are counted over many cycles elsewhere.
SLACK: Final = Slack(fds=12, threads=4, maps=12)
#: Verbs after which something is waited for that patience would only put off: a claim's lapse, a peer's loss.
_BREAKS: Final = frozenset({"kill", "stop", "restart"})
#: Fields of a ``publish`` or ``open`` step that go to `Outgoing` as they are.
_OUTGOING: Final = ("lease", "readers", "ttl_s", "attempt", "registered")


@dataclass(frozen=True, slots=True)
class Order:
    """What a verb asks of a side.

    Attributes:
        op: Operation of the side's runner.
        arguments: Its arguments.
        answer_s: The operation's own deadline.
        seen: Makes the observation of the answer.
    """

    op: str
    arguments: Mapping[str, Any]
    answer_s: float
    seen: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Baseline:
    """What there was before the first step."""

    held: Mapping[str, tuple[int, Held]]
    keys: frozenset[str]
    names: frozenset[str]


class Player:
    """Plays one scenario on one route.

    Args:
        stage: The sides.
        scenario: The scenario.
        route: The route.
        note: Told of each observation.

    Threads: one.
    """

    def __init__(self, stage: Stage, scenario: Scenario, route: str, note: Note) -> None:
        self._scenario = scenario
        self._steps = scenario.steps
        self._stage = stage
        self._route = route
        self._note = note
        lives = _BREAKS.isdisjoint(step.do for step in scenario.steps)
        self._cast: Cast = stage.cast(
            route,
            {**(PATIENT if lives else {}), **scenario.side.given()},
            {name: changes.given() for name, changes in scenario.sides.items()},
        )
        self._sent: dict[str, Sent] = {}
        self._claims: dict[tuple[str, str], tuple[str, Sent]] = {}
        self._kept: list[tuple[Actor, str]] = []
        self._begun: dict[str, tuple[Order, float]] = {}
        self._met: dict[str, Actor] = {}
        self._why = ""
        self._tag = stage.name("s")

    def play(self) -> None:
        """Play it to the end.

        Raises:
            AssertionError: A step's observation is not among those expected; the message tells which step, what was
                done, expected and observed.
        """
        before = self._baseline()
        try:
            for number, step in enumerate(self._steps, start=1):
                self._why = ""
                observed = self._settled(before, step) if step.do == "settled" else self._timed(step)
                did = _words(step)
                self._note.step(f"{number}. {did} -> {observed}")
                expected = step.expect
                if observed not in expected:
                    why = f" ({self._why})" if self._why else ""
                    message = (
                        f"{self._scenario.id}, step {number}: {did}: expected {' or '.join(expected)}, "
                        f"observed {observed}{why}"
                    )
                    raise AssertionError(message)
        finally:
            self._let_go()

    # The baseline.

    def _baseline(self) -> Baseline:
        """Start all sides that occur, let those without faults meet, and count."""
        names = dict.fromkeys(step.side for step in self._steps if step.side)
        for name in names:
            self._met[name] = self._cast(name)
            self._met[name].process  # noqa: B018 - starts it
        sound = [actor for actor in self._met.values() if actor.settings.faults == type(actor.settings.faults)()]
        for producer in (actor for actor in sound if actor.settings.role == "producer"):
            for consumer in (actor for actor in sound if actor.settings.role == "consumer"):
                self._stage.acquaint(producer, consumer)
        held = {}
        for name, actor in self._met.items():
            held[name] = (actor.process.pid, actor.process.probe())
        ground = self._stage.ground
        return Baseline(held, frozenset(ground.store_keys()), frozenset(ground.memory_names()))

    def _settled(self, before: Baseline, step: Step) -> str:
        within_s = step.within_s or SETTLE_S
        self._drop_kept()
        left = self._stage.settle(*self._met.values(), within_s=within_s)
        if left:
            return f"left: {left}"
        found: list[str] = []

        def clean() -> bool:
            # Age counts from the first sweep that saw a thing, where the store does not tell it.
            self._stage.ground.sweep()
            found[:] = self._outside(before)
            return not found

        return "settled" if until(clean, within_s, step_s=0.1) else f"left: {'; '.join(found)}"

    def _outside(self, before: Baseline) -> list[str]:
        """Return what sides, store and memory have above the baseline."""
        ground = self._stage.ground
        keys = set(ground.store_keys()) - before.keys
        found = [f"{len(keys)} keys in the store, among them {min(keys)!r}"] if keys else []
        # A side that was started anew has memory of its own under a new name.
        segments, allowed = set(ground.memory_names()), len(before.names)
        if len(segments) > allowed:
            new = sorted(segments - before.names)
            found.append(f"{len(segments) - allowed} memory names, among them {new[0]!r}")
        for name, actor in self._met.items():
            pid, held = before.held[name]
            if actor.alive and actor.process.pid == pid:
                found += [f"{name} holds {more}" for more in beyond(held, actor.process.probe(), SLACK)]
        return found

    def _drop_kept(self) -> None:
        for actor, name in self._kept:
            if actor.alive:
                # A side that was started anew does not know the name.
                _attempt(lambda actor=actor, name=name: actor.do("drop", name=name))  # type: ignore[misc]
        self._kept.clear()

    def _let_go(self) -> None:
        """Leave no claim, no payload and no stopped side to the next test, whatever happened."""
        for actor in self._met.values():
            if actor.stands:
                actor.go_on()
        for name in list(self._begun):
            # What it answers is of no interest any more, and a side that does not answer is not used again.
            _attempt(lambda name=name: self._met[name].answer(answer_s=5.0))  # type: ignore[misc]
        self._begun.clear()
        self._drop_kept()
        if not self._finished_clean():
            # A claim or payload may be left behind: those sides are ended, whoever comes next has others.
            self._stage.retire(*self._met.values())

    def _finished_clean(self) -> bool:
        steps = self._note.steps or []
        return len(steps) >= len(self._steps) and steps[-1].endswith("-> settled")

    # Steps.

    def _timed(self, step: Step) -> str:
        began = time.monotonic()
        observed = self._one(step)
        within_s = step.within_s
        # A wait for a state keeps its own time; the last look may end a little later.
        bounded = within_s is not None and step.do != "until_status" and observed not in ("hang", "late")
        if bounded and within_s is not None and time.monotonic() - began > within_s:
            self._why = f"{observed} after {time.monotonic() - began:.1f} s, more than {within_s} s"
            return "late"
        return observed

    def _one(self, step: Step) -> str:
        verb = step.do
        own: Callable[[Step], str] | None = getattr(self, f"_do_{verb}", None)
        if own is not None:
            return own(step)
        order = self._order(step)
        return self._observe(
            lambda: order.seen(self._side(step).do(order.op, answer_s=order.answer_s, **order.arguments))
        )

    def _observe(self, act: Callable[[], str]) -> str:
        try:
            return act()
        except SideHung as exc:
            self._why = str(exc)
            return "hang"
        except SideEnded as exc:
            self._why = str(exc)
            return "ended"
        except SideFailed as exc:
            self._why = str(exc)
            return "untyped"
        except MoonrelayError as exc:
            self._why = str(exc)
            return f"refused:{exc.code}"

    def _side(self, step: Step) -> Actor:
        return self._met[step.side]

    def _do_kill(self, step: Step) -> str:
        self._side(step).kill()
        self._begun.pop(step.side, None)
        return "done"

    def _do_stop(self, step: Step) -> str:
        self._side(step).stop()
        return "done"

    def _do_go_on(self, step: Step) -> str:
        self._side(step).go_on()
        return "done"

    def _do_restart(self, step: Step) -> str:
        self._side(step).restart()
        return "done"

    @staticmethod
    def _do_pass_time(step: Step) -> str:
        threading.Event().wait(step.seconds)
        return "done"

    def _do_reuse(self, step: Step) -> str:
        """Overwrite what is free of a producer's memory, by payloads that are published and dropped."""
        actor, size = self._side(step), step.bytes
        fillers: list[Sent] = []

        def fill() -> str:
            try:
                for number in range(4):
                    tree = {"tensor": {"shape": [max(1, size // 4)], "dtype": "uint8", "seed": 1000 + number}}
                    fillers.append(actor.publish(tree))
            except MoonrelayError as exc:
                if exc.code not in ("capacity_error", "queue_full", "no_credit"):
                    raise
            for filler in fillers:
                give_up(actor, filler, self._stage)
            return "done"

        return self._observe(fill)

    def _do_until_status(self, step: Step) -> str:
        seen = ""

        def there() -> bool:
            nonlocal seen
            seen = self._one(msgspec.structs.replace(step, do="status"))
            return seen.removeprefix("state:") in step.state or not seen.startswith("state:")

        if until(there, step.within_s or CALL_S, step_s=0.05):
            return seen
        self._why = f"still {seen}"
        return "late"

    def _do_begin(self, step: Step) -> str:
        order = self._order(_inner(step))
        self._side(step).send(order.op, **order.arguments)
        self._begun[step.side] = (order, time.monotonic())
        return "done"

    def _do_finish(self, step: Step) -> str:
        begun = self._begun.pop(step.side, None)
        if begun is None:
            return "ended"  # the side was killed meanwhile
        order, began = begun
        left = order.answer_s if step.within_s is None else step.within_s
        observed = self._observe(lambda: order.seen(self._side(step).answer(answer_s=left)))
        took = time.monotonic() - began
        self._why = self._why or f"{took:.1f} s after it began"
        return observed

    # Orders.

    def _order(self, step: Step) -> Order:
        make: Callable[[Step], Order] | None = getattr(self, f"_order_{step.do}", None)
        if make is None:
            message = f"{self._scenario.id}: no verb {step.do!r}"
            raise AssertionError(message)
        return make(step)

    def _publishing(self, op: str, step: Step) -> Order:
        label, name = step.name, self._stage.name("p")
        # A request id may be used again by the scenario, on purpose; by another scenario it must not be.
        outgoing: dict[str, Any] = {"request_id": f"{step.request}-{self._tag}" if step.request else name}
        outgoing |= {key: value for key in _OUTGOING if (value := getattr(step, key)) is not None}
        if step.chunks > 1 or op == "open":
            outgoing |= {"num_chunks": step.chunks, "chunk_dim": step.chunk_dim or 0}
        tree = self._scenario.payload if step.payload is None else step.payload
        digests = chunk_digests(tree, outgoing["chunk_dim"], step.chunks) if "num_chunks" in outgoing else ()

        def seen(answer: Any) -> str:
            self._sent[label] = Sent(name, answer["ticket"], answer["digest"], digests)
            return "published" if op == "publish" else "opened"

        return Order(op, {"name": name, "tree": tree, "outgoing": outgoing}, max(step.timeout_s, 60.0), seen)

    def _order_publish(self, step: Step) -> Order:
        return self._publishing("publish", step)

    def _order_open(self, step: Step) -> Order:
        return self._publishing("open", step)

    def _order_ready(self, step: Step) -> Order:
        arguments = {"name": self._sent[step.of].name, "chunk": step.chunk}
        return Order("ready", arguments, CALL_S, _done)

    def _order_abort(self, step: Step) -> Order:
        arguments = {"ticket": self._sent[step.of].ticket, "reason": step.text or "given up"}
        return Order("abort_ticket", arguments, CALL_S, _done)

    def _order_receive(self, step: Step) -> Order:
        sent = self._sent[step.of]
        arguments = {"ticket": sent.ticket, "timeout_s": step.timeout_s}
        if step.name:
            arguments["name"] = name = self._stage.name("r")
            self._claims[step.side, step.name] = (name, sent)
            self._kept.append((self._side(step), name))
        return Order("receive", arguments, step.timeout_s, self._delivered(sent.digest))

    def _order_claim(self, step: Step) -> Order:
        name, sent = self._stage.name("c"), self._sent[step.of]
        self._claims[step.side, step.name] = (name, sent)
        timeout_s = step.timeout_s
        arguments = {"name": name, "ticket": sent.ticket, "timeout_s": timeout_s}
        return Order("claim", arguments, timeout_s, lambda _: "granted")

    def _order_read(self, step: Step) -> Order:
        (name, sent), timeout_s = self._claims[step.side, step.of], step.timeout_s
        self._kept.append((self._side(step), name))
        return Order("read", {"name": name, "timeout_s": timeout_s}, timeout_s, self._delivered(sent.digest))

    def _order_next_chunk(self, step: Step) -> Order:
        (name, sent), timeout_s = self._claims[step.side, step.of], step.timeout_s

        def seen(answer: Any) -> str:
            if answer.get("end"):
                return "end"
            right = sent.chunk_digests[step.chunk]
            if (answer["index"], answer["digest"]) == (step.chunk, right):
                return "delivered"
            self._why = f"chunk {step.chunk} is {right}, was given number {answer['index']} with {answer['digest']}"
            return "wrong_bytes"

        return Order("next_chunk", {"name": name, "timeout_s": timeout_s}, timeout_s, seen)

    def _order_ack(self, step: Step) -> Order:
        timeout_s = step.timeout_s
        return Order("ack", {"name": self._claims[step.side, step.of][0], "timeout_s": timeout_s}, timeout_s, _done)

    def _order_nack(self, step: Step) -> Order:
        return Order("nack", {"name": self._claims[step.side, step.of][0]}, CALL_S, _done)

    def _order_release(self, step: Step) -> Order:
        return Order("release", {"ticket": self._sent[step.of].ticket}, CALL_S, _done)

    def _order_status(self, step: Step) -> Order:
        return Order("status", {"ticket": self._sent[step.of].ticket}, CALL_S, lambda word: f"state:{word}")

    def _order_edit(self, step: Step) -> Order:
        return Order("edit", {"name": self._claims[step.side, step.of][0]}, CALL_S, _done)

    def _order_recheck(self, step: Step) -> Order:
        name, sent = self._claims[step.side, step.of]
        return Order(
            "recheck",
            {"name": name},
            CALL_S,
            lambda answer: "unchanged" if answer["digest"] == sent.digest else "changed",
        )

    def _delivered(self, digest: str) -> Callable[[Any], str]:
        def seen(answer: Any) -> str:
            if answer["digest"] == digest:
                return "delivered"
            self._why = f"published {digest}, delivered {answer['digest']}"
            return "wrong_bytes"

        return seen


def give_up(actor: Actor, sent: Sent, stage: Stage) -> None:
    """Drop a payload of a producer in the way that its adapter has."""
    if stage.supports(Capability.ABORT):
        actor.abort(sent)
    elif stage.supports(Capability.RELEASE):
        actor.release(sent)
    else:
        stage.drain(actor, sent)


def _attempt(act: Callable[[], object]) -> None:
    try:
        act()
    except (MoonrelayError, SideFailed, SideHung, SideEnded):
        return


def _done(_: Any) -> str:
    return "done"


def _inner(step: Step) -> Step:
    """Return the step that a ``begin`` begins."""
    assert step.step is not None, "the corpus's check lets no begin without a step pass"
    return msgspec.structs.replace(step.step, side=step.step.side or step.side)


def _words(step: Step) -> str:
    """Say what a step does, the same for every adapter and route."""
    if step.do == "begin":
        return f"begin: {_words(_inner(step))}"
    return " ".join(part for part in (step.side, step.do, step.of, step.name) if part)


__all__ = ["GRACE_S", "Baseline", "Order", "Player", "give_up"]
