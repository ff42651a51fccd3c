"""StageHandle: the reference that travels in a queue message, and the addresses inside it.

Owns the versioned wire form. Payload bytes never pass through a handle; a handle is small, immutable and used once.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from moonrelay.errors import ConfigError, VersionError, WireError
from moonrelay.integrity import ALGORITHMS
from moonrelay.layout import MAX_BYTES, ChunkPlan, Extent, TensorSpec, check_plan, check_spec, chunk_nbytes
from moonrelay.payload import MAX_NAME, check_plain, spec_tree
from moonrelay.tree import MAX_LEAVES, check_tree

__all__ = [
    "ControlAddress",
    "DirectAddress",
    "EngineAddress",
    "Extent",
    "LeaseTerms",
    "Region",
    "RelayAddress",
    "StageHandle",
    "TensorLocation",
]


MAGIC: Final = b"MRH"
#: Version of the wire form. A new optional field raises the minor one; what older readers cannot ignore is a feature in
#: ``requires``; the major one is for a form that they cannot even parse.
MAJOR: Final = 1
MINOR: Final = 0
#: Features that this version knows, of those a handle may require.
FEATURES: Final[frozenset[str]] = frozenset()
#: Largest wire form. `payload.flatten` refuses what could come near.
MAX_HANDLE_BYTES: Final = 4 << 20
MAX_INT: Final = 1 << 31
_HEADER: Final = len(MAGIC) + 2


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that an engine serves to its peers.

    Attributes:
        key: The engine's name for the memory (a shared-memory name, or empty where the address is enough).
        base: First address, in the owner's address space.
        nbytes: Length in bytes.
    """

    key: str
    base: int
    nbytes: int


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transfer engine is reached; ``nonce`` tells two lives of one address apart."""

    engine: str
    address: str
    nonce: str


class ControlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a connector's control channel is reached; ``nonce`` tells two lives of one address apart."""

    address: str
    nonce: str


class DirectAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The producer of a payload: whom to ask for a claim, and which engine serves the bytes."""

    control: ControlAddress
    engine: EngineAddress | None = None


class RelayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a payload is, or will be, in an object store.

    Attributes:
        url: The store.
        prefix: Prefix of all the payload's keys; unique to this attempt.
    """

    url: str
    prefix: str


class TensorLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor's bytes begin in a producer's memory, sent with a granted claim.

    Attributes:
        region: The registered region that holds it.
        address: First byte, in the producer's address space; the tensor lies there packed, in its spec's order.
    """

    region: Region
    address: int


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A lease policy as it stands in a handle: name in ``moonrelay.policies``, how many readers, for how long.

    ``readers`` 0 means any number. ``ttl_s`` ``None`` means until released.
    """

    policy: str
    readers: int
    ttl_s: float | None


