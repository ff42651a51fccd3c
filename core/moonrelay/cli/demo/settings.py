"""What the demo was asked to do: validated once, before anything is started."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonrelay.cli.embeddings import cache_bytes
from moonrelay.config import require_one_of, require_positive
from moonrelay.errors import ConfigError

STAGES: Final = ("encode", "denoise", "decode")
KILLS: Final = ("none", *STAGES)
MODES: Final = ("auto", "p2p", "store")

#: A killed worker's job is given to another after this long, in seconds; its claim on the input ends after as long.
LEASE_S: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of one run.

    Attributes:
        requests: Videos to make.
        encode_workers: Processes of the encode stage.
        denoise_workers: Processes of the denoise stage.
        decode_workers: Processes of the decode stage.
        transfer_mode: ``auto``, ``p2p`` or ``store``.
        engine: Direct engine.
        store: Relay's URL; ``local`` is the embedded one in the run's own folder; ``None`` starts a Mooncake store.
        kill: Stage of which one worker is killed in the middle of a job, or ``none``.
        model: Folder or hub id; ``None`` builds a tiny random model.
        device: Where the model lives.
        dtype: Type of the weights; ``None`` leaves it to the host.
        size: Height and width in pixels; ``None`` is small, and fit for the model's family.
        frames: Frames of a video; ``None`` likewise.
        steps: Denoising steps.
        preempt: The last request is interactive, comes when the batch ones fill the denoise workers, and overtakes one.
        checkpoint_every: A denoising job's state is saved after every so many steps; 0 for never.
        output: Folder for what the run leaves.
        seed: Seed of the first request; each further one has the next.
        threads: Threads of one torch operation, in the stages and in the undivided pipeline.
        timeout_s: After this long the run is given up.
        embedding_cache: Bound of the workers' cache of embeddings, or ``off``.

    Raises:
        ConfigError: Naming the field, the value and the remedy.
    """

    requests: int = 8
    encode_workers: int = 1
    denoise_workers: int = 2
    decode_workers: int = 1
    transfer_mode: str = "auto"
    engine: str = "mooncake"
    store: str | None = None
    kill: str = "none"
    model: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    size: int | None = None
    frames: int | None = None
    steps: int = 20
    preempt: bool = False
    checkpoint_every: int = 5
    output: Path = Path("out/demo")
    seed: int = 0
    threads: int = 1
    timeout_s: float = 900.0
    embedding_cache: str = "64MiB"

    def __post_init__(self) -> None:
        require_positive(
            self, "requests", "encode_workers", "denoise_workers", "decode_workers", "steps", "threads", "timeout_s"
        )
        require_one_of(self, "transfer_mode", MODES)
        require_one_of(self, "kill", KILLS)
        for name in ("size", "frames"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        for name in ("seed", "checkpoint_every"):
            if getattr(self, name) < 0:
                message = f"{name}={getattr(self, name)!r} must not be negative"
                raise ConfigError(message, field=name)
        if self.preempt:
            self._check_preemption()
        cache_bytes(self.embedding_cache)  # refuses what is no size
        if self.engine == "memory":
            message = "engine='memory' serves one process only; use mooncake or shm"
            raise ConfigError(message, field="engine")
        if self.store is not None and self.store.startswith("memory:"):
            message = f"store={self.store!r} serves one process only; use local or mooncake://host:port"
            raise ConfigError(message, field="store")
        if self.output.exists() and not self.output.is_dir():
            message = f"output={str(self.output)!r} is no folder; name a folder"
            raise ConfigError(message, field="output")

    def _check_preemption(self) -> None:
        for field, wrong, needed in (
            ("checkpoint_every", self.checkpoint_every < 1, "above 0: a job is left where its state is saved"),
            ("steps", self.steps < 8, "8 or more: a job is left in its middle"),
            ("requests", self.requests <= self.denoise_workers, "above denoise_workers, which batch requests fill"),
            ("kill", self.kill != "none", "none: one fault at a time"),
        ):
            if wrong:
                message = f"{field}={getattr(self, field)!r} with preempt must be {needed}"
                raise ConfigError(message, field=field)

    @property
    def starts_store(self) -> bool:
        """Whether the run starts a Mooncake store of its own."""
        return self.store is None and self.transfer_mode != "p2p"

    def workers(self, stage: str) -> int:
        """Return how many workers a stage has."""
        return {"encode": self.encode_workers, "denoise": self.denoise_workers, "decode": self.decode_workers}[stage]

    def as_dict(self) -> dict[str, str | int | float | None]:
        """Return the settings as plain values, for the summary."""
        return {**dataclasses.asdict(self), "output": str(self.output)}
