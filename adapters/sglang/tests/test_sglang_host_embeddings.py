"""The cache of embeddings in the host's processes: a prompt is encoded once, also for the encoder's next start.

Counted is in the host: prompts given to its stage for encoding, and forwards of its text encoder. Videos are compared
with the undivided host's, to the byte.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cpu_support.counts import VARIABLE
from sglang_cluster import FIRST_TIMEOUT_S, PROMPTS, Cluster, key_of, until

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]

#: A request has a prompt and a negative one.
TEXTS = 2
SETTINGS: dict[str, Any] = {"engine": "shm", "encoder_revision": "test"}


class Counts:
    """What the encoder's process has done since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: Counter[str] = Counter()

    def new(self) -> dict[str, int]:
        now = Counter(self.path.read_text().split() if self.path.exists() else [])
        new, self._seen = now - self._seen, now
        return dict(new)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    return Counts(tmp_path_factory.mktemp("counts") / "encoder")


@pytest.fixture(scope="module")
def cached(
    wan: Path, right: Mapping[str, bytes], counts: Counts, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster-embeddings")
    settings = {**SETTINGS, "embedding_cache": {"bytes": 64 << 20, "store": f"local://{folder}/kept"}}
    environment = {
        "all": {"MOONRELAY_SGLANG": json.dumps(SETTINGS)},
        "encoder": {"MOONRELAY_SGLANG": json.dumps(settings), VARIABLE: str(counts.path)},
    }
    made = Cluster(wan, folder, backend="moonrelay", environment=environment).start()
    try:
        made.warm()
        yield made
    finally:
        made.end()


def counted(cached: Cluster, wanted: Mapping[str, int]) -> None:
    """Wait until the head has heard from the encoder's process what it did."""

    def seen() -> dict[str, int]:
        report = cached.stats()["reports"].get("encoder[0]", {"counters": {}})  # none of a new process yet
        return {name: report["counters"].get(name) for name in ("encoded", "remembered")}

    until(lambda: seen() == wanted, otherwise=seen)


def test_a_prompt_is_encoded_once_also_for_the_encoders_next_start(
    cached: Cluster, counts: Counts, right: Mapping[str, bytes]
) -> None:
    counts.new()
    for prompt in PROMPTS[:2]:
        assert cached.ask(prompt, within_s=FIRST_TIMEOUT_S) == right[key_of(prompt)]
        assert counts.new()["encode"] == TEXTS
    for prompt in PROMPTS[:2]:
        assert cached.ask(prompt, within_s=FIRST_TIMEOUT_S) == right[key_of(prompt)]
        assert counts.new() == {}
    counted(cached, {"encoded": 3, "remembered": 2})  # the first one of three was to warm it

    cached.restart("encoder-0")
    for prompt in PROMPTS[:2]:
        assert cached.ask(prompt, within_s=FIRST_TIMEOUT_S) == right[key_of(prompt)]
        assert counts.new() == {}, "neither a prompt was encoded nor a forward run"
    counted(cached, {"encoded": 0, "remembered": 2})
    assert cached.ask(PROMPTS[2], within_s=FIRST_TIMEOUT_S) == right[key_of(PROMPTS[2])]
    assert counts.new() == {"encode": TEXTS, "forward": TEXTS}


def test_where_the_weights_are_not_known_nothing_is_remembered(
    cached: Cluster, counts: Counts, right: Mapping[str, bytes]
) -> None:
    unknown = {"engine": "shm", "embedding_cache": True}
    cached.restart("encoder-0", environment={"MOONRELAY_SGLANG": json.dumps(unknown)})
    for _ in range(2):
        assert cached.ask(PROMPTS[0], within_s=FIRST_TIMEOUT_S) == right[key_of(PROMPTS[0])]
        assert counts.new()["encode"] == TEXTS
    assert "no embedding cache: which weights the text encoder has is not known" in cached.logs("encoder-0")
