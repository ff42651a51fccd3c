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
    batch = [limited.submit(f"{number} fish", number, **of_class("batch")) for number in range(BATCH)]
    limited.ask("a cat", within_s=WITHIN_S, **of_class("interactive"))
    behind = [request for request in batch if limited.get(f"/v1/videos/{request}")["status"] != "completed"]
    assert len(behind) > BATCH // 2
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
