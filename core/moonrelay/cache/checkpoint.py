"""Step checkpoints: a denoising loop's state in the relay, so that another worker goes on where this one was.

Owns when a state is saved, dropped and taken up again. Saving never stalls a step: the caller copies what changes, the
rest happens on one thread, with one checkpoint under way at a time; while it is, further ones are skipped. Trouble with
the store never fails a job. How a checkpoint lies in the relay is ``checkpoint_store``, what it is of is
``checkpoint_identity``. Importing this module loads no torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from moonrelay.cache.checkpoint_identity import (
    CheckpointIdentity,
    StepState,
    check_override,
    mismatch,
    request_digest,
)
from moonrelay.cache.checkpoint_store import Saved, Shelf, Snapshot, Unusable
from moonrelay.clock import Clock, Deadline
from moonrelay.errors import CheckpointMismatch, ClosedError, ConfigError, MoonrelayError
from moonrelay.events import Event, EventBus, EventName

if TYPE_CHECKING:
    from types import TracebackType

    from moonrelay.config import StoreConfig
    from moonrelay.relay.base import Relay

__all__ = [
    "CheckpointCounters",
    "CheckpointIdentity",
    "CheckpointMismatch",
    "CheckpointSession",
    "Checkpointer",
    "StepState",
]

logger = logging.getLogger(__name__)

#: How long looking for a checkpoint and reading it may take, in seconds; the job waits for it.
RESUME_TIMEOUT_S = 60.0
#: How long `CheckpointSession.save_now` may take, in seconds.
SAVE_NOW_TIMEOUT_S = 30.0
#: How long removing checkpoints may take, in seconds; what is left then is the sweeper's.
REMOVE_TIMEOUT_S = 30.0
#: How long `Checkpointer.close` waits for what is under way, in seconds.
CLOSE_TIMEOUT_S = 10.0

Capture = Callable[[], StepState]


class _Settings(Protocol):
    @property
    def role(self) -> str: ...
    @property
    def store(self) -> StoreConfig: ...


class StoreConnector(Protocol):
    """What a `Checkpointer` needs of a `DiffusionConnector`, whatever its ``transfer_mode``."""

    @property
    def settings(self) -> _Settings: ...
    @property
    def events(self) -> EventBus: ...
    @property
    def clock(self) -> Clock: ...
    def store(self) -> Relay: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCounters:
    """What a checkpointer has done so far.

    Attributes:
        saved: Checkpoints that are, or were, whole in the store.
        skipped: Not taken because the one before was still under way.
        failed: Not stored, found or removed because of the store, or because a state could not be carried.
        resumed: Runs that went on from a checkpoint.
        refused: Checkpoints that were found and not used: of another run, or damaged.
        dropped: Checkpoints removed.
        nbytes: Bytes saved.
    """

    saved: int = 0
    skipped: int = 0
    failed: int = 0
    resumed: int = 0
    refused: int = 0
    dropped: int = 0
    nbytes: int = 0


class Checkpointer:
    """Saves and finds the step checkpoints of one process.

    Args:
        conn: A connector; its store takes the checkpoints. Close the checkpointer first.
        every: A checkpoint after every so many steps; 0 for none but those asked for by `CheckpointSession.save_now`.
        ttl_s: Lease of a checkpoint, in seconds; any connector of the deployment sweeps it afterwards.
        keep: How many checkpoints of a request are kept; older ones are dropped once a newer one is whole.
        scope: Tells apart deployments that share a store and name requests alike, e.g. the queue's URL.

    Raises:
        ConfigError: A number is out of range; the message names it.

    Threads: all methods from any thread.
    """

    def __init__(
        self, conn: StoreConnector, *, every: int = 0, ttl_s: float = 3600.0, keep: int = 1, scope: str = ""
    ) -> None:
        for name, value, least in (("every", every, 0), ("keep", keep, 1)):
            if type(value) is not int or value < least:
                message = f"{name}={value!r} must be a whole number, {least} or more"
                raise ConfigError(message, field=name)
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, (int, float)) or not ttl_s > 0:
            message = f"ttl_s={ttl_s!r} must be a number of seconds above 0"
            raise ConfigError(message, field="ttl_s")
        self.every = every
        self.keep = keep
        self.ttl_s = float(ttl_s)
        self.scope = scope
        self._conn = conn
        self._clock = conn.clock
        self._changed = threading.Condition()
        self._counters = CheckpointCounters()
        self._pending = 0  # pieces of work given to the thread and not ended
        self._unquiet = 0  # snapshots that something may still read
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moonrelay-checkpoint")

    def start(self) -> None:
        """Reach the store now, so that what is missing is said now. Blocks: seconds at most.

        Raises:
            PluginError, ConfigError, PeerLost: It cannot be reached.
            ClosedError: The connector is closed.
        """
        self._conn.store()

    def session(
        self, identity: CheckpointIdentity, *, keep: int | None = None, retain: bool = False
    ) -> CheckpointSession:
        """Return the checkpoints of one run.

        Args:
            identity: What the run is.
            keep: Overrides the checkpointer's.
            retain: Leave this run's checkpoints to their lease when it ends, so that another request can go on from
                one of them.
        """
        return CheckpointSession(self, identity, keep=self.keep if keep is None else max(1, keep), retain=retain)

    def drop(self, request_id: str) -> None:
        """Remove a request's checkpoints, but those that were to be retained. Returns at once."""
        self._sweep([request_id], wait_turn=True)

    def sweep(self, ended: Iterable[str]) -> bool:
        """Remove what requests that have ended left behind, whoever saved it. Returns at once.

        Args:
            ended: Requests that are known to have ended.

        Returns:
            Whether it was begun; not while a checkpoint is under way.
        """
        return self._sweep(list(ended), wait_turn=False)

    def counters(self) -> CheckpointCounters:
        """Return what was done so far."""
        with self._changed:
            return self._counters

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; return whether that came. Blocks: up to ``timeout_s``."""
        deadline = Deadline(timeout_s, self._clock)
        with self._changed:
            return deadline.wait_for(self._changed, lambda: self._pending == 0)

    def close(self) -> None:
        """End the thread; what is stored stays. Idempotent. Blocks: up to `CLOSE_TIMEOUT_S`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        if not self.wait_idle(CLOSE_TIMEOUT_S):
            logger.warning("a checkpoint is still under way; the store's end will end it")
        self._thread.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- for sessions ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is under way, so that a checkpoint would have to wait."""
        with self._changed:
            return self._pending > 0 or self._unquiet > 0

    def shelf(self) -> Shelf:
        return Shelf(self._conn.store(), self._conn.settings.store.namespace)

    def deadline(self, timeout_s: float) -> Deadline:
        return Deadline(timeout_s, self._clock)

    def put_deadline(self) -> Deadline:
        return Deadline(self._conn.settings.store.put_timeout_s, self._clock)

    def now(self) -> float:
        return self._clock.monotonic()

    def submit(self, work: Callable[[], None]) -> bool:
        """Run ``work`` on the thread, after what is there already; False once closed."""
        with self._changed:
            if self._closed:
                return False
            self._pending += 1
        try:
            self._thread.submit(self._run, work)
        except RuntimeError:
            self._ended()
            return False
        return True

    def hold(self) -> Callable[[], None]:
        """Count a snapshot as being read until the returned function is called."""
        with self._changed:
            self._unquiet += 1

        def quiet() -> None:
            with self._changed:
                self._unquiet -= 1
                self._changed.notify_all()

        return quiet

    def count(self, **more: int) -> None:
        with self._changed:
            self._counters = replace(
                self._counters, **{name: getattr(self._counters, name) + number for name, number in more.items()}
            )

    def tell(
        self,
        name: EventName,
        request_id: str | None,
        *,
        step: int | None = None,
        nbytes: int | None = None,
        duration_s: float | None = None,
        reason: str | None = None,
        code: str | None = None,
        field: str | None = None,
    ) -> None:
        self._conn.events.emit(
            Event(
                name=name,
                request_id=request_id,
                kind="checkpoint",
                stage=self._conn.settings.role,
                path="store",
                nbytes=nbytes,
                duration_s=duration_s,
                reason=reason,
                code=code,
                extra={"step": step, "field": field},
            )
        )

    def trouble(self, request_id: str | None, what: str, error: Exception, step: int | None = None) -> None:
        """Note that a checkpoint could not be handled; the job goes on."""
        self.count(failed=1)
        code = error.code if isinstance(error, MoonrelayError) else None
        self.tell("checkpoint_failed", request_id, step=step, reason=f"{what}: {error}", code=code)

    def removed(self, request_id: str | None, saved: Saved, reason: str) -> None:
        if saved.whole:
            self.count(dropped=1)
            self.tell("checkpoint_dropped", request_id, step=saved.step, reason=reason)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:  # the thread's outermost frame: a defect here must not end the job
            logger.exception("checkpointing failed")
            self.trouble(None, "checkpointing failed", exc)
        finally:
            self._ended()

    def _ended(self) -> None:
        with self._changed:
            self._pending -= 1
            self._changed.notify_all()

    def _sweep(self, ended: list[str], *, wait_turn: bool) -> bool:
        if not ended or (not wait_turn and self.busy):
            return not ended
        names = {request_digest(self.scope, request_id): request_id for request_id in ended}

        def sweep() -> None:
            try:
                shelf, deadline = self.shelf(), self.deadline(REMOVE_TIMEOUT_S)
                for saved in shelf.found("" if len(names) > 1 else next(iter(names)), deadline):
                    if saved.request in names and not saved.retained:
                        shelf.remove(saved, deadline)
                        self.removed(names[saved.request], saved, "its request has ended")
            except MoonrelayError as exc:
                self.trouble(None, "checkpoints of ended requests stay until their lease ends", exc)

        return self.submit(sweep)


class CheckpointSession:
    """The checkpoints of one run. Made by `Checkpointer.session`.

    Threads: one at a time, that of the run.

    Attributes:
        identity: What the run is.
        resumed_step: Steps that it did not have to do; 0 when it started afresh.
    """

    def __init__(self, owner: Checkpointer, identity: CheckpointIdentity, *, keep: int, retain: bool) -> None:
        self.identity = identity
        self.resumed_step = 0
        self._owner = owner
        self._keep = keep
        self._retain = retain
        self._request = request_digest(owner.scope, identity.request_id)
        self._lock = threading.Lock()
        self._kept: list[Saved] = []  # ours that are whole, and what was there before; newest first
        self._next = 0
        self._looked = False
        self._whole_step = 0
        self._finished = False

    def resume(
        self,
        override: Iterable[str] = (),
        *,
        of: str | None = None,
        step: int | None = None,
        device: str | None = None,
    ) -> StepState | None:
        """Find the newest whole checkpoint of this run, and read it.

        Damaged and half-written ones are passed over, with an event. Trouble with the store is an event, too.

        Args:
            override: Fields of the identity that may differ: to go on with a changed prompt, ``("conditioning",)``.
            of: Another request, whose checkpoint it is; its id may differ then.
            step: Take the checkpoint after this many steps, no other.
            device: Where tensors go that were saved from an accelerator; host memory by default.

        Returns:
            The state; ``None`` when there is nothing to go on from, so that the run starts afresh.

        Raises:
            CheckpointMismatch: The checkpoint is of another run, or lacks something; ``context['field']`` names what.
                Nothing of it may be used; the run starts afresh.
            ConfigError: ``override`` names a field that may not differ.

        Blocks: until it is read, or `RESUME_TIMEOUT_S`.
        """
        allowed = check_override(override)
        if of is not None and of != self.identity.request_id:
            allowed |= {"request_id"}
        owner, request_id = self._owner, self.identity.request_id
        began = owner.now()
        try:
            shelf, deadline = owner.shelf(), owner.deadline(RESUME_TIMEOUT_S)
            found = self._look(shelf, deadline)
            if of is not None:
                found = shelf.found(request_digest(owner.scope, of), deadline)
            candidates = [saved for saved in found if saved.whole]
            if step is not None:
                steps = sorted({saved.step for saved in candidates})
                candidates = [saved for saved in candidates if saved.step == step]
                if not candidates:
                    raise mismatch("step", f"one of {steps}" if steps else "none", step)
            for saved in candidates:
                try:
                    description, nbytes = shelf.describe(saved, deadline)
                    self.identity.require_same(description.identity, allowed)
                    tree = shelf.read(saved, description, device, deadline)
                except Unusable as exc:
                    owner.count(refused=1)
                    owner.tell("checkpoint_refused", request_id, step=saved.step, reason=str(exc))
                    continue
                state = StepState.from_tree(tree, self.identity)
                self.resumed_step = self._whole_step = state.step
                owner.count(resumed=1)
                owner.tell(
                    "checkpoint_resumed", request_id, step=state.step, nbytes=nbytes, duration_s=owner.now() - began
                )
                return state
        except CheckpointMismatch as exc:
            self.refuse(exc)
            raise
        except ConfigError:
            raise
        except MoonrelayError as exc:
            owner.trouble(request_id, "no checkpoint could be looked for", exc)
        return None

    def refuse(self, error: CheckpointMismatch) -> None:
        """Note that a checkpoint is not used; for a host that finds something missing in the state that it was given.

        What was refused is dropped once a newer checkpoint is whole.
        """
        self.resumed_step = self._whole_step = 0
        self._owner.count(refused=1)
        field = error.context.get("field")
        self._owner.tell(
            "checkpoint_refused",
            self.identity.request_id,
            reason=error.message,
            code=error.code,
            field=None if field is None else str(field),
        )

    def due(self, step: int) -> bool:
        """Say whether a checkpoint is to be taken after this many steps."""
        return self._owner.every > 0 and step % self._owner.every == 0 and step > self._whole_step

    def after_step(self, step: int, capture: Capture) -> bool:
        """Save the state where a checkpoint is due. Returns at once.

        Args:
            step: Steps done.
            capture: Called here and now, in this thread, when the state is going to be saved. Nobody may change what
                it returns afterwards: it copies what the loop changes in place, and need not copy what the loop only
                replaces. A change that torch can see makes the checkpoint void.

        Returns:
            Whether a save was begun. It was not when none was due, or the one before is still under way.
        """
        if not self.due(step):
            return False
        if self._owner.busy:
            self._owner.count(skipped=1)
            self._owner.tell(
                "checkpoint_skipped", self.identity.request_id, step=step, reason="the one before is under way"
            )
            return False
        return self._begin(step, capture)

    def save_now(self, step: int, capture: Capture, *, timeout_s: float = SAVE_NOW_TIMEOUT_S) -> bool:
        """Save the state after this many steps, and wait until it is whole: before the job is given back.

        Returns:
            Whether the state of this step is whole in the store.

        Blocks: up to ``timeout_s``.
        """
        deadline = self._owner.deadline(timeout_s)
        if not self._owner.wait_idle(deadline.remaining() or 0.0):
            return False
        if self._whole_step != step and self._begin(step, capture):
            self._owner.wait_idle(deadline.remaining() or 0.0)
        return self._whole_step == step

    def finish(self) -> None:
        """Remove this run's checkpoints: its request needs them no more. Returns at once. Idempotent.

        Call it when what came of the run is safe: published, and the job settled. With ``retain`` they stay.
        """
        with self._lock:
            if self._finished:
                return
            self._finished = True
        if not self._retain:
            self._owner.drop(self.identity.request_id)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _look(self, shelf: Shelf, deadline: Deadline) -> list[Saved]:
        found = shelf.found(self._request, deadline)
        if not self._looked:
            self._looked = True
            self._kept = found
            self._next = max((saved.number for saved in found), default=-1) + 1
        return found

    def _begin(self, step: int, capture: Capture) -> bool:
        owner, request_id = self._owner, self.identity.request_id
        began = owner.now()
        try:
            state = capture()
            tree = state.tree()
            # What could not be resumed is not worth a save; it is named now, while somebody looks.
            StepState.from_tree(tree, self.identity)
            snapshot = Snapshot(tree, request_id)
        except MoonrelayError as exc:
            owner.trouble(request_id, f"the state after step {step} was not saved", exc, step)
            return False
        quiet = owner.hold()
        # One reference, given up by the thread that saves: a snapshot in flight is all that is kept of it.
        if owner.submit(lambda: self._save(step, snapshot, began, quiet)):
            return True
        quiet()
        return False

    def _save(self, step: int, snapshot: Snapshot, began: float, quiet: Callable[[], None]) -> None:
        owner, request_id = self._owner, self.identity.request_id
        written: Saved | None = None
        handed_over = False
        try:
            shelf, deadline = owner.shelf(), owner.put_deadline()
            self._look(shelf, deadline)
            written = shelf.name(self._request, self._next, step, retained=self._retain)
            self._next += 1
            handed_over = True
            nbytes = shelf.write(written, snapshot, self.identity.to_plain(), owner.ttl_s, deadline, quiet)
        except MoonrelayError as exc:
            owner.trouble(request_id, f"the state after step {step} was not saved", exc, step)
            if written is not None and not isinstance(exc, ClosedError):
                self._remove([written], "it was not finished")
            return
        finally:
            if not handed_over:
                quiet()
        written = replace(written, whole=True)
        self._whole_step = step
        owner.count(saved=1, nbytes=nbytes)
        owner.tell("checkpoint_saved", request_id, step=step, nbytes=nbytes, duration_s=owner.now() - began)
        self._kept.insert(0, written)
        # Half-written ones before it count for nothing.
        whole = [saved for saved in self._kept if saved.whole]
        spare = whole[self._keep :] + [saved for saved in self._kept if not saved.whole]
        self._kept = whole[: self._keep]
        self._remove(spare, "a newer one is whole")

    def _remove(self, gone: list[Saved], reason: str) -> None:
        owner = self._owner
        for saved in gone:
            try:
                owner.shelf().remove(saved, owner.deadline(REMOVE_TIMEOUT_S))
            except MoonrelayError as exc:
                owner.trouble(self.identity.request_id, "an old checkpoint stays until its lease ends", exc, saved.step)
            else:
                owner.removed(self.identity.request_id, saved, reason)
