"""What a step checkpoint is of, and what it holds: the identity of a denoising run, and the state after a step.

Owns the comparison of two identities, field by field, and the names by which something missing is refused. Knows no
store and no host; tensors are opaque here but for shape and dtype.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from moonrelay.errors import CheckpointMismatch, ConfigError

if TYPE_CHECKING:
    import torch

#: Fields of an identity by which a run may differ from its checkpoint when its caller says so by name; with the others
#: different, the state would not even fit.
OVERRIDABLE: Final = frozenset(
    {"request_id", "model", "loras", "guidance", "conditioning", "numerics", "approximate", "seed"}
)

#: Longest value shown in a refusal.
_SHOWN: Final = 120
_PARTS: Final = ("step", "latents", "scheduler", "generators", "extra")
_PLAIN: Final = frozenset({str, int, float, bool, type(None)})

Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIdentity:
    """Everything that decides the bits of a denoising run, but for the state itself.

    Two runs with equal identities compute the same from the same state. A field that the host cannot fill in truly
    must stop it from checkpointing, not be guessed.

    Attributes:
        request_id: The request.
        model: The model's weights by revision, e.g. ``owner/name@commit``, or a digest of its files.
        loras: Scale by adapter (with its revision); empty for none.
        scheduler: The scheduler's kind, its class.
        scheduler_config: Digest of its settings.
        sigmas: Digest of its noise levels for this run.
        timesteps: Digest of its timesteps for this run.
        num_steps: Steps in all.
        guidance: Guidance values by name.
        latent_shape: Shape of the latents.
        latent_dtype: Their dtype, e.g. ``float32``.
        conditioning: Digest of the embeddings and whatever else conditions the run.
        numerics: What of the host decides bits, by name: dtype, attention, threads, versions, device.
        seed: The request's seed.
        approximate: Names of the approximations that are on, sorted; see `moonrelay.cache.features`.

    Raises:
        ConfigError: A field is empty or of the wrong type; ``context['field']`` names it.
    """

    request_id: str
    model: str
    loras: Mapping[str, float]
    scheduler: str
    scheduler_config: str
    sigmas: str
    timesteps: str
    num_steps: int
    guidance: Mapping[str, float | None]
    latent_shape: tuple[int, ...]
    latent_dtype: str
    conditioning: str
    numerics: Mapping[str, Plain]
    seed: int
    approximate: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name in ("loras", "guidance", "numerics"):
                ok = isinstance(value, Mapping) and all(
                    type(name) is str and type(part) in _PLAIN for name, part in value.items()
                )
            elif entry.name == "latent_shape":
                ok = isinstance(value, tuple) and all(type(size) is int for size in value)
            elif entry.name == "approximate":
                ok = isinstance(value, tuple) and all(type(name) is str for name in value)
            elif entry.name in ("num_steps", "seed"):
                ok = type(value) is int
            else:
                ok = type(value) is str and bool(value)
            if not ok:
                message = f"{entry.name}={value!r} does not say what the run is; fill it in, or take no checkpoints"
                raise ConfigError(message, field=entry.name)
        if self.num_steps < 1:
            message = f"num_steps={self.num_steps} must be at least 1"
            raise ConfigError(message, field="num_steps")

    def to_plain(self) -> dict[str, object]:
        """Return the identity as plain values, for a checkpoint's description."""
        plain: dict[str, object] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            plain[entry.name] = dict(value) if isinstance(value, Mapping) else value
        plain["latent_shape"] = list(self.latent_shape)
        plain["approximate"] = list(self.approximate)
        return plain

    def require_same(self, saved: Mapping[str, object], override: Iterable[str] = ()) -> None:
        """Compare with a checkpoint's identity, one field after the other.

        Args:
            saved: What `to_plain` gave when it was saved.
            override: Fields that may differ; see `OVERRIDABLE`.

        Raises:
            CheckpointMismatch: A field differs, is missing, or is not known here; ``context`` has ``field``, ``saved``
                and ``present``. Parts of mappings are named ``guidance.guidance_scale``.
            ConfigError: ``override`` names a field that may not differ.
        """
        allowed = check_override(override)
        present = self.to_plain()
        for name in [*present, *(name for name in saved if name not in present)]:
            if name in allowed:
                continue
            if name not in saved or name not in present:
                raise mismatch(name, saved.get(name, "nothing"), present.get(name, "nothing"))
            ours, theirs = present[name], saved[name]
            if isinstance(ours, dict) and isinstance(theirs, Mapping):
                for key in sorted({*ours, *theirs}):
                    if key not in ours or key not in theirs or not _same(ours[key], theirs[key]):
                        raise mismatch(f"{name}.{key}", theirs.get(key, "nothing"), ours.get(key, "nothing"))
            elif not _same(ours, theirs):
                raise mismatch(name, theirs, ours)


