"""What the families share: loading part of a pipeline, and the denoise run round the pipeline's own ``__call__``.

Owns no model knowledge; that is in the family's module. torch and diffusers are imported inside functions.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moonrelay.errors import Cancelled, ConfigError
from moonrelay_diffusers.features import WanFeatures
from moonrelay_diffusers.identity import ModelIdentity
from moonrelay_diffusers.loop import DenoiseLoop, RunCheckpoints
from moonrelay_diffusers.numerics import aligned
from moonrelay_diffusers.request import StageParams

if TYPE_CHECKING:
    import torch

    from moonrelay.cache.features import FeatureRun
    from moonrelay_diffusers.families.base import Placement
    from moonrelay_diffusers.model import ModelInfo

#: An object of diffusers, which has no types.
Untyped = Any


def load_pipeline(info: ModelInfo, pipeline_class: str, components: tuple[str, ...], placement: Placement) -> Untyped:
    """Load a pipeline with some of its modules; the others' files are neither read nor downloaded.

    Args:
        info: The model.
        pipeline_class: Name of diffusers' class.
        components: The modules to load; those that the model does not have are passed over.
        placement: Where they go, and in which type.

    Blocks: while files are read, or downloaded.

    Raises:
        ConfigError: A file is missing or damaged, or the device or type does not exist.
    """
    import diffusers
    from safetensors import SafetensorError

    _check_device(placement.device)
    _check_folders(info, components)
    absent = {slot: None for slot in info.all_slots() if slot not in components}
    options: dict[str, object] = dict(absent)
    if placement.dtype is not None:
        options[_dtype_keyword()] = _torch_dtypes(placement.dtype)
    if info.revision is not None:
        options["revision"] = info.revision
    # What diffusers and transformers raise on a malformed folder depends on which file and which field it is.
    malformed = (
        *(AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
        SafetensorError,
    )
    try:
        with quietly():
            pipe = getattr(diffusers, pipeline_class).from_pretrained(info.source, **options)
            pipe.to(placement.device)
    except malformed as exc:
        reason = " ".join(str(exc).split())[:400]
        message = f"model={info.source!r}: cannot load {', '.join(components)} on {placement.device}: {reason}"
        raise ConfigError(message, field="model") from exc
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise_source(seed: int) -> torch.Generator:
    """Return the generator from which both the stages and the undivided pipeline draw noise: on the CPU, by seed."""
    import torch

    return torch.Generator("cpu").manual_seed(seed)


def step_callback(
    steps: int, on_step: Callable[[int, int], None] | None, cancelled: Callable[[], bool] | None
) -> dict[str, object]:
    """Return the arguments that make a pipeline's ``__call__`` report its steps and ask whether to go on.

    Raises:
        Cancelled: From within the pipeline's call, once ``cancelled`` says so.
    """

    def after_step(_pipe: Untyped, index: int, _timestep: object, _tensors: object) -> dict[str, object]:
        if on_step is not None:
            on_step(index + 1, steps)
        raise_if(cancelled, f"cancelled after step {index + 1} of {steps}")
        return {}

    return {"callback_on_step_end": after_step, "callback_on_step_end_tensor_inputs": []}


def raise_if(cancelled: Callable[[], bool] | None, message: str) -> None:
    """Raise `Cancelled` when ``cancelled`` is given and says so."""
    if cancelled is not None and cancelled():
        raise Cancelled(message)


def guided(guidance_scale: float | None) -> bool:
    """Say whether guidance is on; diffusers counts it as on above 1."""
    return guidance_scale is not None and guidance_scale > 1


class PipelineDenoiser(ABC):
    """A denoise stage that calls the pipeline's own ``__call__`` with ready-made embeddings and asks for latents.

    Args:
        pipe: A pipeline that has a transformer and a scheduler only.
        components: Names of what was loaded.

    Threads: one call at a time.
    """

    family: str
    input_schema: str
    output_schema: str
    components: tuple[str, ...]
    chunk_dim: int | None

    def __init__(self, pipe: Untyped, components: tuple[str, ...]) -> None:
        self._pipe = pipe
        self.components = components
        self._identity = ModelIdentity(self.family, pipe)
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        #: Set by a family whose features are known.
        self._features: WanFeatures | None = None

    @abstractmethod
    def latent_shape(self, params: StageParams) -> tuple[int, ...]:
        """Return the shape of the latents."""

    @abstractmethod
    def noise_dtype(self, tree: Mapping[str, object]) -> torch.dtype:
        """Return the type in which the pipeline draws its noise."""

    @abstractmethod
    def call_arguments(self, tree: Mapping[str, object], params: StageParams) -> dict[str, object]:
        """Return the family's own arguments of the pipeline's ``__call__``."""

    def latent_spec(self, tree: Mapping[str, object]) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and type of the latents that `run` will give for this tree; see `DenoiseRunner`."""
        noise = self.noise_dtype(tree)
        if noise not in self._dtypes:
            self._dtypes[noise] = _stepped_dtype(self._pipe.scheduler, noise, self._model_dtype())
        return self.latent_shape(params_of(tree)), self._dtypes[noise]

    def run(
        self,
        tree: Mapping[str, object],
        *,
        on_step: Callable[[int, int], None] | None = None,
        out: Callable[[tuple[int, ...], torch.dtype], torch.Tensor] | None = None,
        cancelled: Callable[[], bool] | None = None,
        checkpoints: RunCheckpoints | None = None,
        features: FeatureRun | None = None,
    ) -> torch.Tensor:
        """Denoise from the seed's noise, or from a checkpoint; see `DenoiseRunner`."""
        params = params_of(tree)
        spec = self.latent_spec(tree)
        raise_if(cancelled, "cancelled before the first step")
        destination = None if out is None else out(*spec)
        approximate = () if features is None else features.approximate
        loop = DenoiseLoop(
            self._pipe,
            params.num_inference_steps,
            noise_source(params.seed),
            identify=lambda request_id, history: self._identity.of_run(
                request_id, history, params, tree, spec, approximate
            ),
            on_step=on_step,
            cancelled=cancelled,
            checkpoints=checkpoints,
        )
        arguments = {
            "height": params.height,
            "width": params.width,
            "num_inference_steps": params.num_inference_steps,
            "max_sequence_length": params.max_sequence_length,
            "output_type": "latent",
            **self.call_arguments(tree, params),
        }
        kept = self._known_features().used(features, params, spec[0]) if features is not None else nullcontext()
        with kept:
            latents: torch.Tensor = loop.run(arguments)
        if (tuple(latents.shape), latents.dtype) != spec:
            message = (
                f"the pipeline gave latents {tuple(latents.shape)} {latents.dtype}, not {spec[0]} {spec[1]} as planned"
            )
            raise ConfigError(message, field="latents")
        if destination is None:
            return latents
        return destination.copy_(latents)

    def check_features(self) -> None:
        """See whether features can be kept here; see `DenoiseRunner`."""
        self._known_features().check()

    def _known_features(self) -> WanFeatures:
        if self._features is None:
            message = f"family {self.family!r} has no features that could be kept; leave the feature cache out"
            raise ConfigError(message, field="feature_cache")
        return self._features

    def embeds(self, tree: Mapping[str, object], name: str) -> torch.Tensor:
        """Return a tensor of the tree, on the stage's device.

        Raises:
            ConfigError: It is not there.
        """
        found = self.optional_embeds(tree, name)
        if found is None:
            message = f"{name} is missing from the payload; publish what the encode stage gave as {self.input_schema}"
            raise ConfigError(message, field=name)
        return found

    def optional_embeds(self, tree: Mapping[str, object], name: str) -> torch.Tensor | None:
        """Return a tensor of the tree on the stage's device, ``None`` where the tree has none.

        Raises:
            ConfigError: It is something else.
        """
        import torch

        found = tree.get(name)
        if found is None:
            return None
        if not isinstance(found, torch.Tensor):
            message = f"{name} must be a tensor, not {type(found).__name__}; publish what the encode stage gave"
            raise ConfigError(message, field=name)
        return aligned(found.to(self._pipe.device))

    def _model_dtype(self) -> torch.dtype:
        model = self._pipe.transformer if self._pipe.transformer is not None else self._pipe.transformer_2
        dtype: torch.dtype = model.dtype
        return dtype


