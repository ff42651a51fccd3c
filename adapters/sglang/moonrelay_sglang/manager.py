"""The host's transfer manager over a `DiffusionConnector`: what a role made is published, the next role claims it.

Owns the payloads of one role's process, by request: those that it offers, and those that it has taken over and computes
with. A payload is pulled, so nothing is allocated for it before it is asked for, and no address is ever used again: a
handle is good for one payload only. Imports nothing of the host; `manager_class` joins its base class.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.connector import DiffusionConnector
from moonrelay.connector.caching import ChosenCache
from moonrelay.errors import CapacityError, LeaseLost, MoonrelayError, WireError
from moonrelay.handle import StageHandle
from moonrelay.payload import StagePayload
from moonrelay_sglang import fields, protocol

if TYPE_CHECKING:
    from moonrelay.cache.embeddings import EmbeddingCache
    from moonrelay.connector.claim import PayloadClaim
    from moonrelay.events import Event
    from moonrelay_sglang.config import SglangConfig

logger = logging.getLogger(__name__)

#: What the trees of our payloads mean.
SCHEMA: Final = "sglang.req/1"
_TENSORS: Final = "tensors"
_VALUES: Final = "values"
#: Longest pause between two looks for room: tensors that were handed out give theirs back without a word.
ROOM_LOOK_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Slot:
    """What the host reads of a slot. There is none: ``size`` is the payload's, exactly."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Staged:
    """What the host reads of a staged transfer, and the handle in its manifest."""

    request_id: str
    slot: Slot
    manifest: dict[str, Any]
    scalar_fields: dict[str, Any]
    handle: StageHandle


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """What the host reads of a slot to receive into; ours is never written to."""

    request_id: str
    slot: Slot


@dataclass(slots=True)
class Loaded:
    """A payload that was taken over and is computed with.

    Attributes:
        claim: The right to it, until it is acknowledged or given back.
        tensors: Tensors and lists of tensors by field.
        values: All else by field.
        event: The host's event after which the tensors are on the device; ``None`` where they are.
    """

    claim: PayloadClaim
    tensors: dict[str, Any]
    values: dict[str, Any]
    event: Any = None


@dataclass(slots=True)
class _Taken:
    """What is kept of a payload that was taken over.

    Not its tensors: they are the request's, and those that a stage replaces give their memory back before it offers
    its own.

    Attributes:
        claim: The right to it.
        source: The tensors as they landed, where copies to a device may still be under way.
    """

    claim: PayloadClaim
    source: Any = None


