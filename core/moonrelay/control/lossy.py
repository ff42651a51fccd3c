"""Control messages lost on command: what the fault tests run the channel on.

Owns the words of ``ControlConfig.options["drop"]`` and the count of what was lost. ``"send:ack:2"`` loses the first two
acknowledgements that this side sends, ``"receive:granted"`` the first grant that it receives, ``"send:renew:all"``
every renewal. Without such words a channel has no part of this.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from moonrelay.config import unknown_key
from moonrelay.control import messages
from moonrelay.errors import ConfigError

logger = logging.getLogger(__name__)

Direction: TypeAlias = Literal["send", "receive"]
DIRECTIONS: Final = ("send", "receive")
#: Words for messages, as they stand on the wire.
MESSAGES: Final = tuple(sorted(str(kind.__struct_config__.tag) for kind in get_args(messages.Message)))
_ALL: Final = "all"


class Losses:
    """Loses messages by direction, kind and number; the channel's ``drop``.

    Args:
        words: See the module; several words of one direction and kind add up.

    Raises:
        ConfigError: A word is not known; the nearest one is suggested.

    Threads: any.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._left: dict[tuple[str, str], float] = {}
        for word in words:
            direction, message, count = _parsed(word)
            self._left[direction, message] = self._left.get((direction, message), 0) + count

    def __call__(self, direction: Direction, message: messages.Message) -> bool:
        """Return whether a message is lost, and count it."""
        key = (direction, str(type(message).__struct_config__.tag))
        with self._lock:
            left = self._left.get(key, 0)
            if left <= 0:
                return False
            self._left[key] = left - 1
        logger.debug("lost on purpose: %s %s", *key)
        return True


def losses(options: Mapping[str, Any]) -> Losses | None:
    """Return what loses a channel's messages; ``None`` where nothing is to be lost.

    Args:
        options: ``ControlConfig.options``.

    Raises:
        ConfigError: An unknown option or word.
    """
    for name in options:
        if name != "drop":
            raise ConfigError(unknown_key(name, ("drop",), "ControlConfig.options"), field=f"options.{name}")
    words = options.get("drop", ())
    if isinstance(words, str) or not isinstance(words, Sequence):
        message = f"options.drop={words!r} must be a list such as ['send:ack:2']"
        raise ConfigError(message, field="options.drop")
    return Losses([str(word) for word in words]) if words else None


def _parsed(word: str) -> tuple[str, str, float]:
    direction, _, rest = word.partition(":")
    message, _, count = rest.partition(":")
    if direction not in DIRECTIONS:
        text = f"options.drop={word!r} must begin with {' or '.join(DIRECTIONS)}, e.g. 'send:ack:2'"
        raise ConfigError(text, field="options.drop", value=word)
    if message not in MESSAGES:
        raise ConfigError(unknown_key(message, MESSAGES, "options.drop"), field="options.drop", value=word)
    if count == _ALL:
        return direction, message, float("inf")
    if not (count or "1").isdecimal():
        text = f"options.drop={word!r} must end with a number of messages, or with 'all'"
        raise ConfigError(text, field="options.drop", value=word)
    return direction, message, float(count or 1)
