"""The LightX2V adapter as a target of the conformance suite.

Owns the side: runners over the mixin that takes the place of the host's, called as the host's server calls its own. An
encoder is asked for a request and sends; a transformer is asked for the same request, finds it by its name, has it, and
ends well or fails. What that contract has no word for is declared as unsupported.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import itertools
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import msgspec

from moonrelay.errors import Cancelled, ConfigError, DeadlineExceeded, LeaseLost, WireError
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import mode_of
from moonrelay_conformance.targets.adapter import AdapterSide, Outgoing, SideClaim, SideSettings, Ticket
from moonrelay_conformance.targets.connector import ConnectorTarget
from moonrelay_lightx2v import config, plugin
from moonrelay_lightx2v.roles import link_of, runner_class, serve

#: Where in the encoder's outputs a payload travels.
FIELD: Final = "text_encoder_output"
#: A shape as the host's encoder says it beside its outputs.
_LATENT_SHAPE: Final = [16, 21, 60, 104]
#: How long a sender waits for room: a role waits longer, which no expectation of the suite is for.
_SEND_TIMEOUT_S: Final = 1.0
#: Beyond a call's own time: what ends it is to be the adapter's error, not this bound.
_BEYOND_S: Final = 30.0


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiving role is told of a payload: where its sender's desk is, by its config, and what to make."""

    desk: str
    task_id: str


class Lightx2vSide(AdapterSide):
    """A role's runners, as a process of the host has one.

    A runner works on one request at a time and has its settings for life. So a payload that is to live for another time
    is sent by another one, as by another role instance, and so is what comes while a receiver is at a request. Those
    that hold nothing are released when the suite asks what is held.
    """

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._numbers = itertools.count()
        self._senders: dict[float, Any] = {}
        self._receivers: list[Receiver] = []

    @classmethod
    def prepare(cls) -> None:
        runner_class()  # imports the host

    def start(self) -> None:
        if self.settings.role == "producer":
            self._sender(self.settings.lease_ttl_s)

    def publish(self, outgoing: Outgoing) -> Ticket:
        _refuse_what_has_no_word(outgoing)
        # As the host's, a request's id is its own in a deployment; so is a retry's.
        task_id = f"{outgoing.request_id}-{os.getpid()}.{id(self)}.{next(self._numbers)}"
        life_s = self.settings.lease_ttl_s if outgoing.ttl_s is None else outgoing.ttl_s
        sender = self._sender(life_s)

        def encode(runner: Any) -> None:
            runner.send_encoder_outputs({FIELD: outgoing.tree, "image_encoder_output": None}, _LATENT_SHAPE)

        try:
            serve(sender, task_id, encode)
        finally:
            sender.work = None
        host, port = link_of(sender).address
        return {"desk": f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "task_id": task_id}

    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        claim = self.claim(ticket, timeout_s=timeout_s)
        try:
            tree = claim.read(timeout_s=timeout_s)
        except BaseException:
            claim.nack()
            raise
        claim.ack(timeout_s=timeout_s)
        return tree

    def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
        told = _told(ticket)
        return self._receiver(told.desk).take(told.task_id, timeout_s)

    def in_use(self) -> Mapping[str, int]:
        """Return what is held. Runners that were made for one payload go when they hold nothing more."""
        for life_s, sender in list(self._senders.items()):
            if life_s != self.settings.lease_ttl_s and not any(link_of(sender).in_use().values()):
                self._senders.pop(life_s).release_disagg()
        for receiver in list(self._receivers):
            if receiver.free and not any(receiver.in_use().values()):
                self._receivers.remove(receiver)
                receiver.close()
        held: dict[str, int] = {}
        for link in (
            *(link_of(sender) for sender in self._senders.values()),
            *(one.link for one in self._receivers),
        ):
            for name, count in link.in_use().items():
                held[name] = held.get(name, 0) + count
        return held

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        for sender in self._senders.values():
            sender.release_disagg()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _sender(self, life_s: float) -> Any:
        made = self._senders.get(life_s)
        if made is None:
            section = {**self.section(), "lease_ttl_s": life_s, "rendezvous_port": 0}
            made = self._senders[life_s] = runner_class()(config.ENCODER, section)
        return made

    def _receiver(self, desk: str) -> Receiver:
        for one in self._receivers:
            if one.free and one.desk == desk:
                return one
        section = {**self.section(), "bootstrap_addr": desk}
        made = Receiver(runner_class()(config.TRANSFORMER, section), desk)
        self._receivers.append(made)
        return made

    def section(self) -> dict[str, Any]:
        """Return what ``disagg_config`` would hold beside addresses.

        Raises:
            ConfigError: The route is none of the connector's.
        """
        settings = self.settings
        engine = str(settings.extra.get("engine", "shm"))
        options = dict(settings.extra.get("engine_options", {}))
        if settings.faults.engine:
            options |= {"inner": engine, "faults": list(settings.faults.engine)}
            engine = "faulty"
        section: dict[str, Any] = {
            "connector": config.CONNECTOR,
            "local_hostname": settings.host,
            "transfer_mode": mode_of(settings.route),
            "engine": engine,
            "engine_options": options,
            "staging_bytes": settings.pool_bytes,
            "progress_timeout_s": settings.peer_timeout_s,
            "retry_s": min(0.5, settings.peer_timeout_s / 4),
            "peer_timeout_s": settings.peer_timeout_s,
            "renew_s": settings.renew_s,
            "claim_ttl_s": settings.claim_ttl_s,
            "control_options": {"drop": list(settings.faults.control)} if settings.faults.control else {},
            "send_timeout_s": _SEND_TIMEOUT_S,
        }
        if settings.auth_key:
            section["auth_key"] = settings.auth_key
        return section