class PayloadManager:
    """Publishes what a role made, and takes over what it is to work on.

    Args:
        config: Our settings of this process.
        epoch: This process's session.
        pipeline: Name of the host's pipeline: it says what the next role needs.
        attempt_of: Gives the attempt under which a request is worked on here.
        on_stage: Called when something is about to be offered.
        clock: All times are reckoned on it.

    Raises:
        ConfigError: A setting is wrong; names it.

    Threads: all methods from any.
    """

    def __init__(
        self,
        config: SglangConfig,
        *,
        epoch: str,
        pipeline: str = "",
        attempt_of: Callable[[str], int] = lambda _request_id: 0,
        on_stage: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._pipeline = pipeline
        self._attempt_of = attempt_of
        self._on_stage = on_stage
        self._clock: Clock = clock or SystemClock()
        # The host's loop takes this very name to look after slots that it allocated in advance; there are none.
        self._lock = threading.Lock()
        self._pending_receives: dict[str, PendingReceive] = {}
        self._changed = threading.Condition(self._lock)
        self._offered: dict[str, Staged] = {}
        self._request_of: dict[str, str] = {}
        # Payloads that ended, by another thread, before it was noted whose they are; empty while nothing is staged.
        self._staging = 0
        self._ended_early: set[str] = set()
        self._taken: dict[str, _Taken] = {}
        self._counts: Counter[str] = Counter()
        self._connector = DiffusionConnector(
            role=f"sglang-{config.role}",
            transfer_mode=config.transfer_mode,
            te_config=config.transfer,
            store_config=config.store,
            control_config=config.control,
            lease_ttl_s=config.lease_ttl_s,
            spill_after_s=config.spill_after_s,
            drain_timeout_s=config.drain_timeout_s,
            integrity=config.integrity,
            auth_key=config.auth_key,
            observers=[self._on_event],
            clock=self._clock,
        )
        chosen = config.embedding_cache
        self._embeddings = None if chosen is None else ChosenCache(chosen, self._connector)

    # -- what the host's manager has ----------------------------------------------------------------------------------

    @property
    def session_id(self) -> str:
        """This process's session; another one after a restart."""
        return self._epoch

    @property
    def pool_data_ptr(self) -> int:
        """0: nobody writes to our memory by its address."""
        return 0

    @property
    def pool_size(self) -> int:
        """Size of the pool, in bytes."""
        return self._config.transfer.pool_bytes

    def stage_tensors_async(
        self,
        request_id: str,
        tensor_fields: Mapping[str, Any],
        scalar_fields: Mapping[str, Any] | None = None,
        stream: Any = None,
    ) -> tuple[Staged, Any]:
        """Offer what a role made to the next one.

        The tensors are copied before this returns, once, into the pool: a stage may keep them and write into them (a
        captured graph's static buffers, a cache of embeddings).

        Args:
            request_id: The request; what it offered before is withdrawn.
            tensor_fields: Tensors by field, alone or in lists, tuples, dicts; ``None`` and plain values among them or
                instead. They arrive as they are, or are refused.
            scalar_fields: All else by field; see `moonrelay_sglang.fields.pack`.
            stream: The host's stream for copies; on it lies the event that is returned.

        Returns:
            What the host tells its head, and an event (``None`` on a CPU): the copy is done then.

        Raises:
            UnsupportedTensor, ConfigError: A field cannot be carried; names it. Nothing is offered.
            CapacityError: It does not fit the pool, or there was no room within ``stage_timeout_s``.
            PluginError, ClosedError: The engine cannot be loaded; the manager is closed.

        Blocks: for the copy, and up to ``stage_timeout_s`` for room.
        """
        self._on_stage()
        with self._lock:
            taken = self._taken.get(request_id)
            if taken is not None:
                taken.source = None  # it was computed with, so it is on the device
        given_tensors, given_scalars = dict(tensor_fields), dict(scalar_fields or {})
        if not self._config.send_all:
            given_tensors = fields.needed(self._config.role, self._pipeline, given_tensors)
            given_scalars = fields.needed(self._config.role, self._pipeline, given_scalars)
        plain, packed = fields.split(given_scalars)
        attempt = self._attempt_of(request_id)
        payload = StagePayload(
            request_id=request_id,
            kind=self._config.role,
            data={_TENSORS: given_tensors, _VALUES: packed},
            attempt=attempt,
            schema=SCHEMA,
        )
        with self._lock:
            self._staging += 1
        before: Staged | None = None
        try:
            handle = self._publish(payload)
            manifest = protocol.manifest_of(handle.to_bytes(), epoch=self._epoch, nbytes=handle.nbytes, attempt=attempt)
            staged = Staged(request_id, Slot(0, handle.nbytes), manifest, plain, handle)
            with self._lock:
                before = self._offered.pop(request_id, None)
                if handle.id not in self._ended_early:
                    self._offered[request_id] = staged
                    self._request_of[handle.id] = request_id
        finally:
            with self._lock:
                self._staging -= 1
                if not self._staging:
                    self._ended_early.clear()
        if before is not None:
            self._connector.abort(before.handle, "the request's stage was done again")
        return staged, _event_on(stream, self._device_of(given_tensors))

    def load_tensors_async(
        self, request_id: str, manifest: Mapping[str, Any], device: Any = "cpu", stream: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Take a payload over, as `load` by the settings' deadline; return all fields, and an event or ``None``."""
        loaded = self.load(request_id, manifest, device=device, stream=stream)
        return {**loaded.tensors, **loaded.values}, loaded.event

    def push_to_peer(self, request_id: str, dest_session_id: str, dest_addr: int, transfer_size: int) -> bool:
        """Return whether the payload is there to be taken: the receiver reads it, nothing is pushed."""
        with self._lock:
            return request_id in self._offered

    def free_staged(self, request_id: str, reason: str = "withdrawn: nobody needs it any more") -> None:
        """Withdraw what a request offers; readers are told the reason. Idempotent; returns at once."""
        with self._lock:
            staged = self._offered.pop(request_id, None)
            if staged is not None:
                self._request_of.pop(staged.handle.id, None)
        if staged is not None:
            self._connector.abort(staged.handle, reason)

    def allocate_receive_slot(self, request_id: str, size: int) -> PendingReceive:
        """Answer a stock head, which wants an address before it sends work on; nothing is allocated."""
        return PendingReceive(request_id, Slot(0, size))

    def register_prealloc_as_receive(self, request_id: str, slot: Any) -> PendingReceive:
        """Answer as the host's does; nothing is registered."""
        return PendingReceive(request_id, slot)

    def free_receive_slot(self, request_id: str) -> None:
        """Do nothing: the host calls this before it computes, and what was taken over is given up after that."""

    def cleanup(self) -> None:
        """End it: give back what was taken over, close the connector. Idempotent. Blocks: ``drain_timeout_s``."""
        with self._lock:
            taken = list(self._taken)
        for request_id in taken:
            self.give_back(request_id)
        if self._embeddings is not None:
            self._embeddings.close()
        self._connector.close()

    # -- what ours has more --------------------------------------------------------------------------------------------

    @property
    def embeddings(self) -> EmbeddingCache | None:
        """This role's cache of what text encoding makes; ``None`` where none was chosen."""
        return None if self._embeddings is None else self._embeddings.cache

    def start(self) -> None:
        """Start engine, channel and store now, so that what is missing is said at the role's start. Idempotent.

        Raises: as `DiffusionConnector.start`. Blocks: seconds at most.
        """
        self._connector.start()

    def load(
        self,
        request_id: str,
        manifest: Mapping[str, Any],
        *,
        device: Any = "cpu",
        stream: Any = None,
        timeout_s: float | None = None,
    ) -> Loaded:
        """Take a payload over: claim it and read it. It stays claimed until `done` or `give_back`.

        Args:
            request_id: The request.
            manifest: As the sender staged it.
            device: Where the tensors shall be.
            stream: The host's stream for copies to the device.
            timeout_s: Longest time; the settings' by default.

        Raises:
            WireError: The manifest is not ours, damaged, or of another request; names the field.
            MoonrelayError: The payload does not come, or not unharmed; see `DiffusionConnector.claim`.

        Blocks: until it is here, or the deadline.
        """
        location = protocol.located(manifest)
        if location is None:
            message = (
                "the payload was not offered by Moonrelay; start all roles with the same --disagg-transfer-backend"
            )
            raise WireError(message, field="manifest", request_id=request_id)
        handle = StageHandle.from_bytes(location.handle_bytes())
        if handle.request_id != request_id:
            message = f"the manifest of {request_id!r} locates a payload of {handle.request_id!r}"
            raise WireError(message, field="manifest.moonrelay.handle", request_id=request_id)
        deadline = Deadline(self._config.fetch_timeout_s if timeout_s is None else timeout_s, self._clock)
        claim = self._connector.claim(handle, timeout_s=deadline.remaining() or 0.0)
        try:
            loaded, source = _unpacked(claim, self._read(claim, deadline), device, stream)
        except BaseException:
            claim.nack()
            raise
        with self._lock:
            before = self._taken.pop(request_id, None)
            self._taken[request_id] = _Taken(claim, source)
            self._counts["delivered"] += 1
            self._counts["bytes"] += handle.nbytes
        if before is not None:
            before.claim.nack()
        return loaded

    def done(self, request_id: str) -> None:
        """Acknowledge as `acknowledge`, and only log what fails: the result is out, and the head decides about it."""
        try:
            self.acknowledge(request_id)
        except LeaseLost as exc:
            logger.warning("%s was given to another instance meanwhile: %s", request_id, exc)
        except MoonrelayError as exc:
            logger.warning("%s could not be acknowledged, its lease will end it: %s", request_id, exc)

    def acknowledge(self, request_id: str, timeout_s: float | None = None) -> None:
        """Acknowledge what was taken over for a request: its own result is out. Without effect where nothing was.

        Raises:
            LeaseLost: Another instance has it meanwhile.
            MoonrelayError: It cannot be told; it is given back.

        Blocks: for one message, ``timeout_s`` at most.
        """
        with self._lock:
            taken = self._taken.pop(request_id, None)
        if taken is None:
            return
        try:
            taken.claim.ack(timeout_s=timeout_s)
        except LeaseLost:
            raise
        except MoonrelayError:
            taken.claim.nack()
            raise

    def give_back(self, request_id: str, claim: PayloadClaim | None = None) -> None:
        """Give back what was taken over for a request: another instance may take it at once. Idempotent.

        Args:
            request_id: The request.
            claim: Only by this claim; what a later attempt took over stays.
        """
        with self._lock:
            taken = self._taken.get(request_id)
            if taken is not None and claim is not None and taken.claim is not claim:
                taken = None
            if taken is not None:
                del self._taken[request_id]
        if taken is not None:
            taken.claim.nack()

    def withdraw(self, request_id: str, up_to_attempt: int | None = None) -> None:
        """Withdraw what a request offers, if it was made by an attempt up to this one (``None``: by any)."""
        with self._lock:
            staged = self._offered.get(request_id)
        if staged is not None and (up_to_attempt is None or staged.handle.attempt <= up_to_attempt):
            self.free_staged(request_id)

    def tidy(self) -> bool:
        """Give back the memory of tensors that were handed out and that only garbage refers to.

        The host's stages leave cycles behind, with the fields of a request in them: the collector finds those in time,
        and a pool that is full does not have it. On a device there is nothing to do: what lands there is copied on.

        Returns:
            Whether the collector was sent for.

        Blocks: for a full collection, where tensors that were handed out still have memory of the pool.
        """
        held = self.in_use()
        if held.slots <= held.payloads:
            return False
        gc.collect()
        return True

    def offered(self) -> tuple[tuple[str, int], ...]:
        """Return the requests whose results are kept here, each with the attempt that made it."""
        with self._lock:
            return tuple((name, staged.handle.attempt) for name, staged in self._offered.items())

    def in_use(self) -> protocol.InUse:
        """Return what is held for payloads now; all zero when nothing is under way."""
        held = self._connector.in_use()
        with self._lock:
            nbytes = sum(staged.handle.nbytes for staged in self._offered.values())
        return protocol.InUse(payloads=held["payloads"], bytes=nbytes, claims=held["claims"], slots=held["slots"])

    def counters(self) -> protocol.Counters:
        """Return what was taken over, and what was encoded, since the start."""
        with self._lock:
            taken = protocol.Counters(delivered=self._counts["delivered"], bytes=self._counts["bytes"])
        if self.embeddings is None:
            return taken
        cached = self.embeddings.counters()
        return msgspec.structs.replace(taken, encoded=cached.encodes, remembered=cached.hits_memory + cached.hits_store)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _read(self, claim: PayloadClaim, deadline: Deadline) -> object:
        """Read a payload; where there is no room for it, once more without the garbage."""
        try:
            return claim.read(timeout_s=deadline.remaining())
        except CapacityError:
            if claim.handle.nbytes > self.pool_size or not self.tidy():
                raise
        return claim.read(timeout_s=deadline.remaining())

    def _publish(self, payload: StagePayload) -> StageHandle:
        """Publish, waiting for room where what is under way will leave some."""
        deadline = Deadline(self._config.stage_timeout_s, self._clock)
        tidied = False
        while True:
            try:
                return self._connector.publish(payload, copy=True)
            except CapacityError:
                pointless = fields.nbytes_of(payload.data) > self.pool_size or self._connector.in_use()["slots"] == 0
                if not pointless and not tidied:
                    tidied = True
                    if self.tidy():
                        continue
                left_s = deadline.remaining() or 0.0
                if pointless or left_s <= 0:
                    raise
            with self._changed:
                self._clock.wait(self._changed, min(left_s, ROOM_LOOK_S))

    def _on_event(self, event: Event) -> None:
        """Follow our own payloads' ends (an observer; in whatever thread they end)."""
        if event.payload_id is None or event.name not in ("released", "lease_expired"):
            return
        if event.name == "lease_expired" and event.reason != "expired":
            return  # a reader's claim lapsed, the payload stays
        with self._changed:
            request_id = self._request_of.pop(event.payload_id, None)
            if request_id is None and self._staging:
                self._ended_early.add(event.payload_id)
            staged = None if request_id is None else self._offered.get(request_id)
            if request_id is not None and staged is not None and staged.handle.id == event.payload_id:
                del self._offered[request_id]
            self._changed.notify_all()

    @staticmethod
    def _device_of(tensors: Any) -> str:
        kinds: set[str] = set()
        fields.map_tensors(tensors, lambda tensor: kinds.add(tensor.device.type))
        return next((kind for kind in kinds if kind != "cpu"), "cpu")


def manager_class() -> type[PayloadManager]:
    """Return `PayloadManager` as a subclass of the host's manager."""
    from sglang.multimodal_gen.runtime.disaggregation.transport.manager import DiffusionTransferManager

    class MoonrelayTransferManager(PayloadManager, DiffusionTransferManager):  # type: ignore[misc]
        """`PayloadManager`, where the host asks for its own class."""

    return MoonrelayTransferManager


def _unpacked(claim: PayloadClaim, data: object, device: Any, stream: Any) -> tuple[Loaded, Any]:
    """Return what was read, with its tensors on ``device``, and what must live until the copies to it are done."""
    if not isinstance(data, dict) or data.keys() != {_TENSORS, _VALUES}:
        message = f"the payload is none of a role of SGLang, schema {claim.handle.schema!r}"
        raise WireError(message, field="schema", request_id=claim.handle.request_id)
    import torch

    landed = {_TENSORS: data[_TENSORS], _VALUES: fields.unpack(data[_VALUES])}
    target = torch.device(device)
    if target.type == "cpu":
        return Loaded(claim, landed[_TENSORS], landed[_VALUES]), None
    module = torch.get_device_module(target)
    computing = module.current_stream(target)
    with module.stream(stream):
        moved = fields.map_tensors(landed, lambda tensor: tensor.to(target, non_blocking=True))
        event = module.Event()
        event.record(module.current_stream(target))
    # Made on the host's stream for copies, used on the computing one: not to be given to others before that is done.
    fields.map_tensors(moved, lambda tensor: tensor.record_stream(computing))
    return Loaded(claim, moved[_TENSORS], moved[_VALUES], event), landed


def _event_on(stream: Any, device_kind: str) -> Any:
    """Return an event after everything on ``stream`` so far; ``None`` on a CPU, where nothing is under way."""
    if stream is None or device_kind == "cpu":
        return None
    import torch

    event = torch.get_device_module(device_kind).Event()
    event.record(stream)
    return event
