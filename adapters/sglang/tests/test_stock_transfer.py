"""What two roles' managers make of a request's fields, one backend beside the other; no process is started.

Each test says what is right. Where the host's own backend does otherwise, its case is expected to fail and the reason
says how: should a release of the host mend it, the case fails for that, and the reason goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sglang_backends import PAIRS, Refused, backends

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("host")]

MIB = 1 << 20
#: What a transfer may cost beside the bytes of its tensors.
OVERHEAD = 64 << 10


@pytest.fixture
def pair(backend: str) -> Iterator[Any]:
    made = PAIRS[backend]()
    yield made
    made.close()


@pytest.fixture
def request_of() -> Callable[..., Any]:
    """Makes a request of the host with these fields."""

    def make(**fields: Any) -> Any:
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.pipelines_core import Req

        return Req(sampling_params=SamplingParams(prompt="a cat"), **fields)

    return make


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


def same(left: Any, right: torch.Tensor) -> bool:
    """Say whether something is that tensor, bit for bit; its dtype need not be one that can be compared."""
    if not isinstance(left, torch.Tensor) or left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(*(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (left, right)))


@backends(PAIRS)
def test_tensors_lists_and_scalars_arrive(pair: Any) -> None:
    latents, embeds = noise(1, 16, 2, 8, 8), [noise(1, 77, 64, dtype=torch.bfloat16)]
    tensors, scalars = pair.carry({"latents": latents, "prompt_embeds": embeds}, {"seed": 3, "prompt": "ä"})
    assert same(tensors["latents"], latents)
    assert same(tensors["prompt_embeds"][0], embeds[0])
    assert scalars == {"seed": 3, "prompt": "ä"}
    assert pair.held_bytes == 0


@backends(PAIRS, "rounds up to the next power of two and sends that: 8 MiB for 5 MiB")
def test_only_the_bytes_of_the_tensors_are_sent(pair: Any) -> None:
    pair.carry({"latents": noise(5 * MIB // 4)})
    assert pair.wire_bytes <= 5 * MIB + OVERHEAD


@backends(PAIRS, "does not count what it aligns by, and writes past the slot", ValueError)
def test_many_small_tensors_fit_where_their_bytes_do(pair: Any) -> None:
    sent = {"small": noise(1, dtype=torch.bfloat16), "large": noise(MIB // 2 - 1, dtype=torch.bfloat16)}
    tensors, _ = pair.carry(sent)
    assert all(same(tensors[name], value) for name, value in sent.items())


@backends(PAIRS, "a tensor of no dimensions cannot be viewed as bytes", RuntimeError)
def test_a_tensor_of_no_dimensions_arrives(pair: Any) -> None:
    value = torch.tensor(0.5, dtype=torch.bfloat16)
    tensors, _ = pair.carry({"latents": noise(4), "guidance": value})
    assert same(tensors["guidance"], value)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16"])
@backends(PAIRS, "stages it, and the receiver does not know the dtype", ValueError)
def test_every_dtype_arrives(pair: Any, dtype: str) -> None:
    value = noise(4, 8).abs().to(getattr(torch, dtype))
    tensors, _ = pair.carry({"latents": value})
    assert same(tensors["latents"], value)


@backends(PAIRS, "expects a tensor at every place of a list", AttributeError)
def test_none_after_a_tensor_in_a_list_arrives(pair: Any) -> None:
    mask = noise(1, 8)
    tensors, _ = pair.carry({"prompt_attention_mask": [mask, None]})
    first, second = tensors["prompt_attention_mask"]
    assert same(first, mask)
    assert second is None


@backends(PAIRS, "takes the list for plain values and makes numbers of its tensors")
def test_none_before_a_tensor_in_a_list_arrives(pair: Any, request_of: Callable[..., Any]) -> None:
    mask = noise(1, 8)
    carried = pair.carry_request(request_of(latents=noise(4), prompt_attention_mask=[None, mask]))
    first, second = carried.prompt_attention_mask
    assert first is None
    assert same(second, mask)


@backends(PAIRS, "makes a list of numbers of it")
def test_a_tuple_of_tensors_arrives_as_one(pair: Any, request_of: Callable[..., Any]) -> None:
    sent = (noise(2, 3), noise(3))
    carried = pair.carry_request(request_of(latents=noise(4), noise_pred=sent))
    assert isinstance(carried.noise_pred, tuple)
    assert all(same(got, one) for got, one in zip(carried.noise_pred, sent, strict=True))


@backends(PAIRS, "takes no payload of zero bytes on the way over an allocated slot", ValueError)
def test_a_request_without_tensors_arrives(pair: Any) -> None:
    tensors, scalars = pair.carry({}, {"seed": 3})
    assert tensors == {}
    assert scalars["seed"] == 3


@backends(PAIRS)
def test_an_empty_tensor_arrives(pair: Any) -> None:
    tensors, _ = pair.carry({"latents": noise(4), "nothing": torch.empty(0, 4)})
    assert same(tensors["nothing"], torch.empty(0, 4))


@backends(PAIRS, "leaves the image's embeddings behind: the denoiser of an image-to-video model has none")
def test_image_embeddings_arrive(pair: Any, request_of: Callable[..., Any]) -> None:
    sent = [noise(1, 257, 64)]
    carried = pair.carry_request(request_of(latents=noise(4), image_embeds=sent))
    assert len(carried.image_embeds) == 1
    assert same(carried.image_embeds[0], sent[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("condition_image", noise(1, 3, 8, 8)),
        ("pixel_values", noise(1, 3, 8, 8)),
        ("vae_image_sizes", [(8, 8)]),
    ],
)
@backends(PAIRS, "leaves it behind without a word")
def test_other_conditioning_arrives(pair: Any, request_of: Callable[..., Any], field: str, value: Any) -> None:
    carried = getattr(pair.carry_request(request_of(latents=noise(4), **{field: value})), field)
    if isinstance(value, torch.Tensor):
        assert same(carried, value)
    else:
        assert [tuple(one) for one in carried or ()] == value


@backends(PAIRS, "finds out when the message is written, too late to answer for the request", TypeError)
def test_a_value_that_is_not_json_is_refused_by_name(pair: Any, request_of: Callable[..., Any]) -> None:
    req = request_of(latents=noise(4), n_tokens=object())
    with pytest.raises(Refused, match="n_tokens"):
        pair.carry_request(req)


@backends(PAIRS, "keeps the slot of what it could not stage")
def test_a_failure_while_staging_keeps_no_memory(pair: Any) -> None:
    class Broken(torch.Tensor):
        def contiguous(self, *_args: Any, **_more: Any) -> torch.Tensor:
            message = "a fault that the test asked for"
            raise RuntimeError(message)

    with pytest.raises((RuntimeError, Refused)):
        pair.stage("a", {"latents": noise(4).as_subclass(Broken)}, {})
    pair.drop("a")
    assert pair.held_bytes == 0


@backends(PAIRS, "forgets the first slot of a request that is staged twice")
def test_a_request_staged_twice_holds_memory_once(pair: Any) -> None:
    for _ in range(2):
        pair.stage("a", {"latents": noise(4)}, {})
    pair.drop("a")
    assert pair.held_bytes == 0


@backends(PAIRS)
def test_what_is_larger_than_the_pool_is_refused_or_arrives(pair: Any) -> None:
    large = noise(40 * MIB // 4)
    try:
        tensors, _ = pair.carry({"latents": large})
    except Refused:
        pass
    else:
        assert same(tensors["latents"], large)
    assert pair.held_bytes == 0
    tensors, _ = pair.carry({"latents": noise(4)}, request="b")
    assert same(tensors["latents"], noise(4))
