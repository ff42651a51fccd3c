"""Our mixin under the double's runners: several roles give what one process gives, and a failure stays with itself."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightx2v_double as double
import numpy as np
import pytest
import torch

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import ClosedError, ConfigError
from moonrelay_lightx2v.mixin import dispatching, end_of

REQUEST: dict[str, Any] = {"prompt": "a red cat", "negative_prompt": "blue dog", "seed": 7, "target_shape": []}
OURS: dict[str, Any] = {
    "connector": "moonrelay",
    "engine": "memory",
    "staging_bytes": 1 << 20,
    "transfer_timeout_s": 20.0,
    "peer_timeout_s": 10.0,
    "retry_s": 0.2,
    "claim_ttl_s": 1.0,
}


@pytest.fixture(autouse=True)
def the_hosts_platform(tmp_path: Path) -> Iterator[None]:
    with double.installed(tmp_path / "host"):
        yield


class Stages:
    """Roles of one deployment in this process, each with a server's worker."""

    def __init__(self, task: str, stages: int = 3, *, mixin: type | None = None, **section: Any) -> None:
        self.mixin = mixin or dispatching(double.native_mixin())
        self.workers: dict[str, double.Worker] = {}
        port: int | None = None
        for role in ("encoder", "transformer", "decode")[:stages]:
            disagg = {**OURS, **section, "rendezvous_port": 0}
            if port is not None:
                disagg["bootstrap_addr"] = f"127.0.0.1:{port}"
            runner = double.runner_of(double.settings_of(role, task=task, stages=stages, disagg=disagg), self.mixin)
            self.workers[role] = double.Worker(runner)
            address = link_of(runner).address
            port = None if address is None else address[1]
        self._pool = ThreadPoolExecutor(max_workers=4)

    def runner(self, role: str) -> Any:
        return self.workers[role].runner

    def post(self, role: str, task_id: str = "t", **request: Any) -> dict[str, Any]:
        return self.workers[role].process(task_id, **{**REQUEST, **request})

    def later(self, role: str, task_id: str = "t", **request: Any) -> Future[dict[str, Any]]:
        return self._pool.submit(self.post, role, task_id, **request)

    def all(self, task_id: str = "t", **request: Any) -> dict[str, Any]:
        """Post one body with one id to all roles, and return the last one's answer."""
        for role in self.workers:
            answer = self.post(role, task_id, **request)
            assert answer["status"] == "success", answer
        return answer

    def close(self) -> None:
        self._pool.shutdown()
        for worker in self.workers.values():
            worker.runner.release_disagg()


@pytest.fixture
def start() -> Iterator[Any]:
    made: list[Stages] = []

    def build(*args: Any, **kwargs: Any) -> Stages:
        made.append(Stages(*args, **kwargs))
        return made[-1]

    yield build
    for stages in made:
        stages.close()


def link_of(runner: Any) -> Any:
    end = end_of(runner)
    assert end is not None
    return end.link


def right(task: str, **request: Any) -> torch.Tensor:
    """What one process makes of a request."""
    runner = double.runner_of(double.settings_of(None, task=task), double.native_mixin())
    return made_by(double.Worker(runner).process(**{**REQUEST, **request}))


def made_by(answer: dict[str, Any]) -> torch.Tensor:
    assert answer["status"] == "success", answer
    (made,) = answer["pipeline_return"].values()
    assert isinstance(made, torch.Tensor)
    return made


def settle(stages: Stages) -> None:
    deadline = Deadline(10.0, SystemClock())
    while any(any(link_of(worker.runner).in_use().values()) for worker in stages.workers.values()):
        assert not deadline.expired, [dict(link_of(worker.runner).in_use()) for worker in stages.workers.values()]
        threading.Event().wait(0.02)


# -- the same as in one process ---------------------------------------------------------------------------------------

