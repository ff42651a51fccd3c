"""The protocol of a host adapter under test.

Three parts, of which a third party writes the first two: an `AdapterTarget`, made in the process of the suite; an
`AdapterSide`, made in a process of its own for each producer and consumer, which does everything through the host's own
native API; and an `AdapterGround`, which observes memory and store *around* the code under test.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Never

import msgspec

from moonrelay.errors import MoonrelayError
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.targets.base import Target

#: What a consumer needs to find a payload, as the host hands it from one process to the other: plain JSON values.
Ticket = dict[str, Any]


class NotSupported(MoonrelayError):
    """The adapter does not have this operation; its target must not declare the capability."""


class Faults(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What goes wrong in one side, by the order of the calls; empty is nothing.

    Attributes:
        engine: Words of `moonrelay.transfer.faulty.Fault` for the first reads, e.g. ``("wrong", "none", "delay:0.5")``.
        relay: Words of `moonrelay.relay.faulty.Fault` for the first puts and gets.
        control: ``"send:ack:2"`` loses the first two acks that this side sends; also ``receive:...``; see
            `moonrelay.config.ControlConfig.options`.
    """

    engine: tuple[str, ...] = ()
    relay: tuple[str, ...] = ()
    control: tuple[str, ...] = ()


class SideSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a side is to run. Times in seconds, sizes in bytes.

    Attributes:
        role: ``producer`` or ``consumer``.
        route: One of the target's routes.
        host: Numeric address on which to listen and to be reached.
        pool_bytes: Bound of the memory for payloads on this side (`Capability.CAPACITY`).
        lease_ttl_s: Life of a payload that names no other.
        claim_ttl_s: A claim that is not renewed lapses after this long.
        renew_s: Pause between two renewals.
        peer_timeout_s: A silent peer is lost after this long.
        spill_after_s: With `Capability.SPILL`: how long an unclaimed payload is offered directly.
        auth_key: Shared secret; empty is none.
        faults: What goes wrong.
        extra: What the target's `AdapterGround.settings` added: addresses of services, folders.
    """

    role: str
    route: str
    host: str = "127.0.0.1"
    pool_bytes: int = 64 << 20
    lease_ttl_s: float = 60.0
    claim_ttl_s: float = 1.5
    renew_s: float = 0.3
    peer_timeout_s: float = 2.0
    spill_after_s: float = 0.3
    auth_key: str = ""
    faults: Faults = Faults()
    extra: dict[str, Any] = {}


class Outgoing(msgspec.Struct, frozen=True, kw_only=True):
    """A payload that a producer is to publish.

    Attributes:
        request_id: The request.
        tree: The tree of tensors and plain values; a bare tensor where ``num_chunks`` is above 1.
        chunk_dim: Dimension to cut along; ``None`` where it is not cut.
        num_chunks: Number of chunks.
        lease: ``delete_on_consume``, ``shared``, ``ttl`` or ``pinned``.
        readers: With ``shared``: how many.
        ttl_s: Life of the payload; ``None`` takes the side's ``lease_ttl_s``.
        attempt: Number of the attempt.
        metadata: Plain values that travel with the ticket (`Capability.METADATA`); ``None`` is none.
        registered: Publish from memory that the host registered, where it can (`Capability.ZERO_COPY`).
    """

    request_id: str
    tree: Any
    chunk_dim: int | None = None
    num_chunks: int = 1
    lease: str = "delete_on_consume"
    readers: int = 1
    ttl_s: float | None = None
    attempt: int = 0
    metadata: dict[str, Any] | None = None
    registered: bool = False


class Encoded(msgspec.Struct, frozen=True, kw_only=True):
    """What a host made of two prompts (`Capability.EMBEDDING_CACHE`).

    Attributes:
        positive: The tree of tensors and plain values that the host hands on for the prompt.
        negative: The same for the negative prompt; ``None`` where the host encodes none.
        computed: How often the host's encoder computed for this call, counted at the encoder itself, not in the cache.
    """

    positive: Any
    negative: Any
    computed: int


class Denoised(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's denoising loop gave (`Capability.CHECKPOINTS`).

    Attributes:
        result: The tree that the loop hands on; ``None`` of one that stopped on the way.
        first_step: Steps that it did not have to do; 0 when it started afresh.
        computed: How many steps the host's model computed.
    """

    result: Any
    first_step: int
    computed: int


