"""The parts a connector is made of, started on first use and ended in order.

Owns the life of engine, pool, registrations, relay, channel, reaper and mover threads. Holds no payload and no lease.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from moonrelay import plugins
from moonrelay.clock import Clock, Deadline
from moonrelay.connector.settings import ConnectorSettings
from moonrelay.control.channel import Handler, PeerChannel
from moonrelay.control.lossy import losses
from moonrelay.control.messages import Push
from moonrelay.errors import ClosedError, MoonrelayError
from moonrelay.events import Event, EventBus, EventName
from moonrelay.handle import ControlAddress, RelayAddress, StageHandle
from moonrelay.lease.reaper import Job, Reaper
from moonrelay.plugins import Registry
from moonrelay.relay import parse_url
from moonrelay.relay.base import Relay
from moonrelay.relay.sweeper import Sweeper
from moonrelay.transfer.arena import Arena
from moonrelay.transfer.base import TransferEngine
from moonrelay.transfer.pull import Puller
from moonrelay.transfer.quarantine import Quarantine
from moonrelay.transfer.registry import Registrations

if TYPE_CHECKING:
    from moonrelay.config import StoreConfig

logger = logging.getLogger(__name__)

#: Threads of one connector that wait for its store (puts, removals, sweeps), that stage and digest, and that renew
#: claims: each kind has its own, so that a slow store delays no direct handoff, and neither of them a renewal.
MOVERS = 3
STAGERS = 2
RENEWERS = 8
QUARANTINE_POLL_S = 0.05
#: How long transfers that are not quiet may keep `close` waiting, in seconds.
QUIET_TIMEOUT_S = 5.0
#: How long what movers have yet to do, all together, may keep `close` waiting, in seconds.
LAST_WORK_S = 5.0


class DataPlane:
    """A started engine with its pool, registrations and puller."""

    def __init__(self, engine: TransferEngine, settings: ConnectorSettings, clock: Clock) -> None:
        self.engine = engine
        self.device_type = settings.transfer.device.partition(":")[0]
        self.arena = Arena(engine, settings.transfer.pool_bytes, clock, settings.transfer.device)
        self.registrations = Registrations(engine)
        self.quarantine = Quarantine(clock)
        self.puller = Puller(
            engine,
            window=settings.transfer.window,
            piece_bytes=settings.transfer.piece_bytes,
            clock=clock,
            quarantine=self.quarantine,
        )

    def close(self) -> None:
        """Wait for what is not quiet, then end engine and pool. Idempotent."""
        quiet = self.quarantine.close(QUIET_TIMEOUT_S)
        self.registrations.close()
        self.arena.close()
        self.engine.close()
        if not quiet and self.quarantine.poll():
            logger.warning("transfers were not quiet %s s before the engine was closed", QUIET_TIMEOUT_S)


class Runtime:
    """Lazily started parts of one connector.

    Threads: all methods from any thread.

    Attributes:
        handler: Takes requests of peers; set before the channel is first used.
        on_push: Takes pushes of peers; likewise.
        on_tick: Runs on the reaper's thread when due; returns when it wants to run next.
        on_renew: Runs on the reaper's thread; returns after how many seconds to run again, ``None`` for not before
            `renew_within`.
    """

    def __init__(self, settings: ConnectorSettings, clock: Clock, events: EventBus) -> None:
        self.settings = settings
        self.clock = clock
        self.events = events
        self.handler: Handler | None = None
        self.on_push: Callable[[ControlAddress, Push], None] | None = None
        self.on_tick: Callable[[float], float | None] = lambda _now: None
        self.on_renew: Callable[[], float | None] = lambda: None
        self._closed = False
        self._lock = threading.RLock()
        self._moving: set[Future[None]] = set()
        self._moving_lock = threading.Lock()
        self._pause = threading.Condition()
        self._data: DataPlane | None = None
        self._channel: PeerChannel | None = None
        self._relay: Relay | None = None
        self._foreign_relays: dict[str, Relay] = {}
        self._policies = Registry(plugins.POLICIES)
        self._last_work: Deadline | None = None
        self._stagers = ThreadPoolExecutor(STAGERS, thread_name_prefix="moonrelay-stage", initializer=_give_way)
        self._movers = ThreadPoolExecutor(MOVERS, thread_name_prefix="moonrelay-mover")
        self._renewers = ThreadPoolExecutor(RENEWERS, thread_name_prefix="moonrelay-renew")
        self._reaper = Reaper(clock)
        self._tick: Job = self._reaper.job("leases", self._run_tick)
        self._renew: Job = self._reaper.job("renewals", self._run_renewals)
        self._quiet: Job = self._reaper.job("quarantine", self._poll_quarantine)

    # -- parts ----------------------------------------------------------------------------------------------------

    def data(self) -> DataPlane:
        """Return the engine's side, started on first use. Blocks: up to about a second, once.

        Raises:
            PluginError: The engine is unknown, or its native library is missing.
            ClosedError: The connector is closed.
        """
        data = self._data
        if data is not None and not self._closed:
            return data
        with self._lock:
            self._check_open()
            if self._data is None:
                engine_class = Registry(plugins.TRANSFERS).load_class(
                    self.settings.transfer.engine,
                    TransferEngine,  # type: ignore[type-abstract]
                )
                engine = engine_class(self.settings.transfer)
                try:
                    engine.start()
                except BaseException:
                    engine.close()
                    raise
                self._data = DataPlane(engine, self.settings, self.clock)
            return self._data

    def channel(self) -> PeerChannel:
        """Return the peer channel, bound on first use. A claim's renewal never waits for another part's start."""
        channel = self._channel
        if channel is not None and not self._closed:
            return channel
        with self._lock:
            self._check_open()
            if self._channel is None:
                lost = losses(self.settings.control.options)
                if lost is not None:
                    words = ", ".join(self.settings.control.options["drop"])
                    logger.warning("%s: control messages are lost on purpose: %s", self.settings.role, words)
                channel = PeerChannel(
                    self.settings.control,
                    auth_key=self.settings.auth_key,
                    clock=self.clock,
                    handler=self.handler,
                    on_push=self.on_push,
                    drop=lost,
                    name=self.settings.role,
                    advertise_host=self.settings.transfer.hostname,
                )
                channel.start()
                self._channel = channel
            return self._channel

    def relay(self) -> Relay:
        """Return this connector's own relay, started on first use. Blocks: seconds at most, once.

        Raises:
            PluginError, ConfigError, PeerLost: It cannot be reached.
        """
        with self._lock:
            self._check_open()
            if self._relay is None:
                self._relay = self._start_relay(self.settings.store)
                sweeper = Sweeper(self._relay, self.settings.store.namespace, self.clock)
                interval = self.settings.store.sweep_interval_s
                job = self._reaper.job("sweep", lambda now: self._sweep(sweeper, now, interval))
                # At once: a start-up sweep clears what a killed process left.
                job.due_by(self.clock.monotonic())
            return self._relay

    def relay_at(self, address: RelayAddress) -> Relay:
        """Return the relay that a handle names: our own where it is the same store."""
        own = self.settings.relays and self.relay()
        if own and own.url == address.url:
            return own
        with self._lock:
            self._check_open()
            relay = self._foreign_relays.get(address.url)
            if relay is None:
                # Options are of our own store's kind; another one is reached by its URL alone.
                relay = self._start_relay(replace(self.settings.store, url=address.url, options={}))
                self._foreign_relays[address.url] = relay
            return relay

    def policy(self, name: str) -> Callable[..., object]:
        """Return a plugin's lease policy by name."""
        found = self._policies.load(name)
        if callable(found):
            return found
        message = f"lease policy {name!r} is {found!r}, which cannot be called"
        raise MoonrelayError(message)

    def _start_relay(self, config: StoreConfig) -> Relay:
        scheme = "local" if config.url is None else parse_url(config.url).scheme
        relay_class = Registry(plugins.RELAYS).load_class(scheme, Relay)  # type: ignore[type-abstract]
        relay = relay_class(config)
        try:
            relay.start()
        except BaseException:
            relay.close()
            raise
        return relay

    @property
    def live_slots(self) -> int:
        """Pieces of pool memory that somebody holds; 0 where no pool was needed yet."""
        data = self._data
        return 0 if data is None else data.arena.live_slots

    # -- work -----------------------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], None]) -> None:
        """Run ``work``, which may wait for the store, on a mover thread.

        Raises:
            ClosedError: The connector is closed.
        """
        done = self._submit(self._movers, work)
        with self._moving_lock:
            self._moving.add(done)
        done.add_done_callback(self._moved)

    def _moved(self, done: Future[None]) -> None:
        with self._moving_lock:
            self._moving.discard(done)

    def submit_staging(self, work: Callable[[], None]) -> None:
        """Run ``work``, which waits for nobody, on a staging thread. Raises as `submit`."""
        self._submit(self._stagers, work)

    def patience(self, seconds: float) -> Deadline:
        """Return a deadline for work on a mover: shorter once the connector is being closed."""
        last = self._last_work
        return Deadline(seconds if last is None else last.remaining(seconds), self.clock)

    def submit_renewal(self, work: Callable[[], None]) -> None:
        """Run ``work`` on a renewing thread."""
        self._submit(self._renewers, work)

    def tick_by(self, when: float) -> None:
        """Let ``on_tick`` run no later than ``when``."""
        self._due(self._tick, when)

    def renew_within(self, seconds: float) -> None:
        """Let ``on_renew`` run within ``seconds``, and again as it says."""
        self._due(self._renew, self.clock.monotonic() + seconds)

    def watch_quarantine(self) -> None:
        """Poll transfers that were not quiet at their deadline until they are."""
        self._due(self._quiet, self.clock.monotonic() + QUARANTINE_POLL_S)

    def pause(self, seconds: float | None) -> None:
        """Wait for ``seconds``, or until the connector is closed."""
        with self._pause:
            if not self._closed:
                self.clock.wait(self._pause, seconds)

    def emit(
        self,
        handle: StageHandle | None,
        name: EventName,
        *,
        path: str | None = None,
        nbytes: int | None = None,
        duration_s: float | None = None,
        reason: str | None = None,
        code: str | None = None,
    ) -> None:
        """Tell observers what happened to a payload."""
        if not self.events.heeds(name):
            return
        self.events.emit(
            Event(
                name=name,
                request_id=handle.request_id if handle else None,
                payload_id=handle.id if handle else None,
                kind=handle.kind if handle else None,
                attempt=handle.attempt if handle else None,
                stage=self.settings.role,
                path=path,
                nbytes=nbytes,
                duration_s=duration_s,
                reason=reason,
                code=code,
            )
        )

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> Future[None]:
        try:
            done = pool.submit(work)
        except RuntimeError as exc:
            message = "the connector is closed"
            raise ClosedError(message) from exc
        done.add_done_callback(_report)
        return done

    def _due(self, job: Job, when: float) -> None:
        try:
            job.due_by(when)
        except ClosedError:
            logger.debug("the reaper is closed, %s is not scheduled", job.name)

    def _run_tick(self, now: float) -> float | None:
        return self.on_tick(now)

    def _run_renewals(self, now: float) -> float | None:
        pause_s = self.on_renew()
        return None if pause_s is None else now + pause_s

    def _poll_quarantine(self, now: float) -> float | None:
        if self._data is None or self._data.quarantine.poll() == 0:
            return None
        return now + QUARANTINE_POLL_S

    def _sweep(self, sweeper: Sweeper, now: float, interval_s: float) -> float:
        def sweep() -> None:
            try:
                removed = sweeper.sweep()
            except MoonrelayError as exc:
                logger.warning("sweep of the relay failed, the next one is in %s s: %s", interval_s, exc)
            else:
                if removed:
                    logger.info("swept %d orphaned objects from the relay", removed)

        self.submit(sweep)
        return now + interval_s

    def _check_open(self) -> None:
        if self._closed:
            message = "the connector is closed; make a new one"
            raise ClosedError(message)

    # -- the end --------------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        """Whether any part was started, and none was ended yet."""
        with self._lock:
            return not self._closed and any(part is not None for part in (self._data, self._channel, self._relay))

    def close(self) -> None:
        """End all parts: threads first, then the channel, then memory, then stores. Idempotent.

        A store that does not answer is left before the threads that wait for it are joined. Blocks: seconds.
        """
        with self._pause:
            if self._closed:
                return
            self._closed = True
            self._pause.notify_all()
        self._last_work = Deadline(LAST_WORK_S, self.clock)
        self._reaper.close()
        self._stagers.shutdown(wait=True)
        with self._lock:
            channel, data = self._channel, self._data
            relays = [relay for relay in (self._relay, *self._foreign_relays.values()) if relay is not None]
        with self._moving_lock:
            moving = list(self._moving)
        if futures.wait(moving, timeout=LAST_WORK_S).not_done:
            logger.warning("the store does not answer, it is closed under %d pieces of work", len(moving))
            for relay in relays:
                relay.close()
        self._movers.shutdown(wait=True)
        self._renewers.shutdown(wait=True)
        if channel is not None:
            channel.close()
        if data is not None:
            data.close()
        for relay in relays:
            relay.close()


def _give_way() -> None:
    """Let this thread not preempt whoever wakes it, so that a caller of `publish` goes on at once."""
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or forbidden
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _report(done: Future[None]) -> None:
    """Say aloud what a mover's work raised beyond the typed errors that it handles itself."""
    error = done.exception()
    if error is not None:
        logger.error("background work failed", exc_info=error)
