"""Moonrelay: disaggregated diffusion serving over Mooncake.

The public names. Importing this package loads neither torch nor mooncake.
"""

from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.features import FeatureCache
from moonrelay.cache.keys import EmbeddingKey
from moonrelay.config import ControlConfig, StoreConfig, TransferConfig
from moonrelay.connector import DiffusionConnector, PayloadClaim, Publication, PublicationState
from moonrelay.errors import (
    Aborted,
    Cancelled,
    CapacityError,
    CheckpointMismatch,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    IntegrityError,
    LeaseExpired,
    LeaseHeld,
    LeaseLost,
    MoonrelayError,
    NoCredit,
    PeerLost,
    PluginError,
    Preempted,
    QueueFull,
    RegistrationError,
    TransferFailed,
    TransferTimeout,
    UnsupportedTensor,
    VersionError,
    WireError,
)
from moonrelay.events import Event, hookimpl
from moonrelay.handle import StageHandle
from moonrelay.lease import DeleteOnConsume, LeaseState, LeaseStatus, Pinned, Shared, Ttl
from moonrelay.payload import ChunkPlan, StagePayload, TensorSpec
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import Pipeline, StageSpec, StageTask

__all__ = [
    "Aborted",
    "Cancelled",
    "CapacityError",
    "CheckpointMismatch",
    "ChunkPlan",
    "ClosedError",
    "ConfigError",
    "ControlConfig",
    "DeadlineExceeded",
    "DeleteOnConsume",
    "DiffusionConnector",
    "EmbeddingCache",
    "EmbeddingKey",
    "Event",
    "FeatureCache",
    "IntegrityError",
    "LeaseExpired",
    "LeaseHeld",
    "LeaseLost",
    "LeaseState",
    "LeaseStatus",
    "MoonrelayError",
    "NoCredit",
    "PayloadClaim",
    "PeerLost",
    "Pinned",
    "Pipeline",
    "PluginError",
    "Preempted",
    "Publication",
    "PublicationState",
    "QueueFull",
    "RegistrationError",
    "Shared",
    "StageHandle",
    "StagePayload",
    "StageQueue",
    "StageSpec",
    "StageTask",
    "StoreConfig",
    "TensorSpec",
    "TransferConfig",
    "TransferFailed",
    "TransferTimeout",
    "Ttl",
    "UnsupportedTensor",
    "VersionError",
    "WireError",
    "hookimpl",
]
