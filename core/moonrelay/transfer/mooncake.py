"""The engine over Mooncake's Transfer Engine, with ``P2PHANDSHAKE``: no metadata service.

Owns the library's engine of this process, what is registered with it, and every handle it gives out. What the wheel
forces is kept in here: one entry per asynchronous read, a handle used until its terminal answer and never after (a
stale one aborts the process), no call before ``initialize`` succeeded or after ``close`` (SIGSEGV), first contact in a
thread of its own (a hung peer blocks it for a minute), the environment set before the first import. Waiting is the
caller's.

Process-wide, since the library reads its environment once: the protocol, IPv6 and ``progress_timeout_s`` of the first
engine hold for all. Fork is not supported: a forked child that uses the engine hangs (use spawn).
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

from moonrelay.clock import Clock, Deadline, SystemClock
from moonrelay.config import TransferConfig, default_environment
from moonrelay.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    MoonrelayError,
    PeerLost,
    PluginError,
    RegistrationError,
    TransferFailed,
)
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer.base import Operation, OperationState, TransferEngine
from moonrelay.transfer.mapping import map_memory
from moonrelay.transfer.operations import Finished, out_of_bounds

logger = logging.getLogger(__name__)

#: ``close`` waits this long for calls into the library that are under way.
_CLOSE_S = 2.0
_PROTOCOL_ENVIRONMENT = {
    # Without these the library chooses by what hardware it finds, whatever protocol it is given.
    "tcp": {"MC_FORCE_TCP": "1"},
    "rdma": {"MC_FORCE_HCA": "1"},
    "nvlink": {"MC_FORCE_MNNVL": "1"},
}


class _Library(Protocol):
    """What we use of ``mooncake.engine.TransferEngine``."""

    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def send_probe(self, peer: str, /) -> int: ...
    def batch_transfer_async_read(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int], /
    ) -> int: ...
    def transfer_check_status(self, handle: int, /) -> int: ...


def translate(call: str, code: int, **context: str | int | None) -> MoonrelayError:
    """Return our error for a return code of the library; the only place that knows them.

    Args:
        call: The library's method, without prefixes: ``initialize``, ``register``, ``probe``, ``submit``, ``status``.
        code: What it returned.
        **context: Scalars for the error.
    """
    if call == "initialize":
        message = (
            f"Mooncake could not start (code {code}): check hostname, free ports in 15000-17000, and that the "
            "protocol's hardware is there (`moonrelay doctor`); protocol='tcp' needs none"
        )
        return ConfigError(message, **context)
    if call == "register":
        reason = {
            -7: "it overlaps memory that is registered already",
            -3: "it is not registered",
            -1: "there is nothing to register",
        }.get(code, "the engine refuses it")
        message = f"cannot register memory with Mooncake: {reason} (code {code})"
        return RegistrationError(message, **context)
    if call == "probe":
        message = f"the peer's Mooncake engine does not answer (code {code})"
        return PeerLost(message, **context)
    if call == "submit":
        message = f"Mooncake could not begin a read: the peer's engine cannot be reached (handle {code})"
        return PeerLost(message, **context)
    message = f"Mooncake reported a failed read (code {code})"
    return TransferFailed(message, **context)


class _Native:
    """The library's engine and the memory it may write: whoever is inside a call keeps both."""

    # Cleared in alphabetical order: the engine (whose destructor joins its threads) before the memory.
    __slots__ = ("__weakref__", "engine", "memory")

    def __init__(self, engine: _Library, memory: dict[int, object]) -> None:
        self.engine: _Library | None = engine
        self.memory = memory


class _Peer:
    """What we know of one life of a peer. Changed under the engine's lock."""

    __slots__ = ("address", "dialing", "error", "ready", "sid")

    def __init__(self, address: str, sid: str) -> None:
        self.address = address
        self.sid = sid
        self.ready = False
        self.dialing = False
        self.error: MoonrelayError | None = None


