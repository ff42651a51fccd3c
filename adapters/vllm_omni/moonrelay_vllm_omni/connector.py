"""What the host's connector does, without the host: put and get by key over a `DiffusionConnector`.

Owns what was put here and which key it stands under. Bytes are moved by the core, keys are found by
`moonrelay_vllm_omni.directory`, waits are `moonrelay_vllm_omni.receiving`, the host's types are
`moonrelay_vllm_omni.mapping`; the host's base class is joined in `moonrelay_vllm_omni.host_connector`.
"""

from __future__ import annotations

import _thread
import base64
import binascii
import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.connector import DiffusionConnector
from moonrelay.errors import (
    ClosedError,
    MoonrelayError,
    PeerLost,
    TransferFailed,
    TransferTimeout,
    WireError,
)
from moonrelay.events import Event
from moonrelay.handle import StageHandle
from moonrelay.payload import StagePayload, flatten
from moonrelay_vllm_omni import mapping
from moonrelay_vllm_omni.background import OrderedJobs
from moonrelay_vllm_omni.config import OmniSettings, parse
from moonrelay_vllm_omni.directory import Edge, KeyDirectory
from moonrelay_vllm_omni.receiving import NOT_YET, Received, Receiver, is_lost

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

#: Where the metadata that `put` returns holds the handle.
HANDLE_FIELD: Final = "moonrelay_handle"
#: A larger handle is not put into the metadata: the host sends that with its own messages.
MAX_TOLD_BYTES: Final = 64 << 10
#: Bound of one attempt at a record, in seconds, and how many there are.
WRITE_TIMEOUT_S: Final = 5.0
WRITE_ATTEMPTS: Final = 3
#: Bound of one sweep of the directory, in seconds.
SWEEP_TIMEOUT_S: Final = 30.0
#: Bound of what `cleanup` waits for an owner, in seconds.
RELEASE_TIMEOUT_S: Final = 2.0
#: Bound of the last jobs on the directory when the connector is closed, in seconds.
LAST_JOBS_S: Final = 5.0
#: How many payloads that ended before their `put` returned are remembered.
OVER_KEPT: Final = 256

#: What the host's `get` returns.
Found = tuple[object, int]


class ConnectorClosed(ClosedError, RuntimeError):
    """The connector was closed; a RuntimeError, as the host's own connectors raise."""

    code = ClosedError.code


@dataclass(slots=True, kw_only=True)
class _Put:
    """A payload that was put here and has not ended."""

    handle: StageHandle
    leaves: tuple[weakref.ref[torch.Tensor], ...]


