"""What of a request travels, in which form, on which hop; and what is refused by name."""

from __future__ import annotations

import enum
import logging
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moonrelay.errors import UnsupportedTensor, WireError
from moonrelay.payload import StagePayload, flatten
from moonrelay_sglang import fields


class Kind(enum.Enum):
    VIDEO = 1


@dataclass
class Sampling:
    prompt: str | None = None
    guidance_scale: float | None = 5.0
    sizes: tuple[int, int] | None = None
    data_type: Kind = Kind.VIDEO


@dataclass
class Request:
    """The host's ``Req``, as far as it matters."""

    sampling_params: Sampling | None = None
    generator: Any = None
    image_embeds: list[torch.Tensor] = field(default_factory=list)
    condition_image: Any = None
    scheduler: Any = None
    latents: torch.Tensor | None = None
    prompt_embeds: Any = field(default_factory=list)
    masks: Any = None
    shape: tuple[int, ...] | None = None
    eta: float = 0.0
    seeds: list[int] | None = None
    kind: Kind | None = None
    wanted: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    trace_ctx: Any = None


LEFT = frozenset({"sampling_params", "generator", "image_embeds", "condition_image", "scheduler", "extra", "trace_ctx"})


def extract(request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
    return fields.extract(request, left=LEFT, left_of_sampling={"data_type"})


def through(value: Any) -> Any:
    """Pack, see that the core carries it, unpack."""
    packed = fields.pack(value, "it")
    flatten(StagePayload(request_id="r", kind="test", data={"it": packed}))
    return fields.unpack(packed)


def test_tensors_and_the_rest_are_parted() -> None:
    latents, embeds = torch.ones(2), [torch.zeros(1), torch.zeros(2)]
    tensors, values = extract(Request(latents=latents, prompt_embeds=embeds, shape=(1, 2), eta=0.5, kind=Kind.VIDEO))
    assert tensors == {"latents": latents, "prompt_embeds": embeds}
    assert values == {"shape": (1, 2), "eta": 0.5, "kind": "VIDEO"}


def test_what_the_host_forgets_is_carried() -> None:
    embeds = [torch.ones(3)]
    tensors, values = extract(Request(image_embeds=embeds, condition_image=torch.ones(1), scheduler=object()))
    assert tensors["image_embeds"] is embeds
    assert "condition_image" in tensors
    assert "scheduler" not in values


def test_defaults_stay_and_a_none_in_a_defaults_place_travels() -> None:
    assert extract(Request()) == ({}, {})
    assert extract(Request(wanted=None)) == ({}, {"wanted": None})  # type: ignore[arg-type]
    assert extract(Request(eta=0)) == ({}, {"eta": 0}), "an int is no float"


def test_sampling_parameters_travel_whole() -> None:
    _, values = extract(Request(sampling_params=Sampling(prompt="a cat", sizes=(3, 4))))
    assert values == {"prompt": "a cat", "guidance_scale": 5.0, "sizes": (3, 4)}
    _, values = extract(Request(sampling_params=Sampling(guidance_scale=None)))
    assert values == {"guidance_scale": None}, "its receiver would take 5.0 otherwise"


def test_lists_with_gaps_are_no_lists_of_tensors() -> None:
    gaps = [torch.ones(1), None]
    tensors, values = extract(Request(masks=gaps))
    assert tensors == {}
    assert values["masks"] is gaps


def test_extras_travel_with_tensors_inside_and_without_what_is_the_hosts(caplog: pytest.LogCaptureFixture) -> None:
    extra = {"mu": 1.5, "tree": {"a": (torch.ones(1), None)}, "_own": object(), "hook": object(), "size": (1, 2)}
    with caplog.at_level(logging.WARNING):
        _, values = extract(Request(extra=extra))
    assert set(values) == {"_extra_mu", "_extra_tree", "_extra_size"}
    assert "extra['hook']" in caplog.text


def test_the_host_takes_tensors_out_of_extras_where_it_can() -> None:
    def trees(extra: Any, tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
        if "plain" in extra:
            tensors["_tree_plain"], scalars["_tree_plain"] = [extra["plain"][0]], {"spec": ""}

    plain, other = (torch.ones(1), 1), [torch.ones(1), 1 << 70]
    tensors, values = fields.extract(Request(extra={"plain": plain, "other": other, "mu": 1}), left=LEFT, trees=trees)
    assert tensors == {"_tree_plain": [plain[0]]}
    assert values == {"_tree_plain": {"spec": ""}, "_extra_other": other, "_extra_mu": 1}


def test_an_extra_with_a_tensor_in_something_foreign_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTensor, match="extra\\['mixed'\\]"):
        extract(Request(extra={"mixed": [torch.ones(1), object()]}))


def test_json_keeps_what_it_keeps() -> None:
    exact = {"a": 1, "b": [1.5, None, True, "ä"], "c": {"d": []}}
    plain, packed = fields.split(exact)
    assert (plain, packed) == (exact, {})


@pytest.mark.parametrize(
    "value", [(1, 2), b"x", math.nan, math.inf, 1 << 70, {1: 2}, [(1,)], {"a": {3}}, {"__moonrelay__": 1}, 1 + 2j]
)
def test_what_json_would_change_goes_with_the_payload(value: Any) -> None:
    plain, packed = fields.split({"it": value})
    assert plain == {}
    back = fields.unpack(packed["it"])
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        [torch.ones(2), None, torch.tensor(3.0)],
        (torch.ones(1), {"a": [torch.empty(0)]}),
        torch.ones(4).to(torch.float8_e4m3fn),
        {"shape": torch.Size([1, 2]), "dtype": torch.bfloat16},
    ],
)
def test_trees_come_back_as_they_were(value: Any) -> None:
    back = through(value)
    assert repr(back) == repr(value)


