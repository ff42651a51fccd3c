"""The seam for an embedding cache: what makes a key, when there is none, and that nobody's edit is another's."""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonrelay.errors import ConfigError, PluginError
from moonrelay_sglang import conditioning, worker_hooks
from moonrelay_sglang import config as settings
from moonrelay_sglang.conditioning import ConditionKey, IncompleteKey, canonical, identity_of, key_of
from moonrelay_sglang.manager import PayloadManager

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REQUEST: tuple[Any, ...] = ("a fox", "blurred", True, None, 512)


class Remembers:
    """The plainest hook: keeps what was encoded, by digest."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.keys: list[ConditionKey] = []

    def __call__(self, key: ConditionKey, encode: Callable[[], Mapping[str, object]]) -> Any:
        self.keys.append(key)
        if key.digest not in self.kept:
            self.kept[key.digest] = encode()
        return self.kept[key.digest]


#: What `make` makes next, per test.
MAKES: list[Any] = []


def make() -> Any:
    return MAKES[-1]


def make_number() -> Any:
    return 3


@dataclass
class PipelineConfig:
    """The host's settings of a pipeline, as far as text goes."""

    template: str = "<{}>"
    functions: tuple[Any, ...] = ()


class TextEncodingStage:
    """The host's stage, with encoders that count: it appends to the request's lists."""

    deduplicated_output_fields = ("prompt_embeds", "prompt_attention_mask", "is_prompt_processed")

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.text_encoders = [torch.nn.Linear(2, 2)]
        self.tokenizers = [object()]

    def build_dedup_fingerprint(self, batch: Any, _server_args: Any) -> tuple[Any, ...]:
        return (batch.prompt, batch.negative_prompt, True, batch.template, 512)

    def forward(self, batch: Any, _server_args: Any) -> Any:
        if batch.prompt == "bad":
            message = "no such word"
            raise LookupError(message)
        self.encoded.append(batch.prompt)
        batch.prompt_embeds.append(torch.full((1, 3), float(len(self.encoded))))
        batch.prompt_attention_mask = [torch.ones(1, 3, dtype=torch.long), None]
        return batch


TextEncodingStage.__module__, _, TextEncodingStage.__qualname__ = conditioning._STAGE.rpartition(".")


class OwnStage(TextEncodingStage):
    """A model's own, which reads more."""


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditioning, "_weights_as_loaded", lambda: True)
    monkeypatch.setattr(conditioning, "_device", lambda: "cpu")


@pytest.fixture
def hook() -> Any:
    made = Remembers()
    MAKES.append(made)
    yield made
    MAKES.remove(made)


def server_args(**more: Any) -> Any:
    found = {
        "disagg_transfer_backend": "moonrelay",
        "disagg_role": "encoder",
        "model_path": "org/model",
        "revision": COMMIT,
        "num_gpus": 1,
        "pipeline_config": PipelineConfig(functions=(_first,)),
    }
    return SimpleNamespace(**{**found, **more})


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_SGLANG", f'{{"condition_hook": "{__name__}:make"}}')


def request(prompt: Any = "a fox", **more: Any) -> Any:
    found = {
        "prompt": prompt,
        "negative_prompt": "blurred",
        "template": None,
        "prompt_embeds": [],
        "prompt_attention_mask": None,
        "is_prompt_processed": False,
        "is_warmup": False,
    }
    return SimpleNamespace(**{**found, **more})


def run(stage: TextEncodingStage, batch: Any, args: Any = None) -> Any:
    return conditioning.around_forward(type(stage).forward, stage, batch, args or server_args())


def _first(text: str) -> str:
    return text[:1]


# -- the seam -------------------------------------------------------------------------------------------------------


def test_what_was_encoded_is_given_again_to_the_bit(hook: Remembers) -> None:
    stage = TextEncodingStage()
    first, second = run(stage, request()), run(stage, request())
    assert stage.encoded == ["a fox"]
    assert torch.equal(first.prompt_embeds[0], second.prompt_embeds[0])
    assert second.prompt_attention_mask[1] is None
    assert second.prompt_attention_mask[0].dtype == torch.long
    assert second.is_prompt_processed is False
    run(stage, request("another"))
    assert stage.encoded == ["a fox", "another"]