IMAGES: dict[str, Any] = {"image_path": "data:one,data:two"}


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    ("task", "request_"),
    [
        ("t2v", {}),
        ("t2v", {"target_shape": [64, 80]}),
        ("i2v", {"image_path": "data:cat"}),
        ("t2i", {}),
        ("t2i", {"target_shape": [64, 96]}),
        ("i2i", {"image_path": "data:cat"}),
        ("i2i", {"image_path": "data:one,data:two,data:three"}),
    ],
)
def test_one_process_and_several_give_the_same(start: Any, task: str, stages: int, request_: dict[str, Any]) -> None:
    deployment = start(task, stages)
    for seed in (7, 8):
        found = made_by(deployment.all(f"t{seed}", seed=seed, **request_))
        assert torch.equal(found, right(task, seed=seed, **request_))
        del found
    settle(deployment)


def test_what_runners_get_is_what_was_sent(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    deployment = start("i2i", 3)
    seen: dict[str, Any] = {}
    encoder, transformer, decoder = (deployment.runner(role) for role in deployment.workers)

    def spy(runner: Any, name: str) -> None:
        call = getattr(runner, name)

        def called(*args: Any) -> Any:
            result = call(*args)
            seen[name] = (args, result)
            return result

        monkeypatch.setattr(runner, name, called)

    spy(encoder, "send_encoder_outputs")
    spy(transformer, "receive_encoder_outputs")
    spy(transformer, "send_transformer_outputs")
    spy(decoder, "receive_transformer_outputs")
    inner = encoder.run_input_encoder

    def with_numpy() -> Any:
        made = inner()
        made["text_encoder_output"]["image_info"]["vae_image_info_list"] = [(np.int64(32), np.int32(48)), (48, 48)]
        made["text_encoder_output"]["negative_prompt_embeds"] = None
        return made

    monkeypatch.setattr(encoder, "run_input_encoder", with_numpy)
    monkeypatch.setattr(transformer.model, "infer", lambda _inputs: None)
    deployment.all(**IMAGES)
    (sent, shape), _ = seen["send_encoder_outputs"]
    got = seen["receive_encoder_outputs"][1]
    assert got["latent_shape"] == shape
    assert [set(image) for image in got["image_encoder_output"]] == [{"image_latents"}, {"image_latents"}]
    for mine, theirs in zip(sent["image_encoder_output"], got["image_encoder_output"], strict=True):
        assert torch.equal(mine["image_latents"], theirs["image_latents"])
        assert mine["image_latents"].dtype == theirs["image_latents"].dtype == torch.bfloat16
    info = got["text_encoder_output"]["image_info"]
    assert info["vae_image_info_list"] == [(32, 48), (48, 48)]
    assert {type(size) for pair in info["vae_image_info_list"] for size in pair} == {int}
    assert len(info["vae_image_list"]) == 2, "natively they stay behind"
    assert got["text_encoder_output"]["negative_prompt_embeds"] is None
    latents = seen["send_transformer_outputs"][0][0]
    received = seen["receive_transformer_outputs"][1]
    assert latents.dtype == received.dtype == torch.float32, "natively they are cast"
    assert torch.equal(latents, received)
    assert decoder._p2_receive_meta["auto_height"] == 32
    assert decoder._p2_receive_meta["latents_dtype"] == "torch.float32"


def test_wan_latents_have_no_sizes_and_an_image_model_gets_them(start: Any) -> None:
    deployment = start("t2v", 3)
    deployment.all()
    assert deployment.runner("decode")._p2_receive_meta["auto_height"] is None


def test_without_guidance_a_branch_is_none(start: Any) -> None:
    stages = start("t2v", 2)
    for worker in stages.workers.values():
        with worker.runner.config.temporarily_unlocked():
            worker.runner.config["enable_cfg"] = False
    runner = double.runner_of(double.settings_of(None, enable_cfg=False), double.native_mixin())
    assert torch.equal(made_by(stages.all()), made_by(double.Worker(runner).process(**REQUEST)))


def test_a_runner_may_drop_a_part_of_what_it_received(start: Any) -> None:
    """The host's Wan 2.2 sets the image's latents to None, in the tree itself."""
    stages = start("i2v", 2)
    for worker in stages.workers.values():
        with worker.runner.config.temporarily_unlocked():
            worker.runner.config["model_cls"] = "wan2.2"
    made_by(stages.all(image_path="data:cat"))


def test_a_store_carries_it_too(start: Any, tmp_path: Path) -> None:
    deployment = start("i2v", 3, transfer_mode="store", store=f"local://{tmp_path}/store")
    found = made_by(deployment.all(image_path="data:cat"))
    assert torch.equal(found, right("i2v", image_path="data:cat"))


# -- who is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{}, {"connector": "native"}])
def test_native_code_runs_where_nobody_names_us(section: dict[str, Any]) -> None:
    native, wire = double.native_mixin(), double.Wire()
    mixin = dispatching(native)
    assert (mixin.__name__, mixin.__qualname__, mixin.__module__) == (
        native.__name__,
        native.__qualname__,
        native.__module__,
    )
    made = []
    for role in ("encoder", "transformer", "decode"):
        config = double.settings_of(role, disagg={"wire": wire, **section})
        made.append(double.Worker(double.runner_of(config, mixin)))
    answers = [worker.process("t", **REQUEST) for worker in made]
    assert [answer["status"] for answer in answers] == ["success"] * 3
    assert [worker.runner.calls for worker in made] == [
        ["init_disagg", "send_encoder_outputs"],
        ["init_disagg", "receive_encoder_outputs", "send_transformer_outputs"],
        ["init_disagg", "receive_transformer_outputs"],
    ]
    for worker in made:
        assert end_of(worker.runner) is None
        assert worker.runner.config["task_id"] == "t", "what the host keeps, it keeps"
        worker.runner.release_disagg()
        assert worker.runner.calls[-1] == "release_disagg"
        assert not any("moonrelay" in name for name in vars(worker.runner))


def test_one_process_is_left_alone() -> None:
    runner = double.runner_of(double.settings_of(None), dispatching(double.native_mixin()))
    assert torch.equal(made_by(double.Worker(runner).process(**REQUEST)), right("t2v"))


def test_a_connector_that_nobody_knows_is_refused() -> None:
    config = double.settings_of("encoder", disagg={"connector": "moonrelais"})
    with pytest.raises(ConfigError, match="moonrelais"):
        double.runner_of(config, dispatching(double.native_mixin()))


def test_a_wrong_setting_ends_the_start() -> None:
    config = double.settings_of("encoder", disagg={**OURS, "staging": 1})
    with pytest.raises(ConfigError, match="did you mean 'staging_bytes'"):
        double.runner_of(config, dispatching(double.native_mixin()))


def test_a_second_wrapping_of_a_method_is_one_request(start: Any) -> None:
    mixin = dispatching(double.native_mixin())
    wan, _ = double.runners(mixin)

    class Derived(wan):  # type: ignore[misc, valid-type]
        def run_pipeline(self, input_info: Any) -> Any:
            return super().run_pipeline(input_info)

    config = double.settings_of("encoder", disagg={**OURS, "rendezvous_port": 0})
    runner = Derived(config)
    runner.init_modules()
    assert double.Worker(runner).process("a", **REQUEST)["status"] == "success"
    assert link_of(runner).in_use()["payloads"] == 1
    runner.release_disagg()


# -- whose it is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [True, False])
def test_reordered_requests_get_their_own(start: Any, ids: bool) -> None:
    """By the client's ids, and by what they ask for where each server has made up its own."""
    deployment = start("t2v", 3)
    orders = {"encoder": "ABC", "transformer": "BCA", "decode": "CAB"}
    found = {}
    for role, order in orders.items():
        for name in order:
            answer = deployment.post(role, name if ids else f"{role}-{name}", prompt=f"prompt {name}")
            assert answer["status"] == "success", answer
            found[name] = answer
    for name in "ABC":
        assert torch.equal(made_by(found[name]), right("t2v", prompt=f"prompt {name}"))


def test_a_room_pairs_bodies_that_differ(start: Any) -> None:
    deployment = start("t2i", 3)
    assert deployment.post("encoder", "x", data_bootstrap_room=5)["status"] == "success"
    assert deployment.post("transformer", "y", disagg_bootstrap_room=5)["status"] == "success"
    answer = deployment.workers["decode"].process("z", prompt="", seed=1, target_shape=[], data_bootstrap_room=5)
    assert torch.equal(made_by(answer), right("t2i"))


def test_one_id_for_two_requests_at_once_is_found(start: Any) -> None:
    """Under it the transformer's first one would get what was made for the second."""
    deployment = start("t2v", 2)
    for prompt in ("first", "second"):
        deployment.post("encoder", prompt, prompt=prompt, data_bootstrap_room=5)
    answer = deployment.post("transformer", "a", prompt="first", data_bootstrap_room=5)
    assert (answer["status"], answer["error_type"]) == ("failed", "ConfigError")
    assert "two requests go by one id" in answer["error"]
    found = made_by(deployment.post("transformer", "b", prompt="second", data_bootstrap_room=5))
    assert torch.equal(found, right("t2v", prompt="second"))


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"negative_prompt": "blue"}, {"negative_prompt": "red"}),
        ({"target_shape": [32, 48]}, {"target_shape": [48, 32]}),
    ],
)
def test_what_a_failed_request_left_under_its_id_is_no_other_ones(
    start: Any, given: dict[str, Any], left: dict[str, Any]
) -> None:
    """The client tries again under one room and asks for something else; its transformer asks first."""
    deployment = start("t2v", 2)
    (name,) = given
    deployment.post("encoder", "a", data_bootstrap_room=5, **left)
    answer = deployment.post("transformer", "b", data_bootstrap_room=5, **given)
    assert (answer["status"], answer["error_type"]) == ("failed", "ConfigError")
    assert f"for another {name} (encoder outputs)" in answer["error"]


