"""SKELETON (signatures hold; bodies follow within minutes)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moonrelay.clock import Clock, Deadline
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, TransferEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    region: Region
    remote_address: int
    local_address: int
    nbytes: int


class Quarantine:
    def __init__(self, clock: Clock) -> None: ...
    def hold(self, operations: Sequence[Operation], on_quiet: Callable[[], None]) -> None: ...
    def poll(self) -> int:
        """Poll what is held, call ``on_quiet`` of what became quiet, return how many pulls are still held."""
        raise NotImplementedError

    busy: int

    def close(self, timeout_s: float) -> bool:
        raise NotImplementedError


class Puller:
    def __init__(
        self, engine: TransferEngine, *, window: int, piece_bytes: int, clock: Clock, quarantine: Quarantine
    ) -> None: ...
    def pull(
        self,
        peer: EngineAddress,
        moves: Sequence[Move],
        deadline: Deadline,
        *,
        on_landed: Callable[[int, int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
        on_quiet: Callable[[], None] | None = None,
    ) -> None:
        """Raises TransferFailed, TransferTimeout, Cancelled, ClosedError, or what on_landed raised.

        ``on_quiet`` is called exactly once, on every way out, as soon as no operation of this pull can write any more.
        """
