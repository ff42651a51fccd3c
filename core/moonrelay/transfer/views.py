"""Tensors over memory that torch did not allocate, and a call when torch is done with them.

Owns no memory. Torch is imported when the first tensor is made.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class _CudaMemory:
    """Device memory in the form that torch takes without copying; torch holds this object while a storage uses it."""

    __slots__ = ("__cuda_array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_over(address: int, nbytes: int, device: str, on_dead: Callable[[], None]) -> torch.Tensor:
    """Return a one-dimensional uint8 tensor over ``nbytes`` at ``address``.

    Args:
        address: First byte, on ``device``.
        nbytes: Length; with zero there is no memory to share, and ``on_dead`` is called at once.
        device: ``cpu`` or ``cuda:N``.
        on_dead: Called once, when the storage dies: in any thread, also inside a garbage collection. Not at exit.
    """
    import torch

    if nbytes == 0:
        on_dead()
        return torch.empty(0, dtype=torch.uint8, device=device)
    owner: memoryview | _CudaMemory
    if device == "cpu":
        owner = memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
    else:
        owner = _CudaMemory(address, nbytes)
    weakref.finalize(owner, on_dead).atexit = False
    if isinstance(owner, memoryview):
        return torch.frombuffer(owner, dtype=torch.uint8)
    return torch.as_tensor(owner, device=device)
