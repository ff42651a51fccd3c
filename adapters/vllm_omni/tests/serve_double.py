"""An engine of no stages but the test's word: paints at once, or when told, and dies when told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moonrelay.clock import Clock, ManualClock
from moonrelay_vllm_omni.serve.errors import ServeError, StageDied
from moonrelay_vllm_omni.serve.front import Front
from moonrelay_vllm_omni.serve.schema import Limits, Order
from moonrelay_vllm_omni.serve.settings import ServeConfig
from moonrelay_vllm_omni.serve.supervisor import Death, State, Supervisor

WAIT_S = 20.0


class FakeEngine:
    """Paints one colour, made of the order's seed."""

    def __init__(self, makes: str = "image") -> None:
        self.makes = makes
        self.stages = ("encode", "denoise", "decode")
        self.orders: list[Order] = []
        self.cancelled = 0
        self.fails: ServeError | None = None
        #: Orders with these seeds fail before they are held.
        self.fails_first: set[int] = set()
        self.closed = threading.Event()
        self.held: asyncio.Event | None = None
        self._dead: list[Death] = []

    async def paint(self, order: Order) -> list[Any]:
        self.orders.append(order)
        if order.seed in self.fails_first and self.fails is not None:
            raise self.fails
        try:
            if self.held is not None:
                await self.held.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self._dead:
            raise StageDied(self._dead[0].stage, self._dead[0].text)
        if self.fails is not None:
            raise self.fails
        shape = (order.num_frames, order.height, order.width, 3)
        pixels = np.full(shape, order.seed % 256, np.uint8)
        return [pixels if self.makes == "video" else pixels[0]]

    def die(self, stage: int) -> None:
        self._dead.append(Death(stage=stage, text="killed"))

    def deaths(self) -> list[Death]:
        return list(self._dead)

    def close(self) -> None:
        self.closed.set()


class Engines:
    """What the supervisor starts: one `FakeEngine` after the other, and failures where told."""

    def __init__(self, makes: str = "image") -> None:
        self.makes = makes
        self.made: list[FakeEngine] = []
        self.failures: list[Exception] = []
        #: Set unless a test wants a start to take its time.
        self.go = threading.Event()
        self.go.set()
        self.tries = 0
        self.interrupted = threading.Event()

    def start(self) -> FakeEngine:
        self.tries += 1
        while not self.go.wait(0.01):
            if self.interrupted.is_set():
                raise RuntimeError("interrupted")
        if self.failures:
            raise self.failures.pop(0)
        engine = FakeEngine(self.makes)
        self.made.append(engine)
        return engine

    def supervisor(self, clock: Clock, changed: Callable[[], None] = lambda: None, **more: Any) -> Supervisor:
        return Supervisor(self.start, interrupt=self.interrupted.set, clock=clock, changed=changed, **more)


class House:
    """A front with such an engine, both begun and ended by ``async with``."""

    def __init__(self, tmp_path: Path, makes: str = "image", **settings: Any) -> None:
        limits = settings.pop("limits", Limits(default_size=(32, 32)))
        deploy = str(tmp_path / "deploy.yaml")
        self.config = ServeConfig(model="tiny", deploy_config=deploy, limits=limits, **settings)
        self.clock = ManualClock()
        self.engines = Engines(makes)
        self.supervisor = self.engines.supervisor(self.clock, self._changed)
        self.front = Front(
            self.config, self.supervisor, clock=self.clock, now=lambda: 1_700_000_000, draw_seed=lambda: 77
        )

    def _changed(self) -> None:
        self.front.engine_changed()

    @property
    def engine(self) -> FakeEngine:
        return self.engines.made[-1]

    async def __aenter__(self) -> House:
        self.front.open()
        self.supervisor.start()
        await self.reaches(State.READY)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.front.close()
        self.engines.go.set()
        assert await asyncio.to_thread(self.supervisor.close, WAIT_S)

    async def reaches(self, state: State) -> None:
        await until(lambda: self.supervisor.status().state is state)


async def until(seen: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not seen():
            await asyncio.sleep(0.005)


def eventually(seen: Callable[[], bool], then: Callable[[], None] = lambda: None) -> None:
    """Wait until something is seen from outside, doing ``then`` at every look."""
    step = threading.Event()
    for _ in range(int(WAIT_S / 0.01)):
        if seen():
            return
        then()
        step.wait(0.01)
    raise AssertionError("not in time")
