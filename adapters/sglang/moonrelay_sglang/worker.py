"""One role's process as a worker of our head: what it holds, what it says, what it takes over.

Owns the requests that were accepted and not finished, the reports about them, the signs of life, and the thread that
takes work from the head's socket. How the host's functions are led here is `moonrelay_sglang.worker_hooks`; payloads
are `moonrelay_sglang.manager`. Imports nothing of the host.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from moonrelay.clock import Clock, SystemClock
from moonrelay.errors import Aborted, IntegrityError, LeaseExpired, LeaseLost, MoonrelayError, PeerLost, WireError
from moonrelay_sglang import protocol
from moonrelay_sglang.sockets import WorkSocket, push_socket

if TYPE_CHECKING:
    from moonrelay_sglang.config import SglangConfig
    from moonrelay_sglang.manager import Loaded, PayloadManager

logger = logging.getLogger(__name__)

#: An input that fails in one of these ways is gone, or was never right: only the stage that made it can mend that.
LOST: Final = (PeerLost, LeaseLost, LeaseExpired, Aborted, IntegrityError)
#: How long the thread that takes work waits before it looks whether to end, in milliseconds.
LOOK_MS: Final = 200
#: How long the threads may take to end, in seconds.
END_S: Final = 2.0
#: The host's word, in its queue, for work that is loaded.
COMPUTE: Final = "transfer_compute"


@dataclass(slots=True)
class Held:
    """A request that this process has accepted and not finished.

    Attributes:
        attempt: Its attempt.
        phase: What is being done with it: one of `protocol.PHASES`.
        released: Nobody needs it any more; its result goes nowhere.
        failure: Why it cannot be computed; said when its turn comes.
        reported: The host has told the head how it ended.
    """

    attempt: int
    phase: str = "load"
    released: bool = False
    failure: BaseException | None = None
    reported: bool = False


#: Makes the host's queue entry of scalars, what was loaded, and what is held for the request.
Build = Callable[[dict[str, Any], "Loaded", Held], Any]


class RoleWorker:
    """What a role's rank 0 does for our head.

    Args:
        config: Our settings of this process.
        role: The host's word for it.
        work_endpoint: Where it takes work, as the head's URLs name it.
        manager: Its payloads; made with this worker's `epoch` and `attempt_of`.
        context: The host's ZeroMQ context.
        result_endpoint: Where the head takes results.
        epoch: This process's session.
        clock: All times are reckoned on it.

    Threads: `run` has a thread of its own, and beats another; the host's functions come from its main thread.
    """

    def __init__(
        self,
        config: SglangConfig,
        *,
        role: str,
        work_endpoint: str,
        context: Any,
        result_endpoint: str,
        epoch: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.epoch = epoch or secrets.token_hex(8)
        self._role = role
        self._work_endpoint = work_endpoint
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        # What the host's main thread is working on, and what it has just taken.
        self._current: tuple[str, Held] | None = None
        self._taken: Held | None = None
        self._failed = 0
        # Nothing was accepted since the garbage was looked through.
        self._tidy = True
        self._manager: PayloadManager | None = None
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._waiting: queue.Queue[tuple[str, Held, list[bytes]]] = queue.Queue()
        self._ending = threading.Event()
        self._deaf = threading.Event()
        self._wake = threading.Condition()
        self._closed = False
        self._closing = threading.Lock()
        # Sockets of our own, since the host's belongs to its main thread. ZeroMQ keeps a report for an absent head; of
        # beats only the next one counts.
        self._reports = push_socket(context, result_endpoint, immediate=False)
        self._beats = push_socket(context, result_endpoint, immediate=True)
        self._reporting = threading.Lock()
        self._loaders = ThreadPoolExecutor(max(1, min(config.slots, 8)), thread_name_prefix="moonrelay-load")
        self._threads: list[threading.Thread] = []

    @property
    def manager(self) -> PayloadManager:
        """This worker's payloads."""
        assert self._manager is not None, "attach() first"
        return self._manager

    @property
    def ready(self) -> queue.Queue[tuple[str, Any]]:
        """What the host's loop takes: ``(word, data)``."""
        return self._ready

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def attach(self, manager: PayloadManager) -> None:
        """Give the worker its manager (which needs the worker's `attempt_of`)."""
        self._manager = manager

    # -- what it is ----------------------------------------------------------------------------------------------------

    def registration(self) -> protocol.Register:
        """Return what the head must know of this process."""
        config = self.config
        return protocol.Register(
            role=self._role,
            work_endpoint=self._work_endpoint,
            session_id=self.epoch,
            pool_size=config.transfer.pool_bytes,
            moonrelay=protocol.Registration(
                version=protocol.VERSION,
                epoch=self.epoch,
                instance=config.instance,
                slots=config.slots,
                beat_s=config.beat_s,
                labels=dict(config.labels),
                features=protocol.FEATURES,
            ),
        )

    def beat(self) -> protocol.Beat:
        """Return a sign of life."""
        counters = self.manager.counters()
        with self._lock:
            holding = tuple((name, held.attempt) for name, held in self._held.items() if not held.released)
            failed = self._failed
        return protocol.Beat(
            moonrelay=protocol.VERSION,
            role=self._role,
            work_endpoint=self._work_endpoint,
            epoch=self.epoch,
            registration=self.registration(),
            holding=holding,
            offered=self.manager.offered(),
            in_use=self.manager.in_use(),
            counters=msgspec.structs.replace(counters, failed=failed),
        )

    def attempt_of(self, request_id: str) -> int:
        """Return the attempt under which a request is worked on here; 0 where nobody said."""
        current = self._current
        if current is not None and current[0] == request_id:
            return current[1].attempt
        with self._lock:
            held = self._held.get(request_id)
        return 0 if held is None else held.attempt

    def start(self) -> None:
        """Register with the head, and live. Returns at once."""
        self._say(protocol.encode(self.registration()))
        self._begin_thread("moonrelay-beat", self._beat_on)

    def take_payloads_from(self, socket: Any, build: Build, device: Any, stream: Any) -> threading.Thread:
        """Take work from the head's socket in a thread of its own; for a role that is sent payloads.

        Args:
            socket: The host's PULL socket, which is this thread's from now on.
            build: Makes the host's queue entry.
            device: Where tensors shall be.
            stream: The host's stream for copies.

        Returns:
            The thread.
        """

        def accept(message: dict[str, Any]) -> None:
            self._accept(message, build, device, stream)

        def pass_on(frames: list[bytes]) -> None:
            self._ready.put(("relay_compute", frames))

        return self._begin_thread(f"moonrelay-recv-{self._role}", lambda: self._take_work(socket, accept, pass_on))

    def take_requests_from(self, socket: Any) -> WorkSocket:
        """Take work from the head's socket in a thread of its own; for an encoder, which is sent whole requests.

        Returns:
            What the host shall read from instead.
        """

        def refuse(message: dict[str, Any]) -> None:
            logger.warning("%s: %s for an input encoder is dropped", self._role, message.get("msg_type"))

        self._begin_thread(
            f"moonrelay-recv-{self._role}", lambda: self._take_work(socket, refuse, self._accept_request)
        )
        return WorkSocket(socket, self._next_request)

    # -- requests ------------------------------------------------------------------------------------------------------

    def taken(self) -> Held | None:
        """Return what is held for the request that an encoder's main thread has just taken."""
        return self._taken

    @contextlib.contextmanager
    def working(self, request_id: str, held: Held | None, *, in_step: bool = False) -> Iterator[bool]:
        """Work on a request in the host's main thread: what fails in here is reported, and ends only this request.

        Args:
            request_id: The request.
            held: What was held for it when it was accepted; ``None`` where a stock head's message went past us.
            in_step: Other ranks compute it too, and would wait for this one: it is not left out for a release.

        Yields:
            Whether there is anything to do: not where it was released, or cannot be computed.
        """
        if held is None:
            with self._lock:
                held = self._held[request_id] = Held(0)
        if held.failure is not None or (held.released and not in_step):
            self._leave(request_id, held, held.failure)
            yield False
            return
        held.phase = "compute"
        self._current = (request_id, held)
        try:
            yield True
        except Exception as exc:
            logger.exception("%s: %s failed", self._role, request_id)
            self._leave(request_id, held, exc)
        else:
            self._leave(request_id, held, None)
        finally:
            self._current = None

    def staging(self) -> None:
        """Note that the request is computed and its result is being offered (main thread)."""
        if self._current is not None:
            self._current[1].phase = "stage"

    def outgoing(self, frames: Sequence[Any]) -> Sequence[Any] | None:
        """Return what the host's socket shall send: stamped, or nothing where nobody needs the request any more."""
        if self._current is None:
            return frames
        held = self._current[1]
        held.phase = "send"
        if held.released:
            return None
        return protocol.stamped(
            frames, protocol.Stamp(version=protocol.VERSION, epoch=self.epoch, attempt=held.attempt)
        )

    def sent(self) -> None:
        """Note that the head was told how the request ended (main thread)."""
        if self._current is not None:
            self._current[1].reported = True

    def control(self, message: dict[str, Any]) -> bool:
        """Take a message of the head that is no work: RELEASE, and what a stock head wants.

        Returns:
            Whether it was one of these.

        Raises:
            WireError: It was, and is malformed.
        """
        kind = message.get("msg_type")
        if kind == protocol.RELEASE:
            release = protocol.parse(message, protocol.Release)
            self._release(release.request_id, release.attempt)
        elif kind == protocol.ALLOC:
            pending = self.manager.allocate_receive_slot(str(message["request_id"]), int(message.get("data_size", 0)))
            self._answer(
                {
                    "msg_type": protocol.ALLOCATED,
                    "request_id": pending.request_id,
                    "session_id": self.epoch,
                    "pool_ptr": 0,
                    "slot_offset": pending.slot.offset,
                    "slot_size": pending.slot.size,
                }
            )
        elif kind == protocol.PUSH:
            self._answer({"msg_type": protocol.PUSHED, "request_id": str(message["request_id"])})
        else:
            return False
        return True

    def close(self) -> None:
        """End threads, loads, payloads and sockets. Idempotent.

        Blocks: for ``drain_timeout_s`` and a few seconds at most.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self.stop()
            if self._manager is not None:
                self._manager.cleanup()
            self._loaders.shutdown(wait=False, cancel_futures=True)
            with self._reporting:
                self._reports.close()
                self._beats.close()

    def stop(self) -> None:
        """End the threads that take work and beat. Idempotent. Blocks: two seconds at most."""
        self._ending.set()
        with self._wake:
            self._wake.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(END_S)

    # -- inside: taking work -------------------------------------------------------------------------------------------

    def _take_work(
        self, socket: Any, accept: Callable[[dict[str, Any]], None], pass_on: Callable[[list[bytes]], None]
    ) -> None:
        """Take what the head sends until the end (own thread)."""
        while not self._ending.is_set():
            try:
                if not socket.poll(LOOK_MS):
                    continue
                frames = socket.recv_multipart()
            except zmq.ZMQError as exc:
                if not self._ending.is_set():
                    # Whoever takes nothing must not look alive, or work is given to it for ever.
                    self._deaf.set()
                    logger.error("%s takes no more work: %s", self._role, exc)  # noqa: TRY400  the reason is the message
                return
            try:
                if not protocol.is_message(frames):
                    pass_on(frames)
                    continue
                message = protocol.decode(frames)
                if message.get("msg_type") == protocol.READY:
                    accept(message)
                elif not self.control(message):
                    logger.warning("%s: a message of unknown type %r", self._role, message.get("msg_type"))
            except (MoonrelayError, KeyError, TypeError, ValueError) as exc:
                logger.warning("%s: a message of the head is not understood and dropped: %s", self._role, exc)
            except Exception:
                # Outermost frame of this thread, without which the role is deaf.
                logger.exception("%s: a message of the head could not be dealt with", self._role)

    def _accept_request(self, frames: list[bytes]) -> None:
        """Accept an encoder's work."""
        request_id = bytes(frames[0]).decode()
        to = protocol.encoder_addressee(frames)
        if to not in ("", self.epoch):
            logger.info("%s: work for another session of this place is dropped", request_id)
            return
        held = self._hold(request_id, protocol.encoder_attempt(frames))
        if held is not None:
            self._waiting.put((request_id, held, frames))

    def _next_request(self) -> list[bytes]:
        """Return the next work that is still wanted (the host's main thread)."""
        while True:
            request_id, held, frames = self._waiting.get()
            if held.released:
                self._leave(request_id, held, None)
                continue
            self._taken = held
            return frames

    def _accept(self, message: dict[str, Any], build: Build, device: Any, stream: Any) -> None:
        """Accept work and have it loaded."""
        ready = protocol.parse(message, protocol.Ready)
        attempt = 0
        problem: MoonrelayError | None = None
        try:
            location = protocol.located(ready.manifest)
            if location is not None:
                if location.to not in ("", self.epoch):
                    logger.info("%s: work for another session of this place is dropped", ready.request_id)
                    return
                attempt = location.attempt
        except WireError as exc:
            problem = exc
        held = self._hold(ready.request_id, attempt)
        if held is None:
            return
        if problem is not None:
            self._leave(ready.request_id, held, problem)
            return
        self._loaders.submit(self._load, ready, held, build, device, stream)

    def _hold(self, request_id: str, attempt: int) -> Held | None:
        """Note that an attempt was accepted; ``None`` where it, or a later one, was before."""
        with self._lock:
            before = self._held.get(request_id)
            if before is not None and before.attempt >= attempt and not before.released:
                return None
            if before is not None:
                before.released = True
            held = self._held[request_id] = Held(attempt)
            self._tidy = False
        if before is not None:
            # It may be computing with this very payload; the tensors are its own, the claim is the later one's.
            self.manager.give_back(request_id)
        return held

    def _load(self, ready: protocol.Ready, held: Held, build: Build, device: Any, stream: Any) -> None:
        """Take one payload over and give it to the host's loop (in a thread of the pool)."""
        request_id = ready.request_id
        if held.released:
            self._leave(request_id, held, None)
            return
        try:
            loaded = self.manager.load(request_id, ready.manifest, device=device, stream=stream)
            entry = build({**ready.scalar_fields, **loaded.values}, loaded, held)
        except Exception as exc:  # noqa: BLE001  outermost frame of this thread: the head must hear of it
            logger.warning("%s: %s cannot be taken over: %s", self._role, request_id, exc)
            self._leave(request_id, held, exc)
            return
        if held.released:
            # Where a later attempt has come meanwhile, it waits for this very payload.
            self.manager.give_back(request_id, loaded.claim)
            self._leave(request_id, held, None)
            return
        held.phase = "compute"
        self._ready.put((COMPUTE, entry))

    # -- inside: beginning and ending a request ------------------------------------------------------------------------

    def _leave(self, request_id: str, held: Held, error: BaseException | None) -> None:
        """End one attempt at a request, and say so."""
        with self._lock:
            if self._held.get(request_id) is held:
                del self._held[request_id]
                newest = True
            else:
                newest = False  # a later attempt has taken its place, with its own payloads
            if error is not None:
                self._failed += 1
        if error is not None:
            self._fail(request_id, held, error, newest=newest)
        elif held.released:
            if newest:
                self.manager.give_back(request_id)
                self.manager.withdraw(request_id, held.attempt)
            self._finish(request_id, held)
        else:
            self.manager.done(request_id)
            if self._role == "decoder":
                self._finish(request_id, held)

    def _fail(self, request_id: str, held: Held, error: BaseException, *, newest: bool) -> None:
        failure = protocol.Failure.of(error)
        if held.reported:
            # The head has its answer; what failed came after it.
            if newest:
                self.manager.done(request_id)
            return
        if newest:
            if held.phase == "load" or failure.retryable:
                self.manager.give_back(request_id)
            else:
                self.manager.done(request_id)
            self.manager.withdraw(request_id, held.attempt)
        if held.released:
            self._finish(request_id, held)
            return
        failed = protocol.Failed(
            moonrelay=protocol.VERSION,
            request_id=request_id,
            attempt=held.attempt,
            epoch=self.epoch,
            phase=held.phase,
            error=failure,
            lost_input=held.phase == "load" and isinstance(error, LOST),
        )
        self._say(protocol.encode(failed))

    def _finish(self, request_id: str, held: Held) -> None:
        finished = protocol.Finished(
            moonrelay=protocol.VERSION, request_id=request_id, attempt=held.attempt, epoch=self.epoch
        )
        self._say(protocol.encode(finished))

    def _release(self, request_id: str, attempt: int | None) -> None:
        with self._lock:
            held = self._held.get(request_id)
            if held is not None and (attempt is None or held.attempt <= attempt):
                held.released = True
        self.manager.withdraw(request_id, attempt)

    # -- inside: speaking ----------------------------------------------------------------------------------------------

    def _say(self, frames: Sequence[bytes]) -> None:
        """Send a report; any thread."""
        with self._reporting:
            if self._reports.closed:
                return
            try:
                self._reports.send_multipart(frames)
            except zmq.ZMQError as exc:
                logger.error("%s cannot tell the head: %s", self._role, exc)  # noqa: TRY400  the reason is the message

    def _answer(self, message: dict[str, Any]) -> None:
        self._say(protocol.encode(message))

    def _beat_on(self) -> None:
        """Give signs of life until the end, or for as long as work is taken (own thread)."""
        while not self._ending.is_set() and not self._deaf.is_set():
            try:
                self._beat_once()
            except Exception:
                # Outermost frame of this thread, without which the head takes the role for dead.
                logger.exception("%s: no sign of life this time", self._role)
            with self._wake:
                if not self._ending.is_set():
                    self._clock.wait(self._wake, self.config.beat_s)

    def _beat_once(self) -> None:
        with self._lock:
            due = not self._held and not self._tidy
            self._tidy = self._tidy or due
        if due:
            # Nobody waits now, and what the beat says of memory is to be what is needed.
            self.manager.tidy()
        frames = protocol.encode(self.beat())
        with self._reporting:
            if not self._beats.closed:
                with contextlib.suppress(zmq.Again):  # no head is there, or it does not listen now
                    self._beats.send_multipart(frames, zmq.NOBLOCK)

    def _begin_thread(self, name: str, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread
