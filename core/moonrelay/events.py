"""What happened to a payload, told to whoever asked: events, hook specifications, and the bus between them.

Owns the vocabulary of events and their log lines. An observer never changes what happens: one that fails is logged, and
the others are told all the same. Payload bytes never travel through this module.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

import pluggy

from moonrelay.clock import Clock, SystemClock
from moonrelay.errors import ConfigError, PluginError
from moonrelay.plugins import OBSERVERS, Registry

logger = logging.getLogger(__name__)

EventName = Literal[
    "published",
    "staged",
    "spilled",
    "claimed",
    "delivered",
    "failed",
    "retried",
    "lease_expired",
    "released",
    "fallback",
    "cache_hit",
    "cache_miss",
    "cache_wait",
    "cache_stored",
    "cache_evicted",
    "cache_trouble",
    "cache_approximated",
    "checkpoint_saved",
    "checkpoint_skipped",
    "checkpoint_resumed",
    "checkpoint_refused",
    "checkpoint_dropped",
    "checkpoint_failed",
]
EVENT_NAMES: Final[tuple[str, ...]] = get_args(EventName)

#: Marks an observer's methods: ``@hookimpl`` above ``def moonrelay_delivered(self, event)``.
hookimpl = pluggy.HookimplMarker("moonrelay")
_hookspec = pluggy.HookspecMarker("moonrelay")

_LEVELS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "published": logging.DEBUG,
        "staged": logging.DEBUG,
        "claimed": logging.DEBUG,
        "delivered": logging.DEBUG,
        "released": logging.DEBUG,
        "spilled": logging.INFO,
        "lease_expired": logging.INFO,
        "retried": logging.WARNING,
        "fallback": logging.WARNING,
        "failed": logging.WARNING,
        "cache_hit": logging.DEBUG,
        "cache_miss": logging.DEBUG,
        "cache_wait": logging.DEBUG,
        "cache_stored": logging.DEBUG,
        "cache_evicted": logging.DEBUG,
        "cache_trouble": logging.WARNING,
        "cache_approximated": logging.INFO,
        "checkpoint_saved": logging.DEBUG,
        "checkpoint_skipped": logging.INFO,
        "checkpoint_resumed": logging.INFO,
        "checkpoint_refused": logging.WARNING,
        "checkpoint_dropped": logging.DEBUG,
        "checkpoint_failed": logging.WARNING,
    }
)

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to one payload.

    Attributes:
        name: What happened; a name of `EVENT_NAMES`.
        request_id: The request that the payload belongs to; ``None`` where none is known.
        payload_id: The handle's id.
        kind: The payload's kind (``latent``, ``embedding`` …).
        stage: The connector's role.
        peer: Address of the other side.
        attempt: The payload's attempt.
        nbytes: Bytes concerned.
        path: How the bytes went: ``p2p``, ``store``, or an engine's word.
        duration_s: How long it took, in seconds.
        reason: Why, in one line, for failures, retries, fallbacks and staging.
        code: Error code where an error is the reason.
        at_s: The owner's monotonic clock when it happened, in seconds; the bus fills it in.
        extra: Further scalars.
    """

    name: EventName
    request_id: str | None = None
    payload_id: str | None = None
    kind: str | None = None
    stage: str | None = None
    peer: str | None = None
    attempt: int | None = None
    nbytes: int | None = None
    path: str | None = None
    duration_s: float | None = None
    reason: str | None = None
    code: str | None = None
    at_s: float | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in _LEVELS:
            message = f"name={self.name!r} is no event; use one of {', '.join(EVENT_NAMES)}"
            raise ConfigError(message, field="name")

    def fields(self) -> dict[str, Scalar]:
        """Return what is known as one flat mapping, without ``None`` values; ``extra`` never replaces a field."""
        known: dict[str, Scalar] = {key: value for key, value in self.extra.items() if value is not None}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.name != "extra" and value is not None:
                known[entry.name] = value
        return known


