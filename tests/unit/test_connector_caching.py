"""An embedding cache by a host's settings: what they say, and which relay it then has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay.cache.keys import EmbeddingKey
from moonrelay.connector import DiffusionConnector
from moonrelay.connector.caching import CacheChoice, ChosenCache
from moonrelay.errors import ConfigError
from moonrelay.events import Event

KEY = EmbeddingKey(
    encoder="t5@1", prompt="a fox", role="text", params={"dtype": "bfloat16", "max_length": 8, "lora": None}
)


def test_what_the_setting_says() -> None:
    assert CacheChoice.parse(None) is CacheChoice.parse(False) is None
    assert CacheChoice.parse(True) == CacheChoice.parse({}) == CacheChoice()
    given = {"bytes": 5, "store": "local:///x", "store_bytes": 6, "shared": True}
    assert CacheChoice.parse(given) == CacheChoice(capacity_bytes=5, store="local:///x", store_bytes=6, shared=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("yes", "embedding_cache='yes'"),
        (1, "embedding_cache=1"),
        ({"byte": 1}, "'bytes'"),
        ({"bytes": True}, "bytes=True"),
        ({"bytes": 0}, "bytes=0"),
        ({"store_bytes": -1}, "store_bytes=-1"),
        ({"shared": 1}, "shared=1"),
        ({"shared": False, "store": "local:///x"}, "leave one"),
    ],
)
def test_what_is_wrong_is_named(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        CacheChoice.parse(given)


def run(choice: CacheChoice, **connector: Any) -> tuple[int, list[str | None]]:
    """Ask a cache of a process of its own once; return how often it encoded, and where hits came from."""
    events: list[Event] = []
    with DiffusionConnector(role="encoder", observers=[events.append], **connector) as conn:
        made = ChosenCache(choice, conn)
        made.cache.get_or_encode(KEY, lambda: torch.ones(2))
        counted = made.cache.counters()
        made.close()
        made.close()
    return counted.encodes, [event.path for event in events if event.name == "cache_hit"]


@pytest.mark.parametrize("own", [True, False])
def test_a_store_that_was_named_outlives_the_process(tmp_path: Path, own: bool) -> None:
    url = f"local://{tmp_path}/store"
    choice = CacheChoice(store=url) if own else CacheChoice()
    connector: dict[str, Any] = {"transfer_mode": "p2p", **({} if own else {"store_config": {"url": url}})}
    assert run(choice, **connector) == (1, [])
    assert run(choice, **connector) == (0, ["store"])


def test_without_a_store_that_somebody_named_it_stays_in_the_process(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(CacheChoice(), transfer_mode="p2p") == (1, [])
    url = f"local://{tmp_path}/store"
    for _ in range(2):
        assert run(CacheChoice(shared=False), store_config={"url": url}) == (1, [])
