"""The front on HTTP: routes, bodies in and out, and clients that go away. Loaded only where the host is installed.

Owns what is HTTP's: content types, lengths, statuses. What a request does is `front`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.formparsers import FormParser, MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moonrelay_vllm_omni.serve.errors import BadRequest, ServeError, TooLarge, error_body
from moonrelay_vllm_omni.serve.front import Front

logger = logging.getLogger(__name__)

#: No request that can be served is longer.
MAX_BODY_BYTES: Final = 1 << 20
#: The status that proxies write down where the client has gone; nobody reads the answer.
_CLIENT_GONE: Final = 499

Handler = Callable[[Request], Awaitable[Response]]


def application(front: Front) -> Starlette:
    """Return the ASGI application of a front."""

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        front.open()
        try:
            yield
        finally:
            await front.close()

    async def images(request: Request) -> Response:
        body = await _json(request)
        return JSONResponse(await _unless_gone(request, front.images(body)))

    async def create_video(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        body = await (_form(request, kind) if kind in _FORMS else _json(request))
        return JSONResponse(await front.create_video(body))

    async def videos(_request: Request) -> Response:
        return JSONResponse(front.videos())

    async def video(request: Request) -> Response:
        return JSONResponse(front.video(request.path_params["video_id"]))

    async def content(request: Request) -> Response:
        variant = request.query_params.get("variant", "video")
        if variant != "video":
            raise BadRequest(f"variant={variant!r}: only 'video' is offered here", param="variant")
        return Response(front.content(request.path_params["video_id"]), media_type="video/mp4")

    async def delete_video(request: Request) -> Response:
        return JSONResponse(await front.delete_video(request.path_params["video_id"]))

    async def models(_request: Request) -> Response:
        return JSONResponse(front.models())

    async def model(request: Request) -> Response:
        return JSONResponse(front.model(request.path_params["name"]))

    async def health(_request: Request) -> Response:
        status, body, retry_after_s = front.health()
        return JSONResponse(body, status, headers=_retry(retry_after_s))

    async def metrics(_request: Request) -> Response:
        return Response(front.metrics() + _hosts_metrics(), media_type="text/plain; version=0.0.4")

    def route(path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, _answering(front, path, handler), methods=[method])

    return Starlette(
        routes=[
            route("/v1/images/generations", images, "POST"),
            route("/v1/videos", create_video, "POST"),
            route("/v1/videos", videos),
            route("/v1/videos/{video_id}", video),
            route("/v1/videos/{video_id}", delete_video, "DELETE"),
            route("/v1/videos/{video_id}/content", content),
            route("/v1/models", models),
            route("/v1/models/{name:path}", model),
            route("/health", health),
            route("/metrics", metrics),
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=lifespan,
    )


def _answering(front: Front, path: str, handler: Handler) -> Handler:
    """Wrap a handler so that every failure is told in OpenAI's form, and counted."""

    async def answer(request: Request) -> Response:
        try:
            response = await handler(request)
        except ServeError as exc:
            response = JSONResponse(exc.body(), exc.status, headers=_retry(exc.retry_after_s))
        except ClientDisconnect:
            response = Response(status_code=_CLIENT_GONE)
        except Exception as exc:
            logger.exception("%s %s failed", request.method, path)
            text = f"{type(exc).__name__}: {exc}"
            response = JSONResponse(error_body(text, kind="server_error", code="internal_error"), 500)
        front.answered(path, response.status_code)
        return response

    return answer


async def _no_route(request: Request, exc: Exception) -> Response:
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    text = f"{request.method} {request.url.path}: {getattr(exc, 'detail', exc)}"
    body = error_body(text, kind="invalid_request_error", code="not_found" if status == 404 else "method_not_allowed")
    return JSONResponse(body, status, headers=getattr(exc, "headers", None))


def _retry(after_s: float | None) -> dict[str, str] | None:
    return None if after_s is None else {"Retry-After": str(max(1, round(after_s)))}


async def _unless_gone(request: Request, work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Do the work, and give it up where its client goes away. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait({task, gone})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    length = 0
    async for piece in request.stream():
        length += len(piece)
        if length > MAX_BODY_BYTES:
            raise TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes; no request needs so many")
        yield piece


async def _json(request: Request) -> dict[str, Any]:
    raw = b"".join([piece async for piece in _pieces(request)])
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as exc:
        raise BadRequest(f"the body is no JSON: {exc}") from None
    if not isinstance(body, dict):
        raise BadRequest(f"the body must be a JSON object, not {type(body).__name__}")
    return body


_FORMS: Final = ("multipart/form-data", "application/x-www-form-urlencoded")


async def _form(request: Request, kind: str) -> dict[str, Any]:
    """Return a form's fields, as OpenAI's client sends a video request."""
    parser = (MultiPartParser if kind == _FORMS[0] else FormParser)(request.headers, _pieces(request))
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as exc:
        raise BadRequest(f"the form cannot be read: {getattr(exc, 'message', exc)}") from None
    fields = {name: value if isinstance(value, str) else object() for name, value in form.items()}
    await form.close()
    return fields


def _hosts_metrics() -> str:
    try:
        from prometheus_client import generate_latest
    except ImportError:  # the host brings it; without it ours are told all the same
        return ""
    return str(generate_latest().decode())
