"""The direct data plane: registered memory of one process, read by another.

Owns engines (`base`, `memory`, `shm`, `mooncake`, `faulty`), the pool that payloads lie and land in (`arena`), the
caller's own registered memory (`registry`) and the pull itself (`pull`). Knows nothing of leases, tasks, trees or
digests. Importing this package loads neither torch nor a native engine.
"""

from moonrelay.transfer.arena import Arena, Slot
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay.transfer.pull import Move, Puller
from moonrelay.transfer.quarantine import Quarantine
from moonrelay.transfer.registry import Registrations

__all__ = [
    "Arena",
    "Move",
    "Operation",
    "OperationState",
    "Puller",
    "Quarantine",
    "Registrations",
    "Slot",
    "TransferEngine",
]
