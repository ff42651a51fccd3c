"""A cache before a runner's text encoder, over the double: what is encoded once and what anew; nothing differs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightx2v_double as double
import pytest
import torch

from moonrelay.errors import ConfigError
from moonrelay_lightx2v import config as settings
from moonrelay_lightx2v import embeddings, mixin
from moonrelay_lightx2v.embeddings import Remembering
from moonrelay_lightx2v.mixin import dispatching, end_of
from moonrelay_lightx2v.ranks import RankedLink

OURS: dict[str, Any] = {
    "connector": "moonrelay",
    "engine": "memory",
    "staging_bytes": 1 << 20,
    "rendezvous_port": 0,
    "encoder_revision": "r1",
}
REQUEST: dict[str, Any] = {"prompt": "a red cat", "negative_prompt": "blue dog", "seed": 7, "target_shape": []}
RUNNERS = {"t2v": "wan.wan_runner.WanRunner", "t2i": "qwen_image.qwen_image_runner.QwenImageRunner"}
WAN = embeddings._KINDS["lightx2v.models.runners.wan.wan_runner.WanRunner"].encoder
QWEN = embeddings._KINDS["lightx2v.models.runners.qwen_image.qwen_image_runner.QwenImageRunner"].encoder


@pytest.fixture(autouse=True)
def the_host(tmp_path: Path) -> Iterator[None]:
    with double.installed(tmp_path / "host"):
        yield


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder, with files that the double does not read."""
    folder = tmp_path / "model"
    for name in ("t5.pth", "tokenizer/vocab.json", "text_encoder/model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def named_as(kind: type, name: str) -> None:
    kind.__module__, _, kind.__qualname__ = name.rpartition(".")


class Encoder:
    """An encoder's role whose runner and text encoder have the names of the host's."""

    def __init__(self, model: Path, *, task: str = "t2v", encoder: str | None = None, **given: Any) -> None:
        # Of its own name, and of no other test's.
        self.kind: Any = type("TextEncoder", (double.TextEncoder,), {})
        named_as(self.kind, encoder or (WAN if task.endswith("v") else QWEN))
        places = {"t5_original_ckpt": f"{model}/t5.pth", "t5_tokenizer_path": f"{model}/tokenizer"}
        host = {"model_path": str(model), **places, "prompt_template_encode": "<{}>", **given.pop("host", {})}
        disagg = {**OURS, "embedding_cache": True, **given}
        config = double.settings_of(
            "encoder", task=task, disagg={k: v for k, v in disagg.items() if v is not None}, **host
        )
        self.sent: list[dict[str, Any]] = []
        self.requests = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(double, "TextEncoder", self.kind)
            wan, qwen = double.runners(dispatching(double.native_mixin()))
            runner = wan if task.endswith("v") else qwen
            named_as(runner, f"lightx2v.models.runners.{RUNNERS['t2v' if task.endswith('v') else 't2i']}")
            self.runner = self.make(runner, config)
            self.runner.init_modules()
        self.worker = double.Worker(self.runner)
        end = end_of(self.runner)
        assert end is not None
        self.link: Any = end.link

    def make(self, runner: Any, config: Any) -> Any:
        return runner(config)

    def ask(self, **request: Any) -> dict[str, Any]:
        """Run one request; return what it hands over."""
        self.requests += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(double, "TextEncoder", self.kind)
            patch.setattr(self.link, "send", lambda data, **_: self.sent.append(data))
            answer = self.worker.process(f"t{self.requests}", **{**REQUEST, **request})
        assert answer["status"] == "success", answer
        found: dict[str, Any] = self.sent[-1]["text_encoder_output"]
        return found

    @property
    def asked(self) -> list[str]:
        """What was given to all encoders that were loaded."""
        return [text for one in self.runner.loaded for text in one.asked]

    def close(self) -> None:
        self.runner.release_disagg()


@pytest.fixture
def start(model: Path) -> Iterator[Any]:
    made: list[Encoder] = []

    def build(**given: Any) -> Encoder:
        made.append(Encoder(given.pop("model", model), **given))
        return made[-1]

    yield build
    for encoder in made:
        encoder.close()


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    assert one.keys() == other.keys()
    return all(
        first is other[name] if first is None else first.dtype == other[name].dtype and torch.equal(first, other[name])
        for name, first in one.items()
        if name != "image_info"
    )


@pytest.mark.parametrize("task", ["t2v", "i2v", "t2i"])
def test_each_text_is_encoded_once(start: Any, task: str) -> None:
    plain, encoder = start(task=task, embedding_cache=False), start(task=task)
    more = {"image_path": "x"} if task == "i2v" else {}
    requests = [{}, {}, {"prompt": "a big fox"}, {"prompt": "blue dog", "negative_prompt": "a red cat"}]
    for request in requests:
        assert same(encoder.ask(**request, **more), plain.ask(**request, **more))
    twice = ["a red cat", "blue dog"] * 2
    assert plain.asked == [*twice, "a big fox", "blue dog", "blue dog", "a red cat"]
    assert encoder.asked == ["a red cat", "blue dog", "a big fox"]


def test_an_edit_of_what_was_handed_over_is_nobody_elses(start: Any) -> None:
    encoder = start()
    right = encoder.ask()["context"].clone()
    for _ in range(2):
        given = encoder.ask()["context"]
        assert torch.equal(given, right)
        given.zero_()


@pytest.mark.parametrize("own", [True, False])
def test_another_start_finds_what_was_kept_in_the_store(start: Any, tmp_path: Path, own: bool) -> None:
    url = f"local://{tmp_path}/kept"
    given: dict[str, Any] = {"embedding_cache": {"store": url}} if own else {"store": url, "transfer_mode": "p2p"}
    first = start(**given)
    right = first.ask()
    first.close()
    second = start(**given)
    assert same(second.ask(), right)
    assert second.asked == []
    assert second.link.embeddings.counters().hits_store == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"host": {"text_len": 9}},
        {"host": {"t5_quantized": True, "t5_quant_scheme": "int8"}},
        {"host": {"cpu_offload": True}},
        {"encoder_revision": "r2"},
        {"encoder_revision": None},
    ],
)
def test_whatever_decides_the_bytes_is_in_the_key(start: Any, tmp_path: Path, changed: dict[str, Any]) -> None:
    store = {"store": f"local://{tmp_path}/kept"}
    start(**store).ask()
    other = start(**store, **changed)
    other.ask()
    assert other.asked == ["a red cat", "blue dog"]
    again = start(**store, **changed)
    again.ask()
    assert again.asked == []


