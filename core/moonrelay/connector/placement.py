"""Where a published payload lies until it is consumed: in registered memory, in the pool, or on the way to a relay.

Owns the decision and the memory held by it. A leaf that lies in registered memory stays where it is; any other is
staged into one slot of the pool, or, where nothing is read directly, kept as it is until it was put into the relay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonrelay.errors import MoonrelayError
from moonrelay.handle import Extent, Region, TensorLocation
from moonrelay.layout import ChunkPlan, TensorSpec, bytes_of, chunk_view, copy_bits, strips, tensor_from_buffer
from moonrelay.payload import Flattened

if TYPE_CHECKING:
    import torch

    from moonrelay.connector.runtime import DataPlane
    from moonrelay.transfer.arena import Slot

logger = logging.getLogger(__name__)

#: Leaves staged into one slot begin at multiples of this, in bytes.
ALIGNMENT = 64


@dataclass(slots=True)
class PlacedLeaf:
    """One leaf in its final place.

    Attributes:
        spec: Its shape, dtype and order.
        source: The caller's tensor, kept until the bytes are elsewhere.
        tensor: The tensor whose memory is served: ``source`` itself, or its staged copy.
        region: The registered region; ``None`` when it is only ever put into the relay.
    """

    spec: TensorSpec
    source: torch.Tensor
    tensor: torch.Tensor
    region: Region | None

    @property
    def staged(self) -> bool:
        return self.tensor is not self.source

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


class Placement:
    """The memory that one payload holds.

    Born with one hold, the publication's. Threads: `stage` by one thread per chunk; `hold` and `release` from any.
    """

    def __init__(
        self, leaves: Sequence[PlacedLeaf], chunks: ChunkPlan, on_release: Sequence[Callable[[], None]]
    ) -> None:
        self.leaves = list(leaves)
        self.chunks = chunks
        self._on_release = list(on_release)
        self._lock = threading.Lock()
        self._holds = 1

    @property
    def device(self) -> str:
        """Type of the device that served memory is on; ``cpu`` only when all of it is."""
        return next((leaf.tensor.device.type for leaf in self.leaves if leaf.tensor.device.type != "cpu"), "cpu")

    @property
    def staged_nbytes(self) -> int:
        """Bytes that had to be copied because they did not lie in registered memory."""
        return sum(leaf.spec.nbytes for leaf in self.leaves if leaf.staged)

    def stage(self, chunk: int) -> None:
        """Copy one chunk of the leaves that need it; after this the chunk's bytes are final in the served memory."""
        for leaf in self.leaves:
            if leaf.staged:
                copy_bits(chunk_view(leaf.source, self.chunks, chunk), chunk_view(leaf.tensor, self.chunks, chunk))

    def drop_sources(self) -> None:
        """Let go of the caller's tensors that were staged completely."""
        for leaf in self.leaves:
            if leaf.staged:
                leaf.source = leaf.tensor

    def extents(self, chunk: int) -> list[Extent]:
        """Return one chunk's bytes in canonical order, as they lie in this process."""
        return [
            Extent(leaf.address + strip.offset, strip.nbytes)
            for leaf in self.leaves
            for strip in strips(leaf.spec, self.chunks, chunk)
        ]

    def parts(self, chunk: int) -> list[Extent | torch.Tensor]:
        """Return one chunk's bytes as a digest takes them: host ranges, or uint8 views on a device."""
        parts: list[Extent | torch.Tensor] = []
        for leaf in self.leaves:
            for strip in strips(leaf.spec, self.chunks, chunk):
                if leaf.tensor.device.type == "cpu":
                    parts.append(Extent(leaf.address + strip.offset, strip.nbytes))
                else:
                    parts.append(bytes_of(leaf.tensor)[strip.offset : strip.offset + strip.nbytes])
        return parts

    def locations(self) -> tuple[TensorLocation, ...]:
        """Return where a peer finds the leaves. Only where all of them lie in registered memory."""
        return tuple(
            TensorLocation(region=leaf.region, address=leaf.address) for leaf in self.leaves if leaf.region is not None
        )

    def hold(self) -> bool:
        """Keep the memory for one more user; False when it was given back already."""
        with self._lock:
            if self._holds == 0:
                return False
            self._holds += 1
            return True

    def release(self) -> None:
        """End one `hold`, or the publication's own; the last one gives the memory back."""
        with self._lock:
            self._holds -= 1
            if self._holds > 0:
                return
            callbacks, self._on_release = self._on_release, []
            self.leaves = []
        for callback in callbacks:
            try:
                callback()
            except MoonrelayError as exc:
                # The rest must go back all the same.
                logger.warning("memory of a payload could not be given back: %s", exc)


