"""A stage's own embedding cache by its deploy YAML: what is encoded and what is not, in one process and the next."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_conditioning import COMMIT, MADE_BY, Double

from moonrelay.cache.files import FileDigests
from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import ClosedError, ConfigError
from moonrelay.events import Event
from moonrelay_vllm_omni.pipelines import conditioning, embeddings
from moonrelay_vllm_omni.pipelines.conditioning import identity_of, install_from
from moonrelay_vllm_omni.pipelines.embeddings import StageCache, settings_of
from moonrelay_vllm_omni.pipelines.wan import encode_each_alone


class WanDouble:
    """Encodes both prompts in one call, as Wan's pipeline does, and counts each."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.encoded: list[tuple[str, int]] = []

    def encode_prompt(
        self,
        prompt: Any,
        negative_prompt: Any = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        max_sequence_length: int = 512,
        device: Any = None,
        dtype: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        texts = [prompt] if isinstance(prompt, str) else prompt
        embeds = self._encode(texts, max_sequence_length)
        if not do_classifier_free_guidance:
            return embeds, None
        negative = negative_prompt or ""
        negative = [negative] * len(texts) if isinstance(negative, str) else negative
        return embeds, self._encode(negative, max_sequence_length)

    def _encode(self, texts: list[str], length: int) -> torch.Tensor:
        self.encoded += [(text, length) for text in texts]
        generators = [torch.Generator().manual_seed(sum(map(ord, text)) + length) for text in texts]
        return torch.stack([torch.randn(2, 3, generator=one) for one in generators])


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StageCache]]:
    """The caches that were made; they are closed afterwards."""
    made: list[StageCache] = []

    def make(*given: Any) -> StageCache:
        made.append(StageCache(*given))
        return made[-1]

    monkeypatch.setattr(conditioning, "StageCache", make)
    yield made
    for one in made:
        one.close()


def config(place: Path, cache: object = True, **more: Any) -> Any:
    """Return what the host has of an encode stage; its connector is ours, with a store of the test's own."""
    edge = {
        "type": "MoonrelayConnector",
        "role": "sender",
        "store": f"local://{place}/store",
        "engine": "shm",
        "engine_options": {"directory": str(place)},
    }
    given = {
        "stage_id": 0,
        "model": f"/cache/models--org--model/snapshots/{COMMIT}",
        "model_config": {"moonrelay": {"embedding_cache": cache}},
        "omni_kv_config": {"connector_config": edge},
    }
    return SimpleNamespace(**{**given, **more})


def started(od_config: Any, pipeline: Any = None) -> Any:
    pipeline = pipeline or Double()
    assert install_from(od_config, pipeline, MADE_BY)
    if isinstance(pipeline, WanDouble):
        encode_each_alone(pipeline)
    return pipeline


def test_what_was_encoded_is_not_encoded_again(place: Path, caches: list[StageCache]) -> None:
    pipeline = started(config(place))
    first, none = pipeline.encode_prompt("a")
    second, _ = pipeline.encode_prompt("a")
    negative, _ = pipeline.encode_prompt("blurry", prompt_name="negative_prompt")
    assert none is None
    assert pipeline.encoded == ["a", "blurry"]
    assert torch.equal(first, second)
    assert not torch.equal(first, negative)
    counted = caches[0].counters()
    assert (counted.encodes, counted.hits_memory, counted.hits_store) == (2, 1, 0)


def test_a_hit_is_the_callers_own(place: Path, caches: list[StageCache]) -> None:
    pipeline = started(config(place))
    for _ in range(3):
        found, _ = pipeline.encode_prompt("a")
        assert torch.equal(found, torch.ones(2, 3))
        found.mul_(7)
    assert pipeline.encoded == ["a"]


def test_a_shared_negative_prompt_is_encoded_once_with_other_positive_ones(
    place: Path, caches: list[StageCache]
) -> None:
    """Also where the host encodes both in one call: each is looked for by itself."""
    whole, pipeline = WanDouble(), started(config(place), WanDouble())
    for positive, negative in (("a", "blurry"), ("b", "blurry"), ("b", "ugly"), ("blurry", "a")):
        expected, found = (one.encode_prompt(positive, negative) for one in (whole, pipeline))
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert [text for text, _ in pipeline.encoded] == ["a", "blurry", "b", "ugly"]
    assert caches[0].counters().hits_memory == 4


