"""What the host's own transfer does when something goes wrong, in its own servers.

Each test asserts what is known of it, which is not what is right: should a version of the host mend one, that test
fails, and goes together with its text in ``docs/upstream/lightx2v``. The same scenarios with our connector are in
``test_lightx2v_host_servers.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightx2v_scenarios as scenarios
import pytest
from lightx2v_cluster import Cluster
from lightx2v_right import Right
from lightx2v_scenarios import BLUE, LARGE, RED, UNSEEDED

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

#: A request of a warm server takes a quarter of a second; after that long it will not end.
HANGS_AFTER_S = 10.0


class Stock:
    """One cluster for all tests, which has to be started anew where a test has left it in ruins."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._works = False

    def working(self) -> Cluster:
        if not self._works:
            self._cluster.afresh()
            self._works = True
        return self._cluster

    def ruin(self) -> None:
        self._works = False


@pytest.fixture(scope="module")
def shared(wan: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    with Cluster(wan, tmp_path_factory.mktemp("lightx2v-stock"), environment) as cluster:
        yield Stock(cluster)


@pytest.fixture
def stock(shared: Stock) -> Cluster:
    """A cluster that works."""
    return shared.working()


@pytest.fixture
def doomed(shared: Stock) -> Iterator[Cluster]:
    """A cluster that works and that the test leaves in ruins."""
    yield shared.working()
    shared.ruin()


def test_a_request_has_the_undivided_hosts_video(stock: Cluster, right: Right) -> None:
    for asked in (RED, BLUE, RED):
        seen = scenarios.request(stock, asked)
        assert {one.status for one in seen.values()} == {"completed"}
        assert seen["decode"].digest == right(**asked).digest


def test_requests_that_overtake_each_other_are_completed_with_videos_of_neither(stock: Cluster, right: Right) -> None:
    seen = scenarios.posts_in_another_order(stock)
    rights = {right(**asked).digest for asked in (RED, BLUE)}
    for one in (seen.first, seen.second):
        assert {outcome.status for outcome in one.values()} == {"completed"}
        assert one["decode"].video
        assert one["decode"].digest not in rights


def test_after_a_failure_in_the_transformer_the_next_request_has_other_noise(doomed: Cluster, right: Right) -> None:
    seen = scenarios.failed_where_nobody_waits(doomed)
    assert seen.first["transformer"].status == "failed"
    assert "buffer too small" in str(seen.first["transformer"].error)
    assert {one.status for one in seen.second.values()} == {"completed"}
    assert seen.second["decode"].video
    assert seen.second["decode"].digest != right(**RED).digest


def test_a_larger_shape_fails_and_its_decoder_takes_the_next_requests_video(doomed: Cluster, right: Right) -> None:
    assert right(**LARGE).status == "completed"
    seen = scenarios.one_after_the_other(doomed, LARGE, RED, within_s=HANGS_AFTER_S)
    assert seen.first["transformer"].status == "failed"
    assert seen.first["decode"].status == "completed"
    assert seen.first["decode"].digest is not None
    assert seen.second["decode"].status == "processing"


def test_a_failed_request_is_completed_with_the_next_ones_video(doomed: Cluster, right: Right) -> None:
    assert right(**UNSEEDED).status == "failed"
    seen = scenarios.one_after_the_other(doomed, UNSEEDED, RED, within_s=HANGS_AFTER_S)
    assert seen.first["transformer"].status == "failed"
    assert (seen.first["decode"].status, seen.first["decode"].digest) == ("completed", right(**RED).digest)
    assert {role: one.status for role, one in seen.second.items()} == {
        "decode": "processing",
        "transformer": "completed",
        "encoder": "completed",
    }


def test_an_idle_encoders_restart_ends_the_service(doomed: Cluster) -> None:
    seen = scenarios.encoder_restarted(doomed, within_s=HANGS_AFTER_S)
    assert {one.status for one in seen.values()} == {"processing"}


def test_a_killed_transformer_leaves_everybody_waiting_and_its_restart_heals_nothing(doomed: Cluster) -> None:
    seen = scenarios.transformer_killed(doomed, within_s=HANGS_AFTER_S)
    assert {one.status for one in seen.lost.values()} == {"processing"}
    assert {role: one.status for role, one in seen.next.items()} == {
        "decode": "pending",
        "transformer": "processing",
        "encoder": "pending",
    }


def test_a_decoder_whose_sender_has_nothing_waits_for_ever(doomed: Cluster) -> None:
    seen = scenarios.nobody_sends(doomed, within_s=HANGS_AFTER_S)
    assert seen["decode"].status == "processing"
