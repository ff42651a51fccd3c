"""Checkpoints as payloads in a relay: their names, their three chunks, and which of them is the newest.

Owns the form. A checkpoint lies under ``<namespace>/ck/<request>/<number>-<step>-<kind>-<nonce>`` as every relayed
payload does (`moonrelay.relay.records`), so chunks carry digests, the end record is the commit, and the sweeper of any
connector removes it when its lease is over. ``kind`` is ``k``, or ``r`` for one that outlives its request. Chunk 0 is
the index (sizes), 1 the description, 2 the tensors' bytes. Nothing is overwritten, and two workers never write under
one name, so a half-written checkpoint hides no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moonrelay import integrity
from moonrelay.clock import Deadline
from moonrelay.errors import IntegrityError, MoonrelayError, UnsupportedTensor, VersionError, WireError
from moonrelay.layout import Extent, TensorSpec, check_spec, copy_bits, copy_leaf, host_extent, tensor_from_buffer
from moonrelay.payload import Flattened, StagePayload, flatten, unflatten
from moonrelay.relay.base import Relay
from moonrelay.relay.records import RelayedPayload

if TYPE_CHECKING:
    import torch

SCHEMA: Final = "moonrelay.checkpoint/1"
VERSION: Final = 1
CHUNKS: Final = 3
DIGEST: Final = "xxh3_128"

_MAGIC: Final = b"MRCK"
#: Magic, version, reserved, step, bytes of the description, bytes of the tensors.
_INDEX: Final = struct.Struct("<4sHHQQQ")
_MAX_META_BYTES: Final = 64 << 20
_NAME: Final = re.compile(
    r"(?P<request>[0-9a-f]{32})/(?P<number>\d{1,9})-(?P<step>\d{1,9})-(?P<kind>[kr])-[0-9a-f]{16}"
)
_KEY: Final = re.compile(r"(?P<checkpoint>.+-[0-9a-f]{16})/(?P<name>c/\d+/\d+|end|tomb|claim/\d+/\d+)")


class Unusable(Exception):
    """A checkpoint is half-written, damaged, or of another version: an older one may be whole."""


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself, in chunk 1."""

    schema: str
    identity: dict[str, Any]
    tree: bytes
    specs: tuple[TensorSpec, ...]
    strides: tuple[tuple[int, ...], ...]
    on_device: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint by name.

    Attributes:
        prefix: Of all its keys.
        request: Digest of its request.
        number: Grows with each checkpoint of a request.
        step: Steps done.
        retained: Whether it outlives its request.
        whole: Whether its end record is there.
    """

    prefix: str
    request: str
    number: int
    step: int
    retained: bool
    whole: bool


class Snapshot:
    """A state's tensors, which nobody changes any more, on their way to the relay.

    Args:
        tree: A tree of tensors and plain values.
        request_id: For messages.

    Raises:
        UnsupportedTensor: It cannot be carried; ``context['field']`` names the place.

    Threads: made in the thread that computed the tensors; everything else in another one.
    """

    def __init__(self, tree: object, request_id: str) -> None:
        self._flat: Flattened = flatten(StagePayload(request_id, "checkpoint", data=tree, schema=SCHEMA))
        self._ready = _work_done(self._flat.leaves)
        self._versions = _versions(self._flat.leaves)

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self._flat.specs)

    def describe(self, identity: dict[str, object]) -> bytes:
        flat = self._flat
        return msgspec.msgpack.encode(
            Description(
                schema=SCHEMA,
                identity=identity,
                tree=flat.tree,
                specs=flat.specs,
                strides=tuple(tuple(leaf.stride()) for leaf in flat.leaves),
                on_device=tuple(leaf.device.type != "cpu" for leaf in flat.leaves),
            )
        )

    def check_unchanged(self) -> None:
        """Raise when a tensor was changed in place since the snapshot was made, as far as torch keeps count.

        Raises:
            IntegrityError: What was stored may be neither the one state nor the other.
        """
        if _versions(self._flat.leaves) != self._versions:
            message = "a tensor of the state was changed in place while it was saved; capture a copy of it"
            raise IntegrityError(message)

    def on_host(self) -> list[torch.Tensor]:
        """Return the tensors packed in host memory. Blocks: until a device has computed and copied them."""
        self._ready()
        packed: list[torch.Tensor] = []
        with _side_streams(self._flat.leaves):
            for leaf, spec, dense in zip(self._flat.leaves, self._flat.specs, self._flat.packed, strict=True):
                if dense and leaf.device.type == "cpu":
                    packed.append(leaf)
                    continue
                buffer = _bytes(spec.nbytes)
                copy_leaf(leaf, spec, buffer)
                packed.append(tensor_from_buffer(buffer, spec))
        return packed


class Shelf:
    """The checkpoints of a namespace.

    Args:
        relay: A started relay.
        namespace: First component of all keys.

    Threads: any. All methods block as long as the relay does, until their deadline, and raise its errors.
    """

    def __init__(self, relay: Relay, namespace: str) -> None:
        self._relay = relay
        self._root = f"{namespace}/ck/"

    def found(self, request: str, deadline: Deadline) -> list[Saved]:
        """Return a request's checkpoints, newest first; all requests' for an empty ``request``."""
        start = f"{self._root}{request}/" if request else self._root
        by_prefix: dict[str, set[str]] = {}
        for key in self._relay.keys(start, deadline):
            match = _KEY.fullmatch(key)
            if match is not None:
                by_prefix.setdefault(match["checkpoint"], set()).add(match["name"])
        found: list[Saved] = []
        for prefix, names in by_prefix.items():
            match = _NAME.fullmatch(prefix.removeprefix(self._root))
            if match is None:
                continue
            found.append(
                Saved(
                    prefix=prefix,
                    request=match["request"],
                    number=int(match["number"]),
                    step=int(match["step"]),
                    retained=match["kind"] == "r",
                    whole="end" in names and "tomb" not in names,
                )
            )
        return sorted(found, key=lambda saved: (saved.number, saved.step), reverse=True)

    def name(self, request: str, number: int, step: int, *, retained: bool) -> Saved:
        """Return a name of its own for a checkpoint that is about to be written."""
        kind = "r" if retained else "k"
        prefix = f"{self._root}{request}/{number}-{step}-{kind}-{secrets.token_hex(8)}"
        return Saved(prefix=prefix, request=request, number=number, step=step, retained=retained, whole=False)

    def write(
        self,
        saved: Saved,
        snapshot: Snapshot,
        identity: dict[str, object],
        ttl_s: float,
        deadline: Deadline,
        on_quiet: Callable[[], None],
    ) -> int:
        """Store a checkpoint; it counts once the last call is done.

        Args:
            saved: Its name.
            snapshot: Its tensors.
            identity: What it is of.
            ttl_s: Its lease.
            deadline: When to give up.
            on_quiet: Called once when nothing reads the snapshot any more, however it ended.

        Returns:
            Bytes stored.
        """
        with _when_all_quiet(on_quiet) as quiet:
            described = snapshot.describe(identity)
            tensors = snapshot.on_host()
            index = _INDEX.pack(_MAGIC, VERSION, 0, saved.step, len(described), snapshot.nbytes)
            payload = self._payload(saved)
            parts: tuple[tuple[object, list[Extent]], ...] = (
                _host_bytes(index),
                _host_bytes(described),
                (tensors, [host_extent(tensor) for tensor in tensors if tensor.numel()]),
            )
            for chunk, (memory, extents) in enumerate(parts):
                _put(payload, chunk, extents, deadline, quiet(memory))
            snapshot.check_unchanged()
            payload.put_end(CHUNKS, ttl_s, deadline)
        return len(index) + len(described) + snapshot.nbytes

    def describe(self, saved: Saved, deadline: Deadline) -> tuple[Description, int]:
        """Read what a checkpoint says of itself, and how many bytes its tensors have.

        Raises:
            Unusable: It is half-written, damaged, or of another version.
        """
        payload = self._payload(saved)
        with _unusable(saved):
            if not saved.whole or payload.get_end(deadline) is None:
                raise Unusable("it is not complete")
            index = self._small(payload, 0, _INDEX.size, deadline)
            magic, version, _, step, meta_nbytes, nbytes = _INDEX.unpack(index)
            if magic != _MAGIC or version != VERSION:
                raise Unusable(f"its version is {version}, this side reads {VERSION}")
            if step != saved.step or meta_nbytes > _MAX_META_BYTES:
                raise Unusable("its index contradicts its name")
            description = msgspec.msgpack.decode(self._small(payload, 1, meta_nbytes, deadline), type=Description)
            if description.schema != SCHEMA:
                raise Unusable(f"its schema is {description.schema!r}, this side reads {SCHEMA!r}")
            if not len(description.specs) == len(description.strides) == len(description.on_device):
                raise Unusable("its description contradicts itself")
            for number, spec in enumerate(description.specs):
                check_spec(spec, f"specs[{number}]")
            if sum(spec.nbytes for spec in description.specs) != nbytes:
                raise Unusable("its description contradicts its index")
        return description, nbytes

    def read(self, saved: Saved, description: Description, device: str | None, deadline: Deadline) -> object:
        """Read a checkpoint's tree, into memory of its own; what lay on a device goes to ``device``.

        Raises:
            Unusable: It is damaged.
        """
        buffers = [_bytes(spec.nbytes) for spec in description.specs]
        extents = [host_extent(buffer) for buffer in buffers if buffer.numel()]
        with _unusable(saved):
            held: list[object] = [buffers]
            record = self._payload(saved).get_chunk(2, extents, deadline, on_quiet=held.clear)
            if record is None or record.digest != _digest(extents):
                raise Unusable("its tensors are not what was stored")
            leaves = [
                _placed(tensor_from_buffer(buffer, spec), strides, device if on_device else None)
                for buffer, spec, strides, on_device in zip(
                    buffers, description.specs, description.strides, description.on_device, strict=True
                )
            ]
            return unflatten(description.tree, leaves)

    def remove(self, saved: Saved, deadline: Deadline) -> None:
        """Remove a checkpoint, whole or not. Idempotent."""
        # The end first: what is being removed must not be taken for whole.
        self._payload(saved).remove_all(CHUNKS, deadline, keep_tombstone=False)

    def _payload(self, saved: Saved) -> RelayedPayload:
        return RelayedPayload(self._relay, saved.prefix, saved.prefix.rpartition("-")[2], slots=0)

    @staticmethod
    def _small(payload: RelayedPayload, chunk: int, nbytes: int, deadline: Deadline) -> bytes:
        memory = (ctypes.c_char * nbytes)()
        extents = [Extent(ctypes.addressof(memory), nbytes)] if nbytes else []
        held: list[object] = [memory]
        record = payload.get_chunk(chunk, extents, deadline, on_quiet=held.clear)
        if record is None or record.digest != _digest(extents):
            raise Unusable("its description is not what was stored")
        return memory.raw


def _put(
    payload: RelayedPayload, chunk: int, extents: list[Extent], deadline: Deadline, on_quiet: Callable[[], None]
) -> None:
    digest = _digest(extents)
    with _when_all_quiet(on_quiet) as quiet:
        try:
            payload.put_chunk(chunk, extents, digest, deadline, on_quiet=quiet(None))
        except MoonrelayError as exc:
            if not exc.retryable or deadline.expired:
                raise
            payload.put_chunk(chunk, extents, digest, deadline, on_quiet=quiet(None))


def _digest(extents: Sequence[Extent]) -> bytes:
    digest = integrity.digester(DIGEST)
    for extent in extents:
        digest.update(extent)
    return digest.digest()


def _host_bytes(raw: bytes) -> tuple[object, list[Extent]]:
    memory = (ctypes.c_char * len(raw)).from_buffer_copy(raw)
    return memory, [Extent(ctypes.addressof(memory), len(raw))]


def _bytes(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


def _placed(tensor: torch.Tensor, strides: tuple[int, ...], device: str | None) -> torch.Tensor:
    """Return a copy with the strides that the saved tensor had, in memory as torch itself allocates it."""
    import torch

    # Kernels choose their way by strides, also by those of dimensions of size 1, which a spec does not keep.
    alike = len(strides) == tensor.dim() and all(
        size == 1 or ours == theirs for size, ours, theirs in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )
    kept = strides if alike and min(strides, default=0) >= 0 else tensor.stride()
    made = torch.empty_strided(tuple(tensor.shape), kept, dtype=tensor.dtype, device=device or "cpu")
    copy_bits(tensor, made)
    return made


def _versions(leaves: Sequence[torch.Tensor]) -> list[int | None]:
    # Tensors made in inference mode are not counted; whoever captures those copies them.
    return [None if leaf.is_inference() else leaf._version for leaf in leaves]  # noqa: SLF001


def _work_done(leaves: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Note what has been asked of the devices so far; return a wait for it."""
    devices = {leaf.device for leaf in leaves if leaf.device.type == "cuda"}
    if not devices:
        return lambda: None
    import torch

    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


