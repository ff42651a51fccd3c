"""Prints what `FeatureCache` saves on the tiny Wan, and how far its approximation is off; run it with Python.

The figures of docs/caches.md. Not a test: times depend on the machine, and a deviation is neither right nor wrong.
Times are of one thread's processor, so that others on the machine do not count.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

from moonrelay import DiffusionConnector, FeatureCache
from moonrelay.cache.features import UNCONDITIONAL
from moonrelay_diffusers import load_stage, tiny
from moonrelay_diffusers.numerics import deterministic_setup

STEPS = 20
ROUNDS = 5


def timed(runner: Any, tree: Any, cache: FeatureCache | None) -> tuple[float, Any, Any]:
    used = None if cache is None else cache.run()
    began = time.thread_time()
    with used or nullcontext():
        latents = runner.run(tree, features=used)
    return time.thread_time() - began, latents, None if used is None else used.counters()


def exact(runner: Any, tree: Any, conn: DiffusionConnector) -> None:
    with FeatureCache(conn, 1 << 30) as cache:
        _, first, counted = timed(runner, tree, cache)
        projections = counted.hits + counted.misses
        without, kept = [], []
        for _ in range(ROUNDS):
            seconds, plain, _ = timed(runner, tree, None)
            without.append(seconds)
            seconds, latents, counted = timed(runner, tree, cache)
            kept.append(seconds)
            assert latents.equal(plain)
            assert first.equal(plain)
        assert counted.hits == projections
        held = cache.counters().bytes_held
    say(f"exact, tiny Wan, {STEPS} steps: {projections} projections; first request {ONCE}, later ones 0; {held} bytes")
    say(f"  request without {ms(without)}, with everything kept {ms(kept)} (median of {ROUNDS})")


def layer() -> None:
    """Time one cross-attention's keys and values in the width of Wan2.1 1.3B, with 512 tokens of text."""
    import torch
    from diffusers.models.transformers.transformer_wan import WanAttention

    attention = WanAttention(dim=1536, heads=12, dim_head=128, cross_attention_dim_head=128)
    text = torch.randn(1, 512, 1536)
    with torch.no_grad():
        tensors = [attention.norm_k(attention.to_k(text)), attention.to_v(text)]
        seconds = []
        for _ in range(ROUNDS):
            began = time.thread_time()
            attention.norm_k(attention.to_k(text))
            attention.to_v(text)
            seconds.append(time.thread_time() - began)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    say(f"one layer of Wan2.1 1.3B, float32: keys and values {ms(seconds)}, {nbytes} bytes")


def approximate(runner: Any, decode: Any, encode: Any, request: Any, conn: DiffusionConnector) -> None:
    other = "A lighthouse in the fog"
    trees = [encode.run(dataclasses.replace(request, seed=seed)) for seed in (request.seed, 9)]
    exact_ones = [decode.run(runner.run(tree), tree["params"]) for tree in trees]
    say(f"yardstick: exact frames of two seeds, PSNR {psnr8(*exact_ones):.1f} dB")
    for what, changes in (
        ("same prompt and seed", {}),
        ("other prompt, same seed", {"prompt": other}),
        ("same prompt, other seed", {"seed": 9}),
        ("other prompt and seed", {"prompt": other, "seed": 9}),
    ):
        tree = encode.run(dataclasses.replace(request, **changes))
        without, plain, _ = timed(runner, tree, None)
        with FeatureCache(conn, 1 << 30, approximate=[UNCONDITIONAL]) as cache:
            timed(runner, encode.run(request), cache)
            seconds, latents, counted = timed(runner, tree, cache)
        frames = [decode.run(each, tree["params"]) for each in (plain, latents)]
        off, largest = (latents - plain).abs().max().item(), plain.abs().max().item()
        say(
            f"approximate, {what}: {counted.reused} of {STEPS} reused, {without * 1e3:.0f} -> {seconds * 1e3:.0f} ms; "
            f"latents max abs {off:.3g} (of {largest:.3g}), PSNR {psnr(plain, latents):.1f} dB; "
            f"frames max abs {int(abs(frames[0].astype(int) - frames[1]).max())} of 255, PSNR {psnr8(*frames):.1f} dB"
        )


def psnr(one: Any, other: Any) -> float:
    """Return the ratio of the range of values to the error, in decibels."""
    error = (one - other).pow(2).mean().item()
    return math.inf if error == 0 else 10 * math.log10((one.max() - one.min()).item() ** 2 / error)


def psnr8(one: Any, other: Any) -> float:
    error = float(((one.astype(float) - other) ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


#: Eight layers, keys and values, two prompts.
ONCE = 8 * 2 * 2

if __name__ == "__main__":
    deterministic_setup(1)
    with tempfile.TemporaryDirectory() as folder, DiffusionConnector("denoise", "p2p", {"engine": "memory"}) as made:
        tiny.build_wan(folder, 3)
        asked = tiny.request("wan", "A red fox in the snow", negative_prompt="blurred, dark", steps=STEPS)
        stages: Any = {name: load_stage(folder, name) for name in ("encode", "denoise", "decode")}  # type: ignore[call-overload]
        stages["denoise"].check_features()
        exact(stages["denoise"], stages["encode"].run(asked), made)
        layer()
        approximate(stages["denoise"], stages["decode"], stages["encode"], asked, made)
