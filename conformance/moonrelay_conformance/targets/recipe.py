"""How a target is made anew in another process: as text, since objects do not cross.

Owns the two ways: an installed part by its name, any other target by its class.
"""

from __future__ import annotations

import importlib
from typing import Any

from moonrelay.errors import ConfigError
from moonrelay_conformance.targets.base import Target


def recipe(target: Target) -> list[str]:
    """Return what `made_from` needs to make a target like ``target`` in another process.

    Args:
        target: An instance of a class that can be made without arguments, or one that has an attribute ``recipe``:
            ``module:function`` and its arguments, all text.

    Raises:
        ConfigError: Its class lies inside a function, where no other process can find it.
    """
    own: Any = getattr(target, "recipe", None)
    if own is not None:
        return [str(part) for part in own]
    cls = type(target)
    if "<locals>" in cls.__qualname__:
        message = f"target {cls.__qualname__} is needed in another process; define its class at the top of a module"
        raise ConfigError(message, field="target")
    return [f"{cls.__module__}:{cls.__qualname__}"]


def made_from(parts: list[str]) -> Any:
    """Make what a `recipe` says.

    Raises:
        ConfigError: The module cannot be imported, or does not have the name.
    """
    where, *arguments = parts
    module, _, names = where.partition(":")
    try:
        made: Any = importlib.import_module(module)
        for name in names.split("."):
            made = getattr(made, name)
    except (ImportError, AttributeError) as exc:
        message = f"target {where} cannot be found in another process ({exc}); put its module on PYTHONPATH"
        raise ConfigError(message, field="target") from exc
    return made(*arguments)
