"""The consumer's side of one payload: claim, read, acknowledge.

Owns the order of things: whom to ask first, what to do when a source fails, when a chunk may be handed out, and that
a claim which is not acknowledged is given back.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from moonrelay.clock import Deadline
from moonrelay.connector.landing import Landing, is_tensor, land
from moonrelay.connector.progress import ProgressView
from moonrelay.connector.runtime import Runtime
from moonrelay.connector.sources import DirectSource, RelaySource, Source, claim_directly, claim_in_relay
from moonrelay.errors import (
    Aborted,
    ClosedError,
    ConfigError,
    IntegrityError,
    LeaseExpired,
    LeaseLost,
    MoonrelayError,
    PeerLost,
    TransferFailed,
    TransferTimeout,
)
from moonrelay.events import EventName
from moonrelay.handle import StageHandle
from moonrelay.payload import unflatten

if TYPE_CHECKING:
    from types import TracebackType

    import torch

#: An acknowledgement has at least this long, in seconds: one that was sent and not waited for would lose the payload.
ACK_TIMEOUT_S = 2.0
RENEWALS_PER_TTL = 3


class PayloadClaim:
    """The right to read one payload, renewed by itself until it is acknowledged or given back.

    Use it as a context manager: leaving without `ack` gives the payload back to others at once.

    Threads: one at a time.
    """

    def __init__(
        self,
        runtime: Runtime,
        handle: StageHandle,
        timeout_s: float,
        *,
        on_start: Callable[[PayloadClaim], None],
        on_end: Callable[[PayloadClaim], None],
    ) -> None:
        self.handle = handle
        self.reader = secrets.token_hex(8)
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._progress = ProgressView(handle)
        self._ended = threading.Event()
        self._switching = threading.Lock()
        self._acked = False
        self._failure: MoonrelayError | None = None
        self._fetcher: threading.Thread | None = None
        self._started_at = runtime.clock.monotonic()
        # Known before the claim is asked for: a push, or another reader's question, may be faster than the grant.
        on_start(self)
        try:
            self._source: Source = self._acquire(Deadline(timeout_s, runtime.clock))
        except BaseException:
            self._end()
            raise
        if self._ended.is_set():
            self._source.nack()
            message = "the connector was closed while the claim was asked for"
            raise ClosedError(message, request_id=handle.request_id)
        self._emit("claimed", path=self._source.path)

    def __repr__(self) -> str:
        state = "acked" if self._acked else "ended" if self._ended.is_set() else "held"
        return f"<PayloadClaim {self.handle.request_id}/{self.handle.kind} {state} via {self._source.path}>"

    @property
    def path(self) -> str:
        """How the bytes come: ``p2p`` or ``store``."""
        return self._source.path

    @property
    def progress(self) -> ProgressView:
        """What is known of the payload's readiness (fed by the connector)."""
        return self._progress

    @property
    def failure(self) -> MoonrelayError | None:
        """The very error by which reading ended, so that a caller can tell it from errors of its own work."""
        return self._failure

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, dst: torch.Tensor | None = None, *, timeout_s: float | None = None) -> object:
        """Read the whole payload. Does not acknowledge.

        Args:
            dst: Destination for a payload that is one tensor: its shape and dtype, any layout; registered memory is
                read into without a copy. Without it the payload lands in pool memory that is handed over.
            timeout_s: Longest wait; the claim's by default.

        Returns:
            The tree, or the tensor (``dst`` itself where it was given).

        Blocks: until every byte is here and proved, or the deadline.

        Raises:
            IntegrityError, TransferFailed, TransferTimeout, PeerLost, Aborted, LeaseLost, CapacityError, ConfigError
        """
        deadline = self._deadline(timeout_s)
        landing = self._land(dst, deadline)
        try:
            done: set[int] = set()
            while len(done) < self.handle.num_chunks:
                done.add(self._fetch_next(landing, done, deadline, lambda: False))
            self._delivered()
            if dst is not None:
                for chunk in range(self.handle.num_chunks):
                    landing.view(chunk)
                return dst
            return unflatten(self.handle.tree, landing.tensors)
        finally:
            landing.close()

    def chunks(self, dst: torch.Tensor | None = None, *, timeout_s: float | None = None) -> Iterator[torch.Tensor]:
        """Read chunk by chunk while later ones are still being made. Does not acknowledge.

        Args:
            dst: As for `read`.
            timeout_s: Longest wait for each chunk; the claim's by default.

        Yields:
            Views of the destination, in chunk order, each proved. Further chunks are read while the caller works.

        Raises:
            ConfigError: The payload is a tree. Otherwise as `read`.
        """
        if not is_tensor(self.handle):
            message = "chunks() is only for a payload that is one tensor; use read()"
            raise ConfigError(message, field="handle", request_id=self.handle.request_id)
        self._check_held()
        if self.handle.num_chunks == 1:
            return self._single(dst, timeout_s)
        return self._streamed(dst, timeout_s)

    def _single(self, dst: torch.Tensor | None, timeout_s: float | None) -> Iterator[torch.Tensor]:
        landing = self._land(dst, self._deadline(timeout_s))
        try:
            self._fetch_next(landing, set(), self._deadline(timeout_s), lambda: False)
            self._delivered()
            yield landing.view(0)
        finally:
            landing.close()

    def _streamed(self, dst: torch.Tensor | None, timeout_s: float | None) -> Iterator[torch.Tensor]:
        landing = self._land(dst, self._deadline(timeout_s))
        fetched = _Fetched(self.handle.num_chunks)
        thread = threading.Thread(
            target=self._fetch_all, args=(landing, fetched, timeout_s), name="moonrelay-fetch", daemon=True
        )
        self._fetcher = thread
        thread.start()
        try:
            for chunk in range(self.handle.num_chunks):
                fetched.wait(chunk, self._deadline(timeout_s), self.handle)
                yield landing.view(chunk)
        finally:
            fetched.stop()
            self._progress.wake()
            thread.join()
            landing.close()

    def _fetch_all(self, landing: Landing, fetched: _Fetched, timeout_s: float | None) -> None:
        """Read all chunks ahead of the caller, the lowest that is ready first (own thread)."""
        done: set[int] = set()
        try:
            while len(done) < self.handle.num_chunks:
                chunk = self._fetch_next(landing, done, self._deadline(timeout_s), fetched.stopped)
                done.add(chunk)
                fetched.add(chunk)
            self._delivered()
        except MoonrelayError as exc:
            fetched.fail(exc)
        except Exception as exc:  # noqa: BLE001 - outermost frame of this thread: the reader must hear of it
            fetched.fail(MoonrelayError(f"reading ahead failed: {type(exc).__name__}: {exc}"))

    def _fetch_next(self, landing: Landing, done: set[int], deadline: Deadline, stopped: Callable[[], bool]) -> int:
        """Wait for the next readable chunk and read it; note why that failed."""
        try:
            return self._fetch(landing, done, deadline, stopped)
        except MoonrelayError as exc:
            self._failure = exc
            raise

    def _fetch(self, landing: Landing, done: set[int], deadline: Deadline, stopped: Callable[[], bool]) -> int:
        """Read the next readable chunk, again or from another source where that fails."""
        retried = False
        while True:
            self._check_held()
            try:
                chunk = self._progress.next_readable(done, deadline, stopped)
                self._source.fetch(chunk, landing, deadline, stopped)
            except (IntegrityError, PeerLost, TransferFailed, TransferTimeout) as exc:
                error = self._diagnose(exc)
                if retried or not isinstance(error, IntegrityError):
                    self._recover(error, deadline)
                    continue
                retried = True
                self._emit("retried", reason=str(error), code=error.code, path=self.path)
            else:
                return chunk

    def _recover(self, error: MoonrelayError, deadline: Deadline) -> None:
        """Go on from the relay when the producer is gone; raise what fits otherwise."""
        source = self._source
        if isinstance(source, DirectSource) and isinstance(error, PeerLost):
            source.forget()
            relayed = claim_in_relay(self._runtime, self.handle, self._progress, self.reader, deadline, direct=None)
            if relayed is not None:
                with self._switching:
                    # A renewal under way may fail just now; after this it is no longer about our source.
                    self._source = relayed
                    self._progress.clear_failure()
                self._emit("fallback", path="store", reason=str(error), code=error.code)
                return
        self._failed(error)
        raise error

    def _diagnose(self, error: MoonrelayError) -> MoonrelayError:
        """Tell a dead producer, or a claim that lapsed, from an unlucky transfer."""
        source = self._source
        if not isinstance(source, DirectSource):
            return error
        failure = self._progress.failure
        if failure is not None:
            return failure
        try:
            source.renew()
        except MoonrelayError as exc:
            exc.__cause__ = error
            return exc
        return error

    # -- ending ---------------------------------------------------------------------------------------------------

    def ack(self, *, timeout_s: float | None = None) -> None:
        """Acknowledge: the payload was consumed. Idempotent.

        Args:
            timeout_s: Longest wait, but never less than two seconds; the claim's by default.

        Blocks: for one message to its owner.

        Raises:
            LeaseLost: The claim lapsed and another reader may have it; undo what was done with the payload.
        """
        if self._acked:
            return
        self._check_held()
        deadline = Deadline(max(self._deadline(timeout_s).timeout_s or 0.0, ACK_TIMEOUT_S), self._runtime.clock)
        try:
            self._source.ack(deadline)
        except PeerLost as exc:
            self._ack_without_owner(exc, deadline)
        self._acked = True
        self._end()

    def _ack_without_owner(self, error: PeerLost, deadline: Deadline) -> None:
        """Consume what a dead producer left in the relay, so that nobody else is handed it again."""
        relayed = claim_in_relay(self._runtime, self.handle, self._progress, self.reader, deadline, direct=None)
        if relayed is not None:
            relayed.ack(deadline)
        self._emit("fallback", path=self.path, reason=f"acknowledged without the producer: {error}", code=error.code)

    def nack(self) -> None:
        """Give the payload back unread; it is free for others at once. Idempotent, no effect after `ack`."""
        if not self._ended.is_set():
            self._end()
            # Without a source it is being asked for, in another thread, which then finds it ended.
            if hasattr(self, "_source"):
                self._source.nack()

    close = nack

    def __enter__(self) -> PayloadClaim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.nack()

    @property
    def renew_every_s(self) -> float:
        """Pause between two renewals: ours, or shorter where the owner drops claims sooner."""
        pause_s = self._runtime.settings.control.renew_s
        ttl_s = self._source.claim_ttl_s if hasattr(self, "_source") else None
        return pause_s if ttl_s is None else min(pause_s, ttl_s / RENEWALS_PER_TTL)

    def renew(self) -> None:
        """Keep the claim (called by the connector every ``renew_every_s``, in a renewing thread)."""
        if self._ended.is_set() or not hasattr(self, "_source"):
            return
        source = self._source
        try:
            source.renew()
        except (PeerLost, LeaseLost, LeaseExpired, Aborted) as exc:
            with self._switching:
                if source is self._source:
                    self._progress.fail(exc)
        except MoonrelayError as exc:
            self._emit("retried", reason=f"renewal: {exc}", code=exc.code, path=self.path)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _acquire(self, deadline: Deadline) -> Source:
        """Ask the producer first, then the relay."""
        lost: PeerLost | None = None
        direct: DirectSource | None = None
        try:
            direct, granted = claim_directly(self._runtime, self.handle, self._progress, self.reader, deadline)
        except PeerLost as exc:
            lost = exc
        else:
            if granted.where == "direct":
                return direct
        source: RelaySource | None = None
        try:
            source = claim_in_relay(self._runtime, self.handle, self._progress, self.reader, deadline, direct=direct)
        finally:
            if source is None and direct is not None:
                direct.nack()
        if source is None:
            message = f"the producer does not answer, and nothing was relayed: {lost}"
            raise PeerLost(message, request_id=self.handle.request_id) from lost
        if lost is not None:
            self._emit("fallback", path="store", reason=str(lost), code=lost.code)
        return source

    def _land(self, dst: torch.Tensor | None, deadline: Deadline) -> Landing:
        self._check_held()
        # A connector that only relays needs no engine for what comes from there: it lands in ordinary memory.
        direct = self._runtime.settings.serves_directly or isinstance(self._source, DirectSource)
        data = self._runtime.data() if direct else None
        try:
            return land(self.handle, dst, data, deadline)
        except MoonrelayError as exc:
            self._failed(exc)
            raise

    def _deadline(self, timeout_s: float | None) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s, self._runtime.clock)

    def _check_held(self) -> None:
        if self._acked:
            message = "the payload was acknowledged; claim it again to read it again"
            raise LeaseLost(message, request_id=self.handle.request_id)
        if self._ended.is_set():
            message = "the claim has ended; claim the payload again"
            raise ClosedError(message, request_id=self.handle.request_id)

    def _end(self) -> None:
        self._ended.set()
        self._on_end(self)

    def _delivered(self) -> None:
        took = self._runtime.clock.monotonic() - self._started_at
        self._emit("delivered", path=self.path, nbytes=self.handle.nbytes, duration_s=took)

    def _failed(self, error: MoonrelayError) -> None:
        self._emit("failed", path=self.path if hasattr(self, "_source") else None, reason=str(error), code=error.code)

    def _emit(
        self,
        name: EventName,
        *,
        path: str | None = None,
        nbytes: int | None = None,
        duration_s: float | None = None,
        reason: str | None = None,
        code: str | None = None,
    ) -> None:
        self._runtime.emit(self.handle, name, path=path, nbytes=nbytes, duration_s=duration_s, reason=reason, code=code)


class _Fetched:
    """Which chunks the reading-ahead thread has landed, waited on by the caller."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._landed: set[int] = set()
        self._failure: MoonrelayError | None = None
        self._stopped = False

    def add(self, chunk: int) -> None:
        with self._changed:
            self._landed.add(chunk)
            self._changed.notify_all()

    def fail(self, error: MoonrelayError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True

    def stopped(self) -> bool:
        with self._changed:
            return self._stopped

    def wait(self, chunk: int, deadline: Deadline, handle: StageHandle) -> None:
        with self._changed:
            deadline.wait_for(self._changed, lambda: chunk in self._landed or self._failure is not None)
            if chunk in self._landed:
                return
            if self._failure is not None:
                raise self._failure
        message = f"chunk {chunk} of {self._count} did not come within {deadline.timeout_s} s"
        raise TransferTimeout(message, request_id=handle.request_id)
