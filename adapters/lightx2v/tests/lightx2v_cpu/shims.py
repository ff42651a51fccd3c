"""What the host calls and a torch without an accelerator has not, or has not beside PyPI's torchvision."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

#: What was defined is undefined when its library is collected.
_KEPT: list[object] = []
_MEMORY = 64 << 30


def apply() -> None:
    """Put all of it in place."""
    define_operators()
    stand_in_for_torchaudio()
    extend_torch()


def define_operators() -> None:
    """Define the operators that torchvision's binary part would bring, were this the torch it was built with."""
    torch: Any = importlib.import_module("torch")
    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


def stand_in_for_torchaudio() -> None:
    """The host imports it at the top of modules that no test of ours runs."""
    if PathFinder.find_spec("torchaudio") is not None:
        return
    parts = {}
    for name in ("torchaudio", "torchaudio.functional", "torchaudio.transforms"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = parts[name.rpartition(".")[2]] = module
    for name in ("functional", "transforms"):
        setattr(parts["torchaudio"], name, parts[name])


def extend_torch() -> None:
    """The host calls ``torch.<device>`` as if it were ``torch.cuda``, and ``torch.cuda`` on every device."""
    torch: Any = importlib.import_module("torch")

    def nothing(*_args: Any, **_more: Any) -> int:
        return 0

    missing: dict[str, Any] = {
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "mem_get_info": lambda *_args: (_MEMORY, _MEMORY),
        **dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated"), nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "empty_cache"), nothing),
    }
    for name, function in missing.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, function)
    allocate = torch.empty

    @functools.wraps(allocate)
    def empty(*args: Any, pin_memory: bool = False, **more: Any) -> Any:  # pinning needs an accelerator
        return allocate(*args, **more)

    torch.empty = empty
    torch.cuda.synchronize = nothing
