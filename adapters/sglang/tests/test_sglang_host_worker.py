"""Our hooks in the real host: all in place, its requests through our manager, its own tests with the adapter active."""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonrelay_sglang import config, plugin, worker_hooks
from moonrelay_sglang.manager import PayloadManager, manager_class

pytestmark = pytest.mark.sglang

RUNTIME = "sglang.multimodal_gen.runtime"
#: The host's unit tests of what we hook, in its wheel, with how many of them there are; the last takes hooks away.
THEIRS = {
    "test_disagg_orchestration.py": 44,
    "test_disagg_extra_tensors.py": 8,
    "test_disagg_trace.py": 3,
    "test_diffusion_plugins.py": 19,
}
#: Runs in a process of its own: applies all plugins' hooks, as the host's commands do, and then its tests.
RUN = """
import json, sys, warnings
warnings.simplefilter("ignore")
import pytest
from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks
from moonrelay_sglang import plugin, worker_hooks
apply_plugin_hooks()
plugin.verify()
if sys.argv[1] == "chosen":
    worker_hooks._chosen_here = lambda: True

class Count:
    def __init__(self):
        self.outcomes = {}
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

count = Count()
pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:moonrelay_conformance", "--rootdir", "/", "-c", "/dev/null",
             "--import-mode=importlib", "-W", "ignore", *sys.argv[2:]], plugins=[count])
print("OUTCOMES", json.dumps(count.outcomes))
"""


@pytest.fixture(scope="module")
def hooked(host: None) -> None:
    """The host with all plugins' hooks, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{RUNTIME}.platforms.plugins").apply_plugin_hooks()


@pytest.fixture
def pair(hooked: None) -> Iterator[tuple[PayloadManager, PayloadManager]]:
    """A sender's and a receiver's manager, as the host is given them."""
    made = []
    for role in ("encoder", "denoiser"):
        settings = config.from_server_args(SimpleNamespace(disagg_role=role), {"engine": "memory"})
        made.append(manager_class()(settings, epoch=secrets.token_hex(4), pipeline="WanPipeline"))
    yield made[0], made[1]
    for manager in made:
        manager.cleanup()


def test_all_hooks_are_in_place(hooked: None) -> None:
    plugin.verify()


def test_a_hook_that_cannot_be_applied_is_named(hooked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = plugin.Hook(f"{plugin._WORKER}._gone", "worker_hooks:around_cleanup")
    monkeypatch.setattr(plugin, "HOOKS", (*plugin.HOOKS, gone))
    with pytest.raises(Exception, match="_gone is not in place"):
        plugin.verify()


def test_the_command_line_takes_us(hooked: None) -> None:
    import argparse

    server_args = importlib.import_module(f"{RUNTIME}.server_args")
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_disagg_cli_args(parser)
    found = parser.parse_args(["--disagg-transfer-backend", "moonrelay", "--disagg-dispatch-policy", "credits"])
    assert config.is_chosen(found)
    assert found.disagg_dispatch_policy == "credits"


def test_the_manager_is_the_hosts_and_leaves_nothing_to_it(pair: tuple[PayloadManager, PayloadManager]) -> None:
    theirs = importlib.import_module(f"{RUNTIME}.disaggregation.transport.manager").DiffusionTransferManager
    assert isinstance(pair[0], theirs)
    for name in vars(theirs):
        if not name.startswith("_"):
            assert getattr(type(pair[0]), name) is not getattr(theirs, name), f"{name} works on the host's own pool"


def carried(req: Any, pair: tuple[PayloadManager, PayloadManager]) -> Any:
    """Carry a request as the roles do: our extraction, the host's JSON, its rebuilding."""
    mixin = importlib.import_module(f"{RUNTIME}.disaggregation.scheduler_mixin")
    sender, receiver = pair
    tensors, scalars = mixin.extract_transfer_fields(req)
    staged, _ = sender.stage_tensors_async("r", tensors, scalars)
    message = json.loads(json.dumps({"manifest": staged.manifest, "scalar_fields": staged.scalar_fields}))
    loaded = receiver.load("r", message["manifest"], device="cpu:0")
    role = SimpleNamespace(_disagg_sampling_params_cls=type(req.sampling_params))
    try:
        return mixin.SchedulerDisaggMixin._build_disagg_req(
            role, {**message["scalar_fields"], **loaded.values}, loaded.tensors
        )
    finally:
        receiver.done("r")


