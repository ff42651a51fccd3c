"""Waiting for room in a role's pool, and what is said when there is none.

Owns when a full pool is worth waiting for: what was sent before leaves it when it is taken or expires, what was
received before when its tensors die.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from moonrelay.clock import Clock, Deadline
from moonrelay.errors import CapacityError
from moonrelay_lightx2v import fields

if TYPE_CHECKING:
    from moonrelay.connector import DiffusionConnector
    from moonrelay.connector.claim import PayloadClaim
    from moonrelay.handle import StageHandle
    from moonrelay.payload import StagePayload
    from moonrelay_lightx2v.config import LinkConfig

#: Longest pause between two looks for room: tensors that were handed out give theirs back without a word.
LOOK_S: Final = 0.05


def publish(
    connector: DiffusionConnector,
    payload: StagePayload,
    config: LinkConfig,
    *,
    clock: Clock,
    changed: threading.Condition,
    check_open: Callable[[], None],
    make_room: Callable[[], bool],
) -> StageHandle:
    """Publish a copy of a payload, waiting for room for ``send_timeout_s`` where some may come.

    Args:
        connector: Of the role.
        payload: What to send.
        config: The role's settings.
        clock: Time.
        changed: Notified when a payload of the connector ends.
        check_open: Raises where there is no use in waiting on.
        make_room: Gives up what is best done without; returns whether there was something.

    Raises:
        CapacityError: It is larger than the pool, or there was no room in time.
        MoonrelayError: As `DiffusionConnector.publish`.

    Blocks: for the copy, and for room.
    """
    deadline = Deadline(config.send_timeout_s, clock)
    while True:
        try:
            return connector.publish(payload, copy=True)
        except CapacityError as exc:
            nbytes = fields.nbytes_of(payload.data)
            left_s = deadline.remaining() or 0.0
            held = connector.in_use()
            is_empty = not held["slots"] and not held["payloads"]
            if nbytes > config.transfer.pool_bytes or is_empty or left_s <= 0:
                message = (
                    f"{payload.request_id}: {nbytes} bytes do not fit into the {config.role}'s pool of "
                    f"{config.transfer.pool_bytes} (waited {config.send_timeout_s - left_s:.0f} s): "
                    "raise disagg_config.staging_bytes, or see why its receivers do not take what is there "
                    f"({held['payloads']} payloads; {exc})"
                )
                raise CapacityError(message, request_id=payload.request_id) from exc
        if make_room():
            continue
        with changed:
            clock.wait(changed, min(left_s, LOOK_S))
        check_open()


def read(claim: PayloadClaim, config: LinkConfig, timeout_s: float) -> object:
    """Read a claimed payload; where there is no room for it, once more without the garbage.

    Args:
        claim: On the payload.
        config: The role's settings.
        timeout_s: Longest wait for each of the two, in seconds.

    Raises:
        CapacityError: There is no room for it.
        MoonrelayError: As `PayloadClaim.read`.

    Blocks: until it is here.
    """
    with contextlib.suppress(CapacityError):
        return claim.read(timeout_s=timeout_s)
    gc.collect()  # of a request before this one, held by a cycle: an exception's traceback makes them
    try:
        return claim.read(timeout_s=timeout_s)
    except CapacityError as exc:
        message = (
            f"{claim.handle.request_id}: {claim.handle.nbytes} bytes do not fit into the {config.role}'s pool of "
            f"{config.transfer.pool_bytes} now: raise disagg_config.staging_bytes, which also holds what the runner "
            f"still uses of earlier requests ({exc})"
        )
        raise CapacityError(message, request_id=claim.handle.request_id) from exc


__all__ = ["publish", "read"]
