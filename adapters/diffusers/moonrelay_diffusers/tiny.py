"""Tiny random models, built in code: real diffusers pipelines of a few megabytes, for the demo, tests and conformance.

Owns their sizes and their weights. Nothing is downloaded; equal seeds give equal folders. What they paint is abstract,
but it depends on prompt, negative prompt, seed and every step, so that a slip anywhere shows in the pixels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from moonrelay.errors import ConfigError
from moonrelay_diffusers.families.common import quietly
from moonrelay_diffusers.request import GenerationRequest

if TYPE_CHECKING:
    import torch

    from moonrelay_diffusers.families.common import Untyped

#: Channels of a latent, as in the real models.
_CHANNELS = 16
_CHANNELS_TI2V = 48
_TEXT_DIM = 64

#: ``wan2.1``: one transformer. ``wan2.2-a14b``: two, the second taking over at low noise. ``wan2.2-ti2v``: one, a
#: timestep per token, and the residual VAE that patches pixels and has 48 channels at one sixteenth of the size.
WanVariant: TypeAlias = Literal["wan2.1", "wan2.2-a14b", "wan2.2-ti2v"]


def request(
    family: str, prompt: str, *, negative_prompt: str | None = None, seed: int = 0, steps: int = 20
) -> GenerationRequest:
    """Return a request of a size that suits the tiny models: a second or two on one core.

    Args:
        family: ``wan`` (17 frames of 96x96, 5 latent frames) or ``qwen_image`` (192x192).
        prompt: What to show.
        negative_prompt: What to avoid.
        seed: Seed of the noise.
        steps: Denoising steps.

    Raises:
        ConfigError: No such family.
    """
    sizes = {"wan": (96, 17), "qwen_image": (192, 1)}
    if family not in sizes:
        message = f"family={family!r} has no tiny model; use one of {', '.join(sizes)}"
        raise ConfigError(message, field="family")
    side, frames = sizes[family]
    return GenerationRequest(
        prompt=prompt,
        negative_prompt=negative_prompt,
        seed=seed,
        height=side,
        width=side,
        num_frames=frames,
        num_inference_steps=steps,
    )


def build_wan(folder: str | Path, seed: int = 0, *, variant: WanVariant = "wan2.1") -> Path:
    """Build a tiny Wan text-to-video model: a ``WanPipeline`` folder.

    Args:
        folder: Where it goes; made if needed.
        seed: Seed of all weights.
        variant: Which Wan it resembles.

    Returns:
        The folder.
    """
    from diffusers import UniPCMultistepScheduler
    from transformers import ByT5Tokenizer

    target = Path(folder)
    two_stage = variant == "wan2.2-a14b"
    with _private_randomness():
        models = {"vae": _wan_vae(variant), "text_encoder": _umt5(), "transformer": _wan_transformer(variant)}
        if two_stage:
            models["transformer_2"] = _wan_transformer(variant)
    for name, model in models.items():
        _fill(model, f"wan/{name}/{seed}")
        _save(model, target / name)
    ByT5Tokenizer().save_pretrained(target / "tokenizer")
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.save_pretrained(target / "scheduler")
    entries = {
        "boundary_ratio": 0.875 if two_stage else None,
        "expand_timesteps": variant == "wan2.2-ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "ByT5Tokenizer"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": ["diffusers", "WanTransformer3DModel"] if two_stage else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    _write_index(target, "WanPipeline", entries)
    return target


def _umt5() -> Untyped:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=384,
            d_model=_TEXT_DIM,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=128,
            feed_forward_proj="gated-gelu",
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def _wan_transformer(variant: WanVariant) -> Untyped:
    from diffusers import WanTransformer3DModel

    channels = _CHANNELS_TI2V if variant == "wan2.2-ti2v" else _CHANNELS
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=channels,
        out_channels=channels,
        text_dim=_TEXT_DIM,
        freq_dim=64,
        ffn_dim=256,
        num_layers=8,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=256,
    )


def _wan_vae(variant: WanVariant) -> Untyped:
    from diffusers import AutoencoderKLWan

    own: dict[str, object] = {"z_dim": _CHANNELS}
    if variant == "wan2.2-ti2v":
        own = {
            "z_dim": _CHANNELS_TI2V,
            "decoder_base_dim": 12,
            "latents_mean": [0.05 * (n % 7 - 3) for n in range(_CHANNELS_TI2V)],
            "latents_std": [0.7 + 0.05 * (n % 9) for n in range(_CHANNELS_TI2V)],
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        }
    return AutoencoderKLWan(
        base_dim=8,
        dim_mult=[1, 2, 2, 2],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, True, True],
        **own,
    )


def build_qwen_image(folder: str | Path, seed: int = 0) -> Path:
    """Build a tiny Qwen-Image model: a ``QwenImagePipeline`` folder.

    Args:
        folder: Where it goes; made if needed.
        seed: Seed of all weights.

    Returns:
        The folder.
    """
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    target = Path(folder)
    vocabulary = _byte_vocabulary()
    with _private_randomness():
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=_CHANNELS,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
        encoder = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(
                text_config={
                    "vocab_size": len(vocabulary) + len(_TEMPLATE_WORDS),
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
                },
                vision_config={
                    "depth": 1,
                    "hidden_size": 32,
                    "intermediate_size": 32,
                    "num_heads": 2,
                    "out_hidden_size": _TEXT_DIM,
                    "fullatt_block_indexes": [0],
                },
            )
        )
        transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * _CHANNELS,
            out_channels=_CHANNELS,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=_TEXT_DIM,
            axes_dims_rope=(8, 12, 12),
        )
    for name, model in {"vae": vae, "text_encoder": encoder, "transformer": transformer}.items():
        _fill(model, f"qwen_image/{name}/{seed}")
        _save(model, target / name)
    _write_qwen_tokenizer(target / "tokenizer", vocabulary)
    FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        shift=1.0,
        shift_terminal=0.02,
        use_dynamic_shifting=True,
    ).save_pretrained(target / "scheduler")
    modules = {
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }
    _write_index(target, "QwenImagePipeline", modules)
    return target


def _private_randomness() -> Untyped:
    """Return a context in which models may draw their (discarded) first weights without moving the caller's dice."""
    import torch

    return torch.random.fork_rng(devices=[])