class _Read(Operation):
    """One entry, one handle; begins once first contact was made."""

    __slots__ = (
        "_abandoned",
        "_engine",
        "_error",
        "_handle",
        "_local",
        "_lock",
        "_nbytes",
        "_peer",
        "_remote",
        "_state",
    )

    def __init__(self, engine: MooncakeEngine, peer: _Peer, remote: int, local: int, nbytes: int) -> None:
        self._engine = engine
        self._peer = peer
        self._remote = remote
        self._local = local
        self._nbytes = nbytes
        self._handle = 0
        self._state = OperationState.RUNNING
        self._error: MoonrelayError | None = None
        self._abandoned = False
        # A handle given to the library twice after its end aborts the process: worth a lock although one thread polls.
        self._lock = threading.Lock()

    @property
    def error(self) -> MoonrelayError | None:
        return self._error

    def poll(self) -> OperationState:
        with self._lock:
            if self._state is OperationState.RUNNING:
                if self._handle:
                    self._check()
                else:
                    self._begin()
            return self._state

    def abandon(self) -> None:
        self._abandoned = True

    def _begin(self) -> None:
        if self._abandoned:
            message = "given up before it began"
            self._fail(TransferFailed(message, peer=self._peer.address))
            return
        answer = self._engine.submit(self._peer, self._remote, self._local, self._nbytes)
        if isinstance(answer, MoonrelayError):
            self._fail(answer)
        else:
            self._handle = answer

    def _check(self) -> None:
        answer = self._engine.check(self._handle)
        if isinstance(answer, MoonrelayError):
            self._fail(answer)
        elif answer in (1, -1):
            self._handle = 0
            if answer == 1:
                self._state = OperationState.DONE
            else:
                self._fail(translate("status", answer, peer=self._peer.address, nbytes=self._nbytes))
        # 0 runs; -2 is the library's own timeout, which says nothing about bytes still under way.

    def _fail(self, error: MoonrelayError) -> None:
        self._handle = 0
        self._error = error
        self._state = OperationState.FAILED


class MooncakeEngine(TransferEngine):
    """Reads over Mooncake's Transfer Engine.

    ``options``: ``intra_node`` (bool, with protocol ``nvlink``: between the GPUs of one host).

    Threads: any. The library's own threads carry the reads; ``start`` and ``close`` hold the GIL for up to a second.
    """

    name: ClassVar[str] = "mooncake"

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._clock: Clock = SystemClock()
        # Re-entrant, because `release` may be called by a finalizer while this thread is inside.
        self._state = threading.Condition(threading.RLock())
        self._native: _Native | None = None
        self._alive: Callable[[], _Library | None] = lambda: None
        self._memory: dict[int, object] = {}
        self._address: EngineAddress | None = None
        self._closed = False
        self._calls = 0
        self._peers: dict[str, _Peer] = {}
        self._lives: dict[str, int] = {}
        self._dialers: set[threading.Thread] = set()

    def start(self) -> None:
        with self._state:
            if self._closed:
                message = "the mooncake engine is closed"
                raise ClosedError(message)
            if self._native is not None:
                return
            engine = _load(self._config)
            host = self._config.hostname
            code = engine.initialize(host, "P2PHANDSHAKE", self._config.protocol, self._config.nics)
            if code != 0:
                nics = {"nics": self._config.nics} if self._config.nics else {}
                raise translate("initialize", code, hostname=host, protocol=self._config.protocol, **nics)
            port = engine.get_rpc_port()
            self._native = _Native(engine, self._memory)
            self._alive = weakref.ref(engine)
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            self._address = EngineAddress(engine=self.name, address=address, nonce=secrets.token_hex(16))

    @property
    def address(self) -> EngineAddress:
        if self._address is None:
            message = "the mooncake engine was not started"
            raise ClosedError(message)
        return self._address

    def allocate(self, nbytes: int) -> Region:
        memory, base = _memory_on(self._config.device, nbytes)
        region = self.register(base, nbytes)
        self._memory[base] = memory
        return region

    def release(self, region: Region) -> None:
        if region.base not in self._memory:
            return
        self.unregister(region)
        if self._closed and self._alive() is not None:
            logger.warning(
                "%d bytes stay mapped: the engine is stuck in a call and may still write them", region.nbytes
            )
            return
        self._memory.pop(region.base, None)

    def register(self, address: int, nbytes: int) -> Region:
        if address <= 0 or nbytes < 1:
            raise translate("register", -1, nbytes=nbytes)
        with self._calling() as engine:
            if engine is None:
                raise self._not_open()
            code = engine.register_memory(address, nbytes)
        if code != 0:
            raise translate("register", code, nbytes=nbytes)
        return Region(key="", base=address, nbytes=nbytes)

    def unregister(self, region: Region) -> None:
        with self._calling() as engine:
            if engine is not None:
                engine.unregister_memory(region.base)

    def read(
        self, peer: EngineAddress, region: Region, remote_address: int, local_address: int, nbytes: int
    ) -> Operation:
        error = out_of_bounds(region, remote_address, nbytes)
        if error is not None:
            return Finished(error)
        with self._state:
            if self._native is None:
                raise self._not_open()
            known = self._known(peer)
            if not known.ready and not known.dialing:
                self._dial(known, remote_address, local_address)
        operation = _Read(self, known, remote_address, local_address, nbytes)
        operation.poll()
        return operation

    def forget(self, peer: EngineAddress) -> None:
        with self._state:
            self._peers.pop(peer.nonce, None)

    def close(self) -> None:
        with self._state:
            self._closed = True
            native, self._native = self._native, None
            if native is None:
                return
            dialers = list(self._dialers)
        deadline = Deadline(_CLOSE_S, self._clock)
        with self._state:
            quiet = deadline.wait_for(self._state, lambda: self._calls == 0)
        for dialer in dialers if quiet else ():
            dialer.join(_CLOSE_S)
        if quiet:
            native.engine = None  # the destructor joins the library's threads
        else:
            logger.warning("a peer hangs in first contact: Mooncake's threads and ports stay until that call returns")

    def submit(self, peer: _Peer, remote: int, local: int, nbytes: int) -> int | MoonrelayError:
        """Begin one read, unless first contact is still under way; return the handle, 0 for "not yet", or the error."""
        with self._state:
            if not peer.ready:
                if self._closed:
                    return self._not_open()
                return 0 if peer.dialing else peer.error or translate("submit", 0, peer=peer.address)
        with self._calling() as engine:
            if engine is None:
                return self._not_open()
            handle = engine.batch_transfer_async_read(peer.sid, [local], [remote], [nbytes])
        if handle:
            return handle
        with self._state:
            peer.ready = False  # the next read dials again
            peer.error = translate("submit", handle, peer=peer.address)
            return peer.error

    def check(self, handle: int) -> int | MoonrelayError:
        """Ask about a handle that has not ended; return the library's answer, or the error once the engine is gone."""
        # `_calling` in full, since this is what a poll costs.
        with self._state:
            native = self._native
            if native is not None:
                self._calls += 1
        if native is not None:
            try:
                if native.engine is not None:
                    return native.engine.transfer_check_status(handle)
            finally:
                with self._state:
                    self._calls -= 1
                    if self._closed:
                        self._state.notify_all()
        # Closed, but until its destructor has run it may still write.
        return self._not_open() if self._alive() is None else 0

    @contextlib.contextmanager
    def _calling(self) -> Iterator[_Library | None]:
        """Enter the library: ``close`` waits for whoever is inside. Yields ``None`` when there is no engine."""
        with self._state:
            native = self._native
            if native is not None:
                self._calls += 1
        try:
            yield None if native is None else native.engine
        finally:
            if native is not None:
                with self._state:
                    self._calls -= 1
                    if self._closed:
                        self._state.notify_all()

    def _known(self, peer: EngineAddress) -> _Peer:
        known = self._peers.get(peer.nonce)
        if known is None:
            life = self._lives.get(peer.address, 0)
            self._lives[peer.address] = life + 1
            known = self._peers[peer.nonce] = _Peer(peer.address, _spelling(peer.address, life, self._config.protocol))
        return known

    def _dial(self, peer: _Peer, remote: int, local: int) -> None:
        peer.dialing = True
        peer.error = None
        dialer = threading.Thread(
            target=self._make_contact, args=(peer, remote, local), name="moonrelay-mooncake-dial", daemon=True
        )
        self._dialers.add(dialer)
        dialer.start()

    def _make_contact(self, peer: _Peer, remote: int, local: int) -> None:
        """Prove that the peer's engine answers, then open its segment with an empty read.

        The probe takes a minute when the peer hangs, but unlike every other call it blocks nobody else.
        """
        error: MoonrelayError | None
        try:
            with self._calling() as engine:
                error = self._not_open() if engine is None else _contact(engine, peer, remote, local)
        except Exception as exc:  # noqa: BLE001 - the outermost frame of a thread; every read that waits for it fails
            message = f"first contact failed: {exc}"
            error = TransferFailed(message, peer=peer.address)
        with self._state:
            peer.error = error
            peer.ready = error is None
            peer.dialing = False
            self._dialers.discard(threading.current_thread())

    def _not_open(self) -> ClosedError:
        message = f"the mooncake engine {'is closed' if self._closed else 'was not started'}"
        return ClosedError(message)


