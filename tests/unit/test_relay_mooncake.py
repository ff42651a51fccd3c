"""The discipline around Mooncake's store, on a store that fails when told: sessions, late returns, close."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import ClosedError, IntegrityError, PeerLost, PluginError, TransferFailed, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay import mooncake_native as native
from moonrelay.relay.mooncake_store import MooncakeRelay


class FakeStore:
    """Keeps objects in a dictionary; ``codes`` makes the next call of a method answer a code."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.open: dict[str, bytearray] = {}
        self.codes: dict[str, int] = {}
        self.log: list[str] = []
        self.blocked: threading.Event | None = None
        self.entered = threading.Event()
        self.closed = False

    def _answer(self, method: str) -> int | None:
        assert not self.closed, "a call after close would crash the process"
        self.log.append(method)
        return self.codes.pop(method, None)

    def setup(self, *_: object) -> int:
        return self._answer("setup") or 0

    def close(self) -> int:
        assert not self.closed
        self.closed = True
        return 0

    def get_size(self, key: str) -> int:
        code = self._answer("get_size")
        if code is not None:
            return code
        return len(self.objects[key]) if key in self.objects else -703 if key in self.open else -704

    def get_into(self, key: str, address: int, nbytes: int) -> int:
        code = self._answer("get_into")
        if code is not None or key not in self.objects:
            return code if code is not None else -703 if key in self.open else -704
        ctypes.memmove(address, self.objects[key], len(self.objects[key]))
        return len(self.objects[key])

    def remove(self, key: str, force: bool) -> int:
        assert force
        code = self._answer("remove")
        return code if code is not None else 0 if self.objects.pop(key, None) is not None else -704

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        return [self.remove(key, force) for key in keys]

    def batch_put_session_start(self, keys: list[str], sizes: list[int], config: object) -> list[int]:
        assert config == "pinned"
        code = self._answer("start")
        if code is None and (keys[0] in self.objects or keys[0] in self.open):
            code = -705
        if code is None:
            self.open[keys[0]] = bytearray(sizes[0])
        return [code or 0]

    def batch_put_from_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        self.entered.set()
        if self.blocked is not None:
            assert self.blocked.wait(20)
        code = self._answer("write")
        if code is not None:
            return [code]
        for address, nbytes, offset in zip(addresses[0], sizes[0], offsets[0], strict=True):
            self.open[keys[0]][offset : offset + nbytes] = ctypes.string_at(address, nbytes)
        return [sum(sizes[0])]

    def batch_put_session_end(self, keys: list[str]) -> list[int]:
        code = self._answer("end")
        if code is None:
            self.objects[keys[0]] = bytes(self.open.pop(keys[0]))
        return [code or 0]

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]:
        self._answer("revoke")
        del self.open[keys[0]]
        return [0]

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        return [self._answer("get_start") or (0 if keys[0] in self.objects else -704)]

    def batch_get_into_multi_buffer_ranges(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
    ) -> list[int]:
        self.entered.set()
        if self.blocked is not None:
            assert self.blocked.wait(20)
        code = self._answer("read")
        if code is not None:
            return [code]
        for address, nbytes, offset in zip(addresses[0], sizes[0], offsets[0], strict=True):
            ctypes.memmove(address, self.objects[keys[0]][offset : offset + nbytes], nbytes)
        return [sum(sizes[0])]

    def batch_get_session_end(self, keys: list[str]) -> int:
        self._answer("get_end")
        return 0


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, SystemClock())


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def relay(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeRelay]:
    monkeypatch.setattr(native, "load", lambda _: native.Loaded(store, "pinned"))  # type: ignore[arg-type]
    made = MooncakeRelay(StoreConfig(url="mooncake://127.0.0.1:1"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def source() -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * (1 << 20)).from_buffer_copy(bytes(range(256)) * 4096)


def parts(buffer: ctypes.Array[ctypes.c_char]) -> list[Extent]:
    base = ctypes.addressof(buffer)
    return [Extent(base, 128), Extent(base + 128, len(buffer) - 128)]


Memory = ctypes.Array[ctypes.c_char]


def test_a_put_is_reserved_written_ended_and_verified(relay: MooncakeRelay, store: FakeStore, source: Memory) -> None:
    relay.put("k", parts(source), soon())
    assert store.log == ["setup", "start", "write", "end", "get_size"]
    target = (ctypes.c_char * len(source))()
    assert relay.get("k", parts(target), soon())
    assert target.raw == source.raw
    assert store.log[5:] == ["get_size", "get_start", "read", "get_end"]


@pytest.mark.parametrize(
    ("method", "code", "error", "cleaned"),
    [
        ("start", -900, PeerLost, None),
        ("write", -800, TransferFailed, "revoke"),
        ("write", 5, TransferFailed, "revoke"),
        ("end", -901, PeerLost, "remove"),
        ("get_size", -704, TransferFailed, "remove"),
        ("get_size", 17, TransferFailed, "remove"),
    ],
)
def test_a_put_that_fails_anywhere_is_cleaned_up(
    relay: MooncakeRelay, store: FakeStore, source: Memory, method: str, code: int, error: type[Exception], cleaned: str
) -> None:
    quiet: list[int] = []
    store.codes[method] = code
    with pytest.raises(error):
        relay.put("k", parts(source), soon(), on_quiet=lambda: quiet.append(1))
    assert quiet == [1]
    assert store.objects == {}
    assert cleaned is None or store.log[-1] == cleaned


@pytest.mark.parametrize(
    ("method", "code", "error"),
    [
        ("get_size", -900, PeerLost),
        ("get_start", -901, PeerLost),
        ("read", -800, TransferFailed),
        ("read", 3, TransferFailed),
    ],
)
def test_a_get_that_fails_is_typed_and_ends_its_session(
    relay: MooncakeRelay, store: FakeStore, source: Memory, method: str, code: int, error: type[Exception]
) -> None:
    relay.put("k", parts(source), soon())
    store.codes[method] = code
    with pytest.raises(error):
        relay.get("k", parts(source), soon())
    assert store.log.count("get_start") == store.log.count("get_end")


def test_an_object_that_vanishes_between_size_and_session_is_absent(
    relay: MooncakeRelay, store: FakeStore, source: Memory
) -> None:
    store.codes["get_size"] = len(source)
    assert not relay.get("k", parts(source), soon())


def test_a_put_that_ends_after_its_deadline_is_taken_back(
    relay: MooncakeRelay, store: FakeStore, source: Memory
) -> None:
    store.blocked, quiet = threading.Event(), threading.Event()
    with pytest.raises(TransferTimeout):
        relay.put("k", parts(source), soon(0.1), on_quiet=quiet.set)
    assert not quiet.is_set()
    with pytest.raises(IntegrityError):
        relay.put("k", parts(source), soon())  # still being written
    store.blocked.set()
    assert quiet.wait(10)
    relay.close()
    assert store.objects == {}
    assert store.open == {}
    assert "remove" in store.log


def test_memory_of_a_get_left_behind_is_quiet_only_after_the_call(
    relay: MooncakeRelay, store: FakeStore, source: Memory
) -> None:
    relay.put("k", parts(source), soon())
    target, quiet = (ctypes.c_char * len(source))(), threading.Event()
    store.blocked = threading.Event()
    with pytest.raises(TransferTimeout):
        relay.get("k", parts(target), soon(0.1), on_quiet=quiet.set)
    assert not quiet.is_set()
    store.blocked.set()
    assert quiet.wait(10)
    assert target.raw == source.raw, "the late bytes landed before quiet was told"


def test_close_never_closes_the_store_under_a_running_call(
    relay: MooncakeRelay, store: FakeStore, source: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonrelay.relay.mooncake_store._CLOSE_TIMEOUT_S", 0.05)
    store.blocked, quiet = threading.Event(), threading.Event()
    with pytest.raises(TransferTimeout):
        relay.put("k", parts(source), soon(0.1), on_quiet=quiet.set)
    relay.close()
    assert not store.closed
    with pytest.raises(ClosedError):
        relay.get_bytes("k", soon())
    threads = [thread for thread in threading.enumerate() if "relay-mooncake" in thread.name]
    store.blocked.set()
    assert quiet.wait(10)
    for thread in threads:
        thread.join(10)
    assert store.closed
    assert store.objects == {}


def test_an_unfinished_small_value_of_another_writer_is_never_a_win(
    relay: MooncakeRelay, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonrelay.relay.mooncake_store._PENDING_S", 0.1)
    store.open["k"] = bytearray(3)
    for call in (lambda: relay.put_if_absent("k", b"mine", soon()), lambda: relay.get_bytes("k", soon())):
        with pytest.raises(TransferFailed, match="may have died") as info:
            call()
        assert info.value.retryable
    store.open.clear()
    assert relay.put_if_absent("k", b"mine", soon()) == b"mine"


def test_a_value_that_appears_while_waiting_is_returned(relay: MooncakeRelay, store: FakeStore) -> None:
    store.open["k"] = bytearray(3)
    started = threading.Timer(0.1, lambda: store.objects.setdefault("k", b"theirs"))
    started.start()
    assert relay.put_if_absent("k", b"mine", soon()) == b"theirs"
    started.join()


def test_start_fails_typed_and_can_be_repeated(
    store: FakeStore, source: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    made = MooncakeRelay(StoreConfig(url="mooncake://127.0.0.1:1"))

    def missing(_: str) -> native.Loaded:
        raise PluginError("cannot be loaded")

    monkeypatch.setattr(native, "load", missing)
    with pytest.raises(PluginError):
        made.start()
    monkeypatch.setattr(native, "load", lambda _: native.Loaded(store, "pinned"))  # type: ignore[arg-type]
    store.codes["setup"] = -1
    with pytest.raises(PeerLost, match="does not answer"):
        made.start()
    with pytest.raises(ClosedError):
        made.put("k", parts(source), soon())
    made.start()
    made.put("k", parts(source), soon())
    made.close()
    assert store.closed
    assert threading.active_count() == before


def test_memory_is_registered_only_where_the_protocol_needs_it(
    store: FakeStore, source: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: dict[int, int] = {}

    class Registering(FakeStore):
        def register_buffer(self, address: int, nbytes: int) -> int:
            registered[address] = nbytes
            return 0

        def unregister_buffer(self, address: int) -> int:
            del registered[address]
            return 0

        def batch_put_from_multi_buffer_ranges(
            self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]], offsets: list[list[int]]
        ) -> list[int]:
            for address, nbytes in zip(addresses[0], sizes[0], strict=True):
                assert any(a <= address and address + nbytes <= a + n for a, n in registered.items())
            return super().batch_put_from_multi_buffer_ranges(keys, addresses, sizes, offsets)

    fabric = Registering()
    monkeypatch.setattr(native, "load", lambda _: native.Loaded(fabric, "pinned"))  # type: ignore[arg-type]
    made = MooncakeRelay(StoreConfig(url="mooncake://127.0.0.1:1?protocol=rdma"))
    made.start()
    made.put("staged", parts(source), soon())
    made.register(ctypes.addressof(source), len(source))
    made.register(ctypes.addressof(source), len(source))
    made.put("direct", parts(source), soon())
    assert fabric.objects["staged"] == fabric.objects["direct"] == source.raw
    made.unregister(ctypes.addressof(source))
    made.unregister(ctypes.addressof(source))
    made.close()
    assert ctypes.addressof(source) not in registered