def make_request(**given: Any) -> Any:
    batch = importlib.import_module(f"{RUNTIME}.pipelines_core.schedule_batch")
    params = importlib.import_module("sglang.multimodal_gen.configs.sample.sampling_params")
    sampling = params.SamplingParams(prompt="a cat", seed=42, num_frames=5, request_id="r")
    return batch.Req(sampling_params=sampling, **given)


def test_what_the_host_loses_arrives(
    pair: tuple[PayloadManager, PayloadManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    image_module = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(worker_hooks, "_chosen_here", lambda: True)
    picture = image_module.new("RGB", (4, 3), (1, 2, 3))
    embeds, mask = torch.randn(1, 3), torch.ones(2, dtype=torch.bool)
    req = make_request(
        image_embeds=[embeds],
        condition_image=[picture],
        vae_image_sizes=[(4, 3)],
        original_condition_image_size=(4, 3),
        prompt_attention_mask=[mask, None],
        latents=torch.randn(1, 2).to(torch.bfloat16),
        raw_latent_shape=(1, 2),
        n_tokens=7,
        generator=torch.Generator(),
        extra={"mu": 1.5, "shapes": [(1, 2)], "ids": {"text": torch.arange(3)}, "_own": object()},
    )
    got = carried(req, pair)
    assert torch.equal(got.image_embeds[0], embeds)
    assert got.condition_image[0].tobytes() == picture.tobytes()
    assert (got.vae_image_sizes, got.original_condition_image_size) == ([(4, 3)], (4, 3))
    assert torch.equal(got.prompt_attention_mask[0], mask)
    assert got.prompt_attention_mask[1] is None
    assert torch.equal(got.latents, req.latents)
    assert got.raw_latent_shape == (1, 2)
    assert (got.n_tokens, got.prompt, got.seed, got.num_frames) == (7, "a cat", 42, 5)
    assert got.extra["shapes"] == [(1, 2)]
    assert got.extra["mu"] == 1.5
    assert torch.equal(got.extra["ids"]["text"], torch.arange(3))
    assert "_own" not in got.extra
    assert got.generator.initial_seed() == 42


def test_what_cannot_be_carried_is_named(
    pair: tuple[PayloadManager, PayloadManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_hooks, "_chosen_here", lambda: True)
    with pytest.raises(Exception, match="'session'"):
        carried(make_request(session=object()), pair)
    assert carried(make_request(latents=torch.ones(1)), pair).latents == 1


def test_all_other_fields_arrive_as_they_were(
    pair: tuple[PayloadManager, PayloadManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    monkeypatch.setattr(worker_hooks, "_chosen_here", lambda: True)
    req = make_request(latents=torch.ones(2), prompt_embeds=[torch.ones(2)], height_latents=3, sigmas=[0.5, 1.0])
    got = carried(req, pair)
    for found in dataclasses.fields(req.sampling_params):
        if found.name not in ("data_type", "supported_resolutions", "teacache_params"):
            ours, theirs = getattr(req.sampling_params, found.name), getattr(got.sampling_params, found.name)
            assert theirs == ours or type(ours).__module__.startswith("sglang"), found.name
    assert (got.height_latents, got.sigmas) == (3, [0.5, 1.0])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("chosen", ["there", "chosen"])
def test_the_hosts_own_tests_pass(hooked: None, tmp_path: Path, chosen: str) -> None:
    spec = importlib.util.find_spec("sglang.multimodal_gen.test.unit")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    files = [str(Path(next(iter(spec.submodule_search_locations))) / name) for name in THEIRS]
    command = [sys.executable, "-c", RUN, chosen, *files]
    run = subprocess.run(command, capture_output=True, text=True, timeout=840, cwd=tmp_path, check=False)
    line = next((line for line in run.stdout.splitlines() if line.startswith("OUTCOMES ")), None)
    assert line is not None, run.stdout[-3000:] + run.stderr[-3000:]
    outcomes: dict[str, str] = json.loads(line.removeprefix("OUTCOMES "))
    bad = {test: outcome for test, outcome in outcomes.items() if outcome == "failed"}
    assert not bad, f"{bad}\n{run.stdout[-3000:]}"
    for name, count in THEIRS.items():
        passed = sum(name in test and outcome == "passed" for test, outcome in outcomes.items())
        assert passed >= count, f"{passed} of {count} of {name}\n{run.stdout[-3000:]}"
