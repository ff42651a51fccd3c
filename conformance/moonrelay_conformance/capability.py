"""What a target can do: `Capability` and how far it is supported.

Owns the vocabulary only. A target declares; the suite holds it to the declaration in both directions: what is declared
must work, and what is not must be refused with a typed error, never carried differently.
"""

from __future__ import annotations

import enum


class Support(enum.StrEnum):
    """How far a capability is there."""

    #: It works on every route of the target.
    FULL = "full"
    #: The host cannot do it; asking for it is refused with a typed error.
    UNSUPPORTED = "unsupported"
    #: The host could, the adapter does not yet; treated as unsupported, shown as such.
    NOT_IMPLEMENTED = "not_implemented"

    @property
    def there(self) -> bool:
        return self is Support.FULL


class Capability(enum.StrEnum):
    """What a target may be able to do.

    Those that say what can be *carried* are tried also where they are not declared: the outcome must then be a refusal.
    Those that are *operations* are not tried where they are not declared.
    """

    # Carried. A payload that has it is delivered identical, or refused.
    ZERO_DIM = "zero_dim"  # tensors of shape ()
    EMPTY = "empty"  # tensors with no element, payloads without any tensor, empty containers
    FP8 = "fp8"  # the float8 dtypes
    UNUSUAL_DTYPES = "unusual_dtypes"  # bool, complex, unsigned 16/32/64 bit, and the like
    NESTED = "nested"  # lists, dicts in dicts, None between tensors
    TUPLES = "tuples"  # tuples and sets that stay what they are
    KEYS = "keys"  # dict keys that are no text
    SIDE_FIELDS = "side_fields"  # plain values beside the tensors, bit for bit
    VIEWS = "views"  # transposed, strided, expanded, lazily conjugated tensors, by their logical values
    SHARED_OBJECTS = "shared_objects"  # one tensor object in several places comes back as one
    METADATA = "metadata"  # plain values that travel with the ticket

    # Routes.
    P2P = "p2p"  # read directly from the producer
    STORE = "store"  # relayed through a store, so that the payload outlives its producer
    SPILL = "spill"  # offered directly, and relayed when nobody claims it soon

    # Operations.
    CLAIM = "claim"  # claim, read and acknowledge are three steps
    CHUNKED = "chunked"  # chunks become readable one by one
    SHARED_READERS = "shared_readers"  # n readers of one payload
    TTL = "ttl"  # payloads that expire
    PINNED = "pinned"  # payloads that stay until released
    ABORT = "abort"  # a producer gives a payload up, readers are told
    RELEASE = "release"  # anybody drops a payload
    STATUS = "status"  # how a payload stands can be asked
    ZERO_COPY = "zero_copy"  # registered memory is published without a copy
    CAPACITY = "capacity"  # the pool has a bound that the suite may set
    RESUME = "resume"  # after a reader's death another one takes over
    IPV6 = "ipv6"  # peers on ::1
    INJECT_ENGINE = "inject_engine"  # the suite may put faults into the transfer engine
    INJECT_CONTROL = "inject_control"  # the suite may lose control messages
    INJECT_STORE = "inject_store"  # the suite may put faults into the relay
    PIPELINE = "pipeline"  # the host runs a real divided pipeline that equals the undivided one
    EMBEDDING_CACHE = "embedding_cache"  # what the host encodes is kept for all its processes, see `AdapterSide.encode`
    CHECKPOINTS = "checkpoints"  # a denoising loop goes on elsewhere from its checkpoint, see `AdapterSide.denoise`

    # Parts: engines, relays and queues.
    PROCESSES = "processes"  # reaches another process
    FOREIGN_MEMORY = "foreign_memory"  # registers memory that it did not allocate
    LIVES = "lives"  # an engine tells two lives of one address apart by itself, by the nonce
    DURABLE = "durable"  # what was stored survives the process that stored it
    LISTING = "listing"  # keys can be listed

    @property
    def carried(self) -> bool:
        """Whether it says what can be carried, rather than what can be done."""
        return self in _CARRIED


_CARRIED = frozenset(
    {
        Capability.ZERO_DIM,
        Capability.EMPTY,
        Capability.FP8,
        Capability.UNUSUAL_DTYPES,
        Capability.NESTED,
        Capability.TUPLES,
        Capability.KEYS,
        Capability.SIDE_FIELDS,
        Capability.VIEWS,
        Capability.SHARED_OBJECTS,
        Capability.METADATA,
    }
)
