"""Keys: whatever decides the bytes separates, and what is not known completely is not cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonrelay.cache.keys import IncompleteKey
from moonrelay_conformance.capability import Capability
from moonrelay_conformance.corpus import trees
from moonrelay_conformance.results import Level
from moonrelay_conformance.suites.base import promise
from moonrelay_conformance.suites.cache_bench import FIELDS, NOTHING, CacheBench, CacheSuite, Encoder


def _params(**changes: Any) -> dict[str, Any]:
    return {"params": {**FIELDS["params"], **changes}}


def _image(seed: int) -> dict[str, Any]:
    return {"images": [trees.build({"tensor": {"shape": [3, 4, 4], "dtype": "uint8", "seed": seed}})]}


#: One change each, by what it is of. Made in functions: tensors are made when a test runs.
_CHANGES: dict[str, Any] = {
    "encoder": {"encoder": "google/umt5-xl@0f1e"},
    "prompt": {"prompt": "A red fox in the snow."},
    "prompt (case)": {"prompt": "a red fox in the snow"},
    "prompt (a space)": {"prompt": "A red fox in the snow "},
    "prompt (decomposed)": {"prompt": "A red fo\u0301x in the snow"},
    "prompt (composed)": {"prompt": "A red f\u00f3x in the snow"},
    "prompt (empty)": {"prompt": ""},
    "prompt (two)": {"prompt": [FIELDS["prompt"], ""]},
    "prompt (two, in another order)": {"prompt": ["", FIELDS["prompt"]]},
    "role": {"role": "negative"},
    "dtype": _params(dtype="float16"),
    "max_length": _params(max_length=511),
    "max_length (none)": _params(max_length=None),
    "lora (none)": _params(lora=None),
    "lora (another)": _params(lora={"style@a1": 0.5, "shape@b2": 1.0}),
    "lora (scale)": _params(lora={"style@a1": 0.25, "detail@b2": 1.0}),
    "lora (order)": _params(lora={"detail@b2": 1.0, "style@a1": 0.5}),
    "a further parameter": _params(clip_skip=2),
    "a further parameter (type)": _params(clip_skip=True),
    "a further parameter (a float)": _params(clip_skip=1.0),
    "a further parameter (more)": _params(pad=False),
    "tokenizer": {"tokenizer": "google/mt5@77"},
    "tokenizer (none)": {"tokenizer": None},
    "template": {"template": "Describe {}"},
    "template (none)": {"template": None},
}

_REVISIONS: dict[str, Any] = {
    "encoder": {"encoder": "google/umt5-xxl@0f1f"},
    "tokenizer": {"tokenizer": "google/umt5@78"},
    "lora": _params(lora={"style@a2": 0.5, "detail@b2": 1.0}),
}

_INCOMPLETE: dict[str, Any] = {
    "encoder without a revision": {"encoder": "google/umt5-xxl"},
    "encoder with an empty revision": {"encoder": "google/umt5-xxl@"},
    "tokenizer without a revision": {"tokenizer": "google/umt5"},
    "no dtype": {"params": {"max_length": 512, "lora": None}},
    "no max_length": {"params": {"dtype": "bfloat16", "lora": None}},
    "no lora": {"params": {"dtype": "bfloat16", "max_length": 512}},
    "lora without a revision": _params(lora={"style": 1.0}),
    "no role": {"role": ""},
    "no prompt": {"prompt": []},
    "a parameter without an exact form": _params(hook=object()),
    "an image by its name": {"images": ["fox.png"]},
}


@dataclass(frozen=True)
class _Key:
    """A host's own key: anything with a digest and a label is one."""

    digest: str
    label: Mapping[str, str] = field(default_factory=dict)


class CacheKeys(CacheSuite):
    """What tells two requests apart."""

    @promise(Level.L1, "Every field of the key, changed alone, is a miss")
    def test_every_field_of_the_key_separates(self, bench: CacheBench) -> None:
        cache = bench.cache()
        first = bench.key()
        keys = {name: bench.key(**change) for name, change in _CHANGES.items()}
        keys |= {f"images ({number})": bench.key(**_image(number)) for number in range(2)}
        cache.put(first, {"of": "the first"})
        for name, key in keys.items():
            found = cache.get(key, NOTHING)
            assert found is NOTHING, f"a request with another {name} was given {found!r}"
            cache.put(key, {"of": name})
        for name, key in keys.items():
            assert cache.get(key) == {"of": name}, f"{name}: the entry of another key"
        assert cache.get(first) == {"of": "the first"}

    @promise(Level.L1, "Weights of another revision, encoder, tokenizer or LoRA, are a miss")
    def test_another_revision_is_a_miss(self, bench: CacheBench) -> None:
        cache, other = bench.cache(), bench.other()
        cache.put(bench.key(), {"of": "the old revision"})
        for name, change in _REVISIONS.items():
            for one in (cache, other):
                found = one.get(bench.key(**change), NOTHING)
                assert found is NOTHING, f"after an update of the {name} what the old one made is given: {found!r}"

    @promise(Level.L1, "A key that would not say everything is none, and nothing is cached")
    def test_an_incomplete_key_caches_nothing(self, bench: CacheBench) -> None:
        for name, change in _INCOMPLETE.items():
            with pytest.raises(IncompleteKey) as caught:
                pytest.fail(f"a key was made from {name}: {bench.key(**change)}")
            assert caught.value.context.get("field"), f"{name}: the refusal names no field"
        cache, encode = bench.cache(), Encoder()
        for _ in range(2):
            assert trees.digest(cache.get_or_encode(None, encode)) == encode.digest
        assert encode.calls == 2
        assert bench.stored() == [], "something was stored without a key"

    @promise(Level.L1, "Keys are told apart by every digit of their digests")
    def test_keys_that_differ_in_one_digit_are_two(self, bench: CacheBench) -> None:
        digits = "0123456789abcdef" * 4
        cache, other = bench.cache(), bench.other()
        cache.put(_Key(digits), {"of": digits})
        for at in (0, 7, 8, 15, 16, 31, 32, 63):
            near = digits[:at] + ("f" if digits[at] != "f" else "0") + digits[at + 1 :]
            for one in (cache, other):
                found = one.get(_Key(near), NOTHING)
                assert found is NOTHING, f"a key that differs in digit {at} was given {found!r}"
        assert other.get(_Key(digits)) == {"of": digits}

    @promise(Level.L1, "Requests that say the same in another form have one key")
    def test_the_same_in_another_form_is_one_key(self, bench: CacheBench) -> None:
        first = bench.key().digest
        assert bench.key(prompt=[FIELDS["prompt"]]).digest == first, "a list of one prompt"
        turned = dict(reversed(FIELDS["params"].items()))
        assert bench.key(params=turned).digest == first, "parameters in another order"
        assert bench.key(**_image(1)).digest == bench.key(**_image(1)).digest, "an image of the same content"
        label = repr(bench.key().label)
        assert FIELDS["prompt"] not in label, f"a label shows what a user wrote: {label}"

    @promise(Level.L1, "Every process makes the same key of the same request", requires=(Capability.PROCESSES,))
    def test_every_process_makes_the_same_key(self, bench: CacheBench) -> None:
        peer = bench.peer()
        for name, change in {"": {}, **_CHANGES}.items():
            assert peer.do("key", changes=change) == bench.key(**change).digest, name
