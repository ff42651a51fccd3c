"""Engines between real processes on loopback: bytes, killed and stopped peers, nothing left behind.

Run as a program, this file is the peer: it serves a pool of known bytes until its standard input ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from moonrelay.clock import Deadline, SystemClock
from moonrelay.config import TransferConfig
from moonrelay.errors import ClosedError, MoonrelayError, TransferFailed, TransferTimeout
from moonrelay.handle import EngineAddress, Region
from moonrelay.transfer import Arena, Move, Puller, Quarantine, TransferEngine
from moonrelay.transfer.mooncake import MooncakeEngine
from moonrelay.transfer.shm import ShmEngine, sweep_orphans

MIB = 1 << 20
ENGINES = {"shm": ShmEngine, "mooncake": MooncakeEngine}
#: Also how long a stopped peer's reads take to be quiet, four at a time.
PROGRESS_S = 2.0


class Facts(msgspec.Struct):
    """What a peer tells: where it is, its pool, and heap memory that it registered (mooncake)."""

    address: EngineAddress
    pool: Region
    heap: Region | None


def pattern(nbytes: int) -> bytes:
    block = bytes(range(251)) * (nbytes // 251 + 1)
    return block[:nbytes]


def config(name: str, hostname: str = "127.0.0.1", directory: str = "/dev/shm") -> TransferConfig:
    options = {"directory": directory} if name == "shm" else {}
    return TransferConfig(engine=name, hostname=hostname, progress_timeout_s=PROGRESS_S, options=options)


def serve(name: str, mib: int, directory: str) -> None:
    engine = ENGINES[name](config(name, directory=directory))
    engine.start()
    pool = engine.allocate(mib * MIB)
    engine.commit(pool, 0, pool.nbytes)
    ctypes.memmove(pool.base, pattern(pool.nbytes), pool.nbytes)
    own = ctypes.create_string_buffer(pattern(3 * MIB + 5), 3 * MIB + 5)
    heap = engine.register(ctypes.addressof(own), len(own)) if engine.registers_foreign_memory else None
    sys.stdout.write(msgspec.json.encode(Facts(engine.address, pool, heap)).decode() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    engine.release(pool)
    engine.close()


def read_from_itself(hostname: str) -> None:
    """Read from one engine by another of the same process, over ``hostname``."""
    side = Side("mooncake", hostname=hostname)
    with_peer = MooncakeEngine(config("mooncake", hostname))
    with_peer.start()
    pool = with_peer.allocate(MIB)
    ctypes.memmove(pool.base, pattern(MIB), MIB)
    side.pull(Facts(with_peer.address, pool, None), MIB)
    side.close()
    with_peer.close()
    sys.stdout.write(with_peer.address.address)


class Peer:
    """A producer in a process of its own."""

    def __init__(self, name: str, mib: int, directory: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, str(mib), directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdout is not None
        self.facts = msgspec.json.decode(self.process.stdout.readline(), type=Facts)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """End it kindly, and return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(30)
        self.process.stdout.close()
        return status

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Side:
    """The consumer's half: engine, pool, puller, quarantine."""

    def __init__(
        self, name: str, hostname: str = "127.0.0.1", directory: str = "/dev/shm", pool_bytes: int = 256 * MIB
    ) -> None:
        self.clock = SystemClock()
        self.engine: TransferEngine = ENGINES[name](config(name, hostname, directory))
        self.engine.start()
        self.quarantine = Quarantine(self.clock)
        self.arena = Arena(self.engine, pool_bytes, self.clock)
        self.puller = Puller(self.engine, window=4, piece_bytes=4 * MIB, clock=self.clock, quarantine=self.quarantine)

    def pull(self, facts: Facts, nbytes: int, *, timeout_s: float = 60.0, on_landed=None, offset: int = 0) -> None:
        """Read into a slot of its own, compare, give the slot back."""
        with self.arena.allocate(nbytes) as slot:
            move = Move(
                region=facts.pool,
                remote_address=facts.pool.base + offset,
                local_address=slot.address,
                nbytes=nbytes,
            )
            self.puller.pull(
                facts.address,
                [move],
                Deadline(timeout_s, self.clock),
                on_landed=on_landed,
                on_quiet=slot.quarantine(),
            )
            assert ctypes.string_at(slot.address, nbytes) == pattern(offset + nbytes)[offset:]

    def until_quiet(self, timeout_s: float = 60.0) -> None:
        assert self.quarantine.close(timeout_s)
        assert self.arena.quarantined_bytes == 0
        assert self.arena.live_slots == 0

    def close(self) -> None:
        self.quarantine.close(30.0)
        self.arena.close()
        self.engine.close()
        self.quarantine.poll()