def test_an_id_may_be_used_again(start: Any) -> None:
    deployment = start("t2v", 3)
    for prompt in ("first", "second"):
        for role in deployment.workers:
            answer = deployment.post(role, prompt=prompt, data_bootstrap_room=0)
        assert torch.equal(made_by(answer), right("t2v", prompt=prompt))


def test_different_bodies_without_an_id_are_refused(start: Any) -> None:
    deployment = start("t2v", 2, transfer_timeout_s=1.0)
    deployment.post("encoder", "a", seed=1)
    answer = deployment.post("transformer", "b", seed=2)
    assert (answer["status"], answer["error_type"]) == ("failed", "DeadlineExceeded")
    assert "data_bootstrap_room" in answer["error"]
    assert "task:b" in answer["error"]
    assert torch.equal(made_by(deployment.post("transformer", "c", seed=1)), right("t2v", seed=1))


def test_two_identical_requests(start: Any) -> None:
    deployment = start("t2v", 2)
    for name in ("a", "b"):
        deployment.post("encoder", f"e{name}")
    expected = right("t2v")
    for name in ("a", "b"):
        found = made_by(deployment.post("transformer", f"t{name}"))
        assert torch.equal(found, expected)
        del found
    settle(deployment)


def test_pairing_by_ids_alone(start: Any) -> None:
    deployment = start("t2v", 2, pairing="id", transfer_timeout_s=0.5)
    deployment.post("encoder", "a")
    assert deployment.post("transformer", "b")["error_type"] == "DeadlineExceeded"
    made_by(deployment.post("transformer", "a"))


