"""``moonrelay cache`` as a process, on a store that other processes filled."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.keys import EmbeddingKey
from moonrelay.clock import Deadline, SystemClock
from moonrelay.relay.cluster import MooncakeCluster

pytestmark = pytest.mark.processes

STORES = ["local", pytest.param("mooncake", marks=pytest.mark.mooncake)]
SECRET = "a fox that nobody may know of"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake"), pool_bytes=64 << 20) as running:
        yield running


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "local":
        return f"local://{tmp_path}/store"
    found: str = request.getfixturevalue("cluster").url
    return found


def key(role: str) -> EmbeddingKey:
    params = {"dtype": "float32", "max_length": 8, "lora": None}
    return EmbeddingKey(encoder="t5@1", prompt=SECRET, role=role, params=params)


def run(*words: str, code: int = 0) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "moonrelay.cli.main", "cache", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    return ended.stdout if code == 0 else ended.stderr


def told(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*words, "--json"))
    return found


def test_it_shows_what_is_there_and_leaves_nothing(url: str) -> None:
    config = {"url": url, "namespace": "shown"}
    where = (f"--store={url}", "--namespace=shown")
    deadline = Deadline(60, SystemClock())
    with (
        DiffusionConnector("encode", "p2p", {"engine": "memory"}, config) as conn,
        EmbeddingCache(conn, 8 << 20) as made,
    ):
        assert told("stats", *where)["entries"] == 0
        for role in ("positive", "negative"):
            assert made.put(key(role), {"embeds": torch.ones(1000)})
        conn.store().put_if_absent("shown/others/1", b"x", deadline)

        stats = told("stats", *where)
        assert (stats["entries"], stats["generations"], stats["capacity_bytes"]) == (2, 1, 8 << 20)
        assert 8000 < stats["bytes"] < 12000
        rows = told("ls", *where)["entries"]
        assert {row["digest"] for row in rows} == {key("positive").digest, key("negative").digest}
        assert {row["label"]["role"] for row in rows} == {"positive", "negative"}
        assert {row["label"]["encoder"] for row in rows} == {"t5@1"}
        text = run("ls", *where)
        assert key("positive").digest[:16] in text
        assert SECRET not in text + json.dumps(rows)
        assert "2 entries" in run("stats", *where)
        assert told("stats", *where, "--name=others")["entries"] == 0

        assert told("clear", *where)["removed"] == 2
        assert conn.store().keys("shown/", deadline) == ["shown/others/1"]
        assert told("stats", *where)["entries"] == 0
        assert told("ls", *where)["entries"] == []
        assert "removed 0 entries" in run("clear", *where)
        conn.store().remove(["shown/others/1"], deadline)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--store=nowhere:///x",), 1, "nowhere"),
        (("--store=local://relative",), 2, "absolute"),
        (("--store=local:///tmp/moonrelay-none", "--name=a/b"), 2, "namespace"),
    ],
)
def test_what_is_wrong_is_one_line(words: tuple[str, ...], code: int, said: str) -> None:
    err = run("stats", *words, code=code)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err