def test_arrays_and_images_come_back() -> None:
    np = pytest.importorskip("numpy")
    image_module = pytest.importorskip("PIL.Image")
    for array in (np.arange(6, dtype=np.float32).reshape(2, 3), np.array(1.5), np.zeros((0, 3), np.uint16)):
        back = through(array)
        assert back.dtype == array.dtype
        assert np.array_equal(back, array)
        assert back.shape == array.shape
    assert through(np.float32(1.5)) == 1.5
    image = image_module.new("RGB", (3, 2), (1, 2, 3))
    back = through([image])[0]
    assert (back.mode, back.size, back.tobytes()) == (image.mode, image.size, image.tobytes())


def test_foreign_things_are_refused_by_name() -> None:
    np = pytest.importorskip("numpy")
    image_module = pytest.importorskip("PIL.Image")
    for value in (object(), [{"a": lambda: 1}], np.array([object()]), image_module.new("P", (1, 1)), slice(1)):
        with pytest.raises(UnsupportedTensor, match=r"side\[0\]") as caught:
            fields.split({"side": (value,)})
        assert str(caught.value.context["field"]).startswith("side[0]")


def test_what_contains_itself_is_refused_by_name() -> None:
    endless: list[Any] = [1.5]
    endless.append(endless)
    with pytest.raises(UnsupportedTensor, match="contains itself") as caught:
        fields.split({"sizes": [1], "endless": endless})
    assert caught.value.context["field"] == "endless"
    with pytest.raises(UnsupportedTensor, match="contains itself"):
        extract(Request(extra={"endless": {"a": (torch.ones(1), endless)}}))


def test_an_unknown_mark_is_refused() -> None:
    with pytest.raises(WireError, match="install the same"):
        fields.unpack({"__moonrelay__": "sphere"})


def test_subclasses_of_plain_types_are_sent_as_their_value() -> None:
    class Word(str):
        __slots__ = ()

    assert type(through(Word("a"))) is str


def test_a_plain_decoder_is_not_sent_the_prompts() -> None:
    given = {"latents": 1, "prompt_embeds": 2, "image_embeds": 3, "trajectory_latents": 4, "anything_new": 5}
    assert fields.needed("denoiser", "WanPipeline", given).keys() == {"latents", "trajectory_latents", "anything_new"}
    assert fields.needed("denoiser", "LTX2Pipeline", given) == given, "its decoder may read what it likes"
    assert fields.needed("encoder", "WanPipeline", given) == given
    assert fields.needed("denoiser", "", given) == given


def test_bytes_of_a_tree() -> None:
    assert fields.nbytes_of({"a": [torch.ones(2), (torch.empty(0), None)], "b": torch.tensor(1, dtype=torch.int8)}) == 9
