"""The lanes of ``moonrelay bench host vllm-omni``, without the host."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moonrelay.cli.bench.host_lanes import CONSUMER, PRODUCER, Room
from moonrelay_vllm_omni import bench, config
from moonrelay_vllm_omni.plugin import VllmOmniAdapter

ROOM = Room(largest=1 << 20, shared={"port": "12345", "folder": "/nowhere", "run": "1", "master": "127.0.0.1:1"})
OURS = [one for one in bench.LANES if one.lane.ours]


def test_the_adapter_gives_its_lanes():
    lanes = VllmOmniAdapter().host_bench()().lanes()
    names = [lane.name for lane in lanes]
    assert len(set(names)) == len(names)
    assert names[:4] == ["host-shm", "host-te", "host-store", "moonrelay-shm"]
    assert [lane.name for lane in lanes if lane.fix] == ["host-te", "host-store"]


@pytest.mark.parametrize("one", OURS, ids=[one.lane.name for one in OURS])
def test_our_lanes_are_set_as_they_say(one):
    producer, consumer = (config.parse(one.extra(side, ROOM)) for side in (PRODUCER, CONSUMER))
    name = one.lane.name
    for settings in (producer, consumer):
        assert settings.transfer.engine == ("shm" if "-shm" in name else "mooncake")
        assert settings.snapshot == ("nocopy" not in name)
        assert settings.integrity == ("off" if "unchecked" in name else "auto")
        assert settings.transfer.pool_bytes > 2 * ROOM.largest
    assert ("the defaults" in one.lane.says) == (name in ("moonrelay-shm", "moonrelay-tcp"))
    assert (producer.stage_id, consumer.stage_id) == (0, 1)


def test_the_hosts_engine_is_told_where_its_sender_is():
    lane = next(one for one in bench.LANES if one.lane.name == "host-te")
    producer, consumer = (lane.extra(side, ROOM) for side in (PRODUCER, CONSUMER))
    assert producer["role"] == "sender"
    assert consumer["role"] == "receiver"
    assert consumer["sender_zmq_port"] == producer["zmq_port"] == 12345
    assert producer["host"] == consumer["sender_host"] == "127.0.0.1"


def test_pinning_is_left_out_only_while_a_connector_is_made():
    before = torch.Tensor.pin_memory
    tensor = torch.zeros(4)
    with bench.without_pinning():
        assert tensor.pin_memory() is tensor
    assert torch.Tensor.pin_memory is before


def test_a_store_is_started_only_for_lanes_that_need_one(tmp_path):
    with bench.OmniBench().shared(["moonrelay-shm", "host-shm"], 1 << 20, tmp_path) as shared:
        assert "master" not in shared
        assert not (tmp_path / "mooncake").exists()


def test_lanes_are_listed_without_the_host_or_torch():
    text = (
        "import sys; from moonrelay_vllm_omni.plugin import VllmOmniAdapter; "
        "print(len(VllmOmniAdapter().host_bench()().lanes()), {'torch', 'vllm_omni', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == [str(len(bench.LANES)), "set()\n"]
