"""The diffusers adapter as a target of the conformance suite.

Owns the side, which is the connector's: the host of this adapter is our own loop (`moonrelay.orchestrator.StageLoop`),
and what it calls to hand a payload on is `DiffusionConnector.publish`, `claim`, `read` and `ack`, nothing between. And
owns the real run: three workers, as ``moonrelay worker`` starts them, beside diffusers' own undivided pipeline.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from moonrelay.cli.demo.children import EXITED, Child, Children, Inbox, Message
from moonrelay.cli.demo.undivided import Order
from moonrelay.clock import Deadline, SystemClock
from moonrelay.errors import DeadlineExceeded, WireError, from_wire
from moonrelay.queueing.base import StageQueue
from moonrelay.queueing.task import Plain, StageTask
from moonrelay_conformance.capability import Capability, Support
from moonrelay_conformance.sides.connector_side import ConnectorSide
from moonrelay_conformance.targets.adapter import Denoised, Encoded, PipelineRun, SideSettings
from moonrelay_conformance.targets.connector import ConnectorGround, ConnectorTarget
from moonrelay_diffusers.families.base import STAGES
from moonrelay_diffusers.frames import frames_digest
from moonrelay_diffusers.plugin import DiffusersAdapter

if TYPE_CHECKING:
    from moonrelay_diffusers.sample_stages import Stages

_REQUEST: Final = "conformance-0"
_PROMPT: Final = "A red fox in the snow"
_UNDIVIDED: Final = "undivided"
_STEPS: Final = 4
_SIZE: Final = 32
_FRAMES: Final = 17
_LOOK_S: Final = 0.2


class DiffusersSide(ConnectorSide):
    """A stage of a diffusers pipeline as producer and consumer: the connector itself.

    In this adapter the host is our own loop, which calls exactly these methods of the connector. There is no
    translation of a host's that could differ from the connector's, and none is pretended. Its encode and denoise stage
    are a tiny model's, made and loaded when they are first asked for.
    """

    def __init__(self, settings: SideSettings) -> None:
        super().__init__(settings)
        self._stages: Stages | None = None

    def encode(self, prompt: str, negative: str, *, cached: bool) -> Encoded:
        made = self._loaded().encode(prompt, negative, cached=cached)
        return Encoded(positive=made[0], negative=made[1], computed=made[2])

    def denoise(self, request_id: str, *, seed: int, steps: int, stop_after: int | None) -> Denoised:
        made = self._loaded().denoise(request_id, seed=seed, steps=steps, stop_after=stop_after)
        return Denoised(result=made[0], first_step=made[1], computed=made[2])

    def close(self) -> None:
        if self._stages is not None:
            self._stages.close()
        super().close()

    def _loaded(self) -> Stages:
        if self._stages is None:
            from moonrelay_diffusers.sample_stages import Stages

            self._stages = Stages(self.connector, Path(self.settings.extra["model"]))
        return self._stages


class DiffusersGround(ConnectorGround):
    """The connector's ground, and a place for a tiny model."""

    def __init__(self, folder: Path, *, engine: str, relay: str) -> None:
        self._model = folder / "model"
        super().__init__(folder, engine=engine, relay=relay)

    def settings(self, settings: SideSettings) -> SideSettings:
        made = super().settings(settings)
        return msgspec.structs.replace(made, extra={**made.extra, "model": str(self._model)})


class DiffusersTarget(ConnectorTarget):
    """Plain diffusers in stages.

    Args:
        engine: ``shm`` by default, which every machine has and which is quick; ``mooncake`` is what a deployment takes.
            The report names the one that was used.
        relay: ``local``, ``mooncake`` or ``none``.
    """

    name = "diffusers"
    side = "moonrelay_diffusers.conformance:DiffusersSide"

    def capabilities(self) -> Mapping[Capability, Support]:
        there, _ = DiffusersAdapter().available()
        model = Support.FULL if there else Support.UNSUPPORTED
        kept = model if self.relay != "none" else Support.UNSUPPORTED
        return {
            **super().capabilities(),
            Capability.PIPELINE: model,
            Capability.EMBEDDING_CACHE: kept,
            Capability.CHECKPOINTS: kept,
        }

    def ground(self, folder: Path) -> DiffusersGround:
        return DiffusersGround(folder, engine=self.engine, relay=self.relay)

    def host(self) -> str:
        version = DiffusersAdapter().host_version()
        return f"diffusers {version or 'not installed'} ({self.through()})"

    def pipeline(self, folder: Path, *, timeout_s: float) -> PipelineRun:
        """Run a tiny random Wan undivided and in three processes, over a queue in ``folder``.

        Args:
            folder: An empty folder for model, queue, logs and frames.
            timeout_s: Bound of it all; half a minute is usual on two cores.

        Raises:
            DeadlineExceeded: It took too long; the message says what is missing.
            PeerLost: A process ended; the message holds its last words.
            MoonrelayError: A stage failed, with its own error.
        """
        return _Run(self.engine, self.relay, folder, timeout_s).run()


