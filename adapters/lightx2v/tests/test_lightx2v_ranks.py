"""A role of several ranks: on the wire it is one, and each rank gets what came, or why nothing did."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightx2v_double as double
import pytest
from lightx2v_role import Role

from moonrelay_lightx2v.ranks import world_size

pytestmark = pytest.mark.processes
REQUEST: dict[str, Any] = {
    "prompt": "a red cat",
    "negative_prompt": "",
    "seed": 7,
    "image_path": "data:a,data:b",
    "target_shape": [],
}


class Deployment:
    """An encoder, and a transformer of two ranks."""

    def __init__(self, folder: Path, task: str, **section: Any) -> None:
        host = double.write_tree(folder / "host")
        self.encoder = Role("encoder", host, task=task)
        self.ranks: list[Role] = []
        address = self.encoder.ready().address
        assert address is not None
        where = f"127.0.0.1:{address[1]}"
        for rank in range(2):
            ranks = (rank, 2, str(folder / "ranks"))
            self.ranks.append(Role("transformer", host, task=task, ranks=ranks, bootstrap_addr=where, **section))
        for role in self.ranks:
            role.ready()

    def post(self, task_id: str, **request: Any) -> list[dict[str, Any]]:
        for role in self.ranks:
            role.tell("post", task_id=task_id, request={**REQUEST, **request})
        return [role.answer() for role in self.ranks]

    def close(self) -> None:
        for role in [self.encoder, *self.ranks]:
            role.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    made: list[Deployment] = []

    def build(task: str, **section: Any) -> Deployment:
        made.append(Deployment(tmp_path, task, **section))
        return made[-1]

    yield build
    for deployment in made:
        deployment.close()


def right(task: str, **request: Any) -> str:
    runner = double.runner_of(double.settings_of(None, task=task), double.native_mixin())
    (made,) = double.Worker(runner).process(**{**REQUEST, **request})["pipeline_return"].values()
    return hashlib.sha256(made.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("task", ["i2v", "i2i"])
def test_every_rank_gets_what_came(start: Any, task: str) -> None:
    deployment = start(task)
    for seed in (7, 8):
        sent = deployment.encoder.post(f"t{seed}", **{**REQUEST, "seed": seed})
        assert sent["status"] == "success", sent
        assert [answer["digest"] for answer in deployment.post(f"t{seed}", seed=seed)] == [right(task, seed=seed)] * 2
    assert not any(deployment.encoder.do("in_use", within_s=10).values())


def test_every_rank_hears_why_nothing_came(start: Any) -> None:
    deployment = start("i2v")
    deployment.encoder.do("fail_at", part="text_encoder")
    assert deployment.encoder.post("bad", **REQUEST)["status"] == "failed"
    for answer in deployment.post("bad"):
        assert (answer["status"], answer["error_type"]) == ("failed", "Aborted")
        assert "encoder failed: planted failure" in answer["error"]
    deployment.encoder.do("fail_at", part="")
    assert deployment.encoder.post("good", **REQUEST)["status"] == "success"
    assert [answer["digest"] for answer in deployment.post("good")] == [right("i2v")] * 2


def test_ranks_are_released_together(start: Any) -> None:
    deployment = start("i2v")
    for role in deployment.ranks:
        role.tell("release")
    for role in deployment.ranks:
        role.answer()
    assert [answer["error_type"] for answer in deployment.post("t")] == ["ClosedError"] * 2
    for role in deployment.ranks:
        role.do("end")
    assert [role.ended() for role in deployment.ranks] == [0, 0]


def test_ranks_end_together(start: Any) -> None:
    deployment = start("i2v")
    assert deployment.encoder.post("t", **REQUEST)["status"] == "success"
    assert [answer["status"] for answer in deployment.post("t")] == ["success"] * 2
    for role in [deployment.encoder, *deployment.ranks]:
        role.tell("end")
    assert [role.ended() for role in deployment.ranks] == [0, 0]


def test_a_start_that_fails_fails_at_every_rank(tmp_path: Path, start: Any) -> None:
    host = double.write_tree(tmp_path / "host")
    busy = Role("encoder", host).ready()
    assert busy.address is not None
    ranks = [
        Role("encoder", host, ranks=(rank, 2, str(tmp_path / "two")), rendezvous_port=busy.address[1])
        for rank in range(2)
    ]
    try:
        assert [role.ended(60) for role in ranks] == [1, 1]
    finally:
        for role in [busy, *ranks]:
            role.close()


def test_one_rank_where_torch_was_not_asked_for_more() -> None:
    assert "torch" in sys.modules
    assert world_size() == 1