def test_loras_by_request_are_paired_by_ids_alone(start: Any) -> None:
    """The server takes them out of what it tells the runner: two requests that differ in them look the same."""
    deployment = start("t2v", 2, transfer_timeout_s=0.5)
    for worker in deployment.workers.values():
        with worker.runner.config.temporarily_unlocked():
            worker.runner.config["lora_dir"] = "/loras"
    deployment.post("encoder", "a")
    assert deployment.post("transformer", "b")["error_type"] == "DeadlineExceeded"
    made_by(deployment.post("transformer", "a"))


def test_without_a_server_requests_are_paired_by_what_they_ask_for(start: Any) -> None:
    deployment = start("t2v", 2)
    for role in ("encoder", "transformer"):
        asked = double.T2VInputInfo(prompt="a", seed=3, return_result_tensor=True, save_result_path=role)
        made = deployment.runner(role).run_pipeline(asked)
    assert torch.equal(made["video"], right("t2v", prompt="a", seed=3, negative_prompt=""))


@pytest.mark.parametrize("fails", [False, True])
def test_a_requests_ids_are_gone_after_it(start: Any, fails: bool) -> None:
    """The host keeps them in its config, and a Qwen runner its rooms too; the next request would go by them."""
    deployment = start("t2i", 3)
    runner = deployment.runner("encoder")
    before = {**runner.config["disagg_config"]}
    runner.fails_at = "text_encoder" if fails else ""
    answer = deployment.post(
        "encoder", "a", data_bootstrap_room=5, disagg_bootstrap_room=6, disagg_decoder_bootstrap_room=7
    )
    assert answer["status"] == ("failed" if fails else "success")
    assert not {"task_id", "data_bootstrap_room", "disagg_bootstrap_room"} & set(runner.config)
    assert dict(runner.config["disagg_config"]) == before
    assert runner.config.locked
    runner.fails_at = ""
    deployment.post("encoder", "b")
    assert deployment.post("transformer", "b")["status"] == "success"