@dataclasses.dataclass
class _Taken:
    """One request of a receiving runner, under way in a thread.

    Attributes:
        came: What its runner received, or how the request ended.
        verdict: How it is to end: ``None`` is well.
        ended: Why its input was not consumed; ``None`` where it was.
    """

    came: queue.SimpleQueue[Any] = dataclasses.field(default_factory=queue.SimpleQueue)
    verdict: queue.SimpleQueue[BaseException | None] = dataclasses.field(default_factory=queue.SimpleQueue)
    ended: BaseException | None = None


class Receiver:
    """A receiving role: its runner, and the request that it is at.

    Its requests run in threads of their own, since the suite's calls end while a request goes on.
    """

    def __init__(self, runner: Any, desk: str) -> None:
        self.desk = desk
        self._runner = runner
        self._thread: threading.Thread | None = None
        self._taken: _Taken | None = None

    @property
    def link(self) -> Any:
        return link_of(self._runner)

    @property
    def free(self) -> bool:
        """Whether it may be asked for a request."""
        return self._thread is None

    def in_use(self) -> Mapping[str, int]:
        held: Mapping[str, int] = self.link.in_use()
        return held

    def take(self, task_id: str, timeout_s: float) -> SideClaim:
        """Ask the runner for a request. Blocks: until it has its input."""
        taken = self._taken = _Taken()
        # A setting of a role; the suite's limits are each call's own.
        self.link.config = dataclasses.replace(self.link.config, transfer_timeout_s=timeout_s)

        def transform(runner: Any) -> None:
            taken.came.put(runner.receive_encoder_outputs())
            verdict = taken.verdict.get()
            if verdict is not None:
                raise verdict

        def run() -> None:
            try:
                serve(self._runner, task_id, transform)
                taken.ended = self.link.not_consumed
            except BaseException as exc:  # noqa: BLE001 - it is the caller's, who waits for it
                taken.ended = exc
                taken.came.put(exc)

        self._thread = threading.Thread(target=run, name="moonrelay-conformance-role", daemon=True)
        self._thread.start()
        try:
            came = taken.came.get(timeout=timeout_s + _BEYOND_S)
        except queue.Empty:
            message = f"the runner neither received nor failed within {timeout_s + _BEYOND_S:g} s"
            raise DeadlineExceeded(message) from None
        if isinstance(came, BaseException):
            self._join()
            raise came
        return RunningClaim(self, came)

    def end(self, error: BaseException | None) -> None:
        """Have the request end. Blocks: until it has.

        Raises:
            MoonrelayError: Its input was not consumed.
        """
        taken = self._taken
        if taken is None or self._thread is None:
            return
        taken.verdict.put(error)
        self._join()
        if error is None and taken.ended is not None:
            raise taken.ended

    def close(self) -> None:
        self.end(Cancelled("the role ends"))
        self._runner.release_disagg()

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        self._taken = None
        if thread is not None:
            thread.join(_BEYOND_S)


