"""Tiny models, built about once per run, and a process that computes the same bits every time."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonrelay_diffusers import GenerationRequest, tiny
from moonrelay_diffusers.frames import frames_digest
from moonrelay_diffusers.numerics import deterministic_setup
from moonrelay_diffusers.reference import Reference

#: Every kind of model that the adapter covers, by a short name.
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "wan2.1": lambda folder: tiny.build_wan(folder, 3),
    "wan2.2-a14b": lambda folder: tiny.build_wan(folder, 4, variant="wan2.2-a14b"),
    "wan2.2-ti2v": lambda folder: tiny.build_wan(folder, 5, variant="wan2.2-ti2v"),
    "qwen_image": lambda folder: tiny.build_qwen_image(folder, 6),
}


def _small_request(kind: str, **changes: object) -> GenerationRequest:
    """Return a request that takes a fraction of a second; videos have 5 latent frames."""
    side = {"wan2.2-ti2v": 64, "qwen_image": 64}.get(kind, 32)
    request = GenerationRequest(
        prompt="A red fox in the snow",
        negative_prompt="blurred",
        seed=11,
        height=side,
        width=side + 32,
        num_frames=1 if kind == "qwen_image" else 17,
        num_inference_steps=4,
        max_sequence_length=64,
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


class Models:
    """Builds each model, and loads each reference, the first time that it is asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._references: dict[str, Reference] = {}
        self._digests: dict[str, str] = {}

    def request(self, kind: str, **changes: object) -> GenerationRequest:
        return _small_request(kind, **changes)

    def build(self, kind: str, folder: Path) -> Path:
        return BUILDERS[kind](folder)

    def folder(self, kind: str) -> str:
        target = self._root / kind
        if not target.exists():
            made = self._root / f"{kind}-{os.getpid()}"
            BUILDERS[kind](made)
            try:
                made.rename(target)
            except OSError:  # another worker of pytest-xdist was faster; what it built is the same
                shutil.rmtree(made)
        return str(target)

    def reference(self, kind: str) -> Reference:
        if kind not in self._references:
            self._references[kind] = Reference(self.folder(kind))
        return self._references[kind]

    def digest(self, kind: str) -> str:
        """Return the digest of the pixels that the undivided pipeline makes of the unchanged request."""
        if kind not in self._digests:
            self._digests[kind] = frames_digest(self.reference(kind).run(self.request(kind)))
        return self._digests[kind]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    own = tmp_path_factory.getbasetemp()
    # The workers of a run of pytest-xdist share them.
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "tiny"
    root.mkdir(exist_ok=True)
    return Models(root)


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Set this process up as a worker is, and give torch's settings back afterwards."""
    import torch
    from torch.utils import deterministic

    threads, fill = torch.get_num_threads(), deterministic.fill_uninitialized_memory
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    deterministic_setup(1)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    deterministic.fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
