"""What a client is told when a request fails, in OpenAI's form.

Owns the status and the word ``type`` of every failure of this front. ``code`` is the class's, as
elsewhere in Moonrelay.
"""

from __future__ import annotations

from typing import Any, ClassVar

from moonrelay.errors import MoonrelayError


class ServeError(MoonrelayError):
    """A failure with an HTTP status.

    Args:
        message: One line: the field, the value, the remedy.
        param: Which field of the request is at fault.
        retry_after_s: When asking again may be worth it.
    """

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the response's body."""
        return error_body(self.message, kind=self.kind, code=self.code, param=self.param)


class BadRequest(ServeError):
    """The request says what cannot be done."""

    status = 400
    kind = "invalid_request_error"
    code = "invalid_request"


class TooLarge(BadRequest):
    """The request's body is longer than any request needs to be."""

    status = 413
    code = "request_too_large"


class NotFound(BadRequest):
    """There is no such model, video or route."""

    status = 404
    code = "not_found"


class NotReady(BadRequest):
    """The video is not there yet."""

    status = 409
    code = "video_not_ready"


class QueueIsFull(ServeError):
    """As many requests wait as may."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"
    retryable = True


class EngineUnavailable(ServeError):
    """The engine starts, or starts again."""

    status = 503
    code = "engine_unavailable"
    retryable = True


class StageDied(ServeError):
    """A stage's process died while it was needed.

    Args:
        stage: Which one; ``None`` where it was the engine as a whole.
        text: The host's word on it.
    """

    status = 503
    code = "stage_died"
    retryable = True

    def __init__(self, stage: int | None, text: str, *, name: str | None = None) -> None:
        where = "the engine" if stage is None else f"stage {stage}" + (f" ({name})" if name else "")
        super().__init__(f"{where} died: {text}; it is started again, send the request anew")
        self.stage = stage
        self.text = text


class GenerationFailed(ServeError):
    """A stage refused or failed this request; the engine lives."""

    code = "generation_failed"


class RequestTimedOut(ServeError):
    """The request was not done in its time; it was given up."""

    status = 504
    code = "request_timeout"


def error_body(message: str, *, kind: str, code: str | None, param: str | None = None) -> dict[str, Any]:
    """Return an error's body in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}
