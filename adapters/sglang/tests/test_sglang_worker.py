"""One role's process as our head sees it, without the host: what it accepts, holds, reports and drops."""

from __future__ import annotations

import gc
import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from moonrelay.errors import CapacityError
from moonrelay_sglang import config, protocol
from moonrelay_sglang.manager import Loaded, PayloadManager
from moonrelay_sglang.sockets import ResultSocket
from moonrelay_sglang.worker import Held, RoleWorker

WITHIN_S = 20.0


class Flags:
    disagg_transfer_backend = "moonrelay"

    def __init__(self, role: str) -> None:
        self.disagg_role = role


class Role:
    """A role's process: its worker, its manager, and the head's ends of its sockets."""

    def __init__(self, context: zmq.Context[Any], role: str, **settings: Any) -> None:
        given = {"engine": "memory", "beat_s": 0.05, "dead_after_s": 1.0, "claim_ttl_s": 1.0, **settings}
        self.config = config.from_server_args(Flags(role), given)
        name = secrets.token_hex(4)
        self.results = context.socket(zmq.PULL)
        self.results.bind(f"inproc://results-{name}")
        self._work_pull = context.socket(zmq.PULL)
        self._work_pull.bind(f"inproc://work-{name}")
        self.work = context.socket(zmq.PUSH)
        self.work.connect(f"inproc://work-{name}")
        self._result_push = context.socket(zmq.PUSH)
        self._result_push.connect(f"inproc://results-{name}")
        self.worker = RoleWorker(
            self.config,
            role=role,
            work_endpoint="tcp://127.0.0.1:1",
            context=context,
            result_endpoint=f"inproc://results-{name}",
        )
        self.manager = PayloadManager(
            self.config,
            epoch=self.worker.epoch,
            attempt_of=self.worker.attempt_of,
            on_stage=self.worker.staging,
        )
        self.worker.attach(self.manager)
        self.socket = ResultSocket(self._result_push, self.worker)
        self.build: Callable[[dict[str, Any], Loaded, Held], Any] = lambda scalars, loaded, held: (
            scalars,
            loaded,
            held,
        )

    def start(self) -> Role:
        if self.config.role == "encoder":
            self.requests = self.worker.take_requests_from(self._work_pull)
        else:
            self.worker.take_payloads_from(self._work_pull, self._entry, "cpu", None)
        self.worker.start()
        return self

    def _entry(self, scalars: dict[str, Any], loaded: Loaded, held: Held) -> Any:
        return self.build(scalars, loaded, held)

    def said(self, kind: str, wanted: Callable[[dict[str, Any]], bool] = lambda _message: True) -> dict[str, Any]:
        """Return the next message of a kind that the head gets; others are dropped."""
        for _ in range(2000):
            assert self.results.poll(WITHIN_S * 1000), f"the head got no {kind}"
            frames = self.results.recv_multipart()
            if not protocol.is_message(frames):
                continue
            message = protocol.decode(frames)
            protocol.parse_any(message)
            if message["msg_type"] == kind and wanted(message):
                return message
        pytest.fail(f"the head got no {kind}")

    def ready(self, request: str, manifest: dict[str, Any], attempt: int, *, to: str = "") -> None:
        message = protocol.Ready(request_id=request, manifest=protocol.for_attempt(manifest, attempt, to=to))
        self.work.send_multipart(protocol.encode(message))

    def release(self, request: str, attempt: int | None = None) -> None:
        self.work.send_multipart(protocol.encode(protocol.Release(moonrelay=1, request_id=request, attempt=attempt)))

    def next(self) -> tuple[dict[str, Any], Loaded, Held]:
        word, entry = self.worker.ready.get(timeout=WITHIN_S)
        assert word == "transfer_compute"
        found: tuple[dict[str, Any], Loaded, Held] = entry
        return found

    def holding(self) -> tuple[tuple[str, int], ...]:
        return self.worker.beat().holding

    def end(self) -> None:
        self.worker.close()
        for socket in (self.results, self._work_pull, self.work, self._result_push):
            socket.close(linger=0)


Make = Callable[..., Role]


@pytest.fixture
def make() -> Iterator[Make]:
    context: zmq.Context[Any] = zmq.Context()
    made: list[Role] = []

    def make_one(role: str, **settings: Any) -> Role:
        one = Role(context, role, **settings)
        made.append(one)
        return one.start()

    yield make_one
    for one in made:
        one.end()
    context.term()


