"""StageQueue: the protocol of a queue, and how a URL finds its backend.

Owns the public contract only. Backends are found by URL scheme in the entry-point group ``moonrelay.queues`` and loaded
when asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from moonrelay import config as settings_of
from moonrelay.clock import Clock, SystemClock
from moonrelay.errors import ConfigError, PluginError
from moonrelay.plugins import QUEUES, Registry
from moonrelay.queueing.settings import QueueConfig
from moonrelay.queueing.task import Pipeline, Plain, StageTask

if TYPE_CHECKING:
    from moonrelay.queueing.views import QueueEvent, QueueStats, RequestView
    from moonrelay.queueing.worker import Worker


#: Schemes that a later release brings.
_LATER = frozenset({"redis", "rediss", "valkey"})


class StageQueue(ABC):
    """Per-stage queues of tasks, shared by clients and workers.

    A request has one task at a time: it waits in a stage's queue, or one worker holds it. A stage's task is kept as it
    was submitted until the request ends, so that a request can go back to the stage that made a lost input.

    Delivery is at least once, the effect is once: every claim has a fencing token that grows with each claim of the
    queue, and whatever comes with an old token raises `LeaseLost` and changes nothing. Each request reaches exactly one
    end: ``done``, ``failed``, ``cancelled`` or ``dead`` (attempts used up).

    Threads: all methods may be called from any thread. Made anew in each process; not to be carried over a fork.
    """

    @staticmethod
    def connect(
        url: str,
        *,
        clock: Clock | None = None,
        pipeline: Pipeline | None = None,
        config: QueueConfig | Mapping[str, Any] | None = None,
        plugins: Registry | None = None,
    ) -> StageQueue:
        """Open the queue at ``url``.

        Args:
            url: ``sqlite:///relative/path.db``, ``sqlite:////absolute/path.db``, ``memory://`` (a new queue inside this
                process), or a plugin's scheme.
            clock: Monotonic time; all processes of one queue must share it.
            pipeline: The stages. ``None`` takes what the queue was made with, or encode -> denoise -> decode when it is
                new.
            config: Settings; see `QueueConfig`.
            plugins: Where backends are looked up; the installed ones by default.

        Raises:
            ConfigError: The URL, a setting or the folder is wrong, or ``pipeline`` is not the stored one.
            PluginError: No backend is installed for the scheme, or it cannot be loaded.
            VersionError: The stored queue has another version.
            IntegrityError: What is stored there is damaged, or no queue.
        """
        scheme = _scheme_of(url)
        backend = _load(scheme, plugins or Registry(QUEUES))
        settings = settings_of.build(QueueConfig, config, env_prefix="QUEUE")
        return backend.open(url, clock=clock or SystemClock(), pipeline=pipeline, config=settings)

    @classmethod
    @abstractmethod
    def open(cls, url: str, *, clock: Clock, pipeline: Pipeline | None, config: QueueConfig) -> StageQueue:
        """Open a queue of this backend; what `connect` calls. Raises as `connect` does."""

    @property
    @abstractmethod
    def url(self) -> str:
        """A URL by which another process of this machine reaches the same queue."""

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The stages, as stored with the queue."""

    @property
    @abstractmethod
    def config(self) -> QueueConfig:
        """This object's settings."""

    # Clients.

    @abstractmethod
    def submit(self, task: StageTask, *, if_absent: bool = False, ahead: StageTask | None = None) -> bool:
        """Queue a request's first task.

        A request id is taken until `forget` (or until the ended request is dropped as the oldest). A client that does
        not know whether its submit arrived repeats it with ``if_absent=True``: an equal task under the same id is then
        left as it stands, wherever it has got to; a different one is refused.

        Where what the first stage would make is there already, the request may begin further on: with ``ahead``, whose
        stage comes later. ``task`` is kept: it is what the request is known by, and what it goes back to when
        `Job.lost_input` says that the input of ``ahead`` is not there after all.

        Args:
            task: The first task, with the request's id, priority and deadline.
            if_absent: See above.
            ahead: The task to begin with instead; of its own it has stage, payload, handle, affinity and bounds of
                attempts.

        Returns:
            True when queued, False when ``if_absent`` found it there.

        Raises:
            ConfigError: The id is taken, a field is wrong, or a payload is not plain; the message names the field.
            QueueFull: ``max_depth`` requests are under way; nothing was queued.
        """

    @abstractmethod
    def result(self, request_id: str, timeout_s: float | None = None) -> Plain:
        """Wait for a request's end and return what its last stage gave.

        Repeatable: the outcome is one and stays readable until `forget`, or until newer ended requests push it out.

        Blocks: until the end, or ``timeout_s``.

        Raises:
            ConfigError: No such request.
            Cancelled: It was cancelled.
            DeadlineExceeded: Its deadline passed (``context['stage']`` says where), or ``timeout_s`` did
                (``context['waited_s']``).
            MoonrelayError: The typed error of the stage that failed, with ``stage``, ``attempt`` and ``state`` in its
                context.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> bool:
        """End a request as cancelled, wherever it is.

        A worker that holds it is told at its next renewal, progress or completion. Its credit is free at once.

        Returns:
            True when this call ended it, False when it had ended before.

        Raises:
            ConfigError: No such request.
        """

    @abstractmethod
    def forget(self, request_id: str) -> bool:
        """Drop an ended request; return whether there was one.

        Raises:
            ConfigError: The request has not ended; cancel it first.
        """

    @abstractmethod
    def requests(self) -> list[RequestView]:
        """Return all requests that are kept, in order of submission."""

    @abstractmethod
    def stats(self) -> QueueStats:
        """Return the load of each stage, the credits and the workers."""

    @abstractmethod
    def events(self, since: int = 0, *, limit: int = 1000, timeout_s: float = 0.0) -> list[QueueEvent]:
        """Return events with a number above ``since``, oldest first; the feed of a live display.

        Only the newest ``keep_events`` are kept: a first number above ``since + 1`` means that some were dropped.

        Blocks: up to ``timeout_s`` when there is none yet.
        """

    # Workers.

    @abstractmethod
    def register_worker(
        self,
        stage: str,
        *,
        slots: int = 1,
        buffers: int | None = None,
        affinity: Mapping[str, str] | None = None,
        worker_id: str | None = None,
        heartbeat: bool = True,
    ) -> Worker:
        """Join the pool of a stage.

        Args:
            stage: Whose work it takes.
            slots: Jobs it holds at a time at most.
            buffers: Credits that it gives to the stage upstream: results that may wait for this pool, not its compute
                slots. ``None`` is 4 for each slot. A pool that keeps up idles nobody when its buffers are at least as
                many as the upstream workers.
            affinity: Labels that a task's affinity is compared with.
            worker_id: A name for displays; made unique.
            heartbeat: Renew from a thread of its own; False leaves `Worker.renew` to the caller.

        Raises:
            ConfigError: The stage is not in the pipeline, or a number is wrong.
        """

    @abstractmethod
    def close(self) -> None:
        """Close workers made here, wake everybody who waits (they get `ClosedError`), free files. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _scheme_of(url: object) -> str:
    if not isinstance(url, str):
        message = f"url={url!r} must be a text such as 'sqlite:///run/moonrelay.db'"
        raise ConfigError(message, field="url")
    try:
        scheme = urlsplit(url).scheme
    except ValueError as exc:
        message = f"url={url!r} is not a URL; use e.g. 'sqlite:///run/moonrelay.db'"
        raise ConfigError(message, field="url") from exc
    if not scheme or "://" not in url:
        message = f"url={url!r} has no scheme; use e.g. 'sqlite:///run/moonrelay.db'"
        raise ConfigError(message, field="url")
    return scheme


def _load(scheme: str, registry: Registry) -> type[StageQueue]:
    """Return the backend of a scheme; one that is broken hurts only its own scheme."""
    if scheme not in registry.names() and scheme in _LATER:
        message = f"the {scheme} backend is not installed yet; use one of {', '.join(registry.names())}"
        raise PluginError(message, scheme=scheme)
    return registry.load_class(scheme, StageQueue)  # type: ignore[type-abstract]
