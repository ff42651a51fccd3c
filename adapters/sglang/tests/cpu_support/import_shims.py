"""Lets SGLang be imported beside a torch without CUDA: operators for torchvision, and a triton that compiles nothing.

PyPI's torchvision has a binary part that such a torch cannot load, and SGLang imports torchvision and triton at the top
of modules that no test of ours runs. Imported at the start of every Python process of the environment, so it is light:
both are made only when they are first looked for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

#: What was defined is undefined when its library is collected.
_KEPT: list[object] = []
_STUBS = "_moonrelay_test_sglang_stubs"


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; sees torchvision being looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            define_operators()
        return None


class _InsteadOfTriton(MetaPathFinder, Loader):
    """Finds triton and all its modules, as the stand-ins that SGLang ships for systems without it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "triton" or stubs() is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: ModuleType = stubs()._MockModule(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        found = stubs()
        known = {
            "triton": {
                "__version__": "3.0.0",
                "cdiv": found._cdiv,
                "next_power_of_2": found._next_power_of_2,
                "Config": found._Config,
            },
            "triton.language": {"constexpr": _Constexpr},
            # Named in `except` clauses.
            "triton.runtime.autotuner": {
                name: type(name, (Exception,), {}) for name in ("OutOfResources", "PTXASError")
            },
            "triton.runtime.cache": {"triton_key": found._triton_key},
            "triton.compiler.compiler": {"triton_key": found._triton_key},
        }
        for name, value in known.get(module.__name__, {}).items():
            setattr(module, name, value)


class _Constexpr:
    """Stands for ``tl.constexpr``, which wraps values and annotates parameters."""

    def __init__(self, value: object = None) -> None:
        self.value = value


def stubs() -> ModuleType | None:
    """Return SGLang's module of stand-ins; by its file, since a process may want triton before any of SGLang."""
    if _STUBS not in sys.modules:
        host = PathFinder.find_spec("sglang")
        if host is None or host.origin is None:
            return None
        spec = importlib.util.spec_from_file_location(_STUBS, Path(host.origin).with_name("_platform_stubs.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[_STUBS] = module
        spec.loader.exec_module(module)
    return sys.modules[_STUBS]


def define_operators() -> None:
    """Define the operators where the torchvision that is installed cannot."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    try:
        fits = torch.version.cuda is not None or version("torchvision").endswith("+cpu")
    except PackageNotFoundError:
        return
    if fits or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
if PathFinder.find_spec("triton") is None:
    sys.meta_path.insert(0, _InsteadOfTriton())