def place(flat: Flattened, data: DataPlane | None, *, snapshot: bool) -> Placement:
    """Find or make the place where a payload's bytes are served.

    Args:
        flat: The payload's leaves.
        data: The engine's side; ``None`` when the payload goes to the relay only.
        snapshot: Whether the caller will modify its tensors: everything is copied before this returns.

    Returns:
        The placement. Staged leaves are not filled yet unless ``snapshot``.

    Raises:
        CapacityError: The pool has no room; nothing is held.
    """
    if data is None:
        return _place_for_relay(flat, snapshot=snapshot)
    on_release: list[Callable[[], None]] = []
    try:
        return _place(flat, data, on_release, snapshot=snapshot)
    except BaseException:
        for callback in on_release:
            callback()
        raise


def _place(flat: Flattened, data: DataPlane, on_release: list[Callable[[], None]], *, snapshot: bool) -> Placement:
    """Do the work of `place`; what has to be given back is in ``on_release``, also when this raises."""
    regions: list[Region | None] = []
    for leaf, packed, spec in zip(flat.leaves, flat.packed, flat.specs, strict=True):
        region = None
        if packed and not snapshot:
            region = _hold_registered(leaf, spec.nbytes, data, on_release)
        regions.append(region)
    to_stage = [index for index, region in enumerate(regions) if region is None]
    leaves = [
        PlacedLeaf(spec=spec, source=leaf, tensor=leaf, region=region)
        for leaf, spec, region in zip(flat.leaves, flat.specs, regions, strict=True)
    ]
    if to_stage:
        slot = data.arena.allocate(sum(_aligned(flat.specs[index].nbytes) for index in to_stage))
        on_release.append(slot.release)
        _lay_out(leaves, to_stage, slot)
    placement = Placement(leaves, flat.chunks, on_release)
    if snapshot:
        for chunk in range(flat.chunks.count):
            placement.stage(chunk)
        placement.drop_sources()
    return placement


def _hold_registered(
    leaf: torch.Tensor, nbytes: int, data: DataPlane, on_release: list[Callable[[], None]]
) -> Region | None:
    """Return the region that already serves ``leaf``, held until release; ``None`` when there is none."""
    slot = data.arena.find(leaf.data_ptr(), nbytes)
    if slot is not None:
        slot.retain()
        on_release.append(slot.release)
        return slot.region
    if nbytes == 0 or data.registrations.find(leaf.data_ptr(), nbytes) is None:
        return None
    # Counted: the memory stays registered until this payload lets go, also when the caller unregisters before.
    region = data.registrations.add(leaf.data_ptr(), nbytes)
    on_release.append(lambda: data.registrations.remove(region))
    return region


def _lay_out(leaves: list[PlacedLeaf], indices: Sequence[int], slot: Slot) -> None:
    memory = slot.tensor()
    offset = 0
    for index in indices:
        spec = leaves[index].spec
        leaves[index].tensor = tensor_from_buffer(memory[offset : offset + spec.nbytes], spec)
        leaves[index].region = slot.region
        offset += _aligned(spec.nbytes)


def _place_for_relay(flat: Flattened, *, snapshot: bool) -> Placement:
    import torch

    leaves = []
    for leaf, packed, spec in zip(flat.leaves, flat.packed, flat.specs, strict=True):
        served = leaf
        if snapshot or not packed or leaf.device.type != "cpu":
            served = tensor_from_buffer(torch.empty(spec.nbytes, dtype=torch.uint8), spec)
        leaves.append(PlacedLeaf(spec=spec, source=leaf, tensor=served, region=None))
    placement = Placement(leaves, flat.chunks, ())
    if snapshot:
        for chunk in range(flat.chunks.count):
            placement.stage(chunk)
        placement.drop_sources()
    return placement


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def work_completed(placement: Placement) -> Callable[[], None] | None:
    """Record where the caller's current stream stands; return a wait for it, or ``None`` without one.

    Only tensors on a CUDA device have work under way. The wait blocks its own thread, never the caller's.
    """
    devices = {leaf.source.device for leaf in placement.leaves if leaf.source.device.type == "cuda"}
    if not devices:
        return None
    import torch

    recorded = []
    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        recorded.append(event)

    def wait() -> None:
        for event in recorded:
            event.synchronize()

    return wait
