"""Every lane of ``moonrelay bench host sglang`` once, at 1 MiB, against the host itself. No time is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonrelay.cli.bench.host_rounds import measure
from moonrelay_sglang.bench import LANES, SglangBench

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.mooncake]

SIZE = 1 << 20


def test_every_lane_runs(tmp_path: Path) -> None:
    report = measure(SglangBench, SglangBench().lanes(), (SIZE,), 1, tmp_path)
    names = [one.lane.name for one in LANES]
    assert {one.lane: one.error for one in report.lanes} == dict.fromkeys(names, "")
    assert [row.lane for row in report.rows] == names
    assert all(one.as_released == "runs" for one in report.lanes)
