"""The host's engine as the supervisor wants it: `AsyncOmni` on an event loop and a thread of its own.

Owns what of the host is called, and that none of its processes is left. The host works on the loop's thread, also for
seconds at its start and end; the front's loop is never held up by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import secrets
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import replace
from typing import Any, Final

from moonrelay_vllm_omni.serve.errors import BadRequest, GenerationFailed, StageDied
from moonrelay_vllm_omni.serve.schema import Order
from moonrelay_vllm_omni.serve.supervisor import Death

logger = logging.getLogger(__name__)

#: How long the host's own shutdown may take before its processes are killed; 10 s are usual after a stage's death.
_SHUT_S: Final = 45.0
_JOIN_S: Final = 5.0
#: How often the warm-up is tried, and how many frames a video needs at least.
_WARM_UPS: Final = 5
_LEAST_FRAMES: Final = 5
#: How long one try may take; an engine that hangs there is closed, and started again.
_WARM_UP_S: Final = 300.0
#: How long requests may take to end where the engine is closed under them.
_LET_GO_S: Final = 3.0
#: What a text encoder of the host says of a prompt of too many tokens; it has no class for it.
_TOO_LONG: Final = "is too long"


def end_children() -> None:
    """Kill the stages' processes that this process has started, so that a start under way fails soon."""
    for child in multiprocessing.active_children():
        child.kill()