def until(true: Callable[[], bool]) -> bool:
    for _ in range(500):
        if true():
            return True
        threading.Event().wait(0.02)
    return False


def offer(sender: Role, request: str = "r", **scalars: Any) -> dict[str, Any]:
    staged, _ = sender.manager.stage_tensors_async(request, {"latents": torch.ones(4)}, scalars)
    return staged.manifest


def test_it_registers_and_gives_signs_of_life(make: Make) -> None:
    role = make("denoiser", labels={"rack": "a"})
    found = protocol.parse(role.said(protocol.REGISTER), protocol.Register)
    assert found.moonrelay is not None
    assert (found.role, found.moonrelay.epoch, found.moonrelay.slots) == ("denoiser", role.worker.epoch, 2)
    assert found.moonrelay.labels == {"rack": "a"}
    beat = protocol.parse(role.said(protocol.BEAT), protocol.Beat)
    assert (beat.registration, beat.holding, beat.in_use) == (found, (), protocol.InUse())


def test_a_beat_that_fails_is_not_the_last(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    role = make("denoiser")
    failing = [True]

    def beat(_self: RoleWorker) -> protocol.Beat:
        if failing:
            failing.pop()
            message = "once"
            raise RuntimeError(message)
        return whole(_self)

    whole = RoleWorker.beat
    monkeypatch.setattr(RoleWorker, "beat", beat)
    assert until(lambda: not failing)
    while role.results.poll(0):
        role.results.recv_multipart()
    role.said(protocol.BEAT)


def test_work_is_loaded_computed_and_acknowledged(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender, size=(1, 2), seed=3), 7)
    scalars, loaded, held = role.next()
    assert scalars["size"] == (1, 2)
    assert torch.equal(loaded.tensors["latents"], torch.ones(4))
    assert role.holding() == (("r", 7),)
    with role.worker.working("r", held) as wanted:
        assert wanted
        staged, _ = role.manager.stage_tensors_async("r", {"latents": torch.zeros(4)}, {})
        assert protocol.located(staged.manifest).attempt == 7  # type: ignore[union-attr]
        assert sender.manager.in_use().payloads == 1, "the input stays until the result is out"
        role.socket.send_multipart([b"__transfer__", b'{"msg_type":"transfer_done","request_id":"r"}'])
    done = role.said(protocol.DONE)
    assert done["moonrelay"] == {"version": 1, "epoch": role.worker.epoch, "attempt": 7}
    assert until(lambda: sender.manager.in_use().payloads == 0)
    assert role.holding() == ()


@pytest.mark.parametrize("phase", ["compute", "stage", "send"])
def test_what_fails_is_said_with_its_phase_and_nothing_stays(make: Make, phase: str) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender), 1)
    _, _, held = role.next()
    with role.worker.working("r", held):
        if phase != "compute":
            role.manager.stage_tensors_async("r", {"latents": torch.zeros(4)}, {})
        if phase == "send":
            role.worker.outgoing([b"__transfer__", b"{}"])
        raise ValueError("broken")
    failed = role.said(protocol.FAILED)
    assert (failed["request_id"], failed["attempt"], failed["phase"]) == ("r", 1, phase)
    assert failed["error"] == {"code": "moonrelay_error", "retryable": False, "message": "ValueError: broken"}
    assert not failed["lost_input"]
    assert until(lambda: role.manager.in_use().payloads == 0 == role.manager.in_use().claims)
    assert until(lambda: sender.manager.in_use().payloads == 0), "nobody can do better with it"
    assert role.worker.beat().counters.failed == 1


def test_what_may_be_tried_again_keeps_its_input(make: Make) -> None:
    sender, role, other = make("encoder"), make("denoiser"), make("denoiser")
    manifest = offer(sender)
    role.ready("r", manifest, 1)
    _, _, held = role.next()
    failure = CapacityError("the pool is full")
    failure.retryable = True
    with role.worker.working("r", held):
        raise failure
    assert role.said(protocol.FAILED)["error"]["code"] == "capacity_error"
    other.ready("r", manifest, 2)
    assert other.next()[2].attempt == 2


def test_what_cannot_be_prepared_is_said_when_its_turn_comes(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender), 1)
    _, _, held = role.next()
    held.failure = RuntimeError("no timesteps")
    with role.worker.working("r", held) as wanted:
        assert not wanted
    assert "no timesteps" in role.said(protocol.FAILED)["error"]["message"]


