"""What becomes of requests when something fails, one backend beside the other, in clusters of the host's processes.

Each test says what is right of any backend: a request ends in time, with its own video to the byte or with an error
that says so. Where the host's own backend does otherwise its case is expected to fail, and the reason says how.

The tests of a backend share a cluster, which an expected failure may leave worse than it was: they run from the
harmless to the ruinous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cpu_support.faults import VARIABLE
from sglang_backends import CLUSTERS, HANGS_AFTER_S, WITHIN_S, backends
from sglang_cluster import FIRST_TIMEOUT_S, LARGE, PROMPTS, Cluster, NoAnswer, RequestFailed, key_of

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]

#: The decoder has room for the two slots that the host allocates at the start, and for no other.
LAYOUT: dict[str, Any] = {"options": {"decoder": {"disagg_transfer_pool_size": 128 << 20}}}

#: The first request of a denoiser that was just started.
AFTER_START_S = 150.0

Right = Mapping[str, bytes]


def assert_own_video(cluster: Cluster, right: Right, prompt: str, *, within_s: float = WITHIN_S, **more: Any) -> None:
    assert cluster.ask(prompt, within_s=within_s, **more) == right[key_of(prompt, **more)], prompt


@backends(CLUSTERS)
def test_the_video_is_the_undivided_hosts(cluster: Cluster, right: Right) -> None:
    for prompt in PROMPTS:
        assert_own_video(cluster, right, prompt)


@backends(CLUSTERS, "leaves an exception while staging in the role's log, and the request waiting", NoAnswer)
def test_a_failure_while_staging_fails_its_request_alone(backend: str, cluster: Cluster, right: Right) -> None:
    cluster.restart("encoder-0", environment={VARIABLE: "staging:1"})
    request = cluster.submit(PROMPTS[0])
    with pytest.raises(RequestFailed, match="a fault that the test asked for"):
        # The encoder's first one: even where an answer never comes it must have had the time to fail.
        cluster.result(request, 2 * HANGS_AFTER_S[backend])
    assert_own_video(cluster, right, PROMPTS[1])


@backends(CLUSTERS)
def test_an_encoder_that_failed_once_serves_on(cluster: Cluster, right: Right) -> None:
    assert_own_video(cluster, right, PROMPTS[1], within_s=FIRST_TIMEOUT_S)


@backends(CLUSTERS, "gives a slot back with the size of what was in it: a larger payload has none left", NoAnswer)
def test_slots_keep_their_size(backend: str, cluster: Cluster, right: Right) -> None:
    for prompt in PROMPTS[:3]:
        assert_own_video(cluster, right, prompt)
    assert_own_video(cluster, right, "a cat", within_s=HANGS_AFTER_S[backend], **LARGE)


@backends(CLUSTERS, "takes a failed push for done: the request is completed with a video of whatever the slot held")
def test_a_failed_push_never_ends_in_another_video(cluster: Cluster, right: Right) -> None:
    cluster.kill("denoiser-0")
    request = cluster.submit(PROMPTS[2])
    cluster.restart("denoiser-0")
    assert cluster.result_or_failure(request, AFTER_START_S) in (None, right[key_of(PROMPTS[2])])


@backends(CLUSTERS, "writes into slots of the denoiser that was there before", (AssertionError, NoAnswer))
def test_after_a_denoisers_restart_each_request_has_its_own_video(backend: str, cluster: Cluster, right: Right) -> None:
    # It was restarted by the test before, with a request under way.
    for prompt in PROMPTS:
        assert_own_video(cluster, right, prompt, within_s=HANGS_AFTER_S[backend])


@backends(CLUSTERS, "has no role register with a new head, so that nobody knows of the slots", NoAnswer)
def test_a_head_that_was_restarted_serves(backend: str, cluster: Cluster, right: Right) -> None:
    cluster.restart("head")
    for prompt in PROMPTS[:2]:
        assert_own_video(cluster, right, prompt, within_s=HANGS_AFTER_S[backend])
