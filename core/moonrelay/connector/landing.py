"""Where a consumed payload lands: pool memory that is handed over, or the caller's own destination.

Owns the destination memory until it is handed over. A landing place whose transfer is not quiet is never given back to
the pool before it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from moonrelay.clock import Deadline
from moonrelay.errors import CapacityError, ConfigError, RegistrationError
from moonrelay.handle import Extent, StageHandle
from moonrelay.integrity import Digest
from moonrelay.layout import bytes_of, chunk_view, copy_bits, packed_order, strips, tensor_from_buffer
from moonrelay.tree import ONE_TENSOR

if TYPE_CHECKING:
    import torch

    from moonrelay.connector.runtime import DataPlane


class Landing:
    """Destination tensors of one payload, one per leaf.

    Threads: filled by one thread at a time; `keep_until_quiet` callbacks may run in any thread.
    """

    def __init__(self, handle: StageHandle, tensors: Sequence[torch.Tensor], copies: torch.Tensor | None) -> None:
        self._handle = handle
        self.tensors = list(tensors)
        self._copies_into = copies
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._busy = 0
        self._closed = False

    def extents(self, chunk: int) -> list[Extent]:
        """Return one chunk's bytes in canonical order, as they will lie in this process."""
        return [
            Extent(tensor.data_ptr() + strip.offset, strip.nbytes)
            for tensor, spec in zip(self.tensors, self._handle.tensors, strict=True)
            for strip in strips(spec, self._handle.chunks, chunk)
        ]

    def leaf_extents(self, chunk: int) -> list[tuple[int, int, Extent]]:
        """Return ``(leaf, offset in the leaf, extent here)`` of one chunk, in canonical order."""
        return [
            (index, strip.offset, Extent(tensor.data_ptr() + strip.offset, strip.nbytes))
            for index, (tensor, spec) in enumerate(zip(self.tensors, self._handle.tensors, strict=True))
            for strip in strips(spec, self._handle.chunks, chunk)
        ]

    def update_digest(self, digest: Digest, address: int, nbytes: int) -> None:
        """Add landed bytes to a digest, where they lie."""
        for tensor in self.tensors:
            offset = address - tensor.data_ptr()
            if tensor.device.type != "cpu" and 0 <= offset < tensor.numel() * tensor.element_size():
                digest.update(bytes_of(tensor)[offset : offset + nbytes])
                return
        digest.update(Extent(address, nbytes))

    def keep_until_quiet(self) -> Callable[[], None]:
        """Return a callback that keeps this memory, and its registration, until it is called."""
        held = [list(self.tensors)]
        with self._lock:
            self._busy += 1

        def quiet() -> None:
            held.clear()
            with self._lock:
                self._busy -= 1
            self._settle()

        return quiet

    def view(self, chunk: int) -> torch.Tensor:
        """Return the caller's view of one landed chunk, copied on where the caller's memory could not be read into."""
        landed = chunk_view(self.tensors[0], self._handle.chunks, chunk)
        if self._copies_into is None:
            return landed
        target = chunk_view(self._copies_into, self._handle.chunks, chunk)
        copy_bits(landed, target)
        return target

    def close(self) -> None:
        """Undo temporary registrations and let go of the memory; who was handed it keeps it. Idempotent."""
        with self._lock:
            self._closed = True
        self._settle()
        # Dropped here, not with this object: an exception that somebody keeps would keep it, and the pool's slot.
        self.tensors.clear()
        self._copies_into = None

    def _settle(self) -> None:
        """Undo the registrations once nobody needs them."""
        with self._lock:
            ended = self._closed and self._busy == 0
        if ended:
            self._stack.close()

    def register(self, data: DataPlane) -> bool:
        """Register the destination for the time of the transfer; return False where the engine refuses it."""
        if data.engine.lands_in_foreign_memory:
            return True
        for tensor in self.tensors:
            if tensor.numel() == 0:
                continue
            nbytes = tensor.numel() * tensor.element_size()
            if data.arena.find(tensor.data_ptr(), nbytes) is not None:
                continue
            try:
                region = data.registrations.add(tensor.data_ptr(), nbytes)
            except RegistrationError:
                return False
            self._stack.callback(data.registrations.remove, region)
        return True


def land(handle: StageHandle, dst: torch.Tensor | None, data: DataPlane | None, deadline: Deadline) -> Landing:
    """Choose where a payload lands.

    Args:
        handle: What is consumed.
        dst: The caller's destination, only for a payload that is one tensor; ``None`` takes pool memory.
        data: The engine's side; ``None`` where the payload comes from a relay only, which reads into any memory.
        deadline: How long to wait for room in the pool.

    Raises:
        ConfigError: ``dst`` does not fit the payload; the message names shape and dtype.
        CapacityError: The pool is too small, or had no room until the deadline.
    """
    if dst is not None:
        return _land_in(handle, dst, data, deadline)
    if data is None:
        return Landing(handle, [_heap(spec.nbytes, index, handle) for index, spec in enumerate(handle.tensors)], None)
    total = sum(spec.nbytes for spec in handle.tensors)
    if total > data.arena.capacity_bytes:
        message = (
            f"the payload's {total} bytes do not fit the pool of {data.arena.capacity_bytes}; "
            f"raise te_config pool_bytes, or give dst"
        )
        raise CapacityError(message, request_id=handle.request_id, fits=False)
    tensors: list[torch.Tensor] = []
    for spec in handle.tensors:
        # A failure on the way frees what was taken: the tensors alone keep their slots.
        with data.arena.allocate(spec.nbytes, deadline) as slot:
            tensors.append(tensor_from_buffer(slot.tensor(), spec))
    return Landing(handle, tensors, None)


def is_tensor(handle: StageHandle) -> bool:
    """Return whether the payload is one tensor, not a tree."""
    return handle.tree == ONE_TENSOR


def _heap(nbytes: int, index: int, handle: StageHandle) -> torch.Tensor:
    import torch

    return tensor_from_buffer(torch.empty(nbytes, dtype=torch.uint8), handle.tensors[index])


def _land_in(handle: StageHandle, dst: torch.Tensor, data: DataPlane | None, deadline: Deadline) -> Landing:
    if not is_tensor(handle):
        message = "dst is only for a payload that is one tensor; leave it out to get the tree"
        raise ConfigError(message, field="dst", request_id=handle.request_id)
    spec = handle.tensors[0]
    dtype = str(dst.dtype).removeprefix("torch.")
    if tuple(dst.shape) != spec.shape or dtype != spec.dtype:
        message = (
            f"dst has shape {tuple(dst.shape)} and dtype {dtype}, the payload has {spec.shape} and {spec.dtype}; "
            f"allocate dst from handle.spec"
        )
        raise ConfigError(message, field="dst", request_id=handle.request_id)
    same_layout = packed_order(dst) == (True, spec.order) and not dst.is_neg()
    if same_layout and dtype.startswith("complex"):
        same_layout = not dst.is_conj()
    if same_layout and (dst.device.type == "cpu" or (data is not None and dst.device.type == data.device_type)):
        landing = Landing(handle, [dst], None)
        if data is None or landing.register(data):
            return landing
        landing.close()
    if data is None or data.engine.lands_in_foreign_memory:
        return Landing(handle, [_heap(spec.nbytes, 0, handle)], dst)
    with data.arena.allocate(spec.nbytes, deadline) as slot:
        return Landing(handle, [tensor_from_buffer(slot.tensor(), spec)], dst)