def test_a_build_that_fails_is_said(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")

    def build(*_given: Any) -> Any:
        raise KeyError("field")

    role.build = build
    role.ready("r", offer(sender), 1)
    failed = role.said(protocol.FAILED)
    assert (failed["phase"], failed["lost_input"]) == ("load", False)
    assert until(lambda: role.manager.in_use().claims == 0)


def test_an_idle_role_holds_no_garbage(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    gc.disable()
    try:
        role.ready("r", offer(sender), 1)
        _, loaded, held = role.next()
        loaded.values["itself"] = loaded  # as a stage of the host does
        del loaded
        with role.worker.working("r", held):
            pass
        assert until(lambda: role.manager.in_use() == protocol.InUse())
    finally:
        gc.enable()


def test_a_lost_input_is_said(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    manifest = offer(sender)
    sender.manager.free_staged("r")
    role.ready("r", manifest, 1)
    failed = role.said(protocol.FAILED)
    assert (failed["phase"], failed["lost_input"]) == ("load", True)
    assert role.worker.ready.empty()


@pytest.mark.parametrize("manifest", [{}, {"moonrelay": {"version": 1}}, {"moonrelay": {"version": 9, "handle": "x"}}])
def test_a_damaged_manifest_fails_its_request_only(make: Make, manifest: dict[str, Any]) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("bad", manifest, 1)
    assert role.said(protocol.FAILED)["error"]["code"] in ("wire_error", "version_error")
    role.work.send_multipart([b"__transfer__", b"{"])
    role.work.send_multipart([b"__transfer__", b'{"msg_type":"transfer_ready"}'])
    role.ready("good", offer(sender, "good"), 1)
    assert role.next()[1].claim.handle.request_id == "good"


def test_a_release_drops_what_waits_and_the_result_of_what_runs(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender), 1)
    _, _, held = role.next()
    with role.worker.working("r", held) as wanted:
        assert wanted
        role.manager.stage_tensors_async("r", {"latents": torch.zeros(4)}, {})
        role.release("r", 1)
        assert until(lambda: held.released)
        role.socket.send_multipart([b"__transfer__", b'{"msg_type":"transfer_done","request_id":"r"}'])
    assert role.said(protocol.FINISHED)["attempt"] == 1
    assert until(lambda: role.manager.in_use().payloads == 0 == role.manager.in_use().claims)
    role.ready("s", offer(sender, "s"), 1)
    _, _, waiting = role.next()
    role.release("s")
    assert until(lambda: waiting.released)
    with role.worker.working("s", waiting) as wanted:
        assert not wanted
    assert role.said(protocol.FINISHED)["request_id"] == "s"


def test_ranks_in_step_compute_what_was_released_and_its_result_goes_nowhere(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender), 1)
    _, _, held = role.next()
    role.release("r")
    assert until(lambda: held.released)
    with role.worker.working("r", held, in_step=True) as wanted:
        assert wanted
        role.manager.stage_tensors_async("r", {"latents": torch.zeros(4)}, {})
        role.socket.send_multipart([b"__transfer__", b'{"msg_type":"transfer_done","request_id":"r"}'])
    assert role.said(protocol.FINISHED)["request_id"] == "r"
    assert until(lambda: role.manager.in_use().payloads == 0 == role.manager.in_use().claims)


def test_an_older_release_does_not_touch_a_newer_attempt(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender), 2)
    _, _, held = role.next()
    role.release("r", 1)
    role.ready("t", offer(sender, "t"), 1)
    role.next()
    assert not held.released


