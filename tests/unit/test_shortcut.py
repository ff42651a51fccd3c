"""Past the encoder: who is asked before a submit, what a task says of its embeddings, and what is read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from moonrelay import DiffusionConnector
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.cache.keys import EmbeddingKey
from moonrelay.errors import InputLost, WireError
from moonrelay.orchestrator import shortcut
from moonrelay.queueing import StageQueue, StageTask

Make = Callable[..., EmbeddingCache]


def key(prompt: str, role: str = "positive") -> EmbeddingKey:
    params = {"dtype": "float32", "max_length": 8, "lora": None}
    return EmbeddingKey(encoder="t5@1", prompt=prompt, role=role, params=params)


KEYS = {"positive": key("a fox"), "negative": key("blurred", "negative")}
FIRST = StageTask(stage="encode", request_id="r1", payload={"request": {"prompt": "a fox"}})
AHEAD = StageTask(stage="denoise", payload={**shortcut.name_kept(KEYS)})


@pytest.fixture
def cache() -> Iterator[Make]:
    made: list[DiffusionConnector | EmbeddingCache] = []

    def make(**settings: object) -> EmbeddingCache:
        conn = DiffusionConnector("client", "p2p", {"engine": "memory"}, {"url": "memory://shortcut"})
        made.append(conn)
        made.append(EmbeddingCache(conn, 1 << 20, **settings))  # type: ignore[arg-type]
        return made[-1]  # type: ignore[return-value]

    yield make
    for one in reversed(made):
        if isinstance(one, EmbeddingCache):
            one.clear()
        one.close()


@pytest.fixture
def queue() -> Iterator[StageQueue]:
    with StageQueue.connect("memory://") as made:
        yield made


def stage(queue: StageQueue) -> str:
    return queue.requests()[0].stage


def test_a_request_skips_encode_only_when_everything_is_there(cache: Make, queue: StageQueue) -> None:
    worker, client = cache(), cache()
    assert not client.holds(KEYS.values())
    worker.put(KEYS["positive"], {"embeds": torch.ones(3)})
    assert not shortcut.submit(queue, FIRST, ahead=AHEAD, cache=client)
    assert stage(queue) == "encode"
    queue.cancel("r1")
    queue.forget("r1")
    worker.put(KEYS["negative"], {"embeds": torch.zeros(3)})
    before = client.counters()
    assert shortcut.submit(queue, FIRST, ahead=AHEAD, cache=client)
    assert stage(queue) == "denoise"
    assert client.counters() == before  # a question is no hit
    assert not shortcut.submit(queue, FIRST, ahead=AHEAD, cache=client, if_absent=True)  # it is there already


@pytest.mark.parametrize("without", ["cache", "task", "names", "store"])
def test_without_one_of_the_parts_it_goes_to_encode(cache: Make, queue: StageQueue, without: str) -> None:
    holder = cache(shared=without != "store")
    for one in KEYS.values():
        holder.put(one, {"embeds": torch.ones(3)})
    ahead = {"task": None, "names": StageTask(stage="denoise", payload={})}.get(without, AHEAD)
    assert not shortcut.submit(queue, FIRST, ahead=ahead, cache=None if without == "cache" else holder)
    assert stage(queue) == "encode"


def test_what_is_named_is_read_bit_for_bit(cache: Make) -> None:
    worker, reader = cache(), cache()
    trees = {role: {"embeds": torch.randn(4, dtype=torch.float64), "mask": None} for role in KEYS}
    for role, one in KEYS.items():
        worker.put(one, trees[role])
    found = shortcut.read_kept(AHEAD.payload, reader)
    assert list(found) == list(KEYS)
    for role, tree in found.items():
        assert isinstance(tree, dict)
        assert tree["mask"] is None
        assert torch.equal(tree["embeds"], trees[role]["embeds"])
    assert reader.counters().hits_store == 2


def test_what_is_gone_is_said_and_not_guessed(cache: Make) -> None:
    reader = cache()
    reader.put(KEYS["positive"], {"embeds": torch.ones(3)})
    with pytest.raises(InputLost, match="negative") as raised:
        shortcut.read_kept(AHEAD.payload, reader, request_id="r1")
    assert raised.value.context["request_id"] == "r1"
    with pytest.raises(InputLost, match="no cache"):
        shortcut.read_kept(AHEAD.payload, None)


def test_a_task_names_no_prompt() -> None:
    assert "fox" not in repr(shortcut.name_kept(KEYS))
    assert [one.digest for one in shortcut.kept_in(AHEAD.payload).values()] == [one.digest for one in KEYS.values()]
    assert shortcut.kept_in({"request": {}}) == {}
    assert shortcut.kept_in(None) == {}


@pytest.mark.parametrize("named", ["x", {"positive": "x"}, {"positive": {"digest": 3, "label": {}}}, {"positive": {}}])
def test_a_malformed_task_is_refused(named: object) -> None:
    with pytest.raises(WireError, match="name_kept"):
        shortcut.kept_in({shortcut.KEPT: named})
