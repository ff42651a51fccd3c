"""Videos in the making, and those that were made until somebody has fetched them or their time is over.

Owns the jobs' states and how much is kept. Belongs to one event loop; what makes a video is handed in.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from moonrelay.clock import Clock
from moonrelay_vllm_omni.serve.errors import NotFound, NotReady, ServeError
from moonrelay_vllm_omni.serve.gate import Place
from moonrelay_vllm_omni.serve.schema import Order

logger = logging.getLogger(__name__)


class JobState(Enum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"


_NEXT: Final[Mapping[JobState, tuple[JobState, ...]]] = {
    JobState.QUEUED: (JobState.IN_PROGRESS, JobState.FAILED),
    JobState.IN_PROGRESS: (JobState.COMPLETED, JobState.FAILED),
    JobState.COMPLETED: (),
    JobState.FAILED: (),
}

#: Makes the bytes of a video; calls the last argument when work on it begins.
MakeVideo = Callable[[Order, Place, Callable[[], None]], Awaitable[bytes]]


@dataclass(slots=True, kw_only=True)
class Job:
    """One video. ``*_at`` are Unix seconds, for clients alone; ``done_s`` is the clock's."""

    id: str
    order: Order
    created_at: int
    state: JobState = JobState.QUEUED
    completed_at: int | None = None
    error: dict[str, Any] | None = None
    content: bytes = b""
    done_s: float | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def become(self, state: JobState) -> None:
        if state not in _NEXT[self.state]:
            message = f"a video that is {self.state.value} cannot become {state.value}"
            raise RuntimeError(message)
        self.state = state


class VideoJobs:
    """The jobs, by id.

    Args:
        make: Makes one video.
        clock: For how long results are kept.
        now: Unix seconds, for what clients are told.
        keep_s: How long a finished job is kept.
        keep_bytes: How much of their content; the oldest goes first. One job is always kept.
        keep_jobs: How many finished jobs.
    """

    def __init__(
        self,
        make: MakeVideo,
        *,
        clock: Clock,
        now: Callable[[], int],
        keep_s: float = 3600.0,
        keep_bytes: int = 1 << 30,
        keep_jobs: int = 1000,
    ) -> None:
        self._make = make
        self._clock = clock
        self._now = now
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._keep_jobs = keep_jobs
        self._jobs: dict[str, Job] = {}

    def create(self, order: Order, place: Place) -> Job:
        """Begin a job, which has ``place`` from now on. Must be called in the loop."""
        self._sweep()
        job = Job(id=f"video_{secrets.token_hex(12)}", order=order, created_at=self._now())
        self._jobs[job.id] = job
        job.task = asyncio.get_running_loop().create_task(self._make_one(job, place))
        # Not at the end of the task itself, of which nothing runs where it is cancelled before its first step.
        job.task.add_done_callback(lambda _: place.leave())
        return job

    def get(self, job_id: str) -> Job:
        """Return a job.

        Raises:
            NotFound: There is none of this id, or none any more.
        """
        self._sweep()
        job = self._jobs.get(job_id)
        if job is None:
            message = f"there is no video {job_id!r}; finished ones are kept for {self._keep_s:g} s"
            raise NotFound(message, param="video_id")
        return job

    def content(self, job_id: str) -> bytes:
        """Return a finished video.

        Raises:
            NotFound: There is none of this id.
            NotReady: It is not finished, or failed.
        """
        job = self.get(job_id)
        if job.state is JobState.FAILED:
            raise NotReady(f"video {job_id} failed: {(job.error or {}).get('message')}", param="video_id")
        if job.state is not JobState.COMPLETED:
            raise NotReady(f"video {job_id} is {job.state.value}; ask again later", param="video_id", retry_after_s=1.0)
        return job.content

    def all(self) -> list[Job]:
        """Return the jobs, the newest first."""
        self._sweep()
        return list(reversed(self._jobs.values()))

    async def delete(self, job_id: str) -> Job:
        """Forget a job; one under way is given up.

        Raises:
            NotFound: There is none of this id.
        """
        job = self.get(job_id)
        del self._jobs[job_id]
        await _ended(job)
        return job

    async def close(self) -> None:
        """Give up what is under way."""
        jobs = list(self._jobs.values())
        self._jobs.clear()
        for job in jobs:
            await _ended(job)

    async def _make_one(self, job: Job, place: Place) -> None:
        try:
            content = await self._make(job.order, place, lambda: job.become(JobState.IN_PROGRESS))
        except ServeError as exc:
            self._finish(job, JobState.FAILED, error={"code": exc.code, "message": exc.message})
        except Exception as exc:
            logger.exception("video %s failed", job.id)
            text = f"{type(exc).__name__}: {exc}"
            self._finish(job, JobState.FAILED, error={"code": "server_error", "message": text})
        else:
            self._finish(job, JobState.COMPLETED, content=content)

    def _finish(self, job: Job, state: JobState, *, content: bytes = b"", error: dict[str, Any] | None = None) -> None:
        job.become(state)
        job.content, job.error = content, error
        job.completed_at, job.done_s = self._now(), self._clock.monotonic()
        self._sweep(sparing=job)

    def _sweep(self, *, sparing: Job | None = None) -> None:
        now_s = self._clock.monotonic()
        done = [job for job in self._jobs.values() if job.done_s is not None]
        done.sort(key=lambda job: job.done_s or 0.0)
        held, count = sum(len(job.content) for job in done), len(done)
        for job in done:
            old = now_s - (job.done_s or 0.0) >= self._keep_s
            if job is sparing or not (old or held > self._keep_bytes or count > self._keep_jobs):
                continue
            del self._jobs[job.id]
            held, count = held - len(job.content), count - 1


async def _ended(job: Job) -> None:
    if job.task is not None:
        job.task.cancel()
        await asyncio.wait({job.task})
