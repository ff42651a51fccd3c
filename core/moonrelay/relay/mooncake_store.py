"""The relay over a Mooncake store: one master, pools in daemons of their own, this process a client without a segment.

Owns the client's life and the discipline that the wheel needs. Objects are put in a session (reserve, write, end): the
master then says at once when a key exists or when there is no room, nothing is readable before it is complete, and
`put_if_absent` is atomic. Every native call runs on a thread of this relay, so a caller leaves at its deadline while
the call may go on; nothing is called before ``setup`` or after ``close``, where the library would crash.

Keys are listed through the master's admin port (``metrics`` in the URL, by default port 9003 of the master's host): the
client library has no listing. Only `keys`, and so only the sweeper, needs it.

Source: wheel 0.3.13.post1. RDMA is configured and coded for, but was never run.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import http.client
import logging
import mmap
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar
from urllib.parse import urlsplit

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig, require_one_of, unknown_key
from moonrelay.errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    PeerLost,
    RegistrationError,
    TransferFailed,
    TransferTimeout,
)
from moonrelay.handle import Extent
from moonrelay.relay import mooncake_native as native
from moonrelay.relay import parse_url
from moonrelay.relay.base import MAX_VALUE_BYTES, OnQuiet, Relay
from moonrelay.relay.extents import check_key, check_parts, check_time, check_value
from moonrelay.relay.native import NativeCalls

_log = logging.getLogger(__name__)
_ResultT = TypeVar("_ResultT")

_START_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 5.0
#: How long an unfinished small value may stay unfinished before its writer is taken for dead.
_PENDING_S = 2.0
_PAUSE_S = 0.005
_DEFAULT_METRICS_PORT = 9003
_THREADS = 4
_LOCAL_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """Options of the Mooncake relay, in ``StoreConfig.options`` or behind the URL's ``?`` (the URL's win).

    Attributes:
        metrics: ``host:port`` of the master's admin port; empty for port 9003 of the master's host.
        protocol: ``tcp`` or ``rdma``.
        hostname: Numeric address of this process that pools dial; empty finds the one that routes to the master.
        nics: RDMA devices, e.g. ``mlx5_0``.
        local_buffer_bytes: The client's own buffer; we hand it memory of ours, so it stays small.
    """

    metrics: str = ""
    protocol: str = "tcp"
    hostname: str = ""
    nics: str = ""
    local_buffer_bytes: int = _LOCAL_BUFFER_BYTES


class _Stage(threading.local):
    """The gathering buffer of one thread of the relay."""

    memory: mmap.mmap | None = None
    address: int = 0


class MooncakeRelay(Relay):
    """Objects in a Mooncake store.

    Args:
        config: ``url`` is ``mooncake://host:port`` of the master; see `MooncakeOptions` for options.
    """

    scheme: ClassVar[str] = "mooncake"

    def __init__(self, config: StoreConfig) -> None:
        if config.url is None:
            message = "the Mooncake relay needs url mooncake://host:port, the master's address"
            raise ConfigError(message, field="url")
        url = parse_url(config.url)
        if url.scheme != self.scheme or not url.host or url.port is None or url.path.strip("/"):
            message = f"store url {config.url!r} must be mooncake://host:port, the master's address"
            raise ConfigError(message, field="url")
        self._options = _options({**config.options, **url.query})
        self._master_host = url.host
        self._master = _join(url.host, url.port)
        self._metrics = _split(self._options.metrics or _join(url.host, _DEFAULT_METRICS_PORT))
        self._url = f"mooncake://{self._master}?metrics={_join(*self._metrics)}"
        if self._options.protocol != "tcp":
            self._url += f"&protocol={self._options.protocol}"
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._calls: NativeCalls | None = None
        self._loaded: native.Loaded | None = None
        self._hard_pin: object = None
        self._stage = _Stage()
        self._stages: list[mmap.mmap] = []  # kept until the store is closed: it may have them registered
        self._registered: dict[int, int] = {}
        # Open sessions by key; the library has one per key, direction and client.
        self._reading: dict[str, int] = {}
        self._putting: set[str] = set()

    def start(self) -> None:
        with self._starting:
            if self._loaded is not None:
                return
            calls = NativeCalls("relay-mooncake", _THREADS)
            deadline = Deadline(_START_TIMEOUT_S, SystemClock())
            hostname = self._options.hostname or self._own_address()
            try:
                self._loaded = calls.call(
                    lambda: self._set_up(hostname),
                    deadline,
                    what=f"connecting to the Mooncake master at {self._master}",
                    on_late=lambda loaded: _close_store(loaded.store),
                )
            except TransferTimeout as error:
                message = f"the Mooncake master at {self._master} did not answer within {_START_TIMEOUT_S} s"
                raise PeerLost(message) from error
            finally:
                if self._loaded is None:
                    calls.close(0.0, lambda: None)
            self._hard_pin = self._loaded.hard_pin
            self._calls = calls

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> None:
        try:
            kept, total = check_parts(parts)
            check_key(key)
        except ConfigError:
            _tell(on_quiet)
            raise
        self._call(
            lambda store: self._put(store, key, kept, total, deadline),
            deadline,
            what=f"put of {key!r}",
            on_quiet=on_quiet,
            on_late=lambda store: _remove_late(store, key),
        )

    def get(self, key: str, parts: Sequence[Extent], deadline: Deadline, *, on_quiet: OnQuiet | None = None) -> bool:
        try:
            kept, total = check_parts(parts)
            check_key(key)
        except ConfigError:
            _tell(on_quiet)
            raise
        return self._call(
            lambda store: self._get(store, key, kept, total, deadline),
            deadline,
            what=f"get of {key!r}",
            on_quiet=on_quiet,
        )

    def put_if_absent(self, key: str, value: bytes, deadline: Deadline) -> bytes:
        check_key(key)
        check_value(value)

        def attempt(store: native.NativeStore) -> bytes | int:
            try:
                with self._put_session(store, key, len(value)):
                    self._write(store, key, [Extent(_address_of(value), len(value))], deadline)
            except _KeyExists:
                return self._read_value(store, key)
            return value

        patience = _Patience(deadline)
        while True:
            # A put that returns late may stand: the caller was told that this is unknown.
            outcome = self._call(attempt, deadline, what=f"put of {key!r}")
            if isinstance(outcome, bytes):
                return outcome
            if outcome not in (native.NOT_FOUND, native.NOT_COMPLETE):
                raise native.translate(outcome, "small value not stored", key)
            patience.wait(key)  # another writer is at it, or its value was just removed

    def get_bytes(self, key: str, deadline: Deadline) -> bytes | None:
        check_key(key)
        patience = _Patience(deadline)
        while True:
            outcome = self._call(lambda store: self._read_value(store, key), deadline, what=f"get of {key!r}")
            if isinstance(outcome, bytes):
                return outcome
            if outcome == native.NOT_FOUND:
                return None
            if outcome != native.NOT_COMPLETE:
                raise native.translate(outcome, "small value not read", key)
            patience.wait(key)

    def remove(self, keys: Iterable[str], deadline: Deadline) -> None:
        names = [check_key(key) for key in keys]
        if not names:
            return
        codes = self._call(lambda store: store.batch_remove(names, True), deadline, what="removal")
        for key, code in zip(names, codes, strict=True):
            # An unfinished object of a dead writer can't be removed; the master discards it by itself.
            if code not in (native.OK, native.NOT_FOUND, native.NOT_COMPLETE):
                raise native.translate(code, "object not removed", key)

    def register(self, address: int, nbytes: int) -> None:
        if self._options.protocol == "tcp":
            return  # TCP reads any memory; registering would only cost
        with self._lock:
            if self._registered.get(address) == nbytes:
                return
        deadline = Deadline(_START_TIMEOUT_S, SystemClock())
        code = self._call(lambda store: store.register_buffer(address, nbytes), deadline, what="registration")
        if code != native.OK:
            message = f"Mooncake's store cannot register {nbytes} bytes of memory, or part is registered already"
            raise RegistrationError(message, code=code)
        with self._lock:
            self._registered[address] = nbytes

    def unregister(self, address: int) -> None:
        with self._lock:
            known = self._registered.pop(address, None) is not None
        if known:
            deadline = Deadline(_START_TIMEOUT_S, SystemClock())
            self._call(lambda store: store.unregister_buffer(address), deadline, what="unregistration")

    def keys(self, prefix: str, deadline: Deadline) -> list[str]:
        timeout_s = deadline.remaining(at_most=_START_TIMEOUT_S) or 0.001
        text = self._call(lambda _: self._list(timeout_s), deadline, what="listing")
        return sorted(key for key in text.splitlines() if key.startswith(prefix))

    def close(self) -> None:
        with self._lock:
            calls, loaded = self._calls, self._loaded
            self._calls = self._loaded = None
            self._registered.clear()
        if calls is not None and loaded is not None:
            stages = self._stages

            def last() -> None:
                _close_store(loaded.store)
                stages.clear()

            calls.close(_CLOSE_TIMEOUT_S, last)

    # Everything below runs on a thread of the relay.

    def _set_up(self, hostname: str) -> native.Loaded:
        loaded = native.load(self._options.protocol)
        code = loaded.store.setup(
            hostname,
            "P2PHANDSHAKE",
            0,
            self._options.local_buffer_bytes,
            self._options.protocol,
            self._options.nics,
            self._master,
        )
        if code != native.OK:
            message = f"the Mooncake master at {self._master} does not answer, or refuses {hostname}"
            raise PeerLost(message, code=code)
        return loaded

    def _put(
        self, store: native.NativeStore, key: str, parts: Sequence[Extent], total: int, deadline: Deadline
    ) -> native.NativeStore:
        with self._put_session(store, key, total):
            self._write(store, key, parts, deadline)
        size = store.get_size(key)
        if size != total:
            store.remove(key, True)
            raise native.translate(min(size, -1), "object not there after its put", key)
        return store

    @contextlib.contextmanager
    def _put_session(self, store: native.NativeStore, key: str, total: int) -> Iterator[None]:
        """Reserve a new object, and complete it on the way out, or give it up when the body fails.

        Raises:
            _KeyExists: Somebody has reserved or stored it.
        """
        with self._lock:
            if key in self._putting:  # the library answers "invalid" for a key that this process has open
                raise _KeyExists(key)
            self._putting.add(key)
        try:
            code = store.batch_put_session_start([key], [total], self._hard_pin)[0]
            if code == native.EXISTS:
                raise _KeyExists(key)
            if code != native.OK:
                raise native.translate(code, "object not stored", key)
            try:
                yield
            except BaseException:
                store.batch_put_session_revoke([key])
                raise
            code = store.batch_put_session_end([key])[0]
            if code != native.OK:
                store.remove(key, True)
                raise native.translate(code, "object not completed", key)
        finally:
            with self._lock:
                self._putting.discard(key)

    def _write(self, store: native.NativeStore, key: str, parts: Sequence[Extent], deadline: Deadline) -> None:
        for move in native.plan(parts, self._is_direct):
            check_time(deadline, key)
            stage = self._stage_address(store) if move.copies else 0
            for address, offset, nbytes in move.copies:
                ctypes.memmove(stage + offset, address, nbytes)
            code = store.batch_put_from_multi_buffer_ranges([key], *_lists(move, stage))[0]
            if code != move.nbytes:
                raise native.translate(min(code, -1), "object not stored", key)

    def _get(
        self, store: native.NativeStore, key: str, parts: Sequence[Extent], total: int, deadline: Deadline
    ) -> bool:
        size = store.get_size(key)
        if size in (native.NOT_FOUND, native.NOT_COMPLETE):
            return False
        if size < 0:
            raise native.translate(size, "object not read", key)
        if size != total:
            message = f"object {key!r} has {size} bytes, not {total}"
            raise IntegrityError(message, key=key)
        with self._get_session(store, key) as code:
            if code == native.NOT_FOUND:
                return False
            if code != native.OK:
                raise native.translate(code, "object not read", key)
            for move in native.plan(parts, self._is_direct):
                check_time(deadline, key)
                stage = self._stage_address(store) if move.copies else 0
                code = store.batch_get_into_multi_buffer_ranges([key], *_lists(move, stage))[0]
                if code != move.nbytes:
                    raise native.translate(min(code, -1), "object not read", key)
                for address, offset, nbytes in move.copies:
                    ctypes.memmove(address, stage + offset, nbytes)
        return True

    @contextlib.contextmanager
    def _get_session(self, store: native.NativeStore, key: str) -> Iterator[int]:
        """Open a get session, shared by this process's readers of the key; the last one out ends it."""
        with self._lock:
            self._reading[key] = self._reading.get(key, 0) + 1
        try:
            yield store.batch_get_session_start([key])[0]
        finally:
            with self._lock:
                self._reading[key] -= 1
                if not self._reading[key]:
                    del self._reading[key]
                    store.batch_get_session_end([key])  # local, and under the lock: no new reader may lose its session

    def _read_value(self, store: native.NativeStore, key: str) -> bytes | int:
        """Return a small value, or the code that says why not."""
        stage = self._stage_address(store)
        code = store.get_into(key, stage, MAX_VALUE_BYTES)
        return code if code < 0 else ctypes.string_at(stage, code)

    def _is_direct(self, part: Extent) -> bool:
        if self._options.protocol == "tcp":
            return part.nbytes >= native.DIRECT_BYTES
        with self._lock:
            return any(
                base <= part.address and part.address + part.nbytes <= base + nbytes
                for base, nbytes in self._registered.items()
            )

    def _stage_address(self, store: native.NativeStore) -> int:
        if self._stage.memory is None:
            memory = mmap.mmap(-1, native.STAGE_BYTES)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            if self._options.protocol != "tcp":
                code = store.register_buffer(address, native.STAGE_BYTES)
                if code != native.OK:
                    message = "Mooncake's store cannot register the relay's own buffer; see ulimit -l"
                    raise RegistrationError(message, code=code)
            with self._lock:
                self._stages.append(memory)
            self._stage.memory, self._stage.address = memory, address
        return self._stage.address

    def _list(self, timeout_s: float) -> str:
        host, port = self._metrics
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        try:
            connection.request("GET", "/get_all_keys")
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            message = f"the Mooncake master's admin port at {_join(host, port)} does not answer ({error})"
            message += "; name it in the store's url: ?metrics=host:port"
            raise PeerLost(message) from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            message = f"the Mooncake master's admin port at {_join(host, port)} answered {response.status}"
            raise TransferFailed(message)
        return body.decode("utf-8", errors="replace")

    # Below, on the caller's thread again.

    def _call(
        self,
        work: Callable[[native.NativeStore], _ResultT],
        deadline: Deadline,
        *,
        what: str,
        on_quiet: OnQuiet | None = None,
        on_late: Callable[[_ResultT], None] | None = None,
    ) -> _ResultT:
        with self._lock:
            calls, loaded = self._calls, self._loaded
        if calls is None or loaded is None:
            _tell(on_quiet)
            message = "the Mooncake relay is not started, or closed"
            raise ClosedError(message, url=self._url)
        store = loaded.store
        return calls.call(lambda: work(store), deadline, what=what, on_quiet=on_quiet, on_late=on_late)

    def _own_address(self) -> str:
        """Return the numeric address of this host from which the master is reached; no packet is sent."""
        try:
            family, kind, _, _, address = socket.getaddrinfo(self._master_host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            message = f"no route to the Mooncake master {self._master_host!r}: {error}"
            raise PeerLost(message) from error


class _KeyExists(IntegrityError):
    """The key is reserved or stored already."""

    code = IntegrityError.code

    def __init__(self, key: str) -> None:
        super().__init__(f"store key {key!r} exists already; keys are used once", key=key)


class _Patience:
    """How long to wait for another writer's small value."""

    def __init__(self, deadline: Deadline) -> None:
        self._bounds = (deadline, Deadline(_PENDING_S, SystemClock()))
        self._pause = threading.Condition()

    def wait(self, key: str) -> None:
        """Pause a little. Raises TransferFailed when it took too long."""
        if any(bound.expired for bound in self._bounds):
            message = f"object {key!r} is not completed by its writer, which may have died; try again later"
            raise TransferFailed(message, key=key)
        with self._pause:
            SystemClock().wait(self._pause, _PAUSE_S)


def _options(given: Mapping[str, object]) -> MooncakeOptions:
    names = [f.name for f in dataclasses.fields(MooncakeOptions)]
    for name in given:
        if name not in names:
            raise ConfigError(unknown_key(name, names, "The Mooncake relay"), field=name)
    values = dict(given)
    text = str(values.pop("local_buffer_bytes", _LOCAL_BUFFER_BYTES))
    if not text.isdecimal() or int(text) == 0:
        message = f"local_buffer_bytes={text!r} must be a whole number above 0"
        raise ConfigError(message, field="local_buffer_bytes")
    for name, value in values.items():
        if not isinstance(value, str):
            message = f"{name}={value!r} must be text"
            raise ConfigError(message, field=name)
    options = MooncakeOptions(**{k: str(v) for k, v in values.items()}, local_buffer_bytes=int(text))
    require_one_of(options, "protocol", ("tcp", "rdma"))
    return options


def _split(text: str) -> tuple[str, int]:
    try:
        split = urlsplit(f"//{text}")
        host, port = split.hostname, split.port
    except ValueError:
        host = port = None
    if not host or port is None:
        message = f"metrics={text!r} must be host:port, the master's admin port"
        raise ConfigError(message, field="metrics")
    return host, port


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _lists(move: native.Move, stage: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    return (
        [[stage + entry.address if entry.staged else entry.address for entry in move.entries]],
        [[entry.nbytes for entry in move.entries]],
        [[entry.offset for entry in move.entries]],
    )


def _address_of(value: bytes) -> int:
    """Return where a bytes object's bytes lie; the caller keeps it alive."""
    address = ctypes.cast(ctypes.c_char_p(value), ctypes.c_void_p).value
    return address or 0


def _tell(on_quiet: OnQuiet | None) -> None:
    if on_quiet is not None:
        on_quiet()


def _remove_late(store: native.NativeStore, key: str) -> None:
    """Take an object back whose caller was told that it was not stored."""
    code = store.remove(key, True)
    if code not in (native.OK, native.NOT_FOUND):
        _log.warning("object %s was stored after its deadline and stays: code %d", key, code)


def _close_store(store: native.NativeStore) -> None:
    code = store.close()
    if code != native.OK:
        _log.warning("the Mooncake store's client closed with code %d", code)
