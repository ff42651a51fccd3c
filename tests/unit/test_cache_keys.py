"""Keys of caches: what decides bytes is in them, exactly; what is not known makes none."""

from __future__ import annotations

import enum
import logging
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moonrelay.cache.keys import CacheKey, EmbeddingKey, IncompleteKey, canonical, digest_of
from moonrelay.errors import ConfigError

PARAMS: dict[str, Any] = {"dtype": "bfloat16", "max_length": 512, "lora": None}
GIVEN: dict[str, Any] = {
    "encoder": "google/umt5-xxl@1",
    "prompt": "a fox",
    "role": "positive",
    "params": PARAMS,
}


def key(**changes: Any) -> EmbeddingKey:
    return EmbeddingKey(**{**GIVEN, **changes})


def params(**changes: Any) -> dict[str, Any]:
    return {"params": {**PARAMS, **changes}}


def picture(value: int = 1, mode: str = "RGB", size: tuple[int, int] = (2, 3)) -> Image.Image:
    return Image.new(mode, size, value)


def palette(last: int, transparency: int | None = None) -> Image.Image:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([0, 0, last])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


#: One field changed at a time.
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "encoder": {"encoder": "google/umt5-xl@1"},
    "revision": {"encoder": "google/umt5-xxl@2"},
    "where the revision begins": {"encoder": "google/umt5@xxl@1"},
    "prompt": {"prompt": "a fox "},
    "no prompt": {"prompt": ""},
    "prompt, composed": {"prompt": "\u00e9"},
    "prompt, decomposed": {"prompt": "e\u0301"},
    "prompt, lone surrogate": {"prompt": "\ud800"},
    "two prompts": {"prompt": ["a", "fox"]},
    "two prompts, the other way round": {"prompt": ["fox", "a"]},
    "two prompts, cut elsewhere": {"prompt": ["a f", "ox"]},
    "the prompt twice": {"prompt": ["a fox", "a fox"]},
    "role": {"role": "negative"},
    "tokenizer": {"tokenizer": "google/umt5-xxl@1"},
    "tokenizer's revision": {"tokenizer": "google/umt5-xxl@2"},
    "template": {"template": "<s>{}</s>"},
    "template, empty": {"template": ""},
    "dtype": params(dtype="float16"),
    "dtype, by type": params(dtype=torch.bfloat16),
    "dtype, another type": params(dtype=torch.float16),
    "length": params(max_length=511),
    "no length": params(max_length=None),
    "lora": params(lora={"style@1": 1.0}),
    "lora's revision": params(lora={"style@2": 1.0}),
    "lora's scale": params(lora={"style@1": 0.5}),
    "two loras": params(lora={"style@1": 1.0, "light@1": 1.0}),
    "two loras, applied the other way round": params(lora={"light@1": 1.0, "style@1": 1.0}),
    "a parameter more": params(clip_skip=None),
    "its value": params(clip_skip=1),
    "its type": params(clip_skip=1.0),
    "another type of it": params(clip_skip=True),
    "its name": params(clip_skips=1),
    "its sign": params(clip_skip=-0.0),
    "image": {"images": [torch.zeros(4)]},
    "image, twice": {"images": [torch.zeros(4), torch.zeros(4)]},
    "image, a bit": {"images": [torch.tensor([0.0, 0.0, 0.0, 1e-45])]},
    "image, a sign": {"images": [-torch.zeros(4)]},
    "image, shape": {"images": [torch.zeros(2, 2)]},
    "image, type": {"images": [torch.zeros(4, dtype=torch.int32)]},
    "image, half types": {"images": [torch.zeros(4, dtype=torch.float16)]},
    "image, other half": {"images": [torch.zeros(4, dtype=torch.bfloat16)]},
    "image, no dimensions": {"images": [torch.tensor(0.0)]},
    "image, one": {"images": [torch.zeros(1)]},
    "image, nothing in it": {"images": [torch.zeros(0, 3)]},
    "image, nothing of another shape": {"images": [torch.zeros(3, 0)]},
    "image, file": {"images": [b"PNG"]},
    "image, another file": {"images": [b"PNG "]},
    "array": {"images": [np.zeros(4, np.float32)]},
    "array, byte order": {"images": [np.zeros(4, ">f4")]},
    "array, shape": {"images": [np.zeros((2, 2), np.float32)]},
    "picture": {"images": [picture()]},
    "picture, a pixel": {"images": [picture(2)]},
    "picture, size": {"images": [picture(size=(3, 2))]},
    "picture, mode": {"images": [picture(mode="L", size=(6, 3))]},
    "palette": {"images": [palette(1)]},
    "palette, a colour": {"images": [palette(2)]},
    "palette, what is transparent": {"images": [palette(1, 0)]},
}


