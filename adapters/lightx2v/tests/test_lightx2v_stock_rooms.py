"""The host's own sender and receiver, room by room, as its queues use them; see `lightx2v_rooms`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightx2v_rooms
import pytest
from lightx2v_cluster import Ports, host_environment

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

#: Both sides are in one process. A side has two threads and six descriptors more with every room.
THREADS, DESCRIPTORS = 4, 12
ROOMS = 24
WAITING_FOR_INPUT = 2


def run(environment: Mapping[str, str], folder: Path, *words: object) -> list[dict[str, Any]]:
    """Run it; return what it said."""
    done = subprocess.run(
        [sys.executable, lightx2v_rooms.__file__, *map(str, words)],
        env=host_environment(environment, folder),
        cwd=folder,
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def rooms(number: int) -> list[int]:
    ports = Ports()
    return [room for _ in range(number // 2) for room in ports.take_rooms()]


def test_every_room_leaves_threads_and_descriptors(environment: dict[str, str], tmp_path: Path) -> None:
    said = run(environment, tmp_path, *rooms(ROOMS))
    assert all(one["same"] for one in said)
    first, last = said[4], said[-1]
    assert len(said) == ROOMS
    assert last["threads"] - first["threads"] > (THREADS - 1) * (ROOMS - 5)
    assert last["descriptors"] - first["descriptors"] > (DESCRIPTORS - 2) * (ROOMS - 5)


def test_a_receiver_without_a_sender_waits_for_ever(environment: dict[str, str], tmp_path: Path) -> None:
    assert run(environment, tmp_path, "--alone", Ports().take_rooms()[0], 10.0) == [{"status": WAITING_FOR_INPUT}]
