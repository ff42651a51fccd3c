"""The peer channel: one listening socket and one I/O thread per connector, and blocking requests to other connectors.

Owns the sockets, the I/O thread and the life of both. Payload bytes never travel through this channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from moonrelay.clock import Clock, Deadline
from moonrelay.config import ControlConfig
from moonrelay.control.messages import Failure, Message, Push, Reply, Request
from moonrelay.handle import ControlAddress

#: Test seam: ``drop("send" | "receive", message)`` true loses the message.
Drop = Callable[[Literal["send", "receive"], Message], bool]


@dataclass(frozen=True, slots=True)
class PeerInfo:
    """Who sent a request.

    Attributes:
        nonce: The peer's channel instance.
        route: Opaque; give it to `PeerChannel.push` to tell that peer something later.
    """

    nonce: str
    route: bytes


class Responder(Protocol):
    """The way back to the peer that asked."""

    def reply(self, message: Reply | Failure) -> None:
        """Answer the request. Threads: any. `Pending` may be sent any number of times; anything else once."""
        ...


class Handler(Protocol):
    """What the owner of a channel does with requests."""

    def handle(self, peer: PeerInfo, request: Request, respond: Responder) -> None:
        """Take a request; reply now or later, from any thread. Called on the I/O thread; must not block."""
        ...


class PeerChannel:
    """A connector's end of the control plane.

    Args:
        config: Addresses and times.
        auth_key: Secret of the deployment, or ``None`` (or empty) for none.
        clock: Time.
        handler: Takes the requests of peers; ``None`` refuses all but pings.
        on_push: Takes pushes of the peers that were asked something; called on the I/O thread, must not block.
        name: Part of the threads' name.
        advertise_host: Numeric address that peers dial; ``config.bind_host`` by default.
        drop: Test seam that loses messages.
    """

    def __init__(
        self,
        config: ControlConfig,
        *,
        auth_key: str | bytes | None,
        clock: Clock,
        handler: Handler | None = None,
        on_push: Callable[[ControlAddress, Push], None] | None = None,
        name: str = "peer",
        advertise_host: str | None = None,
        drop: Drop | None = None,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Bind, then start the I/O thread. Idempotent."""
        raise NotImplementedError

    @property
    def address(self) -> ControlAddress:
        """Where peers reach this channel. Only after `start`."""
        raise NotImplementedError

    def request(
        self, peer: ControlAddress, message: Request, deadline: Deadline, *, keep_waiting: bool = True
    ) -> Reply:
        """Ask a peer and wait for its answer.

        Args:
            peer: Whom to ask, from a handle.
            message: The request.
            deadline: Until when to wait.
            keep_waiting: On `Pending` wait on; false returns the `Pending` (and gives the request up).

        Raises:
            MoonrelayError: The peer's failure, rebuilt from its reply.
            PeerLost: Refused, disconnected, silent for ``peer_timeout_s``, or another process answers there.
            VersionError: The peer speaks another version or requires an unknown feature.
            ConfigError: The two sides do not share an ``auth_key``.
            DeadlineExceeded: The peer lives (or was not silent for long enough to be lost) but did not answer in time.
            ClosedError: This channel is closed.

        Blocks: until the reply or the deadline. Threads: any but the I/O thread.
        """
        raise NotImplementedError

    def push(self, route: bytes, message: Push) -> bool:
        """Tell a peer something, best effort; return whether it was sent. Threads: any. Never blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the thread and close all sockets; waiting requests raise `ClosedError`. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> PeerChannel:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
