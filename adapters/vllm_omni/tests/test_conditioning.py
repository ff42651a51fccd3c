"""The seam for an embedding cache: what makes a key, when there is none, and that nobody's edit is another's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moonrelay.errors import ConfigError
from moonrelay_vllm_omni.pipelines import conditioning
from moonrelay_vllm_omni.pipelines.conditioning import ConditionKey, identity_of, install, install_from, key_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MADE_BY = {"pipeline": "Double", "host": "0.30.0", "template": "<{}>", "weights": torch.bfloat16}


class Double:
    """A pipeline with nothing but an encoder, which counts."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.encoded: list[Any] = []

    def encode_prompt(
        self,
        prompt: Any,
        negative_prompt: Any = None,
        prompt_embeds: Any = None,
        max_sequence_length: int = 512,
        prompt_name: str = "prompt",
        device: Any = None,
        dtype: Any = None,
        image: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Its words."""
        if prompt == "bad":
            message = "no such word"
            raise LookupError(message)
        self.encoded.append(prompt)
        return torch.full((2, 3), float(len(self.encoded))), None


class Remembers:
    """The plainest hook: keeps what was encoded, by digest."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.keys: list[ConditionKey] = []

    def __call__(self, key: ConditionKey, encode: Callable[[], object]) -> object:
        self.keys.append(key)
        if key.digest not in self.kept:
            self.kept[key.digest] = encode()
        return self.kept[key.digest]


def hooked(hook: Any = None, **more: Any) -> tuple[Double, Any]:
    pipeline, hook = Double(), hook or Remembers()
    install(pipeline, hook, **{"encoder": "org/model", "revision": COMMIT, "made_by": MADE_BY, **more})
    return pipeline, hook


def digest(**changes: Any) -> str:
    """Return the key's digest of a call in which something is changed."""
    given: dict[str, Any] = {
        "prompt": "a fox",
        "negative_prompt": None,
        "max_sequence_length": 512,
        "prompt_name": "prompt",
        "dtype": torch.bfloat16,
        "image": None,
    }
    named = {name: changes.pop(name, "org/model" if name == "encoder" else COMMIT) for name in ("encoder", "revision")}
    made_by = {**MADE_BY, **changes.pop("made_by", {})}
    key = key_of(named["encoder"], named["revision"], made_by, {**given, **changes})
    assert key is not None
    return key.digest


def picture(value: int = 1, mode: str = "RGB", size: tuple[int, int] = (2, 3)) -> Image.Image:
    return Image.new(mode, size, value)


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "encoder": {"encoder": "org/other"},
    "revision": {"revision": COMMIT[::-1]},
    "pipeline": {"made_by": {"pipeline": "Other"}},
    "host": {"made_by": {"host": "0.31.0"}},
    "template": {"made_by": {"template": "[{}]"}},
    "weights": {"made_by": {"weights": torch.float16}},
    "prompt": {"prompt": "a fox "},
    "prompt, composed": {"prompt": "\u00e9"},
    "prompt, decomposed": {"prompt": "e\u0301"},
    "two prompts": {"prompt": ["a", "fox"]},
    "two prompts, cut elsewhere": {"prompt": ["a f", "ox"]},
    "negative": {"negative_prompt": "a fox"},
    "negative, empty": {"negative_prompt": ""},
    "role": {"prompt_name": "negative_prompt"},
    "length": {"max_sequence_length": 511},
    "length, as text": {"max_sequence_length": "512"},
    "length, as float": {"max_sequence_length": 512.0},
    "dtype": {"dtype": torch.float32},
    "no dtype": {"dtype": None},
    "dtype, as text": {"dtype": "torch.bfloat16"},
    "tensor": {"image": torch.zeros(4)},
    "tensor, another value": {"image": torch.tensor([0.0, 0.0, 0.0, 1e-30])},
    "tensor, -0.0": {"image": -torch.zeros(4)},
    "tensor, another shape": {"image": torch.zeros(2, 2)},
    "tensor, another type": {"image": torch.zeros(4, dtype=torch.int32)},
    "array": {"image": np.zeros(4, np.float32)},
    "array, another shape": {"image": np.zeros((2, 2), np.float32)},
    "array, another type": {"image": np.zeros(4, np.int32)},
    "picture": {"image": picture()},
    "picture, another pixel": {"image": picture(2)},
    "picture, another size": {"image": picture(size=(3, 2))},
    "picture, another mode": {"image": picture(mode="L", size=(6, 3))},
    "two pictures": {"image": [picture(), picture()]},
    "a mapping": {"image": {"a": 1, "b": None}},
    "a mapping, another name": {"image": {"a": 1, "c": None}},
    "one more argument": {"num_images_per_prompt": 1},
}


