"""A client or worker of a queue in a process of its own, told what to do by JSON lines on its standard input.

Run as ``python -m moonrelay_conformance.suites.queue_peer``. Each line is ``{"do": name, ...}``; the answer is a line
``{"ok": value}`` or ``{"error": code, "retryable": bool, "message": text}``. The loops `Peer.pour` and `Peer.drain`
also write a line ``{"told": ...}`` for each thing that the queue confirmed, so that who kills this process knows what
it had been promised.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from moonrelay.errors import ConfigError, MoonrelayError
from moonrelay.queueing import Job, StageQueue, StageTask, Worker
from moonrelay.queueing.task import Plain
from moonrelay_conformance.targets.parts import QueueTarget
from moonrelay_conformance.targets.queues import InstalledQueue

#: Longest wait for a job before the peer looks whether all have ended.
_PAUSE_S: Final = 0.1


def name_of(target: QueueTarget) -> str:
    """Return the text from which `target_of` makes an equal target in another process."""
    if type(target) is InstalledQueue:
        return target.name
    return f"{type(target).__module__}:{type(target).__qualname__}"


def target_of(name: str) -> QueueTarget:
    """Return the target that a text names: a scheme, or ``module:Class`` of a class that needs no argument."""
    module, colon, attribute = name.partition(":")
    if not colon:
        return InstalledQueue(name)
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    target = found()
    if not isinstance(target, QueueTarget):
        message = f"{name} is no QueueTarget, so its queue cannot be opened in a process of its own"
        raise ConfigError(message, field="target")
    return target


class Peer:
    """One open queue, its workers and jobs, by the names that the orders give them."""

    def __init__(self, tell: Callable[[object], None]) -> None:
        self._tell = tell
        self._queue: StageQueue | None = None
        self._workers: dict[str, Worker] = {}
        self._jobs: dict[str, Job] = {}

    @property
    def queue(self) -> StageQueue:
        if self._queue is None:
            raise ConfigError("the peer has no queue yet; send 'open' first", field="do")
        return self._queue

    def open(self, target: str, url: str, config: dict[str, object]) -> None:
        """Open the queue."""
        self._queue = target_of(target).open(url, clock=None, pipeline=None, config=config)

    def submit(self, request_id: str, stage: str, if_absent: bool = False, **fields: Any) -> bool:
        """Submit one request."""
        return self.queue.submit(StageTask(stage=stage, request_id=request_id, **fields), if_absent=if_absent)

    def result(self, request_id: str, timeout_s: float) -> object:
        """Return a result; plain JSON only."""
        return self.queue.result(request_id, timeout_s=timeout_s)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request."""
        return self.queue.cancel(request_id)

    def join(self, worker: str, stage: str, **settings: Any) -> str:
        """Register a worker; return its id."""
        self._workers[worker] = self.queue.register_worker(stage, **settings)
        return self._workers[worker].worker_id

    def take(self, worker: str, timeout_s: float) -> dict[str, object] | None:
        """Take a job and keep it under its request's id."""
        job = self._workers[worker].take(timeout_s=timeout_s)
        if job is None:
            return None
        self._jobs[job.request_id] = job
        return {"request_id": job.request_id, "token": job.token, "attempt": job.attempt, "payload": job.task.payload}

    def complete(self, request_id: str, result: Any = None, below: str | None = None, payload: Any = None) -> None:
        """Complete a job with a result, or for the stage ``below``."""
        if below is not None:
            self._jobs[request_id].complete(next_task=StageTask(stage=below, payload=payload))
        else:
            self._jobs[request_id].complete(result=result)

    def fail(self, request_id: str, text: str) -> None:
        """Fail a job as retryable."""
        self._jobs[request_id].fail(MoonrelayError(text), retryable=True)

    def progress(self, request_id: str, fraction: float) -> None:
        """Show progress, which renews."""
        self._jobs[request_id].progress(fraction)

    def lost(self, request_id: str, timeout_s: float) -> str | None:
        """Wait until a job's claim is lost; return the code of the reason."""
        job = self._jobs[request_id]
        job.wait_lost(timeout_s)
        return None if job.lost is None else job.lost.code

    def pour(self, prefix: str, count: int, stage: str, size: int) -> None:
        """Submit ``count`` requests one after the other and tell of each that was taken in."""
        for number in range(count):
            request_id = f"{prefix}-{number}"
            payload: dict[str, Plain] = {"id": request_id, "fill": "x" * size, "end": number}
            self.queue.submit(StageTask(stage=stage, request_id=request_id, payload=payload))
            self._tell(request_id)

    def drain(self, stage: str, total: int, below: str | None = None) -> None:
        """Work in a stage until ``total`` requests have ended as done; tell of each completion that was confirmed."""
        with self.queue.register_worker(stage) as worker:
            while True:
                job = worker.take(timeout_s=_PAUSE_S)
                if job is None:
                    if self.queue.stats().ended.get("done", 0) >= total:
                        return
                    continue
                try:
                    if below is None:
                        job.complete(result={"id": job.request_id, "token": job.token})
                    else:
                        job.complete(next_task=StageTask(stage=below, payload=job.task.payload))
                except MoonrelayError as exc:
                    self._tell([job.request_id, job.token, exc.code])
                else:
                    self._tell([job.request_id, job.token, "ok"])

    def close(self) -> None:
        """Close the queue and forget its jobs, so that the process can serve another test."""
        if self._queue is not None:
            self._queue.close()
        self._queue = None
        self._workers, self._jobs = {}, {}


def main() -> None:
    """Answer until standard input ends."""
    # Whatever else writes to standard output must not look like an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(line: dict[str, object]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    peer = Peer(lambda told: say({"told": told}))
    for line in sys.stdin:
        order = json.loads(line)
        act = getattr(peer, order.pop("do"))
        try:
            say({"ok": act(**order)})
        except MoonrelayError as exc:
            code, retryable, message = exc.to_wire()
            say({"error": code, "retryable": retryable, "message": message})
        except Exception as exc:  # noqa: BLE001 - the suite is told of it as what it is
            say({"error": f"!{type(exc).__name__}", "retryable": False, "message": str(exc)})
    peer.close()


if __name__ == "__main__":
    main()
