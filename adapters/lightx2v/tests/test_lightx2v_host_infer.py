"""``python -m lightx2v.infer`` for each role, with our connector: the undivided video, and processes that end."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightx2v_cluster import OneShot
from lightx2v_scenarios import run_once

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("engine", ["mooncake", "shm"])
def test_three_roles_make_the_undivided_video_and_exit(
    wan: Path, environment: dict[str, str], tmp_path: Path, engine: str
) -> None:
    undivided = run_once(OneShot(wan, tmp_path / "undivided", environment, roles=()))
    keys = {role: {"engine": engine} for role in ("encoder", "transformer", "decode")}
    seen = run_once(OneShot(wan, tmp_path / "roles", environment, connector="moonrelay", keys=keys))
    assert seen.video
    assert seen.video == undivided.video
    assert seen.exit_codes == {"encoder": 0, "transformer": 0, "decode": 0}
