"""The front on HTTP: the host's routes, bodies in and out, results passed through, and clients that go away.

Owns what is HTTP's: lengths, types, statuses. What a request does is `front`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from moonrelay_lightx2v.front.errors import BadRequest, BodyTimedOut, FrontError, TooLarge
from moonrelay_lightx2v.front.front import Front

logger = logging.getLogger(__name__)

#: Images are sent inside of it.
MAX_BODY_BYTES: Final = 64 << 20
#: For a client to send its body, and to take one piece of a result.
CLIENT_S: Final = 60.0
#: The status that proxies write down where the client has gone; nobody reads the answer.
_CLIENT_GONE: Final = 499
#: Of a result's answer, what is passed on.
_HEADERS: Final = ("content-type", "content-length", "content-disposition")

Handler = Callable[[Request], Awaitable[Response]]


def application(make: Callable[[], Front]) -> Starlette:
    """Return the ASGI application of a front.

    Args:
        make: Makes the front, inside of the event loop.
    """
    made: list[Front] = []

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        made.append(make())
        try:
            yield
        finally:
            await made[0].close()

    def creating(path: str) -> Handler:
        async def create(request: Request) -> Response:
            made[0].door()
            fields, size = await _json(request)
            return _said(await made[0].create(path, fields, size))

        return create

    async def tasks(_request: Request) -> Response:
        return _said(made[0].all())

    async def queue(_request: Request) -> Response:
        return _said(made[0].queue())

    async def status(request: Request) -> Response:
        return _said(made[0].status(request.path_params["task_id"]))

    async def result(request: Request) -> Response:
        return _Passed(await made[0].result(request.path_params["task_id"]))

    async def cancel(request: Request) -> Response:
        return _said(await made[0].cancel(request.path_params["task_id"]))

    async def cancel_all(_request: Request) -> Response:
        return _said(await made[0].cancel_all())

    async def health(_request: Request) -> Response:
        code, body = await made[0].health()
        return _said(body, code)

    async def metrics(_request: Request) -> Response:
        return Response(made[0].metrics(), media_type="text/plain; version=0.0.4")

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        async def answer(request: Request) -> Response:
            response = await _answer(request, handler)
            made[0].answered(path, response.status_code)
            return response

        return Route(path, answer, methods=[method])

    return Starlette(
        routes=[
            *(
                route(path + slash, creating(path + "/"), "POST")
                for path in ("/v1/tasks/video", "/v1/tasks/image", "/v1/tasks")
                for slash in ("/", "")
            ),
            route("/v1/tasks/", tasks),
            route("/v1/tasks", tasks),
            route("/v1/tasks/queue/status", queue),
            route("/v1/tasks/all/running", cancel_all, "DELETE"),
            route("/v1/tasks/{task_id}/status", status),
            route("/v1/tasks/{task_id}/result", result),
            route("/v1/tasks/{task_id}", cancel, "DELETE"),
            route("/health", health),
            route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=lifespan,
    )


def _said(content: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # Escaped: what a server or client said may hold what UTF-8 cannot.
    return Response(json.dumps(content), status, headers, media_type="application/json")


async def _answer(request: Request, handler: Handler) -> Response:
    """Answer, and tell every failure in the host's form."""
    try:
        return await handler(request)
    except FrontError as exc:
        headers = None if exc.retry_after_s is None else {"Retry-After": str(max(1, round(exc.retry_after_s)))}
        return _said(exc.body(), exc.status, headers=headers)
    except ClientDisconnect:
        return Response(status_code=_CLIENT_GONE)
    except Exception as exc:
        logger.exception("%s %s failed", request.method, request.url.path)
        return _said({"detail": f"{type(exc).__name__}: {exc}"}, 500)


class _Passed(Response):  # type: ignore[misc]
    """A stage's answer, passed on piece by piece. One that breaks off there breaks off here.

    Args:
        answer: Open; closed here.
    """

    def __init__(self, answer: httpx.Response) -> None:
        self.status_code = answer.status_code
        self.background = None
        self._answer = answer
        self.raw_headers = [
            (name.encode(), answer.headers[name].encode("latin-1")) for name in _HEADERS if name in answer.headers
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({pump, gone}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            gone.cancel()
            pump.cancel()
            await asyncio.wait({pump, gone})
            await self._answer.aclose()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._answer.aiter_raw():
                async with asyncio.timeout(CLIENT_S):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (httpx.HTTPError, TimeoutError, OSError) as exc:
            # Not ended in form: the client must not take what it has for the whole.
            logger.warning("a result broke off: %s: %s", type(exc).__name__, exc)
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_route(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    text = f"{request.method} {request.url.path}: {getattr(exc, 'detail', exc)}; the front has the routes of tasks only"
    return _said({"detail": text}, status, headers=getattr(exc, "headers", None))


async def _json(request: Request) -> tuple[dict[str, Any], int]:
    raw = bytearray()
    try:
        async with asyncio.timeout(CLIENT_S):
            async for piece in request.stream():
                raw += piece
                if len(raw) > MAX_BODY_BYTES:
                    raise TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes; send images by URL or path")
    except TimeoutError:
        raise BodyTimedOut(f"the body did not come in {CLIENT_S:g} s") from None
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise BadRequest(f"the body is no JSON: {exc}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(fields).__name__}")
    return fields, len(raw)