def params_of(tree: Mapping[str, object]) -> StageParams:
    """Take the plain parameters out of a conditioning tree.

    Raises:
        ConfigError: They are missing or wrong.
    """
    params = tree.get("params")
    if not isinstance(params, Mapping):
        message = "params is missing from the payload; publish what the encode stage gave"
        raise ConfigError(message, field="params")
    return StageParams.from_payload(params)


def require_multiple(name: str, value: int, multiple: int) -> None:
    """Raise `ConfigError` where a size in pixels is not a multiple of what the model's patches need."""
    if value % multiple:
        near = max(multiple, round(value / multiple) * multiple)
        message = f"{name}={value} must be a multiple of {multiple}; the nearest is {near}"
        raise ConfigError(message, field=name)


def _stepped_dtype(scheduler: Untyped, noise: torch.dtype, model: torch.dtype) -> torch.dtype:
    """Return the type of a sample after a few steps; some schedulers keep the noise's, others the model's."""
    import torch

    trial = copy.deepcopy(scheduler)
    shift = {"mu": 1.0} if trial.config.get("use_dynamic_shifting") else {}
    trial.set_timesteps(3, device="cpu", **shift)
    sample = torch.zeros(1, 1, 4, dtype=noise)
    for step in trial.timesteps[:2]:
        sample = trial.step(torch.zeros(1, 1, 4, dtype=model), step, sample, return_dict=False)[0]
    return sample.dtype


def _check_device(name: str) -> None:
    """Raise `ConfigError` for a device that torch does not know, or that is not here."""
    import torch

    try:
        # Only a tensor on it shows that a device is there; torch says so by assertion where it was built without it.
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        message = f"device={name!r} cannot be used here: {str(exc).splitlines()[0]}; use cpu, or install its torch"
        raise ConfigError(message, field="device") from exc


def _check_folders(info: ModelInfo, components: tuple[str, ...]) -> None:
    """Raise `ConfigError` for a module without files; some tokenizers would load from nothing and know no word."""
    for component in set(components) & set(info.components()):
        folder = Path(info.source, component)
        if Path(info.source).is_dir() and not (folder.is_dir() and any(folder.iterdir())):
            message = f"model={info.source!r}: cannot load {component}: its folder is missing or empty"
            raise ConfigError(message, field="model")


def _dtype_keyword() -> str:
    """Return what ``from_pretrained`` calls its type; diffusers 0.42 renamed it and warns of the old name."""
    from diffusers.utils import deprecation_utils

    return "dtype" if hasattr(deprecation_utils, "_resolve_dtype") else "torch_dtype"


def _torch_dtypes(named: str | Mapping[str, str]) -> torch.dtype | dict[str, torch.dtype]:
    import torch

    def one(name: str) -> torch.dtype:
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            message = f"dtype={name!r} is not a floating-point type of torch; use float32, bfloat16 or float16"
            raise ConfigError(message, field="dtype")
        return found

    return one(named) if isinstance(named, str) else {component: one(name) for component, name in named.items()}


@contextmanager
def quietly() -> Iterator[None]:
    """Keep diffusers' and transformers' progress bars off the worker's output, and give their state back."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()
