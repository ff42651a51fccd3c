"""The embedding cache between processes: one encodes, whoever dies or sticks; in the local relay and Mooncake's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonrelay import DiffusionConnector, Event
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.entry import pack
from moonrelay.cache.keys import EmbeddingKey
from moonrelay.clock import Deadline, SystemClock
from moonrelay.relay.cluster import MooncakeCluster
from support.trees import TREES, canon

pytestmark = pytest.mark.processes

STORES = ["local", pytest.param("mooncake", marks=pytest.mark.mooncake)]
Url = Callable[[str], str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    with MooncakeCluster(tmp_path_factory.mktemp("mooncake"), pool_bytes=64 << 20) as running:
        yield running


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Return a store's configuration by scheme; what this test left in a shared one is removed."""
    configs: list[dict[str, Any]] = []

    def config(scheme: str) -> dict[str, Any]:
        url = f"local://{tmp_path / 'store'}" if scheme == "local" else request.getfixturevalue("cluster").url
        configs.append({"url": url, "namespace": f"n{os.getpid()}-{time.monotonic_ns()}"})
        return configs[-1]

    yield config
    for one in configs:
        with DiffusionConnector("sweep", store_config=one) as conn:
            conn.store().remove(conn.store().keys(f"{one['namespace']}/", soon()), soon())


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline(seconds, SystemClock())


class Crowd:
    """Processes that ask for one key at once."""

    def __init__(self, folder: Path, store: dict[str, Any], count: int, **settings: Any) -> None:
        self.begun_file = folder / "begun"
        self.begun_file.touch()
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
        told = {
            "store": store, "count": count, "begun": str(self.begun_file), "encode_s": 0.3, "first_s": 0.3,
            "wait_s": 60.0, "dead_after_s": 20.0, **settings,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.cache_peer", json.dumps(told)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            text=True,
        )

    def begun(self) -> list[int]:
        """Return the processes that began to encode, in order."""
        return [int(line) for line in self.begun_file.read_text().splitlines()]

    def first(self) -> int:
        """Return the process that encodes, once one does."""
        deadline = soon(90)
        while not self.begun():
            assert not deadline.expired, "nobody encodes"
            assert self._process.poll() is None, self._process.communicate()
            threading.Event().wait(0.02)
        return self.begun()[0]

    def results(self) -> list[dict[str, Any]]:
        out, _ = self._process.communicate(timeout=120)
        results = [json.loads(line) for line in out.splitlines()]
        assert [one for one in results if "error" in one] == []
        return results


def summed(results: list[dict[str, Any]], name: str) -> int:
    return sum(one["counters"][name] for one in results)


@pytest.mark.parametrize("scheme", STORES)
def test_of_32_processes_one_encodes(tmp_path: Path, store: Callable[[str], dict[str, Any]], scheme: str) -> None:
    crowd = Crowd(tmp_path, store(scheme), 32)
    results = crowd.results()
    assert len(results) == 32
    assert len(crowd.begun()) == 1
    assert len({one["digest"] for one in results}) == 1
    assert all(one["again"] for one in results)
    assert summed(results, "encodes") == summed(results, "misses") == 1
    assert summed(results, "hits_store") == 31
    assert summed(results, "hits_memory") == 32
    assert summed(results, "takeovers") == summed(results, "trouble") == summed(results, "evicted") == 0
    (encoder,) = [one for one in results if one["counters"]["encodes"]]
    assert encoder["pid"] == crowd.begun()[0]
    nbytes = encoder["counters"]["bytes_store_written"]
    assert nbytes > 512 * 64 * 2
    assert summed(results, "bytes_store_written") == nbytes
    assert summed(results, "bytes_store_read") == 31 * nbytes
    assert {one["counters"]["bytes_memory"] for one in results} == {nbytes}


