"""The host's own servers with our connector: encoder, transformer and decoder, as one service for many requests.

What `test_lightx2v_stock_faults.py` shows of the host's own transfer is asked of ours here, with the same scenarios.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightx2v_scenarios as scenarios
import pytest
from lightx2v_cluster import Cluster, Outcome, wait_for
from lightx2v_right import Right
from lightx2v_scenarios import BLUE, LARGE, RED, UNSEEDED, Held, Request

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]

#: What all roles are told beside the example's JSON: a dead peer is missed soon.
KEYS: dict[str, dict[str, Any]] = {"all": {"peer_timeout_s": 5, "retry_s": 0.5, "staging_bytes": 1 << 28}}
#: As small as the model goes.
SMALLEST: Request = {"prompt": "a cat", "infer_steps": 1, "target_video_length": 1, "target_shape": [32, 32]}
#: Requests one after the other; what each role's process holds is compared with what it held after the first ones.
MANY, FIRST = 300, 30
AT_ONCE = 10
#: What a process may hold more, after that many requests: threads of its HTTP server, not of requests.
MORE_THREADS, MORE_DESCRIPTORS = 8, 12


@pytest.fixture(scope="module")
def cluster(wan: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("lightx2v-ours")
    with Cluster(wan, folder, environment, connector="moonrelay", keys=KEYS).start() as started:
        yield started


def assert_right(seen: scenarios.Outcomes, right: Right, asked: Request) -> None:
    assert {name: one.status for name, one in seen.items()} == dict.fromkeys(seen, "completed"), seen
    assert seen["decode"].video
    assert seen["decode"].digest == right(**asked).digest


# -- which request is which -------------------------------------------------------------------------------------------


def test_requests_in_a_row_have_the_undivided_hosts_videos(cluster: Cluster, right: Right) -> None:
    for asked in (RED, BLUE, RED):
        assert_right(scenarios.request(cluster, asked), right, asked)
    assert right(**RED).digest != right(**BLUE).digest


@pytest.mark.parametrize("id_", ["task_id", "data_bootstrap_room"])
def test_requests_with_ids_of_the_client_go_by_them(cluster: Cluster, right: Right, id_: str) -> None:
    for number, asked in enumerate((RED, BLUE)):
        given = {**asked, id_: f"client-{number}" if id_ == "task_id" else 700 + number}
        assert_right(scenarios.request(cluster, given), right, asked)


def test_requests_that_overtake_each_other_have_each_its_own_video(cluster: Cluster, right: Right) -> None:
    seen = scenarios.posts_in_another_order(cluster)
    assert_right(seen.first, right, RED)
    assert_right(seen.second, right, BLUE)


def test_a_larger_shape_than_the_json_says_is_made(cluster: Cluster, right: Right) -> None:
    seen = scenarios.one_after_the_other(cluster, LARGE, RED)
    assert_right(seen.first, right, LARGE)
    assert_right(seen.second, right, RED)


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_failed_request_fails_at_its_decoder_and_the_next_one_is_made(cluster: Cluster, right: Right) -> None:
    seen = scenarios.one_after_the_other(cluster, UNSEEDED, RED)
    assert {name: one.status for name, one in seen.first.items()} == {
        "decode": "failed",
        "transformer": "failed",
        "encoder": "completed",
    }
    assert "transformer failed" in str(seen.first["decode"].error)
    assert str(seen.first["transformer"].error) in str(seen.first["decode"].error)
    assert_right(seen.second, right, RED)


def test_after_a_failure_the_same_request_has_the_same_noise(cluster: Cluster, right: Right) -> None:
    seen = scenarios.failed_where_nobody_waits(cluster, UNSEEDED, RED)
    assert seen.first["transformer"].status == "failed"
    assert_right(seen.second, right, RED)


# -- what is given up -------------------------------------------------------------------------------------------------


def until(cluster: Cluster, name: str, task: str, status: str) -> Outcome:
    assert wait_for(lambda: cluster.status(name, task).status == status, 60.0), cluster.status(name, task)
    return cluster.status(name, task)


def test_a_request_given_up_where_it_waits_ends_there_and_frees_its_role(cluster: Cluster, right: Right) -> None:
    given_up = {**RED, "seed": 71}
    task = cluster.post("decode", **given_up)
    until(cluster, "decode", task, "processing")
    behind = cluster.post_all(**BLUE)
    cluster.delete("decode", task)
    assert_right(cluster.wait_all(behind), right, BLUE)
    seen = until(cluster, "decode", task, "failed")
    assert "was cancelled while it waited for the transformer outputs stage" in str(seen.error)


def test_a_request_given_up_at_the_transformer_ends_at_the_decoder_too(cluster: Cluster, right: Right) -> None:
    tasks = {name: cluster.post(name, **RED, task_id="given-up") for name in ("decode", "transformer")}
    for name, task in tasks.items():
        until(cluster, name, task, "processing")
    cluster.delete("transformer", tasks["transformer"])
    seen = cluster.wait_all(tasks, 20.0)
    assert {name: one.status for name, one in seen.items()} == dict.fromkeys(seen, "failed")
    assert "given-up" in str(seen["decode"].error)
    assert "cancelled" in str(seen["decode"].error)
    assert_right(scenarios.request(cluster, BLUE), right, BLUE)


# -- who dies ---------------------------------------------------------------------------------------------------------


def test_an_idle_encoders_restart_changes_nothing(cluster: Cluster, right: Right) -> None:
    assert_right(scenarios.encoder_restarted(cluster), right, RED)


def test_a_killed_transformers_request_fails_in_time_and_its_restart_heals_all(cluster: Cluster, right: Right) -> None:
    seen = scenarios.transformer_killed(cluster)
    assert (seen.lost["decode"].status, seen.lost["encoder"].status) == ("failed", "completed")
    assert "worked on this request and is silent for 5 s" in str(seen.lost["decode"].error)
    assert_right(seen.next, right, BLUE)
    assert_right(scenarios.request(cluster, RED), right, RED)


# -- many -------------------------------------------------------------------------------------------------------------


def held(cluster: Cluster) -> dict[str, Held]:
    return {name: Held(cluster.threads(name), cluster.descriptors(name)) for name in cluster.processes}


def run(cluster: Cluster, seeds: list[int]) -> dict[int, set[str | None]]:
    """Ask for that many small videos, some at once; return the digests by seed."""
    found: dict[int, set[str | None]] = {}
    for start in range(0, len(seeds), AT_ONCE):
        asked = [(seed, cluster.post_all(**SMALLEST, seed=seed)) for seed in seeds[start : start + AT_ONCE]]
        for seed, tasks in asked:
            seen = cluster.wait_all(tasks)
            assert {one.status for one in seen.values()} == {"completed"}, seen
            found.setdefault(seed, set()).add(seen["decode"].digest)
    return found


def test_three_hundred_requests_leave_no_threads_and_no_descriptors(cluster: Cluster, right: Right) -> None:
    seeds = [seed % 5 for seed in range(MANY)]
    run(cluster, seeds[:FIRST])
    before = held(cluster)
    found = run(cluster, seeds[FIRST:])
    after = held(cluster)
    assert found == {seed: {right(**SMALLEST, seed=seed).digest} for seed in range(5)}
    for name, then in before.items():
        assert after[name].threads <= then.threads + MORE_THREADS, (name, before, after)
        assert after[name].descriptors <= then.descriptors + MORE_DESCRIPTORS, (name, before, after)
