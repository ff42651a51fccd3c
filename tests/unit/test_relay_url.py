"""URLs of relays, and keys, values and extents that are refused."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from moonrelay.config import StoreConfig
from moonrelay.errors import ConfigError
from moonrelay.handle import Extent
from moonrelay.relay import parse_url
from moonrelay.relay.extents import batches, check_key, check_parts, check_value
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.memory import MemoryRelay
from moonrelay.relay.mooncake_store import MooncakeRelay


def test_urls_are_taken_apart() -> None:
    url = parse_url("mooncake://[::1]:50051?metrics=127.0.0.1:9003&protocol=tcp")
    assert (url.scheme, url.host, url.port) == ("mooncake", "::1", 50051)
    assert url.query == {"metrics": "127.0.0.1:9003", "protocol": "tcp"}
    assert parse_url("local:///a%20b/c").path == "/a b/c"


@pytest.mark.parametrize(
    "url", ["", "plain", "m://h:port", "m://h:99999", "m://h?a=1&a=2", "m://h?a", "m://user@h:1", "m://h:1#x", 3]
)
def test_malformed_urls_are_refused(url: object) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("relay", "url"),
    [
        (LocalRelay, "local://host/path"),
        (LocalRelay, "local://"),
        (LocalRelay, "local:///"),
        (LocalRelay, "mooncake://h:1"),
        (LocalRelay, "local:///a?x=1"),
        (MooncakeRelay, None),
        (MooncakeRelay, "mooncake://host"),
        (MooncakeRelay, "mooncake://:1"),
        (MooncakeRelay, "mooncake://h:1/path"),
        (MooncakeRelay, "mooncake://h:1?metrics=nine"),
        (MooncakeRelay, "mooncake://h:1?protocol=pigeon"),
        (MooncakeRelay, "mooncake://h:1?local_buffer_bytes=-1"),
        (MemoryRelay, "memory://"),
        (MemoryRelay, "memory://a/b"),
    ],
)
def test_a_relay_refuses_a_url_that_is_not_its_own(
    relay: type[LocalRelay | MooncakeRelay | MemoryRelay], url: str | None
) -> None:
    with pytest.raises(ConfigError):
        relay(StoreConfig(url=url))


def test_an_unknown_option_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'metrics'"):
        MooncakeRelay(StoreConfig(url="mooncake://h:1?metric=h:2"))
    with pytest.raises(ConfigError, match="'sync'"):
        LocalRelay(StoreConfig(url="local:///x", options={"sync": True}))


def test_the_url_of_a_mooncake_relay_reaches_the_same_master_and_admin_port() -> None:
    assert MooncakeRelay(StoreConfig(url="mooncake://[::1]:5")).url == "mooncake://[::1]:5?metrics=[::1]:9003"
    again = MooncakeRelay(StoreConfig(url="mooncake://a:5?metrics=b:6&protocol=rdma")).url
    assert again == "mooncake://a:5?metrics=b:6&protocol=rdma"
    assert MooncakeRelay(StoreConfig(url=again)).url == again


@pytest.mark.parametrize("key", ["", "a b", "ü", "a" * 201, "a\n", "a%2F", None])
def test_bad_keys_are_refused(key: object) -> None:
    with pytest.raises(ConfigError):
        check_key(key)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [b"", b"x" * 4097, "text", bytearray(b"x")])
def test_bad_values_are_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        check_value(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", [[], [Extent(4096, 0)], [Extent(0, 8)], [Extent(4096, -1)]])
def test_bad_parts_are_refused(parts: list[Extent]) -> None:
    with pytest.raises(ConfigError):
        check_parts(parts)


def test_batches_cover_every_byte_once_in_order() -> None:
    memory = bytearray(range(200))
    base = ctypes.addressof((ctypes.c_char * len(memory)).from_buffer(memory))
    parts = [Extent(base, 70), Extent(base + 70, 1), Extent(base + 71, 129)]
    found = list(batches(parts, batch_bytes=32, batch_parts=2))
    assert b"".join(bytes(view) for batch in found for view in batch) == bytes(memory)
    assert all(sum(view.nbytes for view in batch) <= 32 and len(batch) <= 2 for batch in found)


def test_importing_every_relay_loads_no_native_library() -> None:
    code = (
        "import sys, moonrelay.relay.local, moonrelay.relay.mooncake_store, moonrelay.relay.cluster\n"
        "assert not {m for m in sys.modules if m.split('.')[0] in ('torch', 'mooncake', 'numpy')}, sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
