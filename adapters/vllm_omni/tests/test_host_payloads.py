"""What the host's own callers do with a connector: stage payloads, whole payloads of language stages, and KV.

The classes between are the host's: its mixins, threads and managers, put together as its runners have them. Their
models, schedulers and process groups are doubles.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omni_peer import digest

from moonrelay_vllm_omni import plugin

pytestmark = pytest.mark.vllm_omni

LONG_S = 30.0
KEYS = ("prompt_embeds", "mask")
#: Sent and received of what a payload holds; the host's budget for a receive is two seconds.
BUDGET_S = 2.0
SLACK_S = 8.0

Runner = Callable[..., Any]


def until(ready: Callable[[], object], what: str) -> Any:
    end = time.monotonic() + LONG_S
    while not (found := ready()):
        assert time.monotonic() < end, what
        threading.Event().wait(0.01)
    return found


class Calls:
    """Counts what the host asks of a connector, and may make its first puts fail."""

    def __init__(self, connector: Any, monkeypatch: pytest.MonkeyPatch, *, failing: int = 0) -> None:
        self.keys: list[tuple[str, str]] = []
        put, get = connector.put, connector.get_with_deadline

        def counted_put(from_stage: str, to_stage: str, put_key: str, data: Any) -> Any:
            self.keys.append(("put", put_key))
            if len(self.keys) <= failing:
                message = "planted"
                raise RuntimeError(message)
            return put(from_stage, to_stage, put_key, data)

        def counted_get(from_stage: str, to_stage: str, get_key: str, metadata: Any = None, *, deadline: float) -> Any:
            self.keys.append(("get", get_key))
            return get(from_stage, to_stage, get_key, metadata, deadline=deadline)

        monkeypatch.setattr(connector, "put", counted_put)
        monkeypatch.setattr(connector, "get_with_deadline", counted_get)


# -- payloads between diffusion stages --------------------------------------------------------------------------------


def manager(extra: dict[str, Any], stage: int, **more: Any) -> Any:
    """Return the host's transfer manager of a stage; it makes the connector itself, on the first use."""
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import OmniKVTransferManager

    plugin.register()
    role = "sender" if stage == 0 else "receiver"
    return OmniKVTransferManager._create(
        {
            "connector_config": {"type": plugin.NAME, **extra, "role": role},
            "omni_from_stage": "0",
            "omni_to_stage": "1",
            "stage_id": stage,
            "engine_input_source": [0] if stage else [],
            **more,
        }
    )


@pytest.fixture
def diffusion(extra: dict[str, Any]) -> Iterator[Runner]:
    """Makes the payload part of the host's diffusion runner; their connectors are closed at the end."""
    from vllm_omni.diffusion.worker.stage_payload import DiffusionStagePayloadMixin

    made: list[Any] = []

    class StageRunner(DiffusionStagePayloadMixin):
        groups: tuple[Any, ...] = ()

        def _stage_payload_broadcast_groups(self) -> tuple[Any, ...]:
            return self.groups

    def make(stage: int, *, takes: tuple[str, ...] = (), sends: tuple[str, ...] = (), transfers: Any = None) -> Any:
        runner = object.__new__(StageRunner)
        runner.od_config = SimpleNamespace(
            stage_id=stage, stage_input_payload_keys=takes, stage_output_payload_keys=sends
        )
        runner.device, runner._target_device = torch.device("cpu"), None
        transfers = manager(extra, stage) if transfers is None else transfers
        runner._kv_transfer_manager = transfers
        runner.init_omni_connectors(runner.od_config, transfers, synchronous=True)
        made.append(transfers)
        return runner

    yield make
    for one in made:
        if getattr(one, "_connector", None):
            one.connector.close()


def asked(name: str, prompt: Any, **more: Any) -> Any:
    """Return what the host's runner knows of a request."""
    return SimpleNamespace(request_id=f"internal-{name}", external_req_id=name, prompt=prompt, **more)


def computed(**custom: Any) -> Any:
    return SimpleNamespace(custom_output=custom)


