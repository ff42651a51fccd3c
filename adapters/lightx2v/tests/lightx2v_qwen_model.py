"""A tiny random Qwen-Image, in the folder layout that LightX2V loads, and what its roles' JSON has to say.

`build` makes it in a process of the host's. With `Cluster` and `OneShot`: ``model_cls="qwen_image", task="t2i",
config={"all": CONFIG}``, and ``path="/v1/tasks/image/"`` for posts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEXT_DIM = 64
_TEMPLATE = "<|im_start|>system\nDraw:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CONFIG: dict[str, Any] = {
    "text_encoder_type": "baseline",
    "text_encoder_dim": _TEXT_DIM,
    "text_len": 512,
    "aspect_ratio": "1:1",
    "vae_z_dim": 16,
    "vae_stride": [1, 8, 8],
    "target_video_length": 1,
    # The smallest that the host makes of a request for less.
    "target_height": 256,
    "target_width": 256,
    "prompt_template_encode": _TEMPLATE,
    "prompt_template_encode_start_idx": 8,
    "attn_type": "torch_sdpa",
    "sample_guide_scale": 4.0,
}
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TIMEOUT_S = 300.0


def build(folder: Path, environment: Mapping[str, str]) -> Path:
    """Build the text-to-image model; return its folder.

    Args:
        folder: Where to.
        environment: Variables of a process that runs the host; see `lightx2v_cpu.install.place`.
    """
    command = [sys.executable, __file__, str(folder)]
    made = subprocess.run(
        command, env={**os.environ, **environment}, timeout=_TIMEOUT_S, check=False, capture_output=True, text=True
    )
    if made.returncode != 0:
        message = f"no model: {made.stderr[-2000:]}"
        raise RuntimeError(message)
    return folder


def _write(folder: Path) -> None:
    import lightx2v  # noqa: F401  # makes torchvision's operators known
    import torch
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(0)
    vocabulary = _write_tokenizer(folder / "tokenizer")
    AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).save_pretrained(folder / "vae")
    text = {
        "vocab_size": len(vocabulary),
        "hidden_size": _TEXT_DIM,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3], "rope_type": "default"},
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": _TEXT_DIM,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder / "text_encoder")
    QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=2,
        attention_head_dim=128,  # the host has it in its code, by the axes of its rotary embedding
        num_attention_heads=1,
        joint_attention_dim=_TEXT_DIM,
        axes_dims_rope=(16, 56, 56),
    ).to(torch.bfloat16).save_pretrained(folder / "transformer")
    FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    ).save_pretrained(folder / "scheduler")


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """One token for each byte, as GPT-2 spells bytes, and the special ones."""
    from transformers import Qwen2Tokenizer
    from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode

    vocabulary = {word: number for number, word in enumerate([*bytes_to_unicode().values(), *_SPECIAL])}
    folder.mkdir(parents=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    tokenizer.save_pretrained(folder)
    return vocabulary


if __name__ == "__main__":
    _write(Path(sys.argv[1]))
