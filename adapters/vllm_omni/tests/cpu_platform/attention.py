"""torch's attention for the CPU platform: the host's dispatch by platform knows only those that it ships."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuSdpaImpl(SDPAImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        return self._forward_impl(query, key, value, attn_metadata, mask_mode="broadcast_k")


class CpuSdpaBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[CpuSdpaImpl]:
        return CpuSdpaImpl