# -- what fails -------------------------------------------------------------------------------------------------------


def test_a_failure_reaches_the_roles_behind_with_its_text(start: Any) -> None:
    deployment = start("t2v", 3)
    deployment.runner("encoder").fails_at = "text_encoder"
    waiting = [deployment.later(role) for role in ("decode", "transformer")]
    assert "planted failure" in deployment.post("encoder")["error"]
    for answer in (one.result(10) for one in waiting):
        assert (answer["status"], answer["error_type"]) == ("failed", "Aborted")
        assert "encoder failed: planted failure of the text_encoder" in answer["error"]


def test_a_transformer_that_fails_tells_the_decoder(start: Any) -> None:
    deployment = start("t2v", 3)
    deployment.runner("transformer").fails_at = "dit"
    waiting = deployment.later("decode")
    deployment.post("encoder")
    assert deployment.post("transformer")["status"] == "failed"
    assert "transformer failed: planted failure of the dit" in waiting.result(10)["error"]


@pytest.mark.parametrize("task", ["t2v", "i2i"])
@pytest.mark.parametrize("fails", ["text_encoder", "dit", "vae"])
def test_a_good_request_after_a_failed_one(start: Any, task: str, fails: str) -> None:
    """The host keeps a failed request's generator, and its receivers take the next one's for it."""
    more = IMAGES if task == "i2i" else {}
    deployment = start(task, 3)
    role = {"text_encoder": "encoder", "dit": "transformer", "vae": "decode"}[fails]
    deployment.runner(role).fails_at = fails
    answers = [deployment.post(name, "bad", seed=1, **more) for name in deployment.workers]
    assert [answer["status"] for answer in answers][list(deployment.workers).index(role)] == "failed"
    assert answers[-1]["status"] == "failed"
    deployment.runner(role).fails_at = ""
    found = made_by(deployment.all("good", seed=2, **more))
    assert torch.equal(found, right(task, seed=2, **more))


def test_a_failed_request_holds_no_memory(start: Any) -> None:
    deployment = start("i2i", 2)
    deployment.runner("transformer").fails_at = "dit"
    deployment.post("encoder", **IMAGES)
    assert deployment.post("transformer", **IMAGES)["status"] == "failed"
    gc.collect()
    assert link_of(deployment.runner("transformer")).in_use() == {"payloads": 0, "slots": 0, "claims": 0}
    deployment.runner("transformer").fails_at = ""
    made_by(deployment.post("transformer", **IMAGES))
    settle(deployment)