def _contact(engine: _Library, peer: _Peer, remote: int, local: int) -> MoonrelayError | None:
    code = engine.send_probe(peer.sid)
    if code != 0:
        return translate("probe", code, peer=peer.address)
    handle = engine.batch_transfer_async_read(peer.sid, [local], [remote], [0])
    if not handle:
        return translate("submit", handle, peer=peer.address)
    engine.transfer_check_status(handle)  # an empty read ends at once
    return None


def _spelling(address: str, life: int, protocol: str) -> str:
    """Return the name to dial: another spelling for each life of an address.

    The library caches what it learned about a name for ever, so a new process on an old port would never be reached.
    """
    if protocol != "tcp" or life == 0:
        return address
    host, _, port = address.rpartition(":")
    return f"{host}:{'0' * life}{port}"


def _memory_on(device: str, nbytes: int) -> tuple[object, int]:
    """Return new memory on a device (an object that keeps it) and its address."""
    if device == "cpu":
        mapping = map_memory(nbytes)
        return mapping, mapping.address
    import torch

    try:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as exc:  # torch's out-of-memory error is one
        message = f"cannot allocate a pool of {nbytes} bytes on {device}: {exc}; lower pool_bytes"
        raise CapacityError(message, wanted=nbytes, device=device) from exc
    return tensor, tensor.data_ptr()


def _load(config: TransferConfig) -> _Library:
    """Import the library with its environment set, and make an engine that is not initialized yet."""
    protocol = dict(_PROTOCOL_ENVIRONMENT[config.protocol])
    if config.protocol == "nvlink" and config.options.get("intra_node"):
        protocol = {"MC_INTRANODE_NVLINK": "1", "MC_INTRA_NVLINK": "1"}
    if ":" in config.hostname:
        protocol["MC_USE_IPV6"] = "1"
    default_environment(
        {
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(max(1, math.ceil(config.progress_timeout_s))),
            "MC_LOG_LEVEL": "ERROR",
            # A little faster than the default of 64 KiB, in most runs.
            "MC_TCP_SLICE_SIZE": str(256 << 10),
            **protocol,
        }
    )
    try:
        import mooncake.engine as library
    except ImportError as exc:
        message = (
            f"Mooncake's engine cannot be imported: {exc}; install moonrelay[mooncake] (CUDA) or "
            "moonrelay[mooncake-cpu], never both, and the system library libibverbs1"
        )
        raise PluginError(message, engine="mooncake") from exc
    if config.protocol == "nvlink" and not (
        getattr(library, "SUPPORT_MNNVL", False) or getattr(library, "SUPPORT_INTRA_NVLINK", False)
    ):
        message = "protocol='nvlink' needs a Mooncake wheel built with NVLink support, which the installed one is not"
        raise ConfigError(message, field="protocol")
    engine: _Library = library.TransferEngine()
    return engine
