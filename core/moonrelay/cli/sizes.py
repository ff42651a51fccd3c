"""Sizes in bytes as people write and read them. No I/O."""

from __future__ import annotations

import re

from moonrelay.errors import ConfigError

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_SIZE = re.compile(r"(\d+)\s*([a-zA-Z]*)")


def parse_size(text: str, field: str) -> int:
    """Return the bytes of a size such as ``64KiB`` or ``1048576``.

    Args:
        text: The size.
        field: What it is for; begins the message.

    Raises:
        ConfigError: It is none, or 0.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match is not None else None
    if match is None or factor is None or int(match[1]) < 1:
        message = f"{field}: {text!r} is no size; write bytes, or KiB, MiB, GiB, e.g. 64KiB"
        raise ConfigError(message, field=field)
    return int(match[1]) * factor


def say_size(nbytes: int) -> str:
    """Return a size as people write it."""
    for name, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {name}"
    return f"{nbytes} B"
