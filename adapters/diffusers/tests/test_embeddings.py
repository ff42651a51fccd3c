"""The embedding cache in this host: the encoder does not run for what is kept, and nothing comes out otherwise."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonrelay import DiffusionConnector
from moonrelay.cache.embeddings import EmbeddingCache
from moonrelay.errors import ConfigError, InputLost
from moonrelay.orchestrator import StageLoop, shortcut
from moonrelay.queueing import StageQueue, StageTask
from moonrelay_diffusers import load_stage
from moonrelay_diffusers.embeddings import EncodeShortcut
from moonrelay_diffusers.families.base import Text
from moonrelay_diffusers.programs import DecodeProgram, DenoiseProgram, EncodeProgram

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("same_bits")]

KINDS = ("wan2.1", "qwen_image")
LATER = "A lighthouse in the fog"
TEXT = Text(role="positive", text="A red fox", max_length=64)


class House:
    """All three stages of a model round a queue, worked by hand; every worker has a cache of its own on one store."""

    def __init__(self, folder: str, output: Path, *, caching: bool) -> None:
        self.queue = StageQueue.connect("memory://", config={"retry_delay_s": 0.0})
        self.conns = {
            name: DiffusionConnector(
                name, "p2p", {"engine": "memory", "pool_bytes": 32 << 20}, {"url": f"local://{output}/store"}
            )
            for name in ("encode", "denoise", "decode", "client")
        }
        self.encoder: Any = load_stage(folder, "encode")
        self.forwards = 0
        self.encoder._pipe.text_encoder.register_forward_hook(self._count)
        programs: list[Any] = [
            EncodeProgram(self.encoder),
            DenoiseProgram(load_stage(folder, "denoise")),
            DecodeProgram(load_stage(folder, "decode"), output=output, file_format="npy"),
        ]
        self.caches = {name: EmbeddingCache(self.conns[name], 64 << 20) for name in ("encode", "denoise", "client")}
        if caching:
            for program in programs[:2]:
                program.use_embeddings(self.caches[program.stage])
        self.loops = {one.stage: StageLoop(self.queue, self.conns[one.stage], one) for one in programs}
        self.workers = {stage: self.queue.register_worker(stage) for stage in self.loops}
        self.shortcut = EncodeShortcut(folder)

    def _count(self, *_: object) -> None:
        self.forwards += 1

    def submit(self, request: Any, request_id: str) -> bool:
        first = StageTask(stage="encode", request_id=request_id, payload={"request": request.to_payload()})
        return shortcut.submit(self.queue, first, ahead=self.shortcut.task(request), cache=self.caches["client"])

    def work(self, stage: str) -> None:
        job = self.workers[stage].take(timeout_s=10)
        assert job is not None
        self.loops[stage].do(job)

    def run(self, request: Any, request_id: str) -> dict[str, Any]:
        skipped = self.submit(request, request_id)
        for stage in ("denoise", "decode") if skipped else ("encode", "denoise", "decode"):
            self.work(stage)
        return self.result(request_id)

    def result(self, request_id: str) -> dict[str, Any]:
        result: Any = self.queue.result(request_id, timeout_s=10)
        return dict(result)

    def close(self) -> None:
        for part in (*self.workers.values(), self.queue, *self.caches.values(), *self.conns.values()):
            part.close()


@pytest.fixture
def house(models: Any, tmp_path: Path) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(kind: str, *, caching: bool = True) -> House:
        made.append(House(models.folder(kind), tmp_path, caching=caching))
        return made[-1]

    yield make
    for one in made:
        one.close()


def found(result: dict[str, Any], stage: str) -> dict[str, str] | None:
    return next((entry.get("embeddings") for entry in result["trace"] if entry["stage"] == stage), None)


def stages(result: dict[str, Any]) -> list[str]:
    return [entry["stage"] for entry in result["trace"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_encoder_runs_only_for_what_nobody_encoded(kind: str, house: Any, models: Any) -> None:
    at = house(kind)
    request = models.request(kind)
    first = at.run(request, "r1")
    assert found(first, "encode") == {"positive": "encoded", "negative": "encoded"}
    assert at.forwards == 2
    other = at.run(models.request(kind, prompt=LATER), "r2")
    assert found(other, "encode") == {"positive": "encoded", "negative": "memory"}
    assert at.forwards == 3
    again = at.run(models.request(kind, seed=12), "r3")
    assert stages(again) == ["denoise", "decode"]
    assert found(again, "denoise") == {"positive": "kept", "negative": "kept"}
    assert at.forwards == 3
    same = at.run(request, "r4")
    assert stages(same) == ["denoise", "decode"]
    assert first["digest"] == same["digest"] == models.digest(kind)

    plain = house(kind, caching=False)
    for name, asked, theirs in (
        ("p2", models.request(kind, prompt=LATER), other),
        ("p3", models.request(kind, seed=12), again),
    ):
        plain.queue.submit(StageTask(stage="encode", request_id=name, payload={"request": asked.to_payload()}))
        for stage in ("encode", "denoise", "decode"):
            plain.work(stage)
        uncached = plain.result(name)
        assert found(uncached, "encode") is None
        assert uncached["digest"] == theirs["digest"]
    assert plain.forwards == 4


@pytest.mark.parametrize("kind", KINDS)
def test_the_encode_queue_with_everything_kept_does_not_run_the_encoder(kind: str, house: Any, models: Any) -> None:
    at = house(kind)
    at.run(models.request(kind), "r1")
    other = house(kind)  # another process' worth of encoder, with an empty memory
    other.queue.submit(
        StageTask(stage="encode", request_id="r2", payload={"request": models.request(kind).to_payload()})
    )
    for stage in ("encode", "denoise", "decode"):
        other.work(stage)
    result = other.result("r2")
    assert found(result, "encode") == {"positive": "store", "negative": "store"}
    assert other.forwards == 0
    assert result["digest"] == models.digest(kind)


@pytest.mark.parametrize("gone", ["cleared", "no cache", "store closed"])
def test_what_is_gone_meanwhile_is_encoded(gone: str, house: Any, models: Any) -> None:
    at = house("wan2.1")
    at.run(models.request("wan2.1"), "r1")
    assert at.submit(models.request("wan2.1"), "r2")
    if gone == "cleared":
        at.caches["client"].clear()
    elif gone == "no cache":
        at.loops["denoise"]._program._cache = None
    else:
        at.caches["denoise"].close()
    at.work("denoise")
    assert at.loops["denoise"].counts.rewound == 1
    for stage in ("encode", "denoise", "decode"):
        at.work(stage)
    result = at.result("r2")
    assert result["digest"] == models.digest("wan2.1")
    assert stages(result) == ["encode", "denoise", "decode"]
    assert [view.state for view in at.queue.requests()] == ["done", "done"]


@pytest.mark.parametrize("changes", [{"guidance_scale": 1.0}, {"negative_prompt": None}], ids=["unguided", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_negative_prompt_too(kind: str, changes: dict[str, Any], house: Any, models: Any) -> None:
    at = house(kind)
    request = models.request(kind, **changes)
    first, again = at.run(request, "r1"), at.run(request, "r2")
    assert (stages(first)[0], stages(again)[0]) == ("encode", "denoise")
    assert first["digest"] == again["digest"]
    one = "guidance_scale" in changes or kind == "qwen_image"
    assert at.forwards == (1 if one else 2)


def test_a_task_of_another_family_or_without_anything_fails(house: Any, models: Any) -> None:
    at = house("wan2.1")
    at.run(models.request("wan2.1"), "r1")
    task = at.shortcut.task(models.request("wan2.1"))
    wrong = {**task.payload, "conditioning": {**task.payload["conditioning"], "schema": "qwen_image.conditioning/1"}}
    for name, payload in (("r2", wrong), ("r3", {"request": {}})):
        at.queue.submit(StageTask(stage="denoise", request_id=name, payload=payload))
        at.work("denoise")
        with pytest.raises(ConfigError):
            at.result(name)


# -- keys ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def copy(models: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(models.folder("wan2.1"), tmp_path / "copy"))


def digest(folder: str | Path, request: Any, **options: Any) -> str:
    keys = EncodeShortcut(str(folder), **options).keys(request)
    assert keys is not None
    return keys["positive"].digest


def test_client_and_worker_make_the_same_key_wherever_the_files_are(models: Any, copy: Path) -> None:
    request = models.request("wan2.1")
    texts = Text(role="positive", text=request.prompt, max_length=64)
    runner = load_stage(models.folder("wan2.1"), "encode")
    key = runner.key(texts)
    assert key is not None
    assert key.digest == digest(models.folder("wan2.1"), request) == digest(copy, request)
    half = load_stage(models.folder("wan2.1"), "encode", dtype={"text_encoder": "bfloat16"}).key(texts)
    assert half is not None
    assert half.digest == digest(copy, request, dtype="bfloat16") != key.digest
    assert request.prompt not in repr(key)


def test_everything_that_decides_the_bits_makes_another_key(models: Any, copy: Path) -> None:
    request = models.request("wan2.1")
    seen = {digest(copy, request)}

    def another(made: str) -> None:
        assert made not in seen
        seen.add(made)

    another(digest(copy, models.request("wan2.1", prompt=LATER)))
    another(digest(copy, models.request("wan2.1", max_sequence_length=65)))
    another(digest(copy, request, dtype="float16"))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    another(digest(copy, request))
    torch.set_num_threads(threads)
    another(digest(models.folder("qwen_image"), models.request("qwen_image")))
    weights = copy / "text_encoder" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    another(digest(copy, request))
    (copy / "tokenizer" / "added.json").write_text("{}")
    another(digest(copy, request))
    keys = EncodeShortcut(str(copy)).keys(request)
    assert keys is not None
    another(keys["negative"].digest)
    # What is not encode's decides nothing.
    shutil.rmtree(copy / "vae" / "x", ignore_errors=True)
    (copy / "transformer" / "note.txt").write_text("x")
    assert digest(copy, request) in seen


def test_files_are_read_once_as_long_as_they_are_the_same(models: Any, copy: Path) -> None:
    client = EncodeShortcut(str(copy))
    request = models.request("wan2.1")
    first = client.keys(request)
    reads = client._keys._revisions.reads
    assert reads > 1
    assert client.keys(request) == first
    assert client._keys._revisions.reads == reads
    config = copy / "text_encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": 1}))
    changed = client.keys(request)
    assert client._keys._revisions.reads == reads + 1
    assert changed is not None
    assert first is not None
    assert changed["positive"] != first["positive"]


def test_a_worker_keeps_the_key_of_what_it_loaded(models: Any, copy: Path) -> None:
    runner = load_stage(str(copy), "encode")
    key = runner.key(TEXT)
    assert key is not None
    (copy / "text_encoder" / "more.json").write_text("{}")
    assert runner.key(TEXT) == key
    late = load_stage(str(copy), "encode")
    (copy / "text_encoder" / "more.json").write_text("[1]")
    assert late.key(TEXT) is None  # loaded from files that nobody has looked into


@pytest.mark.parametrize("what", ["weight in place", "other weight", "type", "template", "adapter", "tokenizer"])
def test_a_changed_encoder_has_no_key(what: str, models: Any) -> None:
    runner: Any = load_stage(models.folder("qwen_image"), "encode")
    assert runner.key(TEXT) is not None
    pipe = runner._pipe
    weight = next(pipe.text_encoder.parameters())
    if what == "weight in place":
        with torch.no_grad():
            weight.add_(1)
    elif what == "other weight":
        module = next(one for one in pipe.text_encoder.modules() if isinstance(one, torch.nn.Linear))
        module.weight = torch.nn.Parameter(module.weight.detach().clone())
    elif what == "type":
        pipe.text_encoder.to(torch.float64)
    elif what == "template":
        pipe.prompt_template_encode += " "
    elif what == "adapter":
        pipe.text_encoder.peft_config = {"mine": object()}
    else:
        pipe.tokenizer = type(pipe.tokenizer).from_pretrained(f"{models.folder('qwen_image')}/tokenizer")
    assert runner.key(TEXT) is None


def test_without_a_key_everything_is_encoded(house: Any, models: Any) -> None:
    at = house("qwen_image")
    at.encoder._pipe.prompt_template_encode += " "
    for name in ("r1", "r2"):
        at.queue.submit(
            StageTask(stage="encode", request_id=name, payload={"request": models.request("qwen_image").to_payload()})
        )
        at.work("encode")
    assert at.forwards == 4
    assert at.caches["encode"].counters().hits_memory == 0
    assert not at.submit(models.request("qwen_image"), "r3")


def test_a_file_that_changes_while_it_is_read_gives_no_key(models: Any, copy: Path, monkeypatch: Any) -> None:
    class Touching:
        """A digest under whose reading one file becomes another one."""

        def update(self, _piece: bytes) -> None:
            os.utime(copy / "text_encoder" / "config.json")

        def hexdigest(self) -> str:
            return "0" * 32

    client = EncodeShortcut(str(copy))
    with monkeypatch.context() as patched:
        patched.setattr("xxhash.xxh3_128", Touching)
        assert client.keys(models.request("wan2.1")) is None
        assert client.task(models.request("wan2.1")) is None
    assert client.keys(models.request("wan2.1")) is not None


def test_an_embedding_that_is_gone_is_an_input_that_is_lost() -> None:
    with pytest.raises(InputLost):
        shortcut.read_kept({shortcut.KEPT: {"positive": {"digest": "0" * 64, "label": {}}}}, None)
