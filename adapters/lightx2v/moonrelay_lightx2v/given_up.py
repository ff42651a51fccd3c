"""Whether the client of a request has given it up: the host's server only sets an event on the task.

Owns where that event is. The host's own loop looks at it between tasks, not while a runner waits for its input.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from moonrelay_lightx2v.pairing import TASK_ID

logger = logging.getLogger(__name__)

#: Looked for, never imported: it is there where the host serves.
_MODULE: Final = "lightx2v.server.task_manager"


def watch(request: Mapping[str, Any] | None) -> Callable[[], bool] | None:
    """Return what tells whether a request was given up; ``None`` where nobody can give it up.

    Args:
        request: What the server asked of the runner; ``None`` without a server.

    Threads: any, the function that it returns too.
    """
    module = sys.modules.get(_MODULE)
    if request is None or module is None:
        return None
    try:
        task = module.task_manager.get_task(request.get(TASK_ID))
        event = None if task is None else task.stop_event
    except Exception as exc:  # noqa: BLE001 - another host than we know: its requests run to their end, as without us
        logger.warning("LightX2V's tasks cannot be looked at, a DELETE will not end one that waits: %r", exc)
        return None
    return event.is_set if isinstance(event, threading.Event) else None


__all__ = ["watch"]