def test_every_field_changed_gives_another_digest() -> None:
    seen: dict[str, str] = {}
    for name, change in CHANGES.items():
        same = seen.setdefault(key(**change).digest, name)
        assert same == name, f"{name} has the key of {same}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a fox"}, {"prompt": ["a fox"]}),
        ({"prompt": ("a", "b")}, {"prompt": ["a", "b"]}),
        (params(lora=None), params(lora={})),
        (params(lora={"style@1": 1}), params(lora={"style@1": 1.0})),
        (params(a=1, b=2), params(b=2, a=1)),
        ({"images": (torch.ones(2),)}, {"images": [torch.ones(2)]}),
        (
            {"images": [torch.arange(6).reshape(2, 3).T]},
            {"images": [torch.arange(6).reshape(2, 3).T.contiguous()]},
        ),
        (
            {"images": [torch.complex(torch.ones(2), torch.ones(2)).conj()]},
            {"images": [torch.complex(torch.ones(2), -torch.ones(2))]},
        ),
        ({"images": [picture()]}, {"images": [picture()]}),
    ],
)
def test_what_gives_the_same_bytes_has_the_same_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert key(**one) == key(**other)
    assert hash(key(**one)) == hash(key(**other))


def test_keys_are_equal_by_digest_and_to_nothing_else() -> None:
    assert key() != key(role="negative")
    assert key() != key().digest
    assert len({key(), key(), key(prompt="b")}) == 2


def test_a_key_stays_what_it_is() -> None:
    # It stands in stores: a change here makes every entry a miss, and needs another version in it.
    assert key().digest == "a73aa94eedc4758e9f630394b692a174473ef917611526d36861997674f575e7"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"encoder": ""}, "encoder"),
        ({"encoder": "google/umt5-xxl"}, "encoder"),
        ({"encoder": "google/umt5-xxl@"}, "encoder"),
        ({"encoder": "google/umt5-xxl@ "}, "encoder"),
        ({"encoder": "@1"}, "encoder"),
        ({"encoder": None}, "encoder"),
        ({"tokenizer": "umt5"}, "tokenizer"),
        ({"tokenizer": ""}, "tokenizer"),
        ({"role": ""}, "role"),
        ({"role": None}, "role"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt": {"a"}}, "prompt"),
        ({"prompt": b"a"}, "prompt"),
        ({"params": None}, "params"),
        ({"params": [("dtype", "x")]}, "params"),
        ({"params": {**PARAMS, 1: 2}}, "params"),
        ({"params": {"max_length": 1, "lora": None}}, "params['dtype']"),
        ({"params": {"dtype": "bf16", "lora": None}}, "params['max_length']"),
        ({"params": {"dtype": "bf16", "max_length": 1}}, "params['lora']"),
        (params(dtype=None), "params['dtype']"),
        (params(dtype=""), "params['dtype']"),
        (params(dtype=float), "params['dtype']"),
        (params(max_length="512"), "params['max_length']"),
        (params(max_length=0), "params['max_length']"),
        (params(max_length=True), "params['max_length']"),
        (params(lora="style@1"), "params['lora']"),
        (params(lora={"style": 1.0}), "params['lora']"),
        (params(lora={"style@1": None}), "params['lora']"),
        (params(lora={"style@1": True}), "params['lora']"),
        (params(lora={"style@1": float("nan")}), "params['lora']"),
        (params(more=object()), "params"),
        (params(more=torch.Generator()), "params"),
        ({"template": lambda text: text}, "template"),
        ({"images": "fox.png"}, "images"),
        ({"images": torch.zeros(3)}, "images"),
        ({"images": ["fox.png"]}, "images"),
        ({"images": [Path("fox.png")]}, "images"),
        ({"images": [None]}, "images"),
        ({"images": [torch.zeros(1, device="meta")]}, "images"),
        ({"images": [torch.eye(2).to_sparse()]}, "images"),
        ({"images": [torch.nn.Parameter(torch.zeros(1))]}, "images"),
        ({"images": [np.array([object()])]}, "images"),
    ],
)
def test_an_incomplete_key_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(IncompleteKey, match="nothing will be cached") as refused:
        key(**changes)
    assert refused.value.context["field"] == field
    assert str(refused.value).startswith(field)
    assert isinstance(refused.value, ConfigError)


def test_an_incomplete_key_is_none_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert EmbeddingKey.complete(**GIVEN) == key()
    with caplog.at_level(logging.DEBUG, logger="moonrelay.cache.keys"):
        assert EmbeddingKey.complete(**{**GIVEN, "encoder": "umt5"}) is None
    assert "encoder" in caplog.text


def test_a_prompt_is_never_shown() -> None:
    made = key(prompt="SECRET", template="SECRET {}", images=[b"SECRET"], **params(more="SECRET"))
    assert "SECRET" not in repr(made) + str(made.label)
    assert made.label == {"encoder": "google/umt5-xxl@1", "role": "positive"}
    with pytest.raises(IncompleteKey) as refused:
        key(prompt=["SECRET", 1])
    assert "SECRET" not in str(refused.value)


def test_what_is_changed_afterwards_changes_no_key() -> None:
    image = torch.zeros(4)
    made = key(images=[image])
    before = made.digest
    image.fill_(1)
    assert made.digest == before
    assert key(images=[image]).digest != before


