"""What a denoising run is, for its checkpoints: weights, adapters, numerics and inputs, by content.

Owns how each field of a `CheckpointIdentity` is found out in this host. Weights are known by their bytes, wherever they
came from and whatever was fused into them. What cannot be told is refused, so that no checkpoint is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moonrelay import integrity
from moonrelay.cache.checkpoint import CheckpointIdentity
from moonrelay.cache.keys import digest_of
from moonrelay.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from moonrelay_diffusers.request import StageParams
    from moonrelay_diffusers.scheduling import ScheduleHistory

Untyped = Any


class ModelIdentity:
    """The identity of a loaded denoise stage.

    Args:
        family: Name of the family.
        pipe: A pipeline that has its transformers and its scheduler.

    Threads: one at a time.
    """

    def __init__(self, family: str, pipe: Untyped) -> None:
        self._family = family
        self._pipe = pipe
        self._weights: tuple[tuple[tuple[str, int], ...], str] | None = None

    def of_run(
        self,
        request_id: str,
        history: ScheduleHistory,
        params: StageParams,
        tree: Mapping[str, object],
        latents: tuple[tuple[int, ...], torch.dtype],
        approximate: tuple[str, ...] = (),
    ) -> CheckpointIdentity:
        """Return the identity of a run whose schedule is set.

        Blocks: the first time for as long as reading all weights takes.

        Raises:
            ConfigError: Something that decides bits cannot be told; ``context['field']`` names it.
        """
        shape, dtype = latents
        return CheckpointIdentity(
            request_id=request_id,
            model=self.weights(),
            loras=self.loras(),
            scheduler=history.kind,
            scheduler_config=history.config_digest(),
            sigmas=history.sigmas_digest(),
            timesteps=history.timesteps_digest(),
            num_steps=params.num_inference_steps,
            guidance={"guidance_scale": params.guidance_scale, "guidance_scale_2": params.guidance_scale_2},
            latent_shape=shape,
            latent_dtype=str(dtype).removeprefix("torch."),
            conditioning=digest_of({name: value for name, value in tree.items() if name != "params"}),
            numerics=self.numerics(),
            seed=params.seed,
            approximate=approximate,
        )

    def weights(self) -> str:
        """Return ``family@digest`` of all parameters and buffers, and of the settings they are used with."""
        import torch

        tensors = list(self._tensors())
        # Loading an adapter, or other weights, brings other tensors; changes in place count up their versions.
        seen = tuple((f"{name}:{id(tensor)}", tensor._version) for name, tensor in tensors)  # noqa: SLF001
        if self._weights is None or self._weights[0] != seen:
            device = next((tensor.device.type for _, tensor in tensors), "cpu")
            digests = {}
            for name, tensor in tensors:
                digest = integrity.digester(integrity.choose("full", device))
                if tensor.numel():
                    digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8))
                digests[name] = f"{tuple(tensor.shape)} {tensor.dtype} {digest.digest().hex()}"
            configs = {name: _settings(module.config) for name, module in self._models()}
            # Which class each component has is no setting: the transformers are here, the scheduler is told apart.
            own = {name: value for name, value in self._pipe.config.items() if name not in self._pipe.components}
            self._weights = seen, digest_of(digests, _settings(own), configs)
        return f"{self._family}@{self._weights[1]}"

    def loras(self) -> dict[str, float]:
        """Return the scale of each active adapter.

        Raises:
            ConfigError: An adapter has several scales.
        """
        found: dict[str, float] = {}
        for _, model in self._models():
            if not getattr(model, "peft_config", None):
                continue
            for module in model.modules():
                scaling = getattr(module, "scaling", None)
                if not isinstance(scaling, dict):
                    continue
                for adapter in getattr(module, "active_adapters", ()):
                    scale = float(scaling.get(adapter, 0.0))
                    if found.setdefault(adapter, scale) != scale:
                        message = f"adapter {adapter!r} has different scales in different layers"
                        raise ConfigError(message, field="loras")
        return found

    def numerics(self) -> dict[str, str | int | float | bool | None]:
        """Return what else of this process decides bits.

        Raises:
            ConfigError: A cache of the model's carries something from step to step that no checkpoint has.
        """
        from importlib.metadata import version

        import torch

        facts: dict[str, str | int | float | bool | None] = {
            "torch": str(torch.__version__),
            "diffusers": version("diffusers"),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul": torch.get_float32_matmul_precision(),
            "device": self._pipe.device.type,
        }
        if self._pipe.device.type == "cuda":
            facts["gpu"] = torch.cuda.get_device_name(self._pipe.device)
            facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
            facts["tf32"] = torch.backends.cuda.matmul.allow_tf32
        for name, model in self._models():
            if getattr(model, "is_cache_enabled", False):
                message = f"{name} has a cache that carries features from step to step; no checkpoint has them"
                raise ConfigError(message, field="numerics")
            facts[f"{name}.dtype"] = str(model.dtype).removeprefix("torch.")
            processors = getattr(model, "attn_processors", {})
            kinds = {f"{type(one).__name__}/{getattr(one, '_attention_backend', None)}" for one in processors.values()}
            facts[f"{name}.attention"] = ", ".join(sorted(kinds))
        return facts

    def _models(self) -> Iterator[tuple[str, Untyped]]:
        import torch

        for name, module in self._pipe.components.items():
            if isinstance(module, torch.nn.Module):
                yield name, module

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, model in self._models():
            for key, tensor in (*model.named_parameters(), *model.named_buffers()):
                yield f"{name}/{key}", tensor


def _settings(config: Mapping[str, object]) -> dict[str, object]:
    """Return settings without what only says where they came from."""
    return {name: value for name, value in config.items() if not name.startswith("_")}
