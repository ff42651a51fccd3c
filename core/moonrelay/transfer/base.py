"""What a direct transfer engine is: registered memory of one process, read by another.

Owns the contract only. An engine moves bytes; it knows nothing of leases, tasks, trees or digests, and nothing calls it
before the peer's liveness was proved on the control channel.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import ClassVar

from moonrelay.config import TransferConfig
from moonrelay.errors import MoonrelayError
from moonrelay.handle import EngineAddress, Region


class OperationState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Operation(ABC):
    """One read in flight.

    Threads: polled by one thread at a time.
    """

    @abstractmethod
    def poll(self) -> OperationState:
        """Return the state; never blocks. ``DONE`` and ``FAILED`` are terminal: the engine is quiet from then on.

        May be called again after a terminal answer, with the same answer.
        """

    def abandon(self) -> None:  # noqa: B027 - most operations have begun when they are made
        """Say that nobody wants the bytes: what has not begun must not begin. It is still polled to its end."""

    @property
    def error(self) -> MoonrelayError | None:
        """The reason when ``poll`` answered ``FAILED``, else ``None``."""
        return None


class TransferEngine(ABC):
    """Registered memory and asynchronous reads.

    Threads: all methods may be called from any thread. ``close`` is idempotent, also half-built.
    """

    #: Name in the entry-point group ``moonrelay.transfers``.
    name: ClassVar[str]
    #: Whether memory that this engine did not allocate can be registered, so that peers may read it.
    registers_foreign_memory: bool = True
    #: Whether a read may land in memory that is neither allocated by this engine nor registered with it.
    lands_in_foreign_memory: bool = False
    #: The size of pieces that are worked on as they land, whatever ``config.piece_bytes`` says; ``None``: that counts.
    fixed_piece_bytes: int | None = None

    @abstractmethod
    def __init__(self, config: TransferConfig) -> None:
        """Keep the settings; cheap, starts nothing, imports no native library."""

    @abstractmethod
    def start(self) -> None:
        """Start the engine. Blocks: up to about a second. Idempotent.

        Raises:
            PluginError: The native library is missing; the message holds the true import error and the remedy.
            ConfigError: A setting is wrong for this engine.
        """

    @property
    @abstractmethod
    def address(self) -> EngineAddress:
        """Where peers reach this engine, with a nonce of this very instance. Only after ``start``."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Region:
        """Map and register ``nbytes`` of new memory for a pool, on ``config.device``; pages are touched lazily.

        Raises:
            CapacityError: The system gives no such memory.
        """

    @abstractmethod
    def release(self, region: Region) -> None:
        """Unregister and unmap what ``allocate`` gave. Idempotent; also after `close`.

        Threads: may be called by a finalizer, in any thread, during any other method of this engine.
        """

    def commit(  # noqa: B027 - most engines have nothing to do
        self, region: Region, offset: int, nbytes: int
    ) -> None:
        """Make sure that the pages of a part of an allocated region can be touched; called before its first use.

        Raises:
            CapacityError: The system has no such memory left.
        """

    @abstractmethod
    def register(self, address: int, nbytes: int) -> Region:
        """Make memory of the caller readable by peers and usable as a destination.

        Raises:
            RegistrationError: The engine cannot register this memory, or part of it is registered already.
        """

    @abstractmethod
    def unregister(self, region: Region) -> None:
        """Undo `register`. Idempotent. No fence: a read under way may still complete."""

    @abstractmethod
    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        """Begin to copy ``nbytes`` from a peer's registered ``region`` to local memory.

        Args:
            peer: The peer's ``address``.
            region: The peer's region, as its ``allocate`` or ``register`` returned it.
            remote_address: Address inside the peer's region, in the peer's address space.
            local_address: Destination in this process.
            nbytes: At least 1.

        Returns:
            The operation. A failure to start is an operation that is already ``FAILED``.

        Raises:
            ClosedError: After ``close``.
        """

    def forget(self, peer: EngineAddress) -> None:  # noqa: B027 - most engines have nothing to do
        """Drop what is cached about a peer that is gone. Harmless when it is not."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine; peers can read nothing of it afterwards. Idempotent. Blocks: seconds at most.

        Operations still running become ``FAILED`` (and quiet). Regions that were allocated and not released stay
        mapped, because tensors in them may outlive the engine, until `release`.
        """