def _fill(model: torch.nn.Module, name: str) -> None:
    """Give every parameter a value that depends on the names alone, not on how a library's version initialises."""
    import torch

    generator = torch.Generator("cpu")
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            digest = hashlib.sha256(f"{name}/{key}".encode()).digest()
            generator.manual_seed(int.from_bytes(digest[:7], "big"))
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(_scaled(key, parameter, noise))


def _scaled(key: str, parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Bring noise to a size that keeps signals alive through the layers, and pictures soft."""
    last = key.rsplit(".", 1)[-1]
    if last == "bias":
        return noise * 0.05
    if any(part in key for part in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")):
        # Sharp attention: a single letter of the prompt must not drown in the average of all tokens.
        return 3.0 + noise * 0.1
    if last == "gamma" or "norm" in key:
        return 1.0 + noise * 0.1
    if parameter.ndim < 2:
        return noise * 0.1
    if parameter.shape[-2:] == (3, 3) and "decoder" in key:
        noise = _softened(noise)
    fan_in = parameter[0].numel()
    # The last layer at half size: saturated pixels would hide differences.
    gain = 0.5 if "decoder.conv_out" in key else 1.0
    return noise * float(gain * fan_in**-0.5)


def _softened(kernels: torch.Tensor) -> torch.Tensor:
    """Turn random 3x3 kernels into mostly smooth ones of equal energy, so that a VAE paints blobs and not sand."""
    import torch

    bump = torch.tensor([1.0, 2.0, 1.0])
    window = torch.outer(bump, bump)
    smooth: torch.Tensor = kernels.mean(dim=(-2, -1), keepdim=True) * 3.0 * (window * 3.0 / window.norm())
    return smooth * 0.9 + kernels * 0.4


def _save(model: Untyped, folder: Path) -> None:
    with quietly():
        model.eval().save_pretrained(folder)


def _write_index(folder: Path, pipeline_class: str, entries: Mapping[str, object]) -> None:
    from importlib.metadata import version

    index = {"_class_name": pipeline_class, "_diffusers_version": version("diffusers"), **entries}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


#: Words of the pipeline's prompt template. One token each, as in the real tokenizer, they make the 34 tokens that the
#: pipeline drops from the front; otherwise the template's rest would come before every prompt.
_TEMPLATE_WORDS = (
    *("system", "Describe", "user"),
    *(" the", " image", " by", " detailing", " color", " shape", " size", " texture", " quantity", " text"),
    *(" spatial", " relationships", " of", " objects", " and", " background"),
)


def _byte_vocabulary() -> dict[str, int]:
    """Return a token for each byte, spelled as GPT-2's byte-level tokenizers spell them, and the special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    tokens = [spelled[byte] for byte in range(256)]
    return {token: number for number, token in enumerate([*tokens, "<|endoftext|>", "<|im_start|>", "<|im_end|>"])}


def _write_qwen_tokenizer(folder: Path, vocabulary: Mapping[str, int]) -> None:
    from transformers import AddedToken, Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer(
        vocab=dict(vocabulary),
        merges=[],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=2048,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in _TEMPLATE_WORDS])
    tokenizer.save_pretrained(folder)
