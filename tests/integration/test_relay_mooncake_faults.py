"""What Mooncake's own processes do when they die, stop or never start, and what a caller sees of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    PeerLost,
    PluginError,
    TransferFailed,
    TransferTimeout,
)
from moonrelay.handle import Extent
from moonrelay.relay import cluster as cluster_module
from moonrelay.relay.cluster import MooncakeCluster
from moonrelay.relay.mooncake_store import MooncakeRelay

pytestmark = [pytest.mark.mooncake, pytest.mark.processes]

#: A wait that ended this long after its deadline did not keep it.
SLACK_S = 5.0


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, SystemClock())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path / "mooncake", pool_bytes=64 << 20, put_timeout_s=3.0) as running:
        yield running


@pytest.fixture
def relay(cluster: MooncakeCluster) -> Iterator[MooncakeRelay]:
    made = MooncakeRelay(StoreConfig(url=cluster.url))
    with contextlib.closing(made):
        made.start()
        yield made


@pytest.fixture
def data() -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * (8 << 20)).from_buffer_copy(bytes(range(256)) * (32 << 10))


def whole(buffer: ctypes.Array[ctypes.c_char]) -> list[Extent]:
    return [Extent(ctypes.addressof(buffer), len(buffer))]


def test_a_killed_master_is_a_typed_error_by_the_deadline(
    cluster: MooncakeCluster, relay: MooncakeRelay, data: ctypes.Array[ctypes.c_char]
) -> None:
    relay.put("ns/before", whole(data), soon())
    cluster.kill_master()
    assert set(cluster.pids) == {"client"}
    clock = SystemClock()
    quiet = threading.Semaphore(0)
    for call in (
        lambda d: relay.put("ns/a", whole(data), d, on_quiet=quiet.release),
        lambda d: relay.get("ns/before", whole(data), d, on_quiet=quiet.release),
        lambda d: relay.put_if_absent("ns/b", b"x", d),
        lambda d: relay.get_bytes("ns/b", d),
        lambda d: relay.remove(["ns/before"], d),
        lambda d: relay.keys("ns/", d),
    ):
        begun = clock.monotonic()
        with pytest.raises((PeerLost, TransferTimeout)) as info:
            call(soon(1.0))
        assert info.value.retryable
        assert clock.monotonic() - begun < 1.0 + SLACK_S
    for _ in range(2):
        assert quiet.acquire(timeout=30)


@pytest.mark.parametrize("stopped", ["master", "client"])
def test_a_stopped_store_holds_nobody_and_memory_is_quiet_once_it_goes_on(
    cluster: MooncakeCluster, relay: MooncakeRelay, data: ctypes.Array[ctypes.c_char], stopped: str
) -> None:
    relay.put("ns/a", whole(data), soon())
    target = (ctypes.c_char * len(data))()
    put_quiet, get_quiet = threading.Event(), threading.Event()
    os.kill(cluster.pids[stopped], signal.SIGSTOP)
    try:
        with pytest.raises(TransferTimeout):
            relay.get("ns/a", whole(target), soon(0.3), on_quiet=get_quiet.set)
        with pytest.raises(TransferTimeout):
            relay.put("ns/late", whole(data), soon(0.3), on_quiet=put_quiet.set)
        assert not get_quiet.is_set()
        assert not put_quiet.is_set()
    finally:
        os.kill(cluster.pids[stopped], signal.SIGCONT)
    assert get_quiet.wait(30)
    assert put_quiet.wait(30)
    ctypes.memset(target, 0, len(target))
    assert relay.get("ns/a", whole(target), soon())
    assert target.raw == data.raw
    assert relay.keys("", soon()) == ["ns/a"], "what was stored after its deadline is taken back"


def test_a_killed_pool_is_a_typed_error(
    cluster: MooncakeCluster, relay: MooncakeRelay, data: ctypes.Array[ctypes.c_char]
) -> None:
    relay.put("ns/a", whole(data), soon())
    cluster.kill_client()
    quiet = threading.Semaphore(0)
    with pytest.raises((TransferFailed, PeerLost, TransferTimeout)):
        relay.get("ns/a", whole(data), soon(), on_quiet=quiet.release)
    with pytest.raises((TransferFailed, PeerLost, TransferTimeout, CapacityError)):
        relay.put("ns/b", whole(data), soon(), on_quiet=quiet.release)
    for _ in range(2):
        assert quiet.acquire(timeout=30)


def test_a_key_whose_writer_died_in_the_middle_is_nobodys_until_the_store_frees_it(
    cluster: MooncakeCluster, relay: MooncakeRelay, data: ctypes.Array[ctypes.c_char]
) -> None:
    code = """