class ObserverSpec:
    """The hooks that an observer may implement, each with ``@hookimpl`` and at most the one argument ``event``.

    An implementation runs in the thread that did the work, and should return at once. What it raises is logged and goes
    no further.
    """

    @_hookspec
    def moonrelay_published(self, event: Event) -> None:
        """A payload has a handle; its bytes need not be ready."""

    @_hookspec
    def moonrelay_staged(self, event: Event) -> None:
        """Unregistered memory was copied into the pool; ``nbytes`` and ``reason`` say how much and why."""

    @_hookspec
    def moonrelay_spilled(self, event: Event) -> None:
        """A payload was moved to the relay and its direct memory freed."""

    @_hookspec
    def moonrelay_claimed(self, event: Event) -> None:
        """A reader was granted a claim."""

    @_hookspec
    def moonrelay_delivered(self, event: Event) -> None:
        """Every byte arrived and was checked; ``path``, ``nbytes`` and ``duration_s`` are given."""

    @_hookspec
    def moonrelay_failed(self, event: Event) -> None:
        """A publication or a delivery ended in an error; ``code`` and ``reason`` are given."""

    @_hookspec
    def moonrelay_retried(self, event: Event) -> None:
        """A transfer or a message is tried again."""

    @_hookspec
    def moonrelay_lease_expired(self, event: Event) -> None:
        """A payload or a claim ran out."""

    @_hookspec
    def moonrelay_released(self, event: Event) -> None:
        """A payload's memory or objects were given back."""

    @_hookspec
    def moonrelay_fallback(self, event: Event) -> None:
        """Another path or backend than the preferred one is used; ``reason`` is given."""

    @_hookspec
    def moonrelay_cache_hit(self, event: Event) -> None:
        """A cache had it; ``path`` says where: ``memory`` or ``store``."""

    @_hookspec
    def moonrelay_cache_miss(self, event: Event) -> None:
        """No cache had it, so it is computed here."""

    @_hookspec
    def moonrelay_cache_wait(self, event: Event) -> None:
        """Somebody else was computing it; ``duration_s`` says for how long that was waited for."""

    @_hookspec
    def moonrelay_cache_stored(self, event: Event) -> None:
        """It is in the store now, for others too."""

    @_hookspec
    def moonrelay_cache_evicted(self, event: Event) -> None:
        """Something gave way to what was used later; ``path`` says where, ``nbytes`` how much."""

    @_hookspec
    def moonrelay_cache_trouble(self, event: Event) -> None:
        """An entry was damaged or foreign, or the store did not serve; the request went on. ``reason`` is given."""

    @_hookspec
    def moonrelay_cache_approximated(self, event: Event) -> None:
        """What was computed for other latents was used in this request's stead, as asked for; ``reason`` names it."""

    @_hookspec
    def moonrelay_checkpoint_saved(self, event: Event) -> None:
        """A denoising loop's state is whole in the store; ``step``, ``nbytes`` and ``duration_s`` are given."""

    @_hookspec
    def moonrelay_checkpoint_skipped(self, event: Event) -> None:
        """A checkpoint was due and not taken, because the one before was still under way."""

    @_hookspec
    def moonrelay_checkpoint_resumed(self, event: Event) -> None:
        """A run goes on after ``step``, from a checkpoint."""

    @_hookspec
    def moonrelay_checkpoint_refused(self, event: Event) -> None:
        """A checkpoint was found and not used; ``reason`` is given, and ``field`` where one differs."""

    @_hookspec
    def moonrelay_checkpoint_dropped(self, event: Event) -> None:
        """A checkpoint was removed; ``reason`` says why."""

    @_hookspec
    def moonrelay_checkpoint_failed(self, event: Event) -> None:
        """A checkpoint could not be saved, looked for or removed; the job went on. ``reason`` is given."""


Observer = Callable[[Event], object]


class _Subscriber:
    """One observer, whatever its form; counts what it raises."""

    __slots__ = ("_call", "_hooks", "failures", "label", "observer")

    def __init__(self, observer: object) -> None:
        self.observer = observer
        self.label = _label_of(observer)
        self.failures = 0
        self._call: Observer | None = None
        self._hooks: pluggy.HookRelay | None = None
        if isinstance(observer, type):
            message = f"observer {self.label} is a class; give an instance of it"
            raise PluginError(message, plugin=self.label)
        manager = pluggy.PluginManager("moonrelay")
        manager.add_hookspecs(ObserverSpec)
        try:
            manager.register(observer)
            manager.check_pending()
        except pluggy.PluginValidationError as exc:
            message = f"observer {self.label} does not fit the hooks: {exc}"
            raise PluginError(message, plugin=self.label) from exc
        if manager.get_hookcallers(observer):
            self._hooks = manager.hook
        elif callable(observer):
            self._call = observer
        else:
            message = (
                f"observer {self.label} is neither callable nor has a method marked with moonrelay.events.hookimpl"
            )
            raise PluginError(message, plugin=self.label)

    def tell(self, event: Event) -> None:
        if self._hooks is not None:
            getattr(self._hooks, f"moonrelay_{event.name}")(event=event)
        elif self._call is not None:
            self._call(event)


