"""Two values have one digest just when they are one value, however they are nested."""

from __future__ import annotations

import struct
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonrelay.cache.keys import EmbeddingKey, canonical, digest_of

QUICK = settings(max_examples=200, deadline=None)

#: Few different ones, so that equal values come up.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.integers(),
    st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf")]),
    st.floats(),
    st.text("ab1:", max_size=3),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([torch.float16, torch.bfloat16]),
)
NAMES = st.one_of(st.text("ab", max_size=2), st.integers(0, 2), st.sampled_from(["mapping", "set", "dtype"]))
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(NAMES, inner, max_size=3),
        st.frozensets(st.text("ab", max_size=2), max_size=3),
        st.tuples(st.sampled_from(["uint8", "int8", "float16"]), st.lists(st.integers(0, 1), max_size=3)).map(
            lambda made: torch.tensor(made[1], dtype=getattr(torch, made[0]))
        ),
    ),
    max_leaves=8,
)


def model(value: Any) -> Any:
    """Return something hashable that is equal for two values just when they are one value to a key."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), tuple(value.tolist()))
    if type(value) is float:
        return ("float", struct.pack("<d", value))
    if type(value) in (list, tuple):
        return ("list", tuple(model(item) for item in value))
    if type(value) is dict:
        return ("dict", frozenset((model(name), model(part)) for name, part in value.items()))
    if type(value) is frozenset:
        return ("set", frozenset(model(item) for item in value))
    return (type(value).__name__, value)


@QUICK
@given(TREES, TREES)
def test_digests_are_equal_just_when_values_are(one: Any, other: Any) -> None:
    equal = model(one) == model(other)
    assert (digest_of(one) == digest_of(other)) is equal
    assert (canonical({"": one}) == canonical({"": other})) or not equal


@QUICK
@given(st.lists(TREES, max_size=4), st.lists(TREES, max_size=4))
def test_parts_are_told_apart(one: list[Any], other: list[Any]) -> None:
    assert (digest_of(*one) == digest_of(*other)) is (model(one) == model(other))


WORDS = st.text("ab@", min_size=1, max_size=3)
REVISIONS = st.tuples(st.text("ab", min_size=1, max_size=2), st.text("ab", min_size=1, max_size=2)).map("@".join)
PARAMS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["bf16", "fp16", torch.bfloat16]),
        "max_length": st.sampled_from([None, 1, 2]),
        "lora": st.one_of(st.none(), st.dictionaries(REVISIONS, st.sampled_from([0.5, 1, 1.0]), max_size=2)),
    },
    optional={"clip_skip": st.sampled_from([None, 1, True, 1.0])},
)
FIELDS = st.fixed_dictionaries(
    {
        "encoder": REVISIONS,
        "prompt": st.one_of(st.text("ab", max_size=2), st.lists(st.text("ab", max_size=2), min_size=1, max_size=2)),
        "role": WORDS,
        "params": PARAMS,
        "tokenizer": st.one_of(st.none(), REVISIONS),
        "template": st.one_of(st.none(), WORDS),
        "images": st.lists(st.binary(max_size=1), max_size=2),
    }
)


def said(fields: dict[str, Any]) -> Any:
    """Return what two keys must have in common to be one."""
    prompt = [fields["prompt"]] if isinstance(fields["prompt"], str) else fields["prompt"]
    loras = [(name, float(scale)) for name, scale in (fields["params"]["lora"] or {}).items()] or None
    return model({**fields, "prompt": prompt, "params": {**fields["params"], "lora": loras}})


@QUICK
@given(FIELDS, st.data())
def test_one_field_changed_is_another_key(fields: dict[str, Any], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(fields)))
    changed = {**fields, name: data.draw(FIELDS)[name]}
    same = said(changed) == said(fields)
    assert (EmbeddingKey(**changed) == EmbeddingKey(**fields)) is same


@QUICK
@given(FIELDS, FIELDS)
def test_two_keys_are_one_just_when_all_they_say_is(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (EmbeddingKey(**one).digest == EmbeddingKey(**other).digest) is (said(one) == said(other))
