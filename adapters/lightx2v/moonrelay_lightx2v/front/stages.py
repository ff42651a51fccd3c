"""The servers behind the front: which one a request goes to, and what is asked of it over HTTP.

Owns the choice among a stage's servers, and the meaning of every answer and of every way to give none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import httpx

from moonrelay.clock import Clock

#: A server that could not be reached is asked after all others for so long.
OUT_S: Final = 5.0
CONNECT_S: Final = 3.0
#: The host looks at image URLs before it takes a task, for five seconds each.
POST_S: Final = 30.0
LOOK_S: Final = 10.0
CANCEL_S: Final = 5.0
HEALTH_S: Final = 2.0
#: Between two pieces of a result.
PIECE_S: Final = 30.0
#: What is read of an answer that is no result.
_MOST_BYTES: Final = 4 << 20
#: Shorter than the host's servers keep an idle connection, so that none is used as it closes.
_IDLE_S: Final = 2.0

PENDING: Final = "pending"
PROCESSING: Final = "processing"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
STATES: Final = (PENDING, PROCESSING, COMPLETED, FAILED, CANCELLED)
ENDED: Final = (COMPLETED, FAILED, CANCELLED)


@dataclass(slots=True, eq=False)
class Server:
    """One role's server.

    Attributes:
        stage: Its role.
        url: Its base URL.
        under_way: Requests it has from this front.
        out_until_s: Until when it is asked last.
        out_since_s: When it was last found unreachable.
        turn: When it was last chosen, as a number that grows.
        lane: Held while tasks are given to it, so that all stages get them in one order: each works through its own
            queue, and what one does first another should not do last.
    """

    stage: str
    url: str
    under_way: int = 0
    out_until_s: float = 0.0
    out_since_s: float = 0.0
    turn: int = 0
    lane: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        return f"{self.stage} at {self.url}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """The server has the task."""

    save_result_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The server does not have the task: it said so, or cannot be reached (then ``status`` is ``None``)."""

    server: Server
    text: str
    status: int | None = None
    body: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsure:
    """The server may have the task: it gave no answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the server says of a task."""

    status: str
    error: str = ""
    error_type: str = ""
    save_result_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Nobody listens at the server's address."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgot:
    """The server knows of no such task: it was started again since."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """The server is there and said nothing that makes sense."""

    text: str


class _NotReached(Exception):
    """No connection: the server has seen nothing of the call. ``slow`` where it was not refused either."""

    def __init__(self, text: str, *, slow: bool) -> None:
        super().__init__(text)
        self.slow = slow


class _NoAnswer(Exception):
    """The call was begun, and no whole answer came."""


class Stage:
    """The servers of one role."""

    def __init__(self, name: str, urls: Collection[str], clock: Clock) -> None:
        self.name = name
        self.servers = tuple(Server(name, url) for url in urls)
        self._clock = clock
        self._turns = 0

    def choose(self, but: Collection[Server] = ()) -> Server | None:
        """Return the server with the fewest requests, of these the longest unused; unreachable ones come last.

        Args:
            but: Servers that were tried.
        """
        now_s = self._clock.monotonic()
        left = [server for server in self.servers if server not in but]
        if not left:
            return None
        best = min(left, key=lambda one: (one.out_until_s > now_s, one.under_way, one.turn))
        self._turns += 1
        best.turn = self._turns
        return best


class Servers:
    """All stages, and the calls to them.

    Args:
        stages: Names and URLs, in the order in which a request passes them.
        clock: For how long an unreachable server is asked last.

    Threads: belongs to one event loop.
    """

    def __init__(self, stages: Collection[tuple[str, Collection[str]]], clock: Clock) -> None:
        self._clock = clock
        self.stages = tuple(Stage(name, urls, clock) for name, urls in stages)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=_IDLE_S)
        # The servers are the deployment's own: no proxy, and no password of the user's, comes in between.
        self._http = httpx.AsyncClient(limits=limits, trust_env=False, follow_redirects=False)

    async def close(self) -> None:
        """End all connections."""
        await self._http.aclose()

    async def post(self, server: Server, path: str, body: bytes, *, chosen_s: float) -> Took | Refused | Unsure:
        """Give a task to a server.

        Args:
            server: To whom; not asked where it was found unreachable after ``chosen_s``.
            path: Of the host's route.
            body: JSON.
            chosen_s: When it was chosen, by the clock.
        """
        if server.out_since_s > chosen_s:
            return Refused(server=server, text=f"{server} cannot be reached")
        try:
            status, raw = await self._call("POST", server, path, POST_S, body)
        except _NotReached as exc:
            return Refused(server=server, text=f"{server} cannot be reached: {exc}")
        except _NoAnswer as exc:
            self._out(server)
            return Unsure(text=f"{server} did not answer: {exc}")
        answer = _object(raw)
        if 200 <= status < 300:
            return Took(save_result_path=str(answer.get("save_result_path") or ""))
        detail = answer.get("detail", raw[:500].decode(errors="replace"))
        text = detail if isinstance(detail, str) else json.dumps(detail)
        body_told = {**answer, "stage": server.stage} if answer else None
        return Refused(server=server, text=f"{server} answers {status}: {text}", status=status, body=body_told)

    async def look(self, server: Server, task_id: str) -> Seen | Gone | Forgot | Silent:
        """Ask how a task stands."""
        try:
            status, raw = await self._call("GET", server, f"/v1/tasks/{quote(task_id, safe='')}/status", LOOK_S)
        except _NotReached as exc:
            # Where nobody refuses, the network or a busy machine may be what is slow.
            return (Silent if exc.slow else Gone)(text=f"{server} cannot be reached: {exc}")
        except _NoAnswer as exc:
            return Silent(text=f"{server} does not answer: {exc}")
        if status == 404:
            return Forgot(text=f"{server} has forgotten the task, as a server that was started again does")
        answer = _object(raw)
        state = answer.get("status")
        if status != 200 or state not in STATES:
            return Silent(text=f"{server} answers {status} and no task's status")
        path = answer.get("save_result_path")
        return Seen(
            status=str(state),
            error=str(answer.get("error") or ""),
            error_type=str(answer.get("error_type") or ""),
            save_result_path=path if isinstance(path, str) else None,
        )

    async def cancel(self, server: Server, task_id: str) -> bool:
        """Have a server give up a task; return whether it answered."""
        try:
            status, _ = await self._call("DELETE", server, f"/v1/tasks/{quote(task_id, safe='')}", CANCEL_S)
        except (_NotReached, _NoAnswer):
            return False
        return status < 500

    async def ails(self, server: Server) -> str | None:
        """Return why a server is not well, ``None`` where it is."""
        try:
            status, _ = await self._call("GET", server, "/health", HEALTH_S)
        except (_NotReached, _NoAnswer) as exc:
            return str(exc)
        return None if status == 200 else f"answers {status}"

    async def lacking(self) -> Stage | None:
        """Return the first stage without a server that is well."""
        for stage in self.stages:
            ails = await asyncio.gather(*(self.ails(server) for server in stage.servers))
            if all(ails):
                return stage
        return None

    async def result(self, server: Server, task_id: str) -> httpx.Response:
        """Open a task's result; the response is to be read and closed by the caller.

        Raises:
            ConnectionError: No answer; the message says why.
        """
        request = self._http.build_request(
            "GET",
            f"{server.url}/v1/tasks/{quote(task_id, safe='')}/result",
            headers={"Accept-Encoding": "identity"},
            timeout=httpx.Timeout(PIECE_S, connect=CONNECT_S),
        )
        try:
            return await self._http.send(request, stream=True)
        except httpx.HTTPError as exc:
            raise ConnectionError(_said(exc)) from exc

    async def _call(
        self, method: str, server: Server, path: str, timeout_s: float, body: bytes | None = None
    ) -> tuple[int, bytes]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with asyncio.timeout(timeout_s):
                async with self._http.stream(
                    method,
                    server.url + path,
                    content=body,
                    headers=headers,
                    timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
                ) as response:
                    raw = bytearray()
                    async for piece in response.aiter_bytes():
                        raw += piece
                        if len(raw) > _MOST_BYTES:
                            break
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            self._out(server)
            raise _NotReached(_said(exc), slow=isinstance(exc, httpx.ConnectTimeout)) from exc
        except TimeoutError as exc:
            message = f"nothing in {timeout_s:g} s"
            raise _NoAnswer(message) from exc
        except httpx.HTTPError as exc:
            raise _NoAnswer(_said(exc)) from exc
        server.out_until_s = 0.0
        return response.status_code, bytes(raw)

    def _out(self, server: Server) -> None:
        server.out_since_s = self._clock.monotonic()
        server.out_until_s = server.out_since_s + OUT_S


def _object(raw: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return answer if isinstance(answer, dict) else {}


def _said(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
