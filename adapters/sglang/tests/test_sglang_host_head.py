"""The host's real head with ours in it, and workers made of sockets: what goes out, and what comes back to a client."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq

from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import ConfigError, PeerLost
from moonrelay_sglang import head, protocol
from moonrelay_sglang.config import OUR_POLICIES
from moonrelay_sglang.protocol import Failure, Ready, Register, Registration, Stamp

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(120),
    # The host's codec makes tensors of what a socket gave.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable"),
]

WAIT_MS = 10_000
ROLES = ("encoder", "denoiser", "decoder")


class FakeWorker:
    """One instance: the sockets of a role, and the messages of ours."""

    def __init__(self, context: zmq.Context[Any], role: str, result_endpoint: str) -> None:
        self.role = role
        self.work = context.socket(zmq.PULL)
        self.work.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.endpoint = f"tcp://127.0.0.1:{self.work.bind_to_random_port('tcp://127.0.0.1')}"
        self.results = context.socket(zmq.PUSH)
        self.result_endpoint = result_endpoint
        self.epoch = f"{role}-one"

    def begin(self) -> None:
        self.results.connect(self.result_endpoint)
        self.register()

    def registration(self) -> Register:
        ours = Registration(
            version=protocol.VERSION,
            epoch=self.epoch,
            instance=self.role,
            slots=2,
            beat_s=0.2,
            features=protocol.FEATURES,
        )
        return Register(role=self.role, work_endpoint=self.endpoint, session_id=self.epoch, moonrelay=ours)

    def register(self) -> None:
        self.results.send_multipart(protocol.encode(self.registration()))

    def beat(self, *holding: tuple[str, int]) -> None:
        beat = protocol.Beat(
            moonrelay=protocol.VERSION,
            role=self.role,
            work_endpoint=self.endpoint,
            epoch=self.epoch,
            registration=self.registration(),
            holding=holding,
        )
        self.results.send_multipart(protocol.encode(beat))

    def take(self) -> tuple[str, int, Any]:
        """Wait for work: its request, attempt, and what an encoder unpickles or a Ready."""
        while True:
            frames = self.work.recv_multipart()
            if not protocol.is_message(frames):
                return frames[0].decode(), protocol.encoder_attempt(frames), frames[-1]
            message = protocol.parse_any(protocol.decode(frames))
            if isinstance(message, Ready):
                location = protocol.located(message.manifest)
                assert location is not None
                assert location.to == self.epoch
                return message.request_id, location.attempt, message

    def released(self) -> protocol.Release:
        message = protocol.parse_any(protocol.decode(self.work.recv_multipart()))
        assert isinstance(message, protocol.Release)
        return message

    def stage(self, request_id: str, attempt: int) -> None:
        manifest = protocol.manifest_of(f"made by {self.role}".encode(), epoch=self.epoch, nbytes=4, attempt=attempt)
        stamp = Stamp(version=protocol.VERSION, epoch=self.epoch, attempt=attempt)
        scalars = {"request_id": request_id, "seed": 42}
        if self.role == "denoiser":
            message: Any = protocol.Done(
                request_id=request_id,
                staged_for_decoder=True,
                manifest=manifest,
                scalar_fields=scalars,
                moonrelay=stamp,
            )
        else:
            message = protocol.Staged(request_id=request_id, manifest=manifest, scalar_fields=scalars, moonrelay=stamp)
        self.results.send_multipart(protocol.encode(message))

    def fail(self, request_id: str, attempt: int, error: Exception, *, lost_input: bool = False) -> None:
        message = protocol.Failed(
            moonrelay=protocol.VERSION,
            request_id=request_id,
            attempt=attempt,
            epoch=self.epoch,
            phase="load",
            error=Failure.of(error),
            lost_input=lost_input,
        )
        self.results.send_multipart(protocol.encode(message))

    def deliver(self, request_id: str, attempt: int, value: float) -> None:
        from sglang.multimodal_gen.runtime.disaggregation.transport.codec import pack_tensors

        first, tensors = pack_tensors({"output": torch.full((2, 3), value)}, {"request_id": request_id})
        frames = [first, *(tensor._view for tensor in tensors)]
        stamp = Stamp(version=protocol.VERSION, epoch=self.epoch, attempt=attempt)
        self.results.send_multipart(protocol.stamped(frames, stamp))


class Deployment:
    """A real ``DiffusionServer`` with a head of ours, one fake worker for each role but two denoisers."""

    def __init__(self, policy: str = "round_robin", **flags: Any) -> None:
        from sglang.multimodal_gen.runtime.disaggregation.orchestrator import DiffusionServer

        self.context: zmq.Context[Any] = zmq.Context()
        results = {role: self._free_endpoint() for role in ROLES}
        self.encoder, self.denoiser, self.decoder = (FakeWorker(self.context, role, results[role]) for role in ROLES)
        self.other = FakeWorker(self.context, "denoiser", results["denoiser"])
        self.other.epoch = "denoiser-two"
        self.frontend = self._free_endpoint()
        args = SimpleNamespace(
            enable_metrics=False,
            num_gpus=1,
            dp_size=1,
            disagg_role=SimpleNamespace(value="server"),
            disagg_dispatch_policy=policy,
            disagg_timeout=60.0,
            disagg_transfer_backend="moonrelay",
            **flags,
        )
        self.server = DiffusionServer(
            frontend_endpoint=self.frontend,
            encoder_work_endpoints=[self.encoder.endpoint],
            denoiser_work_endpoints=[self.denoiser.endpoint, self.other.endpoint],
            decoder_work_endpoints=[self.decoder.endpoint],
            encoder_result_endpoint=results["encoder"],
            denoiser_result_endpoint=results["denoiser"],
            decoder_result_endpoint=results["decoder"],
            server_args=args,
            dispatch_policy_name=policy,
        )
        self.clients: list[zmq.Socket[Any]] = []
        self.server.start()
        assert self.server.wait_ready(10)

    def workers(self) -> list[FakeWorker]:
        return [self.encoder, self.denoiser, self.other, self.decoder]

    def begin(self, *workers: FakeWorker) -> None:
        for worker in workers or self.workers():
            worker.begin()
        self.until(lambda: all(self.alive(worker) for worker in workers or self.workers()))

    def alive(self, worker: FakeWorker) -> bool:
        instances = self.stats()["stages"][worker.role]["instances"]
        return any(one["alive"] and one["endpoint"] == worker.endpoint for one in instances)

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get_stats()["moonrelay"]
        return found

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = Deadline(10.0, SystemClock())
        waiter = zmq.Poller()
        while not condition():
            assert not deadline.expired, self.stats()
            waiter.poll(20)

    def ask(self, request: Any) -> zmq.Socket[Any]:
        from sglang.multimodal_gen.runtime.disaggregation import orchestrator

        client = self.context.socket(zmq.REQ)
        client.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        client.connect(self.frontend)
        client.send(orchestrator.pickle.dumps(request))
        self.clients.append(client)
        return client

    @staticmethod
    def answer(client: zmq.Socket[Any]) -> Any:
        from sglang.multimodal_gen.runtime.disaggregation import orchestrator

        return orchestrator.pickle.loads(client.recv())

    def _free_endpoint(self) -> str:
        probe = self.context.socket(zmq.PULL)
        port = probe.bind_to_random_port("tcp://127.0.0.1")
        probe.close(linger=0)
        return f"tcp://127.0.0.1:{port}"

    def end(self) -> None:
        self.server.stop()
        self.context.destroy(linger=0)


@pytest.fixture(scope="module", autouse=True)
def hooks(host: None) -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what our hooks import of the host warns
        apply_plugin_hooks()


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    one = Deployment()
    with contextlib.closing(SimpleNamespace(close=one.end)):
        one.begin()
        yield one


def request(request_id: str, **extra: Any) -> Any:
    from sglang.multimodal_gen.configs.sample.sampling_params import SamplingParams
    from sglang.multimodal_gen.runtime.pipelines_core import Req

    made = Req(sampling_params=SamplingParams(), prompt="a fox", request_id=request_id)
    made.extra.update(extra)
    return made


def test_a_request_goes_through_all_roles_and_its_result_to_its_client(deployment: Deployment) -> None:
    client = deployment.ask(request("r"))
    request_id, attempt, _ = deployment.encoder.take()
    deployment.encoder.stage(request_id, attempt)
    request_id, attempt, ready = deployment.denoiser.take()
    assert ready.scalar_fields["seed"] == 42
    assert protocol.located(ready.manifest).handle_bytes() == b"made by encoder"  # type: ignore[union-attr]
    deployment.denoiser.stage(request_id, attempt)
    request_id, attempt, _ = deployment.decoder.take()
    deployment.decoder.deliver(request_id, attempt, 0.5)
    answer = deployment.answer(client)
    assert answer.error is None
    assert torch.equal(answer.output, torch.full((2, 3), 0.5))
    deployment.until(lambda: deployment.stats()["active"] == 0)
    assert deployment.encoder.released().request_id == "r"
    assert deployment.server.tracker.snapshot()["total"] == 0


def test_a_failure_is_told_to_its_client_alone_and_at_once(deployment: Deployment) -> None:
    first, second = deployment.ask(request("first")), deployment.ask(request("second"))
    taken = {}
    for _ in range(2):
        request_id, attempt, _ = deployment.encoder.take()
        taken[request_id] = attempt
    deployment.encoder.fail("first", taken["first"], ValueError("no such token"))
    answer = deployment.answer(first)
    assert "no such token" in answer.error
    deployment.encoder.stage("second", taken["second"])
    worker = deployment.denoiser
    request_id, attempt, _ = worker.take()
    worker.stage(request_id, attempt)
    request_id, attempt, _ = deployment.decoder.take()
    deployment.decoder.deliver(request_id, attempt, 2.0)
    assert deployment.answer(second).error is None


def test_a_lost_input_is_made_again_and_a_late_result_of_the_first_attempt_is_dropped(deployment: Deployment) -> None:
    client = deployment.ask(request("r"))
    _, first, _ = deployment.encoder.take()
    deployment.encoder.stage("r", first)
    _, attempt, _ = deployment.denoiser.take()
    deployment.denoiser.fail("r", attempt, PeerLost("the encoder is gone"), lost_input=True)
    _, second, _ = deployment.encoder.take()
    assert second > first
    deployment.encoder.stage("r", first)  # the late one
    deployment.until(lambda: deployment.stats()["stages"]["encoder"]["running"] == 1)
    deployment.encoder.stage("r", second)
    _, attempt, _ = deployment.other.take()
    deployment.other.stage("r", attempt)
    _, attempt, _ = deployment.decoder.take()
    deployment.decoder.deliver("r", attempt, 1.0)
    assert deployment.answer(client).error is None


def test_a_dead_denoiser_gets_no_work_and_the_other_one_takes_over() -> None:
    deployment = Deployment(disagg_instance_id=None)
    with contextlib.closing(SimpleNamespace(close=deployment.end)):
        deployment.begin()
        client = deployment.ask(request("r"))
        _, attempt, _ = deployment.encoder.take()
        deployment.encoder.stage("r", attempt)
        _, lost, _ = deployment.denoiser.take()
        deployment.denoiser.beat(("r", lost))
        living = [deployment.encoder, deployment.other, deployment.decoder]
        deadline = Deadline(15.0, SystemClock())
        deployment.other.work.setsockopt(zmq.RCVTIMEO, 200)
        again = None
        while again is None:
            assert not deadline.expired, deployment.stats()
            for worker in living:
                worker.beat()
            with contextlib.suppress(zmq.Again):
                _, again, _ = deployment.other.take()
        assert again > lost
        deployment.other.stage("r", again)
        _, attempt, _ = deployment.decoder.take()
        deployment.decoder.deliver("r", attempt, 1.0)
        assert deployment.answer(client).error is None
        stats = deployment.stats()
        assert stats["stages"]["denoiser"]["instances"][0]["deaths"] == 1
        assert "denoiser[1]" in stats["reports"]
        assert "denoiser[0]" not in stats["reports"], "what a dead process held is gone with it"


@pytest.mark.parametrize("policy", OUR_POLICIES)
def test_a_policy_of_ours_is_the_schedulers(policy: str) -> None:
    deployment = Deployment(policy)
    try:
        assert deployment.stats()["policy"] == policy
    finally:
        deployment.end()


def test_a_policy_of_ours_without_our_backend_is_refused() -> None:
    args = SimpleNamespace(disagg_transfer_backend="mooncake")
    with pytest.raises(ConfigError, match="--disagg-dispatch-policy credits needs --disagg-transfer-backend moonrelay"):
        head.around_init(pytest.fail, object(), server_args=args, dispatch_policy_name="credits")


def test_statistics_come_over_the_wire_of_the_clients(deployment: Deployment) -> None:
    from sglang.multimodal_gen.runtime.entrypoints.control_requests import GetDisaggStatsReq

    deployment.decoder.beat()
    deployment.until(lambda: bool(deployment.stats()["reports"]))
    answer = deployment.answer(deployment.ask(GetDisaggStatsReq()))
    ours = answer.output["moonrelay"]
    assert list(ours["stages"]) == list(ROLES)
    assert ours["problems"] == []
    assert ours["reports"]["decoder[0]"]["in_use"]["payloads"] == 0
    msgspec.json.encode(answer.output)  # as the HTTP side does


def test_a_ping_is_answered_as_before(deployment: Deployment) -> None:
    assert deployment.answer(deployment.ask({"method": "ping"})) == {"status": "ignored"}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [({"priority": "now"}, "priority='now'"), ({"speed": 9}, "moonrelay"), ({"affinity": "here"}, "affinity='here'")],
)
def test_a_wrong_wish_is_refused_in_one_line(deployment: Deployment, wanted: Any, said: str) -> None:
    client = deployment.ask(request("r", diffusers_kwargs={"moonrelay": wanted}))
    answer = deployment.answer(client)
    assert said in answer.error
    assert "\n" not in answer.error
    assert deployment.server.tracker.snapshot()["total"] == 0


def test_a_wish_does_not_reach_the_pipeline(deployment: Deployment) -> None:
    from sglang.multimodal_gen.runtime.disaggregation import orchestrator

    kwargs = {"moonrelay": {"priority": "interactive"}, "flow_shift": 3.0}
    deployment.ask(request("r", diffusers_kwargs=kwargs))
    _, _, work = deployment.encoder.take()
    (req,) = orchestrator.pickle.loads(work)
    assert req.extra["diffusers_kwargs"] == {"flow_shift": 3.0}


def test_a_stock_role_is_refused_and_said_so() -> None:
    deployment = Deployment()
    with contextlib.closing(SimpleNamespace(close=deployment.end)):
        deployment.begin(deployment.encoder, deployment.denoiser, deployment.decoder)
        stock = Register(role="denoiser", work_endpoint=deployment.other.endpoint, session_id="x")
        deployment.denoiser.results.send_multipart(protocol.encode(stock))
        deployment.until(lambda: bool(deployment.stats()["refused"]))
        assert "--disagg-transfer-backend moonrelay" in deployment.stats()["refused"][0]
        assert not deployment.alive(deployment.other)


def test_damaged_messages_end_nothing(deployment: Deployment) -> None:
    for frames in ([b"__transfer__", b"{"], [b"__transfer__", b'{"msg_type":"transfer_staged"}'], [b"\xff\x00"], [b""]):
        deployment.encoder.results.send_multipart(frames)
    for kind in ([], {}, None, 7):
        deployment.encoder.results.send_multipart(protocol.encode({"msg_type": kind}))
    for scalars in ([], "text", None):
        first = msgspec.json.encode({"tensor_descriptors": [], "scalar_fields": scalars})
        deployment.encoder.results.send_multipart([first])
    # One that the last role cannot mean.
    manifest = protocol.manifest_of(b"x", epoch="decoder-one", nbytes=4, attempt=1)
    stamp = Stamp(version=protocol.VERSION, epoch="decoder-one", attempt=1)
    done = protocol.Done(request_id="r", staged_for_decoder=True, manifest=manifest, moonrelay=stamp)
    deployment.decoder.results.send_multipart(protocol.encode(done))
    client = deployment.ask(request("r"))
    _, attempt, _ = deployment.encoder.take()
    deployment.encoder.fail("r", attempt, ValueError("stop here"))
    assert "stop here" in deployment.answer(client).error
    assert deployment.server.is_alive


def test_health_tells_which_role_is_missing() -> None:
    from fastapi import FastAPI

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it prefers another client's package
        from fastapi.testclient import TestClient

    from moonrelay_sglang.head import after_create_app

    deployment = Deployment()
    with contextlib.closing(SimpleNamespace(close=deployment.end)):
        deployment.begin(deployment.encoder, deployment.denoiser)
        app = FastAPI()
        app.state.disagg_server = deployment.server
        app.get("/health")(lambda: {"status": "ok"})
        with TestClient(after_create_app(app)) as client:
            deployment.until(lambda: client.get("/health").status_code == 503)
            assert "no decoder is alive" in client.get("/health").json()["error"]
            for worker in deployment.workers():
                worker.begin() if worker in (deployment.other, deployment.decoder) else worker.beat()
            deployment.until(lambda: client.get("/health").status_code == 200)


def test_what_a_head_before_left_with_a_role_is_released(deployment: Deployment) -> None:
    encoder = deployment.encoder
    beat = protocol.Beat(
        moonrelay=protocol.VERSION,
        role=encoder.role,
        work_endpoint=encoder.endpoint,
        epoch=encoder.epoch,
        registration=encoder.registration(),
        offered=(("of another head", 3),),
    )
    encoder.results.send_multipart(protocol.encode(beat))
    released = encoder.released()
    assert (released.request_id, released.attempt) == ("of another head", 3)


def test_the_head_outlives_what_it_cannot_do(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    from moonrelay_sglang.host_server import HostServer

    def fails(*_args: Any) -> None:
        raise KeyError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(HostServer, "dispatched", fails)
        answer = deployment.answer(deployment.ask(request("r")))
    assert "no such thing" in answer.error
    assert deployment.server.is_alive