class StageHandle(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A reference to a published payload: what it is, how it is cut, and where it can be had. Used once.

    Attributes:
        id: 128-bit random hex; a handle's identity.
        request_id, kind, attempt, schema, metadata: As in the payload.
        tree: The description of the payload's tree, see `moonrelay.tree`.
        tensors: Its tensors' specs.
        chunks: How it is cut.
        digest: Name of the algorithm by which each chunk is checked, see `moonrelay.integrity`.
        lease: Who may read it, for how long.
        direct: The producer, while it lives.
        relay: The object store to which the payload was or will be moved.
        requires: Names of features without which the handle must not be read.
        unknown: Fields of a newer version that this one does not know, kept to be passed on.
    """

    id: str
    request_id: str
    kind: str
    attempt: int
    tree: bytes
    tensors: tuple[TensorSpec, ...]
    chunks: ChunkPlan
    digest: str
    lease: LeaseTerms
    direct: DirectAddress | None = None
    relay: RelayAddress | None = None
    schema: str | None = None
    metadata: dict[str, Any] | None = None
    requires: tuple[str, ...] = ()
    unknown: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.tensors)

    @property
    def num_chunks(self) -> int:
        """Number of chunks, at least one."""
        return self.chunks.count

    @property
    def spec(self) -> object:
        """The payload's tree with a `TensorSpec` in place of each tensor (and of long ``bytes``, ``str`` and ints)."""
        return spec_tree(self.tree, self.tensors)

    def chunk_nbytes(self, chunk: int) -> int:
        """Return the bytes of one chunk, over all tensors.

        Raises:
            ConfigError: There is no such chunk.
        """
        return chunk_nbytes(self.tensors, self.chunks, chunk)

    def to_bytes(self) -> bytes:
        """Return the wire form: ``MRH``, major and minor version, then msgpack. Below 64 KiB for ordinary payloads.

        Raises:
            ConfigError: The handle would not be accepted by `from_bytes`; the message names the field.
        """
        try:
            _check(self)
            body = _encode(self)
        except WireError as error:
            raise ConfigError(f"the handle is not valid: {error.message}", **error.context) from error
        if len(body) > MAX_HANDLE_BYTES - _HEADER:
            message = f"the handle takes {len(body)} bytes, at most {MAX_HANDLE_BYTES} are allowed; send fewer tensors"
            raise ConfigError(message, field="tensors")
        return MAGIC + bytes((MAJOR, MINOR)) + body

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> StageHandle:
        """Rebuild a handle from its wire form. Nothing in it is trusted; memory stays in proportion to its size.

        Raises:
            WireError: The bytes are malformed, truncated, too long, or contradict themselves.
            VersionError: They are of another major version, or require a feature or digest that this side does not
                know; the message names both sides.
        """
        if len(raw) > MAX_HANDLE_BYTES:
            raise WireError(f"a handle has at most {MAX_HANDLE_BYTES} bytes, this has {len(raw)}")
        raw = bytes(raw)
        handle = _as_we_write(raw)
        if handle is not None:
            _check(handle)
            return handle
        if len(raw) <= _HEADER or not raw.startswith(MAGIC):
            raise WireError("the bytes are no stage handle: they do not begin with MRH, a version and a body")
        major, minor = raw[len(MAGIC)], raw[len(MAGIC) + 1]
        if major != MAJOR:
            message = f"the handle has version {major}.{minor}, this side speaks {MAJOR}.{MINOR}; update the older side"
            raise VersionError(message)
        try:
            body = msgspec.msgpack.decode(raw[_HEADER:])
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise WireError("the handle's body is no valid msgpack") from error
        if type(body) is not dict or "unknown" in body:
            raise WireError("the handle's body is no map of fields")
        _check_requires(body.get("requires", ()), f"{major}.{minor}")
        try:
            handle = msgspec.convert(body, cls)
            extra = _unknown_fields(body, cls)
        except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
            raise WireError(f"the handle's body is malformed: {str(error)[:200]}") from error
        if extra:
            handle = msgspec.structs.replace(handle, unknown=extra)
        _check(handle)
        return handle


def _as_we_write(raw: bytes) -> StageHandle | None:
    """Return the handle when its bytes are just what this version writes, with nothing that is unknown; else ``None``.

    Whatever else they are, good or bad, the long way says. Nothing is checked yet but types.
    """
    if not raw.startswith(_OURS):
        return None
    try:
        handle = _decoder.decode(raw[_HEADER:])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError):
        return None
    if handle.requires or handle.unknown is not None or msgspec.msgpack.encode(handle) != raw[_HEADER:]:
        return None
    return handle


def _check_requires(requires: object, version: str) -> None:
    if not isinstance(requires, (list, tuple)) or not all(type(name) is str for name in requires):
        raise WireError("the required features are no list of names", field="requires")
    missing = [name[:64] for name in requires if name not in FEATURES]
    if missing:
        message = (
            f"the handle of version {version} requires {missing[:8]}, "
            f"this side's version {MAJOR}.{MINOR} knows {sorted(FEATURES)}; update this side"
        )
        raise VersionError(message, field="requires")