def test_a_request_without_a_name_is_refused_with_the_remedy(start: Any) -> None:
    deployment = start("t2v", 2, pairing="id")
    asked = double.T2VInputInfo(prompt="a")
    with pytest.raises(ConfigError, match="POST the same task_id"):
        deployment.runner("encoder").run_pipeline(asked)


# -- life -------------------------------------------------------------------------------------------------------------


def test_release_is_clean_and_may_be_repeated(start: Any) -> None:
    threads = threading.active_count()
    files = len(list(Path("/proc/self/fd").iterdir()))
    deployment = Stages("t2v", 3)
    deployment.all()
    for _ in range(2):
        deployment.close()
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    answer = deployment.post("encoder")
    assert (answer["status"], answer["error_type"]) == ("failed", ClosedError.__name__)
    with pytest.raises(ClosedError, match="init_disagg"):
        deployment.runner("encoder").send_encoder_outputs({}, [])


def test_init_again_after_release(start: Any) -> None:
    deployment = start("t2v", 2)
    encoder, transformer = (deployment.runner(role) for role in deployment.workers)
    for again in range(2):
        if again:
            encoder.release_disagg()  # a second init alone releases it, too
        encoder.init_disagg(encoder.config)
        with transformer.config.temporarily_unlocked():
            transformer.config["disagg_config"]["bootstrap_addr"] = f"127.0.0.1:{link_of(encoder).address[1]}"
        transformer.init_disagg(transformer.config)
        assert torch.equal(made_by(deployment.all(f"t{again}")), right("t2v"))


def test_init_with_the_hosts_own_afterwards(start: Any) -> None:
    deployment = start("t2v", 2)
    encoder = deployment.runner("encoder")
    link = link_of(encoder)
    wire = double.Wire()
    encoder.init_disagg(double.settings_of("encoder", disagg={"wire": wire}))
    assert end_of(encoder) is None
    encoder.send_encoder_outputs({"image_encoder_output": None}, [1])
    assert encoder.calls == ["init_disagg", "send_encoder_outputs"]
    with pytest.raises(ClosedError):
        link.begin(("task:a",))


def test_a_runner_that_is_dropped_ends_once_its_payload_is_taken(start: Any) -> None:
    deployment = start("t2v", 2)
    link = link_of(deployment.runner("encoder"))
    deployment.post("encoder")
    gone = weakref.ref(deployment.workers.pop("encoder").runner)
    gc.collect()
    assert gone() is None
    made_by(deployment.post("transformer"))
    deadline = Deadline(10.0, SystemClock())
    while not link._closed:
        assert not deadline.expired
        threading.Event().wait(0.02)


def test_two_deployments_in_one_process(start: Any) -> None:
    wan, qwen = start("t2v", 3), start("i2i", 2)
    for number in range(2):
        assert torch.equal(made_by(wan.all(f"t{number}")), right("t2v"))
        assert torch.equal(made_by(qwen.all(f"t{number}", **IMAGES)), right("i2i", **IMAGES))


def test_many_requests_leave_nothing(start: Any) -> None:
    deployment = start("i2v", 3)

    def one(number: int) -> None:
        found = made_by(deployment.all(f"t{number}", seed=number % 5, image_path="data:cat"))
        assert found.numel()

    for number in range(10):
        one(number)
    settle(deployment)
    before = held()
    for number in range(10, 310):
        one(number)
    settle(deployment)
    assert held() == before


def held() -> tuple[list[str], int]:
    names = sorted(thread.name for thread in threading.enumerate() if not thread.name.startswith("moonrelay-renew"))
    return names, len(list(Path("/proc/self/fd").iterdir()))


# -- several ranks ----------------------------------------------------------------------------------------------------


def test_one_rank_may_be_called_parallel(start: Any) -> None:
    config = double.settings_of("encoder", disagg={**OURS, "rendezvous_port": 0}, parallel={"seq_p_size": 1})
    runner = double.runner_of(config, dispatching(double.native_mixin()))
    runner.release_disagg()
