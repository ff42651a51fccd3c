"""What a relay is: an object store between stages whose objects outlive their writer.

Owns the contract only. Keys are used once, objects are immutable; what the objects mean is `relay.records`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from moonrelay.clock import Deadline
from moonrelay.config import StoreConfig
from moonrelay.handle import Extent

#: Called exactly once when nothing can touch the ``parts`` of a put or get any more; must not raise or block.
OnQuiet = Callable[[], None]

#: Largest value of `Relay.put_if_absent`, in bytes.
MAX_VALUE_BYTES = 4096


class Relay(ABC):
    """Immutable objects by key.

    A key is a non-empty string of at most 200 bytes of ``A-Z a-z 0-9 . _ - /``.

    Quiet memory: a put or get that gives up at its deadline may leave a native call behind that still reads or writes
    ``parts``. Whoever passes ``on_quiet`` learns when that has ended: it is called exactly once, before the method
    returns or raises in every ordinary case, and later, from a thread of the relay, after a `TransferTimeout`.
    ``parts`` must stay mapped until then, and a get's must not be reused.

    Threads: all methods may be called from any thread. ``close`` is idempotent, also half-built.
    """

    #: URL scheme, and name in the entry-point group ``moonrelay.relays``.
    scheme: ClassVar[str]

    @abstractmethod
    def __init__(self, config: StoreConfig) -> None:
        """Keep the settings; cheap, starts nothing."""

    @abstractmethod
    def start(self) -> None:
        """Connect. Blocks: seconds at most. Idempotent.

        Raises:
            PluginError: The native library is missing.
            ConfigError: The URL is wrong.
            PeerLost: The store does not answer.
        """

    @property
    @abstractmethod
    def url(self) -> str:
        """A URL by which another process reaches the same store."""

    @abstractmethod
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        """Store the concatenation of ``parts`` (host memory of this process) under a new key, hard-pinned, verified.

        Args:
            key: Never used before.
            parts: At least one byte in all.
            deadline: When to give up.
            on_quiet: See the class.

        Blocks: until stored, or the deadline. On return the object is readable, complete, and will stay.

        Raises:
            CapacityError: No room; nothing was stored.
            IntegrityError: The key exists already.
            TransferFailed, TransferTimeout, PeerLost: Not stored; the key must not be used again.
            ClosedError: Before ``start`` or after ``close``.
        """

    @abstractmethod
    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        """Read an object into ``parts``, whose total size must be the object's size exactly.

        Blocks: until read, or the deadline.

        Returns:
            True when every byte was read; False when there is no (complete) object under the key.

        Raises:
            IntegrityError: The object has another size.
            TransferFailed, TransferTimeout, PeerLost: Not read; ``parts`` may hold anything.
            ClosedError: Before ``start`` or after ``close``.
        """

    @abstractmethod
    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        """Store a small value (1 byte to 4 KiB) unless the key exists; return the value that stands. Atomic.

        A caller that must know whether it won puts something unique into ``value``. Repeating the call with the same
        value after a failure is safe.

        Raises:
            CapacityError, TransferFailed, TransferTimeout, PeerLost: Unknown whether stored.
        """

    @abstractmethod
    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        """Return a small value stored by `put_if_absent`; ``None`` when absent.

        Raises:
            TransferFailed, TransferTimeout, PeerLost: Not read.
        """

    @abstractmethod
    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        """Remove objects by force, whatever read lease the store holds on them. Missing keys are fine."""

    def age_s(self, key: str) -> float | None:
        """Return a lower bound of the seconds since ``key`` was stored; ``None`` where the store cannot tell.

        Never compares clocks of two hosts.
        """
        return None

    def register(self, address: int, nbytes: int) -> None:  # noqa: B027 - a default
        """Announce memory that parts will lie in, for stores that need it (RDMA). Idempotent for the same range.

        Raises:
            RegistrationError: The store cannot register this memory.
        """

    def unregister(self, address: int) -> None:  # noqa: B027 - a default
        """Undo `register`; unknown addresses are fine. No call may be using the memory."""

    @abstractmethod
    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        """Return the keys that begin with ``prefix``, complete objects and, where the store shows them, others.

        Raises:
            TransferFailed, TransferTimeout, PeerLost: The listing does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Disconnect; what was stored stays. Idempotent. Blocks: seconds at most."""
