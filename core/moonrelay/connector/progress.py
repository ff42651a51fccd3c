"""What a reader knows of a payload that may still be in the making."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moonrelay.clock import Deadline
from moonrelay.control.messages import Progress
from moonrelay.errors import Cancelled, MoonrelayError, TransferTimeout
from moonrelay.handle import StageHandle


class ProgressView:
    """Readiness of one claimed payload: which chunks are final, their digests, and whether it failed.

    Threads: fed by the channel's and the renewing thread, waited on by the reading one.
    """

    def __init__(self, handle: StageHandle) -> None:
        self._handle = handle
        self._changed = threading.Condition()
        self._readable: set[int] = set()
        self._digests: dict[int, bytes] = {}
        self._failure: MoonrelayError | None = None

    def update(self, progress: Progress) -> None:
        """Take over what the producer says; readiness only grows."""
        with self._changed:
            self._readable.update(progress.readable)
            self._digests.update(progress.digests)
            if progress.failure is not None and self._failure is None:
                self._failure = progress.failure.error()
            self._changed.notify_all()

    def complete(self) -> None:
        """Take every chunk for readable (the relay holds all of them)."""
        with self._changed:
            self._readable.update(range(self._handle.num_chunks))
            self._changed.notify_all()

    def fail(self, error: MoonrelayError) -> None:
        """End all waits with ``error``; the first one stands."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def clear_failure(self) -> None:
        """Forget a failure of a source that was given up for another one."""
        with self._changed:
            self._failure = None

    @property
    def failure(self) -> MoonrelayError | None:
        with self._changed:
            return self._failure

    def wake(self) -> None:
        """Let `next_readable` look again whether it was stopped."""
        with self._changed:
            self._changed.notify_all()

    def next_readable(self, done: set[int], deadline: Deadline, stopped: Callable[[], bool]) -> int:
        """Wait for the lowest readable chunk that is not in ``done``.

        Raises:
            Cancelled: ``stopped()`` became true.
            TransferTimeout: None became readable by the deadline.
            MoonrelayError: The payload failed.
        """
        with self._changed:
            deadline.wait_for(
                self._changed, lambda: self._failure is not None or stopped() or bool(self._readable - done)
            )
            if stopped():
                message = "reading ahead was stopped"
                raise Cancelled(message, request_id=self._handle.request_id)
            if self._failure is not None:
                raise self._failure
            waiting = self._readable - done
            if waiting:
                return min(waiting)
        message = (
            f"no further chunk was ready within {deadline.timeout_s} s ({len(done)} of {self._handle.num_chunks} read)"
        )
        raise TransferTimeout(message, request_id=self._handle.request_id)

    def digest(self, chunk: int, deadline: Deadline) -> bytes:
        """Wait for the producer's digest of a chunk.

        Raises:
            TransferTimeout: It did not come by the deadline.
            MoonrelayError: The payload failed.
        """
        with self._changed:
            deadline.wait_for(self._changed, lambda: self._failure is not None or chunk in self._digests)
            if chunk in self._digests:
                return self._digests[chunk]
            if self._failure is not None:
                raise self._failure
        message = f"the digest of chunk {chunk} did not come within {deadline.timeout_s} s"
        raise TransferTimeout(message, request_id=self._handle.request_id)