def test_anything_with_digest_and_label_is_a_key() -> None:
    assert isinstance(key(), CacheKey)
    assert not isinstance("x", CacheKey)


# -- the exact form ---------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Same(enum.Enum):
    ONE = 1


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    ONE = "one"


class Bits(enum.Flag):
    ONE = 1
    TWO = 2


@dataclass
class Config:
    value: Any = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Other:
    value: Any = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Slotted:
    value: Any = None


class Odd(str):
    __slots__ = ()


def function() -> None:
    """Stand for itself."""


def another() -> None:
    """Stand for itself."""


def beside(config: Config, **attributes: Any) -> Config:
    vars(config).update(attributes)
    return config


NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) + 1))

DIFFERENT: list[Any] = [
    None, False, True, 0, 1, -1, 255, 1 << 70, -(1 << 70), 0.0, -0.0, 1.0, NAN, OTHER_NAN, float("inf"), 0j, 1j,
    complex(-0.0, 0.0), "", "0", "1", "None", "a", "ab", b"", b"a", b"ab", [], [[]], [None], ["a", "b"], ["b", "a"],
    ["ab"], ["a"], {}, {"a": "b"}, {"b": "a"}, {"a": {}}, {1: "b"}, {"1": "b"}, {True: "b"}, [["a", "b"]],
    {"mapping": [["a", "b"]]}, {"set": ["a"]}, {"a"}, {"a", "b"}, {"class": "x"}, {"torch": 1},
    Kind.ONE, Kind.TWO, Same.ONE, Number.ONE, Word.ONE, Bits.ONE, Bits.ONE | Bits.TWO, Kind, Same, int, function,
    another, Config(), Config(1), Config(more={"a": 1}), Config(more={"b": 1}), Other(), beside(Config(), extra=1),
    Slotted(), Slotted(1), {"value": 1}, torch.float16, "torch.float16", {"dtype": "torch.float16"},
    torch.device("cpu"), torch.device("cuda"), torch.device("cuda:0"), torch.tensor(1), torch.tensor(1.0),
    torch.tensor([1]), torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.float8_e4m3fn),
    torch.zeros(2, dtype=torch.float8_e5m2), torch.zeros(2, dtype=torch.bool), np.zeros(2, np.uint8),
]  # fmt: skip


def test_no_two_different_values_have_one_form() -> None:
    seen: dict[str, int] = {}
    for index, value in enumerate(DIFFERENT):
        same = seen.setdefault(digest_of(value), index)
        assert same == index, f"{value!r} is {DIFFERENT[same]!r}"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, (2,)), [1, [2]]),
        ({"a": 1, "b": 2}, OrderedDict(b=2, a=1)),
        (MappingProxyType({"a": 1}), {"a": 1}),
        ({1, "a", None}, frozenset([None, "a", 1])),
        (Config(1, {"a": 1, "b": 2}), Config(1, {"b": 2, "a": 1})),
        (torch.ones(2), torch.ones(4)[::2]),
        (np.ones((2, 3)).T, np.ascontiguousarray(np.ones((2, 3)).T)),
    ],
)
def test_equal_values_have_one_form(one: Any, other: Any) -> None:
    assert canonical(one) == canonical(other)
    assert digest_of(one) == digest_of(other)


def test_parts_are_told_apart_from_their_joins() -> None:
    assert len({digest_of(), digest_of([]), digest_of("a", "b"), digest_of("ab"), digest_of(["a", "b"])}) == 5
    assert len(digest_of()) == 64


def of_a_script() -> type:
    return type("Script", (), {"__module__": "__main__"})


def instance() -> object:
    class Local:
        pass

    return Local()


def closure(value: int) -> Any:
    def inner() -> int:
        return value

    return inner


def cycle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        lambda: 1,
        closure(1),
        of_a_script(),
        instance(),
        Odd("text"),
        iter(()),
        range(3),
        bytearray(b"x"),
        torch.Generator(),
        torch.nn.Linear(1, 1),
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(1, device="meta"),
        torch.eye(2).to_sparse(),
        np.zeros(1, [("a", "i4")]),
        np.float32(1),
        Path("x"),
        cycle(),
    ],
)
def test_what_cannot_be_said_completely_is_refused(value: Any) -> None:
    for inside in (value, [value], {"a": value}, Config(value)):
        with pytest.raises(IncompleteKey):
            canonical(inside)
    with pytest.raises(IncompleteKey):
        digest_of("x", value)


@pytest.mark.parametrize("value", [{"a"}, {1: 2}, Kind.ONE, Number.ONE, Word.ONE, Kind, function, Config()])
def test_values_of_a_call_are_plainer(value: Any) -> None:
    canonical(value)
    for inside in (value, [value], {"a": value}):
        with pytest.raises(IncompleteKey):
            canonical(inside, plain=True)
    assert canonical({"a": [1, torch.float16]}, plain=True) == canonical({"a": [1, torch.float16]})
