"""What a relay is: an object store between stages whose objects outlive their writer.

Owns the contract only. Keys are used once, objects are immutable; what the objects mean is `relay.records`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from moonrelay.clock import Deadline
from moonrelay.config import StoreConfig
from moonrelay.handle import Extent


class Relay(ABC):
    """Immutable objects by key.

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
    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline) -> None:
        """Store the concatenation of ``parts`` (host memory of this process) under a new key, hard-pinned, verified.

        Blocks: until stored, or the deadline. On return the object is readable, complete, and will stay.

        Raises:
            CapacityError: No room; nothing was stored.
            IntegrityError: The key exists already with another size.
            TransferFailed, TransferTimeout, PeerLost: Not stored; the key must not be used again.
        """

    @abstractmethod
    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline) -> bool:
        """Read an object into ``parts``, whose total size must be the object's size exactly.

        Blocks: until read, or the deadline.

        Returns:
            True when every byte was read; False when there is no (complete) object under the key.

        Raises:
            IntegrityError: The object has another size.
            TransferFailed, TransferTimeout, PeerLost: Not read.
        """

    @abstractmethod
    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        """Store a small value (at most 4 KiB) unless the key exists; return the value that stands. Atomic.

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

    @abstractmethod
    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        """Return the keys that begin with ``prefix``, complete objects and unfinished ones."""

    @abstractmethod
    def close(self) -> None:
        """Disconnect; what was stored stays. Idempotent. Blocks: seconds at most."""