@dataclass(slots=True, kw_only=True)
class StepState:
    """A denoising loop between two steps.

    Attributes:
        step: Steps done; the next one has this number, counted from 0.
        latents: The latents after them.
        scheduler: The scheduler's history by name: tensors, plain values, and lists of such.
        generators: States of random generators by name, as uint8 tensors.
        extra: What else the host needs.
    """

    step: int
    latents: torch.Tensor
    scheduler: Mapping[str, object]
    generators: Mapping[str, torch.Tensor]
    extra: object = field(default=None)

    def tree(self) -> dict[str, object]:
        """Return the state as a tree that a payload can carry."""
        return {
            "step": self.step,
            "latents": self.latents,
            "scheduler": dict(self.scheduler),
            "generators": dict(self.generators),
            "extra": self.extra,
        }

    @classmethod
    def from_tree(cls, tree: object, identity: CheckpointIdentity) -> StepState:
        """Rebuild a state and hold it against the run.

        Raises:
            CheckpointMismatch: A part is missing or does not fit; ``context['field']`` names it.
        """
        if not isinstance(tree, dict):
            raise mismatch("state", type(tree).__name__, "a tree with its parts by name")
        for name in _PARTS:
            if name not in tree:
                raise mismatch(name, "nothing", "a part of every checkpoint")
        for name in tree:
            if name not in _PARTS:
                raise mismatch(str(name), "a part", "nothing of that name")
        step, latents = tree["step"], tree["latents"]
        if type(step) is not int or not 1 <= step <= identity.num_steps:
            raise mismatch("step", step, f"1 to {identity.num_steps}")
        shape, dtype = getattr(latents, "shape", None), str(getattr(latents, "dtype", None)).removeprefix("torch.")
        if shape is None or tuple(shape) != identity.latent_shape or dtype != identity.latent_dtype:
            found = type(latents).__name__ if shape is None else f"{tuple(shape)} {dtype}"
            raise mismatch("latents", found, f"{identity.latent_shape} {identity.latent_dtype}")
        for name in ("scheduler", "generators"):
            if not isinstance(tree[name], dict):
                raise mismatch(name, type(tree[name]).__name__, "a mapping")
        for name, state in tree["generators"].items():
            if str(getattr(state, "dtype", None)) != "torch.uint8":
                raise mismatch(f"generators.{name}", type(state).__name__, "a state as a uint8 tensor")
        return cls(
            step=step,
            latents=latents,
            scheduler=tree["scheduler"],
            generators=tree["generators"],
            extra=tree["extra"],
        )


def check_override(override: Iterable[str]) -> frozenset[str]:
    """Return the fields that may differ.

    Raises:
        ConfigError: One of them may not.
    """
    allowed = frozenset([override] if isinstance(override, str) else override)
    for name in sorted(allowed - OVERRIDABLE):
        message = f"override={name!r} is not possible; a run may differ in {', '.join(sorted(OVERRIDABLE))}"
        raise ConfigError(message, field="override")
    return allowed


def mismatch(name: str, saved: object, present: object) -> CheckpointMismatch:
    """Return the refusal that names a field."""
    message = f"the checkpoint's {name} is {_short(saved)}, this run's is {_short(present)}; it starts afresh"
    return CheckpointMismatch(message, field=name, saved=_short(saved), present=_short(present))


def request_digest(scope: str, request_id: str) -> str:
    """Return the name under which a request's checkpoints are kept: 32 hex digits."""
    return hashlib.blake2b(f"{len(scope)}:{scope}{request_id}".encode(), digest_size=16).hexdigest()


def _same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    # True is not 1, and 1 is not 1.0.
    return type(one) is type(other) and one == other


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