import os, signal, sys
from moonrelay.config import StoreConfig
from moonrelay.relay.mooncake_store import MooncakeRelay
relay = MooncakeRelay(StoreConfig(url=sys.argv[1]))
relay.start()
def begin(store):
    for key in ("ns/chunk", "ns/claim"):
        assert store.batch_put_session_start([key], [100], relay._hard_pin) == [0]
    os.kill(os.getpid(), signal.SIGKILL)
from moonrelay.clock import Deadline, SystemClock
relay._call(begin, Deadline(20.0, SystemClock()), what="begin")
"""
    died = subprocess.run([sys.executable, "-c", code, cluster.url], stderr=subprocess.DEVNULL, timeout=60)
    assert died.returncode == -signal.SIGKILL
    assert not relay.get("ns/chunk", whole(data), soon())
    with pytest.raises(IntegrityError):
        relay.put("ns/chunk", whole(data), soon())
    with pytest.raises((TransferFailed, TransferTimeout)) as info:
        relay.put_if_absent("ns/claim", b"mine", soon(0.5))
    assert info.value.retryable
    relay.remove(["ns/chunk"], soon())
    patience = soon(30.0)
    standing = b""
    while not standing and not patience.expired:
        with contextlib.suppress(TransferFailed):
            standing = relay.put_if_absent("ns/claim", b"mine", patience)
    assert standing == b"mine"
    assert relay.get_bytes("ns/claim", soon()) == b"mine"


def test_a_master_that_is_not_there_is_a_lost_peer(tmp_path: Path) -> None:
    (port,) = cluster_module._free_ports(1)
    before = threading.active_count()
    made = MooncakeRelay(StoreConfig(url=f"mooncake://127.0.0.1:{port}"))
    with pytest.raises(PeerLost, match=str(port)):
        made.start()
    made.close()
    assert threading.active_count() == before


def test_a_wrong_admin_port_is_named(cluster: MooncakeCluster) -> None:
    (port,) = cluster_module._free_ports(1)
    url = cluster.url.split("?", maxsplit=1)[0] + f"?metrics=127.0.0.1:{port}"
    made = MooncakeRelay(StoreConfig(url=url))
    with contextlib.closing(made):
        made.start()
        with pytest.raises(PeerLost, match=r"metrics=host:port"):
            made.keys("", soon())


def test_a_cluster_ends_with_its_parent(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from moonrelay.relay.cluster import MooncakeCluster
cluster = MooncakeCluster(Path(sys.argv[1]), pool_bytes=16 << 20)
cluster.start()
print(*cluster.pids.values(), flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    handles = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.communicate()
    for handle in handles:
        readable, _, _ = select.select([handle], [], [], 20.0)
        os.close(handle)
        assert readable, "a child of a killed parent still runs"


def test_a_cluster_is_closed_twice_and_leaves_no_process(tmp_path: Path) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    made = MooncakeCluster(tmp_path / "c", pool_bytes=16 << 20)
    made.close()
    made.start()
    made.start()
    handles = [os.pidfd_open(pid) for pid in made.pids.values()]
    assert len(handles) == 2
    made.close()
    made.close()
    for handle in handles:
        assert select.select([handle], [], [], 0.0)[0]
        os.close(handle)
    assert made.pids == {}
    assert len(os.listdir("/proc/self/fd")) == fds
    with pytest.raises(PeerLost):
        _ = made.url


@pytest.mark.parametrize(
    ("script", "error", "text"),
    [
        (
            "echo 'x: error while loading shared libraries: libibverbs.so.1: cannot open it' >&2; exit 127",
            PluginError,
            "apt-get install libibverbs1",
        ),
        ("echo 'the port is taken' >&2; exit 3", PeerLost, "code 3.*the port is taken"),
        ("echo 'thinking' >&2; exec sleep 60", PeerLost, r"within 0\.5 s.*thinking"),
    ],
)
def test_a_cluster_that_does_not_start_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, error: type[Exception], text: str
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(cluster_module, "_programs", lambda: {"master": program, "client": program})
    made = MooncakeCluster(tmp_path / "logs", start_timeout_s=0.5)
    with pytest.raises(error, match=f"(?s){text}"):
        made.start()
    assert made.pids == {}
    assert made._watcher is None


def test_a_cluster_refuses_a_pool_too_small(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pool_bytes"):
        MooncakeCluster(tmp_path, pool_bytes=1)
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        MooncakeCluster(tmp_path, lease_ttl_s=0)
