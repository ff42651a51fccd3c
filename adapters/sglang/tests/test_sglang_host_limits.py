"""Whose turn it is, and what becomes of a request whose time is over, with our backend; a head with limits of its own.

The last ones in their cluster: its head stays as it is started here.
"""

from __future__ import annotations

from typing import Any

import pytest
from sglang_backends import CLUSTERS, WITHIN_S, backends
from sglang_cluster import PROMPTS, Cluster, RequestFailed
from test_sglang_host_cluster import DENOISERS, settled

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]

LAYOUT: dict[str, Any] = {}
#: See `conftest.pytest_collection_modifyitems`.
LAST_IN_ITS_CLUSTER = True
OURS = {name: layout for name, layout in CLUSTERS.items() if name == "moonrelay"}
TIMEOUT_S = 20
BATCH = 24
#: Steps of theirs, so that they do not end while the other one's end is looked for.
LONG = {"num_inference_steps": 12}
#: How many requests two denoisers and a decoder may have begun when a later one overtakes nobody but those.
HELD = 6


def of_class(priority: str) -> dict[str, Any]:
    return {"diffusers_kwargs": {"moonrelay": {"priority": priority}}}


@pytest.fixture
def limited(cluster: Cluster) -> Cluster:
    """The cluster, with a head that heeds priorities and ends what takes too long."""
    if not cluster.limited:
        cluster.restart("head", options={"disagg_dispatch_policy": "priority", "disagg_timeout": TIMEOUT_S})
        cluster.limited = True
    return cluster


@backends(OURS)
def test_an_interactive_request_overtakes_batch_ones(limited: Cluster) -> None:
    limited.stop("encoder-0")  # so that all of them wait, however fast they come and are worked on
    try:
        batch = [limited.submit(f"{number} fish", number, **LONG, **of_class("batch")) for number in range(BATCH)]
        urgent = limited.submit("a cat", **of_class("interactive"))
    finally:
        limited.go_on("encoder-0")
    limited.result(urgent, WITHIN_S)
    behind = [request for request in batch if limited.get(f"/v1/videos/{request}")["status"] != "completed"]
    assert len(behind) > HELD
    for request in batch:
        limited.result_or_failure(request, WITHIN_S)
    settled(limited)


@backends(OURS)
def test_a_request_whose_time_is_over_leaves_nothing(limited: Cluster) -> None:
    for name in DENOISERS:
        limited.stop(name)
    try:
        request = limited.submit(PROMPTS[0])
        with pytest.raises(RequestFailed, match="deadline"):
            limited.result(request, TIMEOUT_S + WITHIN_S)
    finally:
        for name in DENOISERS:
            limited.go_on(name)
    settled(limited)
    limited.ask(PROMPTS[0], within_s=WITHIN_S)
