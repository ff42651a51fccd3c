"""One suite of behaviour for every relay, and what their writers' death leaves."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import CapacityError, ClosedError, ConfigError, IntegrityError, TransferTimeout
from moonrelay.handle import Extent
from moonrelay.relay.base import Relay
from moonrelay.relay.cluster import MooncakeCluster
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.memory import MemoryRelay
from moonrelay.relay.mooncake_store import MooncakeRelay

POOL_BYTES = 64 << 20
CAPACITY_BYTES = 48 << 20
CLASSES: dict[str, type[Relay]] = {"memory": MemoryRelay, "local": LocalRelay, "mooncake": MooncakeRelay}
ALL = [
    "memory",
    "local",
    pytest.param("mooncake", marks=[pytest.mark.mooncake, pytest.mark.processes]),
]
ACROSS = [
    pytest.param("local", marks=pytest.mark.processes),
    pytest.param("mooncake", marks=[pytest.mark.mooncake, pytest.mark.processes]),
]

# What the child processes of these tests have in common.
PRELUDE = """
import ctypes, json, os, signal, sys
from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import StoreConfig
from moonrelay.errors import CapacityError
from moonrelay.handle import Extent
from moonrelay.relay.local import LocalRelay
from moonrelay.relay.mooncake_store import MooncakeRelay
url, capacity, me = sys.argv[1], int(sys.argv[2]), sys.argv[3]
relay = (LocalRelay if url.startswith("local") else MooncakeRelay)(StoreConfig(url=url, capacity_bytes=capacity))
relay.start()
deadline = Deadline(30.0, SystemClock())
def put(key, data):
    buffer = ctypes.create_string_buffer(data, len(data))
    relay.put(key, [Extent(ctypes.addressof(buffer), len(data))], deadline)
def go():
    print("ready", flush=True)
    sys.stdin.readline()