def _check(handle: StageHandle) -> None:
    """Refuse a handle whose values contradict each other; its types are right already.

    Raises:
        WireError: What is wrong, by field.
    """
    for field, text in (("id", handle.id), ("request_id", handle.request_id), ("kind", handle.kind)):
        _check_text(field, text)
    if handle.schema is not None:
        _check_text("schema", handle.schema)
    if not 0 <= handle.attempt <= MAX_INT:
        raise WireError(f"attempt {handle.attempt} is out of range", field="attempt")
    if handle.digest not in ALGORITHMS:
        message = f"digest {handle.digest[:64]!r} is unknown, version {MAJOR}.{MINOR} of this side knows {ALGORITHMS}"
        raise VersionError(message, field="digest")
    terms = handle.lease
    _check_text("lease.policy", terms.policy)
    if not 0 <= terms.readers <= MAX_INT:
        raise WireError(f"readers {terms.readers} is out of range", field="lease.readers")
    if terms.ttl_s is not None and not 0 <= terms.ttl_s < math.inf:
        raise WireError(f"ttl_s {terms.ttl_s} is no time", field="lease.ttl_s")
    if len(handle.tensors) > MAX_LEAVES:
        raise WireError(f"{len(handle.tensors)} tensors, at most {MAX_LEAVES} are possible", field="tensors")
    total = 0
    for index, spec in enumerate(handle.tensors):
        check_spec(spec, f"tensors[{index}]")
        total += spec.nbytes
    if total > MAX_BYTES:
        raise WireError("the tensors are larger than any memory", field="tensors")
    check_plan(handle.chunks, handle.tensors)
    check_tree(handle.tree, handle.tensors)
    if handle.metadata is not None:
        try:
            check_plain(handle.metadata, "metadata")
        except ConfigError as error:
            raise WireError(error.message, **error.context) from error


def _check_text(field: str, text: str) -> None:
    if not text or len(text) > MAX_NAME or not text.isprintable():
        raise WireError(f"{field} is empty, longer than {MAX_NAME} characters or not printable", field=field)


def _encode(handle: StageHandle) -> bytes:
    try:
        if handle.unknown is None:
            return msgspec.msgpack.encode(handle)
        body = msgspec.to_builtins(handle, builtin_types=(bytes,))
        body.pop("unknown")
        return msgspec.msgpack.encode(_merge(body, handle.unknown, StageHandle))
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise WireError(f"a field cannot be encoded: {error}") from error


def _unknown_fields(body: dict[Any, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields in ``body`` that ``struct`` does not have, also those inside its own structs' maps."""
    known = _FIELDS[struct]
    found: dict[str, Any] = {}
    for name, value in body.items():
        if type(name) is not str:
            raise WireError("a field's name is no str")
        if name not in known:
            found[name] = value
            continue
        inner = known[name]
        if inner is None or value is None:
            continue
        if isinstance(value, dict):
            below = _unknown_fields(value, inner)
            if below:
                found[name] = below
        else:
            each = {str(index): below for index, part in enumerate(value) if (below := _unknown_fields(part, inner))}
            if each:
                found[name] = each
    return found


def _merge(body: dict[str, Any], unknown: dict[str, Any], struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Put unknown fields back to where they were, unless what held them is gone; a list's parts go by number."""
    merged = dict(body)
    known = _FIELDS[struct]
    for name, value in unknown.items():
        inner = known.get(name)
        held = merged.get(name)
        if name not in known:
            merged[name] = value
        elif inner is None or not isinstance(value, dict):
            continue
        elif isinstance(held, dict):
            merged[name] = _merge(held, value, inner)
        elif isinstance(held, (list, tuple)):
            merged[name] = [_merge(part, value.get(str(index), {}), inner) for index, part in enumerate(held)]
    return merged


_OURS: Final = MAGIC + bytes((MAJOR, MINOR))
_decoder: Final[msgspec.msgpack.Decoder[StageHandle]] = msgspec.msgpack.Decoder(StageHandle)

_Inner = dict[str, type[msgspec.Struct]]
_STRUCTS: Final[tuple[tuple[type[msgspec.Struct], _Inner], ...]] = (
    (
        StageHandle,
        {
            "direct": DirectAddress,
            "relay": RelayAddress,
            "lease": LeaseTerms,
            "chunks": ChunkPlan,
            "tensors": TensorSpec,
        },
    ),
    (DirectAddress, {"control": ControlAddress, "engine": EngineAddress}),
    (ControlAddress, {}),
    (EngineAddress, {}),
    (RelayAddress, {}),
    (LeaseTerms, {}),
    (ChunkPlan, {}),
    (TensorSpec, {}),
)

#: Every field of the structs in a handle, with the struct inside it whose own fields must be looked at too.
_FIELDS: Final[dict[type[msgspec.Struct], dict[str, type[msgspec.Struct] | None]]] = {
    struct: {name: inner.get(name) for name in struct.__struct_fields__} for struct, inner in _STRUCTS
}