@pytest.mark.parametrize(
    "call",
    [
        {"prompt": ["a"], "negative_prompt": None},
        {"prompt": ["a", "b"], "negative_prompt": "n"},
        {"prompt": ["a", "b"], "negative_prompt": ["n", "m"]},
        {"prompt": "a", "negative_prompt": "n", "do_classifier_free_guidance": False},
        {"prompt": "a", "negative_prompt": "", "max_sequence_length": 7, "dtype": torch.float32},
    ],
)
def test_both_prompts_apart_are_what_they_are_together(
    place: Path, caches: list[StageCache], call: dict[str, Any]
) -> None:
    whole, pipeline = WanDouble(), started(config(place), WanDouble())
    for _ in range(2):
        expected, found = whole.encode_prompt(**call), pipeline.encode_prompt(**call)
        assert torch.equal(expected[0], found[0])
        assert (expected[1] is None) == (found[1] is None)
        assert expected[1] is None or torch.equal(expected[1], found[1])
    assert len(pipeline.encoded) * 2 == len(whole.encoded)
    positional = pipeline.encode_prompt("a", "n", True, 1, 9)
    assert torch.equal(positional[1], whole.encode_prompt("a", "n", True, 1, 9)[1])


def test_another_process_and_the_next_start_find_it(place: Path, caches: list[StageCache]) -> None:
    started(config(place)).encode_prompt("a")
    caches[0].close()
    for _ in range(2):
        pipeline = started(config(place))
        found, _ = pipeline.encode_prompt("a")
        assert torch.equal(found, torch.ones(2, 3))
        assert pipeline.encoded == []
    assert [one.counters().hits_store for one in caches] == [0, 1, 1]


@pytest.mark.parametrize("cache", [{"shared": False}, {"store_bytes": 0}])
def test_not_shared_it_ends_with_the_process(place: Path, caches: list[StageCache], cache: object) -> None:
    for _ in range(2):
        pipeline = started(config(place, cache))
        pipeline.encode_prompt("a")
        pipeline.encode_prompt("a")
        assert pipeline.encoded == ["a"]
    assert not (place / "store").exists()


def test_a_store_of_its_own(place: Path, caches: list[StageCache]) -> None:
    for encoded in (["a"], []):
        pipeline = started(config(place, {"store": f"local://{place}/apart", "bytes": 1 << 20}))
        pipeline.encode_prompt("a")
        assert pipeline.encoded == encoded
    assert not (place / "store").exists()
    assert (place / "apart").exists()


def test_what_no_store_serves_costs_an_encoding(
    place: Path, caches: list[StageCache], caplog: pytest.LogCaptureFixture
) -> None:
    (place / "store").write_text("no folder")
    pipeline = started(config(place))
    for _ in range(2):
        pipeline.encode_prompt("a")
    assert pipeline.encoded == ["a"]
    assert caches[0].counters().trouble == 1
    assert "cache_trouble" in caplog.text


def test_what_encoding_raises_passes(place: Path, caches: list[StageCache]) -> None:
    pipeline = started(config(place))
    for _ in range(2):
        with pytest.raises(LookupError, match="no such word"):
            pipeline.encode_prompt("bad")


def test_without_a_complete_key_nobody_is_asked(place: Path, caches: list[StageCache]) -> None:
    pipeline = started(config(place))
    for _ in range(2):
        pipeline.encode_prompt("a", image=object())
    assert pipeline.encoded == ["a", "a"]
    assert caches[0].counters().misses == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"model": "org/model"}, "encoder_revision"),
        ({"lora_path": "x"}, "lora_path"),
        ({"quantization_config": "fp8"}, "quantization"),
        ({"num_gpus": 2}, "ranks"),
        ({"parallel_config": SimpleNamespace(world_size=4)}, "ranks"),
    ],
)
def test_where_something_is_not_known_there_is_none(
    place: Path, caches: list[StageCache], caplog: pytest.LogCaptureFixture, more: dict[str, Any], said: str
) -> None:
    pipeline = Double()
    assert not install_from(config(place, **more), pipeline, MADE_BY)
    assert vars(pipeline) == {"encoded": []}
    assert caches == []
    assert said in caplog.text
    assert "no embedding cache for Double" in caplog.text


@pytest.mark.parametrize("off", [False, None])
def test_off_is_off(place: Path, caches: list[StageCache], off: object) -> None:
    pipeline = Double()
    assert not install_from(config(place, off), pipeline, MADE_BY)
    assert vars(pipeline) == {"encoded": []}
    assert caches == []


def test_off_leaves_ones_own_hook(place: Path, caches: list[StageCache]) -> None:
    settings = {"embedding_cache": False, "condition_hook": "test_conditioning:Remembers"}
    pipeline = started(config(place, model_config={"moonrelay": settings}))
    pipeline.encode_prompt("a")
    pipeline.encode_prompt("a")
    assert pipeline.encoded == ["a"]
    assert caches == []


def test_events_say_whose_encoder_and_never_the_prompt(place: Path, caches: list[StageCache]) -> None:
    pipeline = started(config(place))
    events: list[Event] = []
    caches[0].connector.events.subscribe(events.append)
    for _ in range(2):
        pipeline.encode_prompt("a secret fox")
    assert [event.name for event in events] == ["cache_miss", "cache_stored", "cache_hit"]
    assert {event.stage for event in events} == {"vllm-omni-0"}
    assert {event.extra["encoder"] for event in events} == {f"org/model@{COMMIT}"}
    assert "secret" not in str(events)