class HostEngine:
    """One engine of the host; see `moonrelay_vllm_omni.serve.supervisor.Engine`.

    Args:
        model: Name or folder of the model.
        deploy_config: Path of the deploy YAML.
        warm_up: What is painted, and thrown away, before the engine is ready; one frame of it, or the least video.

    Raises:
        Exception: Whatever the host raises where it cannot start.

    Blocks: the constructor, for a minute and more.
    """

    def __init__(self, model: str, deploy_config: str, warm_up: Order) -> None:
        self.makes = ""
        self.stages: tuple[str, ...] = ()
        self._omni: Any = None
        self._closed = False
        #: What requests are told that the engine is closed under.
        self._cause = Death(stage=None, text="it was closed")
        self._lock = threading.Lock()
        self._before = {child.pid for child in multiprocessing.active_children()}
        self._at_work: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._gone = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="moonrelay-serve-engine", daemon=True)
        self._thread.start()
        try:
            self._submit(self._open(model, deploy_config)).result()
            self._submit(self._warm_up(warm_up)).result()
        except BaseException:
            self.close()
            raise

    async def paint(self, order: Order) -> list[Any]:
        """Return the frames of one image or video. May be called in any loop, and cancelled.

        Raises:
            StageDied: A stage died, or the engine was closed.
            BadRequest: The host says that the request is wrong.
            GenerationFailed: A stage failed the request.
        """
        if self._closed:
            raise self._died(self._cause.stage, self._cause.text)
        frames: list[Any] = await asyncio.wrap_future(self._submit(self._paint(order)))
        return frames

    def deaths(self) -> list[Death]:
        omni = self._omni
        if omni is None or self._closed:
            return []
        from vllm.v1.engine.exceptions import EngineDeadError

        found = []
        for pool in omni.engine.stage_pools:
            texts = []
            for client in pool.clients:
                try:
                    if client is not None:  # the host takes a dead replica out
                        client.check_health()
                        break
                except EngineDeadError as exc:
                    texts.append(str(exc.args[-1]) if exc.args else str(exc))  # the host's own words come last
            else:
                text = "; ".join(texts) or "its process has ended"
                found.append(Death(stage=int(pool.stage_id), text=text.rstrip(".")))
        if not found and not omni.engine.is_alive():
            found.append(Death(stage=None, text="the host's orchestrator has ended"))
        return found

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._cause = next(iter(self.deaths()), self._cause)
            self._closed = True
        try:
            self._submit(self._shut()).result(_SHUT_S)
        except NotInTime:
            logger.warning("the host did not shut its engine down in %g s; its processes are killed", _SHUT_S)
        except Exception:
            logger.exception("the host failed to shut its engine down")
        for child in multiprocessing.active_children():
            if child.pid not in self._before:
                child.kill()
                child.join(_JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):
                self._loop.close()

    def _submit(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self, model: str, deploy_config: str) -> None:
        from moonrelay_vllm_omni import plugin

        plugin.register()  # the host reads the YAML before it loads plugins
        from vllm_omni.entrypoints.async_omni import AsyncOmni

        self._omni = AsyncOmni(model=model, deploy_config=deploy_config)
        each = [self._omni.engine.get_stage_metadata(number) for number in range(self._omni.num_stages)]
        self.stages = tuple(str(one.model_stage) for one in each)
        self.makes = next((str(one.final_output_type) for one in reversed(each) if one.final_output), "")

    async def _warm_up(self, order: Order) -> None:
        """Send one order through all stages.

        The host makes a stage's connector when it first needs it, out of the two seconds that it gives a payload to
        arrive; on a busy machine the first request would fail of that.

        Raises:
            ServeError: Every try failed; or a stage died.
            TimeoutError: A try took too long.
        """
        if self.makes == "video":
            order = replace(order, num_frames=_LEAST_FRAMES)
        for left in reversed(range(_WARM_UPS)):
            try:
                async with asyncio.timeout(_WARM_UP_S):
                    await self._paint(order)
            except GenerationFailed as exc:
                if not left:
                    raise
                logger.warning("the warm-up failed and is tried again: %s", exc)
            else:
                return

    async def _shut(self) -> None:
        self._gone.set()
        if self._at_work:
            await asyncio.wait(self._at_work, timeout=_LET_GO_S)
        if self._omni is not None:
            self._omni.shutdown()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        await asyncio.sleep(0)

    async def _paint(self, order: Order) -> list[Any]:
        """Ask the host, but no longer than the engine stands."""
        work = asyncio.ensure_future(self._ask(order))
        gone = asyncio.ensure_future(self._gone.wait())
        self._at_work.add(work)
        work.add_done_callback(self._at_work.discard)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise self._died(self._cause.stage, self._cause.text)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()

    async def _ask(self, order: Order) -> list[Any]:
        from vllm_omni.entrypoints.omni_base import OmniEngineDeadError
        from vllm_omni.errors import OmniClientError

        prompt = {"prompt": order.prompt}
        if order.negative_prompt is not None:
            prompt["negative_prompt"] = order.negative_prompt
        # The host's request id is part of the payloads' keys.
        request_id = f"serve-{secrets.token_hex(8)}"
        params = [_sampling(order) for _ in self.stages]
        try:
            answers = self._omni.generate(prompt, request_id=request_id, sampling_params_list=params)
            outputs = [output async for output in answers]
        except OmniEngineDeadError as exc:
            raise self._died(exc.error_stage_id, str(exc).rstrip(".")) from exc
        except OmniClientError as exc:
            raise BadRequest(exc.message) from exc
        except Exception as exc:
            if _TOO_LONG in str(exc):
                raise BadRequest(str(exc), param="prompt") from exc
            raise GenerationFailed(f"{type(exc).__name__}: {exc}") from exc
        images = [image for output in outputs[-1:] for image in output.images or ()]
        if not images:
            raise GenerationFailed("the decode stage gave no pixels")
        return images

    def _died(self, stage: int | None, text: str) -> StageDied:
        named = stage is not None and 0 <= stage < len(self.stages)
        return StageDied(stage, text, name=self.stages[stage] if stage is not None and named else None)


def _sampling(order: Order) -> Any:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    given: dict[str, Any] = {
        "seed": order.seed,
        "width": order.width,
        "height": order.height,
        "num_frames": order.num_frames,
        "num_inference_steps": order.num_inference_steps,
        "true_cfg_scale": order.true_cfg_scale,
    }
    if order.guidance_scale is not None:
        given.update(guidance_scale=order.guidance_scale, guidance_scale_provided=True)
    if order.fps:
        given["fps"] = float(order.fps)
    return OmniDiffusionSamplingParams(**given)