def condition() -> dict[str, Any]:
    return {"prompt_embeds": torch.randn(5, 8).to(torch.bfloat16), "mask": torch.tensor([True, False])}


def test_declared_parts_reach_the_next_stages_prompt(diffusion: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = diffusion(0, sends=KEYS), diffusion(1, takes=KEYS)
    sent, got = (Calls(runner._kv_transfer_manager.connector, monkeypatch) for runner in (one, other))
    parts = condition()
    output = computed(**parts, not_declared=7, empty=None)
    one._maybe_send_stage_payload([asked("a", "text")], [output])
    prompt: dict[str, Any] = {"prompt": "text", "additional_information": {"mine": 1}}
    other._maybe_recv_stage_payload(asked("a", prompt))
    assert digest(prompt["additional_information"]) == digest({"mine": 1, **parts})
    # By the key alone: what `put` told the producer has no way to a diffusion stage in 0.30.
    assert sent.keys == [("put", "a_0_0")]
    assert got.keys == [("get", "a_0_0")]
    # What was sent is not sent a second time, by the host's own way; the rest is.
    handle = output.custom_output.pop("_stage_payload_transfer")
    assert output.custom_output == {"not_declared": 7, "empty": None}
    assert handle["payload_keys"] == list(KEYS)
    assert handle["size_bytes"] > 0


def test_a_handle_in_the_prompt_is_followed(diffusion: Runner) -> None:
    one, other = diffusion(0, sends=KEYS), diffusion(1)
    parts, output = condition(), computed()
    output.custom_output.update(parts)
    one._maybe_send_stage_payload([asked("a", "text")], [output])
    prompt: dict[str, Any] = {"_stage_payload_transfer": output.custom_output["_stage_payload_transfer"]}
    # Nothing is declared here, and the request has another name; the handle says it all.
    other._maybe_recv_stage_payload(asked("another", prompt))
    assert digest(prompt) == digest({"additional_information": parts})


@pytest.mark.parametrize(
    "sender",
    [
        {"host": "192.0.2.1", "zmq_port": 50051},
        {"0": {"host": "192.0.2.1", "zmq_port": 50051}},
        {0: {"host": "192.0.2.1", "zmq_port": 1}, 5: {"host": "192.0.2.2", "zmq_port": 2}},
        {"host": ""},
    ],
    ids=["plain", "by stage", "by number", "empty"],
)
def test_where_another_connector_would_listen_is_no_matter(diffusion: Runner, sender: dict[Any, Any]) -> None:
    one, other = diffusion(0, sends=KEYS), diffusion(1, takes=KEYS)
    parts = condition()
    one._maybe_send_stage_payload([asked("a", "text")], [computed(**parts)])
    prompt: dict[str, Any] = {"prompt": "text"}
    other._maybe_recv_stage_payload(asked("a", prompt, payload_sender_info=sender))
    assert digest(prompt["additional_information"]) == digest(parts)


def test_what_is_published_within_the_budget_is_waited_for(diffusion: Runner) -> None:
    one, other = diffusion(0, sends=KEYS), diffusion(1, takes=KEYS)
    parts = condition()
    connector = one._kv_transfer_manager.connector
    until(lambda: connector.health()["started"], "the connector did not start")
    later = threading.Timer(0.6, one._maybe_send_stage_payload, ([asked("a", "text")], [computed(**parts)]))
    later.start()
    prompt: dict[str, Any] = {"prompt": "text"}
    other._maybe_recv_stage_payload(asked("a", prompt))
    later.join()
    assert digest(prompt["additional_information"]) == digest(parts)


def test_what_is_never_published_fails_the_request_in_the_budget(diffusion: Runner) -> None:
    other = diffusion(1, takes=KEYS)
    connector = other._kv_transfer_manager.connector
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="missing keys") as failure:
        other._maybe_recv_stage_payload(asked("a", {"prompt": "text"}))
    assert BUDGET_S - 0.5 < time.monotonic() - started < BUDGET_S + SLACK_S
    assert all(name in str(failure.value) for name in KEYS)
    assert connector.health()["waiting"] == 0
    assert sum(connector.stages.in_use().values()) == 0