class RunningClaim(SideClaim):
    """What a runner received and works on: found, claimed and read at once, consumed when its request has ended."""

    def __init__(self, receiver: Receiver, came: Any) -> None:
        self._receiver = receiver
        self._came: Any | None = came
        self._acked = False

    def read(self, *, timeout_s: float) -> Any:
        if self._came is None:
            message = "its request has ended"
            raise LeaseLost(message)
        found = dict(self._came)
        if found.pop("latent_shape", None) != _LATENT_SHAPE or found.pop("image_encoder_output", 1) is not None:
            message = "what is beside the payload is not what was sent"
            raise WireError(message, field="latent_shape")
        if found.keys() != {FIELD}:
            message = f"fields {sorted(found)} arrived, and {FIELD} was sent"
            raise WireError(message, field=FIELD)
        return found[FIELD]

    def ack(self, *, timeout_s: float) -> None:
        if not self._acked:
            self._came = None
            self._receiver.end(None)
            self._acked = True

    def nack(self) -> None:
        self._came = None
        self._receiver.end(Cancelled("given back"))


class Lightx2vTarget(ConnectorTarget):
    """LightX2V's roles, by the mixin of their runners.

    It runs without the host too: the class that the mixin is a subclass of lends it no method where a config names our
    connector (a test of the adapter holds that), so the code that is run is the same.

    Args:
        engine: ``shm`` by default, which every machine has; ``mooncake`` is what a deployment over several hosts takes.
    """

    name = "lightx2v"
    side = "moonrelay_lightx2v.conformance:Lightx2vSide"
    forked = True
    needs_host = False
    #: What the host's contract has no word for: one method hands over one whole payload to one reader, and nothing is
    #: said of it afterwards. A payload in a store is found at its sender's desk, which ends with the sender: so it does
    #: not outlive it, as the suite's routes through a store promise. And a run of the host, which takes a minute and a
    #: test's cures for CPUs: the adapter's tests compare its videos.
    WITHOUT: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.METADATA,
            Capability.CHUNKED,
            Capability.SHARED_READERS,
            Capability.PINNED,
            Capability.ABORT,
            Capability.RELEASE,
            Capability.STATUS,
            Capability.ZERO_COPY,
            Capability.STORE,
            Capability.SPILL,
            Capability.INJECT_STORE,
            Capability.PIPELINE,
        }
    )

    def __init__(self, *, engine: str = "shm") -> None:
        super().__init__(engine=engine, relay="none")

    def capabilities(self) -> Mapping[Capability, Support]:
        return {**super().capabilities(), **dict.fromkeys(self.WITHOUT, Support.UNSUPPORTED)}

    def host(self) -> str:
        version = plugin.host_version()
        if plugin.host_folder() is None:
            return f"lightx2v not installed: its mixin without the host's own class ({self.through()})"
        return f"lightx2v {version} ({self.through()}; a run of the host is among the adapter's tests, nox -s lightx2v)"

    def environment(self) -> Mapping[str, str]:
        # The host refuses to be imported where its accelerator is missing; payloads are in host memory here.
        return {"HF_HUB_OFFLINE": "1", "SKIP_PLATFORM_CHECK": "1"}


class MooncakeLightx2vTarget(Lightx2vTarget):
    """The same by Mooncake's engine: ``moonrelay_lightx2v.conformance:MooncakeLightx2vTarget``."""

    name = "lightx2v-mooncake"

    def __init__(self) -> None:
        super().__init__(engine="mooncake")


def _told(ticket: Ticket) -> _Told:
    """Return what a ticket says.

    Raises:
        WireError: It is malformed.
    """
    try:
        told = msgspec.convert(ticket, _Told, strict=True)
        host, _, port = told.desk.rpartition(":")
        ipaddress.ip_address(host.strip("[]"))
        if not told.task_id or not 0 < int(port) < 1 << 16:
            raise ValueError(told.desk)
    except (msgspec.ValidationError, ValueError) as exc:
        message = f"the ticket names no request at a desk: {exc}"
        raise WireError(message, field="desk") from exc
    return told


def _refuse_what_has_no_word(outgoing: Outgoing) -> None:
    """Refuse what a role cannot ask of the mixin.

    Raises:
        ConfigError: Names it.
    """
    asked = {
        "metadata": outgoing.metadata is not None,
        "num_chunks": outgoing.num_chunks != 1,
        "lease": outgoing.lease != "delete_on_consume",
    }
    for name, given in asked.items():
        if given:
            message = f"{name}={getattr(outgoing, name)!r}: the host's mixin hands one whole payload to one reader"
            raise ConfigError(message, field=name)


__all__ = ["Lightx2vSide", "Lightx2vTarget", "MooncakeLightx2vTarget", "Receiver"]
