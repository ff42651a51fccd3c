"""What vLLM-Omni needs to run its diffusion stages on a CPU, which its wheel does not bring. For tests only.

Put into an environment by ``python -m cpu_platform.install`` (see there); then every Python process of that
environment finds it, the host's spawned ones too. Importing this package imports nothing.
"""

from __future__ import annotations

from importlib.util import find_spec


def activate() -> str | None:
    """Return the platform's class, for the host's ``vllm_omni.platform_plugins``; ``None`` where a GPU is there."""
    if find_spec("torch") is None:
        return None
    import torch

    return None if torch.cuda.is_available() else "cpu_platform.platform.CpuOmniPlatform"