class StageConnector:
    """Puts and gets the host's payloads by ``(from_stage, to_stage, key)``.

    One instance sends and receives on all edges of its stage. Engine, channel and store start in the background; what
    is missing there is said as an ERROR at once, and by `health`.

    Args:
        extra: The connector's settings, see `moonrelay_vllm_omni.config`.
        clock: All times are reckoned on it.

    Raises:
        ConfigError: A setting is wrong or unknown; names it.
        PluginError: The store's relay cannot be loaded.

    Threads: all methods from any.
    """

    def __init__(self, extra: Mapping[str, Any], *, clock: Clock | None = None) -> None:
        self.settings: OmniSettings = parse(extra)
        self._clock: Clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._closed = False
        self._closing = threading.Lock()
        self._puts: dict[Edge, _Put] = {}
        self._edges: dict[str, Edge] = {}
        self._over: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._last_error: str | None = None
        settings = self.settings
        self._directory = KeyDirectory(settings.store, self._clock, default_ttl_s=settings.lease_ttl_s)
        self._connector = DiffusionConnector(
            role="vllm-omni" if settings.stage_id < 0 else f"vllm-omni-{settings.stage_id}",
            transfer_mode=settings.transfer_mode,
            te_config=settings.transfer,
            store_config=settings.store,
            control_config=settings.control,
            lease_ttl_s=settings.lease_ttl_s,
            spill_after_s=settings.spill_after_s,
            drain_timeout_s=settings.drain_timeout_s,
            integrity=settings.integrity,
            auth_key=settings.auth_key,
            observers=[self._on_event],
            clock=self._clock,
        )
        self._receiver = Receiver(
            self._connector,
            self._directory,
            self._clock,
            fetchers=settings.fetchers,
            fetch_timeout_s=settings.fetch_timeout_s,
            keep_s=settings.lease_ttl_s,
            on_trouble=self._note,
        )
        self._jobs = OrderedJobs("omni-keys", self._clock, every_s=settings.store.sweep_interval_s, again=self._sweep)
        self._jobs.submit(self._start)

    # -- producing --------------------------------------------------------------------------------------------------

    def put(
        self, from_stage: object, to_stage: object, put_key: object, data: object
    ) -> tuple[bool, int, dict[str, Any]]:
        """Offer ``data`` under a key; of two payloads under one key the last one counts.

        Copies the tensors and returns, unless ``snapshot`` is off: then they are referenced, staged by other threads,
        and must stay unmodified until they are taken; and the very same ones again change nothing.

        Args:
            from_stage: The stage that sends.
            to_stage: The stage that receives.
            put_key: The key, unique between the two.
            data: A tree of tensors and plain values, msgspec structs among them.

        Returns:
            True, the payload's size in bytes, and metadata by which a consumer needs no look into the directory.

        Raises:
            UnsupportedTensor, ConfigError: A value cannot be carried; names the field. Nothing changed.
            CapacityError: The pool has no room and there is no store to take it.
            PluginError, PeerLost: Engine or store cannot be used.
            ConnectorClosed: The connector is closed.
        """
        edge = Edge(from_stage=str(from_stage), to_stage=str(to_stage), key=str(put_key))
        self._check_open(edge.key)
        try:
            payload = mapping.to_payload(edge, data, readers=self.settings.readers, ttl_s=self.settings.lease_ttl_s)
            same = None if self.settings.snapshot else self._same(edge, payload)
            if same is not None:
                return True, _size(same), _told(same)
            handle = self._connector.publish(payload, copy=self.settings.snapshot)
        except ClosedError as exc:
            raise ConnectorClosed(exc.message, key=edge.key) from exc
        except MoonrelayError as exc:
            self._note(exc)  # the host logs what it is told
            raise
        with self._lock:
            before = self._puts.get(edge)
            self._puts[edge] = _Put(handle=handle, leaves=_references(payload))
            self._edges[handle.id] = edge
            over = self._over.pop(handle.id, None)
            self._counts["puts"] += 1
            self._counts["bytes_transferred"] += handle.nbytes
        if not self._jobs.submit(partial(self._enter, edge, handle, before)):
            raise ConnectorClosed("the connector was closed meanwhile", key=edge.key)
        if over is not None:
            if over:
                self._note_text(over)
            self._forget(handle.id)
        return True, _size(handle), _told(handle)

    def cleanup(
        self,
        request_id: object,
        from_stage: object = None,
        to_stage: object = None,
        metadata: object = None,
        **_: object,
    ) -> None:
        """Drop what stands under a key and nobody needs. Idempotent.

        Args:
            request_id: The very key that was put (not a prefix of it).
            from_stage: With ``to_stage``: on this edge only, also where another process put it.
            to_stage: See ``from_stage``.
            metadata: What `put` returned, where the caller has it; then the directory is not asked.

        Blocks: for a message to the payload's owner, two seconds at most.
        """
        key = str(request_id)
        one = None
        if from_stage is not None and to_stage is not None:
            one = Edge(from_stage=str(from_stage), to_stage=str(to_stage), key=key)
        if self._closed:
            return
        self._receiver.give_up(key, one)
        with self._lock:
            mine = [(edge, put.handle) for edge, put in self._puts.items() if edge.key == key and one in (None, edge)]
        try:
            if not mine and one is not None:
                told = _handle_in(metadata, key)
                found = told or self._directory.find(one, Deadline(RELEASE_TIMEOUT_S, self._clock))
                mine = [] if found is None else [(one, found)]
            for edge, handle in mine:
                self._connector.release(handle, timeout_s=RELEASE_TIMEOUT_S)
                self._directory.drop(edge, handle.id, Deadline(RELEASE_TIMEOUT_S, self._clock))
        except MoonrelayError as exc:
            self._note(exc)
            logger.warning("cleaning %s up failed, its lease will end it: %s", key, exc)

    def reap_consumed(self) -> None:
        """Do the small housekeeping that needs no wait. Returns at once; what was consumed is freed without it."""
        self._receiver.prune()

    # -- consuming --------------------------------------------------------------------------------------------------

    def get(self, from_stage: object, to_stage: object, get_key: object, metadata: object = None) -> Found | None:
        """Return the payload under a key if it is here; see to it that it will be. Never blocks.

        Args:
            from_stage: The stage that sends.
            to_stage: The stage that receives.
            get_key: The key.
            metadata: What `put` returned, alone or as ``{key: metadata}``; another connector's counts as nothing.

        Returns:
            The payload and its size in bytes; ``None`` while it is not here.

        Raises:
            MoonrelayError: It will never come, or not unharmed; said once.
            ConnectorClosed: The connector is closed.
        """
        return self._got(self._edge(from_stage, to_stage, get_key), metadata, None)

    def get_with_deadline(
        self, from_stage: object, to_stage: object, get_key: object, metadata: object = None, *, deadline: float
    ) -> Found | None:
        """Return the payload under a key; ``None`` where it is not here by ``deadline``.

        Args:
            from_stage: As in `get`, and so the next three.
            to_stage: The stage that receives.
            get_key: The key.
            metadata: As in `get`.
            deadline: On the monotonic clock, in seconds.

        Blocks: until then. Raises: as `get`.
        """
        edge = self._edge(from_stage, to_stage, get_key)
        left_s = deadline - self._clock.monotonic()
        if left_s <= 0:
            return None
        return self._got(edge, metadata, Deadline(left_s, self._clock))

    def abandon_get(self, get_key: object) -> None:
        """Look for a key no more, and give back what is being read of it. Returns at once; no memory is freed under a
        transfer, and a payload that is complete stays for a while."""
        if not self._closed:
            self._receiver.give_up(str(get_key))

    # -- life -------------------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """Return how it stands, with the host's documented keys and ours. Returns at once."""
        settings = self.settings
        transfer = settings.transfer
        with self._lock:
            counts = {name: self._counts[name] for name in ("puts", "gets", "bytes_transferred", "errors", "timeouts")}
            closed, started, last_error = self._closed, self._counts["started"] > 0, self._last_error
            failed = self._counts["not_started"] > 0 and not started
        return {
            "status": "unhealthy" if closed or failed else "healthy",
            "host": settings.transfer.hostname,
            "metadata_server": self._directory.url,
            "master": settings.store.url,
            "protocol": transfer.protocol if transfer.engine == "mooncake" else transfer.engine,
            "pool_device": settings.transfer.device,
            "pool_size": settings.transfer.pool_bytes,
            **counts,
            "engine": settings.transfer.engine,
            "transfer_mode": self._connector.settings.mode,
            "started": started,
            "closed": closed,
            "last_error": last_error,
            "waiting": self._receiver.waiting,
            **self.in_use(),
        }

    def in_use(self) -> Mapping[str, int]:
        """Return what is held for payloads now: ``payloads``, ``slots`` and ``claims``, see `DiffusionConnector`."""
        return self._connector.in_use()

    def close(self) -> None:
        """End the connector: nothing stays behind but what was moved to the store. Idempotent.

        Blocks: up to ``drain_timeout_s`` and a few seconds; a second caller until the first one is done.
        """
        with self._lock:
            self._closed = True
        with self._closing:
            if self._directory.closed:
                return
            # Records of what was put must be there before their payloads are moved to the store.
            self._jobs.flush(Deadline(LAST_JOBS_S, self._clock))
            self._receiver.stop()
            self._connector.close()
            self._receiver.close()
            self._jobs.close(Deadline(LAST_JOBS_S, self._clock))
            self._directory.close()

    def close_soon(self) -> None:
        """Have the connector closed by a thread of its own. Returns at once and takes no lock, so that a finalizer may
        call it in any thread; without effect while the interpreter ends, when no thread runs any more."""
        if not self._closed and not sys.is_finalizing():
            _thread.start_new_thread(self._close_apart, ())

    # -- inside -----------------------------------------------------------------------------------------------------

    def _close_apart(self) -> None:
        # One that the interpreter knows by name; where the process ends meanwhile, leases and sweeps do the rest.
        threading.Thread(target=self.close, name="moonrelay-omni-close", daemon=True).start()

    def _edge(self, from_stage: object, to_stage: object, key: object) -> Edge:
        edge = Edge(from_stage=str(from_stage), to_stage=str(to_stage), key=str(key))
        self._check_open(edge.key)
        return edge

    def _check_open(self, key: str) -> None:
        if self._closed:
            raise ConnectorClosed("the connector is closed; make a new one", key=key)

    def _got(self, edge: Edge, metadata: object, deadline: Deadline | None) -> Found | None:
        try:
            told = _handle_in(metadata, edge.key)
            if deadline is None:
                received = self._receiver.poll(edge, told)
            else:
                received = self._receiver.wait(edge, told, deadline)
        except ClosedError as exc:
            raise ConnectorClosed(exc.message, key=edge.key) from exc
        except MoonrelayError as exc:
            self._note(exc)
            if isinstance(exc, NOT_YET):
                self._count("timeouts")
            raise
        if received is None:
            if deadline is not None:
                self._count("timeouts")
            return None
        return self._handed(received)

    def _handed(self, received: Received) -> Found:
        with self._lock:
            self._counts["gets"] += 1
            self._counts["bytes_transferred"] += received.handle.nbytes
        return mapping.to_host(received.data), _size(received.handle)

    def _same(self, edge: Edge, payload: StagePayload) -> StageHandle | None:
        """Return the handle under which this very content stands already."""
        with self._lock:
            before = self._puts.get(edge)
        if before is None:
            return None
        flat = flatten(payload)
        if flat.tree != before.handle.tree or flat.specs != before.handle.tensors:
            return None
        now = _references(payload)
        if len(now) != len(before.leaves):
            return None
        same = all(old() is not None and old() is new() for old, new in zip(before.leaves, now, strict=True))
        return before.handle if same else None

    def _start(self) -> None:
        """Start engine, channel and stores (first of the ordered jobs)."""
        error: MoonrelayError | None = None
        try:
            self._directory.start()
            self._connector.start()
        except ClosedError:
            return
        except MoonrelayError as exc:
            error = exc
        if error is None:
            self._count("started")
            return
        self._note(error)
        self._count("not_started")
        logger.error("MoonrelayConnector cannot move payloads yet: %s", error)

    def _sweep(self) -> None:
        self._directory.sweep(Deadline(SWEEP_TIMEOUT_S, self._clock), lost=self._is_lost)

    def _is_lost(self, handle: StageHandle) -> bool:
        with self._lock:
            mine = handle.id in self._edges
        return not mine and not self._closed and is_lost(self._connector, handle)

    def _enter(self, edge: Edge, handle: StageHandle, before: _Put | None) -> None:
        """Write a payload's record, then end the payload that it replaces (an ordered job)."""
        error: MoonrelayError | None = None
        for _ in range(WRITE_ATTEMPTS):
            try:
                own = None if before is None else before.handle.id
                self._directory.write(edge, handle, Deadline(WRITE_TIMEOUT_S, self._clock), instead_of=own)
                error = None
                break
            except (TransferFailed, TransferTimeout, PeerLost) as exc:
                error = exc
            except MoonrelayError as exc:
                error = exc
                break
        if error is not None:
            self._note(error)
            logger.error("%s has no record in %s, its readers are told: %s", edge, self._directory.url, error)
            self._connector.abort(handle, f"its key could not be recorded: {error}")
        elif before is not None:
            self._connector.abort(before.handle, "a later payload was put under the same key")

    def _leave(self, edge: Edge, payload_id: str) -> None:
        """Take the record of a payload that has ended away (an ordered job)."""
        self._directory.drop(edge, payload_id, Deadline(WRITE_TIMEOUT_S, self._clock))

    def _on_event(self, event: Event) -> None:
        """Follow our own payloads' ends (an observer; in whatever thread they end)."""
        if event.payload_id is None or event.name not in ("released", "lease_expired", "failed"):
            return
        if event.name == "lease_expired" and event.reason != "expired":
            return  # a reader's claim lapsed, the payload stays
        why = f"{event.code}: {event.reason}" if event.name == "failed" else ""
        with self._lock:
            if event.payload_id not in self._edges:
                # It has ended before `put`, which publishes first, could note where it belongs.
                self._over[event.payload_id] = self._over.get(event.payload_id) or why
                while len(self._over) > OVER_KEPT:
                    self._over.pop(next(iter(self._over)))
                return
        if why:
            self._note_text(why)  # its end is told apart
        else:
            self._forget(event.payload_id)

    def _forget(self, payload_id: str) -> None:
        """Take a payload that has ended off the books, and its record away."""
        with self._lock:
            edge = self._edges.pop(payload_id, None)
            if edge is None:
                return
            put = self._puts.get(edge)
            if put is not None and put.handle.id == payload_id:
                del self._puts[edge]
        self._jobs.submit(partial(self._leave, edge, payload_id))

    def _note(self, error: MoonrelayError) -> None:
        self._note_text(f"{error.code}: {error.message}")

    def _note_text(self, text: str) -> None:
        with self._lock:
            self._counts["errors"] += 1
            self._last_error = text

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _size(handle: StageHandle) -> int:
    """Return a payload's bytes, with those of what is no tensor."""
    return handle.nbytes + len(handle.tree)


