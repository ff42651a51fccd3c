"""The cache of embeddings in the real host's encoder: a text is encoded once, also for the encoder's next start.

Counted is in the host: text encoders that are loaded, and calls of their ``infer``. What comes of a request is compared
with the undivided host's, to the byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightx2v_qwen_model
import pytest
from lightx2v_cluster import Cluster, OneShot
from lightx2v_cpu.install import COUNTS
from lightx2v_right import Right
from lightx2v_scenarios import BLUE, RED, request, run_once

pytestmark = [pytest.mark.lightx2v, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

ROLES = ("encoder", "transformer")


class Counts:
    """What an encoder's process has done since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: Counter[str] = Counter()

    def new(self) -> dict[str, int]:
        now = Counter(self.path.read_text().split() if self.path.exists() else [])
        new, self._seen = now - self._seen, now
        return dict(new)


@pytest.fixture
def counts(tmp_path: Path) -> Counts:
    return Counts(tmp_path / "counts")


@pytest.fixture
def cluster(wan: Path, environment: dict[str, str], tmp_path: Path, counts: Counts) -> Iterator[Cluster]:
    cache = {"embedding_cache": {"store": f"local://{tmp_path}/kept"}}
    with Cluster(
        wan,
        tmp_path / "roles",
        environment,
        connector="moonrelay",
        roles=ROLES,
        keys={"all": {"engine": "shm", "staging_bytes": 1 << 28}, "encoder": cache},
        variables={"encoder": {COUNTS: str(counts.path)}},
    ).start() as started:
        yield started


def made(cluster: Cluster, asked: Any) -> bytes | None:
    seen = request(cluster, asked)
    assert {one.status for one in seen.values()} == {"completed"}, seen
    return seen[cluster.last].video


def restart_with(cluster: Cluster, **config: Any) -> None:
    """Start the encoder anew with more in its JSON."""
    path = cluster.folder / "encoder.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    cluster.restart("encoder")


def test_a_text_is_encoded_once_also_for_the_encoders_next_start(
    cluster: Cluster, counts: Counts, right: Right
) -> None:
    assert counts.new() == {"load": 1}
    for asked, encoded in ((RED, {"infer": 2}), (RED, {}), (BLUE, {"infer": 1}), (BLUE, {}), (RED, {})):
        assert made(cluster, asked) == right(**asked).video
        assert counts.new() == encoded, "of the second prompt, the negative one was known"

    cluster.restart("encoder")
    assert counts.new() == {"load": 1}
    for asked in (RED, BLUE):
        assert made(cluster, asked) == right(**asked).video
        assert counts.new() == {}
    other = {**RED, "negative_prompt": "a small sea"}
    assert made(cluster, other) == right(**other).video
    assert counts.new() == {"infer": 1}


def test_without_a_complete_key_every_text_is_encoded(cluster: Cluster, counts: Counts) -> None:
    made(cluster, RED)
    restart_with(cluster, dummy_model=True)
    counts.new()
    for _ in range(2):
        made(cluster, RED)
        assert counts.new() == {"infer": 2}
    assert "no embedding cache: its weights are random" in cluster.logs("encoder")


def test_an_encoder_that_is_loaded_for_each_request_is_loaded_for_texts_that_are_not_kept(
    cluster: Cluster, counts: Counts, right: Right
) -> None:
    restart_with(cluster, unload_modules=True)
    counts.new()
    for asked, counted in ((RED, {"load": 1, "infer": 2}), (RED, {}), (BLUE, {"load": 1, "infer": 1}), (BLUE, {})):
        assert made(cluster, asked) == right(**asked).video
        assert counts.new() == counted
    cluster.restart("encoder")
    for asked, counted in ((RED, {"load": 1}), (BLUE, {})):  # the first one, to know which it is
        assert made(cluster, asked) == right(**asked).video
        assert counts.new() == counted


@pytest.mark.parametrize("model_cls", ["wan2.1", "qwen_image"])
def test_a_role_of_one_request_finds_what_the_one_before_kept(
    wan: Path, qwen_image: Path, environment: dict[str, str], tmp_path: Path, counts: Counts, model_cls: str
) -> None:
    qwen = model_cls == "qwen_image"
    model, asked = (qwen_image, {**RED, "target_shape": [64, 64]}) if qwen else (wan, RED)
    more: dict[str, Any] = (
        {"model_cls": model_cls, "task": "t2i", "config": {"all": lightx2v_qwen_model.CONFIG}} if qwen else {}
    )
    undivided = run_once(OneShot(model, tmp_path / "undivided", environment, roles=(), **more), asked)
    assert undivided.video
    keys = {"all": {"engine": "shm"}, "encoder": {"embedding_cache": {"store": f"local://{tmp_path}/kept"}}}
    for place, counted in enumerate(({"load": 1, "infer": 2}, {"load": 1})):
        roles = OneShot(
            model,
            tmp_path / f"roles-{place}",
            environment,
            connector="moonrelay",
            keys=keys,
            variables={"encoder": {COUNTS: str(counts.path)}},
            **more,
        )
        seen = run_once(roles, asked)
        assert seen.video == undivided.video
        assert seen.exit_codes == {"encoder": 0, "transformer": 0, "decode": 0}
        assert counts.new() == counted
