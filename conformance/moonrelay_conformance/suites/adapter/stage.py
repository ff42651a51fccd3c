"""The sides of a test by name: started when first used, kept warm for the next test, replaced after a kill or a hang.

Owns the life of sides during a suite's class. What a test does with them, and what is right, is the tests' business;
tensors never pass through here, only descriptions, tickets and digests.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.sides.process import SideEnded, SideFailed, SideHung
from moonrelay_conformance.targets.adapter import AdapterGround, AdapterTarget, Faults, SideSettings, Ticket

if TYPE_CHECKING:
    from moonrelay_conformance.sides.process import SidePool, SideProcess

#: An answer may come this much after the call's own deadline; then it is a hang.
GRACE_S: Final = 10.0
#: Default deadline of one call.
CALL_S: Final = 20.0
#: Within this long, what a payload held must be given back.
SETTLE_S: Final = 12.0
#: Sides that are kept at the same time; beyond it the one longest unused is started anew with other settings.
WARM: Final = 8
#: For sides that live while a test lasts: no claim lapses and no peer counts as lost because the machine is busy.
PATIENT: Final = {"claim_ttl_s": 8.0, "peer_timeout_s": 6.0}
#: The payload that tests send when its content does not matter.
SMALL: Final = {"tensor": {"shape": [16, 16], "dtype": "float32", "seed": 1}}


def bytes_of(size: int, seed: int = 1) -> dict[str, Any]:
    """Describe a tensor of ``size`` bytes."""
    return {"tensor": {"shape": [size], "dtype": "uint8", "seed": seed}}


@dataclass(frozen=True, slots=True)
class Sent:
    """A payload that was published.

    Attributes:
        name: What its side calls it.
        ticket: What a consumer needs.
        digest: Of the tree, as the producer had it.
        chunk_digests: Of its chunks, where they are known.
    """

    name: str
    ticket: Ticket
    digest: str
    chunk_digests: tuple[str, ...] = ()


class Actor:
    """One side of a test, by its name; survives `restart`.

    Threads: one.
    """

    def __init__(self, name: str, settings: SideSettings, stage: Stage) -> None:
        self.name = name
        self.settings = settings
        self.used = 0
        #: Another one after each start.
        self.life = ""
        self._stage = stage
        self._process: SideProcess | None = None
        self._stands = False

    @property
    def process(self) -> SideProcess:
        """The process, started when first asked for."""
        if self._process is None:
            self._process = self._stage.begin(self.settings)
            self._stands = False
            self.life = self._stage.name("life")
        return self._process

    @property
    def alive(self) -> bool:
        """Whether it was started and neither killed nor stopped."""
        return self._process is not None and not self._stands

    @property
    def stands(self) -> bool:
        """Whether it was stopped by SIGSTOP."""
        return self._stands

    def do(self, op: str, *, answer_s: float | None = None, **arguments: Any) -> Any:
        """Order and wait. A side that does not answer hangs: it is killed.

        Args:
            op: Operation of the side's runner.
            answer_s: The operation's deadline, ``timeout_s`` by default; the answer may come `GRACE_S` later.
            **arguments: The operation's arguments.

        Raises:
            MoonrelayError: The side's typed error.
            SideFailed: An untyped one.
            SideHung, SideEnded: No answer; the side is started anew when next used.
        """
        own_s = answer_s or arguments.get("timeout_s") or CALL_S
        try:
            return self.process.do(op, within_s=own_s + GRACE_S, **arguments)
        except (SideHung, SideEnded):
            self.kill()
            raise

    def send(self, op: str, **arguments: Any) -> None:
        """Order without waiting; see `answer`."""
        self.process.send(op, **arguments)

    def answer(self, *, answer_s: float = CALL_S) -> Any:
        """Wait for the answer to `send`; raises as `do`."""
        try:
            return self.process.answer(answer_s + GRACE_S)
        except (SideHung, SideEnded):
            self.kill()
            raise

    # Payloads.

    def publish(self, tree: Mapping[str, Any] | Any = SMALL, **outgoing: Any) -> Sent:
        """Publish a tree; ``outgoing`` are fields of `Outgoing`."""
        return self._published("publish", tree, outgoing)

    def open(self, tree: Mapping[str, Any] | Any, *, num_chunks: int = 1, chunk_dim: int = 0, **outgoing: Any) -> Sent:
        """Publish a tensor whose chunks follow."""
        return self._published("open", tree, {"num_chunks": num_chunks, "chunk_dim": chunk_dim, **outgoing})

    def _published(self, op: str, tree: Any, outgoing: Mapping[str, Any]) -> Sent:
        name = self._stage.name("p")
        given = {"request_id": name, **outgoing}
        answer = self.do(op, name=name, tree=tree, outgoing=given, answer_s=60.0)
        return Sent(name, answer["ticket"], answer["digest"], tuple(answer.get("chunk_digests") or ()))

    def ready(self, sent: Sent, *chunks: int) -> None:
        """Say that chunks are final."""
        for chunk in chunks:
            self.do("ready", name=sent.name, chunk=chunk)

    def receive(self, sent: Sent, *, timeout_s: float = CALL_S, name: str | None = None) -> dict[str, Any]:
        """Take a payload over; return what the side says of it, among it its ``digest``."""
        kept: dict[str, Any] = {} if name is None else {"name": name}
        answer: dict[str, Any] = self.do("receive", ticket=sent.ticket, timeout_s=timeout_s, **kept)
        return answer

    def takes(self, sent: Sent, *, timeout_s: float = CALL_S) -> None:
        """Receive a payload, and fail unless its bytes are the producer's."""
        got = self.receive(sent, timeout_s=timeout_s)["digest"]
        assert got == sent.digest, f"{self.name} was given other bytes than those published: {got} != {sent.digest}"

    def claim(self, sent: Sent, *, timeout_s: float = CALL_S) -> str:
        """Claim a payload; return the claim's name."""
        name = self._stage.name("c")
        self.do("claim", name=name, ticket=sent.ticket, timeout_s=timeout_s)
        return name

    def read(self, claim: str, *, timeout_s: float = CALL_S) -> str:
        """Read a claimed payload whole; return its digest."""
        return str(self.do("read", name=claim, timeout_s=timeout_s)["digest"])

    def next_chunk(self, claim: str, *, timeout_s: float = CALL_S) -> tuple[int, str] | None:
        """Read the next chunk; return its number and digest, ``None`` at the end."""
        answer = self.do("next_chunk", name=claim, timeout_s=timeout_s)
        return None if answer.get("end") else (answer["index"], answer["digest"])

    def ack(self, claim: str, *, timeout_s: float = CALL_S) -> None:
        """Acknowledge."""
        self.do("ack", name=claim, timeout_s=timeout_s)

    def nack(self, claim: str) -> None:
        """Give a claim back."""
        self.do("nack", name=claim)

    def abort(self, sent: Sent, reason: str = "the test gave it up") -> None:
        """Give up a payload of this side."""
        self.do("abort_ticket", ticket=sent.ticket, reason=reason)

    def release(self, sent: Sent) -> None:
        """Drop a payload that nobody needs."""
        self.do("release", ticket=sent.ticket)

    def status(self, sent: Sent) -> str:
        """Return how a payload stands."""
        return str(self.do("status", ticket=sent.ticket))

    def recheck(self, name: str) -> str:
        """Return the digest, made anew, of what was read under ``name``."""
        return str(self.do("recheck", name=name)["digest"])

    def drop(self, name: str) -> None:
        """Let go of what was read under ``name``."""
        self.do("drop", name=name)

    def in_use(self) -> dict[str, int]:
        """Return what the side still holds, without what is zero."""
        return {what: count for what, count in self.do("in_use").items() if count}

    # Its process.

    def kill(self) -> None:
        """Kill -9. Its next use starts another one with the same settings. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        self._stands = False

    def stop(self) -> None:
        """SIGSTOP."""
        self.process.stop()
        self._stands = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.go_on()
        self._stands = False

    def restart(self) -> None:
        """Kill it if it lives, and start it with the same settings."""
        self.kill()
        self.process  # noqa: B018 - starts it

    def leave(self) -> SideProcess | None:
        """Close the side; return its process where another side may have it."""
        process, self._process = self._process, None
        self._stands = False
        if process is None or process.reset():
            return process
        process.kill()
        return None


@dataclass(frozen=True, slots=True)
class Cast:
    """The sides of one test on one route."""

    stage: Stage
    route: str
    common: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __call__(self, name: str) -> Actor:
        """Return the side called ``name`` ("producer", "consumer2", ...)."""
        settings = {**self.common, **self.own.get(name, {})}
        return self.stage.actor(name, self.route, settings)

    @property
    def producer(self) -> Actor:
        return self("producer")

    @property
    def consumer(self) -> Actor:
        return self("consumer")


class Stage:
    """All sides that a suite's class has used, by name and settings.

    Args:
        target: The adapter under test.
        pool: Where processes come from.
        ground: The services that the sides need.

    Threads: one.
    """

    def __init__(self, target: AdapterTarget, pool: SidePool, ground: AdapterGround) -> None:
        self.target = target
        self.ground = ground
        self._pool = pool
        self._actors: dict[bytes, Actor] = {}
        self._turn = itertools.count(1)
        self._names = itertools.count(1)
        self._met: set[tuple[str, str]] = set()
        self._spare: list[SideProcess] = []

    def name(self, prefix: str) -> str:
        """Return a name that was not used before."""
        return f"{prefix}{next(self._names)}"

    def cast(
        self, route: str, common: Mapping[str, Any] | None = None, own: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Cast:
        """Return the sides of a test.

        Args:
            route: The route.
            common: Fields of `SideSettings` for all of them.
            own: More of them, by the side's name.
        """
        return Cast(self, route, dict(common or {}), dict(own or {}))

    def actor(self, name: str, route: str, settings: Mapping[str, Any]) -> Actor:
        """Return the side with this name and these settings; the same as before where it still lives."""
        given = dict(settings)
        if isinstance(given.get("faults"), Mapping):
            given["faults"] = msgspec.convert(given["faults"], Faults)
        wanted = SideSettings(role="producer" if name.startswith("producer") else "consumer", route=route, **given)
        key = name.encode() + msgspec.json.encode(wanted)
        actor = self._actors.get(key)
        if actor is None:
            self._make_room()
            actor = self._actors[key] = Actor(name, self.ground.settings(wanted), self)
        actor.used = next(self._turn)
        return actor

    def _make_room(self) -> None:
        while len(self._actors) >= WARM:
            key = min(self._actors, key=lambda one: self._actors[one].used)
            process = self._actors.pop(key).leave()
            if process is not None:
                self._spare.append(process)

    def begin(self, settings: SideSettings) -> SideProcess:
        """Start a side. Blocks: seconds where no process is free."""
        if not self._spare:
            return self._pool.start(self.target.side, settings)
        process = self._spare.pop()
        process.do("start", side=self.target.side, settings=msgspec.to_builtins(settings))
        return process

    def acquaint(self, producer: Actor, consumer: Actor) -> None:
        """Let a consumer take one small payload from a producer, unless it did, so that what both keep is there."""
        producer.process, consumer.process  # noqa: B018 - starts them
        pair = (producer.life, consumer.life)
        if pair in self._met:
            return
        consumer.takes(producer.publish())
        if self.supports(Capability.ZERO_COPY):
            # Registered memory is made when it is first asked for, and stays.
            consumer.takes(producer.publish(registered=True))
        self._met.add(pair)

    def settle(self, *actors: Actor, within_s: float | None = None) -> str:
        """Wait until sides hold nothing (`SETTLE_S` at most, unless said); return what is left, empty when nothing is.

        Sides that do not live or stand still are not asked.
        """
        left: dict[str, dict[str, int]] = {}

        def clear() -> bool:
            left.clear()
            for actor in actors:
                if actor.alive:
                    held = actor.in_use()
                    if held:
                        # Only now: it takes its time in a process with torch.
                        actor.do("collect")
                        held = actor.in_use()
                    if held:
                        left[actor.name] = held
            return not left

        until(clear, SETTLE_S if within_s is None else within_s, step_s=0.05)
        return "; ".join(
            f"{name} holds {', '.join(f'{count} {what}' for what, count in held.items())}"
            for name, held in left.items()
        )

    def drain(self, producer: Actor, sent: Sent) -> None:
        """Take a payload over for no other reason than that its adapter has no other way to drop it."""
        settings = msgspec.structs.replace(producer.settings, role="consumer", faults=Faults())
        fields = {name: getattr(settings, name) for name in settings.__struct_fields__}
        for own in ("role", "route", "extra"):
            fields.pop(own)
        self.actor("consumer", producer.settings.route, fields).receive(sent)

    def retire(self, *actors: Actor) -> None:
        """End sides that no other test is to use, e.g. because their faults have happened."""
        for key in [key for key, actor in self._actors.items() if actor in actors]:
            process = self._actors.pop(key).leave()
            if process is not None:
                self._spare.append(process)

    def supports(self, *capabilities: Capability) -> bool:
        """Return whether the target declares all of ``capabilities``."""
        return self.target.supports(*capabilities)

    def close(self) -> None:
        """End all sides; their processes may serve another suite. Idempotent."""
        for actor in self._actors.values():
            if actor.stands:
                actor.go_on()
        self._actors.clear()
        self._spare.clear()
        self._pool.take_back()


def until(predicate: Callable[[], bool], within_s: float, *, step_s: float = 0.02) -> bool:
    """Ask an outside observation until it is true or ``within_s`` have passed; return whether it came true."""
    limit = time.monotonic() + within_s
    while not predicate():
        if time.monotonic() >= limit:
            return False
        threading.Event().wait(step_s)
    return True


def refusal(act: Callable[[], object]) -> MoonrelayError | None:
    """Run ``act``; return the side's typed error, ``None`` where there was none.

    Raises:
        SideFailed, SideHung, SideEnded: There was another failure.
    """
    try:
        act()
    except (SideFailed, SideHung, SideEnded):
        raise
    except MoonrelayError as exc:
        return exc
    return None


def outcome(act: Callable[[], object]) -> str:
    """Run ``act`` and return how it ended: ``ok``, ``refused:<code>``, ``untyped: ...``, ``hang`` or ``ended``."""
    try:
        error = refusal(act)
    except SideHung:
        return "hang"
    except SideEnded:
        return "ended"
    except SideFailed as exc:
        return f"untyped: {exc.message}"
    return "ok" if error is None else f"refused:{error.code}"


def answer_of(actor: Actor, *, answer_s: float = CALL_S) -> tuple[str, str]:
    """Wait for the answer to what was sent; return its `outcome` and, where it was ``ok``, the digest delivered."""
    got: list[str] = []
    observed = outcome(lambda: got.append(actor.answer(answer_s=answer_s)["digest"]))
    return observed, "".join(got)


def timed(act: Callable[[], object]) -> tuple[str, float]:
    """Return `outcome`, and how long it took."""
    began = time.monotonic()
    ended = outcome(act)
    return ended, time.monotonic() - began