def test_a_folders_encoder_is_known_by_its_files(start: Any, tmp_path: Path, model: Path) -> None:
    store = {"store": f"local://{tmp_path}/kept", "encoder_revision": None}
    start(**store).ask()
    moved = model.rename(tmp_path / "moved")
    same_files = start(**store, model=moved)
    same_files.ask()
    assert same_files.asked == []
    (moved / "t5.pth").write_text("other")
    other = start(**store, model=moved)
    other.ask()
    assert len(other.asked) == 2
    (moved / "tokenizer" / "vocab.json").write_text("other")
    other = start(**store, model=moved)
    other.ask()
    assert len(other.asked) == 2


def test_an_encoder_that_is_loaded_anew_each_time_is_not_loaded_for_what_is_kept(start: Any, model: Path) -> None:
    encoder = start(host={"lazy_load": True}, encoder_revision=None)
    right = encoder.ask()
    for _ in range(2):
        assert same(encoder.ask(), right)
    assert len(encoder.runner.loaded) == 1
    encoder.ask(prompt="a big fox")
    assert len(encoder.runner.loaded) == 2
    assert encoder.asked == ["a red cat", "blue dog", "a big fox"]
    (model / "t5.pth").write_text("other")
    encoder.ask()
    assert len(encoder.runner.loaded) == 3
    assert encoder.asked[3:] == ["a red cat", "blue dog"]


