"""A text encoder with random weights, for ``moonrelay bench cache``: what a hit is held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def random_t5(width: int, depth: int, inner: int, tokens: int) -> tuple[Callable[[], object], int]:
    """Make a T5 v1.1 encoder of a stated size.

    Args:
        width: Of its states; heads are 64 wide.
        depth: Layers.
        inner: Width of the feed-forward part.
        tokens: How many it encodes.

    Returns:
        What encodes once, on the CPU in float32, and the number of parameters.

    Blocks: while its weights are drawn.
    """
    import torch
    from transformers import T5Config, T5EncoderModel

    config: Any = T5Config(
        d_model=width, d_kv=64, d_ff=inner, num_layers=depth, num_heads=width // 64, feed_forward_proj="gated-gelu"
    )
    torch.manual_seed(0)
    model: Any = T5EncoderModel(config).eval()
    ids = torch.randint(0, 30_000, (1, tokens))

    def encode() -> object:
        with torch.inference_mode():
            return model(input_ids=ids).last_hidden_state

    return encode, sum(part.numel() for part in model.parameters())