def test_a_later_attempt_takes_the_place_of_an_earlier_one(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    manifest = offer(sender)
    role.ready("r", manifest, 1)
    _, _, first = role.next()
    role.ready("r", manifest, 1)  # said twice
    role.ready("r", manifest, 2)
    _, _, second = role.next()
    assert (first.released, second.attempt, role.holding()) == (True, 2, (("r", 2),))
    with role.worker.working("r", first) as wanted:
        assert not wanted
    assert role.manager.in_use().claims == 1, "the later one's"
    with role.worker.working("r", second) as wanted:
        assert wanted
    assert until(lambda: sender.manager.in_use().payloads == 0)


def test_work_for_another_session_of_this_place_is_dropped(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    manifest = offer(sender)
    role.ready("r", manifest, 1, to="the process before")
    role.ready("r", manifest, 2, to=role.worker.epoch)
    assert role.next()[2].attempt == 2
    assert role.worker.ready.empty()


def test_an_encoder_holds_what_waits_and_drops_what_is_released(make: Make) -> None:
    role = make("encoder")
    for number, request in enumerate(("a", "b", "c")):
        role.work.send_multipart(protocol.encoder_frames(request, number, request.encode(), to=role.worker.epoch))
    role.work.send_multipart(protocol.encoder_frames("d", 9, b"d", to="another"))
    assert until(lambda: role.holding() == (("a", 0), ("b", 1), ("c", 2)))
    role.release("b")
    assert until(lambda: len(role.holding()) == 2)
    assert role.requests.recv_multipart()[-1] == b"a"
    with role.worker.working("a", role.worker.taken()):
        role.socket.send_multipart([b'{"tensor_descriptors":[],"scalar_fields":{"request_id":"a"}}'])
    assert role.requests.recv_multipart()[-1] == b"c"
    taken = role.worker.taken()
    assert taken is not None
    assert taken.attempt == 2
    assert role.said(protocol.FINISHED)["request_id"] == "b"


def test_a_stock_head_is_answered(make: Make) -> None:
    role = make("denoiser")
    role.work.send_multipart([b"__transfer__", b'{"msg_type":"transfer_alloc","request_id":"r","data_size":65}'])
    assert role.said(protocol.ALLOCATED)["slot_size"] == 65
    role.work.send_multipart([b"__transfer__", b'{"msg_type":"transfer_push","request_id":"r"}'])
    assert role.said(protocol.PUSHED)["request_id"] == "r"


def test_what_fails_after_the_answer_is_no_second_answer(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser")
    role.ready("r", offer(sender), 1)
    _, _, held = role.next()
    with role.worker.working("r", held):
        role.socket.send_multipart([b"__transfer__", b'{"msg_type":"transfer_done","request_id":"r"}'])
        raise RuntimeError("of the metrics")
    role.said(protocol.DONE)
    assert until(lambda: sender.manager.in_use().payloads == 0)
    role.ready("s", {}, 1)
    assert role.said(protocol.FAILED)["request_id"] == "s"


def test_it_ends_while_it_takes_work_over(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser", peer_timeout_s=30.0)
    role.ready("r", offer(sender), 1)
    role.next()
    role.worker.close()
    role.worker.close()
    with pytest.raises(queue.Empty):
        role.worker.ready.get_nowait()
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("moonrelay-beat") and thread in role.worker._threads
    ]


def test_a_sign_of_life_names_what_is_offered(make: Make) -> None:
    role = make("encoder")
    offer(role)
    assert len(role.worker.beat().offered) == 1
    assert protocol.parse_any(protocol.decode(protocol.encode(role.worker.beat()))) == role.worker.beat()


def test_a_later_attempt_need_not_wait_for_one_that_was_still_loading(make: Make) -> None:
    sender, role = make("encoder"), make("denoiser", fetch_timeout_s=8.0)
    manifest = offer(sender)
    loading, go_on = threading.Event(), threading.Event()
    load = role.manager.load

    def slow(*args: Any, **kwargs: Any) -> Loaded:
        loaded = load(*args, **kwargs)
        if not loading.is_set():
            loading.set()
            assert go_on.wait(WITHIN_S)
        return loaded

    role.manager.load = slow  # type: ignore[method-assign]
    role.ready("r", manifest, 1)
    assert loading.wait(WITHIN_S)
    with role.manager._lock:
        taken = role.manager._taken.pop("r")  # as if it had not landed yet when the second attempt comes
    role.ready("r", manifest, 2)
    assert until(lambda: role.holding() == (("r", 2),))
    with role.manager._lock:
        role.manager._taken["r"] = taken
    go_on.set()
    _, loaded, held = role.next()
    assert held.attempt == 2
    assert loaded.claim is not taken.claim


def test_a_role_that_takes_no_more_work_gives_no_sign_of_life() -> None:
    class Broken:
        def poll(self, _timeout_ms: int) -> bool:
            raise zmq.ZMQError(zmq.ENOTSOCK)

    context: zmq.Context[Any] = zmq.Context()
    role = Role(context, "denoiser")
    try:
        role.worker.start()
        role.said(protocol.BEAT)
        role.worker.take_payloads_from(Broken(), role.build, "cpu", None).join(WITHIN_S)
        beat = next(thread for thread in role.worker._threads if thread.name == "moonrelay-beat")
        beat.join(WITHIN_S)
        assert not beat.is_alive()
    finally:
        role.end()
        context.destroy(linger=0)
