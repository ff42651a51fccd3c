"""Sides that are forked from a process which has imported their host; what any side does stands in test_sides.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonrelay.errors import PeerLost
from moonrelay_conformance.sides import SideEnded, SidePool
from moonrelay_conformance.targets.adapter import SideSettings

pytestmark = pytest.mark.processes

HERE = str(Path(__file__).parent)
PREPARED = "side_samples:PreparedSide"
SETTINGS = SideSettings(role="producer", route="p2p")


@pytest.fixture(autouse=True)
def _samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture
def pool() -> Iterator[SidePool]:
    with SidePool(forked=True) as made:
        yield made


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(*pids: int) -> None:
    end = time.monotonic() + 20
    while not all(map(gone, pids)):
        assert time.monotonic() < end
        threading.Event().wait(0.02)


def test_the_host_is_imported_once_for_all_sides(pool: SidePool) -> None:
    sides = [pool.start(PREPARED, SETTINGS) for _ in range(3)]
    seen = [side.do("in_use") for side in sides]
    assert len({side.pid for side in sides}) == 3
    assert len({one["prepared_in"] for one in seen}) == 1
    assert all(one["prepared_in"] == one["parent"] for one in seen)


def test_the_host_can_be_imported_before_a_side_is_needed(pool: SidePool) -> None:
    pool.prepare(PREPARED)
    (ready,) = pool._idle
    assert pool.start(PREPARED, SETTINGS) is ready
    pool.prepare("side_samples:ThreadedSide")  # what is wrong with it comes with its start


def test_the_end_of_a_fork_is_seen_and_hurts_no_other(pool: SidePool) -> None:
    killed, left, other = (pool.start(PREPARED, SETTINGS) for _ in range(3))
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(SideEnded, match="signal 9"):
        killed.do("in_use")
    tree = {"tensor": {"shape": [8], "dtype": "float32", "seed": 7}}
    with pytest.raises(SideEnded, match="exit status 3"):
        left.do("publish", name="p", outgoing={"request_id": "exit"}, tree=tree)
    assert not killed.alive
    assert other.do("in_use")["parent"]
    pool.take_back()
    assert pool.start(PREPARED, SETTINGS).pid == other.pid


def test_a_fork_has_a_group_of_its_own(pool: SidePool) -> None:
    side = pool.start(PREPARED, SETTINGS)
    assert os.getpgid(side.pid) == side.pid


def test_a_host_that_starts_threads_cannot_be_forked(pool: SidePool, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerLost, match="exit status is 1"):
        pool.start("side_samples:ThreadedSide", SETTINGS)
    assert "host-ticker" in capfd.readouterr().err


def test_nothing_is_left_of_a_pool() -> None:
    with SidePool(forked=True) as pool:
        sides = [pool.start(PREPARED, SETTINGS) for _ in range(2)]
        nursery = sides[0].do("in_use")["parent"]
    wait_until_gone(nursery, *(side.pid for side in sides))


def test_forks_die_with_the_suite() -> None:
    suite = textwrap.dedent(
        f"""
        import sys, threading
        from moonrelay_conformance.sides import SidePool
        from moonrelay_conformance.targets.adapter import SideSettings
        pool = SidePool(forked=True)
        one, two = (pool.start({PREPARED!r}, SideSettings(role="producer", route="p2p")) for _ in range(2))
        two.stop()
        print(one.pid, two.pid, one.do("in_use")["parent"], flush=True)
        threading.Event().wait()
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen([sys.executable, "-c", suite], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        assert not any(map(gone, pids))
        process.send_signal(signal.SIGKILL)
    wait_until_gone(*pids)