def test_a_part_that_is_missing_is_named(diffusion: Runner) -> None:
    one, other = diffusion(0, sends=("prompt_embeds",)), diffusion(1, takes=KEYS)
    one._maybe_send_stage_payload([asked("a", "text")], [computed(**condition())])
    with pytest.raises(RuntimeError, match=r"missing keys: \['mask'\]"):
        other._maybe_recv_stage_payload(asked("a", {"prompt": "text"}))


def test_what_the_connector_refuses_stays_in_the_output(diffusion: Runner) -> None:
    one = diffusion(0, sends=(*KEYS, "odd"))
    output = computed(**condition(), odd=object())
    one._maybe_send_stage_payload([asked("a", "text")], [output])
    assert output.custom_output.keys() == {*KEYS, "odd"}
    assert one._kv_transfer_manager.connector.health()["last_error"]
    assert sum(one._kv_transfer_manager.connector.stages.in_use().values()) == 0


def test_parts_that_came_with_the_prompt_make_up_for_a_missing_payload(diffusion: Runner) -> None:
    other = diffusion(1, takes=KEYS)
    parts = condition()
    prompt: dict[str, Any] = {"prompt": "text", "additional_information": dict(parts)}
    other._maybe_recv_stage_payload(asked("a", prompt))
    assert digest(prompt["additional_information"]) == digest(parts)


@pytest.mark.parametrize(("name", "prompt"), [("a", "bare text"), ("dummy", {"prompt": "text"})])
def test_where_the_host_does_not_look_nothing_is_asked(
    diffusion: Runner, monkeypatch: pytest.MonkeyPatch, name: str, prompt: Any
) -> None:
    from vllm_omni.diffusion.request import OmniDiffusionRequest

    one, other = diffusion(0, sends=KEYS), diffusion(1, takes=KEYS)
    request = asked(name, prompt)
    if name == "dummy":
        request.request_id = "dummy_req_id"
        assert OmniDiffusionRequest.is_dummy_run_request_id(request.request_id)
        one._maybe_send_stage_payload([request], [computed(**condition())])
        assert one._kv_transfer_manager._connector is None
    got = Calls(other._kv_transfer_manager.connector, monkeypatch)
    other._maybe_recv_stage_payload(request)
    assert got.keys == []


class Group:
    """One rank's end of a process group of threads: what its first member says, all have."""

    def __init__(self, members: list[queue.SimpleQueue[Any]], rank: int) -> None:
        self._members = members
        self.rank_in_group = rank
        self.world_size = len(members)

    def broadcast_object(self, said: Any = None, src: int = 0) -> Any:
        if self.rank_in_group != src:
            return self._members[self.rank_in_group].get(timeout=LONG_S)
        for rank, member in enumerate(self._members):
            if rank != src:
                member.put(said)
        return said

    broadcast_tensor_dict = broadcast_object


class Nobody:
    """The transfer manager of a rank that must not touch the connector."""

    send_stages = recv_stages = ("0", "1")

    @property
    def connector(self) -> Any:
        message = "a rank that follows asked for the connector"
        raise AssertionError(message)


