"""What the stages decide without their host: the next one's prompt, and what an empty negative condition means."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from moonrelay_vllm_omni.pipelines import common, handover, qwen_image, registration, wan


@pytest.mark.parametrize("asked", ["a fox", ["a fox"], {"prompt": "a fox"}, [{"prompt": "a fox"}]])
def test_the_next_stage_is_asked_by_a_dict(asked: Any) -> None:
    # For text the host would not look for the payload at all.
    assert handover.next_prompt([], asked, False) == {"prompt": "a fox"}


def test_the_next_stages_prompt_is_its_own() -> None:
    asked: dict[str, Any] = {"prompt": "a", "negative_prompt": "b", "additional_information": {"mine": 1}}
    own = handover.next_prompt([], asked)
    assert own == asked
    assert own is not None
    own["additional_information"]["latents"] = torch.zeros(1)
    own["more"] = 1
    assert asked == {"prompt": "a", "negative_prompt": "b", "additional_information": {"mine": 1}}


@pytest.mark.parametrize("asked", [["a", "b"], [], 7, None])
def test_other_prompts_fail_the_request(asked: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert handover.next_prompt([], asked) is None
    assert "cannot be handed to the next stage" in caplog.text


def test_an_empty_negative_condition_is_none() -> None:
    held = {
        "prompt_embeds": torch.ones(2, 3),
        "negative_prompt_embeds": torch.ones(0, 3),
        "negative_prompt_embeds_mask": torch.ones(0),
    }
    common.drop_empty_negative({"prompt": "a", "additional_information": held})
    assert held.keys() == {"prompt_embeds"}


@pytest.mark.parametrize("prompt", ["a fox", {"prompt": "a fox"}, {"additional_information": None}])
def test_where_nothing_was_received_nothing_is_dropped(prompt: Any) -> None:
    common.drop_empty_negative(prompt)
    assert common.additional_information(prompt) == {}


def test_a_real_negative_condition_stays() -> None:
    held = {"negative_prompt_embeds": torch.ones(1, 3), "negative_prompt_embeds_mask": torch.ones(1)}
    common.drop_empty_negative({"additional_information": held})
    assert len(held) == 2


@pytest.mark.parametrize("module", [qwen_image, wan])
def test_no_other_names_are_made_up(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match="Nonesuch"):
        module.Nonesuch  # noqa: B018


@pytest.mark.parametrize("family", registration.FAMILIES, ids=lambda family: family.pipeline)
def test_every_stage_is_there_and_hands_over_what_the_host_looks_for(family: registration.Family) -> None:
    names = importlib.import_module(family.module).NAMES
    assert sorted(names) == sorted(family.classes + role for role in registration.ROLES)
    assert "prompt_embeds" in family.condition
    assert "latents" in family.result


def test_naming_the_pipelines_imports_nothing_heavy() -> None:
    code = (
        "import sys; from moonrelay_vllm_omni.pipelines import handover, qwen_image, registration, wan; "
        "print(sorted({'torch', 'vllm', 'vllm_omni', 'diffusers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