"""


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, SystemClock())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake"), pool_bytes=POOL_BYTES) as running:
        yield running


@pytest.fixture(scope="module")
def urls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("local")

    def url(scheme: str) -> str:
        if scheme == "mooncake":
            return str(request.getfixturevalue("cluster").url)
        return f"local://{folder}" if scheme == "local" else "memory://suite"

    return url


@pytest.fixture(scope="module", params=ALL)
def shared(request: pytest.FixtureRequest, urls: Callable[[str], str]) -> Iterator[Relay]:
    """One relay of each kind for the whole module; tests use keys of their own."""
    relay = CLASSES[request.param](StoreConfig(url=urls(request.param), capacity_bytes=CAPACITY_BYTES))
    with contextlib.closing(relay):
        relay.start()
        yield relay


@pytest.fixture
def relay(shared: Relay) -> Iterator[Relay]:
    yield shared
    shared.remove(shared.keys("", soon()), soon())


def block(data: bytes) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


def cut(buffer: ctypes.Array[ctypes.c_char], *at: int) -> list[Extent]:
    bounds = [0, *at, len(buffer)]
    base = ctypes.addressof(buffer)
    return [Extent(base + a, b - a) for a, b in itertools.pairwise(bounds)]


def pattern(nbytes: int) -> bytes:
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


def test_an_object_comes_back_however_it_is_cut(relay: Relay) -> None:
    source, target = block(pattern(3_000_001)), block(bytes(3_000_001))
    quiet: list[str] = []
    relay.put("ns/a/c/0/0", cut(source, 128, 128, 1_000_000), soon(), on_quiet=lambda: quiet.append("put"))
    found = relay.get("ns/a/c/0/0", cut(target, 1, 999_999, 1_500_000), soon(), on_quiet=lambda: quiet.append("get"))
    assert found
    assert target.raw == source.raw
    assert quiet == ["put", "get"]


def test_thousands_of_small_parts_are_one_object(relay: Relay) -> None:
    source, target = block(pattern(6 << 20)), block(bytes(6 << 20))
    strips = range(1000, 6 << 20, 1500)
    relay.put("ns/strips", cut(source, *strips), soon())
    assert relay.get("ns/strips", cut(target, *strips), soon())
    assert target.raw == source.raw


def test_an_absent_object_is_false_and_touches_nothing(relay: Relay) -> None:
    target = block(b"untouched")
    quiet: list[int] = []
    assert not relay.get("ns/none", cut(target), soon(), on_quiet=lambda: quiet.append(1))
    assert target.raw == b"untouched"
    assert relay.get_bytes("ns/none", soon()) is None
    assert quiet == [1]


@pytest.mark.parametrize("wanted", [1, 99, 101, 1000])
def test_another_size_than_the_objects_is_an_integrity_error(relay: Relay, wanted: int) -> None:
    relay.put("ns/sized", cut(block(pattern(100))), soon())
    quiet: list[int] = []
    with pytest.raises(IntegrityError):
        relay.get("ns/sized", cut(block(bytes(wanted))), soon(), on_quiet=lambda: quiet.append(1))
    assert quiet == [1]


def test_a_key_is_used_once(relay: Relay) -> None:
    first, target = block(b"first"), block(bytes(5))
    relay.put("ns/once", cut(first), soon())
    quiet: list[int] = []
    for other in (b"other", b"longer than the first"):
        with pytest.raises(IntegrityError):
            relay.put("ns/once", cut(block(other)), soon(), on_quiet=lambda: quiet.append(1))
    assert relay.get("ns/once", cut(target), soon())
    assert target.raw == b"first"
    assert quiet == [1, 1]


def test_bad_input_is_a_config_error_and_quiet(relay: Relay) -> None:
    good = cut(block(b"data"))
    quiet: list[int] = []
    for key, parts in (("", good), ("a b", good), ("ok", []), ("ok", [Extent(0, 4)]), ("x" * 201, good)):
        for move in (relay.put, relay.get):
            with pytest.raises(ConfigError):
                move(key, parts, soon(), on_quiet=lambda: quiet.append(1))
    assert len(quiet) == 10
    for value in (b"", bytes(4097)):
        with pytest.raises(ConfigError):
            relay.put_if_absent("ok", value, soon())
    assert relay.keys("", soon()) == []


def test_the_first_small_value_stands(relay: Relay) -> None:
    assert relay.put_if_absent("ns/v", b"one", soon()) == b"one"
    assert relay.put_if_absent("ns/v", b"two", soon()) == b"one"
    assert relay.get_bytes("ns/v", soon()) == b"one"
    assert relay.put_if_absent("ns/big", pattern(4096), soon()) == pattern(4096)
    assert relay.get_bytes("ns/big", soon()) == pattern(4096)
    relay.remove(["ns/v"], soon())
    assert relay.put_if_absent("ns/v", b"three", soon()) == b"three"


def test_threads_racing_for_a_small_value_agree(relay: Relay) -> None:
    barrier = threading.Barrier(4)
    answers: list[list[bytes]] = [[] for _ in range(4)]

    def race(me: int) -> None:
        for key in range(20):
            barrier.wait(20)
            answers[me].append(relay.put_if_absent(f"ns/race/{key}", b"%d" % me, soon()))

    threads = [threading.Thread(target=race, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(answer) == 20 for answer in answers)
    for standing in zip(*answers, strict=True):
        assert len(set(standing)) == 1


def test_threads_reading_one_object_all_get_it(relay: Relay) -> None:
    source = block(pattern(2 << 20))
    relay.put("ns/popular", cut(source), soon())
    right: list[bool] = []

    def read() -> None:
        target = block(bytes(len(source)))
        for _ in range(5):
            ctypes.memset(target, 0, len(target))
            right.append(relay.get("ns/popular", cut(target, 5, 1 << 20), soon()) and target.raw == source.raw)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 20


def test_remove_is_idempotent_and_by_force(relay: Relay) -> None:
    target = block(bytes(4))
    relay.put("ns/a", cut(block(b"data")), soon())
    relay.put("ns/b", cut(block(b"data")), soon())
    assert relay.get("ns/a", cut(target), soon())  # Mooncake leases what was just read
    relay.remove(["ns/a", "ns/never", "ns/a"], soon())
    relay.remove(["ns/a"], soon())
    relay.remove([], soon())
    assert not relay.get("ns/a", cut(target), soon())
    assert relay.keys("ns/", soon()) == ["ns/b"]


def test_keys_are_listed_by_prefix(relay: Relay) -> None:
    for key in ("ns/a/1", "ns/a/2", "ns/ab", "other"):
        relay.put_if_absent(key, b"x", soon())
    assert relay.keys("ns/a/", soon()) == ["ns/a/1", "ns/a/2"]
    assert relay.keys("ns/a", soon()) == ["ns/a/1", "ns/a/2", "ns/ab"]
    assert relay.keys("nothing", soon()) == []


def test_a_full_store_refuses_and_keeps_what_it_has(relay: Relay) -> None:
    nbytes = 16 << 20
    source, target = block(pattern(nbytes)), block(bytes(nbytes))
    stored: list[str] = []
    quiet: list[int] = []

    def fill() -> None:
        for number in range(10):
            relay.put(f"ns/{number}", cut(source), soon(), on_quiet=lambda: quiet.append(1))
            stored.append(f"ns/{number}")

    with pytest.raises(CapacityError):
        fill()
    assert 2 <= len(stored) <= 4
    assert len(quiet) == len(stored) + 1
    assert relay.keys("", soon()) == stored, "nothing of the refused object is left, nothing was evicted"
    for key in stored:
        ctypes.memset(target, 0, nbytes)
        assert relay.get(key, cut(target), soon())
        assert target.raw == source.raw
    relay.remove(stored[:1], soon())
    relay.put(f"ns/{len(stored)}", cut(source), soon())  # the very key that was refused


def test_an_object_larger_than_the_store_is_refused(relay: Relay) -> None:
    source = block(bytes(POOL_BYTES + 1))
    with pytest.raises(CapacityError):
        relay.put("ns/huge", cut(source), soon())
    assert relay.keys("", soon()) == []


def test_a_deadline_in_the_past_is_a_timeout_and_leaves_nothing(relay: Relay) -> None:
    buffer = block(bytes(1000))
    over = Deadline(0.0, SystemClock())
    quiet = threading.Event()
    with pytest.raises(TransferTimeout):
        relay.put("ns/late", cut(buffer), over, on_quiet=quiet.set)
    assert quiet.wait(10)
    quiet.clear()
    with pytest.raises(TransferTimeout):
        relay.get("ns/late", cut(buffer), over, on_quiet=quiet.set)
    assert quiet.wait(10)
    with pytest.raises(TransferTimeout):
        relay.get_bytes("ns/late", over)
    assert relay.keys("", soon()) == []


@pytest.mark.parametrize("scheme", ALL)
def test_close_is_idempotent_and_what_was_stored_stays(scheme: str, urls: Callable[[str], str]) -> None:
    config = StoreConfig(url=urls(scheme), capacity_bytes=CAPACITY_BYTES)
    never_started = CLASSES[scheme](config)
    never_started.close()
    with pytest.raises(ClosedError):
        never_started.keys("", soon())
    first, keeper = CLASSES[scheme](config), CLASSES[scheme](config)
    first.start()
    first.start()
    keeper.start()
    first.put_if_absent("ns/stays", b"here", soon())
    assert first.url == keeper.url
    first.close()
    first.close()
    quiet: list[int] = []
    buffer = cut(block(b"data"))
    for call in (
        lambda: first.put("ns/x", buffer, soon(), on_quiet=lambda: quiet.append(1)),
        lambda: first.get("ns/x", buffer, soon(), on_quiet=lambda: quiet.append(1)),
        lambda: first.put_if_absent("ns/x", b"x", soon()),
        lambda: first.get_bytes("ns/x", soon()),
        lambda: first.remove(["ns/x"], soon()),
        lambda: first.keys("", soon()),
    ):
        with pytest.raises(ClosedError):
            call()
    assert quiet == [1, 1]
    assert keeper.get_bytes("ns/stays", soon()) == b"here"
    keeper.remove(["ns/stays"], soon())
    keeper.close()


def test_three_hundred_cycles_leave_everything_at_the_baseline(relay: Relay) -> None:
    source, target = block(pattern(300_000)), block(bytes(300_000))

    def cycle(number: int) -> None:
        relay.put(f"ns/{number}/c/0/0", cut(source, 100), soon())
        relay.put_if_absent(f"ns/{number}/end", b"end", soon())
        assert relay.get(f"ns/{number}/c/0/0", cut(target), soon())
        relay.remove([f"ns/{number}/c/0/0", f"ns/{number}/end"], soon())

    for number in range(5):
        cycle(-number)
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(300):
        cycle(number)
    assert relay.keys("", soon()) == []
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds
    if isinstance(relay, LocalRelay):
        root = Path(relay.url.removeprefix("local://"))
        assert [path.name for path in root.rglob("*") if path.is_file()] == ["lock"]
        assert (root / "lock").read_bytes() == bytes(8)


class Child:
    """A process that runs ``PRELUDE`` and ``code``."""

    def __init__(self, url: str, code: str, me: str = "0", capacity: int = CAPACITY_BYTES) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + code, url, str(capacity), me],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def children(*made: Child) -> Iterator[list[Child]]:
    try:
        yield list(made)
    finally:
        for child in made:
            child.close()


@contextlib.contextmanager
def opened(scheme: str, url: str) -> Iterator[Relay]:
    relay = CLASSES[scheme](StoreConfig(url=url, capacity_bytes=CAPACITY_BYTES))
    with contextlib.closing(relay):
        relay.start()
        yield relay
        relay.remove(relay.keys("", soon()), soon())


@pytest.mark.parametrize("scheme", ACROSS)
def test_what_was_stored_survives_the_kill_of_its_writer(scheme: str, urls: Callable[[str], str]) -> None:
    code = """
