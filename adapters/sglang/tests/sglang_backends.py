"""A sender's and a receiver's manager in one process, for each ``--disagg-transfer-backend`` that is put to the test.

`Pair.carry` does what head and roles do with a request's fields: stage them, carry the message as JSON, take a receive
slot, push, load, free. What a role does before and after is `Pair.carry_request`.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

POOL_BYTES = 32 << 20


class Refused(Exception):
    """What a backend will not carry; the text names the field, or says what is full."""


class StockPair:
    """The managers of the host, over an engine that copies and counts what it was asked to send."""

    def __init__(self) -> None:
        from sglang.multimodal_gen.runtime.disaggregation.transport.buffer import TransferTensorBuffer
        from sglang.multimodal_gen.runtime.disaggregation.transport.engine import BaseTransferEngine
        from sglang.multimodal_gen.runtime.disaggregation.transport.manager import DiffusionTransferManager

        class CopyEngine(BaseTransferEngine):
            sent = 0
            session_id = "here"

            def register_buffer(self, ptr: int, length: int) -> None:
                pass

            def deregister_buffer(self, ptr: int) -> None:
                pass

            def transfer_sync(self, dst_session_id: str, src_addr: int, dst_addr: int, length: int) -> int:
                ctypes.memmove(dst_addr, src_addr, length)
                self.sent += length
                return 0

            def batch_transfer_sync(self, *args: Any) -> int:
                raise NotImplementedError

        self._engine = CopyEngine()
        # Not "cpu": for that it wants pinned memory, which needs an accelerator.
        self._buffers = [TransferTensorBuffer(POOL_BYTES, role_name=role, device="cpu:0") for role in ("out", "in")]
        self.sender, self.receiver = (DiffusionTransferManager(self._engine, buffer) for buffer in self._buffers)

    @property
    def wire_bytes(self) -> int:
        """Bytes sent so far."""
        return self._engine.sent

    @property
    def held_bytes(self) -> int:
        """Bytes of both pools that nobody can allocate."""
        return sum(buffer._allocator.get_stats()["allocated_bytes"] for buffer in self._buffers)

    def stage(self, request: str, tensors: dict[str, Any], scalars: dict[str, Any]) -> dict[str, Any]:
        """Return the sender's message, as it comes out of the socket."""
        staged, event = self.sender.stage_tensors_async(request, tensors, scalars, None)
        if staged is None:
            message = "Transfer staging failed"  # which the role tells the head
            raise Refused(message)
        if event is not None:
            event.synchronize()
        slot = staged.slot
        told = {
            "manifest": staged.manifest,
            "scalar_fields": staged.scalar_fields,
            "data_size": slot.size if slot else 0,
        }
        back: dict[str, Any] = json.loads(json.dumps(told))
        return back

    def carry(
        self, tensors: dict[str, Any], scalars: dict[str, Any] | None = None, request: str = "a"
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Carry the fields of a request; return what the receiver has of them."""
        message = self.stage(request, tensors, scalars or {})
        pending = self.receiver.allocate_receive_slot(request, message["data_size"])
        assert pending is not None
        target = self.receiver.pool_data_ptr + pending.slot.offset
        assert self.sender.push_to_peer(request, self.receiver.session_id, target, message["data_size"])
        self.sender.free_staged(request)
        loaded, event = self.receiver.load_tensors_async(request, message["manifest"], device="cpu:0", stream=None)
        if event is not None:
            event.synchronize()
        self.receiver.free_receive_slot(request)
        return loaded, message["scalar_fields"]

    def drop(self, request: str) -> None:
        """Give up what a request has staged."""
        self.sender.free_staged(request)

    def carry_request(self, req: Any) -> Any:
        """Carry a request from one role to the next."""
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.disaggregation import scheduler_mixin

        class Role:
            _disagg_sampling_params_cls = SamplingParams

        tensors, scalars = self.carry(*scheduler_mixin.extract_transfer_fields(req))
        return scheduler_mixin.SchedulerDisaggMixin._build_disagg_req(Role(), scalars, tensors)

    def close(self) -> None:
        """Nothing is left of it but memory."""


class MoonrelayPair:
    """Our managers, in the host's own class, over the engine for one process."""

    def __init__(self) -> None:
        from moonrelay_sglang import config
        from moonrelay_sglang.manager import manager_class

        def make(role: str) -> Any:
            settings = config.from_server_args(
                SimpleNamespace(disagg_role=role), {"engine": "memory", "pool_bytes": POOL_BYTES, "stage_timeout_s": 1}
            )
            return manager_class()(settings, epoch=role)

        self.sender, self.receiver = make("encoder"), make("denoiser")

    @property
    def wire_bytes(self) -> int:
        """Bytes taken over so far."""
        taken: int = self.receiver.counters().bytes
        return taken

    @property
    def held_bytes(self) -> int:
        """Bytes that are offered, and payloads that are claimed; what was handed out is the request's own."""
        held = 0
        for _ in range(100):
            used = [manager.in_use() for manager in (self.sender, self.receiver)]
            held = sum(one.bytes + one.payloads + one.claims for one in used)
            if held == 0:
                break
            threading.Event().wait(0.02)
        return held

    def stage(self, request: str, tensors: dict[str, Any], scalars: dict[str, Any]) -> dict[str, Any]:
        """Return the sender's message, as it comes out of the socket."""
        from moonrelay.errors import MoonrelayError

        try:
            staged, _ = self.sender.stage_tensors_async(request, tensors, scalars, None)
        except MoonrelayError as exc:
            raise Refused(str(exc)) from exc
        told = {
            "manifest": staged.manifest,
            "scalar_fields": staged.scalar_fields,
            "data_size": staged.slot.size,
        }
        back: dict[str, Any] = json.loads(json.dumps(told))
        return back

    def carry(
        self, tensors: dict[str, Any], scalars: dict[str, Any] | None = None, request: str = "a"
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Carry the fields of a request; return what the receiver has of them."""
        message = self.stage(request, tensors, scalars or {})
        loaded = self.receiver.load(request, message["manifest"], device="cpu:0")
        self.receiver.done(request)
        return loaded.tensors, {**message["scalar_fields"], **loaded.values}

    def drop(self, request: str) -> None:
        """Give up what a request has staged."""
        self.sender.free_staged(request)

    def carry_request(self, req: Any) -> Any:
        """Carry a request from one role to the next."""
        from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
        from sglang.multimodal_gen.runtime.disaggregation import scheduler_mixin

        from moonrelay_sglang import fields

        class Role:
            _disagg_sampling_params_cls = SamplingParams

        taken = fields.extract(
            req,
            left=scheduler_mixin._EXCLUDE_FIELDS,
            left_of_sampling=scheduler_mixin._SAMPLING_PARAMS_EXCLUDE_FIELDS,
            trees=scheduler_mixin.extract_extra_tensors,
        )
        tensors, scalars = self.carry(*taken)
        return scheduler_mixin.SchedulerDisaggMixin._build_disagg_req(Role(), scalars, tensors)

    def close(self) -> None:
        """End both managers."""
        self.sender.cleanup()
        self.receiver.cleanup()


#: By the value of the host's flag. Each makes a pair.
PAIRS: dict[str, Callable[[], Any]] = {"mooncake": StockPair, "moonrelay": MoonrelayPair}
#: What a cluster with a backend is made with, over its module's LAYOUT; see `sglang_cluster.Cluster`. With ours all
#: modules have one and the same: it is what each of them needs.
CLUSTERS: dict[str, dict[str, Any]] = {
    "mooncake": {"backend": "mooncake"},
    "moonrelay": {
        "backend": "moonrelay",
        "denoisers": 2,
        "options": {
            "encoder": {"disagg_transfer_pool_size": 8 << 20},
            "denoiser": {"disagg_transfer_pool_size": 4 << 20},
        },
    },
}

#: A request takes half a second of an idle machine.
WITHIN_S = 60.0
#: The same where the host's own backend is known never to answer.
HANGS_AFTER_S = {"mooncake": 15.0, "moonrelay": WITHIN_S}


def backends(known: dict[str, Any], stock_fault: str | None = None, raises: Any = AssertionError) -> Any:
    """Parametrise a test with the backends.

    Args:
        known: The backends, by name.
        stock_fault: What the host's own backend does instead of what is right; its case then has to fail.
        raises: How it fails.
    """
    import pytest

    def case(name: str) -> Any:
        faulty = stock_fault is not None and name == "mooncake"
        marks = [pytest.mark.xfail(strict=True, reason=stock_fault, raises=raises)] if faulty else []
        return pytest.param(name, id=name, marks=marks)

    return pytest.mark.parametrize("backend", [case(name) for name in known])
