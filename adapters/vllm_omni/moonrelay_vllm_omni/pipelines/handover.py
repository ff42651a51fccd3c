"""What the host asks the next stage for: always a dict, since for a string prompt it does not look for the payload."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def next_prompt(
    _source_outputs: Sequence[object],
    prompt: object,
    _requires_multimodal_data: bool = False,
) -> dict[str, Any] | None:
    """Return the user's prompt as a dict of its own, for the host's orchestrator.

    Args:
        prompt: What the user asked for: text, a dict, or a list of one of them.

    Returns:
        The prompt; ``None``, the host's word for a request that fails here, where it is of another kind.
    """
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        own = dict(prompt)
        given = own.get("additional_information")
        if isinstance(given, Mapping):
            own["additional_information"] = dict(given)  # the stage adds to it
        return own
    logger.error("a prompt of type %s cannot be handed to the next stage; give text or a dict", type(prompt).__name__)
    return None
