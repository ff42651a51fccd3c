"""Where a receiver finds by name what a sender has: the sender's `Desk`, and the `Caller` that asks desks.

Owns the two public ends. Handles travel here, never tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonrelay.clock import Clock, Deadline

__all__ = ["Caller", "Desk", "Names"]

#: What one request goes by, most exact name first.
Names = tuple[str, ...]


class Desk:
    """What one sender role has to hand over, by name.

    Args:
        host: Address to bind, numeric or a name; IPv6 literals with or without brackets.
        port: Port to bind; 0 is the system's choice.
        phase: What is handed over here; a caller for another phase is refused.
        auth_key: The deployment's secret, or ``None``.
        clock: Time.
        keep_failures_s: How long a refusal is remembered for who comes later, in seconds.

    Raises:
        ConfigError: The key is empty.

    Threads: any; one daemon thread of its own between `start` and `close`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        phase: str,
        auth_key: str | None = None,
        clock: Clock | None = None,
        keep_failures_s: float = 600.0,
    ) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Bind and serve. Idempotent.

        Raises:
            ConfigError: The address is taken or unusable.
            ClosedError: The desk was closed.
        """
        raise NotImplementedError

    @property
    def address(self) -> tuple[str, int]:
        """Where it is bound: the host as given, and the port. Only after `start`."""
        raise NotImplementedError

    def working(self, names: Names) -> None:
        """Say that a request is being worked on here, until `offer`, `refuse` or `done`.

        Raises:
            ConfigError: The names are unusable.
            ClosedError: The desk is closed.
        """
        raise NotImplementedError

    def offer(self, names: Names, payload_id: str, handle: bytes) -> str | None:
        """Offer a payload under these names; who waits for one of them is told at once.

        Returns:
            The id of an older offer under the same first name that this one replaces, or ``None``.

        Raises:
            ConfigError: The names are unusable, or the handle is too large.
            ClosedError: The desk is closed.
        """
        raise NotImplementedError

    def refuse(self, names: Names, code: str, message: str) -> None:
        """Say that this stage failed a request; who waits for it, or comes, is told.

        A live offer under the same first name stays, and is what they get.

        Raises:
            ConfigError: The names are unusable.
            ClosedError: The desk is closed.
        """
        raise NotImplementedError

    def done(self, names: Names) -> None:
        """Say that a request is no longer worked on, and nothing came of it. Nothing after `close`."""
        raise NotImplementedError

    def withdraw(self, payload_id: str) -> None:
        """Forget an offer: its payload has ended. Unknown ids are nothing; so is everything after `close`."""
        raise NotImplementedError

    def close(self) -> None:
        """Tell who waits that this desk closes, then stop. Idempotent.

        Blocks: until the thread ended, a fraction of a second.
        """
        raise NotImplementedError


class Caller:
    """What one receiver role asks of desks.

    Args:
        addresses: ``(host, port)`` of the desks; all are asked.
        phase: What is wanted; must be the desks'.
        auth_key: The deployment's secret, or ``None``.
        peer_timeout_s: After how many seconds of silence a desk counts as lost.
        retry_s: How often the question is repeated.
        clock: Time.

    Raises:
        ConfigError: No address, or an unusable one; the key is empty.

    Threads: any; none of its own. Finds in several threads run one after the other.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        phase: str,
        auth_key: str | None = None,
        peer_timeout_s: float = 30.0,
        retry_s: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        raise NotImplementedError

    def find(self, names: Names, deadline: Deadline) -> bytes:
        """Return the handle that a desk offers under one of these names.

        Raises:
            PeerLost: No desk answers for ``peer_timeout_s``, or the one that worked on it is gone, closes, or was
                restarted.
            Aborted: The stage that was to hand it over failed; the message carries its text.
            DeadlineExceeded: Nothing was offered by the deadline.
            ConfigError: The names are unusable, the desk has another ``auth_key``, or serves another phase.
            VersionError: The desk speaks another version.
            ClosedError: This caller is closed, or was while it waited.

        Blocks: until then.
        """
        raise NotImplementedError

    def forget(self, names: Names) -> None:
        """Tell the desks that the last find of these names is settled. Best effort; never blocks or raises."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the sockets; a find under way ends with `ClosedError`. Idempotent.

        Blocks: until that find let go, at once.
        """
        raise NotImplementedError
