"""The trees that the host's runners hand over: in the form that can be carried, and back on a role's device.

Owns what is changed on the way, which is little: the host's own dicts become plain ones, and numpy's scalars Python's
where its own code has it so. Tensors keep shape, dtype and bits; what cannot be carried is refused by the core, by its
place.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

#: The host's configuration, of which parts may get into what it sends.
_HOSTS_DICT: Final = "LockableDict"
#: What its own code sends as JSON, with numpy's numbers as numbers.
_SAID: Final = frozenset({"latent_shape", "image_info"})


def carriable(value: Any) -> Any:
    """Return a tree as it can be carried; its tensors are the very same objects.

    Changed are the host's own dicts, and numpy's scalars where the host's own code would send them as JSON: in the
    shape beside the tensors and in what it says of images. Anything else stays, so that the core refuses it by its
    place where it would arrive as something else.

    Args:
        value: What a runner sends.
    """
    return _carriable(value, frozenset())


def plain(value: Any) -> Any:
    """Return a tree with plain containers and values, whatever subclasses of those it is made of."""
    if isinstance(value, Mapping):
        return {plain(name): plain(part) for name, part in value.items()}
    if isinstance(value, tuple) and not _is_size(value):
        return tuple(plain(part) for part in value)
    if isinstance(value, list):
        return [plain(part) for part in value]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value


def on_device(value: Any, device: torch.device | str) -> Any:
    """Return a tree with its tensors on a device; one that is there already stays the same object.

    A tensor in several places stays one object. Blocks: until copies to the device are done, since what they are made
    from goes back to the pool when nobody holds it.
    """
    import torch

    return _moved(value, torch.device(device), {})


def nbytes_of(value: Any) -> int:
    """Return the bytes of a tree's tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(nbytes_of(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(nbytes_of(part) for part in value)
    return 0


def _carriable(value: Any, above: frozenset[int]) -> Any:
    if id(value) in above:
        return value  # a cycle, which the core refuses
    within = above | {id(value)}
    if type(value) is dict or (isinstance(value, dict) and type(value).__name__ == _HOSTS_DICT):
        return {name: plain(part) if name in _SAID else _carriable(part, within) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_carriable(part, within) for part in value)
    return value


def _moved(value: Any, target: torch.device, moved: dict[int, torch.Tensor]) -> Any:
    # No closure that calls itself: it would be a cycle, and keep the tensors until garbage is collected.
    import torch

    if isinstance(value, torch.Tensor):
        if id(value) not in moved:
            moved[id(value)] = value.to(target)
        return moved[id(value)]
    if isinstance(value, dict):
        return {name: _moved(part, target, moved) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(part, target, moved) for part in value)
    return value


def _is_size(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Size)
