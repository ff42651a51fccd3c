"""The relay that fails on command: what each fault does, and what the connector makes of it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector, StagePayload
from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import (
    ClosedError,
    ConfigError,
    IntegrityError,
    MoonrelayError,
    PluginError,
    TransferFailed,
    TransferTimeout,
)
from moonrelay.handle import Extent
from moonrelay.relay.faulty import Fault, FaultyRelay, parse_faults
from moonrelay.relay.local import LocalRelay

CLOCK = SystemClock()
VALUE = bytes(range(1, 101))

Make = Callable[..., FaultyRelay]


def soon(seconds: float = 10.0) -> Deadline:
    return Deadline(seconds, CLOCK)


class Memory:
    """Some bytes of this process, in two parts."""

    def __init__(self, value: bytes) -> None:
        self._buffer = ctypes.create_string_buffer(value, len(value))
        base, size = ctypes.addressof(self._buffer), len(value)
        self.parts = [Extent(base, size // 3), Extent(base + size // 3, size - size // 3)]
        self.quiet = 0

    @property
    def value(self) -> bytes:
        return self._buffer.raw

    def on_quiet(self) -> None:
        self.quiet += 1


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[FaultyRelay] = []

    def build(*faults: str) -> FaultyRelay:
        options = {"inner": f"local://{tmp_path / 'store'}", "faults": list(faults)}
        made.append(FaultyRelay(StoreConfig(url="faulty://", options=options)))
        made[-1].start()
        return made[-1]

    yield build
    for relay in made:
        relay.close()


def put(relay: FaultyRelay, key: str = "a/1", value: bytes = VALUE) -> None:
    memory = Memory(value)
    try:
        relay.put(key, memory.parts, soon(), on_quiet=memory.on_quiet)
    finally:
        assert memory.quiet == 1
        assert memory.value == value


def get(relay: FaultyRelay, key: str = "a/1", nbytes: int = len(VALUE), seconds: float = 10.0) -> bytes | None:
    memory = Memory(bytes(nbytes))
    try:
        found = relay.get(key, memory.parts, soon(seconds), on_quiet=memory.on_quiet)
    finally:
        assert memory.quiet == 1
    return memory.value if found else None


def test_without_a_fault_it_is_the_inner_relay(make: Make) -> None:
    relay = make()
    put(relay)
    assert get(relay) == VALUE
    assert relay.put_if_absent("a/c", b"me", soon()) == b"me"
    assert relay.put_if_absent("a/c", b"you", soon()) == b"me"
    assert relay.get_bytes("a/c", soon()) == b"me"
    assert relay.keys("a/", soon()) == ["a/1", "a/c"]
    assert (relay.age_s("a/1") or 0) >= 0
    relay.remove(["a/1"], soon())
    assert get(relay) is None
    assert relay.injected == ()


def test_a_peer_with_the_plain_relay_reaches_the_same_objects(make: Make) -> None:
    relay = make()
    put(relay)
    plain = LocalRelay(StoreConfig(url=relay.url))
    plain.start()
    assert plain.keys("", soon()) == ["a/1"]


@pytest.mark.parametrize(
    ("fault", "error", "stored"),
    [
        ("fail", TransferFailed, None),
        ("fail_after", TransferFailed, VALUE),
        ("lose", None, None),
        ("wrong", None, VALUE[:-1] + bytes([VALUE[-1] ^ 0x5A])),
        ("duplicate", IntegrityError, VALUE),
        ("delay:0.01", None, VALUE),
    ],
)
def test_a_put_goes_wrong_once(
    make: Make, fault: str, error: type[MoonrelayError] | None, stored: bytes | None
) -> None:
    relay = make(f"put:{fault}")
    if error is None:
        put(relay)
    else:
        with pytest.raises(error):
            put(relay)
    assert relay.injected == (("put", Fault(fault.partition(":")[0])),)
    assert get(relay) == stored
    put(relay, "a/2")
    assert get(relay, "a/2") == VALUE


def test_a_short_put_stores_half(make: Make) -> None:
    relay = make("short")
    put(relay)
    assert get(relay, nbytes=50) == VALUE[:50]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("fail", TransferFailed),
        ("fail_after", TransferFailed),
        ("lose", None),
        ("nothing", bytes(100)),
        ("short", VALUE[:50] + bytes(50)),
        ("wrong", VALUE[:-1] + bytes([VALUE[-1] ^ 0x5A])),
        ("duplicate", VALUE),
        ("delay:0.01", VALUE),
    ],
)
def test_a_get_goes_wrong_once(make: Make, fault: str, expected: bytes | type[MoonrelayError] | None) -> None:
    relay = make(f"get:{fault}")
    put(relay)
    if isinstance(expected, type):
        with pytest.raises(expected):
            get(relay)
    else:
        assert get(relay) == expected
    assert get(relay) == VALUE


def test_records_go_wrong_by_name_only(make: Make) -> None:
    relay = make("none", "put_if_absent:fail", "put_if_absent:fail_after", "put_if_absent:lose", "get_bytes:lose")
    with pytest.raises(TransferFailed):
        relay.put_if_absent("a/c", b"me", soon())
    assert relay.keys("", soon()) == []
    with pytest.raises(TransferFailed):
        relay.put_if_absent("a/c", b"me", soon())
    assert relay.put_if_absent("a/c", b"you", soon()) == b"you"
    assert relay.get_bytes("a/c", soon()) is None
    assert relay.get_bytes("a/c", soon()) == b"me"


def test_faults_come_in_order_and_to_the_call_that_they_name(make: Make) -> None:
    relay = make("none", "get:fail", "fail", "put:lose")
    put(relay)
    with pytest.raises(TransferFailed):
        put(relay, "a/2")
    with pytest.raises(TransferFailed):
        get(relay)
    assert get(relay) == VALUE
    put(relay, "a/3")
    assert get(relay, "a/3") is None


def test_a_stall_ends_at_the_deadline_or_with_the_relay(make: Make) -> None:
    relay = make("get:stall", "get:stall")
    put(relay)
    with pytest.raises(TransferTimeout):
        get(relay, seconds=0.05)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            get(relay, seconds=30)
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    relay.close()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(failed[0], ClosedError)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "options.inner=None"),
        ({"inner": "faulty://"}, "options.inner='faulty://'"),
        ({"inner": "local:///x", "faults": "fail"}, "must be a list"),
        ({"inner": "local:///x", "faults": ["fial"]}, "did you mean 'fail'"),
        ({"inner": "local:///x", "faults": ["get:delay:soon"]}, "options.faults"),
        ({"inner": "local:///x", "faults": ["put:nothing"]}, "put cannot go wrong by 'nothing'"),
        ({"inner": "local:///x", "faults": ["get_bytes:wrong"]}, "get_bytes cannot go wrong"),
        ({"inner": "local:///x", "other": 1}, "has no setting 'other'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        FaultyRelay(StoreConfig(url="faulty://", options=options))


def test_an_unknown_inner_relay_is_a_plugin_error() -> None:
    with pytest.raises(PluginError):
        FaultyRelay(StoreConfig(url="faulty://", options={"inner": "nowhere://x"}))


def test_a_fault_that_one_of_two_calls_cannot_have_is_for_the_other() -> None:
    assert parse_faults(["nothing"])[0].calls == ("get",)


# The connector on it.


@pytest.fixture
def connectors(tmp_path: Path) -> Iterator[Callable[..., DiffusionConnector]]:
    made: list[DiffusionConnector] = []

    def build(role: str, *faults: str) -> DiffusionConnector:
        url = f"local://{tmp_path / 'store'}"
        store: dict[str, Any] = {"url": url, "put_timeout_s": 2.0}
        if faults:
            store |= {"url": "faulty://", "options": {"inner": url, "faults": list(faults)}}
        made.append(DiffusionConnector(role, "store", store_config=store, drain_timeout_s=0.2))
        return made[-1]

    yield build
    for connector in made:
        connector.close()


def handed_over(producer: DiffusionConnector, consumer: DiffusionConnector) -> bool:
    tensor = torch.arange(1000, dtype=torch.int32)
    handle = producer.publish(StagePayload("r", "latent", tensor))
    got = consumer.receive(handle, timeout_s=3)
    assert isinstance(got, torch.Tensor)
    return torch.equal(got, tensor)


@pytest.mark.parametrize("fault", ["get:wrong", "get:short", "get:nothing", "get:delay:0.1", "get:duplicate"])
def test_a_reader_gets_the_right_bytes_from_a_store_that_lies_once(
    connectors: Callable[..., DiffusionConnector], fault: str
) -> None:
    assert handed_over(connectors("denoise"), connectors("decode", fault))


@pytest.mark.parametrize("fault", ["put:lose", "put:wrong", "put:short"])
def test_what_a_store_spoilt_is_never_delivered(connectors: Callable[..., DiffusionConnector], fault: str) -> None:
    with pytest.raises(MoonrelayError):
        handed_over(connectors("denoise", fault), connectors("decode"))
