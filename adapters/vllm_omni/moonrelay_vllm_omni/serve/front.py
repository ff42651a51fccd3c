"""The front itself: what each request does, in plain values; `routes` puts it on HTTP.

Owns the way of a request: refused at the door where the engine is not ready or too many wait; a place in the `gate`,
its turn, the engine, a file. A request that waits while the engine is started again waits on; one that was in the
engine fails.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moonrelay.clock import Clock
from moonrelay_vllm_omni.serve import media
from moonrelay_vllm_omni.serve.errors import (
    BadRequest,
    EngineUnavailable,
    NotFound,
    RequestTimedOut,
    StageDied,
)
from moonrelay_vllm_omni.serve.gate import Gate, Place
from moonrelay_vllm_omni.serve.jobs import Job, VideoJobs
from moonrelay_vllm_omni.serve.schema import Order, image_orders, video_order
from moonrelay_vllm_omni.serve.settings import ServeConfig
from moonrelay_vllm_omni.serve.supervisor import Engine, State, Supervisor

logger = logging.getLogger(__name__)

_ROUTES = {"image": "/v1/images/generations", "video": "/v1/videos"}


class Front:
    """Answers requests with an engine that a supervisor keeps alive.

    Args:
        config: Settings.
        supervisor: Started and closed by the caller; `engine_changed` is to be its ``changed``.
        clock: For how long videos are kept.
        now: Unix seconds, for what clients are told.
        draw_seed: A seed for a request that names none.

    Threads: belongs to the event loop that `open` was called in; `engine_changed` may be called by any thread.
    """

    def __init__(
        self,
        config: ServeConfig,
        supervisor: Supervisor,
        *,
        clock: Clock,
        now: Callable[[], int],
        draw_seed: Callable[[], int],
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._now = now
        self._draw_seed = draw_seed
        self._gate = Gate(config.max_running, config.max_waiting)
        self._jobs = VideoJobs(
            self._video,
            clock=clock,
            now=now,
            keep_s=config.keep_videos_s,
            keep_bytes=config.keep_video_bytes,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Event()
        self._answers: Counter[tuple[str, str]] = Counter()

    def open(self) -> None:
        """Take this event loop for one's own."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Give up the videos under way."""
        await self._jobs.close()

    def engine_changed(self) -> None:
        """Have requests that wait for the engine look again. Threads: any."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._look_again)

    async def images(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Make images; ``POST /v1/images/generations``.

        Raises:
            ServeError: Why not, for the client.
        """
        orders = image_orders(body, self._config.limits, model=self._config.name, seed=self._draw_seed())
        self._door("image")
        places = self._gate.enter(len(orders))
        tasks = [asyncio.ensure_future(self._image(order, place)) for order, place in zip(orders, places, strict=True)]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for place in places:
                place.leave()
        data = [
            {"b64_json": base64.b64encode(file).decode(), "seed": order.seed}
            for file, order in zip(files, orders, strict=True)
        ]
        return {"created": self._now(), "data": data, "output_format": "png", "size": orders[0].size}

    async def create_video(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a video; ``POST /v1/videos``.

        Raises:
            ServeError: Why not, for the client.
        """
        order = video_order(body, self._config.limits, model=self._config.name, seed=self._draw_seed())
        self._door("video")
        (place,) = self._gate.enter()
        return self._told(self._jobs.create(order, place))

    def video(self, video_id: str) -> dict[str, Any]:
        """Say how a video stands; ``GET /v1/videos/ID``. Raises `NotFound`."""
        return self._told(self._jobs.get(video_id))

    def videos(self) -> dict[str, Any]:
        """List the videos, the newest first; ``GET /v1/videos``."""
        data = [self._told(job) for job in self._jobs.all()]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, "has_more": False, **ends}

    def content(self, video_id: str) -> bytes:
        """Return a finished video as MP4; ``GET /v1/videos/ID/content``. Raises `NotFound` or `NotReady`."""
        return self._jobs.content(video_id)

    async def delete_video(self, video_id: str) -> dict[str, Any]:
        """Forget a video, and give it up where it is in the making; ``DELETE /v1/videos/ID``. Raises `NotFound`."""
        job = await self._jobs.delete(video_id)
        return {"id": job.id, "object": "video.deleted", "deleted": True}

    def models(self) -> dict[str, Any]:
        """List the one model; ``GET /v1/models``."""
        return {"object": "list", "data": [self.model(self._config.name)]}

    def model(self, name: str) -> dict[str, Any]:
        """Tell of one model; ``GET /v1/models/NAME``. Raises `NotFound`."""
        if name != self._config.name:
            message = f"model {name!r} is not served here; {self._config.name!r} is"
            raise NotFound(message, param="model")
        return {"id": name, "object": "model", "created": 0, "owned_by": "moonrelay"}

    def health(self) -> tuple[int, dict[str, Any], float | None]:
        """Look at every stage; ``GET /health``.

        Returns:
            The status, 200 only where all live; the body; and when to ask again.
        """
        self._supervisor.look()
        status = self._supervisor.status()
        ready = status.state is State.READY
        body: dict[str, Any] = {
            "status": "ok" if ready else status.state.value,
            "dead_stages": [one.stage for one in status.deaths if one.stage is not None],
            "restarts": status.restarts,
            "running": self._gate.running,
            "waiting": self._gate.waiting,
        }
        if status.reason:
            body["reason"] = status.reason
        return (200, body, None) if ready else (503, body, status.retry_after_s)

    def metrics(self) -> str:
        """Tell of the front in Prometheus' text format; the host's own numbers are added by `routes`."""
        status = self._supervisor.status()
        numbers: list[tuple[str, str, str, Sequence[tuple[str, int]]]] = [
            ("moonrelay_serve_ready", "gauge", "Whether all stages live.", [("", status.state is State.READY)]),
            ("moonrelay_serve_engine_restarts_total", "counter", "Engines after the first.", [("", status.restarts)]),
            ("moonrelay_serve_running", "gauge", "Requests in the engine.", [("", self._gate.running)]),
            ("moonrelay_serve_waiting", "gauge", "Requests that wait.", [("", self._gate.waiting)]),
            (
                "moonrelay_serve_answers_total",
                "counter",
                "Answers by route and status.",
                [(f'{{route="{route}",status="{code}"}}', n) for (route, code), n in sorted(self._answers.items())],
            ),
        ]
        lines: list[str] = []
        for name, kind, text, series in numbers:
            lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
            lines += [f"{name}{labels} {int(value)}" for labels, value in series]
        return "\n".join(lines) + "\n"

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._answers[route, str(status)] += 1

    def _door(self, makes: str) -> None:
        engine = self._supervisor.engine()
        if engine.makes != makes:
            way = _ROUTES.get(engine.makes)
            remedy = f"use {way}" if way else "this front has no route for that"
            raise BadRequest(f"model {self._config.name!r} makes {engine.makes or 'nothing'}s; {remedy}", param="model")

    async def _image(self, order: Order, place: Place) -> bytes:
        frames = await self._paint(order, place, lambda: None)
        return await asyncio.to_thread(media.png, frames)

    async def _video(self, order: Order, place: Place, begun: Callable[[], None]) -> bytes:
        frames = await self._paint(order, place, begun)
        return await asyncio.to_thread(media.mp4, frames, order.fps)

    async def _paint(self, order: Order, place: Place, begun: Callable[[], None]) -> list[Any]:
        limit_s = self._config.request_timeout_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                async with place:
                    engine = await self._engine()
                    begun()
                    return await engine.paint(order)
        except TimeoutError:
            if not limit.expired():
                raise
            message = f"not done in {limit_s:g} s, waiting included; ask for less, or raise --request-timeout-s"
            raise RequestTimedOut(message) from None
        except StageDied:
            self._supervisor.look()
            raise

    async def _engine(self) -> Engine:
        while True:
            turn = self._turn
            try:
                return self._supervisor.engine()
            except EngineUnavailable as exc:
                if exc.retry_after_s is None:
                    raise
            await turn.wait()

    def _look_again(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    def _told(self, job: Job) -> dict[str, Any]:
        done = job.completed_at
        return {
            "id": job.id,
            "object": "video",
            "model": self._config.name,
            "status": job.state.value,
            "progress": 100 if job.content else 0,
            "created_at": job.created_at,
            "completed_at": done,
            "expires_at": None if done is None else done + int(self._config.keep_videos_s),
            "error": job.error,
            "prompt": job.order.prompt,
            "size": job.order.size,
            "seconds": job.order.seconds,
            "seed": job.order.seed,
        }
