"""Single flight: of all processes that miss one key, one makes it and the others wait, for as long as that one lives.

Owns who leads. A lead that dies is taken over, and one that was only slow learns that it was; its late result has the
same bytes and does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from moonrelay.clock import Clock, Deadline
from moonrelay.relay.base import Relay

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """Somebody else led.

    Attributes:
        finished: Whether that lead has ended: look into the store, and enter again where nothing is there. False at the
            deadline.
    """

    finished: bool


class Lead:
    """The right to make the value of one digest. Look into the store once more first; end it with `finish`, always.

    A context manager: leaving it finishes.

    Attributes:
        epoch: 0 for the first lead of a flight; each that died adds one, so above 0 this is a take-over.

    Threads: any.
    """

    digest: str
    epoch: int

    def stands(self) -> bool:
        """Return whether nobody has taken over. Blocks: two small reads. A store that does not answer: False."""
        raise NotImplementedError

    def finish(self) -> None:
        """Let the others go, whether the value was stored or not. Idempotent. Blocks: some seconds at most.

        Never raises because of the store: what is left behind is taken over and removed by the next who asks.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


class SingleFlight:
    """Flights by digest in a relay.

    Args:
        relay: A started relay.
        prefix: As of `SharedStore`.
        clock: All waiting is reckoned on it.
        beat_s: How often a lead says that it lives.
        dead_after_s: After this long without a sign of life a lead is taken over.

    Threads: all methods from any thread; any number of processes at once. Threads of one process that want the same
    digest wait for each other without the store. One thread of its own, only while something of this process leads.
    """

    def __init__(
        self, relay: Relay, prefix: str, clock: Clock, *, beat_s: float = 0.5, dead_after_s: float = 3.0
    ) -> None:
        raise NotImplementedError

    def enter(self, digest: str, deadline: Deadline) -> Lead | Waited:
        """Lead, or wait until whoever leads has ended.

        Blocks: while another leads, until the deadline at most.

        Raises:
            TransferFailed, TransferTimeout, PeerLost, ClosedError: The store does not answer; this one leads nothing.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Finish all leads of this process, let its waiters go (with ``finished=False``), end the thread. Idempotent."""
        raise NotImplementedError
