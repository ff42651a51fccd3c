"""Our backend in clusters of the host's processes: many requests at once, and instances that die, stop and come back.

Every video is compared to the byte: with the undivided host's, or with the same request's before the fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sglang_backends import CLUSTERS, WITHIN_S, backends
from sglang_cluster import FIRST_TIMEOUT_S, PROMPTS, Cluster, key_of, until

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]

LAYOUT: dict[str, Any] = {}
OURS = {name: layout for name, layout in CLUSTERS.items() if name == "moonrelay"}
#: A request that is with its denoiser for some seconds: long enough to find it there.
LONG: dict[str, Any] = {"num_inference_steps": 100, "guidance_scale": 1.0}
AT_ONCE = 50
DENOISERS = ("denoiser-0", "denoiser-1")

Right = Mapping[str, bytes]


def working(cluster: Cluster) -> str | None:
    """Return the denoiser that has a request."""
    instances = cluster.stats()["stages"]["denoiser"]["instances"]
    return next((f"denoiser-{number}" for number, one in enumerate(instances) if one["running"]), None)


def at_the_denoisers(cluster: Cluster) -> bool:
    stages = cluster.stats()["stages"]
    return not stages["encoder"]["queued"] + stages["encoder"]["running"] and (
        stages["denoiser"]["queued"] + stages["denoiser"]["running"] == 1
    )


def delivered(cluster: Cluster, name: str) -> int:
    count: int = cluster.stats()["reports"][name.replace("-", "[") + "]"]["counters"]["delivered"]
    return count


@backends(OURS)
def test_many_requests_at_once_have_their_own_videos(cluster: Cluster, right: Right) -> None:
    asked: list[tuple[str, int]] = [(prompt, 42) for prompt in PROMPTS]
    asked += [(f"{number} birds", number) for number in range(AT_ONCE - len(asked))]
    requests = [cluster.submit(prompt, seed) for prompt, seed in asked]
    videos = [cluster.result(request, FIRST_TIMEOUT_S) for request in requests]
    assert videos[: len(PROMPTS)] == [right[key_of(prompt)] for prompt in PROMPTS]
    assert len(set(videos)) == AT_ONCE
    # Two at a time, so that both denoisers have them.
    for first in range(0, AT_ONCE, 2):
        pair = [cluster.submit(prompt, seed) for prompt, seed in asked[first : first + 2]]
        again = [cluster.result(request, WITHIN_S) for request in pair]
        assert again == videos[first : first + 2], asked[first : first + 2]
    settled(cluster)


@backends(OURS)
def test_a_denoiser_killed_at_work_is_replaced(cluster: Cluster, right: Right) -> None:
    undisturbed = cluster.ask(PROMPTS[0], within_s=WITHIN_S, **LONG)
    request = cluster.submit(PROMPTS[0], **LONG)
    name = until(lambda: working(cluster))
    cluster.kill(name)
    assert cluster.result(request, WITHIN_S) == undisturbed
    cluster.restart(name)
    for prompt in PROMPTS[:2]:
        assert cluster.ask(prompt, within_s=FIRST_TIMEOUT_S) == right[key_of(prompt)]
    assert until(lambda: delivered(cluster, name)) == 1, "the new one serves its share"
    settled(cluster)


@backends(OURS)
def test_what_a_stopped_denoiser_makes_too_late_is_dropped(cluster: Cluster, right: Right) -> None:
    undisturbed = cluster.ask(PROMPTS[1], within_s=WITHIN_S, **LONG)
    request = cluster.submit(PROMPTS[1], **LONG)
    name = until(lambda: working(cluster))
    cluster.stop(name)
    try:
        assert cluster.result(request, WITHIN_S) == undisturbed
    finally:
        cluster.go_on(name)
    until(lambda: name in cluster.registrations())
    settled(cluster)
    for prompt in PROMPTS[:2]:
        assert cluster.ask(prompt, within_s=WITHIN_S) == right[key_of(prompt)]


@backends(OURS)
def test_what_an_encoder_stored_outlives_it(cluster: Cluster, right: Right, tmp_path: Path) -> None:
    stored = {"transfer_mode": "store", "store": f"local://{tmp_path}/store"}
    cluster.restart("encoder-0", environment={"MOONRELAY_SGLANG": json.dumps(stored)})
    for name in DENOISERS:
        cluster.stop(name)
    try:
        request = cluster.submit(PROMPTS[2])
        until(lambda: at_the_denoisers(cluster))
        cluster.kill("encoder-0")
    finally:
        for name in DENOISERS:
            cluster.go_on(name)
    assert cluster.result(request, WITHIN_S) == right[key_of(PROMPTS[2])]


@backends(OURS)
def test_an_encoder_that_was_started_anew_serves(cluster: Cluster, right: Right) -> None:
    request = cluster.submit(PROMPTS[3])  # while none is there
    cluster.restart("encoder-0")
    assert cluster.result(request, FIRST_TIMEOUT_S) == right[key_of(PROMPTS[3])]
    settled(cluster)


@backends(OURS)
def test_health_tells_of_a_dead_decoder_and_of_its_return(cluster: Cluster, right: Right) -> None:
    cluster.kill("decoder-0")
    code, said = until(lambda: found if (found := cluster.health())[0] != 200 else None)
    assert code == 503
    assert "no decoder is alive" in said["error"]
    request = cluster.submit(PROMPTS[1])
    cluster.restart("decoder-0")
    assert cluster.health()[0] == 200
    assert cluster.result(request, FIRST_TIMEOUT_S) == right[key_of(PROMPTS[1])]
    settled(cluster)


def settled(cluster: Cluster) -> None:
    """Wait until no request is under way and no instance holds anything."""
    left: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
        "active": cluster.stats()["active"],
        "held": {
            name: one["in_use"] for name, one in cluster.stats()["reports"].items() if any(one["in_use"].values())
        },
    }
    until(lambda: not any(left().values()), otherwise=left)
