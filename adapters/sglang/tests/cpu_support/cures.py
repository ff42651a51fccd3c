"""Hooks that let stock SGLang run its diffusion pipelines on a CPU: what its wheel calls there is not on PyPI.

An entry point of ``sglang.multimodal_gen.plugins``; it only registers, the host applies. Nothing of the transfer
between roles is touched.
"""

from __future__ import annotations

from typing import Any

_RUNTIME = "sglang.multimodal_gen.runtime"
_SCALE_SHIFT = "sglang.kernels.ops.diffusion.modulate.scale_shift_triton"


def register() -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    # Fused kernels that only `sglang-kernel` for CPUs has.
    for name in ("_ScaleResidualNormScaleShift", "_NormScaleShift"):
        HookRegistry.register(f"{_RUNTIME}.layers.layernorm.{name}.forward_cpu", _native, HookType.REPLACE)
    for name in ("_fuse_scale_shift_kernel_cpu", "fuse_scale_shift_kernel"):
        HookRegistry.register(f"{_SCALE_SHIFT}.{name}", _scale_and_shift, HookType.REPLACE)
    mixin = f"{_RUNTIME}.disaggregation.scheduler_mixin.SchedulerDisaggMixin"
    HookRegistry.register(f"{mixin}._init_disagg_state", _with_streams_of_a_device, HookType.AROUND)


def _native(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.forward_native(*args, **kwargs)


def _scale_and_shift(
    x: Any, scale: Any, shift: Any, scale_constant: float = 1.0, block_l: int = 128, block_c: int = 128
) -> Any:
    from sglang.kernels.ops.diffusion.modulate.scale_shift_triton import expand_scale_shift_cpu_param as expanded

    return (x * (scale_constant + expanded(scale, x)) + expanded(shift, x)).to(x.dtype)


def _with_streams_of_a_device(original: Any, *args: Any, **kwargs: Any) -> Any:
    """The roles ask for a stream of a device, which torch.cpu's class does not know."""
    import torch

    if torch.get_device_module() is torch.cpu:
        base = torch.cpu.Stream

        class Stream(base):  # type: ignore[misc, valid-type]
            def __init__(self, device: object = None, priority: int = -1) -> None:
                super().__init__(priority)

        torch.cpu.Stream = Stream  # type: ignore[misc]
    return original(*args, **kwargs)