class SidePublication(ABC):
    """A payload whose chunks become final one by one (`Capability.CHUNKED`)."""

    @property
    @abstractmethod
    def ticket(self) -> Ticket:
        """What a consumer needs; valid before any chunk is ready."""

    @abstractmethod
    def ready(self, chunk: int) -> None:
        """Say that a chunk is final."""

    def abort(self, reason: str) -> None:
        """Give the payload up (`Capability.ABORT`)."""
        not_supported(Capability.ABORT)


class SideClaim(ABC):
    """The right to read one payload (`Capability.CLAIM`)."""

    @abstractmethod
    def read(self, *, timeout_s: float) -> Any:
        """Return the tree; does not acknowledge. Raises a typed error; never returns other bytes."""

    def chunks(self, *, timeout_s: float) -> Iterator[Any]:
        """Yield the chunks in order (`Capability.CHUNKED`)."""
        not_supported(Capability.CHUNKED)

    @abstractmethod
    def ack(self, *, timeout_s: float) -> None:
        """Acknowledge: the payload was consumed."""

    @abstractmethod
    def nack(self) -> None:
        """Give the payload back unread."""

    def metadata(self) -> dict[str, Any] | None:
        """Return the plain values that travelled with the ticket."""
        return None


class AdapterSide(ABC):
    """One producer or consumer in a process of its own, through the host's native API.

    Made with its settings in a fresh or re-used process; a process may see several sides, one after the other. Every
    failure must leave as a `MoonrelayError`: translate the host's own exceptions here, and nothing else.

    Threads: called by one thread.
    """

    def __init__(self, settings: SideSettings) -> None:
        self.settings = settings

    @classmethod  # noqa: B027 - most import fast
    def prepare(cls) -> None:
        """Import the host, in the process that others are forked from (`AdapterTarget.forked`). Start no thread."""

    def start(self) -> None:  # noqa: B027 - many start on first use
        """Start what the host starts. Blocks: until it can publish or receive."""

    @abstractmethod
    def publish(self, outgoing: Outgoing) -> Ticket:
        """Publish a payload whose bytes are final; return what a consumer needs.

        Raises:
            MoonrelayError: It cannot be carried (``context['field']`` names the place) or there is no room; nothing is
                held on to.
        """

    @abstractmethod
    def receive(self, ticket: Ticket, *, timeout_s: float) -> Any:
        """Take a payload over whole, in the host's way; return the tree.

        Raises:
            MoonrelayError: It is not here by ``timeout_s``, or never will be; or the ticket is damaged.
        """

    def open(self, outgoing: Outgoing) -> SidePublication:
        """Publish a payload whose chunks follow (`Capability.CHUNKED`)."""
        not_supported(Capability.CHUNKED)

    def claim(self, ticket: Ticket, *, timeout_s: float) -> SideClaim:
        """Claim a payload (`Capability.CLAIM`). Blocks: until granted, or ``timeout_s``."""
        not_supported(Capability.CLAIM)

    def abort(self, ticket: Ticket, reason: str) -> None:
        """Give up a payload published by this side (`Capability.ABORT`)."""
        not_supported(Capability.ABORT)

    def release(self, ticket: Ticket, *, timeout_s: float) -> None:
        """Drop a payload that nobody needs (`Capability.RELEASE`)."""
        not_supported(Capability.RELEASE)

    def status(self, ticket: Ticket, *, timeout_s: float) -> str:
        """Return how a payload stands, a word of `moonrelay.lease.LeaseStatus` (`Capability.STATUS`)."""
        not_supported(Capability.STATUS)

    def metadata(self, ticket: Ticket) -> dict[str, Any] | None:
        """Return the plain values that travelled with a ticket (`Capability.METADATA`)."""
        return None

    def encode(self, prompt: str, negative: str, *, cached: bool) -> Encoded:
        """Encode two prompts as the host's encode stage does for a request (`Capability.EMBEDDING_CACHE`).

        All sides of one ground share the cache, by the ground's store. The prompts are new in every check, so entries
        of earlier ones are in nobody's way.

        Args:
            prompt: The prompt.
            negative: The negative prompt.
            cached: Whether by the host's cache of embeddings, switched on as its users do; else as without one.
        """
        not_supported(Capability.EMBEDDING_CACHE)

    def denoise(self, request_id: str, *, seed: int, steps: int, stop_after: int | None) -> Denoised:
        """Run the host's denoising loop, with a checkpoint after every step (`Capability.CHECKPOINTS`).

        It goes on from the newest checkpoint of the request where there is one that fits, and removes the request's
        checkpoints at its end. It has randomness of its own in each step where the host's scheduler has.

        Args:
            request_id: The request.
            seed: Decides the noise.
            steps: Steps in all.
            stop_after: Leave the loop after this many steps, as soon as their checkpoint is whole, as a worker would
                that is about to die: nothing is tidied up. ``None`` runs to the end.
        """
        not_supported(Capability.CHECKPOINTS)

    def in_use(self) -> Mapping[str, int]:
        """Return what this side still holds for payloads, by name: slots, bytes, entries. All zero means nothing.

        Only what the host's own API can tell; the suite looks at descriptors, threads and mappings by itself.
        """
        return {}

    def counters(self) -> Mapping[str, int]:
        """Return counts that only grow and that the host can tell.

        ``staged`` counts the payloads that `publish` copied; who declares `Capability.ZERO_COPY` must give it.
        """
        return {}

    @abstractmethod
    def close(self) -> None:
        """End the side. Idempotent. Blocks: seconds at most."""