class MooncakeDiffusersTarget(DiffusersTarget):
    """The same by Mooncake's engine and store, by name: ``moonrelay_diffusers.conformance:MooncakeDiffusersTarget``."""

    name = "diffusers-mooncake"

    def __init__(self) -> None:
        super().__init__(engine="mooncake", relay="mooncake")


class _Run:
    """One real run. Threads: one, and one reader per child."""

    def __init__(self, engine: str, relay: str, folder: Path, timeout_s: float) -> None:
        self._engine = engine
        self._relay = relay
        self._folder = folder
        self._clock = SystemClock()
        self._deadline = Deadline(timeout_s, self._clock)
        self._inbox = Inbox()
        self._children = Children(self._clock)
        self._request: Plain = None
        self._model = ""
        self._undivided = ""
        self._waiting_for = "the tiny model"

    def run(self) -> PipelineRun:
        with ExitStack() as stack:
            stack.callback(self._sweep)
            store = self._start_store(stack)
            stack.callback(self._children.close)
            self._start(_UNDIVIDED, ["moonrelay.cli.demo.undivided"], msgspec.json.encode(self._order()).decode())
            while self._request is None:
                self._listen()
            queue = stack.enter_context(StageQueue.connect(f"sqlite:///{self._folder / 'queue.db'}"))
            for stage in STAGES:
                self._start(stage, ["moonrelay.cli.main", *self._worker(stage, queue.url, store)])
            queue.submit(StageTask(request_id=_REQUEST, stage=STAGES[0], payload={"request": self._request}))
            divided = self._result(queue)
            self._waiting_for = "the undivided pipeline"
            while not self._undivided:
                self._listen()
        return PipelineRun(undivided=self._undivided, divided=divided, processes=len(STAGES))

    # -- starting -----------------------------------------------------------------------------------------------------

    def _order(self) -> Order:
        return Order(
            model=None,
            build=str(self._folder / "model"),
            prompts=[(_REQUEST, _PROMPT, "blurred", 11)],
            steps=_STEPS,
            size=_SIZE,
            frames=_FRAMES,
            device="cpu",
            dtype=None,
            threads=1,
        )

    def _worker(self, stage: str, queue_url: str, store: str | None) -> list[str]:
        options: dict[str, object] = {
            "model": self._model,
            "queue": queue_url,
            "transfer-mode": "p2p" if store is None else "auto",
            "engine": self._engine,
            "store": store,
            "output": self._folder / "frames",
            "format": "npy",
            "worker-id": stage,
            "grace-s": 1.0,
            "drain-timeout-s": 1.0,
            "parent-fd": 0,
        }
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        return ["--log-level", "info", "worker", stage, *given]

    def _start(self, name: str, arguments: list[str], first_line: str = "") -> None:
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", *arguments]
        self._children.add(Child(name, command, self._inbox, log, first_line=first_line, clock=self._clock))

    def _start_store(self, stack: ExitStack) -> str | None:
        if self._relay == "none":
            return None
        if self._relay == "local":
            return f"local://{self._folder / 'store'}"
        from moonrelay.relay.cluster import MooncakeCluster

        return stack.enter_context(MooncakeCluster(self._folder / "mooncake", clock=self._clock)).url

    # -- watching -----------------------------------------------------------------------------------------------------

    def _result(self, queue: StageQueue) -> str:
        """Wait for the frames that the last stage wrote; return their digest."""
        import numpy as np

        self._waiting_for = "the pipeline in stages"
        while True:
            self._listen()
            try:
                result = queue.result(_REQUEST, timeout_s=0)
            except DeadlineExceeded as exc:
                if "waited_s" not in exc.context:
                    raise
                continue
            file = result.get("file") if isinstance(result, dict) else None
            if not isinstance(file, str):
                message = f"the last stage gave {result!r:.200}, which names no file"
                raise WireError(message, field="file")
            return frames_digest(np.load(file))

    def _listen(self) -> None:
        """Take a message of a child, or a moment without one; raise what has gone wrong."""
        if self._deadline.expired:
            late = f"{self._waiting_for} took more than {self._deadline.timeout_s:g} s; see the logs in {self._folder}"
            raise DeadlineExceeded(late)
        message = self._inbox.get(_LOOK_S)
        if message is None:
            return
        if message.child == _UNDIVIDED:
            self._from_undivided(message)
        elif message.event == EXITED:
            raise self._children[message.child].failure(message.fields.get("code"))

    def _from_undivided(self, message: Message) -> None:
        fields = message.fields
        if message.event == "model":
            self._model = str(fields["model"])
            requests = fields["requests"]
            self._request = requests[_REQUEST] if isinstance(requests, dict) else None
        elif message.event == "undivided":
            self._undivided = str(fields["digest"])
        elif message.event == "error":
            raise from_wire(str(fields["code"]), bool(fields["retryable"]), str(fields["message"]))
        elif message.event == EXITED and not self._undivided:
            raise self._children[_UNDIVIDED].failure(fields.get("code"))

    def _sweep(self) -> None:
        """Take away shared memory of a worker that had to be killed."""
        if self._engine == "shm":
            from moonrelay.transfer.shm import sweep_orphans

            sweep_orphans()
