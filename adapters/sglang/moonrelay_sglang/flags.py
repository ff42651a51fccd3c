"""The host's flags that choose us: values that they take more of where our hooks are in place.

Owns the widening alone. Where a hook of ours could not be applied the values are not offered, so that asking for them
ends the command with the reason instead of running on the host's own transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from moonrelay.errors import PluginError
from moonrelay_sglang.config import BACKEND, OUR_POLICIES

logger = logging.getLogger(__name__)

_MORE: Final = {
    "--disagg-transfer-backend": (BACKEND,),
    "--disagg-dispatch-policy": OUR_POLICIES,
}


def around_add_cli_args(original: Callable[..., None], cls: type, parser: Any) -> None:
    """Offer our backend and policies; on ``DisaggServerArgsMixin.add_disagg_cli_args``."""
    original(cls, parser)
    from moonrelay_sglang import plugin

    try:
        plugin.verify()
    except PluginError as exc:
        logger.error("%s is not offered: %s", BACKEND, exc)  # noqa: TRY400  the reason is the message
        return
    for flag, values in _MORE.items():
        _widen(parser, flag, values)


def _widen(parser: Any, flag: str, values: tuple[str, ...]) -> None:
    action = parser._option_string_actions.get(flag)  # noqa: SLF001  argparse has no other way to an option
    if action is None or action.choices is None:
        logger.error("this host's %s takes no fixed values, so %s cannot be added", flag, ", ".join(values))
        return
    action.choices = [*action.choices, *(value for value in values if value not in action.choices)]