# -- its relay --------------------------------------------------------------------------------------------------------


def test_its_store_is_the_connectors(place: Path) -> None:
    assert settings_of(config(place)).store.url == f"local://{place}/store"
    other = {"connector_config": {"type": "SharedMemoryConnector", "shm_threshold_bytes": 1}}
    for host in (other, {}, None):
        assert settings_of(config(place, omni_kv_config=host)).store.url is None


def test_a_wrong_setting_of_the_connector_is_refused(place: Path) -> None:
    host = {"connector_config": {"type": "MoonrelayConnector", "stor": "x"}}
    with pytest.raises(ConfigError) as refusal:
        install_from(config(place, omni_kv_config=host), Double(), MADE_BY)
    assert refusal.value.context["field"] == "stor"


# -- which weights ----------------------------------------------------------------------------------------------------


def model(folder: Path, **parts: str) -> Path:
    for name, content in {"text_encoder": "w", "tokenizer": "t", **parts}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "file").write_text(content)
    return folder


def loaded(commit: str | None = None) -> Any:
    return SimpleNamespace(text_encoder=SimpleNamespace(config=SimpleNamespace(_commit_hash=commit)))


def test_a_folders_files_say_which_weights_they_are(tmp_path: Path) -> None:
    folders = [
        model(tmp_path / "a"),
        model(tmp_path / "b", vae="x"),
        model(tmp_path / "c", text_encoder="v"),
        model(tmp_path / "d", tokenizer="s"),
        model(tmp_path / "e", text_encoder="t", tokenizer="w"),
    ]
    found = [identity_of(SimpleNamespace(model=str(folder)), {}, loaded()) for folder in folders]
    assert found[0] == found[1]
    assert len(set(found)) == len(found) - 1
    assert all(one is not None and one[0] == "SimpleNamespace" and len(one[1]) == 64 for one in found)
    named = identity_of(SimpleNamespace(model=str(folders[0])), {"encoder": "mine"}, loaded())
    assert named is not None
    assert named[0] == "mine"


def test_a_folder_without_a_part_says_nothing(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "tokenizer" / "file").unlink()
    assert identity_of(SimpleNamespace(model=str(tmp_path)), {}, loaded()) is None


def test_what_is_said_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDigests, "of", None)
    named = identity_of(SimpleNamespace(model=str(model(tmp_path))), {"encoder_revision": "v3"}, loaded())
    assert named == (str(tmp_path), "v3")


def test_the_commit_that_was_loaded_from_the_hub() -> None:
    hub = SimpleNamespace(model="org/model", revision="main")
    assert identity_of(hub, {}, loaded(COMMIT)) == ("org/model", COMMIT)
    for noted in (None, "main", 3):
        assert identity_of(hub, {}, loaded(noted)) is None
    assert identity_of(hub, {}, SimpleNamespace()) is None


# -- its end ----------------------------------------------------------------------------------------------------------


def test_it_ends_with_the_pipeline(place: Path, caches: list[StageCache]) -> None:
    pipeline = started(config(place))
    pipeline.encode_prompt("a")
    relay = caches[0].connector.store()
    del pipeline
    gc.collect()
    deadline = Deadline(20.0, SystemClock())
    while not caches[0]._closed or [one for one in threading.enumerate() if one.name == embeddings.CLOSER]:
        assert not deadline.expired
        threading.Event().wait(0.02)
    with pytest.raises(ClosedError):
        caches[0].connector.store()
    with pytest.raises(ClosedError):
        relay.get_bytes("k", Deadline(1.0, SystemClock()))


def test_closed_it_encodes(place: Path, caches: list[StageCache], caplog: pytest.LogCaptureFixture) -> None:
    pipeline = started(config(place))
    pipeline.encode_prompt("a")
    with caplog.at_level(logging.INFO, embeddings.__name__):
        caches[0].close()
        caches[0].close()
    assert caplog.text.count("embedding cache of vllm-omni-0 closed: 1 encoded, 0 from memory") == 1
    pipeline.encode_prompt("a")
    assert pipeline.encoded == ["a", "a"]


@pytest.mark.processes
def test_it_ends_with_the_process(place: Path) -> None:
    script = """
import logging, sys
from pathlib import Path
from test_embedding_cache import config, started
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
pipeline = started(config(Path(sys.argv[1])))
pipeline.encode_prompt("a")
pipeline.encode_prompt("a")
"""
    ran = subprocess.run(
        [sys.executable, "-c", script, str(place)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": ":".join([str(Path(__file__).parent), *filter(None, sys.path)])},
    )
    assert ran.returncode == 0, ran.stderr
    assert "embedding cache of vllm-omni-0 closed: 1 encoded, 1 from memory, 0 from the store, 0 troubles" in ran.stdout
    assert ran.stderr == ""