put("ns/survivor", bytes(range(256)) * 1000)
relay.put_if_absent("ns/survivor-end", b"end", deadline)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with children(Child(urls(scheme), code)) as (writer,), opened(scheme, urls(scheme)) as relay:
        assert writer.process.wait(60) == -signal.SIGKILL
        target = block(bytes(256_000))
        assert relay.get("ns/survivor", cut(target), soon())
        assert target.raw == bytes(range(256)) * 1000
        assert relay.get_bytes("ns/survivor-end", soon()) == b"end"


@pytest.mark.parametrize("scheme", ACROSS)
def test_processes_racing_for_a_small_value_agree_on_one_winner(scheme: str, urls: Callable[[str], str]) -> None:
    code = """
go()
print(json.dumps([relay.put_if_absent(f"ns/race/{n}", me.encode(), deadline).decode() for n in range(50)]), flush=True)
"""
    made = [Child(urls(scheme), code, str(me)) for me in range(3)]
    with children(*made), opened(scheme, urls(scheme)) as relay:
        for child in made:
            assert child.line() == "ready"
        for child in made:
            child.go()
        answers = [json.loads(child.line()) for child in made]
        for number, standing in enumerate(zip(*answers, strict=True)):
            assert len(set(standing)) == 1
            assert relay.get_bytes(f"ns/race/{number}", soon()) == standing[0].encode()