def test_whatever_changes_the_key_changes() -> None:
    by_digest: dict[str, str] = {}
    for name, change in CHANGES.items():
        same = by_digest.setdefault(digest(**change), name)
        assert same == name, f"{name} has the key of {same}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a fox"}, {"prompt": ["a fox"]}),
        ({"negative_prompt": ["x"]}, {"negative_prompt": "x"}),
        ({"device": "cpu"}, {"device": torch.device("cuda:3")}),
        ({"image": torch.arange(6).reshape(2, 3).T}, {"image": torch.arange(6).reshape(2, 3).T.contiguous()}),
        ({"image": picture()}, {"image": picture()}),
        ({"image": {"a": 1, "b": 2}}, {"image": {"b": 2, "a": 1}}),
        ({"image": (1, 2)}, {"image": [1, 2]}),
    ],
)
def test_what_gives_the_same_bytes_has_the_same_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert digest(**one) == digest(**other)


def test_a_key_stays_what_it_is() -> None:
    # It stands in stores: a change here makes every entry a miss, and needs another version in it.
    plain = key_of("e", "r", {"p": 1}, {"prompt": "a", "n": [None, True, 0.5, b"x"]})
    assert plain is not None
    assert plain.digest == "ab82cce541b356297ee8558d5c2b8bbabe8f946457d5747ea5b36116ae42fca9"
    assert plain.arguments == {"prompt": ["a"], "n": [None, True, 0.5, b"x"]}


class Odd(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        object(),
        torch.Generator(),
        Odd("text"),
        {1: "number as a name"},
        {"set"},
        torch.nn.Parameter(torch.zeros(1)),
        torch.eye(2).to_sparse(),
        torch.zeros(1, device="meta"),
        np.array([object()]),
        [object()],
        lambda: None,
    ],
)
def test_where_something_is_not_known_there_is_no_key(value: Any) -> None:
    pipeline, hook = hooked()
    pipeline.encode_prompt("a", image=value)
    pipeline.encode_prompt("a", image=value)
    assert hook.keys == []
    assert pipeline.encoded == ["a", "a"]


def test_what_is_encoded_already_is_passed_through() -> None:
    pipeline, hook = hooked()
    pipeline.encode_prompt("a", prompt_embeds=torch.zeros(1))
    assert hook.keys == []
    assert pipeline.encoded == ["a"]


def test_by_position_or_by_name_it_is_the_same_call() -> None:
    pipeline, hook = hooked()
    pipeline.encode_prompt("a", "b", None, 7)
    pipeline.encode_prompt(max_sequence_length=7, negative_prompt="b", prompt="a", prompt_name="prompt")
    assert pipeline.encoded == ["a"]
    assert hook.keys[0] == hook.keys[1]
    assert hook.keys[0].arguments["prompt"] == ["a"]


def test_a_hit_is_the_callers_own() -> None:
    pipeline, hook = hooked()
    first, none = pipeline.encode_prompt("a")
    assert none is None
    first.zero_()
    second, _ = pipeline.encode_prompt("a")
    assert torch.equal(second, torch.ones(2, 3))
    second.mul_(7)
    third, _ = pipeline.encode_prompt("a")
    assert torch.equal(third, torch.ones(2, 3))
    (kept,) = hook.kept.values()
    assert torch.equal(kept[0], torch.ones(2, 3))


def test_a_tuple_stays_a_tuple_in_lists_and_dicts() -> None:
    kept = {"a": (torch.ones(1), [torch.zeros(1), "text", 3])}
    pipeline, _ = hooked(lambda _key, _encode: kept)
    found: Any = pipeline.encode_prompt("a")
    assert type(found) is dict
    assert type(found["a"]) is tuple
    assert type(found["a"][1]) is list
    assert found["a"][1][1:] == ["text", 3]
    assert found["a"][0] is not kept["a"][0]


def test_what_encoding_raises_passes() -> None:
    pipeline, hook = hooked()
    with pytest.raises(LookupError, match="no such word"):
        pipeline.encode_prompt("bad")
    assert hook.kept == {}


