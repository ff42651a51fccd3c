"""The seam for an embedding cache in the host's own stage, with its requests and a real pipeline's settings.

Its encoder is a double of one method: what it computes is not looked at here, what is asked for and kept is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonrelay_sglang import conditioning
from moonrelay_sglang.conditioning import ConditionKey

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("host")]

#: What hooks have kept, per test.
KEPT: list[dict[str, Any]] = []


def make() -> Any:
    kept = KEPT[-1]

    def hook(key: ConditionKey, encode: Callable[[], Mapping[str, object]]) -> Any:
        if key.digest not in kept:
            kept[key.digest] = encode()
        return kept[key.digest]

    return hook


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("MOONRELAY_SGLANG", f'{{"condition_hook": "{__name__}:make", "encoder_revision": "test"}}')
    KEPT.append({})
    yield KEPT[-1]
    KEPT.pop()


@pytest.fixture
def stage_of() -> Callable[[], Any]:
    """Makes a stage of the host whose encoder counts."""
    from sglang.multimodal_gen.runtime.pipelines_core.stages.text_encoding import TextEncodingStage

    class Tokenizer:
        pass

    def make_stage() -> Any:
        stage = object.__new__(TextEncodingStage)
        stage.text_encoders, stage.tokenizers, stage.texts = [torch.nn.Linear(2, 2)], [Tokenizer()], []

        def encode_text(text: str, *_args: Any, **_more: Any) -> Any:
            stage.texts.append(text)
            embeds = torch.full((1, 4, 3), float(len(stage.texts)), dtype=torch.bfloat16)
            mask = torch.ones(1, 4, dtype=torch.long)
            return [embeds], [mask], [], [mask.bool()], [[4]]

        stage.encode_text = encode_text
        return stage

    return make_stage


@pytest.fixture
def args() -> Any:
    from sglang.multimodal_gen.configs.pipeline_configs.wan import WanT2V480PConfig

    return SimpleNamespace(
        disagg_transfer_backend="moonrelay",
        disagg_role="encoder",
        model_path="org/model",
        num_gpus=1,
        pipeline_config=WanT2V480PConfig(),
    )


def request(prompt: str, **more: Any) -> Any:
    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.pipelines_core import Req

    return Req(sampling_params=SamplingParams(prompt=prompt, negative_prompt="blurred", guidance_scale=5.0), **more)


def run(stage: Any, batch: Any, args: Any) -> Any:
    from sglang.multimodal_gen.runtime.pipelines_core.stages.text_encoding import TextEncodingStage

    return conditioning.around_forward(TextEncodingStage.forward, stage, batch, args)


def test_the_seam_finds_what_it_needs_in_the_host(kept: dict[str, Any], stage_of: Callable[[], Any], args: Any) -> None:
    first, second, stock = stage_of(), stage_of(), stage_of()
    one = run(first, request("a fox"), args)
    other = run(second, request("a fox"), args)
    right = stock.forward(request("a fox"), args)
    assert first.texts == ["a fox", "blurred"]
    assert second.texts == []
    assert len(kept) == 1
    for name in first.deduplicated_output_fields:
        wanted = getattr(right, name)
        for made in (getattr(one, name), getattr(other, name)):
            assert type(made) is type(wanted), name
            if isinstance(wanted, list) and wanted and isinstance(wanted[0], torch.Tensor):
                assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(made, wanted, strict=True)), name
            else:
                assert made == wanted, name


def test_requests_that_differ_are_encoded_each(kept: dict[str, Any], stage_of: Callable[[], Any], args: Any) -> None:
    stage = stage_of()
    run(stage, request("a fox"), args)
    run(stage, request("a wolf"), args)
    longer = request("a fox")
    longer.max_sequence_length = 77
    run(stage, longer, args)
    assert len(kept) == 3


def test_a_large_tensor_in_a_fingerprint_makes_no_key(
    kept: dict[str, Any], stage_of: Callable[[], Any], args: Any
) -> None:
    """The host's fingerprint of two such tensors is the same."""
    for value in (torch.zeros(300), torch.ones(300)):
        batch = request("a fox")
        batch.prompt_template = {"image": value}
        stage = stage_of()
        run(stage, batch, args)
        assert stage.texts
    assert kept == {}


def test_weights_that_were_changed_are_nobodys(
    kept: dict[str, Any], stage_of: Callable[[], Any], args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.multimodal_gen.runtime.cache import conditioning as of_the_host

    monkeypatch.setattr(of_the_host, "_weights_epoch", 1)
    run(stage_of(), request("a fox"), args)
    assert kept == {}