def _told(handle: StageHandle) -> dict[str, Any]:
    """Return the metadata by which a consumer finds a payload without the directory."""
    raw = handle.to_bytes()
    told: dict[str, Any] = {"size": _size(handle)}
    if len(raw) <= MAX_TOLD_BYTES:
        told[HANDLE_FIELD] = base64.b64encode(raw).decode()
    return told


def _handle_in(metadata: object, key: str) -> StageHandle | None:
    """Return the handle in what the host passes on; ``None`` where there is none of ours.

    Raises:
        WireError, VersionError: There is one, and it is damaged, or of another version. The key may still be good, but
            what else was damaged on the way nobody knows.
    """
    if not isinstance(metadata, Mapping):
        return None
    inner = metadata.get(key, metadata)
    if not isinstance(inner, Mapping) or HANDLE_FIELD not in inner:
        return None
    try:
        raw = base64.b64decode(inner[HANDLE_FIELD], validate=True)
    except (binascii.Error, TypeError, ValueError) as exc:
        message = f"the metadata of {key} holds a damaged handle"
        raise WireError(message, field=HANDLE_FIELD) from exc
    return StageHandle.from_bytes(raw)


def _references(payload: StagePayload) -> tuple[weakref.ref[torch.Tensor], ...]:
    """Return weak references to the host's own tensor objects, in the order of the tree."""
    found: list[weakref.ref[torch.Tensor]] = []
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    pending: list[object] = [payload.tensor if payload.tensor is not None else payload.data]
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            found.append(weakref.ref(item))
        elif type(item) is dict:
            pending += reversed(list(item.values()))
        elif type(item) in (list, tuple):
            pending += reversed(item)  # type: ignore[call-overload]
    return tuple(found)


__all__ = ["HANDLE_FIELD", "ConnectorClosed", "StageConnector"]
