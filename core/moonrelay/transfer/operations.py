"""Operations that are over before their caller sees them, and the bounds check that every engine shares.

Owns no memory and no thread.
"""

from __future__ import annotations

from moonrelay.errors import MoonrelayError, RegistrationError
from moonrelay.handle import Region
from moonrelay.transfer.base import Operation, OperationState


class Finished(Operation):
    """A read that ended inside ``read`` itself: done, or failed with a reason."""

    __slots__ = ("_error",)

    def __init__(self, error: MoonrelayError | None = None) -> None:
        self._error = error

    def poll(self) -> OperationState:
        return OperationState.DONE if self._error is None else OperationState.FAILED

    @property
    def error(self) -> MoonrelayError | None:
        return self._error


def out_of_bounds(region: Region, address: int, nbytes: int) -> RegistrationError | None:
    """Return the error for a range that does not lie in a region with at least one byte, else ``None``."""
    if nbytes >= 1 and region.base <= address and address + nbytes <= region.base + region.nbytes:
        return None
    message = (
        f"range {address:#x}+{nbytes} does not lie in region {region.key or hex(region.base)!r} "
        f"of {region.nbytes} bytes at {region.base:#x}"
    )
    return RegistrationError(message, nbytes=nbytes)
