"""Registered memory for callers: tensors in the pool, and registrations of memory of their own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from moonrelay.connector.runtime import Runtime
from moonrelay.errors import CapacityError, ConfigError, RegistrationError
from moonrelay.handle import Region
from moonrelay.layout import TensorSpec, packed_order, tensor_from_buffer

if TYPE_CHECKING:
    from types import TracebackType

    import torch


def empty(
    runtime: Runtime,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str | None,
    *,
    on_shortage: Callable[[], None],
) -> torch.Tensor:
    """Allocate a tensor in the pool; see `DiffusionConnector.empty`."""
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape):
        message = f"shape={shape!r} must be whole numbers, 0 or more"
        raise ConfigError(message, field="shape")
    pool_device = runtime.settings.transfer.device
    if device is not None and device != pool_device:
        message = f"device={device!r} is not the pool's {pool_device!r}; set te_config device, or leave it out"
        raise ConfigError(message, field="device")
    spec = TensorSpec(shape=shape, dtype=str(dtype).removeprefix("torch."))
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        slot = runtime.data().arena.allocate(nbytes)
    except CapacityError:
        on_shortage()
        raise
    with slot:
        return tensor_from_buffer(slot.tensor(), spec)


class Registration:
    """The caller's hold on memory that it registered; a context manager.

    Threads: any. The tensor is referenced until the hold is given back.
    """

    def __init__(self, runtime: Runtime, tensor: torch.Tensor) -> None:
        self._lock = threading.Lock()
        self._registrations = runtime.data().registrations
        self._tensor: torch.Tensor | None = tensor
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            message = "a tensor without bytes needs no registration"
            raise RegistrationError(message, field="tensor")
        if not packed_order(tensor)[0]:
            message = f"strides {tuple(tensor.stride())} leave gaps; register the dense tensor that this is a view of"
            raise RegistrationError(message, field="tensor")
        self._region: Region | None = self._registrations.add(tensor.data_ptr(), nbytes)

    def close(self) -> None:
        """Give the hold back. Idempotent; payloads that are still published from the memory keep it registered."""
        with self._lock:
            region, self._region = self._region, None
            self._tensor = None
        if region is not None:
            self._registrations.remove(region)

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