pytestmark = pytest.mark.processes
mooncake_only = pytest.mark.parametrize("name", [pytest.param("mooncake", marks=pytest.mark.mooncake)])
both = pytest.mark.parametrize("name", ["shm", pytest.param("mooncake", marks=pytest.mark.mooncake)])


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in shared memory, so that the tests see only their own segments."""
    path = Path("/dev/shm") / f"moonrelay-test-{os.getpid()}"
    path.mkdir()
    yield str(path)
    left = sorted(one.name for one in path.iterdir())
    for one in left:
        (path / one).unlink()
    path.rmdir()
    assert left == []


@pytest.fixture
def make_peer(folder) -> Iterator:
    peers: list[Peer] = []

    def build(name: str, mib: int = 32) -> Peer:
        peers.append(Peer(name, mib, folder))
        return peers[-1]

    yield build
    for peer in peers:
        peer.kill()


@pytest.fixture
def make_side(folder) -> Iterator:
    sides: list[Side] = []

    def build(name: str, **kwargs) -> Side:
        sides.append(Side(name, directory=folder, **kwargs))
        return sides[-1]

    yield build
    for side in sides:
        side.close()


@both
def test_bytes_arrive_from_another_process(name, make_peer, make_side):
    peer, side = make_peer(name), make_side(name)
    landed: list[tuple[int, int, int]] = []
    side.pull(peer.facts, 32 * MIB, on_landed=lambda *where: landed.append(where))
    assert sum(nbytes for _, _, nbytes in landed) == 32 * MIB
    assert [offset for _, offset, _ in landed] == sorted(offset for _, offset, _ in landed)
    side.pull(peer.facts, 5 * MIB + 3, offset=12345)
    side.pull(peer.facts, 1, offset=32 * MIB - 1)
    side.until_quiet()
    assert peer.end() == 0


@mooncake_only
def test_registered_heap_memory_is_read(name, make_peer, make_side):
    peer, side = make_peer(name), make_side(name)
    assert peer.facts.heap is not None
    side.pull(Facts(peer.facts.address, peer.facts.heap, None), peer.facts.heap.nbytes)


@mooncake_only
def test_the_peer_refuses_what_it_did_not_register(name, make_peer, make_side):
    peer, side = make_peer(name), make_side(name)
    pool = peer.facts.pool
    side.pull(peer.facts, 100)
    lie = Region(key="", base=pool.base, nbytes=2 * pool.nbytes)
    with pytest.raises(TransferFailed):
        side.pull(Facts(peer.facts.address, lie, None), 100, offset=pool.nbytes - 50)
    side.until_quiet()
    side.pull(peer.facts, 100)  # the retry takes care of a failure that has nothing to do with this read


@pytest.mark.mooncake
@pytest.mark.parametrize("hostname", ["127.0.0.1", "::1"])
def test_ipv4_and_ipv6(hostname):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run(
        [sys.executable, __file__, "itself", hostname],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.rpartition(":")[0] == ("[::1]" if hostname == "::1" else hostname)


@mooncake_only
def test_a_peer_killed_while_it_is_read(name, make_peer, make_side):
    peer, side = make_peer(name, 128), make_side(name)
    begun = side.clock.monotonic()
    with pytest.raises(TransferFailed):
        side.pull(peer.facts, 128 * MIB, on_landed=lambda *_: peer.kill())
    # Not by the deadline, and not by the progress timeout of each piece in turn.
    assert side.clock.monotonic() - begun < 30
    side.until_quiet()
    with pytest.raises(TransferFailed):
        side.pull(peer.facts, MIB)
    side.until_quiet()


@mooncake_only
@pytest.mark.parametrize("ending", ["continued", "killed"])
def test_a_peer_stopped_while_it_is_read(name, ending, make_peer, make_side):
    peer, side = make_peer(name, 64), make_side(name, pool_bytes=64 * MIB)

    def stop(*_: int) -> None:
        peer.signal(signal.SIGSTOP)

    with pytest.raises(TransferTimeout) as caught:
        side.pull(peer.facts, 64 * MIB, timeout_s=1.0, on_landed=stop)
    assert caught.value.context["pending"] >= 1
    assert side.quarantine.busy == 1
    assert side.arena.quarantined_bytes == 64 * MIB
    with pytest.raises(MoonrelayError):
        side.arena.allocate(1)
    if ending == "continued":
        peer.signal(signal.SIGCONT)
        side.until_quiet()
        side.pull(peer.facts, 64 * MIB)
    else:
        peer.kill()
        side.until_quiet()
    side.until_quiet()


@mooncake_only
def test_first_contact_with_a_stopped_peer_ends_by_the_deadline_and_disturbs_nobody(name, make_peer, make_side):
    stopped, healthy, side = make_peer(name), make_peer(name), make_side(name)
    stopped.signal(signal.SIGSTOP)
    begun = side.clock.monotonic()
    with pytest.raises(TransferTimeout):
        side.pull(stopped.facts, MIB, timeout_s=1.0)
    side.pull(healthy.facts, 32 * MIB)
    # Alone, first contact takes the library a minute, during which it serves nobody.
    assert side.clock.monotonic() - begun < 30
    stopped.signal(signal.SIGCONT)
    side.until_quiet()
    side.pull(stopped.facts, MIB)


@mooncake_only
def test_close_under_a_pull(name, make_peer, make_side):
    peer, side = make_peer(name, 128), make_side(name)
    with pytest.raises((ClosedError, TransferFailed)):
        side.pull(peer.facts, 128 * MIB, on_landed=lambda *_: side.engine.close())
    side.engine.close()
    side.until_quiet()
    assert peer.end() == 0


def test_shm_outlives_a_killed_owner_until_the_sweep(make_peer, make_side, folder):
    peer, side = make_peer("shm"), make_side("shm")
    peer.kill()
    side.pull(peer.facts, MIB)
    assert sweep_orphans(Path(folder)) == [peer.facts.pool.key]
    side.engine.forget(peer.facts.address)
    with pytest.raises(TransferFailed, match="cannot open segment"):
        side.pull(peer.facts, MIB)


def test_shm_of_a_stopped_owner_is_no_orphan_and_can_be_read(make_peer, make_side, folder):
    peer, side = make_peer("shm"), make_side("shm")
    peer.signal(signal.SIGSTOP)
    assert sweep_orphans(Path(folder)) == []
    side.pull(peer.facts, MIB)
    peer.signal(signal.SIGCONT)
    assert peer.end() == 0


def footprint(folder: str) -> dict[str, int]:
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "segments": len(os.listdir(folder)),
    }


def settles_at(baseline: dict[str, int], folder: str) -> bool:
    """Wait a little for the system to reap threads."""
    for _ in range(100):
        if all(footprint(folder)[key] <= value for key, value in baseline.items()):
            return True
        time.sleep(0.05)
    return False


@both
def test_300_reads_and_several_lives_leave_nothing(name, make_peer, folder):
    peer = make_peer(name, 2)
    for life in range(4):
        side = Side(name, directory=folder, pool_bytes=4 * MIB)
        for turn in range(100):
            side.pull(peer.facts, 1 + (turn * 7919) % MIB)
            if turn == 0:
                inside = footprint(folder)
        side.until_quiet()
        assert settles_at(inside, folder), (inside, footprint(folder))
        side.close()
        side.close()
        if life == 0:
            baseline = footprint(folder)  # the library keeps a few threads of its own from its first life on
    assert settles_at(baseline, folder), (baseline, footprint(folder))
    assert peer.end() == 0
    assert os.listdir(folder) == []


if __name__ == "__main__":
    if sys.argv[1] == "itself":
        read_from_itself(sys.argv[2])
    else:
        serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