def test_one_rank_of_a_grid_receives_and_all_have_it(diffusion: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two by two ranks, tensor by sequence parallel; each runs the same receive, in a thread of its own.
    def lines() -> list[list[queue.SimpleQueue[Any]]]:
        return [[queue.SimpleQueue(), queue.SimpleQueue()] for _ in range(2)]

    tensor, sequence = lines(), lines()
    runners = []
    for rank in range(4):
        along, across = rank % 2, rank // 2
        runner = diffusion(1, takes=KEYS, transfers=None if rank == 0 else Nobody())
        runner.groups = (Group(tensor[across], along), Group(sequence[along], across))
        runners.append(runner)
    assert [runner.is_data_transfer_rank() for runner in runners] == [True, False, False, False]
    got = Calls(runners[0]._kv_transfer_manager.connector, monkeypatch)
    one, parts = diffusion(0, sends=KEYS), condition()
    one._maybe_send_stage_payload([asked("a", "text")], [computed(**parts)])
    prompts: list[dict[str, Any]] = [{"prompt": "text"} for _ in runners]
    with ThreadPoolExecutor(len(runners)) as pool:
        list(pool.map(lambda one, prompt: one._maybe_recv_stage_payload(asked("a", prompt)), runners, prompts))
    for prompt in prompts:
        assert digest(prompt["additional_information"]) == digest(parts)
    assert got.keys == [("get", "a_0_0")]


def test_one_rank_of_a_group_sends_and_all_drop_what_was_sent(
    diffusion: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    members: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue(), queue.SimpleQueue()]
    runners = [diffusion(0, sends=KEYS, transfers=None if rank == 0 else Nobody()) for rank in range(2)]
    for rank, runner in enumerate(runners):
        runner.groups = (Group(members, rank),)
    sent = Calls(runners[0]._kv_transfer_manager.connector, monkeypatch)
    parts = condition()
    outputs = [computed(**parts) for _ in runners]
    with ThreadPoolExecutor(len(runners)) as pool:
        list(pool.map(lambda one, out: one._maybe_send_stage_payload([asked("a", "text")], [out]), runners, outputs))
    assert sent.keys == [("put", "a_0_0")]
    assert [output.custom_output.keys() for output in outputs] == [{"_stage_payload_transfer"}] * 2


# -- whole payloads and chunks of language stages ---------------------------------------------------------------------


def whole(*, transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
    """What a model's hook makes of all that its steps gave."""
    return {**pooling_output, "meta": {"next_stage_prompt_len": 3, "finished": torch.tensor(True)}}


def chunk(*, transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool) -> Any:
    """What a model's hook makes of one step."""
    return {"embed": {"decode": multimodal_output}, "meta": {"finished": torch.tensor(is_finished)}}


@pytest.fixture
def language(extra: dict[str, Any]) -> Iterator[Runner]:
    """Makes the connector part of the host's language runners, with its two threads; all are ended at the end."""
    from vllm_omni.worker.omni_connector_model_runner_mixin import OmniConnectorModelRunnerMixin

    plugin.register()
    made: list[Any] = []

    class StageRunner(OmniConnectorModelRunnerMixin):
        pass

    def make(stage: int, hook: Callable[..., Any] | None = None, *, by_chunks: bool = False) -> Any:
        runner = object.__new__(StageRunner)
        runner.model_config = SimpleNamespace(
            stage_connector_config={"name": plugin.NAME, "extra": dict(extra)},
            stage_id=stage,
            model_stage=f"stage{stage}",
            worker_type="ar",
            async_chunk=by_chunks,
            custom_process_next_stage_input_func=hook and f"{__name__}.{hook.__name__}",
        )
        made.append(runner)
        runner.init_omni_connectors(runner.model_config)
        return runner

    yield make
    for one in made:
        one.shutdown_omni_connectors()


def of_language(name: str, finished: bool = False) -> Any:
    return SimpleNamespace(request_id=f"internal-{name}", external_req_id=name, is_finished=lambda: finished)


def test_a_whole_payload_is_sent_when_its_request_has_finished(
    language: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = language(0, whole), language(1)
    sent = Calls(one.connector, monkeypatch)
    steps = [{"hidden": torch.randn(2, 4), "last": torch.tensor(step)} for step in range(3)]
    for step in steps:
        one.accumulate_full_payload_output("internal-a", step, of_language("a"))
    other.register_chunk_recv(of_language("a"))
    assert sent.keys == []
    one.flush_full_payload_outputs({"internal-a"})
    got = until(lambda: other.recv_full_payload_inputs(None), "the payload did not come")["internal-a"]
    assert torch.equal(got["hidden"], torch.cat([step["hidden"] for step in steps]))
    assert int(got["last"]) == 2
    assert sent.keys == [("put", "a_0_0")]
    told = other.get_omni_connector_output()
    assert told.stage_recv_req_ids == {"internal-a"}
    assert told.request_metadata["internal-a"]["next_stage_prompt_len"] == 3
    until(lambda: not sum(one.connector.stages.in_use().values()), "the producer holds the payload")


def test_a_put_that_fails_is_tried_again_by_the_host(language: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = language(0, whole), language(1)
    sent = Calls(one.connector, monkeypatch, failing=2)
    hidden = torch.randn(2, 4)
    one.send_full_payload_outputs(None, {"internal-a": ({"hidden": hidden}, of_language("a"))})
    other.register_chunk_recv(of_language("a"))
    got = until(lambda: other.recv_full_payload_inputs(None), "the payload did not come")["internal-a"]
    assert torch.equal(got["hidden"], hidden)
    assert sent.keys == [("put", "a_0_0")] * 3


def test_what_can_never_be_put_is_told_to_the_host_with_the_field(
    language: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = language(0, whole)
    sent = Calls(one.connector, monkeypatch)
    told: list[BaseException] = []
    one._connector_send_error_sink = told.append
    one.send_full_payload_outputs(None, {"internal-a": ({"odd": object()}, of_language("a"))})
    until(lambda: told, "the host was not told")
    assert "odd" in str(told[0].__cause__)
    assert sent.keys == [("put", "a_0_0")] * (one._MAX_SEND_RETRIES + 1)
    until(lambda: not one._pending_save_counts, "the host still counts the send as pending")


def test_chunks_are_put_together_again(language: Runner) -> None:
    one, other = language(0, chunk, by_chunks=True), language(1, by_chunks=True)
    steps = [torch.randn(number + 1, 4) for number in range(5)]
    other.register_chunk_recv(of_language("a"))
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        assert one.send_chunk(of_language("a", last), step, wait_for_delivery=True)
    until(lambda: "internal-a" in other._chunk_stream_completed, "the stream did not end")
    got = other.get_local_stage_payload("internal-a")
    assert torch.equal(got["embed"]["decode"], torch.cat(steps))
    assert other.get_omni_connector_output().chunk_finished_req_ids == {"internal-a"}
    until(lambda: not sum(one.connector.stages.in_use().values()), "the producer holds chunks")


# -- KV ---------------------------------------------------------------------------------------------------------------

BLOCK = 4
HEADS = 2
#: The host makes its tensors on the very bytes that it was given, which it does not write to.
on_bytes = pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")


@pytest.fixture
def transfers(extra: dict[str, Any]) -> Iterator[Runner]:
    """Makes the host's KV managers; their connectors are closed at the end."""
    made: list[Any] = []

    def make(stage: int, **more: Any) -> Any:
        need = {"need_send_cache": True} if stage == 0 else {"need_recv_cache": True, "recv_timeout": LONG_S}
        one = manager(extra, stage, **{**need, **more})
        made.append(one)
        return one

    yield make
    for one in made:
        one.shutdown_prefetch()
        if one.connector is not None:
            one.connector.close()


def caches(layers: int = 2) -> list[torch.Tensor]:
    """Return KV caches of a model, key and value together, in blocks."""
    return [torch.randn(2, 6, BLOCK, HEADS, 3).to(torch.bfloat16) for _ in range(layers)]


def expected(layers: list[torch.Tensor], blocks: list[int], length: int) -> dict[str, list[torch.Tensor]]:
    return {
        name: [layer[part][blocks].flatten(0, 1)[:length] for layer in layers]
        for part, name in enumerate(("key_cache", "value_cache"))
    }


def equal(found: dict[str, Any], wanted: dict[str, list[torch.Tensor]]) -> bool:
    return all(
        one.dtype == other.dtype and torch.equal(one, other)
        for name, parts in wanted.items()
        for one, other in zip(found[name], parts, strict=True)
    )


def send(one: Any, layers: list[torch.Tensor], name: str = "r1") -> None:
    done = one.handle_finished_requests_kv_transfer(
        {name: {"block_ids": [1, 3], "seq_len": 7, "custom_metadata": {"more": 1}}}, layers, BLOCK, "bfloat16"
    )
    assert done == [name]


@on_bytes
def test_kv_blocks_arrive(transfers: Runner) -> None:
    one, other = transfers(0), transfers(1)
    layers = caches()
    send(one, layers)
    data, size = other.receive_kv_cache_for_request("r1")
    assert size > 0
    assert equal(data["layer_blocks"], expected(layers, [1, 3], 7))
    assert data["block_ids"] == [1, 3]
    assert data["metadata"]["more"] == 1
    until(lambda: not sum(one.connector.stages.in_use().values()), "the producer holds the blocks")


def test_packed_kv_comes_as_a_buffer_that_is_released(transfers: Runner) -> None:
    from vllm_omni.distributed.omni_connectors.kv_transfer_manager import KVCacheTransferData

    one, other = transfers(0), transfers(1)
    blocks = {"key_cache": [torch.randn(7, 2, 3), None], "value_cache": [torch.randn(7, 2, 3), None]}
    packed = KVCacheTransferData("r1", blocks, [0], {"seq_len": 7}).to_bytes()
    # What a GPU's producer puts: the host packs it on the device then.
    raw = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    assert one.connector.put(from_stage="0", to_stage="1", put_key="omni_0_to_1_kv_cache_r1", data=raw)[0]
    data, size = other.receive_kv_cache_for_request("r1")
    assert size >= len(packed)
    assert torch.equal(data["layer_blocks"]["key_cache"][0], blocks["key_cache"][0])
    assert data["layer_blocks"]["value_cache"][1] is None
    # The host has copied it out and released the buffer, so no memory of the pool is held for it.
    until(lambda: not sum(other.connector.stages.in_use().values()), "the consumer holds the buffer")


@on_bytes
def test_kv_that_comes_later_is_waited_for_and_what_never_comes_is_given_up(transfers: Runner) -> None:
    one, other = transfers(0), transfers(1)
    layers = caches()
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(other.receive_kv_cache_for_request, "r1")
        threading.Event().wait(0.3)
        send(one, layers)
        data, _ = received.result(LONG_S)
    assert equal(data["layer_blocks"], expected(layers, [1, 3], 7))
    other.config.recv_timeout = 0.5
    started = time.monotonic()
    assert other.receive_kv_cache_for_request("never") == (None, 0)
    assert time.monotonic() - started < SLACK_S


@on_bytes
def test_kv_is_put_again_where_a_put_failed(transfers: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = transfers(0), transfers(1)
    sent = Calls(one.connector, monkeypatch, failing=2)
    layers = caches()
    send(one, layers)
    assert sent.keys == [("put", "omni_0_to_1_kv_cache_r1")] * 3
    data, _ = other.receive_kv_cache_for_request("r1")
    assert equal(data["layer_blocks"], expected(layers, [1, 3], 7))


@on_bytes
def test_kv_of_two_ranks_is_put_together_for_one(transfers: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.distributed.omni_connectors import kv_transfer_manager

    mapping = {"rank_mapping": {"from_tp": 2, "to_tp": 1}}
    ranks = []
    for rank in range(2):
        monkeypatch.setattr(kv_transfer_manager, "get_local_tp_rank", lambda rank=rank: rank)
        ranks.append(transfers(0, **mapping))
    monkeypatch.setattr(kv_transfer_manager, "get_local_tp_rank", lambda: 0)
    other = transfers(1, **mapping)
    halves = [caches(), caches()]
    for one, layers in zip(ranks, halves, strict=True):
        send(one, layers)
    data, _ = other.receive_kv_cache_for_request("r1")
    both = [torch.cat(pair, dim=-2) for pair in zip(*halves, strict=True)]
    assert equal(data["layer_blocks"], expected(both, [1, 3], 7))
