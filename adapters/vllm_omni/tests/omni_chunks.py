"""The host's own chunk transfer around our connector, as its schedulers have it; a producer in a process of its own.

What a language stage would compute is made from numbers, on both sides; everything between is the host's code.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from omni_peer import StagePeer, digest, main

from moonrelay_vllm_omni import plugin

#: How long anything here may take on a busy machine.
LONG_S = 60.0


def content(name: str, number: int) -> dict[str, Any]:
    """Return what chunk ``number`` of a request holds: codes and a latent of its own, in the host's types."""
    maker = torch.Generator().manual_seed(number * 7919 + sum(name.encode()))
    return {
        "codes": torch.randint(0, 1024, (2, 3 + number), generator=maker),
        "latent": torch.randn(5, 8, generator=maker).to(torch.bfloat16),
        "number": number,
    }


def payload_of(
    *, transfer_manager: Any, multimodal_output: int | None, request: Any, is_finished: bool
) -> Any:  # the host looks for these very names
    """Build a chunk, as a model's hook does in the host's save thread; the last word of a request may hold nothing."""
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct

    if multimodal_output is None:
        return None
    made = content(request.external_req_id, multimodal_output)
    return OmniPayloadStruct(
        codes=CodesStruct(audio=made["codes"]), latent=made["latent"], meta=MetaStruct(chunk_seq=made["number"])
    )


def seen(information: dict[str, Any]) -> str:
    """Return the digest of what a received chunk holds, as `content` has it."""
    return digest(
        {
            "codes": information["codes"]["audio"],
            "latent": information["latent"],
            "number": information["meta"]["chunk_seq"],
        }
    )


def adapter(extra: dict[str, Any], stage: int, worker: str) -> Any:
    """Return the host's adapter of one stage, with the connector that it makes from a deploy YAML's words."""
    from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import OmniChunkTransferAdapter

    plugin.register()
    model = SimpleNamespace(
        stage_connector_config={"name": plugin.NAME, "extra": dict(extra)},
        stage_id=stage,
        worker_type=worker,
        async_chunk=True,
        max_model_len=4096,
        custom_process_next_stage_input_func=f"{__name__}.payload_of" if stage == 0 else None,
    )
    return OmniChunkTransferAdapter(
        SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=8))
    )


def request(name: str) -> Any:
    """Return a request of the host's, under an internal and an external id."""
    from vllm.sampling_params import SamplingParams
    from vllm_omni.request import OmniRequest

    return OmniRequest(f"internal-{name}", [1, 2, 3], SamplingParams(max_tokens=64), None, external_req_id=name)


class Consumer:
    """What of the host's scheduler drives the receiving adapter: its two queues, tick by tick."""

    def __init__(self, receiving: Any) -> None:
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

        self.adapter = receiving
        self.waiting = create_request_queue(SchedulingPolicy.FCFS)
        self.running: list[Any] = []
        self.requests: dict[str, Any] = {}
        #: Digests of the chunks, by external id, in the order in which the model would have had them.
        self.chunks: dict[str, list[str]] = {}
        self.slowest_s = 0.0

    def add(self, one: Any) -> None:
        self.requests[one.request_id] = one
        self.chunks[one.external_req_id] = []
        self.waiting.add_request(one)

    def tick(self) -> None:
        """One step of the scheduler: who has a chunk runs, who has none waits aside."""
        from vllm.v1.request import RequestStatus

        started = time.monotonic()
        self.adapter.process_pending_chunks(self.waiting, self.running, scheduler_requests=self.requests)
        new, cached = [], []
        for one in [*self.running, *self.waiting]:
            if one.request_id not in self.adapter.requests_with_ready_chunks:
                continue
            information = one.additional_information
            if information and "latent" in information:
                self.chunks[one.external_req_id].append(seen(information))
                one.additional_information = None
            (new if one in self.waiting else cached).append(one.request_id)
            if one in self.waiting:
                self.waiting.remove_request(one)
                one.status = RequestStatus.RUNNING
                self.running.append(one)
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=one) for one in new],
            scheduled_cached_reqs=SimpleNamespace(req_ids=cached),
        )
        self.adapter.postprocess_scheduler_output(output, self.requests)
        self.adapter.restore_queues(self.waiting, self.running, self.requests)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)

    def done(self, name: str) -> bool:
        """Whether a stream has ended, and the model has had all of it."""
        one = f"internal-{name}"
        waits = one in self.adapter._finished_load_reqs or one in self.adapter.requests_with_ready_chunks
        return bool(self.adapter.is_done_receiving_chunks(one)) and not waits

    def until(self, ready: Any, what: str) -> None:
        """Tick until something is so."""
        end = time.monotonic() + LONG_S
        while not ready():
            assert time.monotonic() < end, f"{what}; seen so far: { {k: len(v) for k, v in self.chunks.items()} }"
            self.tick()
            threading.Event().wait(0.002)

    def finish(self, *names: str, failed: bool = False) -> None:
        """End requests as the host's scheduler does."""
        from vllm.v1.request import RequestStatus

        status = RequestStatus.FINISHED_ERROR if failed else RequestStatus.FINISHED_STOPPED
        ids = [f"internal-{name}" for name in names]
        self.adapter.finish_requests(ids, status, self.requests)
        for one in ids:
            ended = self.requests.pop(one)
            ended.status = status
            self.running = [other for other in self.running if other is not ended]


class ChunkProducer(StagePeer):
    """A process with the sending stage's adapter."""

    script = __file__


class _Producer:
    """The other end."""

    def __init__(self) -> None:
        self.adapter: Any = None
        self.requests: dict[str, Any] = {}

    def make(self, extra: dict[str, Any], host: bool) -> None:
        assert host, "the host's code is what is tested here"
        self.adapter = adapter(extra, 0, "ar")

    def save(self, name: str, number: int | None, finished: bool = False) -> None:
        """Have the host send one chunk; ``None`` is a request's end without content."""
        from vllm.v1.request import RequestStatus

        one = self.requests.setdefault(name, request(name))
        one.num_computed_tokens += 1
        if finished:
            one.status = RequestStatus.FINISHED_STOPPED
        self.adapter.save_async(number, one, is_segment_finished=False)

    def abort(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        one = self.requests.pop(name)
        self.adapter.finish_requests([one.request_id], RequestStatus.FINISHED_ABORTED, {one.request_id: one})

    def forget(self, name: str) -> None:
        """Let the next request of this name be a new one."""
        del self.requests[name]

    def sent(self) -> dict[str, Any]:
        """Return how many payloads were put, how many wait for it, and what the host gave up."""
        return {
            "puts": self.adapter.connector.health()["puts"],
            "queued": len(self.adapter._pending_save_reqs),
            "failed": self.adapter.collect_failed_send_request_ids(),
        }

    def in_use(self) -> dict[str, int]:
        return dict(self.adapter.connector.stages.in_use())

    def close(self) -> None:
        self.adapter.shutdown()


if __name__ == "__main__":
    main(_Producer())
