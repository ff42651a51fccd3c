"""Several denoisers, one of them silent; and payloads that a receiver has no room for. See `test_stock_faults`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from sglang_backends import CLUSTERS, HANGS_AFTER_S, WITHIN_S, backends
from sglang_cluster import HUGE, PROMPTS, Cluster, NoAnswer, RequestFailed, key_of

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]

#: A huge payload fits the encoder, which has no room for another one beside it, and no denoiser.
LAYOUT: dict[str, Any] = {
    "denoisers": 2,
    "options": {"encoder": {"disagg_transfer_pool_size": 8 << 20}, "denoiser": {"disagg_transfer_pool_size": 4 << 20}},
}

Right = Mapping[str, bytes]


def assert_own_video(cluster: Cluster, right: Right, prompt: str, within_s: float = WITHIN_S) -> None:
    assert cluster.ask(prompt, within_s=within_s) == right[key_of(prompt)], prompt


@backends(CLUSTERS)
def test_two_denoisers_make_the_undivided_hosts_videos(cluster: Cluster, right: Right) -> None:
    for prompt in PROMPTS:
        assert_own_video(cluster, right, prompt)


@backends(CLUSTERS, "sends every second request to it, and waits", NoAnswer)
def test_a_silent_instance_gets_no_work(backend: str, cluster: Cluster, right: Right) -> None:
    # Stopped, not killed: as silent, and back without a minute's start.
    cluster.stop("denoiser-1")
    try:
        for prompt in PROMPTS:
            assert_own_video(cluster, right, prompt, HANGS_AFTER_S[backend])
    finally:
        cluster.go_on("denoiser-1")


@backends(CLUSTERS, "has a receiver without room say nothing", NoAnswer)
def test_a_payload_without_room_ends_in_time(backend: str, cluster: Cluster) -> None:
    with pytest.raises(RequestFailed):
        cluster.ask("a cat", within_s=HANGS_AFTER_S[backend], **HUGE)


@backends(CLUSTERS, "never frees what the receiver had no room for: the encoder can stage nothing more", RequestFailed)
def test_after_a_payload_without_room_others_are_served(cluster: Cluster, right: Right) -> None:
    for prompt in PROMPTS:
        assert_own_video(cluster, right, prompt)
