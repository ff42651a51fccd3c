"""The front itself: the way of a request through the stages, in plain values; `routes` puts it on HTTP.

Owns one task of the event loop for each request: it gives the request to a server of every stage, looks at them until
the last has completed or one has failed, begins anew where a server is lost, and has every server give the task up that
need not go on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import httpx

from moonrelay.clock import Clock, Deadline
from moonrelay_lightx2v.front.errors import FrontError, IdTaken, NotFound, StageRefused
from moonrelay_lightx2v.front.orders import Book, Order, View
from moonrelay_lightx2v.front.settings import FrontConfig
from moonrelay_lightx2v.front.stages import (
    CANCELLED,
    COMPLETED,
    ENDED,
    FAILED,
    OUT_S,
    PENDING,
    PROCESSING,
    Forgot,
    Refused,
    Seen,
    Server,
    Servers,
    Silent,
    Stage,
    Took,
    Unsure,
)

logger = logging.getLogger(__name__)

#: The first pause between two looks; each is half as long again as the one before.
_FIRST_PAUSE_S: Final = 0.05
_GROWTH: Final = 1.5
#: A server that is there and says nothing that makes sense is lost after so long.
SILENT_S: Final = 60.0
#: Looks in a row that must find nobody at a server's address.
_UNREACHED: Final = 2
#: For the servers to give tasks up when the front ends.
_CLOSE_S: Final = 6.0
#: Which servers lack something is asked of so often while a request waits for one.
_RESTART_PAUSE_S: Final = 1.0


class _Lost(Exception):
    """A stage's server cannot end the task any more."""

    def __init__(self, stage: str, text: str) -> None:
        super().__init__(text)
        self.stage = stage
        self.text = text


