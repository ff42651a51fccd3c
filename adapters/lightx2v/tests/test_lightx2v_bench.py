"""The lanes of ``moonrelay bench host lightx2v``: ours without the host, all of them with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay.cli.bench.host_lanes import CONSUMER, PRODUCER, Room
from moonrelay.cli.bench.host_payload import Payloads
from moonrelay_lightx2v import bench, plugin, roles
from moonrelay_lightx2v.bench import PAYLOADS
from moonrelay_lightx2v.plugin import Lightx2vAdapter

OURS = [one for one in bench.LANES if one.lane.ours]
LARGEST = max(one.nbytes for one in PAYLOADS)


def test_the_adapter_gives_its_lanes() -> None:
    lanes = Lightx2vAdapter().host_bench()().lanes()
    assert [lane.name for lane in lanes] == [
        "host",
        "moonrelay-tcp",
        "moonrelay-tcp-unchecked",
        "moonrelay-shm",
        "moonrelay-shm-unchecked",
    ]
    assert [lane.name for lane in lanes if lane.fix] == ["host"]


def test_payloads_are_what_the_hosts_encoder_sends() -> None:
    assert [one.name for one in PAYLOADS] == ["wan-i2v-480p", "wan-i2v-720p"]
    assert [round(one.nbytes / (1 << 20), 1) for one in PAYLOADS] == [13.6, 20.2]
    assert [one.tensors["vae_encoder_out"][1] for one in PAYLOADS] == [(20, 21, 60, 104), (20, 21, 90, 160)]
    made = Payloads(LARGEST, PAYLOADS).make(PAYLOADS[0].nbytes, 3)
    tensors = [value for value in made.values() if isinstance(value, torch.Tensor)]
    assert sum(tensor.nbytes for tensor in tensors) == PAYLOADS[0].nbytes


@pytest.mark.parametrize("one", OURS, ids=[one.lane.name for one in OURS])
def test_our_lanes_are_set_as_they_say(
    one: bench.Lightx2vLane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[tuple[str, dict[str, Any]]] = []

    class Link:
        address = ("127.0.0.1", 5)

    monkeypatch.setattr(roles, "runner_class", lambda: lambda role, section: made.append((role, section)))
    monkeypatch.setattr(roles, "link_of", lambda _: Link)
    for side in (PRODUCER, CONSUMER):
        one.open(side, Room(largest=1 << 20, shared={"folder": str(tmp_path)}), True)
    assert [role for role, _ in made] == ["encoder", "transformer"]
    assert made[1][1]["bootstrap_addr"] == "127.0.0.1:5"
    for _, section in made:
        assert section["connector"] == "moonrelay"
        assert section["engine"] == ("shm" if "-shm" in one.lane.name else "mooncake")
        assert section["integrity"] == ("off" if "unchecked" in one.lane.name else "auto")
        assert section["staging_bytes"] > 2 << 20
    assert ("the default" in one.lane.says) == ("unchecked" not in one.lane.name)


def test_payloads_go_through_our_lane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "host_folder", lambda: None)
    one = next(one for one in OURS if one.lane.name == "moonrelay-shm")
    room = Room(largest=LARGEST, shared={"folder": str(tmp_path)})
    payloads = Payloads(LARGEST, PAYLOADS)
    sender, receiver = one.open(PRODUCER, room, True), one.open(CONSUMER, room, True)
    try:
        for stamp, payload in enumerate(PAYLOADS):
            ticket = sender.put(payload.name, payloads.make(payload.nbytes, stamp))
            payloads.check(receiver.get(payload.name, ticket), payload.nbytes, stamp)
    finally:
        receiver.close()
        sender.close()


def test_rooms_are_the_same_at_both_ends_and_never_used_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "_is_free", lambda port: port != 17788 + 10)
    chosen = [(bench._rooms(PRODUCER, tmp_path), bench._rooms(CONSUMER, tmp_path)) for _ in range(2)]
    assert chosen == [([0, 2], [0, 2]), ([3, 4], [3, 4])]


def test_lanes_are_listed_without_the_host_or_torch() -> None:
    text = (
        "import sys; from moonrelay_lightx2v.plugin import Lightx2vAdapter; "
        "print(len(Lightx2vAdapter().host_bench()().lanes()), {'torch', 'lightx2v', 'mooncake'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == [str(len(bench.LANES)), "set()\n"]


@pytest.mark.lightx2v
@pytest.mark.timeout(600)
def test_the_hosts_lane_and_ours_carry_the_same_payloads(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moonrelay.cli.main", "bench", "host", "lightx2v", "--rounds", "1", "--json"]
    lanes = ["--lanes", "host,moonrelay-tcp,moonrelay-shm"]
    done = subprocess.run(
        [*command, *lanes],
        capture_output=True,
        text=True,
        timeout=580,
        cwd=tmp_path,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert not [one["error"] for one in report["lanes"] if one["error"]]
    names = ["host", "moonrelay-tcp", "moonrelay-shm"]
    assert {(row["lane"], row["payload"]) for row in report["rows"]} == {
        (lane, one.name) for lane in names for one in PAYLOADS
    }
