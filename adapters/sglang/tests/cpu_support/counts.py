"""Counts what a role's text encoding does, for a test that says where to: one word and a line's end for each call.

An entry point of ``sglang.multimodal_gen.plugins``, like the cures.
"""

from __future__ import annotations

import os
from typing import Any

#: Path of the file.
VARIABLE = "MOONRELAY_TEST_COUNTS"
_STAGE = "sglang.multimodal_gen.runtime.pipelines_core.stages.text_encoding.TextEncodingStage"
#: A prompt is given to the first; the host's own cache may keep it from the second, which computes.
COUNTED = {"encode_text": "encode", "_forward_text_encoder": "forward"}


def register() -> None:
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for method, word in COUNTED.items():
        HookRegistry.register(f"{_STAGE}.{method}", _counting(path, word), HookType.AROUND)


def _counting(path: str, word: str) -> Any:
    def hook(original: Any, *args: Any, **kwargs: Any) -> Any:
        with open(path, "a", encoding="utf-8") as counts:
            counts.write(f"{word}\n")
        return original(*args, **kwargs)

    return hook
