"""The lanes of ``moonrelay bench host sglang``, without the host."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from moonrelay.cli.bench.host_lanes import CONSUMER, PRODUCER, Room
from moonrelay_sglang import bench
from moonrelay_sglang.manager import PayloadManager
from moonrelay_sglang.plugin import SglangAdapter

OURS = [one for one in bench.LANES if one.lane.ours]


def test_the_adapter_gives_its_lanes() -> None:
    lanes = SglangAdapter().host_bench()().lanes()
    assert [lane.name for lane in lanes] == [
        "host",
        "moonrelay-tcp",
        "moonrelay-tcp-unchecked",
        "moonrelay-shm",
        "moonrelay-shm-unchecked",
    ]
    assert [lane.name for lane in lanes if not lane.ours] == ["host"]
    assert not any(lane.fix for lane in lanes), "all of them run as they were released"


@pytest.mark.parametrize("one", OURS, ids=[one.lane.name for one in OURS])
def test_our_lanes_are_set_as_they_say(one: bench.SglangLane, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Manager:
        def __init__(self, settings: Any, *, epoch: str) -> None:
            made.append(settings)

        def start(self) -> None:
            pass

    monkeypatch.setattr(bench, "manager_class", lambda: Manager)
    room = Room(largest=1 << 20, shared={"folder": "/nowhere"})
    for side in (PRODUCER, CONSUMER):
        one.open(side, room)
    for settings in made:
        assert settings.transfer.engine == ("shm" if "-shm" in one.lane.name else "mooncake")
        assert settings.integrity == ("off" if "unchecked" in one.lane.name else "auto")
        assert settings.transfer.pool_bytes > 2 * room.largest
        assert settings.transfer_mode == "p2p"
    assert [settings.role for settings in made] == ["encoder", "denoiser"]
    assert ("the default" in one.lane.says) == ("unchecked" not in one.lane.name)


def test_a_payload_goes_through_our_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "manager_class", lambda: PayloadManager)
    one = next(one for one in OURS if one.lane.name == "moonrelay-shm")
    room = Room(largest=1 << 20, shared={"folder": "/nowhere"})
    sender, receiver = one.open(PRODUCER, room), one.open(CONSUMER, room)
    try:
        ticket = sender.put("a", {"latents": torch.arange(4096), "height": 64, "prompt": "a hare"})
        assert json.loads(ticket)[1] == {"height": 64, "prompt": "a hare"}
        found: Any = receiver.get("a", ticket)
        assert found.keys() == {"latents", "height", "prompt"}
        assert torch.equal(found["latents"], torch.arange(4096))
        del found
    finally:
        receiver.close()
        sender.close()


def test_lanes_are_listed_without_the_host_or_torch() -> None:
    text = (
        "import sys; from moonrelay_sglang.plugin import SglangAdapter; "
        "print(len(SglangAdapter().host_bench()().lanes()), {'torch', 'sglang', 'mooncake'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == [str(len(bench.LANES)), "set()\n"]