def test_what_the_hook_raises_passes() -> None:
    def fails(_key: ConditionKey, _encode: Callable[[], object]) -> object:
        message = "planted"
        raise OSError(message)

    pipeline, _ = hooked(fails)
    with pytest.raises(OSError, match="planted"):
        pipeline.encode_prompt("a")


def test_a_wrong_call_is_told_as_without_a_hook() -> None:
    pipeline, hook = hooked()
    with pytest.raises(TypeError, match="nonesuch"):
        pipeline.encode_prompt("a", nonesuch=1)
    assert hook.keys == []


def test_it_looks_like_what_it_replaced() -> None:
    pipeline, _ = hooked()
    assert pipeline.encode_prompt.__doc__ == "Its words."


def test_without_a_hook_nothing_is_changed() -> None:
    pipeline = Double()
    install(pipeline, None, encoder="", revision="")
    install_from(SimpleNamespace(model_config=None), pipeline, MADE_BY)
    install_from(SimpleNamespace(model_config={"other": 1}), pipeline, MADE_BY)
    install_from(SimpleNamespace(), pipeline, MADE_BY)
    assert vars(pipeline) == {"encoded": []}


@pytest.mark.parametrize("field", ["encoder", "revision"])
def test_a_key_that_names_no_weights_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="names nothing"):
        hooked(**{field: ""})


# -- by configuration -------------------------------------------------------------------------------------------------


def config(model: str = f"/cache/models--org--model/snapshots/{COMMIT}", **more: Any) -> Any:
    settings = more.pop("settings", {"condition_hook": f"{__name__}:Remembers"})
    return SimpleNamespace(model=model, model_config={"moonrelay": settings}, **more)


@pytest.mark.parametrize(
    ("od_config", "settings", "identity"),
    [
        (config(), {}, ("org/model", COMMIT)),
        (config(f"/x/models--org--model/snapshots/{COMMIT}/"), {}, ("org/model", COMMIT)),
        (config("org/model", revision=COMMIT), {}, ("org/model", COMMIT)),
        (config("org/model", revision="main"), {}, None),
        (config("org/model"), {}, None),
        (config("/models/mine"), {}, None),
        (config("/models/mine"), {"encoder_revision": "v3"}, ("/models/mine", "v3")),
        (config("/models/mine"), {"encoder_revision": "v3", "encoder": "mine"}, ("mine", "v3")),
        (config(quantization_config="fp8"), {"encoder_revision": "v3"}, None),
        (config(lora_path="x"), {"encoder_revision": "v3"}, None),
        (config(""), {"encoder_revision": "v3"}, None),
    ],
)
def test_which_weights_they_are_is_known_or_not(
    od_config: Any, settings: dict[str, str], identity: tuple[str, str] | None
) -> None:
    assert identity_of(od_config, settings) == identity


def test_a_hook_by_configuration() -> None:
    pipeline = Double()
    install_from(config(), pipeline, MADE_BY)
    pipeline.encode_prompt("a")
    pipeline.encode_prompt("a")
    assert pipeline.encoded == ["a"]


def test_unknown_weights_leave_the_pipeline_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Double()
    install_from(config("org/model"), pipeline, MADE_BY)
    assert vars(pipeline) == {"encoded": []}
    assert "encoder_revision" in caplog.text


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ("text", "moonrelay"),
        ({}, "embedding_cache"),
        ({"embedding_cache": "yes"}, "embedding_cache"),
        ({"embedding_cache": {"byte": 1}}, "byte"),
        ({"embedding_cache": True, "condition_hook": "os:getpid"}, "embedding_cache"),
        ({"condition_hook": ""}, "condition_hook"),
        ({"condition_hook": "no.such.module:make"}, "condition_hook"),
        ({"condition_hook": "os:no_such_name"}, "condition_hook"),
        ({"condition_hook": "os"}, "condition_hook"),
        ({"condition_hook": "os:getpid"}, "condition_hook"),
        ({"condition_hok": "os:getpid"}, "condition_hok"),
        ({"condition_hook": "os:getpid", "encoder": 3}, "encoder"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: Any, field: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        install_from(config(settings=settings), Double(), MADE_BY)
    assert refusal.value.context["field"] == field


def test_the_seam_imports_nothing_heavy_by_itself() -> None:
    assert "torch" not in vars(conditioning)
