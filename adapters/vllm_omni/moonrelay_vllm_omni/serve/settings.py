"""What the front is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonrelay.config import require_positive
from moonrelay.errors import ConfigError
from moonrelay_vllm_omni.serve.schema import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of the front.

    Attributes:
        model: Name or folder of the model, for the host.
        deploy_config: The deploy YAML, for the host.
        served_model_name: What clients call it; the model's own name where empty.
        host: Address to listen on.
        port: Port to listen on; 0 is any free one.
        max_running: Requests in the engine at once: as many as there are stages keeps each of them at work.
        max_waiting: Requests that may wait before these; more are refused.
        request_timeout_s: How long a request may take, the wait in the queue and for a starting engine included.
        restarts: How many engines in a row may fail or die soon before the server ends.
        drain_s: How long requests may go on once the server is to end.
        keep_videos_s: How long a finished video can be fetched.
        keep_video_bytes: How much of them is kept in memory; the oldest go first.
        limits: Of requests.
    """

    model: str
    deploy_config: str
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    max_running: int = 3
    max_waiting: int = 64
    request_timeout_s: float = 600.0
    restarts: int = 5
    drain_s: float = 10.0
    keep_videos_s: float = 3600.0
    keep_video_bytes: int = 1 << 30
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        require_positive(
            self,
            "max_running",
            "max_waiting",
            "request_timeout_s",
            "restarts",
            "drain_s",
            "keep_videos_s",
            "keep_video_bytes",
        )
        if not 0 <= self.port <= 65_535:
            message = f"port={self.port}: must be between 0 and 65535"
            raise ConfigError(message, field="port")

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model
