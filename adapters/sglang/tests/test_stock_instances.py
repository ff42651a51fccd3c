"""Several denoisers, one of them dead; and payloads that a receiver has no room for. See `test_stock_faults`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sglang_backends import CLUSTERS, backends
from sglang_cluster import LARGE, PROMPTS, Cluster, NoAnswer, RequestFailed, key_of

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]

#: A large payload fits the encoder, which has no room for another one beside it, and no denoiser.
LAYOUT: dict[str, Any] = {
    "denoisers": 2,
    "options": {"encoder": {"disagg_transfer_pool_size": 2 << 20}, "denoiser": {"disagg_transfer_pool_size": 1 << 20}},
}
WITHIN_S = 45.0

Right = Mapping[str, bytes]


def assert_own_video(cluster: Cluster, right: Right, prompt: str) -> None:
    assert cluster.ask(prompt, within_s=WITHIN_S) == right[key_of(prompt)], prompt


@backends(CLUSTERS)
def test_two_denoisers_make_the_undivided_hosts_videos(cluster: Cluster, right: Right) -> None:
    for prompt in PROMPTS:
        assert_own_video(cluster, right, prompt)


@backends(CLUSTERS, "sends every second request to the dead one, and waits", NoAnswer)
def test_a_dead_instance_gets_no_work(cluster: Cluster, right: Right) -> None:
    cluster.kill("denoiser-1")
    try:
        for prompt in PROMPTS:
            assert_own_video(cluster, right, prompt)
    finally:
        cluster.restart("denoiser-1")


@backends(CLUSTERS, "has a receiver without room say nothing", NoAnswer)
def test_a_payload_without_room_ends_in_time(cluster: Cluster, right: Right) -> None:
    try:
        video = cluster.ask("a cat", within_s=WITHIN_S, **LARGE)
    except RequestFailed:
        pass
    else:
        assert video == right[key_of("a cat", **LARGE)]


@backends(CLUSTERS, "never frees what the receiver had no room for: the encoder can stage nothing more", RequestFailed)
def test_after_a_payload_without_room_others_are_served(cluster: Cluster, right: Right) -> None:
    for prompt in PROMPTS:
        assert_own_video(cluster, right, prompt)
