"""Features of prompts in Wan's transformers: kept keys and values of cross-attention, and kept predictions.

Owns where a kept feature takes the place of a computed one inside diffusers' model, and of which classes that is known:
others are refused by name. The keys and values of a text are exact: they depend on its embeddings and the weights. A
prediction depends on the latents too, so it is kept only where the cache allows ``unconditional_prediction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moonrelay.cache.features import UNCONDITIONAL, FeatureKey, PredictionKey
from moonrelay.cache.keys import digest_of
from moonrelay.errors import ConfigError
from moonrelay_diffusers.scheduling import ScheduleHistory

if TYPE_CHECKING:
    import torch

    from moonrelay.cache.features import FeatureRun
    from moonrelay_diffusers.identity import ModelIdentity
    from moonrelay_diffusers.request import StageParams

Untyped = Any
#: Gives what is kept for a layer, or what the function computes.
Keep = Callable[[str, Callable[[], "torch.Tensor"]], "torch.Tensor"]

#: diffusers' name for the branch without the prompt.
_UNCONDITIONAL_BRANCH: Final = "uncond"
_WAN: Final = "diffusers.models.transformers.transformer_wan"
_TRANSFORMER: Final = f"{_WAN}.WanTransformer3DModel"
_BLOCK: Final = f"{_WAN}.WanTransformerBlock"
_ATTENTION: Final = f"{_WAN}.WanAttention"
_PROCESSOR: Final = f"{_WAN}.WanAttnProcessor"
_TEXT: Final = f"{_WAN}.WanTimeTextImageEmbedding"
_LINEAR: Final = "torch.nn.modules.linear.Linear"
_NORM: Final = "torch.nn.modules.normalization.RMSNorm"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One cross-attention, of a known build."""

    name: str
    attention: Untyped


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is the same in every key of a run."""

    model: str
    lora: dict[str, float]
    host: dict[str, str | int | float | bool | None]


class WanFeatures:
    """Keeps features of the transformers of a pipeline.

    Args:
        pipe: The pipeline.
        components: Names of what was loaded.
        identity: Knows the weights, adapters and numerics.

    Threads: one call at a time.
    """

    def __init__(self, pipe: Untyped, components: tuple[str, ...], identity: ModelIdentity) -> None:
        self._pipe = pipe
        self._names = tuple(name for name in components if name.startswith("transformer"))
        self._identity = identity

    def check(self) -> None:
        """See whether features can be kept here, and whether a layer gives the same bits with what is kept.

        Raises:
            ConfigError: A module is none of the known ones, or something else has its hands in it; the message names
                it.

        Blocks: the first time for as long as reading all weights takes.
        """
        self._facts()
        for name in self._names:
            self._prove(self._layers(name)[0])

    @contextmanager
    def used(self, run: FeatureRun, params: StageParams, shape: tuple[int, ...]) -> Iterator[None]:
        """Keep features while the pipeline runs within this context; without it nothing is changed.

        What is not known any more, such as an adapter loaded meanwhile, makes the run compute, and is told by the run.
        """
        try:
            facts = self._facts()
            layers = {name: self._layers(name) for name in self._names}
        except ConfigError as exc:
            run.trouble(f"no features are kept in this run: {exc}", code=exc.code)
            yield
            return
        session = _Session(self._pipe, run, facts, params, shape)
        with ExitStack() as stack:
            for name, found in layers.items():
                session.watch(name, getattr(self._pipe, name), found, stack)
            yield
            session.finish()

    def _facts(self) -> _Facts:
        model = self._identity.weights()
        # An adapter's own weights are among the weights by whose digest the model goes.
        revision = model.rpartition("@")[2]
        lora = {f"{name}@{revision}": scale for name, scale in self._identity.loras().items()}
        return _Facts(model, lora, self._identity.numerics())

    def _layers(self, name: str) -> list[_Layer]:
        """Return a transformer's cross-attentions.

        Raises:
            ConfigError: Something of it is not known.
        """
        model = getattr(self._pipe, name)
        _known(name, model, _TRANSFORMER, hooks=True)
        _known(f"{name}.condition_embedder", model.condition_embedder, _TEXT)
        layers = []
        for index, block in enumerate(model.blocks):
            place = f"{name}.blocks.{index}"
            _known(place, block, _BLOCK)
            attention = block.attn2
            place = f"{place}.attn2"
            _known(place, attention, _ATTENTION)
            if _name(attention.processor) != _PROCESSOR:
                raise _refused(f"{place}.processor", f"a {_name(attention.processor)}, not {_PROCESSOR}")
            if attention.fused_projections:
                raise _refused(place, "fused: its keys and values are one projection")
            if attention.add_k_proj is not None:
                raise _refused(place, "one that attends to an image too")
            for part, kind in (("to_k", _LINEAR), ("to_v", _LINEAR), ("norm_k", _NORM)):
                _known(f"{place}.{part}", getattr(attention, part), kind)
            layers.append(_Layer(place, attention))
        if not layers:
            raise _refused(name, "without blocks")
        return layers

    def _prove(self, layer: _Layer) -> None:
        import torch

        attention, kept = layer.attention, dict[str, "torch.Tensor"]()
        computed: list[str] = []

        def keep(name: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
            if name not in kept:
                computed.append(name)
                kept[name] = compute().clone()
            return kept[name]

        dice = torch.Generator("cpu").manual_seed(0)
        place = {"device": attention.to_k.weight.device, "dtype": attention.to_q.weight.dtype}
        latents = torch.randn(1, 4, attention.to_q.in_features, generator=dice).to(**place)
        text = torch.randn(1, 6, attention.to_k.in_features, generator=dice).to(**place)
        with torch.no_grad():
            plain = attention(latents, text, None, None)
            with ExitStack() as stack:
                _hold(layer, keep, lambda: True, stack)
                once, again = attention(latents, text, None, None), attention(latents, text, None, None)
        if computed != [f"{layer.name}.k", f"{layer.name}.v"] or not (plain.equal(once) and plain.equal(again)):
            raise _refused(layer.name, "one that does not give the same with its keys and values kept")


class _Session:
    """One run: which text a transformer is being called with, and the keys that follow from it."""

    def __init__(
        self, pipe: Untyped, run: FeatureRun, facts: _Facts, params: StageParams, shape: tuple[int, ...]
    ) -> None:
        self._pipe = pipe
        self._run = run
        self._facts = facts
        self._guidance = {"guidance_scale": params.guidance_scale, "guidance_scale_2": params.guidance_scale_2}
        self._shape = shape
        self._approximate = UNCONDITIONAL in run.approximate
        self._texts: list[tuple[torch.Tensor, int, str]] = []
        self._text: tuple[str, torch.Tensor] | None = None
        self._keys: dict[tuple[str, str], FeatureKey] = {}
        self._branch: str | None = None
        self._branches: set[str] = set()
        self._schedule: str | None = None

    def watch(self, name: str, model: Untyped, layers: list[_Layer], stack: ExitStack) -> None:
        """Stand in a transformer's way until the stack is left."""
        compute = model.forward

        def forward(*args: Untyped, **named: Untyped) -> Untyped:
            text = None if args else self._digest(named)
            before, self._text = self._text, text
            try:
                if text is None or not self._approximate or self._branch != _UNCONDITIONAL_BRANCH:
                    return compute(**named) if not args else compute(*args, **named)
                return self._predicted(name, text, named, compute)
            finally:
                self._text = before

        _replace(model, "forward", forward, stack)
        if self._approximate:
            self._watch_branches(model, stack)
        for layer in layers:
            _hold(layer, self._keep, lambda: self._text is not None, stack)

    def finish(self) -> None:
        """Say so where an approximation was asked for and could not be made."""
        if self._approximate and self._branches and _UNCONDITIONAL_BRANCH not in self._branches:
            guided = (self._guidance["guidance_scale"] or 0) > 1
            if guided:
                self._run.trouble(f"the pipeline has no branch {_UNCONDITIONAL_BRANCH!r}; nothing is approximated")

    def _watch_branches(self, model: Untyped, stack: ExitStack) -> None:
        enter = model.cache_context

        @contextmanager
        def cache_context(branch: str, *args: Untyped, **named: Untyped) -> Iterator[None]:
            before, self._branch = self._branch, branch
            self._branches.add(branch)
            try:
                with enter(branch, *args, **named):
                    yield
            finally:
                self._branch = before

        _replace(model, "cache_context", cache_context, stack)

    def _digest(self, named: dict[str, Untyped]) -> tuple[str, torch.Tensor] | None:
        """Return the text of a transformer's call; ``None`` where more than it decides keys and values."""
        import torch

        text = named.get("encoder_hidden_states")
        plain = (
            type(text) is torch.Tensor
            and named.get("encoder_hidden_states_image") is None
            and not named.get("attention_kwargs")
            and not torch.is_grad_enabled()
            and not text.is_inference()
            and not torch.is_autocast_enabled(text.device.type)
        )
        if not plain or text is None:
            return None
        for known, version, digest in self._texts:
            if known is text and version == text._version:  # noqa: SLF001 - an edit makes it another text
                return digest, text
        digest = digest_of("text", text)
        self._texts.append((text, text._version, digest))  # noqa: SLF001
        return digest, text

    def _keep(self, layer: str, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._text is None:
            return compute()
        digest, text = self._text
        key = self._keys.get((digest, layer))
        if key is None:
            key = self._keys[digest, layer] = FeatureKey(
                feature="cross_attention",
                conditioning=digest,
                model=self._facts.model,
                layer=layer,
                dtype=text.dtype,
                device=str(text.device),
                lora=self._facts.lora,
                params=self._facts.host,
            )
        return self._run.get_or_compute(key, compute, lend=True)

    def _predicted(
        self, name: str, text: tuple[str, torch.Tensor], named: dict[str, Untyped], compute: Callable[..., Untyped]
    ) -> Untyped:
        latents = named.get("hidden_states")
        if named.get("return_dict", True) or latents is None or tuple(latents.shape) != self._shape:
            return compute(**named)
        schedule = self._scheduled()
        if schedule is None:
            return compute(**named)
        digest, embeds = text
        # Before its first step a scheduler counts none.
        step = self._pipe.scheduler.step_index or 0
        key = PredictionKey(
            conditioning=digest,
            step=int(step),
            schedule=schedule,
            shape=tuple(latents.shape),
            guidance=self._guidance,
            model=self._facts.model,
            layer=name,
            dtype=f"{latents.dtype}, {embeds.dtype}",
            device=str(latents.device),
            lora=self._facts.lora,
            params=self._facts.host,
        )
        return (self._run.get_or_compute(key, lambda: compute(**named)[0]),)

    def _scheduled(self) -> str | None:
        if self._schedule is None:
            try:
                history = ScheduleHistory(self._pipe.scheduler)
                self._schedule = digest_of(
                    history.kind, history.config_digest(), history.sigmas_digest(), history.timesteps_digest()
                )
            except ConfigError as exc:
                self._run.trouble(f"no prediction is kept in this run: {exc}", code=exc.code)
                self._approximate = False
        return self._schedule


def _hold(layer: _Layer, keep: Keep, watching: Callable[[], bool], stack: ExitStack) -> None:
    """Give a cross-attention kept keys, their norm included, and kept values, until the stack is left."""
    attention = layer.attention
    key, value, norm = (getattr(attention, name).forward for name in ("to_k", "to_v", "norm_k"))
    handed: list[torch.Tensor] = []

    def to_k(text: torch.Tensor) -> torch.Tensor:
        if not watching():
            return key(text)  # type: ignore[no-any-return]  # diffusers has no types
        handed[:] = [keep(f"{layer.name}.k", lambda: norm(key(text)))]
        return handed[0]

    def to_v(text: torch.Tensor) -> torch.Tensor:
        if not watching():
            return value(text)  # type: ignore[no-any-return]
        return keep(f"{layer.name}.v", lambda: value(text))

    def norm_k(keys: torch.Tensor) -> torch.Tensor:
        if handed and handed.pop() is keys:
            return keys  # it has its norm already
        return norm(keys)  # type: ignore[no-any-return]

    for name, forward in (("to_k", to_k), ("to_v", to_v), ("norm_k", norm_k)):
        _replace(getattr(attention, name), "forward", forward, stack)


def _replace(module: Untyped, name: str, function: Callable[..., Untyped], stack: ExitStack) -> None:
    setattr(module, name, function)
    stack.callback(delattr, module, name)


def _known(place: str, module: Untyped, kind: str, *, hooks: bool = False) -> None:
    """Refuse a module that is not exactly of a class, or whose calls somebody else has changed."""
    if _name(module) != kind:
        raise _refused(place, f"a {_name(module)}, not {kind}")
    if "forward" in vars(module) or "cache_context" in vars(module):
        raise _refused(place, "one whose forward was replaced, by offloading or a cache")
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise _refused(place, "compiled")
    if not hooks and (module._forward_pre_hooks or module._forward_hooks):  # noqa: SLF001 - torch has no other word
        raise _refused(place, "one with hooks, which may change what passes")


def _refused(place: str, what: str) -> ConfigError:
    message = f"{place} is {what}; what its features depend on is not known, so none are kept"
    return ConfigError(message, field=place)


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
