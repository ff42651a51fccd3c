"""Counts what the text encoders of the host's processes compute, for a test that says where to: a line for each call.

Called where the platform is loaded, which is in every stage.
"""

from __future__ import annotations

import os
from typing import Any

#: Path of the file.
VARIABLE = "MOONRELAY_TEST_ENCODER_CALLS"
ENCODERS = ("Qwen2_5_VLForConditionalGeneration", "UMT5EncoderModel")


def register() -> None:
    """Have calls of the encoders counted in this process, where the environment says so."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from torch.nn.modules.module import register_module_forward_pre_hook

    def count(module: Any, _given: Any) -> None:
        if type(module).__name__ in ENCODERS:
            with open(path, "a", encoding="utf-8") as calls:
                calls.write(f"{type(module).__name__}\n")

    register_module_forward_pre_hook(count)
