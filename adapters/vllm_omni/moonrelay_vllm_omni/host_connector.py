"""The host's own class: `MoonrelayConnector`, an ``OmniConnectorBase`` over `StageConnector`.

Owns nothing but the host's signatures. The class is made on the first call, since its base is the host's.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from moonrelay_vllm_omni.config import stage_of
from moonrelay_vllm_omni.connector import StageConnector


@cache
def connector_class() -> type[Any]:
    """Return `MoonrelayConnector`; the same class every time. Imports the host's connector package."""
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase

    class MoonrelayConnector(OmniConnectorBase):  # type: ignore[misc]
        """Moves stage payloads by Moonrelay; see `StageConnector` for what each method promises.

        Args:
            config: The connector's ``extra``.

        Raises:
            ConfigError: A setting is wrong or unknown.
        """

        #: Flat uint8 tensors and bytes go as they are, never through the host's serializer.
        supports_raw_data = True

        def __init__(self, config: dict[str, Any]) -> None:
            self.config = config
            self.stage_id: int = stage_of(config.get("stage_id"))
            self.stages = StageConnector(config)

        def put(
            self, from_stage: str, to_stage: str, put_key: str, data: Any
        ) -> tuple[bool, int, dict[str, Any] | None]:
            return self.stages.put(from_stage, to_stage, put_key, data)

        def get(
            self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
        ) -> tuple[Any, int] | None:
            return self.stages.get(from_stage, to_stage, get_key, metadata)

        def get_with_deadline(
            self,
            from_stage: str,
            to_stage: str,
            get_key: str,
            metadata: dict[str, Any] | None = None,
            *,
            deadline: float,
        ) -> tuple[Any, int] | None:
            return self.stages.get_with_deadline(from_stage, to_stage, get_key, metadata, deadline=deadline)

        def abandon_get(self, get_key: str) -> None:
            self.stages.abandon_get(get_key)

        def reap_consumed(self) -> None:
            self.stages.reap_consumed()

        def cleanup(
            self, request_id: str, from_stage: str | None = None, to_stage: str | None = None, **kwargs: Any
        ) -> None:
            self.stages.cleanup(request_id, from_stage, to_stage, **kwargs)

        def health(self) -> dict[str, Any]:
            return self.stages.health()

        def close(self) -> None:
            stages = getattr(self, "stages", None)  # there is none where the constructor has failed
            if stages is not None:
                stages.close()

        def __del__(self) -> None:
            # Instead of the base's, which closes in whatever thread collects: one of ours, say, with its locks held.
            stages = getattr(self, "stages", None)
            if stages is not None:
                stages.close_soon()

    return MoonrelayConnector