class AdapterGround(ABC):
    """The services that sides need, and eyes on them that do not belong to the code under test.

    A context manager; leaving it ends what it started, by process id.
    """

    @abstractmethod
    def settings(self, settings: SideSettings) -> SideSettings:
        """Return ``settings`` with what the target adds in ``extra``."""

    def store_keys(self) -> tuple[str, ...]:
        """Return what lies in the store, read around the adapter; empty where there is no store."""
        return ()

    def memory_names(self) -> tuple[str, ...]:
        """Return the shared memory segments and files that sides made, read around the adapter."""
        return ()

    def sweep(self) -> None:  # noqa: B027 - most need none
        """Do now what the deployment does at intervals or at a start to clear what killed processes left."""

    @abstractmethod
    def close(self) -> None:
        """End the services. Idempotent."""

    def __enter__(self) -> AdapterGround:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PipelineRun(msgspec.Struct, frozen=True, kw_only=True):
    """A real divided run beside the undivided one (`Capability.PIPELINE`).

    Attributes:
        undivided: Digest of the result of the undivided pipeline.
        divided: Digest of the result of the pipeline in ``processes`` processes.
        processes: In how many processes the divided one ran.
    """

    undivided: str
    divided: str
    processes: int


class AdapterTarget(Target):
    """A host adapter under test.

    Attributes:
        side: ``module:Class`` of its `AdapterSide`, importable in a side's process.
        forked: Whether sides' processes are forked from one in which `AdapterSide.prepare` was called, instead of
            started: for a host that imports for many seconds.
        needs_host: Whether ``moonrelay conformance NAME`` refuses to run where the adapter says that it is not
            available. False where the sides are as they are with the host, and its class has no part in what they do.
    """

    kind: ClassVar[str] = "adapter"
    forked: ClassVar[bool] = False
    needs_host: ClassVar[bool] = True
    side: str

    @abstractmethod
    def ground(self, folder: Path) -> AdapterGround:
        """Start the services that sides need, in ``folder``. Blocks: until they answer."""

    def routes(self) -> tuple[str, ...]:
        return tuple(one.value for one in (Capability.P2P, Capability.STORE) if self.supports(one))

    def named_routes(self) -> tuple[str, ...]:
        return (Capability.SPILL.value,) if self.supports(Capability.SPILL) else ()

    def python(self) -> str:
        """Return the interpreter for the sides' processes."""
        return sys.executable

    def environment(self) -> Mapping[str, str]:
        """Return variables to add to the environment of the sides' processes."""
        return {}

    def pipeline(self, folder: Path, *, timeout_s: float) -> PipelineRun:
        """Run a real pipeline undivided and divided (`Capability.PIPELINE`)."""
        not_supported(Capability.PIPELINE)


#: What `moonrelay.adapters` entry points may offer: ``conformance_target() -> AdapterTarget``.
OFFER = "conformance_target"


def not_supported(capability: Capability) -> Never:
    """Raise `NotSupported` for an operation that an adapter leaves out."""
    message = f"this adapter has no operation for {capability.value}; its target must not declare the capability"
    raise NotSupported(message, capability=capability.value)


__all__ = [
    "OFFER",
    "AdapterGround",
    "AdapterSide",
    "AdapterTarget",
    "Denoised",
    "Encoded",
    "Faults",
    "NotSupported",
    "Outgoing",
    "PipelineRun",
    "SideClaim",
    "SidePublication",
    "SideSettings",
    "Ticket",
    "not_supported",
]
