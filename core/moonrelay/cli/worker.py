"""``moonrelay worker``: one worker of a stage, from a queue to the next stage.

Owns a worker process's start and end: the same bits in every process, what a supervisor reads on stdout, and signals.
The work itself is `moonrelay.orchestrator`'s.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

import typer

from moonrelay.cli.embeddings import DEFAULT, cache_bytes, give_cache
from moonrelay.cli.features import feature_bytes, give_features
from moonrelay.cli.hold import HoldingProgram
from moonrelay.cli.lifeline import Lifeline
from moonrelay.clock import Clock, SystemClock
from moonrelay.config import from_environment
from moonrelay.errors import ConfigError, MoonrelayError, PluginError
from moonrelay.plugins import ADAPTERS, Registry
from moonrelay.queueing.precedence import INTERACTIVE_FIRST
from moonrelay.queueing.states import ENDED

if TYPE_CHECKING:
    from moonrelay.cache.checkpoint import Checkpointer
    from moonrelay.events import Event
    from moonrelay.orchestrator import StageLoop, StageProgram
    from moonrelay.queueing.base import StageQueue
    from moonrelay.queueing.task import Plain
    from moonrelay.queueing.worker import Worker

logger = logging.getLogger(__name__)

#: How long an orphaned worker may take to end in order, in seconds.
ORPHAN_GRACE_S = 5.0
#: Events that ``--tell-checkpoints`` prints.
TOLD = frozenset({"checkpoint_saved", "checkpoint_resumed", "checkpoint_refused"})
#: Pause between two looks for requests that have ended, in seconds.
SWEEP_S = 5.0


class WorkerAdapter(Protocol):
    """What a worker asks of a plugin of ``moonrelay.adapters``."""

    stages: tuple[str, ...]

    def prepare(self, threads: int) -> Mapping[str, Plain]:
        """Set the process up for equal bits; return what decides them."""
        ...

    def load_program(
        self,
        model: str,
        stage: str,
        *,
        output: Path,
        device: str,
        dtype: str | Mapping[str, str] | None,
        file_format: str,
    ) -> StageProgram:
        """Load one stage of a model."""
        ...


def worker(
    stage: Annotated[str, typer.Argument(help="Stage whose work it takes: encode, denoise or decode.")],
    model: Annotated[str, typer.Option(help="Folder or hub id of the model.")],
    queue: Annotated[str, typer.Option(help="Queue, e.g. sqlite:////run/moonrelay.db; or MOONRELAY_QUEUE_URL.")] = "",
    adapter: Annotated[str, typer.Option(help="Host that runs the model; see `moonrelay adapters`.")] = "diffusers",
    transfer_mode: Annotated[
        str | None, typer.Option(help="auto, p2p or store; or MOONRELAY_TRANSFER_MODE.", show_default="auto")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Direct engine: mooncake, shm, ...; or MOONRELAY_TE_ENGINE.", show_default="mooncake"),
    ] = None,
    protocol: Annotated[
        str | None, typer.Option(help="Mooncake's protocol: tcp, rdma, nvlink.", show_default="tcp")
    ] = None,
    hostname: Annotated[
        str | None, typer.Option(help="Numeric address that peers dial.", show_default="127.0.0.1")
    ] = None,
    nics: Annotated[str | None, typer.Option(help="Mooncake's device list, e.g. mlx5_0,mlx5_1.")] = None,
    pool_bytes: Annotated[int | None, typer.Option(help="Size of the registered pool.", show_default="256 MiB")] = None,
    store: Annotated[
        str | None, typer.Option(help="Relay: local:///folder or mooncake://host:port; or MOONRELAY_STORE_URL.")
    ] = None,
    integrity: Annotated[str, typer.Option(help="auto, full or off.")] = "auto",
    output: Annotated[Path, typer.Option(help="Folder for results; used by decode.")] = Path("out"),
    file_format: Annotated[str, typer.Option("--format", help="mp4, gif, png or npy; used by decode.")] = "mp4",
    device: Annotated[str, typer.Option(help="Where the model lives: cpu, cuda:0, ...")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(help="Type of the weights, e.g. bfloat16, or default=bfloat16,vae=float32.")
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of one torch operation; the same in every stage, or bits may differ.")
    ] = 1,
    buffers: Annotated[
        int | None, typer.Option(min=0, help="Results that may wait for this worker.", show_default="4")
    ] = None,
    worker_id: Annotated[
        str | None, typer.Option(help="A name for displays; the queue makes it unique.", show_default="the stage")
    ] = None,
    spill_after_s: Annotated[
        float,
        typer.Option(
            "--spill-after-s", "--spill-after", help="In auto: seconds until an unclaimed payload is relayed."
        ),
    ] = 5.0,
    lease_ttl_s: Annotated[
        float, typer.Option("--lease-ttl-s", "--lease-ttl", help="Life of a published payload in seconds.")
    ] = 600.0,
    drain_timeout_s: Annotated[
        float, typer.Option(help="At its end: how long moving unread payloads to the store, and readers, may take.")
    ] = 10.0,
    claim_ttl_s: Annotated[
        float | None, typer.Option(help="A dead reader's claim ends after these seconds.", show_default="5")
    ] = None,
    queue_lease_s: Annotated[
        float | None,
        typer.Option(help="A dead worker's job is given to another after these seconds.", show_default="10"),
    ] = None,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Save a job's state after every so many steps, for another worker to go on from; 0 for never.",
        ),
    ] = 0,
    checkpoint_ttl_s: Annotated[
        float, typer.Option(help="A checkpoint that nobody removed goes after these seconds.")
    ] = 3600.0,
    preempt: Annotated[
        bool | None,
        typer.Option(
            "--preempt/--no-preempt",
            help="Leave a batch job at a step for a waiting interactive one and go on with it later; needs "
            "--checkpoint-every; or MOONRELAY_QUEUE_PREEMPT, which says which classes.",
            show_default="no",
        ),
    ] = None,
    preempt_least_s: Annotated[
        float | None, typer.Option(min=0, help="With --preempt: not a job that ends sooner.", show_default="2")
    ] = None,
    embedding_cache: Annotated[
        str | None,
        typer.Option(
            help="Bound of the cache of embeddings, in memory and in the store, e.g. 2GiB, or off; "
            "or MOONRELAY_EMBEDDING_CACHE.",
            show_default=DEFAULT,
        ),
    ] = None,
    feature_cache: Annotated[
        str | None,
        typer.Option(
            help="Bound of the features of prompts that denoise keeps on its device, e.g. 2GiB, or off; exact.",
            show_default="off",
        ),
    ] = None,
    approximate: Annotated[
        list[str] | None,
        typer.Option(
            help="With --feature-cache: allow what changes results. unconditional_prediction: take the negative "
            "prompt's predictions from another request.",
            show_default="nothing",
        ),
    ] = None,
    tell_checkpoints: Annotated[
        bool, typer.Option("--tell-checkpoints", help="For supervisors: a JSON line for each checkpoint, too.")
    ] = False,
    grace_s: Annotated[
        float, typer.Option(min=0, help="After SIGTERM, how long the job under way may take before it is given back.")
    ] = 30.0,
    parent_fd: Annotated[
        int | None, typer.Option(help="For supervisors: an inherited pipe; when it breaks, the worker ends itself.")
    ] = None,
    hold_at: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="For fault demonstrations: stop at this fraction of the first job, to be killed there."
        ),
    ] = None,
) -> None:
    """Run one worker of a stage until it is told to stop.

    With --preempt, a batch job makes way at a step for a waiting interactive one, and goes on from there afterwards.

    Prints one JSON line when it is ready and one at its end. SIGTERM lets the job under way finish (a second one, or
    --grace-s, gives it back) and exits with 0; with --checkpoint-every, the job is left at the next step, its state
    saved, for another worker to go on. Ctrl-C gives it back at once and exits with 130. In both cases what
    nobody has read yet is moved to the store. The deployment's secret is MOONRELAY_AUTH_KEY.
    """
    from moonrelay.cache.checkpoint import Checkpointer
    from moonrelay.connector import DiffusionConnector
    from moonrelay.orchestrator import StageLoop
    from moonrelay.queueing.base import StageQueue

    clock = SystemClock()
    began = clock.monotonic()
    shutdown = Shutdown(grace_s)
    lifeline = None if parent_fd is None else Lifeline(parent_fd, shutdown.orphaned)
    queue_url = queue or from_environment("QUEUE_URL")
    if not queue_url:
        message = "no queue: give --queue, e.g. sqlite:////run/moonrelay.db, or set MOONRELAY_QUEUE_URL"
        raise ConfigError(message, field="queue")
    bound = cache_bytes(embedding_cache)
    feature_bound = feature_bytes(feature_cache, approximate)
    settings = _queue_settings(queue_lease_s) | _preemption(preempt, preempt_least_s, checkpoint_every)
    host = load_adapter(adapter)
    with ExitStack() as stack:
        # A second of collecting what a framework's import made, at the very end, frees nothing that the exit does not.
        stack.callback(gc.freeze)
        connection = stack.enter_context(StageQueue.connect(queue_url, config=settings))
        connection.pipeline[stage]  # refuses an unknown stage before the model is loaded
        connector = stack.enter_context(
            DiffusionConnector(
                stage,
                transfer_mode,
                _given(
                    engine=engine,
                    protocol=protocol,
                    hostname=hostname,
                    nics=nics,
                    pool_bytes=pool_bytes,
                    device=None if device == "cpu" else device,
                ),
                _given(url=store),
                control_config=_given(claim_ttl_s=claim_ttl_s),
                lease_ttl_s=lease_ttl_s,
                spill_after_s=spill_after_s,
                drain_timeout_s=drain_timeout_s,
                integrity=integrity,
            )
        )
        # First of all that computes: it decides how many threads torch starts.
        numerics = dict(host.prepare(threads))
        # Now rather than within the first job, which would fail for what is this worker's fault.
        connector.start()
        if tell_checkpoints:
            stack.callback(connector.events.subscribe(_tell))
        keeper = None
        if checkpoint_every:
            keeper = stack.enter_context(
                Checkpointer(connector, every=checkpoint_every, ttl_s=checkpoint_ttl_s, scope=connection.url)
            )
            keeper.start()
        program = host.load_program(
            model,
            stage,
            output=output,
            device=device,
            dtype=parse_dtype(dtype),
            file_format=file_format,
            **_checkpointing(host, adapter, keeper),
        )
        cache = give_cache(program, connector, bound, stack)
        features = give_features(program, connector, feature_bound, approximate, stack)
        if hold_at is not None:
            program = HoldingProgram(
                program, hold_at, lambda: shutdown.asked or (lifeline is not None and lifeline.go_on.is_set())
            )

        def ready(registration: Worker) -> None:
            _say(
                "ready",
                worker_id=registration.worker_id,
                stage=stage,
                pid=os.getpid(),
                numerics=numerics,
                seconds=clock.monotonic() - began,
            )

        loop = StageLoop(
            connection,
            connector,
            program,
            buffers=buffers,
            worker_id=worker_id,
            on_registered=ready,
            on_idle=None if keeper is None else CheckpointSweep(keeper, connection, clock),
        )
        with shutdown.of(loop):
            loop.run()
        cached = {} if cache is None else {"embedding_cache": asdict(cache.counters())}
        if features is not None:
            cached["feature_cache"] = asdict(features.counters())
    counts = loop.counts
    left = {} if keeper is None else {"left": counts.left}
    _say(
        "ended",
        stage=stage,
        completed=counts.completed,
        failed=counts.failed,
        lost=counts.lost,
        rewound=counts.rewound,
        **left,
        **cached,
    )


def load_adapter(name: str) -> WorkerAdapter:
    """Load a host by name and check that it can serve workers.

    Raises:
        PluginError: It is unknown, cannot be loaded, or brings no programs.
    """
    part = Registry(ADAPTERS).load(name)
    host = part() if isinstance(part, type) else part
    if not all(callable(getattr(host, method, None)) for method in ("prepare", "load_program")):
        message = f"adapter {name!r} brings no programs for workers; run its stages inside its own host"
        raise PluginError(message, plugin=name)
    return cast("WorkerAdapter", host)


def parse_dtype(text: str | None) -> str | dict[str, str] | None:
    """Read ``bfloat16`` or ``default=bfloat16,vae=float32``.

    Raises:
        ConfigError: A part of a list is not ``module=type``.
    """
    if text is None or "=" not in text:
        return text
    parts = [part.partition("=") for part in text.split(",")]
    for name, equals, value in parts:
        if not name.strip() or not equals or not value.strip():
            message = f"dtype={text!r} is not understood; give e.g. bfloat16, or default=bfloat16,vae=float32"
            raise ConfigError(message, field="dtype")
    return {name.strip(): value.strip() for name, _, value in parts}


class CheckpointSweep:
    """Has checkpoints removed of requests that ended elsewhere, whose worker cannot do it any more.

    Args:
        keeper: Removes them.
        queue: Knows which requests have ended.
        clock: Time.

    Threads: one.
    """

    def __init__(self, keeper: Checkpointer, queue: StageQueue, clock: Clock) -> None:
        self._keeper = keeper
        self._queue = queue
        self._clock = clock
        self._due_s = clock.monotonic()
        self._swept: frozenset[str] = frozenset()

    def __call__(self) -> None:
        """Look, if it is time."""
        now = self._clock.monotonic()
        if now < self._due_s:
            return
        self._due_s = now + SWEEP_S
        try:
            ended = frozenset(view.request_id for view in self._queue.requests() if view.state in ENDED)
        except MoonrelayError as exc:
            logger.warning("checkpoints of ended requests stay for now: %s", exc)
            return
        if self._keeper.sweep(sorted(ended - self._swept)):
            self._swept = ended


class Shutdown:
    """Turns signals, and the supervisor's death, into an orderly end.

    SIGTERM: the loop stops after the job under way; once ``grace_s`` have passed, or on a second SIGTERM, the main
    thread is interrupted and the job goes back to the queue. Ctrl-C interrupts it at once, by Python's own handler.

    Threads: made in the main thread, which signals interrupt; `orphaned` from any.
    """

    def __init__(self, grace_s: float) -> None:
        self.asked = False
        self._grace_s = grace_s
        self._loop: StageLoop | None = None
        self._working = False
        self._never = threading.Event()
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGALRM, self._out_of_time)

    def of(self, loop: StageLoop) -> Shutdown:
        """Say which loop is stopped; as a context manager round its ``run``."""
        self._loop = loop
        return self

    def __enter__(self) -> Shutdown:
        self._working = True
        return self

    def __exit__(self, *error: object) -> None:
        self._working = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def orphaned(self) -> None:
        """End this process: in order if that takes no longer than `ORPHAN_GRACE_S`, by force otherwise."""
        self._grace_s = 0.0
        os.kill(os.getpid(), signal.SIGTERM)
        self._never.wait(ORPHAN_GRACE_S)
        os._exit(1)

    def _terminate(self, _signal: int, _frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self._loop is None:
            raise SystemExit(0)  # still loading: there is nothing to give back
        self._loop.stop()
        if not self._working:
            return  # draining already
        if again or self._grace_s <= 0:
            raise SystemExit(0)
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _out_of_time(self, _signal: int, _frame: FrameType | None) -> None:
        if self._working:
            raise SystemExit(0)


def _checkpointing(host: WorkerAdapter, adapter: str, keeper: Checkpointer | None) -> dict[str, Any]:
    """Return the argument by which a host is given the checkpointer.

    Raises:
        ConfigError: The host's programs take no checkpoints.
    """
    if keeper is None:
        return {}
    if "checkpointer" not in inspect.signature(host.load_program).parameters:
        message = f"--checkpoint-every: adapter {adapter!r} takes no checkpoints; leave it out"
        raise ConfigError(message, field="checkpoint_every")
    return {"checkpointer": keeper}


def _preemption(asked: bool | None, least_s: float | None, checkpoint_every: int) -> dict[str, str | float]:
    """Return the queue's settings of preemption, as far as they were given here.

    Raises:
        ConfigError: It was asked for, and without checkpoints no job can be left.
    """
    there = from_environment("QUEUE_PREEMPT")
    if asked and not checkpoint_every:
        message = "--preempt: a job can be left only where its state is saved; give --checkpoint-every, e.g. 5"
        raise ConfigError(message, field="preempt")
    if there and asked is None and not checkpoint_every:
        logger.warning("MOONRELAY_QUEUE_PREEMPT=%s: nothing is preempted here without --checkpoint-every", there)
    given: dict[str, str | float] = {} if least_s is None else {"preempt_least_s": least_s}
    if asked is not None:
        given["preempt"] = (there or INTERACTIVE_FIRST) if asked else ""
    return given


def _tell(event: Event) -> None:
    """Print what a display wants to know of checkpoints."""
    if event.name in TOLD:
        _say(event.name, **{key: value for key, value in event.fields().items() if key != "name"})


def _queue_settings(lease_s: float | None) -> dict[str, str | float]:
    return {} if lease_s is None else {"lease_s": lease_s, "renew_s": lease_s / 4}


def _given(**values: object) -> dict[str, object]:
    """Return the options that were given; the others are the environment's or the defaults'."""
    return {name: value for name, value in values.items() if value is not None}


def _say(event: str, **fields: object) -> None:
    typer.echo(json.dumps({"event": event, **fields}))