class EventBus:
    """Tells events to observers and to the log.

    Args:
        observers: Callables that take an `Event`, or objects with methods marked by `hookimpl`.
        clock: Stamps events that carry no time.

    Raises:
        PluginError: An observer is neither, or one of its hooks does not fit its specification.

    Threads: any. Observers run in the emitting thread, each apart from the others, in the order of subscription.
    """

    def __init__(self, observers: Iterable[object] = (), clock: Clock | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._subscribers: tuple[_Subscriber, ...] = tuple(_Subscriber(observer) for observer in observers)

    def subscribe(self, observer: object) -> Callable[[], None]:
        """Add an observer; return a function that takes it away again (idempotent).

        Raises:
            PluginError: It is neither callable nor an object with hooks.
        """
        subscriber = _Subscriber(observer)
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(known for known in self._subscribers if known is not subscriber)

        return unsubscribe

    def heeds(self, name: EventName) -> bool:
        """Return whether anybody would hear an event of that name; whoever emits many asks before making one."""
        return bool(self._subscribers) or logger.isEnabledFor(_LEVELS[name])

    def emit(self, event: Event) -> None:
        """Log the event and tell it to every observer; never raises because of one.

        Blocks: for as long as the observers take.
        """
        level = _LEVELS[event.name]
        if logger.isEnabledFor(level):
            _log(level, event)
        subscribers = self._subscribers
        if not subscribers:
            return
        if event.at_s is None:
            event = dataclasses.replace(event, at_s=self._clock.monotonic())
        for subscriber in subscribers:
            try:
                subscriber.tell(event)
            except Exception:  # noqa: BLE001 - foreign code; its failure is its own, and is logged here aloud
                self._observer_failed(subscriber, event)

    def _observer_failed(self, subscriber: _Subscriber, event: Event) -> None:
        with self._lock:
            subscriber.failures += 1
            first = subscriber.failures == 1
        logger.log(
            logging.ERROR if first else logging.DEBUG,
            "observer %s failed on %s; it stays subscribed, and later failures are logged at DEBUG",
            subscriber.label,
            event.name,
            exc_info=True,
        )


def load_observers(names: Iterable[str], registry: Registry | None = None) -> list[object]:
    """Load observers by name from the entry-point group ``moonrelay.observers``.

    Args:
        names: The observers asked for; none is loaded otherwise.
        registry: Where to look; the installed distributions by default.

    Returns:
        The observers, for `EventBus`; a class is made into an instance, without arguments.

    Raises:
        PluginError: A name is unknown, cannot be imported, or its class cannot be made.
    """
    registry = registry or Registry(OBSERVERS)
    observers: list[object] = []
    for name in names:
        part = registry.load(name)
        if isinstance(part, type):
            try:
                part = part()
            except Exception as exc:  # foreign code
                message = f"observer {name!r} cannot be made: {type(exc).__name__}: {exc}"
                raise PluginError(message, plugin=name) from exc
        observers.append(part)
    return observers


def _label_of(observer: object) -> str:
    own = getattr(observer, "__qualname__", None)
    return own if isinstance(own, str) else type(observer).__qualname__


def _log(level: int, event: Event) -> None:
    known = event.fields()
    shown = " ".join(f"{key}={value}" for key, value in known.items() if key not in ("name", "at_s"))
    logger.log(
        level,
        "%s %s",
        event.name,
        shown,
        extra={
            "event": event.name,
            "request_id": event.request_id,
            "payload_id": event.payload_id,
            "stage": event.stage,
            "attempt": event.attempt,
            "peer": event.peer,
        },
    )
