"""Lets torchvision of PyPI be imported beside a torch without CUDA, which its binary part cannot be loaded with.

vLLM imports torchvision for models that no test of ours runs. It wants two operators of that binary part to be there;
they are defined, and never called. Imported at the start of every Python process of the environment, so it is light.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: What was defined is undefined when its library is collected.
_KEPT: list[object] = []


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; sees torchvision being looked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            define_operators()
        return None


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
