"""Tiny random Wan2.1 models, in the folder layout that LightX2V loads.

`build` makes it in a process of the host's, which knows the names of the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The denoiser's ``config.json``.
DENOISER: dict[str, Any] = {
    "dim": 48,
    "num_heads": 4,
    "num_layers": 2,
    "ffn_dim": 96,
    "freq_dim": 32,
    "in_dim": 16,
    "out_dim": 16,
    "text_len": 32,
    "eps": 1e-6,
    "model_type": "t2v",
}
#: All words that the tokenizer tells apart.
WORDS = ("a", "cat", "dog", "runs", "on", "the", "moon", "sea", "of", "two", "red", "blue", "small", "big", "fights")
_TIMEOUT_S = 300.0
_SPREAD = 0.05


#: Of the denoiser for images to videos: beside the latents come those of the image, and four channels of a mask.
IMAGE_TO_VIDEO: dict[str, Any] = {**DENOISER, "in_dim": 36, "model_type": "i2v"}
#: What the JSON of every role says for that model: the image's embedding, of a network that cannot be made small, is
#: left out, as Wan2.2 does.
WITHOUT_IMAGE_ENCODER: dict[str, Any] = {"use_image_encoder": False}


def build(folder: Path, environment: Mapping[str, str], task: str = "t2v") -> Path:
    """Build a model; return its folder.

    Args:
        folder: Where to.
        environment: Variables of a process that runs the host; see `lightx2v_cpu.install.place`.
        task: ``t2v`` or ``i2v``; for the latter the roles need `WITHOUT_IMAGE_ENCODER`.
    """
    command = [sys.executable, __file__, str(folder), task]
    made = subprocess.run(
        command, env={**os.environ, **environment}, timeout=_TIMEOUT_S, check=False, capture_output=True, text=True
    )
    if made.returncode != 0:
        message = f"no model: {made.stderr[-2000:]}"
        raise RuntimeError(message)
    return folder


def image(path: Path) -> Path:
    """Write an image to start a video from; return its path."""
    from PIL import Image

    Image.radial_gradient("L").resize((80, 64)).convert("RGB").save(path)
    return path


def _write(folder: Path, sizes: Mapping[str, Any]) -> None:
    import lightx2v  # noqa: F401  # makes the platform known
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    save_file(_denoiser(sizes), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps(sizes))
    torch.save(_text_encoder(), folder / "models_t5_umt5-xxl-enc-bf16.pth")
    torch.save(_vae(), folder / "Wan2.1_VAE.pth")
    _tokenizer().save_pretrained(folder / "google" / "umt5-xxl")


def _denoiser(sizes: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    from lightx2v_cpu.platform import TEXT_ENCODER

    made: dict[str, Any] = {}

    def noise(name: str, *shape: int) -> None:
        made[name] = (torch.randn(*shape) * _SPREAD).to(torch.bfloat16)

    def linear(name: str, outputs: int, inputs: int) -> None:
        noise(f"{name}.weight", outputs, inputs)
        noise(f"{name}.bias", outputs)

    dim, out = sizes["dim"], sizes["out_dim"]
    ones = torch.ones(dim, dtype=torch.bfloat16)
    noise("patch_embedding.weight", dim, sizes["in_dim"], 1, 2, 2)
    noise("patch_embedding.bias", dim)
    linear("text_embedding.0", dim, TEXT_ENCODER["dim"])
    linear("text_embedding.2", dim, dim)
    linear("time_embedding.0", dim, sizes["freq_dim"])
    linear("time_embedding.2", dim, dim)
    linear("time_projection.1", 6 * dim, dim)
    for number in range(sizes["num_layers"]):
        block = f"blocks.{number}"
        noise(f"{block}.modulation", 1, 6, dim)
        for attention in ("self_attn", "cross_attn"):
            for part in "qkvo":
                linear(f"{block}.{attention}.{part}", dim, dim)
            for part in "qk":
                made[f"{block}.{attention}.norm_{part}.weight"] = ones.clone()
        made[f"{block}.norm3.weight"] = ones.clone()
        noise(f"{block}.norm3.bias", dim)
        linear(f"{block}.ffn.0", sizes["ffn_dim"], dim)
        linear(f"{block}.ffn.2", dim, sizes["ffn_dim"])
    noise("head.modulation", 1, 2, dim)
    linear("head.head", 4 * out, dim)
    return made


def _text_encoder() -> dict[str, Any]:
    import torch
    from lightx2v.models.input_encoders.hf.wan.t5 import model

    empty = model.umt5_xxl(encoder_only=True, dtype=torch.bfloat16, device="cpu")
    return {
        name: (torch.randn(weight.shape) * _SPREAD + ("norm" in name)).to(torch.bfloat16)
        for name, weight in empty.state_dict().items()
    }


def _vae() -> dict[str, Any]:
    from lightx2v.models.video_encoders.hf.wan import vae
    from lightx2v_cpu.platform import VAE

    fixed: dict[str, Any] = {
        "z_dim": 16,
        "dim_mult": [1, 2, 4, 4],
        "attn_scales": [],
        "temperal_downsample": [False, True, True],
        "dropout": 0.0,
        "pruning_rate": 0.0,
    }
    weights: dict[str, Any] = vae.WanVAE_(**VAE, **fixed).state_dict()
    return weights


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    known = {word: number for number, word in enumerate([*marks.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token=marks["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)


if __name__ == "__main__":
    _write(Path(sys.argv[1]), IMAGE_TO_VIDEO if sys.argv[2] == "i2v" else DENOISER)