def test_an_edit_is_nobody_elses(hook: Remembers) -> None:
    stage = TextEncodingStage()
    for _ in range(3):
        batch = run(stage, request())
        assert batch.prompt_embeds[0].tolist() == [[1.0, 1.0, 1.0]]
        batch.prompt_embeds[0].zero_()
        batch.prompt_embeds.append(None)
        batch.prompt_attention_mask.clear()


def test_encoding_twice_for_one_request_appends_once() -> None:
    def twice(_key: ConditionKey, encode: Callable[[], Mapping[str, object]]) -> Any:
        encode()
        return encode()

    MAKES.append(twice)
    try:
        assert len(run(TextEncodingStage(), request()).prompt_embeds) == 1
    finally:
        MAKES.pop()


def test_what_encoding_raises_passes_and_is_not_kept(hook: Remembers) -> None:
    stage = TextEncodingStage()
    with pytest.raises(LookupError):
        run(stage, request("bad"))
    assert hook.kept == {}


@pytest.mark.parametrize("returned", [None, {}, {"prompt_embeds": []}, 3])
def test_a_hook_that_returns_something_else_is_told(returned: Any) -> None:
    MAKES.append(lambda _key, _encode: returned)
    try:
        with pytest.raises(PluginError, match="prompt_embeds"):
            run(TextEncodingStage(), request())
    finally:
        MAKES.pop()


@pytest.mark.parametrize(
    "batch",
    [
        {"is_warmup": True},
        {"prompt_embeds": [torch.zeros(1)]},
        {"prompt_embeds": torch.zeros(1)},
        {"is_prompt_processed": True},
        {"template": ("tensor", (1, 300), "torch.float32", "cpu")},
        {"prompt": object()},
    ],
    ids=lambda given: next(iter(given)),
)
def test_without_a_complete_key_nobody_is_asked(hook: Remembers, batch: dict[str, Any]) -> None:
    stage = TextEncodingStage()
    stage.forward = lambda *_: pytest.fail("the hooked function is called, not the attribute")  # type: ignore[method-assign]
    original: list[Any] = []
    given = request(**batch)
    assert (
        conditioning.around_forward(lambda _stage, one, _args: original.append(one) or one, stage, given, server_args())
        is given
    )
    assert original == [given]
    assert hook.keys == []