@pytest.mark.processes
def test_processes_filling_one_folder_never_exceed_its_capacity(tmp_path: Path) -> None:
    capacity = 1_000_000
    code = """
import time
read = os.pread
os.pread = lambda *given: (read(*given), time.sleep(0.002))[0]  # a window for others between reading and writing
go()
stored = 0
for number in range(60):
    try:
        put(f"ns/{me}/{number}", bytes(10_007))
        stored += 1
    except CapacityError:
        pass
print(stored, flush=True)
"""
    url = f"local://{tmp_path}"
    made = [Child(url, code, str(me), capacity) for me in range(3)]
    with children(*made):
        for child in made:
            assert child.line() == "ready"
        for child in made:
            child.go()
        stored = sum(int(child.line()) for child in made)
    assert stored == capacity // 10_007
    sizes = [path.stat().st_size for path in (tmp_path / "objects").iterdir()]
    assert sum(sizes) == stored * 10_007
    assert (tmp_path / "lock").read_bytes() == (stored * 10_007).to_bytes(8, "little")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.processes
def test_a_writer_killed_in_the_middle_leaves_nothing_that_stays(tmp_path: Path) -> None:
    code = """
import moonrelay.relay.local as local
write = local.os.pwritev
def die(fd, views, at):
    write(fd, views[:1], at)
    os.kill(os.getpid(), signal.SIGKILL)
local.os.pwritev = die
put("ns/torn", bytes(100_000))
"""
    url = f"local://{tmp_path}"
    with children(Child(url, code)) as (writer,):
        assert writer.process.wait(60) == -signal.SIGKILL
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    relay = LocalRelay(StoreConfig(url=url, capacity_bytes=100_000))
    relay.start()
    assert relay.keys("", soon()) == []
    assert list((tmp_path / "tmp").iterdir()) == []
    relay.put("ns/torn", cut(block(bytes(100_000))), soon())
