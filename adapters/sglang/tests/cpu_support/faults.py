"""Faults that a test asks one role's process for, by MOONRELAY_TEST_FAULT in its environment; else nothing.

An entry point of ``sglang.multimodal_gen.plugins``, like the cures.
"""

from __future__ import annotations

import os
from typing import Any

#: The name of a fault, and after a colon how many requests it hits.
VARIABLE = "MOONRELAY_TEST_FAULT"
_MIXIN = "sglang.multimodal_gen.runtime.disaggregation.scheduler_mixin"


def register() -> None:
    name, _, times = os.environ.get(VARIABLE, "").partition(":")
    if not name:
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    fault = {"staging": _raises_while_staging}[name]
    HookRegistry.register(f"{_MIXIN}.extract_transfer_fields", fault(int(times or 1)), HookType.AROUND)


def _raises_while_staging(times: int) -> Any:
    """After the work is done and before it goes out, the fields cannot be made."""
    left = [times]

    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        if left[0]:
            left[0] -= 1
            message = "a fault that the test asked for"
            raise RuntimeError(message)
        return original(*args, **kwargs)

    return hook