def test_changed_weights_are_nobodys(hook: Remembers, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = TextEncodingStage()
    run(stage, request())
    monkeypatch.setattr(conditioning, "_weights_as_loaded", lambda: False)
    run(stage, request())
    assert stage.encoded == ["a fox", "a fox"]
    assert len(hook.keys) == 1


@pytest.mark.parametrize(
    ("stage", "args"),
    [
        (TextEncodingStage, {"disagg_transfer_backend": "mooncake"}),
        (TextEncodingStage, {"num_gpus": 2}),
        (TextEncodingStage, {"revision": "main"}),
        (TextEncodingStage, {"lora_path": "org/lora"}),
        (TextEncodingStage, {"component_paths": {"text_encoder": "org/other"}}),
        (TextEncodingStage, {"quantization": "fp8"}),
        (TextEncodingStage, {"pipeline_config": PipelineConfig(functions=(lambda text: text,))}),
        (OwnStage, {}),
    ],
)
def test_where_the_bytes_are_not_known_the_stage_is_left_alone(
    hook: Remembers, stage: type[TextEncodingStage], args: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one = stage()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            run(one, request(), server_args(**args))
    assert one.encoded == ["a fox", "a fox"]
    assert hook.keys == []
    assert len(caplog.records) == ("disagg_transfer_backend" not in args)


def test_another_backend_is_left_alone(hook: Remembers) -> None:
    stage, batch = TextEncodingStage(), request()
    before = set(vars(stage))
    assert run(stage, batch, server_args(disagg_transfer_backend="auto")) is batch
    assert set(vars(stage)) == before
    assert hook.keys == []


def test_without_the_setting_nothing_happens(hook: Remembers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONRELAY_SGLANG")
    stage = TextEncodingStage()
    assert run(stage, request()).prompt_embeds[0].tolist() == [[1.0, 1.0, 1.0]]
    assert hook.keys == []


# -- keys -------------------------------------------------------------------------------------------------------------


def digest(request: tuple[Any, ...] = REQUEST, encoder: str = "org/model", revision: str = COMMIT, **made: Any) -> str:
    key = key_of(encoder, revision, canonical({"host": "0.5.23", **made}), request)
    assert key is not None
    return key.digest


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class Nested:
    value: Any = None
    more: dict[str, Any] = field(default_factory=dict)


def test_whatever_changes_the_key_changes() -> None:
    changed = [
        digest(),
        digest(encoder="org/other"),
        digest(revision=COMMIT[::-1]),
        digest(host="0.5.24"),
        digest(("a fox ", *REQUEST[1:])),
        digest(("\u00e9", *REQUEST[1:])),
        digest(("e\u0301", *REQUEST[1:])),
        digest((("a", "fox"), *REQUEST[1:])),
        digest((("a f", "ox"), *REQUEST[1:])),
        digest(("a fox", None, *REQUEST[2:])),
        digest(("a fox", "", *REQUEST[2:])),
        digest((*REQUEST[:2], False, *REQUEST[3:])),
        digest((*REQUEST[:2], 1, *REQUEST[3:])),
        digest((*REQUEST[:4], 511)),
        digest((*REQUEST[:4], "512")),
        digest((*REQUEST[:4], 512.0)),
        digest((*REQUEST[:3], (("role", "user"),), 512)),
        digest((*REQUEST[:3], ("tensor", (1,), "torch.float32", (0.0,)), 512)),
        digest((*REQUEST[:3], ("tensor", (1,), "torch.float32", (-0.0,)), 512)),
        digest(pipeline=Nested()),
        digest(pipeline=Nested(1)),
        digest(pipeline=Nested(more={"a": 1})),
        digest(pipeline=Nested(more={"b": 1})),
        digest(pipeline=Kind.ONE),
        digest(pipeline=Kind.TWO),
        digest(pipeline=_first),
        digest(pipeline=make),
        digest(pipeline=torch.zeros(300)),
        digest(pipeline=-torch.zeros(300)),
        digest(pipeline=torch.zeros(30, 10)),
        digest(pipeline=torch.float16),
        digest(pipeline="torch.float16"),
        digest(pipeline={Kind.ONE}),
        digest(pipeline=[Kind.ONE]),
        digest(pipeline=Nested),
    ]
    assert len(set(changed)) == len(changed)


def test_what_gives_the_same_bytes_has_the_same_key() -> None:
    assert digest(pipeline={"a": 1, "b": {Kind.TWO, Kind.ONE}}) == digest(pipeline={"b": {Kind.ONE, Kind.TWO}, "a": 1})
    assert digest(list(REQUEST)) == digest(REQUEST)  # type: ignore[arg-type]


def test_a_large_tensor_in_the_hosts_fingerprint_makes_no_key() -> None:
    by_shape = ("tensor", (300,), "torch.float32", "cpu")
    for part in (by_shape, (by_shape,), ("x", (("y", by_shape),)), [list(by_shape)]):
        assert key_of("org/model", COMMIT, {}, (*REQUEST, part)) is None
    assert key_of("org/model", COMMIT, {}, (*REQUEST, object())) is None


@pytest.mark.parametrize("value", [object(), lambda: 1, len, torch.nn.Linear(1, 1), iter(())])
def test_what_cannot_be_said_completely_is_refused(value: Any) -> None:
    with pytest.raises(IncompleteKey):
        canonical({"a": [value]})


@pytest.mark.parametrize(
    ("args", "given", "found"),
    [
        ({}, {}, ("org/model", COMMIT)),
        ({"revision": "v1"}, {}, None),
        ({"revision": None}, {"encoder_revision": "v1"}, ("org/model", "v1")),
        ({"revision": None}, {"encoder_revision": "v1", "encoder": "mine"}, ("mine", "v1")),
        ({"model_path": f"/x/models--org--model/snapshots/{COMMIT}", "revision": None}, {}, ("org/model", COMMIT)),
        ({"model_path": "", "revision": COMMIT}, {}, None),
        ({"component_weights_paths": {"text_encoder": "x"}}, {"encoder_revision": "v1"}, None),
    ],
)
def test_identity(args: dict[str, Any], given: dict[str, Any], found: Any) -> None:
    asked = server_args(**args)
    assert identity_of(asked, settings.from_server_args(asked, given)) == found


# -- the setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["no_such_module:make", f"{__name__}:nothing", __name__, f"{__name__}:", f"{__name__}:MAKES"]
)
def test_a_role_whose_hook_is_not_there_does_not_start(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonrelay_sglang import plugin

    monkeypatch.setattr(plugin, "verify", lambda: None)
    monkeypatch.setenv("MOONRELAY_SGLANG", f'{{"condition_hook": "{path}"}}')
    with pytest.raises(ConfigError, match="condition_hook"):
        worker_hooks.around_init_state(lambda *_: pytest.fail("started"), object(), server_args(), 0)


def test_a_hook_that_cannot_be_called_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONRELAY_SGLANG", f'{{"condition_hook": "{__name__}:make_number"}}')
    with pytest.raises(ConfigError, match="makes a int"):
        run(TextEncodingStage(), request())


# -- the role's own cache ---------------------------------------------------------------------------------------------


class Role:
    """One encoder's process: a stage, and the cache that it was lent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        monkeypatch.setenv("MOONRELAY_SGLANG", json.dumps({"embedding_cache": True, **given}))
        self.manager = PayloadManager(settings.from_server_args(server_args()), epoch="one")
        self.stage = TextEncodingStage()
        assert self.manager.embeddings is not None
        conditioning.lend([OwnStage(), self.stage], self.manager.embeddings)

    def ask(self, prompt: str = "a fox", **args: Any) -> Any:
        return run(self.stage, request(prompt), server_args(**args))

    def counted(self) -> tuple[int, int]:
        counters = self.manager.counters()
        return counters.encoded, counters.remembered


@pytest.mark.parametrize("own", [True, False])
def test_the_roles_cache_outlives_it_where_there_is_a_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool
) -> None:
    url = f"local://{tmp_path}/kept"
    found: list[Any] = []
    for _ in range(2):
        role = Role(monkeypatch, **({"embedding_cache": {"store": url}} if own else {"store": url}))
        found += [role.ask(), role.ask()]
        assert role.stage.encoded == (["a fox"] if len(found) == 2 else [])
        assert role.counted() == ((1, 1) if len(found) == 2 else (0, 2))
        role.manager.cleanup()
        role.ask()  # a role that ends encodes
        assert role.stage.encoded[-1:] == ["a fox"]
    for batch in found[1:]:
        assert torch.equal(batch.prompt_embeds[0], found[0].prompt_embeds[0])
        assert batch.prompt_attention_mask[0].dtype == torch.long
        assert batch.prompt_attention_mask[1] is None
        assert batch.is_prompt_processed is False


def test_an_edit_of_what_the_cache_gave_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    role = Role(monkeypatch)
    for _ in range(3):
        batch = role.ask()
        assert batch.prompt_embeds[0].tolist() == [[1.0, 1.0, 1.0]]
        batch.prompt_embeds[0].zero_()
    assert role.stage.encoded == ["a fox"]
    role.manager.cleanup()


def test_the_cache_is_not_asked_where_the_bytes_are_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    role = Role(monkeypatch)
    for _ in range(2):
        role.ask(lora_path="org/lora")
    assert role.stage.encoded == ["a fox", "a fox"]
    assert role.counted() == (0, 0)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["no embedding cache"]
    role.manager.cleanup()


def test_a_stage_that_was_lent_no_cache_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOONRELAY_SGLANG", '{"embedding_cache": true}')
    stage = TextEncodingStage()
    for _ in range(2):
        run(stage, request())
    assert stage.encoded == ["a fox", "a fox"]
    assert "this process has none" in caplog.text


def test_two_that_remember_are_refused() -> None:
    given = {"embedding_cache": True, "condition_hook": "my_cache:make"}
    with pytest.raises(ConfigError, match="leave one of them out"):
        settings.from_server_args(server_args(), given)
    given["embedding_cache"] = False
    assert settings.from_server_args(server_args(), given).embedding_cache is None
    with pytest.raises(ConfigError, match="'bytes'"):
        settings.from_server_args(server_args(), {"embedding_cache": {"byte": 1}})
