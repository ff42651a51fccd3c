"""A CPU as a platform of vLLM-Omni: vLLM's own one, with what the diffusion engine asks for besides."""

from __future__ import annotations

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from cpu_platform import counts

counts.register()

#: Told to the host, which sizes nothing by it on this path.
_FREE_BYTES = 8 << 30
_TOTAL_BYTES = 16 << 30


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Every device number is the one CPU; streams and memory statistics are without meaning here."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        return "cpu_platform.attention.CpuSdpaBackend"

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 8

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "cpu"

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def current_stream(cls) -> None:
        return None

    @classmethod
    def empty_cache(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        return _FREE_BYTES

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        return _FREE_BYTES, _TOTAL_BYTES

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return _TOTAL_BYTES

    @classmethod
    def reset_peak_memory_stats(cls, *_args: object, **_more: object) -> None:
        return None

    @classmethod
    def max_memory_reserved(cls, *_args: object, **_more: object) -> int:
        return 0

    @classmethod
    def max_memory_allocated(cls, *_args: object, **_more: object) -> int:
        return 0

    @classmethod
    def memory_allocated(cls, *_args: object, **_more: object) -> int:
        return 0