@pytest.mark.parametrize("scheme", STORES)
def test_the_encoder_is_killed_and_the_next_takes_over(
    tmp_path: Path, store: Callable[[str], dict[str, Any]], scheme: str
) -> None:
    crowd = Crowd(tmp_path, store(scheme), 8, first_s=600.0, dead_after_s=3.0)
    killed = crowd.first()
    os.kill(killed, signal.SIGKILL)
    results = crowd.results()
    assert len(results) == 7
    assert killed not in {one["pid"] for one in results}
    assert len(crowd.begun()) == 2
    assert len({one["digest"] for one in results}) == 1
    assert summed(results, "encodes") == 1
    assert summed(results, "takeovers") == 1
    assert summed(results, "waits") == 7
    assert summed(results, "hits_store") == 6
    assert max(one["seconds"] for one in results) < 40


def test_an_encoder_that_is_stopped_is_overtaken_and_harms_nothing_later(
    tmp_path: Path, store: Callable[[str], dict[str, Any]]
) -> None:
    config = store("local")
    crowd = Crowd(tmp_path, config, 4, first_s=3.0, dead_after_s=3.0)
    stuck = crowd.first()
    os.kill(stuck, signal.SIGSTOP)
    try:
        deadline = soon(60)
        while len(crowd.begun()) < 2:
            assert not deadline.expired
            threading.Event().wait(0.05)
        with DiffusionConnector("encode", store_config=config) as conn, EmbeddingCache(conn, wait_s=30.0) as cache:
            kept = cache.get_or_encode(peer_key(), lambda: pytest.fail("encoded"))
    finally:
        os.kill(stuck, signal.SIGCONT)
    results = crowd.results()
    assert len(results) == 4
    assert len(crowd.begun()) == 2
    assert summed(results, "takeovers") == 1
    assert len({one["digest"] for one in results if one["pid"] != stuck}) == 1
    with DiffusionConnector("encode", store_config=config) as conn, EmbeddingCache(conn) as cache:
        assert canon(cache.get(peer_key())) == canon(kept)


def test_an_encoder_that_is_stuck_stops_others_only_until_their_deadline(
    tmp_path: Path, store: Callable[[str], dict[str, Any]]
) -> None:
    crowd = Crowd(tmp_path, store("local"), 4, first_s=3.0, encode_s=0.1, wait_s=2.0, dead_after_s=100.0)
    stuck = crowd.first()
    os.kill(stuck, signal.SIGSTOP)
    try:
        deadline = soon(60)
        while len(crowd.begun()) < 4:
            assert not deadline.expired
            threading.Event().wait(0.05)
    finally:
        os.kill(stuck, signal.SIGCONT)
    results = crowd.results()
    others = [one for one in results if one["pid"] != stuck]
    assert len(others) == 3
    assert all(1.9 < one["seconds"] < 20 for one in others)
    assert summed(results, "takeovers") == 0
    assert summed(others, "waits") == 3


def peer_key() -> EmbeddingKey:
    return EmbeddingKey(
        encoder="umt5@1", prompt="a fox", role="negative", params={"dtype": "bf16", "max_length": 512, "lora": None}
    )


@pytest.mark.mooncake
def test_hits_from_mooncake_are_bit_exact_and_clear_leaves_nothing(store: Callable[[str], dict[str, Any]]) -> None:
    config = store("mooncake")
    events: list[Event] = []
    calls: list[str] = []
    with (
        DiffusionConnector("encode", store_config=config, observers=[events.append]) as one,
        DiffusionConnector("encode", store_config=config) as other,
        EmbeddingCache(one, 8 << 20) as first,
        EmbeddingCache(other, 8 << 20) as second,
    ):
        for cache in (first, second, second):
            for name, tree in TREES.items():

                def encode(name: str = name, tree: object = tree) -> object:
                    calls.append(name)
                    return tree

                assert canon(cache.get_or_encode(key_of(name), encode)) == canon(tree)
        assert calls == list(TREES)
        assert second.counters().hits_store == second.counters().hits_memory == len(TREES)
        total = sum(pack(key_of(name).digest, tree).nbytes for name, tree in TREES.items())
        assert second.counters().bytes_store_read == first.counters().bytes_store_written == total
        assert {event.name for event in events} == {"cache_miss", "cache_stored"}
        first.clear()
        assert one.store().keys(f"{config['namespace']}/", soon()) == []


def key_of(name: str) -> EmbeddingKey:
    return EmbeddingKey(
        encoder="umt5@1", prompt=name, role="positive", params={"dtype": "bf16", "max_length": 512, "lora": None}
    )
