"""The host's own servers, two of them: without ``decoder_engine_rank`` the transformer decodes and sends nothing on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lightx2v_scenarios as scenarios
import pytest
from lightx2v_cluster import Cluster
from lightx2v_right import Right
from lightx2v_scenarios import BLUE, RED, UNSEEDED

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def cluster(wan: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("lightx2v-two")
    keys = {"all": {"engine": "shm", "staging_bytes": 1 << 28}}
    roles = ("encoder", "transformer")
    with Cluster(wan, folder, environment, connector="moonrelay", roles=roles, keys=keys).start() as started:
        yield started


def test_two_roles_make_the_undivided_hosts_videos(cluster: Cluster, right: Right) -> None:
    for asked in (RED, BLUE, RED):
        seen = scenarios.request(cluster, asked)
        assert {one.status for one in seen.values()} == {"completed"}, seen
        assert seen["transformer"].video == right(**asked).video


def test_after_a_failure_two_roles_make_the_next_video(cluster: Cluster, right: Right) -> None:
    seen = scenarios.one_after_the_other(cluster, UNSEEDED, RED)
    assert {name: one.status for name, one in seen.first.items()} == {"transformer": "failed", "encoder": "completed"}
    assert seen.second["transformer"].video == right(**RED).video