@contextlib.contextmanager
def _side_streams(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Copy beside the computation, not in its queue."""
    devices = {leaf.device for leaf in leaves if leaf.device.type == "cuda"}
    if not devices:
        yield
        return
    import torch

    with contextlib.ExitStack() as stack:
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stack.enter_context(torch.cuda.stream(stream))
        yield


@contextlib.contextmanager
def _unusable(saved: Saved) -> Iterator[None]:
    """Tell what is wrong with a checkpoint from what is wrong with the store."""
    try:
        yield
    except (IntegrityError, WireError, VersionError, UnsupportedTensor, msgspec.MsgspecError, struct.error) as exc:
        message = f"the checkpoint of step {saved.step} cannot be used: {exc}"
        raise Unusable(message) from exc
    except Unusable as exc:
        message = f"the checkpoint of step {saved.step} cannot be used: {exc}"
        raise Unusable(message) from None


@contextlib.contextmanager
def _when_all_quiet(on_quiet: Callable[[], None]) -> Iterator[Callable[[object], Callable[[], None]]]:
    """Give out callbacks that keep memory alive; call ``on_quiet`` once after the last of them and the block's end."""
    lock = threading.Lock()
    pending = [1]

    def ended() -> None:
        with lock:
            pending[0] -= 1
            last = pending[0] == 0
        if last:
            on_quiet()

    def quiet(memory: object) -> Callable[[], None]:
        held: list[object] = [memory]
        with lock:
            pending[0] += 1

        def one() -> None:
            held.clear()
            ended()

        return one

    try:
        yield quiet
    finally:
        ended()
