"""What a client is told when a request of its is refused, in the form of the host's server: ``{"detail": ...}``."""

from __future__ import annotations

from typing import Any, ClassVar

from moonrelay.errors import MoonrelayError


class FrontError(MoonrelayError):
    """A refusal with an HTTP status.

    Args:
        message: One line: the field, the value, the remedy.
        status: Of the response; the class's by default.
        retry_after_s: When asking again may be worth it.
        body: The whole body, where it is a stage's own words.
    """

    status: int = 500
    retry_after: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        body: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = self.status if status is None else status
        self.retry_after_s = self.retry_after if retry_after_s is None else retry_after_s
        self._body = body

    def body(self) -> dict[str, Any]:
        """Return the response's body."""
        return {"detail": self.message} if self._body is None else self._body


class BadRequest(FrontError):
    """The request says what cannot be done."""

    status = 400


class NotFound(FrontError):
    """There is no such task or route, or its result is not there."""

    status = 404


class BodyTimedOut(FrontError):
    """The client did not send its body."""

    status = 408


class IdTaken(FrontError):
    """There is a task with this id."""

    status = 409


class TooLarge(FrontError):
    """The body is longer than any request needs to be."""

    status = 413


class FrontIsFull(FrontError):
    """As many requests are under way as may be. The host's server says 503 too when its queue is full."""

    status = 503
    retryable = True
    retry_after = 5.0


class StageRefused(FrontError):
    """A stage's server refused the task, or none of the stage's servers can be reached."""

    status = 503
    retryable = True
    retry_after = 5.0