class Front:
    """Answers for all stages as the host's server does for one.

    Args:
        config: Settings.
        clock: For unreachable and silent servers.
        now: Unix seconds, for what clients are told.
        draw_id: An id for a request that gives none.
        draw_seed: A seed for a request that gives none.

    Threads: made in and belongs to one event loop.
    """

    def __init__(
        self,
        config: FrontConfig,
        *,
        clock: Clock,
        now: Callable[[], int],
        draw_id: Callable[[], str],
        draw_seed: Callable[[], int],
    ) -> None:
        self._config = config
        self._clock = clock
        self._now = now
        self._servers = Servers(config.stages, clock)
        names = tuple(stage.name for stage in self._servers.stages)
        self._book = Book(names, config.max_requests, now=now, draw_id=draw_id, draw_seed=draw_seed)
        self._chores: set[asyncio.Task[None]] = set()
        self._answers: Counter[tuple[str, str]] = Counter()
        self._lost: Counter[str] = Counter()
        self._closing = False

    async def close(self) -> None:
        """Give all requests up, at the servers too.

        Blocks: for seconds.
        """
        self._closing = True
        tasks = [self._cancel(order, "the front was ended") for order in self._book.under_way]
        waiting = {task for task in (*tasks, *self._chores) if task is not None}
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=1.0)
        await self._servers.close()

    def door(self) -> None:
        """Raise `FrontError` where no request can be taken in now."""
        if self._closing:
            raise StageRefused("the front ends; ask again")
        self._book.door()

    async def create(self, path: str, fields: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Give a request to all stages; ``POST /v1/tasks/video/`` and its like.

        Args:
            path: Of the host's route.
            fields: The body.
            size: Of it, in bytes.

        Returns:
            What the host's server answers.

        Raises:
            FrontError: Why not, for the client.
        """
        self.door()
        order = self._book.enter(path, fields, size)
        # A client that goes away may have gone before the answer: nobody reads it then.
        order.placed.add_done_callback(lambda placed: placed.cancelled() or placed.exception())
        order.task = asyncio.create_task(self._live(order), name=f"moonrelay-order-{order.id}")
        return await asyncio.shield(order.placed)

    def status(self, task_id: str) -> dict[str, Any]:
        """Say how a request stands. Raises `NotFound`."""
        return self._order(task_id).told()

    def all(self) -> dict[str, dict[str, Any]]:
        """Say how every request stands, by id."""
        return {order.id: order.told() for order in self._book}

    def queue(self) -> dict[str, Any]:
        """Say how full the front is, as the host's server says it of its queue."""
        orders = self._book.under_way
        busy = [order.id for order in orders if order.state == PROCESSING]
        return {
            "is_processing": bool(busy),
            "current_task": busy[0] if busy else None,
            "pending_count": len(orders) - len(busy),
            "active_count": len(orders),
            "queue_size": self._config.max_requests,
            "queue_available": self._config.max_requests - len(orders),
        }

    async def cancel(self, task_id: str) -> dict[str, str]:
        """Have all stages give a request up; answers as the host's server does, also of one that is not there."""
        order = self._book.get(task_id)
        task = None if order is None else self._cancel(order, "Task cancelled by user")
        if order is None or task is None:
            return {"stop_status": "do_nothing", "reason": "Task not found or already completed."}
        await asyncio.wait({task}, timeout=_CLOSE_S)
        if order.state != CANCELLED:
            return {"stop_status": "do_nothing", "reason": f"Task {order.state} meanwhile."}
        return {"stop_status": "success", "reason": "Task stopped successfully."}

    async def cancel_all(self) -> dict[str, str]:
        """Have all stages give all requests up."""
        tasks = [self._cancel(order, "Task cancelled by user") for order in self._book.under_way]
        waiting = {task for task in tasks if task is not None}
        if waiting:
            await asyncio.wait(waiting, timeout=_CLOSE_S)
        return {"stop_status": "success", "reason": "All tasks stopped successfully."}

    async def result(self, task_id: str) -> httpx.Response:
        """Open a completed request's result at the server that has it; the caller reads and closes it.

        Raises:
            NotFound: There is no such request, or it has not completed.
            StageRefused: The server that has it cannot be reached.
        """
        order = self._order(task_id)
        server = order.views[-1].server
        if order.state != COMPLETED or server is None:
            raise NotFound("Task not completed")
        try:
            return await self._servers.result(server, order.wire_id)
        except ConnectionError as exc:
            message = f"the result lies with {server}, which cannot be reached: {exc}"
            raise StageRefused(message) from exc

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Look at every server; 200 only where every stage has one that is well."""
        servers = [server for stage in self._servers.stages for server in stage.servers]
        ails = dict(zip(servers, await asyncio.gather(*map(self._servers.ails, servers)), strict=True))
        stages = {
            stage.name: {server.url: ails[server] or "ok" for server in stage.servers} for stage in self._servers.stages
        }
        lacking = [name for name, urls in stages.items() if "ok" not in urls.values()]
        body: dict[str, Any] = {"status": "unavailable" if lacking else "ok", "stages": stages}
        if lacking:
            body["detail"] = f"no server of {' and '.join(lacking)} can be reached"
        return (503 if lacking else 200), body

    def metrics(self) -> str:
        """Tell of the front in Prometheus' text format."""
        servers = [server for stage in self._servers.stages for server in stage.servers]
        now_s = self._clock.monotonic()
        states = Counter(order.state for order in self._book.under_way)
        name = "moonrelay_lightx2v_front"
        numbers: list[tuple[str, str, str, list[tuple[str, int]]]] = [
            (
                "requests",
                "gauge",
                "Requests under way, by state.",
                [(f'{{state="{state}"}}', states[state]) for state in (PENDING, PROCESSING)],
            ),
            (
                "requests_total",
                "counter",
                "Requests that have ended, by how.",
                [(f'{{outcome="{how}"}}', self._book.outcomes[how]) for how in (*ENDED, "refused")],
            ),
            (
                "lost_total",
                "counter",
                "Times that a request lost a stage's server, by stage.",
                [(f'{{stage="{stage.name}"}}', self._lost[stage.name]) for stage in self._servers.stages],
            ),
            ("server_requests", "gauge", "Requests that a server has.", [(_of(s), s.under_way) for s in servers]),
            (
                "server_reachable",
                "gauge",
                "Whether a server was reachable when last asked.",
                [(_of(s), int(s.out_until_s <= now_s)) for s in servers],
            ),
            (
                "answers_total",
                "counter",
                "Answers by route and status.",
                [(f'{{route="{route}",status="{code}"}}', n) for (route, code), n in sorted(self._answers.items())],
            ),
        ]
        lines: list[str] = []
        for short, kind, text, series in numbers:
            lines += (f"# HELP {name}_{short} {text}", f"# TYPE {name}_{short} {kind}")
            lines += [f"{name}_{short}{labels} {value}" for labels, value in series]
        return "\n".join(lines) + "\n"

    def answered(self, route: str, status: int) -> None:
        """Count an answer."""
        self._answers[route, str(status)] += 1

    def _order(self, task_id: str) -> Order:
        order = self._book.get(task_id)
        if order is None:
            raise NotFound("Task not found")
        return order

    def _cancel(self, order: Order, why: str) -> asyncio.Task[None] | None:
        """Interrupt a request; ``None`` where it has ended."""
        if order.over or order.task is None:
            return None
        order.why_cancelled = why
        order.task.cancel()
        return order.task

    async def _live(self, order: Order) -> None:
        limit_s = self._config.request_timeout_s
        refusal: FrontError | None = None
        try:
            async with asyncio.timeout(limit_s):
                await self._attempts(order)
        except asyncio.CancelledError:
            order.end(CANCELLED, self._now(), stage=order.stage, error=order.why_cancelled)
        except TimeoutError:
            stands = ", ".join(f"{view.stage} {view.status}" for view in order.views)
            text = f"not done in {limit_s:g} s ({stands}); ask for less, or raise --request-timeout"
            self._fail(order, order.stage or order.views[0].stage, text, "Timeout")
            refusal = FrontError(text, status=504)
        except FrontError as exc:
            refusal = exc
            self._fail(order, order.stage, exc.message, "StageRefused")
        except Exception as exc:
            logger.exception("request %s failed in the front", order.id)
            text = f"the front failed: {type(exc).__name__}: {exc}"
            self._fail(order, order.stage, text, type(exc).__name__)
            refusal = FrontError(text)
        try:
            await self._let_go(order)
        finally:
            told = order.placed.done()
            if not told:
                order.placed.set_exception(refusal or StageRefused(order.error))
            if told or order.state == CANCELLED:
                self._book.leave(order)
            else:
                self._book.refuse(order)

    async def _attempts(self, order: Order) -> None:
        attempts = self._config.attempts
        for attempt in range(1, attempts + 1):
            order.attempt = attempt
            try:
                took = await (self._place(order) if attempt == 1 else self._place_again(order))
                if not order.placed.done():
                    path = took.save_result_path or order.save_result_path
                    order.save_result_path = path
                    order.placed.set_result({"task_id": order.id, "task_status": PENDING, "save_result_path": path})
                await self._watch(order)
                return
            except _Lost as lost:
                order.lost.append(lost.text)
                self._lost[lost.stage] += 1
                logger.warning("request %s, attempt %d of %d: %s", order.id, attempt, attempts, lost.text)
                if attempt < attempts:
                    self._forsake(order)
                    order.reset()
                    order.stage = lost.stage
                    continue
                order.stage = lost.stage
                text = lost.text + (f"; it was the last of {attempts} attempts" if attempts > 1 else "")
                if not order.placed.done():
                    raise StageRefused(text) from None
                self._fail(order, lost.stage, text, "StageLost")

    def _fail(self, order: Order, stage: str, text: str, kind: str) -> None:
        order.end(FAILED, self._now(), stage=stage, error=text, error_type=kind)

    async def _place(self, order: Order) -> Took:
        """Give a request to a server of every stage; return the last stage's answer.

        Raises:
            StageRefused: No server of a stage takes it; those of the others are told to give it up.
            _Lost: A server gave no answer and may have it.
        """
        body = order.renew(self._book.next_wire_id(order))
        stages = self._servers.stages
        refused: dict[str, list[Refused]] = {stage.name: [] for stage in stages}
        took: dict[str, Took] = {}
        while left := [stage for stage in stages if stage.name not in took]:
            chosen = [self._choose(order, stage, refused[stage.name]) for stage in left]
            answers = await self._post(chosen, order.path, body)
            for server, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, Took):
                    took[server.stage] = answer
                elif isinstance(answer, Refused):
                    order.drop(server)
                    refused[server.stage].append(answer)
            for server, answer in zip(chosen, answers, strict=True):
                if isinstance(answer, Unsure):
                    raise _Lost(server.stage, answer.text)
            # A stage that says why is told of before one that merely is not there.
            spent = [
                refused[stage.name]
                for stage in left
                if stage.name not in took and len(refused[stage.name]) == len(stage.servers)
            ]
            if spent:
                self._forsake(order)
                raise _refusal(min((all_of[-1] for all_of in spent), key=lambda one: not _clients(one)), order)
        for view in order.views:
            view.server = order.held[view.stage]
        return took[stages[-1].name]

    def _choose(self, order: Order, stage: Stage, refused: Sequence[Refused]) -> Server:
        server = stage.choose([one.server for one in refused])
        assert server is not None, "a stage without a server left was told of"
        order.hold(server)
        return server

    async def _post(self, chosen: Sequence[Server], path: str, body: bytes) -> list[Took | Refused | Unsure]:
        chosen_s = self._clock.monotonic()
        async with contextlib.AsyncExitStack() as lanes:
            for server in chosen:  # in the stages' order, so that no two requests wait for each other
                await lanes.enter_async_context(server.lane)
            calls = (self._servers.post(server, path, body, chosen_s=chosen_s) for server in chosen)
            return list(await asyncio.gather(*calls))

    async def _place_again(self, order: Order) -> Took:
        """Wait for every stage to have a server that is well, and give the request to them."""
        wait = Deadline(self._config.restart_wait_s, self._clock)
        last: StageRefused | None = None
        while True:
            lacking = await self._servers.lacking()
            if lacking is None:
                try:
                    return await self._place(order)
                except StageRefused as exc:
                    if not exc.retryable:
                        raise
                    last = exc
            else:
                order.stage = lacking.name
                urls = ", ".join(server.url for server in lacking.servers)
                last = StageRefused(f"no {lacking.name} can be reached ({urls})")
            if wait.expired:
                text = f"{order.lost[-1]}; and after {self._config.restart_wait_s:g} s: {last.message}"
                raise StageRefused(text) from last
            await asyncio.sleep(min(_RESTART_PAUSE_S, self._config.poll_interval_s))

    async def _watch(self, order: Order) -> None:
        """Look at the stages until the request has ended.

        Raises:
            _Lost: A server cannot end it any more.
        """
        pause_s = min(_FIRST_PAUSE_S, self._config.poll_interval_s)
        while True:
            await self._look(order, [view for view in order.views if view.status not in ENDED])
            last = order.views[-1]
            if last.status == COMPLETED:
                order.end(COMPLETED, self._now())
                return
            if any(view.status in (FAILED, CANCELLED) for view in order.views):
                await self._judge(order)
                return
            self._raise_lost(order)
            order.standing()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * _GROWTH, self._config.poll_interval_s)

    async def _judge(self, order: Order) -> None:
        """End a request of which a stage has failed; by the stage that is the cause, for the others only follow it.

        Raises:
            _Lost: The cause is a server that is lost.
        """
        for _ in range(_UNREACHED):
            await self._look(order, [view for view in order.views if not view.lost])
            if not any(view.unreached for view in order.views if not view.lost):
                break
            await asyncio.sleep(_FIRST_PAUSE_S)
        self._raise_lost(order)
        cause = next(view for view in order.views if view.status in (FAILED, CANCELLED))
        text = f"{cause.stage}: {cause.error or cause.status}"
        order.end(cause.status, self._now(), stage=cause.stage, error=text, error_type=cause.error_type)

    async def _look(self, order: Order, views: Sequence[View]) -> None:
        servers = [(view, view.server) for view in views if view.server is not None]
        looks = await asyncio.gather(*(self._servers.look(server, order.wire_id) for _, server in servers))
        for (view, server), look in zip(servers, looks, strict=True):
            if isinstance(look, Seen):
                view.saw(look)
                continue
            if isinstance(look, Silent):
                self._silent(view, look)
                continue
            view.unreached += 1
            if isinstance(look, Forgot) or view.unreached >= _UNREACHED:
                view.lost = look.text
                order.drop(server)

    def _silent(self, view: View, look: Silent) -> None:
        now_s = self._clock.monotonic()
        if view.silent_since_s is None:
            view.silent_since_s = now_s
        elif now_s - view.silent_since_s > SILENT_S:
            view.lost = f"{look.text}, for {SILENT_S:g} s"

    def _raise_lost(self, order: Order) -> None:
        follows = [f"{view.stage}: {view.error}" for view in order.views if view.status == FAILED and view.error]
        for view in order.views:
            if view.lost:
                raise _Lost(view.stage, "; ".join([view.lost, *follows]))

    def _forsake(self, order: Order) -> None:
        """Have the servers give up what they have of a request that goes on elsewhere; nobody waits for it."""
        done = {view.stage for view in order.views if view.status in ENDED}
        for server in list(order.held.values()):
            order.drop(server)
            if server.stage not in done:
                self._chore(self._give_up(server, order.wire_id))

    async def _let_go(self, order: Order) -> None:
        """Have the servers give up what they have of a request that has ended, but one that completed.

        Its first stages may be about to say that they have ended too.
        """
        done = {view.stage for view in order.views if view.status in ENDED}
        held = list(order.held.values())
        for server in held:
            order.drop(server)
        if order.state != COMPLETED:
            calls = [self._give_up(server, order.wire_id) for server in held if server.stage not in done]
            await asyncio.gather(*calls)
            if order.state == CANCELLED:
                for view in order.views:
                    view.status = view.status if view.status in ENDED else CANCELLED

    async def _give_up(self, server: Server, task_id: str) -> None:
        if not await self._servers.cancel(server, task_id):
            logger.warning("%s did not answer when told to give up %s", server, task_id)

    def _chore(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


def _clients(refused: Refused) -> bool:
    """Whether it is the request that is at fault."""
    return refused.status is not None and 400 <= refused.status < 500


def _refusal(refused: Refused, order: Order) -> FrontError:
    order.stage = refused.server.stage
    status = refused.status
    if status is None:
        return StageRefused(refused.text, retry_after_s=OUT_S)
    if f"Task ID {order.wire_id} already exists" in refused.text:
        return IdTaken(f"task_id={order.id!r} is taken: {refused.text}; use another, or leave it out")
    body = refused.body or {"detail": refused.text, "stage": refused.server.stage}
    if _clients(refused):
        return FrontError(refused.text, status=status, body=body)
    return StageRefused(refused.text, status=status if status >= 500 else 502, body=body)


def _of(server: Server) -> str:
    url = server.url.replace("\\", "\\\\").replace('"', '\\"')
    return f'{{stage="{server.stage}",url="{url}"}}'
