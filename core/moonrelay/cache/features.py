"""FeatureCache: what a denoiser computes of a prompt again and again, kept in this process on its own device.

Owns which features there are: exact ones, which depend on nothing but their key, and approximate ones, which depend on
more than their key says and are therefore kept only where they are asked for by name. Computing, and taking a feature's
place inside a model, is the host's. Importing it loads no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, Self

from moonrelay.cache.keys import IncompleteKey, canonical, check_revision, digest_of, plain_loras
from moonrelay.errors import ConfigError
from moonrelay.events import Event, EventBus, EventName, Scalar

if TYPE_CHECKING:
    import torch

#: Reuse of the prediction that a negative prompt gave in another request, whose latents were others.
UNCONDITIONAL: Final = "unconditional_prediction"
#: All that may be asked for.
APPROXIMATIONS: Final = (UNCONDITIONAL,)

_FEATURE: Final = "moonrelay.feature/1"
_PREDICTION: Final = "moonrelay.prediction/1"
_DIGEST: Final = re.compile(r"[0-9a-f]{32,128}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureKey:
    """What decides an exact feature's bytes, all of it.

    Args:
        feature: What it is, e.g. ``"cross_attention.k"``.
        conditioning: Digest of the content of the embeddings that it is made of.
        model: Whose weights: ``name@revision``.
        layer: Where in the model.
        dtype: In which type it is computed.
        device: On which device; it says its kind, and where the tensor is.
        lora: ``None``, or a mapping of ``adapter@revision`` to scale.
        params: Everything else that decides bits: libraries, threads, precision.

    Attributes:
        digest: 64 hexadecimal digits of all that.

    Raises:
        IncompleteKey: A field does not say everything; the message names it. Nothing can be kept then.
    """

    #: Of what approximation it is part: none.
    approximation: ClassVar[str | None] = None

    feature: str
    conditioning: str
    model: str
    layer: str
    dtype: object
    device: str
    lora: Mapping[str, float] | None
    params: Mapping[str, object] = field(repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        _words(feature=self.feature, layer=self.layer)
        _digests(conditioning=self.conditioning)
        common = _common(self.model, self.dtype, self.device, self.lora, self.params)
        object.__setattr__(self, "digest", digest_of(_FEATURE, self.feature, self.conditioning, self.layer, *common))

    @property
    def label(self) -> Mapping[str, str]:
        """What it is and where in which model."""
        return {"feature": self.feature, "model": self.model, "layer": self.layer}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PredictionKey:
    """Under what an unconditional prediction is reused. It does not say the latents, which decide bits too.

    So a hit is the prediction for other latents: an approximation, for which a cache must be told by name.

    Args:
        conditioning: Digest of the content of the negative prompt's embeddings.
        step: Number of the step, from 0.
        schedule: Digest of the scheduler, its settings and its levels for all steps.
        shape: The latents' shape.
        guidance: Guidance values by name.
        model: Whose weights: ``name@revision``.
        layer: Which of the model's transformers.
        dtype: In which type it is computed.
        device: As of `FeatureKey`.
        lora: As of `FeatureKey`.
        params: As of `FeatureKey`.

    Attributes:
        digest: 64 hexadecimal digits of all that.

    Raises:
        IncompleteKey: A field does not say everything; the message names it. Nothing can be kept then.
    """

    #: Of what approximation it is part.
    approximation: ClassVar[str | None] = UNCONDITIONAL

    conditioning: str
    step: int
    schedule: str
    shape: tuple[int, ...]
    guidance: Mapping[str, float | None]
    model: str
    layer: str
    dtype: object
    device: str
    lora: Mapping[str, float] | None
    params: Mapping[str, object] = field(repr=False)
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        _words(layer=self.layer)
        _digests(conditioning=self.conditioning, schedule=self.schedule)
        if type(self.step) is not int or self.step < 0:
            raise _incomplete("step", f"{self.step!r:.40} is no number of a step")
        if not isinstance(self.shape, tuple) or not self.shape or not all(type(size) is int for size in self.shape):
            raise _incomplete("shape", f"{self.shape!r:.80} is no shape")
        guidance = _said("guidance", self.guidance)
        common = _common(self.model, self.dtype, self.device, self.lora, self.params)
        digest = digest_of(
            _PREDICTION, self.conditioning, self.step, self.schedule, self.shape, guidance, self.layer, *common
        )
        object.__setattr__(self, "digest", digest)

    @property
    def label(self) -> Mapping[str, str]:
        """Which step of which model."""
        return {"feature": UNCONDITIONAL, "model": self.model, "layer": self.layer, "step": str(self.step)}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCounters:
    """One cache's numbers, or one run's.

    Attributes:
        hits: Exact features that were not computed again.
        reused: Approximate ones that were not computed again.
        misses: Features with a key that were computed.
        not_kept: Computed ones for which there was no room without giving up what the same run uses, or that cannot be
            kept.
        evicted: Entries that gave way.
        trouble: Entries that somebody edited, and runs that the host could not serve.
        entries: Entries now.
        bytes_held: Bytes of the entries now.
    """

    hits: int = 0
    reused: int = 0
    misses: int = 0
    not_kept: int = 0
    evicted: int = 0
    trouble: int = 0
    entries: int = 0
    bytes_held: int = 0


class _Settings(Protocol):
    @property
    def role(self) -> str: ...


class Connector(Protocol):
    """What this cache needs of a `DiffusionConnector`: who is told, and who says so."""

    @property
    def settings(self) -> _Settings:
        """Its role."""
        ...

    @property
    def events(self) -> EventBus:
        """Who is told."""
        ...


@dataclass(slots=True)
class _Entry:
    tensor: torch.Tensor
    version: int
    nbytes: int
    #: The run that used it last.
    run: int


class FeatureCache:
    """Keeps features of prompts in the memory of the device on which they were computed.

    Least recently used out first, but never for the sake of another feature of a run that uses them: where one run's
    features do not all fit, some are kept and the others computed, rather than each making room for the next. Nothing
    is shared with other processes.

    Args:
        conn: A `DiffusionConnector`, for its events.
        capacity_bytes: Bound of the entries' bytes.
        approximate: Names of approximations that are allowed; none by default. See `APPROXIMATIONS`.

    Raises:
        ConfigError: The bound is no number of bytes, or an approximation is not known.

    Threads: any. Two that miss the same feature at once both compute it.
    """

    #: Word for what is kept, in events.
    kind: ClassVar[str] = "feature"

    def __init__(self, conn: Connector, capacity_bytes: int, *, approximate: Iterable[str] = ()) -> None:
        if type(capacity_bytes) is not int or capacity_bytes < 0:
            message = f"capacity_bytes={capacity_bytes!r} must be a number of bytes, 0 or more"
            raise ConfigError(message, field="capacity_bytes")
        self._conn = conn
        self._capacity = capacity_bytes
        self._approximate = check_approximations(approximate)
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._nbytes = 0
        self._counters = FeatureCounters()
        self._runs = itertools.count(1)
        self._active: set[int] = set()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def approximate(self) -> tuple[str, ...]:
        """The approximations that are allowed, sorted."""
        return self._approximate

    def run(self, request_id: str | None = None) -> FeatureRun:
        """Return the use of this cache by one request's run, a context manager."""
        return FeatureRun(self, request_id, next(self._runs))

    def counters(self) -> FeatureCounters:
        """Return this object's numbers."""
        with self._lock:
            return dataclasses.replace(self._counters, entries=len(self._entries), bytes_held=self._nbytes)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._nbytes = 0

    def close(self) -> None:
        """Forget everything, and keep nothing from now on. Idempotent. Runs that are under way compute."""
        with self._lock:
            self._closed = True
        self.clear()

    # -- what runs do -------------------------------------------------------------------------------------------------

    def _begin(self, run: int) -> None:
        with self._lock:
            self._active.add(run)

    def _end(self, run: int) -> None:
        with self._lock:
            self._active.discard(run)

    def _look(self, digest: str, run: int) -> torch.Tensor | None:
        """Return a kept tensor itself.

        Raises:
            _Edited: Somebody changed it; it is forgotten.
        """
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None:
                return None
            if _version(entry.tensor) != entry.version:
                self._drop(digest)
                raise _Edited
            self._entries.move_to_end(digest)
            entry.run = run
            return entry.tensor

    def _put(self, digest: str, tensor: torch.Tensor, run: int) -> tuple[bool, int, int]:
        """Keep a copy; return whether, and how many entries of how many bytes gave way."""
        kept = _kept(tensor, self._capacity)
        with self._lock:
            if kept is None or self._closed:
                return False, 0, 0
            self._drop(digest)
            entry = _Entry(kept, _version(kept), kept.nbytes, run)
            evicted = freed = 0
            while self._nbytes + entry.nbytes > self._capacity:
                oldest = next(iter(self._entries))
                # What comes after it was used later, so by a run under way as well.
                if self._entries[oldest].run in self._active:
                    return False, evicted, freed
                evicted, freed = evicted + 1, freed + self._entries[oldest].nbytes
                self._drop(oldest)
            self._entries[digest] = entry
            self._nbytes += entry.nbytes
            return True, evicted, freed

    def _drop(self, digest: str) -> None:
        dropped = self._entries.pop(digest, None)
        if dropped is not None:
            self._nbytes -= dropped.nbytes

    def _count(self, **amounts: int) -> None:
        with self._lock:
            self._counters = _added(self._counters, amounts)

    def _tell(
        self,
        name: EventName,
        request_id: str | None,
        *,
        nbytes: int | None = None,
        reason: str | None = None,
        code: str | None = None,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        events = self._conn.events
        if events.heeds(name):
            events.emit(
                Event(
                    name=name,
                    request_id=request_id,
                    kind=self.kind,
                    stage=self._conn.settings.role,
                    path="memory",
                    nbytes=nbytes,
                    reason=reason,
                    code=code,
                    extra=extra or {},
                )
            )


class FeatureRun:
    """One request's use of a `FeatureCache`; made by its `FeatureCache.run`.

    Exact hits and misses are told once, at the end, with their number (``entries``): a model has hundreds of them per
    step. Each approximate reuse is told by itself.

    Threads: one at a time.
    """

    def __init__(self, cache: FeatureCache, request_id: str | None, number: int) -> None:
        self._cache = cache
        self._request_id = request_id
        self._number = number
        self._counters = FeatureCounters()
        self._bytes_hit = 0

    def __enter__(self) -> Self:
        self._cache._begin(self._number)  # noqa: SLF001 - both are this module's
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cache._end(self._number)  # noqa: SLF001
        counters = self._counters
        if counters.hits:
            self._tell("cache_hit", nbytes=self._bytes_hit, extra={"entries": counters.hits})
        if counters.misses:
            self._tell("cache_miss", extra={"entries": counters.misses, "not_kept": counters.not_kept or None})

    @property
    def approximate(self) -> tuple[str, ...]:
        """The approximations that are allowed, sorted."""
        return self._cache.approximate

    def counters(self) -> FeatureCounters:
        """Return this run's numbers."""
        return self._counters

    def get_or_compute(
        self, key: FeatureKey | PredictionKey | None, compute: Callable[[], torch.Tensor], *, lend: bool = False
    ) -> torch.Tensor:
        """Return the feature of a key, computed now or earlier.

        Args:
            key: ``None`` for no caching.
            compute: Called without arguments where nothing is kept. What is kept is a copy of its result.
            lend: Return the kept tensor itself, for whoever only reads it, instead of a copy. An edit that torch counts
                makes it void: whoever asks next computes.

        Raises:
            What ``compute`` raises, unchanged.
            ConfigError: The key is an approximation's that this cache was not told of.

        Blocks: while computing.
        """
        if key is None:
            return compute()
        if key.approximation is not None and key.approximation not in self._cache.approximate:
            message = f"approximate={list(self._cache.approximate)} does not name {key.approximation!r}, which was used"
            raise ConfigError(message, field="approximate")
        kept = self._look(key)
        if kept is not None:
            return kept if lend and not kept.is_inference() else kept.clone()
        tensor = compute()
        self._count(misses=1)
        stored, evicted, freed = self._cache._put(key.digest, tensor, self._number)  # noqa: SLF001
        if not stored:
            self._count(not_kept=1)
        if evicted:
            self._count(evicted=evicted)
            self._tell("cache_evicted", nbytes=freed, extra={"entries": evicted})
        return tensor

    def trouble(self, reason: str, *, code: str | None = None) -> None:
        """Say, for a host, that something cannot be kept; the run goes on and computes."""
        self._count(trouble=1)
        self._tell("cache_trouble", reason=reason, code=code)

    def _look(self, key: FeatureKey | PredictionKey) -> torch.Tensor | None:
        try:
            kept = self._cache._look(key.digest, self._number)  # noqa: SLF001
        except _Edited:
            self.trouble(f"a kept feature was edited: {key.label}", code="integrity_error")
            return None
        if kept is None:
            return None
        if key.approximation is None:
            self._count(hits=1)
            self._bytes_hit += kept.nbytes
        else:
            self._count(reused=1)
            reason = f"approximate: {key.approximation} of another request"
            self._tell("cache_approximated", nbytes=kept.nbytes, reason=reason, extra=dict(key.label))
        return kept

    def _count(self, **amounts: int) -> None:
        self._counters = _added(self._counters, amounts)
        self._cache._count(**amounts)  # noqa: SLF001

    def _tell(
        self,
        name: EventName,
        *,
        nbytes: int | None = None,
        reason: str | None = None,
        code: str | None = None,
        extra: Mapping[str, Scalar] | None = None,
    ) -> None:
        self._cache._tell(  # noqa: SLF001
            name, self._request_id, nbytes=nbytes, reason=reason, code=code, extra=extra
        )


class _Edited(Exception):
    """An entry is not what was kept."""


def check_approximations(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of approximations, sorted, each once.

    Raises:
        ConfigError: One is not known.
    """
    if isinstance(names, str):
        names = (names,)
    found = tuple(sorted(set(names)))
    for name in found:
        if name not in APPROXIMATIONS:
            message = f"approximate={name!r} is not known; there is {', '.join(APPROXIMATIONS)}"
            raise ConfigError(message, field="approximate")
    return found


def _added(counters: FeatureCounters, amounts: Mapping[str, int]) -> FeatureCounters:
    return dataclasses.replace(counters, **{name: getattr(counters, name) + amount for name, amount in amounts.items()})


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed; what inference mode made does not count, and is only ever copied."""
    return 0 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - torch has no other word for it


def _kept(tensor: torch.Tensor, at_most: int) -> torch.Tensor | None:
    """Return a copy to keep; ``None`` of what has a history, is no plain tensor, or too large."""
    import torch

    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    return tensor.clone() if plain and tensor.nbytes <= at_most else None


def _incomplete(name: str, why: str) -> IncompleteKey:
    return IncompleteKey(f"{name}: {why}; the key is not complete, and nothing will be kept under it", field=name)


def _words(**words: str) -> None:
    for name, value in words.items():
        if type(value) is not str or not value:
            raise _incomplete(name, f"{value!r:.40} is no word")


def _digests(**digests: str) -> None:
    for name, value in digests.items():
        if type(value) is not str or not _DIGEST.fullmatch(value):
            raise _incomplete(name, f"{value!r:.80} is no digest")


def _said(name: str, value: object) -> object:
    if not isinstance(value, Mapping) or not all(type(entry) is str for entry in value):
        raise _incomplete(name, f"a {type(value).__name__} is no mapping of names to values")
    try:
        return canonical(value)
    except IncompleteKey as exc:
        raise _incomplete(name, exc.message) from exc


def _common(model: str, dtype: object, device: str, lora: object, params: object) -> list[object]:
    check_revision("model", model)
    _words(device=device)
    if dtype is None or dtype == "":
        raise _incomplete("dtype", f"{dtype!r} is no dtype")
    try:
        kind = canonical(dtype)
    except IncompleteKey as exc:
        raise _incomplete("dtype", exc.message) from exc
    return [model, kind, device, plain_loras("lora", lora), _said("params", params)]