def test_images_are_not_looked_for(start: Any) -> None:
    encoder = start(task="i2i")
    for _ in range(2):
        encoder.ask(image_path="x,y")
    assert len(encoder.asked) == 4
    assert encoder.link.embeddings.counters().encodes == 0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"encoder": "lightx2v.models.input_encoders.lightllm.LightLLMServiceTextEncoder"}, "LightLLMService"),
        ({"host": {"dummy_model": True}}, "random"),
        ({"encoder_revision": None, "host": {"t5_tokenizer_path": "google/umt5-xxl"}}, "encoder_revision"),
        ({"host": {"t5_hook": object()}}, "no exact form"),
    ],
)
def test_without_a_complete_key_nothing_is_kept(
    start: Any, given: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        encoder = start(**given)
    assert not isinstance(encoder.runner.text_encoders[0], Remembering)
    for _ in range(2):
        encoder.ask()
    assert len(encoder.asked) == 4
    said = [record.message for record in caplog.records if "no embedding cache" in record.message]
    assert len(said) == 1
    assert why in said[0]


def test_a_runner_of_another_kind_is_left_alone(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Other(Encoder):
        def make(self, runner: Any, config: Any) -> Any:
            class OtherRunner(runner):  # type: ignore[misc]
                def load_text_encoder(self) -> Any:
                    (encoder,) = super().load_text_encoder()
                    encoder.changed = True
                    return [encoder]

            return OtherRunner(config)

    encoder = Other(model)
    for _ in range(2):
        encoder.ask()
    assert len(encoder.asked) == 4
    assert "OtherRunner" in caplog.text
    encoder.close()


def test_a_role_of_several_ranks_has_none(caplog: pytest.LogCaptureFixture) -> None:
    link = object.__new__(RankedLink)
    link.config = settings.parse(double.settings_of("encoder", disagg={**OURS, "embedding_cache": True}))
    assert mixin._texts_of(link) is None
    assert "several ranks" in caplog.text


def test_a_setting_that_changes_while_it_runs_is_in_the_key(start: Any) -> None:
    encoder = start(task="t2i")
    encoder.ask()
    encoder.ask(tokenizer_max_length=3)
    assert len(encoder.asked) == 4
    encoder.ask(tokenizer_max_length=3)
    assert len(encoder.asked) == 4


def test_the_rest_of_an_encoder_is_the_hosts(start: Any, model: Path) -> None:
    encoder = start()
    (seen,) = encoder.runner.text_encoders
    assert seen.checkpoint_path == f"{model}/t5.pth"
    seen.mark = 3
    assert encoder.runner.loaded[0].mark == 3
    with pytest.raises(AttributeError):
        seen.nothing  # noqa: B018
    assert len(seen.infer(["a", "b"])) == 2


def test_what_encoding_raises_passes_and_is_not_kept(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = start()

    def fails(*_: Any) -> Any:
        message = "no such word"
        raise LookupError(message)

    with monkeypatch.context() as patch:
        patch.setattr(encoder.kind, "infer", fails)
        with pytest.raises(AssertionError, match="no such word"):
            encoder.ask()
    encoder.ask()
    assert encoder.asked == ["a red cat", "blue dog"]


def test_only_an_encoder_has_one(model: Path) -> None:
    given = {**OURS, "embedding_cache": True}
    for role in ("transformer", "decode"):
        runner = double.runner_of(double.settings_of(role, disagg=given), dispatching(double.native_mixin()))
        end: Any = end_of(runner)
        assert end.texts is None
        assert end.link.embeddings is None
        runner.release_disagg()


@pytest.mark.parametrize("given", ["yes", 3, {"byte": 3}, {"shared": False, "store": "local:///x"}])
def test_a_wrong_setting_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="embedding_cache"):
        settings.parse(double.settings_of("encoder", disagg={**OURS, "embedding_cache": given}))


def test_the_setting_is_read() -> None:
    read = settings.parse(double.settings_of("encoder", disagg={**OURS, "embedding_cache": {"bytes": 7}}))
    assert read.embedding_cache is not None
    assert (read.embedding_cache.capacity_bytes, read.encoder_revision) == (7, "r1")
    assert settings.parse(double.settings_of("encoder", disagg=OURS)).embedding_cache is None
